"""Makes a module sparse: its own linear maps, whatever is between them."""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from simplicit import _core
from simplicit._cuda import find_cuda
from simplicit._progress import watcher
from simplicit.errors import ConvergenceWarning, SettingError, ShapeError, UnsupportedError
from simplicit.estimator import SIM
from simplicit.model import ImplicitModel
from simplicit.report import TrainReport
from simplicit.torch._batches import Batches
from simplicit.torch._collect import Evaluating, inputs_of
from simplicit.torch._compressed import Compressed
from simplicit.torch._find import check, choose, find, stages
from simplicit.torch._network import Converted, convert
from simplicit.torch._source import Source, fingerprint

#: Positions of a sample that statistics see, unless rows need more; as on the command line.
_POSITIONS = 64

#: Settings that need the whole network.
_OF_NETWORKS = (
    "connectivity", "mask", "kappa", "matching", "robust", "robust_refit", "reach", "bias", "reconstruct", "output_refit", "stages",
    "allocate", "augment",
)  # fmt: skip



def compress(
    module: nn.Module,
    loader: Iterable[Any],
    target_sparsity: float | None = None,
    *,
    cascade: str | None = "layer",
    include: Any = None,
    exclude: Any = None,
    inplace: bool = False,
    forward_kwargs: Mapping[str, Any] | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    output: Callable[[Any], torch.Tensor] | None = None,
    as_module: bool | None = None,
    **settings: Any,
) -> Any:
    """Make a module sparse, from unlabelled inputs.

    Any module that applies parameters by ``F.linear``, ``F.conv1d``, ``F.conv2d`` or Hugging Face's ``Conv1D``, in modules or
    in functions, attention included. The module runs itself, on its own device and in its own precision, in evaluation
    mode; the library fits the rows of its weights to their outputs in the original module.

    Parameters
    ----------
    module : nn.Module
        Not changed unless `inplace`.
    loader : iterable
        Batches: a tensor, a tuple that begins with the inputs, or a mapping of keyword arguments (labels are left out). It
        is gone through several times and never held; a generator's batches are kept as they are.
    target_sparsity : float, optional
        Share of the module's non-zero parameters to remove, batch norms folded into the layers before them. Without it
        `mu` (or the parameter of another penalty) is the strength.
    cascade : str or None, optional
        ``layer``: every layer sees the layers before it sparse. ``block``: every element of the outermost ``Sequential`` or
        ``ModuleList`` does, with fewer passes over the loader. None: all layers see the original; one pass.
    include, exclude : str, type or sequence of them, optional
        Layers to train, and layers to leave, by name (``*`` allowed, ``layer3`` means everything inside) or type of module.
    inplace : bool, optional
        Write into `module` itself.
    forward_kwargs : mapping, optional
        Given to the module with every batch.
    forward : callable, optional
        ``forward(module, batch)`` in the place of a call.
    output : callable, optional
        From what the module returns to the tensor that counts. By default ``logits``, or the first tensor.
    as_module : bool, optional
        Deprecated: True returns a module, False an implicit model, both by converting the module first.
    **settings
        Parameters of :class:`simplicit.SIM` that do not need a converted network: `penalty` and its parameters,
        `output_aware`, `normalize`, `rounds`, `refit`, `bounds`, `prove`, `positions`, `seed`, `threads`, `device`,
        `checkpoint`, `progress`.

    Returns
    -------
    Compressed

    Examples
    --------
    >>> import torch
    >>> from simplicit.torch import compress
    >>> _ = torch.manual_seed(0)
    >>> mlp = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    >>> batches = [torch.randn(100, 8) for _ in range(5)]
    >>> compressed = compress(mlp, batches, target_sparsity=0.5)
    >>> round(compressed.report.sparsity, 1)
    0.5
    >>> kept = sum(int(p.count_nonzero()) for p in compressed.module.parameters())
    >>> kept == compressed.report.nonzeros
    True
    """
    if as_module is not None:
        return _converted(module, loader, target_sparsity, as_module, settings)
    if cascade not in ("layer", "block", None):
        raise SettingError(f"cascade: expected 'layer', 'block' or None, got {cascade!r}")
    sim = SIM(target_sparsity=target_sparsity, cascade=cascade is not None, **settings)
    for name in _OF_NETWORKS:
        if getattr(sim, name) is not None:
            raise SettingError(
                f"{name}: expected none for a module; convert it with simplicit.torch.network and fit a SIM for this"
            )
    if callable(sim.penalty):
        raise SettingError("penalty: expected a name for a module, got a function")
    check(module)
    twin = _copy(module)
    original, out = (twin, module) if inplace else (module, twin)
    with Evaluating(original):
        batches = Batches(loader, original, forward, forward_kwargs, output)
        found = find(original, batches)
        choose(original, found, include, exclude)
        trained = [block for block in found.blocks if block.kept is None]
        stages(original, trained, cascade)
        with Evaluating(out):
            source = Source(original, out, found, batches, positions=sim.positions or _POSITIONS, seed=sim.seed)
            report = _train(sim, source)
        masks: dict[str, torch.Tensor] = {}
        after = dict(out.named_parameters())
        for block in trained:
            masks.setdefault(block.key.parameter, after[block.key.parameter].detach() != 0)
    for notice in report.notices:
        warnings.warn(notice, ConvergenceWarning, stacklevel=2)
    return Compressed(out, original, report, masks, batches)


