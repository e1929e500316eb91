//! Resizing: nearest neighbours are values at chosen places, interpolation is a product with constant weights.

use super::constant::{Tensor, place};
use super::import::{Importer, Value};
use super::nodes::Inputs;
use super::proto::NodeProto;
use crate::{Error, Result};

/// The map from places of the result to places of the value.
struct Coordinates<'n> {
    mode: &'n str,
    scale: f64,
    from: usize,
    to: usize,
}

impl Coordinates<'_> {
    fn at(&self, k: usize) -> f64 {
        let (k, from, to) = (k as f64, self.from as f64, self.to as f64);
        match self.mode {
            "asymmetric" => k / self.scale,
            "align_corners" if self.to > 1 => k * (from - 1.0) / (to - 1.0),
            "align_corners" => 0.0,
            "pytorch_half_pixel" if self.to <= 1 => 0.0,
            "half_pixel_symmetric" => {
                let exact = self.scale * from;
                let (adjustment, centre) = (to / exact, from / 2.0);
                centre * (1.0 - adjustment) + (k + 0.5) / self.scale - 0.5
            }
            _ => (k + 0.5) / self.scale - 0.5,
        }
    }
}

impl Importer<'_> {
    pub(super) fn resize(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        let value = inputs.value(0)?;
        let dims = self.dims(value);
        let mode = node.text("mode", "nearest");
        let upsample = node.op_type == "Upsample" || (self.opset < 11 && inputs.0.len() == 2);
        let coordinates =
            if upsample { "asymmetric" } else { node.text("coordinate_transformation_mode", "half_pixel") };
        let known = matches!(mode, "nearest" | "linear" | "bilinear" | "cubic")
            && matches!(
                coordinates,
                "asymmetric" | "half_pixel" | "align_corners" | "pytorch_half_pixel" | "half_pixel_symmetric"
            )
            && (mode != "nearest" || node.int("antialias", 0) == 0)
            && node.text("keep_aspect_ratio_policy", "stretch") == "stretch";
        if !known {
            return Err(Error::unsupported(
                format!("a resize of mode {mode:?} with {coordinates:?} coordinates"),
                "nearest, linear and cubic ones are read, without a region and with keep_aspect_ratio_policy stretch",
            ));
        }
        let (scale_at, size_at) = if upsample { (1, usize::MAX) } else { (2, 3) };
        let scales = inputs.floats(scale_at)?.map(|t| t.values).filter(|v| !v.is_empty());
        let scales = scales.or_else(|| node.floats("scales").map(<[f32]>::to_vec));
        let sizes = inputs.ints(size_at)?.filter(|v| !v.is_empty());
        let axes = match node.ints("axes") {
            Some(axes) => axes.iter().map(|&a| place(a, dims.len())).collect::<Result<Vec<_>>>()?,
            None => (0..dims.len()).collect(),
        };
        let filter = Filter {
            cubic: (mode == "cubic").then(|| f64::from(node.float("cubic_coeff_a", -0.75))),
            exclude_outside: node.int("exclude_outside", 0) != 0,
            antialias: node.int("antialias", 0) != 0,
        };
        let mut out = value.clone();
        for (k, &axis) in axes.iter().enumerate() {
            let from = dims[axis];
            let (to, scale) = match (&sizes, &scales) {
                (Some(sizes), _) if sizes.len() == axes.len() => (sizes[k], sizes[k] as f64 / from as f64),
                (None, Some(scales)) if scales.len() == axes.len() => {
                    let scale = f64::from(scales[k]);
                    ((from as f64 * scale).floor() as i64, scale)
                }
                _ => return Err(Error::shape("resize", "scales or sizes, one per axis", "others")),
            };
            let of_batch = axis == 0 && self.fixed_batch.is_some_and(|b| b as i64 == to);
            let to = if of_batch { from as i64 } else { to };
            if from == 0 || !(1..=1 << 20).contains(&to) || !scale.is_finite() || scale <= 0.0 {
                return Err(Error::shape("resize", "positive sizes below 2^20", to));
            }
            if to as usize == from && (scale == 1.0 || of_batch) {
                continue;
            }
            let coordinates = Coordinates { mode: coordinates, scale, from, to: to as usize };
            out = if mode == "nearest" {
                let rounding = if upsample { "floor" } else { node.text("nearest_mode", "round_prefer_floor") };
                self.nearest(&out, axis, &coordinates, rounding)?
            } else {
                self.interpolated(&out, axis, &coordinates, &filter)?
            };
        }
        Ok(out)
    }

    fn nearest(&mut self, value: &Value, axis: usize, c: &Coordinates<'_>, rounding: &str) -> Result<Value> {
        let source = |k: usize| {
            let x = c.at(k);
            let rounded = match rounding {
                "floor" => x.floor(),
                "ceil" => x.ceil(),
                "round_prefer_ceil" => (x + 0.5).floor(),
                _ => (x - 0.5).ceil(),
            };
            rounded.clamp(0.0, c.from as f64 - 1.0) as usize
        };
        let places: Vec<usize> = (0..c.to).map(source).collect();
        self.gather(value, axis, &places, &[places.len()])
    }

    /// Every result is a weighted mean of neighbours along the axis.
    fn interpolated(&mut self, value: &Value, axis: usize, c: &Coordinates<'_>, filter: &Filter) -> Result<Value> {
        super::constant::size(&[c.from, c.to])?;
        let mut weights = vec![0.0f64; c.from * c.to];
        for k in 0..c.to {
            filter.spread(c, k, &mut weights[k * c.from..(k + 1) * c.from]);
        }
        let values = weights.into_iter().map(|w| w as f32).collect();
        self.along(value, axis, Tensor { dims: vec![c.to, c.from], values })
    }
}

/// The weights of neighbours.
struct Filter {
    /// The coefficient of cubic interpolation; `None` for linear interpolation.
    cubic: Option<f64>,
    /// Whether neighbours beyond the ends have no weight; otherwise they count as the last value.
    exclude_outside: bool,
    /// Whether the filter widens by the factor by which the value shrinks.
    antialias: bool,
}

impl Filter {
    /// The weight of a neighbour at this distance.
    fn weight(&self, distance: f64) -> f64 {
        let d = distance.abs();
        match self.cubic {
            None => (1.0 - d).max(0.0),
            Some(a) if d <= 1.0 => ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0,
            Some(a) if d < 2.0 => (((d - 5.0) * d + 8.0) * d - 4.0) * a,
            Some(_) => 0.0,
        }
    }

    /// Adds the weights of all values in place k of the result.
    fn spread(&self, c: &Coordinates<'_>, k: usize, weights: &mut [f64]) {
        let (last, x) = (c.from as i64 - 1, c.at(k));
        // Beyond the ends, a linear mean is the last value.
        let x = if self.cubic.is_none() && !self.antialias { x.clamp(0.0, last as f64) } else { x };
        let scale = if self.antialias { c.scale.min(1.0) } else { 1.0 };
        let reach = if self.cubic.is_some() { 2.0 } else { 1.0 } / scale;
        let (first, end) = ((x - reach).floor() as i64, (x + reach).ceil() as i64);
        for place in first..=end {
            let weight = self.weight((place as f64 - x) * scale);
            if !self.exclude_outside || (0..=last).contains(&place) {
                weights[place.clamp(0, last) as usize] += weight;
            }
        }
        let total: f64 = weights.iter().sum();
        if total != 0.0 {
            weights.iter_mut().for_each(|w| *w /= total);
        }
    }
}
