import copy

import numpy as np
import pytest
from conftest import needs

import simplicit
from simplicit import SIM, States

torch = needs("torch")
from networks import Mixed, ResNet20, batches, shake  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import simplicit.torch as st  # noqa: E402


class Functional(nn.Module):
    """In place, functional, a method, a leaky one, and control flow that fx cannot trace."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(7, 6), nn.Linear(6, 5), nn.Linear(5, 4)
        self.four = nn.Linear(4, 3)
        self.act = nn.ReLU(inplace=True)

    def forward(self, u):
        x = self.act(self.one(u))
        x = F.leaky_relu(self.two(x), 0.25)
        x = self.three(x).tanh() if x.sum() > -1e30 else x
        return self.four(x)


class Twice(nn.Module):
    """A map that two activations read: a network, but not one to write weights back into."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, u):
        z = self.one(u)
        return self.two(torch.relu(z) + torch.tanh(z))


@pytest.fixture
def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(9, 14), nn.ReLU(), nn.Linear(14, 12), nn.ReLU(), nn.Linear(12, 4))


def test_collect_sees_every_activation():
    torch.manual_seed(0)
    module = Functional().train()
    loader = batches(7)
    states = st.collect(module, loader)
    assert module.training
    assert isinstance(states, States) and states.samples == 500
    assert [la["activation"] for la in states.layout] == ["tanh", "leaky-relu:0.25", "relu"]
    assert [la["size"] for la in states.layout] == [4, 5, 6]
    u = torch.cat([b[0] for b in loader])
    with torch.no_grad():
        z1 = module.one(u)
        z2 = module.two(z1.relu())
        z3 = module.three(F.leaky_relu(z2, 0.25))
        y = module.four(z3.tanh())
    np.testing.assert_allclose(states.Z, torch.hstack([z3, z2, z1]), atol=1e-6)
    np.testing.assert_allclose(states.Y, y, atol=1e-6)
    sim = SIM(penalty="l1", beta=1e-4, connectivity="feedforward", bias=True).fit(states)
    assert sim.score(states.U, states.Y) > 0.99


def test_collect_into_statistics_does_not_depend_on_batches(mlp):
    u = torch.cat([b[0] for b in batches(9, count=30)])
    m, G, H, e = st.collect(mlp, u.split(100), into="statistics")
    states = st.collect(mlp, [u])
    features = np.hstack([states.X, states.U, np.ones((m, 1))]).astype(float)
    targets = np.hstack([states.Z, states.Y]).astype(float)
    assert m == 3000
    np.testing.assert_allclose(G, features.T @ features, rtol=1e-5, atol=1e-2)
    np.testing.assert_allclose(H, targets.T @ features, rtol=1e-5, atol=1e-2)
    np.testing.assert_allclose(e, (targets**2).sum(0), rtol=1e-5)
    again = st.collect(mlp, [torch.from_numpy(states.U)], into="statistics")
    for ours, theirs in zip(again, (m, G, H, e), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-4)


def test_statistics_are_fitted_as_their_states_are(mlp):
    loader = batches(9)
    sums, states = st.collect(mlp, loader, into="statistics"), st.collect(mlp, loader)
    how = {"penalty": "l1", "beta": 2e-3, "connectivity": "baseline", "bias": True, "progress": "none"}
    ours = SIM(**how).fit(sums)
    theirs = SIM(cascade=False, output_refit=0, **how).fit(states)
    # One convex problem a row; where it starts makes no difference.
    for letter in "ABCD":
        np.testing.assert_allclose(getattr(ours.model_, letter).toarray(), getattr(theirs.model_, letter).toarray(), atol=2e-4)
    np.testing.assert_allclose(ours.model_.b, theirs.model_.b, atol=2e-4)
    assert ours.model_.sparsity().nonzeros < sums.baseline_nonzeros
    half = SIM(target_sparsity=0.4, bias=True, progress="none").fit(sums)
    assert half.model_.sparsity().sparsity == pytest.approx(0.4, abs=0.01)
    assert half.report_.sparsity == pytest.approx(float(half.model_.sparsity().sparsity))
    with pytest.raises(simplicit.SettingError, match="connectivity"):
        SIM(connectivity="full").fit(sums)
    with pytest.raises(simplicit.SettingError, match="target_sparsity.*bias=True"):
        SIM(target_sparsity=0.4).fit(sums)


def test_a_plain_mlp_is_the_same_network(mlp):
    u = torch.randn(50, 3, 3)
    network = st.network(mlp, u)
    assert network.nonzeros == sum(p.numel() for p in mlp.parameters())
    np.testing.assert_allclose(network.forward(u.numpy()), mlp(u).detach(), atol=1e-5)


