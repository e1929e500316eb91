//! What users get wrong is said before any work, and nothing of theirs is lost.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::Path;

use crate::program::{TRAIN_UNBOUNDED, names, npy, run};
use serde_json::Value;
use simplicit::graph::{Dims, Structure};
use simplicit::layout::{Activation, Layer, Layout, Operand, Operator, Source};
use simplicit::linalg::{Csr, Matrix};
use simplicit::model::{DenseLayer, ImplicitModel, ModelParts};
use simplicit::onnx::{OnnxSettings, export_onnx};
use simplicit::random::Random;

/// A network of 6 inputs and one hidden layer of 5.
fn network(path: &Path, outputs: usize, seed: u64, activation: Activation) {
    let mut random = Random::new(seed);
    let mut weights = |rows, cols| Matrix::from_fn(rows, cols, |_, _| random.normal() as f32);
    let hidden = DenseLayer::new("hidden", weights(5, 6), activation);
    let output = DenseLayer::new("output", weights(outputs, 5), Activation::Identity);
    let model = ImplicitModel::from_layers(&[hidden], &output).unwrap();
    export_onnx(&model, path, OnnxSettings::default()).unwrap();
}

fn inputs(path: &Path, samples: usize) {
    npy(path, &[samples, 6], |k| (k as f32 * 0.37).sin());
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

#[test]
fn no_command_overwrites_what_it_reads() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    network(&d.join("net.onnx"), 3, 1, Activation::Relu);
    inputs(&d.join("u.npy"), 50);
    npy(&d.join("y.npy"), &[50], |k| (k % 3) as f32);
    run(d, "convert net.onnx --out m.st").expect(0);
    std::fs::create_dir(d.join("folder")).unwrap();
    let kept = ["net.onnx", "u.npy", "y.npy", "m.st"];
    let before = kept.map(|name| std::fs::read(d.join(name)).unwrap());
    let all = names(d);
    for line in [
        "train net.onnx --inputs u.npy --out net.onnx",
        "train net.onnx --inputs u.npy --out u.npy",
        "train net.onnx --inputs u.npy --out folder/../u.npy",
        "train net.onnx --inputs u.npy --out x.st --json x.st",
        "train net.onnx --inputs u.npy --out x.st --json u.npy",
        "train net.onnx --inputs u.npy --out x.st --report x.recipe.toml",
        "train net.onnx --inputs u.npy --test-inputs u.npy --test-labels y.npy --out x.st --report y.npy",
        "predict m.st --inputs u.npy --out m.st",
        "predict net.onnx --inputs u.npy --out net.onnx",
        "predict m.st --inputs u.npy --out u.npy",
        "export m.st --like net.onnx --out net.onnx",
        "export m.st --out m.st",
        "convert net.onnx --out net.onnx",
        "convert net.onnx --out x.st --json net.onnx",
        "collect net.onnx --inputs u.npy --out u.npy",
        "evaluate m.st net.onnx --inputs u.npy --json net.onnx",
        "evaluate m.st net.onnx --inputs u.npy --labels y.npy --report y.npy",
        "evaluate m.st net.onnx --inputs u.npy --report r --json r",
        "attack m.st --inputs u.npy --labels y.npy --json y.npy",
        "certify m.st --inputs u.npy --labels y.npy --json m.st",
        "reduce m.st --out m.st",
        "reduce m.st --out x.st --drop-inputs x.st",
        "report m.st net.onnx --out net.onnx",
        "inspect m.st --json m.st",
        "bench inference --model m.st --network net.onnx --inputs u.npy --json m.st",
        "lab frontier net.onnx --inputs u.npy --json u.npy",
    ] {
        let ran = run(d, line).expect(2);
        assert!(ran.one_line().contains("expected another file than"), "{line}: {ran:?}");
        assert_eq!(names(d), all, "{line}");
    }
    assert!(kept.map(|name| std::fs::read(d.join(name)).unwrap()) == before);
}

#[test]
fn a_recipe_is_overwritten_only_if_it_is_one_of_ours() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    network(&d.join("net.onnx"), 3, 1, Activation::Relu);
    inputs(&d.join("u.npy"), 50);
    let mine = "# mine\nseed = 3\n";
    std::fs::write(d.join("m.recipe.toml"), mine).unwrap();
    for line in [
        "train net.onnx --inputs u.npy --bounds off --out m.st",
        "train net.onnx --recipe m.recipe.toml --inputs u.npy --bounds off --out m.st",
    ] {
        let ran = run(d, line).expect(2);
        assert!(ran.one_line().contains("simplicit did not write"), "{ran:?}");
        assert!(!d.join("m.st").exists());
    }
    assert_eq!(std::fs::read_to_string(d.join("m.recipe.toml")).unwrap(), mine);
    // A run's own recipe is written again where it lies.
    run(d, "train net.onnx --inputs u.npy --bounds off --out own.st").expect(0);
    run(d, "train --recipe ./own.recipe.toml").expect(0);
    assert!(
        run(d, "train --recipe own.recipe.toml --json own.recipe.toml").expect(2).one_line().contains("another file")
    );
}

