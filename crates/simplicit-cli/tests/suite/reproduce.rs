//! The paper's experiments in their fast variant: every item there, nothing repeated, every number that of its command.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::Path;

use crate::program::{names, run};
use serde_json::Value;

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn fashion_mnist_from_nothing_to_tables_and_pictures() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    let ran = run(d, "lab reproduce fashion-mnist --fast --out r").expect(0);
    assert!(ran.stdout.contains("results.md"), "{ran:?}");
    let results = json(&d.join("r/results.json"));
    let ids: Vec<&str> = results["items"].as_array().unwrap().iter().map(|i| i["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["figure-2", "figure-3", "figure-4", "table-2", "table-3", "figure-5", "figure-6"]);
    let page = std::fs::read_to_string(d.join("r/results.md")).unwrap();
    for picture in ["figure-2.svg", "figure-3.svg", "figure-4.svg", "figure-5.svg", "figure-6.svg"] {
        assert!(page.contains(picture) && d.join("r").join(picture).is_file(), "{picture}");
    }
    // No cell of a table is empty: every step gave what its item shows.
    for item in results["items"].as_array().unwrap() {
        assert!(!item["rows"].as_array().unwrap().is_empty(), "{item}");
        for cell in item["rows"].as_array().unwrap().iter().flat_map(|r| r.as_array().unwrap()) {
            assert!(cell != "–" && cell != "", "{item}");
        }
    }

    // A number of the page is that of its command, run by hand.
    let steps = results["steps"].as_array().unwrap();
    let step = steps.iter().find(|s| s["name"] == "l1-600-0.001").unwrap();
    let line: Vec<&str> = step["command"].as_array().unwrap().iter().map(|a| a.as_str().unwrap()).collect();
    run(d, &format!("{} --json again.json", line.join(" "))).expect(0);
    let (again, then) = (json(&d.join("again.json")), &results["results"]["l1-600-0.001"]);
    for key in ["sparsity", "accuracy", "max_relative_gap", "norm_a_inf"] {
        assert_eq!(again[key], then[key], "{key}");
    }
    assert!(then["norm_a_inf"].as_f64().unwrap() <= 0.99);

    // The second time nothing is run: models keep their times, the page its bytes.
    let before = names(&d.join("r/steps"));
    let stamp = |name: &str| d.join("r/steps").join(name).metadata().unwrap().modified().unwrap();
    let stamps: Vec<_> = before.iter().map(|n| stamp(n)).collect();
    run(d, "lab reproduce fashion-mnist --fast --out r").expect(0);
    assert_eq!(names(&d.join("r/steps")), before);
    assert_eq!(before.iter().map(|n| stamp(n)).collect::<Vec<_>>(), stamps);
    assert_eq!(std::fs::read_to_string(d.join("r/results.md")).unwrap(), page);
}

#[test]
fn missing_files_are_named_with_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    let ran = run(d, "lab reproduce fashion-mnist --data . --out r").expect(2);
    assert!(ran.one_line().contains("train-images-idx3-ubyte.gz") && ran.one_line().contains("--fast"), "{ran:?}");
    let ran = run(d, "lab reproduce cifar-100 --out r").expect(2);
    assert!(ran.one_line().contains("--data"), "{ran:?}");
    let ran = run(d, "lab reproduce cifar-100 --data . --out r").expect(2);
    assert!(ran.one_line().contains("train.bin"), "{ran:?}");
    assert!(!d.join("r/results.md").exists());
}
