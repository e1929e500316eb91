//! The JSON that commands write for scripts: one set of keys for all, null where a key does not apply.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use simplicit::backend::{self, Device};
use simplicit::equilibrium::DeviceModel;
use simplicit::files::{OutputFile, write_bytes_atomically};
use simplicit::model::{ImplicitModel, LayerCount};
use simplicit::parallel::Threads;
use simplicit::train::{RowReport, TrainReport, TriedModel};

use crate::args::JsonArgs;
use crate::exit::{emit, say};

/// The keys that every command has, then those of this program.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Results {
    pub(crate) sparsity: Option<f64>,
    pub(crate) nonzeros: Option<u64>,
    pub(crate) baseline_nonzeros: Option<u64>,
    pub(crate) multiply_adds: Option<u64>,
    pub(crate) baseline_multiply_adds: Option<u64>,
    pub(crate) model_bytes: Option<u64>,
    pub(crate) accuracy: Option<f64>,
    pub(crate) baseline_accuracy: Option<f64>,
    pub(crate) rows: Option<usize>,
    pub(crate) rows_at_limit: Option<usize>,
    pub(crate) max_relative_gap: Option<f64>,
    pub(crate) refit_residual: Option<f64>,
    pub(crate) norm_a_inf: Option<f64>,
    pub(crate) lambda_pf_upper: Option<f64>,
    pub(crate) equilibrium_error: Option<f64>,
    pub(crate) not_converged: Option<u64>,
    /// Samples with an output that is NaN or infinite.
    pub(crate) not_finite: Option<u64>,
    /// The first of them, as a row of the outputs.
    #[serde(skip)]
    pub(crate) first_not_finite: Option<usize>,
    /// Accuracy and errors are those of the inputs that were trained on, as no others were given.
    #[serde(skip)]
    pub(crate) on_training_inputs: bool,
    pub(crate) seconds: BTreeMap<String, f64>,
    pub(crate) seed: Option<u64>,
    pub(crate) version: &'static str,
    /// Share of samples for which the model predicts the same class as the baseline: on the test inputs, or on those
    /// held out by `--max-drop`.
    pub(crate) agreement: Option<f64>,
    /// Samples that accuracy, agreement and equilibrium error were measured on.
    pub(crate) samples: Option<usize>,
    /// Share of samples whose label is among the five largest outputs, where there are more than five.
    pub(crate) top5_accuracy: Option<f64>,
    pub(crate) baseline_top5_accuracy: Option<f64>,
    /// Mean of (output − target)² where the labels are targets of a regression.
    pub(crate) mean_squared_error: Option<f64>,
    pub(crate) baseline_mean_squared_error: Option<f64>,
    /// The strength that training ended with: a factor on the penalty, or the price of a non-zero.
    pub(crate) strength: Option<f64>,
    pub(crate) training_error: Option<f64>,
    /// Cardinality rows that have a lower bound, and those of them whose answers are proven optimal.
    pub(crate) rows_bounded: Option<usize>,
    pub(crate) rows_proven: Option<usize>,
    /// (value − bound)/value of cardinality rows against their certified lower bounds: the median and the largest.
    pub(crate) median_bound_distance: Option<f64>,
    pub(crate) max_bound_distance: Option<f64>,
    /// Divergence of the outputs, on inputs that were not fitted, before and after the reconstruction over the next
    /// operations.
    pub(crate) reconstruction_before: Option<f64>,
    pub(crate) reconstruction_after: Option<f64>,
    /// The objective of the refit in the output metric, at its start and at its end.
    pub(crate) output_refit_before: Option<f64>,
    pub(crate) output_refit_after: Option<f64>,
    /// Share of held-out samples that linear bounds certify to keep the baseline's class, before and after the refit by them.
    pub(crate) held_out_certified_before: Option<f64>,
    pub(crate) held_out_certified_after: Option<f64>,
    /// Divergence of the outputs, on inputs that were not fitted, of rough models with one price for all layers and
    /// with the prices of `--allocate`. The factors of these prices follow.
    pub(crate) allocation_before: Option<f64>,
    pub(crate) allocation_after: Option<f64>,
    pub(crate) price_factors: Option<BTreeMap<String, f64>>,
    /// A bound on the largest distance of an output from that of exact arithmetic (`--certified`).
    pub(crate) certified_error: Option<f64>,
    /// Milliseconds per 1,000 samples.
    pub(crate) milliseconds: Option<f64>,
    pub(crate) baseline_milliseconds: Option<f64>,
    pub(crate) threads: Option<usize>,
    /// The solver of the rows: `cpu`, or the name of the GPU.
    pub(crate) device: Option<String>,
    /// Number of rows that the GPU solved.
    pub(crate) rows_on_gpu: Option<usize>,
    /// Operators of the model that have no kernel on that GPU and ran on the CPU.
    pub(crate) operators_on_cpu: Option<Vec<&'static str>>,
    /// The most memory that the process held at one time while it trained, where the system reports it.
    pub(crate) peak_memory_bytes: Option<u64>,
    /// The sparsity of the rows that training solved: parameters that always stay and layers that were left out are
    /// not counted.
    pub(crate) trainable_sparsity: Option<f64>,
    /// Non-zeros that training left as they were.
    pub(crate) kept_nonzeros: Option<u64>,
    /// Layers that training left out, by name.
    pub(crate) kept_layers: Option<Vec<String>>,
    /// Non-zeros per layer, last layer first.
    pub(crate) layers: Vec<LayerCount>,
    /// Details of every row: states, then outputs.
    pub(crate) row_details: Vec<RowDetails>,
    /// The models of the search for a target, in the order they were fitted.
    pub(crate) models_tried: Vec<ModelDetails>,
}

