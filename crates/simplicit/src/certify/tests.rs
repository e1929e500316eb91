use super::*;
use crate::attack::{AttackInput, AttackSettings, Classifier, attack};
use crate::graph::{Dims, Pooling, Structure};
use crate::layout::{Activation, Layer, Layout};
use crate::linalg::Csr;
use crate::model::ModelParts;
use crate::network::{Network, Shape, Window};
use crate::random::Random;

pub(crate) const SMALL: usize = INPUTS;
const INPUTS: usize = 10;
const STATES: usize = 14;
const CLASSES: usize = 3;

/// Three layers of two activations; `cycles` allows A everywhere, otherwise only from earlier layers (with skips).
pub(crate) fn random_model(r: &mut Random, cycles: bool, size: f64) -> ImplicitModel {
    let layer = |i: usize| {
        if i < 4 {
            0
        } else if i < 9 {
            1
        } else {
            2
        }
    };
    let kinds = [Activation::Relu, Activation::Relu, Activation::Tanh, Activation::leaky_relu(0.2).unwrap()];
    let density = 0.3 + 0.7 * r.uniform();
    let mut rows = |count: usize, cols: usize, size: f64, keep: &dyn Fn(usize, usize) -> bool| {
        (0..count)
            .map(|i| {
                let mut row: Vec<(usize, f32)> = Vec::new();
                for j in (0..cols).filter(|&j| keep(i, j)) {
                    if r.uniform() < density {
                        row.push((j, (size * r.normal()) as f32));
                    }
                }
                row
            })
            .collect::<Vec<_>>()
    };
    let all = |_: usize, _: usize| true;
    let a = if cycles {
        // Every row sum below 0.9.
        let mut a = rows(STATES, STATES, 1.0, &all);
        for row in &mut a {
            let sum: f32 = row.iter().map(|(_, v)| v.abs()).sum();
            row.iter_mut().for_each(|(_, v)| *v *= 0.9 / sum.max(0.9));
        }
        a
    } else {
        rows(STATES, STATES, size, &|i, j| layer(j) > layer(i))
    };
    let b = rows(STATES, INPUTS, size, &all);
    let c = rows(CLASSES, STATES, size, &all);
    let d = rows(CLASSES, INPUTS, 0.3 * size, &all);
    let kind = |r: &mut Random| kinds[r.below(kinds.len())];
    let layout = Layout::new(vec![
        Layer::dense("third", 4, kind(r)),
        Layer::dense("second", 5, Activation::Relu),
        Layer::dense("first", 5, kind(r)),
    ]);
    ImplicitModel::new(ModelParts {
        a: Csr::from_rows(STATES, a),
        b: Csr::from_rows(INPUTS, b),
        c: Csr::from_rows(STATES, c),
        d: Csr::from_rows(INPUTS, d),
        state_bias: (0..STATES).map(|_| (0.3 * r.normal()) as f32).collect(),
        output_bias: vec![0.1, 0.0, -0.1],
        layout,
        ..Default::default()
    })
    .unwrap()
}

/// Strides, uneven padding, two means on the way, a residual sum and one with a mean in it: 2 × 7 × 6 to 3 classes.
fn convolutional(seed: u64, gain: f64) -> Network {
    let mut r = Random::new(seed);
    let mut weights = |rows: usize, cols: usize| {
        let size = gain / (cols as f64).sqrt();
        Matrix::from_fn(rows, cols, |_, _| if r.uniform() < 0.3 { 0.0 } else { (size * r.normal()) as f32 })
    };
    let odd = Window { kernel: [3, 2], stride: [1, 2], padding: [1, 0, 1, 0], dilation: [1; 2] };
    let overlapping = Window { kernel: [3, 2], stride: [2, 1], padding: [1, 0, 0, 1], dilation: [1; 2] };
    let bias = |rows: usize| Some((0..rows).map(|k| 0.1 * k as f32 - 0.1).collect::<Vec<_>>());
    let start = Network::builder(Shape::map(2, 7, 6))
        .unwrap()
        .convolution(weights(3, 12), odd, bias(3))
        .unwrap()
        .activation(Activation::Relu)
        .unwrap()
        .average_pool(overlapping, seed.is_multiple_of(2))
        .unwrap();
    let pooled = start.here();
    start
        .convolution(weights(3, 27), Window::square(3, 1, 1), bias(3))
        .unwrap()
        .plus(pooled)
        .unwrap()
        .activation(Activation::LeakyRelu { slope: 0.1 })
        .unwrap()
        .global_average()
        .unwrap()
        .linear(weights(3, 3), bias(3))
        .unwrap()
        .build()
        .unwrap()
}

