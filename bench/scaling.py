"""Serial, threads, Python multiprocessing and Ray on the same problem (the paper's Fig. 6), and the bytes that travel.

    python bench/scaling.py [--workers 1 2] [--samples 2000] [--page docs/python.md]

The problem is the paper's: FashionMNIST states, full connectivity, perspective penalty, one convex solve per row, kappa
0.99. Every run must give the same bits as the serial one, or this fails. With --page the tables go into the page between
its marks, and the figure beside it as scaling.svg.
"""

import argparse
import multiprocessing
import os
import pathlib
import pickle
import sys
import time

import page

import simplicit
from simplicit import SIM
from simplicit.engine import Engine

sys.path.insert(0, str(page.ROOT / "python/tests"))
from conftest import idx  # noqa: E402

KINDS = ("shards", "statistics", "tasks", "results")
COLOURS = {"serial": "#888", "threads": "#1b6ca8", "multiprocessing": "#c0561f", "Ray": "#3a8f3a"}


def call(pickled):
    """On a worker."""
    function, args = pickle.loads(pickled)
    return function(*args, 1)


class Processes(Engine):
    """A pool of processes: every call carries all it needs, as multiprocessing does."""

    def __init__(self, pool, *args, **kwargs):
        self.pool = pool
        super().__init__(*args, **kwargs)
        # Nothing is put anywhere once: shards and statistics are counted with every call.
        self.bytes.clear()

    def submit(self, function, *args):
        pickled = pickle.dumps((function, args), protocol=5)
        self.sent = getattr(self, "sent", 0) + len(pickled)
        return self.pool.apply_async(call, (pickled,))

    def poll(self, call):
        return call.get()

    def travelled(self):
        """What was pickled; tasks are with the statistics they are solved from."""
        return {"calls": self.sent, "results": self.bytes["results"]}


def ready():
    """What a worker does first."""
    return simplicit.__version__


