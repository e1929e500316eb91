"""The properties that networks and models share: sizes and layers."""

from __future__ import annotations

import json
from typing import Any

from simplicit._core import Model, Network


class Shaped:
    """A function from p inputs through n states to q outputs."""

    _core: Model | Network

    @property
    def n_inputs(self) -> int:
        """p, inputs per sample."""
        return self._core.shape[0]

    @property
    def n_states(self) -> int:
        """n, states per sample."""
        return self._core.shape[1]

    @property
    def n_outputs(self) -> int:
        """q, outputs per sample."""
        return self._core.shape[2]

    @property
    def layout(self) -> list[dict[str, Any]]:
        """Layers, last first: name, size, activation."""
        layers: list[dict[str, Any]] = json.loads(self._core.layout)
        return layers
