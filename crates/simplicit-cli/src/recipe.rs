//! Recipes: the flags of `train` in a TOML file. Flags on the command line win.

use std::ffi::OsString;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use simplicit::files::read_capped;
use toml::Spanned;
use toml::de::DeTable;

const MAX_BYTES: u64 = 1 << 20;
/// Flags of `train` that a recipe must not contain, because they say how to run and not what to compute.
const NOT_IN_RECIPES: [&str; 2] = ["recipe", "help"];

/// The command line with the recipe's keys as additional flags; a key whose flag is on the command line is left out.
pub(crate) fn expand(mut line: Vec<OsString>) -> anyhow::Result<Vec<OsString>> {
    // -q and -v may stand before the command.
    let first = |line: &[OsString]| line.iter().skip(1).position(|w| !w.to_string_lossy().starts_with('-'));
    let Some(at) = first(&line).map(|at| at + 1).filter(|at| line[*at] == "train") else { return Ok(line) };
    let Some(path) = value_of(&line, "recipe") else { return Ok(line) };
    let (path, mut flags) = (Path::new(&path), Vec::new());
    let bytes = read_capped(path, MAX_BYTES)?;
    let text = String::from_utf8(bytes).with_context(|| path.display().to_string())?;
    let misplaced = |message: String, span: Range<usize>| Misplaced::new(path, &text, message, span);
    let table: toml::Table = text.parse().map_err(|e: toml::de::Error| {
        let place = misplaced(e.message().to_string(), e.span().unwrap_or(0..0));
        // The place helps in a recipe, not in a file of another kind.
        if path.extension().is_some_and(|extension| extension == "toml") {
            return anyhow::Error::from(place);
        }
        anyhow::anyhow!("{place}; expected a recipe in TOML, as a run writes beside its --out")
    })?;
    // Parsed once more to learn the places of the keys; text that parses as a table also parses this way.
    let places = DeTable::parse(&text).map(Spanned::into_inner).unwrap_or_default();
    for (key, value) in table {
        if !given(&line, &key) {
            let place = places.keys().find(|k| *k.get_ref() == *key).map_or(0..0, Spanned::span);
            flags.extend(flag(&key, &value).map_err(|e| misplaced(e.to_string(), place))?);
        }
    }
    line.splice(at + 1..at + 1, flags.into_iter().map(OsString::from));
    Ok(line)
}

/// An error at a place of a recipe.
#[derive(Debug)]
pub(crate) struct Misplaced {
    file: String,
    message: String,
    /// Counted from 1, as in editors.
    line: usize,
    column: usize,
    source: String,
    width: usize,
}

impl Misplaced {
    fn new(path: &Path, text: &str, message: String, span: Range<usize>) -> Self {
        let before = text.get(..span.start).unwrap_or(text);
        let begin = before.rfind('\n').map_or(0, |at| at + 1);
        let source = text[begin..].lines().next().unwrap_or_default();
        let column = before[begin..].chars().count() + 1;
        let marked = text.get(span).map_or(0, |t| t.lines().next().unwrap_or_default().chars().count());
        Self {
            file: path.display().to_string(),
            message,
            line: before.matches('\n').count() + 1,
            column,
            width: marked.clamp(1, (source.chars().count() + 2 - column).max(1)),
            source: source.to_string(),
        }
    }

    /// The line with the place marked below it.
    pub(crate) fn excerpt(&self) -> String {
        let number = self.line.to_string();
        // Tabs stay tabs, so that the mark stands below its place.
        let indent = self.source.chars().take(self.column - 1).map(|c| if c == '\t' { '\t' } else { ' ' });
        let margin = " ".repeat(number.len());
        let mark = "^".repeat(self.width);
        format!("  {number} | {}\n  {margin} | {}{mark}", self.source, indent.collect::<String>())
    }
}

impl std::fmt::Display for Misplaced {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}:{}: {}", self.file, self.line, self.column, self.message)
    }
}

impl std::error::Error for Misplaced {}

fn given(line: &[OsString], key: &str) -> bool {
    let long = format!("--{key}");
    let short = crate::help::short(key).map(|letter| format!("-{letter}"));
    line.iter().filter_map(|a| a.to_str()).any(|a| {
        let is_long = a.strip_prefix(&long).is_some_and(|r| r.is_empty() || r.starts_with('='));
        is_long || short.as_ref().is_some_and(|short| a.starts_with(short.as_str()))
    })
}

fn value_of(line: &[OsString], key: &str) -> Option<OsString> {
    let flag = format!("--{key}");
    let mut arguments = line.iter();
    while let Some(argument) = arguments.next() {
        if *argument == *flag {
            return arguments.next().cloned();
        }
        if let Some(value) = argument.to_str().and_then(|a| a.strip_prefix(&flag)).and_then(|r| r.strip_prefix('=')) {
            return Some(value.into());
        }
    }
    None
}

/// The name of the flag under which a value is parsed alone.
const ALONE: &str = "value-of-recipe";

