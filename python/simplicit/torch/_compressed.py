"""A module with zeros, the report about it, and ways to keep its zeros."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from simplicit.errors import SettingError, UnsupportedError
from simplicit.report import TrainReport

if TYPE_CHECKING:
    from simplicit.model import ImplicitModel
    from simplicit.torch._batches import Batches


class Compressed:
    """The result of :func:`compress`.

    Attributes
    ----------
    module : nn.Module
        The module with the new weights, zeros included.
    original : nn.Module
        The module before.
    report : TrainReport
        Sparsity over all parameters and over trained rows, every layer, every row; ``report.to_html(path)`` is a page.
    masks : dict of str to bool tensor
        Of every trained weight, by the parameter's name: where it is not zero.
    """

    def __init__(
        self, module: nn.Module, original: nn.Module, report: TrainReport, masks: dict[str, torch.Tensor], batches: Batches
    ) -> None:
        self.module, self.original, self.report, self.masks = module, original, report, masks
        self._batches = batches
        self._model: ImplicitModel | None = None

    @property
    def model(self) -> ImplicitModel | None:
        """The same function as an implicit model, where :func:`simplicit.torch.network` can read the module; else None."""
        if self._model is None:
            from simplicit.model import ImplicitModel
            from simplicit.torch._network import network

            batch, _ = next(iter(self._batches))
            sample = batch[0] if isinstance(batch, (tuple, list)) else batch
            if not isinstance(sample, torch.Tensor) or not sample.is_floating_point():
                return None
            try:
                converted = network(self.module, sample.detach().cpu().float())
            except UnsupportedError:
                return None
            self._model = ImplicitModel(converted._core.implicit(self.report.baseline_nonzeros))
        return self._model

    def hold(self, optimizer: torch.optim.Optimizer) -> torch.utils.hooks.RemovableHandle:
        """Keep zeros zero: after every step of an optimiser the masked weights are zero again.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
            One that steps parameters of ``module``.

        Returns
        -------
        RemovableHandle
            After ``remove()`` the weights may become non-zero again.
        """
        return hold(self.module, optimizer, masks=self.masks)

    def to_sparse_csr(self) -> nn.Module:
        """A copy of the module whose trained ``nn.Linear`` weights are sparse (CSR), for inference.

        PyTorch multiplies by such weights where the input has two axes; layers that it cannot run stay dense.

        Returns
        -------
        nn.Module
        """
        out = copy.deepcopy(self.module)
        for name, child in out.named_modules():
            if type(child) is nn.Linear and f"{name}.weight".removeprefix(".") in self.masks:
                dense = child.weight
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)
                    child.weight = nn.Parameter(dense.detach().to_sparse_csr(), requires_grad=False)
                try:
                    with torch.no_grad():
                        child(torch.zeros(2, child.in_features, device=dense.device, dtype=dense.dtype))
                except (RuntimeError, NotImplementedError):
                    child.weight = dense
        return out

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        from simplicit.model import ImplicitModel

        if not hasattr(ImplicitModel, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warnings.warn(
            f"compress returns a Compressed now; use compressed.model.{name} (or compressed.module)", DeprecationWarning, stacklevel=2
        )
        model = self.model
        if model is None:
            raise AttributeError(f"{name!r}: this module is no implicit model; use compressed.module")
        return getattr(model, name)

    def __repr__(self) -> str:
        layers = sum(layer["trained"] for layer in self.report.layers)
        return f"Compressed({type(self.module).__name__}, {100 * self.report.sparsity:.1f} % sparse, {layers} layers trained)"

    def _repr_html_(self) -> str:
        return self.report._repr_html_()


def hold(
    module: nn.Module, optimizer: torch.optim.Optimizer, *, masks: Mapping[str, torch.Tensor] | None = None
) -> torch.utils.hooks.RemovableHandle:
    """Keep zeros zero while an optimiser steps: of a module that was compressed, saved and loaded again, too.

    Parameters
    ----------
    module : nn.Module
        The module whose zeros are kept.
    optimizer : torch.optim.Optimizer
        One that steps parameters of `module`.
    masks : mapping of str to bool tensor, optional
        By the parameter's name, where it may be non-zero; by default wherever a weight of two or more axes is non-zero now.

    Returns
    -------
    RemovableHandle
        After ``remove()`` the weights may become non-zero again.
    """
    parameters = dict(module.named_parameters())
    if masks is None:
        masks = {name: p.detach() != 0 for name, p in parameters.items() if p.dim() > 1 and not bool(p.detach().all())}
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    held = [(parameters[name], mask.to(parameters[name].device)) for name, mask in masks.items() if id(parameters[name]) in stepped]
    if not held:
        raise SettingError("optimizer: expected one that steps the module's sparse weights, got one that steps none of them")

    def again(*_: Any) -> None:
        with torch.no_grad():
            for parameter, mask in held:
                parameter.mul_(mask)

    again()
    return optimizer.register_step_post_hook(again)

