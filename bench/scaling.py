"""Serial, threads, Python multiprocessing and Ray on the same problem (the paper's Fig. 6), and the bytes that travel.

    python bench/scaling.py [--workers 1 2] [--samples 2000] [--out docs/scaling.svg]

The problem is the paper's: FashionMNIST states, full connectivity, perspective penalty, one convex solve per row, kappa
0.99. Every run must give the same bits as the serial one, or this fails.
"""

import argparse
import json
import multiprocessing
import pathlib
import sys
import time

import numpy as np

import simplicit
from simplicit import SIM
from simplicit.engine import Engine

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python/tests"))
from conftest import idx  # noqa: E402


class Processes(Engine):
    """A pool of processes: everything is pickled for every call, as multiprocessing does."""

    def __init__(self, pool, *args, **kwargs):
        self.pool = pool
        super().__init__(*args, **kwargs)

    def submit(self, function, *args):
        return self.pool.apply_async(function, (*args, 1))

    def poll(self, call):
        return call.get()


def ready():
    """What a worker does first."""
    return simplicit.__version__


def timed(name, workers, run, expected):
    begin = time.monotonic()
    sim, travelled = run()
    seconds = time.monotonic() - begin
    same = expected is None or sim.model_.to_bytes() == expected
    if not same:
        raise SystemExit(f"{name} with {workers} workers: other bits than serial")
    row = {"engine": name, "workers": workers, "seconds": round(seconds, 2), "travelled": travelled}
    print(json.dumps(row), flush=True)
    return row, sim.model_.to_bytes()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--no-ray", action="store_true")
    args = parser.parse_args()
    network = simplicit.Network.from_onnx(ROOT / "data/fashion_fc.onnx")
    images = idx("fashion_train_images.idx.gz")[: args.samples]
    states = network.states(images.reshape(len(images), -1) / 255.0)

    def sim(threads):
        return SIM(penalty="perspective", preset="paper", alpha=1e-2, threads=threads)

    def local(threads):
        return lambda: (sim(threads).fit(states), {})

    rows = []
    row, bits = timed("serial", 1, local(1), None)
    rows.append(row)
    for workers in args.workers:
        rows.append(timed("threads", workers, local(workers), bits)[0])

    def processes(workers):
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            pool.map(abs, range(workers))
            engine = Processes(pool, states, None, workers=workers, shard_blocks=1)
            fitted = sim(1)._fit(states, None, engine)
        return fitted, dict(engine.bytes)

    for workers in args.workers:
        rows.append(timed("multiprocessing", workers, lambda w=workers: processes(w), bits)[0])
    if not args.no_ray:
        import ray

        from simplicit import ray as cluster

        for workers in args.workers:
            ray.init(num_cpus=workers, log_to_driver=False, logging_level="error")

            def on_ray():
                fitted = cluster.fit(sim(1), states, shard_blocks=1)
                return fitted, fitted.travelled_

            # Workers start once; a cluster is already there.
            ray.get([ray.remote(ready).remote() for _ in range(4 * workers)])
            rows.append(timed("ray", workers, on_ray, bits)[0])
            ray.shutdown()
    if args.out:
        args.out.write_text(figure(rows))


def figure(rows):
    """Seconds over workers, one line an engine, as a small SVG."""
    width, height, left, top = 520, 300, 60, 20
    most = max(r["seconds"] for r in rows)
    workers = sorted({r["workers"] for r in rows})
    colours = {"serial": "#888", "threads": "#1b6ca8", "multiprocessing": "#c0561f", "ray": "#3a8f3a"}
    x = {w: left + (k + 0.5) * (width - left - 20) / len(workers) for k, w in enumerate(workers)}
    y = lambda s: top + (height - top - 40) * (1 - s / (1.1 * most))  # noqa: E731
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">']
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for k in range(5):
        s = most * k / 4
        parts.append(f'<line x1="{left}" x2="{width - 20}" y1="{y(s):.1f}" y2="{y(s):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y(s) + 4:.1f}" text-anchor="end">{s:.1f} s</text>')
    for w in workers:
        parts.append(f'<text x="{x[w]:.1f}" y="{height - 18}" text-anchor="middle">{w} worker{"s" if w > 1 else ""}</text>')
    for k, engine in enumerate(dict.fromkeys(r["engine"] for r in rows)):
        points = [(x[r["workers"]], y(r["seconds"])) for r in rows if r["engine"] == engine]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colours[engine]}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{colours[engine]}"/>' for a, b in points]
        parts.append(f'<text x="{width - 130}" y="{top + 16 + 16 * k}" fill="{colours[engine]}">{engine}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    main()
