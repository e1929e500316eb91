//! Finds CUDA's shared libraries at run time, and the functions that we call in them.
//!
//! Nothing is linked, and nothing is loaded before a GPU is asked for. A missing library or function is an error with
//! its name. Libraries are looked for in the folders given ([`search_in`], the variable `SIMPLICIT_CUDA_PATH`), in
//! the `nvidia` packages that PyTorch installs below these folders, and then where the system's loader looks.

use std::ffi::{OsString, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use libloading::Library;

/// The variable that names folders with CUDA's libraries, or Python's site-packages.
pub const PATH_VARIABLE: &str = "SIMPLICIT_CUDA_PATH";

static FOLDERS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Adds a folder that is searched before the system's: one with the libraries themselves, or a Python's site-packages
/// with `nvidia` packages in it. This applies to GPUs opened later.
pub fn search_in(folder: impl Into<PathBuf>) {
    let mut folders = FOLDERS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    folders.push(folder.into());
}

/// Every folder to look in, those inside `nvidia` packages included.
fn folders() -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> =
        std::env::var_os(PATH_VARIABLE).map(|paths| std::env::split_paths(&paths).collect()).unwrap_or_default();
    roots.extend(FOLDERS.lock().unwrap_or_else(std::sync::PoisonError::into_inner).iter().cloned());
    let mut out = Vec::new();
    for root in roots.into_iter().filter(|root| !root.as_os_str().is_empty()) {
        out.extend(packages(&root));
        out.push(root);
    }
    out
}

/// The folders `nvidia/*/lib` below a site-packages, in the order of their names.
fn packages(root: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(root.join("nvidia")) else { return Vec::new() };
    let mut out: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path().join("lib")).filter(|lib| lib.is_dir()).collect();
    out.sort();
    out
}

/// The first library among these names that loads.
fn open(what: &str, names: &[&str]) -> Result<Library, String> {
    let folders = folders();
    let inside = folders.iter().flat_map(|folder| names.iter().map(move |name| folder.join(name)));
    let paths = inside.filter(|path| path.is_file()).map(PathBuf::into_os_string);
    let mut refusal = None;
    for path in paths.chain(names.iter().map(OsString::from)) {
        // SAFETY: the libraries are NVIDIA's own; their initialisers may run at any time and on any thread.
        match unsafe { Library::new(&path) } {
            Ok(library) => return Ok(library),
            // The error of a file that exists but does not load says more than that of a missing file.
            Err(error) => drop(refusal.get_or_insert_with(|| match std::error::Error::source(&error) {
                Some(cause) => cause.to_string(),
                None => error.to_string(),
            })),
        }
    }
    let why = refusal.map(|text| format!(" ({text})")).unwrap_or_default();
    Err(format!("no {what}{why}"))
}

/// Pointers to CUDA's functions: a struct with one field a function, filled from an open library.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident, $what:literal, $names:expr, $($field:ident = $symbol:literal ($($argument:ty),*);)*) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub(super) struct $table {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> c_int,)*
            /// The pointers are valid as long as the library is loaded.
            _library: Library,
        }

        impl $table {
            pub(super) fn load() -> Result<Self, String> {
                let library = open($what, &$names)?;
                Ok(Self {
                    $($field: {
                        type Function = unsafe extern "C" fn($($argument),*) -> c_int;
                        // SAFETY: the type is that of the function in NVIDIA's header of every version we look for.
                        let symbol = unsafe { library.get::<Function>(concat!($symbol, "\0").as_bytes()) };
                        *symbol.map_err(|_| format!(concat!($what, " has no {}: it is too old"), $symbol))?
                    },)*
                    _library: library,
                })
            }
        }
    };
}

/// An opaque pointer of CUDA's, such as a context or a kernel.
pub(super) type Handle = *mut c_void;
/// An address on the device.
pub(super) type Address = u64;

