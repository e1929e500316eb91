//! Every operator against its definition, index by index in double precision, and its adjoint against differences of
//! the definition.

use super::*;
use crate::random::Random;

/// A value in double precision.
#[derive(Debug, Clone)]
struct Exact {
    sizes: Vec<usize>,
    data: Vec<f64>,
}

fn count(sizes: &[usize]) -> usize {
    sizes.iter().product()
}

/// All index vectors of these sizes, the last axis fastest.
fn indices(sizes: &[usize]) -> Vec<Vec<usize>> {
    (0..count(sizes))
        .map(|mut flat| {
            let mut index = vec![0; sizes.len()];
            for k in (0..sizes.len()).rev() {
                index[k] = flat % sizes[k];
                flat /= sizes[k];
            }
            index
        })
        .collect()
}

impl Exact {
    fn at(&self, index: &[usize]) -> f64 {
        self.data[index.iter().zip(&self.sizes).fold(0, |flat, (i, size)| flat * size + i)]
    }

    /// With broadcasting: leading axes are dropped, axes of size 1 stand still.
    fn repeated_at(&self, index: &[usize]) -> f64 {
        let own = &index[index.len() - self.sizes.len()..];
        self.at(&own.iter().zip(&self.sizes).map(|(&i, &size)| if size == 1 { 0 } else { i }).collect::<Vec<_>>())
    }
}

fn erf_series(x: f64) -> f64 {
    let (mut term, mut sum, mut n) = (x, 0.0, 0.0);
    while sum + term != sum {
        sum += term;
        n += 1.0;
        term *= 2.0 * x * x / (2.0 * n + 1.0);
    }
    std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
}

