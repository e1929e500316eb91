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


def test_mixtures_are_of_two_samples_and_the_same_with_the_same_generator():
    from simplicit.torch._batches import mixed

    one = mixed({"x": torch.eye(6), "labels": [1] * 6}, 6, torch.Generator().manual_seed(3))
    again = mixed([torch.eye(6), "labels"], 6, torch.Generator().manual_seed(3))
    assert torch.equal(one["x"], again[0]) and one["labels"] == [1] * 6 and again[1] == "labels"
    assert torch.allclose(one["x"].sum(1), torch.ones(6)) and bool((one["x"] >= 0).all())
    # Every sample is in its own mixture and in that of one other sample.
    off_diagonal = one["x"] - torch.diag(one["x"].diagonal())
    assert bool((one["x"].diagonal() > 0).all())
    assert (off_diagonal > 0).sum(0).tolist() == [1] * 6 and (off_diagonal > 0).sum(1).tolist() == [1] * 6
    with pytest.raises(simplicit.SettingError, match="inputs of floating point with 3 samples, got torch.int64"):
        mixed(torch.arange(3), 3)


def test_mixtures_teach_where_the_original_is_certain_of_its_samples():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)).eval()
    corners = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    loader = [corners.repeat(20, 1) + 0.01 * torch.randn(40, 2) for _ in range(10)]
    # A class for each corner, far from the border between them, which does not go through zero.
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(25 * module(loader[0]), torch.tensor([0, 1] * 20)).backward()
        optimizer.step()
    with torch.no_grad():
        module[2].weight.mul_(100)
        module[2].bias += torch.tensor([4.0, 0.0])
    mixtures = torch.lerp(corners[:1], corners[1:], torch.linspace(0, 1, 101)[:, None])

    def divergence(sparse):
        with torch.no_grad():
            t, s = (m(mixtures).log_softmax(1) for m in (module, sparse))
            return float((t.exp() * (t - s)).sum(1).mean())

    found = {}
    for mix in (False, True):
        sparse = st.compress(module, loader, target_sparsity=0.3, **FAST)
        with torch.no_grad():
            sparse.module[2].bias += torch.tensor([-60.0, 0.0])
        before = divergence(sparse.module)
        polished = st.polish(sparse, loader, epochs=20, learning_rate=5e-2, mix=mix, progress="none")
        found[mix] = divergence(sparse.module) / before
        assert sparse.report.polished["mix"] == mix and polished.losses[polished.best] <= polished.losses[0]
    assert found[True] < 0.1 and found[False] > 0.9, found
