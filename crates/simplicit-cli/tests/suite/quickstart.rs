//! The README's first command, for real.

#![allow(clippy::unwrap_used, clippy::panic)]

use crate::program::{names, run};

#[test]
fn quickstart_keeps_its_promises() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    let ran = run(d, "quickstart --json r.json").expect(0);
    assert_eq!(ran.stderr, "", "no bar without a terminal");
    assert_eq!(names(&d.join("simplicit-quickstart")), ["model.safetensors", "report.html", "run.json"]);
    let result: serde_json::Value = serde_json::from_slice(&std::fs::read(d.join("r.json")).unwrap()).unwrap();
    let number = |key: &str| result[key].as_f64().unwrap();
    assert!(number("sparsity") >= 0.6);
    assert_eq!(number("baseline_accuracy"), 0.8798);
    assert!(number("baseline_accuracy") - number("accuracy") <= 0.01);
    assert!(number("lambda_pf_upper") < 1.0);
    for word in [
        "parameters",
        "accuracy",
        "file size",
        "from the bound",
        "well-posed",
        "time",
        "model.safetensors",
        "report.html",
    ] {
        assert!(ran.stdout.contains(word), "{word}\n{}", ran.stdout);
    }
    // The accuracy is that of the file.
    let test = "--inputs @fashion_test_images.idx.gz --labels @fashion_test_labels.idx.gz";
    let again = run(d, &format!("evaluate --model simplicit-quickstart/model.safetensors {test} --json -")).expect(0);
    let again: serde_json::Value = serde_json::from_str(&again.stdout).unwrap();
    assert_eq!(again["accuracy"], result["accuracy"]);
}