/// The result of an operator by its definition.
fn reference(structure: &Structure, inputs: &[Exact], out: &[usize]) -> Vec<f64> {
    let x = &inputs[0];
    let all = indices(out);
    let each = |f: &dyn Fn(&[usize]) -> f64| all.iter().map(|index| f(index)).collect::<Vec<f64>>();
    match structure {
        Structure::Unary(unary) => {
            let f = |x: f64| match unary {
                Unary::Sqrt => x.sqrt(),
                Unary::Exp => x.exp(),
                Unary::Log => x.ln(),
                Unary::Erf => erf_series(x),
                Unary::Negative => -x,
                Unary::Absolute => x.abs(),
                Unary::Reciprocal => 1.0 / x,
                Unary::Sine => x.sin(),
                Unary::Cosine => x.cos(),
            };
            each(&|index| f(x.at(index)))
        }
        Structure::Binary(binary) => each(&|index| {
            let (a, b) = (x.repeated_at(index), inputs[1].repeated_at(index));
            match binary {
                Binary::Add => a + b,
                Binary::Subtract => a - b,
                Binary::Multiply => a * b,
                Binary::Divide => a / b,
                Binary::Power => a.powf(b),
                Binary::Maximum => a.max(b),
                Binary::Minimum => a.min(b),
                Binary::Greater => f64::from(a > b),
            }
        }),
        Structure::Select => each(&|index| {
            let chosen = if x.repeated_at(index) != 0.0 { &inputs[1] } else { &inputs[2] };
            chosen.repeated_at(index)
        }),
        Structure::MatMul => {
            let (mut a, mut b) = (x.clone(), inputs[1].clone());
            let (row, column) = (a.sizes.len() == 1, b.sizes.len() == 1);
            let depth = a.sizes[a.sizes.len() - 1];
            if row {
                a.sizes.insert(0, 1);
            }
            if column {
                b.sizes.push(1);
            }
            each(&|index| {
                let mut index = index.to_vec();
                if column {
                    index.push(0);
                }
                if row {
                    index.insert(index.len() - 1, 0);
                }
                let (i, j) = (index[index.len() - 2], index[index.len() - 1]);
                let batch = &index[..index.len() - 2];
                let entry = |m: &Exact, r: usize, c: usize| m.repeated_at(&[batch, &[r, c]].concat());
                (0..depth).map(|k| entry(&a, i, k) * entry(&b, k, j)).sum()
            })
        }
        Structure::Softmax { axis } => each(&|index| {
            let along = |k: usize| {
                let mut index = index.to_vec();
                index[*axis] = k;
                x.at(&index).exp()
            };
            x.at(index).exp() / (0..x.sizes[*axis]).map(along).sum::<f64>()
        }),
        Structure::Normalise { axis, epsilon } => {
            let inner = indices(&x.sizes[*axis..]);
            each(&|index| {
                let n = inner.len() as f64;
                let at = |tail: &Vec<usize>| x.at(&[&index[..*axis], tail].concat());
                let mean = inner.iter().map(at).sum::<f64>() / n;
                let variance = inner.iter().map(|t| (at(t) - mean).powi(2)).sum::<f64>() / n;
                (x.at(index) - mean) / (variance + f64::from(*epsilon)).sqrt()
            })
        }
        Structure::Reduce { reduction, axes, keep } => each(&|index| {
            let mut left = index.iter();
            let fixed: Vec<Option<usize>> = (0..x.sizes.len())
                .map(|axis| match (axes.contains(&axis), keep) {
                    (true, true) => left.next().and(None),
                    (true, false) => None,
                    (false, _) => left.next().copied(),
                })
                .collect();
            let matching = |i: &Vec<usize>| i.iter().zip(&fixed).all(|(i, f)| f.is_none_or(|f| f == *i));
            let values: Vec<f64> = indices(&x.sizes).iter().filter(|i| matching(i)).map(|i| x.at(i)).collect();
            match reduction {
                Reduction::Sum => values.iter().sum(),
                Reduction::Mean => values.iter().sum::<f64>() / values.len() as f64,
                Reduction::Maximum => values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
                Reduction::Minimum => values.iter().copied().fold(f64::INFINITY, f64::min),
            }
        }),
        Structure::Pool(p) => each(&|index| {
            let pooled = p.kernel.len();
            let first = index.len() - pooled;
            let (mut values, mut places) = (Vec::new(), 0);
            for tap in indices(&p.kernel) {
                let at: Vec<i64> = (0..pooled)
                    .map(|k| (index[first + k] * p.stride[k] + tap[k] * p.dilation[k]) as i64 - p.padding[k][0] as i64)
                    .collect();
                let size = |k: usize| x.sizes[first + k] as i64;
                let inside = (0..pooled).all(|k| (0..size(k)).contains(&at[k]));
                let end = |k: usize| size(k) + (p.padding[k][1] - p.beyond[k]) as i64;
                let counts = (0..pooled).all(|k| at[k] < end(k));
                if inside {
                    let at: Vec<usize> = at.iter().map(|&v| v as usize).collect();
                    values.push(x.at(&[&index[..first], &at].concat()));
                }
                places += usize::from(if p.count_padding { counts } else { inside });
            }
            if p.maximum {
                values.iter().copied().fold(f64::NEG_INFINITY, f64::max)
            } else {
                values.iter().sum::<f64>() / places as f64
            }
        }),
        Structure::Concat { axis } => each(&|index| {
            let mut index = index.to_vec();
            for part in inputs {
                if index[*axis] < part.sizes[*axis] {
                    return part.at(&index);
                }
                index[*axis] -= part.sizes[*axis];
            }
            unreachable!()
        }),
        Structure::Slice { axis, start, step, .. } => each(&|index| {
            let mut index = index.to_vec();
            index[*axis] = (*start as i64 + index[*axis] as i64 * step) as usize;
            x.at(&index)
        }),
        Structure::Pad { padding, value } => each(&|index| {
            let inside = |k: usize| (padding[k][0]..padding[k][0] + x.sizes[k]).contains(&index[k]);
            if (0..index.len()).all(inside) {
                x.at(&(0..index.len()).map(|k| index[k] - padding[k][0]).collect::<Vec<_>>())
            } else {
                f64::from(*value)
            }
        }),
        Structure::Gather { axis, indices, dims } => each(&|index| {
            let chosen = &index[*axis..*axis + dims.rank()];
            let flat = chosen.iter().zip(dims.sizes()).fold(0, |flat, (i, size)| flat * size + i);
            x.at(&[&index[..*axis], &[indices[flat]], &index[*axis + dims.rank()..]].concat())
        }),
        Structure::Lookup => each(&|index| {
            let (last, chosen) = index.split_last().unwrap();
            let number = inputs[1].at(chosen);
            let row = if number < 0.0 { number + x.sizes[0] as f64 } else { number };
            x.at(&[row as usize, *last])
        }),
        Structure::Transpose { order } => each(&|index| {
            let mut from = vec![0; order.len()];
            order.iter().zip(index).for_each(|(&axis, &i)| from[axis] = i);
            x.at(&from)
        }),
        Structure::Reshape { .. } => x.data.clone(),
        Structure::Expand { .. } => each(&|index| x.repeated_at(index)),
    }
}

