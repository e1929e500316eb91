//! Dimension reduction: fewer states, the same outputs, nothing left that could go by the same rules.

#![allow(clippy::unwrap_used)]

use simplicit::equilibrium::Equilibrium;
use simplicit::evaluate::state_ranges;
use simplicit::layout::{Activation, Layer, Layout};
use simplicit::linalg::{Csr, Matrix};
use simplicit::model::{ImplicitModel, ModelParts, Ranges, TapWeights, Target};
use simplicit::network::{Network, Shape, Window};
use simplicit::parallel::{Cancel, Threads};
use simplicit::random::Random;
use simplicit::states::Collected;

fn outputs(model: &ImplicitModel, u: &Matrix<f32>) -> Matrix<f32> {
    let solution = Equilibrium::new(model, Default::default()).unwrap().outputs(u).unwrap();
    assert!(solution.diagnostics.iter().all(|d| d.converged));
    solution.y
}

fn same(a: &Matrix<f32>, b: &Matrix<f32>, what: &str) {
    let scale = a.as_slice().iter().fold(1.0f32, |m, v| m.max(v.abs()));
    for (a, b) in a.as_slice().iter().zip(b.as_slice()) {
        assert!((a - b).abs() <= 2e-5 * scale, "{what}: {a} and {b}");
    }
}

fn csr(dense: &Matrix<f32>) -> Csr<f32> {
    Csr::from_dense(dense)
}

/// n states in layers of different activations; with cycles every row of |A| sums to at most 0.8.
fn random_model(seed: u64, cyclic: bool) -> ImplicitModel {
    let mut r = Random::new(seed);
    let (n, p, q) = (14, 6, 3);
    let mut sparse = |rows: usize, cols: usize, density: f64| {
        Matrix::from_fn(rows, cols, |_, _| if r.uniform() < density { r.normal() as f32 } else { 0.0 })
    };
    let mut a = sparse(n, n, 0.2);
    for i in 0..n {
        for j in 0..n {
            if !cyclic && j <= i {
                a[(i, j)] = 0.0;
            }
        }
        let sum: f32 = a.row(i).iter().map(|v| v.abs()).sum();
        if cyclic && sum > 0.8 {
            a.row_mut(i).iter_mut().for_each(|v| *v *= 0.8 / sum);
        }
    }
    let (b, c, d) = (sparse(n, p, 0.3), sparse(q, n, 0.3), sparse(q, p, 0.3));
    // Some rows that never fire and some that always do, on inputs in [0, 1].
    let bias = (0..n)
        .map(|i| {
            if i % 5 == 0 {
                -60.0
            } else if i % 5 == 1 {
                60.0
            } else {
                0.0
            }
        })
        .collect();
    let layers = [("e", 4, Activation::Relu), ("d", 3, Activation::Tanh), ("c", 2, Activation::Identity)]
        .into_iter()
        .chain([("b", 3, Activation::LeakyRelu { slope: 0.25 }), ("a", 2, Activation::Sigmoid)]);
    ImplicitModel::new(ModelParts {
        a: csr(&a),
        b: csr(&b),
        c: csr(&c),
        d: csr(&d),
        state_bias: bias,
        output_bias: vec![0.0; q],
        layout: Layout::new(layers.map(|(name, size, phi)| Layer::dense(name, size, phi)).collect()),
        ..Default::default()
    })
    .unwrap()
}

#[test]
fn outputs_stay_and_nothing_grows() {
    let (mut unread, mut constant, mut linear) = (0, 0, 0);
    for seed in 0..60 {
        for cyclic in [false, true] {
            let model = random_model(seed, cyclic);
            let mut r = Random::new(1000 + seed);
            let u = Matrix::from_fn(40, 6, |_, _| r.uniform() as f32);
            let wide = Matrix::from_fn(40, 6, |_, _| 5.0 * r.normal() as f32);
            let map = Equilibrium::new(&model, Default::default()).unwrap();
            let observed = state_ranges(&Collected::new(&map, &u).unwrap(), Threads::new(2), &Cancel::new()).unwrap();
            for (ranges, inputs) in
                [(Ranges::Unknown, &wide), (Ranges::Inputs(vec![(0.0, 1.0); 6]), &u), (Ranges::Observed(observed), &u)]
            {
                let what = format!("seed {seed}, cyclic {cyclic}, {ranges:?}");
                let reduced = model.reduce(&ranges).unwrap();
                same(&outputs(&model, inputs), &outputs(&reduced.model, inputs), &what);
                assert!(reduced.model.sparsity().nonzeros <= model.sparsity().nonzeros, "{what}");
                let gone = reduced.unread.len() + reduced.constant.len() + reduced.linear.len();
                assert_eq!(reduced.model.shape().states + gone, 14, "{what}");
                if cyclic {
                    assert!(reduced.model.a().norm_inf() <= 0.8 + 1e-6, "{what}");
                }
                unread += reduced.unread.len();
                constant += reduced.constant.len();
                linear += reduced.linear.len();
                // Cut inputs give the same as well.
                let (narrow, kept) = reduced.model.without_unread_inputs().unwrap();
                assert_eq!(kept.len() + reduced.unread_inputs.len(), 6);
                let cut = Matrix::from_fn(inputs.rows(), kept.len(), |i, j| inputs[(i, kept[j])]);
                same(&outputs(&reduced.model, inputs), &outputs(&narrow, &cut), &what);
            }
        }
    }
    assert!(unread > 20 && constant > 20 && linear > 20, "{unread} {constant} {linear}: the cases must occur");
}

