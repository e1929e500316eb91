"""Pages and tables for people."""

from __future__ import annotations

import html
import os
from typing import Any


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body{{font:15px sans-serif;margin:2em}}table{{border-collapse:collapse;margin-bottom:2em}}
th,td{{padding:.2em .7em;text-align:left;border-bottom:1px solid #ccc}}caption{{font-weight:bold;text-align:left}}</style>
</head><body><h1>{title}</h1>{body}</body></html>
"""


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
    """The report of training: the numbers of ``train --json`` as attributes, and rows.

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

    def to_html(self, path: str | os.PathLike[str] | None = None) -> Report:
        """Numbers and layers as one HTML page; of an implicit model :meth:`ImplicitModel.report` shows more.

        Parameters
        ----------
        path : path-like, optional
            Written there, whole or not at all.

        Returns
        -------
        Report
        """
        title = f"{100 * float(self.sparsity):.1f} % sparse"
        page = Report(_PAGE.format(title=html.escape(title), body=self._repr_html_() + self._layers_html()))
        if path is not None:
            page.save(path)
        return page

    def _layers_html(self) -> str:
        layers = self.results.get("layers") or []
        if not layers:
            return ""
        head = "".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in layers[0])
        shown = (f"{100 * v:.1f} %" if k == "sparsity" else "" if v is None else str(v) for la in layers for k, v in la.items())
        cells = [f"<td>{html.escape(value)}</td>" for value in shown]
        width = len(layers[0])
        rows = "".join(f"<tr>{''.join(cells[k : k + width])}</tr>" for k in range(0, len(cells), width))
        return f"<table><caption>Layers</caption><tr>{head}</tr>{rows}</table>"

    def __repr__(self) -> str:
        return f"TrainReport(sparsity={self.sparsity:.4f}, rows={len(self.rows)}, seconds={self.seconds['total']:.2f})"

    def _repr_html_(self) -> str:
        shown = ["sparsity", "trainable_sparsity", "nonzeros", "baseline_nonzeros", "rows", "rows_proven", "median_bound_distance"]
        shown += ["max_bound_distance", "max_relative_gap", "refit_residual", "equilibrium_error"]
        rows = [(k.replace("_", " "), f"{self.results[k]}") for k in shown if self.results.get(k) is not None]
        rows.append(("seconds", f"{self.seconds['total']:.2f}"))
        return table("TrainReport", rows + [("note", n) for n in self.notices])


def table(title: str, rows: list[tuple[str, str]]) -> str:
    """Names and values as HTML."""
    cells = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in rows)
    return f"<table><caption>{html.escape(title)}</caption>{cells}</table>"
