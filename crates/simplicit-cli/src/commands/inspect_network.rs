//! `simplicit inspect NET.onnx`: what a network consists of, and what of it cannot be read.

use std::ops::Range;
use std::path::Path;
use std::time::Instant;

use anyhow::bail;
use serde_json::{Value, json};
use simplicit::arrays::Preprocessing;
use simplicit::compress;
use simplicit::files::write_bytes_atomically;
use simplicit::linalg::{Matrix, gemm};
use simplicit::memory;
use simplicit::model::ImplicitModel;
use simplicit::network::{LayerSummary, Network, Shape};
use simplicit::onnx::{OnnxFile, OnnxSelection};
use simplicit::parallel::Threads;
use simplicit::states::{Collected, InputSource};
use simplicit::train::{Estimate, TrainInput, TrainSettings, estimate};

use crate::args::JsonArgs;
use crate::exit::{Outcome, say};
use crate::operands::no_network;
use crate::table::{Table, count};

/// Multiply-adds of the row weights for every sample and multiply-add of the network: one pass forward (1), then two
/// draws with a pass back each, where a pass back costs twice a pass forward (2 · 2).
const ROW_WEIGHTS: f64 = 5.0;

/// The share of a large matrix product's speed that training reaches, bounds and single moves included: about 0.28 on
/// ResNet-20 with 5,000 samples and on a CNN with a wide last layer, more where groups are large (0.6 on ResNet-18),
/// less where they are small and samples few (0.1 on SqueezeNet 1.1 and MobileNetV3-small with 64 samples).
const REACHED: f64 = 0.25;

pub(crate) fn run(
    path: &Path,
    selection: &OnnxSelection,
    samples: Option<usize>,
    json: &JsonArgs,
) -> anyhow::Result<Outcome> {
    let start = Instant::now();
    let file = OnnxFile::read(path, selection).map_err(|e| no_network(path, e))?;
    let layers = file.network.as_ref().map(|network| network.summary());
    let training = match (&file.network, samples) {
        (Some(network), Some(samples)) => Some(Training::of(network, samples)?),
        _ => None,
    };
    let seconds = start.elapsed().as_secs_f64();
    let text = format!("{:#}\n", results(&file, layers.as_deref(), training.as_ref(), seconds));
    if let Some(path) = json.file() {
        write_bytes_atomically(path, text.as_bytes())?;
    }
    say(&if json.to_stdout() { text } else { table(&file, layers.as_deref(), training.as_ref()) })?;
    let refused = file.unsupported.len();
    let notices = if refused > 0 { vec![format!("{refused} node(s) cannot be read")] } else { vec![] };
    Ok(Outcome::with_notices(&notices))
}

/// What training a network on a number of samples would take, or why it is refused.
struct Training {
    samples: usize,
    threads: usize,
    /// The estimate, the seconds of a model at a given price and the seconds of a model of a given sparsity.
    estimate: Result<(Estimate, [f64; 2]), String>,
}

/// Inputs of which only the number is known; nothing reads their values.
struct Blank {
    samples: usize,
    features: usize,
}

impl InputSource for Blank {
    fn samples(&self) -> usize {
        self.samples
    }

    fn features(&self) -> usize {
        self.features
    }

    fn rows(&self, samples: Range<usize>) -> simplicit::Result<Matrix<f32>> {
        Ok(Matrix::zeros(samples.len(), self.features))
    }
}

impl Training {
    fn of(network: &Network, samples: usize) -> anyhow::Result<Self> {
        if samples == 0 {
            bail!("--samples: expected at least 1, got 0");
        }
        let threads = Threads::available();
        let blank = Blank { samples, features: network.input_shape().size() };
        let source = Collected::new(network, &blank)?;
        let estimate = ImplicitModel::from_network(network).and_then(|baseline| {
            let preprocessing = Preprocessing::identity();
            let input = TrainInput { source: &source, baseline: Some(&baseline), importance: None, preprocessing };
            estimate(&input, &TrainSettings::default(), threads)
        });
        let speed = REACHED * multiply_adds_per_second() * threads.get() as f64;
        let weighed = ROW_WEIGHTS * samples.min(compress::WEIGHED) as f64 * network.multiply_adds() as f64;
        let timed = |about: Estimate| (about, [about.model, about.target].map(|work| (work + weighed) / speed));
        Ok(Self { samples, threads: threads.get(), estimate: estimate.map(timed).map_err(|e| e.to_string()) })
    }

    fn results(&self) -> Value {
        let known = self.estimate.as_ref().ok();
        json!({
            "samples": self.samples,
            "threads": self.threads,
            "memory_bytes": known.map(|(about, _)| about.bytes),
            "least_memory_bytes": known.map(|(about, _)| about.least_bytes),
            "multiply_adds": known.map(|(about, _)| about.target),
            "model_seconds": known.map(|(_, seconds)| seconds[0]),
            "target_seconds": known.map(|(_, seconds)| seconds[1]),
            "refused": self.estimate.as_ref().err(),
        })
    }

