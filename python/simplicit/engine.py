"""Training's heavy steps on workers in other processes, with the same bits as in this process.

An engine cuts the samples into shards. Workers compute their statistics and sum them in a fixed tree, each worker those of
its own shards first; then they solve blocks of rows. Networks with feature maps are walked through: a shard is on one worker
with the states of its layers, and receives the rows of each layer as they are solved. A worker that is lost is replaced, or its
shards go to others, where they are made again from the steps so far: the result has the same bits. :mod:`simplicit.ray` is one;
anything that can keep a :class:`Worker` elsewhere can be another: subclass :class:`Engine`.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from simplicit import _core
from simplicit._arrays import as_array
from simplicit.errors import SettingError
from simplicit.estimator import SIM, _baseline
from simplicit.model import ImplicitModel
from simplicit.states import States

#: Samples in a leaf of the tree of sums, for rows of single units.
BLOCK = 1024
#: Images in a leaf of the tree of sums, for networks with feature maps.
PIECE = _core.Shard.PIECE
#: Statistics from elsewhere that one worker sums; a power of two, so that every sum is a branch of the tree.
FAN_IN = 4
#: Shards of its own that a worker walks through and sums in one call, at most; a power of two too. Their inputs come together.
TOGETHER = 32
#: How many statistics stay with the workers for later calls.
_KEPT = 4
#: How many groups are remembered whose inverses the workers share; workers keep these while they have memory.
_SPREAD = 256
#: From this many features per thread of a worker on, to make an inverse takes longer than to send it.
_WORTH_SENDING = 64
#: Share of a worker's free memory that the designs of groups may fill.
_DESIGNS = 0.25


class WorkerLost(Exception):
    """A worker is gone, with what it was doing."""


class ResultLost(Exception):
    """A result that a worker had finished is lost."""


class WorkFailed(RuntimeError):
    """A piece of work was lost more often than is allowed."""


class Worker:
    """The work of a worker, in any process, one call at a time. Calls return a result, its core-seconds and its bytes."""

    def __init__(self, decided: str, preprocessing: str, threads: int, device: str = "cpu", share: float = 1.0) -> None:
        self._decided, self._preprocessing = decided, preprocessing
        self._threads, self._device, self._share = threads, device, share
        self._walk: int | None = None
        self._shards: dict[int, tuple[Any, int]] = {}
        #: Designs of groups with their statistics and inverses, kept from call to call; the last used comes last.
        self._designs: collections.OrderedDict[bytes, Any] = collections.OrderedDict()
        self._room = _DESIGNS * share * (_core.free_memory() or 0)
        #: Designs and inverses made so far.
        self.made: collections.Counter[str] = collections.Counter()

    def call(self, method: str, *args: Any) -> tuple[Any, tuple[float, int]]:
        """One of the methods below, by name."""
        begin = time.process_time()
        result = getattr(self, method)(*args)
        size = sum(map(len, result)) if isinstance(result, list) else len(result)
        return result, (time.process_time() - begin, size)

    def statistics(self, task: bytes, baseline: Any, samples: Sequence[int], *shards: dict[str, Any]) -> bytes:
        """Statistics of rows of single units over the first samples of some shards, a branch of the tree."""
        core = None if baseline is None else baseline._core
        branch = _core.Branch()
        for count, shard in zip(samples, shards, strict=True):
            states, u = shard["states"], shard["u"]
            if states is not None:
                states = (*(a[:count] for a in states[:4]), *states[4:])
            u = None if u is None else u[:count]
            _core.run_statistics(branch, task, core, u, states, self._preprocessing, self._threads)
        return branch.finish()

    def walk(
        self, walk: int, group: int, share: float, about: bytes, model: bytes, shards: Sequence[ShardOnItsWay], first_step: int,
        *parts: Any,
    ) -> bytes:  # fmt: skip
        """Statistics of a group over some shards, a branch of the tree. Inputs of shards without any step yet come before the
        steps from number `first_step` on."""
        if self._walk != walk:
            self._walk, self._shards = walk, {}
        new = sum(not shard.known for shard in shards)
        inputs, steps = iter(parts[:new]), parts[new:]
        branch = _core.Branch()
        for shard in shards:
            walking, done = self._shards.pop(shard.number, (None, 0))
            if not shard.known:
                u = next(inputs)["u"][: shard.samples]
                walking = _core.Shard(
                    about + model, self._decided, u, shard.first, self._preprocessing, self._threads, self._device,
                    self._share * share,
                )  # fmt: skip
            elif done != shard.known:
                raise RuntimeError(f"shard {shard.number}: expected all steps from number {done} on, got those from {shard.known} on")
            for step in steps[shard.known - first_step :]:
                walking.step(step)
            walking.statistics(group, branch)
            # After an error the shard is made again.
            self._shards[shard.number] = (walking, first_step + len(steps))
        return branch.finish()

    def sums(self, task: bytes, model: bytes, baseline: Any, first: int, samples: int, shard: dict[str, Any]) -> list[bytes]:
        """The contributions of a shard's blocks to the row weights, or to the error of the outputs."""
        core = None if baseline is None else baseline._core
        return _core.run_sums(task + model, core, shard["u"][:samples], first, self._preprocessing, self._threads)

    def merge(self, features: int, targets: int, leaves: Sequence[int], *parts: bytes) -> bytes:
        """The sum of some branches; `leaves` has the number of shards of each."""
        branch = _core.Branch()
        for count, part in zip(leaves, parts, strict=True):
            branch.add(count, part, features, targets)
        return branch.finish()

    def rows(self, digest: bytes, statistics: bytes, features: int, targets: int, inverses: int, *parts: bytes) -> list[bytes]:
        """Some blocks of rows over one design, solved or bounded. Inverses that others made come before them."""
        tasks = list(parts[inverses:])

        def work(design: _core.Design) -> list[bytes]:
            for number, inverse in enumerate(parts[:inverses]):
                design.know(tasks[0], number, inverse)
            return design.rows(self._decided, tasks, self._threads, self._device)

        rows: list[bytes] = self._on_design(digest, statistics, features, targets, work)
        return rows

    def inverse(self, digest: bytes, statistics: bytes, features: int, targets: int, task: bytes, number: int) -> bytes:
        """An inverse that all blocks of a group need."""
        made: bytes = self._on_design(digest, statistics, features, targets, lambda design: design.inverse(task, number, self._threads))
        return made

    def _on_design(self, digest: bytes, statistics: bytes, features: int, targets: int, work: Callable[[Any], Any]) -> Any:
        """Work on the design of a group, which is kept as long as there is memory for it."""
        design = self._designs.pop(digest, None)
        if design is None:
            design = _core.Design(statistics, features, targets)
            self.made["designs"] += 1
        before = design.made
        result = work(design)
        self.made["inverses"] += design.made - before
        self._designs[digest] = design
        while self._designs and sum(kept.bytes for kept in self._designs.values()) > self._room:
            self._designs.popitem(last=False)
        return result