#[test]
fn bounds_hold_on_samples_and_are_tight_on_one_layer() {
    for seed in 0..40 {
        for cyclic in [false, true] {
            let model = random_model(seed, cyclic);
            let bounds = model.state_bounds(&[(0.0, 1.0); 6]).unwrap();
            let mut r = Random::new(seed);
            // Corners of the box are where bounds are reached, if anywhere.
            let u = Matrix::from_fn(64, 6, |_, _| if r.uniform() < 0.5 { 0.0 } else { 1.0 });
            let z = Equilibrium::new(&model, Default::default()).unwrap().run(&u).unwrap().z;
            for i in 0..z.rows() {
                for (k, &(low, high)) in bounds.iter().enumerate() {
                    let value = f64::from(z[(i, k)]);
                    assert!(low - 1e-4 <= value && value <= high + 1e-4, "seed {seed}: {low} ≤ {value} ≤ {high}");
                }
            }
        }
    }
    // One row reading u ∈ [0, 1] with weights 2 and −3 and bias 1: [−2, 3].
    let model = ImplicitModel::new(ModelParts {
        a: Csr::empty(1, 1),
        b: csr(&Matrix::from_vec(1, 2, vec![2.0, -3.0]).unwrap()),
        c: csr(&Matrix::from_vec(1, 1, vec![1.0]).unwrap()),
        d: Csr::empty(1, 2),
        state_bias: vec![1.0],
        output_bias: vec![0.0],
        layout: Layout::new(vec![Layer::dense("only", 1, Activation::Relu)]),
        ..Default::default()
    })
    .unwrap();
    let (low, high) = model.state_bounds(&[(0.0, 1.0); 2]).unwrap()[0];
    assert!((low + 2.0).abs() < 1e-12 && (high - 3.0).abs() < 1e-12);
    assert!(model.state_bounds(&[(0.0, 1.0)]).is_err() && model.state_bounds(&[(1.0, 0.0); 2]).is_err());
}

#[test]
fn each_rule_on_a_model_made_for_it() {
    // 0 reads 1 and 2; 1 is never positive, 2 always is and reads one input; 3 is read by nobody, 4 reads itself alone.
    let rows = [vec![(1, 1.0f32), (2, 2.0), (4, 0.5)], vec![], vec![], vec![(2, 1.0)], vec![(4, 0.5)]];
    let b = [vec![(1, 1.0f32)], vec![(0, -1.0)], vec![(0, 3.0)], vec![], vec![]];
    let model = ImplicitModel::new(ModelParts {
        a: Csr::from_rows(5, rows),
        b: Csr::from_rows(3, b),
        c: Csr::from_rows(5, [vec![(0, 1.0f32)]]),
        d: Csr::empty(1, 3),
        state_bias: vec![0.0; 5],
        output_bias: vec![0.0],
        layout: Layout::new(vec![Layer::dense("top", 1, Activation::Relu), Layer::dense("rest", 4, Activation::Relu)]),
        ..Default::default()
    })
    .unwrap();
    let reduced = model.reduce(&Ranges::Inputs(vec![(0.0, 1.0); 3])).unwrap();
    assert_eq!((reduced.unread, reduced.constant, reduced.linear), (vec![3], vec![1, 4], vec![0, 2]));
    // ŷ = 6u₀ + u₁: the outermost state is linear as well, since nothing it reads is ever negative.
    assert_eq!(reduced.model.shape().states, 0);
    assert_eq!(reduced.model.d().row(0).collect::<Vec<_>>(), [(0, 6.0), (1, 1.0)]);
    assert_eq!(reduced.unread_inputs, [2]);
    // On inputs of either sign only what holds for all of them goes.
    let reduced = model.reduce(&Ranges::Unknown).unwrap();
    assert_eq!((reduced.unread, reduced.constant, reduced.linear), (vec![3], vec![4], vec![]));
}

