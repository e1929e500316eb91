//! Flags that several commands share.

use std::path::{Path, PathBuf};

use anyhow::bail;
use clap::{Args, ValueEnum};
use simplicit::arrays::{Array, Inputs, PictureSettings, Preprocessing, Selection};
use simplicit::model::ImplicitModel;
use simplicit::onnx::OnnxSelection;
use simplicit::parallel::Threads;

use crate::progress::Show;

/// on or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Switch {
    On,
    Off,
}

impl Switch {
    pub(crate) fn is_on(self) -> bool {
        self == Switch::On
    }
}

impl From<bool> for Switch {
    fn from(on: bool) -> Self {
        if on { Switch::On } else { Switch::Off }
    }
}

/// u = (raw·scale − mean) / std.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Preprocessing, u = (raw·scale − mean)/std")]
pub(crate) struct PreprocessingArgs {
    /// Factor on the raw values, such as 1/255 [default: the model's; else 1/255 for IDX and CIFAR files, 1 for arrays]
    #[arg(long, value_name = "S", value_parser = number, allow_hyphen_values = true)]
    pub(crate) scale: Option<f64>,
    /// Subtracted after scaling: one number, or one per channel as 0.5,0.4,0.3 [default: the model's; else 0]
    #[arg(long, value_name = "M[,M…]", value_delimiter = ',', value_parser = number, allow_hyphen_values = true)]
    pub(crate) mean: Vec<f64>,
    /// Divided by at the end: one number, or one per channel [default: the model's; else 1]
    #[arg(long, value_name = "S[,S…]", value_delimiter = ',', value_parser = number)]
    pub(crate) std: Vec<f64>,
}

impl PreprocessingArgs {
    /// Preprocessing from the flags; `default` (a model's own, or that of the file's format) fills in what they leave
    /// out.
    pub(crate) fn over(&self, default: &Preprocessing) -> anyhow::Result<Preprocessing> {
        let or = |given: &Vec<f64>, default: &Vec<f64>| if given.is_empty() { default.clone() } else { given.clone() };
        Ok(Preprocessing::new(
            self.scale.unwrap_or(default.scale),
            or(&self.mean, &default.mean),
            or(&self.std, &default.std),
        )?)
    }
}

/// A choice of samples.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct SelectionArgs {
    /// Use N samples, chosen without replacement; the same ones of inputs and labels [default: all, in order]
    #[arg(long, value_name = "N")]
    pub(crate) samples: Option<usize>,
    /// Seed of everything random [default: 0]
    #[arg(long, value_name = "S", default_value_t = 0, hide_default_value = true)]
    pub(crate) seed: u64,
}

impl SelectionArgs {
    pub(crate) fn selection(&self) -> Selection {
        self.samples.map_or_else(Selection::all, |count| Selection::random(count, self.seed))
    }
}

/// Which inputs, and how they are read.
#[derive(Debug, Clone, Args)]
pub(crate) struct InputArgs {
    /// Inputs: .npy, .npz[:key], .safetensors[:key], IDX or CIFAR binary, each also .gz, or a folder of JPEG and PNG files
    #[arg(long, value_name = "FILE")]
    pub(crate) inputs: PathBuf,
    #[command(flatten)]
    pictures: PictureArgs,
    #[command(flatten)]
    pub(crate) selection: SelectionArgs,
    #[command(flatten)]
    preprocessing: PreprocessingArgs,
}

impl InputArgs {
    /// Opens the chosen samples, with the model's `own` preprocessing unless flags override it.
    pub(crate) fn open(&self, own: Option<&Preprocessing>) -> anyhow::Result<Inputs> {
        let selection = self.selection.selection();
        self.pictures.open_inputs(&self.inputs, &self.preprocessing, own, &selection)
    }
}

/// How pictures become samples.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct PictureArgs {
    /// Of pictures: make the shorter side N pixels long [default: as they are]
    #[arg(long, value_name = "N")]
    resize: Option<usize>,
    /// Of pictures: cut a square of N × N pixels from the middle [default: all of it]
    #[arg(long, value_name = "N")]
    crop: Option<usize>,
}

impl PictureArgs {
    /// As [`open_inputs`], but also for a folder of pictures.
    pub(crate) fn open_inputs(
        &self,
        path: &Path,
        flags: &PreprocessingArgs,
        own: Option<&Preprocessing>,
        selection: &Selection,
    ) -> anyhow::Result<Inputs> {
        if path.is_dir() {
            let settings = PictureSettings { resize: self.resize, crop: self.crop };
            let array = Array::from_pictures(path, settings, selection)?;
            let preprocessing = flags.over(own.unwrap_or(&Preprocessing::bytes()))?;
            return Ok(Inputs::new(array, Some(preprocessing), &Selection::all())?);
        }
        if self.resize.is_some() || self.crop.is_some() {
            bail!("--resize and --crop are for a folder of pictures; arrays are used as they are");
        }
        open_inputs(path, flags, own, selection)
    }

    /// The flags that were given, with their values.
    pub(crate) fn given(&self) -> Vec<(&'static str, usize)> {
        [("resize", self.resize), ("crop", self.crop)].into_iter().filter_map(|(n, v)| Some((n, v?))).collect()
    }
}

