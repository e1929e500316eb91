//! `frontier`: ours and the rivals on FashionMNIST or on a network and images of yours, from one command to the tables and
//! the plot of the experiment's page.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Parser;
use simplicit::arrays::{Array, Labels, Preprocessing, Selection};
use simplicit::backend::Device;
use simplicit::files::write_bytes_atomically;
use simplicit::network::Network;
use simplicit::parallel::{Cancel, Threads};
use simplicit_bench::experiment::{Data, OURS, Outcome, Plan, Row, Workers, run};
use simplicit_bench::{page, rivals};

/// Accuracy against sparsity: simplicit and its rivals on the same states, counter and held-out images
#[derive(Debug, Parser)]
struct Args {
    /// The baseline
    #[arg(long, value_name = "FILE", default_value = "data/fashion_fc.onnx")]
    network: PathBuf,
    /// Folder with the four FashionMNIST files (Debian: dataset-fashion-mnist)
    #[arg(long, value_name = "DIR", default_value = "/usr/share/datasets/fashion-mnist")]
    data: PathBuf,
    /// Training inputs of the network instead of those in the folder
    #[arg(long, value_name = "FILE", requires = "test", conflicts_with_all = ["data", "fast"])]
    inputs: Option<PathBuf>,
    /// Test inputs
    #[arg(long, value_name = "FILE", requires = "inputs")]
    test: Option<PathBuf>,
    /// Their labels [default: those in the file of the test inputs, as CIFAR has them]
    #[arg(long, value_name = "FILE", requires = "test")]
    test_labels: Option<PathBuf>,
    /// Subtracted after scaling: one number, or one per channel
    #[arg(long, value_name = "M[,M…]", value_delimiter = ',', requires = "inputs", allow_hyphen_values = true)]
    mean: Vec<f64>,
    /// Divided by at the end: one number, or one per channel
    #[arg(long, value_name = "S[,S…]", value_delimiter = ',', requires = "inputs")]
    std: Vec<f64>,
    /// Whose models: simplicit, magnitude, magnitude-refit, l1, second-order, admm, snows, evopress [default: all]
    #[arg(long, value_delimiter = ',')]
    methods: Vec<String>,
    /// Training images per seed
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    samples: usize,
    /// Held-out training images per seed
    #[arg(long, value_name = "N", default_value_t = 5_000)]
    held_out: usize,
    /// Number of seeds
    #[arg(long, value_name = "N", default_value_t = 3)]
    seeds: u64,
    /// The first of them: with --merge, further seeds join those of the JSON
    #[arg(long, value_name = "S", default_value_t = 0)]
    first_seed: u64,
    /// Sparsities
    #[arg(long, value_delimiter = ',', default_value = "0.5,0.6,0.7,0.75,0.8,0.85,0.9,0.93,0.95")]
    levels: Vec<f64>,
    /// Sparsities of the comparison of connectivities; the cyclic ones are trained up to 0.5
    #[arg(long, value_delimiter = ',', default_value = "0.25,0.36,0.8,0.9")]
    connectivity_levels: Vec<f64>,
    /// κ of the cyclic ones, a row each, in coordinates in which the baseline needs 0.99
    #[arg(long, value_delimiter = ',', default_value = "0.8")]
    kappas: Vec<f64>,
    /// Seeds of that comparison; 0 leaves it out
    #[arg(long, value_name = "N", default_value_t = 3)]
    connectivity_seeds: usize,
    /// The embedded bundle's files, few images, one level, one seed: for the tests
    #[arg(long)]
    fast: bool,
    /// Threads [default: all]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Who runs layers and gathers statistics, and solves our rows: cpu, auto or cuda[:N]; rivals take auto for cuda
    #[arg(long, default_value_t = Device::Cpu)]
    device: Device,
    /// Page whose marked part is replaced; the plot is written beside it, with the ending .svg
    #[arg(long, value_name = "FILE")]
    page: Option<PathBuf>,
    /// Every row as JSON, written as they come
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Keep the rows that the JSON has already, where they are not measured again
    #[arg(long, requires = "json")]
    merge: bool,
    /// Write the page from the JSON of earlier runs instead of running; of the same row the last file's
    #[arg(long, value_name = "FILE[,FILE…]", value_delimiter = ',', conflicts_with_all = ["merge", "fast"])]
    from: Vec<PathBuf>,
}

