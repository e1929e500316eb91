import numpy as np
import pytest
from conftest import DATA, needs

import simplicit
from simplicit import SIM

cp = needs("cvxpy")


def test_l1_as_an_expression_is_l1(states):
    small = states[:300]
    expression = SIM(
        penalty=lambda row: 0.05 * cp.sum(cp.multiply(row.rms, cp.abs(cp.hstack([row.a, row.b])))),
        connectivity="feedforward",
        solver="CLARABEL",
        zero_below=1e-5,
    ).fit(small)
    built_in = SIM(
        penalty="l1", beta=0.05, connectivity="feedforward", rounds=1, refit=False, cascade=False
    ).fit(small)
    for letter in "ABCD":
        ours, theirs = (getattr(m.model_, letter).toarray() for m in (expression, built_in))
        np.testing.assert_allclose(ours, theirs, atol=2e-4)
    assert expression.n_features_in_ == 9 and len(expression.report_.rows) == 30


def test_constraints_of_your_own(states):
    sim = SIM(
        penalty=lambda row: (1e-3 * cp.norm1(row.b), [row.a >= 0]),
        connectivity="no-self-loop",
        kappa=0.5,
        solver="CLARABEL",
    ).fit(states[:200])
    A = sim.model_.A.toarray().astype(float)
    assert A.min() > -1e-6 and A.max() > 1e-3
    assert sim.model_.well_posedness().norm_a_inf <= 0.5


def test_what_does_not_go_together(states):
    with pytest.raises(simplicit.SettingError, match="target_sparsity: expected None"):
        SIM(penalty=lambda row: 0, target_sparsity=0.5).fit(states)
    resnet = simplicit.Network.from_onnx(DATA / "resnet20_cifar100.onnx")
    with pytest.raises(simplicit.UnsupportedError, match="convolutions"):
        SIM(penalty=lambda row: 0).fit(resnet, np.zeros((1, 3, 32, 32)))
    with pytest.raises(simplicit.InfeasibleError, match=r"z\[0\]"):
        SIM(penalty=lambda row: (0, [row.b[0] >= 1, row.b[0] <= 0]), solver="CLARABEL").fit(states[:50])
