import pickle

import numpy as np
import pytest
import scipy.sparse
from conftest import DATA, needs

import simplicit
from simplicit import ImplicitModel


def reference(model, u):
    """x = φ(Ax + Bu + b) by plain iteration in double precision."""
    A, B, C, D = (m.toarray().astype(float) for m in (model.A, model.B, model.C, model.D))
    x = np.zeros((len(u), model.n_states))
    for _ in range(3000):
        z = x @ A.T + u @ B.T + model.b
        x = np.hstack([np.tanh(z[:, :5]), np.maximum(z[:, 5:], 0)])
    return z, x, x @ C.T + u @ D.T + model.d


def test_equilibrium_of_a_cyclic_model(cyclic):
    u = np.random.default_rng(0).normal(size=(40, 5))
    z, x, y = reference(cyclic, u.astype(np.float32).astype(float))
    got = cyclic.equilibrium(u)
    for ours, theirs in zip(got, (z, x, y), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
    np.testing.assert_array_equal(cyclic.predict(u), got[2])
    diagnostics = cyclic.diagnostics(u)
    assert diagnostics.converged.all() and diagnostics.iterations.min() > 1
    assert (np.abs(cyclic.predict(u) - y).max(axis=1) <= diagnostics.output_error + 1e-6).all()


def test_every_type_and_stride_gives_the_same(cyclic):
    u = np.random.default_rng(1).normal(size=(12, 5)).astype(np.float32)
    expected = cyclic.predict(u)
    wide = np.zeros((24, 10), np.float32)
    wide[::2, ::2] = u
    for same in (u.astype(np.float64), np.asfortranarray(u), wide[::2, ::2], u[::-1][::-1], u.tolist(), u.astype(">f4")):
        np.testing.assert_array_equal(cyclic.predict(same), expected)
    np.testing.assert_array_equal(
        cyclic.predict(np.array([[1, 2, 3, 4, 5]], np.uint8)), cyclic.predict([[1.0, 2, 3, 4, 5]])
    )
    np.testing.assert_array_equal(cyclic.predict(u[:, ::-1][:, ::-1].reshape(12, 5, 1)), expected)


def test_matrices_are_lent_not_copied(cyclic):
    core = cyclic._core
    for letter in "ABCD":
        ours = getattr(cyclic, letter)
        assert isinstance(ours, scipy.sparse.csr_array)
        _, indices, data, _ = core.csr(letter)
        assert np.shares_memory(ours.data, data) and np.shares_memory(ours.indices, indices)
        assert np.shares_memory(getattr(cyclic, letter).data, ours.data)
        assert not ours.data.flags.writeable
        with pytest.raises(ValueError):
            ours.data[0] = 1.0
    kept = cyclic.A
    assert kept.has_sorted_indices
    np.testing.assert_allclose(kept @ np.ones(8), kept.toarray().sum(1), rtol=1e-6)
    # The array outlives its model.
    data = ImplicitModel.from_arrays(np.eye(2) / 2, np.eye(2), np.eye(2), np.zeros((2, 2))).A.data
    assert data.tolist() == [0.5, 0.5]


def test_a_model_from_the_matrices_of_another(cyclic):
    parts = [cyclic.A, cyclic.B, cyclic.C, cyclic.D]
    again = ImplicitModel.from_arrays(*parts, cyclic.b, cyclic.d, layout=cyclic.layout)
    u = np.random.default_rng(0).normal(size=(5, cyclic.n_inputs))
    np.testing.assert_array_equal(again.predict(u), cyclic.predict(u))
    # What is given stays as it is, also where it is not in order.
    given = scipy.sparse.csr_array((np.array([1.0, 2.0, 0.0], np.float32), [1, 0, 1], [0, 2, 3]), shape=(2, 2))
    ImplicitModel.from_arrays(np.zeros((2, 2)), given, np.eye(2), np.zeros((2, 2)))
    assert given.nnz == 3 and given.indices.tolist() == [1, 0, 1]


def test_files_pickles_and_equality(cyclic, tmp_path):
    path = tmp_path / "model.safetensors"
    cyclic.save(path)
    again = ImplicitModel.load(path)
    assert again == cyclic and path.read_bytes() == cyclic.to_bytes()
    assert pickle.loads(pickle.dumps(cyclic)) == cyclic
    assert again.layout == cyclic.layout
    assert "8 states" in repr(again) and "<table>" in again._repr_html_()


def test_counts_and_well_posedness(cyclic):
    size = cyclic.sparsity()
    assert size.nonzeros == 8 * 8 + 8 * 5 + 3 * 8 + 3 * 5 + 8 + 3
    assert size.bytes == len(cyclic.to_bytes())
    posed = cyclic.well_posedness()
    A = np.abs(cyclic.A.toarray().astype(float))
    assert posed.norm_a_inf == pytest.approx(A.sum(1).max())
    radius = np.abs(np.linalg.eigvals(A)).max()
    assert radius <= posed.lambda_pf_upper <= radius + 1e-4
    assert posed.is_shown and not posed.acyclic


def test_gradient_by_differences(cyclic):
    rng = np.random.default_rng(5)
    u, v = rng.normal(size=(6, 5)), rng.normal(size=(6, 3))
    gradient = cyclic.input_gradient(u, v)
    for j in range(5):
        e = np.zeros(5)
        e[j] = 1e-5
        difference = ((reference(cyclic, u + e)[2] - reference(cyclic, u - e)[2]) * v).sum(1) / 2e-5
        np.testing.assert_allclose(gradient[:, j], difference, atol=1e-3)


def test_onnx_export_runs_elsewhere(cyclic, network, U, tmp_path):
    runtime = needs("onnxruntime")
    for name, model, u in (("c", cyclic, np.random.default_rng(6).normal(size=(9, 5))), ("n", network.to_implicit(), U)):
        path = tmp_path / f"{name}.onnx"
        model.to_onnx(path)
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        (y,) = session.run(None, {session.get_inputs()[0].name: u.astype(np.float32)})
        np.testing.assert_allclose(y, model.predict(u), atol=1e-4)


def test_network_forward_and_states(network, weights, biases, U):
    x = U.astype(np.float32).astype(float)
    seen = []
    for w, b in zip(weights[:-1], biases[:-1], strict=True):
        z = x @ w.T + b
        x = np.maximum(z, 0)
        seen.append((z, x))
    y = x @ weights[-1].T + biases[-1]
    np.testing.assert_allclose(network.forward(U), y, atol=1e-5)
    states = network.states(U)
    np.testing.assert_allclose(states.Z, np.hstack([seen[1][0], seen[0][0]]), atol=1e-5)
    np.testing.assert_allclose(states.X, np.hstack([seen[1][1], seen[0][1]]), atol=1e-5)
    np.testing.assert_allclose(network.to_implicit().predict(U), y, atol=1e-5)
    again = pickle.loads(pickle.dumps(network))
    np.testing.assert_array_equal(again.forward(U), network.forward(U))


def test_onnx_network():
    network = simplicit.Network.from_onnx(DATA / "fashion_fc.onnx")
    assert network.nonzeros == 52_896
    again = pickle.loads(pickle.dumps(network))
    u = np.random.default_rng(0).uniform(size=(3, 784))
    np.testing.assert_array_equal(again.forward(u), network.forward(u))


def test_onnx_network_takes_sizes_that_fit():
    path = DATA / "resnet20_cifar100.onnx"
    network = simplicit.Network.from_onnx(path, input_shape=(3, 32, 32))
    assert network.nonzeros == simplicit.Network.from_onnx(path).nonzeros
    u = np.random.default_rng(0).standard_normal((2, 3 * 32 * 32))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(network)).forward(u), network.forward(u))
    with pytest.raises(simplicit.Error, match="input_shape.*3x16x16"):
        simplicit.Network.from_onnx(path, input_shape=(3, 16, 16))
    with pytest.raises(simplicit.Error, match="fill.*mask"):
        simplicit.Network.from_onnx(path, fill={"mask": 1})


def test_rescale_keeps_the_outputs(network, U):
    model = network.to_implicit()
    small = model.rescale(0.9)
    assert small.well_posedness().norm_a_inf <= 0.9 < model.well_posedness().norm_a_inf
    np.testing.assert_array_equal(small.predict(U), model.predict(U))


def test_report_is_the_command_lines_page(network, U):
    page = network.to_implicit().report(baseline=network, U=U, labels=network.forward(U).argmax(1), title="a <b> page")
    assert page.html.startswith("<!doctype html>") and "a &lt;b&gt; page" in page.html
    assert 'id="pattern"' in page.html and page._repr_html_().startswith("<iframe")
