//! `simplicit`: sparse, well-posed implicit models from trained networks, on the command line.

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::exit::{self, Outcome};
use crate::{commands, help, interrupt, progress, recipe};

const EXAMPLES: &str = "\
Examples:
  simplicit quickstart                      see it work, on embedded data, in seconds
  simplicit train net.onnx --inputs images.npy --out model.safetensors
  simplicit train net.onnx --inputs u.npy --target-sparsity 0.8 --out m.safetensors
  simplicit evaluate m.safetensors net.onnx --inputs u.npy --labels y.npy
  simplicit export model.safetensors --out sparse.onnx

Exit codes: 0 done; 1 done, with a note on stderr that a script must see (a row at its limit, a
sample not converged, a target missed); 2 failed or refused, one line on stderr; 130 after Ctrl-C.
Results go to stdout, everything else to stderr.";

/// Sparse, well-posed implicit models from trained networks, by convex optimisation
///
/// A trained network goes in; a smaller implicit model x = φ(Ax + Bu + b), ŷ = Cx + Du + d comes out, with the states of
/// the network matched row by row, every convex row certified, and the file as small as its non-zeros.
#[derive(Debug, Parser)]
#[command(name = "simplicit", version, after_help = EXAMPLES, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    /// Print no table and show no progress; notes, errors and --json - stay
    #[arg(short, long, global = true, conflicts_with = "verbose", help_heading = "Running")]
    quiet: bool,
    /// Say on stderr what is being done and how long it takes
    #[arg(short, long, global = true, help_heading = "Running")]
    verbose: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Quickstart(commands::quickstart::QuickstartArgs),
    Train(Box<commands::train::TrainArgs>),
    Evaluate(commands::evaluate::EvaluateArgs),
    Predict(commands::predict::PredictArgs),
    Collect(commands::collect::CollectArgs),
    Convert(commands::convert::ConvertArgs),
    Inspect(commands::inspect::InspectArgs),
    Export(commands::export::ExportArgs),
    Attack(commands::attack::AttackArgs),
    Certify(commands::certify::CertifyArgs),
    Reduce(commands::reduce::ReduceArgs),
    Report(commands::report::ReportArgs),
    Bench(commands::bench::BenchArgs),
    Lab(commands::lab::LabArgs),
    Completions(commands::completions::CompletionsArgs),
    /// Moved: simplicit lab reproduce
    #[command(hide = true)]
    Reproduce(commands::reproduce::ReproduceArgs),
}

/// The commands and flags as clap knows them.
pub(crate) fn command() -> clap::Command {
    Cli::command()
}

/// The whole program, from its arguments to its exit code.
pub fn main() -> ExitCode {
    exit::code(run())
}

fn run() -> anyhow::Result<Outcome> {
    let line = recipe::expand(std::env::args_os().collect())?;
    let parsed = help::shaped(command()).try_get_matches_from(&line);
    let cli = match parsed.and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli,
        Err(error) if !error.use_stderr() => {
            exit::emit(&error.render().to_string())?;
            return Ok(Outcome::Done);
        }
        Err(error) if error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            anyhow::bail!(help::no_command(&line))
        }
        Err(error) => {
            let said = help::missing(&error, &line).or_else(|| help::meant(&error, &line));
            anyhow::bail!(said.unwrap_or_else(|| usage(&error)))
        }
    };
    if cli.quiet {
        exit::be_quiet();
    }
    if cli.verbose {
        progress::be_verbose();
    }
    let cancel = interrupt::listen()?;
    match cli.command {
        Command::Quickstart(args) => commands::quickstart::run(&args, &cancel),
        Command::Train(mut args) => {
            args.settle()?;
            commands::train::run(&args, &cancel)
        }
        Command::Evaluate(args) => commands::evaluate::run(&args, &cancel),
        Command::Predict(args) => commands::predict::run(&args, &cancel),
        Command::Collect(args) => commands::collect::run(&args, &cancel),
        Command::Convert(args) => commands::convert::run(&args),
        Command::Inspect(args) => commands::inspect::run(&args),
        Command::Export(args) => commands::export::run(&args),
        Command::Attack(args) => commands::attack::run(&args, &cancel),
        Command::Certify(args) => commands::certify::run(&args, &cancel),
        Command::Reduce(args) => commands::reduce::run(&args, &cancel),
        Command::Report(args) => commands::report::run(&args, &cancel),
        Command::Bench(args) => commands::bench::run(&args, &cancel),
        Command::Completions(args) => commands::completions::run(&args),
        Command::Lab(args) => commands::lab::run(args, &cancel),
        Command::Reproduce(args) => {
            commands::lab::moved("reproduce", "lab reproduce");
            commands::reproduce::run(&args, &cancel)
        }
    }
}

/// clap's message without the usage block, on one line.
pub(crate) fn usage(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let text = text.split("\n\nUsage:").next().unwrap_or(&text);
    let text = text.split("\n\nFor more information").next().unwrap_or(text);
    let text = exit::one_line(text);
    format!("{}; see --help", text.strip_prefix("error: ").unwrap_or(&text))
}
