use super::*;
use crate::parallel::{Cancel, Threads};
use crate::random::Random;

fn data(samples: usize) -> (Matrix, Matrix) {
    let mut r = Random::new(5);
    (Matrix::from_fn(samples, 7, |_, _| r.normal()), Matrix::from_fn(samples, 3, |_, _| r.normal()))
}

fn rows(m: &Matrix, range: std::ops::Range<usize>) -> Matrix {
    Matrix::from_fn(range.len(), m.cols(), |i, j| m[(range.start + i, j)])
}

#[test]
fn streamed_statistics_equal_the_definition_and_do_not_depend_on_threads() {
    let samples = 5 * BLOCK + 17;
    let (f, t) = data(samples);
    let stream = |threads| {
        let read = |range: std::ops::Range<usize>| Ok((rows(&f, range.clone()), rows(&t, range)));
        Statistics::stream(samples, Threads::new(threads), &Cancel::new(), read, |_| {}).unwrap()
    };
    let one = stream(1);
    assert_eq!(one, stream(2));
    assert_eq!(one, stream(5));
    for i in 0..7 {
        for j in 0..7 {
            let g: f64 = (0..samples).map(|k| f[(k, i)] * f[(k, j)]).sum();
            assert!((one.gram()[(i, j)] - g).abs() < 1e-9);
        }
        let h: f64 = (0..samples).map(|k| f[(k, i)] * t[(k, 2)]).sum();
        assert!((one.cross(2)[i] - h).abs() < 1e-9);
    }
    let e: f64 = (0..samples).map(|k| t[(k, 1)].powi(2)).sum();
    assert!((one.energy(1) - e).abs() < 1e-9);
    assert_eq!(one.samples(), samples);
}

#[test]
fn shards_cut_at_tree_nodes_merge_to_the_same_bits() {
    let (f, t) = data(4 * BLOCK);
    let of = |range: std::ops::Range<usize>| {
        let start = range.start;
        let read = |r: std::ops::Range<usize>| {
            let r = start + r.start..start + r.end;
            Ok((rows(&f, r.clone()), rows(&t, r)))
        };
        Statistics::stream(range.len(), Threads::one(), &Cancel::new(), read, |_| {}).unwrap()
    };
    let whole = of(0..4 * BLOCK);
    let halves = of(0..2 * BLOCK).merge(&of(2 * BLOCK..4 * BLOCK)).unwrap();
    assert_eq!(whole, halves);
}

#[test]
fn branches_of_any_size_merge_to_the_same_bits() {
    let (f, t) = data(7 * 16);
    let leaf = |k: usize| Statistics::of(&rows(&f, 16 * k..16 * (k + 1)), &rows(&t, 16 * k..16 * (k + 1))).unwrap();
    let of = |leaves: std::ops::Range<usize>| {
        let mut tree = Tree::default();
        leaves.for_each(|k| tree.push(leaf(k)).unwrap());
        tree.finish().unwrap()
    };
    let whole = of(0..7);
    for cuts in [vec![0, 4, 6, 7], vec![0, 2, 3, 4, 5, 6, 7], vec![0, 1, 2, 4, 6, 7], vec![0, 4, 7]] {
        let mut tree = Tree::default();
        cuts.windows(2).for_each(|c| tree.push_branch(c[1] - c[0], of(c[0]..c[1])).unwrap());
        assert_eq!(tree.finish().unwrap(), whole, "{cuts:?}");
    }
    // A branch must be at its place, and nothing may come after the last leaves.
    let mut tree = Tree::default();
    tree.push_branch(1, leaf(0)).unwrap();
    assert!(tree.push_branch(2, of(1..3)).is_err() && tree.push_branch(0, leaf(1)).is_err());
    let mut tree = Tree::default();
    tree.push_branch(3, of(0..3)).unwrap();
    assert!(tree.push_branch(1, leaf(3)).is_err());
}

#[test]
fn bytes_and_fingerprints_say_which_statistics_they_are() {
    let (f, t) = data(40);
    let own = Statistics::of(&f, &t).unwrap();
    let bytes = own.to_bytes();
    // The part of G above the diagonal is not written.
    assert_eq!(bytes.len(), 8 * (1 + 7 * 8 / 2 + 3 * 7 + 3));
    assert_eq!(bytes[8..16], own.gram()[(0, 0)].to_le_bytes());
    assert_eq!(bytes[24..32], own.gram()[(1, 1)].to_le_bytes());
    assert_eq!(Statistics::from_bytes(&bytes, 7, 3).unwrap(), own);
    assert!(Statistics::from_bytes(&bytes, 3, 7).is_none() && Statistics::from_bytes(&bytes[8..], 7, 3).is_none());
    // Unless sums that were computed elsewhere have other bits there; several tiles.
    let wide = |twist: f64| {
        let gram = Matrix::from_fn(150, 150, |i, j| 1.0 + (i * j) as f64 + if i < j { twist } else { 0.0 });
        Statistics::from_sums(9, gram, Matrix::from_fn(1, 150, |_, j| j as f64), vec![2.0]).unwrap()
    };
    for (other, numbers) in [(wide(0.0), 150 * 151 / 2), (wide(0.5), 150 * 150)] {
        assert_eq!(other.to_bytes().len(), 8 * (1 + numbers + 150 + 1));
        assert_eq!(Statistics::from_bytes(&other.to_bytes(), 150, 1).unwrap(), other);
    }
    assert_eq!(own.fingerprint(), Statistics::fingerprint_of(&bytes));
    let mut names = std::collections::BTreeSet::from([own.fingerprint()]);
    for k in 0..bytes.len() / 8 {
        let mut other = bytes.clone();
        other[8 * k] ^= 1;
        assert!(names.insert(Statistics::fingerprint_of(&other)), "number {k}");
    }
    assert!(names.insert(Statistics::fingerprint_of(&bytes[8..])));
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let mut other = bytes.clone();
        other[16..24].copy_from_slice(&bad.to_le_bytes());
        assert!(Statistics::from_bytes(&other, 7, 3).is_none());
    }
}

