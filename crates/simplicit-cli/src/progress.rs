//! Progress on stderr: a bar, JSON lines, or nothing.

use std::io::IsTerminal;

use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use simplicit::train::Progress;

use crate::exit::complain;

/// What to show while work goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Show {
    /// A bar, drawn only on a terminal
    Bar,
    /// One JSON object a line on stderr
    Json,
    /// Nothing
    None,
}

/// Whoever watches a command.
pub(crate) struct Watcher<'a> {
    show: Show,
    bar: ProgressBar,
    /// Another front end, told in place of stderr.
    listener: Option<&'a (dyn Fn(Event) + Sync)>,
}

/// What another front end is told.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A phase begins.
    Phase(String),
    /// Training goes on.
    Training(Progress),
}

impl<'a> Watcher<'a> {
    /// A bar if stderr is a terminal and nothing else is asked for.
    pub(crate) fn new(show: Option<Show>) -> Self {
        let show = show.unwrap_or(if std::io::stderr().is_terminal() { Show::Bar } else { Show::None });
        let bar = if show == Show::Bar { ProgressBar::new(0) } else { ProgressBar::hidden() };
        if let Ok(style) = ProgressStyle::with_template("{msg:34} {bar:24} {pos:>6}/{len:<6} {elapsed}") {
            bar.set_style(style);
        }
        Self { show, bar, listener: None }
    }

    /// Nothing on stderr; `listener` is told instead.
    pub(crate) fn telling(listener: &'a (dyn Fn(Event) + Sync)) -> Self {
        Self { listener: Some(listener), ..Self::new(Some(Show::None)) }
    }

    /// A phase begins.
    pub(crate) fn phase(&self, name: &str) {
        if let Some(listener) = self.listener {
            listener(Event::Phase(name.to_string()));
        }
        match self.show {
            Show::Bar => self.set(name, 0, 1),
            Show::Json => complain(&json!({ "event": "phase", "name": name }).to_string()),
            Show::None => {}
        }
    }

    /// Samples of a phase are done.
    pub(crate) fn samples(&self, done: usize, total: usize) {
        match self.show {
            Show::Bar => self.set(&self.bar.message(), done, total),
            Show::Json => complain(&json!({ "event": "samples", "done": done, "total": total }).to_string()),
            Show::None => {}
        }
    }

    /// What training says.
    pub(crate) fn training(&self, progress: &Progress) {
        if let Some(listener) = self.listener {
            listener(Event::Training(progress.clone()));
        }
        match self.show {
            Show::Bar => self.draw(progress),
            Show::Json => complain(&line(progress).to_string()),
            Show::None => {}
        }
    }

    fn draw(&self, progress: &Progress) {
        let (message, done, total) = match progress {
            Progress::Samples { group, done, total } => (format!("samples for {group}"), *done, *total),
            Progress::Rows { group, done, total } => (format!("rows of {group}"), *done, *total),
            Progress::Model { strength, sparsity } => {
                (format!("{:.1} % sparse at {strength:.2e}", 100.0 * sparsity), 1, 1)
            }
            Progress::OutputRefit { round, rounds, .. } => ("refit in the output metric".to_string(), *round, *rounds),
        };
        self.set(&message, done, total);
    }

    fn set(&self, message: &str, done: usize, total: usize) {
        self.bar.update(|state| {
            state.set_len(total as u64);
            state.set_pos(done as u64);
        });
        if self.bar.message() != message {
            self.bar.set_message(message.to_string());
        }
    }

    /// Clears the bar, so that results stand alone.
    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

fn line(progress: &Progress) -> serde_json::Value {
    match progress {
        Progress::Samples { group, done, total } => {
            json!({ "event": "samples", "group": group, "done": done, "total": total })
        }
        Progress::Rows { group, done, total } => {
            json!({ "event": "rows", "group": group, "done": done, "total": total })
        }
        Progress::Model { strength, sparsity } => {
            json!({ "event": "model", "strength": strength, "sparsity": sparsity })
        }
        Progress::OutputRefit { round, rounds, objective } => {
            json!({ "event": "output-refit", "done": round, "total": rounds, "objective": objective })
        }
    }
}
