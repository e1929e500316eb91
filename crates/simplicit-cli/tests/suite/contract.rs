//! What scripts rely on: JSON keys, exit codes, recipes, the same bytes from the same command.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::Path;

use crate::program::{TRAIN, TRAIN_UNBOUNDED, run};
use serde_json::Value;

const KEYS: &str = "sparsity nonzeros baseline_nonzeros multiply_adds baseline_multiply_adds model_bytes accuracy \
    baseline_accuracy rows rows_at_limit max_relative_gap rows_proven median_bound_distance max_bound_distance \
    refit_residual norm_a_inf lambda_pf_upper equilibrium_error not_converged seconds seed version";

fn json(directory: &Path, name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(directory.join(name)).unwrap()).unwrap()
}

fn require_keys(value: &Value) {
    for key in KEYS.split_whitespace() {
        assert!(value.get(key).is_some(), "no key {key} in {value}");
    }
    assert!(value["seconds"]["total"].as_f64().unwrap() > 0.0);
}

#[test]
fn json_has_every_key_and_null_where_it_does_not_apply() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    run(d, &format!("{TRAIN_UNBOUNDED} --out m.safetensors --json r.json")).expect(0);
    let trained = json(d, "r.json");
    require_keys(&trained);
    assert_eq!(trained["baseline_nonzeros"], 52_896);
    assert_eq!(trained["rows"], 122);
    assert_eq!(trained["accuracy"], Value::Null);
    // The file is what is counted.
    let size = std::fs::metadata(d.join("m.safetensors")).unwrap().len();
    assert_eq!(trained["model_bytes"], size);
    let nonzeros = trained["nonzeros"].as_f64().unwrap();
    assert_eq!(trained["sparsity"].as_f64().unwrap(), 1.0 - nonzeros / 52_896.0);

    let ran = run(d, "inspect m.safetensors --json -").expect(0);
    let inspected: Value = serde_json::from_str(&ran.stdout).unwrap();
    require_keys(&inspected);
    for key in ["nonzeros", "sparsity", "model_bytes", "multiply_adds", "norm_a_inf", "seed"] {
        assert_eq!(inspected[key], trained[key], "{key}");
    }
    assert_eq!(inspected["rows"], Value::Null);

    let test = "--inputs @fashion_test_images.idx.gz --labels @fashion_test_labels.idx.gz";
    run(d, &format!("evaluate --model m.safetensors --network @fashion_fc.onnx {test} --json e.json")).expect(0);
    let evaluated = json(d, "e.json");
    require_keys(&evaluated);
    assert_eq!(evaluated["baseline_accuracy"], 0.8798);
    assert_eq!(evaluated["nonzeros"], trained["nonzeros"]);
    assert!(evaluated["equilibrium_error"].as_f64().unwrap() > 0.0);
    // No bound unless it is asked for, and the same outputs with it.
    assert_eq!(evaluated["certified_error"], Value::Null);
    run(d, &format!("evaluate --model m.safetensors {test} --certified --json c.json")).expect(0);
    let certified = json(d, "c.json");
    assert_eq!(certified["accuracy"], evaluated["accuracy"]);
    let bound = certified["certified_error"].as_f64().unwrap();
    assert!(bound > 0.0, "{bound}");
    run(d, &format!("evaluate --network @fashion_fc.onnx {test} --certified")).expect(2);
    let alone = run(d, &format!("evaluate --network @fashion_fc.onnx {test} --json -")).expect(0);
    let alone: Value = serde_json::from_str(&alone.stdout).unwrap();
    require_keys(&alone);
    assert_eq!((&alone["accuracy"], &alone["baseline_accuracy"]), (&Value::Null, &Value::from(0.8798)));
}

#[test]
fn same_seed_same_bytes_for_any_number_of_threads_and_from_the_recipe() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    let train = |flags: &str| run(d, &format!("{TRAIN_UNBOUNDED} {flags}")).expect(0);
    train("--seed 3 --threads 1 --out one.safetensors");
    train("--seed 3 --threads 2 --out two.safetensors");
    train("--seed 4 --out other.safetensors");
    let read = |name: &str| std::fs::read(d.join(name)).unwrap();
    assert!(read("one.safetensors") == read("two.safetensors"));
    assert!(read("one.safetensors") != read("other.safetensors"));
    run(d, "train --recipe one.recipe.toml --out again.safetensors").expect(0);
    assert!(read("again.safetensors") == read("one.safetensors"));
    // Flags win over the recipe, and the recipe of that run says so.
    run(d, "train --recipe one.recipe.toml --seed 4 --out won.safetensors").expect(0);
    assert!(read("won.safetensors") == read("other.safetensors"));
    assert!(String::from_utf8(read("won.recipe.toml")).unwrap().contains("seed = 4"));
}

#[test]
fn provenance_has_settings_and_hashes_but_no_time_path_or_threads() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    run(d, &format!("{TRAIN_UNBOUNDED} --threads 2 --out m.safetensors")).expect(0);
    let text = String::from_utf8_lossy(&std::fs::read(d.join("m.safetensors")).unwrap()).into_owned();
    let header = &text[..text.rfind("\"provenance\"").unwrap() + 1200];
    assert!(header.contains("cardinality") && header.contains("version"));
    for (file, word) in [("fashion_fc.onnx", "network"), ("fashion_train_images.idx.gz", "inputs")] {
        let sum = std::process::Command::new("sha256sum").arg(crate::program::data(file)).output().unwrap();
        let sum = String::from_utf8(sum.stdout).unwrap();
        assert!(header.contains(&sum[..64]), "{word}");
    }
    for word in ["thread", &d.display().to_string(), "idx.gz", "seconds"] {
        assert!(!header.contains(word), "{word}");
    }
}