/// A key and its value as a flag; a switch without a value is given as true or false.
fn flag(key: &str, value: &toml::Value) -> anyhow::Result<Vec<String>> {
    let command = crate::program::command();
    let train = command.find_subcommand("train").context("the command train")?;
    let known: Vec<&clap::Arg> =
        train.get_arguments().filter(|a| a.get_long().is_some_and(|l| !NOT_IN_RECIPES.contains(&l))).collect();
    let Some(argument) = known.iter().find(|a| a.get_long() == Some(key)) else {
        let names: Vec<&str> =
            known.iter().filter_map(|a| a.get_long().filter(|l| !a.is_hide_set() || *l == "network")).collect();
        let near = names.iter().map(|n| (distance(n, key), *n)).min().filter(|(d, _)| *d <= 2);
        let hint = near.map_or_else(String::new, |(_, name)| format!(", did you mean {name}?"));
        bail!(
            "unknown key {key:?}{hint}{} one of {}",
            if hint.is_empty() { ", expected" } else { " Expected" },
            names.join(", ")
        );
    };
    let value_or_switch = || -> anyhow::Result<Vec<String>> {
        if !matches!(argument.get_action(), clap::ArgAction::SetTrue) {
            return Ok(vec![format!("--{key}={}", text(key, value)?)]);
        }

        match value {
            toml::Value::Boolean(true) => Ok(vec![format!("--{key}")]),
            toml::Value::Boolean(false) => Ok(Vec::new()),
            other => bail!("{key}: expected true or false, got {other}"),
        }
    };
    let words = value_or_switch()?;
    // Parsed alone, so that the message about a wrong value can name its place in the recipe.
    let mut alone = clap::Arg::new(ALONE).long(ALONE).action(argument.get_action().clone());
    alone = alone.value_parser(argument.get_value_parser().clone()).allow_hyphen_values(true);
    if let Some(delimiter) = argument.get_value_delimiter() {
        alone = alone.value_delimiter(delimiter);
    }
    let renamed = words.iter().map(|word| word.replacen(&format!("--{key}"), &format!("--{ALONE}"), 1));
    let tried = clap::Command::new("recipe").no_binary_name(true).arg(alone).try_get_matches_from(renamed);
    match tried {
        Ok(_) => Ok(words),
        Err(error) => {
            let message = crate::program::usage(&error);
            bail!(message.trim_end_matches("; see --help").replace(&format!("--{ALONE} <{ALONE}>"), key));
        }
    }
}

/// The number of letters to insert, remove or change to turn one word into the other.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.bytes().enumerate() {
            let change = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = change.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

fn text(key: &str, value: &toml::Value) -> anyhow::Result<String> {
    Ok(match value {
        toml::Value::String(text) => text.clone(),
        toml::Value::Integer(number) => number.to_string(),
        toml::Value::Float(number) => number.to_string(),
        toml::Value::Boolean(on) => (if *on { "on" } else { "off" }).to_string(),
        toml::Value::Array(values) => {
            values.iter().map(|v| text(key, v)).collect::<anyhow::Result<Vec<_>>>()?.join(",")
        }
        other => bail!("{key}: expected a text, a number, true, false or a list of numbers, got {other}"),
    })
}

/// The path of an output's effective recipe: `model.recipe.toml` in the folder of `model.safetensors`.
pub(crate) fn beside(output: &Path) -> PathBuf {
    output.with_extension("recipe.toml")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(words: &[&str]) -> Vec<OsString> {
        words.iter().map(OsString::from).collect()
    }

    #[test]
    fn flags_win_and_unknown_keys_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("r.toml");
        let recipe = format!("--recipe={}", path.display());
        std::fs::write(&path, "penalty = \"l1\"\nbeta = 1e-3\nmean = [0.5, -0.25]\nrefit = false\nrescale = true\n")
            .unwrap();
        let expanded = expand(line(&["simplicit", "train", "--beta", "2e-3", &recipe])).unwrap();
        let expected = line(&[
            "simplicit",
            "train",
            "--mean=0.5,-0.25",
            "--penalty=l1",
            "--refit=off",
            "--rescale",
            "--beta",
            "2e-3",
            &recipe,
        ]);
        assert_eq!(expanded, expected);
        std::fs::write(&path, "betta = 1").unwrap();
        let message = format!("{:#}", expand(line(&["simplicit", "train", &recipe])).unwrap_err());
        assert!(message.contains("r.toml:1:1: unknown key \"betta\", did you mean beta?"), "{message}");
        assert_eq!(expand(line(&["simplicit", "inspect", &recipe])).unwrap().len(), 3);
    }

    #[test]
    fn the_place_is_marked() {
        let text = "seed = 1\n\tpenalty = \"l0\"\n";
        let place = Misplaced::new(Path::new("r.toml"), text, "unknown".into(), 10..17);
        assert_eq!(place.to_string(), "r.toml:2:2: unknown");
        assert_eq!(place.excerpt(), "  2 | \tpenalty = \"l0\"\n    | \t^^^^^^^");
        // A place beyond the text or across several lines must not panic.
        for span in [0..0, 5..400, 400..500, text.len()..text.len()] {
            assert!(Misplaced::new(Path::new("r.toml"), text, "x".into(), span).excerpt().contains('^'));
        }
    }

    #[test]
    fn wrong_values_have_their_place() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("r.toml");
        let recipe = format!("--recipe={}", path.display());
        for (text, place) in [
            ("seed = 1\npenalty = \"l0\"\n", ":2:1:"),
            ("rescale = 3", ":1:1:"),
            ("beta = = 1", ":1:8:"),
            ("seed = -1", ":1:1:"),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = expand(line(&["simplicit", "train", &recipe])).unwrap_err();
            assert!(error.downcast_ref::<Misplaced>().unwrap().to_string().contains(place), "{error}");
        }
    }

    #[test]
    fn distances_of_words() {
        assert_eq!([distance("beta", "betta"), distance("", "abc"), distance("mu", "mu")], [1, 3, 0]);
    }
}
