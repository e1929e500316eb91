//! Long work is safe: kill -9, Ctrl-C, a full disk, a closed pipe.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::program::{PROGRAM, Ran, TRAIN_UNBOUNDED, command, names, npy, run, words};
use simplicit::random::Random;

/// One model; `--progress json` says how far it is.
fn line() -> String {
    format!("{TRAIN_UNBOUNDED} --checkpoint kept --progress json --out m.safetensors")
}

/// Kills the run after so many lines of progress and a little while, or when its final write begins.
fn kill(directory: &Path, line: &str, events: Option<usize>, pause: Duration) -> bool {
    let mut child = command(directory, line).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap()).lines();
    match events {
        Some(events) => {
            said.by_ref().take(events).for_each(drop);
            std::thread::sleep(pause);
        }
        None => {
            // Files are staged under hidden names once the last phase has been announced.
            said.by_ref().find(|l| l.as_ref().is_ok_and(|l| l.contains("writing")));
            std::thread::sleep(pause);
        }
    }
    child.kill().unwrap(); // SIGKILL
    child.wait().unwrap().code().is_none()
}

#[test]
fn twenty_kills_at_random_moments_and_the_same_bytes() {
    let reference = tempfile::tempdir().unwrap();
    let first = run(reference.path(), &line()).expect(0);
    let events = first.stderr.lines().count();
    assert!(first.stderr.contains("\"samples\"") && first.stderr.contains("\"rows\""));
    let expected = std::fs::read(reference.path().join("m.safetensors")).unwrap();
    let plain = tempfile::tempdir().unwrap();
    run(plain.path(), &line().replace("--checkpoint kept", "")).expect(0);
    assert!(std::fs::read(plain.path().join("m.safetensors")).unwrap() == expected, "a checkpoint changes the model");
    // Everything is there: nothing is gathered again, and the model is the same.
    let again = run(reference.path(), &line()).expect(0);
    assert!(!again.stderr.contains("\"samples\""), "{}", again.stderr);
    assert!(std::fs::read(reference.path().join("m.safetensors")).unwrap() == expected);

    let mut random = Random::new(20);
    let mut interrupted = 0;
    for turn in 0..20 {
        let directory = tempfile::tempdir().unwrap();
        let d = directory.path();
        // One moment in every sixteenth of the run, then four in the final write, which takes a few milliseconds.
        let (at, pause) = if turn < 16 {
            (Some((events as f64 * (f64::from(turn) + random.uniform()) / 16.0) as usize), 8.0)
        } else {
            (None, 1.5)
        };
        let killed = kill(d, &line(), at, Duration::from_secs_f64(1e-3 * pause * random.uniform()));
        interrupted += usize::from(killed);
        if let Ok(bytes) = std::fs::read(d.join("m.safetensors")) {
            assert!(bytes == expected, "kill {turn}: half a model");
        }
        run(d, &line()).expect(0);
        assert!(std::fs::read(d.join("m.safetensors")).unwrap() == expected, "kill {turn}: another model");
    }
    assert!(interrupted >= 16, "only {interrupted} runs were interrupted");
}

#[test]
fn a_run_killed_again_and_again_still_ends_with_the_same_bytes() {
    // Several models on the way to a target; every start gets a little further.
    let line = format!("{} --target-sparsity 0.75", line());
    let reference = tempfile::tempdir().unwrap();
    run(reference.path(), &line).expect(0);
    let directory = tempfile::tempdir().unwrap();
    let mut random = Random::new(21);
    let mut interrupted = 0;
    for _ in 0..6 {
        let pause = Duration::from_secs_f64(0.05 * random.uniform());
        interrupted += usize::from(kill(directory.path(), &line, Some(3 + random.below(9)), pause));
    }
    assert_eq!(interrupted, 6);
    run(directory.path(), &line).expect(0);
    let read = |d: &Path| std::fs::read(d.join("m.safetensors")).unwrap();
    assert!(read(directory.path()) == read(reference.path()));
}

#[test]
fn a_checkpoint_of_other_settings_or_inputs_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    let train = format!("{TRAIN_UNBOUNDED} --checkpoint kept --out m.safetensors");
    run(d, &train).expect(0);
    let model = std::fs::read(d.join("m.safetensors")).unwrap();
    for other in ["--mu 1e-5", "--seed 1", "--scale 1/256", "--inputs @fashion_test_images.idx.gz"] {
        let line = if other.starts_with("--inputs") {
            train.replace("--inputs @fashion_train_images.idx.gz", other)
        } else {
            format!("{train} {other}")
        };
        let ran = run(d, &line).expect(2);
        assert!(ran.one_line().contains("a checkpoint of other settings or inputs"), "{ran:?}");
    }
    assert!(std::fs::read(d.join("m.safetensors")).unwrap() == model);
    // What changes no result changes no fingerprint.
    run(d, &format!("{train} --threads 1 --progress none")).expect(0);
}

