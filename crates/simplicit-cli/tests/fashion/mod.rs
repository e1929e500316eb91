//! A real run on the embedded FashionMNIST images, as a report.

#![allow(dead_code, missing_docs, unreachable_pub, clippy::unwrap_used)]

use std::path::PathBuf;
use std::time::Instant;

use simplicit::arrays::{Array, Inputs, Labels, Selection};
use simplicit::equilibrium::{Equilibrium, EquilibriumSettings};
use simplicit::evaluate::{accuracy, agreement, class_changes, equilibrium_error, layer_errors};
use simplicit::linalg::Matrix;
use simplicit::model::ImplicitModel;
use simplicit::network::Network;
use simplicit::parallel::{Cancel, Threads};
use simplicit::states::{Collected, InputSource};
use simplicit::train::{Forget, Run, TrainInput, TrainSettings, importance, train};
use simplicit_cli::report::{Input, render};

const CLASSES: [&str; 10] =
    ["T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "trainer", "bag", "ankle boot"];

fn data(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../data")).join(name)
}

fn images(name: &str, samples: usize) -> Matrix<f32> {
    let inputs = Inputs::new(Array::open(data(name)).unwrap(), None, &Selection::all()).unwrap();
    inputs.rows(0..samples.min(inputs.samples())).unwrap()
}

/// Trains `data/fashion_fc.onnx` and reports on it.
pub fn fashion_report(training: usize, test: usize, settings: &TrainSettings) -> String {
    let (threads, cancel) = (Threads::new(2), Cancel::new());
    let start = Instant::now();
    let network = Network::from_onnx(data("fashion_fc.onnx")).unwrap();
    let baseline = ImplicitModel::from_network(&network).unwrap();
    let u = images("fashion_train_images.idx.gz", training);
    let weights = importance(&network, &u, 4, 0, threads, &cancel).unwrap();
    let source = Collected::new(&network, &u).unwrap();
    let input = TrainInput {
        source: &source,
        baseline: Some(&baseline),
        importance: Some(&weights),
        preprocessing: Default::default(),
    };
    let collected = start.elapsed().as_secs_f64();
    let mut run = Run { threads, cancel: &cancel, keep: &Forget, progress: &mut |_| {} };
    let trained = train(&input, settings, &mut run).unwrap();
    let fitted = start.elapsed().as_secs_f64();
    let model = &trained.model;

    let u = images("fashion_test_images.idx.gz", test);
    let labels = Labels::read(data("fashion_test_labels.idx.gz"), &Selection::all()).unwrap();
    let labels = &labels.as_slice()[..u.rows()];
    let timed = |model: &ImplicitModel| {
        let equilibrium = Equilibrium::new(model, EquilibriumSettings { threads, ..Default::default() }).unwrap();
        let start = Instant::now();
        let outputs = equilibrium.outputs(&u).unwrap();
        (outputs, start.elapsed().as_secs_f64() * 1e6 / u.rows() as f64)
    };
    let ((before, baseline_milliseconds), (after, milliseconds)) = (timed(&baseline), timed(model));
    let classes = class_changes(&after.y, &before.y, labels).unwrap();
    let errors = layer_errors(model, &baseline, &u, threads, &cancel).unwrap();
    let total = start.elapsed().as_secs_f64();
    render(&Input {
        baseline: Some(&baseline),
        baseline_bytes: Some(std::fs::metadata(data("fashion_fc.onnx")).unwrap().len()),
        test_samples: Some(u.rows()),
        accuracy: Some(accuracy(&after.y, labels).unwrap()),
        baseline_accuracy: Some(accuracy(&before.y, labels).unwrap()),
        agreement: Some(agreement(&after.y, &before.y).unwrap()),
        equilibrium_error: Some(equilibrium_error(&after.y, &before.y).unwrap()),
        milliseconds: Some(milliseconds),
        baseline_milliseconds: Some(baseline_milliseconds),
        threads: Some(threads.get()),
        rows: &trained.report.rows,
        classes: &classes,
        class_names: &CLASSES.map(String::from),
        layer_errors: &errors,
        diagnostics: &after.diagnostics,
        seconds: Some(total),
        phases: &[
            ("states and importance".into(), collected),
            ("training".into(), fitted - collected),
            ("evaluation".into(), total - fitted),
        ],
        settings: &[
            ("network".into(), "fashion_fc.onnx".into()),
            ("training samples".into(), training.to_string()),
            ("objective".into(), format!("{:?}", settings.objective)),
            ("connectivity".into(), format!("{:?}", settings.allowed.connectivity)),
            ("strength".into(), format!("{:.3e}", trained.report.strength)),
            ("kappa".into(), settings.allowed.kappa.map_or("none".into(), |k| k.to_string())),
            ("version".into(), env!("CARGO_PKG_VERSION").into()),
        ],
        ..Input::new("fashion_fc, made sparse", model)
    })
}
