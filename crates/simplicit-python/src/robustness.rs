//! Attacks and certificates for Python, as `simplicit attack` and `simplicit certify` have them.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use simplicit::Error;
use simplicit::attack::{self, AttackInput, AttackSettings, Classifier, Gradient, Method};
use simplicit::certify::{self, CertifySettings};

use crate::arrays::Lent;
use crate::door::{self, enter};
use crate::errors::of_library;
use crate::model::Model;
use crate::network::Network;

fn methods(names: &[String]) -> Result<Vec<Method>, Error> {
    let method = |name: &String| match name.as_str() {
        "fgsm" => Ok(Method::Fgsm),
        "pgd" => Ok(Method::Pgd),
        "square" => Ok(Method::Square),
        other => Err(Error::setting("method", "fgsm, pgd or square", other)),
    };
    names.iter().map(method).collect()
}

/// Accuracy under attack, for raw inputs and their classes.
#[pyfunction]
#[pyo3(signature = (model, u, labels, *, baseline=None, epsilon, methods, pixels, iterations, restarts, step, queries, seed, norm="linf", threads=None))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn attack_model<'py>(
    py: Python<'py>,
    model: &Bound<'py, Model>,
    u: Lent<'py>,
    labels: Vec<u32>,
    baseline: Option<&Bound<'py, PyAny>>,
    epsilon: Vec<f64>,
    methods: Vec<String>,
    pixels: f64,
    iterations: usize,
    restarts: usize,
    step: Option<f64>,
    queries: usize,
    seed: u64,
    norm: &str,
    threads: Option<usize>,
) -> PyResult<Bound<'py, PyDict>> {
    let model = model.get().model.clone();
    let inputs = u.inputs(model.preprocessing(), model.input_axes().as_deref())?;
    let per_feature = inputs.per_feature().clone();
    let sample_shape = inputs.sample_shape().to_vec();
    let methods = self::methods(&methods).map_err(|e| of_library(&e))?;
    let norm = norm_of(norm)?;
    let source = match baseline {
        None => None,
        Some(object) => Some(match object.cast::<Network>() {
            Ok(network) => Classifier::of_network(&network.get().network).map_err(|e| of_library(&e))?,
            Err(_) => {
                let other = object.cast::<Model>().map_err(|_| {
                    of_library(&Error::setting("baseline", "a network or an implicit model", object.get_type()))
                })?;
                Classifier::new(&other.get().model).map_err(|e| of_library(&e))?
            }
        }),
    };
    let threads = door::threads(threads);
    let report = enter(py, None, |inside| {
        let target = Classifier::new(&model)?;
        let baseline = source.as_ref();
        let gradients =
            if baseline.is_some() { vec![Gradient::Baseline, Gradient::Model] } else { vec![Gradient::Model] };
        let settings =
            AttackSettings { epsilon, methods, gradients, pixels, step, iterations, restarts, queries, seed, norm };
        let input = AttackInput {
            target: &target,
            baseline,
            inputs: &inputs,
            labels: &labels,
            per_feature: &per_feature,
            sample_shape: &sample_shape,
        };
        Ok(attack::attack(&input, &settings, threads, inside.cancel, |_| {})?)
    })?;
    let out = PyDict::new(py);
    out.set_item("epsilon", report.epsilon)?;
    out.set_item("samples", report.samples)?;
    out.set_item("clean_accuracy", report.clean_accuracy)?;
    out.set_item("attacked_accuracy", report.attacked_accuracy)?;
    let attacks: Vec<(String, Option<String>, Vec<f64>)> = report
        .attacks
        .into_iter()
        .map(|a| (a.method.to_string(), a.gradient.map(|g| g.to_string()), a.accuracy))
        .collect();
    out.set_item("attacks", attacks)?;
    out.set_item("fooled", report.fooled)?;
    Ok(out)
}

fn norm_of(name: &str) -> PyResult<attack::Norm> {
    match name {
        "linf" => Ok(attack::Norm::Linf),
        "l2" => Ok(attack::Norm::L2),
        other => Err(of_library(&Error::setting("norm", "linf or l2", other))),
    }
}

/// Accuracy that no perturbation can take away.
#[pyfunction]
#[pyo3(signature = (model, u, labels, *, epsilon, bound, slopes=0, norm="linf", arithmetic="single", work=2.2e12, threads=None))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn certify_model<'py>(
    py: Python<'py>,
    model: &Bound<'py, Model>,
    u: Lent<'py>,
    labels: Vec<u32>,
    epsilon: Vec<f64>,
    bound: &str,
    slopes: usize,
    norm: &str,
    arithmetic: &str,
    work: f64,
    threads: Option<usize>,
) -> PyResult<Bound<'py, PyDict>> {
    let model = model.get().model.clone();
    let inputs = u.inputs(model.preprocessing(), model.input_axes().as_deref())?;
    let arithmetic = match arithmetic {
        "single" => certify::Arithmetic::Single,
        "any-order" => certify::Arithmetic::AnyOrder,
        "exact" => certify::Arithmetic::Exact,
        other => return Err(of_library(&Error::setting("arithmetic", "single, any-order or exact", other))),
    };
    let bound = match bound {
        "global" => certify::Bound::Global,
        "interval" => certify::Bound::Interval,
        "linear" if slopes > 0 => certify::Bound::Slopes,
        "linear" => certify::Bound::Linear,
        other => return Err(of_library(&Error::setting("bound", "global, interval or linear", other))),
    };
    let norm = norm_of(norm)?;
    let threads = door::threads(threads);
    let report = enter(py, None, |inside| {
        let settings = CertifySettings { epsilon, bound, slopes, norm, arithmetic, work: work as u64 };
        let (per_feature, cancel) = (inputs.per_feature(), inside.cancel);
        Ok(certify::certify(&model, &inputs, &labels, per_feature, &settings, threads, cancel, |_| {})?)
    })?;
    let out = PyDict::new(py);
    out.set_item("epsilon", report.epsilon)?;
    out.set_item("samples", report.samples)?;
    out.set_item("clean_accuracy", report.clean_accuracy)?;
    out.set_item("certified_accuracy", report.certified_accuracy)?;
    let by_bound: Vec<(String, Vec<f64>)> =
        report.by_bound.into_iter().map(|(bound, accuracy)| (bound.to_string(), accuracy)).collect();
    out.set_item("by_bound", by_bound)?;
    out.set_item("certified", report.certified)?;
    out.set_item("not_converged", report.not_converged)?;
    out.set_item("given_up", report.given_up)?;
    Ok(out)
}
