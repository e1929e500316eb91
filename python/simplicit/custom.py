"""Objectives of your own: a function that builds a CVXPY expression for one row, solved by any solver CVXPY has.

The paper allows any convex f and any convex constraints. ``SIM(penalty=function)`` minimises, for every row,

    Λ·mean squared mismatch + f(w)   subject to your constraints, and ‖a‖₁ ≤ kappa where one is given

from the same statistics as the built-in penalties (one pass, no cascade). A row takes as long as the solver takes: this
is for objectives that nothing else solves, not for speed.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from simplicit import _core
from simplicit._arrays import Array, as_array, content_hash
from simplicit._progress import watcher
from simplicit.errors import InfeasibleError, SettingError, UnsupportedError
from simplicit.model import ImplicitModel
from simplicit.report import TrainReport
from simplicit.states import States

if TYPE_CHECKING:
    from simplicit.estimator import SIM
    from simplicit.network import Network

_BATCH = 4096
#: Settings of the built-in method, which a custom objective does not take.
_NOT_HERE = (
    "target_sparsity", "max_drop", "preset", "gamma", "samples", "checkpoint", "rounds", "output_refit", "stages", "robust", "robust_refit",
    "prove", "reach", "reconstruct",
    "allocate", "augment", "positions", "bounds", "cascade", "matching", "scale", "mean", "std", "device", "memory",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """The argument of a custom objective: the row's weights as CVXPY expressions, in stored units.

    Attributes
    ----------
    name : str
        ``z[i]`` or ``y[i]``.
    a, b : cvxpy expressions
        The row of A and B (of C and D for an output), zero where there is no connection.
    rms : array
        Root mean square of every entry's feature over the target's: multiply to get unit-free weights.
    """

    name: str
    a: Any
    b: Any
    rms: Array


def fit_custom(sim: SIM, baseline: States | Network | ImplicitModel, U: Any) -> tuple[ImplicitModel, TrainReport]:
    """Solve every row with CVXPY; see the module's documentation."""
    import cvxpy as cp

    for name in _NOT_HERE:
        if getattr(sim, name) is not None:
            raise SettingError(f"{name}: expected None with a penalty of your own, got {getattr(sim, name)!r}")
    if sim.rescale:
        raise SettingError("rescale: expected False with a penalty of your own; rescale the model afterwards")
    if any(layer.get("map") for layer in baseline.layout or ()):
        raise UnsupportedError("a penalty of your own for convolutions is not supported: a row there is shared by positions")
    begin = time.monotonic()
    states = baseline if isinstance(baseline, States) else _states(baseline, U)
    n, p, q = states.Z.shape[1], int(np.prod(states.U.shape[1:])), states.Y.shape[1]
    allowed, biased = _connections(sim, baseline, states, n, p, q)
    kappa = sim.kappa if sim.kappa is not None else (None if _acyclic(allowed[:n, :n]) else 0.99)
    m, gram, cross, energy = _statistics(states)
    normalise = sim.normalize is not False
    rms = np.sqrt(np.diag(gram) / m)
    shown = watcher(sim.progress)
    weights = np.zeros((n + q, n + p + 1))
    details: list[dict[str, Any]] = []
    try:
        for i in range(n + q):
            columns = np.flatnonzero(np.append(allowed[i], biased[i]) & (rms > 1e-140))
            target = np.sqrt(energy[i] / m)
            lam = (sim.lambda1 if i < n else sim.lambda2) or 1.0
            fit = lam / target**2 if normalise and target > 0 else lam * (1 if normalise else m)
            if target > 0 and len(columns):
                weights[i, columns] = _solve(cp, sim, i, n, columns, p, gram / m, cross[i] / m, energy[i] / m, fit, rms / target, kappa)
            residual = energy[i] - 2 * cross[i] @ weights[i] + weights[i] @ gram @ weights[i]
            details.append(
                {
                    "name": f"z[{i}]" if i < n else f"y[{i - n}]",
                    "nonzeros": int(np.count_nonzero(weights[i])),
                    "relative_gap": None,
                    "at_limit": False,
                    "relative_residual": float(np.sqrt(max(residual, 0) / energy[i])) if energy[i] > 0 else 0.0,
                    "bound_distance": None,
                    "proven": False,
                }
            )
            shown("rows", i + 1, n + q)
    finally:
        shown.close()
    stored = _toward_zero(weights)
    layout = states.layout or [{"name": "states", "size": n, "activation": states.activation}]
    model = ImplicitModel.from_arrays(
        stored[:n, :n],
        stored[:n, n : n + p],
        stored[n:, :n],
        stored[n:, n : n + p],
        stored[:n, -1],
        stored[n:, -1],
        layout=layout,
        kappa=kappa,
        baseline_nonzeros=states.baseline_nonzeros,
        provenance={
            "settings": json.dumps({"penalty": getattr(sim.penalty, "__name__", "custom"), "kappa": kappa}),
            "version": _core.__version__,
            "states": content_hash(states.U, states.Z, states.X, states.Y),
        },
    )
    size, posed = model.sparsity(), model.well_posedness()
    results = {
        "sparsity": float(size.sparsity),
        "nonzeros": size.nonzeros,
        "baseline_nonzeros": size.baseline_nonzeros,
        "rows": n + q,
        "row_details": details,
        "norm_a_inf": posed.norm_a_inf,
        "lambda_pf_upper": posed.lambda_pf_upper,
        "seconds": {"total": time.monotonic() - begin},
    }
    return model, TrainReport(results, [])


