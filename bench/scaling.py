"""One training of a network with feature maps in one process and on local Ray clusters, what travels, and a model of cost.

    python bench/scaling.py [--network net.onnx --inputs images.npy] [--samples 512] [--workers 0,1,2,4] [--page docs/cluster.md]
    python bench/scaling.py ... --runs runs.json         # the runs alone, on the machine to measure
    python bench/scaling.py --from runs.json --page docs/cluster.md

Zero workers is one process without Ray. With --mu every run is one model at one price instead of a search for a target.

Without files it is the bundled convolutional network on the bundled FashionMNIST images.

Every cluster has one node of one CPU for each worker, and every run must give the bits of the run without Ray, or this
fails. Seconds count where there are as many cores as workers; beyond that bytes and calls do. The model is fitted to the
runs and predicts larger clusters. With --page tables go into the page between its marks, and the figure beside it as
scaling.svg.
"""

import argparse
import collections
import hashlib
import json
import math
import os
import pathlib
import sys
import time
import types

import numpy as np
import page

import simplicit
from simplicit.engine import FAN_IN, PIECE, TOGETHER, branches

#: What is assumed of a cluster that was not measured.
BANDWIDTH = 10e9 / 8
THREADS = 0.7
#: Bytes of a node's object store: the statistics and the inverses of the widest group, several times.
STORE = 2**31
PHASES = ("weights", "walk", "merge", "rows", "errors")
#: Cores that this process may use.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


#: What a run says of its engine.
COUNTED = ("busy", "wall", "calls", "bytes", "blocks")


class Runs:
    """The runs so far, each with the bits of the first."""

    def __init__(self, network, images, asked):
        self.network, self.images, self.asked = network, images, asked
        self.rows, self.cores, self.count = [], CORES, len(images)
        self.said = f"`{page.command()}`: {len(images):,} images, {network.nonzeros:,} weights; {page.machine()}."

    @classmethod
    def read(cls, paths):
        """Runs of another time or place."""
        runs = cls.__new__(cls)
        rows = []
        for path in paths:
            vars(runs).update(json.loads(path.read_text(encoding="utf-8")))
            rows += runs.rows
        runs.rows = sorted(rows, key=lambda row: row["workers"])
        if len({row["bits"] for row in rows}) != 1:
            raise SystemExit("runs with different bits")
        for row in runs.rows:
            if row["engine"]:
                kinds = {k: collections.defaultdict(float, v) if isinstance(v, dict) else v for k, v in row["engine"].items()}
                row["engine"] = types.SimpleNamespace(**kinds)
        return runs

    def write(self, path):
        rows = [row | {"engine": row["engine"] and {k: getattr(row["engine"], k) for k in COUNTED}} for row in self.rows]
        path.write_text(json.dumps({"said": self.said, "cores": self.cores, "count": self.count, "rows": rows}, indent=1), encoding="utf-8")

    def sim(self):
        how = {"threads": 1, "device": "cpu", "bounds": "sampled", "progress": "none"}
        return simplicit.SIM(network=self.network, **self.asked, **how)

    def add(self, workers, run):
        begin = time.monotonic()
        sim, engine = run()
        seconds = time.monotonic() - begin
        bits = hashlib.sha256(sim.model_.to_bytes()).hexdigest()
        if self.rows and bits != self.rows[0]["bits"]:
            raise SystemExit(f"{workers} workers: other bits than {self.rows[0]['workers']}")
        self.rows.append(
            {"workers": workers, "seconds": seconds, "sparsity": float(sim.model_.sparsity().sparsity), "bits": bits, "engine": engine}
        )
        print(f"{workers} workers: {seconds:.1f} s", file=sys.stderr)

    def here(self):
        self.add(0, lambda: (self.sim().fit(self.images), None))

    def ray(self, workers):
        if workers == 0:
            return self.here()
        import ray
        from ray.cluster_utils import Cluster

        from simplicit.ray import RayEngine, fit_on

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": STORE})
        try:
            for _ in range(workers):
                cluster.add_node(num_cpus=1, object_store_memory=STORE)
            ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
            cluster.wait_for_nodes()
            sim = self.sim()
            engine = RayEngine(
                self.network, self.images, workers=workers, cpus_per_task=1, gpus_per_task=0, shard_blocks=1, retries=3, patience=300
            )  # fmt: skip
            self.add(workers, lambda: (fit_on(sim, self.network, self.images, engine), engine))
        finally:
            ray.shutdown()
            cluster.shutdown()

    def on_clusters(self):
        """The runs with Ray."""
        return [run for run in self.rows if run["engine"]]

    def tables(self):
        alone = [run["seconds"] for run in self.rows if not run["engine"]]
        lines = [("none", "–", f"{seconds:.1f}", "–", "–", "–", *["–"] * len(PHASES)) for seconds in alone]
        first = None
        for run in self.on_clusters():
            engine, seconds = run["engine"], run["seconds"]
            first = first or seconds
            idle = [1 - engine.busy[k] / max(1e-9, run["workers"] * engine.wall[k]) for k in PHASES]
            counts = run["workers"] <= self.cores
            lines.append((
                "Ray", str(run["workers"]), f"{seconds:.1f}" if counts else "–", f"{first / seconds:.2f}" if counts else "–",
                f"{sum(engine.bytes.values()) / 1e6:,.1f}", f"{sum(engine.calls.values()):,.0f}",
                *(f"{100 * max(0.0, i):.0f} %" if counts else "–" for i in idle),
            ))  # fmt: skip
        head = ("cluster", "workers", "seconds", "times one worker", "MB that travel", "calls", *(f"idle in {k}" for k in PHASES))
        last = self.rows[-1]["engine"]
        what = {
            "shards": "inputs, once", "tasks": "the network, once, and row problems", "steps": "solved rows, to every shard",
            "statistics": "sums of shards on the way to their total, and totals to those who solve rows",
            "inverses": "of a group, to those who solve its rows", "totals": "statistics of every group, to the driver",
            "results": "sums for row weights and rows, to the driver",
        }  # fmt: skip
        kinds = [(k, f"{last.bytes[k]:,}", text) for k, text in what.items()]
        return [page.table(head, lines), f"What travels, with {self.rows[-1]['workers']} workers:", page.table(("", "bytes", ""), kinds)]