/// Random operators and inputs of one kind.
struct Cases(Random);

impl Cases {
    fn sizes(&mut self, least: usize, most: usize) -> Vec<usize> {
        let rank = least + self.0.below(most - least + 1);
        (0..rank).map(|_| [1, 1, 2, 3, 4, 5, 17, 19][self.0.below(if rank > 2 { 6 } else { 8 })]).collect()
    }

    fn normal(&mut self, sizes: &[usize]) -> Exact {
        // The values are f32 numbers, so that both computations start from the same ones.
        let data = (0..count(sizes)).map(|_| f64::from(self.0.normal() as f32)).collect();
        Exact { sizes: sizes.to_vec(), data }
    }

    /// Away from 0, where quotients and powers are steep.
    fn positive(&mut self, sizes: &[usize]) -> Exact {
        let data = (0..count(sizes)).map(|_| f64::from((0.5 + 1.5 * self.0.uniform()) as f32)).collect();
        Exact { sizes: sizes.to_vec(), data }
    }

    /// Some axes shrunk to 1, some leading ones left out: two values that broadcast.
    fn broadcast(&mut self, sizes: &[usize]) -> [Vec<usize>; 2] {
        let mut make = || {
            let dropped = self.0.below(sizes.len() + 1) * self.0.below(2);
            let kept = sizes[dropped..].iter();
            kept.map(|&size| if self.0.below(3) == 0 { 1 } else { size }).collect::<Vec<_>>()
        };
        let (a, b) = (make(), make());
        if self.0.below(2) == 0 { [sizes.to_vec(), b] } else { [a, b] }
    }

    fn axis(&mut self, sizes: &[usize]) -> usize {
        self.0.below(sizes.len())
    }

    fn pooling(&mut self) -> (Structure, Vec<usize>) {
        loop {
            let pooled = 1 + self.0.below(2);
            let sizes = [vec![1, 1 + self.0.below(3)], (0..pooled).map(|_| 1 + self.0.below(9)).collect()].concat();
            let mut numbers = |least: usize, most: usize| -> Vec<usize> {
                (0..pooled).map(|_| least + self.0.below(most - least + 1)).collect()
            };
            let (kernel, stride, dilation, before) = (numbers(1, 4), numbers(1, 3), numbers(1, 3), numbers(0, 2));
            let (behind, beyond) = (numbers(0, 2), numbers(0, 2));
            let pooling = Pooling {
                maximum: self.0.below(2) == 0,
                padding: (0..pooled).map(|k| [before[k], behind[k] + beyond[k]]).collect(),
                count_padding: self.0.below(2) == 0,
                kernel,
                stride,
                dilation,
                beyond,
            };
            let structure = Structure::Pool(pooling);
            if structure.dims(&[Dims::new(&sizes).unwrap()]).is_ok() {
                return (structure, sizes);
            }
        }
    }

