//! Who may call whom: every `crate::` path outside tests must lead to a room that stands above its own in the table of
//! docs/architecture.md.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests are tests

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Rooms with their places in the table; those of one row stand in the order in which the row names them.
fn rooms() -> BTreeMap<String, usize> {
    let page = std::fs::read_to_string(root().join("docs/architecture.md")).unwrap();
    let table = page.split("\n## Rooms\n").nth(1).unwrap().split("\n## ").next().unwrap();
    let mut rooms = BTreeMap::new();
    for line in table.lines().filter(|line| line.starts_with("| `")) {
        let names = line.trim_start_matches("| ").split(" | ").next().unwrap();
        for name in names.split(", ") {
            let place = rooms.len();
            rooms.insert(name.trim_matches('`').to_string(), place);
        }
    }
    rooms
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") && path.file_name().is_some_and(|n| n != "tests.rs") {
            found.push(path);
        }
    }
}

/// The names right behind every `crate::` of a text, those in braces included.
fn called(text: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for rest in text.split("crate::").skip(1) {
        let word = |s: &str| s.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
        match rest.strip_prefix('{') {
            Some(list) => names.extend(list.split('}').next().unwrap().split(',').map(|n| word(n.trim()))),
            None => {
                names.insert(word(rest));
            }
        }
    }
    names
}

#[test]
fn rooms_call_only_rooms_above_them() {
    let rooms = rooms();
    assert!(rooms.len() > 15, "{rooms:?}");
    let src = root().join("crates/simplicit/src");
    let mut files = Vec::new();
    sources(&src, &mut files);
    let mut wrong = Vec::new();
    let mut seen = BTreeSet::new();
    for file in files {
        let inside = file.strip_prefix(&src).unwrap();
        let room =
            inside.components().next().unwrap().as_os_str().to_str().unwrap().trim_end_matches(".rs").to_string();
        if room == "lib" {
            continue;
        }
        let Some(&place) = rooms.get(&room) else { panic!("{room:?} is not in the table of docs/architecture.md") };
        seen.insert(room.clone());
        let text = std::fs::read_to_string(&file).unwrap();
        let opens_tests = |at: usize| text[at..].lines().take(3).any(|line| line.ends_with("mod tests {"));
        let end =
            text.match_indices("#[cfg(test)]").map(|(at, _)| at).find(|&at| opens_tests(at)).unwrap_or(text.len());
        let code: Vec<&str> = text[..end].lines().filter(|line| !line.trim_start().starts_with("//")).collect();
        for name in called(&code.join("\n")) {
            if rooms.get(&name).is_some_and(|&other| other > place) {
                wrong.push(format!("{} calls {name}", inside.display()));
            }
        }
    }
    let missing: Vec<&String> = rooms.keys().filter(|room| !seen.contains(*room)).collect();
    assert!(missing.is_empty(), "rooms of the table without a folder: {missing:?}");
    assert!(wrong.is_empty(), "against the table of docs/architecture.md:\n{}", wrong.join("\n"));
}

#[test]
fn a_call_against_the_table_is_seen() {
    let text = "use crate::{Error, model::ImplicitModel};\nlet x = crate::train::path();";
    assert_eq!(called(text), ["Error", "model", "train"].map(String::from).into());
}
