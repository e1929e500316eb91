"""Writes hand_*.onnx, one small network per form an ONNX file may take, and what ONNX Runtime computes for every
*.onnx here and for the two shipped networks: references.safetensors with NAME.input, NAME.output and, for the shipped
networks, the states NAME.x.VALUE.

Run with Python, numpy, onnx, onnxruntime and safetensors, after make_torch_onnx.py:
    python make_onnx.py FASHION_MNIST_IDX_GZ CIFAR100_TEST_BIN_GZ
"""

import gzip
import pathlib
import sys

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

HERE = pathlib.Path(__file__).parent
DATA = HERE.parents[3] / "data"
random = np.random.default_rng(0)


def w(*shape):
    fan = np.prod(shape[1:]) if len(shape) > 1 else 1
    return (random.standard_normal(shape) / np.sqrt(fan)).astype(np.float32)


def ints(*values):
    return np.array(values, np.int64)


def node(op, inputs, output, **attributes):
    return helper.make_node(op, inputs.split(), [output], name=f"{op}_{output}", **attributes)


def model(name, shape, nodes, constants, opset=17, batch="batch"):
    """`constants`: arrays (stored raw), or TensorProtos as they are. The output is the value `y`."""
    initializers = [
        c if isinstance(c, TensorProto) else numpy_helper.from_array(c, key)
        for key, c in constants.items()
    ]
    graph = helper.make_graph(
        nodes, name,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, *shape])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        initializers,
    )
    result = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    result = onnx.shape_inference.infer_shapes(result)
    del result.graph.value_info[:]
    onnx.save(result, HERE / f"hand_{name}.onnx")


def listed(name, array):
    """Values in float_data (or int64_data), not in raw_data."""
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    return helper.make_tensor(name, kind, array.shape, array.flatten().tolist())


def norm(prefix, size):
    return {
        f"{prefix}s": w(size), f"{prefix}b": w(size), f"{prefix}m": w(size),
        f"{prefix}v": random.uniform(0.5, 2, size).astype(np.float32),
    }


