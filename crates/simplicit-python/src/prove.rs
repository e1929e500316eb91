//! Proofs about one row with a price on every non-zero.

use pyo3::prelude::*;
use simplicit::solver::prove::{PricedRow, ProveSettings, Then, Verdict};

use crate::arrays::Lent;
use crate::door::enter;

/// The diagonal, point and fixed entries of one case of a proof.
type Evidence = (usize, Vec<f64>, Vec<(usize, bool)>);
/// A case: its evidence, and where the case splits (entry, case without the entry, case with it).
type Case = (Option<Evidence>, Option<(usize, usize, usize)>);
/// Value, bound, best value, its weights, verdict, diagonals, cases.
type Outcome = (f64, f64, f64, Vec<f64>, &'static str, Vec<Vec<f64>>, Vec<Case>);

/// Searches for a proof that `answer` minimises ½wᵀGw − hᵀw + ½e + Σ prices of non-zeros.
#[pyfunction]
pub(crate) fn prove_row(
    py: Python<'_>,
    gram: Lent<'_>,
    cross: Vec<f64>,
    energy: f64,
    prices: Vec<f64>,
    answer: Option<Vec<f64>>,
    seconds: f64,
) -> PyResult<Outcome> {
    let numbers = gram.numbers();
    enter(py, None, |inside| {
        let row = PricedRow::new(numbers.block(0..numbers.samples()), cross, energy, prices)?;
        let settings = ProveSettings { seconds, ..ProveSettings::default() };
        let proof = match answer {
            Some(answer) => row.prove(&answer, &settings, inside.cancel)?,
            None => row.solve(&settings, inside.cancel)?,
        };
        let verdict = match proof.verdict {
            Verdict::Optimal => "optimal",
            Verdict::Beaten => "beaten",
            Verdict::Open => "open",
        };
        let diagonals = proof.certificate.diagonals.iter().map(|d| d.as_ref().clone()).collect();
        let cases = proof.certificate.cases.into_iter().map(|case| {
            let evidence = case.evidence.map(|e| (e.diagonal, e.point, e.fixed));
            let split = match case.then {
                Then::Ends => None,
                Then::Splits { entry, without, with } => Some((entry, without, with)),
            };
            (evidence, split)
        });
        Ok((proof.value, proof.bound, proof.best, proof.weights, verdict, diagonals, cases.collect()))
    })
}
