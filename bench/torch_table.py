"""Modules made sparse by simplicit, by magnitude with and without a refit, by Wanda- and SparseGPT-style masks and by ADMM (ALPS).

    python bench/torch_table.py resnet18 --model resnet18_cifar100.onnx --data cifar100 --samples 1000 --targets 0.75,0.85
    python bench/torch_table.py vit --model vit_cifar100.onnx --data cifar100 --samples 1000 --targets 0.4,0.5
    python bench/torch_table.py resnet20 --model resnet20_cifar100.onnx --data cifar100 --samples 10000 --rivals "" --epochs 30 --augment

`--data` is a folder with `train.bin.gz` and `test.bin.gz` in the binary format of CIFAR-100. The module is written here in
plain PyTorch, gets the weights of the ONNX file, and is checked against ONNX Runtime where that is installed. All methods
see the same images without labels and are counted alike, over all parameters; drops are of test accuracy, in points. The last
two rivals are tried with equal shares of all layers and with one criterion for all of them, on the original's states and on
their own (cascade); 2,000 further images choose among the four by agreement with the original, labels play no part in it.
"""

import argparse
import gzip
import json
import pathlib
import time

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import nn
from torch.nn.utils import prune

import simplicit.torch as st
from simplicit.torch._batches import Batches
from simplicit.torch._find import choose, find
from simplicit.torch._source import Source

MEAN = torch.tensor([0.50707516, 0.48654887, 0.44091784])
STD = torch.tensor([0.26733429, 0.25643846, 0.27615047])


