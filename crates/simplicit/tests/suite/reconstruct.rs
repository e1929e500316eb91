//! The reconstruction over the next operations on convolutions, groups, residual sums and tokens.

use simplicit::equilibrium::{Equilibrium, EquilibriumSettings};
use simplicit::linalg::Matrix;
use simplicit::model::{ImplicitModel, TapWeights};
use simplicit::network::Network;
use simplicit::parallel::{Cancel, Threads};
use simplicit::problem::{Connectivity, Matching};
use simplicit::random::Random;
use simplicit::states::Collected;
use simplicit::train::{
    AllowedWeights, Forget, Keep, ModelSettings, Progress, RowSettings, Run, TrainInput, TrainSettings, Trained,
    importance, train,
};

use crate::common::Notes;
use crate::networks::{SIDE, attention, networks};

const SAMPLES: usize = 300;

fn samples() -> Matrix<f32> {
    let mut random = Random::new(71);
    Matrix::from_fn(SAMPLES, 3 * SIDE * SIDE, |_, _| random.normal() as f32)
}

fn settings(reconstruct: usize) -> TrainSettings {
    TrainSettings {
        target_sparsity: Some(0.5),
        model: ModelSettings { reconstruct, ..Default::default() },
        ..Default::default()
    }
}

fn trained(
    network: &Network,
    settings: &TrainSettings,
    threads: usize,
    keep: &dyn Keep,
    cancel: &Cancel,
    progress: &mut dyn FnMut(Progress),
) -> simplicit::Result<Trained> {
    let (u, threads) = (samples(), Threads::new(threads));
    let baseline = ImplicitModel::from_network(network).unwrap();
    let weights = importance(network, &u, 2, 0, threads, &Cancel::new()).unwrap();
    let source = Collected::new(network, &u).unwrap();
    let input = TrainInput {
        source: &source,
        baseline: Some(&baseline),
        importance: Some(&weights),
        preprocessing: Default::default(),
    };
    train(&input, settings, &mut Run { threads, cancel, keep, progress })
}

fn quietly(network: &Network, settings: &TrainSettings, threads: usize) -> simplicit::Result<Trained> {
    trained(network, settings, threads, &Forget, &Cancel::new(), &mut |_| {})
}

/// E KL(network ‖ model) over every tenth sample, in double precision.
fn held_out(network: &Network, model: &ImplicitModel) -> f64 {
    let u = samples();
    let ours = Equilibrium::new(model, EquilibriumSettings::default()).unwrap().outputs(&u).unwrap().y;
    let theirs = network.forward(&u).unwrap();
    let logs = |y: &[f32]| -> Vec<f64> {
        let total = y.iter().map(|v| f64::from(*v).exp()).sum::<f64>().ln();
        y.iter().map(|v| f64::from(*v) - total).collect()
    };
    let of =
        |s: usize| -> f64 { logs(theirs.row(s)).iter().zip(logs(ours.row(s))).map(|(p, q)| p.exp() * (p - q)).sum() };
    (9..SAMPLES).step_by(10).map(of).sum::<f64>() / (SAMPLES / 10) as f64
}

#[test]
fn every_kind_of_block_is_refitted_and_held_out_outputs_never_lose() {
    let mut changed = 0;
    for (name, network) in networks() {
        let without = quietly(&network, &settings(0), 2).unwrap();
        assert!(without.report.reconstruction.is_none(), "off by default");
        for ahead in [1, 2] {
            let with = quietly(&network, &settings(ahead), 2).unwrap();
            let report = with.report.reconstruction.unwrap();
            for (model, reported) in [(&without.model, report.held_out_before), (&with.model, report.held_out_after)] {
                let expected = held_out(&network, model);
                assert!((reported - expected).abs() <= 1e-4 * expected, "{name}: {reported}, from scratch {expected}");
            }
            assert!(report.held_out_after <= report.held_out_before, "{name}: {report:?}");
            assert!(report.changed <= report.segments && report.segments > 0, "{name}: {report:?}");
            changed += usize::from(report.held_out_after < 0.99 * report.held_out_before);
            // On the support that was found.
            for (before, after) in without.model.taps().iter().zip(with.model.taps()) {
                let (TapWeights::Taps(before), TapWeights::Taps(after)) = (&before.weights, &after.weights) else {
                    continue;
                };
                for o in 0..before.rows() {
                    let columns: Vec<usize> = before.row(o).map(|(j, _)| j).collect();
                    assert!(after.row(o).all(|(j, _)| columns.contains(&j)), "{name}: row {o} gained a non-zero");
                }
            }
            // Constants of operators are counted and belong to no row.
            let of_operators = |t: &Trained| {
                let rows: usize = t.report.rows.iter().map(|r| r.nonzeros).sum();
                t.model.sparsity().nonzeros - rows as u64
            };
            assert_eq!(of_operators(&with), of_operators(&without), "{name}");
            if ahead == 2 {
                assert_eq!(quietly(&network, &settings(2), 1).unwrap().model, with.model, "{name}: any threads");
            }
        }
    }
    assert!(changed >= networks().len(), "{changed}");
}

#[test]
fn stopped_in_the_middle_it_goes_on_from_there() {
    let network = attention();
    let (notes, cancel) = (Notes::default(), Cancel::new());
    let stop = &mut |progress: Progress| {
        if matches!(progress, Progress::Reconstruct { segment: 3, .. }) {
            cancel.cancel();
        }
    };
    assert!(trained(&network, &settings(1), 2, &notes, &cancel, stop).is_err());
    let kept = |notes: &Notes| notes.0.lock().unwrap().keys().filter(|k| k.contains("reconstruction")).count();
    let before = kept(&notes);
    let again = trained(&network, &settings(1), 1, &notes, &Cancel::new(), &mut |_| {}).unwrap();
    assert!(before > 0 && kept(&notes) > before);
    assert_eq!(again.model, quietly(&network, &settings(1), 2).unwrap().model);
}

#[test]
fn where_it_cannot_apply_it_is_refused() {
    let network = attention();
    let refused = |settings: TrainSettings| quietly(&network, &settings, 1).unwrap_err().to_string();
    let cyclic = TrainSettings {
        allowed: AllowedWeights { connectivity: Connectivity::Full, kappa: Some(0.9), ..Default::default() },
        ..settings(1)
    };
    let message = refused(cyclic);
    assert!(message.contains("reconstruct") && message.contains("connectivity full"), "{message}");
    let l1 = simplicit::problem::penalty::L1::new(1e-3).unwrap();
    let exact = TrainSettings {
        objective: simplicit::train::Objective::Convex(std::sync::Arc::new(l1)),
        target_sparsity: None,
        rows: RowSettings { matching: Matching::Exact, rounds: 1, refit: false, ..Default::default() },
        model: ModelSettings { cascade: false, ..settings(1).model },
        ..settings(1)
    };
    let message = refused(exact);
    assert!(message.contains("reconstruction over the next operations"), "{message}");
    // States alone have no layers to run.
    let u = samples();
    let source = Collected::new(&network, &u).unwrap();
    let input = TrainInput { source: &source, baseline: None, importance: None, preprocessing: Default::default() };
    let message = train(&input, &settings(1), &mut Run::default()).unwrap_err().to_string();
    assert!(message.contains("states alone"), "{message}");
}
