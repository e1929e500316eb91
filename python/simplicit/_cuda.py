"""Finds CUDA's libraries: PyTorch and others install them as ``nvidia`` packages, which no system loader searches."""

from __future__ import annotations

import importlib.util
import os

VARIABLE = "SIMPLICIT_CUDA_PATH"


def find_cuda() -> None:
    """Name the folders with ``nvidia`` packages of this Python to the library, unless folders were named before."""
    if VARIABLE in os.environ:
        return
    spec = importlib.util.find_spec("nvidia")
    folders = [os.path.dirname(path) for path in (spec.submodule_search_locations or ())] if spec else []
    if folders:
        os.environ[VARIABLE] = os.pathsep.join(folders)