functions! {
    /// The driver.
    Driver, "NVIDIA driver (libcuda)", ["libcuda.so.1", "libcuda.so", "nvcuda.dll"],
    init = "cuInit"(c_uint);
    version = "cuDriverGetVersion"(*mut c_int);
    device_count = "cuDeviceGetCount"(*mut c_int);
    device_get = "cuDeviceGet"(*mut c_int, c_int);
    device_name = "cuDeviceGetName"(*mut c_char, c_int, c_int);
    device_attribute = "cuDeviceGetAttribute"(*mut c_int, c_int, c_int);
    retain_context = "cuDevicePrimaryCtxRetain"(*mut Handle, c_int);
    set_context = "cuCtxSetCurrent"(Handle);
    synchronize = "cuCtxSynchronize"();
    memory_info = "cuMemGetInfo_v2"(*mut usize, *mut usize);
    allocate = "cuMemAlloc_v2"(*mut Address, usize);
    free = "cuMemFree_v2"(Address);
    upload = "cuMemcpyHtoD_v2"(Address, *const c_void, usize);
    download = "cuMemcpyDtoH_v2"(*mut c_void, Address, usize);
    clear = "cuMemsetD8_v2"(Address, u8, usize);
    load_module = "cuModuleLoadData"(*mut Handle, *const c_void);
    get_function = "cuModuleGetFunction"(*mut Handle, Handle, *const c_char);
    launch = "cuLaunchKernel"(Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void);
    error_name = "cuGetErrorName"(c_int, *mut *const c_char);
}

functions! {
    /// Matrix products.
    Blas, "cuBLAS (libcublas)",
    ["libcublas.so.13", "libcublas.so.12", "libcublas.so.11", "libcublas.so", "cublas64_13.dll", "cublas64_12.dll"],
    create = "cublasCreate_v2"(*mut Handle);
    set_math_mode = "cublasSetMathMode"(Handle, c_int);
    sgemm = "cublasSgemm_v2"(Handle, c_int, c_int, c_int, c_int, c_int, *const f32, Address, c_int, Address, c_int, *const f32, Address, c_int);
    dgemm = "cublasDgemm_v2"(Handle, c_int, c_int, c_int, c_int, c_int, *const f64, Address, c_int, Address, c_int, *const f64, Address, c_int);
    dsyrk = "cublasDsyrk_v2"(Handle, c_int, c_int, c_int, c_int, *const f64, Address, c_int, *const f64, Address, c_int);
    dgemm_batched = "cublasDgemmStridedBatched"(Handle, c_int, c_int, c_int, c_int, c_int, *const f64, Address, c_int, i64, Address, c_int, i64, *const f64, Address, c_int, i64, c_int);
}

functions! {
    /// The compiler of kernels.
    Compiler, "NVRTC (libnvrtc)",
    ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so", "nvrtc64_130_0.dll", "nvrtc64_120_0.dll"],
    version = "nvrtcVersion"(*mut c_int, *mut c_int);
    create = "nvrtcCreateProgram"(*mut Handle, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char);
    destroy = "nvrtcDestroyProgram"(*mut Handle);
    compile = "nvrtcCompileProgram"(Handle, c_int, *const *const c_char);
    log_size = "nvrtcGetProgramLogSize"(Handle, *mut usize);
    log = "nvrtcGetProgramLog"(Handle, *mut c_char);
    code_size = "nvrtcGetCUBINSize"(Handle, *mut usize);
    code = "nvrtcGetCUBIN"(Handle, *mut c_char);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_or_is_none_is_named() {
        let missing = open("thing (libthing)", &["libsimplicit-no-such-library.so.7"]).unwrap_err();
        assert!(missing.starts_with("no thing (libthing)"), "{missing}");
        let folder = tempfile::tempdir().unwrap();
        let inside = folder.path().join("nvidia").join("thing").join("lib");
        std::fs::create_dir_all(&inside).unwrap();
        std::fs::write(inside.join("libsimplicit-broken.so"), "not a library").unwrap();
        assert_eq!(packages(folder.path()), [inside]);
        search_in(folder.path());
        let broken = open("thing", &["libsimplicit-broken.so"]).unwrap_err();
        assert!(broken.contains("libsimplicit-broken.so"), "{broken}");
    }
}
