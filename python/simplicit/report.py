"""Pages and tables for people."""

from __future__ import annotations

import html
import os
from typing import Any


class Report:
    """One self-contained HTML page; shown in a frame by notebooks."""

    def __init__(self, page: str) -> None:
        self.html = page

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page, whole or not at all.

        Parameters
        ----------
        path : path-like
        """
        target = os.fspath(path)
        beside = f"{target}.{os.getpid()}.tmp"
        try:
            with open(beside, "w", encoding="utf-8") as file:
                file.write(self.html)
            os.replace(beside, target)
        except BaseException:
            if os.path.exists(beside):
                os.unlink(beside)
            raise

    def _repr_html_(self) -> str:
        page = html.escape(self.html, quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:640px;border:0" title="report"></iframe>'

    def __repr__(self) -> str:
        return f"Report({len(self.html)} characters of HTML)"


class TrainReport:
    """What training has to say: the numbers of ``train --json`` as attributes, and rows.

    ``results`` is the whole JSON object; `rows` has name, non-zeros, gap and residual of every row, states then outputs.
    """

    def __init__(self, results: dict[str, Any], notices: list[str]) -> None:
        self.results = results
        self.notices = notices

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One per row of (A B; C D), states then outputs."""
        rows: list[dict[str, Any]] = self.results["row_details"]
        return rows

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "results":
            raise AttributeError(name)
        try:
            return self.results[name]
        except KeyError:
            raise AttributeError(f"{name!r}; there is {', '.join(self.results)}") from None

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.results]

    def __repr__(self) -> str:
        return f"TrainReport(sparsity={self.sparsity:.4f}, rows={len(self.rows)}, seconds={self.seconds['total']:.2f})"

    def _repr_html_(self) -> str:
        shown = ["sparsity", "nonzeros", "baseline_nonzeros", "rows", "rows_proven", "median_bound_distance"]
        shown += ["max_bound_distance", "max_relative_gap", "refit_residual", "equilibrium_error"]
        rows = [(k.replace("_", " "), f"{self.results[k]}") for k in shown if self.results.get(k) is not None]
        rows.append(("seconds", f"{self.seconds['total']:.2f}"))
        return table("TrainReport", rows + [("note", n) for n in self.notices])


def table(title: str, rows: list[tuple[str, str]]) -> str:
    """Names and values as HTML."""
    cells = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in rows)
    return f"<table><caption>{html.escape(title)}</caption>{cells}</table>"
