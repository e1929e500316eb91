"""How far a model's outputs are from the network's on images that were not trained on, against the number of images trained on.

    python bench/images.py --network data/resnet20_cifar100.onnx --inputs train.bin --test test.bin --level 0.6 \
        --samples 500,1000,2000,5000,9000 --seeds 3 --device cuda --json images.json -- --mean … --std … --bounds off

Everything behind `--` goes to `simplicit train`, and `--mean` and `--std` among it to `simplicit predict` of the network. The
divergence is the mean over the test images of KL(network ‖ model) of softmax outputs; it needs no label. Accuracy is read from
the same runs. `--from FILE` reads such a JSON instead of running anything; `--figure FILE.svg` draws it (with matplotlib).
"""

import pathlib
import subprocess
import tempfile

import levels


def outputs(given, model, folder, flags):
    """log p of the test images."""
    import numpy as np

    file = folder / "outputs.npy"
    command = [given.program, "predict", model, "--inputs", given.test, "--out", str(file), *flags]
    subprocess.run(command, check=True, capture_output=True)
    y = np.load(file).astype(np.float64)
    y -= y.max(1, keepdims=True)
    return y - np.log(np.exp(y).sum(1, keepdims=True))


def preprocessing(rest):
    """The flags of the network's inputs among those of training."""
    pairs = zip(rest, rest[1:], strict=False)
    return [part for flag, value in pairs if flag in ("--mean", "--std", "--scale") for part in (flag, value)]


def run_all(given):
    import numpy as np

    runs = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        network = outputs(given, given.network, folder, preprocessing(given.rest))
        for samples in map(int, given.counts.split(",")):
            for seed in range(given.seeds):
                given.samples = samples
                found = levels.run(given, given.level, seed, folder)
                if found is None:
                    continue
                model = outputs(given, str(folder / f"{given.level}-{seed}.safetensors"), folder, [])
                divergence = float((np.exp(network) * (network - model)).sum(1).mean())
                runs.append({"samples": samples, **found, "divergence": divergence})
    return runs


def table(runs):
    lines = ["| images | divergence on the test images | accuracy, points | agreement with the network % |", "|---|---|---|---|"]
    for samples in sorted({r["samples"] for r in runs}):
        here = [r for r in runs if r["samples"] == samples]
        mean = lambda key: sum(r[key] for r in here) / len(here)  # noqa: B023, E731
        each = ", ".join(f"{r['divergence']:.4f}" for r in here)
        drops = ", ".join(f"{r['drop']:+.2f}" for r in here)
        row = f"| {samples:,} | **{mean('divergence'):.4f}** ({each}) | {mean('drop'):+.2f} ({drops}) | {100 * mean('agreement'):.1f} |"
        lines.append(row.replace("-", "−"))
    return "\n".join(lines)


def figure(runs, path):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "images"
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(figsize=(7, 3.4))
    counts = sorted({r["samples"] for r in runs})
    of = [[r["divergence"] for r in runs if r["samples"] == count] for count in counts]
    axes.plot(counts, [sum(d) / len(d) for d in of], color="#1b6ca8")
    axes.plot([r["samples"] for r in runs], [r["divergence"] for r in runs], "o", color="#1b6ca8", markersize=3.5)
    axes.set_xscale("log")
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("unlabelled training images")
    axes.set_ylabel("divergence on unseen images, nats")
    axes.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    fig.savefig(path, metadata={"Date": None})


def main():
    given = levels.parsed(
        __doc__,
        samples={"dest": "counts", "default": "500,1000,2000,5000"},
        level={"type": float, "default": 0.6},
    )
    runs = levels.found(given, run_all)
    print(table(runs))
    if given.figure:
        figure(runs, given.figure)


if __name__ == "__main__":
    main()
