//! The library's errors as the exceptions of `simplicit.errors`: one class for each, with the same message, and with
//! expected and given values as attributes.

use pyo3::IntoPyObjectExt;
use pyo3::exceptions::{PyKeyboardInterrupt, PyRuntimeError};
use pyo3::prelude::*;
use simplicit::Error;

/// An exception of a class in `simplicit.errors`, with attributes.
fn raise(name: &str, message: &str, attributes: &[(&str, Py<PyAny>)]) -> PyErr {
    Python::attach(|py| {
        let build = || {
            let exception = py.import("simplicit.errors")?.getattr(name)?.call1((message,))?;
            for (attribute, value) in attributes {
                exception.setattr(*attribute, value)?;
            }
            PyResult::Ok(PyErr::from_value(exception))
        };
        build().unwrap_or_else(|_| PyRuntimeError::new_err(message.to_string()))
    })
}

fn text(value: &str) -> Py<PyAny> {
    Python::attach(|py| value.into_pyobject(py).map(|v| v.unbind().into_any()).unwrap_or_else(|_| py.None()))
}

fn object<'py, T: IntoPyObject<'py>>(py: Python<'py>, value: T) -> Py<PyAny> {
    value.into_py_any(py).unwrap_or_else(|_| py.None())
}

/// The exception for a library error.
pub(crate) fn of_library(error: &Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::Shape { what, expected, got } => {
            raise("ShapeError", &message, &[("what", text(what)), ("expected", text(expected)), ("got", text(got))])
        }
        Error::NotFinite { array, row, column, .. } => Python::attach(|py| {
            let place = [("array", text(array)), ("row", object(py, *row)), ("column", object(py, *column))];
            raise("NotFiniteError", &message, &place)
        }),
        Error::Setting { setting, expected, got } => setting_error(&message, setting, expected, got),
        Error::File { path, .. } => raise("FileError", &message, &[("path", text(&path.display().to_string()))]),
        Error::Io { path, .. } => raise("FileError", &message, &[("path", text(&path.display().to_string()))]),
        Error::Unsupported { .. } => raise("UnsupportedError", &message, &[]),
        Error::Infeasible { rows } => Python::attach(|py| {
            let rows: Vec<(String, f64)> = rows.iter().map(|r| (r.name.clone(), r.relative_residual)).collect();
            raise("InfeasibleError", &message, &[("rows", object(py, rows))])
        }),
        Error::NotConverged { samples } => {
            Python::attach(|py| raise("NotConvergedError", &message, &[("samples", object(py, samples.clone()))]))
        }
        Error::Cancelled => PyKeyboardInterrupt::new_err(()),
        _ => raise("Error", &message, &[]),
    }
}

fn setting_error(message: &str, setting: &str, expected: &str, got: &str) -> PyErr {
    let message = in_python_words(message);
    raise("SettingError", &message, &[("setting", text(setting)), ("expected", text(expected)), ("got", text(got))])
}

/// The exception for anything that the command line's code refuses: a library error, or a setting.
pub(crate) fn of_any(error: &anyhow::Error) -> PyErr {
    match error.downcast_ref::<Error>() {
        Some(error) => of_library(error),
        None => raise("SettingError", &in_python_words(&error.to_string()), &[]),
    }
}

/// Renames flags to Python's arguments: `--target-sparsity` becomes `target_sparsity`.
fn in_python_words(message: &str) -> String {
    let mut words = Vec::new();
    for word in message.split(' ') {
        let start = word.find("--").filter(|&k| word[k + 2..].starts_with(|c: char| c.is_ascii_lowercase()));
        words.push(match start {
            Some(k) => format!("{}{}", &word[..k], word[k + 2..].replace('-', "_")),
            None => word.to_string(),
        });
    }
    words.join(" ")
}
