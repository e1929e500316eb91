//! One NVIDIA GPU, found and loaded at run time: a build needs no CUDA, and a machine without a GPU runs the same binary.
//!
//! We bind about forty functions ourselves instead of using a crate. A library may then come from any folder (such as
//! PyTorch's packages) in any version, and a missing one is an error, never a panic. Products are cuBLAS's (f32 with
//! TF32 off, f64), everything else is in `kernels.cu`.
#![allow(unsafe_code)]

mod dense;
mod inverse;
mod kernels;
mod layers;
mod lent;
mod library;
mod memory;
mod moves;
mod operators;
mod rows;
mod statistics;
mod work;

pub use kernels::CACHE_VARIABLE;
pub(crate) use layers::{Geometry, Operand, Phi, PoolKind, Values};
pub use lent::LentRows;
pub use library::{PATH_VARIABLE, search_in};
pub(crate) use memory::Buffer;
pub use memory::MEMORY_VARIABLE;
pub(crate) use operators::{Pairwise, Products, UnitMap};
pub(crate) use statistics::{Block, Places, Sums};
pub use work::{Peaks, Phase, Work};

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kernels::Kernels;
use library::{Blas, Driver, Handle};

use crate::{Error, Result};

/// The oldest driver that works: CUDA 11.2 has every function we call.
const OLDEST_DRIVER: c_int = 11020;
/// The driver's attribute numbers of the compute capability, major and minor.
const CAPABILITY: [c_int; 2] = [75, 76];
/// cuBLAS's default mathematics: f32 is f32, no TF32.
const DEFAULT_MATH: c_int = 0;
/// Threads per block of most kernels.
const THREADS: usize = 256;

/// An open GPU.
pub struct Cuda {
    driver: Driver,
    blas: Blas,
    kernels: Kernels,
    context: Handle,
    handle: Handle,
    number: usize,
    name: String,
    /// Blocks that were allocated and are free again, and the limit on memory.
    pool: Mutex<memory::Pool>,
    /// Held by the one session at a time that may use the device, because buffers and handles are not shared.
    turn: Mutex<()>,
    /// The parts of the group that was solved last, with their times.
    phases: Mutex<Vec<Phase>>,
    /// The work counted since the GPU was opened.
    work: Mutex<Work>,
}

// SAFETY: the driver's handles may be used from any thread once the context is current there, which `Session` sees to,
// one thread at a time.
unsafe impl Send for Cuda {}
// SAFETY: as above; every use goes through `turn`.
unsafe impl Sync for Cuda {}

impl std::fmt::Debug for Cuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cuda").field("number", &self.number).field("name", &self.name).finish_non_exhaustive()
    }
}

impl Cuda {
    /// Opens a GPU, at most once per process; it and the libraries stay open.
    pub fn open(number: usize) -> Result<&'static Self> {
        static OPEN: Mutex<Vec<(usize, &'static Cuda)>> = Mutex::new(Vec::new());
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, cuda)) = open.iter().find(|(n, _)| *n == number) {
            return Ok(cuda);
        }
        let refused = |problem: String| Error::Device { device: format!("cuda:{number}"), problem };
        let cuda: &'static Self = Box::leak(Box::new(Self::load(number).map_err(refused)?));
        open.push((number, cuda));
        Ok(cuda)
    }

    fn load(number: usize) -> Result<Self, String> {
        let driver = Driver::load()?;
        let check = |what: &str, status: c_int| match status {
            0 => Ok(()),
            status => Err(format!("{what}: {}", error_name(&driver, status))),
        };
        // SAFETY: the signatures are the driver's; every pointer is to a live local of the right type.
        let (context, name, capability) = unsafe {
            check("the driver does not start", (driver.init)(0))?;
            let mut version = 0;
            check("the driver's version", (driver.version)(&raw mut version))?;
            if version < OLDEST_DRIVER {
                let [needed, got] = [OLDEST_DRIVER, version].map(|v| format!("{}.{}", v / 1000, v % 1000 / 10));
                return Err(format!("the driver is too old: it must know CUDA {needed}, and knows {got}"));
            }
            let mut count = 0;
            check("number of GPUs", (driver.device_count)(&raw mut count))?;
            let ordinal = c_int::try_from(number).ok().filter(|n| *n < count);
            let Some(ordinal) = ordinal else { return Err(format!("there are {count} GPU(s), counted from 0")) };
            let mut device = 0;
            check("the GPU", (driver.device_get)(&raw mut device, ordinal))?;
            let mut name = [0 as c_char; 256];
            check("the GPU's name", (driver.device_name)(name.as_mut_ptr(), 255, device))?;
            let mut capability = [0; 2];
            for (value, attribute) in capability.iter_mut().zip(CAPABILITY) {
                check("compute capability", (driver.device_attribute)(&raw mut *value, attribute, device))?;
            }
            let mut context = std::ptr::null_mut();
            check("the GPU cannot be used", (driver.retain_context)(&raw mut context, device))?;
            check("the GPU cannot be used", (driver.set_context)(context))?;
            (context, CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned(), capability)
        };
        let blas = Blas::load()?;
        let kernels = Kernels::load(&driver, (capability[0], capability[1]))?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the context is current; the handle stays for as long as the process does.
        let status = unsafe {
            match (blas.create)(&raw mut handle) {
                0 => (blas.set_math_mode)(handle, DEFAULT_MATH),
                status => status,
            }
        };
        if status != 0 {
            return Err(format!("cuBLAS does not start (status {status})"));
        }
        Ok(Self {
            driver,
            blas,
            kernels,
            context,
            handle,
            number,
            name,
            pool: Mutex::new(memory::Pool::new()?),
            turn: Mutex::new(()),
            phases: Mutex::default(),
            work: Mutex::default(),
        })
    }

    /// The name of the GPU, such as `NVIDIA H200`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The device as users write it, with its name, such as `cuda:0 (NVIDIA H200)`.
    pub fn describe(&self) -> String {
        format!("cuda:{} ({})", self.number, self.name)
    }

    /// Free and total memory of the device, in bytes.
    pub fn memory(&'static self) -> Result<(usize, usize)> {
        self.session()?.memory()
    }

    /// Makes the device current on this thread until the session ends.
    pub(crate) fn session(&'static self) -> Result<Session> {
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let session = Session { cuda: self, _turn: turn };
        // SAFETY: the context lives as long as `self`.
        session.driver("the context", unsafe { (self.driver.set_context)(self.context) })?;
        Ok(session)
    }

    fn error(&self, problem: String) -> Error {
        Error::Device { device: format!("cuda:{}", self.number), problem }
    }
}

