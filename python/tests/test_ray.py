"""On real local clusters: the same bits for any number of workers, and with a node that dies in the middle."""

import sys
import threading
import time
import uuid

import numpy as np
import pytest
from conftest import needs

import simplicit
from simplicit import SIM, Network

ray = needs("ray")
from ray.cluster_utils import Cluster  # noqa: E402

import simplicit.ray  # noqa: E402


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=s) / np.sqrt(s[1]) for s in ((48, 30), (40, 48), (6, 40))]
    network = Network.from_layers(weights, [0.1 * rng.normal(size=k) for k in (48, 40, 6)])
    return network, rng.normal(size=(9_000, 30))


@pytest.fixture
def cluster():
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 200_000_000})
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_the_same_bits(problem, cluster):
    network, U = problem
    settings = {"penalty": "l1", "beta": 1e-3, "cascade": True}
    here = SIM(**settings).fit(network, U)
    cluster.add_node(num_cpus=2, object_store_memory=200_000_000)
    cluster.wait_for_nodes()

    # Joins the cluster that is there.
    there = simplicit.ray.fit(SIM(**settings), network, U, address=cluster.address, shard_blocks=1)
    assert len([node for node in ray.nodes() if node["Alive"]]) == 2
    with pytest.raises(simplicit.SettingError, match="ray.shutdown"):
        simplicit.ray.fit(SIM(**settings), network, U, address="10.0.0.1:6379")
    assert there.model_ == here.model_
    assert there.report_.rows == here.report_.rows
    assert set(there.travelled_) == {"shards", "statistics", "tasks", "results"}
    assert there.travelled_["shards"] == U.nbytes

    # Plain states, another shard size, two threads a task.
    states = network.states(U)
    plain = SIM(**settings).fit(states)
    assert simplicit.ray.fit(SIM(**settings), states, shard_blocks=2, cpus_per_task=2).model_ == plain.model_

    # Threads are what was granted.
    for cpus in (1, 2):
        task = ray.remote(simplicit.ray._run).options(num_cpus=cpus)
        assert ray.get(task.remote(lambda *given: given, "work")) == ("work", cpus)

    # Held-out samples stay held out.
    drop = {"max_drop": 20.0, "penalty": "l1", "rounds": 1}
    assert simplicit.ray.fit(SIM(**drop), network, U).model_ == SIM(**drop).fit(network, U).model_


def slow(folder, function, *args):
    """On a worker: says where it runs, waits so that it can be killed in the middle, then does its work."""
    context = ray.get_runtime_context()
    (folder / f"{context.get_node_id()} {uuid.uuid4()}").touch()
    time.sleep(0.7)
    return simplicit.ray._run(function, *args)


def test_a_node_that_dies_in_the_middle_changes_nothing(problem, cluster, tmp_path):
    network, U = problem
    settings = {"penalty": "l1", "beta": 1e-3}
    here = SIM(**settings).fit(network, U)
    doomed = cluster.add_node(num_cpus=1, object_store_memory=100_000_000)
    cluster.add_node(num_cpus=1, object_store_memory=100_000_000)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    cluster.wait_for_nodes()
    # Workers cannot import this file.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

    class Slow(simplicit.ray.RayEngine):
        def submit(self, function, *args):
            calls.append(function)
            return self._slow.remote(tmp_path, function, *args)

    calls, killed = [], []

    def kill():
        deadline = time.monotonic() + 120
        while not any(p.name.startswith(doomed.node_id) for p in tmp_path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.02)
        killed.append(len(list(tmp_path.iterdir())))
        cluster.remove_node(doomed, allow_graceful=False)

    engine = Slow(network, U, cpus_per_task=1, shard_blocks=1)
    options = {"max_retries": -1, "num_cpus": 1, "scheduling_strategy": "SPREAD"}
    engine._slow = ray.remote(slow).options(**options)
    thread = threading.Thread(target=kill)
    thread.start()
    try:
        survived = SIM(**settings)._fit(network, U, engine)
    finally:
        thread.join()
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert survived.model_ == here.model_
    # It did die at work: more tasks began than were asked for.
    assert killed[0] < len(calls) < len(list(tmp_path.iterdir()))


def test_what_a_cluster_refuses(problem):
    network, U = problem
    with pytest.raises(simplicit.SettingError, match="samples: expected None on a cluster"):
        simplicit.engine.prepare(SIM(samples=10), network, U)
    with pytest.raises(simplicit.SettingError, match="rescale"):
        simplicit.engine.prepare(SIM(rescale=True), network, U)


def test_an_engine_of_ones_own(problem):
    """The seam: a pool of threads in this process, results out of order."""
    from concurrent.futures import ThreadPoolExecutor

    from simplicit.engine import Engine

    class Pool(Engine):
        def submit(self, function, *args):
            return pool.submit(function, *args, 1)

        def poll(self, call):
            return call.result()

    network, U = problem
    with ThreadPoolExecutor(3) as pool:
        sim = SIM(target_sparsity=0.5)
        sim._fit(network, U, Pool(network, U, workers=3, shard_blocks=4))
    assert sim.model_ == SIM(target_sparsity=0.5).fit(network, U).model_

    class Broken(Pool):
        def poll(self, call):
            raise RuntimeError("no workers left")

    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="no workers left"):
        SIM()._fit(network, U, Broken(network, U, workers=1, shard_blocks=4))