impl Args {
    fn plan(&self) -> Plan {
        let all = || std::iter::once(OURS).chain(rivals::all().iter().map(|r| r.id())).map(String::from).collect();
        let methods = if self.methods.is_empty() { all() } else { self.methods.clone() };
        if self.fast {
            return Plan {
                samples: 1000,
                methods,
                held_out: 200,
                seeds: vec![0],
                levels: vec![0.8],
                connectivity_levels: Vec::new(),
                connectivity_seeds: 0,
                connectivity_samples: 0,
                kappas: Vec::new(),
            };
        }
        Plan {
            samples: self.samples,
            methods,
            held_out: self.held_out,
            seeds: (self.first_seed..self.first_seed.saturating_add(self.seeds)).collect(),
            levels: sorted(&self.levels),
            connectivity_levels: sorted(&self.connectivity_levels),
            connectivity_seeds: self.connectivity_seeds,
            connectivity_samples: self.samples.min(5_000),
            kappas: self.kappas.clone(),
        }
    }

    fn open(&self) -> anyhow::Result<Data> {
        if let (Some(inputs), Some(test)) = (&self.inputs, &self.test) {
            let train = Array::open(inputs)?;
            let format = if train.is_image_file() { Preprocessing::bytes() } else { Preprocessing::identity() };
            let or = |given: &[f64], default: Vec<f64>| if given.is_empty() { default } else { given.to_vec() };
            let (mean, std) = (or(&self.mean, format.mean), or(&self.std, format.std));
            return Ok(Data {
                network: Network::from_onnx(&self.network)?,
                preprocessing: Some(Preprocessing::new(format.scale, mean, std)?),
                train,
                test: Array::open(test)?,
                labels: Labels::read(self.test_labels.as_ref().unwrap_or(test), &Selection::all())?,
            });
        }
        let names = if self.fast {
            ["fashion_train_images.idx.gz", "fashion_test_images.idx.gz", "fashion_test_labels.idx.gz"]
        } else {
            ["train-images-idx3-ubyte.gz", "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"]
        };
        let bundle = self.network.parent().unwrap_or(Path::new("."));
        let [train, test, labels] = names.map(|name| if self.fast { bundle.join(name) } else { self.data.join(name) });
        Ok(Data {
            network: Network::from_onnx(&self.network)?,
            preprocessing: None,
            train: Array::open(train)?,
            test: Array::open(test)?,
            labels: Labels::read(labels, &Selection::all())?,
        })
    }
}

fn sorted(levels: &[f64]) -> Vec<f64> {
    let mut out = levels.to_vec();
    out.sort_by(f64::total_cmp);
    out
}

fn read(path: &Path) -> anyhow::Result<Outcome> {
    let name = || path.display().to_string();
    serde_json::from_slice(&std::fs::read(path).with_context(name)?).with_context(name)
}

fn write_json(path: &Path, outcome: &Outcome) -> anyhow::Result<()> {
    Ok(write_bytes_atomically(path, (serde_json::to_string_pretty(outcome)? + "\n").as_bytes())?)
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let outcome = match args.from.split_first() {
        Some((first, later)) => later.iter().try_fold(read(first)?, |earlier, path| read(path)?.over(earlier))?,
        None => {
            let threads = args.threads.map_or_else(Threads::available, Threads::new);
            let earlier = args.json.as_deref().filter(|path| args.merge && path.exists()).map(read).transpose()?;
            let merged = |outcome: Outcome| match &earlier {
                Some(earlier) => outcome.over(earlier.clone()),
                None => Ok(outcome),
            };
            let mut tell = |so_far: &Outcome, row: &Row| -> anyhow::Result<()> {
                // Nothing can be done if even stderr is closed.
                let _ = writeln!(std::io::stderr(), "{}", page::line(row));
                if let Some(json) = &args.json {
                    write_json(json, &merged(so_far.clone())?)?;
                }
                Ok(())
            };
            let workers = Workers { threads, device: args.device };
            merged(run(&args.open()?, &args.plan(), workers, &Cancel::new(), &mut tell)?)?
        }
    };
    let markdown = page::markdown(&outcome);
    if let Some(json) = &args.json {
        write_json(json, &outcome)?;
    }
    if let Some(path) = &args.page {
        let svg = path.with_extension("svg");
        let name = svg.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let generated = format!("![change of test accuracy against sparsity]({name})\n\n{markdown}");
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let filled = page::fill(&text, &generated)
            .with_context(|| format!("{}: expected the two marks of the generated part", path.display()))?;
        write_bytes_atomically(&svg, page::plot(&outcome).as_bytes())?;
        write_bytes_atomically(path, filled.as_bytes())?;
    }
    std::io::stdout().write_all(markdown.as_bytes())?;
    Ok(())
}
