//! The commands of the guides run as they stand, in the order of each page.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::{Path, PathBuf};

use crate::program::{data, run};

/// Commands of a page: lines in `sh` blocks that begin with the program's name. A backslash goes on in the next line.
fn commands(page: &str) -> Vec<String> {
    let mut inside = false;
    let mut out = Vec::new();
    for line in page.replace("\\\n", "").lines() {
        match line.trim() {
            "```sh" => inside = true,
            "```" => inside = false,
            line if inside => out.push(line.strip_prefix("simplicit ").unwrap_or_else(|| panic!("{line}")).to_string()),
            _ => {}
        }
    }
    out
}

fn guides() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guides");
    let mut pages: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    pages.sort();
    pages
}

#[test]
fn commands_of_every_guide_succeed() {
    let mut ran = 0;
    for page in guides() {
        let directory = tempfile::tempdir().unwrap();
        for line in commands(&std::fs::read_to_string(&page).unwrap()) {
            // Guides name files by their place in the repository, `data/NAME`.
            let line = line.replace("data/", &format!("{}/", data("").display().to_string().trim_end_matches('/')));
            let output = run(directory.path(), &line);
            assert_eq!(output.code, Some(0), "{}: {line}\n{output:#?}", page.display());
            ran += 1;
        }
    }
    assert!(ran >= 8, "{ran} commands in all guides");
}