class Cost:
    """Seconds of one training: arithmetic, latency and bytes.

    T = driver + Σ busy_k / (workers that phase k can use) + latency · calls + bytes / bandwidth
    """

    def __init__(self, runs):
        import scipy.optimize

        timed = [r for r in runs.on_clusters() if r["workers"] <= runs.cores]
        engines = [r["engine"] for r in timed]
        self.images = runs.count
        self.busy = {k: float(np.mean([e.busy[k] for e in engines])) for k in PHASES}
        self.driver = float(np.mean([r["seconds"] - sum(r["engine"].wall.values()) for r in timed]))
        one = engines[0]
        self.groups = one.calls["walk"] / len(branches([0] * self.shards(self.images), TOGETHER))
        self.rows_at_once = one.blocks / max(1, one.calls["rows"]) * timed[0]["workers"]
        self.sizes = {k: float(one.bytes[k]) for k in ("totals", "inverses", "results", "tasks", "steps")}
        # Core-seconds for a byte of a sum that is added to others.
        added = sum(e.bytes["totals"] * e.calls["walk"] / self.groups for e in engines if e.calls["merge"])
        self.adding = sum(e.busy["merge"] for e in engines) / added if added else 0.0
        left = [sum(r["engine"].wall.values()) - self.arithmetic(r["workers"], 1, self.images) for r in timed]
        design = [[sum(r["engine"].calls.values()), sum(r["engine"].bytes.values())] for r in timed]
        (self.latency, self.per_byte), _ = scipy.optimize.nnls(np.array(design, float), np.maximum(left, 0.0))

    def shards(self, images):
        return math.ceil(images / PIECE)

    def levels(self, nodes, images):
        """How often sums are added to those of other workers, and how many at a time."""
        sums = min(nodes, self.shards(images))
        return math.ceil(math.log(sums, FAN_IN) - 1e-9), min(sums, FAN_IN)

    def arithmetic(self, nodes, cores, images):
        threads = 1.0 if cores == 1 else THREADS * cores
        grown = images / self.images
        walk = grown * self.busy["walk"] / (min(nodes, self.shards(images)) * threads)
        levels, parts = self.levels(nodes, images)
        merge = self.adding * self.sizes["totals"] * levels * parts
        rows = self.busy["rows"] / (min(nodes, self.rows_at_once) * threads)
        # Weights come from the first 1,000 images at most.
        weights = self.busy["weights"] / (min(nodes, self.shards(min(images, 1000))) * threads)
        errors = grown * self.busy["errors"] / (min(nodes, self.shards(images)) * threads)
        return weights + walk + merge + rows + errors

    def seconds(self, nodes, cores, images):
        """On so many nodes of so many cores, one worker each, with so many images."""
        shards = min(nodes, self.shards(images))
        levels, parts = self.levels(nodes, images)
        calls = self.groups * (2 * shards + levels + nodes)
        sums = self.sizes["totals"] * levels * (parts - 1)
        spread = math.log2(max(2, nodes))
        shared = self.sizes["totals"] + self.sizes["inverses"] + self.sizes["results"] + self.sizes["steps"]
        sent = sums + shared * spread + self.sizes["tasks"]
        return self.driver + self.arithmetic(nodes, cores, images) + self.latency * calls / max(1, nodes) + sent / BANDWIDTH

    def tables(self, nodes, cores, images):
        lines = [
            ("seconds of the driver, alone", f"{self.driver:.2f}"),
            *((f"core-seconds of {k}", f"{self.busy[k]:.2f}") for k in PHASES),
            ("core-seconds to add a gigabyte of sums", f"{1e9 * self.adding:.2f}"),
            ("blocks of rows in a group, on average", f"{self.rows_at_once:.1f}"),
            ("seconds a call", f"{self.latency:.4f}"),
            ("seconds a byte here", f"{self.per_byte:.1e}"),
        ]
        counts = [2**k for k in range(int(math.log2(nodes)) + 1)]
        heads = [("nodes", *(f"seconds, {m:,} images" for m in images), *(f"times one node, {m:,} images" for m in images))]
        for n in counts:
            at = [self.seconds(n, cores, m) for m in images]
            lines_ = (str(n), *(f"{t:.2f}" for t in at), *(f"{self.seconds(1, cores, m) / t:.2f}" for m, t in zip(images, at, strict=True)))
            heads.append(lines_)
        assumed = (
            f"Predicted, not measured: nodes of {cores} cores, one worker each, whose threads are {THREADS} as fast as that many "
            f"cores alone; {BANDWIDTH * 8 / 1e9:.0f} Gb/s a node; latency and the driver's share as here; the walk grows with the images "
            "and rows do not; a group's rows spread over as many workers as it has blocks."
        )
        return ["Fitted to the runs:", page.table(("", ""), lines), assumed, page.table(heads[0], heads[1:])]

    def figure(self, runs, nodes, cores, images):
        """Times one node over nodes, as predicted; beside it the bound of perfect scaling."""
        width, height, left, top, right = 640, 320, 60, 20, 170
        counts = [2**k for k in range(int(math.log2(nodes)) + 1)]
        steps = len(counts) - 1

        def x(n):
            return left + math.log2(n) / steps * (width - left - right)

        def y(v):
            return height - 40 - math.log2(max(1.0, v)) / steps * (height - 40 - top)

        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
            "<title>Predicted speed over that of one node</title>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]
        for n in counts:
            parts.append(f'<line x1="{left}" x2="{width - right}" y1="{y(n):.1f}" y2="{y(n):.1f}" stroke="#ddd"/>')
            parts.append(f'<text x="{left - 6}" y="{y(n) + 4:.1f}" text-anchor="end">{n} ×</text>')
            parts.append(f'<text x="{x(n):.1f}" y="{height - 20}" text-anchor="middle">{n}</text>')
        parts.append(f'<text x="{(left + width - right) / 2}" y="{height - 4}" text-anchor="middle">nodes of {cores} cores</text>')
        lines = [("perfect", "#bbb", [(n, n) for n in counts])]
        for m, colour in zip(images, ("#1b6ca8", "#c0561f", "#3a8f3a"), strict=False):
            first = self.seconds(1, cores, m)
            lines.append((f"{m:,} images, predicted", colour, [(n, first / self.seconds(n, cores, m)) for n in counts]))
        for k, (name, colour, points) in enumerate(lines):
            line = " ".join(f"{x(n):.1f},{y(v):.1f}" for n, v in points)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
            parts.append(f'<text x="{width - right + 8}" y="{top + 16 + 18 * k}" fill="{colour}">{name}</text>')
        one = next((r["seconds"] for r in runs.on_clusters() if r["workers"] == 1), None)
        for run in runs.on_clusters():
            if one and run["workers"] <= runs.cores:
                parts.append(f'<circle cx="{x(run["workers"]):.1f}" cy="{y(one / run["seconds"]):.1f}" r="4" fill="#333"/>')
        parts.append(f'<text x="{width - right + 8}" y="{top + 16 + 18 * len(lines)}" fill="#333">● measured, 1 core a node</text>')
        return "\n".join([*parts, "</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", type=pathlib.Path, default=page.ROOT / "data/fashion_cnn.onnx", help="ONNX")
    parser.add_argument("--inputs", type=pathlib.Path, help=".npy, as the network takes them")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--sparsity", type=float, default=0.8)
    parser.add_argument("--mu", type=float, help="one model at this price instead of a target")
    parser.add_argument("--workers", type=counts, default=[0, 1, 2, 4], help="0: no Ray; for example 0,1,2,4")
    parser.add_argument("--nodes", type=int, default=64, help="of the cluster to predict")
    parser.add_argument("--cores", type=int, default=64, help="of each of its nodes")
    parser.add_argument("--images", type=int, nargs="+", help="to predict for; by default those of the runs and 50,000")
    parser.add_argument("--runs", type=pathlib.Path, help="write the runs here and stop")
    parser.add_argument("--from", dest="known", type=pathlib.Path, nargs="+", help="runs that --runs has written, instead of new ones")
    parser.add_argument("--page", type=pathlib.Path, help="write the tables into this page, and scaling.svg beside it")
    args = parser.parse_args()
    runs = Runs.read(args.known) if args.known else measured(args)
    if args.runs:
        return runs.write(args.runs)
    cost = Cost(runs)
    asked = args.images or [runs.count, 50_000]
    said = f"{runs.said} All runs gave the same bits, {100 * runs.rows[0]['sparsity']:.1f} % sparse."
    text = "\n\n".join([said, *runs.tables(), *cost.tables(args.nodes, args.cores, asked)])
    print(text)
    if args.page:
        (args.page.parent / "scaling.svg").write_text(cost.figure(runs, args.nodes, args.cores, asked), encoding="utf-8")
        page.fill(args.page, "bench/scaling.py", text + "\n\n![predicted speed over one node](scaling.svg)")


def counts(text):
    return [int(count) for count in text.split(",")]


def measured(args):
    if args.inputs:
        images = np.load(args.inputs, mmap_mode="r")[: args.samples]
    else:
        sys.path.insert(0, str(page.ROOT / "python/tests"))
        from conftest import idx

        images = idx("fashion_train_images.idx.gz")[: args.samples, None].astype(np.float32) / 255
    asked = {"mu": args.mu} if args.mu else {"target_sparsity": args.sparsity}
    runs = Runs(simplicit.Network.from_onnx(args.network), np.ascontiguousarray(images), asked)
    for workers in args.workers:
        runs.ray(workers)
    return runs


if __name__ == "__main__":
    main()
