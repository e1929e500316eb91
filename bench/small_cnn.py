"""Writes a small convolutional network for 28 x 28 images whose last layer reads 3,136 features.

    python bench/small_cnn.py OUT.onnx

Two 3 x 3 convolutions (8 and 16 channels), a maximum over 2 x 2 and a linear layer: 32,618 parameters, drawn by a fixed
seed. What it costs to make it sparse depends on its shape, not on what it predicts. Needs NumPy and onnx.
"""

import sys

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def main():
    random = np.random.default_rng(0)

    def weight(name, *shape):
        scale = (2.0 / np.prod(shape[1:])) ** 0.5
        return numpy_helper.from_array((scale * random.standard_normal(shape)).astype(np.float32), name)

    def bias(name, size):
        return numpy_helper.from_array((0.05 * random.standard_normal(size)).astype(np.float32), name)

    weights = [weight("w1", 8, 1, 3, 3), bias("b1", 8), weight("w2", 16, 8, 3, 3), bias("b2", 16)]
    weights += [weight("w3", 10, 3136), bias("b3", 10)]
    same = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    nodes = [
        helper.make_node("Conv", ["u", "w1", "b1"], ["z1"], **same),
        helper.make_node("Relu", ["z1"], ["x1"]),
        helper.make_node("Conv", ["x1", "w2", "b2"], ["z2"], **same),
        helper.make_node("Relu", ["z2"], ["x2"]),
        helper.make_node("MaxPool", ["x2"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "w3", "b3"], ["y"], transB=1),
    ]
    u = helper.make_tensor_value_info("u", TensorProto.FLOAT, ["batch", 1, 28, 28])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 10])
    graph = helper.make_graph(nodes, "small_cnn", [u], [y], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, sys.argv[1])


if __name__ == "__main__":
    main()