#[test]
fn labels_that_do_not_fit_are_refused_before_the_training() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    npy(&d.join("short.npy"), &[40], |k| (k % 10) as f32);
    npy(&d.join("high.npy"), &[10_000], |k| (k % 11) as f32);
    npy(&d.join("narrow.npy"), &[50, 700], |_| 0.5);
    let train = format!("{TRAIN_UNBOUNDED} --progress json --out m.st");
    for (flags, said) in [
        (
            "--test-inputs @fashion_test_images.idx.gz --test-labels short.npy",
            "expected 10000, one for each input, got 40",
        ),
        ("--test-inputs @fashion_test_images.idx.gz --test-labels high.npy", "expected a class below 10"),
        ("--test-inputs narrow.npy", "expected 784 values per sample, got 700"),
    ] {
        let ran = run(d, &format!("{train} {flags}")).expect(2);
        let last = ran.stderr.lines().last().unwrap();
        assert!(last.contains(said), "{ran:?}");
        assert!(!ran.stderr.contains("\"samples\""), "the work began: {ran:?}");
    }
    let evaluate = "evaluate @fashion_fc.onnx --inputs @fashion_test_images.idx.gz --labels high.npy --progress json";
    let ran = run(d, evaluate).expect(2);
    assert!(ran.stderr.contains("a class below 10") && !ran.stderr.contains("\"samples\""), "{ran:?}");
}

#[test]
fn another_network_than_the_models_is_said_or_refused() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    network(&d.join("net.onnx"), 3, 1, Activation::Relu);
    network(&d.join("again.onnx"), 3, 2, Activation::Relu);
    network(&d.join("other.onnx"), 3, 1, Activation::Tanh);
    inputs(&d.join("u.npy"), 50);
    npy(&d.join("y.npy"), &[50], |k| (k % 3) as f32);
    run(d, "convert net.onnx --out m.st").expect(0);
    assert_eq!(run(d, "evaluate m.st net.onnx --inputs u.npy").expect(0).stderr, "");
    for line in [
        "evaluate m.st again.onnx --inputs u.npy",
        "attack m.st again.onnx --inputs u.npy --labels y.npy --method fgsm",
        "report m.st again.onnx --out r.html",
    ] {
        let ran = run(d, line).expect(0);
        assert!(ran.one_line().starts_with("note: again.onnx is not the file"), "{line}: {ran:?}");
    }
    // Models of one network may be compared with each other.
    run(d, "train net.onnx --inputs u.npy --bounds off --out t.st").expect(0);
    assert_eq!(run(d, "evaluate t.st m.st --inputs u.npy").expect(0).stderr, "");

    assert_eq!(run(d, "export m.st --like net.onnx --out e.onnx").expect(0).stderr, "");
    let ran = run(d, "export m.st --like other.onnx --out refused.onnx").expect(2);
    assert!(ran.one_line().contains("expected the network that the model was made from"), "{ran:?}");
    assert!(!d.join("refused.onnx").exists());
    // The same graph in another file takes all weights of the model.
    let ran = run(d, "export m.st --like again.onnx --out same.onnx").expect(0);
    assert!(ran.one_line().starts_with("note: again.onnx"), "{ran:?}");
    let ran = run(d, "evaluate m.st same.onnx --inputs u.npy --json -").expect(0);
    assert!(json(&ran.stdout)["equilibrium_error"].as_f64().unwrap() < 1e-6, "{ran:?}");
}

#[test]
fn axes_in_another_order_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    let value = |k: usize| (k as f32 * 0.37).sin();
    npy(&d.join("last.npy"), &[8, 32, 32, 3], value);
    npy(&d.join("first.npy"), &[8, 3, 32, 32], value);
    npy(&d.join("flat.npy"), &[8, 3072], value);
    run(d, "convert @resnet20_cifar100.onnx --out m.st").expect(0);
    let said = "expected 3 × 32 × 32, got 32 × 32 × 3: transpose the samples";
    for line in [
        "train @resnet20_cifar100.onnx --inputs last.npy --out t.st",
        "train @resnet20_cifar100.onnx --inputs first.npy --test-inputs last.npy --out t.st",
        "predict @resnet20_cifar100.onnx --inputs last.npy --out y.npy",
        "predict m.st --inputs last.npy --out y.npy",
        "evaluate m.st @resnet20_cifar100.onnx --inputs last.npy",
        "collect @resnet20_cifar100.onnx --inputs last.npy --out s.safetensors",
    ] {
        let ran = run(d, line).expect(2);
        assert!(ran.one_line().contains(said), "{line}: {ran:?}");
    }
    for name in ["first.npy", "flat.npy"] {
        run(d, &format!("predict m.st --inputs {name} --out y.npy")).expect(0);
        run(d, &format!("predict @resnet20_cifar100.onnx --inputs {name} --out y.npy")).expect(0);
    }
    // One channel has no order.
    npy(&d.join("grey.npy"), &[4, 28, 28, 1], value);
    run(d, "predict @fashion_cnn.onnx --inputs grey.npy --out y.npy").expect(0);
}

