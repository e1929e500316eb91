"""Docstring examples run, stubs agree with the module, types check, documents' snippets run."""

import doctest
import importlib
import importlib.util
import inspect
import os
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


def documented(docstring):
    """Names under Parameters, as numpydoc has them."""
    section = re.search(r"^Parameters\n-+\n(.*?)(?=^\w[\w ]*\n-+$|\Z)", inspect.cleandoc(docstring), re.S | re.M)
    lines = re.findall(r"^(\S.*)$", section[1], re.M) if section else []
    return {name.strip().lstrip("*") for line in lines for name in line.split(" : ")[0].split(",")}


def public(module):
    """Classes, functions and methods that a module defines."""
    for name, thing in vars(module).items():
        if name.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(thing):
            yield f"{module.__name__}.{name}", thing
        if inspect.isclass(thing):
            yield f"{module.__name__}.{name}", thing
            for method in vars(thing):
                function = inspect.getattr_static(thing, method)
                function = function.__func__ if isinstance(function, classmethod | staticmethod) else function
                if not method.startswith("_") and (isinstance(function, property) or inspect.isfunction(function)):
                    yield f"{module.__name__}.{name}.{method}", function


#: What users call: methods of these classes, and these functions.
CLASSES = ("SIM", "ImplicitModel", "Network", "States", "Report", "Compressed")
FUNCTIONS = (
    "simplicit.ray.fit",
    *(f"simplicit.torch._{name}.{name}" for name in ("collect", "compress", "network", "polish")),
    "simplicit.torch._compressed.hold",
    "simplicit.torch._modules.implicit",
)


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_name_every_parameter(name):
    module = load(name)
    assert module.__doc__
    for where, thing in public(module):
        assert thing.__doc__, where
        called = where in FUNCTIONS or where.split(".")[-2] in CLASSES
        if called and inspect.isfunction(thing):
            given = set(inspect.signature(thing).parameters) - {"self"}
            assert given <= documented(thing.__doc__) | {"cls"}, where


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


@pytest.mark.parametrize("document", ["README.md", "docs/python.md", "docs/pytorch.md", "docs/guides/transformer.md"])
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
        needed = [m for m in ("torch", "torchvision", "ray", "cvxpy") if re.search(rf"\b{m}\b", snippet)]
        # With CI=true what is missing is a failure.
        if os.environ.get("CI") == "true" or all(importlib.util.find_spec(m) for m in needed):
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
