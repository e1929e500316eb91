"""Tap blocks: the parts of A, B, C, D whose weights are shared over positions, and what they are when unrolled."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse

from simplicit._arrays import Array
from simplicit.errors import UnsupportedError

_TYPES = {"F32": "<f4", "U8": "<u1", "U16": "<u2", "U32": "<u4", "I32": "<i4", "I64": "<i8"}


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
    factors : array
        Of a residual sum, one per channel.
    """

    letter: str
    target: int | None
    source: int | None
    maps: list[dict[str, Any]]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    input: tuple[int, int, int]
    output: tuple[int, int, int]
    taps: scipy.sparse.csr_array | None
    factors: Array

    def multiply_adds(self) -> int:
        """An upper bound on the non-zeros of the unrolled block."""
        positions = self.output[1] * self.output[2]
        return positions * (self.output[0] if self.taps is None else int(self.taps.nnz))

    def unrolled(self) -> scipy.sparse.csr_array:
        """The block as a matrix, units of the target × units of the source."""
        if self.taps is None:
            block = scipy.sparse.diags_array(np.repeat(self.factors, self.output[1] * self.output[2])).tocsr()
        else:
            block = _slide(self.taps.tocoo(), self.kernel, self.stride, self.padding, self.input, self.output)
        for pooling in reversed(self.maps):
            block = block @ _pooling(pooling)
        return scipy.sparse.csr_array(block, dtype=np.float32)


def _slide(taps: Any, kernel: Any, stride: Any, padding: Any, size_in: Any, size_out: Any) -> Any:
    """A convolution's matrix; taps on padding are not there."""
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


def _pooling(pooling: dict[str, Any]) -> Any:
    ((kind, about),) = pooling.items()
    size = tuple(about["input"][k] for k in ("channels", "height", "width"))
    channels, h, w = size
    if kind == "global_average":
        kernel, stride, padding, counted = (h, w), (1, 1), (0, 0, 0, 0), True
    elif kind == "average_pool":
        window = about["window"]
        kernel, stride, padding, counted = window["kernel"], window["stride"], window["padding"], about["count_padding"]
    else:
        raise UnsupportedError(f"unrolling a {kind.replace('_', ' ')} is not supported: it is not linear")
    ho = (h + padding[0] + padding[2] - kernel[0]) // stride[0] + 1
    wo = (w + padding[1] + padding[3] - kernel[1]) // stride[1] + 1
    area = kernel[0] * kernel[1]
    # One tap of weight one at every place of a channel's own window.
    rows, cols = np.repeat(np.arange(channels), area), np.arange(channels * area)
    ones = scipy.sparse.coo_array((np.ones(channels * area), (rows, cols)), shape=(channels, channels * area))
    matrix = _slide(ones, kernel, stride, padding, size, (channels, ho, wo))
    counts = np.full(matrix.shape[0], float(area)) if counted else np.asarray(matrix.sum(axis=1)).ravel()
    return scipy.sparse.diags_array(1.0 / np.maximum(counts, 1.0)) @ matrix


def read(data: bytes) -> list[TapBlock]:
    """The tap blocks of a model file's bytes; none in a model without maps."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    entries = json.loads(header["__metadata__"].get("taps", "[]"))

    def tensor(name: str) -> Array:
        entry = header[name]
        first, last = (8 + length + offset for offset in entry["data_offsets"])
        return np.frombuffer(data[first:last], _TYPES[entry["dtype"]])

    def place(value: Any) -> int | None:
        return int(value["layer"]) if isinstance(value, dict) else None

    blocks = []
    for k, entry in enumerate(entries):
        size_in, size_out = (tuple(entry[s][a] for a in ("channels", "height", "width")) for s in ("input", "output"))
        taps, factors = None, np.ones(size_out[0], np.float32)
        if entry["weights"] == "taps":
            parts = tuple(tensor(f"taps.{k}.{part}") for part in ("data", "indices", "indptr"))
            shape = (size_out[0], size_in[0] * entry["kernel"][0] * entry["kernel"][1])
            taps = scipy.sparse.csr_array((parts[0], parts[1].astype(np.int32), parts[2].astype(np.int32)), shape=shape)
        elif entry["weights"] == "diagonal":
            factors = tensor(f"taps.{k}.data")
        blocks.append(
            TapBlock(
                entry["letter"],
                place(entry["target"]),
                place(entry["source"]),
                entry["maps"],
                tuple(entry["kernel"]),
                tuple(entry["stride"]),
                tuple(entry["padding"]),
                size_in,
                size_out,
                taps,
                factors,
            )
        )
    return blocks
