//! `train --prove` on the embedded FashionMNIST network and images: what is claimed, and that it changes no model.

#![allow(clippy::unwrap_used, clippy::panic)]

use crate::program::run;
use serde_json::Value;

#[test]
fn rows_are_proven_optimal_and_the_model_stays_the_same() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    let train = "train --network @fashion_fc.onnx --inputs @fashion_train_images.idx.gz --samples 1000 --mu 2e-5 \
                 --output-refit 0 --progress none";
    let result = |flags: &str| -> Value {
        run(d, &format!("{train} {flags} --out m.safetensors --json r.json")).expect(0);
        serde_json::from_slice(&std::fs::read(d.join("r.json")).unwrap()).unwrap()
    };
    let bounded = result("");
    let proven = result("--prove 2");
    let number = |of: &Value, key: &str| of[key].as_f64().unwrap();
    for of in [&bounded, &proven] {
        assert!(of["max_relative_gap"].is_null(), "a relaxation's gap is not the row's");
        assert_eq!(of["rows_at_limit"], 0);
        let (median, worst) = (number(of, "median_bound_distance"), number(of, "max_bound_distance"));
        assert!((0.0..=1.0).contains(&median) && median <= worst && worst <= 1.0);
    }
    // A search is at least as good as its first bound, row by row.
    let rows = |of: &Value| -> Vec<(f64, bool)> {
        let row = |r: &Value| (r["bound_distance"].as_f64().unwrap(), r["proven"].as_bool().unwrap());
        of["row_details"].as_array().unwrap().iter().map(row).collect()
    };
    for (k, (before, after)) in rows(&bounded).iter().zip(rows(&proven)).enumerate() {
        assert!(after.0 <= before.0 + 1e-3, "row {k}: {before:?} {after:?}");
        assert!(!after.1 || after.0 <= 1e-6, "row {k}: {after:?}");
    }
    // The ten outputs and the sixteen units of the last hidden layer have at most 16 and 32 features.
    let small = rows(&proven).iter().enumerate().filter(|(k, r)| (*k < 16 || *k >= 112) && r.1).count();
    assert!(small >= 20, "{small} of 26 small rows proven");
    assert!(number(&proven, "rows_proven") >= number(&bounded, "rows_proven"));
    assert_eq!(bounded["nonzeros"], proven["nonzeros"]);
    let recipe = std::fs::read_to_string(d.join("m.recipe.toml")).unwrap();
    assert!(recipe.contains("prove = 2.0"), "{recipe}");
    // A stated ridge makes every bound better.
    let ridge = result("--alpha 0.01");
    assert!(number(&ridge, "median_bound_distance") < number(&bounded, "median_bound_distance"));
    let refused = run(d, &format!("{train} --penalty l1 --mu 1 --out n.safetensors")).expect(2);
    assert!(!refused.one_line().is_empty());
    let network = "train --network @fashion_fc.onnx --inputs @fashion_train_images.idx.gz --samples 100";
    let refused = run(d, &format!("{network} --penalty l1 --prove 1 --out n.safetensors")).expect(2);
    assert!(refused.one_line().contains("--prove: expected --penalty cardinality"), "{refused:?}");
}
