//! How many steps the search for the equilibrium took.

use super::svg::{Axis, Plot};
use super::text::{count, counted, fixed};
use super::{Input, figure as framed};

const MOST_BARS: usize = 30;

/// A histogram of the values: the width of a bin, the first value and the number of samples in each bin.
fn histogram(values: &[usize]) -> (usize, usize, Vec<usize>) {
    let low = values.iter().copied().min().unwrap_or(0);
    let high = values.iter().copied().max().unwrap_or(0);
    let width = (high - low + 1).div_ceil(MOST_BARS).max(1);
    let mut bins = vec![0; (high - low) / width + 1];
    for v in values {
        bins[(v - low) / width] += 1;
    }
    (width, low, bins)
}

pub(super) fn figure(input: &Input) -> String {
    const TITLE: &str = "Iterations to the equilibrium";
    if input.model.well_posedness().acyclic {
        return String::new();
    }
    if input.diagnostics.is_empty() {
        return String::new();
    }
    let values: Vec<usize> = input.diagnostics.iter().map(|d| d.iterations).collect();
    let (width, low, bins) = histogram(&values);
    let tallest = bins.iter().copied().max().unwrap_or(0);
    let mut plot = Plot::new(
        Axis::linear(low as f64, (low + width * bins.len()) as f64, "iterations"),
        Axis::linear(0.0, tallest as f64, "samples"),
    );
    for (k, samples) in bins.iter().enumerate() {
        let from = low + k * width;
        let range = if width == 1 { from.to_string() } else { format!("{from} to {}", from + width - 1) };
        plot.bar(
            from as f64,
            (from + width) as f64,
            *samples as f64,
            &format!("{range} iterations: {samples} samples"),
        );
    }
    let mean = values.iter().sum::<usize>() as f64 / values.len() as f64;
    let stuck = input.diagnostics.iter().filter(|d| !d.converged).count();
    let caption = format!(
        "Steps of the cycle that took longest, over {}: {} on average, {} at most. {} did not converge.",
        counted(values.len(), "sample"),
        fixed(mean, 1),
        count(values.iter().copied().max().unwrap_or(0) as u64),
        counted(stuck, "sample")
    );
    framed(TITLE, &plot.finish("Histogram of the iterations per sample."), &caption)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sample_is_in_a_bin() {
        assert_eq!(histogram(&[4, 5, 5, 7]), (1, 4, vec![1, 2, 0, 1]));
        let values: Vec<usize> = (10..2000).collect();
        let (width, low, bins) = histogram(&values);
        assert!(bins.len() <= MOST_BARS && low == 10 && width == 67);
        assert_eq!(bins.iter().sum::<usize>(), values.len());
    }
}