/// A [`TriedModel`] as it is written to a file.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct ModelDetails {
    strength: f64,
    sparsity: f64,
    output_error: f64,
}

impl From<&TriedModel> for ModelDetails {
    fn from(tried: &TriedModel) -> Self {
        Self { strength: tried.strength, sparsity: tried.sparsity, output_error: tried.output_error }
    }
}

impl From<ModelDetails> for TriedModel {
    fn from(tried: ModelDetails) -> Self {
        Self { strength: tried.strength, sparsity: tried.sparsity, output_error: tried.output_error }
    }
}

/// A [`RowReport`] as it is written to a file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct RowDetails {
    name: String,
    nonzeros: usize,
    relative_gap: Option<f64>,
    at_limit: bool,
    relative_residual: Option<f64>,
    /// Absent in files of earlier versions.
    #[serde(default)]
    target_rms: f64,
    bound_distance: Option<f64>,
    /// Absent in files of earlier versions.
    #[serde(default)]
    proven: bool,
    /// Present only where a GPU solved the row.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    on_gpu: bool,
}

impl From<&RowReport> for RowDetails {
    fn from(row: &RowReport) -> Self {
        Self {
            name: row.name.clone(),
            nonzeros: row.nonzeros,
            relative_gap: row.relative_gap,
            at_limit: row.at_limit,
            relative_residual: Some(row.relative_residual).filter(|r| r.is_finite()),
            target_rms: row.target_rms,
            bound_distance: row.bound_distance,
            proven: row.proven,
            on_gpu: row.on_gpu,
        }
    }
}

impl From<RowDetails> for RowReport {
    fn from(row: RowDetails) -> Self {
        Self {
            name: row.name,
            nonzeros: row.nonzeros,
            relative_gap: row.relative_gap,
            at_limit: row.at_limit,
            relative_residual: row.relative_residual.unwrap_or(f64::INFINITY),
            target_rms: row.target_rms,
            bound_distance: row.bound_distance,
            proven: row.proven,
            on_gpu: row.on_gpu,
        }
    }
}

impl Results {
    /// Results in which only the version is known.
    pub(crate) fn new() -> Self {
        Self { version: env!("CARGO_PKG_VERSION"), ..Self::default() }
    }

    /// Counts and well-posedness of the stored model.
    pub(crate) fn of_model(model: &ImplicitModel) -> Self {
        let (sparsity, posed) = (model.sparsity(), model.well_posedness());
        Self {
            sparsity: Some(sparsity.sparsity),
            nonzeros: Some(sparsity.nonzeros),
            baseline_nonzeros: Some(sparsity.baseline_nonzeros),
            multiply_adds: Some(sparsity.multiply_adds),
            baseline_multiply_adds: sparsity.baseline_multiply_adds,
            model_bytes: Some(sparsity.bytes),
            norm_a_inf: Some(posed.norm_a_inf),
            lambda_pf_upper: Some(posed.lambda_pf_upper),
            trainable_sparsity: Some(sparsity.trainable_sparsity),
            kept_nonzeros: Some(sparsity.fixed),
            kept_layers: Some(model.metadata().kept.clone()),
            layers: sparsity.layers,
            ..Self::new()
        }
    }

    /// Adds what training reported.
    pub(crate) fn add_training(&mut self, report: &TrainReport) {
        self.rows = Some(report.rows.len());
        self.rows_at_limit = Some(report.rows_at_limit());
        self.max_relative_gap = report.max_relative_gap();
        self.refit_residual = Some(report.refit_residual());
        self.strength = Some(report.strength);
        self.training_error = Some(report.training_error);
        self.rows_bounded = report.rows_bounded();
        self.rows_proven = report.rows_proven();
        self.median_bound_distance = report.median_bound_distance();
        self.max_bound_distance = report.max_bound_distance();
        self.reconstruction_before = report.reconstruction.map(|r| r.held_out_before);
        self.reconstruction_after = report.reconstruction.map(|r| r.held_out_after);
        self.output_refit_before = report.output_refit.map(|r| r.before);
        self.output_refit_after = report.output_refit.map(|r| r.after);
        self.held_out_certified_before = report.bound_refit.map(|r| r.held_out_before);
        self.held_out_certified_after = report.bound_refit.map(|r| r.held_out_after);
        let allocation = report.allocation.as_ref();
        self.allocation_before = allocation.map(|a| a.before);
        self.allocation_after = allocation.map(|a| a.after);
        self.price_factors = allocation.map(|a| a.factors.iter().cloned().collect());
        self.agreement = report.agreement;
        self.peak_memory_bytes = simplicit::memory::peak();
        self.row_details = report.rows.iter().map(RowDetails::from).collect();
        self.models_tried =
            report.path.iter().filter(|tried| tried.output_error.is_finite()).map(ModelDetails::from).collect();
    }

