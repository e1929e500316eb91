//! The equilibrium against a plain double-precision iteration written from the formula.

#![allow(clippy::unwrap_used)] // helpers of tests, outside #[test] functions

use simplicit::Error;
use simplicit::equilibrium::{Equilibrium, EquilibriumSettings, InputGradient, not_converged};
use simplicit::layout::{Activation, Layer, Layout};
use simplicit::linalg::{Csr, Matrix};
use simplicit::model::{DenseLayer, ImplicitModel, ModelParts};
use simplicit::parallel::Threads;
use simplicit::random::Random;
use simplicit::states::StateMap;

const RELU: Activation = Activation::Relu;
const LEAKY: Activation = Activation::LeakyRelu { slope: 0.2 };

fn sparse(rows: usize, cols: usize, density: f64, size: f64, r: &mut Random) -> Csr<f32> {
    let mut row = || -> Vec<(usize, f32)> {
        (0..cols).map(|j| (j, if r.uniform() < density { (size * r.normal()) as f32 } else { 0.0 })).collect()
    };
    let rows: Vec<_> = (0..rows).map(|_| row()).collect();
    Csr::from_rows(cols, rows)
}

/// Scales every row of A to the given sum of magnitudes, a hair below it.
fn with_row_sums(a: &Csr<f32>, sum: f64) -> Csr<f32> {
    let rows = (0..a.rows()).map(|i| {
        let total: f64 = a.row(i).map(|(_, v)| f64::from(v).abs()).sum();
        a.row(i).map(move |(j, v)| (j, (f64::from(v) * sum / total * (1.0 - 1e-6)) as f32)).collect::<Vec<_>>()
    });
    Csr::from_rows(a.cols(), rows.collect::<Vec<_>>())
}

fn model(a: Csr<f32>, inputs: usize, outputs: usize, layers: &[(usize, Activation)], r: &mut Random) -> ImplicitModel {
    let n = a.rows();
    let layers = layers.iter().enumerate().map(|(k, (size, f))| Layer::dense(format!("l{k}"), *size, *f)).collect();
    ImplicitModel::new(ModelParts {
        a,
        b: sparse(n, inputs, 0.4, 1.0, r),
        c: sparse(outputs, n, 0.5, 1.0, r),
        d: sparse(outputs, inputs, 0.3, 1.0, r),
        state_bias: (0..n).map(|_| r.normal() as f32).collect(),
        output_bias: (0..outputs).map(|_| r.normal() as f32).collect(),
        layout: Layout::new(layers),
        ..Default::default()
    })
    .unwrap()
}

fn random_inputs(samples: usize, features: usize, r: &mut Random) -> Matrix<f32> {
    Matrix::from_fn(samples, features, |_, _| r.normal() as f32)
}

fn times(m: &Csr<f32>, x: &[f64]) -> Vec<f64> {
    (0..m.rows()).map(|i| m.row(i).map(|(j, v)| f64::from(v) * x[j]).sum()).collect()
}

/// x and y in double precision: Picard from zero until nothing moves.
fn reference(model: &ImplicitModel, u: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let bu = times(model.b(), u);
    let mut x = vec![0.0; model.shape().states];
    for _ in 0..200_000 {
        let ax = times(model.a(), &x);
        let next: Vec<f64> = (0..x.len())
            .map(|i| {
                let phi = model.layout().layers()[model.layout().layer_of(i).unwrap()].activation;
                phi.apply_f64(ax[i] + bu[i] + f64::from(model.state_bias()[i]))
            })
            .collect();
        let step = next.iter().zip(&x).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        x = next;
        if step < 1e-15 {
            break;
        }
    }
    let (cx, du) = (times(model.c(), &x), times(model.d(), u));
    let y = (0..cx.len()).map(|i| cx[i] + du[i] + f64::from(model.output_bias()[i])).collect();
    (x, y)
}

fn wide(row: &[f32]) -> Vec<f64> {
    row.iter().map(|v| f64::from(*v)).collect()
}

fn distance(got: &[f32], wanted: &[f64]) -> f64 {
    got.iter().zip(wanted).map(|(g, w)| (f64::from(*g) - w).abs()).fold(0.0, f64::max)
}

