//! `simplicit lab reproduce`: the paper's experiments, each item compared with the paper's figure.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use serde_json::json;
use simplicit::files::write_bytes_atomically;
use simplicit::parallel::Cancel;

use crate::args::{JsonArgs, RunArgs};
use crate::embedded;
use crate::exit::Outcome;
use crate::interrupt::set_how_to_go_on;
use crate::paths::Paths;
use crate::progress::Watcher;
use crate::reproduce::{Cifar, Experiment, Fashion, Files, Found, Laboratory, Page, cifar};
use crate::results::deliver;

const HELP: &str = "\
Writes results.md (tables, what the paper says, what was found), results.json and one SVG per
figure into --out. Every step is a command of this program, listed at the end of results.md;
finished steps are kept in --out/steps, so that the same command goes on after any interruption.

The network and the FashionMNIST test images are part of the program. Needed besides:
  fashion-mnist  train-images-idx3-ubyte.gz, from Debian's package dataset-fashion-mnist
  cifar-100      train.bin and test.bin (or .gz) of the binary version of CIFAR-100

Examples:
  simplicit lab reproduce fashion-mnist --out fashion
  simplicit lab reproduce fashion-mnist --fast --out try
  simplicit lab reproduce cifar-100 --data cifar-100-binary --out cifar";

/// Where Debian's package puts FashionMNIST.
const DEBIAN: &str = "/usr/share/datasets/fashion-mnist";

/// Which of the paper's experiments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Which {
    /// The 4-layer network
    FashionMnist,
    /// ResNet-20, one row per output channel
    #[value(name = "cifar-100")]
    Cifar100,
}

/// Run an experiment of the paper from files to tables and pictures
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(crate) struct ReproduceArgs {
    /// The experiment
    experiment: Which,
    /// Directory for tables, pictures and finished steps
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Directory with the data set's files [default for fashion-mnist: where Debian's package puts them]
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// A few points of every item, on embedded or few images: to see it work, not for figures
    #[arg(long)]
    fast: bool,
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    json: JsonArgs,
}

pub(crate) fn run(args: &ReproduceArgs, cancel: &Cancel) -> anyhow::Result<Outcome> {
    Paths::default().writes("--json", args.json.file()).check()?;
    std::fs::create_dir_all(&args.out).with_context(|| args.out.display().to_string())?;
    set_how_to_go_on("the same command goes on from the steps in --out".into());
    let data = args.out.join("data");
    std::fs::create_dir_all(&data).with_context(|| data.display().to_string())?;
    let threads = args.run.threads().get();
    let steps_directory = args.out.join("steps");
    let experiment: Box<dyn Experiment> = match args.experiment {
        Which::FashionMnist => {
            let network = write(&data.join("fashion_fc.onnx"), embedded::NETWORK)?;
            let test_inputs = write(&data.join("t10k-images-idx3-ubyte.gz"), embedded::TEST_IMAGES)?;
            let test_labels = write(&data.join("t10k-labels-idx1-ubyte.gz"), embedded::TEST_LABELS)?;
            let inputs = if args.fast {
                write(&data.join("train-images-idx3-ubyte.gz"), embedded::TRAIN_IMAGES)?
            } else {
                let folder = args.data.clone().unwrap_or_else(|| PathBuf::from(DEBIAN));
                one_of(&folder, &["train-images-idx3-ubyte.gz", "train-images-idx3-ubyte"], "--fast needs no files")?
            };
            let models = steps_directory.clone();
            let files = Files { network, inputs, test_inputs, test_labels, models, preprocessing: "" };
            Box::new(Fashion { files, fast: args.fast, threads })
        }
        Which::Cifar100 => {
            let Some(folder) = &args.data else {
                bail!(
                    "--data: expected the directory with train.bin and test.bin of CIFAR-100's binary version, got none"
                )
            };
            let hint = "get the binary version from the data set's home page and unpack it";
            let inputs = one_of(folder, &["train.bin.gz", "train.bin"], hint)?;
            let test = one_of(folder, &["test.bin.gz", "test.bin"], hint)?;
            let files = Files {
                network: write(&data.join("resnet20_cifar100.onnx"), embedded::RESNET)?,
                inputs,
                test_inputs: test.clone(),
                test_labels: test,
                models: steps_directory.clone(),
                preprocessing: cifar::PREPROCESSING,
            };
            Box::new(Cifar { files, fast: args.fast })
        }
    };
    let watcher = Watcher::new(args.run.progress);
    let steps = experiment.steps();
    let found = Laboratory::new(&steps_directory, threads, cancel, &watcher).run(&steps)?;
    let items = experiment.items(&found)?;
    let name = args.experiment.to_possible_value().map(|v| v.get_name().to_string()).unwrap_or_default();
    let (data, fast) = (args.data.as_ref().map_or("", |_| " --data DATA"), if args.fast { " --fast" } else { "" });
    let command = format!("simplicit lab reproduce {name}{data}{fast} --out DIR");
    let seconds = seconds(&found);
    Page { title: experiment.title(), items: &items, steps: &steps, found: &found, command: &command, seconds }
        .write(&args.out)?;
    watcher.finish();
    let pictures = items.iter().filter(|i| i.picture.is_some()).count();
    let page = args.out.join("results.md");
    let line = format!(
        "{} items, {pictures} pictures, {} steps, {seconds:.0} s of steps\n{}\n",
        items.len(),
        steps.len(),
        page.display()
    );
    let results = json!({
        "items": items.len(),
        "pictures": pictures,
        "steps": steps.len(),
        "seconds": { "total": seconds },
        "page": page.display().to_string(),
        "version": env!("CARGO_PKG_VERSION"),
    });
    deliver(&results, &args.json, &line)?;
    Ok(Outcome::Done)
}

/// Seconds that all steps took, with those of an earlier run included.
fn seconds(found: &Found) -> f64 {
    found.values().filter_map(|v| v["seconds"]["total"].as_f64()).sum()
}

fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<PathBuf> {
    write_bytes_atomically(path, bytes)?;
    Ok(path.to_path_buf())
}

fn one_of(folder: &Path, names: &[&str], hint: &str) -> anyhow::Result<PathBuf> {
    match names.iter().map(|name| folder.join(name)).find(|path| path.is_file()) {
        Some(path) => Ok(path),
        None => bail!("{}: expected {}, found neither; {hint}", folder.display(), names.join(" or ")),
    }
}
