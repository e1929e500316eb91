"""Implicit models inside PyTorch: the same outputs, exact gradients."""

import copy
import pickle

import numpy as np
import pytest
from conftest import DATA, needs

import simplicit
from simplicit import SIM

torch = needs("torch")
from networks import Mixed, ResNet20, shake  # noqa: E402
from torch import nn  # noqa: E402

import simplicit.torch as st  # noqa: E402


def gradients_check(module, u):
    """By differences, in double precision: for inputs and for every parameter."""
    assert torch.autograd.gradcheck(module, (u,))
    names = [name for name, p in module.named_parameters() if p.numel()]
    parameters = tuple(module.get_parameter(name) for name in names)

    def outputs(*values):
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), (u.detach(),))

    assert torch.autograd.gradcheck(outputs, parameters)


def test_to_torch_has_the_same_outputs(cyclic, network, U):
    u = torch.randn(20, 5)
    np.testing.assert_allclose(cyclic.to_torch()(u).detach(), cyclic.predict(u.numpy()), atol=1e-5)
    np.testing.assert_allclose(network.to_implicit().to_torch()(torch.tensor(U)).detach(), network.forward(U), atol=1e-5)
    fitted = SIM(penalty="l1", scale=0.5, mean=0.25, std=2.0).fit(network, U).model_
    np.testing.assert_allclose(fitted.to_torch()(torch.tensor(U)).detach(), fitted.predict(U), atol=1e-5)


@pytest.mark.parametrize("which", ["cyclic", "acyclic"])
def test_gradcheck(which, cyclic, network):
    model = cyclic if which == "cyclic" else network.to_implicit()
    module = model.to_torch(dtype=torch.float64)
    u = torch.randn(3, model.n_inputs, dtype=torch.float64, requires_grad=True)
    gradients_check(module, u)


def test_gradient_is_the_librarys(cyclic):
    u = torch.randn(6, 5, requires_grad=True)
    v = torch.randn(6, 3)
    cyclic.to_torch()(u).backward(v)
    np.testing.assert_allclose(u.grad, cyclic.input_gradient(u.detach().numpy(), v.numpy()), atol=1e-4)


def test_not_converged_is_an_error():
    model = simplicit.ImplicitModel.from_arrays([[2.0]], [[1.0]], [[1.0]], [[0.0]])
    module = st.ImplicitModule(model, max_iterations=50)
    with pytest.raises(simplicit.NotConvergedError):
        module(torch.ones(2, 1))


@pytest.fixture(scope="module")
def mixed():
    torch.manual_seed(0)
    return Mixed().eval()


def test_convolutions_are_the_same_function(mixed):
    u = torch.randn(6, 2, 5, 8)
    network = st.network(mixed, u)
    model = network.to_implicit()
    with torch.no_grad():
        y = mixed(u)
    np.testing.assert_allclose(network.forward(u.numpy()), y, atol=1e-5)
    module = model.to_torch()
    assert isinstance(module, st.LayeredModule)
    np.testing.assert_allclose(module(u).detach(), y, atol=1e-5)
    # Weights are parameters, structure is not.
    assert sum(int(p.count_nonzero()) for p in module.parameters()) == model.sparsity().nonzeros
    for same in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(same(u), module(u))
    other = model.to_torch()
    other.load_state_dict(module.state_dict())


def test_gradcheck_through_convolutions(mixed):
    torch.manual_seed(1)
    u = torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True)
    model = st.network(mixed, u).to_implicit()
    gradients_check(model.to_torch(dtype=torch.float64), u)


def test_the_gradient_of_convolutions_is_the_librarys(mixed):
    u = torch.randn(6, 2, 5, 8, requires_grad=True)
    model = SIM(penalty="l1", beta=1e-5, scale=0.5, mean=[0.1, -0.2], std=[1.0, 2.0]).fit(
        st.network(mixed, u), np.random.default_rng(0).normal(size=(300, 2, 5, 8))
    ).model_
    v = torch.randn(6, 2)
    y = model.to_torch()(u)
    np.testing.assert_allclose(y.detach(), model.predict(u.detach().numpy()), atol=1e-5)
    y.backward(v)
    # The library's is with respect to the preprocessed input.
    inner = model.input_gradient(u.detach().numpy(), v.numpy()).reshape(u.shape)
    expected = inner * 0.5 / np.array([1.0, 2.0]).reshape(2, 1, 1)
    np.testing.assert_allclose(u.grad, expected, atol=1e-5)
    assert 0.1 < model.sparsity().sparsity < 0.9


def test_residual_sums_without_convolutions():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 2)

        def forward(self, u):
            x = torch.tanh(self.one(u))
            x = torch.tanh(self.two(x) + x)
            return self.three(x)

    torch.manual_seed(0)
    residual = Residual()
    u = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    model = st.network(residual, u.float()).to_implicit()
    module = model.to_torch(dtype=torch.float64)
    assert isinstance(module, st.ImplicitModule)
    np.testing.assert_allclose(module(u).detach(), residual.double()(u).detach(), atol=1e-6)
    assert sum(p.numel() for p in module.parameters()) == model.sparsity().nonzeros
    gradients_check(module, u)


@pytest.mark.parametrize("kind", ["dense", "convolutions"])
def test_rescaled_models(kind, network, U):
    if kind == "dense":
        model, u = network.to_implicit(), torch.tensor(U[:20])
    else:
        u = torch.randn(2, 3, 8, 8)
        model = st.network(shake(ResNet20(2)), u).to_implicit()
    small = model.rescale(0.9)
    expected = model.predict(u.numpy())
    np.testing.assert_allclose(small.to_torch()(u).detach(), expected, atol=1e-5 * max(1, np.abs(expected).max()))


def test_outputs_are_in_the_baselines_units(network, U):
    """The paper's layered scaling makes states and outputs smaller; predict and to_torch undo it."""
    model = SIM(preset="paper", penalty="l1", beta=1e-6, gamma=2.0).fit(network, U).model_
    assert model.output_factor > 1
    u = torch.tensor(U[:20], requires_grad=True)
    y = model.to_torch(dtype=torch.float64)(u)
    np.testing.assert_allclose(y.detach(), model.predict(U[:20]), atol=1e-4)
    assert np.abs(y.detach().numpy() - network.forward(U[:20])).max() < 0.2 * np.abs(network.forward(U)).max()
    v = torch.randn_like(y)
    y.backward(v)
    np.testing.assert_allclose(u.grad, model.input_gradient(U[:20], v.numpy()), atol=1e-3)


def test_resnet20():
    """The repository's own: 277,444 parameters, 188,416 states."""
    model = simplicit.Network.from_onnx(DATA / "resnet20_cifar100.onnx").to_implicit()
    module = model.to_torch()
    torch.manual_seed(0)
    u = torch.randn(2, 3, 32, 32, requires_grad=True)
    y = module(u)
    expected = model.predict(u.detach().numpy())
    scale = np.abs(expected).max()
    np.testing.assert_allclose(y.detach(), expected, atol=1e-4 * scale)
    assert sum(p.numel() for p in module.parameters()) == 277_444
    v = torch.randn_like(y)
    y.backward(v)
    expected = model.input_gradient(u.detach().numpy(), v.numpy()).reshape(u.shape)
    np.testing.assert_allclose(u.grad, expected, atol=1e-3 * np.abs(expected).max())
    assert all(p.grad is not None and bool(p.grad.any()) for p in module.parameters())
