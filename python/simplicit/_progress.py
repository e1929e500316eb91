"""Progress in terminals and notebooks; silent elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

Progress = Callable[[str, int, int], None]

_WIDTH = 24
_INTERVAL = 0.1


def in_notebook() -> bool:
    """Whether this is a Jupyter kernel, which can show HTML."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


class Terminal:
    """One line on stderr, drawn over itself and cleared at the end."""

    def __init__(self) -> None:
        self._last = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last < _INTERVAL:
            return
        self._last = now
        filled = _WIDTH * done // max(total, 1)
        sys.stderr.write(f"\r\x1b[K{what:34} {'█' * filled}{'░' * (_WIDTH - filled)} {done:>6}/{total}")
        sys.stderr.flush()

    def close(self) -> None:
        """Clear the line."""
        if self._last:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


class Tqdm:
    """tqdm's bar, in terminals and notebooks alike; every bar is removed at its end."""

    def __init__(self) -> None:
        import importlib

        self._make = importlib.import_module("tqdm.auto").tqdm
        self._what: str | None = None
        self._bar: Any = None

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._what or self._bar is None or self._bar.total != total:
            self.close()
            self._what, self._bar = what, self._make(total=total, desc=what, leave=False, mininterval=_INTERVAL)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Clear the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class Notebook:
    """An HTML progress element that is updated in place."""

    def __init__(self) -> None:
        import importlib

        shown: Any = importlib.import_module("IPython.display")
        self._html = shown.HTML
        self._last = 0.0
        self._handle = shown.display(shown.HTML(""), display_id=True)

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last < _INTERVAL:
            return
        self._last = now
        import html

        text = f'<progress value="{done}" max="{max(total, 1)}"></progress> {html.escape(what)} {done}/{total}'
        self._handle.update(self._html(text))

    def close(self) -> None:
        """Empty the element."""
        self._handle.update(self._html(""))


class Nothing:
    """Shows nothing."""

    def __call__(self, what: str, done: int, total: int) -> None:
        pass

    def close(self) -> None:
        """Nothing to clear."""


class Told:
    """Calls the user's own function."""

    def __init__(self, function: Progress) -> None:
        self._function = function

    def __call__(self, what: str, done: int, total: int) -> None:
        self._function(what, done, total)

    def close(self) -> None:
        """Nothing to clear."""


def has_tqdm() -> bool:
    """Whether tqdm is installed."""
    import importlib.util

    return importlib.util.find_spec("tqdm") is not None


def watcher(show: str | Progress | None) -> Terminal | Notebook | Nothing | Told | Tqdm:
    """``"tqdm"``, ``"bar"``, ``"none"``, a function of (what, done, total), or None: a bar in terminals and notebooks, tqdm's
    where that is installed."""
    if callable(show):
        return Told(show)
    if show is None:
        seen = in_notebook() or sys.stderr.isatty()
        if seen and has_tqdm():
            return Tqdm()
        return Notebook() if in_notebook() else Terminal() if seen else Nothing()
    if show == "tqdm" and has_tqdm():
        return Tqdm()
    if show == "bar":
        return Notebook() if in_notebook() else Terminal()
    if show == "none":
        return Nothing()
    from simplicit.errors import SettingError

    raise SettingError(f"progress: expected tqdm (where it is installed), bar, none, a function or None, got {show!r}")
