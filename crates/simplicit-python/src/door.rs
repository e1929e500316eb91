//! Every call into native work goes through here: the interpreter's lock is released, Ctrl-C is honoured, errors
//! become exceptions, and progress is reported on the thread that called.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use pyo3::prelude::*;
use simplicit::parallel::{Cancel, Threads};
use simplicit_cli::front::Event;

use crate::errors;

/// How often signals are checked.
const PATIENCE: Duration = Duration::from_millis(50);
/// Stack size of the thread that works, in bytes: as large as that of a main thread.
const STACK: usize = 8 << 20;

/// What the work receives.
pub(crate) struct Inside<'a> {
    /// Set by Ctrl-C.
    pub(crate) cancel: &'a Cancel,
    /// Receives progress events.
    pub(crate) tell: &'a (dyn Fn(Event) + Sync),
}

/// The number of threads asked for; all by default.
pub(crate) fn threads(asked: Option<usize>) -> Threads {
    asked.map_or_else(Threads::available, Threads::new)
}

/// Runs `work` without the interpreter's lock. `progress` is called with (phase or group, done, total).
pub(crate) fn enter<T: Send>(
    py: Python<'_>,
    progress: Option<&Bound<'_, PyAny>>,
    work: impl FnOnce(&Inside) -> anyhow::Result<T> + Send,
) -> PyResult<T> {
    let progress: Option<Py<PyAny>> = progress.map(|p| p.clone().unbind());
    let cancel = Cancel::new();
    let (sender, receiver) = channel();
    py.detach(move || {
        std::thread::scope(|scope| {
            let inside = &cancel;
            let body = move || {
                let tell = |event| {
                    // After an exception nobody receives events any more, so a failed send is ignored.
                    let _ = sender.send(event);
                };
                work(&Inside { cancel: inside, tell: &tell })
            };
            let worker = std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, body);
            let worker = worker.map_err(|e| errors::of_any(&e.into()))?;
            let mut exception = None;
            loop {
                let event = receiver.recv_timeout(PATIENCE);
                if event == Err(RecvTimeoutError::Disconnected) {
                    break;
                }
                // Only the latest progress is worth reporting.
                let event = receiver.try_iter().last().or(event.ok());
                let said = Python::attach(|py| {
                    py.check_signals()?;
                    if let (Some(event), Some(progress)) = (event, &progress)
                        && exception.is_none()
                    {
                        progress.call1(py, words(event))?;
                    }
                    PyResult::Ok(())
                });
                if let Err(error) = said {
                    cancel.cancel();
                    exception.get_or_insert(error);
                }
            }
            let result = worker.join().map_err(|_| errors::of_any(&anyhow::anyhow!("the native library panicked")))?;
            match (exception, result) {
                (Some(exception), _) => Err(exception),
                (None, result) => result.map_err(|e| errors::of_any(&e)),
            }
        })
    })
}

fn words(event: Event) -> (String, usize, usize) {
    use simplicit::train::Progress;
    match event {
        Event::Phase(name) => (name, 0, 1),
        // The front end reports these phases itself.
        Event::Training(Progress::Phase(_)) => ("training".to_string(), 0, 1),
        Event::Training(Progress::Samples { group, done, total }) => (format!("samples for {group}"), done, total),
        Event::Training(Progress::Rows { group, done, total }) => (format!("rows of {group}"), done, total),
        Event::Training(Progress::Model { strength, sparsity }) => {
            (format!("{:.1} % sparse at {strength:.2e}", 100.0 * sparsity), 1, 1)
        }
        Event::Training(Progress::Pass { .. }) => ("a model".to_string(), 0, 1000),
        Event::Training(Progress::Group { share }) => ("a model".to_string(), (1000.0 * share) as usize, 1000),
        Event::Training(Progress::Memory { needed, .. }) => {
            (format!("memory: {} needed", simplicit::memory::words(needed)), 0, 1)
        }
        Event::Training(Progress::Reconstruct { segment, segments }) => {
            ("refit over the next operations".to_string(), segment, segments)
        }
        Event::Training(Progress::OutputRefit { round, rounds, .. }) => {
            ("refit in the output metric".to_string(), round, rounds)
        }
        Event::Training(Progress::BoundRefitBegins { samples, of, .. }) => {
            (format!("refit by linear bounds of {samples} of {of} samples"), 0, 1)
        }
        Event::Training(Progress::BoundRefit { round, rounds, .. }) => {
            ("refit by linear bounds".to_string(), round, rounds)
        }
    }
}
