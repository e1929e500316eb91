"""The networks of torchvision through simplicit: which are read, run, trained and written again.

    cargo build --release
    python3 bench/networks.py            # makes an environment of its own, writes docs/networks.md

Every network is exported by both exporters of PyTorch with random weights (batch norms with random statistics), at a
small input where the network allows it. What simplicit computes is compared with ONNX Runtime on two samples: the
largest difference over the largest output. Training asks for half of the weights with 64 random samples.
"""

import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ["torch", "torchvision", "onnx", "onnxruntime", "onnxscript", "numpy"]
# Name in torchvision and the side of the image; adaptive poolings and position embeddings fix some of them.
NETWORKS = {
    "alexnet": 224,
    "vgg11_bn": 224,
    "resnet18": 64,
    "resnet50": 64,
    "densenet121": 64,
    "squeezenet1_1": 64,
    "googlenet": 64,
    "mobilenet_v2": 64,
    "mobilenet_v3_small": 64,
    "mnasnet1_0": 64,
    "shufflenet_v2_x1_0": 64,
    "regnet_y_400mf": 64,
    "efficientnet_b0": 64,
    "convnext_tiny": 64,
    "vit_b_16": 224,
    "swin_t": 64,
}
EXPORTERS = ["torchscript", "dynamo"]
START, END = "<!-- networks -->", "<!-- end of networks -->"


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--environment", default=ROOT / "target/networks-environment", type=pathlib.Path)
    parser.add_argument("--folder", default=ROOT / "target/networks", type=pathlib.Path, help="files of the runs")
    parser.add_argument("--program", default=ROOT / "target/release/simplicit", type=pathlib.Path)
    parser.add_argument("--page", default=ROOT / "docs/networks.md", type=pathlib.Path)
    parser.add_argument("--only", default="", help="names, comma-separated; the page is then not written")
    parser.add_argument("--train", action="store_true", help="train each network, too")
    parser.add_argument("--again", action="store_true", help="export again what is there already")
    return parser.parse_args()


def environment(folder):
    """A Python with torch; this one, if it has it."""
    try:
        import onnxruntime  # noqa: F401
        import torchvision  # noqa: F401
    except ImportError:
        python = folder / "bin/python"
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            subprocess.run([folder / "bin/pip", "install", "--quiet", *PACKAGES], check=True)
        os.execv(python, [python, *sys.argv])


def export(name, side, exporter, path):
    import torch
    import torchvision

    torch.manual_seed(0)
    # The fast path of attention is an operator that the older exporter does not know.
    torch.backends.mha.set_fastpath_enabled(False)
    extra = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
    network = getattr(torchvision.models, name)(weights=None, **extra).eval()
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.running_mean, -0.2, 0.2)
            torch.nn.init.uniform_(module.running_var, 0.5, 1.5)
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
            torch.nn.init.uniform_(module.bias, -0.2, 0.2)
        if isinstance(module, torch.nn.Linear) and not module.weight.any():
            # A head that starts at zero would make every output zero.
            torch.nn.init.normal_(module.weight, std=0.05)
    sample = torch.zeros(1, 3, side, side)
    with torch.no_grad():
        if exporter == "dynamo":
            batch = {0: torch.export.Dim("batch")}
            torch.onnx.export(network, (torch.zeros(2, 3, side, side),), path, dynamo=True, dynamic_shapes=(batch,),
                              external_data=False, verbose=False)
        else:
            torch.onnx.export(network, (sample,), path, dynamo=False, dynamic_axes={"input": {0: "batch"}},
                              input_names=["input"], output_names=["output"], opset_version=17)


def run(command):
    """(seconds, peak bytes, error or nothing)"""
    start = time.monotonic()
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    seconds = time.monotonic() - start
    error = None if done.returncode in (0, 1) else (done.stderr.strip().splitlines() or ["no message"])[-1]
    return seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024, error


def difference(ours, theirs):
    import numpy

    return float(numpy.abs(ours - theirs.reshape(ours.shape)).max() / numpy.abs(theirs).max())


def reference(path, u):
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return session.run(None, {name: u})[0]


def measure(args, name, side, exporter):
    import numpy

    row = {"name": name, "side": side, "exporter": exporter}
    path = args.folder / f"{name}_{exporter}.onnx"
    if args.again or not path.exists():
        try:
            export(name, side, exporter, path)
        except Exception as error:  # the exporter's own failure is a result, too
            return row | {"error": f"not exported: {str(error).splitlines()[0][:120]}"}
    u = numpy.random.default_rng(1).standard_normal((2, 3, side, side)).astype(numpy.float32)
    numpy.save(args.folder / "two.npy", u)
    out = args.folder / "out.npy"
    seconds, _, error = run([args.program, "predict", "--network", path, "--inputs", args.folder / "two.npy", "--out", out])
    row |= {"seconds": seconds, "error": error}
    if error:
        return row
    row["difference"] = difference(numpy.load(out), reference(path, u))
    seconds, _, error = run([args.program, "inspect", path, "--json", args.folder / "inspect.json"])
    if not error:
        about = json.loads((args.folder / "inspect.json").read_text())
        row |= {"parameters": about["parameters"], "multiply_adds": about["multiply_adds"]}
    if not args.train:
        return row
    samples = numpy.random.default_rng(2).standard_normal((64, 3, side, side)).astype(numpy.float32)
    numpy.save(args.folder / "train.npy", samples)
    model, sparse = args.folder / "model.safetensors", args.folder / "sparse.onnx"
    seconds, peak, error = run([args.program, "train", "--network", path, "--inputs", args.folder / "train.npy", "--out",
                                model, "--target-sparsity", "0.5", "--json", args.folder / "train.json"])
    row |= {"train_seconds": seconds, "train_bytes": peak, "train_error": error}
    if error:
        return row
    row["sparsity"] = json.loads((args.folder / "train.json").read_text())["sparsity"]
    _, _, error = run([args.program, "export", "--model", model, "--like", path, "--out", sparse])
    row["export_error"] = error
    if not error:
        run([args.program, "predict", "--model", model, "--inputs", args.folder / "two.npy", "--out", out])
        row["export_difference"] = difference(numpy.load(out), reference(sparse, u))
    return row


def table(rows):
    head = ["network", "exporter", "input", "parameters", "read", "difference", "seconds", "trained", "exported, difference"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]

    def shown(row, key, form):
        return form.format(row[key]) if row.get(key) is not None else "–"

    for row in rows:
        trained = row.get("train_error") or (
            f"{row['sparsity']:.1%}, {row['train_seconds']:.0f} s, {row['train_bytes'] / 2**30:.1f} GiB" if "sparsity" in row else "–")
        exported = row.get("export_error") or shown(row, "export_difference", "{:.1e}")
        lines.append("| " + " | ".join([
            row["name"], row["exporter"], f"3 × {row['side']} × {row['side']}", shown(row, "parameters", "{:,}"),
            row.get("error") or "yes", shown(row, "difference", "{:.1e}"), shown(row, "seconds", "{:.1f}"), trained, exported]) + " |")
    return "\n".join(lines)


def main():
    args = parse()
    environment(args.environment)
    args.folder.mkdir(parents=True, exist_ok=True)
    chosen = args.only.split(",") if args.only else list(NETWORKS)
    rows = []
    for name in chosen:
        for exporter in EXPORTERS:
            row = measure(args, name, NETWORKS[name], exporter)
            print(json.dumps(row), flush=True)
            rows.append(row)
    text = table(rows)
    print(text)
    if not args.only:
        page = args.page.read_text()
        before, rest = page.split(START)
        args.page.write_text(before + START + "\n" + text + "\n" + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
