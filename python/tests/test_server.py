"""examples/server.py, asked over HTTP."""

import http.client
import io
import json
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

import simplicit


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A model behind the example, and a way to ask it."""
    rng = np.random.default_rng(3)
    A = np.triu(rng.normal(size=(6, 6)), 1)
    model = simplicit.ImplicitModel.from_arrays(A=A, B=rng.normal(size=(6, 4)), C=rng.normal(size=(3, 6)), D=np.zeros((3, 4)))
    path = tmp_path_factory.mktemp("server") / "m.safetensors"
    model.save(path)
    command = [sys.executable, ROOT / "examples/server.py", path, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            address, about = process.stdout.readline().split(" ", 1)
            assert json.loads(about) == {"inputs": 4, "outputs": 3, "sparsity": model.sparsity().sparsity, "served": 0}

            def ask(method, where, body=None, kind="application/json", **headers):
                connection = http.client.HTTPConnection("127.0.0.1", int(address.rsplit(":", 1)[1]), timeout=60)
                headers = {"Content-Type": kind, **headers}
                connection.request(method, where, body, headers)
                answer = connection.getresponse()
                return answer.status, answer.read()

            yield model, ask
        finally:
            process.terminate()


def test_predictions_are_the_models(served):
    model, ask = served
    u = np.random.default_rng(4).uniform(size=(5, 4))
    status, answer = ask("POST", "/predict", json.dumps({"inputs": u.tolist()}))
    answer = json.loads(answer)
    expected = model.predict(u.astype(np.float32))
    assert status == 200
    np.testing.assert_array_equal(np.asarray(answer["outputs"], np.float32), expected)
    assert answer["classes"] == expected.argmax(axis=1).tolist()
    raw = io.BytesIO()
    np.save(raw, u)
    status, answer = ask("POST", "/predict", raw.getvalue(), "application/octet-stream")
    assert status == 200
    np.testing.assert_array_equal(np.load(io.BytesIO(answer)), model.predict(u))
    status, answer = ask("GET", "/")
    assert status == 200 and json.loads(answer)["served"] == 10


def test_bad_requests_are_refused_with_a_reason(served):
    _, ask = served
    pickled = io.BytesIO()
    np.save(pickled, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    for status, word, body, kind in [
        (400, "inputs", "not json", "application/json"),
        (400, "inputs", '{"inputs": [[1, 2], [3]]}', "application/json"),
        (400, "inputs", '{"inputs": [1, 2, 3, 4]}', "application/json"),
        (400, "4", '{"inputs": [[1, 2, 3]]}', "application/json"),
        (400, "finite", '{"inputs": [[1, 2, 3, NaN]]}', "application/json"),
        (400, ".npy", b"nothing of the kind", "application/octet-stream"),
        (400, ".npy", pickled.getvalue(), "application/octet-stream"),
    ]:
        got, answer = ask("POST", "/predict", body, kind)
        assert (got, word in json.loads(answer)["error"]) == (status, True), (body, got, answer)
    assert ask("POST", "/elsewhere", "{}")[0] == 404
    assert ask("GET", "/elsewhere")[0] == 404
    assert ask("POST", "/predict", "{}", **{"Content-Length": str(1 << 40)})[0] == 413
    # It is still there.
    assert ask("POST", "/predict", '{"inputs": [[1, 2, 3, 4]]}')[0] == 200
