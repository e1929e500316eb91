"""Unusual networks, with what ONNX Runtime computes for them; or what it computes for networks written again.

    python onnx_unusual.py FOLDER          # writes NAME.onnx, NAME.input.npy, NAME.output.npy
    python onnx_unusual.py FOLDER again    # NAME.sparse.onnx on NAME.input.npy must give NAME.sparse.npy
"""

import pathlib
import sys

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

node = helper.make_node
random = np.random.default_rng(0)
SAMPLES = 64


def weights(*shape):
    return (random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]) if len(shape) > 1 else 4)).astype(np.float32)


def model(nodes, constants, shape, opset=13, batch="batch", outputs=("y",), kind=TensorProto.FLOAT, as_nodes=False):
    stored = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    if as_nodes:
        nodes = [node("Constant", [], [tensor.name], value=tensor) for tensor in stored] + nodes
    inputs = [helper.make_tensor_value_info("x", kind, [batch, *shape])]
    if opset < 9:
        # Initialisers had to be inputs, too.
        inputs += [helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in stored]
    float_kind = TensorProto.FLOAT16 if kind == TensorProto.FLOAT16 else TensorProto.FLOAT
    results = [helper.make_tensor_value_info(name, float_kind, None) for name in outputs]
    graph = helper.make_graph(nodes, "unusual", inputs, results, [] if as_nodes else stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8 if opset > 8 else 3)


def norm(channels):
    return [1 + 0.1 * weights(channels), weights(channels), weights(channels), np.abs(weights(channels)) + 0.5]