/// Inputs from a file, with a model's own preprocessing unless flags override it.
pub(crate) fn open_inputs(
    path: &Path,
    flags: &PreprocessingArgs,
    own: Option<&Preprocessing>,
    selection: &Selection,
) -> anyhow::Result<Inputs> {
    if !path.exists() && is_cifar(path) {
        bail!(
            "{}: no such file; CIFAR-100 is yours to fetch: unpack the binary version (cifar-100-binary.tar.gz from \
             https://www.cs.toronto.edu/~kriz/cifar.html) and give its train.bin or test.bin, gzipped or not",
            path.display()
        );
    }
    let array = Array::open(path)?;
    let format = if array.is_image_file() { Preprocessing::bytes() } else { Preprocessing::identity() };
    let preprocessing = flags.over(own.unwrap_or(&format))?;
    Ok(Inputs::new(array, Some(preprocessing), selection)?)
}

/// Whether a name is one of CIFAR's.
fn is_cifar(path: &Path) -> bool {
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    name.trim_end_matches(".gz").ends_with(".bin")
}

/// How the work is done; none of these changes a result.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Running")]
pub(crate) struct RunArgs {
    /// Threads; results do not depend on it [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
    /// Progress on stderr [default: bar on a terminal, none elsewhere]
    #[arg(long, value_name = "HOW")]
    pub(crate) progress: Option<Show>,
}

impl RunArgs {
    pub(crate) fn threads(&self) -> Threads {
        self.threads.map_or_else(Threads::available, |n| Threads::new(usize::from(n)))
    }
}

/// What to read of an ONNX network that leaves a choice.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Networks with several inputs or outputs, or with open sizes")]
pub(crate) struct NameArgs {
    /// The input of the ONNX network that is the sample [default: its only one]
    #[arg(long, value_name = "NAME")]
    input: Option<String>,
    /// The output of the ONNX network, or any value in it to end at [default: its only output]
    #[arg(long, value_name = "NAME")]
    output: Option<String>,
    /// The sizes of one sample, such as 3x224x224, where the ONNX network leaves them open
    #[arg(long, value_name = "SIZES")]
    input_shape: Option<String>,
    /// Numbers that fill the other inputs of the ONNX network, such as mask=1,kinds=0
    #[arg(long, value_name = "NAME=NUMBER,…")]
    fill: Option<String>,
}

impl NameArgs {
    /// The flags that were given, with their values.
    pub(crate) fn given(&self) -> Vec<(&'static str, &str)> {
        let values = [&self.input, &self.output, &self.input_shape, &self.fill];
        let all = Self::FLAGS.into_iter().zip(values);
        all.filter_map(|(name, value)| Some((name, value.as_deref()?))).collect()
    }

    /// The names of the flags, under which a model stores the values that it was trained with.
    pub(crate) const FLAGS: [&str; 4] = ["input", "output", "input-shape", "fill"];

    pub(crate) fn selection(&self) -> anyhow::Result<OnnxSelection> {
        self.selection_for(None)
    }

    /// The values of the flags; a flag that was not given has the value that the model was trained with.
    pub(crate) fn selection_for(&self, model: Option<&ImplicitModel>) -> anyhow::Result<OnnxSelection> {
        let given = self.given();
        let [input, output, input_shape, fill] = Self::FLAGS.map(|flag| {
            let own = given.iter().find(|(name, _)| *name == flag).map(|(_, value)| (*value).to_string());
            own.or_else(|| model?.metadata().provenance.get(flag).cloned())
        });
        let input_shape = input_shape.map(|text| OnnxSelection::parse_shape(&text)).transpose()?;
        let fill = fill.map(|text| OnnxSelection::parse_fill(&text)).transpose()?.unwrap_or_default();
        Ok(OnnxSelection { input, output, input_shape, fill })
    }
}

/// Results for scripts.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Results")]
pub(crate) struct JsonArgs {
    /// Write the results as JSON, to a file or with - to stdout instead of the table
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

impl JsonArgs {
    pub(crate) fn to_stdout(&self) -> bool {
        self.json.as_deref() == Some(Path::new("-"))
    }

    /// The path of the JSON, if it goes to a file.
    pub(crate) fn file(&self) -> Option<&Path> {
        self.json.as_deref().filter(|p| *p != Path::new("-"))
    }
}

/// A number, or a quotient such as 1/255.
pub(crate) fn number(text: &str) -> Result<f64, String> {
    let parse = |t: &str| t.trim().parse::<f64>().map_err(|_| format!("expected a number or a quotient, got {t:?}"));
    let value = match text.split_once('/') {
        Some((top, bottom)) => parse(top)? / parse(bottom)?,
        None => parse(text)?,
    };
    if value.is_finite() { Ok(value) } else { Err(format!("expected a finite number, got {text:?}")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_quotients() {
        assert_eq!(number("1/255"), Ok(1.0 / 255.0));
        assert_eq!(number("-0.5"), Ok(-0.5));
        for bad in ["", "x", "1/0", "nan", "1/2/3"] {
            assert!(number(bad).is_err(), "{bad}");
        }
    }
}
