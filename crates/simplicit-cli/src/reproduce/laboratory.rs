//! Runs the steps of an experiment, each once.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::{Value, json};
use simplicit::files::{read_capped, write_bytes_atomically};
use simplicit::parallel::Cancel;

use super::Found;
use crate::exit::one_line;
use crate::progress::Watcher;

const MAX_RECORD: u64 = 256 << 20;
const POLL: Duration = Duration::from_millis(20);

/// One command of this program.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Step {
    /// A name that is unique in the experiment; the files of the step have it too.
    pub(crate) name: String,
    /// The command and its flags, without `--json` and `--progress`.
    pub(crate) args: Vec<String>,
    /// A file that it writes and that later steps read.
    pub(crate) writes: Option<PathBuf>,
}

/// Where steps run and store their results.
///
/// A step is a process of its own, started from this program itself. So the measurement is exactly that of the
/// command printed on the page, and no step can leave memory or threads behind for the next.
pub(crate) struct Laboratory<'a> {
    directory: PathBuf,
    threads: usize,
    cancel: &'a Cancel,
    watcher: &'a Watcher<'a>,
}

impl<'a> Laboratory<'a> {
    pub(crate) fn new(directory: &Path, threads: usize, cancel: &'a Cancel, watcher: &'a Watcher<'a>) -> Self {
        Self { directory: directory.to_path_buf(), threads, cancel, watcher }
    }

    /// Runs all steps in order. A step whose results are there, from the same command and version, is not run again.
    pub(crate) fn run(&self, steps: &[Step]) -> anyhow::Result<Found> {
        std::fs::create_dir_all(&self.directory).with_context(|| self.directory.display().to_string())?;
        let mut found = Found::new();
        for (k, step) in steps.iter().enumerate() {
            self.cancel.check()?;
            self.watcher.phase(&step.name);
            self.watcher.samples(k, steps.len());
            let record = self.directory.join(format!("{}.json", step.name));
            let results = match self.known(&record, step) {
                Some(results) => results,
                None => {
                    let results = self.perform(step).with_context(|| step.name.clone())?;
                    let text = serde_json::to_string_pretty(&json!({
                        "command": step.args, "version": env!("CARGO_PKG_VERSION"), "results": results
                    }))?;
                    write_bytes_atomically(&record, text.as_bytes())?;
                    results
                }
            };
            found.insert(step.name.clone(), results);
        }
        Ok(found)
    }

    /// The results of an earlier run of the same step.
    fn known(&self, record: &Path, step: &Step) -> Option<Value> {
        if step.writes.as_ref().is_some_and(|path| !path.is_file()) {
            return None;
        }
        let mut record: Value = serde_json::from_slice(&read_capped(record, MAX_RECORD).ok()?).ok()?;
        let same = record["command"] == json!(step.args) && record["version"] == env!("CARGO_PKG_VERSION");
        same.then(|| record["results"].take())
    }

    fn perform(&self, step: &Step) -> anyhow::Result<Value> {
        let fresh = self.directory.join(format!(".{}.fresh.json", step.name));
        let mut command = Command::new(std::env::current_exe()?);
        command.args(&step.args).arg("--json").arg(&fresh);
        if step.args[0] != "convert" {
            command.args(["--progress", "none"]);
            if !step.args.iter().any(|a| a == "--threads") {
                command.arg("--threads").arg(self.threads.to_string());
            }
        }
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if self.cancel.is_cancelled() {
                let _ = child.kill();
                let _ = child.wait();
                let _ = std::fs::remove_file(&fresh);
                self.cancel.check()?;
            }
            std::thread::sleep(POLL);
        };
        self.cancel.check()?;
        // Exit code 1 also means that the work is done, with a notice that the results repeat.
        if !matches!(status.code(), Some(0 | 1)) {
            let mut said = String::new();
            child.stderr.take().map(|mut e| e.read_to_string(&mut said)).transpose()?;
            bail!("{}: {}", step.args.join(" "), one_line(said.trim_start_matches("error: ")));
        }
        let results = serde_json::from_slice(&read_capped(&fresh, MAX_RECORD)?)?;
        std::fs::remove_file(&fresh)?;
        Ok(results)
    }
}
