//! `--memory`: a budget that holds, and a model that does not depend on it.
#![allow(missing_docs, clippy::unwrap_used)] // helpers of tests are tests

use crate::program::{names, run};
use simplicit::arrays::write_npy;
use simplicit::layout::Activation;
use simplicit::linalg::Matrix;
use simplicit::model::ImplicitModel;
use simplicit::network::{Network, Shape, Window};
use simplicit::random::Random;

const SAMPLES: usize = 1200;
/// Samples × maps × positions × bytes of one layer.
const LAYER: u64 = SAMPLES as u64 * 16 * 28 * 28 * 4;

/// Four convolutions of 16 maps: two layers of the baseline and two of the model are alive at once.
fn network() -> Network {
    let mut random = Random::new(2);
    let mut weights = |rows, cols| Matrix::from_fn(rows, cols, |_, _| 0.25 * random.normal() as f32);
    let window = Window::square(3, 1, 1);
    let mut network = Network::builder(Shape::map(1, 28, 28))
        .and_then(|b| b.convolution(weights(16, 9), window, Some(vec![0.1; 16])))
        .and_then(|b| b.activation(Activation::Relu));
    for _ in 0..2 {
        network = network
            .and_then(|b| b.convolution(weights(16, 144), window, Some(vec![0.1; 16])))
            .and_then(|b| b.activation(Activation::Relu));
    }
    let (last, outputs) = (weights(16, 144), weights(5, 16));
    network
        .and_then(|b| b.convolution(last, Window::square(3, 2, 1), None))
        .and_then(|b| b.activation(Activation::Relu))
        .and_then(|b| b.global_average())
        .and_then(|b| b.linear(outputs, None))
        .and_then(|b| b.build())
        .unwrap()
}

#[test]
fn a_small_budget_holds_and_gives_the_same_model() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    ImplicitModel::from_network(&network()).unwrap().save(at.join("net.safetensors")).unwrap();
    run(at, "export --model net.safetensors --out net.onnx").expect(0);
    let mut random = Random::new(3);
    let inputs = Matrix::from_fn(SAMPLES, 28 * 28, |_, _| random.normal() as f32);
    write_npy(at.join("u.npy"), &inputs).unwrap();
    let train = |name: &str, memory: &str| {
        let line = format!(
            "train --network net.onnx --inputs u.npy --positions 8 --mu 1e-4 --bounds off --output-aware off --device cpu --threads 2 \
             --memory {memory} --out {name}.safetensors --json {name}.json --checkpoint {name}.kept --progress json"
        );
        let ran = run(at, &line).expect(0);
        let json: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(at.join(format!("{name}.json"))).unwrap()).unwrap();
        let said = ran.stderr.lines().find(|line| line.contains("\"memory\"")).unwrap();
        let said: serde_json::Value = serde_json::from_str(said).unwrap();
        (json["peak_memory_bytes"].as_u64().unwrap(), said)
    };
    let (much, said) = train("much", "8G");
    let (needed, least) = (said["needed"].as_u64().unwrap(), said["least"].as_u64().unwrap());
    assert!(needed - least >= 4 * LAYER && much > 4 * LAYER, "{said} {much}");
    // What is said before holds.
    assert!(much <= needed, "{much} of {needed}");
    // Less than a group of rows takes is refused, in one line that says what would do, before any work.
    let line = "train --network net.onnx --inputs u.npy --positions 8 --mu 1e-4 --bounds off --device cpu --threads 2 \
                --memory 1M --progress json --out no.safetensors";
    let refused = run(at, line).expect(2);
    assert!(!refused.stderr.contains("weights"), "{refused:?}");
    let (_, enough) = refused.stderr.split_once("memory: expected at least ").unwrap();
    let enough = enough.split_once(" MB").unwrap().0.to_string() + "M";
    let (little, _) = train("little", &enough);
    let budget = simplicit::memory::parse(&enough).unwrap();
    assert!(little <= budget, "{little} bytes held of {budget} allowed");
    assert!(much - little > 2 * LAYER, "{little} beside {much}");
    // What lies between: some layers in memory, which is given back when the next ones come.
    let (some, _) = train("some", &(budget + 2 * LAYER).to_string());
    assert!(some <= budget + 2 * LAYER, "{some} bytes held of {budget} and two layers");
    let bytes = |name: &str| std::fs::read(at.join(name)).unwrap();
    for name in ["little.safetensors", "some.safetensors"] {
        assert!(bytes("much.safetensors") == bytes(name), "the model depends on the budget: {name}");
    }
    assert!(names(&at.join("little.kept")).iter().all(|name| !name.ends_with(".part")), "a file of layers was left");
    let refused = run(at, &line.replace("1M --progress json", "4T")).expect(2);
    assert!(refused.one_line().contains("K, M or G"), "{refused:?}");
}

/// Rows over many features, more weights than are solved at once: a convolution of 41 maps of 7 × 7 and a layer that reads all
/// of them.
const MAPS: usize = 41;
const ROWS: usize = 4096;

#[test]
fn a_wide_group_is_solved_in_parts_within_its_budget() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let mut random = Random::new(5);
    let mut weights = |rows: usize, cols: usize| {
        let size = (2.0 / cols as f64).sqrt();
        Matrix::from_fn(rows, cols, |_, _| (size * random.normal()) as f32)
    };
    let network = Network::builder(Shape::map(3, 7, 7))
        .and_then(|b| b.convolution(weights(MAPS, 27), Window::square(3, 1, 1), Some(vec![0.1; MAPS])))
        .and_then(|b| b.activation(Activation::Relu))
        .and_then(|b| b.flatten())
        .and_then(|b| b.linear(weights(ROWS, 49 * MAPS), Some(vec![0.1; ROWS])))
        .and_then(|b| b.activation(Activation::Relu))
        .and_then(|b| b.linear(weights(5, ROWS), None))
        .and_then(|b| b.build())
        .unwrap();
    ImplicitModel::from_network(&network).unwrap().save(at.join("net.safetensors")).unwrap();
    run(at, "export --model net.safetensors --out net.onnx").expect(0);
    write_npy(at.join("u.npy"), &weights(24, 3 * 49)).unwrap();
    let train = |name: &str, memory: &str, code: i32| {
        let line = format!(
            "train --network net.onnx --inputs u.npy --mu 1e-4 --bounds off --device cpu --threads 2 --memory {memory} \
             --out {name}.safetensors --json {name}.json --progress json"
        );
        run(at, &line).expect(code).stderr
    };
    let peak = |name: &str| {
        let text = std::fs::read_to_string(at.join(format!("{name}.json"))).unwrap();
        serde_json::from_str::<serde_json::Value>(&text).unwrap()["peak_memory_bytes"].as_u64().unwrap()
    };
    let refused = train("no", "1M", 2);
    let (_, enough) = refused.split_once("memory: expected at least ").unwrap();
    let (number, unit) = enough.split_once('B').unwrap().0.trim().split_once(' ').unwrap();
    let enough = format!("{number}{unit}");
    train("much", "8G", 0);
    train("little", &enough, 0);
    let budget = simplicit::memory::parse(&enough).unwrap();
    assert!(peak("little") <= budget, "{} bytes held of {budget} allowed", peak("little"));
    // All rows at once would take a hundred bytes a weight beside the network: neither run does, whatever it may.
    let weights = (ROWS * 49 * MAPS) as u64;
    assert!(peak("much") < 90 * weights, "{} for {weights} weights", peak("much"));
    let bytes = |name: &str| std::fs::read(at.join(name)).unwrap();
    assert!(bytes("much.safetensors") == bytes("little.safetensors"), "the model depends on the budget");
}
