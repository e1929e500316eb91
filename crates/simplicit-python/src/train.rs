//! Training and the report, through the same code as the command line.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use simplicit::Error;
use simplicit::arrays::{
    Array, Augment, Augmented, DeviceInputs, Element, InputSource, Labels, Preprocessing, Selection, require_order,
};
use simplicit::layout::{Activation, Layer, Layout};
use simplicit::problem::Mask;
use simplicit::states::StateSource;
use simplicit::train::{Checkpoint, Forget, Keep};
use simplicit_cli::front::{self, Baseline, Found, Remote, Run, Samples, Training};

use crate::arrays::{Lent, ViewInputs, ViewStates};
use crate::delegate::Engine;
use crate::dlpack::{Tensor, on_gpu};
use crate::door::{self, enter};
use crate::errors::{of_any, of_library};
use crate::model::Model;
use crate::network::Network;

/// U, Z, X, Y with a layout (JSON) or an activation, and the baseline's non-zeros.
#[derive(FromPyObject)]
pub(crate) struct GivenStates<'py>(Lent<'py>, Lent<'py>, Lent<'py>, Lent<'py>, Option<String>, String, Option<u64>);

impl GivenStates<'_> {
    pub(crate) fn source(&self) -> PyResult<ViewStates<'_>> {
        let GivenStates(u, z, x, y, layout, activation, nonzeros) = self;
        let numbers = [u.numbers(), z.numbers(), x.numbers(), y.numbers()];
        let source = || {
            let (layout, known) = match layout {
                Some(text) => (Layout::from_json(text)?, true),
                None => {
                    let activation = Activation::try_from(activation.clone())?;
                    (Layout::new(vec![Layer::dense("states", numbers[1].features(), activation)]), false)
                }
            };
            ViewStates::new(numbers, layout, known, *nonzeros)
        };
        source().map_err(|e| of_library(&e))
    }
}

/// A `Network` or a `Model`.
pub(crate) fn baseline_of(object: &Bound<'_, PyAny>) -> PyResult<Baseline> {
    if let Ok(network) = object.cast::<Network>() {
        let network = network.get();
        return Ok(Baseline::of_network(network.network.clone(), network.bytes));
    }
    match object.cast::<Model>() {
        Ok(model) => Baseline::of_model(model.get().model.as_ref().clone()).map_err(|e| of_any(&e)),
        Err(_) => Err(of_library(&Error::setting("baseline", "a network or an implicit model", object.get_type()))),
    }
}

fn mask_of(mask: &Lent<'_>) -> Mask {
    let numbers = mask.numbers();
    Mask::from_pattern(&numbers.block(0..numbers.samples()))
}

/// Inputs in host memory or on a GPU.
enum Given<'py> {
    Host(Lent<'py>),
    Device(Tensor<'py>),
}

impl<'py> Given<'py> {
    fn of(object: &Bound<'py, PyAny>) -> PyResult<Self> {
        match on_gpu(object).then(|| Tensor::of(object)).transpose()?.flatten() {
            Some(tensor) => Ok(Self::Device(tensor)),
            None => object.extract().map(Self::Host),
        }
    }

    fn samples(&self) -> usize {
        match self {
            Self::Host(lent) => lent.numbers().samples(),
            Self::Device(tensor) => tensor.shape().first().copied().unwrap_or(0),
        }
    }

    /// The inputs, with changed copies of the images if they are asked for.
    fn inputs(
        &self,
        preprocessing: &Preprocessing,
        indices: Option<Vec<usize>>,
        how: Option<(Augment, u64)>,
        axes: Option<&[usize]>,
    ) -> PyResult<Box<dyn InputSource + '_>> {
        let library = |e: Error| of_library(&e);
        match self {
            Self::Host(lent) => {
                let inputs = ViewInputs::new(lent.numbers(), preprocessing, indices, axes).map_err(library)?;
                let Some((augment, seed)) = how else { return Ok(Box::new(inputs)) };
                let (shape, spread) = (inputs.sample_shape().to_vec(), inputs.per_feature().clone());
                Ok(Box::new(Augmented::new(inputs, &shape, &spread, augment, seed).map_err(library)?))
            }
            Self::Device(tensor) => {
                let (rows, shape) = (tensor.rows()?, tensor.shape().get(1..).unwrap_or_default());
                axes.map_or(Ok(()), |axes| require_order("U", shape, axes)).map_err(library)?;
                let spread = preprocessing.per_feature(shape).map_err(library)?;
                let inputs = DeviceInputs::new(rows, spread.clone(), indices.as_deref()).map_err(library)?;
                let Some((augment, seed)) = how else { return Ok(Box::new(inputs)) };
                // Copies are made on the CPU, from images that are read once.
                let host = inputs.rows(0..inputs.samples()).map_err(library)?;
                Ok(Box::new(Augmented::new(host, shape, &spread, augment, seed).map_err(library)?))
            }
        }
    }
}

