//! Owned memory on the device.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::Range;

use super::library::Address;
use super::{Argument, Cuda, Session};
use crate::Result;

/// Plain numbers with the same representation on host and device.
pub(super) trait Number: Copy + Default + 'static {}
impl Number for f64 {}
impl Number for f32 {}
impl Number for i32 {}
impl Number for u8 {}

/// A buffer of numbers on the device.
pub(crate) struct Buffer<T> {
    cuda: &'static Cuda,
    address: Address,
    len: usize,
    /// Bytes that it takes: `len` numbers, rounded up.
    bytes: usize,
    numbers: PhantomData<T>,
}

impl<T> Buffer<T> {
    pub(super) fn address(&self) -> Address {
        self.address
    }

    /// The address of an element, for a product over a part of the buffer.
    pub(super) fn at(&self, element: usize) -> Address {
        self.address + (element * size_of::<T>()) as Address
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.len > 0 {
            // All work on the device runs in one order, so the work that still uses this block ends before its next
            // owner writes to it.
            self.cuda.pool().blocks.push((self.bytes, self.address));
        }
    }
}

/// The variable that limits how much memory of the device is taken: bytes, or a number with K, M or G such as `16G`.
pub const MEMORY_VARIABLE: &str = "SIMPLICIT_CUDA_MEMORY";

/// Blocks of memory that are free again. Asking the driver for a new block each time would make it wait for all work.
#[derive(Debug)]
pub(super) struct Pool {
    /// Bytes and address of every free block.
    blocks: Vec<(usize, Address)>,
    /// Bytes that the driver has given us, free blocks included.
    taken: usize,
    /// The most bytes that may be taken.
    pub(super) limit: usize,
}

impl Pool {
    pub(super) fn new() -> Result<Self, String> {
        let limit = match std::env::var(MEMORY_VARIABLE).ok().filter(|text| !text.is_empty()) {
            Some(text) => crate::memory::parse(&text).map_err(|e| format!("{MEMORY_VARIABLE}: {e}"))? as usize,
            None => usize::MAX,
        };
        Ok(Self { blocks: Vec::new(), taken: 0, limit })
    }

    /// Bytes of free blocks.
    pub(super) fn free(&self) -> usize {
        self.blocks.iter().map(|b| b.0).sum()
    }

    /// Bytes in use.
    pub(super) fn used(&self) -> usize {
        self.taken - self.free()
    }

    /// The smallest free block of at least this many bytes that wastes no more than a quarter.
    fn find(&mut self, bytes: usize) -> Option<(usize, Address)> {
        let fits = |b: &(usize, Address)| b.0 >= bytes && b.0 <= bytes + bytes / 4;
        let best = (0..self.blocks.len()).filter(|&k| fits(&self.blocks[k])).min_by_key(|&k| self.blocks[k].0)?;
        Some(self.blocks.swap_remove(best))
    }
}