class Basic(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if inputs != outputs else nn.Identity()

    def forward(self, x):
        return torch.relu(self.conv2(torch.relu(self.conv1(x))) + self.shortcut(x))


class ResNet(nn.Module):
    """For images of 32 × 32; batch norms are in the convolutions already."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes = sizes
        self.conv = nn.Conv2d(3, sizes[0], 3, 1, 1)
        self.blocks = nn.Sequential(*(Basic(a, b, 1 if a == b else 2) for a, b in zip(sizes, sizes[1:], strict=False)))
        self.linear = nn.Linear(sizes[-1], 100)

    def forward(self, x):
        return self.linear(self.blocks(torch.relu(self.conv(x))).mean((2, 3)))

    def load(self, graph):
        """Convolutions in the order of the file, which is the order they run."""
        values = {i.name: torch.from_numpy(numpy_helper.to_array(i).copy()) for i in graph.initializer}
        nodes = [n for n in graph.node if n.op_type in ("Conv", "Gemm")]
        layers = [m for m in self.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
        assert len(nodes) == len(layers)
        with torch.no_grad():
            for node, layer in zip(nodes, layers, strict=True):
                layer.weight.copy_(values[node.input[1]])
                layer.bias.copy_(values[node.input[2]])


def resnet18():
    return ResNet([64, 64, 64, 128, 128, 256, 256, 512, 512])


def resnet20():
    return ResNet([16, 16, 16, 16, 32, 32, 32, 64, 64, 64])


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        samples, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(samples, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, -1) @ v
        return self.out(mixed.transpose(1, 2).reshape(samples, tokens, width))


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, width=192, depth=6, heads=3):
        super().__init__()
        self.embed = nn.Conv2d(3, width, 4, 4)
        self.position = nn.Parameter(torch.zeros(1, 64, width))
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(depth)))
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, 100)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2) + self.position
        return self.linear(self.norm(self.layers(x)).mean(1))

    def load(self, graph):
        values = {i.name: torch.from_numpy(numpy_helper.to_array(i).copy()) for i in graph.initializer}
        constants = {n.output[0]: numpy_helper.to_array(n.attribute[0].t) for n in graph.node if n.op_type == "Constant"}
        heads = int(constants["/b/b.0/a/Constant_5_output_0"][0])
        products = iter([values[n.input[1]] for n in graph.node if n.op_type == "MatMul" and n.input[1] in values])
        state = {"position": values["pos"], "embed.weight": values["e.weight"], "embed.bias": values["e.bias"]}
        for part in ("weight", "bias"):
            state[f"norm.{part}"], state[f"linear.{part}"] = values[f"n.{part}"], values[f"f.{part}"]
        names = {"attention.qkv": "a.qkv", "attention.out": "a.o", "mlp.0": "m.0", "mlp.2": "m.2"}
        for k, layer in enumerate(self.layers):
            layer.attention.heads = heads
            for ours, theirs in names.items():
                state[f"layers.{k}.{ours}.weight"] = next(products).t()
                state[f"layers.{k}.{ours}.bias"] = values[f"b.{k}.{theirs}.bias"]
            for n in (1, 2):
                for part in ("weight", "bias"):
                    state[f"layers.{k}.norm{n}.{part}"] = values[f"b.{k}.n{n}.{part}"]
        self.load_state_dict(state)


NETWORKS = {"resnet18": resnet18, "resnet20": resnet20, "vit": ViT}


def images(path, count=0, seed=None):
    """The first images of a file, or a draw of them."""
    with gzip.open(path) as file:
        raw = np.frombuffer(file.read(), np.uint8).reshape(-1, 3074)
    order = np.arange(len(raw)) if seed is None else np.random.default_rng(seed).permutation(len(raw))
    raw = raw[order[: count or len(raw)]]
    x = torch.from_numpy(raw[:, 2:].copy()).reshape(-1, 3, 32, 32).float() / 255
    return (x - MEAN[:, None, None]) / STD[:, None, None], torch.from_numpy(raw[:, 1].astype(np.int64))


@torch.no_grad()
def accuracy(module, x, y):
    device = next(module.parameters()).device
    hits = sum(int((module(a.to(device)).argmax(1).cpu() == b).sum()) for a, b in zip(x.split(500), y.split(500), strict=True))
    return 100 * hits / len(y)


def sparsity(module, original):
    count = lambda m: sum(int(p.count_nonzero()) for p in m.parameters())  # noqa: E731
    return 1 - count(module) / count(original)


def magnitude(module, loader, share):
    """torch.nn.utils.prune over all layers together."""
    places = [(m, "weight") for m in module.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    prune.global_unstructured(places, prune.L1Unstructured, amount=share)
    for place in places:
        prune.remove(*place)


def wanda_rows(w, gram, share):
    """|w| times the size of its feature, the smallest of every row go."""
    score = w.abs() * gram.diagonal().sqrt()
    cut = score.argsort(1)[:, : round(share * w.shape[1])]
    return w.scatter(1, cut, 0)


def sparsegpt_rows(w, gram, share, block=128):
    """Columns in order, the smallest w²/[H⁻¹] of a block of columns go, the rest takes up their errors."""
    gram = gram.clone()
    dead = gram.diagonal() == 0
    gram[dead, dead] = 1
    gram.diagonal().add_(0.01 * gram.diagonal().mean())
    w = w.clone()
    w[:, dead] = 0
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(gram)), upper=True)
    for first in range(0, w.shape[1], block):
        last = min(first + block, w.shape[1])
        part, u = w[:, first:last].clone(), upper[first:last, first:last]
        score = (part / u.diagonal()) ** 2
        gone = score <= score.flatten().kthvalue(max(1, round(share * score.numel()))).values
        errors = torch.zeros_like(part)
        for j in range(last - first):
            errors[:, j] = torch.where(gone[:, j], part[:, j], 0) / u[j, j]
            part[:, j:] -= errors[:, j : j + 1] * u[j, j:]
            part[:, j] = torch.where(gone[:, j], 0, part[:, j])
        w[:, first:last] = part
        w[:, last:] -= errors @ upper[first:last, last:]
    return w


def by_layers(rows):
    """A mask style, layer by layer on the inputs that the layers before it leave, with the same statistics as ours."""

    def method(module, loader, share):
        batches = Batches(loader, module, None, None, None)
        found = find(module, batches)
        choose(module, found, None, None)
        source = Source(module, module, found, batches, positions=64, seed=0)
        for k, block in enumerate(found.blocks):
            source.begin([k], source.samples(), False)
            while source.step() is not None:
                pass
            ((m, first, *_),) = source.finish()
            gram = torch.from_numpy(first[0] if m is not None else first[0].T @ first[0])[: block.features, : block.features]
            weight = dict(module.named_parameters())[block.key.parameter]
            gram = gram.to(weight.device)
            with torch.no_grad():
                new = rows(weight.reshape(block.rows, -1).double(), gram, share)
                weight.copy_(new.reshape(weight.shape))

    return method


def least_squares(gram, cross, kept, ridge=1e-6):
    """Every row's least squares on its own support; rows with supports of like size at once."""
    out = torch.zeros_like(cross)
    sizes = kept.sum(1)
    order = sizes.argsort()
    first = 0
    while first < len(order):
        largest = int(sizes[order[min(first + 127, len(order) - 1)]].clamp(min=1))
        rows = order[first : first + max(1, min(128, int(1e8) // largest**2))]
        first += len(rows)
        most = int(sizes[rows].max())
        if most == 0:
            continue
        # Places of the non-zeros, filled up with others that the system holds at zero.
        places = kept[rows].to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
        real = kept[rows].gather(1, places)
        system = gram[places[:, :, None], places[:, None, :]] * (real[:, :, None] & real[:, None, :])
        system.diagonal(dim1=1, dim2=2).mul_(1 + ridge).add_((~real).double())
        right = torch.where(real, cross[rows].gather(1, places), 0)
        answer = torch.cholesky_solve(right[:, :, None], torch.linalg.cholesky_ex(system).L)[:, :, 0]
        out[rows[:, None], places] = torch.where(real, answer, 0)
    return out


class Rows:
    """One layer's least-squares problem: G, H, the original rows, and whether the last feature is the constant, which stays."""

    def __init__(self, statistics, weights, constant, device):
        samples, gram, cross, energy = statistics
        if samples is None:
            raise SystemExit("rivals that fit: expected more samples than 0.41 times the features of every layer")
        self.gram, self.cross = (torch.from_numpy(part[0]).to(device) / samples for part in (gram, cross))
        self.energy = float(energy.sum()) / samples
        # A feature that is always zero has no weight and no equation.
        size = self.gram.diagonal()
        self.gram.diagonal().add_((size <= 0).double())
        self.constant = constant
        self.weights = weights.double().to(device)
        if constant:
            self.weights = torch.cat([self.weights, torch.zeros_like(self.weights[:, :1])], 1)
        self.free = (size > 0) & (self.weights != 0)
        self.held = torch.zeros_like(self.free)
        if constant:
            self.held[:, -1] = True

    def largest(self, score, count):
        """The support of the largest scores of a layer, constants beside it."""
        score = torch.where(self.free, score, -1)
        kept = torch.zeros_like(self.free)
        kept.view(-1)[score.flatten().topk(min(count, int(self.free.sum()))).indices] = True
        return kept | self.held

    def above(self, score, least):
        """The support of the scores from the least on."""
        return (self.free & (score >= least)) | self.held

    def count(self, kept):
        return int(kept.sum()) - (len(kept) if self.constant else 0)


def magnitude_support(rows, count=None, price=None):
    """The largest weights: a number of them, or those above a threshold."""
    size = rows.weights.abs()
    return rows.above(size, price) if count is None else rows.largest(size, count)


def admm_support(rows, count=None, price=None, steps=300, look=3):
    """Cardinality by ADMM as ALPS does it: unit-norm features, a projection of the whole layer, ρ by the support's change."""
    scale = rows.gram.diagonal().sqrt()
    gram, cross, v = rows.gram / (scale[:, None] * scale), rows.cross / scale, rows.weights * scale
    dual, rho, support, inverse = torch.zeros_like(v), 0.1, v != 0, None
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    for step in range(steps):
        if inverse is None:
            inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram + rho * eye))
        m = (cross + rho * (v - dual)) @ inverse + dual
        least = None if price is None else (2 * price * rows.energy / rho) ** 0.5
        kept = rows.largest(m.abs(), count) if least is None else rows.above(m.abs(), least)
        v = torch.where(kept, m, 0)
        dual = m - v
        if step % look == look - 1:
            changed = int((kept != support).sum()) / max(1, int(kept.sum()))
            support = kept
            if changed == 0:
                break
            growth = 1.3 if changed >= 0.1 else 1.2 if changed >= 0.005 else 1.1
            rho, dual, inverse = rho * growth, dual / growth, None
    return support


def chosen_of_four(support_of, original, loader, held_out, target, copies):
    """Equal shares and one criterion for all layers, each on the original's states and on its own."""
    batches = Batches(loader, original, None, None, None)
    found = find(original, batches)
    choose(original, found, None, None)
    device = next(original.parameters()).device

    def source_of(module):
        return Source(original, module, found, batches, positions=64, seed=0)

    def statistics(source, blocks, own):
        source.begin(blocks, source.samples(), own)
        while source.step() is not None:
            pass
        pairs = zip(source.finish(), (source.trained[k] for k in blocks), strict=True)
        return [Rows(s, source.weights(b), source.constant(b) is not None, device) for s, b in pairs]

    flat = source_of(copies())
    blocks = list(range(len(flat.trained)))
    layers = statistics(flat, blocks, False)
    sizes = [int((flat.weights(b) != 0).sum()) for b in flat.trained]
    total = sum(int(p.count_nonzero()) for p in original.parameters())
    stays = sum(sizes) - round(target * total)
    uniform = [round(stays * size / sum(sizes)) for size in sizes]
    # One criterion for all layers: its price by bisection on the logarithm.
    low, high = -14.0, 1.0
    for _ in range(14):
        middle = (low + high) / 2
        counts = [rows.count(support_of(rows, price=10**middle)) for rows in layers]
        low, high = (middle, high) if sum(counts) > stays else (low, middle)
        if abs(sum(counts) - stays) < 1e-3 * total:
            break
    excess = sum(counts) - stays
    shared = [max(1, round(c - excess * c / max(1, sum(counts)))) for c in counts]
    with torch.no_grad():
        wanted = torch.cat([original(x.to(device)).argmax(1) for x in held_out.split(500)])
    tried = []
    for name, counts in (("uniform", uniform), ("global", shared)):
        for own in (False, True):
            module = copies()
            source = source_of(module)
            for k in blocks:
                rows = statistics(source, [k], True)[0] if own else layers[k]
                new = least_squares(rows.gram, rows.cross, support_of(rows, count=counts[k]))
                constant = new[:, -1] if rows.constant else None
                new = new[:, :-1] if rows.constant else new
                source.install(k, new.float().cpu().numpy(), None if constant is None else constant.float().cpu().numpy())
            with torch.no_grad():
                got = torch.cat([module(x.to(device)).argmax(1) for x in held_out.split(500)])
            agreement = float((got == wanted).double().mean())
            tried.append((agreement, name + (", cascade" if own else ""), module))
    agreement, name, module = max(tried, key=lambda t: t[0])
    return module, f"{name}, agrees on {100 * agreement:.2f} %"


METHODS = {"magnitude": magnitude, "Wanda style": by_layers(wanda_rows), "SparseGPT style": by_layers(sparsegpt_rows)}
FITTED = {"magnitude + refit": magnitude_support, "cardinality by ADMM (ALPS)": admm_support}
HELD_OUT = 2000


def flips_and_shifts(x):
    """Every image mirrored or not and moved by up to four pixels, with zeros around it."""
    samples, device = len(x), x.device
    x = torch.where(torch.rand(samples, 1, 1, 1, device=device) < 0.5, x.flip(3), x)
    padded = nn.functional.pad(x, (4, 4, 4, 4))
    top, left = torch.randint(0, 9, (2, samples, 1), device=device)
    rows, columns = (first + torch.arange(32, device=device) for first in (top, left))
    sample, channel = torch.arange(samples, device=device)[:, None, None, None], torch.arange(3, device=device)[:, None, None]
    return padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]


def to_sparsity(method, original, loader, target, copies):
    """The share of every layer's weights that gives the target over all parameters: biases and norms stay."""
    weights = sum(p.numel() for p in original.parameters() if p.dim() > 1 and p.shape[0] != 1)
    total = sum(int(p.count_nonzero()) for p in original.parameters())
    module = copies()
    method(module, loader, target * total / weights)
    return module


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=list(NETWORKS))
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, type=pathlib.Path)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--test", type=int, default=0)
    parser.add_argument("--targets", default="0.75")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cascade", default="layer")
    parser.add_argument("--epochs", type=int, default=0, help="of polish, which is fine-tuning without labels")
    parser.add_argument("--augment", action="store_true", help="polish on flips and shifts")
    parser.add_argument("--mix", action="store_true", help="polish on images mixed in pairs")
    parser.add_argument("--rate", type=float, default=4e-4, help="first rate of polish")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--seed", type=int, help="of a draw of the images, and of polish; without it the first images")
    parser.add_argument("--rivals", default=",".join(METHODS))
    parser.add_argument("--ours", choices=["on", "off"], default="on")
    parser.add_argument("--json")
    given = parser.parse_args()
    module = NETWORKS[given.network]()
    graph = onnx.load(given.model).graph
    module.load(graph)
    module.eval().to(given.device)
    train, _ = images(given.data / "train.bin.gz", given.samples + HELD_OUT, given.seed)
    train, held_out = train[: given.samples], train[given.samples :]
    torch.manual_seed(given.seed or 0)
    x, y = images(given.data / "test.bin.gz", given.test)
    try:
        import onnxruntime

        session = onnxruntime.InferenceSession(given.model, providers=["CPUExecutionProvider"])
        expected = session.run(None, {session.get_inputs()[0].name: x[:20].numpy()})[0]
        with torch.no_grad():
            got = module(x[:20].to(given.device)).cpu().numpy()
        assert np.abs(got - expected).max() < 1e-2 * np.abs(expected).max(), "the module is not the network of the file"
    except ImportError:
        pass
    loader = list(train.to(given.device).split(given.batch))
    before = accuracy(module, x, y)
    print(f"baseline {before:.2f} % on {len(y)} test images", flush=True)
    lines = []

    def write():
        if given.json:
            results = {"baseline": before, "test": len(y), "samples": given.samples, "seed": given.seed, "lines": lines}
            pathlib.Path(given.json).write_text(json.dumps(results, indent=1))

    def fresh():
        out = NETWORKS[given.network]()
        out.load(graph)
        return out.eval().to(given.device)

    def unseen(sparse):
        """How far the outputs are from the original's on images that nothing was fitted to, without labels."""
        if len(held_out) == 0:
            return ""
        total = agreed = 0.0
        with torch.no_grad():
            for x in held_out.split(500):
                wanted, got = (m(x.to(given.device)).double().log_softmax(1) for m in (module, sparse))
                total += float((wanted.exp() * (wanted - got)).sum())
                agreed += int((wanted.argmax(1) == got.argmax(1)).sum())
        return f"unseen images: divergence {total / len(held_out):.4f}, agrees on {100 * agreed / len(held_out):.2f} %"

    for target in map(float, given.targets.split(",")):
        for name in filter(None, given.rivals.split(",")):
            begin = time.time()
            choice = ""
            if name in FITTED:
                sparse, choice = chosen_of_four(FITTED[name], module, loader, held_out, target, fresh)
            else:
                sparse = to_sparsity(METHODS[name], module, loader, target, fresh)
            lines.append((name, sparsity(sparse, module), accuracy(sparse, x, y) - before, time.time() - begin, choice))
            print(*lines[-1], flush=True)
            write()
        if given.ours == "off":
            continue
        begin = time.time()
        cascade = None if given.cascade == "none" else given.cascade
        compressed = st.compress(
            module,
            loader,
            target_sparsity=target,
            cascade=cascade,
            bounds="off",
            progress="none",
            device=given.device,
            seed=given.seed or 0,
        )
        ours = compressed.module
        lines.append(("simplicit", sparsity(ours, module), accuracy(ours, x, y) - before, time.time() - begin, unseen(ours)))
        print(*lines[-1], flush=True)
        if given.epochs:
            begin = time.time()
            augment = flips_and_shifts if given.augment else None
            polished = st.polish(
                compressed, loader, epochs=given.epochs, learning_rate=given.rate, augment=augment, mix=given.mix, progress="none"
            )
            print(polished)
            change = accuracy(ours, x, y) - before
            lines.append(("simplicit, fine-tuned (polish)", sparsity(ours, module), change, time.time() - begin, unseen(ours)))
            print(*lines[-1], flush=True)
            write()
    write()


if __name__ == "__main__":
    main()
