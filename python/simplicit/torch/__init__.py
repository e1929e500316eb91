"""PyTorch: states of a module, a module made sparse, and implicit models as modules.

``collect`` records every activation of a module, ``network`` turns it into a :class:`simplicit.Network`, ``compress``
trains a sparse model from it, and ``implicit`` runs a model inside PyTorch with exact gradients.
"""

from simplicit.torch._collect import collect
from simplicit.torch._compress import compress
from simplicit.torch._modules import ImplicitModule, LayeredModule, implicit
from simplicit.torch._network import network

__all__ = ["ImplicitModule", "LayeredModule", "collect", "compress", "implicit", "network"]
