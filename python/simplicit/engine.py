"""Training's heavy steps on somebody else's workers, with the bits they would have had here.

An engine cuts the samples into shards of 1024·2ᵏ, has their statistics made on workers and summed in a fixed tree, and
sends out blocks of rows; what is lost is computed again and is the same. :mod:`simplicit.ray` is one; anything that can
run a function elsewhere can be another: subclass :class:`Engine`.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from simplicit import _core
from simplicit._arrays import as_array
from simplicit.errors import SettingError
from simplicit.estimator import SIM, _baseline
from simplicit.states import States

#: Samples in a leaf of the summation tree.
BLOCK = 1024


def shard_statistics(task: bytes, shard: dict[str, Any], samples: int, preprocessing: str, threads: int) -> bytes:
    """A worker's part of the statistics: over the first `samples` samples of a shard."""
    states = shard["states"]
    if states is not None:
        states = (*(a[:samples] for a in states[:4]), *states[4:])
    u = shard["u"]
    baseline = shard["baseline"]
    return _core.run_statistics(
        task,
        None if baseline is None else baseline._core,
        None if u is None else u[:samples],
        states,
        preprocessing,
        threads,
    )


def solve_rows(
    decided: str, statistics: bytes, features: int, targets: int, tasks: Sequence[bytes], threads: int
) -> list[bytes]:
    """A worker's rows: some blocks over one design."""
    return _core.run_rows(decided, statistics, features, targets, list(tasks), threads)


class Engine:
    """Shards, tasks and results; a subclass says how a function runs elsewhere."""

    def __init__(self, baseline: Any, U: Any, *, workers: int, shard_blocks: int) -> None:
        if shard_blocks < 1 or shard_blocks & (shard_blocks - 1):
            raise SettingError(f"shard_blocks: expected a power of two, got {shard_blocks}")
        self.workers = max(1, workers)
        self.bytes: dict[str, int] = collections.Counter()
        size = BLOCK * shard_blocks
        self.shards: list[tuple[int, Any]] = []
        if isinstance(baseline, States):
            for first in range(0, baseline.samples, size):
                part = baseline[first : first + size]
                self._add(part.samples, {"states": part._for_core(), "u": None, "baseline": None}, (part.U, part.Z, part.X, part.Y))
        else:
            u = as_array(U, "U")
            for first in range(0, len(u), size):
                inputs = u[first : first + size]
                self._add(len(inputs), {"states": None, "u": inputs, "baseline": baseline}, (inputs,))

    def _add(self, samples: int, shard: dict[str, Any], arrays: Sequence[Any]) -> None:
        self.bytes["shards"] += sum(a.nbytes for a in arrays)
        self.shards.append((samples, self.put(shard)))

    def put(self, value: Any) -> Any:
        """Make a value available to workers, once."""
        return value

    def submit(self, function: Any, *args: Any) -> Any:
        """Begin a call elsewhere."""
        raise NotImplementedError

    def poll(self, call: Any) -> Any:
        """The call's result, or None after a moment in which it did not come."""
        raise NotImplementedError

    # What the native side calls.

    def begin(self, decided: str, preprocessing: str) -> None:
        """The settings, once they are known."""
        self._decided, self._preprocessing = decided, preprocessing

    def start_statistics(self, task: bytes, samples: int) -> tuple[Any, int]:
        """Begin the statistics of a task; returns a handle and the number of results."""
        calls = []
        for size, shard in self.shards:
            if samples > 0:
                calls.append(self.submit(shard_statistics, task, shard, min(size, samples), self._preprocessing))
                self.bytes["tasks"] += len(task)
            samples -= size
        return (collections.deque(calls), collections.deque()), len(calls)

    def start_rows(self, statistics: bytes, features: int, targets: int, tasks: list[bytes]) -> Any:
        """Begin blocks of rows over one design, which travels once."""
        shared = self.put(statistics)
        self.bytes["statistics"] += len(statistics)
        # One call per worker: a design is set up once per call.
        length = -(-len(tasks) // self.workers)
        calls = []
        for first in range(0, len(tasks), length):
            part = tasks[first : first + length]
            self.bytes["tasks"] += sum(map(len, part))
            calls.append(self.submit(solve_rows, self._decided, shared, features, targets, part))
        return (collections.deque(calls), collections.deque())

    def next(self, handle: Any) -> bytes | None:
        """The next result in order, or None for now."""
        calls, ready = handle
        if not ready:
            result = self.poll(calls[0])
            if result is None:
                return None
            calls.popleft()
            ready.extend(result if isinstance(result, list) else [result])
        out: bytes = ready.popleft()
        self.bytes["results"] += len(out)
        return out


def prepare(sim: SIM, baseline: Any, U: Any) -> Any:
    """The baseline of a `fit` elsewhere; refuses what only one machine can do."""
    for name in ("samples", "gamma", "checkpoint"):
        if getattr(sim, name) is not None:
            raise SettingError(f"{name}: expected None on a cluster, got {getattr(sim, name)!r}")
    if sim.rescale:
        raise SettingError("rescale: expected False on a cluster; rescale the model afterwards")
    if callable(sim.penalty):
        raise SettingError("penalty: expected a name on a cluster, got a function")
    return _baseline(baseline, U)
