//! What an operator is for bounds over boxes: affine, or the maximum over windows.

use super::{Binary, Dims, Reduction, Structure, Unary, Value};

/// Integers up to here are exact in single precision.
const MOST: usize = 1 << 24;

/// An operator in the form that bounds need.
pub(crate) enum Shape {
    /// Every result is a constant plus, for some operands, one of their values times a factor.
    Affine {
        /// Operand, the unit that each result reads (`u32::MAX` for none), and its factor.
        parts: Vec<(usize, Vec<u32>, Vec<f32>)>,
        /// The constant of every result.
        constant: Vec<f32>,
    },
    /// Every result is the sum over a window of the one operand, times a factor.
    Sum(Vec<(Vec<u32>, f64)>),
    /// Every result is the maximum over a window of the one operand.
    Maximum(Vec<Vec<u32>>),
}

impl Structure {
    /// The operator on operands of these dimensions, of which some are known numbers; `None` if it is neither affine
    /// nor a maximum. Where a moved value came from is found by running the operator on the values' indices.
    pub(crate) fn shape_for_bounds(&self, dims: &[Dims], known: &[Option<&[f32]>]) -> Option<Shape> {
        let size = self.dims(dims).ok()?.size();
        if dims.iter().any(|d| d.size() >= MOST) {
            return None;
        }
        match self {
            Structure::Reshape { .. }
            | Structure::Transpose { .. }
            | Structure::Slice { .. }
            | Structure::Pad { .. }
            | Structure::Gather { .. }
            | Structure::Expand { .. }
            | Structure::Concat { .. }
            | Structure::Unary(Unary::Negative)
            | Structure::Binary(Binary::Add | Binary::Subtract) => {
                let zeros: Vec<Vec<f32>> = dims.iter().map(|d| vec![0.0; d.size()]).collect();
                let constant = self.of(dims, &zeros, size);
                let mut parts = Vec::new();
                for operand in 0..dims.len() {
                    let mut values = zeros.clone();
                    values[operand] = numbers(dims[operand].size());
                    let moved = self.of(dims, &values, size);
                    let (from, factor) =
                        moved
                            .iter()
                            .zip(&constant)
                            // A place that is filled with a constant reads no value.
                            .map(|(v, c)| {
                                if *c == 0.0 && *v != 0.0 { (v.abs() as u32 - 1, v.signum()) } else { (u32::MAX, 0.0) }
                            })
                            .unzip();
                    parts.push((operand, from, factor));
                }
                Some(Shape::Affine { parts, constant })
            }
            Structure::Binary(binary @ (Binary::Multiply | Binary::Divide)) => {
                let (operand, other) = match (binary, known.first()?, known.get(1)?) {
                    (_, _, Some(_)) => (0, 1),
                    (Binary::Multiply, Some(_), _) => (1, 0),
                    _ => return None,
                };
                let mut values = [Vec::new(), Vec::new()];
                values[operand] = numbers(dims[operand].size());
                values[other] = vec![1.0; dims[other].size()];
                let from = self.of(dims, &values, size).iter().map(|v| *v as u32 - 1).collect();
                values[operand] = vec![1.0; dims[operand].size()];
                values[other] = known[other]?.to_vec();
                let factor = self.of(dims, &values, size);
                let finite = factor.iter().all(|f| f.is_finite());
                finite.then(|| Shape::Affine { parts: vec![(operand, from, factor)], constant: vec![0.0; size] })
            }
            Structure::Reduce { reduction, axes, keep } => {
                // The adjoint of a sum, run on the results' indices, gives every value the result that it belongs to.
                let sum = Structure::Reduce { reduction: Reduction::Sum, axes: axes.clone(), keep: *keep };
                let (x, y) = (vec![0.0; dims.first()?.size()], vec![0.0; size]);
                let mut owner = vec![0.0; x.len()];
                let out = Value { dims: self.dims(dims).ok()?, data: &y };
                sum.adjoint(&[Value { dims: dims[0], data: &x }], out, &numbers(size), &mut [Some(&mut owner)]);
                let mut windows = vec![Vec::new(); size];
                for (k, owner) in owner.iter().enumerate() {
                    windows.get_mut((*owner as usize).checked_sub(1)?)?.push(k as u32);
                }
                match reduction {
                    Reduction::Maximum => Some(Shape::Maximum(windows)),
                    Reduction::Minimum => None,
                    Reduction::Sum => Some(Shape::Sum(windows.into_iter().map(|w| (w, 1.0)).collect())),
                    Reduction::Mean => Some(Shape::Sum(
                        windows.into_iter().map(|w| (w.clone(), 1.0 / w.len().max(1) as f64)).collect(),
                    )),
                }
            }
            Structure::Pool(pooling) => {
                let windows = pooling.windows(*dims.first()?)?;
                Some(if pooling.maximum {
                    Shape::Maximum(windows.into_iter().map(|(window, _)| window).collect())
                } else {
                    Shape::Sum(windows)
                })
            }
            _ => None,
        }
    }

    fn of(&self, dims: &[Dims], values: &[Vec<f32>], size: usize) -> Vec<f32> {
        let mut out = vec![0.0; size];
        let values: Vec<Value> = dims.iter().zip(values).map(|(&dims, data)| Value { dims, data }).collect();
        self.forward(&values, &mut out);
        out
    }
}

/// The numbers 1, 2, 3, …
fn numbers(count: usize) -> Vec<f32> {
    (1..=count).map(|k| k as f32).collect()
}
