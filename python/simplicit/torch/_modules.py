"""Implicit models as modules, with exact gradients."""

from __future__ import annotations

import graphlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from simplicit.errors import NotConvergedError, UnsupportedError
from simplicit.model import ImplicitModel
from simplicit.taps import TapBlock, unroll, window_of
from simplicit.torch import _activations


def implicit(model: ImplicitModel, *, dtype: torch.dtype | None = None) -> ImplicitModule | LayeredModule:
    """A model as a module: raw inputs go in, as for :meth:`ImplicitModel.predict`, and outputs come out.

    Parameters
    ----------
    model : ImplicitModel
    dtype : torch.dtype, optional
        The type of its parameters, float32 by default.

    Returns
    -------
    ImplicitModule or LayeredModule
        The second for convolutions and poolings, whose layers never form a cycle.
    """
    if all(block.is_plain_residual for block in model.taps):
        return ImplicitModule(model, dtype=dtype)
    return LayeredModule(model, dtype=dtype)


class _Outer(nn.Module):
    """The part that both kinds share: biases, and units of inputs and outputs."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, model: ImplicitModel, dtype: torch.dtype | None) -> None:
        super().__init__()
        dtype = dtype or torch.float32
        self.layout = model.layout
        self.b = nn.Parameter(torch.tensor(model.b, dtype=dtype))
        self.d = nn.Parameter(torch.tensor(model.d, dtype=dtype))
        how = model.preprocessing
        self.scale = float(how["scale"])
        for name in ("mean", "std"):
            spread = np.repeat(how[name], model.n_inputs // len(how[name]))
            self.register_buffer(name, torch.tensor(spread, dtype=dtype))
        #: Factor from the model's outputs to the units of the original network.
        self.factor = model.output_factor

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        """Outputs, one sample a row."""
        u = (u.flatten(1).to(self.b.dtype) * self.scale - self.mean) / self.std
        return self.outputs(u) * self.factor

    def outputs(self, u: torch.Tensor) -> torch.Tensor:
        """Outputs in the model's own units."""
        raise NotImplementedError


