//! Gradients of a network in double precision, from its terms alone: every linear part as a list of its coefficients, read
//! backwards. Slow and plain; nothing of the library's adjoint is used but the adjoints of operators, which have tests of
//! their own.

use simplicit::graph::Value;
use simplicit::layout::{MapShape, Operator, Source};
use simplicit::linalg::Matrix;
use simplicit::network::{FixedMap, Network, PreActivation, Term, Weights, Window};
use simplicit::states::StateMap;

/// Σ v·y of one sample by its inputs and by every pre-activation.
pub struct Slopes {
    pub du: Vec<f64>,
    pub dz: Vec<f64>,
}

/// Result, operand and coefficient of every product in a linear map.
type Coefficients = Vec<(usize, usize, f64)>;

/// The slopes of Σ v·y for every row of `u`, `v` having one row of outputs each.
pub fn slopes(network: &Network, u: &Matrix<f32>, v: &Matrix<f32>) -> Vec<Slopes> {
    let states = network.states(u).unwrap();
    let (layout, samples) = (network.layout(), u.rows());
    (0..samples)
        .map(|s| {
            let (z, x) = (states.z.row(s), states.x.row(s));
            let mut du = vec![0.0; u.cols()];
            // Cotangents of X, and of Z where a layer has had its turn.
            let mut dx = vec![0.0; layout.size()];
            let mut send = |sum: &PreActivation, dout: &[f64], dx: &mut [f64]| {
                let value = |source: Source| match source {
                    Source::Input => states.u.row(s).to_vec(),
                    Source::Layer(k) => x[layout.range(k)].to_vec(),
                };
                let mut add = |source: Source, cotangent: &[f64]| {
                    let into = match source {
                        Source::Input => &mut du[..],
                        Source::Layer(k) => &mut dx[layout.range(k)],
                    };
                    into.iter_mut().zip(cotangent).for_each(|(into, d)| *into += d);
                };
                for term in &sum.terms {
                    add(term.source, &through(term, value(term.source), dout));
                }
                if let Some(Operator::Structure { structure, operands }) = &sum.operator {
                    let single = |values: &[f64]| values.iter().map(|v| *v as f32).collect::<Vec<f32>>();
                    let read: Vec<Vec<f32>> = operands.iter().map(|o| single(&value(o.source))).collect();
                    let values: Vec<Value> =
                        operands.iter().zip(&read).map(|(o, data)| Value { dims: o.dims, data }).collect();
                    let dims = structure.dims(&operands.iter().map(|o| o.dims).collect::<Vec<_>>()).unwrap();
                    let mut out = vec![0.0; dout.len()];
                    structure.forward(&values, &mut out);
                    let mut back: Vec<Vec<f32>> = read.iter().map(|data| vec![0.0; data.len()]).collect();
                    let mut into: Vec<Option<&mut [f32]>> = back.iter_mut().map(|b| Some(&mut b[..])).collect();
                    structure.adjoint(&values, Value { dims, data: &out }, &single(dout), &mut into);
                    for (operand, back) in operands.iter().zip(&back) {
                        add(operand.source, &back.iter().map(|v| f64::from(*v)).collect::<Vec<_>>());
                    }
                }
            };
            let v: Vec<f64> = v.row(s).iter().map(|v| f64::from(*v)).collect();
            send(network.output(), &v, &mut dx);
            for (k, (layer, sum)) in layout.layers().iter().zip(network.pre_activations()).enumerate() {
                for i in layout.range(k) {
                    dx[i] *= f64::from(layer.activation.derivative(z[i] as f32));
                }
                let dout = dx[layout.range(k)].to_vec();
                send(sum, &dout, &mut dx);
            }
            Slopes { du, dz: dx }
        })
        .collect()
}

/// What a term's cotangent gives its source.
fn through(term: &Term, source: Vec<f64>, dout: &[f64]) -> Vec<f64> {
    let mut values = vec![source];
    let mut parts: Vec<Coefficients> = Vec::new();
    for &map in &term.maps {
        let before = &values[values.len() - 1];
        let part = pooling(map, before);
        let mut after = vec![0.0; map.output().unwrap().size()];
        part.iter().for_each(|&(o, i, c)| after[o] += c * before[i]);
        parts.push(part);
        values.push(after);
    }
    let last = values[values.len() - 1].len();
    parts.push(match &term.weights {
        Weights::Identity => (0..last).map(|i| (i, i, 1.0)).collect(),
        Weights::Dense(w) => {
            (0..w.rows()).flat_map(|o| w.row(o).iter().enumerate().map(move |(i, c)| (o, i, f64::from(*c)))).collect()
        }
        Weights::Taps { weights, window, groups, input, output } => {
            let (of_output, of_input) = (output.channels / groups, input.channels / groups);
            let mut part = Vec::new();
            for (o, taps) in (0..output.channels).map(|o| (o, weights.row(o))) {
                for (j, &tap) in taps.iter().enumerate() {
                    let c = o / of_output * of_input + j / window.area();
                    let places = places(*window, *input, *output, j % window.area());
                    part.extend(
                        places.map(|(to, from)| {
                            (o * output.positions() + to, c * input.positions() + from, f64::from(tap))
                        }),
                    );
                }
            }
            part
        }
    });
    parts.iter().rev().enumerate().fold(dout.to_vec(), |cotangent, (k, part)| {
        let mut back = vec![0.0; values[parts.len() - 1 - k].len()];
        part.iter().for_each(|&(o, i, c)| back[i] += c * cotangent[o]);
        back
    })
}

/// Where a tap of a window reads: position of the result, position of the operand.
fn places(window: Window, input: MapShape, output: MapShape, tap: usize) -> impl Iterator<Item = (usize, usize)> {
    let offset = [tap / window.kernel[1], tap % window.kernel[1]];
    let read = move |at: usize, axis: usize, size: usize| {
        let place = at * window.stride[axis] + offset[axis] * window.dilation[axis];
        place.checked_sub(window.padding[axis]).filter(|p| *p < size)
    };
    (0..output.positions()).filter_map(move |to| {
        let row = read(to / output.width, 0, input.height)?;
        Some((to, row * input.width + read(to % output.width, 1, input.width)?))
    })
}

fn pooling(map: FixedMap, value: &[f64]) -> Coefficients {
    let (input, output) = (map.input(), map.output().unwrap());
    let whole = Window { kernel: [input.height, input.width], ..Window::square(1, 1, 0) };
    let (window, max, padded) = match map {
        FixedMap::GlobalAverage { .. } => (whole, false, false),
        FixedMap::MaxPool { window, .. } => (window, true, false),
        FixedMap::AveragePool { window, count_padding, .. } => (window, false, count_padding),
    };
    let mut windows = vec![Vec::new(); output.size()];
    for (c, tap) in (0..input.channels).flat_map(|c| (0..window.area()).map(move |tap| (c, tap))) {
        for (to, from) in places(window, input, output, tap) {
            windows[c * output.positions() + to].push(c * input.positions() + from);
        }
    }
    let of_window = |(o, places): (usize, &Vec<usize>)| -> Coefficients {
        if max {
            // The first of the largest.
            let first = places.iter().copied().reduce(|a, b| if value[b] > value[a] { b } else { a });
            first.map(|i| (o, i, 1.0)).into_iter().collect()
        } else {
            let count = if padded { window.area() } else { places.len() };
            places.iter().map(|&i| (o, i, 1.0 / count as f64)).collect()
        }
    };
    windows.iter().enumerate().flat_map(of_window).collect()
}
