"""Arrays for the native side: float32, float64 and uint8 as they are, any stride; other types become float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from simplicit import _core
from simplicit._cuda import find_cuda

Array = NDArray[Any]


#: CUDA's number among the devices of DLPack.
_CUDA = 2


def on_gpu(values: Any) -> bool:
    """Whether it is a tensor on an NVIDIA GPU."""
    device = getattr(values, "__dlpack_device__", None)
    return device is not None and device()[0] == _CUDA


def as_array(values: Any, name: str) -> Array:
    """An array with samples first; copied only if its type is none of these three, or if it is on a GPU."""
    if on_gpu(values):
        find_cuda()
        values = _core.read_tensor(values, 0, len(values)).reshape(tuple(values.shape))
    array = np.asarray(values)
    if array.dtype.kind not in "fiub":
        from simplicit.errors import ShapeError

        raise ShapeError(f"{name}: expected numbers, got {array.dtype}")
    if array.dtype not in (np.float32, np.float64, np.uint8) or not array.dtype.isnative:
        array = array.astype(np.float64)
    return array


def content_hash(*arrays: Any) -> str:
    """SHA-256 of type, shape and numbers: how a model's provenance identifies its data.

    A tensor on a GPU has the hash of the same array; it passes through the host in parts and is not kept there.
    """
    import hashlib

    digest = hashlib.sha256()
    for array in arrays:
        if on_gpu(array):
            find_cuda()
            digest.update(f"{np.dtype(np.float32).str}{tuple(array.shape)}".encode())
            for first in range(0, len(array), 1024):
                digest.update(_core.read_tensor(array, first, min(first + 1024, len(array))).data)
            continue
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