def by_hand():
    model("gemm_plain", (5,), [
        node("Gemm", "x a", "h"), node("Tanh", "h", "t"), node("Gemm", "t b c", "y", alpha=0.5, beta=2.0)],
        {"a": w(5, 4), "b": w(4, 3), "c": w(1, 3)})
    model("gemm_transposed", (5,), [
        node("Gemm", "x a b", "h", transB=1), node("LeakyRelu", "h", "r"), node("Gemm", "r c d", "y", transB=1)],
        {"a": listed("a", w(4, 5)), "b": listed("b", w(4)), "c": w(3, 4), "d": np.float32(0.25)}, opset=13)
    model("matmul_add", (5,), [
        node("MatMul", "x a", "m"), node("Add", "m b", "h"), node("Sigmoid", "h", "s"),
        node("Transpose", "c", "ct", perm=[1, 0]), node("MatMul", "s ct", "n"), node("Add", "d n", "o"),
        node("Identity", "o", "y")],
        {"a": w(5, 4), "b": w(4), "c": w(3, 4), "d": w(1, 3)})
    half = numpy_helper.from_array(w(5, 4).astype(np.float16), "a")
    model("precisions", (5,), [
        node("Cast", "a", "af", to=1), node("MatMul", "x af", "h"), node("Relu", "h", "r"),
        node("Cast", "b", "bf", to=1), node("Gemm", "r bf", "y")],
        {"a": half, "b": w(4, 3).astype(np.float64)})
    model("constants", (2, 3), [
        helper.make_node("Constant", [], ["a"], value=numpy_helper.from_array(w(6, 4), "a")),
        helper.make_node("Constant", [], ["shape"], value_ints=[0, -1]),
        node("Reshape", "x shape", "f"), node("MatMul", "f a", "m"),
        helper.make_node("Constant", [], ["c"], value_float=0.5), node("Add", "m c", "h"), node("Relu", "h", "y")],
        {})
    model("dropout", (4,), [
        node("Gemm", "x a", "h"), node("Relu", "h", "r"), node("Dropout", "r ratio training", "d"),
        node("Gemm", "d b", "y")],
        {"a": w(4, 4), "b": w(4, 3), "ratio": np.float32(0.5), "training": np.array(False)})
    flattening = {
        "gather": [
            node("Shape", "p", "s"), node("Gather", "s zero", "n", axis=0), node("Unsqueeze", "n axis", "u"),
            node("Concat", "u minus", "t", axis=0), node("Reshape", "p t", "f")],
        "slice": [
            node("Shape", "p", "s"), node("Cast", "s", "sc", to=7), node("Slice", "sc axis one", "n"),
            node("Concat", "n size", "t", axis=0), node("Reshape", "p t", "f")],
        "shape_end": [
            node("Shape", "p", "n", end=1), node("Concat", "n minus", "t", axis=0), node("Reshape", "p t", "f")],
        "infer_batch": [node("Reshape", "p fixed", "f")],
        "flatten": [node("Flatten", "p", "f", axis=-3)],
    }
    for key, nodes in flattening.items():
        model(f"flatten_{key}", (1, 4, 4), [
            node("Conv", "x k", "c", pads=[1, 1, 1, 1]), node("Relu", "c", "r"),
            node("MaxPool", "r", "p", kernel_shape=[2, 2], strides=[2, 2]), *nodes, node("Gemm", "f g", "y")],
            {"k": w(3, 1, 3, 3), "g": w(12, 3), "zero": np.array(0, np.int64), "axis": ints(0), "one": ints(1),
             "minus": ints(-1), "size": ints(12), "fixed": ints(-1, 12)})
    model("same_padding", (2, 7, 6), [
        node("Conv", "x a", "h", auto_pad="SAME_UPPER", strides=[2, 2]), node("Relu", "h", "r"),
        node("Conv", "r b bb", "i", auto_pad="SAME_LOWER", strides=[1, 2]), node("Relu", "i", "s"),
        node("Conv", "s c", "y", auto_pad="VALID", kernel_shape=[2, 1])],
        {"a": w(3, 2, 3, 2), "b": w(4, 3, 2, 3), "bb": w(4), "c": w(2, 4, 2, 1)})
    model("asymmetric", (2, 8, 7), [
        node("Conv", "x a", "h", pads=[0, 1, 2, 0], strides=[2, 1]), node("Tanh", "h", "t"),
        node("MaxPool", "t", "m", kernel_shape=[3, 2], strides=[1, 2], pads=[1, 0, 0, 1]),
        node("AveragePool", "m", "p", kernel_shape=[2, 2], pads=[0, 1, 1, 0], count_include_pad=1),
        node("AveragePool", "p", "q", kernel_shape=[2, 3], pads=[1, 1, 0, 1], count_include_pad=0),
        node("MaxPool", "q", "e", kernel_shape=[1, 1], ceil_mode=1),
        node("GlobalMaxPool", "e", "g"), node("Flatten", "g", "f"), node("Gemm", "f w", "y")],
        {"a": w(3, 2, 3, 3), "w": w(3, 2)})
    model("large", (3, 40, 40), [
        node("Conv", "x a", "h", pads=[2, 2, 2, 2]), node("Relu", "h", "r"),
        node("Conv", "r b", "i", pads=[1, 1, 1, 1]), node("Relu", "i", "s"),
        node("GlobalAveragePool", "s", "g"), node("Squeeze", "g axes", "f"), node("Gemm", "f w", "y")],
        {"a": w(16, 3, 5, 5), "b": w(8, 16, 3, 3), "w": w(8, 3), "axes": ints(2, -1)})
    for keep in (0, 1):
        for opset in (13, 18):
            axes = {"axes": [-1, -2]} if opset == 13 else {}
            tail = [node("Flatten", "m", "f")] if keep else [node("Identity", "m", "f")]
            model(f"mean_{keep}_{opset}", (2, 5, 4), [
                node("Conv", "x a", "h"), node("Relu", "h", "r"),
                node("ReduceMean", "r" if axes else "r axes", "m", keepdims=keep, **axes), *tail,
                node("Gemm", "f w", "y")],
                {"a": w(4, 2, 3, 3), "w": w(4, 3), "axes": ints(3, 2)}, opset=opset)
    model("norms", (2, 6, 6), [
        node("Conv", "x a", "h", pads=[1, 1, 1, 1]),
        node("BatchNormalization", "h n1s n1b n1m n1v", "n", epsilon=1e-3), node("Relu", "n", "r"),
        node("BatchNormalization", "r n2s n2b n2m n2v", "o"), node("Conv", "o b bb", "i"), node("Relu", "i", "s"),
        node("BatchNormalization", "s n3s n3b n3m n3v", "p"), node("Flatten", "p", "f"), node("Gemm", "f w", "g"),
        node("BatchNormalization", "g n4s n4b n4m n4v", "y")],
        {"a": w(3, 2, 3, 3), "b": w(4, 3, 3, 3), "bb": w(4), "w": w(64, 3),
         **norm("n1", 3), **norm("n2", 3), **norm("n3", 4), **norm("n4", 3)})
    model("normalised_input", (3, 6, 6), [
        node("Sub", "x mean", "c"), node("Div", "c std", "n"), node("Mul", "n two", "m"),
        node("Conv", "m a b", "h", strides=[2, 2]), node("Relu", "h", "r"), node("Flatten", "r", "f"),
        node("Gemm", "f w", "y")],
        {"mean": w(3, 1, 1), "std": random.uniform(0.5, 2, (1, 3, 1, 1)).astype(np.float32), "two": np.float32(2),
         "a": w(4, 3, 2, 2), "b": w(4), "w": w(36, 3)})
    model("sum_read_twice", (2, 5, 5), [
        node("Conv", "x a", "h", pads=[1, 1, 1, 1]), node("Relu", "h", "r"),
        node("Conv", "r b", "i", pads=[1, 1, 1, 1]), node("Add", "i h", "j"), node("Relu", "j", "s"),
        node("Conv", "s c", "k", pads=[1, 1, 1, 1]), node("Add", "j k", "l"),
        node("AveragePool", "l", "p", kernel_shape=[5, 5]), node("Flatten", "p", "f"), node("Gemm", "f w", "y")],
        {"a": w(3, 2, 3, 3), "b": w(3, 3, 3, 3), "c": w(3, 3, 3, 3), "w": w(3, 2)})
    model("plain_image", (6, 5), [
        node("Unsqueeze", "x axis", "u"), node("Conv", "u a", "h"), node("Sigmoid", "h", "y")],
        {"axis": ints(1), "a": w(2, 1, 3, 3)})
    model("fixed_batch", (2, 3), [
        node("Reshape", "x shape", "f"), node("Gemm", "f a", "h"), node("Relu", "h", "y")],
        {"shape": ints(2, 6), "a": w(6, 3)}, batch=2)


