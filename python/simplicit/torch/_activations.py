"""The functions that are activations, and their names in this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F


def _leaky(*args: Any, **kwargs: Any) -> str:
    slope = args[1] if len(args) > 1 else kwargs.get("negative_slope", 0.01)
    return f"leaky-relu:{slope}"


def _named(name: str) -> Callable[..., str]:
    return lambda *_, **__: name


#: Every function that is an activation, with its name in this package.
FUNCTIONS: dict[Any, Callable[..., str]] = {
    **{f: _named("relu") for f in (F.relu, F.relu_, torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_)},
    **{f: _named("tanh") for f in (F.tanh, torch.tanh, torch.Tensor.tanh, torch.Tensor.tanh_)},
    **{f: _named("sigmoid") for f in (F.sigmoid, torch.sigmoid, torch.Tensor.sigmoid, torch.Tensor.sigmoid_)},
    **{f: _leaky for f in (F.leaky_relu, F.leaky_relu_)},
}
_METHODS = {name + end: name for name in ("relu", "tanh", "sigmoid") for end in ("", "_")}
_MODULES: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid"}


def of_node(node: fx.Node, modules: dict[str, nn.Module]) -> str | None:
    """The activation that a traced node is, if it is one."""
    if node.op == "call_module":
        child = modules[str(node.target)]
        if isinstance(child, nn.LeakyReLU):
            return f"leaky-relu:{child.negative_slope}"
        return _MODULES.get(type(child))
    if node.op == "call_method":
        return _METHODS.get(str(node.target))
    name = FUNCTIONS.get(node.target)
    return name(*node.args, **node.kwargs) if name else None


def apply(z: torch.Tensor, activation: str) -> torch.Tensor:
    """φ(z)."""
    if activation == "relu":
        return F.relu(z)
    if activation.startswith("leaky-relu:"):
        return F.leaky_relu(z, float(activation.partition(":")[2]))
    if activation == "tanh":
        return torch.tanh(z)
    return torch.sigmoid(z) if activation == "sigmoid" else z


def derivative(z: torch.Tensor, activation: str) -> torch.Tensor:
    """φ′(z); at a kink that of the left, as PyTorch has it."""
    if activation == "relu" or activation.startswith("leaky-relu:"):
        slope = float(activation.partition(":")[2] or 0)
        return torch.where(z > 0, torch.ones_like(z), slope)
    if activation == "tanh":
        return 1 - torch.tanh(z) ** 2
    if activation == "sigmoid":
        s = torch.sigmoid(z)
        return s * (1 - s)
    return torch.ones_like(z)
