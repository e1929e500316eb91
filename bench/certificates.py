#!/usr/bin/env python3
"""Draws docs/experiments/certificates.svg from what `attack --json` and `certify --json` wrote.

    python3 bench/certificates.py OUT

OUT holds, for every model NAME, NAME.certify.json and, where it was attacked, NAME.attack.json, measured as the page says.
The dense network is `dense`, sparse models are `sparse-SHARE`. Left: accuracy over ε of the dense network; right: accuracy
at 1/255 over sparsity. Needs nothing but Python.
"""

import json
import pathlib
import sys

INK, GRID = "#5c6877", "#e2e6ec"
ATTACKED, CERTIFIED, SLOPES, CLEAN = "#c4432c", "#1668b8", "#2b7f50", "#8a94a3"


def read(path):
    return json.loads(path.read_text()) if path.exists() else None


def panel(left, title, ticks, lines):
    """Accuracy from 0 to 1 over x; lines are (name, colour, [(x, y)])."""
    top, bottom, width = 34, 250, 300
    last = max(ticks)

    def x(v):
        return left + v / last * width

    def y(v):
        return bottom - v * (bottom - top)

    svg = f'<text x="{left}" y="18" fill="#1d2733" font-weight="bold">{title}</text>'
    for tick in [0, 0.2, 0.4, 0.6, 0.8]:
        svg += f'<line x1="{left}" x2="{left + width}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="{GRID}"/>'
        svg += f'<text x="{left - 6}" y="{y(tick) + 4:.1f}" text-anchor="end" fill="{INK}">{tick:.1f}</text>'
    for tick in ticks:
        svg += f'<text x="{x(tick):.1f}" y="{bottom + 16}" text-anchor="middle" fill="{INK}">{tick:g}</text>'
    for k, (name, colour, points) in enumerate(lines):
        path = "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in points)
        svg += f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        svg += "".join(f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3" fill="{colour}"/>' for a, b in points)
        svg += f'<text x="{left + 14 + 72 * k}" y="{bottom + 36}" fill="{colour}">{name}</text>'
    return svg


def page(panels):
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 300" font-family="sans-serif" font-size="12">'
    return f'{head}<rect width="760" height="300" fill="#ffffff"/>{panels}</svg>\n'


def main():
    out = pathlib.Path(sys.argv[1])
    dense, attack = read(out / "dense.certify.json"), read(out / "dense.attack.json")
    epsilon = [255 * e for e in dense["epsilon"]]

    def over(values):
        return [(0, dense["clean_accuracy"]), *zip(epsilon, values, strict=True)]

    lines = [("attacked", ATTACKED, over(attack["attacked_accuracy"]))]
    bounds = {b["bound"]: b["accuracy"] for b in dense["bounds"]}
    lines.append(("certified", CERTIFIED, over(bounds["linear"])))
    if "slopes" in bounds:
        lines.append(("with slopes", SLOPES, over(bounds["slopes"])))
    svg = panel(46, "the network, over ε in 1/255", [0, *sorted(epsilon)], lines)
    models = [("dense", 0.0)] + [(p.name[:-13], None) for p in sorted(out.glob("sparse-*.certify.json"))]
    clean, certified, attacked = [], [], []
    for name, sparsity in models:
        proved = read(out / f"{name}.certify.json")
        share = 100 * (proved["sparsity"] if sparsity is None else sparsity)
        at = min(range(len(proved["epsilon"])), key=lambda k: abs(255 * proved["epsilon"][k] - 1))
        clean.append((share, proved["clean_accuracy"]))
        certified.append((share, proved["certified_accuracy"][at]))
        found = read(out / f"{name}.attack.json")
        if found:
            attacked.append((share, found["attacked_accuracy"][at]))
    lines = [("clean", CLEAN, clean), ("attacked", ATTACKED, attacked), ("certified", CERTIFIED, certified)]
    ticks = [0, 20, 40, 60, 80]
    svg += panel(420, "at ε = 1/255, over sparsity in %", ticks, [line for line in lines if line[2]])
    (out / "certificates.svg").write_text(page(svg))


if __name__ == "__main__":
    main()