fn settings() -> EquilibriumSettings {
    EquilibriumSettings { threads: Threads::new(2), ..Default::default() }
}

/// Every sample within its certified error of the reference, and the certificate itself small.
fn check(model: &ImplicitModel, u: &Matrix<f32>, largest_bound: f64) {
    let equilibrium = Equilibrium::new(model, settings()).unwrap();
    let solution = equilibrium.run(u).unwrap();
    assert!(not_converged(&solution.diagnostics).is_empty());
    for s in 0..u.rows() {
        let (x, y) = reference(model, &wide(u.row(s)));
        let about = solution.diagnostics[s];
        let size = x.iter().map(|v| v.abs()).fold(1.0, f64::max);
        let (ex, ey) = (distance(solution.x.row(s), &x), distance(solution.y.row(s), &y));
        assert!(ex <= about.state_error && ey <= about.output_error, "{ex} {ey} {about:?}");
        assert!(ex <= 3e-6 * size, "{ex} of {size}");
        assert!(about.state_error <= largest_bound * size, "{about:?} of {size}");
        for i in 0..x.len() {
            let phi = model.layout().layers()[model.layout().layer_of(i).unwrap()].activation;
            let (z, x) = (solution.z[(s, i)], solution.x[(s, i)]);
            assert!((phi.apply(z) - x).abs() <= 4.0 * f32::EPSILON * x.abs().max(z.abs()), "X = φ(Z)");
        }
    }
    assert_eq!(equilibrium.outputs(u).unwrap().y, solution.y, "states nobody reads change nothing");
}

#[test]
fn a_dense_cycle_with_norm_below_one() {
    let mut r = Random::new(1);
    for activation in [RELU, LEAKY, Activation::Tanh, Activation::Sigmoid, Activation::Identity] {
        let a = with_row_sums(&sparse(40, 40, 0.5, 1.0, &mut r), 0.95);
        let model = model(a, 30, 6, &[(15, activation), (25, RELU)], &mut r);
        let found = model.well_posedness();
        assert!((found.norm_a_inf - 0.95).abs() < 1e-4 && found.is_shown());
        check(&model, &random_inputs(37, 30, &mut r), 2e-5);
    }
}

#[test]
fn norm_above_one_but_spectral_radius_below() {
    let mut r = Random::new(2);
    for activation in [RELU, Activation::Tanh] {
        let a = with_row_sums(&sparse(30, 30, 0.4, 1.0, &mut r), 0.9);
        let s: Vec<f64> = (0..30).map(|_| (1.5 * r.normal()).exp()).collect();
        let rows: Vec<Vec<_>> =
            (0..30).map(|i| a.row(i).map(|(j, v)| (j, (f64::from(v) * s[i] / s[j]) as f32)).collect()).collect();
        let model = model(Csr::from_rows(30, rows), 20, 5, &[(30, activation)], &mut r);
        let found = model.well_posedness();
        assert!(
            found.norm_a_inf > 1.5 && found.lambda_pf_upper < 1.0,
            "{} {}",
            found.norm_a_inf,
            found.lambda_pf_upper
        );
        check(&model, &random_inputs(20, 20, &mut r), 2e-3);
    }
}

#[test]
fn chains_of_cycles_periodic_blocks_and_dead_ends() {
    let mut r = Random::new(3);
    // 0..3 a three-cycle (periodic), 3..6 acyclic and reading it, 6 a loop, 7..9 read by nobody, 9 isolated.
    let rows: Vec<Vec<(usize, f32)>> = vec![
        vec![(1, 2.0)],
        vec![(2, -0.5)],
        vec![(0, 0.7), (9, 1.0)],
        vec![(0, 3.0), (1, -1.0)],
        vec![(2, 2.0), (3, 1.0)],
        vec![(4, 1.0), (9, 1.0)],
        vec![(5, 0.3), (6, -0.8)],
        vec![(6, 1.0)],
        vec![(7, 1.0), (8, 0.5)],
        vec![],
    ];
    let mut parts = model(Csr::from_rows(10, rows), 4, 3, &[(4, LEAKY), (6, RELU)], &mut r).into_parts();
    let c: Vec<Vec<_>> = (0..3).map(|i| parts.c.row(i).filter(|(j, _)| *j < 7).collect()).collect();
    parts.c = Csr::from_rows(10, c);
    let model = ImplicitModel::new(parts).unwrap();
    check(&model, &random_inputs(25, 4, &mut r), 1e-3);
}

