"""The program as the benchmarks of many networks run it: their flags, their Python, one run, one network, one comparison."""

import argparse
import importlib.util
import json
import os
import pathlib
import resource
import subprocess
import sys
import time
import typing

import page


def parser(description, folder):
    """The flags that these benchmarks share; the files of the runs go to target/`folder`."""
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("--environment", default=page.ROOT / "target/networks-environment", type=pathlib.Path)
    flags.add_argument("--folder", default=page.ROOT / "target" / folder, type=pathlib.Path, help="files of the runs")
    flags.add_argument("--program", default=page.ROOT / "target/release/simplicit", type=pathlib.Path)
    flags.add_argument("--page", default=page.ROOT / "docs/networks.md", type=pathlib.Path)
    flags.add_argument("--only", default="", help="names, comma-separated; the rows of the others stay as they are")
    flags.add_argument("--threads", default="", help="threads of simplicit (default: all)")
    flags.add_argument("--limit", default=None, type=float, help="seconds after which a training run is stopped")
    return flags


def environment(folder, packages):
    """Go on in a Python that has the packages; in this one, if it has them."""
    if all(importlib.util.find_spec(package) for package in packages):
        return
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    # Another benchmark may have made the environment with fewer packages.
    subprocess.run([folder / "bin/pip", "install", "--quiet", *packages], check=True)
    os.execv(python, [python, *sys.argv])


class Run(typing.NamedTuple):
    seconds: float
    processor_seconds: float
    error: str | None


def run(args, *command, limit=None):
    """One command of the program, at most `limit` seconds."""
    line = [str(c) for c in (args.program, *command)]
    if args.threads and command[0] in ("predict", "train"):
        line += ["--threads", args.threads]

    def now():
        return time.monotonic(), sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])

    before, error = now(), None
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=limit)
        # 1 is a result with a remark: a target missed by a little, a row at its limit.
        if done.returncode not in (0, 1):
            error = (done.stderr.strip().splitlines() or ["no message"])[-1]
    except subprocess.TimeoutExpired:
        error = f"stopped after {limit:.0f} s"
    after = now()
    return Run(after[0] - before[0], after[1] - before[1], error)


def difference(ours, theirs):
    """The largest difference over the largest output."""
    return float(abs(ours - theirs.reshape(ours.shape)).max() / abs(theirs).max())


def with_random_norms(network):
    """Random statistics and scales of batch norms, which start as identities; no layer that starts at zero."""
    import torch

    for module in network.modules():
        if isinstance(module, (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d)) and module.weight is not None:
            torch.nn.init.uniform_(module.running_mean, -0.2, 0.2)
            torch.nn.init.uniform_(module.running_var, 0.5, 1.5)
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
            torch.nn.init.uniform_(module.bias, -0.2, 0.2)
        if isinstance(module, torch.nn.Linear) and not module.weight.any():
            # A head that starts at zero would make every output zero.
            torch.nn.init.normal_(module.weight, std=0.05)


def choices(sizes, more):
    """What the file leaves open, as flags."""
    flags = []
    if more.get("open"):
        flags += ["--input-shape", "x".join(map(str, sizes))]
    for name in ("input", "output"):
        if name in more:
            flags += [f"--{name}", more[name]]
    if "fill" in more:
        flags += ["--fill", ",".join(f"{name}={value}" for name, value in more["fill"].items())]
    return flags


def samples(count, sizes, more, seed):
    import numpy

    random = numpy.random.default_rng(seed)
    if "tokens" in more:
        return random.integers(0, more["tokens"], (count, *sizes)).astype(numpy.float32)
    return random.standard_normal((count, *sizes)).astype(numpy.float32)