#[test]
fn statistics_in_two_parts_are_those_of_the_whole() {
    let (f, t) = data(300);
    let columns = |m: &Matrix, range: std::ops::Range<usize>| {
        Matrix::from_fn(m.rows(), range.len(), |i, j| m[(i, range.start + j)])
    };
    let whole = Statistics::of(&f, &t).unwrap();
    let (head, tail) = (columns(&f, 0..2), columns(&f, 2..7));
    let fixed = Statistics::of(&tail, &t).unwrap();
    let joined = Statistics::of(&head, &beside(&[&tail, &t])).unwrap().followed_by(&fixed).unwrap();
    assert_eq!(joined.energy, whole.energy);
    let pairs = joined.gram().as_slice().iter().zip(whole.gram().as_slice());
    for (a, b) in pairs.chain(joined.cross.as_slice().iter().zip(whole.cross.as_slice())) {
        assert!((a - b).abs() < 1e-10);
    }
    let part = whole.part(&[6, 1], &[2]);
    assert_eq!((part.gram()[(0, 1)], part.cross[(0, 1)]), (whole.gram()[(6, 1)], whole.cross[(2, 1)]));
    assert!(fixed.followed_by(&whole).is_err());
}

#[test]
fn few_samples_are_kept_and_say_the_same() {
    let mut r = Random::new(9);
    let (f, t) = (Matrix::from_fn(8, 30, |_, _| r.normal()), Matrix::from_fn(8, 2, |_, _| r.normal()));
    let (gram, few) = (Statistics::of(&f, &t).unwrap(), Statistics::of_few(f.clone(), &t).unwrap());
    assert!(few.few_samples().is_some() && gram.few_samples().is_none());
    let weights: Vec<(usize, f64)> = (0..30).step_by(4).map(|j| (j, r.normal())).collect();
    for k in 0..2 {
        let (a, b) = (gram.mismatch(k, &weights), few.mismatch(k, &weights));
        assert!((a - b).abs() < 1e-10 * a, "{a} {b}");
        assert_eq!(gram.cross(k), few.cross(k));
    }
    assert!((0..30).all(|j| (gram.rms(j) - few.rms(j)).abs() < 1e-12));
    assert_eq!(few.gram(), gram.gram());
    let read = |range: std::ops::Range<usize>| Ok((rows(&f, range.clone()), rows(&t, range)));
    let streamed = |all| Statistics::stream_shard(8, all, Threads::one(), &Cancel::new(), read, |_| {}).unwrap();
    assert_eq!(streamed(8), few);
    assert_eq!(streamed(1000), gram, "a shard of many samples adds up");
    for of in [&gram, &few] {
        assert_eq!(&Statistics::from_bytes(&of.to_bytes(), 30, 2).unwrap(), of);
    }
    assert!(Statistics::from_bytes(&few.to_bytes()[8..], 30, 2).is_none());
    let halves = Statistics::of_few(rows(&f, 0..3), &rows(&t, 0..3)).unwrap();
    let merged = halves.merge(&Statistics::of_few(rows(&f, 3..8), &rows(&t, 3..8)).unwrap()).unwrap();
    assert_eq!(merged.few_samples(), few.few_samples());
    let part = few.part(&[6, 1], &[1]);
    assert!((part.gram()[(0, 1)] - gram.gram()[(6, 1)]).abs() < 1e-12);
    let (head, tail) = (few.part(&(0..10).collect::<Vec<_>>(), &[]), few.part(&(10..30).collect::<Vec<_>>(), &[0, 1]));
    let tails = Matrix::from_fn(8, 20, |i, j| f[(i, 10 + j)]);
    let head = Statistics::of_few(head.few_samples().unwrap().clone(), &beside(&[&tails, &t])).unwrap();
    assert_eq!(head.followed_by(&tail).unwrap().few_samples(), few.few_samples());
}

#[test]
fn no_samples_and_cancelled_runs_are_errors() {
    let read = |_: std::ops::Range<usize>| Ok((Matrix::zeros(1, 1), Matrix::zeros(1, 1)));
    assert!(Statistics::stream(0, Threads::one(), &Cancel::new(), read, |_| {}).is_err());
    let cancel = Cancel::new();
    cancel.cancel();
    let out = Statistics::stream(9, Threads::one(), &cancel, read, |_| {});
    assert!(matches!(out, Err(Error::Cancelled)));
}
