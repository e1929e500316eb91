//! One file per command.

pub(crate) mod attack;
pub(crate) mod bench;
pub(crate) mod certify;
pub(crate) mod collect;
pub(crate) mod completions;
pub(crate) mod convert;
pub(crate) mod evaluate;
pub(crate) mod export;
pub(crate) mod frontier;
pub(crate) mod inference;
pub(crate) mod inspect;
mod inspect_network;
pub(crate) mod lab;
pub(crate) mod predict;
pub(crate) mod quickstart;
pub(crate) mod reduce;
pub(crate) mod report;
pub(crate) mod reproduce;
pub(crate) mod train;
