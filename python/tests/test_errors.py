import os
import signal
import threading
import time

import numpy as np
import pytest
from conftest import DATA

import simplicit
from simplicit import SIM, ImplicitModel, Network


def test_shapes_name_both_sides(network):
    with pytest.raises(simplicit.ShapeError, match="expected 9 values per sample, got 5 values per sample") as caught:
        network.to_implicit().predict(np.zeros((3, 5)))
    assert caught.value.expected == "9 values per sample" and caught.value.got == "5 values per sample"
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, simplicit.Error)


def test_not_finite_names_the_place(network):
    u = np.zeros((7, 9))
    u[4, 2] = np.nan
    with pytest.raises(simplicit.NotFiniteError, match="U: NaN at row 4, column 2") as caught:
        network.to_implicit().predict(u)
    assert (caught.value.row, caught.value.column) == (4, 2)


def test_axes_in_another_order():
    network = Network.from_onnx(DATA / "resnet20_cifar100.onnx")
    first, last = (np.zeros((2, *sizes), np.float32) for sizes in ((3, 32, 32), (32, 32, 3)))
    model = network.to_implicit()
    for run in (network.forward, model.predict, lambda u: SIM().fit(network, u)):
        with pytest.raises(simplicit.ShapeError, match="expected 3 × 32 × 32, got 32 × 32 × 3: transpose"):
            run(last)
    assert np.array_equal(model.predict(first), model.predict(first.reshape(2, -1)))


def test_files(tmp_path):
    path = tmp_path / "x.safetensors"
    with pytest.raises(simplicit.FileError) as caught:
        ImplicitModel.load(path)
    assert caught.value.path == str(path) and isinstance(caught.value, OSError)
    path.write_bytes(b"nonsense")
    with pytest.raises(simplicit.FileError, match="x.safetensors"):
        ImplicitModel.load(path)
    with pytest.raises(simplicit.FileError):
        Network.from_onnx(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kappa": 1.5}, "kappa: expected a number between 0 and 1, got 1.5"),
        ({"target_sparsity": 2.0}, "target.sparsity: expected a number below 1"),
        ({"target_sparsity": -0.1}, "target.sparsity: expected a number below 1"),
        ({"penalty": "l3"}, "l3"),
        ({"penalty": "l1", "mu": 1.0}, "mu: expected another penalty; l1 has no such parameter"),
        ({"connectivity": "mask"}, "connectivity mask: expected"),
        ({"samples": 10_000}, "samples: expected at most 700"),
        ({"mean": [1.0, 2.0]}, "mean: expected 1 value"),
    ],
)
def test_settings(network, U, settings, message):
    with pytest.raises(simplicit.SettingError, match=message) as caught:
        SIM(**settings).fit(network, U)
    assert "--" not in str(caught.value) and "\n" not in str(caught.value)


def test_wrong_kinds(network, U, states):
    with pytest.raises(simplicit.SettingError, match="network: expected a network"):
        SIM().fit(3, U)
    with pytest.raises(simplicit.SettingError, match="U: expected the inputs"):
        SIM().fit(network)
    with pytest.raises(simplicit.SettingError, match="U: expected None"):
        SIM().fit(states, U)
    with pytest.raises(simplicit.ShapeError, match="expected numbers"):
        network.forward(["a"])
    with pytest.raises(simplicit.ShapeError, match="X, layer"):
        SIM().fit(simplicit.States(states.U, states.Z, states.Z, states.Y, layout=states.layout))


def test_not_converged_is_a_warning(cyclic):
    u = np.random.default_rng(0).normal(size=(4, 5))
    with pytest.warns(simplicit.ConvergenceWarning, match="4 sample"):
        cyclic.predict(u, max_iterations=1, memory=0)


def test_rows_that_cannot_match_exactly(network, U):
    with pytest.raises(simplicit.InfeasibleError) as caught:
        SIM(penalty="l1", matching="exact", connectivity="full", kappa=0.01, normalize=False).fit(network, U)
    assert len(caught.value.rows) > 0 and all(name and residual > 0 for name, residual in caught.value.rows)


def test_attributes_are_always_there():
    with pytest.raises(simplicit.SettingError) as caught:
        SIM().set_params(kapa=1)
    assert (caught.value.setting, caught.value.got) == ("", "")


def test_control_c_stops_training_at_once():
    rng = np.random.default_rng(0)
    network = Network.from_layers([rng.normal(size=(300, 200)), rng.normal(size=(300, 300)), rng.normal(size=(5, 300))])
    U = rng.normal(size=(3000, 200))
    sim = SIM(penalty="perspective", connectivity="full", rounds=4)
    # A shell's background jobs ignore it from birth.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            sim.fit(network, U)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begin < 30
    assert not hasattr(sim, "model_")


def test_other_threads_run_meanwhile(network):
    U = np.random.default_rng(0).normal(size=(20_000, 9))
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.005)

    thread = threading.Thread(target=tick)
    thread.start()
    SIM(penalty="l1", target_sparsity=0.5).fit(network, U)
    stop.set()
    thread.join()
    assert len(ticks) > 5 and max(np.diff(ticks)) < 2.0
