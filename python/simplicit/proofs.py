"""Proofs about one row, and a checker that uses whole numbers.

The row's problem is min ½wᵀGw − hᵀw + ½e + Σ prices of the non-zeros. :func:`prove` searches for a proof that an answer
is optimal; :func:`check` verifies its certificate with Python's integers, without any rounding but a last one downwards,
and shares no code with the search.

Examples
--------
>>> import numpy as np
>>> from simplicit.proofs import check, prove
>>> rng = np.random.default_rng(0)
>>> F = rng.normal(size=(200, 8))
>>> z = F[:, 0] - 2 * F[:, 3] + 0.1 * rng.normal(size=200)
>>> G, h, e = F.T @ F / 200, F.T @ z / 200, z @ z / 200
>>> proof = prove(G, h, e, prices=0.05 * e)
>>> proof.verdict, [int(j) for j in np.flatnonzero(proof.weights)]
('optimal', [0, 3])
>>> float(check(proof)) >= proof.value * (1 - 1e-6)
True
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from simplicit import _core
from simplicit.errors import SettingError, ShapeError

#: Number of binary digits after the point in the checker's sums.
_DIGITS = 300


@dataclass(frozen=True)
class Proof:
    """What has been proved about an answer of one row."""

    #: Cost of the given answer.
    value: float
    #: A lower bound: no weights cost less.
    bound: float
    #: Cost of the best weights known, and these.
    best: float
    weights: np.ndarray
    #: ``optimal``: no weights cost less than the answer, up to a millionth; ``beaten``: better ones are known; ``open``.
    verdict: str
    #: The problem: G (its upper triangle), h, e and the prices.
    problem: tuple[np.ndarray, np.ndarray, float, np.ndarray] = field(repr=False)
    #: Diagonals δ with G − diag(δ) ⪰ 0 where δ > 0.
    diagonals: list[list[float]] = field(repr=False)
    #: Per case its evidence (diagonal, point, fixed entries) and its split (entry, case without, case with).
    cases: list[Any] = field(repr=False)

    @property
    def distance(self) -> float:
        """(value − bound) / value."""
        return max(self.value - self.bound, 0.0) / self.value if self.value > 0 else 0.0


def prove(gram: Any, cross: Any, energy: float, prices: Any, answer: Any = None, *, seconds: float = 60.0) -> Proof:
    """Search for a proof that an answer is optimal.

    Parameters
    ----------
    gram, cross, energy : array (d, d), array (d), float
        G, h and e; of G the upper triangle counts. A ridge is part of G.
    prices : float or array (d)
        What a non-zero costs; 0 is free and infinity forbids the entry.
    answer : array (d), optional
        The weights to judge; without any, the best that the search finds.
    seconds : float, optional
        For the search, on one thread.

    Returns
    -------
    Proof
    """
    gram = np.ascontiguousarray(gram, dtype=np.float64)
    cross = np.asarray(cross, dtype=np.float64)
    d = len(cross)
    if gram.shape != (d, d):
        raise ShapeError(f"Gram matrix: expected {d} × {d}, got {' × '.join(map(str, gram.shape))}")
    prices = np.array(np.broadcast_to(np.asarray(prices, dtype=np.float64), (d,)))
    if seconds < 0:
        raise SettingError(f"seconds: expected zero or more, got {seconds}")

    start = None if answer is None else np.asarray(answer, dtype=np.float64).tolist()
    found = _core.prove_row(gram, cross.tolist(), float(energy), prices.tolist(), start, float(seconds))
    value, bound, best, weights, verdict, diagonals, cases = found
    problem = (gram, cross, float(energy), prices)
    return Proof(value, bound, best, np.array(weights), verdict, problem, diagonals, cases)


def check(proof: Proof) -> Fraction:
    """The lower bound that a proof's certificate shows, in exact arithmetic; ValueError if it shows none.

    Parameters
    ----------
    proof : Proof

    Returns
    -------
    Fraction
    """
    gram, cross, energy, prices = proof.problem
    d = len(cross)
    upper = np.triu(gram)
    gram = upper + np.triu(gram, 1).T
    deltas = [np.array(delta) for delta in proof.diagonals]
    for k, delta in enumerate(deltas):
        if len(delta) != d or (delta < 0).any() or not np.isfinite(delta).all() or not _is_below(gram, delta):
            raise ValueError(f"diagonal {k}: G − diag(δ) is not shown to be semidefinite")
    lowest: int | None = None
    seen: set[int] = set()
    first = ["in" if p == 0 else "out" if np.isinf(p) else "open" for p in prices]
    waiting: list[tuple[int, list[str], int | None]] = [(0, first, None)]
    while waiting:
        at, places, above = waiting.pop()
        if at in seen or not 0 <= at < len(proof.cases):
            raise ValueError(f"case {at} is not there, or there twice")
        seen.add(at)
        evidence, split = proof.cases[at]
        bound = above
        if evidence is not None:
            number, point, fixed = evidence
            delta = deltas[number]
            if any(places[j] != "out" and delta[j] <= 0 for j in range(d)):
                raise ValueError(f"case {at}: an entry outside of its diagonal")
            base, excess = _terms(gram, cross, energy, prices, places, delta, np.array(point))
            total = base - sum(max(0, x) for x in excess.values())
            bound = total if bound is None else max(bound, total)
            places = list(places)
            for j, inside in fixed:
                if places[j] != "open":
                    raise ValueError(f"case {at}: entry {j} is fixed but not open")
                # The opposite choice: out subtracts nothing, in pays its price whatever its pull.
                other = total + max(0, excess[j]) - (0 if inside else excess[j])
                lowest = other if lowest is None else min(lowest, other)
            for j, inside in fixed:
                places[j] = "in" if inside else "out"
        if split is None:
            if bound is None:
                raise ValueError(f"case {at} has no evidence")
            lowest = bound if lowest is None else min(lowest, bound)
            continue
        entry, without, with_it = split
        if places[entry] != "open":
            raise ValueError(f"case {at} splits at entry {entry}, which is not open")
        waiting.append((without, [*places[:entry], "out", *places[entry + 1 :]], bound))
        waiting.append((with_it, [*places[:entry], "in", *places[entry + 1 :]], bound))
    if lowest is None:
        raise ValueError("no case")
    return Fraction(lowest, 1 << _DIGITS)


def _whole(values: np.ndarray) -> tuple[np.ndarray, int]:
    """Whole numbers n and an exponent b with values = n / 2ᵇ, exactly."""
    values = np.asarray(values, dtype=np.float64)
    ratios = [float(v).as_integer_ratio() for v in values.ravel()]
    digits = max((r[1].bit_length() - 1 for r in ratios), default=0)
    whole = np.array([n << (digits - (m.bit_length() - 1)) for n, m in ratios], dtype=object)
    return whole.reshape(values.shape), digits


def _is_below(gram: np.ndarray, delta: np.ndarray) -> bool:
    """G − diag(δ) ⪰ 0 where δ > 0: it is LLᵀ, L from floating point, plus a diagonally dominant rest, exactly."""
    domain = np.flatnonzero(delta > 0)
    if len(domain) == 0:
        return True
    below = gram[np.ix_(domain, domain)]
    shift = 1e-13 * np.trace(below)
    try:
        lower = np.linalg.cholesky(below - np.diag(delta[domain] + shift))
    except np.linalg.LinAlgError:
        return False
    whole, digits = _whole(np.stack([below, np.diag(delta[domain]), np.zeros_like(below)]))
    factor, behind = _whole(lower)
    common = max(digits, 2 * behind)
    rest = (whole[0] - whole[1]) * (1 << (common - digits)) - factor.dot(factor.T) * (1 << (common - 2 * behind))
    size = np.abs(rest).sum(axis=1)
    return all(2 * rest[i, i] >= size[i] for i in range(len(domain)))


def _terms(
    gram: np.ndarray,
    cross: np.ndarray,
    energy: float,
    prices: np.ndarray,
    places: list[str],
    delta: np.ndarray,
    point: np.ndarray,
) -> tuple[int, dict[int, int]]:
    """½e − ½yᵀQy + Σ_in(p − g²/2δ) from below, and g²/2δ − p of open entries from above, times 2 to `_DIGITS`."""
    used = [j for j, place in enumerate(places) if place != "out"]
    g, b_g = _whole(gram[np.ix_(used, used)])
    y, b_y = _whole(point[used])
    dl, b_d = _whole(delta[used])
    h, b_h = _whole(cross[used])
    b = max(b_g, b_d)
    qy = g.dot(y) * (1 << (b - b_g)) - dl * y * (1 << (b - b_d))
    curved = int((qy * y).sum())
    base = _scaled(Fraction(energy) / 2) - _up(Fraction(curved, 1 << (b + 2 * b_y + 1)))
    common = max(b_h, b + b_y)
    pull = h * (1 << (common - b_h)) - qy * (1 << (common - b - b_y))
    excess: dict[int, int] = {}
    for k, j in enumerate(used):
        # g²/2δ, rounded upwards.
        over = 2 * int(dl[k]) << (2 * common)
        square = int(pull[k]) ** 2 << (_DIGITS + b_d)
        term = -(-square // over) - _scaled(Fraction(float(prices[j])))
        if places[j] == "in":
            base -= term
        else:
            excess[j] = term
    return base, excess


def _scaled(value: Fraction) -> int:
    """Times 2 to `_DIGITS`, rounded downwards."""
    return (value.numerator << _DIGITS) // value.denominator


def _up(value: Fraction) -> int:
    return -((-value.numerator << _DIGITS) // value.denominator)
