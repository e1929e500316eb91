//! The paper's problem: states of the 784-64-32-16-10 network on 1,000 FashionMNIST images, rescaled to κ = 0.99.

use simplicit::arrays::Array;
use simplicit::linalg::{Matrix, gemm};

/// p × n × q and m of the paper's problem.
pub const INPUTS: usize = 784;
/// n.
pub const STATES: usize = 112;
/// q.
pub const OUTPUTS: usize = 10;
/// m.
pub const SAMPLES: usize = 1000;
/// The row bound that the baseline itself satisfies.
pub const KAPPA: f64 = 0.99;

/// One array of `data/paper_states.npz`.
pub fn stored(key: &str) -> Matrix {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/paper_states.npz");
    let array = Array::open(format!("{path}:{key}")).unwrap();
    array.rows(0..array.samples()).unwrap()
}

/// U, Z, X, Y (samples are rows, last layer first); every value is a float32.
pub fn states() -> (Matrix, Matrix, Matrix, Matrix) {
    let round = |m: &Matrix| m.cast::<f32>().cast::<f64>();
    let (a, b, c) = (stored("A"), stored("B"), stored("C"));
    let mut u = stored("U8");
    u.as_mut_slice().iter_mut().for_each(|v| *v = f64::from(*v as f32 / 255.0));
    let product = |f: &Matrix, w: &Matrix| {
        let mut out = Matrix::zeros(f.rows(), w.rows());
        gemm(out.as_mut_slice(), w.rows(), false, 1.0, f.view(), w.view().t());
        out
    };
    let bu = product(&u, &b);
    let (mut z, mut x) = (Matrix::default(), Matrix::zeros(u.rows(), STATES));
    // Three layers deep: three passes reach the fixed point exactly.
    for _ in 0..3 {
        z = product(&x, &a);
        z.as_mut_slice().iter_mut().zip(bu.as_slice()).for_each(|(z, bu)| *z += bu);
        z = round(&z);
        x = z.clone();
        x.as_mut_slice().iter_mut().for_each(|v| *v = v.max(0.0));
    }
    let y = round(&product(&x, &c));
    (u, z, x, y)
}
