//! `train --ray ADDRESS`: the heavy steps on a Ray cluster, by the Python package in a process of its own. Calls go to it
//! through its standard input, results come back through its standard output: a line of JSON, then the bytes it announces.

use std::io::{BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, bail};
use serde_json::{Value, json};
use simplicit::arrays::{Preprocessing, write_npy};
use simplicit::model::ImplicitModel;
use simplicit::states::InputSource;
use simplicit::{Error, Result};

use crate::remote::Courier;

/// The process of the Python package.
pub(crate) struct Cluster {
    process: Mutex<Process>,
    /// Folder of the inputs, which the workers' driver reads; it must exist as long as the process.
    _folder: tempfile::TempDir,
    /// The last failure that the process reported.
    failure: Mutex<Option<String>>,
}

struct Process {
    child: Child,
    /// File that receives its standard error. A pipe that nobody empties would block the process.
    log: PathBuf,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

/// What is trained on, as files.
pub(crate) enum Trained<'a> {
    /// A network or a model, with its inputs.
    Network {
        network: &'a Path,
        /// The choice among the inputs and outputs of an ONNX network.
        names: Vec<(&'static str, &'a str)>,
        /// The baseline in the coordinates of the training, where these differ from its own.
        moved: Option<&'a ImplicitModel>,
        inputs: &'a dyn InputSource,
    },
    /// A states file.
    States(&'a Path),
}

impl Cluster {
    /// Starts the package, which joins the cluster at `address`.
    pub(crate) fn join(address: &str, trained: &Trained, decided: &str) -> anyhow::Result<Self> {
        let python = std::env::var("SIMPLICIT_PYTHON").unwrap_or_else(|_| "python3".into());
        let folder = tempfile::tempdir()?;
        let mut about = json!({
            "address": address,
            "decided": decided,
            // The inputs of the workers have already been preprocessed.
            "preprocessing": serde_json::to_string(&Preprocessing::identity())?,
        });
        match trained {
            Trained::Network { network, names, moved, inputs } => {
                if let Some(moved) = moved {
                    let path = folder.path().join("moved.safetensors");
                    std::fs::write(&path, moved.to_bytes())?;
                    about["moved"] = json!(path);
                }
                about["names"] = names.iter().map(|(name, value)| (*name, json!(value))).collect();
                let path = folder.path().join("inputs.npy");
                write_npy(&path, &inputs.rows(0..inputs.samples())?)?;
                about["network"] = json!(network);
                about["inputs"] = json!(path);
            }
            Trained::States(states) => about["states"] = json!(states),
        }
        let log = folder.path().join("log");
        let mut child = Command::new(&python)
            .args(["-m", "simplicit.ray"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(&log)?)
            .spawn()
            .with_context(|| format!("--ray: {python} cannot be started; set SIMPLICIT_PYTHON"))?;
        let (Some(to), Some(from)) = (child.stdin.take(), child.stdout.take()) else { bail!("--ray: no pipes") };
        let mut process = Process { child, log, to, from: BufReader::new(from) };
        match process.ask(&about, &[]) {
            Ok((answer, _)) => {
                if let Some(error) = answer["error"].as_str() {
                    bail!("--ray {address}: {error}");
                }
            }
            Err(error) => {
                let said = process.last_words();
                let why = if said.is_empty() { error.to_string() } else { said };
                bail!(
                    "--ray: {python} failed ({why}); install the package with pip install 'simplicit[ray]', or set \
                     SIMPLICIT_PYTHON"
                );
            }
        }
        Ok(Self { process: Mutex::new(process), _folder: folder, failure: Mutex::default() })
    }

    /// Why a call failed, if one did.
    pub(crate) fn failure(&self) -> Option<String> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn asked(&self, question: &Value, parts: &[Vec<u8>]) -> Result<(Value, Vec<u8>)> {
        let mut process = self.process.lock().unwrap_or_else(PoisonError::into_inner);
        let answer = process.ask(question, parts).map_err(|error| {
            let said = process.last_words();
            if said.is_empty() { error.to_string() } else { said }
        });
        let answer = answer.and_then(|(answer, bytes)| match answer["error"].as_str() {
            Some(error) => Err(error.to_string()),
            None => Ok((answer, bytes)),
        });
        answer.map_err(|why| {
            *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
            Error::Cancelled
        })
    }
}

impl Process {
    fn ask(&mut self, question: &Value, parts: &[Vec<u8>]) -> anyhow::Result<(Value, Vec<u8>)> {
        let mut question = question.clone();
        question["lengths"] = json!(parts.iter().map(Vec::len).collect::<Vec<_>>());
        self.to.write_all(format!("{question}\n").as_bytes())?;
        for part in parts {
            self.to.write_all(part)?;
        }
        self.to.flush()?;
        let mut line = String::new();
        if std::io::BufRead::read_line(&mut self.from, &mut line)? == 0 {
            bail!("it ended without an answer");
        }
        let answer: Value = serde_json::from_str(&line)?;
        let mut bytes = vec![0; usize::try_from(answer["length"].as_u64().unwrap_or(0))?];
        self.from.read_exact(&mut bytes)?;
        Ok((answer, bytes))
    }

    /// The last line of its standard error, once it has ended.
    fn last_words(&mut self) -> String {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let said = std::fs::read_to_string(&self.log).unwrap_or_default();
        said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default().trim().to_string()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process ends when its input ends, and it gives its workers back.
        let _ = self.to.write_all(b"\n");
        let _ = self.to.flush();
        let _ = self.child.wait();
    }
}

impl Courier for Cluster {
    fn start(&self, method: &str, numbers: &[usize], parts: &[Vec<u8>]) -> Result<u64> {
        let (answer, _) = self.asked(&json!({"method": method, "numbers": numbers}), parts)?;
        Ok(answer["call"].as_u64().unwrap_or(0))
    }

    fn next(&self, call: u64, take: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<bool> {
        let (answer, bytes) = self.asked(&json!({"next": call}), &[])?;
        let came = answer["length"].is_u64();
        if came {
            take(&bytes)?;
        }
        Ok(came)
    }
}
