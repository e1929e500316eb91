//! States from arrays and files, and the states file.

#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

use crate::common::{fixture, number, paper};
use simplicit::arrays::{Array, ArrayFile, Preprocessing, write_npy};
use simplicit::layout::{Activation, Layer, Layout};
use simplicit::linalg::Matrix;
use simplicit::parallel::{Cancel, Threads, fold};
use simplicit::states::{ArrayStates, StateBlock, StateShape, StateSource, StatesMetadata, write_states};
use simplicit::statistics::Statistics;
use simplicit::{Error, Result};

/// Arrays of agreeing shapes: m samples, 3 inputs, 4 ReLU states, 2 outputs.
fn matrices(samples: usize) -> [Matrix; 4] {
    let fill = |cols: usize, shift: usize| Matrix::from_fn(samples, cols, |i, j| number(i * cols + j + shift));
    let (u, z, y) = (fill(3, 0), fill(4, 5), fill(2, 9));
    let x = Matrix::from_fn(samples, 4, |i, j| z[(i, j)].max(0.0));
    [u, z, x, y]
}

fn states([u, z, x, y]: &[Matrix; 4], activation: Activation) -> Result<ArrayStates> {
    let array = Array::from_matrix::<f64>;
    ArrayStates::without_layout(array("u", u), array("z", z), array("x", x), array("y", y), activation)
}

fn message(matrices: &[Matrix; 4]) -> String {
    states(matrices, Activation::Relu).unwrap_err().to_string()
}

#[test]
fn arrays_in_memory_come_back_as_blocks() {
    let all = matrices(10);
    let source = states(&all, Activation::Relu).unwrap();
    assert_eq!(source.shape(), StateShape { inputs: 3, states: 4, outputs: 2 });
    assert_eq!((source.samples(), source.layout().size()), (10, 4));
    assert!(!source.layout_is_declared());
    assert_eq!(source.baseline_nonzeros(), None);
    let block = source.block(3..8).unwrap();
    for (part, whole) in [&block.u, &block.z, &block.x, &block.y].into_iter().zip(&all) {
        assert_eq!(part, &Matrix::from_fn(5, whole.cols(), |i, j| whole[(i + 3, j)]));
    }
    // float32 and float64 may be mixed.
    let [u, z, x, y] = &all;
    let single = |name: &str, m: &Matrix| Array::from_matrix(name, &m.cast::<f32>());
    let (u, z) = (single("u", u), single("z", z));
    let (x, y) = (Array::from_matrix("x", x), single("y", y));
    let mixed = ArrayStates::without_layout(u, z, x, y, Activation::Relu).unwrap();
    assert_eq!(mixed.block(3..8).unwrap(), block);
}

#[test]
fn shapes_that_disagree_are_named() {
    let good = matrices(10);
    for (k, name, other, expected) in [
        (1, "Z", Matrix::zeros(9, 4), "expected 10 × 4, got 9 × 4"),
        (2, "X", Matrix::zeros(10, 5), "expected 10 × 4, got 10 × 5"),
        (2, "X", Matrix::zeros(11, 4), "expected 10 × 4, got 11 × 4"),
        (3, "Y", Matrix::zeros(9, 2), "expected 10 × 2, got 9 × 2"),
        (3, "Y", Matrix::zeros(10, 0), "expected 10 × 1, got 10 × 0"),
        (0, "U", Matrix::zeros(10, 0), "expected 10 × 1, got 10 × 0"),
    ] {
        let mut bad = good.clone();
        bad[k] = other;
        let message = message(&bad);
        assert!(message.starts_with(&format!("{name} (")) && message.ends_with(expected), "{message}");
    }
    assert!(message(&matrices(0)).contains("U: expected at least one sample"));
    let [u, z, x, y] = &good;
    let array = Array::from_matrix::<f64>;
    let layout = Layout::new(vec![Layer::dense("a", 3, Activation::Relu)]);
    let wrong = ArrayStates::new(array("u", u), array("z", z), array("x", x), array("y", y), layout);
    assert_eq!(wrong.unwrap_err().to_string(), "Z: expected 3 units, as in the layout, got 4 units");
}

#[test]
fn a_value_that_is_not_finite_is_named_when_its_block_is_read() {
    for (k, name) in ["U", "Z", "X", "Y"].into_iter().enumerate() {
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let mut all = matrices(1000);
            all[k][(700, 1)] = bad;
            let source = states(&all, Activation::Relu).unwrap();
            source.block(0..512).unwrap();
            match source.block(512..1000).unwrap_err() {
                Error::NotFinite { array, row, column, .. } => {
                    assert_eq!((array.as_str(), row, column), (name, 700, 1));
                }
                other => panic!("{other}"),
            }
        }
    }
    let mut all = matrices(10);
    all[2][(3, 1)] = f64::NAN;
    assert!(message(&all).starts_with("X: NaN at row 3, column 1"));
}

