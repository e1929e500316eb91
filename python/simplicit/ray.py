"""Ray: the same training on a cluster, the same bits for any number of workers.

Every worker is an actor. It holds shards of samples with the states of their layers, sums statistics, and solves blocks of
rows. If a worker or a node dies, that costs time but changes no result.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import ray

from simplicit import _core
from simplicit.engine import Engine, ResultLost, Worker, WorkerLost, prepare
from simplicit.errors import SettingError
from simplicit.estimator import SIM, _baseline
from simplicit.network import Network

_PATIENCE = 0.2


class RayEngine(Engine):
    """An engine whose workers are actors, distributed over the nodes."""

    def __init__(
        self, baseline: Any, U: Any, *, workers: int | None, cpus_per_task: int, gpus_per_task: float, shard_blocks: int,
        retries: int, patience: float,
    ) -> None:  # fmt: skip
        self._patience = patience
        resources: Any = ray.cluster_resources
        if workers is None:
            workers = max(1, int(resources().get("CPU", 1)) // cpus_per_task)
        self._cpus, self._gpus = cpus_per_task, gpus_per_task
        self._actors: dict[int, Any] = {}
        super().__init__(baseline, U, workers=workers, shard_blocks=shard_blocks, retries=retries)
        # A GPU makes its own inverses.
        self.threads = float("inf") if gpus_per_task else cpus_per_task

    def begin(self, decided: str, preprocessing: str, chosen: Sequence[int] | None = None, moved: Any = None) -> None:
        """Starts the workers."""
        super().begin(decided, preprocessing, chosen, moved)
        for worker in self.alive:
            self._actors[worker] = self._actor()
        ready = {actor.__ray_ready__.remote(): worker for worker, actor in self._actors.items()}
        started, late = ray.wait(list(ready), num_returns=len(ready), timeout=self._patience)
        if not started:
            self.close()
            raise SettingError(
                f"workers: expected at least one of {len(ready)} workers of {self._cpus} CPUs to start in {self._patience:.0f} s; "
                "see ray status"
            )
        # Do not wait for actors for which the cluster has no room.
        for worker in (ready[call] for call in late):
            ray.kill(self._actors.pop(worker))
            self.alive.remove(worker)

    def actor_options(self) -> dict[str, Any]:
        """How Ray places a worker. Ray does not restart a lost one: the engine replaces it, because it knows its shards."""
        gpus = {"num_gpus": self._gpus} if self._gpus else {}
        return {"num_cpus": self._cpus, "scheduling_strategy": "SPREAD", "max_restarts": 0, **gpus}

    def _actor(self) -> Any:
        # A worker may use the same share of a node's memory as of its CPUs.
        nodes: Any = ray.nodes
        most = max((node["Resources"].get("CPU", 1) for node in nodes() if node["Alive"]), default=1)
        share = min(1.0, self._cpus / max(1.0, most))
        device = "auto" if self._gpus else "cpu"
        actor: Any = ray.remote(Worker).options(**self.actor_options())
        return actor.remote(self._decided, self._preprocessing, self._cpus, device, share)

    def put(self, value: Any) -> Any:
        """Put a value into the object store."""
        return ray.put(value)

    def submit(self, worker: int, method: str, args: Sequence[Any]) -> Any:
        """Returns two objects: the result, which stays on its node, and its cost."""
        return self._actors[worker].call.options(num_returns=2).remote(method, *args)

    def wait(self, calls: Sequence[Any]) -> Sequence[Any]:
        """Those of the calls that are done, after a short wait at most."""
        said = {call[1]: call for call in calls}
        done, _ = ray.wait(list(said), num_returns=1, timeout=_PATIENCE)
        done, _ = ray.wait(list(said), num_returns=len(said), timeout=0) if done else ([], [])
        return [said[call] for call in done]

    def keep(self, call: Any) -> tuple[Any, tuple[float, int]]:
        """The reference of the result."""
        return call[0], self.fetch(call[1])

    def fetch(self, value: Any) -> Any:
        """The value of a reference."""
        try:
            return ray.get(value)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, ray.exceptions.ObjectLostError):
                raise ResultLost(str(cause)) from error
            raise cause from None
        except ray.exceptions.ObjectLostError as error:
            raise ResultLost(str(error)) from error
        except (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError) as error:
            raise WorkerLost(" ".join(str(error).split())) from error

    def replace(self, worker: int, number: int) -> bool:
        """Another actor, where a node has room for it now."""
        # The name of the lost actor stays valid for calls that are already on the way to it.
        ray.kill(self._actors[worker])
        resources: Any = ray.available_resources
        if resources().get("CPU", 0) < self._cpus:
            return False
        actor = self._actor()
        ready, _ = ray.wait([actor.__ray_ready__.remote()], timeout=self._patience)
        if not ready:
            ray.kill(actor)
            return False
        self._actors[number] = actor
        return True

    def close(self) -> None:
        """Stop the workers."""
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors = {}


def fit(
    sim: SIM,
    baseline: Any,
    U: Any = None,
    *,
    address: str | None = None,
    workers: int | None = None,
    cpus_per_task: int = 1,
    num_gpus: float = 0,
    shard_blocks: int = 1,
    retries: int = 3,
    patience: float = 60.0,
) -> SIM:
    """``sim.fit(baseline, U)`` on a Ray cluster.

    Parameters
    ----------
    sim : SIM
        What to fit; changed in place, as by its own ``fit``.
    baseline, U
        As for :meth:`SIM.fit`.
    address : str, optional
        An existing cluster, ``auto`` or ``ray://host:port``; by default the one this process is connected to, or a
        new one on this machine.
    workers : int, optional
        Workers to ask for; by default one for every ``cpus_per_task`` CPUs that the cluster has now. A cluster that grows
        by itself grows for more, if ``patience`` lets it.
    cpus_per_task : int, optional
        CPUs, and with them threads, of one worker.
    num_gpus : float, optional
        GPUs of one worker. With any, cardinality rows and statistics of feature maps are done there, and the bits agree with those
        of no other run. Not tested so far.
    shard_blocks : int, optional
        Blocks of 1024 samples in a shard (of 256 images, where the network has feature maps), a power of two. Bits depend
        neither on this nor on the number of workers.
    retries : int, optional
        How often one piece of work may be lost with its worker before training fails.
    patience : float, optional
        Seconds that workers may take to start; training does without those that take longer.

    Returns
    -------
    SIM
        The one given, with ``model_``, ``report_``, ``travelled_`` (bytes of shards, steps, statistics, tasks and
        results) and ``work_`` (calls, core-seconds of workers and seconds that passed, by kind).
    """
    if not ray.is_initialized():
        # A cluster that died may have left its address behind, which Ray would try to join: without an address, none is joined.
        ray.init(address=address or os.environ.get("RAY_ADDRESS") or "local", log_to_driver=False, logging_level=logging.ERROR)
    elif address not in (None, "auto"):
        connected = ray.get_runtime_context().gcs_address
        if address != connected:
            raise SettingError(
                f"address: expected {connected}, which this process is connected to, got {address}; call ray.shutdown() first"
            )
    known = prepare(sim, baseline, U)
    engine = RayEngine(
        known, U, workers=workers, cpus_per_task=cpus_per_task, gpus_per_task=num_gpus, shard_blocks=shard_blocks, retries=retries,
        patience=patience,
    )  # fmt: skip
    return fit_on(sim, known, U, engine)


def fit_on(sim: SIM, baseline: Any, U: Any, engine: RayEngine) -> SIM:
    """``sim.fit(baseline, U)`` on an engine."""
    try:
        sim._fit(baseline, U, engine)
    finally:
        engine.close()
    sim.travelled_ = dict(engine.bytes)  # type: ignore[attr-defined]
    sim.work_ = {"calls": dict(engine.calls), "busy": dict(engine.busy), "wall": dict(engine.wall)}  # type: ignore[attr-defined]
    return sim


def _chosen(names: dict[str, str]) -> dict[str, Any]:
    """The command line's flags about an ONNX file as arguments of :meth:`Network.from_onnx`."""
    chosen: dict[str, Any] = {name.replace("-", "_"): value for name, value in names.items()}
    if "input_shape" in chosen:
        chosen["input_shape"] = [int(size) for size in chosen["input_shape"].replace("×", "x").split("x")]
    if "fill" in chosen:
        pairs = (pair.rpartition("=") for pair in chosen["fill"].split(","))
        chosen["fill"] = {name.strip(): float(value) for name, _, value in pairs}
    return chosen


