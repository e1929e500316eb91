//! The whole command on few images: every rival meets the level with the one counter, the page and the plot are written.

#![allow(clippy::unwrap_used)]

use std::process::Command;

#[test]
fn one_command_from_images_to_page() {
    let directory = tempfile::tempdir().unwrap();
    let (page, json) = (directory.path().join("page.md"), directory.path().join("rows.json"));
    let marks = "# Title\n<!-- written by the command: begin -->\n<!-- written by the command: end -->\nend\n";
    std::fs::write(&page, marks).unwrap();
    let network = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/fashion_fc.onnx");
    let ran = Command::new(env!("CARGO_BIN_EXE_frontier"))
        .args(["--fast", "--threads", "2", "--network", network])
        .arg("--page")
        .arg(&page)
        .arg("--json")
        .arg(&json)
        .output()
        .unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let outcome: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    assert_eq!(outcome["baseline_accuracy"], 0.8798);
    let rows = outcome["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 8, "ours and seven rivals at one level");
    for row in rows {
        let sparsity = row["sparsity"].as_f64().unwrap();
        assert!((sparsity - 0.8).abs() <= 0.002, "{row}");
    }
    // A thousand images are too few for a ranking, but data-free pruning is last with any.
    let accuracy = |k: usize| rows[k]["accuracy"].as_f64().unwrap();
    assert!(rows[1]["method"] == "magnitude" && accuracy(1) < accuracy(0) && accuracy(1) < accuracy(2));
    let text = std::fs::read_to_string(&page).unwrap();
    assert!(text.starts_with("# Title") && text.ends_with("end\n") && text.contains("| 80 % |"), "{text}");
    // The same page again, from the rows alone.
    std::fs::write(&page, marks).unwrap();
    let again = Command::new(env!("CARGO_BIN_EXE_frontier")).arg("--from").arg(&json).arg("--page").arg(&page).output();
    assert!(again.unwrap().status.success());
    assert_eq!(std::fs::read_to_string(&page).unwrap(), text);
    let svg = std::fs::read_to_string(page.with_extension("svg")).unwrap();
    assert_eq!(svg.matches("<text x=\"76\"").count(), 8, "all in the key; a curve may lie below the plot");
    // One method measured again: its row gives way, the others stay, and all come out as before.
    let measured = |method: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_frontier"));
        command.args(["--fast", "--threads", "1", "--network", network, "--methods", method, "--merge", "--json"]);
        command.arg(&json).output().unwrap()
    };
    assert!(measured("magnitude").status.success());
    let mut again: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    let again = again["rows"].as_array_mut().unwrap();
    assert_ne!(again[1]["seconds"], rows[1]["seconds"]);
    again[1]["seconds"] = rows[1]["seconds"].clone();
    assert_eq!(again, rows);
    let said = String::from_utf8(measured("magic").stderr).unwrap();
    assert!(said.contains("--methods: expected some of simplicit, magnitude, magnitude-refit"), "{said}");
}
