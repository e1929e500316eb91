import importlib
import os
import pathlib

import numpy as np
import pytest

import simplicit

# Some virtual machines offer AMX and do not run it: PyTorch's products in bfloat16 would end the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

ROOT = pathlib.Path(__file__).parents[2]
DATA = ROOT / "data"


def needs(name):
    """A module, or the test is skipped; with CI=true nothing is."""
    return importlib.import_module(name) if os.environ.get("CI") == "true" else pytest.importorskip(name)


def idx(name):
    """An IDX file, read by other means than the library's."""
    import gzip

    raw = gzip.decompress((DATA / name).read_bytes())
    shape = [int.from_bytes(raw[4 + 4 * k : 8 + 4 * k], "big") for k in range(raw[3])]
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


@pytest.fixture(scope="session")
def weights():
    rng = np.random.default_rng(1)
    return [rng.normal(size=s) / np.sqrt(s[1]) for s in ((14, 9), (12, 14), (4, 12))]


@pytest.fixture(scope="session")
def biases():
    rng = np.random.default_rng(2)
    return [0.3 * rng.normal(size=k) for k in (14, 12, 4)]


@pytest.fixture(scope="session")
def network(weights, biases):
    return simplicit.Network.from_layers(weights, biases)


@pytest.fixture(scope="session")
def U():
    return np.random.default_rng(3).normal(size=(700, 9))


@pytest.fixture(scope="session")
def states(network, U):
    return network.states(U)


@pytest.fixture(scope="session")
def cyclic():
    rng = np.random.default_rng(4)
    A = rng.normal(size=(8, 8))
    A *= 0.8 / np.abs(A).sum(1, keepdims=True)
    B, C, D = rng.normal(size=(8, 5)), rng.normal(size=(3, 8)), rng.normal(size=(3, 5))
    layout = [{"name": "two", "size": 5, "activation": "tanh"}, {"name": "one", "size": 3, "activation": "relu"}]
    return simplicit.ImplicitModel.from_arrays(A, B, C, D, rng.normal(size=8), rng.normal(size=3), layout=layout)
