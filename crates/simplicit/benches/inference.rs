//! Inference of randomly pruned networks on one thread, beside the dense network prepared the same way and ONNX Runtime:
//! `cargo bench -p simplicit --bench inference [-- PART ...]`, see `PARTS`. `page FILE` measures what docs/inference.md shows,
//! three times, and writes the tables to FILE for `bench/inference_page.py`; it refuses to while other processes work.
//!
//! ONNX Runtime is timed where `SIMPLICIT_PYTHON` (default `python3`) can import it. `SIMPLICIT_RESNET18` names a second
//! convolutional network (ONNX), `SIMPLICIT_RESNET18_MODEL` a trained sparse model of it. Nothing else is read, so the binary
//! also runs on a machine without the repository.

#![allow(clippy::print_stdout, clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::hint::black_box;
use std::process::Command;
use std::time::{Duration, Instant};

use simplicit::equilibrium::{Equilibrium, EquilibriumSettings, Prepared, SampleDiagnostics};
use simplicit::kernels::{
    Aligned, Choice, Cost, FEW, Finish, Grid, GridWeights, Instructions, RowWeights, Samples, thread_seconds,
};
use simplicit::layout::{Activation, Layer, Layout, MapShape};
use simplicit::linalg::{Csr, Matrix};
use simplicit::model::{DenseLayer, ImplicitModel, ModelParts, TapBlock, TapWeights, Target};
use simplicit::network::{Network, Source, Window};
use simplicit::onnx::{OnnxSettings, export_onnx};
use simplicit::parallel::Threads;
use simplicit::random::Random;

const SPARSITIES: [f64; 6] = [0.0, 0.5, 0.65, 0.8, 0.9, 0.95];

/// A part of the page, by name.
type Part = (&'static str, fn(&mut String));
/// What can be asked for; the first four are what is run without a word.
const PARTS: [Part; 8] = [
    ("convolutions", convolutions),
    ("dense", dense),
    ("kernels", kernels),
    ("cycles", cycles),
    ("choice", choice),
    ("threads", threads),
    ("layers", layers),
    ("calibrate", calibrate),
];

/// Runs of every measurement on the page; its numbers are their medians.
const RUNS: usize = 3;

fn main() {
    let asked: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    if let [first, file] = &asked[..]
        && first == "page"
    {
        return page(std::path::Path::new(file));
    }
    let mut run: Vec<_> = PARTS.iter().filter(|(name, _)| asked.iter().any(|a| a == name)).collect();
    if asked.is_empty() {
        run.extend(&PARTS[..4]);
    }
    assert!(asked.len() <= run.len(), "expected some of {:?}, got {asked:?}", PARTS.map(|(name, _)| name));
    for (_, part) in run {
        let mut text = String::new();
        part(&mut text);
        print!("{text}");
    }
}

/// Everything that docs/inference.md shows, on a machine that does nothing else.
fn page(file: &std::path::Path) {
    let mut out = String::new();
    let _ = writeln!(out, "{}", machine());
    for (name, part) in &PARTS[..6] {
        let others = others_use();
        if others > 0.05 {
            println!(
                "{file:?} is not written: other processes use {:.0} % of a core, expected 5 % at most",
                100.0 * others
            );
            std::process::exit(1);
        }
        let _ = writeln!(out, "\n## {name}");
        part(&mut out);
        println!("{name}: done; other processes used {:.1} % of a core before it", 100.0 * others);
    }
    std::fs::write(file, out).unwrap();
}

/// The processor in words.
fn machine() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split(": ").nth(1)).unwrap_or("unknown").to_string()
    };
    let cores = Threads::available().get();
    format!(
        "Machine: {} (family {}, model {}), {cores} cores, {}.",
        field("model name"),
        field("cpu family"),
        field("model\t"),
        Instructions::detect().name()
    )
}

