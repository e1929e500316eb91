"""A module as a network, by torch.fx."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from simplicit.errors import UnsupportedError
from simplicit.network import Builder, Network
from simplicit.torch import _activations
from simplicit.torch._collect import Evaluating


@dataclass
class Place:
    """One linear map or convolution of the module, with the batch norm behind it and the layers it joins.

    Layers are named; None is the input, or the output.
    """

    module: str
    source: str | None
    node: fx.Node
    norm: str | None = None
    target: str | None = None


@dataclass
class Converted:
    """A network, and the place of every weight of the module in it."""

    network: Network
    places: list[Place]


def network(module: nn.Module, sample: Any) -> Network:
    """A PyTorch module as a network: linear maps, convolutions, batch norm, sums, activations and poolings.

    Parameters
    ----------
    module : nn.Module
        Traced by torch.fx: its control flow must not depend on its inputs.
    sample : tensor
        A batch of inputs, for its shape.

    Examples
    --------
    >>> import torch
    >>> from simplicit.torch import network
    >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    >>> network(mlp, torch.zeros(1, 4))
    Network(4 inputs, 3 states, 2 outputs)
    """
    return convert(module, sample).network


class _Values(fx.Interpreter):
    """Runs one sample and keeps the shapes of tensors, and all values that are not tensors, such as ``x.size(0)``."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        n.meta["value"] = tuple(value.shape) if isinstance(value, torch.Tensor) else value
        n.meta["tensor"] = isinstance(value, torch.Tensor)
        return value


def convert(module: nn.Module, sample: torch.Tensor, *, places: bool = False) -> Converted:
    """The network, and with `places` the data that are needed to write weights back."""
    with Evaluating(module):
        try:
            traced = fx.symbolic_trace(module)
        except Exception as problem:
            raise UnsupportedError(
                f"{type(module).__name__} is not supported: torch.fx cannot trace it ({problem}); "
                "collect its states and fit a SIM on them"
            ) from problem
        if sum(node.op == "placeholder" for node in traced.graph.nodes) != 1:
            raise UnsupportedError("a module with several inputs is not supported; wrap it into one with a single input")
        weights = next(module.parameters(), sample)
        _Values(traced).run(sample[:1].to(weights.device, weights.dtype, copy=True))
    return _Conversion(module, list(sample.shape[1:])).run(traced.graph, places)


