//! Arrays from files, the inputs of everything else.
//!
//! | file | read as | in memory |
//! |---|---|---|
//! | `.npy` | one array, C or Fortran order, either byte order | nothing but the rows asked for |
//! | `.npz` | `file.npz:key`; without a key exactly one array | stored members nothing, deflated members whole |
//! | `.safetensors` | `file.safetensors:key`; without a key exactly one array | nothing |
//! | IDX | N × H × W images or N labels | nothing |
//! | CIFAR-10 and CIFAR-100 binary | N × 3 × 32 × 32 images, with their (fine) labels | nothing |
//! | any of them as `.gz` | the same | whole, at most 1 GiB |
//!
//! The first axis is samples, the others are flattened. An [`Array`] knows its shape and type without loading
//! anything and reads any rows from several threads at once. No file is trusted: a header's sizes are checked against
//! the file before anything is allocated.

mod array;
mod augment;
mod bytes;
mod device;
mod element;
mod file;
mod hash;
mod image;
mod inputs;
mod labels;
mod npy;
mod pictures;
mod preprocessing;
mod safetensors;
mod selection;
mod source;
mod zip;

pub use array::Array;
pub use augment::{Augment, Augmented};
pub use device::DeviceInputs;
pub use element::Element;
pub use file::ArrayFile;
pub use hash::content_hash;
pub(crate) use hash::digest;
pub use inputs::{Inputs, require_order};
pub use labels::Labels;
pub use npy::write_npy;
pub use pictures::PictureSettings;
pub use preprocessing::{PerFeature, Preprocessing};
pub use selection::Selection;
pub use source::InputSource;
