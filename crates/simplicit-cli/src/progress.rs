//! Progress on stderr: a bar, lines of text or JSON, or nothing.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use simplicit::memory::words;
use simplicit::train::{Phase, Progress};

use crate::exit::{complain, is_quiet};
use crate::overall::{Overall, Plan};

/// About how many multiply-adds per minute one core makes in linear bounds.
const MULTIPLY_ADDS_PER_MINUTE: f64 = 1e12;
/// Steps of a bar that shows the whole training.
const STEPS: u64 = 1000;

static VERBOSE: AtomicBool = AtomicBool::new(false);

/// From now on lines are shown where nothing else is asked for.
pub(crate) fn be_verbose() {
    VERBOSE.store(true, Ordering::Relaxed);
}

/// What to show while work goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Show {
    /// A bar, drawn only on a terminal
    Bar,
    /// A line when something begins, with the seconds so far
    Lines,
    /// One JSON object a line on stderr
    Json,
    /// Nothing
    None,
}

/// Shows the progress of a command.
pub(crate) struct Watcher<'a> {
    show: Show,
    bar: ProgressBar,
    begun: Instant,
    /// The last line printed, so that it is not repeated.
    said: Mutex<String>,
    /// The progress of a training whose length can be estimated.
    overall: Mutex<Option<Overall>>,
    /// Another front end, which receives events in place of stderr.
    listener: Option<&'a (dyn Fn(Event) + Sync)>,
}

/// The progress that another front end receives.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A phase begins.
    Phase(String),
    /// Progress within a training.
    Training(Progress),
}

impl<'a> Watcher<'a> {
    /// Shows a bar if stderr is a terminal and nothing else is asked for.
    pub(crate) fn new(show: Option<Show>) -> Self {
        let show = show.unwrap_or_else(|| match (VERBOSE.load(Ordering::Relaxed), is_quiet()) {
            (true, _) => Show::Lines,
            (false, false) if std::io::stderr().is_terminal() => Show::Bar,
            _ => Show::None,
        });
        let bar = if show == Show::Bar { ProgressBar::new(0) } else { ProgressBar::hidden() };
        if let Ok(style) = ProgressStyle::with_template("{msg:34} {bar:24} {percent:>3} % {elapsed} {prefix}") {
            bar.set_style(style);
        }
        let (said, overall) = (Mutex::default(), Mutex::new(None));
        Self { show, bar, begun: Instant::now(), said, overall, listener: None }
    }

    /// From now on the bar shows the progress of a whole training.
    pub(crate) fn plan(&self, plan: Plan) {
        *self.overall.lock().unwrap_or_else(PoisonError::into_inner) = Some(Overall::new(plan));
    }

    /// Shows nothing on stderr; `listener` is called instead.
    pub(crate) fn telling(listener: &'a (dyn Fn(Event) + Sync)) -> Self {
        Self { listener: Some(listener), ..Self::new(Some(Show::None)) }
    }

    /// Reports that a phase begins.
    pub(crate) fn phase(&self, name: &str) {
        if let Some(listener) = self.listener {
            listener(Event::Phase(name.to_string()));
        }
        match self.show {
            Show::Bar if self.is_planned() => self.name(name),
            Show::Bar => self.set(name, 0, 1),
            Show::Lines => self.line(name),
            Show::Json => complain(&json!({ "event": "phase", "name": name }).to_string()),
            Show::None => {}
        }
    }

    /// Reports how many samples of a phase are done.
    pub(crate) fn samples(&self, done: usize, total: usize) {
        match self.show {
            Show::Bar if self.is_planned() => {}
            Show::Bar => self.set(&self.bar.message(), done, total),
            Show::Json => complain(&json!({ "event": "samples", "done": done, "total": total }).to_string()),
            Show::Lines | Show::None => {}
        }
    }

    /// Reports the progress of a training.
    pub(crate) fn training(&self, progress: &Progress) {
        if let Some(listener) = self.listener {
            listener(Event::Training(progress.clone()));
        }
        match self.show {
            // Printed once, above the bar, if there are layers that could be kept in files.
            Show::Bar if matches!(progress, Progress::Memory { needed, least, .. } if needed > least) => {
                self.bar.println(step(progress).0);
            }
            Show::Bar => self.draw(progress),
            Show::Lines => match progress {
                Progress::Pass { .. } => self.follow(progress),
                // Every model goes through all groups again, so one line per model is enough to follow.
                Progress::Samples { .. } | Progress::Rows { .. } => {}
                // An expensive pass has few groups, so each gets a line with the time left.
                Progress::Group { .. } => {
                    let mut overall = self.overall.lock().unwrap_or_else(PoisonError::into_inner);
                    let text = overall.as_mut().map(|o| (o.after(progress), o.left()));
                    drop(overall);
                    if let Some((share, left)) = text.filter(|(_, left)| !left.is_empty()) {
                        self.line(&format!("{:.0} %, {left}", 100.0 * share));
                    }
                }
                other => self.line(&step(other).0),
            },
            Show::Json => complain(&line(progress).to_string()),
            Show::None => {}
        }
    }

