#!/usr/bin/env python3
"""Attacked and certified accuracy of FashionMNIST models: trains them, runs attack and certify, writes tables and plots.

    cargo build --release && python3 bench/robustness.py OUT [--samples N] [--only NAME,NAME]

OUT/NAME.* holds every model with its recipe and results; tables.md, robustness.svg (accuracy over ε) and sparsity.svg (accuracy over
sparsity, of the default at several targets) are docs/experiments/robustness.md's.
Needs nothing but Python. Models that are there already are not trained again.
"""

import argparse
import json
import pathlib
import subprocess

import certificates

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / "data"
PROGRAM = ROOT / "target/release/simplicit"
EPSILON = "0.5/255,1/255,2/255,4/255"
TEST = ["--inputs", DATA / "fashion_test_images.idx.gz", "--labels", DATA / "fashion_test_labels.idx.gz"]
NETWORK = DATA / "fashion_fc.onnx"
SPARSE = "--target-sparsity 0.8"
PLAIN = f"--penalty l1 --rounds 1 --refit off {SPARSE}"

# Name, flags of train (None: the baseline itself, converted).
MODELS = [
    ("baseline", None),
    ("default", SPARSE),
    # Without the refit in the output metric, so that what differs is the lever.
    ("cardinality", f"{SPARSE} --output-refit 0"),
    ("l1-refit", f"--penalty l1 --output-refit 0 {SPARSE}"),
    ("l1", PLAIN),
    ("l1-robust-1", f"{PLAIN} --robust 1"),
    ("l1-robust-3", f"{PLAIN} --robust 3"),
    ("cardinality-robust-3", f"{SPARSE} --robust 3"),
    ("robust-refit", f"{SPARSE} --output-refit 0 --robust-refit 2/255"),
    ("l1-kappa-0.9", f"{PLAIN} --rescale --kappa 0.9"),
    ("l1-kappa-0.9-robust-3", f"{PLAIN} --rescale --kappa 0.9 --robust 3"),
    ("full-kappa-0.8", f"{PLAIN} --connectivity full --rescale --kappa 0.8"),
    ("full-kappa-0.4", f"{PLAIN} --connectivity full --rescale --kappa 0.4"),
    ("cyclic-kappa-0.5", f"{PLAIN} --connectivity no-self-loop --kappa 0.5"),
]
# Strength of l1 instead of equal sparsity.
MODELS += [(f"l1-beta-{beta}", f"--penalty l1 --rounds 1 --refit off --beta {beta}") for beta in ["1e-4", "1e-2"]]
# The default at other targets, for the figure over sparsity.
LEVELS = [("sparse-50", 0.5), ("sparse-65", 0.65), ("default", 0.8), ("sparse-90", 0.9), ("sparse-95", 0.95)]
MODELS += [(name, f"--target-sparsity {target}") for name, target in LEVELS if name != "default"]


def run(program, *words):
    words = [str(program), *map(str, words)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(words)}: {done.stderr}")


def results(path):
    return json.loads(path.read_text())


def measure(program, out, name, flags, samples):
    model = out / f"{name}.safetensors"
    if not model.exists():
        if flags is None:
            run(program, "convert", "--network", NETWORK, "--scale", "1/255", "--out", model)
        else:
            images = DATA / "fashion_train_images.idx.gz"
            run(program, "train", "--network", NETWORK, "--inputs", images, *flags.split(), "--out", model)
    some = ["--samples", samples] if samples else []
    files = {kind: out / f"{name}.{kind}.json" for kind in ["certify", "attack", "paper"]}
    if not files["certify"].exists():
        run(program, "certify", "--model", model, *TEST, "--epsilon", EPSILON, *some, "--json", files["certify"])
    if not files["attack"].exists():
        attack = ["attack", "--model", model, "--network", NETWORK, *TEST, "--epsilon", EPSILON]
        run(program, *attack, *some, "--json", files["attack"])
    if not files["paper"].exists():
        paper = ["attack", "--model", model, "--network", NETWORK, *TEST, "--epsilon", "1/255,2/255"]
        run(program, *paper, "--gradient", "baseline", "--method", "fgsm", "--pixels", 0.5, *some, "--json", files["paper"])
    return {kind: results(path) for kind, path in files.items()}


def percent(value):
    return f"{100 * value:.1f}"


def tables(found):
    heads = ["sparsity", "clean", "paper's attack 1/255", "2/255", "worst attack 1/255", "2/255", "4/255"]
    heads += ["certified 1/255", "2/255", "4/255", "interval 1/255", "global 1/255"]
    text = "| model | " + " | ".join(heads) + " |\n|---|" + "---:|" * len(heads) + "\n"
    for name, _, r in found:
        attack, certify, paper = r["attack"], r["certify"], r["paper"]
        bound = {b["bound"]: b["accuracy"] for b in certify["bounds"]}
        cells = [certify["sparsity"], certify["clean_accuracy"], *paper["attacked_accuracy"]]
        cells += attack["attacked_accuracy"][1:] + certify["certified_accuracy"][1:]
        cells += [bound["interval"][1], bound["global"][1]]
        text += f"| {name} | " + " | ".join(map(percent, cells)) + " |\n"
    text += "\n| model | command |\n|---|---|\n"
    for name, flags, _ in found:
        text += f"| {name} | " + ("`convert --scale 1/255`" if flags is None else f"`train {flags}`") + " |\n"
    return text


