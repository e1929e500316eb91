"""Writes ONNX's own node tests of the given operators as networks of one node: model, input and expected output each.

    python onnx_nodes.py FOLDER

The first float input is the sample, under one more axis for the batch; all others are constants. Cases whose types or
several outputs a network cannot have are left out.
"""

import pathlib
import sys
import warnings

warnings.filterwarnings("ignore")

import numpy
import onnx
import onnx.backend.test.case.node as node_cases
from onnx import TensorProto, helper, numpy_helper

OPERATORS = set(
    """Add Sub Mul Div Pow Sqrt Exp Log Erf Neg Abs Reciprocal Sin Cos Max Min Sum Relu LeakyRelu PRelu Elu Celu Selu
    Softplus Softsign Sigmoid Tanh HardSigmoid HardSwish Gelu Mish Swish Clip Softmax LogSoftmax Gemm MatMul Conv ConvTranspose LRN
    BatchNormalization LayerNormalization InstanceNormalization GroupNormalization RMSNormalization MaxPool AveragePool
    GlobalAveragePool GlobalMaxPool ReduceMean ReduceSum ReduceMax ReduceMin ReduceL2 ReduceL1
    ReduceLogSum ReduceLogSumExp ReduceSumSquare Einsum Attention Concat Split Slice Pad
    Transpose Reshape Flatten Squeeze Unsqueeze Expand Gather Identity Tile DepthToSpace SpaceToDepth Resize Upsample Where
    Dropout Constant ConstantOfShape Shape Size Range Equal Less Greater LessOrEqual GreaterOrEqual Not And Or Xor Mod
    ScatterND Cast Trilu CumSum NonZero OneHot Ceil Floor Round Sign ReduceProd GatherND GatherElements""".split()
)
FLOATS = (numpy.float32, numpy.float64, numpy.float16)


# Here ONNX Runtime and PyTorch, whose files are read, take the rounded size where ONNX's reference does not; and this attention
# is computed in half precision.
DISPUTED = {"test_resize_downsample_scales_linear_align_corners", "test_resize_downsample_scales_cubic_align_corners",
            "test_attention_24_qk_matmul_output_mode3_softmax_precision"}


def as_network(case):
    """(model, sample, expected) or why not."""
    if case.name in DISPUTED:
        return "disputed"
    graph = case.model.graph
    if len(graph.node) != 1 or graph.node[0].op_type not in OPERATORS:
        return "other operators"
    node = graph.node[0]
    arrays, expected = case.data_sets[0]
    names = [i.name for i in graph.input]
    if not all(isinstance(a, (numpy.ndarray, numpy.generic)) for a in [*arrays, *expected]):
        return "not arrays"
    arrays, expected = [numpy.asarray(a) for a in arrays], [numpy.asarray(a) for a in expected]
    given = dict(zip(names, arrays))
    output, y = node.output[0], expected[0]
    if not output:
        return "first output left out"
    if y.size == 0 or any(a.size == 0 for a in arrays[:1]):
        return "no values"
    if case.model.opset_import[0].version < 7:
        return "opset below 7"
    if any(a.dtype.kind == "f" and not numpy.isfinite(a).all() for a in [*arrays, y]):
        return "values that are not finite"
    # What is computed for constants comes out as a float.
    if y.dtype not in FLOATS and y.dtype.kind not in "iub":
        return "type of the output"
    sample = next((n for n in names if n == node.input[0] and given[n].dtype in FLOATS), None) if node.input else None
    comparisons = {"Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual"}
    only_constants = {"Shape", "Size", "ConstantOfShape", "Range", "Mod", "ScatterND", "Cast", "Trilu", "NonZero", "OneHot",
                      "Ceil", "Floor", "Round", "ReduceProd", "GatherND", "GatherElements", "Constant", "Upsample"}
    # Truth values of a sample are numbers.
    if node.op_type in only_constants or (y.dtype not in FLOATS and node.op_type not in comparisons):
        sample = None
    for n in names:
        kind = given[n].dtype
        if n != sample and kind not in FLOATS and kind.kind not in "ib":
            return f"type {kind}"
    body, initializers = [], []
    for n in names:
        value = given[n]
        if n == sample:
            continue
        if value.dtype == numpy.float16:
            value = value.astype(numpy.float32)
        initializers.append(numpy_helper.from_array(value, n))
    if sample is None:
        # A constant that must be computed: added to a sample of zeros.
        u = numpy.zeros((1, *y.shape), numpy.float32)
        body += [node, helper.make_node("Cast", [output], ["as_float"], to=TensorProto.FLOAT),
                 helper.make_node("Add", ["u", "as_float"], ["y_batch"])]
        finish = []
    else:
        u = given[sample].astype(numpy.float32)[None]
        initializers.append(numpy_helper.from_array(numpy.array(given[sample].shape, numpy.int64), "own_dims"))
        body += [helper.make_node("Reshape", ["u", "own_dims"], [sample]), node]
        initializers.append(numpy_helper.from_array(numpy.array([1, *y.shape], numpy.int64), "out_dims"))
        finish = [helper.make_node("Reshape", [output, "out_dims"], ["y_batch"])]
    # An input of one axis is a batch of single numbers.
    flat = u.reshape(1, -1)
    lead = [helper.make_node("Reshape", ["flat", "u_dims"], ["u"])]
    initializers.append(numpy_helper.from_array(numpy.array(u.shape, numpy.int64), "u_dims"))
    model = helper.make_model(
        helper.make_graph(
            lead + body + finish, case.name,
            [helper.make_tensor_value_info("flat", TensorProto.FLOAT, ["batch", flat.shape[1]])],
            [helper.make_tensor_value_info("y_batch", TensorProto.FLOAT, None)], initializers),
        opset_imports=case.model.opset_import)
    return model, flat, y.astype(numpy.float32).reshape(1, -1)


def main(folder):
    folder = pathlib.Path(folder)
    written, left_out = 0, {}
    for case in node_cases.collect_testcases(None):
        if any(o.domain not in ("", "ai.onnx") for o in case.model.opset_import):
            continue
        result = as_network(case)
        if isinstance(result, str):
            left_out[result] = left_out.get(result, 0) + 1
            continue
        model, sample, expected = result
        (folder / f"{case.name}.onnx").write_bytes(model.SerializeToString())
        numpy.save(folder / f"{case.name}.input.npy", sample)
        numpy.save(folder / f"{case.name}.output.npy", expected)
        written += 1
    print(written, left_out)


if __name__ == "__main__":
    main(sys.argv[1])