impl Cuda {
    pub(super) fn pool(&self) -> std::sync::MutexGuard<'_, Pool> {
        self.pool.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl<T> From<&Buffer<T>> for Argument {
    fn from(buffer: &Buffer<T>) -> Self {
        Argument::Address(buffer.address)
    }
}

impl Session {
    /// Memory whose content is undefined.
    pub(super) fn allocate<T: Number>(&self, len: usize) -> Result<Buffer<T>> {
        // Sizes are rounded up to multiples of 512 bytes and of a sixteenth of the size, so that blocks of similar
        // size can be used for each other.
        let wanted = len.saturating_mul(size_of::<T>());
        let grain = (wanted / 16).next_power_of_two().max(512);
        let bytes = wanted.div_ceil(grain).saturating_mul(grain);
        let buffer = |bytes, address| Buffer { cuda: self.cuda, address, len, bytes, numbers: PhantomData };
        if len == 0 {
            return Ok(buffer(0, 0));
        }
        let mut pool = self.cuda.pool();
        if let Some((bytes, address)) = pool.find(bytes) {
            return Ok(buffer(bytes, address));
        }
        let take = |pool: &mut Pool| {
            let mut address = 0;
            let fits = pool.taken.saturating_add(bytes) <= pool.limit;
            // SAFETY: a live local; a size the device does not have is refused.
            let given = fits && unsafe { (self.cuda.driver.allocate)(&raw mut address, bytes) } == 0;
            given.then(|| {
                pool.taken += bytes;
                address
            })
        };
        if let Some(address) = take(&mut pool) {
            return Ok(buffer(bytes, address));
        }
        // Free blocks of other sizes may take up the space, so they are given back.
        for (bytes, address) in std::mem::take(&mut pool.blocks) {
            // SAFETY: given by the driver once, and not in use; the driver waits for work that uses it.
            unsafe { (self.cuda.driver.free)(address) };
            pool.taken -= bytes;
        }
        let again = take(&mut pool);
        drop(pool);
        if let Some(address) = again {
            return Ok(buffer(bytes, address));
        }
        let (free, total) = self.memory().unwrap_or_default();
        let mib = |bytes: usize| bytes >> 20;
        Err(self.cuda.error(format!(
            "out of device memory: {} MiB asked for, {} of {} MiB free; use the device cpu, or one with more memory",
            mib(bytes),
            mib(free),
            mib(total)
        )))
    }

    pub(super) fn zeros<T: Number>(&self, len: usize) -> Result<Buffer<T>> {
        let out = self.allocate(len)?;
        self.clear(&out)?;
        Ok(out)
    }

    pub(super) fn clear<T: Number>(&self, buffer: &Buffer<T>) -> Result<()> {
        self.clear_part(buffer, 0..buffer.len)
    }

    pub(super) fn clear_part<T: Number>(&self, buffer: &Buffer<T>, part: Range<usize>) -> Result<()> {
        if part.is_empty() {
            return Ok(());
        }
        if part.end > buffer.len {
            return Err(self.cuda.error(format!("numbers {part:?} of {}", buffer.len)));
        }
        // SAFETY: inside the buffer; all-zero bytes are the number zero.
        let status = unsafe { (self.cuda.driver.clear)(buffer.at(part.start), 0, part.len() * size_of::<T>()) };
        self.driver("clearing memory", status)
    }

    pub(super) fn uploaded<T: Number>(&self, values: &[T]) -> Result<Buffer<T>> {
        let out = self.allocate(values.len())?;
        self.upload(values, &out)?;
        Ok(out)
    }

    /// Copies numbers into the front of a buffer.
    pub(super) fn upload<T: Number>(&self, values: &[T], buffer: &Buffer<T>) -> Result<()> {
        if values.len() > buffer.len {
            return Err(self.cuda.error(format!("{} numbers into room for {}", values.len(), buffer.len)));
        }
        if values.is_empty() {
            return Ok(());
        }
        // SAFETY: both sides hold that many bytes; the driver has read the host's side when it returns.
        let status =
            unsafe { (self.cuda.driver.upload)(buffer.address, values.as_ptr().cast::<c_void>(), size_of_val(values)) };
        self.driver("copying to the device", status)
    }

    pub(super) fn to_host<T: Number>(&self, buffer: &Buffer<T>) -> Result<Vec<T>> {
        self.to_host_part(buffer, 0..buffer.len)
    }

    pub(super) fn to_host_part<T: Number>(&self, buffer: &Buffer<T>, part: Range<usize>) -> Result<Vec<T>> {
        if part.start > part.end || part.end > buffer.len {
            let problem = format!("numbers {} to {} of {}", part.start, part.end, buffer.len);
            return Err(self.cuda.error(problem));
        }
        let mut out = vec![T::default(); part.len()];
        if !out.is_empty() {
            // SAFETY: both sides hold that many bytes, and any bytes are valid numbers; the call waits for earlier
            // work.
            let status = unsafe {
                (self.cuda.driver.download)(
                    out.as_mut_ptr().cast::<c_void>(),
                    buffer.at(part.start),
                    size_of_val(&out[..]),
                )
            };
            self.driver("copying from the device", status)?;
        }
        Ok(out)
    }
}
