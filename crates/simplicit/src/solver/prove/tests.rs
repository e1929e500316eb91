use super::*;
use crate::linalg::gemm;
use crate::parallel::Cancel;
use crate::random::Random;

/// A row with similar features, as neighbouring taps are.
fn row(seed: u64, d: usize, samples: usize, price: f64, ridge: f64) -> PricedRow {
    let mut random = Random::new(seed);
    let raw = Matrix::from_fn(samples, d, |_, _| random.normal());
    let features = Matrix::from_fn(samples, d, |s, j| raw[(s, j)] + 0.9 * raw[(s, j / 3 * 3)] + 0.2);
    let truth: Vec<f64> = (0..d).map(|_| random.normal() * random.uniform().powi(3)).collect();
    let target: Vec<f64> = (0..samples)
        .map(|s| (0..d).map(|j| truth[j] * features[(s, j)]).sum::<f64>() + 0.3 * random.normal())
        .collect();
    let m = samples as f64;
    let mut gram = vec![0.0; d * d];
    gemm(&mut gram, d, false, 1.0 / m, features.view().t(), features.view());
    (0..d).for_each(|j| gram[j * d + j] += ridge);
    let cross = (0..d).map(|j| (0..samples).map(|s| features[(s, j)] * target[s]).sum::<f64>() / m).collect();
    let energy = target.iter().map(|z| z * z).sum::<f64>() / m;
    let mut prices = vec![price * energy; d];
    if d > 4 {
        // One entry is free, as a constant is, and one is forbidden.
        prices[d - 1] = 0.0;
        prices[2] = f64::INFINITY;
    }
    PricedRow::new(Matrix::from_vec(d, d, gram).unwrap(), cross, energy, prices).unwrap()
}

/// The best answer over all supports.
fn brute_force(row: &PricedRow) -> (f64, Vec<f64>) {
    let d = row.features();
    let allowed = |set: usize| (0..d).all(|j| set >> j & 1 == 0 || row.prices[j].is_finite());
    (0..1usize << d)
        .filter(|set| allowed(*set))
        .filter_map(|set| incumbent::on_support(row, &(0..d).filter(|j| set >> j & 1 == 1).collect::<Vec<_>>()))
        .min_by(|a, b| a.0.total_cmp(&b.0))
        .unwrap()
}

#[test]
fn the_bound_is_below_the_best_of_all_supports_and_not_far() {
    let mut shares = Vec::new();
    for seed in 0..12 {
        for (price, ridge) in [(0.003, 1e-5), (0.03, 1e-5), (0.01, 0.05)] {
            let row = row(seed, 6 + (seed as usize % 7), 60, price, ridge);
            let (best, _) = brute_force(&row);
            let (bound, certificate) = row.bound().unwrap();
            assert_eq!(certificate.cases.len(), 1);
            assert!(bound <= best, "seed {seed}: bound {bound} above the optimum {best}");
            shares.push(bound / best);
        }
    }
    let mean = shares.iter().sum::<f64>() / shares.len() as f64;
    assert!(mean > 0.6, "the bound is {mean} of the optimum on average");
}

#[test]
fn a_search_proves_what_all_supports_show() {
    let settings = ProveSettings::default();
    for seed in 0..12 {
        for (price, ridge) in [(0.003, 1e-5), (0.03, 1e-5), (0.01, 0.05)] {
            let row = row(seed, 6 + (seed as usize % 7), 60, price, ridge);
            let (best, weights) = brute_force(&row);
            let proof = row.prove(&weights, &settings, &Cancel::new()).unwrap();
            assert_eq!(proof.verdict, Verdict::Optimal, "seed {seed}: {} of {best}", proof.bound);
            assert!(proof.bound <= best + 1e-12 && proof.bound >= best * (1.0 - 2e-6), "{} {best}", proof.bound);
            assert_eq!(proof.certificate.check(&row).unwrap(), proof.bound);
            let alone = row.solve(&settings, &Cancel::new()).unwrap();
            assert_eq!(alone.verdict, Verdict::Optimal, "seed {seed}");
            assert!((alone.value - best).abs() <= 1e-9 * best && alone.value == alone.best, "{} {best}", alone.value);
            // Given a worse answer, the search finds the best one.
            let (_, all) = incumbent::on_support(&row, &[0, 1, 3]).unwrap();
            let proof = row.prove(&all, &settings, &Cancel::new()).unwrap();
            if proof.value > best * (1.0 + 1e-5) {
                assert_eq!(proof.verdict, Verdict::Beaten);
            }
            assert!((proof.best - best).abs() <= 1e-9 * best && proof.bound <= best + 1e-12);
        }
    }
}

