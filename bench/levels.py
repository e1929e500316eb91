"""Drop of test accuracy against sparsity for one network: one `simplicit train` per level and draw of unlabelled images.

    python bench/levels.py --network resnet20_cifar10.onnx --inputs train.bin.gz --test test.bin.gz --samples 5000 \
        --levels 0.5,0.6,0.7,0.8,0.9 --seeds 3 --jobs 8 --threads 2 -- --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225

Everything behind `--` goes to `simplicit train`. Prints a Markdown table (mean and half of the range over draws) and, with
`--json FILE`, writes what every run said. Test labels are read once a run, after training. `--from FILE` reads such a file
instead of running anything; `--figure FILE.svg` draws it (with matplotlib), beside others' figures where they are given:
`--beside "CHITA++ (with labels)=0.5:-0.32,0.6:-0.58"`.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor


def run(given, level, seed, folder):
    stem = folder / f"{level}-{seed}"
    command = [given.program, "train", "--network", given.network, "--inputs", given.inputs, "--samples", str(given.samples)]
    command += ["--seed", str(seed), "--target-sparsity", str(level), "--test-inputs", given.test, "--test-labels", given.test]
    command += ["--threads", str(given.threads), "--device", given.device, "--progress", "none"]
    command += ["--out", f"{stem}.safetensors", "--json", f"{stem}.json", *given.rest]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        results = json.loads(pathlib.Path(f"{stem}.json").read_text())
    except OSError:
        print(f"level {level}, seed {seed}: {done.stderr.strip() or done.returncode}", file=sys.stderr, flush=True)
        return None
    drop = 100 * (results["accuracy"] - results["baseline_accuracy"])
    seconds = results["seconds"]["total"]
    print(f"level {level} seed {seed}: {results['sparsity']:.4f} {drop:+.2f} in {seconds:.0f} s", flush=True)
    return {
        "level": level,
        "seed": seed,
        "drop": drop,
        "agreement": results["agreement"],
        "sparsity": results["sparsity"],
        "accuracy": results["accuracy"],
        "baseline_accuracy": results["baseline_accuracy"],
        "seconds": seconds,
    }


def table(runs):
    """A row a level: what was asked for, the drop over draws, the agreement with the network."""
    lines = ["| sparsity % | accuracy, points | draws | agreement with the network % | seconds a run |", "|---|---|---|---|---|"]
    for level in sorted({r["level"] for r in runs}):
        here = [r for r in runs if r["level"] == level]
        drops, agreements = [r["drop"] for r in here], [100 * r["agreement"] for r in here if "agreement" in r]
        mean, half = sum(drops) / len(drops), (max(drops) - min(drops)) / 2
        spread = f" ± {half:.2f}" if len(here) > 1 else ""
        timed = [r["seconds"] for r in here if "seconds" in r]
        seconds = f"{sum(timed) / len(timed):.0f}" if timed else "–"
        each = ", ".join(f"{d:+.2f}" for d in drops)
        agree = f"{min(agreements):.1f}–{max(agreements):.1f}" if agreements else "–"
        row = f"| {100 * level:g} | **{mean:+.2f}**{spread} | {each} | {agree} | {seconds} |"
        lines.append(row.replace("-", "−"))
    return "\n".join(lines)


def figure(runs, beside, path):
    """Drops against sparsity, a dot a draw, the mean as a line."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "levels"
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(figsize=(7, 3.8))
    levels = sorted({r["level"] for r in runs})
    means = [sum(d) / len(d) for d in ([r["drop"] for r in runs if r["level"] == level] for level in levels)]
    axes.axhline(0, color="#999", linewidth=0.8)
    axes.plot([100 * level for level in levels], means, color="#1b6ca8", label="simplicit (no labels)")
    axes.plot([100 * r["sparsity"] for r in runs], [r["drop"] for r in runs], "o", color="#1b6ca8", markersize=3.5)
    for text, colour in zip(beside, ["#c8553d", "#588157", "#7b4b94", "#b08900"], strict=False):
        name, points = text.split("=")
        pairs = [tuple(map(float, point.split(":"))) for point in points.split(",")]
        axes.plot([100 * x for x, _ in pairs], [y for _, y in pairs], "s--", color=colour, markersize=4, label=name)
    axes.set_xlabel("sparsity over all parameters, %")
    axes.set_ylabel("change of test accuracy, points")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left")
    fig.tight_layout()
    fig.savefig(path, metadata={"Date": None})


def parsed(text, **own):
    """The flags of such a script, those of its own by name, and in `rest` what goes to `simplicit train`."""
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="target/release/simplicit")
    parser.add_argument("--network")
    parser.add_argument("--inputs")
    parser.add_argument("--test", help="test inputs that are their own labels (CIFAR's binary format)")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="of each run")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json")
    parser.add_argument("--from", dest="source", help="a file that --json wrote, instead of runs")
    parser.add_argument("--figure")
    for name, how in own.items():
        parser.add_argument(f"--{name}", **how)
    given = parser.parse_args(arguments[:cut])
    given.rest = arguments[cut + 1 :]
    if not given.source and not (given.network and given.inputs and given.test):
        parser.error("--network, --inputs and --test, or --from")
    return given


def found(given, run_all):
    """What the runs said, from a file or by running them; written where that is asked for."""
    runs = json.loads(pathlib.Path(given.source).read_text()) if given.source else run_all(given)
    if given.json:
        pathlib.Path(given.json).write_text(json.dumps(runs, indent=1) + "\n")
    if not runs:
        sys.exit("no run succeeded")
    return runs


def main():
    given = parsed(
        __doc__,
        samples={"type": int, "default": 5000},
        levels={"default": "0.5"},
        jobs={"type": int, "default": 1, "help": "runs at a time"},
        beside={"action": "append", "default": [], "help": "NAME=LEVEL:DROP,LEVEL:DROP for the figure"},
    )
    runs = found(given, run_all)
    print(f"\nBaseline {100 * runs[0]['baseline_accuracy']:.2f} %.\n")
    print(table(runs))
    if given.figure:
        figure(runs, given.beside, given.figure)


def run_all(given):
    """Every level and draw, some at a time."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        # Sparse models last longest: they begin first.
        tasks = [(level, seed) for level in sorted(map(float, given.levels.split(",")), reverse=True) for seed in range(given.seeds)]
        return [r for r in pool.map(lambda t: run(given, *t, pathlib.Path(folder)), tasks) if r]


if __name__ == "__main__":
    main()
