//! Class labels: one small integer per sample.

use std::path::{Path, PathBuf};

use super::array::{Array, Shape};
use super::selection::Selection;
use crate::{Error, Result};

/// Checked labels, in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Labels {
    path: PathBuf,
    values: Vec<u32>,
}

impl Labels {
    /// Reads any file that [`Array::open`] reads; a CIFAR file gives its own (fine) labels. In a folder of folders of
    /// pictures, the label of a picture is the place of its folder in the order of the names.
    pub fn read(file: impl AsRef<Path>, selection: &Selection) -> Result<Self> {
        Self::from_array(&Self::open(file)?, selection)
    }

    /// The array that labels, or other answers, are read from.
    pub fn open(file: impl AsRef<Path>) -> Result<Array> {
        let file = file.as_ref();
        if file.is_dir() { Array::from_class_folders(file) } else { Array::open(file) }
    }

    /// N or N × 1 integers (or floating-point numbers that are integers), none negative.
    pub fn from_array(array: &Array, selection: &Selection) -> Result<Self> {
        let own = array.own_labels();
        let array = own.as_ref().unwrap_or(array);
        let path = array.path().to_path_buf();
        if array.features() != 1 {
            return Err(Error::shape(
                format!("labels {}", path.display()),
                "one integer a sample",
                Shape(array.shape()),
            ));
        }
        let indices = selection.indices(array.samples())?;
        let mut values = array.small_integers()?;
        if let Some(indices) = indices {
            values = indices.iter().map(|&i| values[i]).collect();
        }
        Ok(Self { path, values })
    }

    /// The labels, one per sample.
    pub fn as_slice(&self) -> &[u32] {
        &self.values
    }

    /// An error unless there is one label for each of `samples`, each below `classes`.
    pub fn require(&self, samples: usize, classes: usize) -> Result<()> {
        if self.values.len() != samples {
            return Err(Error::shape(
                format!("labels {}", self.path.display()),
                format!("{samples}, one for each input"),
                self.values.len(),
            ));
        }
        match self.values.iter().position(|&v| v as usize >= classes) {
            None => Ok(()),
            Some(i) => Err(Error::shape(
                format!("labels {}, sample {i}", self.path.display()),
                format!("a class below {classes}, the number of outputs"),
                self.values[i],
            )),
        }
    }
}
