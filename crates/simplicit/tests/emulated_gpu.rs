//! The kernels of layers and rows on an emulated device: compiled as C++ and run on the host a thread at a time, behind a driver of
//! our own. So their indices, their sums and every buffer's end are checked on machines without a GPU; what only a GPU can
//! show (races, other roundings, speed) is left to `tests/backend.rs`.

#![allow(clippy::unwrap_used, clippy::print_stderr)] // helpers of tests are tests; what is not run is said

#[allow(dead_code)] // the rest is for `tests/backend.rs`
#[path = "common/device_rows.rs"]
mod device_rows;
#[path = "common/layers.rs"]
mod layers;

use std::ffi::c_void;
use std::path::Path;
use std::process::Command;

use simplicit::arrays::{DeviceInputs, InputSource, Preprocessing};
use simplicit::backend::Device;
use simplicit::backend::cuda::{Cuda, LentRows};
use simplicit::layout::Activation;
use simplicit::linalg::Matrix;
use simplicit::model::ImplicitModel;
use simplicit::network::{Network, Shape, Window};
use simplicit::parallel::{Cancel, Threads};
use simplicit::random::Random;
use simplicit::states::Collected;
use simplicit::train::{Forget, ModelSettings, Run, TrainInput, TrainSettings, WorkSettings, importance_on, train};

/// The device as shared libraries in a folder; `None` without a compiler.
fn built() -> Option<tempfile::TempDir> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    let (mut kernels, mut table) = (String::new(), String::new());
    for (file, entry) in [("kernels.cu", "KERNEL"), ("layers.cu", "PLAIN_KERNEL"), ("operators.cu", "PLAIN_KERNEL")] {
        let text = std::fs::read_to_string(root.join("src/backend/cuda").join(file)).unwrap();
        for name in text.split("__global__ void ").skip(1).filter_map(|rest| rest.split('(').next()) {
            table.push_str(&format!("{entry}({name})\n"));
        }
        kernels.push_str(&text);
    }
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("kernels.inc"), kernels).unwrap();
    std::fs::write(path("table.inc"), table).unwrap();
    let quoted = |name: &str| format!("\"{}\"", path(name).display());
    let compiled = Command::new("c++")
        .args(["-O1", "-shared", "-fPIC", "-std=c++17", "-w"])
        .arg(format!("-DKERNELS={}", quoted("kernels.inc")))
        .arg(format!("-DTABLE={}", quoted("table.inc")))
        .arg(root.join("tests/emulated_gpu/device.cpp"))
        .arg("-o")
        .arg(path("libcuda.so.1"))
        .output();
    match compiled {
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => {
            assert!(std::env::var_os("CI").is_none(), "c++: {error}");
            eprintln!("not run: c++ is missing");
            return None;
        }
    }
    for library in ["libcublas.so.12", "libnvrtc.so.12"] {
        std::fs::copy(path("libcuda.so.1"), path(library)).unwrap();
    }
    Some(folder)
}

/// In a process of its own, which finds the emulated device and keeps no compiled kernels.
#[test]
fn layers_and_rows_run_on_an_emulated_device() {
    let Some(folder) = cfg!(target_os = "linux").then(built).flatten() else { return };
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "on_the_device", "--ignored", "--nocapture"])
        .env("SIMPLICIT_CUDA_PATH", folder.path())
        .env("SIMPLICIT_CACHE", "")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
#[ignore = "run by the test above"]
fn on_the_device() {
    layers::outputs_are_the_networks_own(true);
    layers::row_weights_are_those_of_the_cpu(true);
    layers::refits_are_those_of_the_cpu(true);
    let device = Cuda::open(0).unwrap();
    device_rows::more_features_than_samples(&device, 32, 130, 3);
    device_rows::any_size(&device);
    inputs_are_read_where_they_lie();
}

