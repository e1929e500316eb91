//! Buffers that start on a cache line.

/// Bytes of a cache line.
const LINE: usize = 64;

/// A buffer that starts on a cache line, so that no vector straddles two.
#[derive(Debug)]
pub struct Aligned<T> {
    data: Vec<T>,
    start: usize,
}

impl<T: Copy + Default> Aligned<T> {
    /// All zeros.
    pub fn zeros(length: usize) -> Self {
        let data = vec![T::default(); length + LINE / size_of::<T>()];
        let start = data.as_ptr().align_offset(LINE).min(LINE / size_of::<T>());
        Self { data, start }
    }

    fn range(&self) -> std::ops::Range<usize> {
        self.start..self.start + self.data.len() - LINE / size_of::<T>()
    }
}

impl<T: Copy + Default> From<&[T]> for Aligned<T> {
    fn from(values: &[T]) -> Self {
        let mut out = Self::zeros(values.len());
        out.copy_from_slice(values);
        out
    }
}

/// A copy starts on a line of its own.
impl<T: Copy + Default> Clone for Aligned<T> {
    fn clone(&self) -> Self {
        Self::from(&**self)
    }
}

impl<T: Copy + Default> std::ops::Deref for Aligned<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.data[self.range()]
    }
}

impl<T: Copy + Default> std::ops::DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let range = self.range();
        &mut self.data[range]
    }
}