class _Conversion:
    """One walk over the graph."""

    def __init__(self, module: nn.Module, shape: list[int]) -> None:
        self.modules = dict(module.named_modules())
        # Images without a channel axis have one channel.
        self.builder = Builder([1, *shape] if len(shape) == 2 else shape)
        self.at: dict[fx.Node, int] = {}
        #: The layer that a value comes from; None is the input.
        self.source: dict[fx.Node, str | None] = {}
        self.places: dict[fx.Node, Place] = {}

    def run(self, graph: fx.Graph, places: bool) -> Converted:
        output: Any = None
        for node in graph.nodes:
            if node.op == "placeholder":
                self.at[node], self.source[node] = 0, None
            elif node.op == "output":
                output = node.args[0]
            elif node.meta["tensor"] and node.op != "get_attr":
                self.add(node)
        if not isinstance(output, fx.Node):
            raise UnsupportedError("a module with several outputs is not supported; wrap it into one with a single output")
        found = list(self.places.values()) if places else []
        for place in found:
            place.target = self.target(place, output)
        return Converted(self.builder.build(self.at[output]), found)

    def add(self, node: fx.Node) -> None:
        x: Any = node.args[0]
        if x not in self.at:
            raise refusal(node, node.target, "it reads no value of the module")
        self.source[node] = self.source[x]
        activation = _activations.of_node(node, self.modules)
        if activation is not None:
            self.at[node] = self.builder.activation(self.at[x], activation, node.name)
            self.source[node] = node.name
        elif node.op == "call_module":
            self.at[node] = self.called_module(node, x, self.modules[str(node.target)])
        else:
            self.at[node] = self.called_function(node, x)

    def called_module(self, node: fx.Node, x: fx.Node, child: nn.Module) -> int:
        builder, here = self.builder, self.at[x]
        if isinstance(child, nn.Linear):
            self.places[node] = Place(str(node.target), self.source[x], node)
            return int(builder.linear(here, child.weight.detach().cpu().float().numpy(), _numbers(child.bias)))
        if isinstance(child, nn.Conv2d):
            if child.groups != 1 or _pair(child.dilation) != [1, 1] or child.padding_mode != "zeros":
                raise refusal(node, child, "groups and dilation must be 1, padding zeros")
            self.places[node] = Place(str(node.target), self.source[x], node)
            weights = child.weight.detach().cpu().float().flatten(1).numpy()
            window = (_pair(child.kernel_size), _pair(child.stride), _padding(child.padding))
            return int(builder.convolution(here, weights, *window, _numbers(child.bias)))
        if isinstance(child, (nn.BatchNorm1d, nn.BatchNorm2d)):
            if child.running_mean is None or child.running_var is None:
                raise refusal(node, child, "it needs running statistics")
            ones = torch.ones_like(child.running_mean)
            scale = _numbers(ones if child.weight is None else child.weight)
            shift = _numbers(0 * ones if child.bias is None else child.bias)
            if x in self.places:
                self.places[x].norm = str(node.target)
            mean, variance = _numbers(child.running_mean), _numbers(child.running_var)
            return int(builder.batch_norm(here, scale, shift, mean, variance, child.eps))
        if isinstance(child, (nn.Identity, nn.Dropout, nn.Dropout2d)):
            return here
        if isinstance(child, nn.Flatten):
            return int(builder.flatten(here))
        if isinstance(child, nn.AdaptiveAvgPool2d) and child.output_size in (1, (1, 1)):
            return int(builder.global_average(here))
        if isinstance(child, nn.AvgPool2d):
            return self.average(node, here, child.kernel_size, child.stride, child.padding, child.ceil_mode,
                                child.count_include_pad, child.divisor_override)  # fmt: skip
        if isinstance(child, nn.MaxPool2d):
            return self.maximum(node, here, child.kernel_size, child.stride, child.padding, child.dilation, child.ceil_mode)
        raise refusal(node, type(child).__name__, "see docs/python.md for what is")

    def called_function(self, node: fx.Node, x: fx.Node) -> int:
        builder, here, target = self.builder, self.at[x], node.target

        def argument(k: int, name: str, default: Any = None) -> Any:
            value = node.args[k] if len(node.args) > k else node.kwargs.get(name, default)
            return fx.node.map_arg(value, lambda n: n.meta["value"])

        if target in (operator.add, operator.iadd, torch.add, "add", "add_"):
            other: Any = node.args[1]
            if other not in self.at or node.kwargs.get("alpha", 1) != 1:
                raise refusal(node, target, "a sum must be of two values of the module")
            return int(builder.plus(here, self.at[other]))
        if target in (torch.flatten, torch.reshape, "flatten", "view", "reshape"):
            if node.meta["value"] != (1, math.prod(x.meta["value"])):
                raise refusal(node, target, "only a sample as one vector is")
            return int(builder.flatten(here))
        if target in (F.dropout, "contiguous"):
            return here
        if target is F.adaptive_avg_pool2d and argument(1, "output_size") in (1, (1, 1), [1, 1]):
            return int(builder.global_average(here))
        if target in ("mean", torch.mean) and sorted(d % 4 for d in _several(argument(1, "dim", ()))) == [2, 3]:
            return int(builder.global_average(here))
        if target is F.avg_pool2d:
            window = (argument(1, "kernel_size"), argument(2, "stride"), argument(3, "padding", 0))
            counted = (argument(5, "count_include_pad", True), argument(6, "divisor_override"))
            return self.average(node, here, *window, argument(4, "ceil_mode", False), *counted)
        if target is F.max_pool2d:
            window = (argument(1, "kernel_size"), argument(2, "stride"), argument(3, "padding", 0))
            return self.maximum(node, here, *window, argument(4, "dilation", 1), argument(5, "ceil_mode", False))
        raise refusal(node, target, "see docs/python.md for what is")

    def average(
        self, node: fx.Node, here: int, kernel: Any, stride: Any, padding: Any, ceil: bool, counted: bool, divisor: Any
    ) -> int:
        if ceil or divisor is not None:
            raise refusal(node, "average pooling", "ceil_mode and divisor_override must be off")
        window = (_pair(kernel), _pair(stride or kernel), _padding(padding))
        return int(self.builder.average_pool(here, *window, bool(counted)))

    def maximum(self, node: fx.Node, here: int, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> int:
        if ceil or _pair(dilation) != [1, 1]:
            raise refusal(node, "maximum pooling", "ceil_mode must be off and dilation 1")
        return int(self.builder.max_pool(here, _pair(kernel), _pair(stride or kernel), _padding(padding)))

    def target(self, place: Place, output: fx.Node) -> str | None:
        """The layer that a linear map feeds, following sums and batch norms."""
        node = place.node
        while node is not output:
            # Readers that only use its shape do not count.
            users = [user for user in node.users if user.meta.get("tensor")]
            if len(users) != 1:
                raise refusal(node, place.module, f"it is read {len(users)} times without an activation")
            node = users[0]
            if _activations.of_node(node, self.modules) is not None:
                return node.name
        return None


def refusal(node: fx.Node, what: Any, why: str) -> UnsupportedError:
    """The error for something that is not supported, with its place and the reason."""
    name = getattr(what, "__name__", what)
    return UnsupportedError(f"{name} at {node.name} is not supported: {why}")


def _several(value: Any) -> list[int]:
    return [int(v) for v in value] if isinstance(value, (tuple, list)) else [int(value)]


def _pair(value: Any) -> list[int]:
    return _several(value) * 2 if isinstance(value, int) else _several(value)


def _padding(value: Any) -> list[int]:
    if isinstance(value, str):
        raise UnsupportedError(f"padding {value!r} is not supported; give numbers")
    return _pair(value) * 2


def _numbers(tensor: Any) -> list[float] | None:
    return None if tensor is None else tensor.detach().cpu().float().tolist()
