"""Fine-tuning on the support, without labels."""

import pytest
from conftest import needs

import simplicit

torch = needs("torch")
from networks import shake  # noqa: E402
from torch import nn  # noqa: E402

import simplicit.torch as st  # noqa: E402

FAST = {"bounds": "off", "progress": "none"}


def test_polishing_lowers_the_held_out_loss_and_holds_zeros():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10)]
    module = shake(nn.Sequential(*layers))
    with torch.no_grad():
        module[6].weight.mul_(8)
    loader = [torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(k)) for k in range(10)]
    sparse = st.compress(module, loader, target_sparsity=0.7, cascade="block", **FAST)
    # Somebody has spoilt it, so that there is something to learn.
    with torch.no_grad():
        sparse.module[6].weight.mul_(0.6)
    test = torch.randn(200, 3, 8, 8, generator=torch.Generator().manual_seed(99))

    def divergence():
        with torch.no_grad():
            t, s = (m(test).log_softmax(1) for m in (module, sparse.module))
            return float((t.exp() * (t - s)).sum(1).mean())

    before, running = divergence(), sparse.module[1].running_mean.clone()
    polished = st.polish(sparse, loader, epochs=6, learning_rate=2e-3, progress="none")
    assert polished.kind == "KL" and len(polished.losses) == 7
    assert polished.losses[polished.best] == min(polished.losses) < 0.7 * polished.losses[0]
    assert divergence() < 0.7 * before
    weights = dict(sparse.module.named_parameters())
    assert all(bool((weights[n][~m] == 0).all()) for n, m in sparse.masks.items())
    assert torch.equal(running, sparse.module[1].running_mean)
    assert all(p.grad is None for p in module.parameters())
    assert sparse.report.polished["best_epoch"] == polished.best
    assert "fine-tuned" in repr(polished)


def test_the_best_state_is_kept_and_may_be_the_first():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 1)).eval().requires_grad_(False)
    loader = [torch.randn(50, 8) for _ in range(6)]
    sparse = st.compress(module, loader, target_sparsity=0.4, **FAST)
    before = [p.clone() for p in sparse.module.parameters()]
    polished = st.polish(sparse, loader, epochs=2, learning_rate=50.0, held_out=[torch.randn(100, 8)], progress="none")
    assert polished.kind == "mean square" and polished.best == 0
    assert all(torch.equal(a, b) for a, b in zip(before, sparse.module.parameters(), strict=True))
    assert not any(p.requires_grad for p in sparse.module.parameters())
    with torch.no_grad():
        sparse.module[2].bias += 0.3
    better = st.polish(sparse, loader, epochs=10, learning_rate=1e-2, progress="none")
    assert better.losses[better.best] < 0.5 * better.losses[0]
    with pytest.raises(simplicit.ShapeError, match="besides those held out"):
        st.polish(sparse, loader[:1], epochs=1)
    with pytest.raises(simplicit.SettingError, match="held_out"):
        st.polish(sparse, loader, held_out=0.9)
