"""Follows the output of a linear map while it stays the same numbers: through a batch norm, dropout in evaluation mode,
another shape, up to the sum that it is added to.

A sum's constants are one number, whichever of its terms has it; and what the other term of a sum has lost to sparsity, a
linear map can give back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from simplicit.torch._calls import Key

_SUMS = frozenset(("add", "add_", "__add__", "__radd__", "__iadd__"))


@dataclass
class Chain:
    """A tensor that is some blocks' output, up to scale, offset and shape."""

    tensor: Any
    keys: frozenset[Key]
    #: The batch norm in between.
    norm: str | None = None
    #: From the tensor's shape to that of the block's output, last step first.
    back: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()
    #: The functions that have read it so far, and those that have read the tensors before it.
    reads: list[Any] = field(default_factory=list)
    before: Chain | None = None
    is_sum: bool = False

    def undone(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of this shape in the shape of the block's output."""
        for step in self.back:
            tensor = step(tensor)
        return tensor

    def read_once(self) -> bool:
        """Whether nothing but the next tensor of the chain reads any of it."""
        return len(self.reads) <= 1 and (self.before is None or self.before.read_once())


class Chains:
    """The chains of one forward pass. `norms` are batch norms by the identity of their running mean."""

    def __init__(self, norms: dict[int, str]) -> None:
        self.norms = norms
        self.norm_uses: dict[str, int] = {}
        self._chains: dict[int, Chain] = {}

    def start(self, key: Key, out: torch.Tensor) -> None:
        """A block gave `out`."""
        self._chains[id(out)] = Chain(weakref.ref(out), frozenset((key,)))

    def of(self, value: Any) -> Chain | None:
        """The chain that a tensor is the end of."""
        chain = self._chains.get(id(value))
        return chain if chain is not None and chain.tensor() is value else None

    def read(self, values: Any, func: Any) -> None:
        """A function reads these values."""
        for value in values:
            if isinstance(value, torch.Tensor):
                chain = self.of(value)
                if chain is not None:
                    chain.reads.append(func)
            elif isinstance(value, (tuple, list)):
                self.read(value, func)

    def terms(self, func: Any, args: Any, kwargs: Any) -> list[tuple[Chain | None, Chain | None, Any, Any]]:
        """The two terms of a sum, if it is one: their chains and values."""
        if getattr(func, "__name__", "") not in _SUMS or len(args) != 2 or kwargs.get("alpha", 1) != 1:
            return []
        a, b = args
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)) or a.shape != b.shape:
            return []
        return [(self.of(a), self.of(b), a, b)]

    def after(self, func: Any, args: Any, kwargs: Any, out: Any, sums: Any) -> tuple[Chain, str] | None:
        """Continues the chains that a function read; returns a block and its batch norm if the function was one."""
        paired = None
        name = getattr(func, "__name__", "")
        chain = self.of(args[0]) if args else None
        if func is F.batch_norm:
            given = dict(zip(("input", "running_mean"), args, strict=False), **kwargs)
            norm = self.norms.get(id(given["running_mean"]))
            chain = self.of(given["input"])
            if norm is not None:
                self.norm_uses[norm] = self.norm_uses.get(norm, 0) + 1
                if chain is not None and chain.norm is None and not chain.is_sum:
                    paired = (chain, norm)
                    self._go_on(chain, out, norm=norm)
        elif chain is not None and name in ("dropout", "contiguous"):
            self._go_on(chain, out)
        elif chain is not None and name in ("view", "reshape", "flatten", "unflatten") and out.numel() == args[0].numel():
            shape = args[0].shape
            self._go_on(chain, out, back=lambda t: t.reshape(shape))
        elif chain is not None and name == "transpose" and len(args) == 3:
            _, i, j = args
            self._go_on(chain, out, back=lambda t: t.transpose(i, j))
        for one, other, _, _ in sums:
            keys = frozenset().union(*(c.keys for c in (one, other) if c is not None))
            if keys:
                joined = Chain(weakref.ref(out), keys, is_sum=True)
                both = [c for c in (one, other) if c is not None]
                # A sum is read once only if its terms are.
                several = [] if all(c.read_once() for c in both) else [func, func]
                joined.before = both[0] if len(both) == 1 else Chain(None, keys, reads=several)
                self._chains[id(out)] = joined
        return paired

    def _go_on(self, chain: Chain, out: Any, norm: str | None = None, back: Any = None) -> None:
        steps = chain.back if back is None else (back, *chain.back)
        if out is not chain.tensor():
            self._chains[id(out)] = Chain(weakref.ref(out), chain.keys, norm or chain.norm, steps, before=chain, is_sum=chain.is_sum)