/// The driver's name for an error, such as `CUDA_ERROR_OUT_OF_MEMORY`.
fn error_name(driver: &Driver, status: c_int) -> String {
    let mut name = std::ptr::null();
    // SAFETY: the driver hands out a static string, or null for a number it does not know.
    unsafe {
        match (driver.error_name)(status, &raw mut name) {
            0 if !name.is_null() => CStr::from_ptr(name).to_string_lossy().into_owned(),
            _ => format!("error {status}"),
        }
    }
}

/// Exclusive use of the device by the current thread.
pub(crate) struct Session {
    cuda: &'static Cuda,
    _turn: MutexGuard<'static, ()>,
}

impl Session {
    fn driver(&self, what: &str, status: c_int) -> Result<()> {
        match status {
            0 => Ok(()),
            status => Err(self.cuda.error(format!("{what}: {}", error_name(&self.cuda.driver, status)))),
        }
    }

    fn blas(&self, what: &str, status: c_int) -> Result<()> {
        match status {
            0 => Ok(()),
            status => Err(self.cuda.error(format!("{what}: cuBLAS status {status}"))),
        }
    }

    /// Free and total memory in bytes, within the limit that [`MEMORY_VARIABLE`] sets.
    fn memory(&self) -> Result<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: two live locals.
        let status = unsafe { (self.cuda.driver.memory_info)(&raw mut free, &raw mut total) };
        self.driver("memory", status)?;
        let pool = self.cuda.pool();
        let left = pool.limit.saturating_sub(pool.used());
        Ok(((free + pool.free()).min(left), total.min(pool.limit)))
    }

    /// Waits for all work so far; an error inside a kernel is reported here.
    fn wait(&self, what: &str) -> Result<()> {
        // SAFETY: the context is current.
        self.driver(what, unsafe { (self.cuda.driver.synchronize)() })
    }

    /// Starts a kernel over blocks (x, y) of `threads` threads.
    fn launch(&self, kernel: Handle, blocks: (usize, usize), threads: usize, arguments: &mut [Argument]) -> Result<()> {
        if blocks.0 == 0 || blocks.1 == 0 {
            return Ok(());
        }
        let grid = |n: usize| u32::try_from(n).map_err(|_| self.cuda.error(format!("a grid of {n} blocks")));
        let (x, y) = (grid(blocks.0)?, grid(blocks.1)?);
        let mut pointers: Vec<*mut c_void> = arguments.iter_mut().map(Argument::pointer).collect();
        // SAFETY: the driver copies the arguments before it returns; their number, order and types are the kernel's,
        // which each caller sees to, and buffers outlive the work because freeing one waits for it.
        let status = unsafe {
            (self.cuda.driver.launch)(
                kernel,
                x,
                y,
                1,
                threads as u32,
                1,
                1,
                0,
                std::ptr::null_mut(),
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.driver("a kernel does not start", status)
    }

    /// Starts a kernel with one thread per element, `batch` times.
    fn each(&self, kernel: Handle, elements: usize, batch: usize, arguments: &mut [Argument]) -> Result<()> {
        self.launch(kernel, (elements.div_ceil(THREADS), batch), THREADS, arguments)
    }
}

/// An argument of a kernel, by value.
enum Argument {
    Address(library::Address),
    Int(c_int),
    Size(u64),
    Single(f32),
    Double(f64),
    Geometry(Geometry),
}

impl Argument {
    fn pointer(&mut self) -> *mut c_void {
        match self {
            Argument::Address(v) => (&raw mut *v).cast(),
            Argument::Int(v) => (&raw mut *v).cast(),
            Argument::Size(v) => (&raw mut *v).cast(),
            Argument::Single(v) => (&raw mut *v).cast(),
            Argument::Double(v) => (&raw mut *v).cast(),
            Argument::Geometry(v) => (&raw mut *v).cast(),
        }
    }
}

/// A count of elements.
impl From<u64> for Argument {
    fn from(value: u64) -> Self {
        Argument::Size(value)
    }
}

impl From<Geometry> for Argument {
    fn from(value: Geometry) -> Self {
        Argument::Geometry(value)
    }
}

impl From<f64> for Argument {
    fn from(value: f64) -> Self {
        Argument::Double(value)
    }
}

impl From<f32> for Argument {
    fn from(value: f32) -> Self {
        Argument::Single(value)
    }
}

/// Sizes are `int` in the kernels; counts of elements are `u64`.
impl From<usize> for Argument {
    fn from(value: usize) -> Self {
        Argument::Int(value as c_int)
    }
}

/// The arguments of a kernel, in order: buffers by address, numbers by value.
macro_rules! arguments {
    ($($argument:expr),* $(,)?) => { &mut [$($crate::backend::cuda::Argument::from($argument)),*] };
}
use arguments;
