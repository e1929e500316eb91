"""A module as a source of linear blocks: it runs itself, and the library computes its new weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from simplicit.errors import UnsupportedError
from simplicit.torch._batches import Batches, tensors
from simplicit.torch._calls import Call, Calls, Key, Known, Stop, no_fast_path
from simplicit.torch._chains import Chains
from simplicit.torch._find import Block, Found

#: Positions are added until there are this many samples per feature, if a few per sample give fewer; as in the library.
_SAMPLES_PER_FEATURE = 20
#: Below this ratio of samples to features the library works with the samples themselves.
_FEW = 0.41
#: Lines that are multiplied at once.
_LINES = 4096
#: Samples and draws of row weights and of joint errors; as in the library.
_WEIGHED, _DRAWS = 1000, 4
_ROUGH, _JOINT_DRAWS = 500, 2


class _Sums:
    """G, H, e of every group of a block, in f64 where the data is; features and targets while they are few."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cpu") if device.type == "mps" else device
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.lines = 0
        self.gram: torch.Tensor | None = None

    def add(self, features: torch.Tensor, targets: torch.Tensor) -> None:
        """Groups × lines × features (the constant included), groups × lines × rows."""
        self.waiting.append((features.to(self.device), targets.to(self.device)))
        self.lines += features.shape[1]
        waiting = sum(f.shape[1] for f, _ in self.waiting)
        if waiting >= max(_FEW * features.shape[2], _LINES if self.gram is not None else 0):
            self._multiply()

    def _multiply(self) -> None:
        for features, targets in self.waiting:
            for first in range(0, features.shape[1], _LINES):
                f = features[:, first : first + _LINES].double()
                t = targets[:, first : first + _LINES].double()
                gram, cross, energy = f.transpose(1, 2) @ f, t.transpose(1, 2) @ f, t.square().sum(1)
                if self.gram is None:
                    self.gram, self.cross, self.energy = gram, cross, energy
                else:
                    self.gram += gram
                    self.cross += cross
                    self.energy += energy
        self.waiting = []

    def finish(self) -> tuple[Any, ...]:
        """(m, G, H, e), or (None, F, T) of few samples."""
        if self.gram is None and self.lines and self.lines < _FEW * self.waiting[0][0].shape[2]:
            both = [torch.cat(part, 1).double().cpu().contiguous().numpy() for part in zip(*self.waiting, strict=True)]
            return (None, *both)
        self._multiply()
        if self.gram is None:
            raise UnsupportedError("a layer that no batch runs through has no statistics; exclude it")
        return (self.lines, *(t.cpu().contiguous().numpy() for t in (self.gram, self.cross, self.energy)))


class _Pass:
    """One forward pass that records features and outputs of some blocks, and the values that their outputs are added to."""

    def __init__(
        self,
        blocks: dict[Key, Block],
        choose: Callable[[Call, torch.Tensor], torch.Tensor | None],
        *,
        features: bool,
        targets: bool,
        terms: bool,
    ) -> None:
        self._blocks, self._choose = blocks, choose
        self._wants_features, self._wants_targets = features, targets
        self.follows = terms and any(block.added for block in blocks.values())
        self.features: dict[Key, list[torch.Tensor]] = {key: [] for key in blocks}
        self.targets: dict[Key, list[torch.Tensor]] = {key: [] for key in blocks}
        self.terms: dict[Key, torch.Tensor] = {}
        self.left = {key: block.uses for key, block in blocks.items()}
        self.chains = Chains({})
        #: Blocks whose sum has not come yet: how they were called, and the lines that count.
        self._open: dict[Key, tuple[Call, torch.Tensor | None]] = {}

    def see(self, call: Call, out: torch.Tensor) -> torch.Tensor:
        """A linear map ran."""
        block = self._blocks.get(call.key)
        if block is None:
            return out
        chosen = self._choose(call, out)
        if self._wants_targets:
            z = call.rows_of(out)
            self.targets[call.key].append(z.clone() if chosen is None else z[chosen])
        if self._wants_features:
            self.features[call.key].append(call.features(chosen))
        self.left[call.key] -= 1
        if self.follows and block.added:
            self._open[call.key] = (Call(call.key, call.kind, call.input.new_empty(0), None), chosen)
            self.chains.start(call.key, out)
        self._stop_if_done()
        return out

    def note(self, func: Any, args: Any, kwargs: Any) -> Callable[[Any], None] | None:
        """Another function runs: a sum may be the one that a block is waiting for."""
        sums = self.chains.terms(func, args, kwargs)
        for one, other, a, b in sums:
            for chain, term in ((one, b), (other, a)):
                if chain is None or chain.is_sum:
                    continue
                for key in chain.keys & self._open.keys():
                    call, chosen = self._open.pop(key)
                    lines = call.rows_of(chain.undone(term))
                    self.terms[key] = lines.clone() if chosen is None else lines[chosen]
        self._stop_if_done()
        return lambda out: (self.chains.after(func, args, kwargs, out, sums), None)[1]

    def _stop_if_done(self) -> None:
        if not self._open and not any(count > 0 for count in self.left.values()):
            raise Stop


