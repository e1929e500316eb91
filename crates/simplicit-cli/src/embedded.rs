//! The network and images of the quick start, which are part of the program.

use simplicit::Result;
use simplicit::arrays::{Array, ArrayFile, Inputs, Labels, Selection};
use simplicit::network::Network;

// Statics, so that the program contains each of them once, however often it is used.
pub(crate) use simplicit_data::{
    FASHION_FC as NETWORK, FASHION_TEST_IMAGES as TEST_IMAGES, FASHION_TEST_LABELS as TEST_LABELS,
    FASHION_TRAIN_IMAGES as TRAIN_IMAGES, RESNET20_CIFAR100 as RESNET,
};

/// FashionMNIST's classes in the order of the outputs.
pub(crate) const CLASSES: [&str; 10] =
    ["T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"];

/// A trained 784-64-32-16-10 ReLU network.
pub(crate) fn network() -> Result<Network> {
    Network::from_onnx_bytes(NETWORK)
}

/// 2,000 training images.
pub(crate) fn train_images() -> Result<Inputs> {
    Inputs::new(train_array()?, None, &Selection::all())
}

/// The training images as an array, from which samples can be chosen.
pub(crate) fn train_array() -> Result<Array> {
    array("fashion_train_images.idx.gz", TRAIN_IMAGES)
}

/// All 10,000 test images.
pub(crate) fn test_images() -> Result<Inputs> {
    Inputs::new(array("fashion_test_images.idx.gz", TEST_IMAGES)?, None, &Selection::all())
}

/// Their labels.
pub(crate) fn test_labels() -> Result<Labels> {
    Labels::from_array(&array("fashion_test_labels.idx.gz", TEST_LABELS)?, &Selection::all())
}

fn array(name: &str, bytes: &'static [u8]) -> Result<Array> {
    ArrayFile::from_bytes(name, bytes)?.only_array()
}
