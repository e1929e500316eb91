//! Magnitude pruning: the smallest weights go, whatever the data; optionally least squares on what stays.

use simplicit::Result;

use super::{Budget, Layer, Prepared, Rival};

/// Largest |w| stay. Price: the smallest |w| that stays.
pub struct Magnitude {
    /// Least squares on the support.
    pub refit: bool,
}

struct Seen<'a> {
    layer: Layer<'a>,
    refit: bool,
}

impl Rival for Magnitude {
    fn name(&self) -> &'static str {
        if self.refit { "magnitude + refit" } else { "magnitude" }
    }

    fn first_price(&self) -> f64 {
        0.1
    }

    fn fits(&self) -> bool {
        self.refit
    }

    fn prepare<'a>(&self, layer: Layer<'a>) -> Result<Box<dyn Prepared + 'a>> {
        Ok(Box::new(Seen { layer, refit: self.refit }))
    }
}

impl Prepared for Seen<'_> {
    fn rows(&self, budget: Budget) -> Result<Vec<Vec<f64>>> {
        let weights = self.layer.weights;
        let rows: Vec<Vec<f64>> = (0..weights.rows()).map(|k| weights.row(k).to_vec()).collect();
        let score = |k: usize, j: usize| weights[(k, j)].abs();
        let count = match budget {
            Budget::Count(count) => count,
            Budget::Price(least) => weights.as_slice().iter().filter(|w| w.abs() >= least).count(),
        };
        let kept = self.layer.largest(&rows, count, score);
        if self.refit { self.layer.refit(&kept) } else { Ok(kept) }
    }
}