    fn make(&mut self, kind: usize) -> (Structure, Vec<Exact>) {
        let unaries = [
            Unary::Sqrt,
            Unary::Exp,
            Unary::Log,
            Unary::Erf,
            Unary::Negative,
            Unary::Absolute,
            Unary::Reciprocal,
            Unary::Sine,
            Unary::Cosine,
        ];
        let binaries = [
            Binary::Add,
            Binary::Subtract,
            Binary::Multiply,
            Binary::Divide,
            Binary::Power,
            Binary::Maximum,
            Binary::Minimum,
            Binary::Greater,
        ];
        let reductions = [Reduction::Sum, Reduction::Mean, Reduction::Maximum, Reduction::Minimum];
        let sizes = self.sizes(1, 4);
        match kind {
            0 => {
                let unary = unaries[self.0.below(unaries.len())];
                let needs = matches!(unary, Unary::Sqrt | Unary::Log | Unary::Reciprocal);
                let x = if needs { self.positive(&sizes) } else { self.normal(&sizes) };
                (Structure::Unary(unary), vec![x])
            }
            1 => {
                let binary = binaries[self.0.below(binaries.len())];
                let [a, b] = self.broadcast(&sizes);
                let steep = matches!(binary, Binary::Divide | Binary::Power);
                let mut value = |sizes: &[usize]| if steep { self.positive(sizes) } else { self.normal(sizes) };
                (Structure::Binary(binary), vec![value(&a), value(&b)])
            }
            2 => {
                let batch = self.sizes(0, 2);
                let [x, y] = self.broadcast(&batch);
                let (rows, depth, cols) = (1 + self.0.below(5), 1 + self.0.below(20), 1 + self.0.below(6));
                let (mut a, mut b) = ([x, vec![rows, depth]].concat(), [y, vec![depth, cols]].concat());
                match self.0.below(6) {
                    0 => a = vec![depth],
                    1 => b = vec![depth],
                    _ => {}
                }
                (Structure::MatMul, vec![self.normal(&a), self.normal(&b)])
            }
            3 => (Structure::Softmax { axis: self.axis(&sizes) }, vec![self.normal(&sizes)]),
            4 => {
                let mut sizes = sizes;
                // For a single value the result is rounding alone.
                sizes.push(3);
                (Structure::Normalise { axis: self.axis(&sizes), epsilon: 1e-3 }, vec![self.normal(&sizes)])
            }
            5 => {
                let axes = (0..sizes.len()).filter(|_| self.0.below(2) == 0).collect();
                let (reduction, keep) = (reductions[self.0.below(4)], self.0.below(2) == 0);
                (Structure::Reduce { reduction, axes, keep }, vec![self.normal(&sizes)])
            }
            6 => {
                let (structure, sizes) = self.pooling();
                (structure, vec![self.normal(&sizes)])
            }
            7 => {
                let axis = self.axis(&sizes);
                let parts = (0..1 + self.0.below(4))
                    .map(|_| {
                        let mut sizes = sizes.clone();
                        sizes[axis] = 1 + self.0.below(4);
                        self.normal(&sizes)
                    })
                    .collect();
                (Structure::Concat { axis }, parts)
            }
            8 => {
                let axis = self.axis(&sizes);
                let (start, end) = (self.0.below(sizes[axis]), self.0.below(sizes[axis]));
                let distance = 1 + self.0.below(3);
                let count = start.abs_diff(end) / distance + 1;
                let step = if end < start { -(distance as i64) } else { distance as i64 };
                (Structure::Slice { axis, start, step, count }, vec![self.normal(&sizes)])
            }
            9 => {
                let padding = sizes.iter().map(|_| [self.0.below(3), self.0.below(3) * self.0.below(2)]).collect();
                (Structure::Pad { padding, value: 0.75 }, vec![self.normal(&sizes)])
            }
            10 => {
                let (axis, dims) = (self.axis(&sizes), self.sizes(0, 2));
                let indices = (0..count(&dims)).map(|_| self.0.below(sizes[axis])).collect();
                (Structure::Gather { axis, indices, dims: Dims::new(&dims).unwrap() }, vec![self.normal(&sizes)])
            }
            11 => {
                let (rows, width) = (1 + self.0.below(6), 1 + self.0.below(5));
                let mut chosen = self.normal(&sizes);
                chosen.data.iter_mut().for_each(|v| *v = self.0.below(2 * rows) as f64 - rows as f64);
                (Structure::Lookup, vec![self.normal(&[rows, width]), chosen])
            }
            12 => {
                let sizes = self.sizes(1, 5);
                (Structure::Transpose { order: self.0.choose(sizes.len(), sizes.len()) }, vec![self.normal(&sizes)])
            }
            13 => {
                let mut other = sizes.clone();
                other.reverse();
                other.insert(self.0.below(other.len()), 1);
                (Structure::Reshape { dims: Dims::new(&other).unwrap() }, vec![self.normal(&sizes)])
            }
            14 => {
                let [a, b] = self.broadcast(&sizes);
                let [_, condition] = self.broadcast(&sizes);
                let mut truth = self.normal(&condition);
                truth.data.iter_mut().for_each(|v| *v = f64::from(*v > 0.0));
                (Structure::Select, vec![truth, self.normal(&a), self.normal(&b)])
            }
            _ => {
                let [_, x] = self.broadcast(&sizes);
                (Structure::Expand { dims: Dims::new(&sizes).unwrap() }, vec![self.normal(&x)])
            }
        }
    }
}