#[test]
fn outputs_that_are_no_numbers_are_said_so_and_agree_with_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    network(&d.join("net.onnx"), 3, 1, Activation::Relu);
    run(d, "convert net.onnx --out m.st").expect(0);
    // Two of five samples are beyond what single precision holds.
    npy(&d.join("u.npy"), &[5, 6], |k| if k / 6 % 2 == 1 { 3e38 * (k as f32).sin() } else { (k as f32).sin() });
    for of in ["m.st", "net.onnx"] {
        let ran = run(d, &format!("predict {of} --inputs u.npy --out y.npy --json r.json")).expect(1);
        let line = ran.one_line();
        assert!(line.contains("outputs of 2 sample(s) are no finite numbers") && line.contains("row 1"), "{ran:?}");
        assert!(!line.contains("equilibrium"), "{ran:?}");
        assert_eq!(json(&std::fs::read_to_string(d.join("r.json")).unwrap())["not_finite"], 2);
    }
}

#[test]
fn a_token_beyond_the_table_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    let operand = |source, sizes: &[usize]| Operand { source, dims: Dims::new(sizes).unwrap() };
    let operands = vec![operand(Source::Layer(1), &[5, 2]), operand(Source::Input, &[1, 3])];
    let words = Operator::Structure { structure: Structure::Lookup, operands };
    let table = Operator::Constant { values: std::sync::Arc::new(vec![0.5; 10]), parameter: true };
    let parts = ModelParts {
        a: Csr::empty(16, 16),
        b: Csr::empty(16, 3),
        c: Csr::from_dense(&Matrix::from_fn(2, 16, |i, j| if j < 6 { (i + j) as f32 } else { 0.0 })),
        d: Csr::empty(2, 3),
        output_bias: vec![0.0; 2],
        layout: Layout::new(vec![Layer::operator("words", 6, words), Layer::operator("table", 10, table)]),
        ..ModelParts::default()
    };
    ImplicitModel::new(parts).unwrap().save(d.join("m.st")).unwrap();
    npy(&d.join("good.npy"), &[4, 3], |k| (k % 5) as f32);
    npy(&d.join("bad.npy"), &[4, 3], |k| if k == 7 { 5.0 } else { 1.0 });
    run(d, "predict m.st --inputs good.npy --out y.npy").expect(0);
    let ran = run(d, "predict m.st --inputs bad.npy --out y.npy").expect(2);
    let said = "inputs, sample 2, value 1: expected a whole number below 5, the rows of the table \"words\", got 5";
    assert!(ran.one_line().contains(said), "{ran:?}");
}

#[test]
fn train_says_what_its_error_was_measured_on() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    let few = run(d, &format!("{TRAIN_UNBOUNDED} --out m.st")).expect(0).stdout;
    assert!(few.contains("outputs (RMS), on the training inputs\n"), "{few}");
    assert!(few.contains("advice          400 samples for rows of up to 784 weights"), "{few}");
    let many = run(d, &format!("{} --out m.st", TRAIN_UNBOUNDED.replace("400", "1000"))).expect(0).stdout;
    assert!(!many.contains("advice"), "{many}");
    let test = "--inputs @fashion_test_images.idx.gz --labels @fashion_test_labels.idx.gz";
    let evaluated = run(d, &format!("evaluate m.st @fashion_fc.onnx {test}")).expect(0).stdout;
    assert!(evaluated.contains("outputs (RMS)\n"), "{evaluated}");
}

#[test]
fn a_single_output_has_no_classes() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    network(&d.join("net.onnx"), 1, 1, Activation::Relu);
    inputs(&d.join("u.npy"), 50);
    npy(&d.join("y.npy"), &[50], |k| (k % 3) as f32);
    run(d, "convert net.onnx --out m.st").expect(0);
    let ran = run(d, "evaluate m.st net.onnx --inputs u.npy --labels y.npy --json r.json").expect(0);
    assert!(!ran.stdout.contains("agreement") && !ran.stdout.contains("accuracy"), "{ran:?}");
    assert!(ran.stdout.contains("mean squared error") && ran.stdout.contains("output error"), "{ran:?}");
    let results = json(&std::fs::read_to_string(d.join("r.json")).unwrap());
    assert_eq!((&results["agreement"], &results["accuracy"]), (&Value::Null, &Value::Null));
}

#[test]
fn the_rank_of_a_is_left_out_where_weights_are_shared() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    run(d, "convert @fashion_cnn.onnx --out c.st").expect(0);
    run(d, "convert @fashion_fc.onnx --out f.st").expect(0);
    assert!(!run(d, "reduce c.st --out r.st").expect(0).stdout.contains("rank of A"));
    assert!(run(d, "reduce f.st --out r2.st").expect(0).stdout.contains("rank of A"));
}

#[test]
fn a_small_network_misses_its_target_by_one_parameter_at_most() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    network(&d.join("net.onnx"), 3, 1, Activation::Relu);
    inputs(&d.join("u.npy"), 500);
    // 45 parameters: between two models there are 2.2 points.
    let ran = run(d, "train net.onnx --inputs u.npy --bounds off --target-sparsity 0.51 --out m.st").expect(0);
    assert_eq!(ran.stderr, "");
}
