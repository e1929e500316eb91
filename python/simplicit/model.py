"""The implicit model x = φ(Ax + Bu + b), y = Cx + Du + d."""

from __future__ import annotations

import html
import json
import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse

from simplicit import _core
from simplicit._arrays import Array, as_array
from simplicit.errors import ConvergenceWarning, SettingError, UnsupportedError
from simplicit.network import Network
from simplicit.taps import TapBlock
from simplicit.taps import read as read_taps

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Sparsity:
    """How large a model is beside its baseline; the one count that every command prints."""

    nonzeros: int
    baseline_nonzeros: int
    sparsity: np.float64
    multiply_adds: int
    baseline_multiply_adds: int | None
    bytes: int
    letters: dict[str, int]
    layers: list[dict[str, Any]]


@dataclass(frozen=True)
class WellPosedness:
    """What can be shown about x = φ(Ax + c) having exactly one solution."""

    norm_a_inf: float
    lambda_pf_upper: float
    acyclic: bool
    is_shown: bool


@dataclass(frozen=True)
class Diagnostics:
    """Per sample: iterations, residual, certified errors of states and outputs, whether it converged."""

    iterations: Array
    residual: Array
    state_error: Array
    output_error: Array
    converged: Array


@dataclass(frozen=True)
class AttackReport:
    """Accuracies in the order of `epsilon`; `attacks` has (method, gradient, accuracies); `fooled` is m × ε."""

    epsilon: list[float]
    samples: int
    clean_accuracy: float
    attacked_accuracy: list[float]
    attacks: list[tuple[str, str | None, list[float]]]
    fooled: Array


@dataclass(frozen=True)
class CertifyReport:
    """Accuracies in the order of `epsilon`; `by_bound` has them per bound; `certified` is m × ε."""

    epsilon: list[float]
    samples: int
    clean_accuracy: float
    certified_accuracy: list[float]
    by_bound: list[tuple[str, list[float]]]
    certified: Array
    not_converged: int


