//! `simplicit inspect NET.onnx`: what a network consists of, and what of it cannot be read.

use std::path::Path;
use std::time::Instant;

use serde_json::{Value, json};
use simplicit::files::write_bytes_atomically;
use simplicit::network::{LayerSummary, Shape};
use simplicit::onnx::{OnnxFile, OnnxSelection};

use crate::args::JsonArgs;
use crate::exit::{Outcome, say};
use crate::table::{Table, count};

pub(crate) fn run(path: &Path, selection: &OnnxSelection, json: &JsonArgs) -> anyhow::Result<Outcome> {
    let start = Instant::now();
    let file = OnnxFile::read(path, selection)?;
    let layers = file.network.as_ref().map(|network| network.summary());
    let text = format!("{:#}\n", results(&file, layers.as_deref(), start.elapsed().as_secs_f64()));
    if let Some(path) = json.file() {
        write_bytes_atomically(path, text.as_bytes())?;
    }
    say(&if json.to_stdout() { text } else { table(&file, layers.as_deref()) })?;
    let refused = file.unsupported.len();
    let notices = if refused > 0 { vec![format!("{refused} node(s) cannot be read")] } else { vec![] };
    Ok(Outcome::with_notices(&notices))
}

/// The sizes of all axes but that of the batch.
fn sizes(shape: Shape) -> Vec<usize> {
    match shape.dims().sizes() {
        [1, rest @ ..] => rest.to_vec(),
        all => all.to_vec(),
    }
}

fn results(file: &OnnxFile, layers: Option<&[LayerSummary]>, seconds: f64) -> Value {
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
        "nonzeros": file.network.as_ref().map(|network| network.nonzeros()),
        "multiply_adds": layers.map(|all| all.iter().map(|l| l.multiply_adds).sum::<u64>()),
        "input": file.network.as_ref().map(|network| sizes(network.input_shape())),
        "output": file.network.as_ref().map(|network| sizes(network.output_shape())),
        "layers": layers.map(|all| all.iter().map(layer).collect::<Vec<_>>()),
        "unsupported": unsupported,
        "opset": file.opset,
        "seconds": { "total": seconds },
        "version": env!("CARGO_PKG_VERSION"),
    })
}

fn table(file: &OnnxFile, layers: Option<&[LayerSummary]>) -> String {
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
        head.row(&["multiply-adds", &count(layers.iter().map(|l| l.multiply_adds).sum())]);
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
    let mut body = Table::with_head(&["cannot be read", "operator", "why, and what to do"]);
    for node in &file.unsupported {
        body.row(&[&node.name, &node.operator, &node.why]);
    }
    format!("{}\n{}", head.show(), body.show())
}
