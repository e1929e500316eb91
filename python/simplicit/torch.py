"""PyTorch: states of a module, a module made sparse, and implicit models as modules.

``collect`` records every activation of a module, ``network`` turns it into a :class:`simplicit.Network`, ``compress``
trains a sparse model from it, and :class:`ImplicitModule` runs a model inside PyTorch with exact gradients.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from simplicit import _core
from simplicit._arrays import Array
from simplicit.errors import NotConvergedError, SettingError, ShapeError, UnsupportedError
from simplicit.model import ImplicitModel
from simplicit.network import Builder, Network
from simplicit.states import States


def _leaky(*args: Any, **kwargs: Any) -> str:
    slope = args[1] if len(args) > 1 else kwargs.get("negative_slope", 0.01)
    return f"leaky-relu:{slope}"


def _named(name: str) -> Callable[..., str]:
    return lambda *_, **__: name


#: Every function that is an activation, and what it is called here.
_FUNCTIONS: dict[Any, Callable[..., str]] = {
    **{f: _named("relu") for f in (F.relu, F.relu_, torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_)},
    **{f: _named("tanh") for f in (F.tanh, torch.tanh, torch.Tensor.tanh, torch.Tensor.tanh_)},
    **{f: _named("sigmoid") for f in (F.sigmoid, torch.sigmoid, torch.Tensor.sigmoid, torch.Tensor.sigmoid_)},
    **{f: _leaky for f in (F.leaky_relu, F.leaky_relu_)},
}
_METHODS = {"relu": "relu", "relu_": "relu", "tanh": "tanh", "tanh_": "tanh", "sigmoid": "sigmoid"}
_MODULES: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid"}


class _Recorder(TorchFunctionMode):
    """Sees every activation, whether a module or a function calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[tuple[str, str, Array, Array]] = []
        self.path: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _FUNCTIONS.get(func)
        if name is None:
            return func(*args, **kwargs)
        # Before the call: it may work in place.
        z = _flat(args[0])
        out = func(*args, **kwargs)
        self.layers.append((self.path[-1] if self.path else "activation", name(*args, **kwargs), z, _flat(out)))
        return out


def _flat(tensor: torch.Tensor) -> Array:
    return tensor.detach().flatten(1).to("cpu", torch.float32, copy=True).numpy()


def _inputs(batch: Any) -> torch.Tensor:
    """A batch is its inputs, or a tuple that begins with them."""
    inputs: torch.Tensor = batch[0] if isinstance(batch, (tuple, list)) else batch
    return inputs


