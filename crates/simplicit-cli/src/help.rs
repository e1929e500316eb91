//! What help shows: the flags most people need with `-h`, everything with `--help`, and short forms of the former.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command};

/// Lines are wrapped to the terminal, up to this width.
pub(crate) const WIDTH: usize = 100;

/// Flags that `-h` shows. A new flag appears only in `--help` until it is added here.
const COMMON: [&str; 37] = [
    "help",
    "version",
    "quiet",
    "verbose",
    "positional",
    "model",
    "network",
    "inputs",
    "labels",
    "states",
    "out",
    "recipe",
    "samples",
    "target_sparsity",
    "max_drop",
    "penalty",
    "test_inputs",
    "test_labels",
    "report",
    "json",
    "threads",
    "device",
    "epsilon",
    "method",
    "bound",
    "range",
    "observed",
    "levels",
    "experiment",
    "data",
    "fast",
    "run",
    "attack",
    "certify",
    "shell",
    "what",
    "checkpoint",
];

/// Long flags that also have a single letter.
const SHORT: [(&str, char); 8] = [
    ("inputs", 'i'),
    ("labels", 'l'),
    ("out", 'o'),
    ("samples", 'n'),
    ("target-sparsity", 't'),
    ("max-drop", 'd'),
    ("threads", 'j'),
    ("epsilon", 'e'),
];

/// The letter of a long flag.
pub(crate) fn short(long: &str) -> Option<char> {
    SHORT.iter().find(|(name, _)| *name == long).map(|(_, letter)| *letter)
}

/// A command and all of its subcommands, with short forms, a short `-h` and a long `--help`.
pub(crate) fn shaped(command: Command) -> Command {
    let mut command = command.max_term_width(WIDTH).mut_args(shaped_argument).mut_subcommands(shaped);
    if let Some(text) = command.get_after_help().map(ToString::to_string) {
        let examples = text.find("Example").map_or("", |at| &text[at..]).to_string();
        command = command.after_help(examples).after_long_help(text);
    }
    command
}

fn shaped_argument(argument: Arg) -> Arg {
    let common = COMMON.contains(&argument.get_id().as_str());
    let letter = argument.get_long().and_then(short);
    let argument = argument.hide_short_help(!common);
    match letter {
        Some(letter) => argument.short(letter),
        None => argument,
    }
}

/// Which arguments are missing, what they mean, and an example: for a user who typed the command alone to see what it
/// needs.
pub(crate) fn missing(error: &clap::Error, line: &[OsString]) -> Option<String> {
    let Some(ContextValue::Strings(names)) = error.get(ContextKind::InvalidArg) else { return None };
    if error.kind() != ErrorKind::MissingRequiredArgument {
        return None;
    }
    let mut root = shaped(crate::program::command());
    root.build();
    let (command, path) = called(&root, line);
    let described: Vec<String> = names.iter().map(|name| described(command, name)).collect();
    let example = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let example = example.lines().map(str::trim).find(|l| l.starts_with(&path)).map(|l| format!("; for example {l}"));
    Some(format!("{path}: missing {}{}; see {path} -h", described.join(", "), example.unwrap_or_default()))
}

/// The flag that was meant by a part of its name, such as --sparsity for --target-sparsity.
pub(crate) fn meant(error: &clap::Error, line: &[OsString]) -> Option<String> {
    let Some(ContextValue::String(given)) = error.get(ContextKind::InvalidArg) else { return None };
    let word = given.strip_prefix("--")?;
    if error.kind() != ErrorKind::UnknownArgument {
        return None;
    }
    let root = shaped(crate::program::command());
    let (command, path) = called(&root, line);
    let flags = command.get_arguments().filter(|a| !a.is_hide_set()).filter_map(Arg::get_long);
    let near = flags.into_iter().find(|flag| flag.strip_suffix(word).is_some_and(|rest| rest.ends_with('-')))?;
    Some(format!("unexpected argument '{given}', did you mean --{near}? See {path} -h"))
}

/// The command that a line names, and the words that name it.
fn called<'a>(root: &'a Command, line: &[OsString]) -> (&'a Command, String) {
    let (mut command, mut path) = (root, String::from("simplicit"));
    for word in line.iter().skip(1).filter_map(|w| w.to_str()).filter(|w| !w.starts_with('-')) {
        let Some(next) = command.find_subcommand(word) else { break };
        command = next;
        path.push_str(&format!(" {word}"));
    }
    (command, path)
}

/// The message for a line without a command.
pub(crate) fn no_command(line: &[OsString]) -> String {
    let root = shaped(crate::program::command());
    let (command, path) = called(&root, line);
    if path == "simplicit" {
        return "no command given; see simplicit --help, or begin with simplicit quickstart".into();
    }
    let names: Vec<&str> = command.get_subcommands().map(Command::get_name).collect();
    format!("{path}: expected one of {}; see {path} -h", names.join(", "))
}

/// A flag with the first words of its help.
fn described(command: &Command, name: &str) -> String {
    // A missing positional is shown in angle brackets, an optional one in square brackets.
    let plain = |text: &str| text.trim_matches(['<', '>', '[', ']']).to_string();
    let argument = command.get_arguments().find(|a| plain(&a.to_string()) == plain(name));
    let help = argument.and_then(Arg::get_help).map(ToString::to_string).unwrap_or_default();
    let words = help.split([':', ';', '(', '[', ',']).next().unwrap_or_default().trim();
    // A description such as "--inputs (inputs)" adds nothing, so it is left out.
    if words.is_empty() || name.contains(&lower(words)) {
        name.to_string()
    } else {
        format!("{name} ({})", lower(words))
    }
}

fn lower(words: &str) -> String {
    let mut letters = words.chars();
    let (first, rest) = (letters.next(), letters.as_str());
    if rest.starts_with(char::is_uppercase) {
        return words.to_string();
    }
    first.map(|c| c.to_lowercase().to_string()).unwrap_or_default() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_are_unique_and_help_is_short() {
        // clap asserts in debug builds that no letter is used twice; here it is checked in every build.
        for sub in shaped(crate::program::command()).get_subcommands() {
            let mut letters: Vec<char> = sub.get_arguments().filter_map(Arg::get_short).collect();
            letters.sort_unstable();
            let count = letters.len();
            letters.dedup();
            assert_eq!(letters.len(), count, "{}", sub.get_name());
            let shown = sub.get_arguments().filter(|a| !a.is_hide_set() && !a.is_hide_short_help_set()).count();
            assert!(shown <= 17, "{}: {shown} flags with -h", sub.get_name());
        }
    }
}