const KINDS: usize = 16;

/// Numbers that choose rows of a table or one of two values have no derivative.
fn has_derivative(structure: &Structure, input: usize) -> bool {
    !matches!((structure, input), (Structure::Lookup, 1) | (Structure::Select, 0))
}

fn singles(exact: &Exact) -> Vec<f32> {
    exact.data.iter().map(|&v| v as f32).collect()
}

fn run(structure: &Structure, inputs: &[Exact]) -> (Dims, Vec<f32>) {
    let dims: Vec<Dims> = inputs.iter().map(|x| Dims::new(&x.sizes).unwrap()).collect();
    let out = structure.dims(&dims).unwrap_or_else(|e| panic!("{structure:?} of {dims:?}: {e}"));
    let data: Vec<Vec<f32>> = inputs.iter().map(singles).collect();
    let values: Vec<Value<'_>> = dims.iter().zip(&data).map(|(&dims, data)| Value { dims, data }).collect();
    let mut result = vec![f32::NAN; out.size()];
    structure.forward(&values, &mut result);
    (out, result)
}

#[test]
fn every_operator_is_its_definition() {
    let mut cases = Cases(Random::new(1));
    for round in 0..KINDS * 150 {
        let (structure, inputs) = cases.make(round % KINDS);
        let (dims, got) = run(&structure, &inputs);
        let expected = reference(&structure, &inputs, dims.sizes());
        assert_eq!(got.len(), expected.len());
        // Sums of up to 20 products of numbers below 5, each rounded to 2⁻²⁴ of the largest partial sum.
        let scale = expected.iter().fold(1.0f64, |m, v| m.max(v.abs()));
        for (k, (&g, e)) in got.iter().zip(&expected).enumerate() {
            let off = (f64::from(g) - e).abs();
            assert!(off <= 32.0 * f64::from(f32::EPSILON) * scale, "{structure:?} of {inputs:?} at {k}: {g} and {e}");
        }
    }
}

