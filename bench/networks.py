"""The networks of torchvision through simplicit: which are read, run, trained and written again.

    cargo build --release
    python3 bench/networks.py --train    # makes an environment of its own, writes docs/networks.md
    python3 bench/networks.py --train --only resnet18,swin_t

What was measured lies in rows.json of the folder, so that networks can be run one by one.

Every network is exported by both exporters of PyTorch with random weights (batch norms with random statistics), at a
small input where the network allows it. What simplicit computes is compared with ONNX Runtime on two samples: the
largest difference over the largest output. Training asks for half of the weights with 64 random samples.
"""

import json

import page
import program
from program import difference, run, shown

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


def parse():
    parser = program.parser(__doc__.splitlines()[0], "networks")
    parser.add_argument("--exporter", choices=EXPORTERS, help="one exporter alone")
    parser.add_argument("--train", action="store_true", help="train each network, too")
    parser.add_argument("--device", default="cpu", help="of training: cpu (default), cuda or auto")
    parser.add_argument("--bounds", default="", help="of training: off, sampled or all (default: what costs less than training)")
    parser.add_argument("--again", action="store_true", help="export again what is there already")
    return parser.parse_args()


def export(name, side, exporter, path):
    import torch
    import torchvision

    torch.manual_seed(0)
    # The fast path of attention is an operator that the older exporter does not know.
    torch.backends.mha.set_fastpath_enabled(False)
    extra = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
    network = getattr(torchvision.models, name)(weights=None, **extra).eval()
    program.with_random_norms(network)
    sample = torch.zeros(1, 3, side, side)
    with torch.no_grad():
        if exporter == "dynamo":
            batch = {0: torch.export.Dim("batch")}
            torch.onnx.export(network, (torch.zeros(2, 3, side, side),), path, dynamo=True, dynamic_shapes=(batch,),
                              external_data=False, verbose=False)
        else:
            torch.onnx.export(network, (sample,), path, dynamo=False, dynamic_axes={"input": {0: "batch"}},
                              input_names=["input"], output_names=["output"], opset_version=17)


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
    two, out = args.folder / "two.npy", args.folder / "out.npy"
    numpy.save(two, u)
    row["seconds"], _, row["error"] = run(args, "predict", "--network", path, "--inputs", two, "--out", out)
    if row["error"]:
        return row
    row["difference"] = difference(numpy.load(out), reference(path, u))
    if not run(args, "inspect", path, "--json", args.folder / "inspect.json").error:
        about = json.loads((args.folder / "inspect.json").read_text())
        row |= {"parameters": about["parameters"], "multiply_adds": about["multiply_adds"]}
    return row


def train(args, name, side, exporter):
    import numpy

    path, two, out = args.folder / f"{name}_{exporter}.onnx", args.folder / "two.npy", args.folder / "out.npy"
    samples = numpy.random.default_rng(2).standard_normal((64, 3, side, side)).astype(numpy.float32)
    numpy.save(args.folder / "train.npy", samples)
    stem = args.folder / f"{name}_{exporter}_sparse"
    model, sparse, results = stem.with_suffix(".safetensors"), stem.with_suffix(".onnx"), stem.with_suffix(".json")
    seconds, _, error = run(args, "train", "--network", path, "--inputs", args.folder / "train.npy", "--out", model,
                            "--target-sparsity", "0.5", "--device", args.device, "--json", results,
                            *(["--bounds", args.bounds] if args.bounds else []), limit=args.limit)
    row = {"train_seconds": seconds, "train_error": error}
    if error:
        return row
    about = json.loads(results.read_text())
    row |= {"sparsity": about["sparsity"], "train_bytes": about["peak_memory_bytes"], "loss": about["equilibrium_error"]}
    row["export_error"] = run(args, "export", "--model", model, "--like", path, "--out", sparse).error
    if not row["export_error"]:
        run(args, "predict", "--model", model, "--inputs", two, "--out", out)
        row["export_difference"] = difference(numpy.load(out), reference(sparse, numpy.load(two)))
    return row


def table(rows):
    head = ["network", "exporter", "input", "parameters", "read", "difference", "seconds", "trained", "exported, difference"]
    lines = []
    for row in rows:
        trained = row.get("train_error") or (
            f"{row['sparsity']:.1%}, {row['train_seconds']:.0f} s, {row['train_bytes'] / 2**30:.1f} GiB" if "sparsity" in row else "–")
        exported = row.get("export_error") or shown(row, "export_difference", "{:.1e}")
        lines.append([
            row["name"], row["exporter"], f"3 × {row['side']} × {row['side']}", shown(row, "parameters", "{:,}"),
            row.get("error") or "yes", shown(row, "difference", "{:.1e}"), shown(row, "seconds", "{:.1f}"), trained, exported])
    return page.table(head, lines)


def main():
    args = parse()
    program.environment(args.environment, PACKAGES)
    args.folder.mkdir(parents=True, exist_ok=True)
    kept = args.folder / "rows.json"
    rows = {(row["name"], row["exporter"]): row for row in json.loads(kept.read_text())} if kept.exists() else {}
    for name in args.only.split(",") if args.only else NETWORKS:
        for exporter in [args.exporter] if args.exporter else EXPORTERS:
            row = rows.get((name, exporter), {}) | measure(args, name, NETWORKS[name], exporter)
            if args.train and not row["error"]:
                row |= train(args, name, NETWORKS[name], exporter)
            print(json.dumps(row), flush=True)
            rows[name, exporter] = row
            kept.write_text(json.dumps(list(rows.values()), indent=1))
    order = [(name, exporter) for name in NETWORKS for exporter in EXPORTERS]
    text = table([rows[key] for key in order if key in rows])
    print(text)
    if all(key in rows for key in order):
        page.fill(args.page, "networks", text)


if __name__ == "__main__":
    main()
