"""Baselines: trained networks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from simplicit import _core
from simplicit._arrays import Array, as_array
from simplicit._core import Network as CoreNetwork
from simplicit._shaped import Shaped
from simplicit.errors import ShapeError


class Network(Shaped):
    """A trained network: from ONNX, from weights, or from PyTorch (:func:`simplicit.torch.network`).

    Examples
    --------
    >>> import numpy as np
    >>> from simplicit import Network
    >>> network = Network.from_layers([np.eye(3), np.ones((2, 3))])
    >>> network
    Network(3 inputs, 3 states, 2 outputs)
    >>> network.forward(np.array([[1.0, -2.0, 3.0]]))
    array([[4., 4.]], dtype=float32)
    """

    _core: CoreNetwork

    def __init__(self, core: CoreNetwork, recipe: tuple[str, Any]) -> None:
        self._core = core
        #: How to build it again on another machine.
        self._recipe = recipe

    @classmethod
    def from_onnx(
        cls,
        path: str | os.PathLike[str],
        input: str | None = None,
        output: str | None = None,
        input_shape: Sequence[int] | None = None,
        fill: Mapping[str, float] | None = None,
    ) -> Network:
        """Read an ONNX file.

        Parameters
        ----------
        path : path-like
            Linear, convolution, sum, activation and pooling nodes; batch norm is folded.
        input, output : str, optional
            Which of several inputs and outputs, by name.
        input_shape : sequence of int, optional
            The sizes of one sample, such as ``(3, 224, 224)``, where the file leaves them open.
        fill : mapping of str to float, optional
            Numbers that fill the other inputs, by name, such as ``{"mask": 1}``.
        """
        sizes = None if input_shape is None else [int(size) for size in input_shape]
        filled = None if fill is None else [(name, float(value)) for name, value in fill.items()]
        core = CoreNetwork.from_onnx(os.fspath(path), input, output, sizes, filled)
        with open(path, "rb") as file:
            return cls(core, ("onnx", (file.read(), input, output, sizes, filled)))

    @classmethod
    def from_layers(
        cls,
        weights: Sequence[Any],
        biases: Sequence[Any] | None = None,
        activation: str = "relu",
    ) -> Network:
        """A layered network from its matrices (outputs × inputs), first layer first; none acts after the last.

        Parameters
        ----------
        weights : sequence of arrays
            One matrix per layer.
        biases : sequence of arrays or None, optional
            One vector per layer, None where there is none.
        activation : str, optional
            relu, leaky-relu:0.1, tanh, sigmoid or identity, between the layers.
        """
        matrices = [as_array(w, "weights") for w in weights]
        if not matrices or any(w.ndim != 2 for w in matrices):
            raise ShapeError("weights: expected at least one matrix, outputs × inputs")
        vectors = [None] * len(matrices) if biases is None else list(biases)
        if len(vectors) != len(matrices):
            raise ShapeError(f"biases: expected {len(matrices)}, one per layer, got {len(vectors)}")
        builder = Builder([matrices[0].shape[1]])
        at = 0
        for k, (w, b) in enumerate(zip(matrices, vectors, strict=True)):
            at = builder.linear(at, w, None if b is None else np.asarray(b, np.float32).tolist())
            if k + 1 < len(matrices):
                at = builder.activation(at, activation, f"layer{k + 1}")
        return builder.build(at)

    @property
    def nonzeros(self) -> int:
        """Non-zero weights and biases, batch norm folded."""
        return self._core.nonzeros

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds on one sample."""
        return self._core.multiply_adds

    def forward(self, U: Any, *, threads: int | None = None) -> Array:
        """Outputs, one sample a row. Inputs as the network expects them: nothing is preprocessed here.

        Parameters
        ----------
        U : array, m × p or m × C × H × W
        threads : int, optional
            All by default; the result does not depend on it.
        """
        return self._core.forward(as_array(U, "U"), threads=threads)

    def states(self, U: Any) -> Any:
        """The states on some inputs.

        Parameters
        ----------
        U : array, m × p or m × C × H × W

        Returns
        -------
        States
        """
        from simplicit.states import States

        u, z, x, y = self._core.states(as_array(U, "U"))
        return States(u, z, x, y, layout=self.layout, baseline_nonzeros=self.nonzeros)

    def to_implicit(self) -> Any:
        """The equivalent implicit model, not trained.

        Returns
        -------
        ImplicitModel
        """
        from simplicit.model import ImplicitModel

        return ImplicitModel(self._core.implicit())

    def __reduce__(self) -> Any:
        return (_again, self._recipe)

    def __repr__(self) -> str:
        return f"Network({self.n_inputs} inputs, {self.n_states} states, {self.n_outputs} outputs)"


class Builder:
    """Builds a network node by node and records the steps, so that networks can be sent to other machines."""

    def __init__(self, shape: Sequence[int]) -> None:
        self._shape = list(shape)
        self._core = _core.Builder(self._shape)
        self._calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._core, name)

        def call(*args: Any) -> int:
            node: int = method(*args)
            self._calls.append((name, args))
            return node

        return call

    def build(self, at: int) -> Network:
        """The network whose output is node `at`."""
        return Network(self._core.build(at), ("calls", (self._shape, self._calls, at)))


def _again(kind: str, recipe: Any) -> Network:
    if kind == "onnx":
        return Network(CoreNetwork.from_onnx_bytes(*recipe), (kind, recipe))
    shape, calls, at = recipe
    builder = Builder(shape)
    for name, args in calls:
        getattr(builder, name)(*args)
    return builder.build(at)
