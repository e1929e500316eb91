//! Every command's help, output and errors against committed text files. After a change on purpose:
//! `SIMPLICIT_UPDATE_SNAPSHOTS=1 cargo test --release -p simplicit-cli --test snapshots`, then read the difference.

#![allow(clippy::unwrap_used, clippy::panic)]

mod program;

use std::fmt::Write;
use std::path::Path;

use program::{TRAIN, command, data, run};

/// Paths of this machine and this run become names.
fn normalised(text: &str, directory: &Path) -> String {
    let data = data("").display().to_string();
    text.replace(&directory.display().to_string(), "[DIR]").replace(data.trim_end_matches('/'), "[DATA]")
}

/// Measured figures differ from machine to machine: digits become 0 (several become one), and columns lose their width.
fn without_figures(text: &str) -> String {
    let mut out = String::new();
    let mut in_number = false;
    for c in text.chars() {
        let numeric = c.is_ascii_digit() || (in_number && matches!(c, '.' | ','));
        if numeric && !in_number {
            out.push('0');
        } else if !numeric {
            out.push(c);
        }
        in_number = numeric;
    }
    let lines = out.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    // Signs and exponents of measured numbers.
    lines.map(|line| line.replace("-0", "0").replace("+0", "0").replace("0e0", "0") + "\n").collect()
}

