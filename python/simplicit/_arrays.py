"""What the native side takes: float32, float64 and uint8 as they are, any stride; other types become float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def as_array(values: Any, name: str) -> Array:
    """An array with samples first; copied only if its type is none of the three."""
    array = np.asarray(values)
    if array.dtype.kind not in "fiub":
        from simplicit.errors import ShapeError

        raise ShapeError(f"{name}: expected numbers, got {array.dtype}")
    if array.dtype not in (np.float32, np.float64, np.uint8) or not array.dtype.isnative:
        array = array.astype(np.float64)
    return array


def content_hash(*arrays: Array) -> str:
    """SHA-256 of type, shape and numbers: what a model's provenance says about its data."""
    import hashlib

    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
