"""Sparse, well-posed implicit models from trained networks, by convex optimisation.

A trained network goes in, an implicit model ``x = φ(Ax + Bu + b)``, ``y = Cx + Du + d`` with as few non-zero weights as
possible comes out. Samples are rows everywhere.

Examples
--------
>>> import numpy as np
>>> import simplicit
>>> rng = np.random.default_rng(0)
>>> network = simplicit.Network.from_layers(
...     [rng.normal(size=(40, 20)), rng.normal(size=(3, 40))], activation="relu"
... )
>>> U = rng.normal(size=(500, 20))
>>> sim = simplicit.SIM(network=network, target_sparsity=0.5).fit(U)
>>> round(float(sim.model_.sparsity().sparsity), 1)
0.5
>>> sim.predict(U).shape
(500, 3)
"""

from simplicit import errors
from simplicit._core import __version__
from simplicit.errors import (
    ConvergenceWarning,
    Error,
    FileError,
    InfeasibleError,
    NotConvergedError,
    NotFiniteError,
    NotFittedError,
    SettingError,
    ShapeError,
    UnsupportedError,
)
from simplicit.estimator import SIM
from simplicit.model import ImplicitModel
from simplicit.network import Network
from simplicit.report import Report, TrainReport
from simplicit.results import AttackReport, CertifyReport, Diagnostics, Sparsity, WellPosedness
from simplicit.states import States

__all__ = [
    "SIM",
    "AttackReport",
    "CertifyReport",
    "ConvergenceWarning",
    "Diagnostics",
    "Error",
    "FileError",
    "ImplicitModel",
    "InfeasibleError",
    "Network",
    "NotConvergedError",
    "NotFiniteError",
    "NotFittedError",
    "Report",
    "SettingError",
    "ShapeError",
    "Sparsity",
    "States",
    "TrainReport",
    "UnsupportedError",
    "WellPosedness",
    "__version__",
    "errors",
]
