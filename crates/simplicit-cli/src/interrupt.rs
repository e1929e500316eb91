//! Ctrl-C: a clean stop within two seconds, and a line that says how to go on.

use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use signal_hook::consts::{SIGINT, SIGTERM};
use simplicit::parallel::Cancel;

/// 128 + SIGINT.
pub(crate) const CODE: u8 = 130;
/// Work that has not stopped after this time is ended. That is safe because every file on the disk is complete at any
/// moment.
const PATIENCE: Duration = Duration::from_millis(1700);

static CANCEL: OnceLock<Cancel> = OnceLock::new();
static HOW_TO_GO_ON: Mutex<Option<String>> = Mutex::new(None);

/// Starts to listen for signals and returns the request that long work must check.
pub(crate) fn listen() -> anyhow::Result<Cancel> {
    let cancel = CANCEL.get_or_init(Cancel::new).clone();
    wait_for_signals(cancel.clone())?;
    Ok(cancel)
}

/// Calls [`asked`] for every request to stop, on a thread of its own.
#[cfg(unix)]
fn wait_for_signals(cancel: Cancel) -> anyhow::Result<()> {
    use signal_hook::consts::SIGXFSZ;
    // A file-size limit becomes an error of the write instead of a sudden end.
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGXFSZ])?;
    std::thread::spawn(move || signals.forever().filter(|s| *s != SIGXFSZ).for_each(|_| asked(&cancel)));
    Ok(())
}

/// The same on systems where a signal can only set a flag.
#[cfg(not(unix))]
fn wait_for_signals(cancel: Cancel) -> anyhow::Result<()> {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    let flag = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(SIGINT, flag.clone())?;
    signal_hook::flag::register(SIGTERM, flag.clone())?;
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(Duration::from_millis(50));
            if flag.swap(false, Ordering::Relaxed) {
                asked(&cancel);
            }
        }
    });
    Ok(())
}

/// The first request cancels and gives the work time to stop, the second ends it.
fn asked(cancel: &Cancel) {
    if cancel.is_cancelled() {
        std::process::exit(i32::from(CODE));
    }
    cancel.cancel();
    std::thread::spawn(|| {
        std::thread::sleep(PATIENCE);
        crate::exit::complain(&farewell());
        std::process::exit(i32::from(CODE));
    });
}

/// Whether somebody pressed Ctrl-C.
pub(crate) fn was_asked() -> bool {
    CANCEL.get().is_some_and(Cancel::is_cancelled)
}

/// Sets the line that a command prints when it is stopped.
pub(crate) fn set_how_to_go_on(text: String) {
    *HOW_TO_GO_ON.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
}

/// The last line that an interrupted command prints.
pub(crate) fn farewell() -> String {
    let hint = HOW_TO_GO_ON.lock().unwrap_or_else(PoisonError::into_inner).clone();
    format!("stopped; {}", hint.unwrap_or_else(|| "nothing was written".into()))
}