/// Both kinds of maximum pooling, one of them over padded and overlapping windows, a shortcut by slice and padding, a
/// grouped and a dilated convolution, a concatenation and a transposition: 2 × 8 × 8 to 3 classes.
fn moving(seed: u64) -> Network {
    let mut r = Random::new(seed);
    let mut weights = |rows: usize, cols: usize| {
        let size = 1.6 / (cols as f64).sqrt();
        Matrix::from_fn(rows, cols, |_, _| if r.uniform() < 0.3 { 0.0 } else { (size * r.normal()) as f32 })
    };
    let bias = |rows: usize| Some((0..rows).map(|k| 0.1 * k as f32 - 0.2).collect::<Vec<_>>());
    let pooling = Pooling {
        maximum: true,
        kernel: vec![2, 2],
        stride: vec![1, 1],
        dilation: vec![2, 1],
        padding: vec![[0, 0], [0, 0]],
        count_padding: false,
        beyond: vec![0, 0],
    };
    let start = Network::builder(Shape::map(2, 8, 8))
        .unwrap()
        .grouped_convolution(weights(4, 9), Window::square(3, 1, 1), 2, bias(4))
        .unwrap()
        .activation(Activation::Relu)
        .unwrap()
        .max_pool(Window { kernel: [3, 3], stride: [2, 2], padding: [1; 4], dilation: [1; 2] })
        .unwrap();
    let pooled = start.here();
    let dilated = Window { kernel: [2, 2], stride: [1, 1], padding: [1, 1, 1, 1], dilation: [2, 2] };
    let main = start.convolution(weights(6, 16), dilated, bias(6)).unwrap();
    let long = main.here();
    // The shortcut: every map of the pooling, and two maps of nothing.
    let short = main.at(pooled).unwrap();
    let short = short
        .structure(Structure::Slice { axis: 2, start: 0, step: 1, count: 4 }, &[])
        .unwrap()
        .structure(Structure::Pad { padding: vec![[0, 0], [1, 1], [0, 0], [0, 0]], value: 0.0 }, &[])
        .unwrap()
        .plus(long)
        .unwrap()
        .activation(Activation::Relu)
        .unwrap()
        .structure(Structure::Pool(pooling), &[])
        .unwrap();
    let whole = short.here();
    short
        .structure(Structure::Transpose { order: vec![0, 1, 3, 2] }, &[])
        .unwrap()
        .structure(Structure::Reshape { dims: Dims::new(&[1, 6, 2, 3]).unwrap() }, &[])
        .unwrap()
        .structure(Structure::Concat { axis: 1 }, &[whole])
        .unwrap()
        .flatten()
        .unwrap()
        .linear(weights(3, 72), bias(3))
        .unwrap()
        .build()
        .unwrap()
}

fn per_feature() -> PerFeature {
    features(INPUTS)
}

fn features(inputs: usize) -> PerFeature {
    let std = (0..inputs).map(|k| 0.5 + 0.1 * (k % INPUTS) as f64).collect();
    PerFeature { scale: 1.0, mean: vec![0.25; inputs], std }
}

/// Preprocessed inputs of raw samples in [0, 1], some values at the ends.
fn samples(r: &mut Random, count: usize) -> Matrix<f32> {
    samples_of(r, count, &per_feature())
}

fn samples_of(r: &mut Random, count: usize, p: &PerFeature) -> Matrix<f32> {
    Matrix::from_fn(count, p.std.len(), |_, k| {
        let raw = (1.4 * r.uniform() - 0.2).clamp(0.0, 1.0);
        ((raw - p.mean[k]) / p.std[k]) as f32
    })
}

fn report(
    model: &ImplicitModel,
    u: &Matrix<f32>,
    labels: &[u32],
    (epsilon, norm): (&[f64], Norm),
    threads: usize,
) -> CertifyReport {
    let settings =
        CertifySettings { epsilon: epsilon.to_vec(), bound: Bound::Slopes, slopes: 4, norm, ..Default::default() };
    let features = features(u.cols());
    certify(model, u, labels, &features, &settings, Threads::new(threads), &Cancel::new(), |_| {}).unwrap()
}

/// The results of all attacks on a model's samples.
#[derive(Default)]
struct Found {
    certified: Vec<usize>,
    fooled: usize,
    /// Perturbed inputs that were run: those of attacks on certified samples, corners and points.
    trials: usize,
}

