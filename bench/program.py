"""The program as the benchmarks of many networks run it: their flags, their Python, one run, one comparison."""

import argparse
import importlib.util
import os
import pathlib
import resource
import subprocess
import sys
import time
import typing

import page


def parser(description, folder):
    """The flags that these benchmarks share; the files of the runs go to target/`folder`."""
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("--environment", default=page.ROOT / "target/networks-environment", type=pathlib.Path)
    flags.add_argument("--folder", default=page.ROOT / "target" / folder, type=pathlib.Path, help="files of the runs")
    flags.add_argument("--program", default=page.ROOT / "target/release/simplicit", type=pathlib.Path)
    flags.add_argument("--page", default=page.ROOT / "docs/networks.md", type=pathlib.Path)
    flags.add_argument("--only", default="", help="names, comma-separated; the rows of the others stay as they are")
    flags.add_argument("--threads", default="", help="threads of simplicit (default: all)")
    flags.add_argument("--limit", default=None, type=float, help="seconds after which a training run is stopped")
    return flags


def environment(folder, packages):
    """Go on in a Python that has the packages; in this one, if it has them."""
    if all(importlib.util.find_spec(package) for package in packages):
        return
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    # Another benchmark may have made the environment with fewer packages.
    subprocess.run([folder / "bin/pip", "install", "--quiet", *packages], check=True)
    os.execv(python, [python, *sys.argv])


class Run(typing.NamedTuple):
    seconds: float
    processor_seconds: float
    error: str | None


def run(args, *command, limit=None):
    """One command of the program, at most `limit` seconds."""
    line = [str(c) for c in (args.program, *command)]
    if args.threads and command[0] in ("predict", "train"):
        line += ["--threads", args.threads]

    def now():
        return time.monotonic(), sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])

    before, error = now(), None
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=limit)
        # 1 is a result with a remark: a target missed by a little, a row at its limit.
        if done.returncode not in (0, 1):
            error = (done.stderr.strip().splitlines() or ["no message"])[-1]
    except subprocess.TimeoutExpired:
        error = f"stopped after {limit:.0f} s"
    after = now()
    return Run(after[0] - before[0], after[1] - before[1], error)


def difference(ours, theirs):
    """The largest difference over the largest output."""
    return float(abs(ours - theirs.reshape(ours.shape)).max() / abs(theirs).max())


def shown(row, key, form):
    """A figure of a table's row, or a dash where there is none."""
    return form.format(row[key]) if row.get(key) is not None else "–"