#[test]
fn the_checker_refuses_what_proves_nothing() {
    let row = row(3, 12, 60, 0.01, 1e-5);
    let (_, weights) = brute_force(&row);
    let proof = row.prove(&weights, &ProveSettings::default(), &Cancel::new()).unwrap();
    let good = proof.certificate;
    assert!(good.cases.len() > 1, "a proof in one case tests little");
    let broken = |change: &dyn Fn(&mut Certificate)| {
        let mut certificate = good.clone();
        change(&mut certificate);
        certificate.check(&row)
    };
    // A larger diagonal is not below G.
    assert!(broken(&|c| c.diagonals[0] = Arc::new(c.diagonals[0].iter().map(|d| 1.5 * d).collect())).is_err());
    // A case is missing, a case is used twice, a case does not exist.
    assert!(broken(&|c| c.cases.truncate(c.cases.len() - 1)).is_err());
    let split = good.cases.iter().position(|c| matches!(c.then, Then::Splits { .. })).unwrap();
    assert!(
        broken(&|c| if let Then::Splits { without, with, .. } = &mut c.cases[split].then {
            *with = *without;
        })
        .is_err()
    );
    // Without its evidence a case has the bound of the case above; a worse point gives a worse bound.
    let end = good.cases.iter().rposition(|c| c.then == Then::Ends && c.evidence.is_some()).unwrap();
    assert!(broken(&|c| c.cases[end].evidence = None).unwrap() <= proof.bound);
    let other = |c: &mut Certificate| {
        if let Some(evidence) = &mut c.cases[end].evidence {
            evidence.point.iter_mut().for_each(|y| *y += 0.3);
        }
    };
    assert!(broken(&other).unwrap() < proof.bound);
    // The certificate of another row proves nothing about this row.
    let another = self::row(4, 12, 60, 0.01, 1e-5);
    let (best, _) = brute_force(&another);
    if let Ok(bound) = good.check(&another) {
        assert!(bound <= best);
    }
}

#[test]
fn a_search_without_time_still_bounds() {
    let row = row(5, 40, 400, 0.002, 1e-5);
    let (_, weights) = incumbent::settle(&row, vec![39]).unwrap();
    let nothing = ProveSettings { seconds: 0.0, ..ProveSettings::default() };
    let short = row.prove(&weights, &nothing, &Cancel::new()).unwrap();
    let long = row.prove(&weights, &ProveSettings { seconds: 20.0, ..nothing }, &Cancel::new()).unwrap();
    assert!(short.bound > 0.0 && short.bound < short.value);
    assert!(long.bound >= short.bound && long.distance() < 0.01, "{} after 20 s", long.distance());
}

#[test]
fn rows_that_cannot_be_are_refused() {
    let square = |v: f64| Matrix::from_fn(2, 2, |i, j| if i == j { v } else { 0.0 });
    assert!(PricedRow::new(square(1.0), vec![0.0; 3], 1.0, vec![0.1; 3]).is_err());
    assert!(PricedRow::new(square(1.0), vec![0.0; 2], 1.0, vec![-0.1; 2]).is_err());
    assert!(PricedRow::new(square(0.0), vec![0.0; 2], 1.0, vec![0.1; 2]).is_err());
    assert!(PricedRow::new(square(f64::NAN), vec![0.0; 2], 1.0, vec![0.1; 2]).is_err());
    let row = PricedRow::new(square(1.0), vec![0.0; 2], 1.0, vec![0.1; 2]).unwrap();
    assert!(row.prove(&[0.0], &ProveSettings::default(), &Cancel::new()).is_err());
    let still = row.prove(&[0.0, 0.0], &ProveSettings::default(), &Cancel::new()).unwrap();
    assert_eq!(still.verdict, Verdict::Optimal);
}
