"""Proofs of rows, and the exact checker against all supports."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from simplicit.proofs import check, prove


def row(seed: int, d: int):
    rng = np.random.default_rng(seed)
    raw = rng.normal(size=(60, d))
    features = raw + 0.9 * raw[:, np.arange(d) // 3 * 3]
    target = features @ (rng.normal(size=d) * rng.uniform(size=d) ** 3) + 0.3 * rng.normal(size=60)
    prices = np.full(d, 0.01 * target @ target / 60)
    prices[-1], prices[2] = 0.0, np.inf
    return features.T @ features / 60 + 1e-5 * np.eye(d), features.T @ target / 60, target @ target / 60, prices


def best(gram, cross, energy, prices):
    allowed = np.flatnonzero(np.isfinite(prices))
    values = []
    for count in range(len(allowed) + 1):
        for support in itertools.combinations(allowed, count):
            s = list(support)
            fit = cross[s] @ np.linalg.solve(gram[np.ix_(s, s)], cross[s]) if s else 0.0
            values.append(energy / 2 - fit / 2 + prices[s].sum())
    return min(values)


@pytest.mark.parametrize("seed", range(4))
def test_the_exact_checker_agrees_with_all_supports(seed):
    problem = row(seed, 9)
    optimum = best(*problem)
    proof = prove(*problem)
    shown = float(check(proof))
    assert proof.verdict == "optimal" and abs(proof.value - optimum) < 1e-9 * optimum
    assert optimum * (1 - 2e-6) <= shown <= optimum * (1 + 1e-12)
    # The library's checker rounds outwards, so the exact one shows at least as much.
    assert proof.bound <= shown <= proof.bound + 1e-10


def test_what_is_changed_is_no_proof():
    proof = prove(*row(1, 12))
    assert len(proof.cases) > 1
    larger = [[2.0 * v for v in delta] for delta in proof.diagonals]
    with pytest.raises(ValueError, match="semidefinite"):
        check(dataclasses.replace(proof, diagonals=larger))
    with pytest.raises(ValueError, match="case"):
        check(dataclasses.replace(proof, cases=proof.cases[:-1]))


def test_the_estimator_proves_rows():
    from simplicit import SIM, Network

    rng = np.random.default_rng(0)
    network = Network.from_layers([rng.normal(size=(8, 6)), rng.normal(size=(2, 8))])
    sim = SIM(target_sparsity=0.4, prove=5.0).fit(network, rng.normal(size=(400, 6)))
    assert sim.report_.rows_proven >= 5 and sim.report_.max_relative_gap is None
    assert sim.report_.rows_proven == sum(r["proven"] for r in sim.report_.rows)
    assert 0 <= sim.report_.median_bound_distance <= sim.report_.max_bound_distance <= 1