    /// Adds which device solved the rows, if this was asked for.
    pub(crate) fn add_device(
        &mut self,
        asked: &str,
        report: &TrainReport,
        model: Option<&ImplicitModel>,
    ) -> anyhow::Result<()> {
        let rows = report.rows.iter().filter(|row| row.on_gpu).count();
        let device = if rows > 0 { asked.parse()? } else { Device::Cpu };
        if let Some(model) = model {
            self.operators_on_cpu = DeviceModel::on(device, model, Threads::one())?.map(|m| m.on_cpu());
        }
        self.device = Some(backend::name(device));
        self.rows_on_gpu = Some(rows);
        Ok(())
    }

    /// Messages that a script must see; they lead to exit code 1.
    pub(crate) fn notices(&self) -> Vec<String> {
        let mut notices = Vec::new();
        if let Some(count) = self.rows_at_limit.filter(|n| *n > 0) {
            let gap = self.max_relative_gap.unwrap_or(f64::NAN);
            notices.push(format!("{count} row(s) ended at a limit, largest relative gap {gap:.1e}"));
        }
        if let Some(count) = self.not_converged.filter(|n| *n > 0) {
            notices.push(format!("the equilibrium of {count} sample(s) was not reached"));
        }
        if let Some(first) = self.first_not_finite {
            let count = self.not_finite.unwrap_or(1);
            notices.push(format!(
                "outputs of {count} sample(s) are no finite numbers (NaN or infinite), first in row {first}; check these inputs"
            ));
        }
        notices
    }

    /// The results as JSON.
    pub(crate) fn text(&self) -> anyhow::Result<String> {
        text(self)
    }

    /// Writes the JSON file, then prints on stdout.
    pub(crate) fn deliver(&self, json: &JsonArgs, table: &str) -> anyhow::Result<()> {
        deliver(self, json, table)
    }

    /// Prints the table on stdout, or the JSON in its place.
    pub(crate) fn print(&self, json: &JsonArgs, table: &str) -> anyhow::Result<()> {
        print(self, json, table)
    }
}

fn text(results: &impl Serialize) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(results)? + "\n")
}

/// For results of any kind: writes the JSON file, then prints on stdout.
pub(crate) fn deliver(results: &impl Serialize, json: &JsonArgs, table: &str) -> anyhow::Result<()> {
    if let Some(path) = json.file() {
        write_bytes_atomically(path, text(results)?.as_bytes())?;
    }
    print(results, json, table)
}

/// The table on stdout, or the JSON in its place; JSON that was asked for by name is printed even with --quiet.
fn print(results: &impl Serialize, json: &JsonArgs, table: &str) -> anyhow::Result<()> {
    if json.to_stdout() {
        emit(&text(results)?)?;
    } else {
        say(table)?;
    }
    Ok(())
}

/// Several files that appear together: all of them are written to the disk before the first is renamed to its final
/// name.
#[derive(Default)]
pub(crate) struct Staged(Vec<OutputFile>);

impl Staged {
    /// Writes one more file under a temporary name.
    pub(crate) fn stage(&mut self, path: &Path, bytes: &[u8]) -> anyhow::Result<&mut Self> {
        let mut file = OutputFile::create(path)?;
        file.write(bytes)?;
        self.0.push(file);
        Ok(self)
    }

    /// Writes one more file if a path is given.
    pub(crate) fn stage_optional(&mut self, path: Option<&Path>, bytes: &[u8]) -> anyhow::Result<&mut Self> {
        match path {
            Some(path) => self.stage(path, bytes),
            None => Ok(self),
        }
    }

    /// Gives all files their final names, in order.
    pub(crate) fn finish(&mut self) -> anyhow::Result<()> {
        for file in self.0.drain(..) {
            file.finish()?;
        }
        Ok(())
    }
}

/// Measures the seconds of every phase and of the whole command.
pub(crate) struct Stopwatch {
    begin: Instant,
    phase: Instant,
    seconds: BTreeMap<String, f64>,
}

impl Stopwatch {
    pub(crate) fn start() -> Self {
        Self { begin: Instant::now(), phase: Instant::now(), seconds: BTreeMap::new() }
    }

    /// Counts all time since the last call as part of this phase.
    pub(crate) fn lap(&mut self, phase: &str) {
        *self.seconds.entry(phase.to_string()).or_default() += self.phase.elapsed().as_secs_f64();
        self.phase = Instant::now();
    }

    /// The seconds of every phase and their `total`.
    pub(crate) fn seconds(&self) -> BTreeMap<String, f64> {
        let mut seconds = self.seconds.clone();
        seconds.insert("total".into(), self.begin.elapsed().as_secs_f64());
        seconds
    }
}