#[test]
fn completions_for_every_shell() {
    let directory = tempfile::tempdir().unwrap();
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let ran = run(directory.path(), &format!("completions {shell}")).expect(0);
        assert!(ran.stdout.contains("target-sparsity") && ran.stderr.is_empty(), "{shell}");
    }
}

#[test]
fn a_missed_target_is_exit_1_and_a_reached_one_is_0() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    run(d, &format!("{TRAIN_UNBOUNDED} --target-sparsity 0.7 --out m.safetensors --json r.json")).expect(0);
    assert!((json(d, "r.json")["sparsity"].as_f64().unwrap() - 0.7).abs() <= 0.002);
    // Ridge has no zeros to give.
    let flags = "--penalty ridge --refit off --rounds 1 --target-sparsity 0.7 --samples 120 --connectivity baseline";
    let ran = run(d, &format!("{} {flags} --out r.safetensors", TRAIN.replace(" --samples 400", ""))).expect(1);
    assert!(ran.one_line().contains("target sparsity 0.7 missed"), "{ran:?}");
    assert!(d.join("r.safetensors").exists());
}

#[test]
fn max_drop_holds_on_the_held_out_tenth() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    let train = "train --network @fashion_fc.onnx --inputs @fashion_train_images.idx.gz --samples 1000";
    run(d, &format!("{train} --bounds off --max-drop 2 --out m.safetensors --json r.json")).expect(0);
    let result = json(d, "r.json");
    assert!(result["agreement"].as_f64().unwrap() >= 0.98);
    assert!(result["sparsity"].as_f64().unwrap() > 0.5);
}

#[test]
fn a_model_in_place_of_a_network_is_matched_at_its_own_equilibrium() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    run(d, "convert --network @fashion_fc.onnx --scale 1/255 --out c.safetensors").expect(0);
    let test = "--inputs @fashion_test_images.idx.gz --labels @fashion_test_labels.idx.gz";
    run(d, &format!("evaluate --model c.safetensors --network @fashion_fc.onnx {test} --json e.json")).expect(0);
    let same = json(d, "e.json");
    assert_eq!(same["accuracy"], same["baseline_accuracy"]);
    assert_eq!(same["sparsity"], 0.0);
    assert!(same["equilibrium_error"].as_f64().unwrap() < 1e-6);
    let inputs = "--inputs @fashion_train_images.idx.gz --samples 400";
    run(d, &format!("train --network c.safetensors {inputs} --penalty l1 --out m.safetensors --json r.json")).expect(0);
    let trained = json(d, "r.json");
    assert!(trained["max_relative_gap"].as_f64().unwrap() <= 1e-6);
    assert!(trained["sparsity"].as_f64().unwrap() > 0.2);
}

#[test]
fn kappa_rescale_gamma_and_the_papers_preset() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    let norm = |flags: &str| {
        let train = if flags.contains("l1") { TRAIN } else { TRAIN_UNBOUNDED };
        run(d, &format!("{train} {flags} --out m.safetensors --json r.json")).expect(0);
        let result = json(d, "r.json");
        (result["norm_a_inf"].as_f64().unwrap(), result)
    };
    assert!(norm("").0 > 1.0);
    assert!(norm("--kappa 0.9").0 <= 0.9);
    assert!(norm("--rescale").0 <= 0.99);
    assert!(norm("--rescale --kappa 0.5").0 <= 0.5);
    let (paper, result) = norm("--preset paper --penalty l1 --rescale");
    assert!(paper <= 0.99 && result["max_relative_gap"].as_f64().unwrap() <= 1e-6);
    // The layered scaling leaves the states as small as it says: ‖A‖∞ ≤ 1/γ before training.
    let (scaled, result) = norm("--gamma 1.25 --penalty l1 --normalize on");
    assert!(scaled < 1.25 && result["equilibrium_error"].as_f64().unwrap() < 0.5, "{result}");
}

#[test]
fn exact_matching_matches_or_says_which_rows_cannot() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    let train = "train --network @fashion_fc.onnx --inputs @fashion_train_images.idx.gz --samples 60 --matching exact";
    run(d, &format!("{train} --out m.safetensors --json r.json")).expect(0);
    let result: Value = serde_json::from_slice(&std::fs::read(d.join("r.json")).unwrap()).unwrap();
    assert!(result["equilibrium_error"].as_f64().unwrap() < 1e-5, "{}", result["equilibrium_error"]);
    assert!(result["max_relative_gap"].as_f64().unwrap() <= 1e-6);
    assert!(result["sparsity"].as_f64().unwrap() > 0.5, "60 samples need few of 784 weights a row");
    let ran = run(d, &format!("{train} --kappa 0.05 --out n.safetensors")).expect(2);
    assert!(ran.one_line().contains("z[16]") && ran.one_line().contains("raise kappa"), "{ran:?}");
    assert!(!d.join("n.safetensors").exists());
}
