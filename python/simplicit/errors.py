"""The errors, one class for each kind, with the library's own one-line messages.

Attributes are empty if the message contains everything.
"""

from __future__ import annotations

from collections.abc import Sequence


class Error(Exception):
    """Anything the library refuses."""


class ShapeError(Error, ValueError):
    """Two shapes that should agree do not; ``what``, ``expected`` and ``got`` say which."""

    what: str = ""
    expected: str = ""
    got: str = ""


class NotFiniteError(Error, ValueError):
    """A NaN or an infinity in the data, at ``row`` and ``column`` of ``array``."""

    array: str = ""
    row: int = -1
    column: int = -1


class SettingError(Error, ValueError):
    """A setting outside its range, or two settings that exclude each other."""

    setting: str = ""
    expected: str = ""
    got: str = ""


class FileError(Error, OSError):
    """A file at ``path`` that is not what it should be, or that the system refuses."""

    path: str = ""


class UnsupportedError(Error, NotImplementedError):
    """Something the library does not do; the message says what it does instead."""


class InfeasibleError(Error):
    """Rows that no weights can match exactly: ``rows`` has their names and smallest residuals."""

    rows: Sequence[tuple[str, float]] = ()


class NotConvergedError(Error):
    """Samples whose equilibrium was not reached, as rows of the batch in ``samples``."""

    samples: Sequence[int] = ()


class NotFittedError(Error, ValueError, AttributeError):
    """An estimator that was used before it was fitted."""


class ConvergenceWarning(UserWarning):
    """The work is done, but with a notice: a row at its limit, a sample not converged, a target missed."""
