//! Memory of the device, owned.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::Range;

use super::library::Address;
use super::{Argument, Cuda, Session};
use crate::Result;

/// Plain numbers that mean the same on both sides.
pub(super) trait Number: Copy + Default + 'static {}
impl Number for f64 {}
impl Number for f32 {}
impl Number for i32 {}
impl Number for u8 {}

/// So many numbers on the device.
pub(super) struct Buffer<'a, T> {
    cuda: &'a Cuda,
    address: Address,
    len: usize,
    numbers: PhantomData<T>,
}

impl<T> Buffer<'_, T> {
    pub(super) fn address(&self) -> Address {
        self.address
    }

    /// The address of an element, for a product over a part.
    pub(super) fn at(&self, element: usize) -> Address {
        self.address + (element * size_of::<T>()) as Address
    }
}

impl<T> Drop for Buffer<'_, T> {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: allocated once, in `allocate`; the driver waits for work that uses it.
            unsafe { (self.cuda.driver.free)(self.address) };
        }
    }
}

impl<T> From<&Buffer<'_, T>> for Argument {
    fn from(buffer: &Buffer<'_, T>) -> Self {
        Argument::Address(buffer.address)
    }
}

impl Session<'_> {
    /// Memory with nothing sensible in it.
    pub(super) fn allocate<T: Number>(&self, len: usize) -> Result<Buffer<'_, T>> {
        let bytes = len.saturating_mul(size_of::<T>());
        let mut address = 0;
        if len > 0 {
            // SAFETY: a live local; a size the device does not have is refused.
            let status = unsafe { (self.cuda.driver.allocate)(&raw mut address, bytes) };
            if status != 0 {
                let (free, total) = self.memory().unwrap_or_default();
                let mib = |bytes: usize| bytes >> 20;
                return Err(self.cuda.error(format!(
                    "out of device memory: {} MiB asked for, {} of {} MiB free; use the device cpu, or one with more memory",
                    mib(bytes),
                    mib(free),
                    mib(total)
                )));
            }
        }
        Ok(Buffer { cuda: self.cuda, address, len, numbers: PhantomData })
    }

    pub(super) fn zeros<T: Number>(&self, len: usize) -> Result<Buffer<'_, T>> {
        let out = self.allocate(len)?;
        self.clear(&out)?;
        Ok(out)
    }

    pub(super) fn clear<T: Number>(&self, buffer: &Buffer<'_, T>) -> Result<()> {
        self.clear_part(buffer, 0..buffer.len)
    }

    pub(super) fn clear_part<T: Number>(&self, buffer: &Buffer<'_, T>, part: Range<usize>) -> Result<()> {
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

    pub(super) fn uploaded<T: Number>(&self, values: &[T]) -> Result<Buffer<'_, T>> {
        let out = self.allocate(values.len())?;
        self.upload(values, &out)?;
        Ok(out)
    }

    /// Copies numbers into the front of a buffer.
    pub(super) fn upload<T: Number>(&self, values: &[T], buffer: &Buffer<'_, T>) -> Result<()> {
        if values.len() > buffer.len {
            return Err(self.cuda.error(format!("{} numbers into room for {}", values.len(), buffer.len)));
        }
        if values.is_empty() {
            return Ok(());
        }
        // SAFETY: both sides hold so many bytes; the driver is done with the host's side when it returns.
        let status =
            unsafe { (self.cuda.driver.upload)(buffer.address, values.as_ptr().cast::<c_void>(), size_of_val(values)) };
        self.driver("copying to the device", status)
    }

    pub(super) fn to_host<T: Number>(&self, buffer: &Buffer<'_, T>) -> Result<Vec<T>> {
        let mut out = vec![T::default(); buffer.len];
        if buffer.len > 0 {
            // SAFETY: both sides hold so many bytes, and any bytes are numbers; the call waits for earlier work.
            let status = unsafe {
                (self.cuda.driver.download)(
                    out.as_mut_ptr().cast::<c_void>(),
                    buffer.address,
                    buffer.len * size_of::<T>(),
                )
            };
            self.driver("copying from the device", status)?;
        }
        Ok(out)
    }
}
