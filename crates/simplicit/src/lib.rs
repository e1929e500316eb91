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
//! which has one equilibrium x for every input u. A penalty f that is a sum over entries makes the weights sparse, and the
//! problem falls apart into n + q convex problems, one a row; all share the features Ũ = \[X; U\]:
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
//! (Files and public arrays hold one sample a row; the paper's columns are used in formulae.)
//!
//! # The walk
//!
//! ```text
//! network ──collect──▶ states ──accumulate──▶ statistics ──solve rows──▶ rows ──assemble──▶ model
//! ```
//!
//! [`network`] (a graph, perhaps from ONNX) and [`arrays`] are where states come from; [`states`] reads them in blocks;
//! [`statistics`] is one pass over them, after which the samples are never needed again; [`problem`] says what is solved
//! and [`solver`] solves it, every row to a certified gap. [`linalg`] is the only module that names the matrix crate and
//! [`parallel`] the only one that starts threads.
//!
//! # Arrays in, certified rows out
//!
//! ```
//! use simplicit::arrays::Array;
//! use simplicit::layout::Activation;
//! use simplicit::linalg::Matrix;
//! use simplicit::parallel::{Cancel, Threads};
//! use simplicit::problem::penalty::L1;
//! use simplicit::problem::{Ball, RowProblem, Units};
//! use simplicit::random::Random;
//! use simplicit::solver::{Design, SolverSettings, Status, solve_rows};
//! use simplicit::states::ArrayStates;
//! use simplicit::statistics::Statistics;
//!
//! # fn main() -> simplicit::Result<()> {
//! // 500 samples of a network with 8 inputs, 6 ReLU states and 2 outputs, one sample a row.
//! let mut random = Random::new(0);
//! let u = Matrix::from_fn(500, 8, |_, _| random.normal());
//! let z = Matrix::from_fn(500, 6, |i, j| 0.8 * u[(i, j)] - 0.3 * u[(i, j + 2)]);
//! let x = Matrix::from_fn(500, 6, |i, j| z[(i, j)].max(0.0));
//! let y = Matrix::from_fn(500, 2, |i, j| x[(i, j)] - x[(i, j + 3)]);
//! let array = |name, matrix| Array::from_matrix(name, matrix);
//! let states =
//!     ArrayStates::without_layout(array("U", &u), array("Z", &z), array("X", &x), array("Y", &y), Activation::Relu)?;
//!
//! // One pass over the samples, one factorisation for all rows.
//! let (threads, cancel) = (Threads::available(), Cancel::new());
//! let statistics = Statistics::of_states(&states, false, threads, &cancel, |_| {})?;
//! let design = Design::new(&statistics)?;
//!
//! // Normalised units, ‖a‖₁ ≤ 0.99 on the state rows, no state from itself.
//! let problems: Vec<RowProblem> = (0..6 + 2)
//!     .map(|row| {
//!         let mut problem = RowProblem::new(row, 1.0 / design.target_rms(row).powi(2));
//!         problem.units = Units::Rms { factor: 1.0 / design.target_rms(row) };
//!         if row < 6 {
//!             problem.ball = Some(Ball::on_states(0.99, 6, 14));
//!             problem.weights = Some((0..14).map(|j| if j == row { f64::INFINITY } else { 1.0 }).collect());
//!         }
//!         problem
//!     })
//!     .collect();
//! let rows = solve_rows(&design, &L1::new(0.01)?, &problems, &SolverSettings::default(), threads, &cancel, |_| {})?;
//!
//! for row in &rows {
//!     assert_eq!(row.status, Status::Solved);
//!     assert!(row.relative_gap <= 1e-6); // at most so far from optimal, proven
//!     assert_eq!(row.weights.iter().filter(|w| **w != 0.0).count(), 2); // the two connections there are
//! }
//! # Ok(())
//! # }
//! ```
//!
//! A penalty of your own is a small trait (`docs/add-a-penalty.md`), and so is a way of your own to find rows
//! (`docs/add-a-row-method.md`).

pub mod arrays;
pub mod attack;
pub mod backend;
pub mod certify;
pub mod equilibrium;
mod error;
pub mod evaluate;
pub mod files;
pub mod graph;
pub mod kernels;
pub mod layout;
pub mod linalg;
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

pub use error::{Error, InfeasibleRow, Result};

/// The documents' examples, run as tests.
#[cfg(doctest)]
mod documents {
    #[doc = include_str!("../../../docs/add-a-penalty.md")]
    struct AddAPenalty;

    #[doc = include_str!("../../../docs/add-a-row-method.md")]
    struct AddARowMethod;
}