fn nothing_beats(r: &mut Random, model: &ImplicitModel, epsilon: &[f64], norm: Norm, round: usize) -> Found {
    let target = Classifier::new(model).unwrap();
    let features = features(model.shape().inputs);
    let u = samples_of(r, 12, &features);
    let labels = crate::evaluate::predictions(&target.logits(&u).unwrap());
    let proved = report(model, &u, &labels, (epsilon, norm), 1);
    let input = AttackInput {
        target: &target,
        baseline: None,
        inputs: &u,
        labels: &labels,
        per_feature: &features,
        sample_shape: &[u.cols()],
    };
    let settings =
        AttackSettings { epsilon: epsilon.to_vec(), iterations: 10, queries: 40, norm, ..Default::default() };
    let attacked = attack(&input, &settings, Threads::one(), &Cancel::new(), |_| {}).unwrap();
    let mut found = Found { certified: vec![0; epsilon.len()], ..Found::default() };
    for s in 0..u.rows() {
        for (e, &size) in epsilon.iter().enumerate() {
            found.certified[e] += usize::from(proved.certified[s][e]);
            found.fooled += usize::from(attacked.fooled[s][e]);
            assert!(!(proved.certified[s][e] && attacked.fooled[s][e]), "round {round} sample {s} ε {size} {norm}");
            if !proved.certified[s][e] {
                continue;
            }
            let points = Matrix::from_fn(40, u.cols(), |turn, k| {
                // In the Euclidean norm the corners are those of a box inside the ball.
                let size = if norm == Norm::L2 { size / (u.cols() as f64).sqrt() } else { size };
                let (low, high) = crate::attack::limits(u[(s, k)], features.mean[k], features.std[k], size);
                let at = if turn < 30 { f64::from(u8::from(r.uniform() < 0.5)) } else { r.uniform() };
                (low + at * (high - low)) as f32
            });
            let wrong = crate::evaluate::predictions(&target.logits(&points).unwrap());
            assert!(wrong.iter().all(|p| *p == labels[s]), "round {round} sample {s} ε {size} {norm}");
            // PGD from all starts, FGSM, the square search, and the points.
            found.trials += settings.restarts * (settings.iterations + 1) + 1 + settings.queries + points.rows();
        }
    }
    found
}

/// No attack, no corner and no random point beats a certificate, in 10⁵ trials.
#[test]
fn nothing_beats_a_certificate() {
    let mut r = Random::new(7);
    let (mut certified, mut euclidean, mut fooled, mut trials) = ([[0usize; 4]; 4], [0usize; 4], [0usize; 4], 0);
    for round in 0..96 {
        let kind = round % 4;
        let norm = if round / 4 % 3 == 2 { Norm::L2 } else { Norm::Linf };
        let epsilon = if norm == Norm::L2 { [0.01, 0.04, 0.15, 0.4] } else { [0.004, 0.015, 0.05, 0.15] };
        let model = match kind {
            3 => ImplicitModel::from_network(&moving(round as u64)).unwrap(),
            2 => ImplicitModel::from_network(&convolutional(round as u64, 3.0)).unwrap(),
            _ => random_model(&mut r, kind == 1, 0.7),
        };
        let found = nothing_beats(&mut r, &model, &epsilon, norm, round);
        certified[kind].iter_mut().zip(&found.certified).for_each(|(c, f)| *c += f);
        euclidean[kind] += if norm == Norm::L2 { found.certified.iter().sum() } else { 0 };
        fooled[kind] += found.fooled;
        trials += found.trials;
    }
    // The test is meaningful: in both norms many samples are certified and many are fooled, for acyclic, cyclic,
    // residual convolutional and pooling models.
    for kind in certified {
        assert!(kind[0] > 200 && kind[1] > 100 && kind[2] > 10, "{certified:?}");
    }
    assert!(euclidean.iter().all(|c| *c > 60) && fooled.iter().all(|f| *f > 20), "{euclidean:?} {fooled:?}");
    assert!(fooled.iter().sum::<usize>() > 300 && trials > 100_000, "{fooled:?} fooled, {trials} trials");
}

