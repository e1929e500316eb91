"""Modules made sparse as they are: what is seen, what is written, what is refused."""

import copy
import warnings

import numpy as np
import pytest
from conftest import needs

import simplicit

torch = needs("torch")
from networks import Mixed, ResNet20, batches, shake, written_again  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import simplicit.torch as st  # noqa: E402
from simplicit.torch import _calls  # noqa: E402

FAST = {"bounds": "off", "progress": "none"}


def kept(module):
    return sum(int(p.count_nonzero()) for p in module.parameters())


def distance(a, b, u):
    with torch.no_grad():
        return float((a(u) - b(u)).norm() / b(u).norm())


CONVOLUTIONS = [
    (nn.Conv2d(4, 6, 3, padding=1), (4, 7, 8)),
    (nn.Conv2d(4, 6, (3, 2), (2, 1), (0, 1), bias=False), (4, 7, 8)),
    (nn.Conv2d(4, 6, 3, dilation=(1, 2), groups=2), (4, 9, 8)),
    (nn.Conv2d(4, 4, 3, groups=4, padding="same"), (4, 5, 5)),
    (nn.Conv2d(4, 6, (4, 3), padding="same", dilation=2), (4, 9, 9)),
    (nn.Conv2d(4, 6, 3, padding=2, padding_mode="reflect"), (4, 6, 6)),
    (nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular", stride=2), (4, 6, 6)),
    (nn.Conv1d(4, 6, 3, stride=2, padding=1), (4, 11)),
    (nn.Conv1d(4, 6, 5, groups=2, padding="same", dilation=2), (4, 11)),
    (nn.Linear(5, 3), (5,)),
    (nn.Linear(5, 3, bias=False), (2, 4, 5)),
]


@pytest.mark.parametrize("layer, shape", CONVOLUTIONS, ids=lambda v: str(v)[:60])
def test_features_times_weights_are_what_the_layer_gives(layer, shape):
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    seen = []
    with torch.no_grad(), _calls.Calls(_calls.Known(layer), lambda call, out: seen.append((call, out)) or out):
        layer(x)
    ((call, out),) = seen
    rows = call.rows_of(out)
    assert len(rows) == call.lines(out)
    chosen = torch.randperm(len(rows))[: max(1, len(rows) // 3)]
    weight = layer.weight.detach().reshape(call.groups, out.shape[1 if call.kind == "conv" else -1] // call.groups, -1)
    for lines in (None, chosen):
        f = call.features(lines)
        z = (f @ weight.transpose(1, 2)).transpose(0, 1).reshape(f.shape[1], -1)
        expected = rows if lines is None else rows[lines]
        torch.testing.assert_close(z + (0 if layer.bias is None else layer.bias.detach()), expected)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", ["self", "cross", "three", "sizes"])
def test_attention_is_pytorchs(first, kind):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(12, 3, batch_first=first, **({"kdim": 5, "vdim": 7} if kind == "sizes" else {})).eval()
    nn.init.normal_(module.in_proj_bias)
    q, k = torch.randn(4, 4, 12), torch.randn(4, 4, 12)
    v = torch.randn(4, 4, 12)
    given = {"self": (q, q, q), "cross": (q, k, k), "three": (q, k, v), "sizes": (q, k[..., :5], v[..., :7])}[kind]
    padding = torch.zeros(4, 4, dtype=torch.bool)
    padding[1, 2:] = True
    causal = torch.ones(4, 4, dtype=torch.bool).triu(1)
    for options in (
        {},
        {"need_weights": False},
        {"attn_mask": causal, "is_causal": True, "need_weights": False},
        {"attn_mask": torch.randn(4, 4), "average_attn_weights": False},
        {"attn_mask": torch.randn(12, 4, 4)},
        {"key_padding_mask": padding, "attn_mask": causal},
    ):
        expected = module(*given, **options)
        seen = []
        with torch.no_grad(), _calls.Calls(_calls.Known(module), lambda call, out, seen=seen: seen.append(call) or out):
            got = module(*given, **options)
        torch.testing.assert_close(got[0], expected[0].detach())
        assert (got[1] is None) == (expected[1] is None)
        if got[1] is not None:
            torch.testing.assert_close(got[1], expected[1].detach())
        assert len(seen) == {"self": 2, "cross": 3, "three": 4, "sizes": 4}[kind]


def test_both_doors_count_alike_and_nothing_changes_without_pruning():
    module = shake(ResNet20(4))
    loader = [torch.randn(60, 3, 8, 8, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    u = torch.cat(loader)
    again, _ = written_again(module, loader)
    assert distance(again, module, u) < 1e-5
    network = st.network(module, u)
    sim = simplicit.SIM(network=network, mu=1e-4, bounds="off").fit(u.numpy())
    half = st.compress(module, loader, target_sparsity=0.5, **FAST)
    assert half.report.baseline_nonzeros == network.nonzeros == sim.report_.baseline_nonzeros
    assert half.report.sparsity == pytest.approx(0.5, abs=0.003)
    # The converted network counts what is stored; a bias of a sum is one number.
    assert st.network(half.module, u).nonzeros == half.report.nonzeros
    assert half.model.sparsity().sparsity == pytest.approx(half.report.sparsity)
    with torch.no_grad():
        np.testing.assert_allclose(half.model.predict(u.numpy()), half.module(u), atol=1e-3)
    trained = [la for la in half.report.layers if la["trained"]]
    assert len(trained) == 22
    assert half.report.trainable_sparsity == pytest.approx(0.5, abs=0.003)
    assert distance(half.module, module, u) < 0.05


def test_a_cascade_and_its_sums_are_better_than_none():
    module = shake(ResNet20(4), 3)
    loader = [torch.randn(50, 3, 8, 8, generator=torch.Generator().manual_seed(k)) for k in range(4)]
    u = torch.randn(300, 3, 8, 8, generator=torch.Generator().manual_seed(99))
    error = {}
    for cascade in ("layer", None):
        sparse = st.compress(module, loader, target_sparsity=0.7, cascade=cascade, **FAST)
        assert sparse.report.sparsity == pytest.approx(0.7, abs=0.003)
        error[cascade] = distance(sparse.module, module, u)
    assert error["layer"] < error[None], error


def statistics(source, block, own):
    """G, H, e of one block, whichever form it has."""
    source.begin([block], source.samples(), own)
    while source.step() is not None:
        pass
    ((m, *rest),) = source.finish()
    if m is None:
        f, t = rest
        return f.shape[1], f.transpose(0, 2, 1) @ f, t.transpose(0, 2, 1) @ f, (t**2).sum(1)
    return (m, *rest)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(3, 4, 1)
        self.two = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        x = torch.relu(self.one(x))
        x = torch.relu(self.norm(self.two(x)) + x)
        return x.mean((2, 3))


def test_statistics_from_scratch():
    from simplicit.torch._batches import Batches
    from simplicit.torch._find import find
    from simplicit.torch._source import Source

    original = shake(Residual())
    module = copy.deepcopy(original)
    with torch.no_grad():
        module.one.weight[:, 1] = 0
    u = torch.randn(30, 3, 5, 5)
    found = find(original, Batches([u[:20], u[20:]], original, None, None, None))
    assert [(b.name, b.norm, b.added) for b in found.blocks] == [("one", None, False), ("two", "norm", True)]
    source = Source(original, module, found, Batches([u[:20], u[20:]], original, None, None, None), positions=10**6, seed=0)
    with torch.no_grad():
        before, now = torch.relu(original.one(u)), torch.relu(module.one(u))
        folded = original.norm(original.two(before)) + before - now
        scale = original.norm.weight / torch.sqrt(original.norm.running_var + original.norm.eps)
        target = (folded / scale[:, None, None]).transpose(0, 1).reshape(4, -1).double().numpy()
        f = F.unfold(now, 3, padding=1).transpose(0, 1).reshape(36, -1).double().numpy()
    f = np.vstack([f, np.ones((1, f.shape[1]))])
    m, G, H, e = statistics(source, 1, True)
    assert m == 30 * 25
    np.testing.assert_allclose(G[0], f @ f.T, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(H[0], target @ f.T, rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(e[0], (target**2).sum(1), rtol=1e-4)
    # Fewer lines: a seeded choice, the same for features and targets, so the original still solves it.
    many = Batches([torch.randn(100, 3, 5, 5) for _ in range(2)], original, None, None, None)
    few = Source(original, original, found, many, positions=7, seed=1)
    m, G, H, e = statistics(few, 1, False)
    assert m == 200 * 7
    w = np.hstack([few.weights(found.blocks[1]).numpy(), few.constant(found.blocks[1]).numpy()[:, None]]).astype(float)
    np.testing.assert_allclose(np.einsum("ij,jk,ik->i", w, G[0], w), (w * H[0]).sum(1), rtol=1e-4)


def test_row_weights_are_the_mean_square_gradients():
    from simplicit.torch._batches import Batches
    from simplicit.torch._find import find
    from simplicit.torch._source import Source

    torch.manual_seed(2)
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)).eval()
    module.requires_grad_(False)
    u = torch.randn(400, 2, 4, 4)
    loader = Batches([u[:250], u[250:]], module, None, None, None)
    source = Source(module, module, find(module, loader), loader, positions=64, seed=0)
    assert source.begin_weights() == 400
    while source.step() is not None:
        pass
    conv, linear = source.finish()
    # Exactly: E over y of (∂ log p(y)/∂z)², summed over positions.
    with torch.no_grad():
        z = module[0](u)
        x = torch.tanh(z)
        p = module[3](x.flatten(1)).softmax(1)
        spread = torch.diag_embed(p) - p[:, :, None] * p[:, None]
        slope = (1 - x**2).reshape(400, 12)
        exact = torch.einsum("ki,skl,li->si", module[3].weight, spread, module[3].weight) * slope**2
        exact = exact.reshape(400, 3, 4).sum(2).mean(0)
    np.testing.assert_allclose(linear, (p * (1 - p)).mean(0), rtol=0.15)
    np.testing.assert_allclose(conv, exact, rtol=0.15)
    assert all(p.grad is None for p in module.parameters())


class Shared(nn.Module):
    """A layer that runs twice, a weight that two layers have, a weight that a function takes, a norm without parameters."""

    def __init__(self):
        super().__init__()
        self.twice, self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight = self.one.weight
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.weight = nn.Parameter(torch.randn(3, 8))
        self.free = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        x = torch.relu(self.twice(torch.relu(self.twice(x))))
        x = torch.relu(self.other(torch.relu(self.one(x))))
        x = torch.relu(self.norm(self.free(x)))
        return F.linear(x, self.weight)


def test_weights_that_are_used_more_than_once():
    torch.manual_seed(0)
    module = Shared()
    module.norm.running_mean.normal_()
    module.norm.running_var.uniform_(0.5, 2)
    assert module.train().training
    loader = [torch.randn(200, 8) for _ in range(3)]
    u = torch.cat(loader)
    before = copy.deepcopy(module.state_dict())
    sparse = st.compress(module, loader, target_sparsity=0.4, **FAST)
    assert module.training and all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert sparse.module.training
    assert [(la["name"], la["uses"]) for la in sparse.report.layers] == [("twice", 2), ("one", 2), ("free", 1), ("Shared", 1)]
    assert sparse.module.other.weight is sparse.module.one.weight
    assert sparse.report.sparsity == pytest.approx(0.4, abs=0.006)
    assert distance(sparse.module.eval(), module.eval(), u) < 0.2
    # Two biases beside one weight have no place in its rows; a norm's mean takes a constant in.
    assert torch.equal(sparse.module.one.bias, module.one.bias)
    assert not torch.equal(sparse.module.norm.running_mean, module.norm.running_mean)
    again, _ = written_again(module, loader)
    assert distance(again, module, u) < 1e-5


def test_an_embedding_keeps_the_weight_that_it_shares():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.inside, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20, bias=False)
            self.head.weight = self.table.weight

        def forward(self, tokens):
            return self.head(torch.relu(self.inside(self.table(tokens))))

    torch.manual_seed(0)
    module = Tied().eval()
    loader = [{"tokens": torch.randint(20, (30, 6)), "labels": torch.zeros(30)} for _ in range(4)]
    sparse = st.compress(module, loader, mu=1e-3, **FAST)
    assert torch.equal(sparse.module.head.weight, module.head.weight)
    layers = {la["name"]: la for la in sparse.report.layers}
    assert layers["table"]["why_not"] == "embedding reads it too" and layers["inside"]["trained"]
    with pytest.raises(simplicit.UnsupportedError, match="embedding reads it too"):
        st.compress(module, loader, mu=1e-3, include="table", **FAST)


def test_zeros_stay_zero(tmp_path):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(9, 14), nn.ReLU(), nn.Linear(14, 4)).eval()
    loader = batches(9)
    u = torch.cat([b[0] for b in loader])
    sparse = st.compress(module, loader, target_sparsity=0.5, **FAST)
    zeros = {name: p == 0 for name, p in sparse.module.named_parameters() if name in sparse.masks}
    assert set(zeros) == {"0.weight", "2.weight"} and all(torch.equal(z, ~sparse.masks[n]) for n, z in zeros.items())
    torch.save(sparse.module.state_dict(), tmp_path / "sparse.pt")
    loaded = copy.deepcopy(module)
    loaded.load_state_dict(torch.load(tmp_path / "sparse.pt"))

    def train(net, hold):
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        handle = hold(optimizer)
        for _ in range(5):
            optimizer.zero_grad()
            net(u).square().mean().backward()
            optimizer.step()
        return optimizer, handle

    for net, hold in ((sparse.module, sparse.hold), (loaded, lambda o: st.hold(loaded, o))):
        before = net[0].weight.detach().clone()
        optimizer, handle = train(net, hold)
        assert not torch.equal(before, net[0].weight)
        assert all(bool((dict(net.named_parameters())[n][z] == 0).all()) for n, z in zeros.items())
        handle.remove()
        net(u).square().mean().backward()
        optimizer.step()
        assert any(bool((dict(net.named_parameters())[n][z] != 0).any()) for n, z in zeros.items())
    with pytest.raises(simplicit.SettingError, match="steps none of them"):
        sparse.hold(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1))
    csr = st.compress(module, loader, target_sparsity=0.5, **FAST)
    other = csr.to_sparse_csr()
    assert other[0].weight.layout is torch.sparse_csr
    torch.testing.assert_close(other(u), csr.module(u).detach())
    page = csr.report.to_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == page.html and "14" in page.html


class Counted(torch.utils.data.IterableDataset):
    """Says how many of its batches live at once."""

    def __init__(self):
        self.passes, self.live, self.most = 0, [], 0

    def __iter__(self):
        import weakref

        self.passes += 1
        for k in range(12):
            batch = torch.randn(20, 9, generator=torch.Generator().manual_seed(k))
            self.live = [r for r in self.live if r() is not None] + [weakref.ref(batch)]
            self.most = max(self.most, len(self.live))
            yield batch
            del batch


def test_loaders_are_streamed_and_generators_kept():
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(9, 14), nn.ReLU(), nn.Linear(14, 4)).eval()
    loader = Counted()
    a = st.compress(module, loader, mu=1e-3, **FAST)
    assert loader.passes > 3 and loader.most <= 3, (loader.passes, loader.most)
    with pytest.warns(UserWarning, match="kept in memory"):
        b = st.compress(module, iter(loader), mu=1e-3, **FAST)
    c = st.compress(module, loader, mu=1e-3, threads=1, **FAST)
    for other in (b, c):
        assert all(torch.equal(p, q) for p, q in zip(a.module.parameters(), other.module.parameters(), strict=True))


def test_layers_are_chosen_by_name_and_type():
    module = shake(ResNet20(4))
    loader = [torch.randn(40, 3, 8, 8)]

    def trained(**which):
        sparse = st.compress(module, loader, mu=1e-4, **which, **FAST)
        return [la["name"] for la in sparse.report.layers if la["trained"]], sparse

    assert trained(include=nn.Linear)[0] == ["linear"]
    names, sparse = trained(include="blocks.1*", exclude=["*.conv2"], cascade="block")
    assert names == ["blocks.1.conv1"]
    assert torch.equal(sparse.module.blocks[1].conv2.weight, module.blocks[1].conv2.weight)
    assert len(trained(exclude=["blocks"])[0]) == 2
    with pytest.raises(simplicit.SettingError, match="include.*layer7"):
        trained(include="layer7")


def test_in_place_and_in_half_precision():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 5)).bfloat16()
    before = copy.deepcopy(module)
    loader = [torch.randn(100, 16).bfloat16() for _ in range(4)]
    sparse = st.compress(module, loader, target_sparsity=0.3, inplace=True, **FAST)
    assert sparse.module is module and module[0].weight.dtype is torch.bfloat16
    assert not torch.equal(module[0].weight, before[0].weight) and torch.equal(sparse.original[0].weight, before[0].weight)
    assert kept(module) == sparse.report.nonzeros
    assert distance(module, before, loader[0]) < 0.3