class Scaling:
    """The runs so far, each with the bits of the first."""

    def __init__(self, states):
        self.states = states
        self.rows = []
        self.bits = None

    def sim(self, threads):
        return SIM(penalty="perspective", preset="paper", alpha=1e-2, threads=threads, progress="none")

    def timed(self, engine, workers, run):
        begin = time.monotonic()
        sim, travelled = run()
        seconds = time.monotonic() - begin
        bits = sim.model_.to_bytes()
        if self.bits not in (None, bits):
            raise SystemExit(f"{engine} with {workers} workers: other bits than serial")
        self.bits = bits
        self.rows.append({"engine": engine, "workers": workers, "seconds": seconds, "travelled": travelled})
        print(f"{engine:16} {workers:3} workers {seconds:8.2f} s {sum(travelled.values()):14,} bytes", file=sys.stderr)

    def local(self, engine, workers):
        self.timed(engine, workers, lambda: (self.sim(workers).fit(self.states), {}))

    def processes(self, workers):
        def run():
            engine = Processes(pool, self.states, None, workers=workers, shard_blocks=1)
            return self.sim(1)._fit(self.states, None, engine), engine.travelled()

        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            pool.starmap(ready, [()] * (4 * workers), chunksize=1)
            self.timed("multiprocessing", workers, run)

    def ray(self, workers):
        import ray

        from simplicit import ray as cluster

        def run():
            fitted = cluster.fit(self.sim(1), self.states, shard_blocks=1)
            return fitted, fitted.travelled_

        ray.init("local", num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="error")
        try:
            # Workers start once; a cluster is already there.
            ray.get([ray.remote(ready).remote() for _ in range(4 * workers)])
            self.timed("Ray", workers, run)
        finally:
            ray.shutdown()

    def markdown(self):
        """Seconds and bytes, as tables."""
        n, p, q = self.states.Z.shape[1], self.states.U.shape[1], self.states.Y.shape[1]
        serial = self.rows[0]["seconds"]
        runs = [
            (r["engine"], str(r["workers"]), f"{r['seconds']:.2f}", f"{serial / r['seconds']:.2f}",
             f"{sum(r['travelled'].values()):,}" if r["travelled"] else "–")
            for r in self.rows
        ]  # fmt: skip
        said = (
            f"`{page.command()}`: {self.states.samples:,} samples, {n} states, {p} inputs, {q} outputs; "
            f"{page.machine()}. All runs gave the same bits."
        )
        parts = [said, page.table(("", "workers", "seconds", "times as fast as serial", "bytes that travel"), runs)]
        on_ray = [r["travelled"] for r in self.rows if r["engine"] == "Ray"]
        if on_ray:
            what = {
                "shards": "U, Z, X, Y, once",
                "statistics": "G, H, e of states and of outputs, once each into the object store",
                "tasks": "row problems",
                "results": "statistics of shards, and rows",
            }
            kinds = [(kind, f"{on_ray[-1].get(kind, 0):,}", what[kind]) for kind in KINDS]
            several = "" if all(t == on_ray[0] for t in on_ray) else f", with {self.rows[-1]['workers']} workers"
            parts += [f"What travels on Ray{several}:", page.table(("", "bytes", ""), kinds)]
        return "\n\n".join(parts)

    def figure(self):
        """Seconds over workers, one line an engine, as a small SVG."""
        width, height, left, top, right = 640, 300, 60, 20, 190
        most = max(r["seconds"] for r in self.rows)
        workers = sorted({r["workers"] for r in self.rows})
        x = {w: left + (k + 0.5) * (width - left - right) / len(workers) for k, w in enumerate(workers)}

        def y(seconds):
            return top + (height - top - 40) * (1 - seconds / (1.1 * most))

        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
            "<title>Seconds of one training, by engine and number of workers</title>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]
        for k in range(5):
            at = y(most * k / 4)
            parts.append(f'<line x1="{left}" x2="{width - right}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
            parts.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{most * k / 4:.1f} s</text>')
        for w in workers:
            name = f"{w} worker{'s' if w > 1 else ''}"
            parts.append(f'<text x="{x[w]:.1f}" y="{height - 18}" text-anchor="middle">{name}</text>')
        for k, (engine, colour) in enumerate(COLOURS.items()):
            rows = [r for r in self.rows if r["engine"] == engine]
            if not rows:
                continue
            points = [(x[r["workers"]], y(r["seconds"])) for r in rows]
            if engine == "serial":
                points = [(left, points[0][1]), (width - right, points[0][1])]
            line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
            dash = ' stroke-dasharray="4 4"' if engine == "serial" else ""
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
            if engine != "serial":
                parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{colour}"/>' for a, b in points]
            megabytes = max(sum(r["travelled"].values()) for r in rows) / 1e6
            travel = f", {megabytes:.0f} MB travel" if megabytes else ""
            parts.append(f'<text x="{width - right + 8}" y="{top + 16 + 18 * k}" fill="{colour}">{engine}{travel}</text>')
        return "\n".join([*parts, "</svg>", ""])


def main():
    cores = os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[w for w in (1, 2, 4, 8) if w <= cores])
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--page", type=pathlib.Path, help="write the tables into this page, and scaling.svg beside it")
    args = parser.parse_args()
    network = simplicit.Network.from_onnx(page.ROOT / "data/fashion_fc.onnx")
    images = idx("fashion_train_images.idx.gz")[: args.samples]
    scaling = Scaling(network.states(images.reshape(len(images), -1) / 255.0))
    scaling.local("serial", 1)
    for run in (lambda w: scaling.local("threads", w), scaling.processes, scaling.ray):
        for workers in args.workers:
            run(workers)
    print(scaling.markdown())
    if args.page:
        (args.page.parent / "scaling.svg").write_text(scaling.figure(), encoding="utf-8")
        page.fill(args.page, "bench/scaling.py", scaling.markdown() + "\n\n![seconds by engine and workers](scaling.svg)")


if __name__ == "__main__":
    main()
