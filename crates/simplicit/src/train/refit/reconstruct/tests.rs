//! Tests of segments, and of the refit where it has a closed form.

use super::*;
use crate::equilibrium::{Equilibrium, EquilibriumSettings};
use crate::layout::{Activation, Layer, Layout};
use crate::linalg::Csr;
use crate::model::{ModelMetadata, ModelParts, OUTPUT};
use crate::parallel::{Cancel, Threads};
use crate::random::Random;
use crate::states::Collected;
use crate::train::{Forget, ModelSettings};

#[test]
fn a_joint_is_what_everything_later_goes_through() {
    let mut random = Random::new(5);
    for case in 0..200 {
        // Every layer reads some of the three layers before it, always the last of them; layers are in the order of a
        // layout.
        let count = 1 + case % 9;
        let order: Vec<usize> = (0..count).rev().collect();
        let mut reads: Vec<Vec<usize>> = Vec::new();
        for k in 0..count {
            let earlier = (k + 1..count.min(k + 4)).filter(|&j| j == k + 1 || random.uniform() < 0.3);
            reads.push(earlier.collect());
        }
        reads.push(vec![0]);
        // By definition: without the joint, nothing that is computed before it reaches the outputs.
        let reaches = |from: usize, without: usize| {
            let mut found = vec![false; count + 1];
            found[from] = true;
            for k in (0..from).rev().chain([count]) {
                found[k] = found[k] || (k != without && reads[k].iter().any(|&j| j != without && found[j]));
            }
            found[count]
        };
        let joints: Vec<usize> = order.iter().copied().filter(|&k| (k + 1..count).all(|j| !reaches(j, k))).collect();
        let found = segments(&order, &reads);
        let ends: Vec<usize> = found.iter().filter(|s| !s.outputs).filter_map(|s| s.layers.last().copied()).collect();
        assert_eq!(ends, joints, "{reads:?}");
        assert_eq!(found.iter().flat_map(|s| s.layers.clone()).collect::<Vec<_>>(), order);
        assert!(found.iter().rev().enumerate().all(|(k, s)| s.outputs == (k == 0)));
    }
}

const INPUTS: usize = 10;
const FIRST: usize = 6;
const SECOND: usize = 8;
const SAMPLES: usize = 400;

/// u → 6 units → 8 units → 3 outputs, all of them linear.
fn linear(b: Csr<f32>, a: &Matrix<f32>, c: &Matrix<f32>, bias: Vec<f32>, kept: &[&str]) -> ImplicitModel {
    let n = FIRST + SECOND;
    let rows = |m: &Matrix<f32>, first: usize, n: usize| {
        let row = |i: usize| m.row(i).iter().enumerate().map(|(j, v)| (first + j, *v)).collect::<Vec<_>>();
        Csr::from_rows(n, (0..m.rows()).map(row))
    };
    let mut all = (0..SECOND).map(|i| a.row(i).iter().enumerate().map(|(j, v)| (SECOND + j, *v)).collect::<Vec<_>>());
    let all = (0..n).map(|_| all.next().unwrap_or_default()).collect::<Vec<_>>();
    ImplicitModel::new(ModelParts {
        a: Csr::from_rows(n, all),
        b: Csr::from_rows(INPUTS, (0..n).map(|i| if i < SECOND { vec![] } else { b.row(i - SECOND).collect() })),
        c: rows(c, 0, n),
        d: Csr::from_rows(INPUTS, (0..3).map(|_| Vec::new())),
        state_bias: bias,
        output_bias: vec![0.0; 3],
        layout: Layout::new(vec![
            Layer::dense("second", SECOND, Activation::Identity),
            Layer::dense("first", FIRST, Activation::Identity),
        ]),
        metadata: ModelMetadata { kept: kept.iter().map(|k| (*k).to_string()).collect(), ..Default::default() },
        ..Default::default()
    })
    .unwrap()
}

/// x with Mx = b, by elimination.
fn solved(mut m: Vec<Vec<f64>>) -> Vec<f64> {
    let n = m.len();
    for i in 0..n {
        for r in (0..n).filter(|r| *r != i) {
            let share = m[r][i] / m[i][i];
            let pivot = m[i].clone();
            m[r].iter_mut().zip(pivot).for_each(|(a, b)| *a -= share * b);
        }
    }
    (0..n).map(|i| m[i][n] / m[i][i]).collect()
}

