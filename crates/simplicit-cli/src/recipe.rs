//! Recipes: the flags of `train` in a TOML file. Flags on the command line win.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::CommandFactory;
use simplicit::files::read_capped;

const MAX_BYTES: u64 = 1 << 20;
/// Flags of `train` that say how to run, not what to compute: not for recipes.
const NOT_IN_RECIPES: [&str; 2] = ["recipe", "help"];

/// The command line with the recipe's keys as flags, left out where the command line has them itself.
pub(crate) fn expand(mut line: Vec<OsString>) -> anyhow::Result<Vec<OsString>> {
    if line.get(1).is_none_or(|c| c != "train") {
        return Ok(line);
    }
    let Some(path) = value_of(&line, "recipe") else { return Ok(line) };
    let mut flags = Vec::new();
    for (key, value) in read(Path::new(&path))? {
        if !given(&line, &key) {
            flags.extend(flag(&key, &value).with_context(|| path.to_string_lossy().into_owned())?);
        }
    }
    line.splice(2..2, flags.into_iter().map(OsString::from));
    Ok(line)
}

fn read(path: &Path) -> anyhow::Result<toml::Table> {
    let bytes = read_capped(path, MAX_BYTES)?;
    let text = String::from_utf8(bytes).with_context(|| path.display().to_string())?;
    text.parse().with_context(|| path.display().to_string())
}

fn given(line: &[OsString], key: &str) -> bool {
    let flag = format!("--{key}");
    line.iter()
        .filter_map(|a| a.to_str())
        .any(|a| a.strip_prefix(&flag).is_some_and(|r| r.is_empty() || r.starts_with('=')))
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

/// A key and its value as a flag; a switch without a value by true or false.
fn flag(key: &str, value: &toml::Value) -> anyhow::Result<Vec<String>> {
    let command = crate::Cli::command();
    let train = command.find_subcommand("train").context("the command train")?;
    let known: Vec<&clap::Arg> =
        train.get_arguments().filter(|a| a.get_long().is_some_and(|l| !NOT_IN_RECIPES.contains(&l))).collect();
    let Some(argument) = known.iter().find(|a| a.get_long() == Some(key)) else {
        let names: Vec<&str> = known.iter().filter(|a| !a.is_hide_set()).filter_map(|a| a.get_long()).collect();
        bail!("unknown key {key:?}, expected one of {}", names.join(", "));
    };
    if matches!(argument.get_action(), clap::ArgAction::SetTrue) {
        return match value {
            toml::Value::Boolean(true) => Ok(vec![format!("--{key}")]),
            toml::Value::Boolean(false) => Ok(Vec::new()),
            other => bail!("{key}: expected true or false, got {other}"),
        };
    }
    Ok(vec![format!("--{key}={}", text(key, value)?)])
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

/// Where the effective recipe of an output goes: `model.safetensors` has `model.recipe.toml` beside it.
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
        assert!(message.contains("unknown key \"betta\"") && message.contains("beta"), "{message}");
        assert_eq!(expand(line(&["simplicit", "inspect", &recipe])).unwrap().len(), 3);
    }
}