/// Trains on a baseline with inputs, or on states. Returns the model, its results (JSON) and the notices for the
/// user.
#[pyfunction]
#[pyo3(signature = (flags, baseline, u, states, *, own=None, mask=None, threads=None, checkpoint=None, hashes=None, progress=None, engine=None))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn train<'py>(
    py: Python<'py>,
    flags: Vec<String>,
    baseline: Option<&Bound<'py, PyAny>>,
    u: Option<&Bound<'py, PyAny>>,
    states: Option<GivenStates<'py>>,
    own: Option<&str>,
    mask: Option<Lent<'py>>,
    threads: Option<usize>,
    checkpoint: Option<PathBuf>,
    hashes: Option<BTreeMap<String, String>>,
    progress: Option<&Bound<'py, PyAny>>,
    engine: Option<&Bound<'py, PyAny>>,
) -> PyResult<(Model, String, Vec<String>)> {
    let baseline = baseline.map(baseline_of).transpose()?;
    let states = states.as_ref().map(GivenStates::source).transpose()?;
    let own: Option<Preprocessing> = own.map(serde_json::from_str).transpose().map_err(|e| of_any(&e.into()))?;
    let mask = mask.as_ref().map(mask_of);
    let units = match (&baseline, &states) {
        (Some(baseline), None) => baseline.map().shape().states,
        (None, Some(states)) => states.shape().states,
        _ => return Err(of_library(&Error::setting("fit", "a baseline with inputs, or states", "something else"))),
    };
    let training = Training::new(&flags, baseline.as_ref(), units, own.as_ref(), mask).map_err(|e| of_any(&e))?;
    let mut chosen = None;
    let given = u.map(Given::of).transpose()?;
    let inputs = match &given {
        Some(u) => {
            let indices = training.selection().indices(u.samples()).map_err(|e| of_library(&e))?;
            chosen.clone_from(&indices);
            let axes = baseline.as_ref().and_then(Baseline::axes);
            Some(u.inputs(training.preprocessing(), indices, training.augment(), axes.as_deref())?)
        }
        None => None,
    };
    if engine.is_some() && training.augment().is_some() {
        let expected = "None with an engine, whose workers read the images themselves";
        return Err(of_library(&Error::setting("augment", expected, "an augmentation")));
    }
    let samples = match (&baseline, &inputs, &states) {
        (Some(baseline), Some(inputs), None) => Samples::Inputs(baseline, inputs.as_ref()),
        (None, None, Some(states)) => Samples::States(states),
        _ => return Err(of_library(&Error::setting("fit", "a baseline with inputs, or states", "something else"))),
    };
    let threads = door::threads(threads);
    let hashes = hashes.unwrap_or_default();
    let raised = Mutex::new(None);
    let engine = match engine {
        // The engine's workers need the settings as they were decided.
        Some(engine) => {
            let decided = training.decided().map_err(|e| of_any(&e))?;
            let preprocessing = serde_json::to_string(training.preprocessing()).map_err(|e| of_any(&e.into()))?;
            let moved = baseline.as_ref().map(|b| training.moved(b)).transpose().map_err(|e| of_any(&e))?.flatten();
            engine.call_method1("begin", (decided, preprocessing, chosen, moved.map(Model::of)))?;
            Some(engine.clone().unbind())
        }
        None => None,
    };
    let trained = enter(py, progress, |inside| {
        let kept = match &checkpoint {
            Some(directory) => {
                let mut fingerprint = hashes.clone();
                fingerprint.insert("settings".into(), training.decided()?);
                fingerprint.insert("preprocessing".into(), serde_json::to_string(training.preprocessing())?);
                Some(Checkpoint::open(directory, &fingerprint)?)
            }
            None => None,
        };
        let store: &dyn Keep = kept.as_ref().map_or(&Forget, |checkpoint| checkpoint);
        let elsewhere = engine.map(|object| Remote::new(Engine { object, raised: &raised }, inside.cancel, store));
        let keep = elsewhere.as_ref().map_or(store, |engine| engine);
        training.run(&samples, &hashes, &Run { threads, cancel: inside.cancel, keep, listener: inside.tell })
    });
    if let Some(error) = raised.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    let trained = trained?;
    Ok((Model::of(trained.model), trained.results, trained.notices))
}

/// The HTML page of `simplicit report`.
#[pyfunction]
#[pyo3(signature = (title, model, *, baseline=None, results=None, attack=None, certify=None, u=None, labels=None, threads=None))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn page<'py>(
    py: Python<'py>,
    title: &str,
    model: &Bound<'py, Model>,
    baseline: Option<&Bound<'py, PyAny>>,
    results: Option<&str>,
    attack: Option<&str>,
    certify: Option<&str>,
    u: Option<Lent<'py>>,
    labels: Option<Vec<u32>>,
    threads: Option<usize>,
) -> PyResult<String> {
    let model = model.get().model.clone();
    let baseline = baseline.map(baseline_of).transpose()?;
    let inputs = u.as_ref().map(|u| u.inputs(model.preprocessing(), model.input_axes().as_deref())).transpose()?;
    let labels = labels.map(|values| {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let array = Array::from_le_bytes("labels", Element::U32, &[values.len()], bytes)?;
        Labels::from_array(&array, &Selection::all())
    });
    let labels = labels.transpose().map_err(|e| of_library(&e))?;
    let threads = door::threads(threads);
    enter(py, None, |inside| {
        let inputs = inputs.as_ref().map(|inputs| inputs as &dyn simplicit::states::InputSource);
        let found = Found { training: results, attack, certify };
        front::page(title, &model, baseline.as_ref(), found, inputs, labels.as_ref(), threads, inside.cancel)
    })
}
