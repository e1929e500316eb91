"""On real local clusters: the same bits for any number of workers, and with a node that dies in the middle."""

import collections
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import ROOT, needs

import simplicit
from simplicit import SIM, Network
from simplicit.engine import Engine, WorkFailed, Worker, WorkerLost
from simplicit.network import Builder

ray = needs("ray")
from ray.cluster_utils import Cluster  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

import simplicit.ray  # noqa: E402


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=s) / np.sqrt(s[1]) for s in ((48, 30), (40, 48), (6, 40))]
    network = Network.from_layers(weights, [0.1 * rng.normal(size=k) for k in (48, 40, 6)])
    return network, rng.normal(size=(9_000, 30))


@pytest.fixture(scope="module")
def convolutional():
    """A convolution, a residual block, a strided one, an average and a classifier; 1100 images are four shards and a bit."""
    rng = np.random.default_rng(1)

    def weights(rows, columns):
        return (rng.normal(size=(rows, columns)) * np.sqrt(2 / columns)).astype(np.float32)

    b = Builder([2, 8, 8])
    first = b.activation(b.convolution(0, weights(8, 18), [3, 3], [1, 1], [1] * 4, [0.1] * 8), "relu", "first")
    sums = b.plus(b.convolution(first, weights(8, 72), [3, 3], [1, 1], [1] * 4), first)
    second = b.activation(sums, "relu", "second")
    third = b.activation(b.convolution(second, weights(12, 72), [3, 3], [2, 2], [1] * 4, [0.0] * 12), "relu", "third")
    network = b.build(b.linear(b.flatten(b.global_average(third)), weights(5, 12), [0.1] * 5))
    return network, rng.normal(size=(1_100, 2, 8, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def pruned(convolutional):
    """What this process makes of it."""
    network, U = convolutional
    return SIM(network=network, **TO_HALF).fit(U)


#: Rough models, a survey, steered prices, single moves and bounds are all on the way; positions fill no block.
TO_HALF = {"target_sparsity": 0.5, "positions": 7}


@pytest.fixture(scope="module")
def cluster():
    """Two nodes; tests add more."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 200_000_000})
    cluster.add_node(num_cpus=2, object_store_memory=200_000_000)
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_the_same_bits(problem, cluster):
    network, U = problem
    settings = {"penalty": "l1", "beta": 1e-3, "cascade": True}
    here = SIM(network=network, **settings).fit(U)

    # Joins the cluster that is there.
    there = simplicit.ray.fit(SIM(**settings), network, U, address=cluster.address)
    assert len([node for node in ray.nodes() if node["Alive"]]) == 2
    with pytest.raises(simplicit.SettingError, match="ray.shutdown"):
        simplicit.ray.fit(SIM(**settings), network, U, address="10.0.0.1:6379")
    assert there.model_ == here.model_
    assert there.report_.rows == here.report_.rows
    assert set(there.travelled_) == {"shards", "statistics", "tasks", "totals", "results"}
    assert there.travelled_["shards"] == U.nbytes
    assert there.work_["calls"]["rows"] == 5 and there.work_["busy"]["statistics"] > 0

    # Plain states, another shard size, two threads a worker.
    states = network.states(U)
    plain = SIM(**settings).fit(states)
    assert simplicit.ray.fit(SIM(**settings), states, shard_blocks=2, cpus_per_task=2).model_ == plain.model_

    # Held-out samples stay held out; bounds are made on workers.
    drop = {"max_drop": 20.0, "rounds": 1, "bounds": "sampled"}
    here = SIM(network=network, **drop).fit(U)
    there = simplicit.ray.fit(SIM(**drop), network, U, shard_blocks=4)
    assert there.model_ == here.model_ and there.report_.rows == here.report_.rows
    assert there.report_.results["max_bound_distance"] is not None


def test_feature_maps_have_the_same_bits_for_any_number_of_workers(convolutional, pruned, cluster):
    network, U = convolutional
    for workers, blocks in ((1, 2), (2, 1), (4, 1)):
        if workers == 4:
            cluster.add_node(num_cpus=1, object_store_memory=200_000_000)
            cluster.wait_for_nodes()
        sim = SIM(**TO_HALF)
        there = simplicit.ray.fit(sim, network, U, address=cluster.address, workers=workers, shard_blocks=blocks)
        assert there.model_ == pruned.model_, f"{workers} workers"
        assert there.report_.rows == pruned.report_.rows
        # The error of the outputs is computed on the workers.
        assert there.work_["busy"]["errors"] > 0
        assert there.report_.results["equilibrium_error"] == pruned.report_.results["equilibrium_error"]
        # Samples and network travel once, however many walks there are.
        assert there.travelled_["shards"] == U.nbytes
        assert there.work_["calls"]["walk"] > 0 and there.work_["calls"]["rows"] > 0


def test_a_node_that_dies_in_the_middle_changes_nothing(convolutional, pruned, cluster):
    network, U = convolutional
    doomed = cluster.add_node(num_cpus=1, object_store_memory=100_000_000)
    cluster.wait_for_nodes()
    if not ray.is_initialized():
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    killed = []
    others = [n for n in ray.nodes() if n["Alive"] and n["NodeID"] != doomed.node_id and n["Resources"].get("CPU", 0) >= 1]

    class Watched(simplicit.ray.RayEngine):
        """The node dies once its shards have walked through some layers, with a call of theirs on the way."""

        def submit(self, worker, method, args):
            call = super().submit(worker, method, args)
            known = min(shard.known for shard in args[5]) if method == "walk" else 0
            if known >= 2 and worker == 1 and not killed:
                killed.append(known)
                cluster.remove_node(doomed, allow_graceful=False)
            return call

        def actor_options(self):
            """The second worker stands on the doomed node, the first one must not."""
            node = {0: others[0]["NodeID"], 1: doomed.node_id}.get(len(self._actors))
            on = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)} if node else {}
            return {**super().actor_options(), **on}

    engine = Watched(network, U, workers=2, cpus_per_task=1, gpus_per_task=0, shard_blocks=1, retries=3, patience=60)
    survived = simplicit.ray.fit_on(SIM(**TO_HALF), network, U, engine)
    # It did die at work, with states of some layers, and another took its place.
    assert killed and engine.alive == [0, 2]
    assert survived.model_ == pruned.model_
    assert survived.report_.rows == pruned.report_.rows


def test_the_command_line_does_the_same(convolutional, cluster, tmp_path):
    program = ROOT / "target/release/simplicit"
    if not program.exists() and os.environ.get("CI") != "true":
        pytest.skip("the program is not built")
    network, U = convolutional
    network.to_implicit().save(tmp_path / "net.safetensors")
    np.save(tmp_path / "u.npy", U[:600])

    def train(out, *more, python=sys.executable):
        command = [program, "train", "net.safetensors", "--inputs", "u.npy", "--target-sparsity", "0.5", "--out", out, *more]
        environment = {**os.environ, "SIMPLICIT_PYTHON": str(python)}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    here, there = train("here.safetensors"), train("there.safetensors", "--ray", cluster.address)
    assert (here.returncode, there.returncode) == (0, 0), here.stderr + there.stderr
    assert (tmp_path / "here.safetensors").read_bytes() == (tmp_path / "there.safetensors").read_bytes()
    # One line where the package, or Python, is missing.
    for python, why in ((tmp_path / "none", "cannot be started"), ("/bin/true", "pip install 'simplicit[ray]'")):
        missing = train("missing.safetensors", "--ray", cluster.address, python=python)
        assert missing.returncode == 2 and why in missing.stderr and len(missing.stderr.splitlines()) == 1, missing.stderr
    assert not (tmp_path / "missing.safetensors").exists()


def test_the_command_line_with_a_choice_of_outputs_other_coordinates_and_a_checkpoint(cluster, tmp_path):
    program = ROOT / "target/release/simplicit"
    if not program.exists() and os.environ.get("CI") != "true":
        pytest.skip("the program is not built")
    onnx = needs("onnx")
    rng = np.random.default_rng(2)
    weights = [(rng.normal(size=s) / np.sqrt(s[1])).astype(np.float32) for s in ((20, 12), (4, 20), (3, 20))]
    node, value, kind = onnx.helper.make_node, onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    names = ("w", "v", "x")
    nodes = [node("Gemm", ["u", "w"], ["z"], transB=1), node("Relu", ["z"], ["h"])]
    nodes += [node("Gemm", ["h", name], [output], transB=1) for name, output in (("v", "first"), ("x", "second"))]
    outputs = [value("first", kind, [None, 4]), value("second", kind, [None, 3])]
    constants = [onnx.numpy_helper.from_array(w, name) for w, name in zip(weights, names, strict=True)]
    graph = onnx.helper.make_graph(nodes, "two", [value("u", kind, [None, 12])], outputs, constants)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)]), tmp_path / "two.onnx")
    np.save(tmp_path / "u.npy", rng.normal(size=(1_500, 12)).astype(np.float32))

    def train(out, *more):
        asked = ["--output", "second", "--rescale", "--kappa", "0.9", "--penalty", "l1", "--samples", "1200"]
        command = [program, "train", "two.onnx", "--inputs", "u.npy", *asked, "--out", out, *more]
        environment = {**os.environ, "SIMPLICIT_PYTHON": sys.executable}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return (tmp_path / out).read_bytes()

    here = train("here.safetensors")
    assert train("there.safetensors", "--ray", cluster.address, "--checkpoint", "kept") == here
    assert any((tmp_path / "kept").iterdir())
    # What the cluster finished serves a training without it.
    assert train("again.safetensors", "--checkpoint", "kept") == here


def test_what_a_cluster_refuses(problem):
    network, U = problem
    with pytest.raises(simplicit.SettingError, match="penalty: expected a name on a cluster"):
        simplicit.engine.prepare(SIM(penalty=lambda w: w), network, U)


def test_out_of_memory_is_a_lost_worker_and_says_why(monkeypatch):
    engine = object.__new__(simplicit.ray.RayEngine)

    def get(_):
        raise ray.exceptions.OutOfMemoryError("the node ran out of memory")

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(WorkerLost, match="ran out of memory"):
        engine.fetch(None)


class Pool(Engine):
    """Workers in threads of this process, and a list of those that are to be lost."""

    def __init__(self, pool, *args, lose=(), **kwargs):
        self.pool, self.lose, self.most = pool, list(lose), 0
        super().__init__(*args, **kwargs)

    def begin(self, decided, preprocessing, *more):
        super().begin(decided, preprocessing, *more)
        self.made = {worker: Worker(decided, preprocessing, 1) for worker in self.alive}
        self.busy_with = collections.defaultdict(threading.Lock)

    def submit(self, worker, method, args):
        def call():
            with self.busy_with[worker]:
                return self.made[worker].call(method, *args)

        return (worker, self.pool.submit(call))

    def wait(self, calls):
        self.most = max(self.most, len(calls))
        time.sleep(0.001)
        return [call for call in calls if call[1].done()]

    def keep(self, call):
        worker, future = call
        if self.lose and self.calls["walk"] + self.calls["statistics"] > self.lose[0]:
            self.lose.pop(0)
            self.gone = worker
            raise WorkerLost("somebody pulled the plug")
        return future.result()

    def replace(self, worker, number):
        if len(self.lose) % 2:
            self.made[number] = Worker(self._decided, self._preprocessing, 1)
            return True
        return False


def test_an_engine_of_ones_own(problem, convolutional, pruned):
    """The seam: threads of this process, results out of order, workers that are lost and replaced, or only lost."""
    network, U = problem
    with ThreadPoolExecutor(3) as pool:
        sim = SIM(target_sparsity=0.5)
        engine = Pool(pool, network, U, workers=3, shard_blocks=1, lose=[5, 20])
        sim._fit(network, U, engine)
        assert sim.model_ == SIM(network=network, target_sparsity=0.5).fit(U).model_
        assert not engine.lose and len(engine.alive) == 2 and 3 < engine.most <= 6

        network, U = convolutional
        engine = Pool(pool, network, U, workers=3, shard_blocks=1, lose=[8, 33])
        put = []
        engine.put = lambda value: put.append(value) or value
        sim = SIM(**TO_HALF)._fit(network, U, engine)
        assert sim.model_ == pruned.model_ and not engine.lose and len(engine.alive) == 2
        # The network is put once for all walks, and once as itself, for the weights of rows.
        model = network.to_implicit().to_bytes()
        assert sum(isinstance(value, bytes) and len(value) == len(model) for value in put) == 1
        assert sum(isinstance(value, Network) for value in put) == 1

        # Bounded: what is lost again and again is an error that says how large it was.
        engine = Pool(pool, network, U, workers=4, shard_blocks=1, retries=1, lose=[0] * 50)
        with pytest.raises(WorkFailed, match=r"walk: its worker was lost 2 times.*pulled the plug.*MB"):
            SIM(**TO_HALF)._fit(network, U, engine)


@pytest.mark.parametrize(
    "settings",
    [
        {"samples": 2_000, "mu": 1e-3, "output_refit": 0},
        {"gamma": 2.0, "mu": 1e-3, "output_refit": 0},
        {"rescale": True, "kappa": 0.9, "mu": 1e-3, "output_refit": 0},
        {"rescale": True, "mu": 1e-3, "output_refit": 0},
    ],
)
def test_samples_and_coordinates_of_ones_own(problem, settings):
    """Workers get the samples that were chosen, and the baseline in the coordinates of the training."""
    network, U = problem[0], problem[1][:2_500]
    here = SIM(network=network, **settings).fit(U)
    with ThreadPoolExecutor(2) as pool:
        engine = Pool(pool, network, U, workers=2, shard_blocks=1)
        there = SIM(**settings)._fit(network, U, engine)
    assert there.model_ == here.model_ and there.report_.rows == here.report_.rows
    assert engine.bytes["shards"] == settings.get("samples", len(U)) * U[0].nbytes


def test_feature_maps_in_other_coordinates(convolutional):
    rng, U = np.random.default_rng(3), convolutional[1]
    b = Builder([2, 8, 8])
    at = 0
    for channels in (2, 6):
        weights = (rng.normal(size=(6, 9 * channels)) / 3).astype(np.float32)
        at = b.activation(b.convolution(at, weights, [3, 3], [1, 1], [1] * 4, [0.1] * 6), "relu", f"of {channels}")
    network = b.build(b.linear(b.flatten(b.global_average(at)), rng.normal(size=(5, 6)).astype(np.float32), [0.1] * 5))
    settings = {"rescale": True, "kappa": 0.9, "mu": 1e-3, "positions": 7, "samples": 600}
    here = SIM(network=network, **settings).fit(U)
    with ThreadPoolExecutor(2) as pool:
        engine = Pool(pool, network, U, workers=2, shard_blocks=1)
        there = SIM(**settings)._fit(network, U, engine)
    assert there.model_ == here.model_ and there.report_.rows == here.report_.rows


def test_a_driver_that_dies_goes_on_from_its_checkpoint(convolutional, pruned, tmp_path):
    """What workers finished is asked for once: the second driver needs only what the first one did not come to."""
    network, U = convolutional

    class Ends(Exception):
        pass

    class Ending(Pool):
        ends = None

        def submit(self, worker, method, args):
            if self.ends is not None and self.calls["rows"] > self.ends:
                raise Ends
            return super().submit(worker, method, args)

    def trained(pool, ends=None):
        engine = Ending(pool, network, U, workers=2, shard_blocks=1)
        engine.ends = ends
        try:
            sim = SIM(checkpoint=tmp_path / "kept", **TO_HALF)._fit(network, U, engine)
        except Ends:
            return None, engine
        return sim, engine

    with ThreadPoolExecutor(2) as pool:
        stopped, first = trained(pool, ends=14)
        assert stopped is None and first.calls["rows"] == 15
        sim, second = trained(pool)
        assert sim.model_ == pruned.model_ and sim.report_.rows == pruned.report_.rows
        # Nothing is left to do but the bounds, which are not kept.
        again, third = trained(pool)
        assert again.model_ == pruned.model_
    assert third.calls["rows"] < second.calls["rows"] and third.calls["walk"] < second.calls["walk"]


def test_designs_stay_with_their_workers(convolutional, pruned, monkeypatch):
    """A worker makes the design of a group once, and one worker an inverse for all, however often rows are asked for."""
    monkeypatch.setattr(simplicit.engine, "_WORTH_SENDING", 1)
    network, U = convolutional
    asked = collections.Counter()

    class Counted(Pool):
        room = None

        def begin(self, *about):
            super().begin(*about)
            for worker in self.made.values() if self.room is not None else ():
                worker._room = self.room

        def submit(self, worker, method, args):
            if method in ("rows", "inverse"):
                asked[worker, args[0]] += 1
            return super().submit(worker, method, args)

    def trained(pool, room=None):
        engine = Counted(pool, network, U, workers=3, shard_blocks=1)
        engine.room = room
        sim = SIM(**TO_HALF)._fit(network, U, engine)
        assert sim.model_ == pruned.model_ and sim.report_.rows == pruned.report_.rows
        return engine, sum((worker.made for worker in engine.made.values()), collections.Counter())

    with ThreadPoolExecutor(3) as pool:
        engine, made = trained(pool)
        groups = {digest for _, digest in asked}
        assert made["designs"] == len(asked) < sum(asked.values())
        # Six values of rho.
        assert engine.calls["inverse"] > 0 and 0 < made["inverses"] <= 6 * len(groups)
        assert engine.bytes["inverses"] > 0
        # Without room for any they are made again in every call, with the same bits.
        asked.clear()
        _, again = trained(pool, room=0)
        assert again["designs"] == sum(asked.values()) and again["inverses"] >= made["inverses"]


def test_shards_are_cut_into_branches_of_the_tree():
    for count in range(1, 40):
        for workers in range(1, 8):
            engine = Engine(None, np.zeros((1, 1)), workers=workers, shard_blocks=1)
            owners = [engine._place(number, count) for number in range(count)]
            shares = collections.Counter(owners)
            assert owners == sorted(owners) and max(shares.values()) - min(shares.values()) <= 1
            assert len(shares) == min(workers, count)
            found = simplicit.engine.branches(owners, 8)
            covered = [range(first, first + size) for first, size in found]
            assert [number for branch in covered for number in branch] == list(range(count))
            assert all(size in (1, 2, 4, 8) and first % size == 0 for first, size in found)
            assert all(len({owners[number] for number in branch}) == 1 for branch in covered)
    assert simplicit.engine.branches([0, 0, 1, 1], 8) == [(0, 2), (2, 2)]
    assert simplicit.engine.branches([0] * 7, 4) == [(0, 4), (4, 2), (6, 1)]


def test_workers_add_up_their_own_shards_first(convolutional):
    """Of four shards one worker sends nothing, two send one sum a group, three two; the bits are the same."""
    network, U = convolutional[0], convolutional[1][:1024]
    settings = {"mu": 1e-3, "positions": 7, "bounds": "off"}
    here = SIM(network=network, **settings).fit(U)

    class Watched(Pool):
        """Who made which bytes, and which of them go to somebody else."""

        def begin(self, *about):
            super().begin(*about)
            self.makers, self.sums, self.sent = {}, [], collections.defaultdict(set)

        def submit(self, worker, method, args):
            values = [value for value in args if isinstance(value, bytes) and self.makers.get(id(value), worker) != worker]
            self.sent[method] |= {(worker, id(value), len(value)) for value in values}
            return super().submit(worker, method, args)

        def keep(self, call):
            value, about = super().keep(call)
            if isinstance(value, bytes):
                self.makers[id(value)] = call[0]
                self.sums.append(value)
            return value, about

    groups = 4
    for workers, calls, merges in ((1, 1, 0), (2, 2, 1), (3, 3, 1)):
        with ThreadPoolExecutor(workers) as pool:
            engine = Watched(pool, network, U, workers=workers, shard_blocks=1)
            there = SIM(**settings)._fit(network, U, engine)
        assert there.model_ == here.model_ and there.report_.rows == here.report_.rows, f"{workers} workers"
        assert (engine.calls["walk"], engine.calls["merge"]) == (groups * calls, groups * merges)
        assert engine.most <= 2 * workers
        # Sums of one group have one size: all but one of them travel, and the total to those who solve rows elsewhere.
        size = {group: len(engine.sums[group * (calls + merges)]) for group in range(groups)}
        travelled = {method: sum(length for _, _, length in engine.sent[method]) for method in ("merge", "rows")}
        assert travelled["merge"] == (calls - 1) * sum(size.values())
        assert engine.bytes["statistics"] == travelled["merge"] + travelled["rows"]


def test_statistics_that_nobody_has_any_more_are_lent(convolutional, pruned, monkeypatch):
    monkeypatch.setattr(simplicit.engine, "_KEPT", 1)
    network, U = convolutional
    lent = []

    class Counted(Pool):
        def start(self, method, numbers, parts):
            if method == "lend":
                assert parts[0] == simplicit._core.fingerprint(parts[1])
                lent.append(parts[0])
            return super().start(method, numbers, parts)

    with ThreadPoolExecutor(2) as pool:
        there = SIM(**TO_HALF)._fit(network, U, Counted(pool, network, U, workers=2, shard_blocks=1))
    # Bounds ask for groups that were solved before.
    assert lent and there.model_ == pruned.model_ and there.report_.rows == pruned.report_.rows


def test_an_error_on_a_worker_is_raised(convolutional):
    network, U = convolutional

    class Broken(Pool):
        def keep(self, call):
            raise RuntimeError("no workers left")

    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="no workers left"):
        SIM()._fit(network, U, Broken(pool, network, U, workers=1, shard_blocks=4))
