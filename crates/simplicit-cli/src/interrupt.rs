//! Ctrl-C: a clean stop within two seconds, and a line that says how to go on.

use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;
use simplicit::parallel::Cancel;

/// 128 + SIGINT.
pub(crate) const CODE: u8 = 130;
/// Work that has not come to a stop by then is ended; every file on the disk is whole at any moment.
const PATIENCE: Duration = Duration::from_millis(1700);

static CANCEL: OnceLock<Cancel> = OnceLock::new();
static HOW_TO_GO_ON: Mutex<Option<String>> = Mutex::new(None);

/// Starts listening and returns what long work must look at.
pub(crate) fn listen() -> anyhow::Result<Cancel> {
    let cancel = CANCEL.get_or_init(Cancel::new).clone();
    // A file-size limit becomes an error of the write instead of a sudden end.
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGXFSZ])?;
    let asked = cancel.clone();
    std::thread::spawn(move || {
        for signal in signals.forever() {
            if signal == SIGXFSZ {
                continue;
            }
            if asked.is_cancelled() {
                std::process::exit(i32::from(CODE));
            }
            asked.cancel();
            std::thread::spawn(|| {
                std::thread::sleep(PATIENCE);
                crate::exit::complain(&farewell());
                std::process::exit(i32::from(CODE));
            });
        }
    });
    Ok(cancel)
}

/// Whether somebody pressed Ctrl-C.
pub(crate) fn was_asked() -> bool {
    CANCEL.get().is_some_and(Cancel::is_cancelled)
}

/// What a command tells whoever stops it.
pub(crate) fn set_how_to_go_on(text: String) {
    *HOW_TO_GO_ON.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
}

/// The last line.
pub(crate) fn farewell() -> String {
    let hint = HOW_TO_GO_ON.lock().unwrap_or_else(PoisonError::into_inner).clone();
    format!("stopped; {}", hint.unwrap_or_else(|| "nothing was written".into()))
}
