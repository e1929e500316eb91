//! Several spellings of one thing: positional files and flags, letters and words, quiet and verbose, JSON of every command.

#![allow(clippy::unwrap_used, clippy::panic)]

use crate::program::{names, run};
use serde_json::Value;

const IMAGES: &str = "@fashion_train_images.idx.gz";
const TEST: &str = "-i @fashion_test_images.idx.gz -l @fashion_test_labels.idx.gz -n 50";

#[test]
fn places_and_letters_say_what_flags_say() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    let old = "train --network @fashion_fc.onnx --inputs @fashion_train_images.idx.gz --samples 300 --bounds off \
         --out old.safetensors";
    run(d, &format!("{old} --threads 2 --report old.html")).expect(0);
    run(d, &format!("train @fashion_fc.onnx -i {IMAGES} -n 300 --bounds off -o new.safetensors -j 1 -q")).expect(0);
    let bytes = |name: &str| std::fs::read(d.join(name)).unwrap();
    assert_eq!(bytes("old.safetensors"), bytes("new.safetensors"));
    // A recipe's network gives way to the one on the line, its number of samples to the letter.
    std::fs::copy(crate::program::data("fashion_fc.onnx"), d.join("copy.onnx")).unwrap();
    let again = run(d, "train copy.onnx --recipe old.recipe.toml -n 200 -o other.safetensors --json -").expect(0);
    let again: Value = serde_json::from_str(&again.stdout).unwrap();
    assert_eq!(again["samples"], 200);
    let recipe = std::fs::read_to_string(d.join("other.recipe.toml")).unwrap();
    assert!(recipe.contains("copy.onnx") && recipe.contains("samples = 200"), "{recipe}");
    // The page names the model and has been measured by nobody: no test inputs.
    let page = String::from_utf8(bytes("old.html")).unwrap();
    assert!(page.contains("old.safetensors") && page.starts_with("<!"), "{}", &page[..200]);
    let both =
        run(d, &format!("evaluate --model new.safetensors --network @fashion_fc.onnx {TEST} --json -")).expect(0);
    let places =
        run(d, &format!("evaluate new.safetensors @fashion_fc.onnx {TEST} --json - --report e.html")).expect(0);
    let (both, places): (Value, Value) =
        (serde_json::from_str(&both.stdout).unwrap(), serde_json::from_str(&places.stdout).unwrap());
    for key in ["accuracy", "baseline_accuracy", "agreement", "equilibrium_error", "nonzeros", "samples"] {
        assert_eq!(both[key], places[key], "{key}");
        assert_ne!(places[key], Value::Null, "{key}");
    }
    assert!(String::from_utf8(bytes("e.html")).unwrap().len() > 10_000);
}

#[test]
fn every_command_with_results_has_json() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    for line in [
        "convert @fashion_fc.onnx --scale 1/255 -o c.safetensors",
        "inspect c.safetensors",
        &format!("evaluate c.safetensors {TEST}"),
        "predict c.safetensors -i @fashion_test_images.idx.gz -n 50 -o y.npy",
        "collect @fashion_fc.onnx -i @fashion_test_images.idx.gz -n 50 -o s.safetensors",
        "export c.safetensors -o c.onnx",
        "reduce c.safetensors --range 0,1 -o r.safetensors",
        "report c.safetensors @fashion_fc.onnx -o r.html",
        &format!("certify c.safetensors {TEST} --bound global"),
        &format!("attack c.safetensors {TEST} --method fgsm"),
    ] {
        let table = run(d, line).expect(0).stdout;
        assert!(!table.is_empty() && !table.starts_with('{'), "{line}: {table}");
        let printed = run(d, &format!("{line} --json - --quiet")).expect(0).stdout;
        let printed: Value = serde_json::from_str(&printed).unwrap_or_else(|e| panic!("{line}: {e}\n{printed}"));
        assert_eq!(printed["version"], env!("CARGO_PKG_VERSION"), "{line}");
        assert!(printed["seconds"].is_object(), "{line}");
        // --quiet with a file: nothing on either side.
        let quiet = run(d, &format!("-q {line} --json j.json")).expect(0);
        assert_eq!((quiet.stdout.as_str(), quiet.stderr.as_str()), ("", ""), "{line}");
        let written: Value = serde_json::from_slice(&std::fs::read(d.join("j.json")).unwrap()).unwrap();
        assert_eq!(written["nonzeros"], printed["nonzeros"], "{line}");
    }
    assert!(names(d).iter().all(|name| !name.ends_with(".part")));
}

#[test]
fn verbose_says_what_is_done_and_results_stay() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    let line = format!("train @fashion_fc.onnx -i {IMAGES} -n 200 -o m.safetensors");
    let ran = run(d, &format!("{line} -v")).expect(0);
    assert!(ran.stdout.contains("parameters"), "{}", ran.stdout);
    for word in ["reading", "output-aware weights", "a model, ", "equilibrium error", "writing"] {
        let said = ran.stderr.lines().filter(|l| l.contains(word)).count();
        assert_eq!(said, 1, "{word}\n{}", ran.stderr);
    }
    let line_has_seconds = |line: &str| line.split_whitespace().nth(1) == Some("s");
    assert!(ran.stderr.lines().all(line_has_seconds), "{}", ran.stderr);
    assert_eq!(run(d, &format!("{line} -v --progress none")).expect(0).stderr, "");
}
