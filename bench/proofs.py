"""Rows of the FashionMNIST network and of ResNet-20 proven optimal: our branch and bound beside l0bnb and okridge.

    python bench/proofs.py [--samples 2000] [--rows 4] [--prices 1e-4,1e-3] [--seconds 60] [--exact] [--cifar train.bin]

A row is ½wᵀGw − hᵀw + ½e + p·(non-zeros) over unit-RMS features and a unit-RMS target, with the ridge of training (1e-5)
in G. l0bnb solves the same row from a factor of G; it needs a bound on the size of the weights, which is given as twice
the largest of our answer, so what it proves is proven for that box. okridge has no price: it is given the number of our
non-zeros, so its row is the same only if that number is right, which is ours to find. Values are recomputed here. With --exact every
certificate of ours is checked once more in whole numbers (simplicit.proofs.check). Layers 2 to 4, one thread each; with
--cifar (CIFAR-100's binary file) also the first two convolutions of data/resnet20_cifar100.onnx, 27 and 144 taps, at 64
positions of every one of 200 images; their constant, which costs nothing, is taken out by centring.
"""

import argparse
import contextlib
import importlib.util
import io
import itertools
import sys
import time

import numpy as np
import page

import simplicit
from simplicit.proofs import check, prove

sys.path.insert(0, str(page.ROOT / "python/tests"))
from conftest import idx  # noqa: E402

RIDGE = 1e-5


def rows(samples, count):
    """(layer, d, G, h) of the first units of every layer but the first."""
    network = simplicit.Network.from_onnx(page.ROOT / "data/fashion_fc.onnx")
    images = idx("fashion_train_images.idx.gz")[:samples]
    states = network.states(images.reshape(len(images), -1) / 255.0)
    # Last layer first: 16 units that read 32, 32 that read 64, 64 that read the inputs; then the outputs.
    X, Z, Y = (np.asarray(a, dtype=np.float64) for a in (states.X, states.Z, states.Y))
    layers = [("layer 2", X[:, 48:112], Z[:, 16:48]), ("layer 3", X[:, 16:48], Z[:, :16]), ("layer 4", X[:, :16], Y)]
    for name, features, targets in layers:
        rms = np.sqrt((features**2).mean(0))
        features = features[:, rms > 0] / rms[rms > 0]
        gram = features.T @ features / len(features) + RIDGE * np.eye(features.shape[1])
        for k in range(count):
            target = targets[:, k] / np.sqrt((targets[:, k] ** 2).mean())
            yield name, gram, features.T @ target / len(target)


