"""Docstring examples run, stubs agree with the module, types check, documents' snippets run."""

import doctest
import importlib
import importlib.util
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, idx, needs

import simplicit

PACKAGE = pathlib.Path(simplicit.__file__).parent


#: By walking the files: nothing is imported before its test asks whether it can be.
MODULES = sorted(".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts) for p in PACKAGE.rglob("*.py"))


def load(name):
    """A module of the package, if what it stands on is there."""
    for optional in ("torch", "ray"):
        if name.split(".")[1] == optional:
            needs(optional)
    return importlib.import_module(name.removesuffix(".__init__"))


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    outcome = doctest.testmod(load(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert outcome.failed == 0


def test_examples_are_there():
    """Every public class that is more than a record, and every public function, shows how it is used."""
    for thing in (simplicit.SIM, simplicit.ImplicitModel, simplicit.Network, simplicit.States, simplicit):
        assert ">>>" in thing.__doc__, thing


def test_public_things_have_numpydoc_docstrings():
    for name in simplicit.__all__:
        thing = getattr(simplicit, name)
        if isinstance(thing, type) and thing.__module__.startswith("simplicit."):
            assert thing.__doc__, name
            for method, function in vars(thing).items():
                public = not method.startswith("_") and callable(getattr(thing, method))
                if public and hasattr(function, "__doc__"):
                    assert getattr(thing, method).__doc__, f"{name}.{method}"


def test_stubs_agree_with_the_module(tmp_path):
    needs("mypy")
    command = [sys.executable, "-m", "mypy.stubtest", "simplicit._core", "--ignore-missing-stub"]
    # Away from the sources: the installed package is what is compared.
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_types():
    needs("mypy")
    assert (PACKAGE / "py.typed").exists()
    needs("torch")
    needs("ray")
    command = [sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports", "-p", "simplicit"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "python")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("document", ["README.md", "docs/python.md"])
def test_snippets_in_documents_run(document, tmp_path, monkeypatch):
    text = (ROOT / document).read_text()
    snippets = re.findall(r"```python\n(.*?)```", text, re.S)
    assert snippets
    monkeypatch.chdir(tmp_path)
    # What the snippets read: the repository's own files under the names they use.
    (tmp_path / "net.onnx").write_bytes((ROOT / "data/fashion_fc.onnx").read_bytes())
    images = idx("fashion_test_images.idx.gz")[:1000].reshape(1000, -1).astype(np.float32) / 255
    np.save(tmp_path / "images.npy", images)
    np.save(tmp_path / "labels.npy", idx("fashion_test_labels.idx.gz")[:1000].astype(np.int64))
    names: dict = {}
    for snippet in snippets:
        needed = [m for m in ("torch", "ray", "cvxpy") if re.search(rf"\b{m}\b", snippet)]
        if all(importlib.util.find_spec(m) for m in needed):
            exec(compile(snippet, document, "exec"), names)
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.shutdown()


def test_quickstart(tmp_path):
    script = ROOT / "examples/quickstart.py"
    done = subprocess.run([sys.executable, script, "--out", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model.safetensors").stat().st_size < 120_000
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    sparsity = float(re.search(r"([\d.]+) % fewer", done.stdout)[1])
    assert abs(sparsity - 75) < 0.3, done.stdout