/// Sums of single precision in many orders, pairwise ones too, stay within the slack, which is about half of what γ_n of all
/// magnitudes allows; and exact arithmetic has less of it.
#[test]
fn slacks_hold_for_every_order_of_a_sum() {
    let mut r = Random::new(41);
    let features = 300;
    for round in 0..20 {
        let w: Vec<f32> = (0..features).map(|_| r.normal() as f32).collect();
        let x: Vec<f32> = (0..features).map(|_| if round % 2 == 0 { r.uniform() } else { r.normal() } as f32).collect();
        let bias = r.normal() as f32;
        let model = ImplicitModel::new(ModelParts {
            a: Csr::empty(0, 0),
            b: Csr::empty(0, features),
            c: Csr::empty(1, 0),
            d: Csr::from_rows(features, [w.iter().copied().enumerate().collect::<Vec<_>>()]),
            output_bias: vec![bias],
            ..Default::default()
        })
        .unwrap();
        let wide: Vec<f64> = x.iter().map(|v| f64::from(*v)).collect();
        let slack = |arithmetic| {
            let graph = Graph::new(&model, arithmetic).unwrap();
            let all = [boxes::Bounds::of_values(wide.clone(), wide.clone())];
            boxes::Bounds::sum(&graph, 1, &all).slack[0]
        };
        let (any, exact) = (slack(Arithmetic::AnyOrder), slack(Arithmetic::Exact));
        let products: Vec<f64> = w.iter().zip(&wide).map(|(w, x)| f64::from(*w) * x).collect();
        let right = products.iter().sum::<f64>() + f64::from(bias);
        let magnitudes = products.iter().map(|p| p.abs()).sum::<f64>() + f64::from(bias.abs());
        assert!(any - exact < 0.62 * boxes::gamma(features as f64 + 4.0) * magnitudes, "{any} {magnitudes}");
        assert!(exact < 0.1 * any);
        let mut worst: f64 = 0.0;
        for turn in 0..60 {
            // Largest first, all of one sign first, or any order; in turn or by pairs.
            let mut order: Vec<f32> = w.iter().zip(&x).map(|(w, x)| w * x).chain([bias]).collect();
            match turn {
                0 => order.sort_by(|a, b| b.abs().total_cmp(&a.abs())),
                1 => order.sort_by(|a, b| b.total_cmp(a)),
                2 => order.sort_by(f32::total_cmp),
                _ => (1..order.len()).for_each(|k| order.swap(k, r.below(k + 1))),
            }
            let found = if turn % 2 == 1 || turn == 2 {
                order.iter().fold(0.0, |sum, p| sum + p)
            } else {
                while order.len() > 1 {
                    order = order.chunks(2).map(|pair| pair.iter().sum()).collect();
                }
                order[0]
            };
            worst = worst.max((f64::from(found) - right).abs());
        }
        assert!(worst <= any, "{worst} against {any}");
    }
}

/// Of dense ReLU layers (W, b), the last without activation: the smallest differences of output `label` and the others
/// over a box, by substitution in double precision, every unit's interval narrowed the same way.
fn textbook(layers: &[(Matrix, Vec<f64>)], low: &[f64], high: &[f64], label: usize) -> Vec<f64> {
    // Smallest value of rows·x_k + constant, x_k being the values of layer k, given the intervals of those before.
    fn least(layers: &[(Matrix, Vec<f64>)], z: &[(Vec<f64>, Vec<f64>)], box_: (&[f64], &[f64]), row: &[f64]) -> f64 {
        let (mut row, mut constant) = (row.to_vec(), 0.0);
        for k in (0..layers.len()).rev() {
            let (w, b) = &layers[k];
            if k + 1 < layers.len() {
                for (i, c) in row.iter_mut().enumerate() {
                    let (l, u) = (z[k].0[i], z[k].1[i]);
                    if u <= 0.0 {
                        *c = 0.0;
                    } else if l < 0.0 && *c >= 0.0 {
                        *c *= f64::from(u8::from(u > -l));
                    } else if l < 0.0 {
                        constant -= *c * u * l / (u - l);
                        *c *= u / (u - l);
                    }
                }
            }
            constant += row.iter().zip(b).map(|(c, b)| c * b).sum::<f64>();
            row = (0..w.cols()).map(|j| row.iter().enumerate().map(|(i, c)| c * w[(i, j)]).sum()).collect();
        }
        let ends = row.iter().zip(box_.0.iter().zip(box_.1));
        constant + ends.map(|(c, (l, h))| if *c >= 0.0 { c * l } else { c * h }).sum::<f64>()
    }
    let mut z: Vec<(Vec<f64>, Vec<f64>)> = Vec::new();
    for k in 0..layers.len() - 1 {
        let size = layers[k].0.rows();
        let end = |sign: f64| -> Vec<f64> {
            let unit = |i: usize| (0..size).map(|j| if i == j { sign } else { 0.0 }).collect::<Vec<_>>();
            (0..size).map(|i| sign * least(&layers[..=k], &z, (low, high), &unit(i))).collect()
        };
        z.push((end(1.0), end(-1.0)));
    }
    let outputs = layers[layers.len() - 1].0.rows();
    (0..outputs)
        .filter(|j| *j != label)
        .map(|j| {
            let row: Vec<f64> = (0..outputs).map(|i| f64::from(i == label) - f64::from(i == j)).collect();
            least(layers, &z, (low, high), &row)
        })
        .collect()
}

