//! Sparse, well-posed implicit models from trained networks, by convex optimisation.
//!
//! Given a baseline's inputs U (p × m), states X = φ(Z) (n × m, last layer on top) and outputs Y (q × m) on m samples,
//! find A (n × n), B (n × p), C (q × n) and D (q × p) that solve
//!
//! <div><math display="block">
//! <mrow><munder><mo>min</mo><mrow><mi>A</mi><mo>,</mo><mi>B</mi><mo>,</mo><mi>C</mi><mo>,</mo><mi>D</mi></mrow></munder><mspace width="1em"/><mi>f</mi><mo>(</mo><mi>A</mi><mo>,</mo><mi>B</mi><mo>,</mo><mi>C</mi><mo>,</mo><mi>D</mi><mo>)</mo><mo>+</mo></mrow>
//! <mrow><msub><mi>λ</mi><mn>1</mn></msub><msup><mrow><mo>‖</mo><mi>Z</mi><mo>−</mo><mi>A</mi><mi>X</mi><mo>−</mo><mi>B</mi><mi>U</mi><mo>‖</mo></mrow><mn>2</mn></msup><mo>+</mo></mrow>
//! <mrow><msub><mi>λ</mi><mn>2</mn></msub><msup><mrow><mo>‖</mo><mi>Y</mi><mo>−</mo><mi>C</mi><mi>X</mi><mo>−</mo><mi>D</mi><mi>U</mi><mo>‖</mo></mrow><mn>2</mn></msup></mrow>
//! <mrow><mspace width="1em"/><mtext>s.t.</mtext><mspace width="1em"/><msub><mrow><mo>‖</mo><mi>A</mi><mo>‖</mo></mrow><mi>∞</mi></msub><mo>≤</mo><mi>κ</mi><mo>&lt;</mo><mn>1</mn></mrow>
//! </math></div>
//!
//! and with them the implicit model, biases b (n) and d (q) included,
//!
//! <div><math display="block">
//! <mrow><mi>x</mi><mo>=</mo><mi>φ</mi><mo>(</mo><mi>A</mi><mi>x</mi><mo>+</mo><mi>B</mi><mi>u</mi><mo>+</mo><mi>b</mi><mo>)</mo><mo>,</mo><mspace width="1em"/><mi>y</mi><mo>=</mo><mi>C</mi><mi>x</mi><mo>+</mo><mi>D</mi><mi>u</mi><mo>+</mo><mi>d</mi></mrow>
//! </math></div>
//!
//! which has one equilibrium x for every input u. A penalty f that is a sum over entries makes the weights sparse,
//! and the problem separates into n + q convex problems, one per row; all share the features Ũ = \[X; U\]:
//!
//! <div><math display="block">
//! <mrow><munder><mo>min</mo><mi>w</mi></munder><mspace width="1em"/><mfrac><mi>Λ</mi><mi>m</mi></mfrac><msup><mrow><mo>‖</mo><mi>z</mi><mo>−</mo><msup><mi>Ũ</mi><mo>⊤</mo></msup><mi>w</mi><mo>‖</mo></mrow><mn>2</mn></msup><mo>+</mo></mrow>
//! <mrow><munder><mo>∑</mo><mi>j</mi></munder><msub><mi>ω</mi><mi>j</mi></msub><mi>f</mi><mo>(</mo><msub><mi>s</mi><mi>j</mi></msub><msub><mi>w</mi><mi>j</mi></msub><mo>)</mo></mrow>
//! <mrow><mspace width="1em"/><mtext>s.t.</mtext><mspace width="1em"/><munder><mo>∑</mo><mrow><mi>j</mi><mo>∈</mo><mi>A</mi></mrow></munder><msub><mi>c</mi><mi>j</mi></msub><mo>|</mo><msub><mi>w</mi><mi>j</mi></msub><mo>|</mo><mo>≤</mo><mi>κ</mi><mo>,</mo><mspace width="1em"/></mrow>
//! <mrow><msub><mi>l</mi><mi>j</mi></msub><mo>≤</mo><msub><mi>w</mi><mi>j</mi></msub><mo>≤</mo><msub><mi>u</mi><mi>j</mi></msub></mrow>
//! </math></div>
//!
//! | symbol | shape | meaning |
//! |---|---|---|
//! | m, n, p, q | | samples, states, inputs, outputs |
//! | Ũ | d × m | features of every row: states, inputs and, where there is a bias, the constant |
//! | z | m | the row's target: one row of Z or Y |
//! | w | d | the row of (A B) or (C D) |
//! | Λ | | weight of the mean squared mismatch: λ₁m on state rows, λ₂m on output rows |
//! | f | | [penalty](problem::penalty) of one weight: ℓ1, perspective, elastic net, ridge or your own |
//! | ω, s | d | entry weights (∞ forbids, 0 is free) and [units](problem::Units) |
//! | c, κ | d | the well-posedness ball on the A part: Σ\|a_j\| ≤ κ |
//! | l, u | d | bounds |
//!
//! (Files and public arrays hold one sample per row; the paper's columns are used in formulae.)
//!
//! # The front door
//!
//! | from | to | by |
//! |---|---|---|
//! | an ONNX file | a network | [`Network::from_onnx`] |
//! | a network and inputs | a sparse model and its report | [`compress()`] |
//! | a model and inputs | outputs | [`Prepared`]; with states and bounds of their errors, [`Equilibrium`] |
//! | a model | a file, ONNX | [`ImplicitModel::save`], [`onnx`] |
//! | arrays of one's own | sparse rows, proven | [`Problem`] |
//! | a model and labelled inputs | accuracy, attacks, certificates | [`evaluate`], [`attack`], [`certify`] |
//!
//! Work that takes long receives a [`Run`]: threads, a checkpoint, progress and a way to stop. These names, and those
//! that their signatures mention, are all that most callers need; the modules below hold the rest.
//!
//! ```
//! use simplicit::compress::Settings;
//! use simplicit::layout::Activation;
//! use simplicit::network::Shape;
//! use simplicit::random::Random;
//! use simplicit::{Matrix, Network, Prepared, Run, Threads, compress};
//!
//! # fn main() -> simplicit::Result<()> {
//! let mut random = Random::new(0);
//! let mut dense = |rows, cols| Matrix::from_fn(rows, cols, |_, _| random.normal() as f32 / (cols as f32).sqrt());
//! let network = Network::builder(Shape::Vector(20))? // yours: Network::from_onnx("network.onnx")?
//!     .linear(dense(16, 20), None)?
//!     .activation(Activation::Relu)?
//!     .linear(dense(4, 16), None)?
//!     .build()?;
//! let inputs = dense(300, 20); // yours; one sample a row, no labels
//!
//! let sparse = compress(&network, &inputs, &Settings::to_sparsity(0.5), &mut Run::default())?;
//! assert!((sparse.model.sparsity().sparsity - 0.5).abs() < 0.05);
//! let outputs = Prepared::new(&sparse.model, 300)?.outputs(&inputs, Threads::available())?;
//! assert_eq!((outputs.rows(), outputs.cols()), (300, 4));
//! # Ok(())
//! # }
//! ```
//!
//! # Arrays in, certified rows out
//!
//! ```
//! use simplicit::problem::penalty::L1;
//! use simplicit::random::Random;
//! use simplicit::solver::Status;
//! use simplicit::{Cancel, Matrix, Problem, Threads};
//!
//! # fn main() -> simplicit::Result<()> {
//! // 500 samples of 14 features, and two targets, each a sum of two of them; one sample a row.
//! let mut random = Random::new(0);
//! let features = Matrix::from_fn(500, 14, |_, _| random.normal());
//! let targets = Matrix::from_fn(500, 2, |i, k| 0.8 * features[(i, k)] - 0.3 * features[(i, k + 6)]);
//! let (threads, cancel) = (Threads::available(), Cancel::new());
//!
//! // A convex penalty: every row is solved to a certified gap.
//! let convex = Problem::new(&features, &targets)?.penalty(L1::new(0.01)?).solve(threads, &cancel)?;
//! assert!(convex.iter().all(|row| row.status == Status::Solved && row.relative_gap <= 1e-6));
//!
//! // A price for every non-zero: not convex, but each row comes with its distance from a lower bound, and more time
//! // may prove it optimal.
//! let problem = Problem::new(&features, &targets)?.price(1e-3);
//! let rows = problem.solve(threads, &cancel)?;
//! let proven = problem.prove(0, &rows[0], 10.0, &cancel)?;
//! assert_eq!(proven.status, Status::Solved);
//! assert_eq!(proven.weights.iter().filter(|w| **w != 0.0).count(), 2);
//! # Ok(())
//! # }
//! ```
//!
//! # The walk
//!
//! ```text
//! network ──collect──▶ states ──accumulate──▶ statistics ──solve rows──▶ rows ──assemble──▶ model
//! ```
//!
//! [`network`] (a graph, perhaps from ONNX) and [`arrays`] are where states come from; [`states`] reads them in blocks;
//! [`statistics`] is one pass over them, after which the samples are never needed again; [`problem`] says what is solved
//! and [`solver`] solves it, every row to a certified gap; [`train`] does so layer by layer and searches for the price
//! that hits a target. [`linalg`] is the only module that names the matrix crate and [`parallel`] the only one that starts
//! threads.
//!
//! A penalty of your own is a small trait (`docs/add-a-penalty.md`), and so is a way of your own to find rows
//! (`docs/add-a-row-method.md`).