fn check(name: &str, text: &str) {
    check_file(&Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/snapshots/{name}.txt")), text);
}

fn check_file(path: &Path, text: &str) {
    if std::env::var_os("SIMPLICIT_UPDATE_SNAPSHOTS").is_some() {
        std::fs::write(path, text).unwrap();
        return;
    }
    let expected = std::fs::read_to_string(path).unwrap_or_default();
    let name = path.display();
    assert!(text == expected, "{name} changed\n--- expected\n{expected}\n--- got\n{text}");
}

fn transcript(directory: &Path, lines: &[&str], figures: bool) -> String {
    let mut text = String::new();
    for line in lines {
        let ran = run(directory, line);
        writeln!(text, "$ simplicit {line}").unwrap();
        let said = normalised(&format!("{}{}", ran.stdout, ran.stderr), directory);
        text.push_str(&if figures { said } else { without_figures(&said) });
        writeln!(text, "[exit {}]\n", ran.code.unwrap()).unwrap();
    }
    text
}

const COMMANDS: [&str; 17] = [
    "quickstart",
    "train",
    "evaluate",
    "predict",
    "collect",
    "convert",
    "inspect",
    "export",
    "attack",
    "certify",
    "reduce",
    "report",
    "bench",
    "lab",
    "lab reproduce",
    "lab frontier",
    "completions",
];

/// The page of the command line is its help, so that it cannot be out of date.
#[test]
fn reference_page_is_the_help() {
    let directory = tempfile::tempdir().unwrap();
    let mut page = String::from(
        "# Command line\n\nWhat `simplicit COMMAND --help` prints; `-h` prints the flags that most people need. This page is made \
         by a test:\n`SIMPLICIT_UPDATE_SNAPSHOTS=1 cargo test --release -p simplicit-cli --test snapshots`.\n",
    );
    for name in COMMANDS {
        let help = run(directory.path(), &format!("{name} --help")).expect(0).stdout;
        let help: Vec<&str> = help.lines().map(str::trim_end).collect();
        write!(page, "\n## {name}\n\n```text\n{}\n```\n", help.join("\n").trim_end()).unwrap();
    }
    check_file(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/command-line.md"), &page);
}

#[test]
fn help_of_every_command() {
    let directory = tempfile::tempdir().unwrap();
    check("help", &transcript(directory.path(), &["-h", "--help", "--version"], true));
    for name in COMMANDS {
        let lines = [format!("{name} -h"), format!("{name} --help")];
        let text = transcript(directory.path(), &lines.each_ref().map(String::as_str), true);
        check(&format!("help-{}", name.replace(' ', "-")), &text);
    }
}

#[test]
fn help_is_wrapped_to_the_terminal() {
    let directory = tempfile::tempdir().unwrap();
    let help = |line: &str, columns: &str| {
        let output = command(directory.path(), line).env("COLUMNS", columns).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    for line in ["train -h", "train --help", "--help"] {
        let widest = |text: &str| text.lines().map(|l| l.chars().count()).max().unwrap();
        let (narrow, wide) = (help(line, "60"), help(line, "400"));
        // A wide terminal has lines of at most 100; examples stand as they are in a narrow one.
        assert!(widest(&wide) <= 100, "{line}: {}", widest(&wide));
        let ours = narrow.lines().filter(|l| !l.contains("simplicit "));
        assert!(ours.clone().all(|l| l.chars().count() <= 60), "{line}:\n{narrow}");
        assert!(ours.count() > 10);
        // A file is no terminal.
        assert_eq!(wide, run(directory.path(), line).stdout);
    }
}

#[test]
fn help_is_short_when_asked_shortly() {
    let directory = tempfile::tempdir().unwrap();
    let lines = |line: &str| run(directory.path(), line).stdout.lines().count();
    assert!(lines("train -h") <= 55 && lines("train --help") > 150, "{} {}", lines("train -h"), lines("train --help"));
}

#[test]
fn output_of_every_command() {
    let directory = tempfile::tempdir().unwrap();
    // Bounds are part of the transcript; they cost less on fewer samples.
    let few = TRAIN.replace("--samples 400", "--samples 60");
    let train = format!(
        "{few} --target-sparsity 0.7 --test-inputs @fashion_test_images.idx.gz --test-labels @fashion_test_labels.idx.gz \
         --out m.safetensors --json run.json --threads 2"
    );
    let test = "--inputs @fashion_test_images.idx.gz";
    let evaluate = format!(
        "evaluate --model m.safetensors --network @fashion_fc.onnx {test} --labels @fashion_test_labels.idx.gz --threads 2"
    );
    let lines = [
        train.as_str(),
        "train --states s.safetensors --penalty l1 --connectivity feedforward --out l1.safetensors",
        "inspect m.safetensors",
        &evaluate,
        &format!("predict --model m.safetensors {test} --samples 50 --out y.npy"),
        "convert --network @fashion_fc.onnx --scale 1/255 --out c.safetensors",
        "export --model m.safetensors --out m.onnx",
        &format!(
            "attack --model m.safetensors --network @fashion_fc.onnx {test} --labels @fashion_test_labels.idx.gz --samples 64 --queries 20 --json a.json"
        ),
        &format!(
            "attack --network @fashion_fc.onnx {test} --labels @fashion_test_labels.idx.gz --samples 64 --method fgsm --pixels 0.5"
        ),
        &format!(
            "certify --model m.safetensors {test} --labels @fashion_test_labels.idx.gz --samples 64 --json c.json"
        ),
        "report --model m.safetensors --network @fashion_fc.onnx --run run.json --attack a.json --certify c.json --out r.html",
        "reduce m.safetensors --range 0,1 --drop-inputs kept.npy --out r.safetensors",
        "quickstart --threads 2",
        "bench --threads 2",
        "lab frontier --levels 0.6,0.8 --threads 2",
        "evaluate m.safetensors -q --inputs @fashion_test_images.idx.gz -l @fashion_test_labels.idx.gz",
        "evaluate @fashion_fc.onnx -i @fashion_test_images.idx.gz -l @fashion_test_labels.idx.gz -n 100 -j 2",
        "-v convert @fashion_fc.onnx -o c2.safetensors",
        "predict m.safetensors -i @fashion_test_images.idx.gz -n 20 -o y.npy --json y.json",
        "bench frontier --levels 1.5",
        "reproduce cifar-100 --out r",
    ];
    let collect =
        "collect --network @fashion_fc.onnx --inputs @fashion_train_images.idx.gz --samples 300 --out s.safetensors";
    let text = transcript(directory.path(), &[&[collect], &lines[..]].concat(), false);
    check("output", &text);
    check(
        "recipe",
        &normalised(&std::fs::read_to_string(directory.path().join("m.recipe.toml")).unwrap(), directory.path()),
    );
}

#[test]
fn errors_are_one_line_each() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    std::fs::write(d.join("junk.onnx"), b"not a network").unwrap();
    std::fs::write(d.join("junk.safetensors"), [7, 0, 0, 0, 0, 0, 0, 0, b'{', b'}', b' ']).unwrap();
    std::fs::write(d.join("typo.toml"), "betta = 1e-3\n").unwrap();
    std::fs::write(d.join("broken.toml"), "beta = = 1\n").unwrap();
    std::fs::write(d.join("value.toml"), "seed = 1\npenalty = \"l0\"  # not one of ours\n").unwrap();
    std::fs::write(d.join("notes.txt"), "hello world\n").unwrap();
    std::fs::write(d.join("cut.onnx"), &std::fs::read(data("fashion_fc.onnx")).unwrap()[..5000]).unwrap();
    program::npy(&d.join("array.npy"), &[2, 3], |k| k as f32);
    std::fs::create_dir(d.join("folder")).unwrap();
    std::fs::write(d.join("folder/holiday.jpg"), b"x").unwrap();
    let with = |flags: &str| format!("{TRAIN} --out m.safetensors {flags}");
    let lines: Vec<String> = [
        "",
        "frobnicate",
        "train",
        "train --network net.onnx --out m.safetensors",
        "train --network missing.onnx --inputs @fashion_train_images.idx.gz --out m.safetensors",
        "train --network junk.onnx --inputs @fashion_train_images.idx.gz --out m.safetensors",
        "train --network junk.safetensors --inputs @fashion_train_images.idx.gz --out m.safetensors",
        "train --network @resnet20_cifar100.onnx --inputs @fashion_train_images.idx.gz --out m.safetensors",
        "train --network @fashion_fc.onnx --inputs @fashion_train_labels.idx.gz --out m.safetensors",
        "train --network @fashion_fc.onnx --inputs @fashion_train_images.idx.gz --out no/such/place/m.safetensors",
        "train --network @fashion_fc.onnx --inputs @fashion_train_images.idx.gz --samples 2001 --out m.safetensors",
        "train --states missing.safetensors --out m.safetensors",
        "train --network @fashion_fc.onnx --inputs @fashion_train_images.idx.gz --samples 150 --max-drop 1 --out m.safetensors",
        "train --recipe typo.toml",
        "train --recipe broken.toml",
        "train --recipe missing.toml",
        "evaluate --inputs @fashion_test_images.idx.gz --labels @fashion_test_labels.idx.gz",
        "evaluate --network @fashion_fc.onnx --inputs @fashion_test_images.idx.gz",
        "evaluate --network @fashion_fc.onnx --inputs @fashion_test_images.idx.gz --labels @fashion_train_labels.idx.gz",
        "train --network @resnet20_cifar100.onnx --inputs train.bin.gz --out m.safetensors",
        "inspect missing.safetensors",
        "inspect junk.safetensors",
        "export --model junk.safetensors --out x.onnx",
        "reduce missing.safetensors --out r.safetensors",
        "reduce junk.safetensors --range 1 --out r.safetensors",
        "report --model missing.safetensors --out r.html",
        "lab frontier --levels 1.5",
        "lab frontier --network @fashion_fc.onnx",
        "lab",
        "bench --levels 0.5",
        "attack --epsilon 0.1",
        "attack --network @fashion_fc.onnx --inputs @fashion_test_images.idx.gz --labels @fashion_test_labels.idx.gz --gradient baseline",
        "attack --network @fashion_fc.onnx --inputs @fashion_test_images.idx.gz --labels @fashion_train_labels.idx.gz",
        "attack --network @fashion_fc.onnx --inputs @fashion_test_images.idx.gz --labels @fashion_test_labels.idx.gz --epsilon 0",
        "attack --network @fashion_fc.onnx --inputs @fashion_test_images.idx.gz --labels @fashion_test_labels.idx.gz --pixels 2",
        "attack --network @fashion_fc.onnx --inputs @fashion_test_images.idx.gz --labels @fashion_test_labels.idx.gz --method carlini",
        "certify",
        "certify --model junk.safetensors --inputs @fashion_test_images.idx.gz --labels @fashion_test_labels.idx.gz",
        "lab reproduce",
        "completions klingon",
        "train @fashion_fc.onnx --inputs @fashion_train_images.idx.gz",
        "train @fashion_fc.onnx --network @fashion_fc.onnx --inputs @fashion_train_images.idx.gz --out m.safetensors",
        "evaluate @fashion_fc.onnx --inputs @fashion_test_images.idx.gz --labels @fashion_test_labels.idx.gz --report r.html",
        "-q -v inspect missing.safetensors",
        "train --recipe value.toml",
        "train --recipe notes.txt",
        "inspect array.npy",
        "inspect cut.onnx",
        "export @fashion_fc.onnx --out x.onnx",
        "train @fashion_fc.onnx --inputs array.npy --out array.npy",
    ]
    .iter()
    .map(|line| (*line).to_string())
    .chain(
        [
            "--penalty l0",
            "--penalty l1 --mu 1",
            "--penalty cardinality --beta 1",
            "--penalty cardinality --rounds 3",
            "--penalty cardinality --refit off",
            "--penalty l1 --beta -1",
            "--target-sparsity 1.5",
            "--target-sparsity=-0.1",
            "--sparsity 0.5",
            "--target-sparsity 0.5 --max-drop 1",
            "--kappa 1.5",
            "--connectivity mask",
            "--connectivity full --mask @fashion_test_labels.idx.gz",
            "--connectivity mask --mask @fashion_test_labels.idx.gz",
            "--matching exact --target-sparsity 0.5",
            "--matching exact --lambda1 2",
            "--reach 3",
            "--positions 9",
            "--normalize off --output-aware on",
            "--gamma 0.5",
            "--gamma 2 --rescale",
            "--mean 1,2,3",
            "--std 0",
            "--scale 1/0",
            "--activation tanh",
            "--threads 0",
            "--lambda1 0",
            "--checkpoint folder",
            "--json no/such/place.json",
            "--test-labels @fashion_test_labels.idx.gz",
            "--max-drop 200",
            "--max-drop 2 --robust 1",
        ]
        .iter()
        .map(|flags| with(flags)),
    )
    .collect();
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    let before = program::names(d);
    check("errors", &transcript(d, &lines, true));
    for line in lines {
        let mut ran = run(d, line).expect(2);
        if let Some((first, place)) = ran.stderr.clone().split_once("\n  ") {
            // The place in a recipe: its line, and a mark below it.
            assert!(line.contains(".toml") && place.lines().count() == 2 && place.trim_end().ends_with('^'), "{ran:?}");
            ran.stderr = format!("{first}\n");
        }
        assert!(ran.one_line().starts_with("error: "), "{line}: {ran:?}");
        assert_eq!(ran.stdout, "", "{line}");
    }
    assert_eq!(program::names(d), before, "something was left behind");
}