#[test]
fn low_rank_rows_become_factors_only_where_that_is_smaller() {
    let mut r = Random::new(8);
    let (rows, cols, rank) = (20, 30, 3);
    // Small whole numbers: the product is exact in f32, so the rank is.
    let whole = |r: &mut Random| r.below(7) as f32 - 3.0;
    let left = Matrix::from_fn(rows, rank, |_, _| whole(&mut r));
    let right = Matrix::from_fn(rank, cols, |_, _| whole(&mut r));
    let product = Matrix::from_fn(rows, cols, |i, j| (0..rank).map(|k| left[(i, k)] * right[(k, j)]).sum::<f32>());
    let top = Matrix::from_fn(4, rows, |_, _| r.normal() as f32);
    let network = Network::builder(simplicit::network::Shape::Vector(cols))
        .and_then(|b| b.linear(product, Some((0..rows).map(|i| i as f32 * 0.1).collect())))
        .and_then(|b| b.activation(Activation::Relu))
        .and_then(|b| b.linear(top, None))
        .and_then(|b| b.build())
        .unwrap();
    let model = ImplicitModel::from_network(&network).unwrap();
    let factorised = model.factorise().unwrap();
    assert_eq!(factorised.blocks.len(), 1);
    assert_eq!(factorised.blocks[0].1, 3);
    assert!(factorised.model.sparsity().nonzeros < model.sparsity().nonzeros / 2);
    assert_eq!(factorised.model.shape().states, 23);
    let u = Matrix::from_fn(50, cols, |_, _| r.normal() as f32);
    same(&outputs(&model, &u), &outputs(&factorised.model, &u), "factorised");
    // Identity states that are worth it are not folded back.
    let again = factorised.model.reduce(&Ranges::Unknown).unwrap();
    assert!(again.model.sparsity().nonzeros <= factorised.model.sparsity().nonzeros);
    assert!(random_model(1, true).factorise().is_err());
    let full = random_model(2, false);
    let same_again = full.factorise().unwrap();
    assert!(same_again.model.sparsity().nonzeros <= full.sparsity().nonzeros);
}

#[test]
fn a_pruned_network_keeps_its_outputs() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/fashion_fc.onnx");
    let mut parts = ImplicitModel::from_network(&Network::from_onnx(path).unwrap()).unwrap().into_parts();
    // Magnitude pruning hard enough to cut units off.
    let prune = |m: &Csr<f32>, least: f32| {
        let rows = (0..m.rows()).map(|i| m.row(i).filter(|(_, v)| v.abs() >= least).collect::<Vec<_>>());
        Csr::from_rows(m.cols(), rows)
    };
    (parts.a, parts.b, parts.c) = (prune(&parts.a, 0.5), prune(&parts.b, 0.3), prune(&parts.c, 0.5));
    let model = ImplicitModel::new(parts).unwrap();
    let mut r = Random::new(5);
    let u = Matrix::from_fn(200, 784, |_, _| r.uniform() as f32);
    let reduced = model.reduce(&Ranges::Inputs(vec![(0.0, 1.0); 784])).unwrap();
    assert!(reduced.model.shape().states < 112, "{:?}", reduced.model.shape());
    assert!(!reduced.unread_inputs.is_empty());
    same(&outputs(&model, &u), &outputs(&reduced.model, &u), "fashion");
}

