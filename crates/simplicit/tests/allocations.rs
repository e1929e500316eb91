//! A prepared model allocates nothing in a call besides the outputs it hands back, once it has run.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use simplicit::equilibrium::Prepared;
use simplicit::linalg::Matrix;
use simplicit::model::ImplicitModel;
use simplicit::network::Network;
use simplicit::parallel::Threads;

/// Counts what is asked of the system while it is told to.
struct Counting;

static COUNTING: AtomicBool = AtomicBool::new(false);
static ASKED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is passed on to the system's allocator.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if COUNTING.load(Ordering::Relaxed) {
            ASKED.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the caller's layout.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's pointer, from `alloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn count<T>(work: impl FnOnce() -> T) -> (T, usize) {
    ASKED.store(0, Ordering::Relaxed);
    COUNTING.store(true, Ordering::Relaxed);
    let value = work();
    COUNTING.store(false, Ordering::Relaxed);
    (value, ASKED.load(Ordering::Relaxed))
}

#[test]
fn a_second_call_allocates_its_outputs_alone() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/");
    for name in ["fashion_fc.onnx", "resnet20_cifar100.onnx"] {
        let network = Network::from_onnx(format!("{folder}{name}")).unwrap();
        let model = ImplicitModel::from_network(&network).unwrap();
        for (batch, threads) in [(1, 1), (1, 3), (5, 2), (40, 1), (40, 3)] {
            let prepared = Prepared::new(&model, batch).unwrap();
            let u = Matrix::from_fn(batch, model.shape().inputs, |i, j| ((i * 7 + j) % 13) as f32 * 0.07);
            let run = || prepared.outputs(&u, Threads::new(threads)).unwrap();
            // Threads take workspaces as they come: after a few calls there are as many as there will ever be.
            (0..20).for_each(|_| drop(run()));
            let first = run();
            let least = (0..20).map(|_| count(run)).map(|(y, asked)| {
                assert!(y.as_slice().iter().zip(first.as_slice()).all(|(a, b)| a.to_bits() == b.to_bits()));
                asked
            });
            assert!(least.min() <= Some(1), "{name}, batch {batch}, {threads} threads");
            let (mut workspace, mut y) = (prepared.workspace(), vec![0.0; batch * model.shape().outputs]);
            prepared.run_in(u.as_slice(), &mut y, &mut workspace).unwrap();
            let (result, asked) = count(|| prepared.run_in(u.as_slice(), &mut y, &mut workspace));
            result.unwrap();
            assert_eq!(asked, 0, "{name}, batch {batch}, a workspace of one's own");
            assert!(y.iter().zip(first.as_slice()).all(|(a, b)| a.to_bits() == b.to_bits()));
        }
    }
}
