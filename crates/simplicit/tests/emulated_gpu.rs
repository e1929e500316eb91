//! The kernels of layers on an emulated device: compiled as C++ and run on the host a thread at a time, behind a driver of
//! our own. So their indices, their sums and every buffer's end are checked on machines without a GPU; what only a GPU can
//! show (races, other roundings, speed) is left to `tests/backend.rs`.

#![allow(clippy::unwrap_used, clippy::print_stderr)] // helpers of tests are tests; what is not run is said

#[path = "common/layers.rs"]
mod layers;

use std::path::Path;
use std::process::Command;

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
fn layers_run_forwards_and_backwards_on_an_emulated_device() {
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
    layers::row_weights_are_those_of_the_networks_own_gradients(true);
}
