import pickle
import subprocess

import numpy as np
import pytest
from conftest import DATA, ROOT, idx, needs

import simplicit
from simplicit import SIM, ImplicitModel, States


def test_parameters():
    sim = SIM(penalty="l1", kappa=0.5)
    assert sim.get_params()["kappa"] == 0.5 and sim.get_params()["beta"] is None
    assert sim.set_params(beta=0.1, kappa=None) is sim and sim.beta == 0.1
    with pytest.raises(simplicit.SettingError, match="kapa"):
        sim.set_params(kapa=1)
    assert repr(SIM()) == "SIM()"
    assert repr(SIM("l1", target_sparsity=0.8)) == "SIM(penalty='l1', target_sparsity=0.8)"
    assert "not fitted" in SIM()._repr_html_()


def test_clone_by_scikit_learn():
    base = needs("sklearn.base")
    sim = SIM(penalty="l1", target_sparsity=0.25, mask=np.ones((3, 3)))
    sim.model_ = "fitted"
    copy = base.clone(sim)
    assert not hasattr(copy, "model_")
    assert copy is not sim and copy.get_params().keys() == sim.get_params().keys()
    assert copy.penalty == "l1" and copy.target_sparsity == 0.25


def test_not_fitted(U):
    with pytest.raises(simplicit.NotFittedError, match="call fit first"):
        SIM().predict(U)
    assert issubclass(simplicit.NotFittedError, AttributeError)


def test_one_output_is_no_class(U):
    rng = np.random.default_rng(5)
    weights, biases = [rng.normal(size=(6, 9)), rng.normal(size=(1, 6))], [rng.normal(size=6), rng.normal(size=1)]
    network = simplicit.Network.from_layers(weights, biases)
    sim = SIM(target_sparsity=0.2, progress="none").fit(network, U)
    # Whole numbers beside one output are values, not classes: all would be class 0.
    counts = np.round(network.forward(U)[:, 0]).astype(int)
    assert sim.score(U, counts) == pytest.approx(sim.score(U, counts.astype(float)))
    assert sim.score(U, counts) > 0.8


def test_fit_predict_score_pickle(network, U):
    sim = SIM(target_sparsity=0.3, progress="none")
    assert sim.fit(network, U) is sim
    assert sim.n_features_in_ == 9
    assert sim.model_.sparsity().sparsity == pytest.approx(0.3, abs=0.01)
    y = network.forward(U)
    r2 = 1 - ((sim.predict(U) - y) ** 2).sum() / ((y - y.mean(0)) ** 2).sum()
    assert sim.score(U, y) == pytest.approx(r2, abs=1e-6) and r2 > 0.9
    labels = y.argmax(1)
    assert sim.score(U, labels) == np.mean(sim.predict(U).argmax(1) == labels)
    again = pickle.loads(pickle.dumps(sim))
    np.testing.assert_array_equal(again.predict(U), sim.predict(U))
    assert again.report_.results == sim.report_.results
    report = sim.report_
    assert report.sparsity == float(sim.model_.sparsity().sparsity)
    assert len(report.rows) == 14 + 12 + 4 and "<table>" in report._repr_html_()
    page = sim.report(baseline=network, title="mine").html
    assert "<title>mine</title>" in page and 'id="rows"' in page
    with pytest.raises(simplicit.SettingError, match="results: expected the run of this model"):
        network.to_implicit().report(results=report.results)


def test_certified_rows_and_kappa(states):
    sim = SIM(penalty="l1", beta=1e-3, kappa=0.8, connectivity="no-self-loop").fit(states)
    assert sim.report_.max_relative_gap <= 1e-6
    A = sim.model_.A.toarray()
    assert np.abs(A.astype(float)).sum(1).max() <= 0.8 and not np.diag(A).any()
    assert sim.model_.well_posedness().norm_a_inf <= 0.8


def test_the_objective_is_the_contracts(states):
    """One convex solve, recomputed: no other weights of the row do better."""
    sim = SIM(
        penalty="l1", beta=0.02, connectivity="feedforward", rounds=1, refit=False, cascade=False, bias=True
    ).fit(states)
    F = np.hstack([states.X, states.U])
    rms = np.sqrt((F**2).mean(0))
    C = np.hstack([sim.model_.C.toarray(), sim.model_.D.toarray()]).astype(float)

    def value(w, d, y):
        t = np.sqrt((y**2).mean())
        return ((y - F @ w - d) ** 2).mean() / t**2 + 0.02 * (np.abs(w) * rms).sum() / t

    rng = np.random.default_rng(0)
    for k in range(4):
        y = states.Y[:, k]
        best = value(C[k], sim.model_.d[k], y)
        for _ in range(200):
            step = rng.normal(size=C.shape[1]) * 1e-3 * (rng.uniform(size=C.shape[1]) < 0.2)
            assert value(C[k] + step, sim.model_.d[k], y) >= best * (1 - 2e-6)


