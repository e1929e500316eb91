"""Tap blocks: the parts of A, B, C, D whose weights are shared over positions, and the matrices that they are when unrolled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse

from simplicit._arrays import Array
from simplicit._core import Model
from simplicit.errors import UnsupportedError


@dataclass(frozen=True)
class TapBlock:
    """One summand of a layer's pre-activations, or of the output; see docs/format.md.

    Attributes
    ----------
    letter : str
        A, B, C or D.
    target, source : int or None
        Layer of the layout; None is the output, or the input.
    maps : list
        Poolings between the source and the weights.
    kernel, stride, padding : tuple of int
        Height and width; top, left, bottom, right.
    input, output : tuple of int
        Channels, height, width of what the window reads and gives.
    taps : scipy.sparse.csr_array or None
        One row per output channel, column (c·kh + dy)·kw + dx; None for a residual sum.
    factors : array or None
        Of a residual sum, one per channel; None is one.
    """

    letter: str
    target: int | None
    source: int | None
    maps: list[dict[str, Any]]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    input: tuple[int, int, int]
    output: tuple[int, int, int]
    taps: scipy.sparse.csr_array | None
    factors: Array | None

    @property
    def is_plain_residual(self) -> bool:
        """Whether units are added to units as they are, without weights or pooling."""
        return self.taps is None and not self.maps

    def most_nonzeros(self) -> int:
        """An upper bound on the non-zeros of the unrolled block: taps on padding do not count."""
        most = self.output[1] * self.output[2] * (self.output[0] if self.taps is None else int(self.taps.nnz))
        for pooling in self.maps:
            kernel = window_of(pooling)[0]
            most *= kernel[0] * kernel[1]
        return most

    def unrolled(self) -> scipy.sparse.csr_array:
        """The block as a matrix, units of the target × units of the source."""
        if self.taps is None:
            factors = np.ones(self.output[0]) if self.factors is None else self.factors
            block = scipy.sparse.diags_array(np.repeat(factors, self.output[1] * self.output[2])).tocsr()
        else:
            block = _slide(self.taps.tocoo(), self.kernel, self.stride, self.padding, self.input, self.output)
        for pooling in reversed(self.maps):
            block = block @ _pooling(pooling)
        return scipy.sparse.csr_array(block, dtype=np.float32)


def _slide(taps: Any, kernel: Any, stride: Any, padding: Any, size_in: Any, size_out: Any) -> Any:
    """A convolution's matrix; taps on padding have no entry."""
    (_, h, w), (_, ho, wo), (kh, kw) = size_in, size_out, kernel
    channel, tap = taps.coords
    c, dy, dx = tap // (kh * kw), tap // kw % kh, tap % kw
    oy, ox = np.divmod(np.arange(ho * wo), wo)
    iy = oy[None, :] * stride[0] + dy[:, None] - padding[0]
    ix = ox[None, :] * stride[1] + dx[:, None] - padding[1]
    inside = (iy >= 0) & (iy < h) & (ix >= 0) & (ix < w)
    rows = channel[:, None] * (ho * wo) + np.arange(ho * wo)[None, :]
    cols = (c[:, None] * h + iy) * w + ix
    values = np.broadcast_to(taps.data[:, None], inside.shape)
    shape = (int(np.prod(size_out)), int(np.prod(size_in)))
    return scipy.sparse.csr_array((values[inside], (rows[inside], cols[inside])), shape=shape)


def window_of(pooling: dict[str, Any]) -> tuple[Any, Any, Any, bool]:
    """Kernel, stride, padding of a pooling, and whether padding counts."""
    ((kind, about),) = pooling.items()
    if kind == "global_average":
        return (about["input"]["height"], about["input"]["width"]), (1, 1), (0, 0, 0, 0), True
    window = about["window"]
    return window["kernel"], window["stride"], window["padding"], about.get("count_padding", False)


def _pooling(pooling: dict[str, Any]) -> Any:
    """A pooling's matrix."""
    ((kind, about),) = pooling.items()
    if kind == "max_pool":
        raise UnsupportedError("unrolling a max pool is not supported: it is not linear")
    channels, h, w = size = tuple(about["input"][k] for k in ("channels", "height", "width"))
    kernel, stride, padding, counted = window_of(pooling)
    ho = (h + padding[0] + padding[2] - kernel[0]) // stride[0] + 1
    wo = (w + padding[1] + padding[3] - kernel[1]) // stride[1] + 1
    area = kernel[0] * kernel[1]
    # One tap of weight one at every place of a channel's own window.
    rows, cols = np.repeat(np.arange(channels), area), np.arange(channels * area)
    ones = scipy.sparse.coo_array((np.ones(channels * area), (rows, cols)), shape=(channels, channels * area))
    matrix = _slide(ones, kernel, stride, padding, size, (channels, ho, wo))
    counts = np.full(matrix.shape[0], float(area)) if counted else np.asarray(matrix.sum(axis=1)).ravel()
    return scipy.sparse.diags_array(1.0 / np.maximum(counts, 1.0)) @ matrix


def unroll(blocks: Sequence[TapBlock], layout: Sequence[dict[str, Any]], shape: tuple[int, int]) -> scipy.sparse.csr_array:
    """The sum of blocks of one letter, every shared weight at every position it acts on."""
    starts = np.concatenate([[0], np.cumsum([layer["size"] for layer in layout])]).astype(np.int64)
    data, rows, cols = [np.zeros(0, np.float32)], [starts[:0]], [starts[:0]]
    for block in blocks:
        part = block.unrolled().tocoo()
        data.append(part.data)
        rows.append(part.coords[0] + (0 if block.target is None else starts[block.target]))
        cols.append(part.coords[1] + (0 if block.source is None else starts[block.source]))
    places = (np.concatenate(rows), np.concatenate(cols))
    return scipy.sparse.csr_array((np.concatenate(data), places), shape=shape)


def of_core(core: Model) -> list[TapBlock]:
    """The tap blocks of a model, over its own memory; only row pointers are copied."""
    return [TapBlock(**{**block, "maps": json.loads(block["maps"]), "taps": _shared(block)}) for block in core.taps()]


def _shared(block: dict[str, Any]) -> scipy.sparse.csr_array | None:
    if block["taps"] is None:
        return None
    columns = block["input"][0] * block["kernel"][0] * block["kernel"][1]
    indptr, indices, data = block["taps"]
    return lent_csr(indptr, indices, data, (block["output"][0], columns))


def lent_csr(indptr: Array, indices: Array, data: Array, shape: tuple[int, int]) -> scipy.sparse.csr_array:
    """Native rows as SciPy's. Columns are below 2³¹, so they have the same bits as int32. Only the row pointers are converted."""
    return scipy.sparse.csr_array((data, indices.view(np.int32), indptr.astype(np.int32)), shape=shape, copy=False)
