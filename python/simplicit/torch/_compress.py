"""A module made sparse: as an implicit model, or with zeros in its own weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from simplicit.errors import SettingError, ShapeError, UnsupportedError
from simplicit.estimator import SIM
from simplicit.model import ImplicitModel
from simplicit.torch._collect import inputs_of
from simplicit.torch._network import Converted, convert


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
    if as_module and settings.get("connectivity", "baseline") != "baseline":
        raise SettingError("as_module: expected connectivity baseline; a module has no place for other connections")
    batches = [inputs_of(batch).detach().to("cpu", torch.float32) for batch in loader]
    if not batches:
        raise ShapeError("loader: expected at least one batch, got none")
    U = torch.cat(batches)
    converted = convert(module, U, places=as_module)
    sim = SIM(target_sparsity=target_sparsity, **settings).fit(converted.network, U.numpy())
    return write_back(module, sim.model_, converted) if as_module else sim.model_


def write_back(module: nn.Module, model: ImplicitModel, converted: Converted) -> nn.Module:
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