    /// Updates the estimate of the whole training.
    fn follow(&self, progress: &Progress) {
        if let Some(overall) = self.overall.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            overall.after(progress);
        }
    }

    fn is_planned(&self) -> bool {
        self.overall.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Prints a line on stderr unless it was the last one printed.
    fn line(&self, text: &str) {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if *said != text {
            complain(&format!("{:8.1} s  {text}", self.begun.elapsed().as_secs_f64()));
            *said = text.to_string();
        }
    }

    fn draw(&self, progress: &Progress) {
        let (message, done, total) = step(progress);
        let mut overall = self.overall.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(overall) = overall.as_mut() else { return self.set(&message, done, total) };
        let share = overall.after(progress);
        self.bar.set_length(STEPS);
        self.bar.set_position((share * STEPS as f64) as u64);
        self.bar.set_prefix(overall.left());
        self.name(&message);
    }

    fn name(&self, message: &str) {
        if self.bar.message() != message {
            self.bar.set_message(message.to_string());
        }
    }

    fn set(&self, message: &str, done: usize, total: usize) {
        self.bar.update(|state| {
            state.set_len(total as u64);
            state.set_pos(done as u64);
        });
        self.name(message);
    }

    /// Removes the bar, so that it does not mix with the results.
    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// The name of a step, and how many of its parts are done.
fn step(progress: &Progress) -> (String, usize, usize) {
    match progress {
        Progress::Phase(phase) => (phase_words(*phase).to_string(), 0, 1),
        Progress::Samples { group, done, total } => (format!("samples for {group}"), *done, *total),
        Progress::Rows { group, done, total } => (format!("rows of {group}"), *done, *total),
        Progress::Model { strength, sparsity } => {
            (format!("a model, {:.1} % sparse at {strength:.2e}", 100.0 * sparsity), 1, 1)
        }
        Progress::Pass { .. } => ("a model".to_string(), 0, STEPS as usize),
        Progress::Group { share } => ("a model".to_string(), (share * STEPS as f64) as usize, STEPS as usize),
        Progress::Memory { needed, least, budget } => (memory_words(*needed, *least, *budget), 0, 1),
        Progress::Reconstruct { segment, segments } => {
            ("refit over the next operations".to_string(), *segment, *segments)
        }
        Progress::OutputRefit { round, rounds, .. } => ("refit in the output metric".to_string(), *round, *rounds),
        Progress::BoundRefitBegins { samples, of, multiply_adds } => {
            (bound_refit_words(*samples, *of, *multiply_adds), 0, 1)
        }
        Progress::BoundRefit { round, rounds, certified } => (
            format!("refit by linear bounds, {:.1} % of held-out samples certified", 100.0 * certified),
            *round,
            *rounds,
        ),
    }
}

/// Says what a refit by linear bounds will take, before it begins.
fn bound_refit_words(samples: usize, of: usize, multiply_adds: u64) -> String {
    let minutes = multiply_adds as f64 / MULTIPLY_ADDS_PER_MINUTE;
    format!("refit by linear bounds of {samples} of {of} samples, some {minutes:.0} min of one core")
}

/// Says how much memory a training needs, before it begins.
fn memory_words(needed: u64, least: u64, budget: Option<u64>) -> String {
    let need = words(needed);
    match budget {
        Some(budget) if budget < needed => {
            format!(
                "memory: {need} needed, {} allowed: the rest lies in files; at least {}",
                words(budget),
                words(least)
            )
        }
        Some(budget) => format!("memory: {need} needed, {} allowed", words(budget)),
        None => format!("memory: {need} needed"),
    }
}

/// A large step, in words.
pub(crate) fn phase_words(phase: Phase) -> &'static str {
    match phase {
        Phase::RowWeights => "output-aware weights",
        Phase::Training { .. } => "training",
        Phase::Measuring => "equilibrium error",
    }
}

fn line(progress: &Progress) -> serde_json::Value {
    match progress {
        Progress::Phase(phase) => json!({ "event": "phase", "name": phase_words(*phase) }),
        Progress::Samples { group, done, total } => {
            json!({ "event": "samples", "group": group, "done": done, "total": total })
        }
        Progress::Rows { group, done, total } => {
            json!({ "event": "rows", "group": group, "done": done, "total": total })
        }
        Progress::Model { strength, sparsity } => {
            json!({ "event": "model", "strength": strength, "sparsity": sparsity })
        }
        Progress::Pass { work, left } => json!({ "event": "pass", "work": work, "left": left }),
        Progress::Group { share } => json!({ "event": "group", "share": share }),
        Progress::Memory { needed, least, budget } => {
            json!({ "event": "memory", "needed": needed, "least": least, "budget": budget })
        }
        Progress::Reconstruct { segment, segments } => {
            json!({ "event": "reconstruct", "done": segment, "total": segments })
        }
        Progress::OutputRefit { round, rounds, objective } => {
            json!({ "event": "output-refit", "done": round, "total": rounds, "objective": objective })
        }
        Progress::BoundRefitBegins { samples, of, multiply_adds } => {
            json!({ "event": "bound-refit-begins", "samples": samples, "of": of, "multiply_adds": multiply_adds })
        }
        Progress::BoundRefit { round, rounds, certified } => {
            json!({ "event": "bound-refit", "done": round, "total": rounds, "certified": certified })
        }
    }
}
