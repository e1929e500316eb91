"""Tables that a benchmark writes into a page, between two marks that carry its name."""

import os
import pathlib
import platform
import shlex
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]


def fill(path, name, text):
    """Replace what is between the marks of `name`; the file is whole or as it was."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    page = path.read_text(encoding="utf-8")
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"{path}: expected the marks {begin} and {end}")
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    beside.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}", encoding="utf-8")
    beside.replace(path)


def command():
    """How this run was asked for, without where it was."""
    return shlex.join(["python", f"bench/{pathlib.Path(sys.argv[0]).name}", *sys.argv[1:]])


#: Of other work, before any of ours.
_LOAD = os.getloadavg()[0]


def machine():
    """The processor, how many of its cores there are, and what else it did when this began."""
    model = platform.processor() or "unknown processor"
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    article = "an" if model[:1] in "AEIOU" else "a"
    busy = f", load {_LOAD:.1f} at the start: others were using it, so seconds say little" if _LOAD > 0.5 else ", idle"
    return f"{cores} cores of {article} {model}{busy}"


def table(header, rows):
    """Markdown."""
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])