class _Evaluating:
    """Evaluation mode and no gradients for a while; the module is left as it was."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __enter__(self) -> None:
        self._training = [m.training for m in self._module.modules()]
        self._module.eval()
        self._no_grad = torch.no_grad()
        self._no_grad.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._no_grad.__exit__(*error)
        for module, training in zip(self._module.modules(), self._training, strict=True):
            module.training = training


def collect(module: nn.Module, loader: Iterable[Any], *, into: str = "states") -> Any:
    """Run a module over batches and record U, Z, X, Y.

    Activations are seen wherever they happen: ``nn.ReLU``, ``F.relu``, ``x.relu_()``; control flow does not matter.

    Parameters
    ----------
    module : nn.Module
        On any device.
    loader : iterable
        Batches: a tensor, or a tuple that begins with one.
    into : str, optional
        ``states`` keeps the samples; ``statistics`` keeps only their sums, in memory that does not grow with them.

    Returns
    -------
    States, or (m, G, H, e)
        The statistics of features [X U 1] and targets [Z Y], one target a row of H.
    """
    if into not in ("states", "statistics"):
        raise SettingError(f"into: expected states or statistics, got {into!r}")
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    parts: list[tuple[Array, Array, Array, Array]] = []
    layout: list[dict[str, Any]] | None = None
    sums: _core.Statistics | None = None
    with _Evaluating(module):
        for batch in loader:
            u = _inputs(batch)
            layers, y = _record(module, u.to(device))
            if not layers:
                raise UnsupportedError("a module without activations is not supported: it has no states")
            # Last layer first.
            layers.reverse()
            seen = [{"name": n, "size": z.shape[1], "activation": a} for n, a, z, _ in layers]
            if layout is None:
                layout = seen
            elif seen != layout:
                raise ShapeError(f"activations: expected the same in every batch, {len(layout)} layers, got {len(seen)}")
            block = (_flat(u), np.hstack([z for *_, z, _ in layers]), np.hstack([x for *_, x in layers]), _flat(y))
            if into == "states":
                parts.append(block)
                continue
            u_, z_, x_, y_ = block
            features = np.hstack([x_, u_, np.ones((len(u_), 1), np.float32)])
            if sums is None:
                sums = _core.Statistics(features.shape[1], z_.shape[1] + y_.shape[1])
            sums.push(features, np.hstack([z_, y_]))
    if layout is None:
        raise ShapeError("loader: expected at least one batch, got none")
    if sums is not None:
        return sums.finish()
    arrays = [np.concatenate(a) for a in zip(*parts, strict=True)]
    nonzeros = sum(int(torch.count_nonzero(p)) for p in module.parameters())
    return States(*arrays, layout=layout, baseline_nonzeros=nonzeros)


def _record(module: nn.Module, u: torch.Tensor) -> tuple[list[tuple[str, str, Array, Array]], torch.Tensor]:
    recorder = _Recorder()
    hooks = []
    for name, child in module.named_modules():
        if name:
            hooks.append(child.register_forward_pre_hook(lambda *_, n=name: recorder.path.append(n)))
            hooks.append(child.register_forward_hook(lambda *_: recorder.path.pop() and None))
    try:
        with recorder:
            y = module(u)
    finally:
        for hook in hooks:
            hook.remove()
    # One module may act several times: names stay unique.
    count: dict[str, int] = {}
    layers = []
    for name, activation, z, x in recorder.layers:
        count[name] = count.get(name, 0) + 1
        layers.append((name if count[name] == 1 else f"{name}:{count[name]}", activation, z, x))
    return layers, y


class _Converted:
    """A network, and where every weight of the module went."""

    def __init__(self, network: Network, places: list[_Place]) -> None:
        self.network = network
        self.places = places


class _Place:
    """One linear map or convolution of the module, with the batch norm behind it and the layers it joins."""

    def __init__(self, module: str, source: str | None, node: fx.Node) -> None:
        self.module = module
        self.norm: str | None = None
        #: Name of the layer it reads; None is the input.
        self.source = source
        #: Name of the layer it feeds; None is the output.
        self.target: str | None = None
        self.node = node


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
    return _convert(module, sample).network


def _convert(module: nn.Module, sample: torch.Tensor) -> _Converted:
    try:
        graph = fx.symbolic_trace(module).graph
    except Exception as problem:
        raise UnsupportedError(
            f"{type(module).__name__} is not supported: torch.fx cannot trace it ({problem}); "
            "collect its states and fit a SIM on them"
        ) from problem
    modules = dict(module.named_modules())
    shape = list(sample.shape[1:])
    # Images without channels have one.
    builder = Builder([1, *shape] if len(shape) == 2 else shape)
    at: dict[fx.Node, int] = {}
    # The layer that a value comes from; None is the input.
    source: dict[fx.Node, str | None] = {}
    places: dict[fx.Node, _Place] = {}
    output: fx.Node | None = None
    for node in graph.nodes:
        if node.op == "placeholder":
            if at:
                raise UnsupportedError("a module with several inputs is not supported; wrap it into one with a single input")
            at[node], source[node] = 0, None
            continue
        if node.op == "output":
            output = node.args[0]
            if not isinstance(output, fx.Node):
                raise UnsupportedError("a module with several outputs is not supported; wrap it into one with a single output")
            continue
        if node.op == "get_attr":
            continue
        _node(builder, modules, node, at, source, places)
    if output is None:
        raise UnsupportedError("a module without output is not supported")
    for place in places.values():
        place.target = _target(place, output, modules)
    return _Converted(builder.build(at[output]), list(places.values()))


def _activation(node: fx.Node, modules: dict[str, nn.Module]) -> str | None:
    if node.op == "call_module":
        child = modules[str(node.target)]
        if isinstance(child, nn.LeakyReLU):
            return f"leaky-relu:{child.negative_slope}"
        return _MODULES.get(type(child))
    if node.op == "call_method":
        return _METHODS.get(str(node.target))
    name = _FUNCTIONS.get(node.target)
    return name(*node.args, **node.kwargs) if name else None


def _pair(value: Any) -> list[int]:
    return [int(v) for v in value] if isinstance(value, (tuple, list)) else [int(value)] * 2


def _padding(value: Any) -> list[int]:
    if isinstance(value, str):
        raise UnsupportedError(f"padding {value!r} is not supported; give numbers")
    return _pair(value) * 2


def _numbers(tensor: Any) -> list[float] | None:
    return None if tensor is None else tensor.detach().cpu().float().tolist()


def _node(
    builder: Builder,
    modules: dict[str, nn.Module],
    node: fx.Node,
    at: dict[fx.Node, int],
    source: dict[fx.Node, str | None],
    places: dict[fx.Node, _Place],
) -> None:
    def argument(k: int, name: str, default: Any) -> Any:
        return node.args[k] if len(node.args) > k else node.kwargs.get(name, default)

    def refuse(what: Any, why: str) -> UnsupportedError:
        return UnsupportedError(f"{what} at {node.name} is not supported: {why}")

    x: Any = node.args[0]
    here = at[x]
    source[node] = source[x]
    activation = _activation(node, modules)
    if activation is not None:
        at[node] = builder.activation(here, activation, node.name)
        source[node] = node.name
        return
    if node.op == "call_module":
        child = modules[str(node.target)]
        if isinstance(child, nn.Linear):
            at[node] = builder.linear(here, child.weight.detach().cpu().float().numpy(), _numbers(child.bias))
            places[node] = _Place(str(node.target), source[x], node)
        elif isinstance(child, nn.Conv2d):
            if child.groups != 1 or _pair(child.dilation) != [1, 1] or child.padding_mode != "zeros":
                raise refuse(child, "groups and dilation must be 1, padding zeros")
            weights = child.weight.detach().cpu().float().flatten(1).numpy()
            window = (_pair(child.kernel_size), _pair(child.stride), _padding(child.padding))
            at[node] = builder.convolution(here, weights, *window, _numbers(child.bias))
            places[node] = _Place(str(node.target), source[x], node)
        elif isinstance(child, (nn.BatchNorm1d, nn.BatchNorm2d)):
            if child.running_mean is None or child.running_var is None:
                raise refuse(child, "it needs running statistics")
            ones = torch.ones_like(child.running_mean)
            scale = _numbers(ones if child.weight is None else child.weight)
            shift = _numbers(0 * ones if child.bias is None else child.bias)
            mean, variance = _numbers(child.running_mean), _numbers(child.running_var)
            at[node] = builder.batch_norm(here, scale, shift, mean, variance, child.eps)
            if x in places:
                places[x].norm = str(node.target)
        elif isinstance(child, (nn.Identity, nn.Dropout, nn.Dropout2d)):
            at[node] = here
        elif isinstance(child, nn.Flatten):
            at[node] = builder.flatten(here)
        elif isinstance(child, nn.AdaptiveAvgPool2d) and child.output_size in (1, (1, 1)):
            at[node] = builder.global_average(here)
        elif isinstance(child, nn.AvgPool2d):
            window = (_pair(child.kernel_size), _pair(child.stride), _padding(child.padding))
            at[node] = builder.average_pool(here, *window, bool(child.count_include_pad))
        elif isinstance(child, nn.MaxPool2d):
            window = (_pair(child.kernel_size), _pair(child.stride), _padding(child.padding))
            at[node] = builder.max_pool(here, *window)
        else:
            raise refuse(type(child).__name__, "see docs/python.md for what is")
    elif node.target in (operator.add, operator.iadd, torch.add, "add", "add_"):
        at[node] = builder.plus(here, at[node.args[1]])  # type: ignore[index]
    elif node.target in (torch.flatten, "flatten") or node.target in ("view", "reshape") and node.args[-1] == -1:
        at[node] = builder.flatten(here)
    elif node.target in (F.dropout, "contiguous"):
        at[node] = here
    elif node.target is F.adaptive_avg_pool2d and argument(1, "output_size", None) in (1, (1, 1)):
        at[node] = builder.global_average(here)
    elif node.target in ("mean", torch.mean) and list(argument(1, "dim", ())) in ([2, 3], [-2, -1]):
        at[node] = builder.global_average(here)
    elif node.target is F.avg_pool2d:
        kernel = _pair(argument(1, "kernel_size", 1))
        stride = _pair(argument(2, "stride", None) or kernel)
        at[node] = builder.average_pool(here, kernel, stride, _padding(argument(3, "padding", 0)), True)
    else:
        raise refuse(node.target, "see docs/python.md for what is")


def _target(place: _Place, output: fx.Node, modules: dict[str, nn.Module]) -> str | None:
    """The layer that a linear map feeds, following sums and batch norms."""
    node = place.node
    while node is not output:
        users = list(node.users)
        if len(users) != 1:
            raise UnsupportedError(f"{place.module} is read {len(users)} times without an activation; that is not supported")
        node = users[0]
        if _activation(node, modules) is not None:
            return node.name
    return None


def compress(
    module: nn.Module,
    loader: Iterable[Any],
    target_sparsity: float | None = None,
    *,
    as_module: bool = False,
    **settings: Any,
) -> Any:
    """A sparse model from a module and unlabelled inputs.

    Parameters
    ----------
    module : nn.Module
        Sequential or with functional activations, dense or convolutional.
    loader : iterable
        Batches of inputs, as the module expects them.
    target_sparsity : float, optional
        Share of the module's non-zero parameters to remove.
    as_module : bool, optional
        Return a copy of the module with the new weights written into it, zeros included, ready to fine-tune.
    **settings
        Parameters of :class:`simplicit.SIM`.

    Returns
    -------
    ImplicitModel or nn.Module

    Examples
    --------
    >>> import torch
    >>> from simplicit.torch import compress
    >>> _ = torch.manual_seed(0)
    >>> mlp = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    >>> batches = [torch.randn(100, 8) for _ in range(5)]
    >>> sparse = compress(mlp, batches, target_sparsity=0.5, as_module=True)
    >>> kept = sum(int(p.count_nonzero()) for p in sparse.parameters())
    >>> bool(abs(1 - kept / 195 - 0.5) < 0.02)
    True
    """
    from simplicit.estimator import SIM

    if as_module and settings.get("connectivity", "baseline") != "baseline":
        raise SettingError("as_module: expected connectivity baseline; a module has no place for other connections")
    batches = [_inputs(batch).detach().to("cpu", torch.float32) for batch in loader]
    if not batches:
        raise ShapeError("loader: expected at least one batch, got none")
    U = torch.cat(batches)
    with _Evaluating(module):
        converted = _convert(module, U[:1])
    sim = SIM(target_sparsity=target_sparsity, **settings).fit(converted.network, U.numpy())
    return write_back(module, sim.model_, converted) if as_module else sim.model_


def write_back(module: nn.Module, model: ImplicitModel, converted: _Converted) -> nn.Module:
    """A copy of the module with a model's weights in it."""
    out = copy.deepcopy(module)
    modules = dict(out.named_modules())
    # By name: the layer's number, its units, and its rows of b (a map has one per channel).
    layers: dict[str | None, tuple[int | None, slice, slice]] = {None: (None, slice(None), slice(None))}
    unit = row = 0
    for k, layer in enumerate(model.layout):
        size = layer["size"]
        rows = layer["map"]["channels"] if layer.get("map") else size
        layers[layer["name"]] = (k, slice(unit, unit + size), slice(row, row + rows))
        unit, row = unit + size, row + rows
    shared = {(block.target, block.source): block.taps for block in model.taps if block.taps is not None}
    taken: set[tuple[str | None, str | None]] = set()
    with torch.no_grad():
        for place in converted.places:
            pair = (place.target, place.source)
            child = modules[place.module]
            if not isinstance(child, (nn.Linear, nn.Conv2d)) or pair in taken:
                raise UnsupportedError(f"{place.module} is not supported by as_module: expected one map per pair of layers")
            number, units, rows_of_b = layers[place.target]
            reads, columns, _ = layers[place.source]
            taps = shared.get((number, reads))
            if taps is None:
                letter = ("B" if place.source is None else "A") if place.target else ("D" if place.source is None else "C")
                weight = model._stored(letter)[units, columns].toarray()
            else:
                weight = taps.toarray()
            # Biases that fold into one row are one number: the first map of a sum has it.
            bias = (model.b if place.target else model.d)[rows_of_b].copy()
            if any(target == place.target for target, _ in taken):
                bias[:] = 0
            taken.add(pair)
            _write(child, modules.get(place.norm or ""), torch.from_numpy(weight), torch.from_numpy(bias))
    return out


