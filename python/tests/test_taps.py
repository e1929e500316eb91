"""Tap blocks, unrolled, against PyTorch's own convolutions."""

import numpy as np
import pytest
import scipy.sparse
from conftest import needs

from simplicit import taps

torch = needs("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import simplicit  # noqa: E402
import simplicit.torch as st  # noqa: E402


def shape(*sizes):
    return dict(zip(("channels", "height", "width"), sizes, strict=True))


def block(**parts):
    """A residual sum of one layer to another, unless told otherwise."""
    usual = {
        "letter": "A", "target": 0, "source": 1, "maps": [], "kernel": (1, 1), "stride": (1, 1), "padding": (0,) * 4,
        "input": (3, 6, 6), "output": (3, 6, 6), "taps": None, "factors": None,
    }  # fmt: skip
    return taps.TapBlock(**{**usual, **parts})


@pytest.mark.parametrize(("kernel", "stride", "padding"), [((3, 3), 1, 1), ((3, 2), 2, 0), ((1, 1), 2, 0), ((2, 3), 1, 2)])
def test_a_convolution_unrolled(kernel, stride, padding):
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(4, 3, *kernel)).astype(np.float32) * (rng.uniform(size=(4, 3, *kernel)) < 0.6)
    x = rng.normal(size=(2, 3, 7, 8)).astype(np.float32)
    y = F.conv2d(torch.from_numpy(x), torch.from_numpy(weight), stride=stride, padding=padding).numpy()
    made = block(
        kernel=kernel, stride=(stride,) * 2, padding=(padding,) * 4, input=(3, 7, 8), output=y.shape[1:],
        taps=scipy.sparse.csr_array(weight.reshape(4, -1)),
    )  # fmt: skip
    matrix = made.unrolled()
    np.testing.assert_allclose((matrix @ x.reshape(2, -1).T).T.reshape(y.shape), y, atol=1e-4)
    assert matrix.nnz <= made.most_nonzeros()


def test_poolings_and_residual_sums_unrolled():
    x = torch.randn(2, 3, 6, 6)
    window = {"kernel": [3, 3], "stride": [2, 2], "padding": [1] * 4}
    pool = {"average_pool": {"input": shape(3, 6, 6), "window": window, "count_padding": False}}
    factors = np.array([1, 2, 4], np.float32)
    blocks = [
        block(factors=factors),
        block(maps=[pool], input=(3, 3, 3), output=(3, 3, 3)),
        block(maps=[{"global_average": {"input": shape(3, 6, 6)}}], input=(3, 1, 1), output=(3, 1, 1)),
    ]
    flat = x.flatten(1).numpy().T
    np.testing.assert_allclose(blocks[0].unrolled() @ flat, (x * torch.from_numpy(factors)[:, None, None]).flatten(1).numpy().T)
    expected = F.avg_pool2d(x, 3, 2, 1, count_include_pad=False).flatten(1).numpy().T
    np.testing.assert_allclose(blocks[1].unrolled() @ flat, expected, atol=1e-6)
    np.testing.assert_allclose(blocks[2].unrolled() @ flat, x.mean((2, 3)).numpy().T, atol=1e-6)
    for made in blocks:
        assert made.unrolled().nnz <= made.most_nonzeros()
    with pytest.raises(simplicit.UnsupportedError, match="not linear"):
        block(maps=[{"max_pool": {"input": shape(3, 6, 6), "window": window}}], input=(3, 3, 3), output=(3, 3, 3)).unrolled()


