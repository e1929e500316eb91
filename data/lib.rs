//! The files that `simplicit quickstart`, `bench` and `lab reproduce` carry with them: a crate of its own, because a
//! published crate holds only what lies in its own folder. `README.md` says what every file is and how it was made.

/// `fashion_fc.onnx`: a trained 784-64-32-16-10 ReLU network.
pub const FASHION_FC: &[u8] = include_bytes!("fashion_fc.onnx");
/// `resnet20_cifar100.onnx`: the ResNet-20 of the CIFAR-100 experiment.
pub const RESNET20_CIFAR100: &[u8] = include_bytes!("resnet20_cifar100.onnx");
/// `fashion_train_images.idx.gz`: 2,000 training images.
pub const FASHION_TRAIN_IMAGES: &[u8] = include_bytes!("fashion_train_images.idx.gz");
/// `fashion_test_images.idx.gz`: all 10,000 test images.
pub const FASHION_TEST_IMAGES: &[u8] = include_bytes!("fashion_test_images.idx.gz");
/// `fashion_test_labels.idx.gz`: their labels.
pub const FASHION_TEST_LABELS: &[u8] = include_bytes!("fashion_test_labels.idx.gz");
