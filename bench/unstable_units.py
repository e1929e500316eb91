"""Which ReLU units of a residual network change sign within ε: by intervals, and to first order.

    python bench/unstable_units.py data/resnet20_cifar100.onnx test.bin [--images 16] [--units 48]

First the radius at which the nearest class would win if the network were linear around an image (margin over the ℓ1 norm of its
gradient, the smallest of the eight largest classes): what no linear bound can be expected to exceed by much. Then, for the first image
that is classified rightly, the share of units per layer whose interval contains zero, and of sampled units whose value is less than ε
times the ℓ1 norm of their gradient. CIFAR-100's binary file; needs torch and onnx; no part of the product.
"""

import argparse

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch.nn import functional

MEAN = np.array([0.50707516, 0.48654887, 0.44091784]).reshape(3, 1, 1)
STD = np.array([0.26733429, 0.25643846, 0.27615047]).reshape(3, 1, 1)
EPSILON = [1e-4, 1e-3, 1e-2, 5e-2, 1e-1]


class Network:
    def __init__(self, file):
        self.graph = onnx.load(file).graph
        self.tensors = {t.name: torch.tensor(numpy_helper.to_array(t).copy()) for t in self.graph.initializer}
        self.input = next(i.name for i in self.graph.input if i.name not in self.tensors)

    def run(self, x, radius=None):
        """Outputs, and (centre, radius) of what every ReLU reads; a radius of the input makes all of them intervals."""
        centres, radii, read = {**self.tensors, self.input: x}, {self.input: radius}, []
        for node in self.graph.node:
            options = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            x, r, out = centres[node.input[0]], radii.get(node.input[0]), node.output[0]
            weights = [centres[name] for name in node.input[1:]]
            match node.op_type:
                case "Conv":
                    place = {"stride": options.get("strides", [1, 1]), "padding": options.get("pads", [0, 0])[:2]}
                    apply = lambda x, w, b=None, place=place: functional.conv2d(x, w, b, **place)  # noqa: E731
                    bias = weights[1] if len(weights) > 1 else None
                case "Gemm":
                    weights[0] = weights[0] if options.get("transB") else weights[0].T
                    apply, bias = functional.linear, weights[1]
                case "Relu":
                    read.append((x, r))
                    low, high = (x, x) if r is None else (x - r, x + r)
                    centres[out] = (low.relu() + high.relu()) / 2
                    radii[out] = None if r is None else (high.relu() - low.relu()) / 2
                    continue
                case "Add":
                    centres[out] = x + weights[0]
                    radii[out] = None if r is None else r + radii[node.input[1]]
                    continue
                case "ReduceMean":
                    keep = bool(options.get("keepdims", 1))
                    centres[out] = x.mean((2, 3), keepdim=keep)
                    radii[out] = None if r is None else r.mean((2, 3), keepdim=keep)
                    continue
                case other:
                    raise SystemExit(f"{node.name}: expected a convolution, sum, mean, ReLU or linear map, got {other}")
            centres[out] = apply(x, weights[0], bias)
            radii[out] = None if r is None else apply(r, weights[0].abs())
        return centres[self.graph.output[0].name], read


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network")
    parser.add_argument("images_file")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--units", type=int, default=48)
    options = parser.parse_args()
    torch.set_num_threads(1)
    network = Network(options.network)
    raw = np.fromfile(options.images_file, np.uint8, 3074 * 4 * options.images).reshape(-1, 3074)
    labels = raw[:, 1]
    images = torch.tensor((raw[:, 2:].reshape(-1, 3, 32, 32) / 255 - MEAN) / STD, dtype=torch.float32)
    inverse = torch.tensor(1 / STD, dtype=torch.float32)
    with torch.no_grad():
        right = np.flatnonzero(network.run(images)[0].argmax(1).numpy() == labels)[: options.images]

    def reach(value, x):
        (gradient,) = torch.autograd.grad(value, x, retain_graph=True)
        return 255 * abs(value.item()) / max((gradient * inverse).abs().sum().item(), 1e-12)

    radii = []
    for k in right:
        x = images[k : k + 1].clone().requires_grad_()
        outputs = network.run(x)[0][0]
        others = [j for j in outputs.topk(8).indices.tolist() if j != labels[k]]
        radii.append(min(reach(outputs[labels[k]] - outputs[j], x) for j in others))
    quartiles = ", ".join(f"{q:.3f}" for q in np.percentile(radii, [0, 25, 50, 75, 100]))
    print(f"first-order radius in 1/255, least, quartiles, most: {quartiles}")
    print("above " + ", ".join(f"{e:g}/255: {100 * np.mean(np.array(radii) > e):.0f} %" for e in EPSILON))
    x = images[right[0] : right[0] + 1]
    for e in EPSILON:
        with torch.no_grad():
            _, read = network.run(x, (e / 255 * inverse).expand_as(x))
        print(f"intervals, {e:g}/255, %:", *(f"{100 * (z.abs() < r).float().mean().item():.1f}" for z, r in read))
    x = x.clone().requires_grad_()
    rng = np.random.default_rng(0)
    reaches = []
    for z, _ in network.run(x)[1]:
        units = z.flatten()
        reaches.append(np.array([reach(units[i], x) for i in rng.choice(len(units), options.units, replace=False)]))
    for e in EPSILON:
        print(f"first order, {e:g}/255, %:", *(f"{100 * np.mean(r < e):.0f}" for r in reaches))


if __name__ == "__main__":
    main()
