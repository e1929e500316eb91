//! The files of an experiment and the commands over them.

use std::path::{Path, PathBuf};

use super::Step;

/// ε of the paper's attacks.
const EPSILON: &str = "1/255,2/255";

/// The files that the steps read, and the folder for their models.
pub(crate) struct Files {
    pub(crate) network: PathBuf,
    pub(crate) inputs: PathBuf,
    pub(crate) test_inputs: PathBuf,
    pub(crate) test_labels: PathBuf,
    pub(crate) models: PathBuf,
    /// Flags from raw values to inputs, in addition to those of the files' format.
    pub(crate) preprocessing: &'static str,
}

impl Files {
    pub(super) fn model(&self, name: &str) -> PathBuf {
        self.models.join(format!("{name}.safetensors"))
    }

    /// The network itself as a model.
    pub(super) fn convert(&self, name: &str) -> Step {
        let model = self.model(name);
        let files = [("--network", &self.network), ("--out", &model)];
        let args = command("convert", &files, &format!("--scale 1/255 {}", self.preprocessing));
        Step { name: name.into(), args, writes: Some(model) }
    }

    pub(super) fn train(&self, name: &str, samples: usize, flags: &str) -> Step {
        let model = self.model(name);
        let files = [
            ("--network", &self.network),
            ("--inputs", &self.inputs),
            ("--test-inputs", &self.test_inputs),
            ("--test-labels", &self.test_labels),
            ("--out", &model),
        ];
        let args = command("train", &files, &format!("{} --samples {samples} {flags}", self.preprocessing));
        Step { name: name.into(), args, writes: Some(model) }
    }

    /// The paper's attack on the model of an earlier step.
    pub(super) fn attack(&self, name: &str, flags: &str) -> Step {
        let model = self.model(name);
        let files = [
            ("--model", &model),
            ("--network", &self.network),
            ("--inputs", &self.test_inputs),
            ("--labels", &self.test_labels),
        ];
        let flags = format!("--epsilon {EPSILON} --method fgsm --gradient baseline --pixels 0.5 {flags}");
        Step { name: attacked(name), args: command("attack", &files, &flags), writes: None }
    }
}

/// The name of the step that attacks the model of another step.
pub(super) fn attacked(name: &str) -> String {
    format!("{name}-attacked")
}

fn command(name: &str, files: &[(&str, &PathBuf)], flags: &str) -> Vec<String> {
    let path = |p: &Path| p.display().to_string();
    let files = files.iter().flat_map(|(flag, file)| [(*flag).to_string(), path(file)]);
    std::iter::once(name.to_string()).chain(files).chain(flags.split_whitespace().map(String::from)).collect()
}
