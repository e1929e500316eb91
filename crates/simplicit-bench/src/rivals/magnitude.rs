//! Magnitude pruning: the smallest weights are removed, whatever the data; optionally least squares refits the
//! others.

use simplicit::Result;

use super::{Budget, Layer, Prepared, Rival};

/// The weights with the largest |w| stay. The price is the smallest |w| that stays.
#[derive(Debug, Clone, Copy)]
pub struct Magnitude {
    /// Whether least squares refits the weights that stay.
    pub refit: bool,
}

impl Rival for Magnitude {
    fn name(&self) -> &'static str {
        if self.refit { "magnitude + refit" } else { "magnitude" }
    }

    fn id(&self) -> &'static str {
        if self.refit { "magnitude-refit" } else { "magnitude" }
    }

    fn first_price(&self) -> f64 {
        0.1
    }

    fn fits(&self) -> bool {
        self.refit
    }

    fn prepare(&self, _: &Layer) -> Result<Box<dyn Prepared>> {
        Ok(Box::new(*self))
    }
}

impl Prepared for Magnitude {
    fn rows(&self, layer: &Layer, budget: Budget) -> Result<Vec<Vec<f64>>> {
        let weights = &layer.weights;
        let rows: Vec<Vec<f64>> = (0..weights.rows()).map(|k| weights.row(k).to_vec()).collect();
        let score = |k: usize, j: usize| weights[(k, j)].abs();
        let count = match budget {
            Budget::Count(count) => count,
            Budget::Price(least) => {
                let stays = |k: usize, j: usize| Some(j) != layer.constant && score(k, j) >= least;
                (0..weights.rows()).map(|k| (0..weights.cols()).filter(|&j| stays(k, j)).count()).sum()
            }
        };
        let kept = layer.largest(&rows, count, score);
        if self.refit { layer.refit(&kept) } else { Ok(kept) }
    }
}