def test_mask_and_array_kinds(states, U, network):
    n, p, q = 26, 9, 4
    mask = np.random.default_rng(0).uniform(size=(n + q, n + p)) < 0.5
    mask[:n, :n] = np.triu(mask[:n, :n], 1)
    sim = SIM(penalty="l1", mask=mask).fit(states)
    A, B, C, D = (sim.model_.A, sim.model_.B, sim.model_.C, sim.model_.D)
    M = np.block([[A.toarray(), B.toarray()], [C.toarray(), D.toarray()]])
    assert not M[~mask].any() and M[mask].any()
    single = SIM(penalty="l1").fit(network, U.astype(np.float32))
    double = SIM(penalty="l1").fit(network, np.asfortranarray(U.astype(np.float32).astype(np.float64)))
    np.testing.assert_array_equal(single.model_.A.toarray(), double.model_.A.toarray())


def test_threads_change_nothing_and_progress_is_told(network, U):
    told = []
    one = SIM(penalty="l1", threads=1, progress=lambda *event: told.append(event)).fit(network, U)
    two = SIM(penalty="l1", threads=2).fit(network, U)
    assert one.model_ == two.model_
    assert all(isinstance(what, str) and 0 <= done <= total for what, done, total in told)

    def fail(*_):
        raise RuntimeError("seen")

    big = np.random.default_rng(0).normal(size=(60_000, 9))
    with pytest.raises(RuntimeError, match="seen"):
        SIM(target_sparsity=0.5, progress=fail).fit(network, big)


def test_missed_target_is_a_warning(network, U):
    with pytest.warns(simplicit.ConvergenceWarning, match="target sparsity"):
        SIM(penalty="ridge", target_sparsity=0.9).fit(network, U)


def test_states_files(states, tmp_path):
    np.savez(tmp_path / "s.npz", U=states.U, Z=states.Z, X=states.X, Y=states.Y)
    loaded = States.load(tmp_path / "s.npz")
    np.testing.assert_array_equal(loaded.Z, states.Z)
    sim = SIM(penalty="l1").fit(tmp_path / "s.npz")
    assert sim.model_ == SIM(penalty="l1").fit(States(states.U, states.Z, states.X, states.Y)).model_


def test_checkpoint_directory(network, U, tmp_path):
    sim = SIM(penalty="l1", checkpoint=tmp_path / "run").fit(network, U)
    assert len(list((tmp_path / "run").iterdir())) > 3
    assert SIM(penalty="l1", checkpoint=tmp_path / "run").fit(network, U).model_ == sim.model_


def test_the_command_line_makes_the_same_weights(tmp_path):
    program = ROOT / "target" / "release" / "simplicit"
    if not program.exists():
        pytest.skip("the command line is not built")
    u = idx("fashion_train_images.idx.gz")[:1000].reshape(1000, -1)
    np.save(tmp_path / "u.npy", u)
    path = tmp_path / "m.safetensors"
    line = [program, "train", "--network", DATA / "fashion_fc.onnx", "--inputs", tmp_path / "u.npy", "--scale", "1/255"]
    subprocess.run([*line, "--penalty", "l1", "--beta", "1e-3", "--out", path], check=True, capture_output=True)
    theirs = ImplicitModel.load(path)
    ours = SIM(penalty="l1", beta=1e-3, scale=1 / 255).fit(DATA / "fashion_fc.onnx", u).model_
    for letter in "ABCD":
        np.testing.assert_array_equal(getattr(ours, letter).toarray(), getattr(theirs, letter).toarray())
    np.testing.assert_array_equal(ours.predict(u), theirs.predict(u))
    # The same page, too: timings are left out by measuring nothing.
    page = [program, "report", "--model", path, "--network", DATA / "fashion_fc.onnx", "--out", tmp_path / "r.html"]
    subprocess.run(page, check=True, capture_output=True)
    network = simplicit.Network.from_onnx(DATA / "fashion_fc.onnx")
    assert theirs.report(baseline=network, title=path.name).html == (tmp_path / "r.html").read_text()


def test_inside_scikit_learn(network, U):
    needs("sklearn")
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import Pipeline
    from sklearn.preprocessing import FunctionTransformer

    quiet = {"network": network, "bounds": "off", "progress": "none"}
    pipe = Pipeline([("same", FunctionTransformer()), ("sim", SIM(target_sparsity=0.3, **quiet))]).fit(U)
    plain = SIM(target_sparsity=0.3, **quiet).fit(U)
    np.testing.assert_array_equal(pipe.predict(U), plain.predict(U))
    # Without labels the score is against the network's own outputs.
    assert plain.score(U) == pytest.approx(plain.score(U, network.forward(U)), abs=1e-9)
    labels = network.forward(U).argmax(1)
    for y in (None, labels):
        search = GridSearchCV(SIM(**quiet), {"target_sparsity": [0.2, 0.7]}, cv=2).fit(U, y)
        assert search.best_params_ == {"target_sparsity": 0.2}
        assert search.best_estimator_.model_.sparsity().sparsity == pytest.approx(0.2, abs=0.01)


def test_the_old_call_warns_and_gives_the_same(network, U):
    with pytest.warns(DeprecationWarning, match=r"SIM\(network=network\)"):
        old = SIM(penalty="l1").fit(network, U)
    assert old.model_ == SIM(penalty="l1", network=network).fit(U).model_
    with pytest.raises(simplicit.SettingError, match="network: expected"):
        SIM().fit(U)
    with pytest.raises(simplicit.SettingError, match="got another network"):
        SIM(network=network).fit(network, U)
    with pytest.raises(simplicit.SettingError, match="y: expected labels"):
        old.score(U)
