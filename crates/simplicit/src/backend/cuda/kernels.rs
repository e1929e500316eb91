//! Our own kernels: compiled for the device in use, and kept in a cache folder.

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::PathBuf;

use sha2::{Digest, Sha256};

use super::library::{Compiler, Driver, Handle};

/// All kernels: those of rows, of layers, of operators.
const SOURCE: &str = concat!(include_str!("kernels.cu"), include_str!("layers.cu"), include_str!("operators.cu"));

/// The variable that names the folder of compiled kernels; an empty value turns the cache off.
pub const CACHE_VARIABLE: &str = "SIMPLICIT_CACHE";

macro_rules! kernels {
    ($($name:ident),* $(,)?) => {
        /// All kernels, ready to be launched.
        #[derive(Debug)]
        pub(super) struct Kernels {
            $(pub(super) $name: Handle,)*
        }

        impl Kernels {
            /// Loads compiled code; the device's context must be current.
            fn from_code(driver: &Driver, code: &[u8]) -> Result<Self, String> {
                let mut module = std::ptr::null_mut();
                // SAFETY: `code` is a whole cubin; the driver checks it and copies what it needs.
                let status = unsafe { (driver.load_module)(&raw mut module, code.as_ptr().cast::<c_void>()) };
                if status != 0 {
                    return Err(format!("the driver refuses the compiled kernels (error {status})"));
                }
                Ok(Self { $($name: function(driver, module, concat!(stringify!($name), "\0"))?,)* })
            }
        }
    };
}

kernels!(
    invert_diagonal,
    take_columns,
    fill_pivot,
    put_rows,
    fill_ladder,
    to_single,
    start_splitting,
    threshold,
    rescale_dual,
    supports,
    fill_supports,
    clear_padding,
    gather,
    scatter,
    start_residual,
    add_to,
    largest,
    leave,
    sign_columns,
    check,
    choose,
    gather_candidates,
    enter,
    mirror,
    relayout,
    take_rows,
    fill_bias,
    windows,
    fold,
    grouped,
    grouped_back,
    grouped_outer,
    channel_sums,
    add_parts,
    pool,
    pool_back,
    activate,
    gate,
    add_scaled,
    weigh,
    gather_taps,
    gather_units,
    fill_double,
    gather_targets,
    targets_double,
    subtract_residual,
    squares_double,
    squares_single,
    sample_products,
    pick_units,
    sum_units,
    binary_units,
    binary_back,
    product_units,
    softmax_units,
    softmax_back,
    normalise_units,
    normalise_back,
);

fn function(driver: &Driver, module: Handle, name: &str) -> Result<Handle, String> {
    let mut out = std::ptr::null_mut();
    // SAFETY: the name ends in a zero and the module is loaded.
    match unsafe { (driver.get_function)(&raw mut out, module, name.as_ptr().cast::<c_char>()) } {
        0 => Ok(out),
        _ => Err(format!("no kernel {}", name.trim_end_matches('\0'))),
    }
}

impl Kernels {
    /// The kernels for a device of this compute capability, from the cache or freshly compiled.
    pub(super) fn load(driver: &Driver, capability: (c_int, c_int)) -> Result<Self, String> {
        let name = format!("sm_{}{}", capability.0, capability.1);
        let kept = cache_file(&name);
        if let Some(code) = kept.as_ref().and_then(|path| std::fs::read(path).ok())
            && let Ok(kernels) = Self::from_code(driver, &code)
        {
            return Ok(kernels);
        }
        let code = compile(&name)?;
        let kernels = Self::from_code(driver, &code)?;
        if let Some(path) = kept {
            // A cache that cannot be written only costs about a second at the next start.
            let _ = path.parent().map(std::fs::create_dir_all);
            let _ = crate::files::write_bytes_atomically(&path, &code);
        }
        Ok(kernels)
    }
}

/// Where the code for a device is kept: the name contains a hash of the source, so that another version never uses
/// it.
fn cache_file(architecture: &str) -> Option<PathBuf> {
    let folder = match std::env::var_os(CACHE_VARIABLE) {
        Some(folder) if folder.is_empty() => return None,
        Some(folder) => PathBuf::from(folder),
        None => match std::env::var_os("XDG_CACHE_HOME").filter(|folder| !folder.is_empty()) {
            Some(folder) => PathBuf::from(folder).join("simplicit"),
            None => PathBuf::from(std::env::var_os("HOME")?).join(".cache").join("simplicit"),
        },
    };
    let digest = Sha256::digest(SOURCE.as_bytes());
    let digest: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    Some(folder.join(format!("kernels-{architecture}-{digest}.cubin")))
}

fn compile(architecture: &str) -> Result<Vec<u8>, String> {
    let compiler = Compiler::load()?;
    let text = |text: &str| CString::new(text).map_err(|_| "a zero byte in the kernels".to_string());
    let (source, name) = (text(SOURCE)?, text("kernels.cu")?);
    let options = [text(&format!("--gpu-architecture={architecture}"))?, text("--std=c++17")?];
    let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    let mut program = std::ptr::null_mut();
    let none = std::ptr::null();
    // SAFETY: all strings outlive the calls; the program is destroyed once, below.
    let status = unsafe { (compiler.create)(&raw mut program, source.as_ptr(), name.as_ptr(), 0, none, none) };
    if status != 0 {
        return Err(format!("NVRTC cannot start (error {status})"));
    }
    // SAFETY: as above; buffers are as long as NVRTC says.
    let out = unsafe {
        if (compiler.compile)(program, options.len() as c_int, options.as_ptr()) == 0 {
            let mut size = 0;
            (compiler.code_size)(program, &raw mut size);
            let mut code = vec![0u8; size];
            match (compiler.code)(program, code.as_mut_ptr().cast::<c_char>()) {
                0 if size > 0 => Ok(code),
                status => Err(format!("NVRTC gives no code for {architecture} (error {status})")),
            }
        } else {
            let (mut major, mut minor, mut size) = (0, 0, 0);
            (compiler.version)(&raw mut major, &raw mut minor);
            (compiler.log_size)(program, &raw mut size);
            let mut log = vec![0u8; size];
            (compiler.log)(program, log.as_mut_ptr().cast::<c_char>());
            let log = String::from_utf8_lossy(&log);
            let first = log.lines().next().unwrap_or_default().trim_end_matches('\0');
            Err(format!("NVRTC {major}.{minor} cannot compile the kernels for {architecture}: {first}"))
        }
    };
    // SAFETY: created above.
    unsafe { (compiler.destroy)(&raw mut program) };
    out
}