class ImplicitModel:
    """An implicit model: weights as SciPy matrices, outputs with certified errors, one file.

    Made by :meth:`load`, :meth:`from_arrays`, :meth:`Network.to_implicit` or :class:`SIM`.

    Examples
    --------
    >>> import numpy as np
    >>> from simplicit import ImplicitModel
    >>> model = ImplicitModel.from_arrays(
    ...     A=[[0.0, 0.5], [0.25, 0.0]], B=[[1.0], [0.0]], C=[[1.0, 1.0]], D=[[0.0]]
    ... )
    >>> float(model.predict(np.array([[7.0]]))[0, 0])
    10.0
    >>> model.well_posedness().norm_a_inf
    0.5
    """

    def __init__(self, core: _core.Model) -> None:
        self._core = core
        self._taps: list[TapBlock] | None = None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ImplicitModel:
        """Read a model file.

        Parameters
        ----------
        path : path-like
        """
        return cls(_core.Model.load(os.fspath(path)))

    @classmethod
    def from_arrays(
        cls,
        A: Any,
        B: Any,
        C: Any,
        D: Any,
        b: Any = None,
        d: Any = None,
        *,
        activation: str = "relu",
        layout: Sequence[dict[str, Any]] | None = None,
        kappa: float | None = None,
        baseline_nonzeros: int | None = None,
        provenance: dict[str, str] | None = None,
        preprocessing: dict[str, Any] | None = None,
    ) -> ImplicitModel:
        """A model from dense or sparse matrices.

        Parameters
        ----------
        A, B, C, D : array or sparse matrix
            n × n, n × p, q × n, q × p; stored as float32.
        b, d : array, optional
            n and q numbers, zero by default.
        activation : str, optional
            Of all states, where no layout is given.
        layout : list of dict, optional
            ``{"name", "size", "activation"}`` per layer, last layer first.
        kappa : float, optional
            The bound that ‖A‖∞ was held to.
        baseline_nonzeros : int, optional
            What sparsity is counted against.
        provenance : dict, optional
            Where the model comes from, strings by name.
        preprocessing : dict, optional
            ``scale``, ``mean`` and ``std`` of u = (raw·scale − mean)/std.
        """
        matrices = [_csr(m) for m in (A, B, C, D)]
        (n, p), q = matrices[1].shape, matrices[2].shape[0]
        if layout is None:
            layout = [{"name": "states", "size": n, "activation": activation}]
        core = _core.Model.from_parts(
            [(m.indptr.astype(np.int64), m.indices.astype(np.int64), m.data) for m in matrices],
            np.zeros(n, np.float32) if b is None else np.asarray(b, np.float32).ravel(),
            np.zeros(q, np.float32) if d is None else np.asarray(d, np.float32).ravel(),
            json.dumps(list(layout)),
            p,
            q,
            kappa,
            baseline_nonzeros,
            provenance,
            None if preprocessing is None else json.dumps(preprocessing),
        )
        return cls(core)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model file, whole or not at all.

        Parameters
        ----------
        path : path-like
        """
        self._core.save(os.fspath(path))

    def to_bytes(self) -> bytes:
        """The bytes of the model file."""
        return self._core.to_bytes()

    def to_onnx(
        self, path: str | os.PathLike[str], *, tolerance: float = 1e-7, max_iterations: int = 10_000
    ) -> None:
        """Write an ONNX file with input ``u`` (preprocessed) and output ``y``.

        Parameters
        ----------
        path : path-like
        tolerance, max_iterations : optional
            When the loop of a cyclic model stops.
        """
        self._core.to_onnx(os.fspath(path), tolerance=tolerance, max_iterations=max_iterations)

    def to_torch(self, *, dtype: Any = None) -> Any:
        """A ``torch.nn.Module`` with the same outputs, whose backward is the equilibrium's exact gradient.

        Parameters
        ----------
        dtype : torch.dtype, optional
            Of its parameters, float32 by default.

        Returns
        -------
        simplicit.torch.ImplicitModule
        """
        from simplicit.torch import ImplicitModule

        return ImplicitModule(self, dtype=dtype)

    @property
    def n_inputs(self) -> int:
        """p, inputs per sample."""
        return self._core.shape[0]

    @property
    def n_states(self) -> int:
        """n, states per sample."""
        return self._core.shape[1]

    @property
    def n_outputs(self) -> int:
        """q, outputs per sample."""
        return self._core.shape[2]

    @property
    def taps(self) -> list[TapBlock]:
        """Parts of A, B, C, D whose weights are shared over positions; none in a model without feature maps."""
        if self._taps is None:
            maps = any(layer.get("map") for layer in self.layout)
            self._taps = read_taps(self.to_bytes()) if maps else []
        return self._taps

    def unrolled(self, letter: str, *, max_nonzeros: int = 50_000_000) -> scipy.sparse.csr_array:
        """A, B, C or D with every shared weight at every position it acts on.

        Parameters
        ----------
        letter : str
            A, B, C or D.
        max_nonzeros : int, optional
            Refuse more: an unrolled ResNet-20 has 37 million.
        """
        matrix = self._stored(letter)
        blocks = [block for block in self.taps if block.letter == letter]
        most = matrix.nnz + sum(block.multiply_adds() for block in blocks)
        if most > max_nonzeros:
            raise SettingError(f"max_nonzeros: expected at least {most} to unroll {letter}, got {max_nonzeros}")
        starts = np.concatenate([[0], np.cumsum([layer["size"] for layer in self.layout])]).astype(int)
        for block in blocks:
            part = block.unrolled().tocoo()
            rows = part.coords[0] + (starts[block.target] if block.target is not None else 0)
            cols = part.coords[1] + (starts[block.source] if block.source is not None else 0)
            matrix = matrix + scipy.sparse.csr_array((part.data, (rows, cols)), shape=matrix.shape)
        return matrix

    def _matrix(self, letter: str) -> scipy.sparse.csr_array:
        if any(block.letter == letter for block in self.taps):
            raise UnsupportedError(
                f"{letter} of a model with shared weights is not supported as it is; use taps, or unrolled({letter!r})"
            )
        return self._stored(letter)

    def _stored(self, letter: str) -> scipy.sparse.csr_array:
        indptr, indices, data, shape = self._core.csr(letter)
        # Columns are below 2³¹: the same bits as int32. Only the row pointers are converted, n + 1 numbers.
        return scipy.sparse.csr_array((data, indices.view(np.int32), indptr.astype(np.int32)), shape=shape, copy=False)

    @property
    def A(self) -> scipy.sparse.csr_array:
        """n × n, states from states; read-only, not copied."""
        return self._matrix("A")

    @property
    def B(self) -> scipy.sparse.csr_array:
        """n × p, states from inputs; read-only, not copied."""
        return self._matrix("B")

    @property
    def C(self) -> scipy.sparse.csr_array:
        """q × n, outputs from states; read-only, not copied."""
        return self._matrix("C")

    @property
    def D(self) -> scipy.sparse.csr_array:
        """q × p, outputs from inputs; read-only, not copied."""
        return self._matrix("D")

    @property
    def b(self) -> Array:
        """The bias of the states, one per unit or channel of a map; read-only, not copied."""
        return self._core.state_bias

    @property
    def d(self) -> Array:
        """The bias of the outputs, q; read-only, not copied."""
        return self._core.output_bias

    @property
    def layout(self) -> list[dict[str, Any]]:
        """Layers, last first: name, size, activation."""
        layers: list[dict[str, Any]] = json.loads(self._core.layout)
        return layers

    @property
    def preprocessing(self) -> dict[str, Any]:
        """``scale``, ``mean`` and ``std`` of u = (raw·scale − mean)/std."""
        parts: dict[str, Any] = json.loads(self._core.preprocessing)
        return parts

    @property
    def kappa(self) -> float | None:
        """The bound that ‖A‖∞ was held to."""
        return self._core.kappa

    @property
    def provenance(self) -> dict[str, str]:
        """Settings, seed, input hashes, version."""
        return self._core.provenance

    def predict(self, U: Any, *, preprocess: bool = True, threads: int | None = None, **limits: Any) -> Array:
        """Outputs, one sample a row.

        Parameters
        ----------
        U : array, m × p or m × C × H × W
            Raw inputs; the model's own preprocessing is applied.
        preprocess : bool, optional
            False if `U` is already what the states were computed from.
        threads : int, optional
            All by default; the result does not depend on it.
        **limits
            ``tolerance``, ``max_iterations`` and ``memory`` of the equilibrium.
        """
        y: Array = self._run(U, False, preprocess, threads, limits)["y"]
        return y

    def equilibrium(self, U: Any, *, preprocess: bool = True, threads: int | None = None, **limits: Any) -> Any:
        """States and outputs at the equilibrium.

        Parameters
        ----------
        U, preprocess, threads, **limits
            As for :meth:`predict`.

        Returns
        -------
        Z, X, Y : arrays
            Pre-activations, states and outputs, one sample a row.
        """
        out = self._run(U, True, preprocess, threads, limits)
        return out["z"], out["x"], out["y"]

    def diagnostics(self, U: Any, *, preprocess: bool = True, threads: int | None = None, **limits: Any) -> Diagnostics:
        """What is known about the equilibrium of every sample.

        Parameters
        ----------
        U, preprocess, threads, **limits
            As for :meth:`predict`.
        """
        out = self._core.run(as_array(U, "U"), preprocess=preprocess, threads=threads, **limits)
        return Diagnostics(**{k: out[k] for k in Diagnostics.__dataclass_fields__})

    def _run(self, U: Any, states: bool, preprocess: bool, threads: int | None, limits: dict[str, Any]) -> Any:
        out = self._core.run(as_array(U, "U"), preprocess=preprocess, states=states, threads=threads, **limits)
        lost = int((~out["converged"]).sum())
        if lost:
            message = f"the equilibrium of {lost} sample(s) was not reached; see diagnostics"
            warnings.warn(message, ConvergenceWarning, stacklevel=3)
        return out

    def input_gradient(self, U: Any, v: Any, *, preprocess: bool = True, threads: int | None = None) -> Array:
        """vᵀ dy/du through the equilibrium, one sample a row.

        Parameters
        ----------
        U : array, m × p
        v : array, m × q
            Cotangents of the outputs.
        preprocess, threads
            As for :meth:`predict`; the gradient is with respect to the preprocessed input.
        """
        return self._core.input_gradient(as_array(U, "U"), as_array(v, "v"), preprocess=preprocess, threads=threads)

    def attack(
        self,
        U: Any,
        labels: Any,
        epsilon: Sequence[float] = (1 / 255, 2 / 255),
        *,
        baseline: Network | ImplicitModel | None = None,
        methods: Sequence[str] = ("fgsm", "pgd", "square"),
        pixels: float = 1.0,
        iterations: int = 20,
        restarts: int = 2,
        step: float | None = None,
        queries: int = 300,
        seed: int = 0,
        threads: int | None = None,
    ) -> AttackReport:
        """Accuracy on inputs that were changed to fool the model, as ``simplicit attack`` measures it.

        Parameters
        ----------
        U : array
            Raw inputs.
        labels : array
            Their classes.
        epsilon : sequence of float, optional
            Largest changes, in raw·scale units; inputs stay in [0, 1] there.
        baseline : Network or ImplicitModel, optional
            Attacks along its gradient are transferred as well.
        methods : sequence of str, optional
            ``fgsm``, ``pgd``, ``square``.
        pixels : float, optional
            Share of the values that may change, chosen at random per sample.
        iterations, restarts, step, queries : optional
            How hard PGD and the square search try.
        seed : int, optional
        threads : int, optional
        """
        found = _core.attack_model(
            self._core,
            as_array(U, "U"),
            np.asarray(labels).ravel().tolist(),
            baseline=None if baseline is None else baseline._core,
            epsilon=[float(e) for e in epsilon],
            methods=list(methods),
            pixels=pixels,
            iterations=iterations,
            restarts=restarts,
            step=step,
            queries=queries,
            seed=seed,
            threads=threads,
        )
        return AttackReport(**{**found, "fooled": np.array(found["fooled"])})

    def certify(
        self,
        U: Any,
        labels: Any,
        epsilon: Sequence[float] = (1 / 255, 2 / 255),
        *,
        bound: str = "linear",
        threads: int | None = None,
    ) -> CertifyReport:
        """Accuracy that no change within epsilon can take away, as ``simplicit certify`` proves it.

        Parameters
        ----------
        U : array
            Raw inputs.
        labels : array
            Their classes.
        epsilon : sequence of float, optional
            Largest changes, in raw·scale units.
        bound : str, optional
            The tightest to try: ``global``, ``interval`` or ``linear``.
        threads : int, optional
        """
        labels = np.asarray(labels).ravel().tolist()
        found = _core.certify_model(
            self._core, as_array(U, "U"), labels, epsilon=[float(e) for e in epsilon], bound=bound, threads=threads
        )
        return CertifyReport(**{**found, "certified": np.array(found["certified"])})

    def sparsity(self) -> Sparsity:
        """Non-zeros, sparsity, multiply-adds and bytes."""
        parts = json.loads(self._core.sparsity())
        parts["sparsity"] = np.float64(parts["sparsity"])
        return Sparsity(**{k: parts[k] for k in Sparsity.__dataclass_fields__})

    def well_posedness(self) -> WellPosedness:
        """‖A‖∞ and a certified upper bound on λ_pf(|A|)."""
        return WellPosedness(**self._core.well_posedness())

    def rescale(self, kappa: float = 0.99) -> ImplicitModel:
        """The same function in coordinates where ‖A‖∞ ≤ kappa.

        Parameters
        ----------
        kappa : float, optional
        """
        return ImplicitModel(self._core.rescale(kappa)[0])

    def report(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        baseline: Network | ImplicitModel | None = None,
        results: dict[str, Any] | None = None,
        U: Any = None,
        labels: Any = None,
        title: str = "model",
        threads: int | None = None,
    ) -> Report:
        """The HTML page of ``simplicit report``.

        Parameters
        ----------
        path : path-like, optional
            Where to write it.
        baseline : Network or ImplicitModel, optional
            For everything "before".
        results : dict, optional
            ``TrainReport.results`` of this model's training.
        U, labels : array, optional
            Raw test inputs and their classes to measure on.
        title : str, optional
        threads : int, optional
        """
        page = _core.page(
            title,
            self._core,
            baseline=None if baseline is None else baseline._core,
            results=None if results is None else json.dumps(results),
            u=None if U is None else as_array(U, "U"),
            labels=None if labels is None else np.asarray(labels).ravel().tolist(),
            threads=threads,
        )
        report = Report(page)
        if path is not None:
            report.save(path)
        return report

    def __reduce__(self) -> Any:
        return (_from_bytes, (self.to_bytes(),))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ImplicitModel) and self.to_bytes() == other.to_bytes()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        size = self.sparsity()
        return (
            f"ImplicitModel({self.n_inputs} inputs, {self.n_states} states, {self.n_outputs} outputs, "
            f"{size.nonzeros} non-zeros, {100 * size.sparsity:.1f} % sparse)"
        )

    def _repr_html_(self) -> str:
        size, posed = self.sparsity(), self.well_posedness()
        rows = [
            ("inputs, states, outputs", f"{self.n_inputs:,}, {self.n_states:,}, {self.n_outputs:,}"),
            ("non-zeros", f"{size.nonzeros:,} of {size.baseline_nonzeros:,} ({100 * size.sparsity:.1f} % sparse)"),
            ("multiply-adds", f"{size.multiply_adds:,}"),
            ("file", f"{size.bytes:,} bytes"),
            ("‖A‖∞, λ_pf at most", f"{posed.norm_a_inf:.4g}, {posed.lambda_pf_upper:.4g}"),
            ("layers, last first", ", ".join(f"{la['name']} {la['size']}" for la in self.layout)),
        ]
        return _table("ImplicitModel", rows)


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


def _from_bytes(data: bytes) -> ImplicitModel:
    return ImplicitModel(_core.Model.from_bytes(data))


def _csr(matrix: Any) -> scipy.sparse.csr_array:
    sparse = scipy.sparse.csr_array(matrix, dtype=np.float32)
    sparse.sum_duplicates()
    sparse.eliminate_zeros()
    return sparse


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in rows)
    return f"<table><caption>{html.escape(title)}</caption>{cells}</table>"