#[test]
fn two_joints_ahead_of_a_linear_block_it_is_least_squares_there() {
    let mut random = Random::new(17);
    let mut normal = |rows, cols| Matrix::from_fn(rows, cols, |_, _| random.normal() as f32);
    let (w, a, c) = (normal(FIRST, INPUTS), normal(SECOND, FIRST), normal(3, SECOND));
    // Inputs that are correlated, so that the weights that are left can replace the others.
    let (mix, noise) = (normal(4, INPUTS), normal(SAMPLES, INPUTS));
    let common = normal(SAMPLES, 4);
    let u = Matrix::from_fn(SAMPLES, INPUTS, |s, j| {
        0.1 * (0.3 * noise[(s, j)] + (0..4).map(|k| common[(s, k)] * mix[(k, j)]).sum::<f32>())
    });
    let mut bias = vec![0.2; SECOND + FIRST];
    let baseline = linear(Csr::from_dense(&w), &a, &c, bias.clone(), &[]);
    // Half of the weights of the first layer are left, with wrong values; the other layers stay as they are.
    let kept: Vec<Vec<usize>> =
        (0..FIRST).map(|i| (0..INPUTS).filter(|j| (j * 7 + i * 3) % 2 == 0).collect()).collect();
    let start = kept.iter().enumerate().map(|(i, row)| row.iter().map(|&j| (j, 0.5 * w[(i, j)])).collect::<Vec<_>>());
    bias[SECOND..].fill(0.1);
    let model = linear(Csr::from_rows(INPUTS, start), &a, &c, bias, &["second", OUTPUT]);
    let weights: Vec<f64> = (0..SECOND + FIRST + 3).map(|i| 0.5 + 0.1 * i as f64).collect();

    let map = Equilibrium::new(&baseline, EquilibriumSettings::default()).unwrap();
    let (source, cancel) = (Collected::new(&map, &u).unwrap(), Cancel::new());
    let input = TrainInput {
        source: &source,
        baseline: Some(&baseline),
        importance: Some(&weights),
        preprocessing: Default::default(),
    };
    let settings =
        TrainSettings { model: ModelSettings { reconstruct: 2, ..Default::default() }, ..TrainSettings::default() };
    let reconstructed = |threads: usize, memory: Option<u64>| {
        let mut run = Run { threads: Threads::new(threads), cancel: &cancel, keep: &Forget, progress: &mut |_| {} };
        let mut settings = settings.clone();
        settings.work.memory = memory;
        // Twice the effort of training, so that little is left to gain.
        reconstruct_with(Effort { rounds: 2, ..EFFORT }, model.clone(), &input, &settings, 1.0, &mut run).unwrap()
    };
    let (refit, report) = reconstructed(1, None);
    let report = report.unwrap();
    assert_eq!((report.segments, report.changed), (1, 1), "{report:?}");
    assert!(report.held_out_after < report.held_out_before, "{report:?}");
    // The result is the same for any number of threads, and with all values in files or computed again.
    for (threads, memory) in [(2, None), (1, Some(1))] {
        assert_eq!(reconstructed(threads, memory).0.to_bytes(), refit.to_bytes());
    }
    assert_eq!((refit.a(), refit.c()), (model.a(), model.c()), "layers that were left out stay");

    // Σ λ_i (a_i·(W u + b) − x̄_i)² over the fitted samples, in the non-zeros of W and in b.
    let unknowns: Vec<(usize, usize)> =
        (0..FIRST).flat_map(|i| kept[i].iter().map(move |&j| (i, j)).chain([(i, INPUTS)])).collect();
    let value = |s: usize, j: usize| if j < INPUTS { f64::from(u[(s, j)]) } else { 1.0 };
    let target = |s: usize, i: usize| -> f64 {
        let hidden = |k: usize| 0.2f32 as f64 + (0..INPUTS).map(|j| f64::from(w[(k, j)]) * value(s, j)).sum::<f64>();
        (0..FIRST).map(|k| f64::from(a[(i, k)]) * hidden(k)).sum()
    };
    let fitted: Vec<usize> = (0..SAMPLES).filter(|s| s % 10 != 9).collect();
    let mut normal = vec![vec![0.0; unknowns.len() + 1]; unknowns.len()];
    for &s in &fitted {
        for i in 0..SECOND {
            let slope: Vec<f64> = unknowns.iter().map(|&(k, j)| f64::from(a[(i, k)]) * value(s, j)).collect();
            let t = target(s, i);
            for (row, p) in normal.iter_mut().zip(&slope) {
                row.iter_mut().zip(slope.iter().chain([&t])).for_each(|(m, q)| *m += weights[i] * p * q);
            }
        }
    }
    let exact = solved(normal);
    let error = |x: &[f64]| -> f64 {
        let of = |s: usize, i: usize| {
            let sum: f64 = unknowns.iter().zip(x).map(|(&(k, j), x)| f64::from(a[(i, k)]) * x * value(s, j)).sum();
            weights[i] * (sum - target(s, i)).powi(2)
        };
        fitted.iter().map(|&s| (0..SECOND).map(|i| of(s, i)).sum::<f64>()).sum()
    };
    let weight = |model: &ImplicitModel, k: usize, j: usize| -> f64 {
        let row = SECOND + k;
        let constant = || f64::from(model.state_bias()[row]);
        let entry = || model.b().row(row).find(|(c, _)| *c == j).map_or(0.0, |(_, v)| f64::from(v));
        if j == INPUTS { constant() } else { entry() }
    };
    let of = |model: &ImplicitModel| error(&unknowns.iter().map(|&(k, j)| weight(model, k, j)).collect::<Vec<_>>());
    let (before, after, least) = (of(&model), of(&refit), error(&exact));
    // Conjugate gradients end at 3 % of the residual, and steps are damped by a thousandth, so a share of the
    // possible gain is left.
    assert!(after >= least * (1.0 - 1e-9), "{after} below {least}");
    assert!(after - least <= 1e-3 * (before - least), "{before} to {after}, by elimination {least}");
    assert!(before > 2.0 * least, "{before} {least}");
}