pub mod arrays;
pub mod attack;
pub mod backend;
pub mod certify;
pub mod compress;
pub mod equilibrium;
mod error;
pub mod evaluate;
#[doc(hidden)] // for the command line and the benchmarks
pub mod files;
pub mod graph;
#[doc(hidden)] // for the command line and the benchmarks
pub mod kernels;
pub mod layout;
pub mod linalg;
#[doc(hidden)] // for the command line and the benchmarks
pub mod memory;
pub mod model;
pub mod network;
pub mod onnx;
pub mod parallel;
pub mod problem;
pub mod random;
pub mod solver;
pub mod states;
pub mod statistics;
pub mod train;

pub use compress::{Compressed, compress};
pub use equilibrium::{Equilibrium, Prepared};
pub use error::{Error, InfeasibleRow, Result};
pub use linalg::Matrix;
pub use model::ImplicitModel;
pub use network::Network;
pub use parallel::{Cancel, Threads};
pub use solver::Problem;
pub use train::Run;

/// The examples in the documents, run as tests.
#[cfg(doctest)]
mod documents {
    #[doc = include_str!("../../../docs/add-a-penalty.md")]
    struct AddAPenalty;

    #[doc = include_str!("../../../docs/add-a-row-method.md")]
    struct AddARowMethod;
}