#[test]
fn every_adjoint_adds_the_derivative() {
    let mut cases = Cases(Random::new(2));
    for round in 0..KINDS * 80 {
        let (structure, inputs) = cases.make(round % KINDS);
        let (dims, out) = run(&structure, &inputs);
        let dout = singles(&cases.normal(dims.sizes()));
        let loss = |inputs: &[Exact]| -> f64 {
            let out = reference(&structure, inputs, dims.sizes());
            out.iter().zip(&dout).map(|(y, &d)| y * f64::from(d)).sum()
        };
        let before: Vec<Vec<f32>> = inputs.iter().map(|x| singles(&cases.normal(&x.sizes))).collect();
        let data: Vec<Vec<f32>> = inputs.iter().map(singles).collect();
        let all: Vec<Dims> = inputs.iter().map(|x| Dims::new(&x.sizes).unwrap()).collect();
        let values: Vec<Value<'_>> = all.iter().zip(&data).map(|(&dims, data)| Value { dims, data }).collect();
        // Sometimes the cotangent of an input is not asked for.
        let asked: Vec<bool> =
            (0..inputs.len()).map(|k| has_derivative(&structure, k) && cases.0.below(5) > 0).collect();
        let mut after = before.clone();
        let mut into: Vec<Option<&mut [f32]>> =
            after.iter_mut().zip(&asked).map(|(a, asked)| asked.then_some(a.as_mut_slice())).collect();
        structure.adjoint(&values, Value { dims, data: &out }, &dout, &mut into);
        for (k, asked) in asked.iter().enumerate() {
            if !asked {
                assert_eq!(after[k], before[k]);
                continue;
            }
            // A few entries of a large input are enough.
            for _ in 0..inputs[k].data.len().min(12) {
                let i = cases.0.below(inputs[k].data.len());
                let h = 1e-5;
                let moved = |by: f64| {
                    let mut inputs = inputs.to_vec();
                    inputs[k].data[i] += by;
                    loss(&inputs)
                };
                let (up, down) = (moved(h), moved(-h));
                let expected = (up - down) / (2.0 * h);
                let got = f64::from(after[k][i]) - f64::from(before[k][i]);
                // Rounding of the sum of a few hundred terms in single precision, that of the difference (10⁻¹⁶ of
                // the loss over h), and h² times a third derivative of at most a few hundred.
                let tolerance = 2e-5 * (1.0 + expected.abs()) + 1e-10 * (up.abs() + down.abs());
                assert!(
                    (got - expected).abs() <= tolerance,
                    "{structure:?} of {inputs:?}, input {k} at {i}: {got}, {expected}"
                );
            }
        }
    }
}

/// ⟨tangent of d, dout⟩ = ⟨d, adjoint of dout⟩, where the adjoint is what differences say.
#[test]
fn every_tangent_is_the_transpose_of_the_adjoint() {
    let mut cases = Cases(Random::new(3));
    for round in 0..KINDS * 80 {
        let (structure, inputs) = cases.make(round % KINDS);
        let (dims, out) = run(&structure, &inputs);
        let dout = singles(&cases.normal(dims.sizes()));
        let mut d: Vec<Vec<f32>> = inputs.iter().map(|x| singles(&cases.normal(&x.sizes))).collect();
        (0..d.len()).filter(|&k| !has_derivative(&structure, k)).for_each(|k| d[k].fill(0.0));
        let data: Vec<Vec<f32>> = inputs.iter().map(singles).collect();
        let all: Vec<Dims> = inputs.iter().map(|x| Dims::new(&x.sizes).unwrap()).collect();
        let values: Vec<Value<'_>> = all.iter().zip(&data).map(|(&dims, data)| Value { dims, data }).collect();
        let at = Value { dims, data: &out };
        let mut tangent = vec![f32::NAN; out.len()];
        let changes: Vec<&[f32]> = d.iter().map(|d| &d[..]).collect();
        structure.tangent(&values, at, &changes, &mut tangent);
        let mut adjoint: Vec<Vec<f32>> = d.iter().map(|d| vec![0.0; d.len()]).collect();
        let mut into: Vec<Option<&mut [f32]>> = adjoint.iter_mut().map(|a| Some(a.as_mut_slice())).collect();
        structure.adjoint(&values, at, &dout, &mut into);
        let products = |a: &[f32], b: &[f32]| -> Vec<f64> {
            a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).collect()
        };
        let forwards = products(&tangent, &dout);
        let backwards: Vec<f64> = d.iter().zip(&adjoint).flat_map(|(d, a)| products(d, a)).collect();
        let size: f64 = forwards.iter().chain(&backwards).map(|v| v.abs()).sum();
        let (left, right) = (forwards.iter().sum::<f64>(), backwards.iter().sum::<f64>());
        assert!((left - right).abs() <= 1e-5 * (size + 1e-3), "{structure:?} of {inputs:?}: {left}, {right}");
    }
}

fn dims(sizes: &[usize]) -> Dims {
    Dims::new(sizes).unwrap()
}

