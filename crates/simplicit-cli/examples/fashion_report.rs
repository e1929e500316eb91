//! Trains the embedded FashionMNIST network on the 2,000 embedded images and writes its report:
//! `cargo run --release -p simplicit-cli --example fashion_report -- report.html`
//!
//! `docs/report.png` is this page: `chromium --headless --hide-scrollbars --screenshot=report.png
//! --window-size=1200,3800 report.html`, reduced to 256 colours.

#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../tests/fashion/mod.rs"]
mod fashion;

use simplicit::train::TrainSettings;

fn main() {
    let path = std::env::args().nth(1).unwrap_or_else(|| panic!("expected the path of the page to write"));
    let settings = TrainSettings { target_sparsity: Some(0.65), ..Default::default() };
    std::fs::write(path, fashion::fashion_report(2_000, 10_000, &settings)).unwrap();
}
