"""Plain linear bounds (CROWN) of a VNN-COMP network by auto_LiRPA, beside `simplicit certify`: seconds, memory, share certified.

    python bench/auto_lirpa.py resnet_2b.onnx test.bin.gz [--images 20] [--epsilon 1]

Needs auto_LiRPA 0.3, which wants Python 3.10 or older and torch below 1.13 (pip install "torch<1.13" "torchvision<0.14"
"numpy<2" auto_LiRPA tqdm onnx). One thread, images one by one, ε in grey levels, inputs in [0, 1]. Seconds are the processor's and
leave out reading the network.
"""

import argparse
import gzip
import resource
import time

import numpy as np
import onnx
import torch
from auto_LiRPA import BoundedModule, BoundedTensor
from auto_LiRPA.perturbations import PerturbationLpNorm
from onnx import numpy_helper

MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(1, 3, 1, 1)
STD = torch.tensor([0.2471, 0.2435, 0.2616]).view(1, 3, 1, 1)


class Network(torch.nn.Module):
    """The operators that these networks have, in the file's order."""

    def __init__(self, file):
        super().__init__()
        graph = onnx.load(file).graph
        self.tensors = torch.nn.ParameterDict()
        names = {}
        for k, tensor in enumerate(graph.initializer):
            value = torch.tensor(numpy_helper.to_array(tensor).copy())
            if value.is_floating_point():
                names[tensor.name] = f"t{k}"
                self.tensors[f"t{k}"] = torch.nn.Parameter(value, requires_grad=False)
        self.input = next(i.name for i in graph.input if i.name not in {t.name for t in graph.initializer})
        self.output = graph.output[0].name
        self.names = names
        attributes = [{a.name: onnx.helper.get_attribute_value(a) for a in n.attribute} for n in graph.node]
        self.nodes = [(n.op_type, list(n.input), n.output[0], a) for n, a in zip(graph.node, attributes, strict=True)]

    def forward(self, x):
        values = {name: self.tensors[key] for name, key in self.names.items()}
        values[self.input] = x
        for kind, inputs, output, given in self.nodes:
            read = [values[name] for name in inputs if name in values]
            if kind == "Conv":
                stride, padding = given.get("strides", [1, 1]), given.get("pads", [0] * 4)[:2]
                out = torch.nn.functional.conv2d(read[0], read[1], read[2] if len(read) > 2 else None, stride, padding)
            elif kind == "Relu":
                out = torch.relu(read[0])
            elif kind == "Add":
                out = read[0] + read[1]
            elif kind in ("Flatten", "Reshape"):
                out = read[0].flatten(1)
            elif kind == "Gemm":
                out = torch.nn.functional.linear(read[0], read[1] if given.get("transB") else read[1].t(), read[2])
            elif kind == "Constant":
                continue
            else:
                raise SystemExit(f"{kind}: not one of the operators of these networks")
            values[output] = out
        return values[self.output]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network")
    parser.add_argument("images_file", help="CIFAR-10's binary file, gzipped")
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--epsilon", type=float, default=1.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with gzip.open(options.images_file) as file:
        raw = np.frombuffer(file.read(3073 * options.images), np.uint8).reshape(-1, 3073)
    network = Network(options.network).eval()
    bounded = BoundedModule(network, torch.zeros(1, 3, 32, 32), device="cpu")
    clean = certified = 0
    start = time.process_time()
    for image in raw:
        label = int(image[0])
        pixels = torch.tensor(image[1:].reshape(1, 3, 32, 32).astype(np.float32) / 255)
        with torch.no_grad():
            right = int(network((pixels - MEAN) / STD).argmax()) == label
        clean += right
        if not right:
            continue
        epsilon = options.epsilon / 255
        low, high = (pixels - epsilon).clamp(0, 1), (pixels + epsilon).clamp(0, 1)
        ends = PerturbationLpNorm(norm=np.inf, x_L=(low - MEAN) / STD, x_U=(high - MEAN) / STD)
        x = BoundedTensor((pixels - MEAN) / STD, ends)
        others = [j for j in range(10) if j != label]
        differences = torch.zeros(1, 9, 10)
        differences[0, :, label] = 1
        differences[0, range(9), others] = -1
        with torch.no_grad():
            least, _ = bounded.compute_bounds(x=(x,), C=differences, method="CROWN", bound_upper=False)
        certified += bool((least > 0).all())
    taken = time.process_time() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    share = f"right {100 * clean / len(raw):.1f} %, certified {100 * certified / len(raw):.1f} %"
    print(f"{len(raw)} images, ε = {options.epsilon:g}/255: {share}, {taken:.1f} processor seconds, {memory:.0f} MiB at most")


main()
