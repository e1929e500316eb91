"""Results about a model, as plain records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from simplicit._arrays import Array


@dataclass(frozen=True)
class Sparsity:
    """The size of a model compared with its baseline; every command prints these counts."""

    nonzeros: int
    baseline_nonzeros: int
    sparsity: np.float64
    multiply_adds: int
    baseline_multiply_adds: int | None
    bytes: int
    letters: dict[str, int]
    layers: list[dict[str, Any]]


@dataclass(frozen=True)
class WellPosedness:
    """What can be proved about whether x = φ(Ax + c) has exactly one solution."""

    norm_a_inf: float
    lambda_pf_upper: float
    acyclic: bool
    is_shown: bool


@dataclass(frozen=True)
class Diagnostics:
    """Per sample: iterations, residual, certified errors of states and outputs, whether it converged."""

    iterations: Array
    residual: Array
    state_error: Array
    output_error: Array
    converged: Array


@dataclass(frozen=True)
class AttackReport:
    """Accuracies in the order of `epsilon`; `attacks` has (method, gradient, accuracies); `fooled` is m × ε."""

    epsilon: list[float]
    samples: int
    clean_accuracy: float
    attacked_accuracy: list[float]
    attacks: list[tuple[str, str | None, list[float]]]
    fooled: Array

    def results(self) -> dict[str, Any]:
        """As ``attack --json`` has them."""
        attacks = [dict(zip(("method", "gradient", "accuracy"), a, strict=True)) for a in self.attacks]
        return _over_epsilon(self, attacked_accuracy=self.attacked_accuracy, attacks=attacks)


@dataclass(frozen=True)
class CertifyReport:
    """Accuracies in the order of `epsilon`; `by_bound` has them per bound; `certified` is m × ε."""

    epsilon: list[float]
    samples: int
    clean_accuracy: float
    certified_accuracy: list[float]
    by_bound: list[tuple[str, list[float]]]
    certified: Array
    not_converged: int
    given_up: int

    def results(self) -> dict[str, Any]:
        """As ``certify --json`` has them."""
        return _over_epsilon(self, certified_accuracy=self.certified_accuracy, attacks=[])


def _over_epsilon(of: AttackReport | CertifyReport, **found: Any) -> dict[str, Any]:
    return {"epsilon": of.epsilon, "clean_accuracy": of.clean_accuracy, **found}
