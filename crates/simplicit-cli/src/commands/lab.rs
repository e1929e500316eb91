//! `simplicit lab`: what researchers run, apart from what users need.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use simplicit::parallel::Cancel;

use super::frontier::{self, FrontierArgs};
use super::reproduce::{self, ReproduceArgs};
use crate::args::RunArgs;
use crate::exit::{Outcome, complain};

const FRONTIER: &str = "\
Prints the whole trade-off curve from one set-up: for every level of sparsity a model with the
default settings, the share of the held-out inputs (the last tenth) that it predicts as the baseline
does, and its certificates. On embedded data, with the test accuracy, or on a network and inputs of
your own. The rivals on the same states are in crates/simplicit-bench.

Examples:
  simplicit lab frontier
  simplicit lab frontier net.onnx --inputs images.npy --samples 20000 --levels 0.8,0.9";

/// Experiments: the paper's, and accuracy against sparsity
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  simplicit lab reproduce fashion-mnist --out fashion\n  simplicit lab frontier")]
pub(crate) struct LabArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Reproduce(ReproduceArgs),
    Frontier(LabFrontierArgs),
}

/// Accuracy against sparsity from one set-up
#[derive(Debug, Args)]
#[command(after_help = FRONTIER)]
struct LabFrontierArgs {
    /// The baseline, an ONNX network (also as --network FILE) [default: the embedded one]
    #[arg(value_name = "NETWORK", requires = "inputs", conflicts_with = "network")]
    positional: Option<PathBuf>,
    #[command(flatten)]
    frontier: FrontierArgs,
    #[command(flatten)]
    run: RunArgs,
}

pub(crate) fn run(args: LabArgs, cancel: &Cancel) -> anyhow::Result<Outcome> {
    match args.what {
        What::Reproduce(args) => reproduce::run(&args, cancel),
        What::Frontier(LabFrontierArgs { positional, mut frontier, run }) => {
            frontier.network = positional.or(frontier.network);
            frontier::run(&frontier, &run, cancel)
        }
    }
}

/// An old spelling of a command works for one more version and prints a note. The exit code does not change.
pub(crate) fn moved(old: &str, new: &str) {
    complain(&format!("note: simplicit {old} is now simplicit {new}; the old spelling goes with the next version"));
}
