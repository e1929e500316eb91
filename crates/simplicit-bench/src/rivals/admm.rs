//! Cardinality by ADMM in the manner of ALPS: unit-norm features, one projection for the whole group, ρ driven by how much
//! the support still changes, then least squares on the support. No output-aware weights.

use simplicit::linalg::{Matrix, View, gemm, symmetric_eigen};
use simplicit::{Error, Result};

use super::{Budget, Layer, Normalised, Prepared, Rival};

const FIRST_RHO: f64 = 0.1;
const STEPS: usize = 300;
/// The support is compared with the previous one every this many steps.
const LOOK: usize = 3;

/// The price is that of a weight, relative to the energy of the group.
#[derive(Debug)]
pub struct Admm;

struct Seen {
    constant: Option<usize>,
    normalised: Normalised,
    energy: f64,
    values: Vec<f64>,
    vectors: Matrix,
}

impl Rival for Admm {
    fn name(&self) -> &'static str {
        "cardinality by ADMM (ALPS)"
    }

    fn id(&self) -> &'static str {
        "admm"
    }

    fn first_price(&self) -> f64 {
        1e-6
    }

    fn fits(&self) -> bool {
        true
    }

    fn prepare(&self, layer: &Layer) -> Result<Box<dyn Prepared>> {
        let normalised = Normalised::new(layer.statistics);
        let Some((values, vectors)) = symmetric_eigen(&normalised.gram) else {
            return Err(Error::shape("Gram matrix", "finite entries", "a NaN"));
        };
        let (constant, energy) = (layer.constant, layer.energy().max(f64::MIN_POSITIVE));
        Ok(Box::new(Seen { constant, normalised, energy, values, vectors }))
    }
}

impl Seen {
    fn is_constant(&self, j: usize) -> bool {
        self.constant == Some(self.normalised.live[j])
    }

    /// The smallest |t| that is kept.
    fn threshold(&self, t: &[f64], budget: Budget, rho: f64, sizes: &mut Vec<f64>) -> f64 {
        match budget {
            Budget::Price(price) => (2.0 * price * self.energy / rho).sqrt(),
            Budget::Count(count) => {
                sizes.clear();
                let d = self.normalised.live.len();
                sizes.extend((0..t.len()).filter(|e| !self.is_constant(e % d)).map(|e| t[e].abs()));
                if count >= sizes.len() {
                    return 0.0;
                }
                if count == 0 {
                    return f64::INFINITY;
                }
                let (_, least, _) = sizes.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a));
                *least
            }
        }
    }
}

impl Prepared for Seen {
    fn rows(&self, layer: &Layer, budget: Budget) -> Result<Vec<Vec<f64>>> {
        let (d, r) = (self.normalised.live.len(), layer.weights.rows());
        let h = self.normalised.cross.as_slice();
        let mut v: Vec<f64> = (0..r * d)
            .map(|e| layer.weights[(e / d, self.normalised.live[e % d])] * self.normalised.rms[e % d])
            .collect();
        let (mut dual, mut m, mut rotated) = (vec![0.0; r * d], vec![0.0; r * d], vec![0.0; r * d]);
        let mut sizes = Vec::with_capacity(r * d);
        let mut support = vec![true; r * d];
        let mut rho = FIRST_RHO;
        for step in 0..STEPS {
            layer.cancel.check()?;
            for e in 0..r * d {
                m[e] = h[e] + rho * (v[e] - dual[e]);
            }
            gemm(&mut rotated, d, false, 1.0, View::new(&m, r, d, d), self.vectors.view());
            for row in rotated.chunks_exact_mut(d.max(1)) {
                for (x, value) in row.iter_mut().zip(&self.values) {
                    *x /= value.max(0.0) + rho;
                }
            }
            gemm(&mut m, d, false, 1.0, View::new(&rotated, r, d, d), self.vectors.view().t());
            for e in 0..r * d {
                m[e] += dual[e];
            }
            let least = self.threshold(&m, budget, rho, &mut sizes);
            for e in 0..r * d {
                v[e] = if m[e].abs() >= least || self.is_constant(e % d) { m[e] } else { 0.0 };
                dual[e] = m[e] - v[e];
            }
            if step % LOOK == LOOK - 1 {
                let kept = v.iter().filter(|v| **v != 0.0).count().max(1);
                let changed = v.iter().zip(&support).filter(|(v, s)| (**v != 0.0) != **s).count();
                support.iter_mut().zip(&v).for_each(|(s, v)| *s = *v != 0.0);
                let growth = match changed as f64 / kept as f64 {
                    share if share >= 0.1 => 1.3,
                    share if share >= 0.005 => 1.2,
                    share if share > 0.0 => 1.1,
                    _ => break,
                };
                rho *= growth;
                dual.iter_mut().for_each(|s| *s /= growth);
            }
        }
        let supports: Vec<Vec<f64>> = (0..r)
            .map(|k| {
                let mut row = vec![0.0; layer.weights.cols()];
                for (j, &name) in self.normalised.live.iter().enumerate() {
                    row[name] = v[k * d + j];
                }
                row
            })
            .collect();
        // Where several entries have exactly the threshold's size, more weights may stay than the budget allows.
        let supports = match budget {
            Budget::Count(count) => layer.largest(&supports, count, |k, j| supports[k][j].abs()),
            Budget::Price(_) => supports,
        };
        layer.refit(&supports)
    }
}
