"""Batches of any kind, and the outputs of a module for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from simplicit.errors import SettingError, ShapeError, UnsupportedError

#: Keys of a batch that are labels: never read.
_LABELS = frozenset(("label", "labels", "label_ids"))


def moved(value: Any, device: torch.device) -> Any:
    """Tensors of any nesting on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {k: moved(v, device) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(moved(v, device) for v in value) if not hasattr(value, "_fields") else value
    return value


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor of any nesting, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from tensors(v)
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from tensors(v)


def mixed(batch: Any, samples: int, generator: torch.Generator | None = None) -> Any:
    """A batch in which every sample is a random share of itself plus the rest of another sample of the batch.

    The inputs must be of floating point; labels, and what follows the first item of a tuple, stay as they are.
    """
    shares, ring = torch.rand(samples, generator=generator), torch.randperm(samples, generator=generator)
    # The partner of a sample is its neighbour in a random ring, so no sample is its own.
    order = torch.empty_like(ring)
    order[ring] = ring.roll(1)

    def pairs(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: v if k in _LABELS else pairs(v) for k, v in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        if not value.is_floating_point() or value.dim() == 0 or value.shape[0] != samples:
            got = f"{value.dtype} of shape {list(value.shape)}"
            raise SettingError(f"mix: expected inputs of floating point with {samples} samples, got {got}; leave mix out")
        share = shares.to(value).reshape(-1, *[1] * (value.dim() - 1))
        return share * value + (1 - share) * value[order.to(value.device)]

    if isinstance(batch, (tuple, list)):
        return [pairs(batch[0]), *batch[1:]]
    return pairs(batch)


class Batches:
    """A loader that is iterated repeatedly, and how a module is called with its batches.

    The batches of a loader that can be iterated only once (a generator) are kept; those of any other loader are never
    kept. Batches are a tensor, a tuple that begins with the inputs, or a mapping of keyword arguments.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        module: nn.Module,
        forward: Callable[[nn.Module, Any], Any] | None,
        forward_kwargs: Mapping[str, Any] | None,
        output: Callable[[Any], torch.Tensor] | None,
    ) -> None:
        if iter(loader) is loader:
            warnings.warn(
                "the loader can be gone through only once, so its batches are kept in memory; give a DataLoader or a list to avoid this",
                stacklevel=4,
            )
            loader = list(loader)
        self._loader, self._forward, self._output = loader, forward, output
        self._kwargs = dict(forward_kwargs or {})
        self.device = next((t.device for t in [*module.parameters(), *module.buffers()]), torch.device("cpu"))
        sizes = [self.size(batch) for batch in loader]
        if not sizes:
            raise ShapeError("loader: expected at least one batch, got none")
        self.samples = sum(sizes)

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        for batch in self._loader:
            yield moved(batch, self.device), self.size(batch)

    def size(self, batch: Any) -> int:
        """Samples of a batch."""
        first = next(tensors(batch), None)
        if first is None or first.dim() == 0:
            raise ShapeError(f"loader: expected batches with a tensor whose first axis is samples, got {type(batch).__name__}")
        return int(first.shape[0])

    def run(self, module: nn.Module, batch: Any) -> Any:
        """The value that the module returns for a batch."""
        if self._forward is not None:
            return self._forward(module, batch)
        if isinstance(batch, Mapping):
            given = {k: v for k, v in batch.items() if k not in _LABELS}
            return module(**{**given, **self._kwargs})
        inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
        return module(inputs, **self._kwargs)

    def outputs(self, module: nn.Module, batch: Any) -> Outputs:
        """The module's outputs for a batch."""
        returned = self.run(module, batch)
        if self._output is not None:
            return Outputs(self._output(returned), None, batch)
        return Outputs.of(returned, batch)


class Outputs:
    """One tensor of outputs, whether it is logits, and which of its places count."""

    def __init__(self, values: torch.Tensor, logits: bool | None, batch: Any) -> None:
        if not isinstance(values, torch.Tensor) or not values.is_floating_point():
            raise UnsupportedError(
                f"outputs of type {type(values).__name__} are not supported; say which tensor counts with output=function"
            )
        self.values = values.float()
        several = values.dim() >= 2 and values.shape[self.axis] > 1
        self.logits = several if logits is None else logits and several
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        places = self.values.movedim(self.axis, -1).shape[:-1]
        self.mask = mask.float() if isinstance(mask, torch.Tensor) and mask.shape == places else None

    @classmethod
    def of(cls, returned: Any, batch: Any) -> Outputs:
        """From whatever a module returns: the logits where there are some, else the first tensor."""
        if isinstance(returned, torch.Tensor):
            return cls(returned, None, batch)
        fields = returned if isinstance(returned, Mapping) else {}
        if "logits" in fields:
            return cls(fields["logits"], True, batch)
        first = next(tensors(returned), None)
        if first is None:
            kind = type(returned).__name__
            raise UnsupportedError(f"outputs of type {kind} are not supported; say which tensor counts with output=function")
        return cls(first, False if fields else None, batch)

    @property
    def axis(self) -> int:
        """Where the classes are: the second axis of maps (N × C × H × W), otherwise the last."""
        return 1 if self.values.dim() in (4, 5) else -1

    def weighed(self, each: torch.Tensor) -> torch.Tensor:
        """The sum of one number a place over the places that count."""
        return (each if self.mask is None else each * self.mask).sum()

    def drawn(self, generator: torch.Generator) -> torch.Tensor:
        """A sum over the batch whose gradient is random, with the outputs' Fisher information as its covariance.

        For a softmax, every class y adds ±√p(y) · log p(y), with a random sign: drawing one y instead would hardly ever see the
        others where one is nearly certain, as on images that the module was trained on.
        """
        if not self.logits:
            noise = torch.randn(self.values.shape, generator=generator).to(self.values.device)
            total = (self.values * noise).movedim(self.axis, -1) if self.values.dim() > 1 else self.values * noise
            return self.weighed(total.sum(-1)) if self.values.dim() > 1 else total.sum()
        logarithms = self.values.movedim(self.axis, -1).log_softmax(-1)
        logarithms = logarithms.clamp(min=torch.finfo(logarithms.dtype).min)  # A class that is ruled out has −∞, and adds 0.
        signs = torch.randint(0, 2, logarithms.shape, generator=generator, dtype=torch.int8).to(logarithms.device)
        roots = (logarithms.detach() / 2).exp() * (2 * signs - 1)
        return self.weighed((roots * logarithms).sum(-1))
