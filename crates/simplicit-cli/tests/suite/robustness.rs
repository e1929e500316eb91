//! `attack` and `certify` as scripts see them, and the shipped recipe for robust models.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::Path;

use crate::program::{TRAIN_UNBOUNDED, data, run};
use serde_json::Value;

const TEST: &str = "--inputs @fashion_test_images.idx.gz --labels @fashion_test_labels.idx.gz";

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn list(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
}

#[test]
fn results_for_scripts_and_their_picture() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    run(d, &format!("{TRAIN_UNBOUNDED} --out m.safetensors")).expect(0);
    let attack = format!(
        "attack --model m.safetensors --network @fashion_fc.onnx {TEST} --samples 100 --epsilon 4/255,1/255 --queries 20"
    );
    run(d, &format!("{attack} --threads 1 --json a.json")).expect(0);
    run(d, &format!("{attack} --threads 2 --json b.json")).expect(0);
    run(d, &format!("certify --model m.safetensors {TEST} --samples 100 --epsilon 4/255,1/255 --json c.json"))
        .expect(0);
    let [mut a, mut b, c] = ["a.json", "b.json", "c.json"].map(|name| json(&d.join(name)));
    for value in [&a, &c] {
        assert_eq!(list(&value["epsilon"]), [4.0 / 255.0, 1.0 / 255.0]);
        for key in ["sparsity", "seconds", "version", "not_converged", "attacked_accuracy", "certified_accuracy"] {
            assert!(value.get(key).is_some(), "{key}");
        }
    }
    assert_eq!(a["clean_accuracy"], c["clean_accuracy"]);
    assert_eq!((&a["certified_accuracy"], &c["attacked_accuracy"]), (&Value::Null, &Value::Null));
    let (attacked, certified) = (list(&a["attacked_accuracy"]), list(&c["certified_accuracy"]));
    let clean = a["clean_accuracy"].as_f64().unwrap();
    assert!(attacked[0] <= attacked[1] && attacked[1] <= clean && attacked[0] < clean, "{attacked:?}");
    assert!(certified.iter().zip(&attacked).all(|(c, a)| c <= a), "{certified:?} above {attacked:?}");
    for value in [&mut a, &mut b] {
        value["seconds"] = Value::Null;
        value["threads"] = Value::Null;
    }
    assert_eq!(a, b);
    run(d, "report --model m.safetensors --attack a.json --certify c.json --out r.html").expect(0);
    let page = std::fs::read_to_string(d.join("r.html")).unwrap();
    for word in ["transferred attacks", "white-box attacks", "certified"] {
        assert!(page.contains(&format!("</i>{word}</li>")), "{word}");
    }
    // Results of another model are not drawn.
    run(d, &format!("{TRAIN_UNBOUNDED} --mu 1e-5 --out other.safetensors")).expect(0);
    let ran = run(d, "report --model other.safetensors --attack a.json --out r.html").expect(2);
    assert!(ran.one_line().contains("a.json: expected results of this model"), "{ran:?}");
}

/// The commands of docs/experiments/robustness.md on fewer images: a network certified and attacked as it is.
#[test]
fn a_network_is_certified_after_convert_in_both_norms() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    run(d, "convert @fashion_cnn.onnx --scale 1/255 --out net.safetensors").expect(0);
    for (norm, epsilon) in [("linf", "1/255,4/255"), ("l2", "0.1,0.4")] {
        let flags = format!("net.safetensors {TEST} --samples 40 --epsilon {epsilon} --norm {norm}");
        run(d, &format!("attack {flags} --queries 20 --json {norm}.a.json")).expect(0);
        run(d, &format!("certify {flags} --slopes 10 --json {norm}.c.json")).expect(0);
        let [a, c] = ["a", "c"].map(|name| json(&d.join(format!("{norm}.{name}.json"))));
        assert_eq!((&a["norm"], &c["norm"]), (&Value::from(norm), &Value::from(norm)));
        let (attacked, certified) = (list(&a["attacked_accuracy"]), list(&c["certified_accuracy"]));
        assert!(certified.iter().zip(&attacked).all(|(c, a)| c <= a), "{certified:?} above {attacked:?}");
        assert!(certified[0] > 0.5, "{norm}: {certified:?}");
        let bounds: Vec<&str> = c["bounds"].as_array().unwrap().iter().map(|b| b["bound"].as_str().unwrap()).collect();
        assert_eq!(bounds, ["global", "interval", "linear", "slopes"]);
        // What is proved for every order of sums is proved for this program's, and that for exact arithmetic.
        let linear = list(&c["bounds"][2]["accuracy"]);
        let proved = ["any-order", "exact"].map(|arithmetic| {
            run(d, &format!("certify {flags} --arithmetic {arithmetic} --json o.json")).expect(0);
            let other = json(&d.join("o.json"));
            assert_eq!((&other["arithmetic"], &c["arithmetic"]), (&Value::from(arithmetic), &Value::from("single")));
            list(&other["certified_accuracy"])
        });
        let ordered = |less: &[f64], more: &[f64]| less.iter().zip(more).all(|(l, m)| l <= m);
        assert!(ordered(&proved[0], &linear) && ordered(&linear, &proved[1]), "{proved:?} around {linear:?}");
    }
    let report = "report --model net.safetensors --out r.html --attack linf.a.json --certify linf.c.json";
    run(d, report).expect(0);
    assert!(!std::fs::read_to_string(d.join("r.html")).unwrap().contains("Euclidean length of the change"));
    run(d, &format!("{report} --attack l2.a.json --certify l2.c.json")).expect(0);
    let page = std::fs::read_to_string(d.join("r.html")).unwrap();
    for axis in ["largest change ε", "Euclidean length of the change ε"] {
        assert!(page.contains(axis), "{axis}");
    }
    let ran = run(d, &format!("{report} --attack linf.a.json")).expect(2);
    assert!(ran.one_line().contains("--attack: expected one file for each norm, got two with linf"), "{ran:?}");
    // Nothing is accepted and ignored.
    let ran = run(d, &format!("certify net.safetensors {TEST} --bound interval --slopes 3")).expect(2);
    assert!(ran.one_line().contains("slopes: expected steps with the bound slopes"), "{ran:?}");
}

#[test]
fn the_recipe_for_robust_models_is_certified_beyond_half() {
    let directory = tempfile::tempdir().unwrap();
    let (model, out) = (directory.path().join("m.safetensors"), directory.path().join("c.json"));
    let root = data("..");
    // Shortened: fewer images, one repetition, no bounds of rows.
    let short = "--samples 500 --robust 1 --bounds off";
    run(&root, &format!("train --recipe recipes/robust-fashion.toml {short} --out {}", model.display())).expect(0);
    run(
        &root,
        &format!("certify --model {} {TEST} --samples 400 --epsilon 1/255 --json {}", model.display(), out.display()),
    )
    .expect(0);
    let result = json(&out);
    assert!((result["sparsity"].as_f64().unwrap() - 0.8).abs() <= 0.002);
    assert!(list(&result["certified_accuracy"])[0] >= 0.5, "{result}");
}