#[test]
fn the_first_of_equal_extremes_takes_the_gradient() {
    let x = [1.0, 3.0, 3.0, 2.0, 3.0, 0.0];
    let value = Value { dims: dims(&[1, 6]), data: &x };
    let one = |structure: Structure| {
        let mut dx = [0.0; 6];
        let out = structure.dims(&[value.dims]).unwrap();
        let mut data = vec![0.0; out.size()];
        structure.forward(&[value], &mut data);
        let dout = vec![1.0; data.len()];
        structure.adjoint(&[value], Value { dims: out, data: &data }, &dout, &mut [Some(&mut dx)]);
        dx
    };
    let reduction = Structure::Reduce { reduction: Reduction::Maximum, axes: vec![1], keep: false };
    assert_eq!(one(reduction), [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
    let pooling = Pooling {
        maximum: true,
        kernel: vec![3],
        stride: vec![3],
        dilation: vec![1],
        padding: vec![[0, 0]],
        count_padding: false,
        beyond: vec![0],
    };
    assert_eq!(one(Structure::Pool(pooling)), [0.0, 1.0, 0.0, 0.0, 1.0, 0.0]);
    let (mut da, mut db) = ([0.0; 6], [0.0; 6]);
    let out = Value { dims: value.dims, data: &x };
    Structure::Binary(Binary::Maximum).adjoint(&[value, value], out, &[1.0; 6], &mut [Some(&mut da), Some(&mut db)]);
    assert_eq!((da, db), ([1.0; 6], [0.0; 6]));
}

#[test]
fn extremes_and_tables_show_what_is_no_number() {
    let x = [1.0, f32::NAN, 3.0];
    let value = Value { dims: dims(&[3]), data: &x };
    let mut out = [0.0];
    Structure::Reduce { reduction: Reduction::Minimum, axes: vec![0], keep: true }.forward(&[value], &mut out);
    assert!(out[0].is_nan());
    let table = Value { dims: dims(&[2, 1]), data: &[5.0, 6.0] };
    let chosen = Value { dims: dims(&[6]), data: &[1.0, -2.0, 2.0, -3.0, 0.5, f32::NAN] };
    let mut out = [0.0; 6];
    Structure::Lookup.forward(&[table, chosen], &mut out);
    assert_eq!(out[..2], [6.0, 5.0]);
    assert!(out[2..].iter().all(|v| v.is_nan()));
}

#[test]
fn softmax_and_layer_norm_survive_large_numbers() {
    let x = [1000.0, 1001.0, -1000.0];
    let mut out = [0.0; 3];
    Structure::Softmax { axis: 0 }.forward(&[Value { dims: dims(&[3]), data: &x }], &mut out);
    let share = 1.0 / (1.0 + 1f32.exp());
    assert!((out[0] - share).abs() < 1e-7 && (out[1] - (1.0 - share)).abs() < 1e-7 && out[2] == 0.0);
    // In single precision the mean of these would be off by more than their spread.
    let x: Vec<f32> = (0..4096).map(|k| 1e6 + (k % 2) as f32).collect();
    let mut out = vec![0.0; 4096];
    Structure::Normalise { axis: 0, epsilon: 0.0 }.forward(&[Value { dims: dims(&[4096]), data: &x }], &mut out);
    assert!(out.iter().enumerate().all(|(k, v)| *v == if k % 2 == 0 { -1.0 } else { 1.0 }));
}

/// Dimensions and attributes of every size, sensible or not, give an answer or an error; what is accepted runs.
#[test]
fn nothing_panics_whatever_the_dimensions() {
    let mut random = Random::new(3);
    let mut accepted = [0usize; KINDS];
    for round in 0..60_000 {
        let kind = round % KINDS;
        let (structure, _) = Cases(Random::new(random.bits())).make(kind);
        let mut any = |most: usize| match random.below(12) {
            0 => usize::MAX - random.below(2),
            1 => 1 << random.below(64),
            2 => 0,
            _ => random.below(most),
        };
        let structure = match structure {
            Structure::Softmax { .. } => Structure::Softmax { axis: any(4) },
            Structure::Normalise { epsilon, .. } => Structure::Normalise { axis: any(4), epsilon },
            Structure::Reduce { reduction, keep, .. } => {
                Structure::Reduce { reduction, axes: (0..any(3).min(4)).map(|_| any(4)).collect(), keep }
            }
            Structure::Pool(mut p) => {
                let change = |v: &mut Vec<usize>, by: usize| v.iter_mut().for_each(|v| *v = by);
                match any(6) {
                    0 => change(&mut p.kernel, any(4)),
                    1 => change(&mut p.stride, any(4)),
                    2 => change(&mut p.dilation, any(4)),
                    3 => change(&mut p.beyond, any(4)),
                    4 => p.padding.iter_mut().for_each(|v| *v = [any(4), any(4)]),
                    _ => p.padding.truncate(any(3)),
                }
                Structure::Pool(p)
            }
            Structure::Concat { .. } => Structure::Concat { axis: any(4) },
            Structure::Slice { step, .. } => {
                let step = if any(4) == 0 { any(9) as i64 } else { step };
                Structure::Slice { axis: any(4), start: any(5), step, count: any(4) }
            }
            Structure::Pad { value, .. } => {
                Structure::Pad { padding: (0..any(4).min(5)).map(|_| [any(3), any(3)]).collect(), value }
            }
            Structure::Gather { dims, .. } => {
                Structure::Gather { axis: any(4), indices: (0..dims.size()).map(|_| any(4)).collect(), dims }
            }
            Structure::Transpose { .. } => Structure::Transpose { order: (0..any(4).min(5)).map(|_| any(4)).collect() },
            other => other,
        };
        let inputs: Vec<Dims> = (0..[1, 1, 2, 2, 3, 0][any(5).min(5)])
            .filter_map(|_| Dims::new(&(0..any(5).min(8)).map(|_| any(4)).collect::<Vec<_>>()).ok())
            .collect();
        let Ok(out) = structure.dims(&inputs) else { continue };
        let small = |d: &Dims| d.size() < 4096;
        if !small(&out) || !inputs.iter().all(small) {
            continue;
        }
        accepted[kind] += 1;
        let data: Vec<Vec<f32>> = inputs.iter().map(|d| vec![0.5; d.size()]).collect();
        let values: Vec<Value<'_>> = inputs.iter().zip(&data).map(|(&dims, data)| Value { dims, data }).collect();
        let mut result = vec![0.0; out.size()];
        structure.forward(&values, &mut result);
        let mut cotangents = data.clone();
        let mut into: Vec<Option<&mut [f32]>> = cotangents.iter_mut().map(|c| Some(c.as_mut_slice())).collect();
        structure.adjoint(&values, Value { dims: out, data: &result }, &result, &mut into);
    }
    assert!(accepted.iter().all(|&n| n > 20), "{accepted:?}");
}

#[test]
fn what_does_not_fit_is_named() {
    let refused = |structure: Structure, inputs: &[&[usize]]| {
        let inputs: Vec<Dims> = inputs.iter().map(|s| dims(s)).collect();
        structure.dims(&inputs).unwrap_err().to_string()
    };
    let add = Structure::Binary(Binary::Add);
    assert!(refused(add.clone(), &[&[2, 3], &[2]]).contains("[2, 3]"));
    assert!(refused(add, &[&[2, 3]]).contains("expected 2, got 1"));
    assert!(refused(Structure::MatMul, &[&[2, 3], &[4, 5]]).contains("3 rows"));
    assert!(refused(Structure::MatMul, &[&[], &[4, 5]]).contains("axis"));
    assert!(refused(Structure::Softmax { axis: 2 }, &[&[2, 3]]).contains("below 2"));
    assert!(refused(Structure::Concat { axis: 1 }, &[&[2, 3], &[3, 3]]).contains("[3, 3]"));
    assert!(refused(Structure::Transpose { order: vec![0, 0] }, &[&[2, 3]]).contains("once"));
    assert!(refused(Structure::Reshape { dims: dims(&[7]) }, &[&[2, 3]]).contains("7 values"));
    assert!(refused(Structure::Expand { dims: dims(&[4, 3]) }, &[&[2, 3]]).contains("[4, 3]"));
    assert!(refused(Structure::Pad { padding: vec![[1, 1]], value: f32::INFINITY }, &[&[3]]).contains("finite"));
    let gather = Structure::Gather { axis: 0, indices: vec![3], dims: dims(&[1]) };
    assert!(refused(gather, &[&[3]]).contains("below 3"));
}