class ShardOnItsWay(NamedTuple):
    """A shard of a walk: its number, its samples, and how many steps its worker has done."""

    number: int
    first: int
    samples: int
    known: int


class _Branch(NamedTuple):
    """The sum over some consecutive shards, and the worker that has it."""

    first: int
    shards: int
    value: Any
    size: int
    worker: int


def branches(owners: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Shards as branches of the tree that a single process would sum in, each with one owner: (first shard, how many).

    A branch is 2ᵏ shards from a multiple of 2ᵏ on, `most` at most.
    """
    found, at = [], 0
    while at < len(owners):
        count = 1
        while 2 * count <= most and at % (2 * count) == 0 and owners[at : at + 2 * count] == [owners[at]] * (2 * count):
            count *= 2
        found.append((at, count))
        at += count
    return found


class _Job:
    """A call that may have to be repeated."""

    def __init__(
        self, method: str, args: Callable[[int], Sequence[Any]], size: int, *, kind: str | None = None, at: int | None = None,
        done: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        self.method, self.args, self.size, self.done = method, args, size, done
        #: The phase that its core-seconds count for.
        self.kind = kind or method
        #: The place among the workers, if one is better than others.
        self.at = at
        self.lost = 0
        self.value: Any = None
        #: The worker that did it, and the bytes of its value.
        self.worker, self.made = -1, 0


def _size(features: int, targets: int) -> int:
    """About how many bytes statistics take in memory."""
    return 8 * features * (features + targets)


def _given(*args: Any) -> Callable[[int], Sequence[Any]]:
    """Arguments that do not depend on the worker."""
    return lambda _: args


class Engine:
    """Shards, steps and results; a subclass decides where workers run.

    Parameters
    ----------
    baseline, U
        As for :meth:`SIM.fit`.
    workers : int
        How many workers there are, numbered from 0.
    shard_blocks : int
        Leaves of the tree in a shard, a power of two: 1024 samples each, or 256 images of a network with feature maps.
    retries : int, optional
        How often a piece of work may be lost before training fails.
    """

    def __init__(self, baseline: Any, U: Any, *, workers: int, shard_blocks: int, retries: int = 3) -> None:
        if shard_blocks < 1 or shard_blocks & (shard_blocks - 1):
            raise SettingError(f"shard_blocks: expected a power of two, got {shard_blocks}")
        self.alive = list(range(max(1, workers)))
        self._numbered = len(self.alive)
        self.retries = retries
        self.shard_blocks = shard_blocks
        #: Of a worker. Of workers that have no use for inverses from elsewhere, infinity.
        self.threads: float = 1
        self._spread: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        #: Bytes that travelled, calls, core-seconds of workers and seconds that passed, by kind.
        self.bytes: dict[str, int] = collections.Counter()
        self.calls: dict[str, int] = collections.Counter()
        self.busy: dict[str, float] = collections.defaultdict(float)
        self.wall: dict[str, float] = collections.defaultdict(float)
        #: Blocks of rows, of all groups together.
        self.blocks = 0
        #: For statistics, by their `_core.fingerprint`: the bytes, and the workers that have them.
        self._known: collections.OrderedDict[bytes, tuple[Any, int, set[int]]] = collections.OrderedDict()
        self._arrays: Any = baseline if isinstance(baseline, States) else as_array(U, "U")
        self._baseline = None if isinstance(baseline, States) else baseline
        self._shards: dict[int, list[tuple[int, int, Any]]] = {}
        self._network: Any = None
        self._moved: Any = None
        self._started = 0
        self._results: dict[int, Generator[bytes | None, None, None]] = {}
        self._task: Any = None
        #: The model that shards walk through, by its digest.
        self._model: tuple[bytes, Any] | None = None
        self._samples = 0
        self._steps: list[Any] = []
        #: For every shard of the present walk its worker, and how many steps it has done.
        self._hosts: dict[int, tuple[int, int]] = {}

    # Methods that a subclass implements.

    def put(self, value: Any) -> Any:
        """Make a value available to workers, once."""
        return value

    def submit(self, worker: int, method: str, args: Sequence[Any]) -> Any:
        """Begin `Worker.call(method, *args)` on a worker; arguments may be what `put` or `keep` returned."""
        raise NotImplementedError

    def wait(self, calls: Sequence[Any]) -> Sequence[Any]:
        """Those of the calls that are done, after a short wait at most."""
        raise NotImplementedError

    def keep(self, call: Any) -> tuple[Any, tuple[float, int]]:
        """The result of a finished call, without moving it, and the cost that `Worker.call` reports. Raises WorkerLost or ResultLost."""
        raise NotImplementedError

    def fetch(self, value: Any) -> Any:
        """What `keep` returned, here. Raises ResultLost."""
        return value

    def replace(self, worker: int, number: int) -> bool:
        """Start a new worker, with a number of its own, in the place of a lost one, if that is possible."""
        return False

    # Methods that the native side calls.

    def begin(self, decided: str, preprocessing: str, chosen: Sequence[int] | None = None, moved: Any = None) -> None:
        """The settings, once they are known; which samples; and the baseline in the coordinates of the training, if these are others."""
        self._decided, self._preprocessing = decided, preprocessing
        if chosen is not None:
            self._arrays = self._arrays[list(chosen)]
        self._moved = None if moved is None else self.put(ImplicitModel(moved))

    def start(self, method: str, numbers: list[int], parts: list[bytes]) -> int:
        """Begin a call; returns the number that its results are asked for by."""
        self._started += 1
        if method == "begin_walk":
            self._begin_walk(numbers[1], *parts)
        elif method == "end_walk":
            self._end_walk()
        elif method == "lend":
            self._remember(parts[0], self.put(parts[1]), len(parts[1]), set())
        else:
            begun: dict[str, Callable[..., Generator[bytes | None, None, None]]] = {
                "statistics": self._statistics, "walk": self._walk, "rows": self._rows,
                "weights": functools.partial(self._sums, "weights"), "errors": functools.partial(self._sums, "errors"),
            }  # fmt: skip
            self._results = {self._started: begun[method](*numbers, parts)}
        return self._started

    def next(self, call: int) -> bytes | None:
        """The next result in order, or None if none is ready; empty bytes ask for the statistics of the rows."""
        return next(self._results[call])

    def _statistics(self, samples: int, features: int, targets: int, parts: list[bytes]) -> Generator[bytes | None, None, None]:
        """The one result is the sum over all shards."""
        (task,) = parts
        shards = self._cut(BLOCK * self.shard_blocks, samples)
        network = self._sent() if self._moved is None else self._moved

        def job(first: int, count: int) -> _Job:
            samples, data = zip(*((samples, data) for _, samples, data in shards[first : first + count]), strict=True)
            return _Job("statistics", _given(task, network, samples, *data), _size(features, targets))

        def jobs() -> list[tuple[int, int, _Job]]:
            # The worker with the least work takes the next branch.
            owners = [self._place(number, len(shards)) for number in range(len(shards))]
            return [(*branch, job(*branch)) for branch in branches(owners, FAN_IN)]

        self.bytes["tasks"] += len(task) * len(jobs())
        return self._summed("statistics", jobs, features, targets)

    def _sent(self) -> Any:
        """The baseline, which is sent only once."""
        if self._network is None and self._baseline is not None:
            self._network = self.put(self._baseline)
        return self._network

    def _sent_model(self, model: bytes) -> Any:
        """The baseline as a model, sent again only where it differs from the one sent last."""
        digest = hashlib.blake2b(model, digest_size=16).digest()
        if self._model is None or self._model[0] != digest:
            self._model = (digest, self.put(model))
            self.bytes["tasks"] += len(model)
        return self._model[1]

    def _sums(self, kind: str, samples: int, unit: int, parts: list[bytes]) -> Generator[bytes | None, None, None]:
        """The contribution of every block of samples to the row weights, or to the error of the outputs, in order."""
        task = self.put(parts[0])
        model, network = (self._sent_model(parts[1]), None) if parts[1] else (b"", self._sent())
        shards = self._cut(unit * self.shard_blocks, samples)
        self.bytes["tasks"] += len(parts[0])
        begin = time.monotonic()
        for _ in range(self.retries + 1):
            jobs = [
                _Job(
                    "sums", _given(task, model, network, first, count, shard), len(parts[0]) + len(parts[1]), kind=kind,
                    at=self._place(number, len(shards)),
                )
                for number, (first, count, shard) in enumerate(shards)
            ]  # fmt: skip
            try:
                yield from self._run(jobs)
                results = [self.fetch(job.value) for job in jobs]
                break
            except ResultLost:
                continue
        else:
            raise WorkFailed(f"{kind}: results were lost {self.retries + 1} times; see retries")
        self.wall[kind] += time.monotonic() - begin
        for blocks in results:
            self.bytes["results"] += sum(map(len, blocks))
            yield from blocks

    def _begin_walk(self, samples: int, about: bytes, model: bytes) -> None:
        """A walk through the layers begins; the network is sent with the first one. Walks do not overlap."""
        self._task, self._samples = (about, self._sent_model(model)), samples
        self._steps, self._hosts = [], {}

    def _walk(self, walk: int, group: int, features: int, targets: int, steps: list[bytes]) -> Generator[bytes | None, None, None]:
        """Statistics of a group after these further steps."""
        self._steps += [self.put(step) for step in steps]
        shards = self._cut(PIECE * self.shard_blocks, self._samples)
        self.bytes["steps"] += sum(map(len, steps))

        def args(numbers: range, worker: int) -> Sequence[Any]:
            on_their_way, inputs = [], []
            for number in numbers:
                host, known = self._hosts.get(number, (worker, 0))
                known = known if host == worker else 0
                # Until the worker answers, the driver does not know how many steps it has done.
                self._hosts[number] = (worker, 0)
                first, count, data = shards[number]
                on_their_way.append(ShardOnItsWay(number, first, count, known))
                inputs += [] if known else [data]
            share = 1 / -(-len(shards) // len(self.alive))
            first_step = min(shard.known for shard in on_their_way)
            return (walk, group, share, *self._task, on_their_way, first_step, *inputs, *self._steps[first_step:])

        def done(numbers: range, worker: int) -> None:
            self._hosts.update({number: (worker, len(self._steps)) for number in numbers})

        def job(first: int, count: int, at: int) -> _Job:
            numbers, size = range(first, first + count), _size(features, targets)
            return _Job("walk", functools.partial(args, numbers), size, at=at, done=functools.partial(done, numbers))

        def jobs() -> list[tuple[int, int, _Job]]:
            # A shard stays on its worker; others are distributed in order, so that neighbours are on the same worker.
            hosts = [self._hosts.get(number, (-1, 0))[0] for number in range(len(shards))]
            owners = [
                self.alive.index(host) if host in self.alive else self._place(number, len(shards)) for number, host in enumerate(hosts)
            ]
            return [(first, count, job(first, count, owners[first])) for first, count in branches(owners, TOGETHER)]

        return self._summed("walk", jobs, features, targets)

    def _end_walk(self) -> None:
        """A walk is over; workers drop its states when the next one begins."""
        self._task, self._steps, self._hosts = None, [], {}

    def _rows(self, features: int, targets: int, inverses: int, parts: list[bytes]) -> Generator[bytes | None, None, None]:
        """Blocks of rows over one design; the statistics are on the workers that summed them, or are sent by the driver.

        Where the blocks share inverses, each worker makes some of them for all, the first time that it meets the design.
        """
        digest, *tasks = parts
        self.bytes["tasks"] += sum(map(len, tasks))
        self.blocks += len(tasks)
        # One call per worker, because rows are treated together.
        length = -(-len(tasks) // len(self.alive))
        shares = [tasks[first : first + length] for first in range(0, len(tasks), length)]
        begin = time.monotonic()
        for _ in range(self.retries + 1):
            while digest not in self._known:
                yield b""
            shared, size, places = self._known[digest]
            held = size + sum(map(len, tasks))
            worth = len(shares) > 1 and digest not in self._spread and features >= _WORTH_SENDING * self.threads
            about = (digest, shared, features, targets)
            made = [
                _Job("inverse", _given(*about, tasks[0], number), held, kind="rows", at=number)
                for number in range(inverses if worth else 0)
            ]
            try:
                yield from self._run(made)
                sent = [job.value for job in made]
                # The next calls go to the same worker, which has the inverse that it made in memory.
                jobs = [_Job("rows", _given(*about, len(sent), *sent, *part), held, at=k) for k, part in enumerate(shares)]
                yield from self._run(jobs)
                results = [self.fetch(job.value) for job in jobs]
                break
            except ResultLost:
                self._known.pop(digest, None)
        else:
            raise WorkFailed(f"rows over {features:,} features: results were lost {self.retries + 1} times; see retries")
        self.wall["rows"] += time.monotonic() - begin
        if made:
            self.bytes["inverses"] += sum(job.made for job in made)
        self.bytes["statistics"] += size * len({job.worker for job in made + jobs} - places)
        places.update(job.worker for job in made + jobs)
        self._spread[digest] = None
        while len(self._spread) > _SPREAD:
            self._spread.popitem(last=False)
        for blocks in results:
            self.bytes["results"] += sum(map(len, blocks))
            yield from blocks

    # How the work is distributed.

    def _cut(self, size: int, samples: int) -> list[tuple[int, int, Any]]:
        """First sample, number of samples and data of every shard of `size` samples."""
        if size not in self._shards:
            shards = []
            for first in range(0, len(self._arrays.U if isinstance(self._arrays, States) else self._arrays), size):
                part = self._arrays[first : first + size]
                states = part._for_core() if isinstance(part, States) else None
                arrays = (part.U, part.Z, part.X, part.Y) if isinstance(part, States) else (part,)
                self.bytes["shards"] += sum(a.nbytes for a in arrays)
                shards.append((first, len(arrays[0]), self.put({"states": states, "u": None if states else part})))
            self._shards[size] = shards
        return [(first, min(count, samples - first), data) for first, count, data in self._shards[size] if first < samples]

    def _remember(self, digest: bytes, value: Any, size: int, places: set[int]) -> None:
        self._known[digest] = (value, size, places)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)

    def _place(self, number: int, shards: int) -> int:
        """The worker of a shard that has none yet: equal numbers for all, neighbours together, more for the last ones."""
        return -(-(number + 1) * len(self.alive) // shards) - 1

    def _summed(
        self, kind: str, jobs: Callable[[], list[tuple[int, int, _Job]]], features: int, targets: int
    ) -> Generator[bytes | None, None, None]:
        """Statistics of all shards, summed on the workers, from jobs for branches of the tree; lost results are computed again."""
        for _ in range(self.retries + 1):
            try:
                begin = time.monotonic()
                parts = jobs()
                yield from self._run([job for _, _, job in parts])
                self.wall[kind] += time.monotonic() - begin
                begin = time.monotonic()
                found = [_Branch(first, count, job.value, job.made, job.worker) for first, count, job in parts]
                total = yield from self._merged(found, features, targets)
                result = self.fetch(total.value)
                self.wall["merge"] += time.monotonic() - begin
                break
            except ResultLost:
                # Workers that still have their shards only repeat the sums.
                continue
        else:
            raise WorkFailed(f"{kind} of {features:,} features: results were lost {self.retries + 1} times; see retries")
        self._remember(_core.fingerprint(result), total.value, len(result), {total.worker})
        self.bytes["totals"] += len(result)
        yield result

    def _merged(self, parts: list[_Branch], features: int, targets: int) -> Generator[None, None, _Branch]:
        """The sum of all branches, on the workers that have most of them."""
        block = max(part.shards for part in parts)
        while len(parts) > 1:
            block *= FAN_IN
            places = [part.first // block for part in parts]
            groups = [[part for part, at in zip(parts, places, strict=True) if at == place] for place in sorted(set(places))]
            merges: list[_Job] = []
            for group in groups:
                most = collections.Counter(part.worker for part in group).most_common(1)[0][0]
                args = _given(features, targets, [part.shards for part in group], *(part.value for part in group))
                at = self.alive.index(most) if most in self.alive else None
                merges.append(_Job("merge", args, sum(part.size for part in group), at=at))
            yield from self._run([job for job, group in zip(merges, groups, strict=True) if len(group) > 1])
            parts = []
            for job, group in zip(merges, groups, strict=True):
                if len(group) == 1:
                    parts += group
                    continue
                self.bytes["statistics"] += sum(part.size for part in group if part.worker != job.worker)
                parts.append(_Branch(group[0].first, sum(part.shards for part in group), job.value, job.made, job.worker))
        return parts[0]

    def _run(self, jobs: list[_Job]) -> Generator[None, None, None]:
        """Does all jobs, at most two of them on a worker at a time; a job whose worker is lost goes to another."""
        waiting = collections.deque(jobs)
        flying: list[tuple[Any, int, _Job]] = []
        while waiting or flying:
            load = collections.Counter(worker for _, worker, _ in flying)
            for _ in range(len(waiting)):
                job = waiting.popleft()
                worker = self._worker(job, load)
                if load[worker] >= 2 or len(flying) >= 2 * len(self.alive):
                    waiting.append(job)
                    continue
                load[worker] += 1
                self.calls[job.method] += 1
                flying.append((self.submit(worker, job.method, job.args(worker)), worker, job))
            done = self.wait([call for call, _, _ in flying])
            if not done:
                yield None
                continue
            lost = set()
            for entry in [entry for entry in flying if any(entry[0] is call for call in done)]:
                call, worker, job = entry
                flying.remove(entry)
                try:
                    job.value, (seconds, job.made) = self.keep(call)
                except WorkerLost as why:
                    lost.add(worker)
                    self._count_loss(job, why)
                    waiting.append(job)
                    continue
                job.worker = worker
                self.busy[job.kind] += seconds
                if job.done and worker in self.alive:
                    job.done(worker)
            # Their other calls are lost too, and are reported as lost.
            for worker in lost & set(self.alive):
                self._hosts = {k: host for k, host in self._hosts.items() if host[0] != worker}
                self._numbered += 1
                at = self.alive.index(worker)
                self.alive[at : at + 1] = [self._numbered - 1] if self.replace(worker, self._numbered - 1) else []
                if not self.alive:
                    raise WorkFailed("all workers are lost")

    def _worker(self, job: _Job, load: collections.Counter[int]) -> int:
        """The worker for a job: the one it prefers, or the one with the fewest jobs."""
        if job.at is not None:
            return self.alive[job.at % len(self.alive)]
        return min(self.alive, key=lambda worker: load[worker])

    def _count_loss(self, job: _Job, why: Exception) -> None:
        job.lost += 1
        if job.lost > self.retries:
            raise WorkFailed(
                f"{job.method}: its worker was lost {job.lost} times, the last time because {why}; "
                f"the call holds about {job.size / 1e6:,.0f} MB besides its shard: give workers more memory, or smaller shards "
                "(shard_blocks)"
            ) from why


def prepare(sim: SIM, baseline: Any, U: Any) -> Any:
    """The baseline of a `fit` on workers; refuses settings that only work on one machine."""
    if callable(sim.penalty):
        raise SettingError("penalty: expected a name on a cluster, got a function, which this process calls")
    return _baseline(baseline, U)