def test_the_old_forms_warn():
    torch.manual_seed(1)
    module = nn.Sequential(nn.Flatten(), nn.Linear(9, 14), nn.ReLU(), nn.Linear(14, 4))
    with pytest.warns(DeprecationWarning, match="as_module"):
        sparse = st.compress(module, batches(9), target_sparsity=0.4, as_module=True)
    assert isinstance(sparse, nn.Module)
    with pytest.warns(DeprecationWarning, match="as_module"):
        model = st.compress(module, batches(9), target_sparsity=0.4, as_module=False)
    assert isinstance(model, simplicit.ImplicitModel)
    new = st.compress(module, batches(9), target_sparsity=0.4)
    with pytest.warns(DeprecationWarning, match="compressed.model.predict"):
        assert new.predict(np.zeros((2, 9))).shape == (2, 4)
    with pytest.raises(AttributeError, match="nothing"):
        _ = new.nothing


class Routed(nn.Module):
    """Which layer runs depends on the data."""

    def __init__(self):
        super().__init__()
        self.first, self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        x = self.first(x)
        left = x.sum(1) > 0
        return torch.where(left[:, None], torch.zeros(len(x), 3).index_put((left,), self.one(x[left])), self.two(x))


def test_what_is_refused():
    u = [torch.randn(50, 6, generator=torch.Generator().manual_seed(0))]
    plain = lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))  # noqa: E731

    def refused(module, match, loader=u, error=simplicit.UnsupportedError, **settings):
        with pytest.raises(error, match=match):
            st.compress(module, loader, **{"target_sparsity": 0.5, **FAST, **settings})

    from torch.nn.utils import parametrizations, prune

    pruned, normed = plain(), plain()
    prune.l1_unstructured(pruned[0], "weight", 0.3)
    refused(pruned, "0 is pruned by torch.nn.utils.prune")
    parametrizations.weight_norm(normed[2])
    refused(normed, "2 has parametrised weights")
    refused(torch.jit.script(plain()), "ScriptModule")
    refused(nn.Sequential(nn.ReLU()), "calls no linear map")
    refused(plain(), "at least one batch", [], simplicit.ShapeError)
    refused(plain(), "cascade", error=simplicit.SettingError, cascade="layers")
    for setting, value in (("kappa", 0.9), ("connectivity", "full"), ("bias", True), ("output_refit", 2)):
        refused(plain(), setting, error=simplicit.SettingError, **{setting: value})
    refused(plain(), "max_drop", error=simplicit.SettingError, max_drop=1.0, target_sparsity=None)
    refused(plain(), "target.sparsity", error=simplicit.SettingError, target_sparsity=1.5)
    torch.manual_seed(0)
    refused(Routed(), "runs on other shapes", target_sparsity=0.6)
    assert st.compress(Routed(), u, mu=1e-4, cascade=None, **FAST).report.sparsity > 0
    quantised = torch.ao.nn.quantized.dynamic.Linear(6, 3)
    refused(nn.Sequential(quantised), "quantised")

    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls = nn.Linear(6, 3), 0

        def forward(self, x):
            self.calls += 1
            if self.calls > 3:
                raise ZeroDivisionError("here")
            return self.linear(x)

    refused(Broken(), "here", error=ZeroDivisionError)


def test_a_checkpoint_is_found_again(tmp_path):
    torch.manual_seed(1)
    module = shake(Mixed())
    loader = [torch.randn(60, 2, 5, 8, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    a = st.compress(module, loader, target_sparsity=0.3, checkpoint=tmp_path / "c", **FAST)
    b = st.compress(module, loader, target_sparsity=0.3, checkpoint=tmp_path / "c", **FAST)
    assert all(torch.equal(p, q) for p, q in zip(a.module.parameters(), b.module.parameters(), strict=True))
    with pytest.raises(simplicit.FileError, match="other settings or inputs"):
        st.compress(module, [loader[0]], target_sparsity=0.3, checkpoint=tmp_path / "c", **FAST)


def test_progress_is_told_and_warnings_are_few():
    told = []
    module = nn.Sequential(nn.Linear(9, 14), nn.ReLU(), nn.Linear(14, 4)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        st.compress(module, batches(9), mu=1e-3, bounds="off", progress=lambda *what: told.append(what))
    assert told
