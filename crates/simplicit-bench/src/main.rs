//! `frontier`: ours and the rivals on FashionMNIST, from one command to the tables and the plot of the experiment's page.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Parser;
use simplicit::arrays::{Array, Labels, Selection};
use simplicit::files::write_bytes_atomically;
use simplicit::network::Network;
use simplicit::parallel::{Cancel, Threads};
use simplicit_bench::experiment::{Data, Outcome, Plan, run};
use simplicit_bench::page;

/// Accuracy against sparsity: simplicit and its rivals on the same states, counter and held-out images
#[derive(Debug, Parser)]
struct Args {
    /// The baseline
    #[arg(long, value_name = "FILE", default_value = "data/fashion_fc.onnx")]
    network: PathBuf,
    /// Folder with the four FashionMNIST files (Debian: dataset-fashion-mnist)
    #[arg(long, value_name = "DIR", default_value = "/usr/share/datasets/fashion-mnist")]
    data: PathBuf,
    /// Training images per seed
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    samples: usize,
    /// Held-out training images per seed
    #[arg(long, value_name = "N", default_value_t = 5_000)]
    held_out: usize,
    /// Number of seeds
    #[arg(long, value_name = "N", default_value_t = 3)]
    seeds: u64,
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
    #[arg(long, value_name = "N", default_value_t = 1)]
    connectivity_seeds: usize,
    /// The embedded bundle's files, few images, one level, one seed: for the tests
    #[arg(long)]
    fast: bool,
    /// Threads [default: all]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Page whose marked part is replaced; the plot is written beside it, with the ending .svg
    #[arg(long, value_name = "FILE")]
    page: Option<PathBuf>,
    /// Every row as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the page from the JSON of an earlier run instead of running
    #[arg(long, value_name = "FILE", conflicts_with_all = ["json", "fast"])]
    from: Option<PathBuf>,
}

impl Args {
    fn plan(&self) -> Plan {
        if self.fast {
            return Plan {
                samples: 1000,
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
            held_out: self.held_out,
            seeds: (0..self.seeds).collect(),
            levels: sorted(&self.levels),
            connectivity_levels: sorted(&self.connectivity_levels),
            connectivity_seeds: self.connectivity_seeds,
            connectivity_samples: self.samples.min(5_000),
            kappas: self.kappas.clone(),
        }
    }

    fn open(&self) -> anyhow::Result<Data> {
        let names = if self.fast {
            ["fashion_train_images.idx.gz", "fashion_test_images.idx.gz", "fashion_test_labels.idx.gz"]
        } else {
            ["train-images-idx3-ubyte.gz", "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"]
        };
        let bundle = self.network.parent().unwrap_or(Path::new("."));
        let [train, test, labels] = names.map(|name| if self.fast { bundle.join(name) } else { self.data.join(name) });
        Ok(Data {
            network: Network::from_onnx(&self.network)?,
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

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let outcome: Outcome = match &args.from {
        Some(path) => serde_json::from_slice(&std::fs::read(path).with_context(|| path.display().to_string())?)
            .with_context(|| path.display().to_string())?,
        None => {
            let threads = args.threads.map_or_else(Threads::available, Threads::new);
            // Nothing can be done if even stderr is closed.
            run(&args.open()?, &args.plan(), threads, &Cancel::new(), |line| {
                let _ = writeln!(std::io::stderr(), "{line}");
            })?
        }
    };
    let markdown = page::markdown(&outcome);
    if let Some(json) = &args.json {
        write_bytes_atomically(json, (serde_json::to_string_pretty(&outcome)? + "\n").as_bytes())?;
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