def _copy(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except Exception as problem:
        raise UnsupportedError(
            f"{type(module).__name__} cannot be copied ({problem}), and the original is needed beside the sparse one"
        ) from problem


def _train(sim: SIM, source: Source) -> TrainReport:
    if sim.device != "cpu":
        find_cuda()
    shown = watcher(sim.progress)
    try:
        results, notices = _core.train_blocks(
            sim._flags(),
            source,
            threads=sim.threads,
            checkpoint=None if sim.checkpoint is None else os.fspath(sim.checkpoint),
            hashes=None if sim.checkpoint is None else fingerprint(source.original, source.batches),
            progress=shown,
        )
    finally:
        shown.close()
    record = json.loads(results)
    layers, before, now = [], 0, 0
    row = 0
    for block in source.found.blocks:
        size = source.count(block)
        kept = size
        if block.kept is None:
            kept = sum(r["nonzeros"] for r in record["row_details"][row : row + block.rows])
            row += block.rows
            before, now = before + size, now + kept
        layers.append(
            {
                "name": block.name,
                "rows": block.rows,
                "features": block.features,
                "uses": block.uses if block.uses < 1 << 60 else None,
                "trained": block.kept is None,
                "why_not": block.kept,
                "nonzeros": kept,
                "baseline_nonzeros": size,
                "sparsity": 1 - kept / max(size, 1),
            }
        )
    record.update(layers=layers, trainable_sparsity=1 - now / max(before, 1))
    return TrainReport(record, notices)


def _converted(module: nn.Module, loader: Iterable[Any], target_sparsity: float | None, as_module: bool, settings: dict[str, Any]) -> Any:
    """The deprecated way: the module is converted to a network first."""
    instead = "compress(...).module" if as_module else "compress(...).model, or SIM(...).fit(simplicit.torch.network(module, sample), U)"
    warnings.warn(f"as_module is deprecated; use {instead}", DeprecationWarning, stacklevel=3)
    if as_module and settings.get("connectivity", "baseline") != "baseline":
        raise SettingError("as_module: expected connectivity baseline; a module has no place for other connections")
    batches = [inputs_of(batch).detach().to("cpu", torch.float32) for batch in loader]
    if not batches:
        raise ShapeError("loader: expected at least one batch, got none")
    U = torch.cat(batches)
    converted = convert(module, U, places=as_module)
    sim = SIM(network=converted.network, target_sparsity=target_sparsity, **settings).fit(U.numpy())
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
