//! How a command ends: 0, 1, 2 or 130. A failure is one line on stderr; a failure in a recipe also shows the place
//! below it.

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use simplicit::Error;

/// How a command that did its work ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Exit 0.
    Done,
    /// Exit 1: the work is done, but a script must see something that has been printed on stderr.
    Noticed,
}

impl Outcome {
    /// `Noticed` if there are notices, which are printed on stderr.
    pub(crate) fn with_notices(notices: &[String]) -> Self {
        for notice in notices {
            complain(&format!("note: {notice}"));
        }
        if notices.is_empty() { Outcome::Done } else { Outcome::Noticed }
    }
}

/// One line on stderr; nothing can be done if even that fails.
pub(crate) fn complain(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

static QUIET: AtomicBool = AtomicBool::new(false);

/// From now on only what was asked for by name is printed on stdout, and no progress is shown.
pub(crate) fn be_quiet() {
    QUIET.store(true, Ordering::Relaxed);
}

pub(crate) fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// A table for people on stdout, unless --quiet.
pub(crate) fn say(text: &str) -> io::Result<()> {
    if is_quiet() { Ok(()) } else { emit(text) }
}

/// Data on stdout. A closed pipe comes back as an error that [`code`] turns into success.
pub(crate) fn emit(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// The exit code; an error is printed as one line first.
pub(crate) fn code(result: anyhow::Result<Outcome>) -> ExitCode {
    let error = match result {
        Ok(Outcome::Done) => return ExitCode::SUCCESS,
        Ok(Outcome::Noticed) => return ExitCode::from(1),
        Err(error) => error,
    };
    if error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe) {
        return ExitCode::SUCCESS;
    }
    if matches!(error.downcast_ref::<Error>(), Some(Error::Cancelled)) && crate::interrupt::was_asked() {
        complain(&crate::interrupt::farewell());
        return ExitCode::from(crate::interrupt::CODE);
    }
    if let Some(place) = error.downcast_ref::<crate::recipe::Misplaced>() {
        complain(&format!("error: {}\n{}", one_line(&place.to_string()), place.excerpt()));
        return ExitCode::from(2);
    }
    complain(&format!("error: {}", one_line(&story(&error))));
    ExitCode::from(2)
}

/// The error and its causes; a cause whose text is already in the message is not repeated.
fn story(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if !text.contains(&cause) {
            text.push_str(if text.is_empty() { "" } else { ": " });
            text.push_str(&cause);
        }
    }
    text
}

/// Line ends become spaces: scripts read one line.
pub(crate) fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The error for a feature that is planned but not there yet.
pub(crate) fn not_yet(what: &str) -> anyhow::Error {
    anyhow::anyhow!("{what}: not yet; this version refuses it rather than ignore it")
}
