"""Writes random networks of many operators with what ONNX Runtime computes for them.

    python onnx_random.py FOLDER COUNT SEED
"""

import pathlib
import sys

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper


class Graph:
    """Nodes that are appended one by one; shapes are without the batch."""

    def __init__(self, random, shape):
        self.random, self.nodes, self.constants = random, [], []
        self.values = [("x", list(shape))]

    def constant(self, array):
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def weights(self, *shape):
        fan = np.prod(shape[1:]) if len(shape) > 1 else 4
        return self.constant((self.random.standard_normal(shape) / np.sqrt(fan)).astype(np.float32))

    def node(self, op, inputs, shape, outputs=1, **attributes):
        names = [f"v{len(self.nodes)}_{k}" for k in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, **attributes))
        if shape is not None:
            self.values += [(name, list(shape)) for name in names]
        return names[0] if outputs == 1 else names

    def pick(self, condition=lambda shape: True):
        # Mostly the newest ones, so that graphs become deep.
        fitting = [v for v in self.values if condition(v[1])]
        return fitting[max(0, len(fitting) - 1 - int(self.random.exponential(1.5)))] if fitting else None

    def step(self):
        r = self.random
        kind = r.integers(18)
        is_map = lambda s: len(s) == 3
        is_rows = lambda s: len(s) == 2
        name, shape = self.pick()
        picked_map, picked_rows = self.pick(is_map), self.pick(is_rows)
        if kind in (0, 1) and picked_map:
            name, (c, h, w) = picked_map
            group = int(r.choice([g for g in (1, 2, c) if c % g == 0]))
            out = group * int(r.integers(1, 4))
            k, d, s = int(r.integers(1, 4)), int(r.integers(1, 3)), int(r.integers(1, 3))
            pads = [int(p) for p in r.integers(0, 3, 4)]
            size = [(n + pads[i] + pads[i + 2] - d * (k - 1) - 1) // s + 1 for i, n in enumerate((h, w))]
            if min(size) < 1:
                return
            inputs = [name, self.weights(out, c // group, k, k)] + ([self.weights(out)] if r.random() < 0.5 else [])
            value = self.node("Conv", inputs, [out, *size], group=group, dilations=[d, d], strides=[s, s], pads=pads)
            if r.random() < 0.4:
                params = [self.weights(out), self.weights(out), self.weights(out), self.constant(r.uniform(0.5, 2, out).astype(np.float32))]
                self.node("BatchNormalization", [value, *params], [out, *size])
        elif kind == 2 and picked_map:
            name, (c, h, w) = picked_map
            if min(h, w) >= 3:
                ceil = int(r.integers(2))
                up = lambda n: -(-(n - 3) // 2) + 1 if ceil else (n - 3) // 2 + 1
                self.node(str(r.choice(["MaxPool", "AveragePool"])), [name], [c, up(h), up(w)], kernel_shape=[3, 3], strides=[2, 2], ceil_mode=ceil)
        elif kind in (3, 4):
            out = int(r.integers(1, 6))
            value = self.node("MatMul", [name, self.weights(shape[-1], out)], [*shape[:-1], out])
            if r.random() < 0.7:
                self.node("Add", [value, self.weights(out)], [*shape[:-1], out])
        elif kind == 5:
            op = str(r.choice(["Relu", "Sigmoid", "Tanh", "HardSigmoid", "HardSwish", "Elu", "Softplus", "Softsign", "LeakyRelu", "Erf"]))
            self.node(op, [name], shape)
        elif kind == 6:
            half = self.node("Div", [name, self.constant(np.float32(np.sqrt(2)))], None)
            gate = self.node("Add", [self.node("Erf", [half], None), self.constant(np.float32(1))], None)
            self.node("Mul", [self.node("Mul", [name, gate], None), self.constant(np.float32(0.5))], shape)
        elif kind == 7:
            self.node("Mul", [name, self.node("Sigmoid", [name], shape)], shape)
        elif kind == 8:
            scale, shift = self.weights(shape[-1]), self.weights(shape[-1])
            self.node("LayerNormalization", [name, scale, shift], shape, axis=-1)
        elif kind == 9:
            self.node("Softmax", [name], shape, axis=int(r.integers(1, len(shape) + 1)))
        elif kind == 10:
            order = [int(k) for k in r.permutation(len(shape))]
            self.node("Transpose", [name], [shape[k] for k in order], perm=[0] + [k + 1 for k in order])
        elif kind == 11 and len(shape) > 1:
            target = self.constant(np.array([0, shape[0] * shape[1], *shape[2:]], np.int64))
            self.node("Reshape", [name, target], [shape[0] * shape[1], *shape[2:]])
        elif kind == 12:
            other = self.pick(lambda s: s == shape)
            self.node(str(r.choice(["Add", "Mul", "Sub", "Max", "Min"])), [name, other[0]], shape)
        elif kind == 13:
            other = self.pick(lambda s: s[1:] == shape[1:])
            self.node("Concat", [name, other[0]], [shape[0] + other[1][0], *shape[1:]], axis=1)
        elif kind == 14 and shape[0] >= 2:
            axis = self.constant(np.array([1], np.int64))
            step = int(r.integers(1, 3))
            start, end = self.constant(np.array([1], np.int64)), self.constant(np.array([2**62], np.int64))
            self.node("Slice", [name, start, end, axis, self.constant(np.array([step], np.int64))], [-(-(shape[0] - 1) // step), *shape[1:]])
        elif kind == 15:
            dims = self.node("Shape", [name], None)
            batch = self.node("Gather", [dims, self.constant(np.array([0], np.int64))], None)
            rest = self.constant(np.array([-1], np.int64))
            self.node("Reshape", [name, self.node("Concat", [batch, rest], None, axis=0)], [int(np.prod(shape))])
        elif kind == 16 and picked_rows:
            name, (t, c) = picked_rows
            turned = self.node("Transpose", [name], None, perm=[0, 2, 1])
            scores = self.node("Softmax", [self.node("MatMul", [name, turned], None)], None, axis=-1)
            self.node("MatMul", [scores, name], [t, c])
        elif kind == 17:
            axis = int(r.integers(1, len(shape) + 1))
            out = [s if k + 1 != axis else 1 for k, s in enumerate(shape)]
            self.node(str(r.choice(["ReduceMean", "ReduceMax"])), [name], out, axes=[axis], keepdims=1)


def main(folder, count, seed):
    random = np.random.default_rng(seed)
    written = 0
    onnxruntime.set_default_logger_severity(4)
    while written < count:
        shape = [int(s) for s in random.integers(2, 8, int(random.integers(1, 4)))]
        graph = Graph(random, shape)
        while len(graph.nodes) < 14:
            graph.step()
            # Small values only: a test must be quick.
            graph.values = [v for v in graph.values if np.prod(v[1]) <= 600 and len(v[1]) <= 3]
        output = graph.values[-1][0]
        if output == "x":
            continue
        model = helper.make_model(
            helper.make_graph(
                graph.nodes, "random", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *shape])],
                [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)], graph.constants),
            opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        u = random.standard_normal((2, *shape)).astype(np.float32)
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        y = np.concatenate([session.run(None, {"x": u[k : k + 1]})[0] for k in range(2)])
        if not np.isfinite(y).all() or np.abs(y).max() > 1e4:
            continue
        path = pathlib.Path(folder) / f"random_{written:03}"
        path.with_suffix(".onnx").write_bytes(model.SerializeToString())
        np.save(f"{path}.input.npy", u.reshape(2, -1))
        np.save(f"{path}.output.npy", y.reshape(2, -1).astype(np.float32))
        written += 1


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
