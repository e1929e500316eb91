//! `simplicit completions`: tab completion for a shell.

use clap::Args;
use clap_complete::Shell;

use crate::exit::{Outcome, emit};

/// Print tab completions for a shell
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  simplicit completions bash > ~/.local/share/bash-completion/completions/simplicit")]
pub(crate) struct CompletionsArgs {
    /// Which shell
    shell: Shell,
}

pub(crate) fn run(args: &CompletionsArgs) -> anyhow::Result<Outcome> {
    let mut out = Vec::new();
    clap_complete::generate(args.shell, &mut crate::help::shaped(crate::program::command()), "simplicit", &mut out);
    emit(&String::from_utf8_lossy(&out))?;
    Ok(Outcome::Done)
}
