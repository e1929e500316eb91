//! Small networks with operators between their linear maps.
#![allow(dead_code)] // not every test needs all of them

use simplicit::graph::{Binary, Dims, Reduction, Structure};
use simplicit::layout::Activation;
use simplicit::linalg::Matrix;
use simplicit::network::{Network, Shape, Window};
use simplicit::random::Random;

pub(crate) const CHANNELS: usize = 8;
pub(crate) const SIDE: usize = 6;

fn random(rows: usize, cols: usize, seed: u64) -> Matrix<f32> {
    let mut r = Random::new(seed);
    let scale = (1.5 / cols as f64).sqrt();
    Matrix::from_fn(rows, cols, |_, _| (r.normal() * scale) as f32)
}

fn bias(rows: usize, seed: u64) -> Option<Vec<f32>> {
    let mut r = Random::new(seed);
    Some((0..rows).map(|_| (0.2 * r.normal()) as f32).collect())
}

fn dims(sizes: &[usize]) -> Dims {
    Dims::new(sizes).unwrap()
}

/// What mobile networks are made of: a dilated convolution, a depthwise one, squeeze and excite, a concatenation.
pub(crate) fn mobile() -> Network {
    let wide = Window { dilation: [2, 2], ..Window::square(3, 1, 2) };
    let start = Network::builder(Shape::map(3, SIDE, SIDE))
        .unwrap()
        .convolution(random(CHANNELS, 27, 1), wide, bias(CHANNELS, 2))
        .unwrap()
        .activation(Activation::Relu)
        .unwrap()
        .grouped_convolution(random(CHANNELS, 9, 3), Window::square(3, 1, 1), CHANNELS, bias(CHANNELS, 4))
        .unwrap()
        .activation(Activation::Relu)
        .unwrap();
    let map = start.here();
    let gate = start
        .structure(Structure::Reduce { reduction: Reduction::Mean, axes: vec![2, 3], keep: true }, &[])
        .unwrap()
        .convolution(random(4, CHANNELS, 5), Window::square(1, 1, 0), bias(4, 6))
        .unwrap()
        .activation(Activation::Relu)
        .unwrap()
        .convolution(random(CHANNELS, 4, 7), Window::square(1, 1, 0), bias(CHANNELS, 8))
        .unwrap()
        .activation(Activation::Sigmoid)
        .unwrap();
    let excited = gate.structure(Structure::Binary(Binary::Multiply), &[map]).unwrap();
    let one = excited.here();
    let two = excited
        .grouped_convolution(random(4, CHANNELS / 2 * 9, 9), Window::square(3, 1, 1), 2, None)
        .unwrap()
        .activation(Activation::Tanh)
        .unwrap();
    two.structure(Structure::Concat { axis: 1 }, &[one])
        .unwrap()
        .convolution(random(10, 12 * 9, 10), Window::square(3, 2, 1), bias(10, 11))
        .unwrap()
        .activation(Activation::Relu)
        .unwrap()
        .global_average()
        .unwrap()
        .linear(random(5, 10, 12), bias(5, 13))
        .unwrap()
        .build()
        .unwrap()
}

/// What transformers are made of: patches as tokens, layer norm with scale and shift, attention, a residual sum.
pub(crate) fn attention() -> Network {
    let tokens = (SIDE / 2) * (SIDE / 2);
    let embedded = Network::builder(Shape::map(3, SIDE, SIDE))
        .unwrap()
        .convolution(random(CHANNELS, 12, 21), Window::square(2, 2, 0), bias(CHANNELS, 22))
        .unwrap()
        .structure(Structure::Reshape { dims: dims(&[1, CHANNELS, tokens]) }, &[])
        .unwrap()
        .structure(Structure::Transpose { order: vec![0, 2, 1] }, &[])
        .unwrap();
    let residual = embedded.here();
    let mut scales = Random::new(23);
    let scale: Vec<f32> = (0..CHANNELS).map(|_| 1.0 + 0.1 * scales.normal() as f32).collect();
    let constant = embedded.constant(dims(&[CHANNELS]), scale, true).unwrap();
    let scale = constant.here();
    let normed = constant
        .at(residual)
        .unwrap()
        .structure(Structure::Normalise { axis: 2, epsilon: 1e-5 }, &[])
        .unwrap()
        .structure(Structure::Binary(Binary::Multiply), &[scale])
        .unwrap()
        .structure(Structure::Transpose { order: vec![0, 2, 1] }, &[])
        .unwrap()
        .structure(Structure::Reshape { dims: dims(&[1, CHANNELS, tokens, 1]) }, &[])
        .unwrap();
    let channels_first = normed.here();
    let one = Window::square(1, 1, 0);
    let keys = normed.convolution(random(CHANNELS, CHANNELS, 24), one, bias(CHANNELS, 25)).unwrap();
    let keys = keys.structure(Structure::Reshape { dims: dims(&[1, CHANNELS, tokens]) }, &[]).unwrap();
    let key = keys.here();
    let values = keys.at(channels_first).unwrap().convolution(random(CHANNELS, CHANNELS, 26), one, None).unwrap();
    let values = values
        .structure(Structure::Reshape { dims: dims(&[1, CHANNELS, tokens]) }, &[])
        .unwrap()
        .structure(Structure::Transpose { order: vec![0, 2, 1] }, &[])
        .unwrap();
    let value = values.here();
    let queries = values.at(channels_first).unwrap().convolution(random(CHANNELS, CHANNELS, 27), one, None).unwrap();
    queries
        .structure(Structure::Reshape { dims: dims(&[1, CHANNELS, tokens]) }, &[])
        .unwrap()
        .structure(Structure::Transpose { order: vec![0, 2, 1] }, &[])
        .unwrap()
        .structure(Structure::MatMul, &[key])
        .unwrap()
        .structure(Structure::Softmax { axis: 2 }, &[])
        .unwrap()
        .structure(Structure::MatMul, &[value])
        .unwrap()
        .plus(residual)
        .unwrap()
        .structure(Structure::Reduce { reduction: Reduction::Mean, axes: vec![1], keep: false }, &[])
        .unwrap()
        .linear(random(5, CHANNELS, 28), bias(5, 29))
        .unwrap()
        .build()
        .unwrap()
}

pub(crate) fn networks() -> [(&'static str, Network); 2] {
    [("mobile", mobile()), ("attention", attention())]
}