def convolution_rows(file, count):
    """(layer, G, h) of the first channels of the first two convolutions of ResNet-20."""
    raw = np.fromfile(file, np.uint8, 200 * 3074).reshape(-1, 3074)[:, 2:].reshape(-1, 3, 32, 32)
    mean = np.array([0.50707516, 0.48654887, 0.44091784]).reshape(3, 1, 1)
    std = np.array([0.26733429, 0.25643846, 0.27615047]).reshape(3, 1, 1)
    images = (raw / 255 - mean) / std
    layers = convolutions(page.ROOT / "data/resnet20_cifar100.onnx", 2)
    rng = np.random.default_rng(0)
    where = rng.integers(32, size=(2, len(images), 64))
    maps = images
    for name, (weight, bias) in zip(("ResNet-20, first", "ResNet-20, second"), layers, strict=True):
        padded = np.pad(maps, ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
        image = np.arange(len(maps))[:, None]
        features = windows[image, :, where[0], where[1]].reshape(-1, weight[0].size)
        targets = features @ weight.reshape(len(weight), -1).T
        features = features - features.mean(0)
        features /= np.sqrt((features**2).mean(0))
        gram = features.T @ features / len(features) + RIDGE * np.eye(features.shape[1])
        for k in range(count):
            target = targets[:, k] - targets[:, k].mean()
            yield name, gram, features.T @ (target / np.sqrt((target**2).mean())) / len(target)
        maps = np.maximum(np.einsum("nchwij,ocij->nohw", windows, weight, optimize=True) + bias[:, None, None], 0)


def convolutions(file, count):
    """Weights and biases of the first convolutions of an ONNX file."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(file).graph
    tensors = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in graph.initializer}
    return [(tensors[n.input[1]], tensors[n.input[2]]) for n in graph.node if n.op_type == "Conv"][:count]


def value(gram, cross, price, w):
    support = np.flatnonzero(w)
    if len(support) == 0:
        return 0.5
    best = np.linalg.solve(gram[np.ix_(support, support)], cross[support])
    return 0.5 - 0.5 * cross[support] @ best + price * len(support)


def l0bnb(gram, cross, price, largest, seconds):
    """Value and seconds of l0bnb on ½‖y − Xw‖² + p‖w‖₀ + λ₂‖w‖² with XᵀX + 2λ₂I = G."""
    # l0bnb 1.0.0 names numpy.Inf, which NumPy 2 no longer has.
    np.Inf = np.inf
    from l0bnb import BNBTree

    lower = np.linalg.cholesky(gram - 0.5 * RIDGE * np.eye(len(cross)))
    X = np.asfortranarray(lower.T)
    y = np.linalg.solve(lower, cross)
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        result = BNBTree(X, y).solve(l0=price, l2=0.25 * RIDGE, m=2 * largest, gap_tol=1e-6, time_limit=seconds)
    taken = time.perf_counter() - start
    return value(gram, cross, price, np.asarray(result.beta)), taken


def okridge(gram, cross, count, seconds):
    """Value and seconds of okridge on min ‖y − Xw‖² + λ₂‖w‖² over `count` non-zeros, with XᵀX + λ₂I = G; whether it proved it."""
    from okridge.tree import BNBTree

    lower = np.linalg.cholesky(gram - 0.5 * RIDGE * np.eye(len(cross)))
    tree = BNBTree(X=lower.T, y=np.linalg.solve(lower, cross), lambda2=0.5 * RIDGE, max_memory_GB=4)
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        _, weights, gap, _, _ = tree.solve(k=count, gap_tol=1e-6, time_limit=seconds)
    return np.asarray(weights), gap <= 1e-6, time.perf_counter() - start


def installed(name):
    return importlib.util.find_spec(name) is not None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--prices", default="1e-4,1e-3")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--cifar")
    options = parser.parse_args()
    head = "| row | features | price | non-zeros | ours: distance | cases | s | l0bnb: value above ours | s |"
    head += " okridge: value above ours | s |"
    print(head)
    print("|" + "---|" * (head.count("|") - 1))
    found_rows = rows(options.samples, options.rows)
    if options.cifar:
        found_rows = itertools.chain(found_rows, convolution_rows(options.cifar, options.rows))
    for name, gram, cross in found_rows:
        for price in map(float, options.prices.split(",")):
            start = time.perf_counter()
            proof = prove(gram, cross, 1.0, price, seconds=options.seconds)
            taken = time.perf_counter() - start
            if options.exact:
                assert float(check(proof)) >= proof.bound
            cells = [name, len(cross), f"{price:g}", np.count_nonzero(proof.weights), f"{100 * proof.distance:.3f} %"]
            cells += [len(proof.cases), f"{taken:.2f}"]
            if installed("l0bnb"):
                found, seconds = l0bnb(gram, cross, price, np.abs(proof.weights).max(), options.seconds)
                cells += [f"{100 * (found / proof.value - 1):+.4f} %", f"{seconds:.2f}"]
            else:
                cells += ["not installed", "–"]
            if installed("okridge"):
                weights, proved, seconds = okridge(gram, cross, np.count_nonzero(proof.weights), options.seconds)
                above = f"{100 * (value(gram, cross, price, weights) / proof.value - 1):+.4f} %"
                cells += [above + ("" if proved else ", open"), f"{seconds:.2f}"]
            else:
                cells += ["not installed", "–"]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