class Source:
    """The object that the native side calls: passes over the batches in steps; weights are read and written.

    `original` gives targets and keeps its weights; `module` is written to. Both are in evaluation mode.
    """

    def __init__(self, original: nn.Module, module: nn.Module, found: Found, batches: Batches, *, positions: int, seed: int) -> None:
        self.original, self.module, self.batches = original, module, batches
        self.positions, self.seed = positions, seed
        self.found = found
        self.trained = [block for block in found.blocks if block.kept is None]
        self._of_original, self._of_module = Known(original), Known(module)
        self._numbers = {block.key: k for k, block in enumerate(self.trained)}
        self._originals: dict[str, Any] = dict(original.named_modules())
        self._modules: dict[str, Any] = dict(module.named_modules())
        self._norms_of_module = {id(self._modules[name].running_mean): name for name in found.norm_names.values()}
        self._steps: Iterator[int] = iter(())
        self._result: Any = None

    # The blocks that are trained.

    def offset(self, block: Block) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Scale s and offset o of the batch norm behind a block: it gives s·(z + o)."""
        if block.norm is None:
            return None
        return norm_offset(self._originals[block.norm])

    def constant(self, block: Block) -> torch.Tensor | None:
        """The block's constants with its batch norm folded in, in its own units; None without a place for them."""
        folded = self.offset(block)
        if block.bias is None and folded is None:
            return None
        weight = self._of_original.parameters[block.key.parameter]
        constant = torch.zeros(block.rows, dtype=torch.float32, device=weight.device)
        if block.bias is not None:
            constant += _part(self._of_original, block.bias).float()
        if folded is not None:
            constant += folded[1].float()
        return constant if bool(constant.any()) else None

    def weights(self, block: Block) -> torch.Tensor:
        """The original weights, rows × features of a group; rows that the batch norm multiplies by zero are zero."""
        weight = block.matrix(self._of_original.parameters[block.key.parameter]).float()
        folded = self.offset(block)
        return weight if folded is None else torch.where((folded[0] != 0).unsqueeze(1), weight, 0)

    def blocks(self) -> list[tuple[Any, ...]]:
        """Name, groups, weights, constants, whether they are counted, whether positions share it, stage."""
        out = []
        for block in self.trained:
            constant = self.constant(block)
            out.append(
                (
                    block.name,
                    block.groups,
                    self.weights(block).cpu().contiguous().numpy(),
                    None if constant is None else constant.cpu().numpy(),
                    self.counts_constant(block),
                    block.positions > 1,
                    block.stage,
                )
            )
        return out

    def counts_constant(self, block: Block) -> bool:
        """Constants that add up to one are counted with the first of their blocks that has them."""
        for together in self.found.sums:
            if block.key in together:
                have = [b.key for b in self.found.blocks if b.key in together and self.constant(b) is not None]
                return not have or have[0] == block.key
        return True

    def count(self, block: Block) -> int:
        """Non-zeros of a block in the original, as they are counted."""
        constant = self.constant(block) if self.counts_constant(block) else None
        return _count(self.weights(block)) + (0 if constant is None else _count(constant))

    def samples(self) -> int:
        """Number of samples."""
        return self.batches.samples

    def fixed_nonzeros(self) -> int:
        """Non-zero parameters that stay, batch norms folded into the layers before them."""
        inside: set[str] = set()
        total = 0
        for block in self.found.blocks:
            inside.add(block.key.parameter)
            if block.kept is not None:
                total += self.count(block)
            if block.bias is not None:
                inside.add(block.bias.parameter)
            if block.norm is not None:
                inside.update(f"{block.norm}.{name}" for name in ("weight", "bias"))
        for name in self.found.norms:
            norm = self._originals[name]
            scale, offset = norm_offset(norm)
            total += _count(scale) + _count(scale * offset)
            inside.update(f"{name}.{part}" for part in ("weight", "bias"))
        for name, parameter in self.original.named_parameters():
            if name not in inside:
                total += _count(parameter)
        return total

    def install(self, number: int, weights: Any, constant: Any) -> None:
        """New weights of a block."""
        block = self.trained[number]
        parameter = self._of_module.parameters[block.key.parameter]
        with torch.no_grad():
            new = torch.from_numpy(weights).to(parameter.device, parameter.dtype)
            if block.kind == "transposed":
                parameter.copy_(new.t())
            else:
                place = parameter[block.key.start : block.key.stop]
                place.copy_(new.reshape(place.shape))
            if constant is None:
                return
            value = torch.from_numpy(constant).to(parameter.device)
            folded = self.offset(block)
            if folded is not None:
                value = value - folded[1].to(value.device, value.dtype)
            if block.bias is not None:
                place = _part(self._of_module, block.bias)
                place.copy_(value.to(place.dtype))
            elif block.norm is not None:
                # The constant is folded into the mean that is subtracted, so scale and shift stay as they are.
                before, after = self._originals[block.norm].running_mean, self._modules[block.norm].running_mean
                after.copy_((before.float() - value).to(after.dtype))

    def reset(self) -> None:
        """Put the original weights back everywhere."""
        with torch.no_grad():
            for block in self.trained:
                for key in (block.key, block.bias):
                    if key is not None:
                        self._of_module.parameters[key.parameter].copy_(self._of_original.parameters[key.parameter])
                if block.norm is not None:
                    self._modules[block.norm].running_mean.copy_(self._originals[block.norm].running_mean)

    # Passes, a batch at a time.

    def step(self) -> int | None:
        """One more batch; samples so far, or None when there are no more."""
        return next(self._steps, None)

    def finish(self) -> Any:
        """The results of the pass."""
        result, self._result, self._steps = self._result(), None, iter(())
        return result

    def _first(self, samples: int) -> Iterator[tuple[int, Any, int]]:
        done = 0
        for number, (batch, size) in enumerate(self.batches):
            if done >= samples:
                return
            yield number, batch, size
            done += size

    def begin(self, wanted: list[int], samples: int, own: bool) -> None:
        """Statistics of some blocks: targets from the original, features from the module (`own`) or from the original."""
        blocks = {self.trained[k].key: self.trained[k] for k in wanted}
        sums = {key: _Sums(self.batches.device) for key in blocks}
        self._result = lambda: [sums[key].finish() for key in blocks]
        self._steps = self._gather(blocks, sums, samples, own)

    def _gather(self, blocks: dict[Key, Block], sums: dict[Key, _Sums], samples: int, own: bool) -> Iterator[int]:
        done = 0
        constants = {key: self.constant(block) is not None for key, block in blocks.items()}
        offsets = {key: self.offset(block) for key, block in blocks.items()}
        for number, batch, size in self._first(samples):
            chosen: dict[Key, list[tuple[int, torch.Tensor | None]]] = {key: [] for key in blocks}

            def choose(call: Call, out: torch.Tensor) -> torch.Tensor | None:
                lines, uses = call.lines(out), chosen[call.key]  # noqa: B023
                uses.append((lines, self._chosen(blocks[call.key], lines, size, samples, number, len(uses))))  # noqa: B023
                return uses[-1][1]

            def again(call: Call, out: torch.Tensor) -> torch.Tensor | None:
                uses = chosen[call.key]  # noqa: B023
                if not uses or uses[0][0] != call.lines(out):
                    raise _control_flow(blocks[call.key])
                return uses.pop(0)[1]

            original = _Pass(blocks, choose, features=not own, targets=True, terms=own)
            self._run(self.original, self._of_original, batch, original, self.found.norm_names)
            present = original
            if own:
                present = _Pass(blocks, again, features=True, targets=False, terms=True)
                present.left = {key: len(uses) for key, uses in chosen.items()}
                self._run(self.module, self._of_module, batch, present, self._norms_of_module)
            for key, block in blocks.items():
                if len(original.targets[key]) != len(present.features[key]):
                    raise _control_flow(block)
                for z, features in zip(original.targets[key], present.features[key], strict=True):
                    offset = offsets[key]
                    z = z.float()
                    if own and key in original.terms and key in present.terms:
                        # The error of the other term of the sum, in the block's own units.
                        lost = original.terms[key].float() - present.terms[key].float()
                        if offset is not None:
                            lost = torch.where(offset[0] != 0, lost / torch.where(offset[0] != 0, offset[0], 1), 0)
                        z = z + lost
                    if offset is not None:
                        z = z + offset[1].float()
                    if constants[key]:
                        features = torch.cat([features, features.new_ones(*features.shape[:2], 1)], 2)
                    rows = block.rows // block.groups
                    sums[key].add(features, z.reshape(len(z), block.groups, rows).transpose(0, 1))
            done += size
            yield min(done, samples)

    def _run(self, module: nn.Module, known: Known, batch: Any, what: _Pass, norms: dict[int, str]) -> None:
        what.chains = Chains(norms)
        with torch.no_grad(), no_fast_path():
            try:
                with Calls(known, what.see, what.note if what.follows else None):
                    self.batches.run(module, batch)
            except Stop:
                pass

    def _chosen(self, block: Block, lines: int, size: int, samples: int, batch: int, use: int) -> torch.Tensor | None:
        """The lines of a batch that are used in place of all of them; None for all."""
        wanted = -(-_SAMPLES_PER_FEATURE * (block.features + 1) // max(1, samples))
        count = max(self.positions, wanted) * size
        if count >= lines:
            return None
        generator = _generator(self.seed, "positions", block.name, batch, use)
        return torch.randperm(lines, generator=generator)[:count].sort().values.to(self.batches.device)

    def begin_weights(self) -> int:
        """λ of every row: the mean of (∂ log p(y|u)/∂z)² over inputs and drawn y, summed over a channel's positions."""
        total = [torch.zeros(block.rows, dtype=torch.float64) for block in self.trained]
        samples = min(self.samples(), _WEIGHED)
        seen = 0

        def steps() -> Iterator[int]:
            nonlocal seen
            for number, batch, size in self._first(samples):
                for k, gradients in self._gradients(batch, _DRAWS, number, "weights", None):
                    for call, gradient in gradients:
                        squares = call.rows_of(gradient).float().square().sum(0, dtype=torch.float64)
                        total[k] += squares.cpu()
                seen += size
                yield min(seen, samples)

        self._steps = steps()
        self._result = lambda: [(t / (seen * _DRAWS)).tolist() for t in total]
        return samples

    def begin_errors(self, rows: list[tuple[Any, Any]]) -> None:
        """For every block E(Σ g·e)² and the mean square of e by row, e the errors of these weights on original features."""
        changes = []
        for block, (weights, constant) in zip(self.trained, rows, strict=True):
            parameter = self._of_original.parameters[block.key.parameter]
            new = torch.from_numpy(weights).to(parameter.device)
            change = (new - self.weights(block).to(new.device)).to(parameter.dtype)
            before, shift = self.constant(block), None
            if constant is not None and before is not None:
                shift = (torch.from_numpy(constant).to(parameter.device) - before).to(parameter.dtype)
            if block.kind == "conv":
                change = change.reshape(block.rows, *parameter.shape[1:])
            changes.append((change, shift))
        together = [0.0] * len(rows)
        squares = [torch.zeros(block.rows, dtype=torch.float64) for block in self.trained]

        def steps() -> Iterator[int]:
            done = 0
            for number, batch, size in self._first(min(self.samples(), _ROUGH)):
                errors: dict[int, list[torch.Tensor]] = {}
                for k, gradients in self._gradients(batch, _JOINT_DRAWS, number, "errors", (changes, errors)):
                    sums = torch.zeros(size, dtype=torch.float64)
                    for (_, gradient), error in zip(gradients, errors[k], strict=True):
                        product = (gradient.float() * error.float()).double()
                        if product.shape[0] % size:
                            # Samples cannot be told apart: the block keeps its weights.
                            sums.zero_()
                            break
                        sums += product.reshape(size, -1).sum(1).cpu()
                    together[k] += float(sums.square().sum()) / _JOINT_DRAWS
                for k, (calls, of_block) in self._last.items():
                    lines = sum(c.lines(e) for c, e in zip(calls, of_block, strict=True))
                    sum_of = torch.zeros(self.trained[k].rows, dtype=torch.float64)
                    for call, error in zip(calls, of_block, strict=True):
                        sum_of += call.rows_of(error).float().square().sum(0, dtype=torch.float64).cpu()
                    squares[k] += sum_of * (size / max(1, lines))
                done += size
                yield done

        self._steps = steps()
        self._result = lambda: [(t, s.tolist()) for t, s in zip(together, squares, strict=True)]

    def _gradients(self, batch: Any, draws: int, number: int, what: str, errors: Any) -> Iterator[tuple[int, list[Any]]]:
        """By draw and block: its calls with the gradients of log p(y|u) there. With changed weights the errors they make."""
        calls: dict[int, list[Call]] = {}
        probes: dict[int, list[torch.Tensor]] = {}

        def see(call: Call, out: torch.Tensor) -> torch.Tensor:
            k = self._numbers.get(call.key)
            if k is None:
                return out
            probe = torch.zeros_like(out, requires_grad=True)
            probes.setdefault(k, []).append(probe)
            if errors is not None and call.again is not None:
                changes, made = errors
                with torch.no_grad():
                    made.setdefault(k, []).append(call.again(*changes[k]))
            # The features are not needed any more.
            kept = Call(call.key, call.kind, call.input.new_empty(0), None, groups=call.groups)
            calls.setdefault(k, []).append(kept)
            return out + probe

        with torch.enable_grad(), no_fast_path():
            with Calls(self._of_original, see):
                outputs = self.batches.outputs(self.original, batch)
            for k, of_block in calls.items():
                if len(of_block) != self.trained[k].uses:
                    # Which functions run depends on the data, so no pass may be cut short.
                    self.trained[k].uses = 1 << 60
            flat = [(k, call, probe) for k in calls for call, probe in zip(calls[k], probes[k], strict=True)]
            if not flat:
                return
            generator = _generator(self.seed, what, number)
            for draw in range(draws):
                likelihood = outputs.drawn(generator)
                if not likelihood.requires_grad:
                    raise UnsupportedError("outputs that are cut off from the layers have no gradients; give output_aware=False")
                gradients = torch.autograd.grad(
                    likelihood, [probe for *_, probe in flat], retain_graph=draw + 1 < draws, allow_unused=True
                )
                by_block: dict[int, list[Any]] = {}
                for (k, call, probe), gradient in zip(flat, gradients, strict=True):
                    by_block.setdefault(k, []).append((call, torch.zeros_like(probe) if gradient is None else gradient))
                yield from by_block.items()
        if errors is not None:
            self._last = {k: (calls[k], errors[1][k]) for k in calls}


def norm_offset(norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """s and o of a batch norm in evaluation mode, which gives s·(z + o); o is 0 where s is."""
    mean, variance = norm.running_mean, norm.running_var
    gain = torch.ones_like(mean) if norm.weight is None else norm.weight.detach()
    scale = gain / torch.sqrt(variance + norm.eps)
    shift = torch.zeros_like(mean) if norm.bias is None else norm.bias.detach()
    return scale, torch.where(scale != 0, shift / torch.where(scale != 0, scale, 1), mean) - mean


def _part(known: Known, key: Key) -> torch.Tensor:
    return known.parameters[key.parameter][key.start : key.stop].detach()


def _count(tensor: torch.Tensor) -> int:
    return int(torch.count_nonzero(tensor))


def _generator(seed: int, *of: Any) -> torch.Generator:
    digest = hashlib.sha256(repr((seed, *of)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _control_flow(block: Block) -> UnsupportedError:
    return UnsupportedError(
        f"{block.name} runs on other shapes, or another number of times, once earlier layers are sparse: control flow that depends "
        "on the data is not supported in a cascade; give cascade=None or exclude it"
    )


def _bytes(tensor: torch.Tensor) -> bytes:
    """The memory of a tensor of any type."""
    return np.ascontiguousarray(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()).tobytes()


def fingerprint(module: nn.Module, batches: Batches) -> dict[str, str]:
    """Everything that a checkpoint of a module depends on."""
    weights, inputs = hashlib.sha256(), hashlib.sha256()
    for name, value in module.state_dict().items():
        weights.update(name.encode())
        if isinstance(value, torch.Tensor):
            weights.update(_bytes(value))
    for batch, _ in batches:
        for tensor in tensors(batch):
            inputs.update(_bytes(tensor))
    return {"module": weights.hexdigest(), "inputs": inputs.hexdigest()}
