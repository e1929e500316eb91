"""Ray: the same training on a cluster, the same bits for any number of workers.

Shards of samples become statistics on the workers, G goes into the object store once, blocks of rows fan out, results
stream back. A worker or a node that dies is retried by Ray and the result is unchanged.
"""

from __future__ import annotations

import logging
from typing import Any

import ray

from simplicit.engine import Engine, prepare
from simplicit.errors import SettingError
from simplicit.estimator import SIM

_PATIENCE = 0.2


def _run(function: Any, *args: Any) -> Any:
    """On a worker: as many threads as CPUs were granted."""
    context: Any = ray.get_runtime_context()
    granted = context.get_assigned_resources().get("CPU", 1)
    return function(*args, max(1, int(granted)))


class RayEngine(Engine):
    """Ray tasks, retried for ever, spread over the nodes."""

    def __init__(self, baseline: Any, U: Any, *, cpus_per_task: int, shard_blocks: int) -> None:
        options = {"max_retries": -1, "num_cpus": cpus_per_task, "scheduling_strategy": "SPREAD"}
        self._remote = ray.remote(_run).options(**options)
        resources: Any = ray.cluster_resources
        cpus = int(resources().get("CPU", 1))
        super().__init__(baseline, U, workers=max(1, cpus // cpus_per_task), shard_blocks=shard_blocks)

    def put(self, value: Any) -> Any:
        """Into the object store."""
        return ray.put(value)

    def submit(self, function: Any, *args: Any) -> Any:
        """As a task."""
        return self._remote.remote(function, *args)

    def poll(self, call: Any) -> Any:
        """The result, or None after a moment."""
        done, _ = ray.wait([call], timeout=_PATIENCE)
        return ray.get(call) if done else None


def fit(
    sim: SIM,
    baseline: Any,
    U: Any = None,
    *,
    address: str | None = None,
    cpus_per_task: int = 1,
    shard_blocks: int = 4,
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
    cpus_per_task : int, optional
        CPUs, and with them threads, of one task.
    shard_blocks : int, optional
        Blocks of 1024 samples in a shard, a power of two. Bits depend neither on this nor on the number of workers.

    Returns
    -------
    SIM
        The one given, with ``model_``, ``report_`` and ``travelled_``: bytes of shards, statistics, tasks and results.
    """
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    elif address not in (None, "auto"):
        connected = ray.get_runtime_context().gcs_address
        if address != connected:
            raise SettingError(
                f"address: expected {connected}, which this process is connected to, got {address}; call ray.shutdown() first"
            )
    known = prepare(sim, baseline, U)
    engine = RayEngine(known, U, cpus_per_task=cpus_per_task, shard_blocks=shard_blocks)
    sim._fit(known, U, engine)
    sim.travelled_ = dict(engine.bytes)  # type: ignore[attr-defined]
    return sim