class Small(nn.Module):
    """A residual block with batch norm, a shortcut and a classifier behind a global average."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.one = nn.Conv2d(4, 6, 3, 2, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(6)
        self.two = nn.Conv2d(6, 6, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(6)
        self.shortcut = nn.Sequential(nn.Conv2d(4, 6, 1, 2, bias=False), nn.BatchNorm2d(6))
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        out = self.norm2(self.two(F.relu(self.norm1(self.one(x)))))
        return self.linear(F.adaptive_avg_pool2d(F.relu(out + self.shortcut(x)), 1).flatten(1))


def test_compress_a_convolutional_module():
    torch.manual_seed(0)
    module = Small()
    for m in module.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.normal_(std=0.2)
            m.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(m.weight, 0.5, 1.5)
            nn.init.normal_(m.bias, std=0.2)
    module.eval()
    loader = [torch.randn(100, 2, 8, 8) for _ in range(4)]
    u = torch.cat(loader)
    model = st.compress(module, loader, target_sparsity=0.4, as_module=False)
    sparse = st.compress(module, loader, target_sparsity=0.4, as_module=True)
    with torch.no_grad():
        expected, y = torch.from_numpy(model.predict(u.numpy())), module(u)
        np.testing.assert_allclose(sparse(u), expected, atol=1e-4 * float(y.abs().max()))
        assert (sparse(u) - y).norm() < 0.5 * y.norm()
    kept = sum(int(m.weight.count_nonzero()) for m in sparse.modules() if isinstance(m, (nn.Conv2d, nn.Linear)))
    counted = sum(block.taps.nnz for block in model.taps if block.taps is not None)
    assert kept == counted + sum(model._stored(k).nnz for k in "ABCD")
    # Lent, not copied.
    for one, same in zip(model.taps, model.taps, strict=True):
        if one.taps is not None:
            assert np.shares_memory(one.taps.data, same.taps.data) and np.shares_memory(one.taps.indices, same.taps.indices)
            assert not one.taps.data.flags.writeable
    # Every letter unrolled is the model's own sum.
    z, x, _ = model.equilibrium(u.numpy())
    bias = np.concatenate([np.repeat(b, s) for b, s in biases(model)])
    got = x @ model.unrolled("A").T + u.flatten(1).numpy() @ model.unrolled("B").T + bias
    np.testing.assert_allclose(got, z, atol=1e-3)
    with pytest.raises(simplicit.SettingError, match="max_nonzeros"):
        model.unrolled("A", max_nonzeros=10)
    with pytest.raises(simplicit.UnsupportedError, match="unrolled"):
        model.A  # noqa: B018


def test_certificates_of_convolutions_are_those_of_their_matrices():
    torch.manual_seed(1)
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 3, 3, 1, 1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 3)
    ).eval()
    u = torch.rand(200, 2, 8, 8)
    with torch.no_grad():
        module[-1].bias -= module(u).mean(0)  # classes of equal standing
    model = st.compress(module, [u], target_sparsity=0.3).model
    layout = [{k: v for k, v in layer.items() if k != "map"} for layer in model.layout]
    bias = np.concatenate([np.repeat(b, s) for b, s in biases(model)])
    letters = [model.unrolled(letter) for letter in "ABCD"]
    dense = simplicit.ImplicitModel.from_arrays(*letters, bias, model.d, layout=layout)
    labels = model.predict(u.numpy()).argmax(1)
    epsilon = [1e-4, 1e-3, 1e-2, 0.1]
    ours = model.certify(u.numpy(), labels, epsilon)
    theirs = dense.certify(u.flatten(1).numpy(), labels, epsilon)
    # Shared weights are charged a little more for rounding, so they never certify more.
    assert not (ours.certified & ~theirs.certified).any()
    assert (ours.certified != theirs.certified).mean() < 0.02
    assert ours.certified[:, 0].mean() > 0.5 and 0 < ours.certified[:, 2].mean() < 1 and not ours.certified[:, 3].all()


def test_certificates_through_maximum_pooling_hold():
    torch.manual_seed(2)
    pooled = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)).eval()
    u = torch.rand(100, 2, 8, 8)
    model = st.compress(pooled, [u], target_sparsity=0.3).model
    labels = model.predict(u.numpy()).argmax(1)
    certified = model.certify(u.numpy(), labels, [1e-3, 3e-2]).certified
    assert certified[:, 0].mean() > 0.5 and not certified[:, 1].all()
    rng = np.random.default_rng(0)
    for epsilon, safe in zip([1e-3, 3e-2], certified.T, strict=True):
        for _ in range(50):
            corner = np.clip(u.numpy() + epsilon * rng.choice([-1, 1], u.shape), 0, 1).astype(np.float32)
            assert (model.predict(corner).argmax(1) == labels)[safe].all()


def biases(model):
    """Every entry of b with the number of units that have it."""
    at = 0
    for layer in model.layout:
        rows = layer["map"]["channels"] if layer.get("map") else layer["size"]
        for b in model.b[at : at + rows]:
            yield b, layer["size"] // rows
        at += rows
