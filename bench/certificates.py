#!/usr/bin/env python3
"""Draws docs/experiments/certificates.svg from what `attack --json` and `certify --json` wrote.

    python3 bench/certificates.py OUT

OUT holds, for every model NAME, NAME.certify.json and, where it was attacked, NAME.attack.json, measured as the page says. The
network is `dense`, models of it are `sparse-SHARE` and, refitted, `refit-SHARE`; those of the FashionMNIST network begin with
`fashion-`. A panel whose network was not measured is left out. Needs nothing but Python.
"""

import json
import pathlib
import sys

INK, GRID = "#5c6877", "#e2e6ec"
ATTACKED, CERTIFIED, REFITTED, SLOPES, CLEAN = "#c4432c", "#1668b8", "#2b7f50", "#2b7f50", "#8a94a3"
WIDTH, LEFT, APART = 300, 46, 374


def read(path):
    return json.loads(path.read_text()) if path.exists() else None


def panel(left, title, ticks, lines, span=(0.0, 1.0)):
    """Accuracy over x; lines are (name, colour, [(x, y)])."""
    top, bottom = 34, 250
    last = max(ticks)

    def x(v):
        return left + v / last * WIDTH

    def y(v):
        return bottom - (v - span[0]) / (span[1] - span[0]) * (bottom - top)

    svg = f'<text x="{left}" y="18" fill="#1d2733" font-weight="bold">{title}</text>'
    for k in range(5):
        tick = span[0] + k * (span[1] - span[0]) / 5
        svg += f'<line x1="{left}" x2="{left + WIDTH}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="{GRID}"/>'
        svg += f'<text x="{left - 6}" y="{y(tick) + 4:.1f}" text-anchor="end" fill="{INK}">{tick:.2g}</text>'
    for tick in ticks:
        svg += f'<text x="{x(tick):.1f}" y="{bottom + 16}" text-anchor="middle" fill="{INK}">{tick:g}</text>'
    for k, (name, colour, points) in enumerate(lines):
        path = "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in points)
        dash = ' stroke-dasharray="5 4"' if name.startswith("clean") else ""
        svg += f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
        svg += "".join(f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3" fill="{colour}"/>' for a, b in points)
        svg += f'<text x="{left + 4 + 74 * k}" y="{bottom + 36}" fill="{colour}">{name}</text>'
    return svg


def page(panels, count=2):
    width = LEFT + APART * count - 34
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 300" font-family="sans-serif" font-size="12">'
    return f'{head}<rect width="{width}" height="300" fill="#ffffff"/>{panels}</svg>\n'


def over_epsilon(out):
    """Lines of the dense network over ε, nothing without its measurements."""
    dense, attack = read(out / "dense.certify.json"), read(out / "dense.attack.json")
    if not dense or not attack:
        return None
    epsilon = [255 * e for e in dense["epsilon"]]

    def over(values):
        return [(0, dense["clean_accuracy"]), *zip(epsilon, values, strict=True)]

    lines = [("attacked", ATTACKED, over(attack["attacked_accuracy"]))]
    bounds = {b["bound"]: b["accuracy"] for b in dense["bounds"]}
    lines.append(("certified", CERTIFIED, over(bounds["linear"])))
    if "slopes" in bounds:
        lines.append(("with slopes", SLOPES, over(bounds["slopes"])))
    return [0, *sorted(epsilon)], lines


def over_sparsity(out, prefix, grey_levels):
    """Clean and certified accuracy at some grey levels, as models are and refitted; nothing without the dense network."""
    dense = read(out / f"{prefix}dense.certify.json")
    if not dense:
        return None
    lines = []
    for kind, name, colour in [("sparse", "sparse", CERTIFIED), ("refit", "refitted", REFITTED)]:
        models = [dense, *(read(p) for p in sorted(out.glob(f"{prefix}{kind}-*.certify.json")))]
        clean, certified = [], []
        for model in models:
            at = min(range(len(model["epsilon"])), key=lambda k: abs(255 * model["epsilon"][k] - grey_levels))
            clean.append((100 * model["sparsity"], model["clean_accuracy"]))
            certified.append((100 * model["sparsity"], model["certified_accuracy"][at]))
        if len(models) > 1:
            lines += [(name, colour, certified), ("clean", colour, clean)]
    return lines


def main():
    out = pathlib.Path(sys.argv[1])
    panels = []
    if found := over_epsilon(out):
        panels.append(("resnet_2b, over ε in 1/255", *found, (0.0, 1.0)))
    if found := over_sparsity(out, "", 1):
        panels.append(("resnet_2b at 1/255, over sparsity in %", [0, 20, 40, 60, 80], found, (0.5, 0.75)))
    if found := over_sparsity(out, "fashion-", 4):
        panels.append(("FashionMNIST at 4/255, over sparsity in %", [0, 20, 40, 60, 80], found, (0.5, 1.0)))
    svg = "".join(panel(LEFT + APART * k, *each) for k, each in enumerate(panels))
    (out / "certificates.svg").write_text(page(svg, len(panels)))


if __name__ == "__main__":
    main()
