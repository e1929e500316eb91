//! Commands of the contract that come later: listed, and refused with exit 2.

use clap::Args;

/// Takes anything, so that the refusal is the same whatever was asked.
#[derive(Debug, Args)]
pub(crate) struct LaterArgs {
    #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
    _anything: Vec<String>,
}