class ImplicitModule(_Outer):
    """An implicit model as a module: sparse weights as parameters, exact gradients through the equilibrium.

    Non-zeros are parameters, zeros stay zeros: it can be trained on. Plain iteration finds the equilibrium and solves
    the adjoint equation; an acyclic model needs as many steps as it has layers.

    Parameters
    ----------
    model : ImplicitModel
        Without convolutions and poolings.
    dtype : torch.dtype, optional
        float32 by default.
    tolerance : float, optional
        Largest change of a state in the last step, relative to max(1, |x|): 16 roundings of the dtype by default.
    max_iterations : int, optional
    """

    A: nn.Parameter
    B: nn.Parameter
    C: nn.Parameter
    D: nn.Parameter

    def __init__(
        self,
        model: ImplicitModel,
        *,
        dtype: torch.dtype | None = None,
        tolerance: float | None = None,
        max_iterations: int = 20_000,
    ) -> None:
        super().__init__(model, dtype)
        if not all(block.is_plain_residual for block in model.taps):
            raise UnsupportedError("convolutions and poolings are not supported in an ImplicitModule; use to_torch()")
        dtype = self.b.dtype
        self.shape = (model.n_inputs, model.n_states, model.n_outputs)
        self.tolerance = 16 * torch.finfo(dtype).eps if tolerance is None else tolerance
        self.max_iterations = max_iterations
        for letter in "ABCD":
            stored = model._stored(letter)
            # Residual sums are structure: they are entries, but not parameters.
            sums = unroll([block for block in model.taps if block.letter == letter], self.layout, stored.shape)
            for part, matrix in (("", stored), ("fixed_", sums)):
                coo = matrix.tocoo()
                index = np.stack([coo.coords[0], coo.coords[1]]).astype(np.int64)
                self.register_buffer(f"{part}{letter}_index", torch.from_numpy(index))
                values = torch.tensor(coo.data, dtype=dtype)
                if part:
                    self.register_buffer(f"fixed_{letter}", values)
                else:
                    setattr(self, letter, nn.Parameter(values))

    def outputs(self, u: torch.Tensor) -> torch.Tensor:
        """Outputs at the equilibrium."""
        return _Equilibrium.apply(self, u, self.A, self.B, self.C, self.D, self.b, self.d)  # type: ignore[no-any-return]

    def product(self, letter: str, values: torch.Tensor, *, transposed: bool = False) -> Callable[[Any], torch.Tensor]:
        """x ↦ Mx, or Mᵀx."""
        p, n, q = self.shape
        size = {"A": (n, n), "B": (n, p), "C": (q, n), "D": (q, p)}[letter]
        parts = []
        for part, numbers in (("", values), ("fixed_", getattr(self, f"fixed_{letter}"))):
            if not part or numbers.numel():
                index = getattr(self, f"{part}{letter}_index")
                matrix = torch.sparse_coo_tensor(index, numbers, size, is_coalesced=True, check_invariants=False)
                parts.append(matrix.t().coalesce() if transposed else matrix)
        return lambda x: sum((matrix @ x for matrix in parts[1:]), parts[0] @ x)

    def activated(self, z: torch.Tensor, function: Callable[[torch.Tensor, str], torch.Tensor]) -> torch.Tensor:
        """φ or φ′ of n × m pre-activations, layer by layer."""
        parts = torch.split(z, [layer["size"] for layer in self.layout])
        return torch.cat([function(part, la["activation"]) for part, la in zip(parts, self.layout, strict=True)])

    def iterate(self, step: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """x = step(x)."""
        for _ in range(self.max_iterations):
            new = step(x)
            change = (new - x).abs() / new.abs().clamp(min=1)
            x = new
            if not change.numel() or change.max() <= self.tolerance:
                return x
        error = NotConvergedError(f"the equilibrium was not reached in {self.max_iterations} steps; raise max_iterations")
        # Written so that a NaN counts as not converged.
        error.samples = torch.nonzero(~(change.amax(0) <= self.tolerance)).flatten().tolist()
        raise error


class _Equilibrium(torch.autograd.Function):
    """y(u) and its exact derivative: with w = Φ(Aᵀw + Cᵀv), dL/du = Bᵀw + Dᵀv and dL/dA = wxᵀ on the non-zeros."""

    @staticmethod
    def forward(ctx: Any, module: ImplicitModule, u: Any, a: Any, b: Any, c: Any, d: Any, bias: Any, out: Any) -> Any:
        A, B, C, D = (module.product(k, v.detach()) for k, v in zip("ABCD", (a, b, c, d), strict=True))
        ut = u.t().contiguous()
        drive = B(ut) + bias[:, None]
        x = module.iterate(lambda x: module.activated(A(x) + drive, _activations.apply), torch.zeros_like(drive))
        z = A(x) + drive
        ctx.module = module
        ctx.save_for_backward(ut, x, z, a, b, c, d)
        return (C(x) + D(ut)).t() + out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        module: ImplicitModule = ctx.module
        ut, x, z, *values = ctx.saved_tensors
        At, Bt, Ct, Dt = (module.product(k, v, transposed=True) for k, v in zip("ABCD", values, strict=True))
        v = gradient.t().contiguous()
        gates, pull = module.activated(z, _activations.derivative), Ct(v)
        w = module.iterate(lambda w: gates * (At(w) + pull), gates * pull)

        def on(letter: str, left: Any, right: Any) -> Any:
            rows, cols = getattr(module, f"{letter}_index")
            # A chunk at a time, so that memory does not grow to non-zeros × samples.
            chunks = [(left[r] * right[k]).sum(1) for r, k in zip(rows.split(4096), cols.split(4096), strict=True)]
            return torch.cat(chunks) if chunks else left.new_zeros(0)

        du = (Bt(w) + Dt(v)).t()
        return (None, du, on("A", w, x), on("B", w, ut), on("C", v, x), on("D", v, ut), w.sum(1), v.sum(1))


class LayeredModule(_Outer):
    """A model with convolutions as a module: layer by layer, the gradient by autograd.

    Non-zeros are parameters, zeros stay zeros: it can be trained on. Its layers form no cycle, so the equilibrium is one
    pass over them and autograd's gradient through that pass is its exact gradient.

    Parameters
    ----------
    model : ImplicitModel
        A model whose layers form no cycle.
    dtype : torch.dtype, optional
        float32 by default.
    """

    def __init__(self, model: ImplicitModel, *, dtype: torch.dtype | None = None) -> None:
        super().__init__(model, dtype)
        self.blocks = nn.ModuleList(_Summand(block, self.b.dtype) for block in _summands(model))
        reads: dict[int, set[int]] = {k: set() for k in range(len(self.layout))}
        for block in self.summands:
            if block.target is not None and block.source is not None:
                reads[block.target].add(block.source)
        try:
            self.order = list(graphlib.TopologicalSorter(reads).static_order())
        except graphlib.CycleError:
            raise UnsupportedError("layers that read each other are not supported in a LayeredModule; use to_torch()") from None
        self.channels = [la["map"]["channels"] if la.get("map") else la["size"] for la in self.layout]

    @property
    def summands(self) -> list[_Summand]:
        """The summands of all layers and of the output."""
        return [block for block in self.blocks if isinstance(block, _Summand)]

    def outputs(self, u: torch.Tensor) -> torch.Tensor:
        """Outputs, computed layer by layer."""
        values: dict[int | None, torch.Tensor] = {None: u}
        biases = torch.split(self.b, self.channels)
        for k in self.order:
            spread = biases[k].repeat_interleave(self.layout[k]["size"] // self.channels[k])
            z = self._sum(k, values, spread.expand(len(u), -1))
            values[k] = _activations.apply(z, self.layout[k]["activation"])
        return self._sum(None, values, self.d.expand(len(u), -1))

    def _sum(self, target: int | None, values: dict[int | None, torch.Tensor], start: torch.Tensor) -> torch.Tensor:
        for block in self.summands:
            if block.target == target:
                start = start + block(values[block.source])
        return start


class _Summand(nn.Module):
    """One tap block: poolings, then a convolution with sparse weights or a residual sum."""

    index: torch.Tensor
    factors: torch.Tensor

    def __init__(self, block: TapBlock, dtype: torch.dtype) -> None:
        super().__init__()
        self.target, self.source, self.poolings = block.target, block.source, block.maps
        self.stride, self.padding, self.input = block.stride, block.padding, block.input
        self.residual = block.taps is None
        if block.taps is None:
            factors = np.ones(block.output[0]) if block.factors is None else block.factors
            # Residual sums are structure, not parameters.
            self.register_buffer("factors", torch.tensor(factors, dtype=dtype)[:, None, None])
            return
        self.kernel = (block.output[0], block.input[0], *block.kernel)
        coo = block.taps.tocoo()
        flat = coo.coords[0].astype(np.int64) * block.taps.shape[1] + coo.coords[1]
        self.register_buffer("index", torch.from_numpy(flat))
        self.weights = nn.Parameter(torch.tensor(coo.data, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What it adds, one sample a row."""
        for pooling in self.poolings:
            x = _pool(x, pooling)
        x = x.reshape(len(x), *self.input)
        if self.residual:
            return (self.factors * x).flatten(1)
        size = int(np.prod(self.kernel))
        kernel = self.weights.new_zeros(size).index_put((self.index,), self.weights).view(self.kernel)
        return F.conv2d(_padded(x, self.padding), kernel, stride=self.stride).flatten(1)


def _padded(x: torch.Tensor, padding: tuple[int, ...], value: float = 0.0) -> torch.Tensor:
    top, left, bottom, right = padding
    return F.pad(x, (left, right, top, bottom), value=value) if any(padding) else x


def _pool(x: torch.Tensor, pooling: dict[str, Any]) -> torch.Tensor:
    ((kind, about),) = pooling.items()
    kernel, stride, padding, counted = window_of(pooling)
    x = x.reshape(len(x), *(about["input"][k] for k in ("channels", "height", "width")))
    if kind == "max_pool":
        return F.max_pool2d(_padded(x, padding, -torch.inf), tuple(kernel), tuple(stride))
    mean = F.avg_pool2d(_padded(x, padding), tuple(kernel), tuple(stride))
    if counted or not any(padding):
        return mean
    # The mean over the values that are not padding.
    return mean / F.avg_pool2d(_padded(torch.ones_like(x[:1]), padding), tuple(kernel), tuple(stride))


def _summands(model: ImplicitModel) -> Iterator[TapBlock]:
    """All of A, B, C, D as tap blocks: plain entries by layer, their units being channels of one position."""
    at = np.cumsum([0, *(layer["size"] for layer in model.layout)])
    layers: list[tuple[int | None, slice]] = [(k, slice(at[k], at[k + 1])) for k in range(len(model.layout))]
    whole: list[tuple[int | None, slice]] = [(None, slice(None))]
    for letter, targets, sources in (("A", layers, layers), ("B", layers, whole), ("C", whole, layers), ("D", whole, whole)):
        matrix = model._stored(letter)
        for target, rows in targets if matrix.nnz else ():
            of_target = matrix[rows]
            for source, columns in sources if of_target.nnz else ():
                part = of_target[:, columns]
                if part.nnz:
                    units = ((part.shape[1], 1, 1), (part.shape[0], 1, 1))
                    yield TapBlock(letter, target, source, [], (1, 1), (1, 1), (0, 0, 0, 0), *units, part, None)
    yield from model.taps
