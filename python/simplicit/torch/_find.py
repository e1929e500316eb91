"""The linear blocks of a module: found while it runs one batch, in the order they run."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from simplicit.errors import SettingError, UnsupportedError
from simplicit.torch._batches import Batches
from simplicit.torch._calls import Call, Calls, Key, Known, no_fast_path
from simplicit.torch._chains import Chain, Chains

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


@dataclass
class Block:
    """A weight that linear maps use, where its constant goes, and what it costs."""

    key: Key
    name: str
    kind: str
    groups: int
    rows: int
    features: int
    #: Number of lines that a sample gives, over all uses.
    positions: int = 0
    uses: int = 0
    bias: Key | None = None
    #: The batch norm that alone reads the block, by name.
    norm: str | None = None
    #: Whether it is added to something, and nothing else reads it.
    added: bool = False
    #: Why it is not trained.
    kept: str | None = None
    stage: int = 0
    biases: set[Key | None] = field(default_factory=set)

    def matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """Rows × features of a group, from the parameter."""
        if self.kind == "transposed":
            return weight.detach().t()
        return weight.detach()[self.key.start : self.key.stop].reshape(self.rows, -1)


@dataclass
class Found:
    """The linear blocks and norms that one pass over a module found."""

    blocks: list[Block]
    known: Known
    #: Batch norms that no block takes in, by name.
    norms: list[str]
    #: Blocks whose constants add up to one, each set once.
    sums: list[frozenset[Key]]
    #: By the identity of the running mean.
    norm_names: dict[int, str]


def check(module: nn.Module) -> None:
    """Refuses weights that are not parameters, because new weights could not be written where the module reads them."""
    for name, child in module.named_modules():
        at = name or type(child).__name__
        place = type(child).__module__
        if isinstance(child, torch.jit.ScriptModule):
            raise UnsupportedError(f"{at} is a ScriptModule, which is not supported; give the module it was made from")
        if "quantized" in place and place.startswith("torch"):
            raise UnsupportedError(f"{at} is quantised ({type(child).__name__}), which is not supported; compress before quantising")
        if parametrize.is_parametrized(child):
            raise UnsupportedError(
                f"{at} has parametrised weights, which are not supported; call torch.nn.utils.parametrize.remove_parametrizations first"
            )
        if hasattr(child, "weight_orig") or hasattr(child, "in_proj_weight_orig"):
            raise UnsupportedError(f"{at} is pruned by torch.nn.utils.prune, which is not supported; call prune.remove(module, name) first")
        linear = isinstance(child, (nn.Linear, nn.Conv1d, nn.Conv2d))
        if linear and not isinstance(child.weight, nn.Parameter):
            raise UnsupportedError(f"{at} computes its weight (weight_norm or alike), which is not supported; remove that first")
        if linear and isinstance(child.weight, nn.UninitializedParameter):
            raise UnsupportedError(f"{at} is lazy and has no weight yet; run the module once first")


class _Finder:
    def __init__(self, module: nn.Module, batches: Batches) -> None:
        self.module, self.batches, self.known = module, batches, Known(module)
        self.blocks: dict[Key, Block] = {}
        self.others: dict[str, str] = {}
        norms = {id(m.running_mean): n for n, m in module.named_modules() if isinstance(m, _NORMS) and m.running_mean is not None}
        self.chains = Chains(norms)
        self.pairs: list[tuple[Chain, str]] = []
        self.sums: list[tuple[Chain | None, Chain | None]] = []
        self.samples = 0

    def run(self) -> None:
        batch, self.samples = next(iter(self.batches))
        with torch.no_grad(), no_fast_path(), Calls(self.known, self.see, self.note):
            self.batches.run(self.module, batch)

    def see(self, call: Call, out: torch.Tensor) -> torch.Tensor:
        self.chains.read((call.input,), F.linear)
        block = self.blocks.get(call.key)
        if block is None:
            weight = self.known.parameters[call.key.parameter]
            rows = call.key.stop - call.key.start
            features = weight.shape[0] if call.kind == "transposed" else weight[0].numel()
            block = Block(call.key, "", call.kind, call.groups, rows, features)
            self.blocks[call.key] = block
        elif (block.kind, block.groups) != (call.kind, call.groups):
            self.others.setdefault(call.key.parameter, "it is used in different ways")
        block.uses += 1
        block.positions += max(1, call.lines(out) // max(1, self.samples))
        block.biases.add(None if call.bias is None else self.known.part(call.bias))
        self.chains.start(call.key, out)
        return out

    def note(self, func: Any, args: Any, kwargs: Any) -> Callable[[Any], None]:
        values = (*args, *kwargs.values())
        sums = self.chains.terms(func, args, kwargs)
        self.chains.read(values, func)
        self.sums += [(one, other) for one, other, _, _ in sums]
        for value in values:
            name = self.known.name(value) if isinstance(value, torch.Tensor) else None
            if name is not None:
                self.others.setdefault(name, f"{getattr(func, '__name__', func)} reads it too")

        def after(out: Any) -> None:
            paired = self.chains.after(func, args, kwargs, out, sums)
            if paired is not None:
                self.pairs.append(paired)

        return after

    def finish(self) -> Found:
        blocks = list(self.blocks.values())
        taken: dict[Key, int] = {}
        for block in blocks:
            for bias in block.biases:
                if bias is not None:
                    taken[bias] = taken.get(bias, 0) + 1
        for block in blocks:
            block.name = self._name(block)
            block.kept = self.others.get(block.key.parameter)
            if block.kept is None and any(
                b is not block and b.key.parameter == block.key.parameter and b.key.start < block.key.stop and block.key.start < b.key.stop
                for b in blocks
            ):
                block.kept = "parts of it that overlap are used on their own"
            if len(block.biases) == 1:
                (bias,) = block.biases
                if bias is not None and taken[bias] == 1 and bias.parameter not in self.others:
                    block.bias = bias
        for chain, norm in self.pairs:
            # A second reader would not get the constant that is folded into the norm.
            (key,) = chain.keys
            if chain.read_once() and self.blocks[key].uses == 1 and self.chains.norm_uses[norm] == 1:
                self.blocks[key].norm = norm
        together: list[frozenset[Key]] = []
        for pair in self.sums:
            once = [c for c in pair if c is not None and c.read_once()]
            for chain in once:
                if len(chain.keys) == 1 and not chain.is_sum:
                    (key,) = chain.keys
                    block = self.blocks[key]
                    block.added = block.uses == 1 and chain.norm == block.norm
            if len(once) == 2:
                keys = once[0].keys | once[1].keys
                together = [k for k in together if not k & keys] + [keys.union(*(k for k in together if k & keys))]
        inside = {block.norm for block in blocks}
        norms = self.chains.norms
        return Found(blocks, self.known, [n for n in norms.values() if n not in inside], together, norms)

    def _name(self, block: Block) -> str:
        name = block.key.parameter
        for end in (".weight", "_weight"):
            name = name.removesuffix(end)
        if name == "weight":
            name = type(self.module).__name__
        whole = self.known.parameters[block.key.parameter].shape[1 if block.kind == "transposed" else 0]
        return name if block.rows == whole else f"{name}[{block.key.start}:{block.key.stop}]"


def find(module: nn.Module, batches: Batches) -> Found:
    """All linear blocks of a module, in the order of their first use."""
    check(module)
    finder = _Finder(module, batches)
    finder.run()
    found = finder.finish()
    if not found.blocks:
        raise UnsupportedError(
            f"{type(module).__name__} is not supported: its forward pass calls no linear map or convolution with a parameter of its own"
        )
    return found


def choose(module: nn.Module, found: Found, include: Any, exclude: Any) -> None:
    """Marks the blocks that are not trained, with the reason."""
    modules = dict(module.named_modules())
    included, excluded = _wanted(include, "include"), _wanted(exclude, "exclude")
    used: set[Any] = set()
    for block in found.blocks:
        owner = modules.get(block.key.parameter.rpartition(".")[0])
        of_include = [w for w in included if _matches(w, block.name, owner)]
        of_exclude = [w for w in excluded if _matches(w, block.name, owner)]
        used.update(of_include + of_exclude)
        if of_include and block.kept is not None and any(isinstance(w, str) for w in of_include):
            raise UnsupportedError(f"{block.name} cannot be trained: {block.kept}; leave it out of include")
        if included and not of_include:
            block.kept = block.kept or "not in include"
        if of_exclude:
            block.kept = "in exclude"
    for what, wanted in (("include", included), ("exclude", excluded)):
        for one in wanted:
            if one not in used:
                names = ", ".join(b.name for b in found.blocks[:8])
                raise SettingError(f"{what}: expected names or types of linear layers such as {names}; got {one!r}, which matches no layer")
    if all(block.kept for block in found.blocks):
        raise SettingError("include, exclude: expected at least one layer to train, got none")


def _wanted(given: Any, what: str) -> Sequence[Any]:
    wanted: tuple[Any, ...] = () if given is None else (given,) if isinstance(given, (str, type)) else tuple(given)
    for one in wanted:
        if not isinstance(one, (str, type)):
            raise SettingError(f"{what}: expected names (with *) or types of modules, got {one!r}")
    return wanted


def _matches(wanted: Any, name: str, owner: nn.Module | None) -> bool:
    if isinstance(wanted, str):
        plain = name.partition("[")[0]
        return fnmatch.fnmatchcase(plain, wanted) or plain == wanted or plain.startswith(wanted + ".")
    return isinstance(owner, wanted)


def stages(module: nn.Module, blocks: list[Block], cascade: str | None) -> None:
    """Numbers the blocks that are gathered together."""
    modules = dict(module.named_modules())

    def element(name: str) -> str:
        # The outermost element of a list of modules, else the child of the module itself.
        parts = name.split(".")
        for k in range(1, len(parts)):
            if isinstance(modules.get(".".join(parts[:k])), (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
                return ".".join(parts[: k + 1])
        return parts[0]

    last, number = None, -1
    for k, block in enumerate(blocks):
        here = k if cascade == "layer" else element(block.name) if cascade == "block" else 0
        number += here != last
        last = here
        block.stage = max(number, 0)