#[test]
fn ctrl_c_stops_within_two_seconds_and_says_how_to_go_on() {
    let long = "train --network @fashion_fc.onnx --inputs @fashion_train_images.idx.gz --connectivity full --penalty l1 \
                --target-sparsity 0.6 --out m.safetensors";
    for (checkpoint, hint) in [("", "--checkpoint DIR"), ("--checkpoint kept", "the same command goes on")] {
        for wait in [0.3, 1.5] {
            let directory = tempfile::tempdir().unwrap();
            let d = directory.path();
            let mut start = command(d, &format!("{long} {checkpoint}"));
            let child = start.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            std::thread::sleep(Duration::from_secs_f64(wait));
            let begin = Instant::now();
            assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
            let ran = Ran::of(child.wait_with_output().unwrap()).expect(130);
            assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
            assert!(ran.one_line().contains(hint), "{ran:?}");
            assert!(names(d).iter().all(|n| n == "kept"), "{:?}", names(d));
        }
    }
}

/// Runs under `sh` with a limit on the size of files, in blocks of 512 bytes.
fn limited(directory: &Path, blocks: usize, line: &str) -> Ran {
    let mut shell = Command::new("sh");
    shell.current_dir(directory).args(["-c", &format!("ulimit -f {blocks}; exec \"$@\""), "sh", PROGRAM]);
    Ran::of(shell.args(words(line)).output().unwrap())
}

#[test]
fn a_file_size_limit_is_one_line_and_nothing_half_written() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    std::fs::write(d.join("m.safetensors"), b"old").unwrap();
    // The model takes about 60 kB, the recipe less than one.
    let ran = limited(d, 16, &format!("{TRAIN_UNBOUNDED} --out m.safetensors --json r.json")).expect(2);
    assert!(ran.one_line().contains("File too large"), "{ran:?}");
    assert_eq!(names(d), ["m.safetensors"]);
    assert_eq!(std::fs::read(d.join("m.safetensors")).unwrap(), b"old");
    // The statistics of the first layer take 5 MB.
    let ran = limited(d, 512, &format!("{TRAIN_UNBOUNDED} --out m.safetensors --checkpoint kept")).expect(2);
    assert!(ran.one_line().contains("File too large"), "{ran:?}");
    assert_eq!(names(d), ["kept", "m.safetensors"]);
    assert_eq!(std::fs::read(d.join("m.safetensors")).unwrap(), b"old");
    for line in [
        "convert --network @fashion_fc.onnx --out c.safetensors",
        "collect --network @fashion_fc.onnx --inputs @fashion_train_images.idx.gz --out s.safetensors",
        "quickstart",
    ] {
        let ran = limited(d, 16, line).expect(2);
        assert!(ran.one_line().contains("File too large"), "{line}: {ran:?}");
    }
    assert_eq!(names(d), ["kept", "m.safetensors", "simplicit-quickstart"]);
    assert_eq!(names(&d.join("simplicit-quickstart")), Vec::<String>::new());
    // Without the limit the checkpoint goes on.
    run(d, &format!("{TRAIN_UNBOUNDED} --out m.safetensors --checkpoint kept")).expect(0);
}

#[test]
fn what_fails_after_the_training_does_not_lose_the_model() {
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    // The model takes 43 kB, the page 52 kB; the limit is 48 kB.
    let ran = limited(d, 94, &format!("{TRAIN_UNBOUNDED} --out m.safetensors --report r.html")).expect(2);
    assert!(
        ran.one_line().contains("File too large") && ran.one_line().contains("the model is in m.safetensors"),
        "{ran:?}"
    );
    assert_eq!(names(d), ["m.recipe.toml", "m.safetensors"]);
    run(d, "inspect m.safetensors").expect(0);
    // Test inputs that cannot be read to their end.
    npy(&d.join("t.npy"), &[5000, 784], |k| if k == 4999 * 784 { f32::NAN } else { 0.5 });
    let ran = run(d, &format!("{TRAIN_UNBOUNDED} --out n.safetensors --test-inputs t.npy")).expect(2);
    assert!(ran.one_line().contains("NaN at row 4999"), "{ran:?}");
    run(d, "inspect n.safetensors").expect(0);
}

#[test]
fn a_full_disk_is_one_line_and_nothing_half_written() {
    let directory = tempfile::tempdir().unwrap();
    let disk = directory.path().join("disk");
    std::fs::create_dir(&disk).unwrap();
    let mount = Command::new("mount").args(["-t", "tmpfs", "-o", "size=64k", "none"]).arg(&disk).output();
    if !mount.is_ok_and(|m| m.status.success()) {
        return; // Only root may; the file-size limit above stands in.
    }
    let ran = run(&disk, "convert --network @fashion_fc.onnx --out c.safetensors");
    let left = names(&disk);
    assert!(Command::new("umount").arg(&disk).status().unwrap().success());
    let ran = ran.expect(2);
    assert!(ran.one_line().contains("No space left"), "{ran:?}");
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_closed_pipe_is_success() {
    let directory = tempfile::tempdir().unwrap();
    for line in ["--help", "completions bash", "quickstart --help"] {
        let mut child = command(directory.path(), line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let ran = Ran::of(child.wait_with_output().unwrap()).expect(0);
        assert_eq!(ran.stderr, "", "{line}");
    }
}