def all_models():
    for opset in (7, 9, 13, 17, 21):
        yield f"conv1d_{opset}", model(
            [
                node("Conv", ["x", "w", "b"], ["a"], group=2, dilations=[2], pads=[2, 2], kernel_shape=[3]),
                node("PRelu", ["a", "slope"], ["c"]),
                node("MaxPool", ["c"], ["d"], kernel_shape=[2], strides=[2]),
                node("Flatten", ["d"], ["e"]),
                node("Gemm", ["e", "v", "vb"], ["y"], transB=1),
            ],
            {"w": weights(8, 2, 3), "b": weights(8), "slope": np.full((8, 1), 0.2, np.float32), "v": weights(5, 64), "vb": weights(5)},
            [4, 16], opset,
        )  # fmt: skip
        g, beta, mean, variance = norm(8)
        g2, beta2, mean2, variance2 = norm(16)
        yield f"conv2d_{opset}", model(
            [
                node("Conv", ["x", "w"], ["a"], auto_pad="SAME_UPPER", strides=[2, 2], kernel_shape=[3, 3]),
                node("Add", ["a", "ab"], ["a2"]),
                node("BatchNormalization", ["a2", "g", "beta", "mean", "variance"], ["n"]),
                node("Relu", ["n"], ["r"]),
                node("Conv", ["r", "w2"], ["c"], kernel_shape=[3, 3], pads=[1] * 4, group=8),
                node("Relu", ["c"], ["c2"]),
                node("Concat", ["c2", "r"], ["k"], axis=1),
                node("BatchNormalization", ["k", "g2", "beta2", "mean2", "variance2"], ["n2"]),
                node("LeakyRelu", ["n2"], ["l"], alpha=0.1),
                node("GlobalAveragePool", ["l"], ["p"]),
                node("Flatten", ["p"], ["f"]),
                node("Gemm", ["f", "v", "vb"], ["y"], alpha=0.5, beta=2.0),
            ],
            {"w": weights(8, 3, 3, 3), "ab": weights(8, 1, 1), "g": g, "beta": beta, "mean": mean, "variance": variance,
             "w2": weights(8, 1, 3, 3), "g2": g2, "beta2": beta2, "mean2": mean2, "variance2": variance2,
             "v": weights(16, 5), "vb": weights(5)},
            [3, 9, 9], opset,
        )  # fmt: skip
    yield "ceil_pools", model(
        [
            node("Conv", ["x", "w"], ["a"], kernel_shape=[3, 3]),
            node("Relu", ["a"], ["r"]),
            node("MaxPool", ["r"], ["m"], kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1),
            node("AveragePool", ["m"], ["q"], kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1, pads=[1, 1, 0, 0]),
            node("Flatten", ["q"], ["f"]),
            node("Gemm", ["f", "v"], ["y"]),
        ],
        {"w": weights(4, 3, 3, 3), "v": weights(64, 5)}, [3, 14, 14], 19,
    )  # fmt: skip
    yield "shared_weights", model(
        [
            node("Conv", ["x", "w"], ["a"], kernel_shape=[3, 3], pads=[1] * 4),
            node("Relu", ["a"], ["r"]),
            node("Conv", ["r", "w"], ["c"], kernel_shape=[3, 3], pads=[1] * 4),
            node("Relu", ["c"], ["d"]),
            node("GlobalAveragePool", ["d"], ["e"]),
            node("Flatten", ["e"], ["f"]),
            node("Gemm", ["f", "v"], ["y"]),
        ],
        {"w": weights(6, 6, 3, 3), "v": weights(6, 5)}, [6, 8, 8],
    )  # fmt: skip
    yield "constant_nodes", model(
        [
            node("Identity", ["w"], ["w1"]),
            node("Conv", ["x", "w1", "b"], ["a"], kernel_shape=[3, 3]),
            node("Relu", ["a"], ["r"]),
            node("Flatten", ["r"], ["f"]),
            node("MatMul", ["f", "v"], ["g"]),
            node("Add", ["g", "vb"], ["y"]),
        ],
        {"w": weights(4, 3, 3, 3), "b": weights(4), "v": weights(144, 5), "vb": weights(5)}, [3, 8, 8], as_nodes=True,
    )  # fmt: skip
    yield "identities", model(
        [
            node("Identity", ["w"], ["w1"]),
            node("Identity", ["x"], ["x1"]),
            node("Gemm", ["x1", "w1", "b"], ["a"], transB=1),
            node("Identity", ["a"], ["a1"]),
            node("Relu", ["a1"], ["r"]),
            node("Gemm", ["r", "v"], ["y0"]),
            node("Identity", ["y0"], ["y"]),
        ],
        {"w": weights(12, 7), "b": weights(12), "v": weights(12, 5)}, [7],
    )  # fmt: skip
    yield "several_outputs", model(
        [
            node("Gemm", ["x", "w"], ["a"]),
            node("Relu", ["a"], ["r"]),
            node("Gemm", ["r", "v"], ["y"]),
            node("Gemm", ["r", "v2"], ["z"]),
        ],
        {"w": weights(7, 12), "v": weights(12, 5), "v2": weights(12, 2)}, [7], outputs=("y", "z"),
    )  # fmt: skip
    for batch in (1, 32):
        yield f"batch_{batch}", model(
            [
                node("Conv", ["x", "w"], ["a"], kernel_shape=[3, 3]),
                node("Relu", ["a"], ["r"]),
                node("Reshape", ["r", "sizes"], ["f"]),
                node("Gemm", ["f", "v"], ["y"]),
            ],
            {"w": weights(4, 3, 3, 3), "sizes": np.array([batch, 144]), "v": weights(144, 5)}, [3, 8, 8], batch=batch,
        )  # fmt: skip
    yield "half", model(
        [
            node("Conv", ["x", "w", "b"], ["a"], kernel_shape=[3, 3]),
            node("Relu", ["a"], ["r"]),
            node("Flatten", ["r"], ["f"]),
            node("Gemm", ["f", "v"], ["y"]),
        ],
        {"w": weights(4, 3, 3, 3).astype(np.float16), "b": weights(4).astype(np.float16), "v": weights(64, 5).astype(np.float16)},
        [3, 6, 6], kind=TensorProto.FLOAT16,
    )  # fmt: skip
    yield "half_weights_cast", model(
        [
            node("Cast", ["w"], ["wf"], to=1),
            node("Conv", ["x", "wf"], ["a"], kernel_shape=[3, 3]),
            node("Relu", ["a"], ["r"]),
            node("Flatten", ["r"], ["f"]),
            node("Gemm", ["f", "v"], ["y"]),
        ],
        {"w": weights(4, 3, 3, 3).astype(np.float16), "v": weights(64, 5)}, [3, 6, 6],
    )  # fmt: skip
    yield "map_output", model(
        [
            node("Conv", ["x", "w"], ["a"], kernel_shape=[3, 3], pads=[1] * 4),
            node("Relu", ["a"], ["r"]),
            node("Conv", ["r", "w2", "b2"], ["y"], kernel_shape=[3, 3], pads=[1] * 4),
        ],
        {"w": weights(8, 3, 3, 3), "w2": weights(2, 8, 3, 3), "b2": weights(2)}, [3, 6, 6],
    )  # fmt: skip
    yield "upsampled_output", model(
        [
            node("Conv", ["x", "w"], ["a"], kernel_shape=[3, 3], pads=[1] * 4),
            node("Relu", ["a"], ["r"]),
            node("MaxPool", ["r"], ["m"], kernel_shape=[2, 2], strides=[2, 2]),
            node("Conv", ["m", "w2"], ["c"], kernel_shape=[1, 1]),
            node("Resize", ["c", "", "scales"], ["y"], mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
        ],
        {"w": weights(8, 3, 3, 3), "w2": weights(2, 8, 1, 1), "scales": np.array([1, 1, 2, 2], np.float32)}, [3, 8, 8],
    )  # fmt: skip
    yield "transposed", model(
        [
            node("Conv", ["x", "w"], ["a"], kernel_shape=[3, 3], pads=[1] * 4),
            node("Relu", ["a"], ["r"]),
            node("ConvTranspose", ["r", "w2", "b2"], ["c"], strides=[2, 2], pads=[1, 0, 1, 1], output_padding=[1, 0]),
            node("Relu", ["c"], ["d"]),
            node("ConvTranspose", ["d", "w3"], ["e"], strides=[2, 2], kernel_shape=[2, 2]),
            node("Add", ["e", "b3"], ["y"]),
        ],
        {"w": weights(8, 3, 3, 3), "w2": weights(8, 4, 3, 3), "b2": weights(4), "w3": weights(4, 2, 2, 2), "b3": weights(2, 1, 1)},
        [3, 5, 6],
    )  # fmt: skip
    yield "one_hot", model(
        [
            node("Unsqueeze", ["x", "last"], ["u"]),
            node("Equal", ["u", "all"], ["is"]),
            node("Cast", ["is"], ["h"], to=1),
            node("MatMul", ["h", "table"], ["e"]),
            node("Relu", ["e"], ["r"]),
            node("Flatten", ["r"], ["f"]),
            node("Gemm", ["f", "v"], ["y"]),
        ],
        {"last": np.array([-1]), "all": np.arange(20), "table": 3 * weights(20, 8), "v": weights(48, 5)}, [6], kind=TensorProto.INT64,
    )  # fmt: skip
    open_sizes = model(
        [
            node("Conv", ["x", "w"], ["a"], kernel_shape=[3, 3], pads=[1] * 4),
            node("Relu", ["a"], ["r"]),
            node("Mul", ["r", "mask"], ["m"]),
            node("GlobalAveragePool", ["m"], ["p"]),
            node("Flatten", ["p"], ["f"]),
            node("Gemm", ["f", "v"], ["y"]),
        ],
        {"w": weights(8, 3, 3, 3), "v": weights(8, 5)}, [3, "height", "width"],
    )  # fmt: skip
    open_sizes.graph.input.append(helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["batch", 1, "height", "width"]))
    yield "open_sizes", open_sizes
    yield "grouped_output", model(
        [
            node("Conv", ["x", "w"], ["a"], kernel_shape=[1, 1]),
            node("Relu", ["a"], ["r"]),
            node("Conv", ["r", "w2"], ["y"], kernel_shape=[4, 4], group=2),
        ],
        {"w": weights(8, 3, 1, 1), "w2": weights(4, 4, 4, 4)}, [3, 4, 4],
    )  # fmt: skip
    yield "scale_behind_a_transpose", model(
        [
            node("Conv", ["x", "w"], ["a"], kernel_shape=[3, 3], pads=[1] * 4, group=6),
            node("Transpose", ["a"], ["t"], perm=[0, 2, 3, 1]),
            node("MatMul", ["t", "w1"], ["m1"]),
            node("Relu", ["m1"], ["r"]),
            node("MatMul", ["r", "w2"], ["m2"]),
            node("Add", ["m2", "b2"], ["m3"]),
            node("Transpose", ["m3"], ["back"], perm=[0, 3, 1, 2]),
            node("Mul", ["scale", "back"], ["scaled"]),
            node("Add", ["scaled", "shift"], ["shifted"]),
            node("Add", ["shifted", "x"], ["sum"]),
            node("Relu", ["sum"], ["s"]),
            node("GlobalAveragePool", ["s"], ["p"]),
            node("Flatten", ["p"], ["f"]),
            node("Gemm", ["f", "v"], ["y"]),
        ],
        {"w": weights(6, 1, 3, 3), "w1": weights(6, 12), "w2": weights(12, 6), "b2": weights(6), "scale": weights(6, 1, 1),
         "shift": weights(6, 1, 1), "v": weights(6, 5)},
        [6, 7, 7],
    )  # fmt: skip
    yield "tokens", model(
        [
            node("Gather", ["table", "x"], ["e"]),
            node("Add", ["e", "places"], ["h"]),
            *(node("MatMul", ["h", w], [v]) for w, v in (("wq", "q"), ("wk", "k"), ("wv", "v"))),
            node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
            node("MatMul", ["q", "kt"], ["scores"]),
            node("Softmax", ["scores"], ["attention"], axis=-1),
            node("MatMul", ["attention", "v"], ["mixed"]),
            node("Add", ["mixed", "h"], ["h1"]),
            node("LayerNormalization", ["h1", "scale", "shift"], ["n"]),
            node("MatMul", ["n", "w1"], ["m1"]),
            node("Add", ["m1", "b1"], ["m2"]),
            node("Gelu", ["m2"], ["m3"]),
            node("MatMul", ["m3", "w2"], ["m4"]),
            node("Add", ["m4", "n"], ["h2"]),
            node("ReduceMean", ["h2", "axis"], ["pooled"], keepdims=0),
            node("Gemm", ["pooled", "head"], ["y"]),
        ],
        {"table": 3 * weights(20, 8), "places": weights(6, 8), "wq": weights(8, 8), "wk": weights(8, 8), "wv": weights(8, 8),
         "scale": 1 + 0.1 * weights(8), "shift": weights(8), "w1": weights(8, 16), "b1": weights(16), "w2": weights(16, 8),
         "axis": np.array([1]), "head": weights(8, 5)},
        [6], 20, kind=TensorProto.INT64,
    )  # fmt: skip
    # Frames that share a network: several maps in the place of the batch, also with strides and without zeros around them.
    yield "frames", model(
        [
            node("Reshape", ["x", "frames"], ["f"]),
            node("Conv", ["f", "w1", "b1"], ["a"], strides=[2, 1], pads=[1, 0, 2, 1], kernel_shape=[3, 2]),
            node("Relu", ["a"], ["b"]),
            node("Conv", ["b", "w2"], ["c"], group=2, dilations=[2, 1], kernel_shape=[2, 2]),
            node("GlobalAveragePool", ["c"], ["d"]),
            node("Reshape", ["d", "flat"], ["e"]),
            node("Gemm", ["e", "head"], ["y"], transB=1),
        ],
        {"frames": np.array([-1, 2, 9, 5]), "w1": weights(4, 2, 3, 2), "b1": weights(4), "w2": weights(6, 2, 2, 2),
         "flat": np.array([-1, 18]), "head": weights(5, 18)},
        [3, 2, 9, 5],
    )  # fmt: skip
    # A convolution of three axes, first in space and then in time, and a pooling of space alone.
    yield "space_and_time", model(
        [
            node("Conv", ["x", "space", "sb"], ["a"], pads=[0, 1, 1, 0, 1, 1], strides=[1, 2, 2], kernel_shape=[1, 3, 3]),
            node("Relu", ["a"], ["b"]),
            node("Conv", ["b", "time"], ["c"], pads=[1, 0, 0, 1, 0, 0], kernel_shape=[3, 1, 1]),
            node("AveragePool", ["c"], ["d"], kernel_shape=[1, 2, 2], strides=[1, 2, 2]),
            node("MaxPool", ["d"], ["e"], kernel_shape=[2, 1, 1], strides=[2, 1, 1]),
            node("GlobalMaxPool", ["e"], ["f"]),
            node("Flatten", ["f"], ["g"]),
            node("Gemm", ["g", "head"], ["y"], transB=1),
        ],
        {"space": weights(6, 2, 1, 3, 3), "sb": weights(6), "time": weights(4, 6, 3, 1, 1), "head": weights(5, 4)},
        [2, 4, 8, 8],
    )  # fmt: skip
    # Weights and encodings that the file computes: a norm of weights, a convolution of constants.
    yield "computed", model(
        [
            node("BatchNormalization", ["raw", "gain", "zero", "mean", "variance"], ["standard", "m1", "v1"], training_mode=1),
            node("Reshape", ["standard", "kernel"], ["w"]),
            node("Conv", ["x", "w", "b"], ["a"], pads=[1, 1, 1, 1], kernel_shape=[3, 3]),
            node("Conv", ["places", "mix"], ["encoding"], kernel_shape=[1, 1]),
            node("ConvTranspose", ["small", "grow"], ["grown"], strides=[2, 2], kernel_shape=[2, 2]),
            node("Add", ["a", "encoding"], ["c"]),
            node("Add", ["c", "grown"], ["d"]),
            node("Relu", ["d"], ["e"]),
            node("Pad", ["e", "around", "lowest"], ["f"]),
            node("MaxPool", ["f"], ["g"], kernel_shape=[3, 3], strides=[2, 2]),
            node("Resize", ["g", "", "scales"], ["h"], mode="cubic", coordinate_transformation_mode="half_pixel"),
            node("Flatten", ["h"], ["i"]),
            node("Gemm", ["i", "head"], ["y"], transB=1),
        ],
        {"raw": weights(1, 6, 27), "gain": 1 + weights(6), "zero": np.zeros(6, np.float32), "mean": weights(6),
         "variance": np.abs(weights(6)) + 1, "kernel": np.array([6, 3, 3, 3]), "b": weights(6), "places": weights(1, 4, 8, 8),
         "mix": weights(6, 4, 1, 1), "small": weights(1, 3, 4, 4), "grow": weights(3, 6, 2, 2),
         "around": np.array([0, 0, 1, 1, 0, 0, 0, 0]), "lowest": np.array(-np.inf, np.float32), "scales": np.array([1, 1, 0.75, 1.25], np.float32),
         "head": weights(5, 90)},
        [3, 8, 8], 15,
    )  # fmt: skip
    # Choices by the sample: comparisons, logic, the larger part of a value, running sums.
    yield "choices", model(
        [
            node("Gemm", ["x", "w", "b"], ["a"], transB=1),
            node("Greater", ["a", "zero"], ["positive"]),
            node("Exp", ["a"], ["e"]),
            node("Sub", ["e", "one"], ["below"]),
            node("Where", ["positive", "a", "below"], ["elu"]),
            node("LessOrEqual", ["a", "one"], ["small"]),
            node("And", ["positive", "small"], ["middle"]),
            node("Not", ["middle"], ["outer"]),
            node("Cast", ["outer"], ["mask"], to=TensorProto.FLOAT),
            node("Mul", ["elu", "mask"], ["kept"]),
            node("CumSum", ["kept", "axis"], ["running"]),
            node("Shape", ["x"], ["batch"], start=0, end=1),
            node("Concat", ["batch", "six"], ["each"], axis=0),
            node("Expand", ["places", "each"], ["own"]),
            node("GatherElements", ["running", "own"], ["chosen"], axis=1),
            node("Sign", ["chosen"], ["sign"]),
            node("Add", ["chosen", "sign"], ["c"]),
            node("Gemm", ["c", "head"], ["y"], transB=1),
        ],
        {"w": weights(12, 7), "b": weights(12), "zero": np.array(0, np.float32), "one": np.array(1, np.float32),
         "axis": np.array(1), "places": np.array([[3, 1, 11, 0, 5, 5]]), "six": np.array([6]), "head": weights(5, 6)},
        [7], 16,
    )  # fmt: skip
    # Attention as sums over letters, one of them a dense layer with a bias.
    yield "letters", model(
        [
            node("Einsum", ["x", "w"], ["a"], equation="btd,df->btf"),
            node("Add", ["a", "b"], ["c"]),
            node("Relu", ["c"], ["d"]),
            node("Einsum", ["d", "heads"], ["q"], equation="btf,hfe->bhte"),
            node("Einsum", ["q", "q"], ["scores"], equation="bhie,bhje->bhij"),
            node("Softmax", ["scores"], ["attention"]),
            node("Einsum", ["attention", "q", "mix"], ["mixed"], equation="...ij,...je,e->...i"),
            node("Einsum", ["mixed"], ["pooled"], equation="bhi->bh"),
            node("Gemm", ["pooled", "head"], ["y"], transB=1),
        ],
        {"w": weights(12, 20), "b": weights(20), "heads": weights(2, 20, 2), "mix": weights(2), "head": weights(5, 2)},
        [4, 12],
    )  # fmt: skip
    # Attention as one node, heads that share keys, causal.
    yield "attention", model(
        [
            *(node("MatMul", ["x", w], [v]) for w, v in (("wq", "q"), ("wk", "k"), ("wv", "v"))),
            node("Attention", ["q", "k", "v"], ["mixed"], q_num_heads=4, kv_num_heads=2, is_causal=1),
            node("Add", ["mixed", "x"], ["h"]),
            node("ReduceMean", ["h", "axis"], ["pooled"], keepdims=0),
            node("Gemm", ["pooled", "head"], ["y"]),
        ],
        {"wq": weights(16, 16), "wk": weights(16, 8), "wv": weights(16, 8), "axis": np.array([1]), "head": weights(16, 5)},
        [5, 16], 23,
    )  # fmt: skip
    yield from scaled_models()