/// The linear bound certifies exactly what the textbook's does, except for margins within the slack for rounding.
#[test]
fn the_linear_bound_is_the_textbooks() {
    let mut r = Random::new(31);
    let features = per_feature();
    let (mut held, mut failed) = (0, 0);
    for _ in 0..12 {
        let sizes = [INPUTS, 9, 8, 7, CLASSES];
        let layers: Vec<(Matrix<f32>, Vec<f32>)> = sizes
            .windows(2)
            .map(|s| {
                let scale = 1.3 / (s[0] as f64).sqrt();
                let w = Matrix::from_fn(s[1], s[0], |_, _| (scale * r.normal()) as f32);
                (w, (0..s[1]).map(|_| (0.2 * r.normal()) as f32).collect())
            })
            .collect();
        let dense = |(w, b): &(Matrix<f32>, Vec<f32>), activation| {
            crate::model::DenseLayer::new("layer", w.clone(), activation).with_bias(b.clone())
        };
        let hidden: Vec<_> = layers[..3].iter().map(|l| dense(l, Activation::Relu)).collect();
        let model = ImplicitModel::from_layers(&hidden, &dense(&layers[3], Activation::Identity)).unwrap();
        let wide: Vec<(Matrix, Vec<f64>)> =
            layers.iter().map(|(w, b)| (w.cast(), b.iter().map(|v| f64::from(*v)).collect())).collect();
        let u = samples(&mut r, 10);
        let labels = crate::evaluate::predictions(&Classifier::new(&model).unwrap().logits(&u).unwrap());
        for epsilon in [0.01, 0.03, 0.08] {
            let settings = CertifySettings { epsilon: vec![epsilon], ..Default::default() };
            let proved =
                certify(&model, &u, &labels, &features, &settings, Threads::one(), &Cancel::new(), |_| {}).unwrap();
            for s in 0..u.rows() {
                let ends: Vec<(f64, f64)> = (0..INPUTS)
                    .map(|k| crate::attack::limits(u[(s, k)], features.mean[k], features.std[k], epsilon))
                    .collect();
                let (low, high): (Vec<f64>, Vec<f64>) = ends.into_iter().unzip();
                let margin = textbook(&wide, &low, &high, labels[s] as usize).into_iter().fold(f64::INFINITY, f64::min);
                // Our bound also tries intervals, which are sometimes slightly better where the lines are poor.
                if margin > 1e-3 {
                    held += 1;
                    assert!(proved.certified[s][0], "{margin} at {epsilon}");
                } else if margin < -0.05 {
                    failed += 1;
                    assert!(!proved.certified[s][0], "{margin} at {epsilon}");
                }
            }
        }
    }
    assert!(held > 50 && failed > 50, "{held} {failed}");
}

/// In exact arithmetic only the certifier's own roundings count, and these are a share of the widths of intervals: with
/// values of thousands and a margin of 0.05, all but a thirtieth of the margin is proved.
#[test]
fn rounded_coefficients_cost_a_share_of_the_widths() {
    let mut r = Random::new(61);
    let features = PerFeature { scale: 1.0, mean: vec![0.0; INPUTS], std: vec![0.5; INPUTS] };
    for round in 0..20 {
        let mut weights = |rows: usize, cols: usize| Matrix::from_fn(rows, cols, |_, _| r.normal() as f32);
        let (first, second) = (weights(12, INPUTS), weights(2, 12));
        let u = Matrix::from_fn(1, INPUTS, |_, k| 1.0 + 0.01 * k as f32);
        let hidden: Vec<f64> = (0..12)
            .map(|i| 1000.0 + (0..INPUTS).map(|k| f64::from(first[(i, k)]) * f64::from(u[(0, k)])).sum::<f64>())
            .collect();
        let difference = |i: usize| f64::from(second[(0, i)]) - f64::from(second[(1, i)]);
        let without: f64 = (0..12).map(|i| difference(i) * hidden[i]).sum();
        let bias = (0.05 - without) as f32;
        let margin = without + f64::from(bias);
        let slope = |k: usize| (0..12).map(|i| difference(i) * f64::from(first[(i, k)])).sum::<f64>().abs() / 0.5;
        let reached = margin / (0..INPUTS).map(slope).sum::<f64>();
        let dense = |w: Matrix<f32>, b: Vec<f32>, activation| {
            crate::model::DenseLayer::new("layer", w, activation).with_bias(b)
        };
        let layers = [dense(first, vec![1000.0; 12], Activation::Relu)];
        let model = ImplicitModel::from_layers(&layers, &dense(second, vec![bias, 0.0], Activation::Identity)).unwrap();
        let settings = CertifySettings {
            epsilon: vec![0.97 * reached, 1.01 * reached],
            arithmetic: Arithmetic::Exact,
            ..Default::default()
        };
        let proved = certify(&model, &u, &[0], &features, &settings, Threads::one(), &Cancel::new(), |_| {}).unwrap();
        assert_eq!(proved.clean_accuracy, 1.0, "round {round}: {margin}");
        assert_eq!(proved.certified[0], [true, false], "round {round}: {margin}, {reached}");
    }
}

