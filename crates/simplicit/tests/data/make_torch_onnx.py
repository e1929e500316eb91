"""Random small networks through both of PyTorch's ONNX exporters: writes torch_*.onnx beside this file.

Run with Python, torch 2.9 or later, onnx and onnxscript; make_onnx.py then adds ONNX Runtime's outputs.
"""

import io
import pathlib
import warnings

import onnx
import torch
from torch import nn

HERE = pathlib.Path(__file__).parent
warnings.filterwarnings("ignore")


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.c0, self.b0 = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.c1, self.b1 = nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(6)
        self.c2, self.b2 = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.short = nn.Sequential(nn.Conv2d(4, 6, 1, stride=2, bias=False), nn.BatchNorm2d(6))
        self.c3, self.b3 = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, 5)

    def forward(self, x):
        x = torch.relu(self.b0(self.c0(x)))
        x = torch.relu(self.b2(self.c2(torch.relu(self.b1(self.c1(x))))) + self.short(x))
        x = torch.relu(self.b3(self.c3(x)) + x)
        return self.fc(x.mean((2, 3)))


class Views(nn.Module):
    """Flattens by x.view, pools before the activation, as in PyTorch's first tutorials."""

    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3)
        self.f1, self.f2 = nn.Linear(6 * 2 * 2, 8), nn.Linear(8, 4)

    def forward(self, x):
        x = torch.relu(torch.max_pool2d(self.c1(x), 2))
        x = torch.max_pool2d(torch.relu(self.c2(x)), 2)
        x = x.view(x.size(0), -1)
        return self.f2(torch.relu(self.f1(x)))


def networks():
    yield "mlp", nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)), (6,)
    yield "mlp_no_bias", nn.Sequential(
        nn.Flatten(), nn.Linear(12, 8, bias=False), nn.LeakyReLU(0.2), nn.Dropout(0.5),
        nn.Linear(8, 4, bias=False), nn.Sigmoid(), nn.Linear(4, 3, bias=False)), (3, 4)
    yield "mlp_norm", nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.BatchNorm1d(5), nn.Linear(5, 3)), (6,)
    yield "conv", nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 5, (3, 2), stride=(1, 2), padding=(1, 0)), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 4 * 2, 3)), (2, 8, 8)
    yield "average", nn.Sequential(
        nn.Conv2d(2, 4, 3, padding="same"), nn.LeakyReLU(), nn.AvgPool2d(2),
        nn.Conv2d(4, 5, 3), nn.Sigmoid(), nn.AvgPool2d(3, stride=1, padding=1), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(5, 3)), (2, 10, 9)
    yield "average_head", nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False),
        nn.Conv2d(4, 5, 1), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten()), (2, 7, 7)
    yield "residual", Residual(), (3, 8, 8)
    yield "views", Views(), (1, 14, 14)


def export(module, shape, new, dynamic=True, training=torch.onnx.TrainingMode.EVAL, opset=18, optimize=True):
    x = torch.randn(2, *shape)
    buffer = io.BytesIO()
    options = {"input_names": ["input"], "output_names": ["output"], "opset_version": opset, "dynamo": new}
    if new:
        if dynamic:
            options["dynamic_shapes"] = ({0: torch.export.Dim("batch")},)
        program = torch.onnx.export(module, (x,), verbose=False, optimize=optimize, **options)
        return program.model_proto
    if dynamic:
        options["dynamic_axes"] = {"input": {0: "batch"}, "output": {0: "batch"}}
    torch.onnx.export(module, (x,), buffer, training=training, **options)
    return onnx.load_model_from_string(buffer.getvalue())


def main():
    torch.manual_seed(0)
    for name, module, shape in networks():
        for p in module.modules():
            if isinstance(p, (nn.BatchNorm1d, nn.BatchNorm2d)):
                p.weight.data.normal_(), p.bias.data.normal_()
                p.running_mean.normal_(), p.running_var.uniform_(0.5, 2)
        module.eval()
        variants = {
            "new": export(module, shape, new=True),
            "new_fixed": export(module, shape, new=True, dynamic=False),
            "old": export(module, shape, new=False, opset=13),
            "old_fixed": export(module, shape, new=False, dynamic=False, opset=17),
        }
        if any(isinstance(p, (nn.BatchNorm1d, nn.BatchNorm2d)) for p in module.modules()):
            # Without optimisation, and with PRESERVE, batch norm stays a node of its own.
            variants["new_unfolded"] = export(module, shape, new=True, optimize=False)
            variants["old_unfolded"] = export(module, shape, new=False, training=torch.onnx.TrainingMode.PRESERVE)
        for variant, model in variants.items():
            for node in model.graph.node:
                node.ClearField("doc_string")
                del node.metadata_props[:]
            del model.graph.value_info[:]
            del model.metadata_props[:]
            for value in [*model.graph.input, *model.graph.output, *model.graph.initializer]:
                if hasattr(value, "metadata_props"):
                    del value.metadata_props[:]
            onnx.checker.check_model(model)
            onnx.save(model, HERE / f"torch_{name}_{variant}.onnx")


if __name__ == "__main__":
    main()