def scaled_models():
    """Scales and shifts that can be folded into a linear map in one place and not in another."""
    image, padded = [6, 8, 8], {"pads": [1] * 4}
    head = [node("GlobalAveragePool", ["c"], ["p"]), node("Flatten", ["p"], ["f"]), node("Gemm", ["f", "head"], ["y"])]
    start = [node("Conv", ["x", "w0", "b"], ["a"], **padded), node("Relu", ["a"], ["r"])]

    def normed(value, result, name="n"):
        return node("BatchNormalization", [value, *(f"{name}{part}" for part in range(4))], [result])

    def scaled(name, nodes, shape=image, outputs=("y",), opset=17, **constants):
        norms = {f"{n}{part}": 1 + value if part == 0 else value for n in "nk" for part, value in enumerate(norm(8))}
        stored = {"w0": weights(8, 6, 3, 3), "b": weights(8), "head": weights(8, 5), **norms, **constants}
        used = {value for part in nodes for value in part.input}
        return name, model(nodes, {k: v for k, v in stored.items() if k in used}, shape, opset, outputs=outputs)

    yield scaled(
        "scaled_image_padded",
        [node("Sub", ["x", "mean"], ["s"]), node("Div", ["s", "std"], ["d"]), node("Conv", ["d", "w0"], ["e"], **padded),
         node("Relu", ["e"], ["c"]), *head],
        mean=weights(6, 1, 1), std=0.5 + np.abs(weights(6, 1, 1)),
    )  # fmt: skip
    yield scaled("scaled_padded", [*start, normed("r", "n"), node("Conv", ["n", "w1"], ["c"], **padded), *head], w1=weights(8, 8, 3, 3))
    yield scaled("scaled_grouped", [*start, normed("r", "n"), node("Conv", ["n", "w1"], ["c"], group=8), *head], w1=weights(8, 1, 3, 3))
    yield scaled(
        "scaled_transposed",
        [*start, normed("r", "n"), node("ConvTranspose", ["n", "w1"], ["c"], strides=[2, 2], **padded), *head],
        w1=weights(8, 8, 4, 4),
    )
    yield scaled(
        "scaled_channels_last",
        [node("Transpose", ["x"], ["t"], perm=[0, 3, 1, 2]), normed("t", "n"), node("Conv", ["n", "w1"], ["e"], **padded),
         node("Relu", ["e"], ["c"]), *head],
        [8, 8, 8], w1=weights(8, 8, 3, 3),
    )  # fmt: skip
    yield scaled(
        "scaled_for_two",
        [*start, normed("r", "n"), node("Conv", ["n", "w1"], ["d"], **padded), node("Conv", ["n", "w2"], ["e"]),
         node("Add", ["d", "e"], ["c"]), *head],
        w1=weights(8, 8, 3, 3), w2=weights(8, 8, 1, 1),
    )  # fmt: skip
    quick = [node("Mul", ["h", "beta"], ["s"]), node("Sigmoid", ["s"], ["g"]), node("Mul", ["h", "g"], ["q"])]
    beta = np.array(1.702, np.float32)
    yield scaled("quick_gelu", [node("Gemm", ["x", "w1", "b1"], ["h"]), *quick, node("Gemm", ["q", "w2"], ["y"])], [7],
                 w1=weights(7, 16), b1=weights(16), w2=weights(16, 5), beta=beta)  # fmt: skip
    yield scaled(
        "quick_gelu_tokens",
        [node("MatMul", ["x", "w1"], ["i"]), node("Add", ["i", "b1"], ["h"]), *quick, node("MatMul", ["q", "w2"], ["y"])],
        [5, 7], w1=weights(7, 16), b1=weights(16), w2=weights(16, 5), beta=beta,
    )  # fmt: skip
    yield scaled(
        "leak_by_hand",
        [*start, node("Mul", ["a", "tenth"], ["l"]), node("Add", ["r", "l"], ["c"]), *head], tenth=np.array(0.1, np.float32),
    )  # fmt: skip
    yield scaled(
        "two_norms",
        [node("Conv", ["x", "w0", "b"], ["a"], **padded), normed("a", "n"), normed("a", "k", "k"), node("Relu", ["n"], ["r"]),
         node("Sigmoid", ["k"], ["g"]), node("Mul", ["r", "g"], ["c"]), *head],
    )  # fmt: skip
    yield scaled(
        "several_outputs_norm",
        [node("Conv", ["x", "w0", "b"], ["a"], **padded), normed("a", "n"), node("Relu", ["n"], ["c"]), *head,
         node("Sigmoid", ["a"], ["z"])],
        outputs=("y", "z"),
    )  # fmt: skip
    yield scaled(
        "norm_of_vector",
        [node("Gemm", ["x", "w1"], ["h"]), node("LayerNormalization", ["h", "n0", "n1"], ["n"]), node("Gemm", ["n", "head"], ["y"])],
        [7], w1=weights(7, 8),
    )  # fmt: skip
    yield scaled(
        "norm_of_instances",
        [*start, node("InstanceNormalization", ["r", "n0", "n1"], ["n"]), node("Conv", ["n", "w1"], ["e"]), node("Relu", ["e"], ["c"]),
         *head],
        w1=weights(8, 8, 1, 1),
    )  # fmt: skip
    yield scaled(
        "norm_then_flat",
        [*start, normed("r", "n"), node("Flatten", ["n"], ["f"]), node("Gemm", ["f", "w1"], ["y"])], w1=weights(512, 5),
    )  # fmt: skip
    yield scaled(
        "pool_norm_flat",
        [*start, node("GlobalAveragePool", ["r"], ["p"]), normed("p", "n"), node("Flatten", ["n"], ["f"]), normed("f", "k", "k"),
         node("Gemm", ["k", "head"], ["y"])],
    )  # fmt: skip
    yield scaled(
        "parts_norm_mean",
        [node("Conv", ["x", "w1"], ["a"]), node("Conv", ["x", "w2"], ["d"]), node("Concat", ["a", "d"], ["c"], axis=1), normed("c", "n"),
         node("ReduceMean", ["n"], ["f"], axes=[2, 3], keepdims=0), node("Gemm", ["f", "head"], ["y"])],
        w1=weights(4, 6, 3, 3), w2=weights(4, 6, 3, 3),
    )  # fmt: skip
    yield scaled(
        "norm_flat_and_not",
        [*start, normed("r", "n"), node("Flatten", ["n"], ["f"]), node("Gemm", ["f", "w1"], ["g"]), node("Conv", ["n", "w2"], ["d"], **padded),
         node("Flatten", ["d"], ["e"]), node("Gemm", ["e", "w3"], ["k"]), node("Add", ["g", "k"], ["y"])],
        w1=weights(512, 5), w2=weights(8, 8, 3, 3), w3=weights(512, 5),
    )  # fmt: skip