def run(model, inputs, extra=()):
    for name in extra:
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: inputs})


def main():
    by_hand()
    references = {}
    for path in sorted(HERE.glob("*.onnx")):
        loaded = onnx.load(path)
        onnx.checker.check_model(loaded)
        shape = [d.dim_value for d in loaded.graph.input[0].type.tensor_type.shape.dim][1:]
        inputs = random.standard_normal((2, *shape)).astype(np.float32)
        references[f"{path.stem}.input"] = inputs
        references[f"{path.stem}.output"] = run(loaded, inputs)[0]

    fashion = np.frombuffer(gzip.open(sys.argv[1]).read(), np.uint8, offset=16).reshape(-1, 784)[:6]
    cifar = np.frombuffer(gzip.open(sys.argv[2]).read(), np.uint8).reshape(-1, 3074)[:3, 2:].reshape(-1, 3, 32, 32)
    mean = np.array([0.50707516, 0.48654887, 0.44091784]).reshape(1, 3, 1, 1)
    std = np.array([0.26733429, 0.25643846, 0.27615047]).reshape(1, 3, 1, 1)
    shipped = {
        "fashion_fc": ((fashion / 255).astype(np.float32), ["relu", "relu_1", "relu_2"]),
        "resnet20_cifar100": (((cifar / 255 - mean) / std).astype(np.float32), ["relu_13", "relu_18"]),
    }
    for name, (inputs, states) in shipped.items():
        results = run(onnx.load(DATA / f"{name}.onnx"), inputs, states)
        references[f"{name}.input"] = inputs
        references[f"{name}.output"] = results[0]
        references.update({f"{name}.x.{value}": result for value, result in zip(states, results[1:])})
    save_file({k: np.ascontiguousarray(v) for k, v in references.items()}, HERE / "references.safetensors")


if __name__ == "__main__":
    main()