#[test]
fn the_states_must_be_the_activation_of_the_pre_activations() {
    let all = matrices(20);
    let wrong = states(&all, Activation::Tanh).unwrap_err().to_string();
    assert!(wrong.contains("X, layer states: expected tanh of Z") && wrong.contains("deviation of"), "{wrong}");
    // The largest deviation is the one named.
    let mut off = all.clone();
    off[2][(4, 1)] += 1e-3;
    off[2][(9, 3)] += 2e-2;
    let message = message(&off);
    assert!(message.contains("2.000e-2 at row 9, column 3"), "{message}");
    // float32 rounding passes, twice the tolerance does not.
    let mut near = all.clone();
    near[2][(4, 1)] += 30.0 * f64::from(f32::EPSILON);
    states(&near, Activation::Relu).unwrap();
    near[2][(4, 1)] += 40.0 * f64::from(f32::EPSILON) * near[1][(4, 1)].abs().max(1.0);
    assert!(states(&near, Activation::Relu).is_err());
}

#[test]
fn dull_features_are_fine() {
    let [mut u, mut z, mut x, y] = matrices(300);
    for i in 0..300 {
        u[(i, 0)] = 0.0;
        u[(i, 1)] = 4.0;
        z[(i, 2)] = -1.0;
        x[(i, 2)] = 0.0;
    }
    let source = states(&[u, z, x, y], Activation::Relu).unwrap();
    assert!(source.block(0..300).unwrap().x.as_slice().iter().skip(2).step_by(4).all(|v| *v == 0.0));
}

#[test]
fn files_of_states() {
    let z = Matrix::from_fn(7, 6, |i, j| number(6 * i + 5 - j));
    let source = ArrayStates::open(fixture("states.safetensors"), Activation::Sigmoid).unwrap();
    assert!(source.layout_is_declared());
    assert_eq!(source.baseline_nonzeros(), Some(28));
    assert_eq!(source.preprocessing(), None);
    let names: Vec<_> = source.layout().layers().iter().map(|l| (l.name.as_str(), l.size, l.activation)).collect();
    assert_eq!(names, [("second", 2, Activation::Tanh), ("first", 4, Activation::Relu)]);
    let block = source.block(0..7).unwrap();
    assert_eq!(block.z, z);
    assert_eq!(block.u, Matrix::from_fn(7, 3, |i, j| number(3 * i + j)));
    assert_eq!(block.y, Matrix::from_fn(7, 2, |i, j| 3.0 * number(2 * i + j)));
    assert!((block.x[(2, 1)] - z[(2, 1)].tanh()).abs() < 1e-7);

    let plain = ArrayStates::open(fixture("relu_states.npz"), Activation::Relu).unwrap();
    assert!(!plain.layout_is_declared());
    assert_eq!(plain.block(0..7).unwrap().z, z);
    assert!(ArrayStates::open(fixture("relu_states.npz"), Activation::Identity).is_err());
    let missing = ArrayStates::open(fixture("two.npz"), Activation::Relu).unwrap_err().to_string();
    assert!(missing.contains("expected an array \"U\", got 2: first, second"), "{missing}");

    // Four .npy files in a folder.
    let folder = tempfile::tempdir().unwrap();
    for (name, array) in [("U", &block.u), ("Z", &z), ("X", &z), ("Y", &block.y)] {
        write_npy(folder.path().join(format!("{name}.npy")), &array.cast()).unwrap();
    }
    let four = ArrayStates::open(folder.path(), Activation::Identity).unwrap();
    assert_eq!(four.block(0..7).unwrap().x, z);
}

