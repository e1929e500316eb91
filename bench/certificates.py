#!/usr/bin/env python3
"""Draws docs/experiments/certificates.svg from what `attack --json` and `certify --json` wrote.

    python3 bench/certificates.py OUT

OUT holds, for every model NAME, NAME.certify.json and, where it was attacked, NAME.attack.json, measured as the page says. The
network is `dense`, models of it are `sparse-SHARE` and, refitted, `refit-SHARE`. Names begin with `thousand-` for resnet_2b on the
first 1,000 test images and with `fashion-` for the FashionMNIST network; without either, they are resnet_2b on all test images.
A panel whose network was not measured is left out. Needs nothing but Python.
"""

import json
import pathlib
import sys

INK, GRID = "#5c6877", "#e2e6ec"
ATTACKED, CERTIFIED, REFITTED, SLOPES = "#c4432c", "#1668b8", "#2b7f50", "#2b7f50"
SOLID, DASHED, DOTTED = "", ' stroke-dasharray="5 4"', ' stroke-dasharray="1 4" stroke-linecap="round"'
WIDTH, LEFT, APART = 300, 46, 374


def read(path):
    return json.loads(path.read_text()) if path.exists() else None


def panel(left, title, ticks, lines, span=(0.0, 1.0)):
    """Accuracy over x; lines are (name, colour, dashes, [(x, y)]), and a line without a name has no place in the legend."""
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
    named = [line for line in lines if line[0]]
    for k, (name, colour, dash, _) in enumerate(named):
        at = left + 4 + 74 * k
        svg += f'<line x1="{at}" x2="{at + 14}" y1="{bottom + 32}" y2="{bottom + 32}" stroke="{colour}" stroke-width="2"{dash}/>'
        svg += f'<text x="{at + 18}" y="{bottom + 36}" fill="{colour}">{name}</text>'
    for _, colour, dash, points in (line for line in lines if line[3]):
        path = "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in points)
        svg += f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
        svg += "".join(f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3" fill="{colour}"/>' for a, b in points)
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

    lines = [("attacked", ATTACKED, SOLID, over(attack["attacked_accuracy"]))]
    bounds = {b["bound"]: b["accuracy"] for b in dense["bounds"]}
    lines.append(("certified", CERTIFIED, SOLID, over(bounds["linear"])))
    if "slopes" in bounds:
        lines.append(("with slopes", SLOPES, SOLID, over(bounds["slopes"])))
    return [0, *sorted(epsilon)], lines


def over_sparsity(out, prefix, grey_levels):
    """Clean, attacked and certified accuracy at some grey levels, as models are and refitted; nothing without the dense network."""
    dense = f"{prefix}dense"
    if not read(out / f"{dense}.certify.json"):
        return None

    def at(result, values):
        nearest = min(range(len(result["epsilon"])), key=lambda k: abs(255 * result["epsilon"][k] - grey_levels))
        return result[values][nearest]

    lines, attacked_any = [], False
    for kind, name, colour in [("sparse", "sparse", CERTIFIED), ("refit", "refitted", REFITTED)]:
        models = [dense, *sorted(p.name.split(".")[0] for p in out.glob(f"{prefix}{kind}-*.certify.json"))]
        clean, attacked, certified = [], [], []
        for model in models:
            proved, tried = read(out / f"{model}.certify.json"), read(out / f"{model}.attack.json")
            share = 100 * proved["sparsity"]
            clean.append((share, proved["clean_accuracy"]))
            certified.append((share, at(proved, "certified_accuracy")))
            if tried:
                attacked.append((share, at(tried, "attacked_accuracy")))
        if len(models) > 1:
            lines += [(name, colour, SOLID, certified), (None, colour, DASHED, clean)]
            if len(attacked) > 1:
                attacked_any = True
                lines.append((None, colour, DOTTED, attacked))
    lines.append(("clean", INK, DASHED, []))
    return [*lines, ("attacked", INK, DOTTED, [])] if attacked_any else lines


def main():
    out = pathlib.Path(sys.argv[1])
    panels = []
    if found := over_epsilon(out):
        panels.append(("resnet_2b, over ε in 1/255", *found, (0.0, 1.0)))
    if found := over_sparsity(out, "thousand-", 1):
        panels.append(("resnet_2b at 1/255, over sparsity in %", [0, 20, 40, 60, 80], found, (0.5, 0.75)))
    if found := over_sparsity(out, "fashion-", 4):
        panels.append(("FashionMNIST at 4/255, over sparsity in %", [0, 20, 40, 60, 80], found, (0.5, 1.0)))
    svg = "".join(panel(LEFT + APART * k, *each) for k, each in enumerate(panels))
    (out / "certificates.svg").write_text(page(svg, len(panels)))


if __name__ == "__main__":
    main()