/// |C_i − C_j|(I−|A|)⁻¹|B| + |D_i − D_j| times 1/std, from dense matrices by a Neumann series.
fn constants(model: &ImplicitModel, features: &PerFeature) -> Matrix {
    let (a, b) = (model.a().to_dense(), model.b().to_dense());
    let from_inputs: Vec<f64> =
        (0..STATES).map(|i| (0..INPUTS).map(|k| f64::from(b[(i, k)].abs()) / features.std[k]).sum()).collect();
    let mut t = from_inputs.clone();
    for _ in 0..3000 {
        t = (0..STATES)
            .map(|i| from_inputs[i] + (0..STATES).map(|j| f64::from(a[(i, j)].abs()) * t[j]).sum::<f64>())
            .collect();
    }
    let (c, d) = (model.c().to_dense(), model.d().to_dense());
    Matrix::from_fn(CLASSES, CLASSES, |i, j| {
        (0..STATES).map(|k| f64::from((c[(i, k)] - c[(j, k)]).abs()) * t[k]).sum::<f64>()
            + (0..INPUTS).map(|k| f64::from((d[(i, k)] - d[(j, k)]).abs()) / features.std[k]).sum::<f64>()
    })
}

/// The global bound certifies up to the formula's ε and not beyond; prices are the formula's derivative.
#[test]
fn the_global_bound_is_the_formula() {
    let mut r = Random::new(11);
    let features = per_feature();
    for round in 0..10 {
        let model = random_model(&mut r, round % 2 == 1, 0.7);
        let constant = constants(&model, &features);
        // Inputs well inside [0, 1], so that no box is cut off.
        let u = Matrix::from_fn(12, INPUTS, |_, k| ((0.3 + 0.4 * r.uniform() - 0.25) / features.std[k]) as f32);
        let y = Classifier::new(&model).unwrap().logits(&u).unwrap();
        let labels = crate::evaluate::predictions(&y);
        for s in 0..u.rows() {
            let label = labels[s] as usize;
            let reached = (0..CLASSES)
                .filter(|j| *j != label)
                .map(|j| f64::from(y[(s, label)] - y[(s, j)]) / constant[(label, j)])
                .fold(f64::INFINITY, f64::min);
            // Rounding takes a part of small margins, and a box is cut off at the ends of [0, 1].
            if !(2e-3..0.25).contains(&reached) {
                continue;
            }
            let settings = CertifySettings {
                epsilon: vec![0.97 * reached, 1.01 * reached],
                bound: Bound::Global,
                ..Default::default()
            };
            let one = Matrix::from_fn(1, INPUTS, |_, k| u[(s, k)]);
            let proved =
                certify(&model, &one, &labels[s..=s], &features, &settings, Threads::one(), &Cancel::new(), |_| {})
                    .unwrap();
            assert_eq!(proved.certified[0], [true, false], "round {round} sample {s}: {reached}");
        }
        // rows ⊗ columns is the derivative: the certificate is homogeneous in B, C, D (each path has one of B or D).
        let found = sensitivity(&model, &features.std).unwrap();
        let mean = |model: &ImplicitModel| {
            let constant = constants(model, &features);
            (0..CLASSES).flat_map(|i| (0..i).map(move |j| (i, j))).map(|(i, j)| constant[(i, j)]).sum::<f64>() / 3.0
        };
        let b = model.b().to_dense();
        let h = 1e-3;
        for _ in 0..20 {
            let (i, j) = (r.below(STATES), r.below(INPUTS));
            let mut parts = model.clone().into_parts();
            let mut dense = b.clone();
            let sign = if dense[(i, j)] < 0.0 { -1.0 } else { 1.0 };
            dense[(i, j)] += sign * h as f32;
            parts.b = Csr::from_dense(&dense);
            let slope = (mean(&ImplicitModel::new(parts).unwrap()) - mean(&model)) / h;
            let expected = found.rows[i] * found.columns[STATES + j];
            assert!((slope - expected).abs() < 0.02 * expected + 1e-3, "{slope} against {expected}");
        }
    }
}

/// Prices of shared weights against differences: the constant is what the model with magnitudes of its weights, without
/// biases and activations, makes of 1/std, averaged over the outputs and doubled.
#[test]
fn prices_of_taps_are_the_derivative() {
    let mut r = Random::new(12);
    for seed in 0..4 {
        let model = ImplicitModel::from_network(&convolutional(seed, 2.0)).unwrap();
        let std = features(model.shape().inputs).std;
        let constant = |model: &ImplicitModel| {
            let mut parts = model.clone().into_parts();
            for block in &mut parts.taps {
                if let crate::model::TapWeights::Taps(taps) = &mut block.weights {
                    *taps = Csr::from_rows(
                        taps.cols(),
                        (0..taps.rows()).map(|o| taps.row(o).map(|(j, w)| (j, w.abs())).collect::<Vec<_>>()),
                    );
                }
            }
            let plain = parts.layout.layers().iter().cloned().map(|l| Layer { activation: Activation::Identity, ..l });
            parts.layout = Layout::new(plain.collect());
            parts.state_bias.fill(0.0);
            parts.output_bias.fill(0.0);
            parts.c = Csr::from_dense(&magnitudes(&parts.c));
            let model = ImplicitModel::new(parts).unwrap();
            let u = Matrix::from_fn(1, std.len(), |_, k| (1.0 / std[k]) as f32);
            let y = Equilibrium::new(&model, one_thread()).unwrap().run(&u).unwrap().y;
            2.0 * y.row(0).iter().map(|v| f64::from(*v)).sum::<f64>() / y.cols() as f64
        };
        let found = sensitivity(&model, &std).unwrap();
        let before = constant(&model);
        for _ in 0..30 {
            let k = r.below(model.taps().len());
            let crate::model::TapWeights::Taps(taps) = &model.taps()[k].weights else { continue };
            let (o, j) = (r.below(taps.rows()), r.below(taps.cols()));
            let h = 0.25f32;
            let mut dense = taps.to_dense();
            dense[(o, j)] += if dense[(o, j)] < 0.0 { -h } else { h };
            let mut parts = model.clone().into_parts();
            parts.taps[k].weights = crate::model::TapWeights::Taps(Csr::from_dense(&dense));
            let slope = (constant(&ImplicitModel::new(parts).unwrap()) - before) / f64::from(h);
            let price = found.taps[k][(o, j)];
            assert!((slope - price).abs() < 1e-4 * (1.0 + price), "block {k}: {slope} against {price}");
        }
    }
}