#[test]
fn metadata_that_is_wrong_is_an_error() {
    let good = std::fs::read(fixture("states.safetensors")).unwrap();
    let len = u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let text = std::str::from_utf8(&good[8..8 + len]).unwrap();
    for (from, to, part) in [
        (r#""28""#, r#""-1""#, "baseline_nonzeros: expected a positive integer"),
        (r#""28""#, r#""0.""#, "baseline_nonzeros: expected a positive integer"),
        (r#"tanh"#, r#"than"#, "layout"),
        (r#"\"size\": 2"#, r#"\"size\": 3"#, "expected 7 units, as in the layout, got 6 units"),
        (r#"\"size\": 4"#, r#"\"size\":-4"#, "layout"),
    ] {
        let changed = text.replace(from, to);
        assert!(changed != text, "{from}");
        let mut bytes = (changed.len() as u64).to_le_bytes().to_vec();
        bytes.extend(changed.bytes().chain(good[8 + len..].iter().copied()));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s.safetensors");
        std::fs::write(&path, bytes).unwrap();
        let message = ArrayStates::open(path, Activation::Relu).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn what_is_written_is_read_back() {
    let all = matrices(1000);
    let source = states(&all, Activation::Relu).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, threads| {
        let path = folder.path().join(name);
        let preprocessing = Some(Preprocessing::new(1.0 / 255.0, vec![0.1], vec![0.3]).unwrap());
        let metadata = StatesMetadata { baseline_nonzeros: Some(123), preprocessing };
        write_states(&path, &source, &metadata, Threads::new(threads), &Cancel::new()).unwrap();
        path
    };
    let path = write("one.safetensors", 1);
    let back = ArrayStates::open(&path, Activation::Tanh).unwrap();
    assert_eq!(back.block(0..1000).unwrap(), source.block(0..1000).unwrap());
    assert_eq!((back.layout(), back.layout_is_declared()), (source.layout(), true));
    assert_eq!(back.baseline_nonzeros(), Some(123));
    assert_eq!(back.preprocessing().unwrap().mean, [0.1]);
    assert_eq!(std::fs::read(write("three.safetensors", 3)).unwrap(), std::fs::read(&path).unwrap());
    // The reference implementation accepts the file.
    let bytes = std::fs::read(&path).unwrap();
    let reference = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(reference.tensor("Z").unwrap().shape(), [1000, 4]);
    assert_eq!(ArrayFile::open(&path).unwrap().metadata("baseline_nonzeros"), Some("123"));
}

#[test]
fn a_write_that_fails_leaves_nothing() {
    let mut all = matrices(1000);
    all[3][(900, 0)] = f64::NAN;
    let source = states(&all, Activation::Relu).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s.safetensors");
    let metadata = StatesMetadata::default();
    let failed = write_states(&path, &source, &metadata, Threads::one(), &Cancel::new());
    assert!(failed.unwrap_err().to_string().starts_with("Y: NaN at row 900"));
    let cancel = Cancel::new();
    cancel.cancel();
    let stopped = write_states(&path, &source, &metadata, Threads::one(), &cancel);
    assert!(matches!(stopped, Err(Error::Cancelled)));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn the_papers_states_load_exactly() {
    let (u, z, x, y) = paper::states();
    assert_eq!((u.rows(), u.cols()), (paper::SAMPLES, paper::INPUTS));
    assert_eq!((z.cols(), y.cols()), (paper::STATES, paper::OUTPUTS));
    // NumPy computed the first rows; sums in another order may round one float32 the other way.
    for (got, expected) in [(&z, paper::stored("Z_head")), (&y, paper::stored("Y_head"))] {
        for i in 0..expected.rows() {
            for (g, e) in got.row(i).iter().zip(expected.row(i)) {
                assert!((g - e).abs() <= 2.0 * f64::from(f32::EPSILON) * e.abs().max(1e-3), "{g} {e}");
            }
        }
    }
    // The baseline satisfies the row bound, and its own rows reproduce the states.
    let (a, b, c) = (paper::stored("A"), paper::stored("B"), paper::stored("C"));
    let mut nonzeros = 0;
    for i in 0..paper::STATES {
        assert!(a.row(i).iter().map(|v| v.abs()).sum::<f64>() <= paper::KAPPA, "row {i}");
        assert!(a.row(i)[..=i].iter().all(|v| *v == 0.0), "not strictly upper triangular");
    }
    for m in [&a, &b, &c] {
        nonzeros += m.as_slice().iter().filter(|v| **v != 0.0).count();
    }
    assert_eq!(nonzeros, 52896);
    let product = |w: &[f64], f: &[f64]| w.iter().zip(f).map(|(w, f)| w * f).sum::<f64>();
    for k in (0..paper::SAMPLES).step_by(97) {
        for i in 0..paper::STATES {
            let again = product(a.row(i), x.row(k)) + product(b.row(i), u.row(k));
            assert!((again - z[(k, i)]).abs() <= 1e-7 * again.abs().max(1e-3), "{again} {}", z[(k, i)]);
            assert_eq!(x[(k, i)], z[(k, i)].max(0.0));
        }
        for i in 0..paper::OUTPUTS {
            let again = product(c.row(i), x.row(k));
            assert!((again - y[(k, i)]).abs() <= 1e-7 * again.abs().max(1e-3));
        }
    }
}

/// States that are never all in memory, with sums that are known exactly.
struct Synthetic {
    layout: Layout,
}

impl StateSource for Synthetic {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn shape(&self) -> StateShape {
        StateShape { inputs: 784, states: 112, outputs: 10 }
    }

    fn samples(&self) -> usize {
        75_000
    }

    fn block(&self, samples: std::ops::Range<usize>) -> Result<StateBlock> {
        let fill = |cols| Matrix::from_fn(samples.len(), cols, |i, j| ((samples.start + i + j) % 4) as f64);
        Ok(StateBlock { u: fill(784), z: fill(112), x: fill(112), y: fill(10) })
    }
}

/// Set in the child process that works under a limit on its memory: the folder to work in.
const FOLDER: &str = "SIMPLICIT_TEST_STREAMING_FOLDER";

/// Less than the file of [`Synthetic`] states is long.
const LIMIT: u64 = 256 << 20;

/// In the child, the folder to work in. In the parent, `None` after the test of this name has passed again in a process
/// that cannot have as much memory as the file is long.
#[cfg(unix)]
fn under_the_limit(test: &str) -> Option<std::path::PathBuf> {
    if let Some(folder) = std::env::var_os(FOLDER) {
        return Some(folder.into());
    }
    let folder = tempfile::tempdir().unwrap();
    let script = format!("ulimit -v {} && exec \"$0\" \"$@\"", LIMIT >> 10);
    let output = std::process::Command::new("sh")
        .args(["-c", &script])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", &format!("states::{test}"), "--test-threads=1"])
        .env(FOLDER, folder.path())
        // One arena: what glibc reserves for others counts against the limit though nobody uses it.
        .env("MALLOC_ARENA_MAX", "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}\n{errors}");
    None
}

/// A file of states that does not fit into the memory there is.
fn large_file(folder: &std::path::Path) -> ArrayStates {
    let path = folder.join("large.safetensors");
    let source = Synthetic { layout: Layout::new(vec![Layer::dense("first", 112, Activation::Relu)]) };
    write_states(&path, &source, &StatesMetadata::default(), Threads::new(2), &Cancel::new()).unwrap();
    let len = std::fs::metadata(&path).unwrap().len();
    assert!(len > LIMIT, "{len}");
    // The limit is real: what the file holds does not fit.
    assert!(Vec::<u8>::new().try_reserve_exact(len as usize).is_err());
    ArrayStates::open(&path, Activation::Relu).unwrap()
}

#[cfg(unix)]
#[test]
fn a_file_larger_than_memory_is_written_and_read() {
    let Some(folder) = under_the_limit("a_file_larger_than_memory_is_written_and_read") else { return };
    let states = large_file(&folder);
    const BLOCK: usize = 256;
    let blocks = states.samples().div_ceil(BLOCK);
    let mut sums = [0.0; 4];
    let work = |b: usize| {
        let block = states.block(b * BLOCK..((b + 1) * BLOCK).min(states.samples()))?;
        Ok([&block.u, &block.z, &block.x, &block.y].map(|m| m.as_slice().iter().sum::<f64>()))
    };
    fold(Threads::new(2), blocks, work, |_, part| {
        sums.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        Ok(())
    })
    .unwrap();
    // 75,000 is a multiple of 4: every column holds 0, 1, 2, 3 equally often.
    assert_eq!(sums, [784.0, 112.0, 112.0, 10.0].map(|columns| columns * 75_000.0 * 1.5));
}

#[cfg(unix)]
#[test]
fn statistics_of_a_file_larger_than_memory() {
    let Some(folder) = under_the_limit("statistics_of_a_file_larger_than_memory") else { return };
    let states = large_file(&folder);
    let mut seen = 0;
    let statistics =
        Statistics::of_states(&states, true, Threads::new(2), &Cancel::new(), |samples| seen = samples).unwrap();
    let m = states.samples();
    assert_eq!((seen, statistics.samples(), statistics.features()), (m, m, 112 + 784 + 1));
    // Column j holds (i + j) % 4 and 75,000 is a multiple of 4: products of two columns sum to a quarter of m times
    // Σ_k k·((k + shift) % 4), shift the difference of the columns.
    let column = |j: usize| if j < 112 { j } else { j - 112 };
    let product = |a: usize, b: usize| {
        let sum: usize = (0..4).map(|k| ((k + a) % 4) * ((k + b) % 4)).sum();
        (m / 4 * sum) as f64
    };
    for a in (0..896).step_by(13) {
        for b in (0..896).step_by(7) {
            assert_eq!(statistics.gram()[(a, b)], product(column(a), column(b)), "{a} {b}");
        }
        assert_eq!(statistics.gram()[(896, a)], m as f64 * 1.5);
        assert_eq!(statistics.cross(115)[a], product(3, column(a)));
    }
    assert_eq!(statistics.energy(5), product(5, 5));
}