def _write(child: nn.Linear | nn.Conv2d, norm: nn.Module | None, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Weights with the batch norm behind them folded in: taken apart again, zeros stay zeros."""
    like = child.weight
    weight, bias = weight.to(like.device, like.dtype).reshape(like.shape), bias.to(like.device, like.dtype)
    if isinstance(norm, (nn.BatchNorm1d, nn.BatchNorm2d)) and norm.running_mean is not None and norm.running_var is not None:
        gain = torch.ones_like(norm.running_mean) if norm.weight is None else norm.weight
        scale = gain / torch.sqrt(norm.running_var + norm.eps)
        old = torch.zeros_like(scale) if child.bias is None else child.bias
        spread = scale.reshape(-1, *[1] * (weight.ndim - 1))
        child.weight.copy_(torch.where(spread != 0, weight / spread, 0))
        norm.bias.copy_(bias - (old - norm.running_mean) * scale)
        return
    child.weight.copy_(weight)
    if child.bias is not None:
        child.bias.copy_(bias)
    elif bias.any():
        raise UnsupportedError("a bias where the module has none is not supported by as_module; leave bias off")


class ImplicitModule(nn.Module):
    """An implicit model as a module: sparse weights as parameters, exact gradients through the equilibrium.

    Non-zeros are parameters, zeros stay zeros: it can be trained on. Raw inputs go in, as for
    :meth:`ImplicitModel.predict`. Plain iteration finds the equilibrium and solves the adjoint equation; an acyclic
    model needs as many steps as it has layers.

    Parameters
    ----------
    model : ImplicitModel
    dtype : torch.dtype, optional
        float32 by default.
    tolerance : float, optional
        Largest change of a state in the last step, relative to max(1, |x|): 16 roundings of the dtype by default.
    max_iterations : int, optional
    """

    A: nn.Parameter
    b: nn.Parameter
    d: nn.Parameter
    mean: torch.Tensor
    std: torch.Tensor

    def __init__(
        self,
        model: ImplicitModel,
        *,
        dtype: torch.dtype | None = None,
        tolerance: float | None = None,
        max_iterations: int = 20_000,
    ) -> None:
        super().__init__()
        if model.taps:
            raise UnsupportedError(
                "a model with shared weights is not supported as an implicit module; use compress(…, as_module=True)"
            )
        dtype = dtype or torch.float32
        self.shape = (model.n_inputs, model.n_states, model.n_outputs)
        self.layout = model.layout
        self.tolerance = 16 * torch.finfo(dtype).eps if tolerance is None else tolerance
        self.max_iterations = max_iterations
        for letter in "ABCD":
            matrix = getattr(model, letter).tocoo()
            index = np.stack([matrix.coords[0], matrix.coords[1]]).astype(np.int64)
            self.register_buffer(f"{letter}_index", torch.from_numpy(index))
            setattr(self, letter, nn.Parameter(torch.tensor(matrix.data, dtype=dtype)))
        self.b = nn.Parameter(torch.tensor(model.b, dtype=dtype))
        self.d = nn.Parameter(torch.tensor(model.d, dtype=dtype))
        how = model.preprocessing
        spread = [np.repeat(how[k], model.n_inputs // len(how[k])) for k in ("mean", "std")]
        self.scale = float(how["scale"])
        self.register_buffer("mean", torch.tensor(spread[0], dtype=dtype))
        self.register_buffer("std", torch.tensor(spread[1], dtype=dtype))

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        """Outputs, one sample a row."""
        u = (u.flatten(1).to(self.A.dtype) * self.scale - self.mean) / self.std
        return _Equilibrium.apply(self, u, self.A, self.B, self.C, self.D, self.b, self.d)  # type: ignore[no-any-return]

    def _matrix(self, letter: str, values: torch.Tensor) -> torch.Tensor:
        p, n, q = self.shape
        size = {"A": (n, n), "B": (n, p), "C": (q, n), "D": (q, p)}[letter]
        return torch.sparse_coo_tensor(getattr(self, f"{letter}_index"), values, size, is_coalesced=True, check_invariants=False)

    def _activate(self, z: torch.Tensor, derivative: bool) -> torch.Tensor:
        """φ or φ′ of n × m pre-activations, layer by layer."""
        parts, start = [], 0
        for layer in self.layout:
            part = z[start : start + layer["size"]]
            start += layer["size"]
            parts.append(_phi(part, layer["activation"], derivative))
        return torch.cat(parts) if parts else z

    def _iterate(self, step: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.max_iterations):
            new = step(x)
            change = (new - x).abs() / new.abs().clamp(min=1)
            x = new
            if not change.numel() or change.max() <= self.tolerance:
                return x
        error = NotConvergedError(f"the equilibrium was not reached in {self.max_iterations} steps; raise max_iterations")
        error.samples = torch.nonzero(change.amax(0) > self.tolerance).flatten().tolist()
        raise error


def _phi(z: torch.Tensor, activation: str, derivative: bool) -> torch.Tensor:
    if activation == "relu" or activation.startswith("leaky-relu"):
        slope = float(activation.partition(":")[2]) if ":" in activation else 0.0
        return torch.where(z > 0, torch.ones_like(z), slope) if derivative else torch.where(z > 0, z, slope * z)
    if activation == "tanh":
        return 1 - torch.tanh(z) ** 2 if derivative else torch.tanh(z)
    if activation == "sigmoid":
        s = torch.sigmoid(z)
        return s * (1 - s) if derivative else s
    return torch.ones_like(z) if derivative else z


class _Equilibrium(torch.autograd.Function):
    """y(u) and its exact derivative: with w = Φ(Aᵀw + Cᵀv), dL/du = Bᵀw + Dᵀv and dL/dA = wxᵀ on the non-zeros."""

    @staticmethod
    def forward(ctx: Any, module: ImplicitModule, u: Any, a: Any, b: Any, c: Any, d: Any, bias: Any, out: Any) -> Any:
        A, B, C, D = (module._matrix(k, v.detach()) for k, v in zip("ABCD", (a, b, c, d), strict=True))
        ut = u.t().contiguous()
        drive = B @ ut + bias[:, None]
        x = module._iterate(lambda x: module._activate(A @ x + drive, False), torch.zeros_like(drive))
        z = A @ x + drive
        ctx.module = module
        ctx.save_for_backward(ut, x, z, a, b, c, d)
        return (C @ x + D @ ut).t() + out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        module: ImplicitModule = ctx.module
        ut, x, z, a, b, c, d = ctx.saved_tensors
        At, Bt, Ct, Dt = (module._matrix(k, v).t().coalesce() for k, v in zip("ABCD", (a, b, c, d), strict=True))
        v = gradient.t().contiguous()
        gates, pull = module._activate(z, True), Ct @ v
        w = module._iterate(lambda w: gates * (At @ w + pull), gates * pull)

        def on(letter: str, left: Any, right: Any) -> Any:
            rows, cols = getattr(module, f"{letter}_index")
            # A chunk at a time: memory is not non-zeros × samples.
            chunks = [(left[r] * right[k]).sum(1) for r, k in zip(rows.split(4096), cols.split(4096), strict=True)]
            return torch.cat(chunks) if chunks else left.new_zeros(0)

        du = (Bt @ w + Dt @ v).t()
        return (None, du, on("A", w, x), on("B", w, ut), on("C", v, x), on("D", v, ut), w.sum(1), v.sum(1))