def curves(found, names):
    """Worst attack (solid) and certificate (dashed) over ε, a colour a model."""
    width, height, left, bottom = 640, 340, 56, 44
    colours = ["#8a94a3", "#1668b8", "#c4432c", "#2b7f50", "#8a4fbf"]
    epsilon = [eval(e) * 255 for e in EPSILON.split(",")]

    def x(e):
        return left + e / max(epsilon) * (width - left - 150)

    def y(a):
        return 12 + (0.9 - a) / 0.4 * (height - bottom - 12)

    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
    svg += f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    for tick in [0.5, 0.6, 0.7, 0.8, 0.9]:
        svg += f'<line x1="{left}" x2="{x(max(epsilon)):.0f}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#e2e6ec"/>'
        svg += f'<text x="{left - 6}" y="{y(tick) + 4:.1f}" text-anchor="end" fill="#5c6877">{tick:.1f}</text>'
    for e in [0, *epsilon]:
        svg += f'<text x="{x(e):.1f}" y="{height - bottom + 16}" text-anchor="middle" fill="#5c6877">{e:g}</text>'
    svg += f'<text x="{x(max(epsilon) / 2):.0f}" y="{height - 8}" text-anchor="middle" fill="#5c6877">ε in 1/255</text>'
    svg += f'<text transform="translate(14 {y(0.7):.0f}) rotate(-90)" text-anchor="middle" fill="#5c6877">accuracy</text>'
    by_name = {name: r for name, _, r in found}
    for k, name in enumerate(n for n in names if n in by_name):
        r, colour = by_name[name], colours[k % len(colours)]
        for kind, key, dash in [("attack", "attacked_accuracy", ""), ("certify", "certified_accuracy", ' stroke-dasharray="5 4"')]:
            points = [(0, r[kind]["clean_accuracy"]), *zip(epsilon, r[kind][key], strict=True)]
            path = "L".join(f"{x(e):.1f} {y(a):.1f}" for e, a in points)
            svg += f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
        svg += f'<text x="{x(max(epsilon)) + 10:.0f}" y="{30 + 20 * k}" fill="{colour}">{name}</text>'
    svg += f'<text x="{x(max(epsilon)) + 10:.0f}" y="{50 + 20 * len(names)}" fill="#5c6877">— attacked</text>'
    svg += f'<text x="{x(max(epsilon)) + 10:.0f}" y="{68 + 20 * len(names)}" fill="#5c6877">- - certified</text>'
    return svg + "</svg>\n"


def over_sparsity(found):
    """Clean, attacked and certified accuracy of the baseline and the default at several targets, at 1/255 and 4/255."""
    by_name = {name: r for name, _, r in found}
    models = [by_name[name] for name in ["baseline", *(name for name, _ in LEVELS)] if name in by_name]

    def line(kind, values):
        return [(100 * m["certify"]["sparsity"], values(m[kind])) for m in models]

    svg = ""
    for left, e, at in [(46, "1/255", 1), (420, "4/255", 3)]:
        clean = line("certify", lambda r: r["clean_accuracy"])
        attacked = line("attack", lambda r, at=at: r["attacked_accuracy"][at])
        certified = line("certify", lambda r, at=at: r["certified_accuracy"][at])
        lines = [("clean", certificates.CLEAN, clean), ("attacked", certificates.ATTACKED, attacked)]
        lines.append(("certified", certificates.CERTIFIED, certified))
        svg += certificates.panel(left, f"at ε = {e}, over sparsity in %", [0, 25, 50, 75, 100], lines)
    return certificates.page(svg)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--samples", type=int, default=0, help="test images (default: all)")
    parser.add_argument("--program", default=PROGRAM, help="a program other than that of the last build")
    parser.add_argument("--only", default="", help="names of models, separated by commas")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = args.only.split(",") if args.only else [name for name, _ in MODELS]
    found = []
    for name, flags in MODELS:
        if name in wanted:
            print(name, flush=True)
            found.append((name, flags, measure(args.program, args.out, name, flags, args.samples)))
    (args.out / "tables.md").write_text(tables(found))
    (args.out / "robustness.svg").write_text(curves(found, ["baseline", "cardinality-robust-3", "l1", "l1-robust-1", "cyclic-kappa-0.5"]))
    (args.out / "sparsity.svg").write_text(over_sparsity(found))


main()
