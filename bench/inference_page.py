"""Puts what `benches/inference.rs -- page FILE` measured into docs/inference.md: python inference_page.py FILE

Rewrites the parts of the page between `<!-- measured NAME -->` and `<!-- end -->` and draws docs/inference.svg: one curve
per network and batch, how many times faster than the faster of our dense model and ONNX Runtime, against the share of
zeros. Above the line of 1 zeros pay; the break-even is where a curve crosses it, on the straight line between two points.
"""

import math
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
AIMS = {
    ("ResNet-20", 64): "1.2 · 1.7 · 2.7 · 4.5 · 7",
    ("ResNet-20", 1): "1.0 · 1.3 · 2.0 · 3.5 · 5",
    ("ResNet-18", 64): "1.2 · 1.7 · 2.7 · 4.5 · 7",
    ("ResNet-18", 1): "1.0 · 1.3 · 2.0 · 3.5 · 5",
    ("784-512-512-10", 256): "1.2 · 1.7 · 3 · 6 · 10",
    ("784-512-512-10", 1): "1.0 · 1.5 · 2.5 · 4.5 · 8",
    ("784-64-32-16-10", 256): "1.1 · 1.5 · 2.3 · 4 · 6",
}

machine, *sections = Path(sys.argv[1]).read_text().split("\n## ")
sections = {name: text.strip() for name, _, text in (section.partition("\n") for section in sections)}
curves, trained = {}, []
for line in (sections["convolutions"] + "\n" + sections["dense"]).splitlines():
    cells = [c.strip() for c in line.strip("| ").split("|")]
    if len(cells) != 7 or not cells[1].endswith("%"):
        continue
    if cells[1].startswith("trained"):
        trained.append(f"{cells[0]} {cells[1]}, batch {cells[2]}: {cells[6]} ×")
    else:
        curves.setdefault((cells[0], int(cells[2])), []).append((float(cells[1][:-1]), float(cells[6])))


def break_even(points):
    """The smallest share of zeros from which on the curve stays at 1 or above; rounding to 1.00 counts as 1."""
    for (s, v), (t, w) in reversed(list(zip(points, points[1:], strict=False))):
        if v < 1 <= w:
            return f"{s + (t - s) * (1 - v) / (w - v):.0f} %"
    return f"{points[0][0]:.0f} %" if points[-1][1] >= 1 else "–"


WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 420, 56, 16, 210, 44
COLOURS = ["#1b6ca8", "#c8553d", "#588157", "#7b4b94", "#b8860b", "#444444"]
COLOURS += ["#2a9d8f", "#e76f51", "#8ab0d0", "#6a994e", "#bc4749", "#9a8c98"]


def x(sparsity):
    return LEFT + (WIDTH - LEFT - RIGHT) * sparsity / 100


def y(speed):
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (math.log2(speed) + 1.5) / 5.2)


out = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
    f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
]
for speed in (0.5, 1, 2, 4, 8):
    colour, dash = ("#000", "") if speed == 1 else ("#ccc", ' stroke-dasharray="3 3"')
    out.append(f'<line x1="{x(0)}" x2="{x(100)}" y1="{y(speed):.1f}" y2="{y(speed):.1f}" stroke="{colour}"{dash}/>')
    out.append(f'<text x="{LEFT - 8}" y="{y(speed) + 4:.1f}" text-anchor="end">{speed} ×</text>')
for sparsity in (0, 20, 40, 60, 80, 100):
    out.append(f'<text x="{x(sparsity)}" y="{HEIGHT - 24}" text-anchor="middle">{sparsity} %</text>')
out.append(f'<text x="{(x(0) + x(100)) / 2}" y="{HEIGHT - 6}" text-anchor="middle">zeros among the weights</text>')
for k, ((name, batch), points) in enumerate(curves.items()):
    colour = COLOURS[k % len(COLOURS)]
    path = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in points)
    out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    for s, v in points:
        out.append(f'<circle cx="{x(s):.1f}" cy="{y(v):.1f}" r="2.5" fill="{colour}"/>')
    row = TOP + 14 + 18 * k
    out.append(f'<line x1="{x(100) + 14}" x2="{x(100) + 34}" y1="{row}" y2="{row}" stroke="{colour}" stroke-width="2"/>')
    out.append(f'<text x="{x(100) + 40}" y="{row + 4}">{name}, {batch}</text>')
out.append("</svg>")
(DOCS / "inference.svg").write_text("\n".join(out) + "\n")

shares = sorted({share for points in curves.values() for share, _ in points if share > 0})
summary = ["| | " + " | ".join(f"{share:.0f} %" for share in shares) + " | break-even | aims |", "|---" * (len(shares) + 3) + "|"]
for (name, batch), curve in curves.items():
    points, aims = dict(curve), AIMS.get((name, batch), "–")
    speeds = " | ".join(f"{points[share]:.2f}" for share in shares)
    summary.append(f"| {name}, batch {batch} | {speeds} | {break_even(curve)} | {aims} |")
below = []
for (name, batch), curve in curves.items():
    aims = [float(aim) for aim in AIMS.get((name, batch), "").split(" · ") if aim]
    points = dict(curve)
    short = [f"{points[s]:.2f} at {s:.0f} % (aim {aim:g})" for s, aim in zip(shares, aims, strict=False) if points[s] < aim]
    below += [f"{name}, batch {batch}: {', '.join(short)}"] if short else []
slower = [f"{name}, batch {batch}, {s:.0f} %: {v:.2f}" for (name, batch), curve in curves.items() for s, v in curve if s > 0 and v < 1]
if trained:
    summary += ["", "Trained to its sparsity, not pruned at random: " + "; ".join(trained) + "."]
sections |= {
    "machine": machine.strip(),
    "summary": "\n".join(summary),
    "shortfalls": f"Below the aims: {'; '.join(below) or 'nothing'}.\n\n"
    f"Slower than the faster dense pass: {'; '.join(slower) or 'nothing'}.",
    "measurements": sections["convolutions"] + "\n" + "\n".join(sections["dense"].splitlines()[2:]),
}
page = (DOCS / "inference.md").read_text()


def measured(match):
    return f"<!-- measured {match[1]} -->\n\n{sections[match[1]]}\n\n<!-- end -->"


page = re.sub(r"<!-- measured (\w+) -->.*?<!-- end -->", measured, page, flags=re.DOTALL)
(DOCS / "inference.md").write_text(page)
