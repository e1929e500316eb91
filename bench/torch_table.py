"""The table of docs/pytorch.md: modules made sparse by simplicit, by magnitude, and by Wanda- and SparseGPT-style masks.

    python bench/torch_table.py resnet18 --model resnet18_cifar100.onnx --data cifar100 --samples 1000 --targets 0.75,0.85
    python bench/torch_table.py vit --model vit_cifar100.onnx --data cifar100 --samples 1000 --targets 0.4,0.5

`--data` is a folder with `train.bin.gz` and `test.bin.gz` in the binary format of CIFAR-100. The module is written here in
plain PyTorch, gets the weights of the ONNX file, and is checked against ONNX Runtime where that is installed. All methods
see the same images without labels and are counted alike, over all parameters; drops are of test accuracy, in points.
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


class ResNet18(nn.Module):
    """For images of 32 × 32; batch norms are in the convolutions already."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 3, 1, 1)
        sizes = [64, 64, 64, 128, 128, 256, 256, 512, 512]
        self.blocks = nn.Sequential(*(Basic(a, b, 1 if a == b else 2) for a, b in zip(sizes, sizes[1:], strict=False)))
        self.linear = nn.Linear(512, 100)

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


def images(path, count):
    with gzip.open(path) as file:
        raw = np.frombuffer(file.read(count * 3074 if count else -1), np.uint8).reshape(-1, 3074)
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


METHODS = {"magnitude": magnitude, "Wanda style": by_layers(wanda_rows), "SparseGPT style": by_layers(sparsegpt_rows)}


def to_sparsity(method, original, loader, target, copies):
    """The share of every layer's weights that gives the target over all parameters: biases and norms stay."""
    weights = sum(p.numel() for p in original.parameters() if p.dim() > 1 and p.shape[0] != 1)
    total = sum(int(p.count_nonzero()) for p in original.parameters())
    module = copies()
    method(module, loader, target * total / weights)
    return module


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=["resnet18", "vit"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, type=pathlib.Path)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--test", type=int, default=0)
    parser.add_argument("--targets", default="0.75")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cascade", default="layer")
    parser.add_argument("--epochs", type=int, default=0, help="of polish, which is fine-tuning without labels")
    parser.add_argument("--rivals", default=",".join(METHODS))
    parser.add_argument("--json")
    given = parser.parse_args()
    module = {"resnet18": ResNet18, "vit": ViT}[given.network]()
    graph = onnx.load(given.model).graph
    module.load(graph)
    module.eval().to(given.device)
    train, _ = images(given.data / "train.bin.gz", given.samples)
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
    loader = list(train.split(100))
    before = accuracy(module, x, y)
    print(f"baseline {before:.2f} % on {len(y)} test images", flush=True)
    lines = []

    def fresh():
        out = type(module)()
        out.load(graph)
        return out.eval().to(given.device)

    for target in map(float, given.targets.split(",")):
        for name in filter(None, given.rivals.split(",")):
            begin = time.time()
            sparse = to_sparsity(METHODS[name], module, loader, target, fresh)
            lines.append((name, sparsity(sparse, module), accuracy(sparse, x, y) - before, time.time() - begin))
            print(*lines[-1], flush=True)
        begin = time.time()
        cascade = None if given.cascade == "none" else given.cascade
        compressed = st.compress(module, loader, target_sparsity=target, cascade=cascade, bounds="off", progress="none")
        ours = compressed.module
        lines.append(("simplicit", sparsity(ours, module), accuracy(ours, x, y) - before, time.time() - begin))
        print(*lines[-1], flush=True)
        if given.epochs:
            begin = time.time()
            polished = st.polish(compressed, loader, epochs=given.epochs, progress="none")
            print(polished)
            lines.append(("simplicit, fine-tuned (polish)", sparsity(ours, module), accuracy(ours, x, y) - before, time.time() - begin))
            print(*lines[-1], flush=True)
    if given.json:
        results = {"baseline": before, "test": len(y), "samples": given.samples, "lines": lines}
        pathlib.Path(given.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
