"""PyTorch: states of a module, a module made sparse, and implicit models as modules.

``compress`` makes the linear maps of any module sparse, ``hold`` keeps zeros zero while an optimiser steps, ``polish``
fine-tunes them without labels. ``collect`` records every activation of a module, ``network`` turns it into a
:class:`simplicit.Network`, and ``implicit`` runs a model inside PyTorch with exact gradients.
"""

from simplicit.torch._collect import collect
from simplicit.torch._compress import compress
from simplicit.torch._compressed import Compressed, hold
from simplicit.torch._modules import ImplicitModule, LayeredModule, implicit
from simplicit.torch._network import network
from simplicit.torch._polish import Polished, polish

__all__ = [
    "Compressed",
    "ImplicitModule",
    "LayeredModule",
    "Polished",
    "collect",
    "compress",
    "hold",
    "implicit",
    "network",
    "polish",
]