def run(path, u):
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    asked = session.get_inputs()[0]
    u = u.astype({"tensor(int64)": np.int64, "tensor(float16)": np.float16}.get(asked.type, np.float32))
    size = asked.shape[0] if isinstance(asked.shape[0], int) else len(u)
    # The mask of open sizes has the sizes of the images.
    masks = {i.name: np.full((len(u), 1, *u.shape[2:]), 0.5, np.float32) for i in session.get_inputs()[1:] if i.name == "mask"}
    parts = [session.run(["y"], {asked.name: u[k : k + size], **masks})[0] for k in range(0, len(u), size)]
    return np.concatenate(parts).astype(np.float32)


def main():
    folder = pathlib.Path(sys.argv[1])
    if sys.argv[2:] == ["again"]:
        for path in sorted(folder.glob("*.sparse.onnx")):
            stem = folder / path.name.removesuffix(".sparse.onnx")
            ours = np.load(f"{stem}.sparse.npy")
            theirs = run(path, np.load(f"{stem}.input.npy")).reshape(ours.shape)
            near = 2e-2 if stem.name == "half" else 2e-5
            assert np.abs(ours - theirs).max() <= near * max(np.abs(theirs).max(), 1e-3), stem.name
            before, after = onnx.load(f"{stem}.onnx"), onnx.load(path)
            assert [o.name for o in before.graph.output] == [o.name for o in after.graph.output], stem.name
            versions = [[(o.domain, o.version) for o in file.opset_import] for file in (before, after)]
            assert versions[0] == versions[1] and before.graph.input[0] == after.graph.input[0], stem.name
        return
    for name, network in all_models():
        onnx.save(network, folder / f"{name}.onnx")
        shape = [d.dim_value or 7 for d in network.graph.input[0].type.tensor_type.shape.dim][1:]
        tokens = network.graph.input[0].type.tensor_type.elem_type == TensorProto.INT64
        u = random.integers(0, 20, (SAMPLES, *shape)) if tokens else random.standard_normal((SAMPLES, *shape)).astype(np.float16)
        np.save(folder / f"{name}.input.npy", u.astype(np.float32))
        np.save(folder / f"{name}.output.npy", run(folder / f"{name}.onnx", u))


if __name__ == "__main__":
    main()