def _solve(
    cp: Any, sim: SIM, i: int, n: int, columns: Array, p: int, gram: Array, cross: Array, energy: float,
    fit: float, rms: Array, kappa: float | None,
) -> Array:  # fmt: skip
    """One row. The mismatch wᵀGw − 2hᵀw + e is ‖Fw − g‖² + rest with G = FᵀF, which every conic solver takes."""
    # Unit-free weights: solvers are tuned for numbers near one.
    unit = np.maximum(rms[columns], np.finfo(float).tiny)
    scaled = gram[np.ix_(columns, columns)] / np.outer(unit, unit)
    values, vectors = np.linalg.eigh(scaled)
    kept = values > 1e-12 * max(values.max(), 1e-300)
    root = np.sqrt(values[kept])
    factor = root[:, None] * vectors[:, kept].T
    shift = (vectors[:, kept].T @ (cross[columns] / unit)) / root
    v = cp.Variable(len(columns))
    w = v / unit
    place = np.zeros((n + p, len(columns)))
    inside = columns < n + p
    place[columns[inside], np.flatnonzero(inside)] = 1.0
    full = place @ w
    row = Row(f"z[{i}]" if i < n else f"y[{i - n}]", full[:n], full[n:], rms[: n + p])
    built = sim.penalty(row)  # type: ignore[operator, misc]
    expression, constraints = built if isinstance(built, tuple) else (built, [])
    constraints = list(constraints)
    if i < n and kappa is not None:
        constraints.append(cp.norm1(full[:n]) <= kappa * (1 - 1e-9))
    problem = cp.Problem(cp.Minimize(fit * cp.sum_squares(factor @ v - shift) + expression), constraints)
    problem.solve(solver=sim.solver)
    if v.value is None:
        raise InfeasibleError(f"{row.name}: the solver says {problem.status}; loosen the constraints")
    out = v.value / unit
    largest = np.abs(v.value).max(initial=0.0)
    out[np.abs(v.value) <= sim.zero_below * largest] = 0.0
    if i < n and kappa is not None:
        # A solver's answer is feasible only within its tolerance; the stored row must be exactly feasible.
        on_states = columns < n
        norm = np.abs(out[on_states]).sum()
        if norm > kappa:
            out[on_states] *= kappa * (1 - 1e-12) / norm
    return np.asarray(out)


def _states(baseline: Network | ImplicitModel, U: Any) -> States:
    u = as_array(U, "U")
    if not isinstance(baseline, ImplicitModel):
        states: States = baseline.states(u)
        return states
    z, x, y = baseline.equilibrium(u)
    size = baseline.sparsity()
    return States(u.reshape(len(u), -1), z, x, y, layout=baseline.layout, baseline_nonzeros=size.nonzeros)


def _connections(
    sim: SIM, baseline: Any, states: States, n: int, p: int, q: int
) -> tuple[Array, Array]:
    implicit = None if isinstance(baseline, States) else (baseline if isinstance(baseline, ImplicitModel) else baseline.to_implicit())
    biased = np.full(n + q, bool(sim.bias))
    if implicit is not None:
        biased |= np.append(np.full(n, bool(np.any(implicit.b))), np.full(q, bool(np.any(implicit.d))))
    if sim.mask is not None:
        return np.asarray(sim.mask) != 0, biased
    kind = sim.connectivity or ("full" if implicit is None else "baseline")
    if kind == "baseline":
        if implicit is None:
            raise SettingError("connectivity: expected full, no-self-loop, feedforward or mask for plain states, got baseline")
        top = np.hstack([implicit.A.toarray(), implicit.B.toarray()])
        return np.vstack([top, np.hstack([implicit.C.toarray(), implicit.D.toarray()])]) != 0, biased
    layout = states.layout or [{"name": "states", "size": n, "activation": states.activation}]
    return _core.connections(kind, json.dumps(layout), p, q) != 0, biased


def _statistics(states: States) -> tuple[int, Array, Array, Array]:
    u = states.U.reshape(states.samples, -1)
    n, p, q = states.Z.shape[1], u.shape[1], states.Y.shape[1]
    gathered = _core.Statistics(n + p + 1, n + q)
    for first in range(0, states.samples, _BATCH):
        rows = slice(first, first + _BATCH)
        ones = np.ones((len(u[rows]), 1))
        features = np.hstack([states.X[rows], u[rows], ones]).astype(np.float64)
        gathered.push(features, np.hstack([states.Z[rows], states.Y[rows]]).astype(np.float64))
    return gathered.finish()


def _acyclic(pattern: Array) -> bool:
    import scipy.sparse.csgraph as graph

    count, _ = graph.connected_components(pattern, directed=True, connection="strong")
    return bool(count == len(pattern) and not np.diag(pattern).any())


def _toward_zero(values: Array) -> Array:
    """float32, magnitudes rounded down, so that stored rows keep every constraint."""
    out = values.astype(np.float32)
    larger = np.abs(out.astype(np.float64)) > np.abs(values)
    out[larger] = np.nextafter(out[larger], np.float32(0))
    return out