def _serve() -> None:
    """``simplicit train --ray``: calls on the standard input, results on the standard output, until a blank line."""
    import json
    import os
    import sys

    import numpy as np

    # Other code may print: its lines go to stderr, so that they do not mix with the answers.
    answers, questions = os.fdopen(os.dup(1), "wb"), sys.stdin.buffer
    os.dup2(2, 1)

    def answer(about: dict[str, Any], result: bytes = b"") -> None:
        answers.write(json.dumps(about).encode() + b"\n" + result)
        answers.flush()

    engine = None
    try:
        while (line := questions.readline().strip()) != b"":
            asked = json.loads(line)
            parts = [questions.read(length) for length in asked["lengths"]]
            try:
                if engine is None:
                    ray.init(address=asked["address"], log_to_driver=False, logging_level=logging.ERROR)
                    U = np.load(asked["inputs"], mmap_mode="r") if "inputs" in asked else None
                    given, names = asked.get("network", asked.get("states")), asked.get("names")
                    baseline = Network.from_onnx(given, **_chosen(names)) if names else _baseline(given, U)
                    moved = _core.Model.load(asked["moved"]) if "moved" in asked else None
                    engine = RayEngine(
                        baseline, U, workers=None, cpus_per_task=1, gpus_per_task=0, shard_blocks=1, retries=3, patience=60.0
                    )  # fmt: skip
                    engine.begin(asked["decided"], asked["preprocessing"], moved=moved)
                    answer({"workers": len(engine.alive)})
                elif "method" in asked:
                    answer({"call": engine.start(asked["method"], asked["numbers"], parts)})
                else:
                    result = engine.next(asked["next"])
                    answer({} if result is None else {"length": len(result)}, result or b"")
            except Exception as error:
                answer({"error": " ".join(str(error).split()) or type(error).__name__})
    finally:
        if engine is not None:
            engine.close()


if __name__ == "__main__":
    _serve()