def test_a_resnet20_is_the_same_network():
    module = shake(ResNet20())
    u = torch.randn(4, 3, 32, 32)
    network = st.network(module, u)
    with torch.no_grad():
        y = module(u)
    np.testing.assert_allclose(network.forward(u.numpy()), y, atol=2e-4 * float(y.abs().max()))
    assert network.n_states == 188_416
    states = st.collect(shake(ResNet20(4)), [torch.randn(2, 3, 8, 8)])
    assert len(states.layout) == 19
    small = st.network(shake(ResNet20(4)), torch.zeros(1, 3, 8, 8))
    assert [la["size"] for la in states.layout] == [la["size"] for la in small.layout]


def test_every_way_to_write_a_layer_is_the_same_network():
    torch.manual_seed(0)
    for module, shape in ((Mixed(), (2, 5, 8)), (Twice(), (2,))):
        u = torch.randn(5, *shape)
        before = copy.deepcopy(module.state_dict())
        assert module.train() is module
        network = st.network(module, u)
        assert module.training
        assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
        np.testing.assert_allclose(network.forward(u.numpy()), module(u).detach(), atol=1e-5)


# compress(as_module=...) is the door before modules ran themselves: by way of the converted network.
pytestmark = pytest.mark.filterwarnings("ignore:as_module:DeprecationWarning")


def test_compress_an_mlp(mlp):
    loader = batches(9)
    u = torch.cat([b[0] for b in loader])
    before = [p.detach().clone() for p in mlp.parameters()]
    model = st.compress(mlp, loader, target_sparsity=0.4, as_module=False)
    assert model.sparsity().sparsity == pytest.approx(0.4, abs=0.01)
    sparse = st.compress(mlp, loader, target_sparsity=0.4, as_module=True)
    assert all(torch.equal(a, b) for a, b in zip(before, mlp.parameters(), strict=True))
    kept = sum(int(p.count_nonzero()) for p in sparse.parameters())
    assert kept == model.sparsity().nonzeros
    np.testing.assert_allclose(sparse(u).detach(), model.predict(u.numpy()), atol=1e-5)
    loss = sparse(u).square().mean()
    loss.backward()
    assert all(p.grad is not None for p in sparse.parameters())


def test_compress_a_resnet20():
    module = shake(ResNet20(4))
    loader = [torch.randn(50, 3, 8, 8, generator=torch.Generator().manual_seed(k)) for k in range(4)]
    u = torch.cat(loader)
    model = st.compress(module, loader, target_sparsity=0.4, as_module=False)
    assert model.sparsity().sparsity == pytest.approx(0.4, abs=0.01)
    sparse = st.compress(module, loader, target_sparsity=0.4, as_module=True)
    with torch.no_grad():
        y = module(u)
        expected = model.predict(u.numpy())
        for same in (sparse, model.to_torch()):
            np.testing.assert_allclose(same(u), expected, atol=1e-5 * float(y.abs().max()))
        assert (sparse(u) - y).norm() < 0.1 * y.norm()
    # Ready to fine-tune: the gradient reaches every weight.
    sparse(u).square().mean().backward()
    assert all(p.grad is not None for p in sparse.parameters())


def test_compress_takes_batch_norm_apart():
    torch.manual_seed(3)
    module = shake(nn.Sequential(nn.Linear(9, 14, bias=False), nn.BatchNorm1d(14), nn.ReLU(), nn.Linear(14, 3)))
    loader = batches(9)
    u = torch.cat([b[0] for b in loader])
    model = st.compress(module, loader, target_sparsity=0.4, as_module=False)
    sparse = st.compress(module, loader, target_sparsity=0.4, as_module=True)
    np.testing.assert_allclose(sparse(u).detach(), model.predict(u.numpy()), atol=1e-5)
    assert int(sparse[0].weight.count_nonzero()) < 14 * 9


def test_what_is_refused(mlp):
    with pytest.raises(simplicit.UnsupportedError, match="torch.fx cannot trace"):
        st.network(Functional(), torch.zeros(1, 7))
    with pytest.raises(simplicit.UnsupportedError, match="GELU"):
        st.network(nn.Sequential(nn.Linear(2, 2), nn.GELU()), torch.zeros(1, 2))
    with pytest.raises(simplicit.UnsupportedError, match="maximum pooling.*ceil_mode"):
        st.network(nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)), torch.zeros(1, 1, 5, 5))
    with pytest.raises(simplicit.UnsupportedError, match="one at one.*read 2 times"):
        st.compress(Twice(), [torch.zeros(9, 2)], as_module=True)
    with pytest.raises(simplicit.SettingError, match="as_module"):
        st.compress(mlp, batches(9), as_module=True, connectivity="full")
    with pytest.raises(simplicit.ShapeError, match="at least one batch"):
        st.collect(mlp, [])