def reference(path, u, more):
    """ONNX Runtime's output, a sample at a time: many files fix the batch."""
    import numpy
    import onnx
    import onnxruntime

    network = onnx.load(path)
    if more.get("output") and all(output.name != more["output"] for output in network.graph.output):
        network.graph.output.append(onnx.helper.make_empty_tensor_value_info(more["output"]))
    session = onnxruntime.InferenceSession(network.SerializeToString(), providers=["CPUExecutionProvider"])
    inputs = session.get_inputs()
    name = more.get("input", inputs[0].name)
    kinds = {"tensor(float)": numpy.float32, "tensor(int32)": numpy.int32, "tensor(int64)": numpy.int64}
    outputs = [more["output"]] if "output" in more else [session.get_outputs()[0].name]

    def feed(sample):
        out = {}
        for each in inputs:
            kind = kinds[each.type]
            if each.name == name:
                # Our own export has a sequence as a map of height one.
                sizes = each.shape[1:] if all(isinstance(d, int) for d in each.shape[1:]) else sample.shape
                out[name] = sample.reshape(1, *sizes).astype(kind)
            else:
                out[each.name] = numpy.full([d if isinstance(d, int) else 1 for d in each.shape], more["fill"][each.name], kind)
        return out

    return numpy.concatenate([session.run(outputs, feed(sample))[0].reshape(1, -1) for sample in u])


def measure(args, path, sizes, more):
    """Reads and runs a network, beside ONNX Runtime; what `more` says is in `choices`, `samples` and `reference`."""
    import numpy

    error = run(args, "inspect", path, *choices(sizes, more), "--json", args.folder / "inspect.json").error
    if error:
        return {"error": error}
    about = json.loads((args.folder / "inspect.json").read_text())
    if about["unsupported"]:
        operators = sorted({node["operator"] for node in about["unsupported"]})
        return {"error": f"refused: {', '.join(operators)}"}
    row = {"parameters": about["parameters"], "multiply_adds": about["multiply_adds"]}
    two, out = args.folder / "two.npy", args.folder / "out.npy"
    u = samples(2, sizes, more, 1)
    numpy.save(two, u)
    error = run(args, "predict", "--network", path, *choices(sizes, more), "--inputs", two, "--out", out).error
    if error:
        return row | {"error": error}
    row["difference"] = difference(numpy.load(out), reference(path, u, more))
    return row | {"error": None}


def train(args, name, path, sizes, more):
    """Trains a network to half of its weights with 64 samples and compares what `export --like` writes with our own run."""
    import numpy

    inputs, two, out = args.folder / "train.npy", args.folder / "two.npy", args.folder / "out.npy"
    numpy.save(inputs, samples(64, sizes, more, 2))
    stem = args.folder / name.replace(" ", "_").replace(",", "")
    model, sparse, results = stem.with_suffix(".safetensors"), stem.with_suffix(".sparse.onnx"), stem.with_suffix(".json")
    wall, seconds, error = run(
        args, "train", path, *choices(sizes, more), "--inputs", inputs, "--out", model, "--target-sparsity", "0.5",
        "--bounds", "off", "--device", "cpu", "--json", results,
        # Features are no scores of classes, which output-aware weights take outputs for.
        *(["--output-aware", "off"] if more.get("features") else []), limit=args.limit)
    row = {"train_seconds": seconds, "wall_seconds": wall, "train_error": error}
    if error:
        return row
    about = json.loads(results.read_text())
    row |= {"sparsity": about["sparsity"], "train_bytes": about["peak_memory_bytes"], "loss": about["equilibrium_error"]}
    # The model knows what it was trained with.
    row["export_error"] = run(args, "export", model, "--like", path, "--out", sparse).error
    if not row["export_error"]:
        run(args, "predict", "--model", model, "--inputs", two, "--out", out)
        row["export_difference"] = difference(numpy.load(out), reference(sparse, numpy.load(two), more))
    return row


def trained(row):
    """What training reached, its processor seconds and memory, for a table."""
    if row.get("train_error"):
        return row["train_error"]
    if "sparsity" not in row:
        return f"not tried: {row['no_training']}" if row.get("no_training") else "–"
    return f"{100 * row['sparsity']:.1f} %, {row['train_seconds']:.0f} s, {row['train_bytes'] / 2**30:.1f} GiB"


def refused(error):
    """What is refused, without the file's name and the way out."""
    return error and "refused: " + error.removeprefix("error: ").split(" in the form of")[0].rstrip(",")


def shown(row, key, form):
    """A figure of a table's row, or a dash where there is none."""
    return form.format(row[key]) if row.get(key) is not None else "–"
