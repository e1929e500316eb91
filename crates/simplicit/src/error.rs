//! The errors, in one line each: what is wrong, where, what was expected and given, and what to do.

use std::path::{Path, PathBuf};

/// The library's result type.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// All errors of the library. Reaching a limit is a status, never an error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Two shapes differ that should be equal.
    #[error("{what}: expected {expected}, got {got}")]
    Shape {
        /// The array or object, by name.
        what: String,
        /// The shape or size it should have.
        expected: String,
        /// The shape or size it has.
        got: String,
    },
    /// A NaN or an infinity in the data.
    #[error("{array}: {value} at row {row}, column {column}; every value must be finite, so clean or drop that sample")]
    NotFinite {
        /// The array, by name.
        array: String,
        /// Row (sample) of the first such value.
        row: usize,
        /// Column (feature) of the first such value.
        column: usize,
        /// The value.
        value: f64,
    },
    /// A setting outside its range, or two settings that exclude each other.
    #[error("{setting}: expected {expected}, got {got}")]
    Setting {
        /// The public name of the setting.
        setting: String,
        /// The values that it accepts.
        expected: String,
        /// The value that was given.
        got: String,
    },
    /// A file whose content is wrong.
    #[error("{}: {problem}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it and what to do.
        problem: String,
    },
    /// The operating system reported an error.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A request that this library does not support, and what it does instead.
    #[error("{what} is not supported: {why}")]
    Unsupported {
        /// What was found, with its name and place.
        what: String,
        /// The reason, and what would work instead.
        why: String,
    },
    /// Rows of an exact-matching problem that no weights can satisfy.
    #[error("exact matching is infeasible for {}", describe_rows(rows))]
    Infeasible {
        /// Each row by name, with the smallest residual that can be reached.
        rows: Vec<InfeasibleRow>,
    },
    /// Samples whose equilibrium was not reached within the limit, where the caller needs all of them.
    #[error("{}; raise the iteration limit, or train with a smaller kappa", describe_samples(samples))]
    NotConverged {
        /// The samples, as rows of the batch.
        samples: Vec<usize>,
    },
    /// A device that cannot be used, or that failed.
    #[error("{device}: {problem}")]
    Device {
        /// The device, such as `cuda:0`.
        device: String,
        /// What is missing or went wrong.
        problem: String,
    },
    /// The caller asked to stop.
    #[error("stopped on request")]
    Cancelled,
}

/// A row that cannot be matched exactly.
#[derive(Debug, Clone, PartialEq)]
pub struct InfeasibleRow {
    /// The row's name, such as `z[17]` or `y[3]`.
    pub name: String,
    /// Number of its target in the statistics that it was solved from.
    pub target: usize,
    /// The smallest achievable ‖z − Ũᵀw‖ / ‖z‖ under the row's constraints.
    pub relative_residual: f64,
}

fn describe_rows(rows: &[InfeasibleRow]) -> String {
    const SHOWN: usize = 5;
    let mut text = format!("{} row(s): ", rows.len());
    for (k, row) in rows.iter().take(SHOWN).enumerate() {
        if k > 0 {
            text.push_str(", ");
        }
        text.push_str(&format!("{} (best residual {:.2e} of its norm)", row.name, row.relative_residual));
    }
    if rows.len() > SHOWN {
        text.push_str(&format!(" and {} more", rows.len() - SHOWN));
    }
    text.push_str("; raise kappa, allow more connections, add the bias, or use relaxed matching");
    text
}

fn describe_samples(samples: &[usize]) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<String> = samples.iter().take(SHOWN).map(usize::to_string).collect();
    let more = if samples.len() > SHOWN { ", …" } else { "" };
    format!("the equilibrium of {} sample(s) was not reached: {}{more}", samples.len(), shown.join(", "))
}

impl Error {
    /// A shape mismatch, both sides given.
    pub fn shape(what: impl Into<String>, expected: impl ToString, got: impl ToString) -> Self {
        Error::Shape { what: what.into(), expected: expected.to_string(), got: got.to_string() }
    }

    /// A setting outside its range.
    pub fn setting(setting: impl Into<String>, expected: impl ToString, got: impl ToString) -> Self {
        Error::Setting { setting: setting.into(), expected: expected.to_string(), got: got.to_string() }
    }

    /// A file that is not what it should be.
    pub fn file(path: impl AsRef<Path>, problem: impl Into<String>) -> Self {
        Error::File { path: path.as_ref().to_path_buf(), problem: problem.into() }
    }

    /// The operating system's refusal, with the path it concerns.
    pub fn io(path: impl AsRef<Path>, source: std::io::Error) -> Self {
        Error::Io { path: path.as_ref().to_path_buf(), source }
    }

    /// An error for what is not supported, with the reason and an alternative.
    pub fn unsupported(what: impl Into<String>, why: impl Into<String>) -> Self {
        Error::Unsupported { what: what.into(), why: why.into() }
    }

    /// The same error, with its place put in front of its subject.
    pub(crate) fn within(mut self, place: &str) -> Self {
        match &mut self {
            Error::Shape { what: subject, .. }
            | Error::NotFinite { array: subject, .. }
            | Error::Setting { setting: subject, .. }
            | Error::Unsupported { what: subject, .. } => subject.insert_str(0, &format!("{place}: ")),
            Error::File { .. }
            | Error::Io { .. }
            | Error::Infeasible { .. }
            | Error::NotConverged { .. }
            | Error::Device { .. }
            | Error::Cancelled => {}
        }
        self
    }
}