/// Numbers in the device's memory, put there by somebody else; they stay.
#[allow(unsafe_code)]
fn lent(rows: &Matrix<f32>) -> LentRows {
    type Allocate = unsafe extern "C" fn(*mut u64, usize) -> i32;
    type Upload = unsafe extern "C" fn(u64, *const c_void, usize) -> i32;
    let folder = std::env::var_os("SIMPLICIT_CUDA_PATH").unwrap();
    let (numbers, mut address) = (rows.as_slice(), 0);
    // SAFETY: the library is `device.cpp`, whose functions have these types; the memory holds as many bytes as are copied.
    unsafe {
        let driver = libloading::Library::new(Path::new(&folder).join("libcuda.so.1")).unwrap();
        let allocate = driver.get::<Allocate>(b"cuMemAlloc_v2\0").unwrap();
        let upload = driver.get::<Upload>(b"cuMemcpyHtoD_v2\0").unwrap();
        assert_eq!(allocate(&raw mut address, size_of_val(numbers)), 0);
        assert_eq!(upload(address, numbers.as_ptr().cast(), size_of_val(numbers)), 0);
        LentRows::new(0, address, rows.rows(), rows.cols()).unwrap()
    }
}

/// Training on samples in somebody else's memory of the device gives the model that the same samples of the host give.
fn inputs_are_read_where_they_lie() {
    let mut random = Random::new(31);
    let mut weights = |rows: usize, cols: usize| Matrix::from_fn(rows, cols, |_, _| random.normal() as f32 * 0.3);
    let network = Network::builder(Shape::map(2, 5, 5))
        .unwrap()
        .convolution(weights(4, 18), Window::square(3, 1, 1), Some(vec![0.1; 4]))
        .unwrap()
        .activation(Activation::Relu)
        .unwrap()
        .global_average()
        .unwrap()
        .linear(weights(3, 4), None)
        .unwrap()
        .build()
        .unwrap();
    let raw = Matrix::from_fn(70, 50, |_, _| (255.0 * random.uniform()) as f32);
    let spread =
        Preprocessing::new(1.0 / 255.0, vec![0.4, 0.5], vec![0.3, 0.2]).unwrap().per_feature(&[2, 5, 5]).unwrap();
    let indices: Vec<usize> = (0..64).map(|i| (i * 7) % 70).collect();
    let there = DeviceInputs::new(lent(&raw), spread.clone(), Some(&indices)).unwrap();
    let mut here = Matrix::zeros(indices.len(), 50);
    for (k, &i) in indices.iter().enumerate() {
        let row: Vec<f64> = raw.row(i).iter().map(|v| f64::from(*v)).collect();
        spread.apply(&row, here.row_mut(k));
    }
    assert_eq!(InputSource::rows(&there, 3..40).unwrap(), InputSource::rows(&here, 3..40).unwrap());
    assert_eq!(lent(&raw).read(9..11).unwrap().as_slice(), &raw.as_slice()[450..550]);
    let baseline = ImplicitModel::from_network(&network).unwrap();
    let (threads, cancel) = (Threads::one(), Cancel::new());
    let trained = |inputs: &dyn InputSource| {
        let mut run = Run { threads, cancel: &cancel, keep: &Forget, progress: &mut |_| {} };
        let row_weights = importance_on(Device::Cuda(0), &network, inputs, 2, 0, &run).unwrap();
        let source = Collected::new(&network, inputs).unwrap();
        let preprocessing = Preprocessing::default();
        let input =
            TrainInput { source: &source, baseline: Some(&baseline), importance: Some(&row_weights), preprocessing };
        let settings = TrainSettings {
            target_sparsity: Some(0.5),
            model: ModelSettings { output_refit: Some(0), ..Default::default() },
            work: WorkSettings { device: Device::Cuda(0), ..Default::default() },
            ..Default::default()
        };
        let model = train(&input, &settings, &mut run).unwrap().model;
        (row_weights, model.to_bytes())
    };
    assert!(trained(&there) == trained(&here), "the models differ");
    let mut broken = raw.clone();
    broken[(7, 3)] = f32::NAN;
    let message = DeviceInputs::new(lent(&broken), spread, None).unwrap_err().to_string();
    assert!(message.starts_with("U: NaN at row 7, column 3"), "{message}");
}