    /// Lines for the head of the table.
    fn lines(&self) -> Vec<[String; 2]> {
        let line = |name: &str, words: String| [name.to_string(), words];
        let on = format!("on {} samples with {} threads", count(self.samples as u64), self.threads);
        match &self.estimate {
            Err(why) => vec![line("training", format!("{on}, refused: {why}"))],
            Ok((about, [model, target])) => vec![
                line("training", format!("{on}, estimated from counted multiply-adds:")),
                line(
                    "  memory",
                    format!("{}, or {} with --memory", memory::words(about.bytes), memory::words(about.least_bytes)),
                ),
                line(
                    "  time",
                    format!("{} at a given price, {} to a target sparsity", duration(*model), duration(*target)),
                ),
            ],
        }
    }
}

/// Single-precision multiply-adds per second of one thread, measured on a product that is large enough to show it.
fn multiply_adds_per_second() -> f64 {
    const SIDE: usize = 384;
    const TIMES: usize = 8;
    let factor = Matrix::from_fn(SIDE, SIDE, |i, j| ((i * 7 + j * 3) % 11) as f32 - 5.0);
    let mut product: Matrix<f32> = Matrix::zeros(SIDE, SIDE);
    let mut fastest = f64::INFINITY;
    for _ in 0..TIMES {
        let start = Instant::now();
        gemm(product.as_mut_slice(), SIDE, false, 1.0, factor.view(), factor.view());
        fastest = fastest.min(start.elapsed().as_secs_f64());
    }
    (SIDE * SIDE * SIDE) as f64 / fastest.max(1e-9)
}

/// Seconds in words.
fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 90.0 => format!("{:.0} s", s.max(1.0)),
        s if s < 5400.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

/// The sizes of all axes but that of the batch.
fn sizes(shape: Shape) -> Vec<usize> {
    match shape.dims().sizes() {
        [1, rest @ ..] => rest.to_vec(),
        all => all.to_vec(),
    }
}

fn results(file: &OnnxFile, layers: Option<&[LayerSummary]>, training: Option<&Training>, seconds: f64) -> Value {
    let layer = |layer: &LayerSummary| {
        json!({
            "name": layer.name,
            "kind": layer.kind,
            "shape": sizes(layer.shape),
            "parameters": layer.parameters,
            "multiply_adds": layer.multiply_adds,
            "trainable": layer.trainable,
        })
    };
    let unsupported: Vec<Value> = file
        .unsupported
        .iter()
        .map(|node| json!({ "name": node.name, "operator": node.operator, "why": node.why }))
        .collect();
    json!({
        "parameters": layers.map(|all| all.iter().map(|l| l.parameters).sum::<usize>()),
        "trainable_parameters": layers.map(|all| all.iter().filter(|l| l.trainable).map(|l| l.parameters).sum::<usize>()),
        "repeated_weights": file.network.as_ref().map(|network| network.repeated_weights()),
        "nonzeros": file.network.as_ref().map(|network| network.nonzeros()),
        "multiply_adds": layers.map(|all| all.iter().map(|l| l.multiply_adds).sum::<u64>()),
        "input": file.network.as_ref().map(|network| sizes(network.input_shape())),
        "output": file.network.as_ref().map(|network| sizes(network.output_shape())),
        "layers": layers.map(|all| all.iter().map(layer).collect::<Vec<_>>()),
        "unsupported": unsupported,
        "opset": file.opset,
        "training": training.map(Training::results),
        "seconds": { "total": seconds },
        "version": env!("CARGO_PKG_VERSION"),
    })
}

fn table(file: &OnnxFile, layers: Option<&[LayerSummary]>, training: Option<&Training>) -> String {
    let mut head = Table::new();
    head.row(&["opset", &file.opset.to_string()]);
    if let (Some(network), Some(layers)) = (&file.network, layers) {
        let trainable: usize = layers.iter().filter(|l| l.trainable).map(|l| l.parameters).sum();
        let all: usize = layers.iter().map(|l| l.parameters).sum();
        head.row(&["input", &network.input_shape().to_string()]);
        head.row(&["output", &network.output_shape().to_string()]);
        head.row(&[
            "parameters",
            &format!("{}, of which {} in rows that training solves", count(all as u64), count(trainable as u64)),
        ]);
        if network.repeated_weights() > 0 {
            let words = "weights that the file uses in several places; each place has its own and is counted";
            head.row(&["  again", &format!("{} of them are {words}", count(network.repeated_weights() as u64))]);
        }
        head.row(&["multiply-adds", &count(layers.iter().map(|l| l.multiply_adds).sum())]);
        if let Some(training) = training {
            for [name, words] in training.lines() {
                head.row(&[&name, &words]);
            }
        }
        let mut body = Table::with_head(&["layer", "kind", "shape", "parameters", "multiply-adds", "trained"]);
        for layer in layers {
            let sizes: Vec<String> = sizes(layer.shape).iter().map(ToString::to_string).collect();
            body.row(&[
                &layer.name,
                &layer.kind,
                &sizes.join(" × "),
                &count(layer.parameters as u64),
                &count(layer.multiply_adds),
                if layer.trainable { "yes" } else { "" },
            ]);
        }
        return format!("{}\n{}", head.show(), body.show());
    }
    // A reason is a whole sentence: in a column of the table it would be cut off, so it gets a line of its own.
    let lines = file.unsupported.iter().map(|node| format!("  {} ({}): {}\n", node.name, node.operator, node.why));
    format!("{}\ncannot be read:\n{}", head.show(), lines.collect::<String>())
}
