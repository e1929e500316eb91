"""States of a module, recorded as it runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from simplicit import _core
from simplicit._arrays import Array
from simplicit.errors import SettingError, ShapeError, UnsupportedError
from simplicit.states import States
from simplicit.statistics import Statistics
from simplicit.torch._activations import FUNCTIONS


class _Recorder(TorchFunctionMode):
    """Sees every activation, whether a module or a function calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[tuple[str, str, Array, Array]] = []
        self.path: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = FUNCTIONS.get(func)
        if name is None:
            return func(*args, **kwargs)
        # Before the call: it may work in place.
        z = _flat(args[0])
        out = func(*args, **kwargs)
        self.layers.append((self.path[-1] if self.path else "activation", name(*args, **kwargs), z, _flat(out)))
        return out


def _flat(tensor: torch.Tensor) -> Array:
    return tensor.detach().flatten(1).to("cpu", torch.float32, copy=True).numpy()


def inputs_of(batch: Any) -> torch.Tensor:
    """A batch is its inputs, or a tuple that begins with them."""
    inputs: torch.Tensor = batch[0] if isinstance(batch, (tuple, list)) else batch
    return inputs


class Evaluating:
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
    States or Statistics
        Statistics are (m, G, H, e) of features [X U 1] and targets [Z Y], one target a row of H; ``SIM.fit`` takes either.
    """
    if into not in ("states", "statistics"):
        raise SettingError(f"into: expected states or statistics, got {into!r}")
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    parts: list[tuple[Array, Array, Array, Array]] = []
    layout: list[dict[str, Any]] | None = None
    sums: _core.Statistics | None = None
    with Evaluating(module):
        for batch in loader:
            u = inputs_of(batch)
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
    nonzeros = sum(int(torch.count_nonzero(p)) for p in module.parameters())
    if sums is not None:
        return Statistics(sums.finish(), layout, nonzeros)
    arrays = [np.concatenate(a) for a in zip(*parts, strict=True)]
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
