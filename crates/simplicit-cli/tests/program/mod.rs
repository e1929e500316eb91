//! Running the program in a directory of its own.

#![allow(dead_code, missing_docs, unreachable_pub, clippy::unwrap_used)] // Each test file uses its own part.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The program under test.
pub const PROGRAM: &str = env!("CARGO_BIN_EXE_simplicit");

/// A file under data/.
pub fn data(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../data")).canonicalize().unwrap().join(name)
}

/// What the program did.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    pub fn of(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// Panics with everything said unless the exit code is `code`.
    #[track_caller]
    pub fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{self:#?}");
        self
    }

    /// One line on stderr, as failures have.
    #[track_caller]
    pub fn one_line(&self) -> &str {
        assert_eq!(self.stderr.matches('\n').count(), 1, "{self:#?}");
        self.stderr.trim_end()
    }
}

/// A command in a directory: words of `line` are arguments, `@name` is a file under data/.
pub fn command(directory: &Path, line: &str) -> Command {
    let mut command = Command::new(PROGRAM);
    command.current_dir(directory).args(words(line)).env_remove("COLUMNS");
    command
}

pub fn words(line: &str) -> Vec<String> {
    line.split_whitespace()
        .map(|word| word.strip_prefix('@').map_or(word.to_string(), |name| data(name).display().to_string()))
        .collect()
}

pub fn run(directory: &Path, line: &str) -> Ran {
    Ran::of(command(directory, line).output().unwrap())
}

/// A small training run that takes about a second.
pub const TRAIN: &str = "train --network @fashion_fc.onnx --inputs @fashion_train_images.idx.gz --samples 400";

/// The same without lower bounds of its rows, which take far longer than the model where features outnumber samples.
pub const TRAIN_UNBOUNDED: &str =
    "train --network @fashion_fc.onnx --inputs @fashion_train_images.idx.gz --samples 400 --bounds off";

/// Names in a directory, sorted.
pub fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(directory).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Writes a `.npy` of float32 with these sizes, number k of which is `value(k)`.
pub fn npy(path: &Path, sizes: &[usize], value: impl Fn(usize) -> f32) {
    let sizes_text: Vec<String> = sizes.iter().map(|size| format!("{size},")).collect();
    let header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({}), }}", sizes_text.join(" "));
    let padding = (64 - (10 + header.len() + 1) % 64) % 64;
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend(((header.len() + padding + 1) as u16).to_le_bytes());
    bytes.extend(header.bytes());
    bytes.extend(std::iter::repeat_n(b' ', padding));
    bytes.push(b'\n');
    (0..sizes.iter().product()).for_each(|k| bytes.extend(value(k).to_le_bytes()));
    std::fs::write(path, bytes).unwrap();
}
