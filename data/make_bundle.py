#!/usr/bin/env python3
"""Makes the files of this folder from Debian's package dataset-fashion-mnist and fashion_fc.onnx.

    apt install dataset-fashion-mnist && pip install numpy onnx && python3 data/make_bundle.py

Deterministic: a seeded choice of images, no times in the archives. Other versions of zlib may pack the same content into
other bytes.
"""

import gzip
import io
import pathlib
import sys
import zipfile

import numpy as np
import onnx
import onnx.numpy_helper

SOURCE = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "/usr/share/datasets/fashion-mnist")
HERE = pathlib.Path(__file__).parent
TRAIN, PAPER, SEED, KAPPA = 2000, 1000, 0, 0.99


def choose(total, count, seed):
    """The library's Selection::random: SplitMix64 and the head of a Fisher-Yates shuffle."""
    mask, state, everything = (1 << 64) - 1, seed, list(range(total))
    for i in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        j = i + ((z * (total - i)) >> 64)
        everything[i], everything[j] = everything[j], everything[i]
    return everything[:count]


def read_idx(name):
    raw = gzip.decompress((SOURCE / name).read_bytes())
    axes = raw[3]
    shape = np.frombuffer(raw, ">u4", axes, 4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape)


def write_idx(name, array):
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    packed = gzip.compress(header + array.tobytes(), 9, mtime=0)
    (HERE / name).write_bytes(packed)
    print(f"{name}: {array.shape}, {len(packed):,} bytes")


def write_npz(name, arrays):
    with zipfile.ZipFile(HERE / name, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for key, array in arrays.items():
            npy = io.BytesIO()
            np.save(npy, array)
            archive.writestr(zipfile.ZipInfo(key + ".npy"), npy.getvalue(), zipfile.ZIP_DEFLATED, 9)
    print(f"{name}: {(HERE / name).stat().st_size:,} bytes")


def implicit(weights):
    """A, B, C of a layered network without biases, last hidden layer first."""
    hidden = weights[:-1]
    sizes = [w.shape[0] for w in hidden]
    n = sum(sizes)
    starts = [n - sum(sizes[: k + 1]) for k in range(len(sizes))]
    a, b, c = np.zeros((n, n)), np.zeros((n, hidden[0].shape[1])), np.zeros((weights[-1].shape[0], n))
    b[starts[0] :] = hidden[0]
    for k in range(1, len(hidden)):
        a[starts[k] : starts[k] + sizes[k], starts[k - 1] : starts[k - 1] + sizes[k - 1]] = hidden[k]
    c[:, : sizes[-1]] = weights[-1]
    return a, b, c


def states(a, b, c, u):
    """Z, X, Y: products in float64, every layer rounded to float32. A is strictly upper triangular."""
    a, b, c, u = (v.astype(np.float64) for v in (a, b, c, u))
    z = (u @ b.T).astype(np.float32)
    x = np.maximum(z, 0)
    for _ in range(len(a)):
        z = (x.astype(np.float64) @ a.T + u @ b.T).astype(np.float32)
        if np.array_equal(np.maximum(z, 0), x):
            break
        x = np.maximum(z, 0)
    return z, x, (x.astype(np.float64) @ c.T).astype(np.float32)


def main():
    train = choose(60000, TRAIN, SEED)
    images = read_idx("train-images-idx3-ubyte.gz")[train]
    write_idx("fashion_train_images.idx.gz", images)
    write_idx("fashion_train_labels.idx.gz", read_idx("train-labels-idx1-ubyte.gz")[train])
    test_images, test_labels = read_idx("t10k-images-idx3-ubyte.gz"), read_idx("t10k-labels-idx1-ubyte.gz")
    write_idx("fashion_test_images.idx.gz", test_images)
    write_idx("fashion_test_labels.idx.gz", test_labels)

    model = onnx.load(HERE / "fashion_fc.onnx")
    weights = [onnx.numpy_helper.to_array(w).astype(np.float64) for w in model.graph.initializer]
    a, b, c = implicit(weights)
    # The rescaling that makes the baseline itself satisfy the row bound: s = (I - |A|/kappa)^-1 1, A' = S^-1 A S.
    s = np.linalg.solve(np.eye(len(a)) - np.abs(a) / KAPPA, np.ones(len(a)))
    scaled = [m.astype(np.float32) for m in (a / s[:, None] * s, b / s[:, None], c * s)]
    norm = np.abs(scaled[0].astype(np.float64)).sum(1).max()
    assert norm <= KAPPA, norm

    u8 = images[:PAPER].reshape(PAPER, -1)
    z, x, y = states(*scaled, u8.astype(np.float32) / np.float32(255))
    write_npz("paper_states.npz", dict(U8=u8, A=scaled[0], B=scaled[1], C=scaled[2], Z_head=z[:8], Y_head=y[:8]))
    logits = states(*scaled, test_images.reshape(len(test_images), -1).astype(np.float32) / np.float32(255))[2]
    accuracy = (logits.argmax(1) == test_labels).mean()
    print(f"max s {s.max():.1f}, norm of A {np.abs(a).sum(1).max():.3f} -> {norm:.6f}, test accuracy {accuracy:.2%}")


if __name__ == "__main__":
    main()