fn magnitudes(m: &Csr<f32>) -> Matrix<f32> {
    let dense = m.to_dense();
    Matrix::from_fn(dense.rows(), dense.cols(), |i, j| dense[(i, j)].abs())
}

#[test]
fn each_bound_adds_to_the_one_before_and_threads_do_not_matter() {
    let mut r = Random::new(3);
    let epsilon = [0.05, 0.002, 0.01];
    let mut totals = [0.0; 4];
    for round in 0..12 {
        let model = random_model(&mut r, round % 3 == 1, 0.7);
        let u = samples(&mut r, 70);
        let target = Classifier::new(&model).unwrap();
        let mut labels = crate::evaluate::predictions(&target.logits(&u).unwrap());
        labels[0] = (labels[0] + 1) % 3;
        let proved = report(&model, &u, &labels, (&epsilon, Norm::Linf), 1);
        assert_eq!(proved, report(&model, &u, &labels, (&epsilon, Norm::Linf), 3));
        assert!((proved.clean_accuracy - 69.0 / 70.0).abs() < 1e-12 && !proved.certified[0].contains(&true));
        for (k, (_, accuracy)) in proved.by_bound.iter().enumerate() {
            totals[k] += accuracy.iter().sum::<f64>();
            assert!(accuracy[1] >= accuracy[2] && accuracy[2] >= accuracy[0], "falls with ε: {accuracy:?}");
        }
        for pair in proved.by_bound.windows(2) {
            assert!(pair[0].1.iter().zip(&pair[1].1).all(|(a, b)| a <= b));
        }
    }
    assert!(totals.windows(2).all(|t| t[0] < t[1]), "{totals:?}");
}

/// A sample that would cost too much is not certified by linear bounds, and it is counted.
#[test]
fn what_is_given_up_is_counted() {
    let model = ImplicitModel::from_network(&convolutional(3, 3.0)).unwrap();
    let features = features(model.shape().inputs);
    let u = samples_of(&mut Random::new(4), 12, &features);
    let labels = crate::evaluate::predictions(&Classifier::new(&model).unwrap().logits(&u).unwrap());
    let run = |work: u64| {
        let settings = CertifySettings { epsilon: vec![0.015], work, ..Default::default() };
        certify(&model, &u, &labels, &features, &settings, Threads::one(), &Cancel::new(), |_| {}).unwrap()
    };
    let (none, all) = (run(0), run(1 << 40));
    let interval = all.by_bound[1].1[0];
    assert_eq!(all.given_up, 0);
    assert!(all.certified_accuracy[0] > interval, "{all:?}");
    // Every sample that intervals do not certify is given up.
    assert_eq!(none.certified_accuracy[0], interval);
    assert_eq!(none.given_up, ((1.0 - interval) * 12.0).round() as usize);
}

#[test]
fn a_model_not_shown_to_be_well_posed_is_refused() {
    let model = ImplicitModel::new(ModelParts {
        a: Csr::from_rows(1, [vec![(0, 1.5f32)]]),
        b: Csr::from_rows(1, [vec![(0, 1.0f32)]]),
        c: Csr::from_rows(1, [vec![(0, 1.0f32)], vec![]]),
        d: Csr::empty(2, 1),
        state_bias: vec![0.0],
        output_bias: vec![0.0; 2],
        layout: Layout::new(vec![Layer::dense("l", 1, Activation::Relu)]),
        ..Default::default()
    })
    .unwrap();
    let u = Matrix::zeros(1, 1);
    let features = PerFeature { scale: 1.0, mean: vec![0.0], std: vec![1.0] };
    let run = |labels: &[u32]| {
        let settings = CertifySettings::default();
        certify(&model, &u, labels, &features, &settings, Threads::one(), &Cancel::new(), |_| {})
            .unwrap_err()
            .to_string()
    };
    assert!(run(&[0]).contains("λ_pf(|A|) only shown to be at most 1.5"), "{}", run(&[0]));
    assert!(run(&[2]).contains("classes below 2, got 2"));
    assert!(run(&[]).contains("expected 1, one for each input, got 0"));
}