/// Cores that other processes kept busy over five seconds.
fn others_use() -> f64 {
    // Clock ticks of all processes (user, nice, system, interrupts), and of this one with its children.
    let ticks = || {
        let all = std::fs::read_to_string("/proc/stat").unwrap_or_default();
        let numbers = |line: &str| line.split_whitespace().filter_map(|w| w.parse::<f64>().ok()).collect::<Vec<_>>();
        let all = numbers(all.lines().next().unwrap_or_default());
        let busy: f64 = [0, 1, 2, 5, 6].iter().filter_map(|&k| all.get(k)).sum();
        let own = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
        let own = numbers(own.rsplit(')').next().unwrap_or_default());
        // Behind the name: state, then numbers; the twelfth to fifteenth field are times.
        busy - own.iter().skip(10).take(4).sum::<f64>()
    };
    let (start, before) = (Instant::now(), ticks());
    std::thread::sleep(Duration::from_secs(5));
    (ticks() - before).max(0.0) / 100.0 / start.elapsed().as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn header(out: &mut String) {
    let _ = writeln!(out);
    let _ = writeln!(
        out,
        "| network | sparsity | batch | ours µs | ours dense µs | ONNX Runtime µs | faster of both / ours |"
    );
    let _ = writeln!(out, "|---|---|---|---|---|---|---|");
}

/// One model after the other at every batch size, beside the first, which is dense.
fn table(out: &mut String, name: &str, models: &[(String, ImplicitModel)], batches: &[usize]) {
    let inputs = models[0].1.shape().inputs;
    let mut theirs: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    let mut ours: BTreeMap<(usize, usize), Vec<f64>> = BTreeMap::new();
    for &batch in batches {
        let mut random = Random::new(batch as u64);
        let u = Matrix::from_fn(batch, inputs, |_, _| random.uniform() as f32);
        // Packed once: the three runs measure the same weights in the same places.
        let prepared: Vec<_> = models.iter().map(|(_, model)| Prepared::new(model, batch).unwrap()).collect();
        for _ in 0..RUNS {
            for (batch, seconds) in onnx_runtime(&models[0].1, 1, &[batch]) {
                theirs.entry(batch).or_default().push(seconds);
            }
            for (k, prepared) in prepared.iter().enumerate() {
                let seconds = best(|| {
                    black_box(prepared.outputs(black_box(&u), Threads::one()).unwrap());
                });
                ours.entry((batch, k)).or_default().push(seconds);
            }
        }
    }
    for &batch in batches {
        let time = |k: usize| median(ours[&(batch, k)].clone());
        let (dense, ort) = (time(0), theirs.get(&batch).cloned().map(median));
        for (k, (sparsity, _)) in models.iter().enumerate() {
            let _ = writeln!(
                out,
                "| {name} | {sparsity} | {batch} | {:.1} | {:.1} | {} | {:.2} |",
                1e6 * time(k),
                1e6 * dense,
                ort.map_or("–".to_string(), |t| format!("{:.1}", 1e6 * t)),
                ort.unwrap_or(f64::INFINITY).min(dense) / time(k),
            );
        }
    }
}

fn dense(out: &mut String) {
    header(out);
    for sizes in [&[784, 64, 32, 16, 10][..], &[784, 512, 512, 10]] {
        let models: Vec<_> = SPARSITIES.iter().map(|s| (in_percent(*s), model(&network(sizes, *s)))).collect();
        let name = sizes.iter().map(usize::to_string).collect::<Vec<_>>().join("-");
        table(out, &name, &models, &[1, 8, 256]);
    }
}

fn in_percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

/// Milliseconds by the clock on the wall for one to all cores, for batches and for single samples.
fn threads(out: &mut String) {
    let _ = writeln!(out);
    let _ = writeln!(out, "| network | sparsity | batch | threads | ours ms | ONNX Runtime, dense, ms |");
    let _ = writeln!(out, "|---|---|---|---|---|---|");
    let cores = Threads::available().get();
    let counts: Vec<usize> = [1, 2, 4, 8, 16, 32, 64].into_iter().filter(|n| *n <= cores).collect();
    for (name, full) in convolutional() {
        let sparse = thinned(&full, 0.8);
        for batch in [1, 64] {
            let mut random = Random::new(5);
            let u = Matrix::from_fn(batch, full.shape().inputs, |_, _| random.uniform() as f32);
            for &count in &counts {
                let ort = onnx_runtime(&full, count, &[batch])
                    .get(&batch)
                    .map_or("–".into(), |t| format!("{:.2}", 1e3 * t));
                for (sparsity, model) in [("0 %", &full), ("80 %", &sparse)] {
                    let prepared = Prepared::new(model, batch).unwrap();
                    let mut times = Vec::new();
                    let begin = Instant::now();
                    while times.len() < 5 || begin.elapsed() < Duration::from_millis(700) {
                        let start = Instant::now();
                        black_box(prepared.outputs(black_box(&u), Threads::new(count)).unwrap());
                        times.push(start.elapsed().as_secs_f64());
                    }
                    let _ = writeln!(
                        out,
                        "| {name} | {sparsity} | {batch} | {count} | {:.2} | {ort} |",
                        1e3 * median(times)
                    );
                }
            }
        }
    }
}

/// What was chosen for a block beside the faster of its two kernels, over shapes and densities: at most 5 % slower.
fn choice(out: &mut String) {
    let _ = writeln!(out);
    let _ = writeln!(
        out,
        "| layer | samples side by side | chosen over the faster of dense and sparse at 70 % density | 50 % | 35 % | 20 % | 10 % |"
    );
    let _ = writeln!(out, "|---|---|---|---|---|---|---|");
    let mut worst: f64 = 0.0;
    let mut row = |layer: String, lanes: usize, work: &dyn Fn(f64, Option<Choice>) -> Run| {
        let ratios = [0.7, 0.5, 0.35, 0.2, 0.1].map(|density| {
            let mut ways = [Some(Choice::Dense), Some(Choice::Sparse), None].map(|choice| work(density, choice));
            // In turn, so that what disturbs one disturbs the others.
            let mut times = [f64::INFINITY; 3];
            let mut ratio = f64::INFINITY;
            for round in 0..24 {
                for (time, way) in times.iter_mut().zip(&mut ways) {
                    *time = time.min(way(Duration::from_millis(20)));
                }
                ratio = times[2] / times[0].min(times[1]);
                // Again while it looks like more than the clock can tell.
                if round >= 5 && ratio <= 1.03 {
                    break;
                }
            }
            ratio
        });
        worst = ratios.iter().copied().fold(worst, f64::max);
        let cells = ratios.map(|r| format!("{r:.2}")).join(" | ");
        let _ = writeln!(out, "| {layer} | {lanes} | {cells} |");
    };
    for (channels, side, kernel) in [(16, 32, 3), (32, 16, 3), (64, 8, 3), (64, 16, 1), (128, 4, 3)] {
        for lanes in [1, 4, 8, 16] {
            row(convolution_name(channels, side, kernel), lanes, &|density, choice| {
                convolution(channels, side, kernel, lanes, density, choice).1
            });
        }
    }
    for (rows, columns) in [(512, 784), (64, 784), (10, 512), (256, 256)] {
        for lanes in [1, 2, 4, 8, 16, 64] {
            row(format!("{columns} → {rows}"), lanes, &|density, choice| {
                product(rows, columns, lanes, density, choice).1
            });
        }
    }
    let _ = writeln!(out);
    let _ = writeln!(out, "Worst: {worst:.2}.");
}

/// ResNet-20, and ResNet-18 where a file of it is named.
fn convolutional() -> Vec<(&'static str, ImplicitModel)> {
    let directory = tempfile::tempdir().unwrap();
    let bundled = directory.path().join("resnet20.onnx");
    std::fs::write(&bundled, include_bytes!("../../../data/resnet20_cifar100.onnx")).unwrap();
    let mut networks = vec![("ResNet-20", bundled)];
    networks.extend(std::env::var("SIMPLICIT_RESNET18").ok().map(|path| ("ResNet-18", path.into())));
    let open = |path| ImplicitModel::from_network(&Network::from_onnx(path).unwrap()).unwrap();
    networks.into_iter().map(|(name, path)| (name, open(path))).collect()
}

/// Networks for 3 × 32 × 32 images with a random share of their taps set to zero.
fn convolutions(out: &mut String) {
    header(out);
    for (name, full) in convolutional() {
        let mut models: Vec<_> = SPARSITIES.iter().map(|s| (in_percent(*s), thinned(&full, *s))).collect();
        if let Some(path) = std::env::var("SIMPLICIT_RESNET18_MODEL").ok().filter(|_| name == "ResNet-18") {
            let trained = ImplicitModel::load(path).unwrap();
            models.push((format!("trained, {}", in_percent(trained.sparsity().sparsity)), trained));
        }
        table(out, name, &models, &[1, 8, 64]);
    }
}

fn thinned(full: &ImplicitModel, sparsity: f64) -> ImplicitModel {
    let mut random = Random::new(1);
    let mut parts = full.clone().into_parts();
    for block in &mut parts.taps {
        if let TapWeights::Taps(taps) = &block.weights {
            let rows: Vec<Vec<(usize, f32)>> =
                (0..taps.rows()).map(|o| taps.row(o).filter(|_| random.uniform() >= sparsity).collect()).collect();
            block.weights = TapWeights::Taps(Csr::from_rows(taps.cols(), rows));
        }
    }
    ImplicitModel::new(parts).unwrap()
}

/// A kernel to measure: its best seconds of processor time within so long.
type Run = Box<dyn FnMut(Duration) -> f64>;

/// A convolution by one kernel, or by the one that is chosen, as a layer of a prepared model: useful multiply-adds, zeros not
/// counted, and a run of it.
fn convolution(
    channels: usize,
    side: usize,
    kernel: usize,
    lanes: usize,
    density: f64,
    choice: Option<Choice>,
) -> (f64, Run) {
    let map = MapShape { channels, height: side, width: side };
    let (columns, size) = (channels * kernel * kernel, map.size());
    let weights = random_rows(channels, columns, density);
    let work = nonzeros(&weights) * (side * side * lanes) as f64;
    let block = TapBlock {
        target: Target::Layer(0),
        source: Source::Input,
        maps: Vec::new(),
        window: Window::square(kernel, 1, kernel / 2),
        input: map,
        output: map,
        groups: 1,
        weights: TapWeights::Taps(Csr::from_rows(columns, weights)),
    };
    let model = ImplicitModel::new(ModelParts {
        a: Csr::empty(size, size),
        b: Csr::empty(size, size),
        c: Csr::from_rows(size, [vec![(0, 1.0f32)]]),
        d: Csr::empty(1, size),
        state_bias: vec![0.1; channels],
        output_bias: vec![0.0],
        taps: vec![block],
        layout: Layout::new(vec![Layer::map("map", map, Activation::Relu)]),
        ..Default::default()
    });
    let model = model.unwrap();
    let prepared = choice.map_or_else(|| Prepared::new(&model, lanes), |c| Prepared::only(&model, lanes, c)).unwrap();
    let mut random = Random::new(8);
    let u = Matrix::from_fn(lanes, size, |_, _| random.normal() as f32);
    let run = move |time| {
        let (mut best, start) = (f64::INFINITY, Instant::now());
        while best == f64::INFINITY || start.elapsed() < time {
            best = best.min(prepared.layer_seconds(&u, 8).unwrap()[0].seconds);
        }
        best
    };
    (work, Box::new(run))
}

/// The same of a dense layer.
fn product(rows: usize, columns: usize, lanes: usize, density: f64, choice: Option<Choice>) -> (f64, Run) {
    let instructions = Instructions::detect();
    let weights = random_rows(rows, columns, density);
    let work = nonzeros(&weights) * lanes as f64;
    let few = match choice {
        None => RowWeights::new(&weights, columns, Samples::Apart(lanes), instructions),
        Some(choice) if lanes <= FEW => {
            let dense = choice == Choice::Dense;
            Some(RowWeights::only(&weights, columns, Samples::Apart(lanes), instructions, dense))
        }
        _ => None,
    };
    if let Some(packed) = few {
        let (source, mut out, bias) = (random_values(columns * lanes), Aligned::zeros(rows * lanes), vec![0.1; rows]);
        let run = move |time| best_within(time, || packed.run(black_box(&source), &mut out, Some(&bias), true));
        return (work, Box::new(run));
    }
    let cost = Cost::of_grid(instructions, lanes, 1);
    let offsets: Vec<usize> = (0..columns).collect();
    let packed = GridWeights::new(&weights, &offsets, 1, lanes * 4, None, choice.map_or(cost, |c| cost.only(c)));
    let grid = Grid { height: 1, width: 1, lanes, source_row: 1, source_step: 1, out_row: 1, out_channel: 1 };
    (work, grid_run(packed, grid, columns, rows))
}

/// Runs weights over a source of so many positions.
fn grid_run(packed: GridWeights, grid: Grid, positions: usize, rows: usize) -> Run {
    let (source, bias) = (random_values(positions * grid.lanes), vec![0.1; rows]);
    let mut out = Aligned::zeros(rows * grid.out_channel * grid.lanes);
    Box::new(move |time| {
        let finish = Finish { bias: Some(&bias), relu: true, ..Default::default() };
        best_within(time, || packed.run(Instructions::detect(), &grid, black_box(&source), &mut out, &finish))
    })
}

fn random_rows(rows: usize, columns: usize, density: f64) -> Vec<Vec<(usize, f32)>> {
    let mut random = Random::new(7);
    (0..rows).map(|_| (0..columns).filter(|_| random.uniform() < density).map(|j| (j, 0.01)).collect()).collect()
}

fn random_values(length: usize) -> Aligned<f32> {
    let mut random = Random::new(8);
    let mut values = Aligned::zeros(length);
    values.iter_mut().for_each(|v| *v = random.normal() as f32);
    values
}

fn nonzeros(rows: &[Vec<(usize, f32)>]) -> f64 {
    rows.iter().map(Vec::len).sum::<usize>() as f64
}

fn convolution_name(channels: usize, side: usize, kernel: usize) -> String {
    format!("{channels} → {channels}, {side} × {side}, {kernel} × {kernel}")
}

/// Billions of multiply-adds a second.
fn rate((work, mut run): (f64, Run)) -> f64 {
    work / median((0..RUNS).map(|_| run(Duration::from_millis(150))).collect()) / 1e9
}

/// Multiply-adds a second of every kernel beside what the core does on registers alone.
fn kernels(out: &mut String) {
    let peak = peak();
    let _ = writeln!(out);
    let _ = writeln!(
        out,
        "Peak on registers: {peak:.1} G multiply-adds a second, one core, {}; shares are of this peak.",
        Instructions::detect().name()
    );
    let _ = writeln!(out);
    let _ = writeln!(out, "| layer | samples side by side | dense | sparse 50 % | 80 % | 90 % | 95 % |");
    let _ = writeln!(out, "|---|---|---|---|---|---|---|");
    let mut row = |layer: String, lanes: usize, work: &dyn Fn(f64, Choice) -> (f64, Run)| {
        let dense = (1.0, Choice::Dense);
        let cells =
            [dense, (0.5, Choice::Sparse), (0.2, Choice::Sparse), (0.1, Choice::Sparse), (0.05, Choice::Sparse)]
                .map(|(density, choice)| rate(work(density, choice)))
                .map(|rate| format!("{rate:.1} ({:.0} %)", 100.0 * rate / peak));
        let _ = writeln!(out, "| {layer} | {lanes} | {} |", cells.join(" | "));
    };
    for (channels, side, kernel) in [(16, 32, 3), (32, 16, 3), (64, 8, 3), (64, 16, 1), (256, 8, 3)] {
        for lanes in [16, 1] {
            row(convolution_name(channels, side, kernel), lanes, &|density, choice| {
                convolution(channels, side, kernel, lanes, density, Some(choice))
            });
        }
    }
    for lanes in [64, 16, 8, 4, 1] {
        row("784 → 512".into(), lanes, &|density, choice| product(512, 784, lanes, density, Some(choice)));
    }
}

/// Time of a multiply-add of a sparse row over one of a dense panel: the table in `kernels/cost.rs`.
fn calibrate(out: &mut String) {
    let _ = writeln!(out);
    let _ = writeln!(out, "| layer | samples side by side | sparse over dense at 80 % density | 50 % | 30 % | 10 % |");
    let _ = writeln!(out, "|---|---|---|---|---|---|");
    let mut row = |layer: String, lanes: usize, work: &dyn Fn(f64, Choice) -> (f64, Run)| {
        let dense = rate(work(1.0, Choice::Dense));
        let ratios = [0.8, 0.5, 0.3, 0.1].map(|density| dense / rate(work(density, Choice::Sparse)));
        let _ = writeln!(out, "| {layer} | {lanes} | {} |", ratios.map(|r| format!("{r:.2}")).join(" | "));
    };
    for lanes in [1, 2, 4, 8, 16] {
        row(convolution_name(32, 16, 3), lanes, &|density, choice| {
            convolution(32, 16, 3, lanes, density, Some(choice))
        });
    }
    for (rows, columns) in [(512, 784), (64, 784)] {
        for lanes in [1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64] {
            row(format!("{columns} → {rows}"), lanes, &|density, choice| {
                product(rows, columns, lanes, density, Some(choice))
            });
        }
    }
}

/// Time and multiply-adds a second of every layer of the dense networks, beside the peak of the core.
fn layers(out: &mut String) {
    let peak = peak();
    let _ = writeln!(out);
    let _ = writeln!(
        out,
        "Peak on registers: {peak:.1} G multiply-adds a second, one core, {}.",
        Instructions::detect().name()
    );
    for (name, model) in convolutional() {
        for batch in [1, 8, 64] {
            let mut random = Random::new(1);
            let u = Matrix::from_fn(batch, model.shape().inputs, |_, _| random.uniform() as f32);
            let prepared = Prepared::new(&model, batch).unwrap();
            let times = prepared.layer_seconds(&u, 20).unwrap();
            let total: f64 = times.iter().map(|t| t.seconds).sum();
            let _ = writeln!(out);
            let _ = writeln!(out, "{name}, batch {batch}: {:.0} µs in layers", 1e6 * total);
            let _ = writeln!(out);
            let _ = writeln!(out, "| layer | weights | positions | µs | share | G multiply-adds/s | of peak |");
            let _ = writeln!(out, "|---|---|---|---|---|---|---|");
            for time in &times {
                let own: Vec<_> = prepared.kernels().iter().filter(|k| k.layer == time.layer).collect();
                let work: u64 = own.iter().map(|k| k.multiply_adds).sum();
                let rate = work as f64 * batch as f64 / time.seconds / 1e9;
                let shapes: Vec<_> = own.iter().map(|k| format!("{} × {}", k.shape[0], k.shape[1])).collect();
                let _ = writeln!(
                    out,
                    "| {} | {} | {} | {:.1} | {:.1} % | {rate:.1} | {:.0} % |",
                    time.layer,
                    shapes.join(" + "),
                    own.first().map_or(0, |k| k.positions),
                    1e6 * time.seconds,
                    100.0 * time.seconds / total,
                    100.0 * rate / peak,
                );
            }
        }
    }
}

/// Billions of multiply-adds a second on registers alone.
fn peak() -> f64 {
    let (seconds, count) = simplicit::kernels::register_peak(Instructions::detect());
    count as f64 / seconds / 1e9
}

/// One cycle of 112 states on 784 inputs, every row of A at the bound: what the iteration costs.
fn cycles(out: &mut String) {
    let _ = writeln!(out);
    let _ = writeln!(out, "| states | κ | density | batch | ours µs | steps | multiply-adds to tolerance |");
    let _ = writeln!(out, "|---|---|---|---|---|---|---|");
    let (n, p, q, batch) = (112, 784, 10, 256);
    for kappa in [0.5, 0.9, 0.99] {
        for density in [0.2, 0.05] {
            let mut random = Random::new(2);
            let mut sparse = |rows: usize, cols: usize, sum: Option<f64>| {
                let rows: Vec<Vec<(usize, f32)>> = (0..rows)
                    .map(|_| {
                        let row: Vec<f64> = (0..cols)
                            .map(|_| (random.normal(), random.uniform()))
                            .map(|(v, keep)| if keep < density { v / (cols as f64 * density).sqrt() } else { 0.0 })
                            .collect();
                        let total: f64 = row.iter().map(|v| v.abs()).sum();
                        let scale = sum.map_or(1.0, |s| (1.0 - 1e-6) * s / total.max(1e-9));
                        row.iter().enumerate().map(|(j, v)| (j, (v * scale) as f32)).collect()
                    })
                    .collect();
                Csr::from_rows(cols, rows)
            };
            let model = ImplicitModel::new(ModelParts {
                a: sparse(n, n, Some(kappa)),
                b: sparse(n, p, None),
                c: sparse(q, n, None),
                d: sparse(q, p, None),
                state_bias: vec![0.1; n],
                output_bias: vec![0.0; q],
                layout: Layout::new(vec![Layer::dense("x", n, Activation::Relu)]),
                ..Default::default()
            })
            .unwrap();
            let settings = EquilibriumSettings { threads: Threads::one(), ..Default::default() };
            let equilibrium = Equilibrium::new(&model, settings).unwrap();
            let u = Matrix::from_fn(batch, p, |_, _| random.uniform() as f32);
            let solution = equilibrium.outputs(&u).unwrap();
            assert!(simplicit::equilibrium::not_converged(&solution.diagnostics).is_empty());
            let mean =
                |f: fn(&SampleDiagnostics) -> f64| solution.diagnostics.iter().map(f).sum::<f64>() / batch as f64;
            let ours = best(|| {
                black_box(equilibrium.outputs(black_box(&u)).unwrap());
            });
            let _ = writeln!(
                out,
                "| {n} | {kappa} | {:.0} % | {batch} | {:.0} | {:.1} | {:.0} |",
                100.0 * density,
                1e6 * ours,
                mean(|d| d.iterations as f64),
                mean(|d| d.multiply_adds as f64)
            );
        }
    }
}

/// Random weights with a random share set to zero; biases stay.
fn network(sizes: &[usize], sparsity: f64) -> Vec<DenseLayer> {
    let mut random = Random::new(1);
    let count = sizes.len() - 1;
    (0..count)
        .map(|k| {
            let (inputs, outputs) = (sizes[k], sizes[k + 1]);
            let weights = Matrix::from_fn(outputs, inputs, |_, _| {
                let value = random.normal() / (inputs as f64).sqrt();
                if random.uniform() < sparsity { 0.0 } else { value as f32 }
            });
            let activation = if k + 1 < count { Activation::Relu } else { Activation::Identity };
            DenseLayer::new(format!("layer{k}"), weights, activation)
                .with_bias((0..outputs).map(|_| 0.1 * random.normal() as f32).collect())
        })
        .collect()
}

fn model(layers: &[DenseLayer]) -> ImplicitModel {
    let (output, hidden) = layers.split_last().unwrap();
    ImplicitModel::from_layers(hidden, output).unwrap()
}

/// Best seconds of processor time per call over 0.4 seconds.
fn best(work: impl FnMut()) -> f64 {
    best_within(Duration::from_millis(400), work)
}

/// Best seconds of processor time per call over so long and three rounds, in rounds long enough for the clock: one thread works, and
/// what others do on the machine is not counted.
fn best_within(time: Duration, mut work: impl FnMut()) -> f64 {
    let start = Instant::now();
    work();
    let rounds = (Duration::from_millis(2).as_nanos() / start.elapsed().as_nanos().max(1)).clamp(1, 1000) as u32;
    let (mut best, mut done, start) = (f64::INFINITY, 0, Instant::now());
    while done < 3 || start.elapsed() < time {
        done += 1;
        let round = thread_seconds();
        for _ in 0..rounds {
            work();
        }
        best = best.min((thread_seconds() - round) / f64::from(rounds));
    }
    best
}

/// Seconds per batch, empty where ONNX Runtime is not installed: of processor time on one thread, else by the wall.
fn onnx_runtime(model: &ImplicitModel, threads: usize, batches: &[usize]) -> BTreeMap<usize, f64> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("baseline.onnx");
    export_onnx(model, &path, OnnxSettings::default()).unwrap();
    let python = std::env::var("SIMPLICIT_PYTHON").unwrap_or_else(|_| "python3".into());
    let run = Command::new(python)
        .args(["-c", include_str!("../../../bench/inference_ort.py")])
        .arg(&path)
        .arg(threads.to_string())
        .args(batches.iter().map(usize::to_string))
        .output();
    let Ok(run) = run else { return BTreeMap::new() };
    String::from_utf8_lossy(&run.stdout)
        .lines()
        .filter_map(|line| line.split_once(' ').and_then(|(b, t)| Some((b.parse().ok()?, t.parse().ok()?))))
        .collect()
}
