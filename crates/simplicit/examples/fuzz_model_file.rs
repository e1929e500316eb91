//! Feeds damaged files to the readers and watches for panics and for memory out of proportion:
//! `cargo run --release -p simplicit --example fuzz_model_file [SECONDS [SEED]]`. Exit code 1 names the case, and the bytes
//! that did it are left in `fuzz-failure.bin`.

// A counting allocator cannot be written without unsafe; it only adds to counters and forwards to the system's.
#![allow(unsafe_code, clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr)]

use std::alloc::{GlobalAlloc, Layout as Block, System};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use simplicit::equilibrium::{Equilibrium, EquilibriumSettings};
use simplicit::layout::{Activation, Layer, Layout};
use simplicit::linalg::{Csr, Matrix};
use simplicit::model::{ImplicitModel, ModelMetadata, ModelParts, Scaling};
use simplicit::network::{Network, Shape, Window};
use simplicit::random::Random;

struct Counting;
static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, block: Block) -> *mut u8 {
        let live = LIVE.fetch_add(block.size(), Relaxed) + block.size();
        PEAK.fetch_max(live, Relaxed);
        unsafe { System.alloc(block) }
    }
    unsafe fn dealloc(&self, at: *mut u8, block: Block) {
        LIVE.fetch_sub(block.size(), Relaxed);
        unsafe { System.dealloc(at, block) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A reader under test: valid files to start from, and what to do with a damaged one. Returns whether it was accepted.
struct Target {
    name: &'static str,
    seeds: Vec<Vec<u8>>,
    read: fn(&[u8]) -> bool,
    /// Bytes of memory that any file may take, however small it is.
    allowed: usize,
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let seconds: u64 = arguments.next().map_or(5, |s| s.parse().unwrap());
    let seed: u64 = arguments.next().map_or(0, |s| s.parse().unwrap());
    let targets = [
        Target { name: "model file", seeds: models(), read: read_model, allowed: 1 << 20 },
        Target { name: "ONNX file", seeds: networks(), read: read_network, allowed: 1 << 30 },
    ];
    let mut random = Random::new(seed);
    let (start, mut cases, mut accepted) = (Instant::now(), 0u64, 0u64);
    let quiet = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    while start.elapsed() < Duration::from_secs(seconds) {
        let target = &targets[random.below(targets.len())];
        let bytes = damaged(&target.seeds, &mut random);
        let before = LIVE.load(Relaxed);
        PEAK.store(before, Relaxed);
        let outcome = std::panic::catch_unwind(|| (target.read)(&bytes));
        let used = PEAK.load(Relaxed).saturating_sub(before);
        // Decoding widens u16 indices and copies; this is far above that and far below a claimed size.
        let allowed = target.allowed + 200 * bytes.len();
        let problem = match outcome {
            Err(_) => Some("panicked".to_string()),
            Ok(_) if used > allowed => Some(format!("took {used} bytes of memory, more than {allowed}")),
            Ok(read) => {
                accepted += u64::from(read);
                None
            }
        };
        if let Some(problem) = problem {
            std::panic::set_hook(quiet);
            std::fs::write("fuzz-failure.bin", &bytes).unwrap();
            eprintln!("{}: case {cases} of seed {seed} {problem}; see fuzz-failure.bin", target.name);
            std::process::exit(1);
        }
        cases += 1;
    }
    println!("{cases} damaged files in {seconds} s, {accepted} still valid, none crashed");
}

/// Whatever is accepted must also survive being used and written again.
fn read_model(bytes: &[u8]) -> bool {
    let Ok(model) = ImplicitModel::from_bytes(bytes, "fuzz") else { return false };
    let again = ImplicitModel::from_bytes(&model.to_bytes(), "again").unwrap();
    assert!(again == model);
    assert!(model.sparsity().nonzeros <= bytes.len() as u64);
    let _ = model.well_posedness();
    let _ = model.rescale(0.9);
    let equilibrium = Equilibrium::new(&model, EquilibriumSettings::default()).unwrap();
    // Small models also run.
    if model.shape().states < 200 && model.shape().inputs < 200 {
        equilibrium.outputs(&Matrix::zeros(1, model.shape().inputs)).unwrap();
    }
    true
}

/// A network that is accepted also runs, if it is small.
fn read_network(bytes: &[u8]) -> bool {
    let Ok(network) = Network::from_onnx_bytes(bytes) else { return false };
    let size = network.input_shape().size();
    if size < 10_000 && network.multiply_adds() < 1 << 20 && network.summary().iter().all(|l| l.shape.size() < 1 << 16)
    {
        network.forward(&Matrix::zeros(1, size)).unwrap();
    }
    true
}

/// The ONNX files of the tests; those of data/operators are networks of `tests/onnx_unusual.py`.
fn networks() -> Vec<Vec<u8>> {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let folders = [folder.join("operators"), folder];
    let files = folders.iter().flat_map(|folder| std::fs::read_dir(folder).unwrap().map(|f| f.unwrap().path()));
    let files = files.filter(|path| path.extension() == Some("onnx".as_ref()));
    let bytes = files.map(|path| std::fs::read(path).unwrap());
    bytes.filter(|bytes| bytes.len() < 1 << 16).collect()
}

fn models() -> Vec<Vec<u8>> {
    let mut random = Random::new(99);
    let mut sparse = |rows: usize, cols: usize, density: f64| {
        let rows: Vec<Vec<_>> = (0..rows)
            .map(|_| (0..cols).filter(|_| random.uniform() < density).map(|j| (j, 0.5f32)).collect())
            .collect();
        Csr::from_rows(cols, rows)
    };
    [(0, 1, 1), (3, 2, 2), (40, 30, 5), (6, 70_000, 2)]
        .into_iter()
        .map(|(n, p, q)| {
            let layers = vec![
                Layer::dense("last", n / 2, Activation::LeakyRelu { slope: 0.25 }),
                Layer::dense("first", n - n / 2, Activation::Relu),
            ];
            ImplicitModel::new(ModelParts {
                a: sparse(n, n, 0.2),
                b: sparse(n, p, 0.1),
                c: sparse(q, n, 0.3),
                d: sparse(q, p, 0.1),
                state_bias: vec![0.25; n],
                output_bias: vec![1.5; q],
                layout: Layout::new(layers),
                metadata: ModelMetadata {
                    kappa: Some(0.99),
                    scaling: Some(Scaling { states: vec![2.0; n], outputs: 1.0 }),
                    provenance: BTreeMap::from([("seed".to_string(), "7".to_string())]),
                    baseline_nonzeros: Some(1000),
                    baseline_multiply_adds: None,
                    kept: if q == 5 { vec!["first".into(), "output".into()] } else { Vec::new() },
                },
                ..Default::default()
            })
            .unwrap()
            .to_bytes()
        })
        .chain(std::iter::once(convolutional()))
        .collect()
}

/// A model with every kind of tap block: taps, poolings, a residual, a classifier behind an average, factors.
fn convolutional() -> Vec<u8> {
    let taps = |rows: usize, cols: usize| Matrix::from_fn(rows, cols, |i, j| if (i + j) % 3 == 0 { 0.0 } else { 0.25 });
    let start = Network::builder(Shape::map(1, 6, 6))
        .and_then(|b| b.convolution(taps(2, 9), Window::square(3, 1, 1), Some(vec![0.5, -0.5])))
        .and_then(|b| b.activation(Activation::Relu))
        .unwrap();
    let skip = start.here();
    let network = start
        .convolution(taps(2, 18), Window::square(3, 1, 1), None)
        .and_then(|b| b.plus(skip))
        .and_then(|b| b.activation(Activation::Relu))
        .and_then(|b| b.max_pool(Window::square(2, 2, 0)))
        .and_then(|b| b.convolution(taps(3, 8), Window::square(2, 2, 1), None))
        .and_then(|b| b.activation(Activation::Identity))
        .and_then(|b| b.global_average())
        .and_then(|b| b.linear(taps(2, 3), None))
        .and_then(|b| b.build())
        .unwrap();
    ImplicitModel::from_network(&network).unwrap().rescale(0.9).unwrap().model.to_bytes()
}

fn damaged(seeds: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    let mut bytes = seeds[random.below(seeds.len())].clone();
    for _ in 0..1 + random.below(3) {
        match random.below(8) {
            0 => bytes.truncate(random.below(bytes.len() + 1)),
            1 => bytes.extend((0..random.below(20)).map(|_| 0u8)),
            2 => flip(&mut bytes, random, usize::MAX),
            // Most of a file is data, most of the logic is in the header.
            3 => flip(&mut bytes, random, 4000),
            4 => {
                let other = &seeds[random.below(seeds.len())];
                bytes.truncate(random.below(bytes.len() + 1));
                bytes.extend_from_slice(&other[random.below(other.len())..]);
            }
            5 => {
                let length = [0, 1, 7, 8, u64::MAX, 1 << 40, bytes.len() as u64, random.bits() >> 50];
                let length = length[random.below(8)].to_le_bytes();
                bytes.iter_mut().zip(length).for_each(|(b, l)| *b = l);
            }
            6 => {
                // A special value in the data.
                let special = [f32::NAN, f32::INFINITY, 0.0, -0.0, 1e-45, 3e38][random.below(6)];
                if bytes.len() > 8 {
                    let at = random.below(bytes.len() - 4);
                    bytes[at..at + 4].copy_from_slice(&special.to_le_bytes());
                }
            }
            _ => edit_header(&mut bytes, random),
        }
    }
    bytes
}

fn flip(bytes: &mut [u8], random: &mut Random, within: usize) {
    let length = bytes.len().min(within);
    for _ in 0..1 + random.below(4) {
        if length > 0 {
            bytes[random.below(length)] ^= 1 << random.below(8);
        }
    }
}

/// Replaces a number or a word of the JSON header and corrects the header's length, so that the damage gets deep.
fn edit_header(bytes: &mut Vec<u8>, random: &mut Random) {
    let Some(length) = bytes.first_chunk::<8>().map(|l| u64::from_le_bytes(*l)) else { return };
    let Ok(length) = usize::try_from(length) else { return };
    let Some(end) = length.checked_add(8).filter(|end| *end <= bytes.len()) else { return };
    let header = bytes[8..end].to_vec();
    let starts: Vec<usize> =
        (1..header.len()).filter(|&k| header[k].is_ascii_digit() && !header[k - 1].is_ascii_digit()).collect();
    let words = [
        "A.data",
        "taps.0.data",
        "identity",
        "relu",
        "F32",
        "U16",
        "I64",
        "null",
        "shape",
        "{",
        "[",
        "\\\"",
        "-1",
        "1e999",
    ];
    let numbers =
        ["0", "1", "2", "-1", "65536", "4294967295", "4294967296", "9223372036854775807", "18446744073709551615"];
    let (from, to, new) = if random.below(3) > 0 && !starts.is_empty() {
        let from = starts[random.below(starts.len())];
        let to = (from..header.len()).find(|&k| !header[k].is_ascii_digit()).unwrap_or(header.len());
        (from, to, numbers[random.below(numbers.len())])
    } else {
        let from = random.below(header.len() + 1);
        (from, (from + random.below(12)).min(header.len()), words[random.below(words.len())])
    };
    let edited = [&header[..from], new.as_bytes(), &header[to..]].concat();
    let mut out = (edited.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(&edited);
    out.extend_from_slice(&bytes[end..]);
    *bytes = out;
}