#[test]
fn a_layered_network_in_one_pass() {
    let mut r = Random::new(4);
    let mut layer = |name: &str, inputs: usize, outputs: usize, activation| {
        let weights = Matrix::from_fn(outputs, inputs, |_, _| (r.normal() / (inputs as f64).sqrt()) as f32);
        DenseLayer::new(name, weights, activation).with_bias((0..outputs).map(|_| r.normal() as f32).collect())
    };
    let hidden = [layer("a", 300, 150, RELU), layer("b", 150, 40, Activation::Tanh), layer("c", 40, 20, LEAKY)];
    let output = layer("y", 20, 7, Activation::Identity);
    let model = ImplicitModel::from_layers(&hidden, &output).unwrap();
    let u = random_inputs(70, 300, &mut Random::new(5));
    check(&model, &u, 0.5);
    let solution = Equilibrium::new(&model, settings()).unwrap().run(&u).unwrap();
    assert!(solution.diagnostics.iter().all(|d| d.iterations == 1 && d.residual == 0.0));
    assert_eq!(solution.diagnostics[0].multiply_adds, model.sparsity().multiply_adds);
    // Powers of two keep every bit.
    let hidden = [hidden[0].clone(), DenseLayer { activation: RELU, ..hidden[1].clone() }, hidden[2].clone()];
    let model = ImplicitModel::from_layers(&hidden, &output).unwrap();
    let rescaled = model.rescale(0.99).unwrap();
    assert!(rescaled.exact && rescaled.model.a().norm_inf() <= 0.99 && model.a().norm_inf() > 1.0);
    let outputs = |m: &ImplicitModel| Equilibrium::new(m, settings()).unwrap().outputs(&u).unwrap().y;
    assert_eq!(outputs(&model), outputs(&rescaled.model));
}

#[test]
fn the_batch_and_the_threads_leave_no_trace() {
    let mut r = Random::new(6);
    let cyclic = model(with_row_sums(&sparse(20, 20, 0.3, 1.0, &mut r), 0.9), 140, 4, &[(20, RELU)], &mut r);
    let rows: Vec<Vec<_>> = (0..20).map(|i| cyclic.a().row(i).filter(|(j, _)| *j > i).collect()).collect();
    let acyclic =
        ImplicitModel::new(ModelParts { a: Csr::from_rows(20, rows), ..cyclic.clone().into_parts() }).unwrap();
    let u = random_inputs(201, 140, &mut r);
    for model in [cyclic, acyclic] {
        let run = |threads| {
            let settings = EquilibriumSettings { threads: Threads::new(threads), ..Default::default() };
            Equilibrium::new(&model, settings).unwrap().run(&u).unwrap()
        };
        let whole = run(1);
        for threads in [2, 3, 5] {
            assert_eq!(run(threads), whole);
        }
        let equilibrium = Equilibrium::new(&model, settings()).unwrap();
        for s in [0, 1, 63, 64, 127, 200] {
            let one = Matrix::from_vec(1, 140, u.row(s).to_vec()).unwrap();
            let alone = equilibrium.run(&one).unwrap();
            assert_eq!(alone.x.row(0), whole.x.row(s));
            assert_eq!(alone.y.row(0), whole.y.row(s));
            assert_eq!(alone.diagnostics[0], whole.diagnostics[s]);
        }
    }
}

