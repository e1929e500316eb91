"""States that a baseline computed: U, Z, X, Y with the layers they belong to."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from simplicit._arrays import Array, as_array
from simplicit.errors import FileError, ShapeError


class States:
    """Inputs, pre-activations, post-activations and outputs of some samples, one sample a row.

    Parameters
    ----------
    U : array, m × p
        Inputs as the baseline saw them.
    Z, X : array, m × n
        Pre- and post-activations, **last layer first**: column 0 is the first unit of the last hidden layer.
    Y : array, m × q
        Outputs.
    layout : list of dict, optional
        ``{"name", "size", "activation"}`` per layer, last layer first. Without it all states are one block of
        `activation`, and `feedforward` and `baseline` connectivity are refused.
    activation : str, optional
        The activation of states without a layout.
    baseline_nonzeros : int, optional
        Non-zero parameters of the baseline, which sparsity is counted against.

    Examples
    --------
    >>> import numpy as np
    >>> from simplicit import States
    >>> U = np.random.default_rng(0).normal(size=(50, 4))
    >>> Z = U @ np.ones((4, 3))
    >>> States(U, Z, np.maximum(Z, 0), Z[:, :1])
    States(50 samples, 4 inputs, 3 states, 1 outputs)
    """

    def __init__(
        self,
        U: Any,
        Z: Any,
        X: Any,
        Y: Any,
        *,
        layout: Sequence[dict[str, Any]] | None = None,
        activation: str = "relu",
        baseline_nonzeros: int | None = None,
    ) -> None:
        self.U, self.Z, self.X, self.Y = (as_array(a, n) for a, n in ((U, "U"), (Z, "Z"), (X, "X"), (Y, "Y")))
        for name, array in (("Z", self.Z), ("X", self.X), ("Y", self.Y)):
            if array.ndim != 2 or array.shape[0] != self.U.shape[0]:
                raise ShapeError(f"{name}: expected {self.U.shape[0]} samples, one a row, got shape {array.shape}")
        self.layout = None if layout is None else list(layout)
        self.activation = activation
        self.baseline_nonzeros = baseline_nonzeros

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> States:
        """Read an ``.npz`` with U, Z, X, Y, or a safetensors file of ``simplicit collect``.

        Parameters
        ----------
        path : path-like
        """
        name = os.fspath(path)
        if name.endswith(".npz"):
            with np.load(name) as arrays:
                missing = [k for k in "UZXY" if k not in arrays]
                if missing:
                    raise FileError(f"{name}: expected arrays U, Z, X, Y, {missing[0]} is missing")
                return cls(*(arrays[k] for k in "UZXY"))
        return cls._load_safetensors(name)

    @classmethod
    def _load_safetensors(cls, name: str) -> States:
        """Our own reader for float32 and float64, so that the safetensors package is not needed."""
        try:
            with open(name, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if length > 1 << 26:
                    raise ValueError("the header is too long")
                header = json.loads(file.read(length))
            metadata = header.get("__metadata__", {})
            arrays = []
            for key in "UZXY":
                entry = header[key]
                dtype = {"F32": np.float32, "F64": np.float64}[entry["dtype"]]
                start = 8 + length + entry["data_offsets"][0]
                arrays.append(np.memmap(name, dtype, "r", start, tuple(entry["shape"])))
        except (KeyError, ValueError, TypeError) as problem:
            raise FileError(f"{name}: expected safetensors with float arrays U, Z, X, Y: {problem}") from None
        layout = json.loads(metadata["layout"]) if "layout" in metadata else None
        count = metadata.get("baseline_nonzeros")
        return cls(*arrays, layout=layout, baseline_nonzeros=None if count is None else int(count))

    @property
    def samples(self) -> int:
        """Number of samples m."""
        return int(self.U.shape[0])

    def __getitem__(self, rows: slice) -> States:
        """Some samples, not copied."""
        return States(
            self.U[rows],
            self.Z[rows],
            self.X[rows],
            self.Y[rows],
            layout=self.layout,
            activation=self.activation,
            baseline_nonzeros=self.baseline_nonzeros,
        )

    def _for_core(self) -> tuple[Array, Array, Array, Array, str | None, str, int | None]:
        layout = None if self.layout is None else json.dumps(self.layout)
        return (self.U, self.Z, self.X, self.Y, layout, self.activation, self.baseline_nonzeros)

    def __repr__(self) -> str:
        p = int(np.prod(self.U.shape[1:]))
        return f"States({self.samples} samples, {p} inputs, {self.Z.shape[1]} states, {self.Y.shape[1]} outputs)"
