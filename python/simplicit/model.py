"""The implicit model x = φ(Ax + Bu + b), y = Cx + Du + d."""

from __future__ import annotations

import json
import os
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse

from simplicit import _core
from simplicit import taps as tap_blocks
from simplicit._arrays import Array, as_array
from simplicit._core import Model as CoreModel
from simplicit._shaped import Shaped
from simplicit.errors import ConvergenceWarning, SettingError, UnsupportedError
from simplicit.report import Report, table
from simplicit.results import AttackReport, CertifyReport, Diagnostics, Sparsity, WellPosedness
from simplicit.taps import TapBlock, lent_csr

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simplicit.network import Network


class ImplicitModel(Shaped):
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

    _core: CoreModel

    def __init__(self, core: CoreModel) -> None:
        self._core = core

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ImplicitModel:
        """Read a model file.

        Parameters
        ----------
        path : path-like
        """
        return cls(CoreModel.load(os.fspath(path)))

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
            The activation of all states, if no layout is given.
        layout : list of dict, optional
            ``{"name", "size", "activation"}`` per layer, last layer first.
        kappa : float, optional
            The bound that ‖A‖∞ was held to.
        baseline_nonzeros : int, optional
            Non-zero parameters of the baseline, with which sparsity is computed.
        provenance : dict, optional
            Where the model comes from, strings by name.
        preprocessing : dict, optional
            ``scale``, ``mean`` and ``std`` of u = (raw·scale − mean)/std.
        """
        matrices = [_csr(m) for m in (A, B, C, D)]
        (n, p), q = matrices[1].shape, matrices[2].shape[0]
        if layout is None:
            layout = [{"name": "states", "size": n, "activation": activation}]
        core = CoreModel.from_parts(
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
            The type of its parameters, float32 by default.

        Returns
        -------
        simplicit.torch.ImplicitModule or simplicit.torch.LayeredModule
        """
        from simplicit.torch import implicit

        return implicit(self, dtype=dtype)

    @property
    def taps(self) -> list[TapBlock]:
        """Convolutions, poolings and residual sums: summands of A, B, C, D; read-only, not copied."""
        return tap_blocks.of_core(self._core)

    def unrolled(self, letter: str, *, max_nonzeros: int = 50_000_000) -> scipy.sparse.csr_array:
        """A, B, C or D with every shared weight at every position it acts on.

        Parameters
        ----------
        letter : str
            A, B, C or D.
        max_nonzeros : int, optional
            Refuse more: an unrolled ResNet-20 has 37 million.
        """
        stored = self._stored(letter)
        blocks = [block for block in self.taps if block.letter == letter]
        most = stored.nnz + sum(block.most_nonzeros() for block in blocks)
        if most > max_nonzeros:
            raise SettingError(f"max_nonzeros: expected at least {most} to unroll {letter}, got {max_nonzeros}")
        return stored + tap_blocks.unroll(blocks, self.layout, stored.shape) if blocks else stored

    def _matrix(self, letter: str) -> scipy.sparse.csr_array:
        if any(block.letter == letter for block in self.taps):
            raise UnsupportedError(
                f"{letter} of a model with shared weights is not supported as it is; use taps, or unrolled({letter!r})"
            )
        return self._stored(letter)

    def _stored(self, letter: str) -> scipy.sparse.csr_array:
        return lent_csr(*self._core.csr(letter))

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
    def preprocessing(self) -> dict[str, Any]:
        """``scale``, ``mean`` and ``std`` of u = (raw·scale − mean)/std."""
        parts: dict[str, Any] = json.loads(self._core.preprocessing)
        return parts

    @property
    def kappa(self) -> float | None:
        """The bound that ‖A‖∞ was held to."""
        return self._core.kappa

    @property
    def output_factor(self) -> float:
        """The factor that brings Cx + Du + d into the units of the baseline; not 1 after ``gamma`` alone."""
        return self._core.output_factor

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
        """Convergence and certified errors of the equilibrium of every sample.

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
        iterations: int = 10,
        restarts: int = 5,
        step: float | None = None,
        queries: int = 300,
        seed: int = 0,
        norm: str = "linf",
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
            The effort of PGD and of the square search.
        seed : int, optional
        norm : str, optional
            ``linf``: every value changes by at most epsilon; ``l2``: the Euclidean length of the change.
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
            norm=norm,
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
        slopes: int = 0,
        norm: str = "linf",
        arithmetic: str = "single",
        work: float = 2.2e12,
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
        slopes : int, optional
            Gradient steps on the slopes of the lines, for samples that the linear bound leaves open.
        norm : str, optional
            ``linf``: every value changes by at most epsilon; ``l2``: the Euclidean length of the change.
        arithmetic : str, optional
            ``single``: proved for exact arithmetic and for simplicit's own run on a processor; ``any-order``: for every other
            run in single precision too, on a GPU or by another program; ``exact``: for exact arithmetic alone.
        work : float, optional
            Multiply-adds that the intervals of one sample at one epsilon may cost; ``given_up`` counts samples that need more.
        threads : int, optional
        """
        labels = np.asarray(labels).ravel().tolist()
        found = _core.certify_model(
            self._core,
            as_array(U, "U"),
            labels,
            epsilon=[float(e) for e in epsilon],
            bound=bound,
            slopes=slopes,
            norm=norm,
            arithmetic=arithmetic,
            work=work,
            threads=threads,
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
        attack: AttackReport | None = None,
        certify: CertifyReport | None = None,
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
        attack, certify : AttackReport, CertifyReport, optional
            What :meth:`attack` and :meth:`certify` found, for accuracy against ε.
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
            attack=None if attack is None else json.dumps(attack.results()),
            certify=None if certify is None else json.dumps(certify.results()),
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
        return table("ImplicitModel", rows)


def _from_bytes(data: bytes) -> ImplicitModel:
    return ImplicitModel(CoreModel.from_bytes(data))


def _csr(matrix: Any) -> scipy.sparse.csr_array:
    # A copy, because sorting changes it: the matrix is the caller's, or belongs to a model and is read-only.
    sparse = scipy.sparse.csr_array(matrix, dtype=np.float32, copy=True)
    sparse.sum_duplicates()
    sparse.eliminate_zeros()
    return sparse