#[test]
fn a_sample_without_equilibrium_is_named() {
    // x = max(1.2x + u, 0) has a solution only for u ≤ 0.
    let model = ImplicitModel::new(ModelParts {
        a: Csr::from_rows(1, [vec![(0, 1.2f32)]]),
        b: Csr::from_rows(1, [vec![(0, 1.0f32)]]),
        c: Csr::from_rows(1, [vec![(0, 1.0f32)]]),
        d: Csr::empty(1, 1),
        state_bias: vec![0.0],
        output_bias: vec![0.0],
        layout: Layout::new(vec![Layer::dense("x", 1, RELU)]),
        ..Default::default()
    })
    .unwrap();
    assert!(!model.well_posedness().is_shown());
    let equilibrium = Equilibrium::new(&model, settings()).unwrap();
    let u = Matrix::from_vec(5, 1, vec![-1.0, 0.0, 0.5, -0.25, 2.0]).unwrap();
    let solution = equilibrium.run(&u).unwrap();
    assert_eq!(not_converged(&solution.diagnostics), [2, 4]);
    assert!(solution.diagnostics.iter().all(|d| d.state_error == f64::INFINITY), "nothing is certified here");
    assert_eq!([solution.x[(0, 0)], solution.x[(1, 0)], solution.x[(3, 0)]], [0.0; 3]);
    match equilibrium.states(&u) {
        Err(Error::NotConverged { samples }) => assert_eq!(samples, [2, 4]),
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_overflow_is_not_an_equilibrium() {
    let hidden = DenseLayer::new("h", Matrix::from_fn(3, 2, |_, _| 1e30), Activation::Identity);
    let output = DenseLayer::new("y", Matrix::from_fn(2, 3, |_, _| 1e-30), Activation::Identity);
    let model = ImplicitModel::from_layers(&[hidden], &output).unwrap();
    let u = Matrix::from_vec(3, 2, vec![1.0, 1.0, 1e20, 1e20, 2.0, 1.0]).unwrap();
    let solution = Equilibrium::new(&model, settings()).unwrap().run(&u).unwrap();
    assert_eq!(not_converged(&solution.diagnostics), [1]);
    assert_eq!(solution.diagnostics[1].state_error, f64::INFINITY);
}

#[test]
fn too_few_iterations_are_reported_with_an_honest_bound() {
    let mut r = Random::new(8);
    let model = model(with_row_sums(&sparse(25, 25, 0.5, 1.0, &mut r), 0.99), 10, 3, &[(25, LEAKY)], &mut r);
    let mut u = random_inputs(9, 10, &mut r);
    u.row_mut(4).fill(0.0);
    for memory in [0, 5] {
        let few = EquilibriumSettings { max_iterations: 3, memory, ..settings() };
        let solution = Equilibrium::new(&model, few).unwrap().run(&u).unwrap();
        assert_eq!(not_converged(&solution.diagnostics).len(), 9);
        for s in 0..9 {
            let (x, y) = reference(&model, &wide(u.row(s)));
            assert!(distance(solution.x.row(s), &x) <= solution.diagnostics[s].state_error);
            assert!(distance(solution.y.row(s), &y) <= solution.diagnostics[s].output_error);
        }
    }
}

#[test]
fn anderson_needs_fewer_steps_than_picard() {
    let mut r = Random::new(9);
    let a = with_row_sums(&sparse(60, 60, 0.3, 1.0, &mut r), 0.99);
    let positive: Vec<Vec<_>> = (0..60).map(|i| a.row(i).map(|(j, v)| (j, v.abs())).collect()).collect();
    let model = model(Csr::from_rows(60, positive), 10, 3, &[(60, RELU)], &mut r);
    let u = random_inputs(16, 10, &mut r);
    let steps = |memory| {
        let settings = EquilibriumSettings { memory, ..settings() };
        let solution = Equilibrium::new(&model, settings).unwrap().run(&u).unwrap();
        assert!(not_converged(&solution.diagnostics).is_empty());
        solution.diagnostics.iter().map(|d| d.iterations).max().unwrap()
    };
    let (plain, accelerated) = (steps(0), steps(5));
    assert!(accelerated * 5 < plain, "{accelerated} against {plain}");
}

#[test]
fn gradients_match_finite_differences() {
    let mut r = Random::new(10);
    let cyclic = with_row_sums(&sparse(30, 30, 0.3, 1.0, &mut r), 0.9);
    let upper: Vec<Vec<_>> = (0..30).map(|i| cyclic.row(i).filter(|(j, _)| *j > i).collect()).collect();
    for a in [cyclic, Csr::from_rows(30, upper)] {
        for activation in [Activation::Tanh, Activation::Sigmoid, RELU, LEAKY] {
            let model = model(a.clone(), 12, 5, &[(18, activation), (12, Activation::Tanh)], &mut r);
            let gradient = InputGradient::new(&model, settings()).unwrap();
            let (u, v) = (random_inputs(20, 12, &mut r), random_inputs(20, 5, &mut r));
            let (_, found) = gradient.run(&u, &v).unwrap();
            assert!(not_converged(&found.diagnostics).is_empty());
            for s in 0..20 {
                let value = |u: &[f64]| -> f64 {
                    reference(&model, u).1.iter().zip(v.row(s)).map(|(y, v)| y * f64::from(*v)).sum()
                };
                let at = wide(u.row(s));
                let (mut apart, mut size) = (0.0, 0.0);
                for j in 0..12 {
                    let h = 1e-6;
                    let (mut up, mut down) = (at.clone(), at.clone());
                    up[j] += h;
                    down[j] -= h;
                    let numeric = (value(&up) - value(&down)) / (2.0 * h);
                    let got = f64::from(found.gradient[(s, j)]);
                    assert!((got - numeric).abs() <= 1e-4 * (1.0 + numeric.abs()), "{got} {numeric} {activation}");
                    apart += (got - numeric).abs();
                    size += numeric.abs();
                }
                // The finite differences themselves are good to about 1e-8 here; the certificate is in the ℓ1 norm.
                let bound = found.diagnostics[s].output_error;
                assert!(apart <= bound + 1e-6, "{apart} {bound}");
                // Worst-case rounding of sums that cancel: far above the true error, far below the gradient.
                assert!(bound <= 1e-3 * (10.0 + size), "{bound} of {size}");
            }
        }
    }
}

#[test]
fn nothing_at_all_and_nonsense() {
    let mut r = Random::new(11);
    let none = model(Csr::empty(0, 0), 3, 2, &[(0, RELU)], &mut r);
    let u = random_inputs(5, 3, &mut r);
    check(&none, &u, 1.0);
    let (_, gradient) = InputGradient::new(&none, settings()).unwrap().run(&u, &random_inputs(5, 2, &mut r)).unwrap();
    assert_eq!((gradient.gradient.rows(), gradient.gradient.cols()), (5, 3));
    let some = model(sparse(4, 4, 0.1, 0.1, &mut r), 3, 2, &[(0, LEAKY), (4, RELU), (0, RELU)], &mut r);
    check(&some, &u, 1e-3);
    let equilibrium = Equilibrium::new(&some, settings()).unwrap();
    let empty = equilibrium.run(&Matrix::zeros(0, 3)).unwrap();
    assert_eq!((empty.x.rows(), empty.diagnostics.len()), (0, 0));
    assert!(matches!(equilibrium.run(&Matrix::zeros(2, 4)), Err(Error::Shape { .. })));
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut u = random_inputs(40, 3, &mut r);
        u[(37, 1)] = bad;
        match equilibrium.run(&u) {
            Err(Error::NotFinite { row: 37, column: 1, .. }) => {}
            other => panic!("{other:?}"),
        }
    }
    let wide = model(Csr::empty(2, 2), 300, 2, &[(2, RELU)], &mut r);
    // An input that some row reads must be a number; one that nobody reads may be anything.
    let reads = |j: usize| wide.b().indices().iter().chain(wide.d().indices()).any(|i| *i as usize == j);
    let (read, unread): (Vec<usize>, Vec<usize>) = (0..300).partition(|j| reads(*j));
    for column in [read[0], read[read.len() - 1], unread[0], unread[unread.len() - 1]] {
        let mut u = random_inputs(40, 300, &mut r);
        u[(9, column)] = f32::NAN;
        match Equilibrium::new(&wide, settings()).unwrap().run(&u) {
            Err(Error::NotFinite { row: 9, .. }) => assert!(reads(column)),
            Ok(found) => assert!(!reads(column) && found.y.as_slice().iter().all(|y| y.is_finite())),
            other => panic!("{column}: {other:?}"),
        }
    }
    let refused = EquilibriumSettings { tolerance: 0.0, ..settings() };
    assert!(Equilibrium::new(&some, refused).is_err());
    let no_inputs = model(sparse(4, 4, 0.5, 0.1, &mut r), 0, 2, &[(4, RELU)], &mut r);
    check(&no_inputs, &Matrix::zeros(3, 0), 1e-3);
}
