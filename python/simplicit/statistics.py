"""Sums over samples that replace the samples, and training from these sums alone."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from simplicit import _core
from simplicit._arrays import Array, content_hash
from simplicit._progress import watcher
from simplicit.errors import SettingError, ShapeError
from simplicit.model import ImplicitModel
from simplicit.report import TrainReport

if TYPE_CHECKING:
    from simplicit.estimator import SIM

#: Ridge of the normal equations that rows start from, relative to the largest entry of their diagonal.
_RIDGE = 1e-9
#: Settings that need the samples, or a network.
_NOT_HERE = (
    "network", "max_drop", "preset", "mask", "kappa", "gamma", "matching", "robust", "robust_refit", "reach", "positions", "samples",
    "augment", "scale", "mean", "std", "reconstruct", "output_refit", "stages", "allocate", "output_aware",
    "cascade",
)  # fmt: skip


class Statistics(tuple[int, Array, Array, Array]):
    """(m, G, H, e) of features [X U 1] and targets [Z Y], with the layers they belong to; ``SIM.fit`` takes it.

    Attributes
    ----------
    layout : list of dict
        Layers as in :class:`States`, last layer first.
    baseline_nonzeros : int
        Non-zero parameters of the module.
    """

    layout: list[dict[str, Any]]
    baseline_nonzeros: int

    def __new__(cls, sums: Sequence[Any], layout: list[dict[str, Any]], baseline_nonzeros: int) -> Statistics:
        """From (m, G, H, e)."""
        out = super().__new__(cls, sums)
        out.layout, out.baseline_nonzeros = layout, baseline_nonzeros
        return out

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self), self.layout, self.baseline_nonzeros


class _Source:
    """Layers of a network whose states were summed, as linear blocks: each reads the layer before it."""

    def __init__(self, statistics: Statistics, bias: bool) -> None:
        self.m, self.G, self.H, self.e = statistics
        sizes = [layer["size"] for layer in statistics.layout]
        n, r = sum(sizes), len(self.e)
        q, p = r - n, len(self.G) - 1 - n
        if self.G.shape != (n + p + 1,) * 2 or self.H.shape != (r, n + p + 1) or q < 1 or p < 1:
            raise ShapeError(f"statistics: expected those of {n} states, got G {self.G.shape}, H {self.H.shape}, e {self.e.shape}")
        self.n, self.p, self.q = n, p, q
        starts = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
        spans = [range(a, b) for a, b in zip(starts, starts[1:], strict=False)] + [range(n, n + p)]
        # First layer first: rows, and the columns they read.
        self.parts = [(s, c) for s, c in zip(spans, spans[1:], strict=False)][::-1] + [(range(n, r), spans[0])]
        self.names = [layer["name"] for layer in statistics.layout][::-1] + ["outputs"]
        self.bias = bias
        self.weights = np.zeros((r, n + p), np.float32)
        self.constants = np.zeros(r, np.float32)

    def _columns(self, k: int) -> list[int]:
        return [*self.parts[k][1], *([self.n + self.p] if self.bias else [])]

    def blocks(self) -> list[tuple[Any, ...]]:
        """As the native side wants them; rows start from least squares."""
        out = []
        for k, (rows, columns) in enumerate(self.parts):
            use = self._columns(k)
            gram = self.G[np.ix_(use, use)]
            ridge = _RIDGE * max(float(gram.diagonal().max()), np.finfo(float).tiny)
            start = np.linalg.solve(gram + ridge * np.eye(len(use)), self.H[np.ix_(rows, use)].T).T.astype(np.float32)
            # A zero would count as a missing connection.
            start = np.where(start == 0, np.float32(1e-30), start)
            d = len(columns)
            out.append((self.names[k], 1, start[:, :d].copy(), start[:, d].copy() if self.bias else None, True, False, k))
        return out

    def fixed_nonzeros(self) -> int:
        """No parameter stays as it is."""
        return 0

    def samples(self) -> int:
        """Number of samples m."""
        return int(self.m)

    def begin(self, wanted: list[int], samples: int, own: bool) -> None:
        """The sums of some layers: whatever number of samples is asked for, all of them."""
        self._wanted = wanted

    def step(self) -> None:
        """There are no batches."""

    def finish(self) -> list[tuple[Any, ...]]:
        """G, H, e of the layers asked for."""
        out = []
        for k in self._wanted:
            rows, use = list(self.parts[k][0]), self._columns(k)
            part = (self.G[np.ix_(use, use)], self.H[np.ix_(rows, use)], self.e[rows])
            out.append((int(self.m), *(np.ascontiguousarray(a, np.float64)[None] for a in part)))
        return out

    def install(self, k: int, weights: Any, constant: Any) -> None:
        """New rows of a layer."""
        rows, columns = self.parts[k]
        self.weights[np.ix_(rows, columns)] = weights
        if constant is not None:
            self.constants[list(rows)] = constant

    def reset(self) -> None:
        """Statistics do not depend on the weights."""


def fit_statistics(sim: SIM, statistics: Statistics) -> tuple[ImplicitModel, TrainReport]:
    """Rows of a layered network from its sums: no samples, so no cascade and nothing measured on them."""
    for name in _NOT_HERE:
        if getattr(sim, name) not in (None, False):
            raise SettingError(f"{name}: expected None with statistics, which have no samples, got {getattr(sim, name)!r}")
    if sim.rescale or callable(sim.penalty):
        raise SettingError("rescale, penalty: expected False and a name with statistics")
    if sim.connectivity not in (None, "baseline"):
        raise SettingError(f"connectivity: expected baseline with statistics, got {sim.connectivity!r}; collect states for another")
    source = _Source(statistics, bool(sim.bias))
    dense = sum(len(rows) * (len(columns) + source.bias) for rows, columns in source.parts)
    if sim.target_sparsity is not None and dense != statistics.baseline_nonzeros:
        raise SettingError(
            f"target_sparsity: expected layers that read the layer before them, {statistics.baseline_nonzeros} parameters in all, "
            f"got {dense}; give a strength such as mu, bias=True where the module has biases, or collect states"
        )
    plain = type(sim)(**{**sim.get_params(), "bias": None, "connectivity": None, "cascade": False, "output_aware": False})
    shown = watcher(sim.progress)
    try:
        results, notices = _core.train_blocks(
            plain._flags(),
            source,
            threads=sim.threads,
            checkpoint=None if sim.checkpoint is None else os.fspath(sim.checkpoint),
            hashes={"statistics": content_hash(source.G, source.H, source.e)},
            progress=shown,
        )
    finally:
        shown.close()
    n = source.n
    model = ImplicitModel.from_arrays(
        source.weights[:n, :n],
        source.weights[:n, n:],
        source.weights[n:, :n],
        source.weights[n:, n:],
        source.constants[:n],
        source.constants[n:],
        layout=statistics.layout,
        baseline_nonzeros=statistics.baseline_nonzeros,
    )
    return model, TrainReport(json.loads(results), notices)