/// Convolution with padding, maximum, 1 x 1 convolution, residual sum, depthwise convolution, mean, two dense layers.
fn map_network(seed: u64) -> Network {
    let mut r = Random::new(seed);
    let mut weights = |rows, cols| Matrix::from_fn(rows, cols, |_, _| 0.5 * r.normal() as f32);
    let first = Network::builder(Shape::map(2, 8, 8))
        .and_then(|b| b.convolution(weights(7, 18), Window::square(3, 1, 1), Some(vec![0.1; 7])))
        .and_then(|b| b.activation(Activation::Relu))
        .and_then(|b| b.max_pool(Window::square(2, 2, 0)))
        .and_then(|b| b.convolution(weights(6, 7), Window::square(1, 1, 0), Some(vec![0.2; 6])))
        .and_then(|b| b.activation(Activation::Relu))
        .unwrap();
    let skip = first.here();
    first
        .convolution(weights(6, 54), Window::square(3, 1, 1), Some(vec![-0.1; 6]))
        .and_then(|b| b.plus(skip))
        .and_then(|b| b.activation(Activation::Relu))
        .and_then(|b| b.grouped_convolution(weights(6, 9), Window::square(3, 1, 1), 6, Some(vec![0.05; 6])))
        .and_then(|b| b.activation(Activation::Relu))
        .and_then(|b| b.global_average())
        .and_then(|b| b.linear(weights(5, 6), Some(vec![0.1; 5])))
        .and_then(|b| b.activation(Activation::Tanh))
        .and_then(|b| b.linear(weights(3, 5), None))
        .and_then(|b| b.build())
        .unwrap()
}

/// The model of [`map_network`] with whole rows and whole columns of its blocks cut, some rows' biases changed.
fn cut_map_model(seed: u64) -> ImplicitModel {
    let mut parts = ImplicitModel::from_network(&map_network(seed)).unwrap().into_parts();
    let mut r = Random::new(7000 + seed);
    for block in &mut parts.taps {
        let area = block.window.area();
        let TapWeights::Taps(taps) = &block.weights else { continue };
        let rows: Vec<bool> = (0..taps.rows()).map(|_| block.target == Target::Output || r.uniform() < 0.7).collect();
        let channels: Vec<bool> = (0..block.input.channels).map(|_| r.uniform() < 0.7).collect();
        let cut =
            (0..taps.rows()).map(|o| taps.row(o).filter(|(j, _)| rows[o] && channels[j / area]).collect::<Vec<_>>());
        block.weights = TapWeights::Taps(Csr::from_rows(taps.cols(), cut));
    }
    parts.state_bias.iter_mut().for_each(|b| *b = [*b, -0.3, 0.0, 0.4][r.below(4)]);
    ImplicitModel::new(parts).unwrap()
}

#[test]
fn channels_that_do_not_matter_go_and_outputs_stay() {
    let (mut unread, mut constant, mut shrunk) = (0, 0, 0);
    for seed in 0..60 {
        let model = cut_map_model(seed);
        let mut r = Random::new(3000 + seed);
        let u = Matrix::from_fn(12, 128, |_, _| r.uniform() as f32);
        let wide = Matrix::from_fn(12, 128, |_, _| 4.0 * r.normal() as f32);
        let map = Equilibrium::new(&model, Default::default()).unwrap();
        let observed = state_ranges(&Collected::new(&map, &u).unwrap(), Threads::new(2), &Cancel::new()).unwrap();
        let mut left = Vec::new();
        for (ranges, inputs) in
            [(Ranges::Unknown, &wide), (Ranges::Inputs(vec![(0.0, 1.0); 128]), &u), (Ranges::Observed(observed), &u)]
        {
            let what = format!("seed {seed}, {}", left.len());
            let reduced = model.reduce(&ranges).unwrap();
            same(&outputs(&model, inputs), &outputs(&reduced.model, inputs), &what);
            assert!(reduced.model.sparsity().nonzeros <= model.sparsity().nonzeros, "{what}");
            let gone = reduced.unread.len() + reduced.constant.len();
            assert_eq!(reduced.model.shape().states + gone, model.shape().states, "{what}");
            // Nothing is left that could go, and what stays is read back from a file as it is.
            let again =
                reduced.model.reduce(&if matches!(ranges, Ranges::Observed(_)) { Ranges::Unknown } else { ranges });
            assert_eq!(again.unwrap().model, reduced.model, "{what}");
            // Channels of the input that no tap reads may be anything.
            let mut changed = inputs.clone();
            for s in 0..changed.rows() {
                reduced.unread_inputs.iter().for_each(|&j| changed[(s, j)] = 9.0);
            }
            same(&outputs(&model, inputs), &outputs(&model, &changed), &what);
            unread += reduced.unread.len();
            constant += reduced.constant.len();
            shrunk +=
                usize::from(reduced.model.layout().layers().iter().any(|l| l.map.is_some_and(|m| m.channels < 6)));
            left.push(reduced.model.shape().states);
        }
        assert!(left[1] <= left[0] && left[2] <= left[1], "seed {seed}: more is known, {left:?} are left");
    }
    assert!(unread > 1000 && constant > 1000 && shrunk > 60, "{unread} {constant} {shrunk}: the cases must occur");
}
