//! The tests of the library in one program: they link once and share the cores.

#![allow(dead_code, missing_docs, unreachable_pub, clippy::unwrap_used, clippy::panic)]

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/networks.rs"]
mod networks;

mod any_network;
mod arrays;
mod blocks;
mod choice;
mod conv_training;
mod equilibrium;
mod exact;
mod max_drop;
mod model_file;
mod onnx;
mod onnx_reference;
mod path;
mod prepared;
mod python;
mod reconstruct;
mod reduce;
mod robustness;
mod rooms;
mod row_method;
mod settings;
mod solver;
mod states;
mod taps;
mod unusual;
mod walk;