/// Expansive or decreasing activations get no certificate and may not lie on a cycle; the message names the layer.
#[test]
fn activations_that_prove_nothing_are_refused_by_the_name_of_their_layer() {
    let mut r = Random::new(77);
    let with = |model: ImplicitModel, activation: Activation| {
        let mut parts = model.into_parts();
        let mut layers = parts.layout.layers().to_vec();
        layers[1].activation = activation;
        layers[1].name = "middle".into();
        parts.layout = Layout::new(layers);
        ImplicitModel::new(parts)
    };
    for activation in [Activation::Gelu, Activation::Selu, Activation::leaky_relu(-0.5).unwrap()] {
        let model = with(random_model(&mut r, false, 0.3), activation).unwrap();
        let message = sensitivity(&model, &[1.0; INPUTS]).unwrap_err().to_string();
        assert!(message.contains("\"middle\"") && message.contains(&activation.to_string()), "{message}");
    }
    let message = with(random_model(&mut r, true, 0.05), Activation::Gelu).unwrap_err().to_string();
    assert!(message.contains("cycle through layer \"middle\" with activation gelu"), "{message}");
    let clip = Activation::Clip { low: 0.0, high: 6.0 };
    assert!(sensitivity(&with(random_model(&mut r, true, 0.05), clip).unwrap(), &[1.0; INPUTS]).is_ok());
}

/// Bounds of both ends at once, and those that end at a node on the way, hold at random points; where everything is stable they are
/// what two substitutions give.
#[test]
fn both_ends_at_once_hold() {
    use super::boxes::Rule;
    use super::sample::Narrow;
    use super::substitution::Until;
    let (mut r, mut wider, mut as_wide) = (Random::new(53), 0, 0);
    for _ in 0..12 {
        let model = random_model(&mut r, false, 0.8);
        let features = PerFeature { scale: 1.0, mean: vec![0.0; INPUTS], std: vec![0.5; INPUTS] };
        let settings = CertifySettings::default();
        let certifier = Certifier::new(&model, &features, &settings).unwrap();
        let u: Vec<f32> = (0..INPUTS).map(|_| r.uniform() as f32).collect();
        let mut substitution = Substitution::new(&certifier.graph);
        let (cancel, epsilon) = (Cancel::new(), 0.05);
        let mut sample = Sample {
            certifier: &certifier,
            substitution: &mut substitution,
            u: &u,
            label: 0,
            states: None,
            cancel: &cancel,
            given_up: false,
            spent: 0,
        };
        let input = sample.input(epsilon);
        let all = sample.boxes(&input, epsilon, Rule::Interval, Narrow::Unstable).unwrap().unwrap();
        let mut points = Matrix::<f32>::zeros(200, INPUTS);
        for s in 0..200 {
            for k in 0..INPUTS {
                let (low, high) = (input.low[k], input.high[k]);
                let at = if s % 2 == 0 { r.uniform() } else { f64::from(u8::from(r.uniform() < 0.5)) };
                points[(s, k)] = (low + at * (high - low)).clamp(low, high) as f32;
            }
        }
        let z = certifier.equilibrium.run(&points).unwrap().z;
        for (layer, &node) in certifier.graph.layers.iter().enumerate() {
            let range = certifier.layout.range(layer);
            let units: Vec<usize> = (0..range.len()).collect();
            let signed: Vec<Vec<(usize, f32)>> =
                units.iter().flat_map(|&i| [vec![(i, 1.0)], vec![(i, -1.0)]]).collect();
            let least = substitution.lower(node, &signed, &all, &input, Until::Input, None);
            for until in [Until::Input, Until::Node(node.saturating_sub(2))] {
                let (low, high) = substitution.both(node, &units, &all, &input, until);
                for &i in &units {
                    let seen = (0..200).map(|s| f64::from(z[(s, range.start + i)]));
                    assert!(seen.clone().all(|z| low[i] <= z && z <= high[i]), "{layer} {i}: {} {}", low[i], high[i]);
                    let (tight, wide) = (-least[2 * i + 1] - least[2 * i], high[i] - low[i]);
                    if matches!(until, Until::Input) {
                        wider += usize::from(wide > 1.001 * tight);
                        as_wide += usize::from((wide - tight).abs() < 1e-4 * tight);
                    }
                }
            }
        }
    }
    assert!(wider > 5 && as_wide > 50, "{wider} {as_wide}");
}
