"""The SIM estimator: the algorithm with the habits of scikit-learn."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from simplicit import _core
from simplicit._arrays import Array, as_array, content_hash, on_gpu
from simplicit._cuda import find_cuda
from simplicit._progress import Progress, watcher
from simplicit.errors import ConvergenceWarning, NotFittedError, SettingError, ShapeError
from simplicit.model import ImplicitModel
from simplicit.network import Network
from simplicit.report import Report, TrainReport, table
from simplicit.states import States
from simplicit.statistics import Statistics, fit_statistics

#: Settings that the command line spells on|off.
_SWITCHES = ("normalize", "output_aware", "bias", "refit", "cascade", "stages")
#: Settings that are not flags of ``simplicit train``.
_OURS = ("network", "mask", "threads", "checkpoint", "progress", "solver", "zero_below")


class SIM:
    """Trains a sparse implicit model that matches a baseline's states, row by row.

    Every parameter is a flag of ``simplicit train`` with its default; None leaves the decision to the library.

    Parameters
    ----------
    penalty : str or callable, optional
        ``cardinality`` (default), ``l1``, ``perspective``, ``elastic-net`` or ``ridge``; or a function that builds a
        CVXPY expression for one row, see :mod:`simplicit.custom`.
    network : Network, ImplicitModel or path-like, optional
        The baseline: a network or model, or the name of an ONNX or model file. ``fit(U)`` needs it; states carry their own.
    beta, alpha, mu, break_point : float, optional
        Parameters of the penalty.
    target_sparsity : float, optional
        Share of the baseline's non-zeros to remove.
    max_drop : float, optional
        The smallest model that agrees with the baseline within this many percentage points on held-out samples.
    preset : str, optional
        ``paper``: the paper's settings.
    connectivity : str, optional
        ``full``, ``no-self-loop``, ``feedforward``, ``baseline`` or ``mask``.
    include, exclude : str or sequence of str, optional
        Layers to train, and layers that keep the baseline's weights: by name (``*`` stands for anything, a name also for
        what is below it) or by kind (``dense``, ``convolution``, ``grouped convolution``).
    mask : array, optional
        (n + q) × (n + p), non-zero where a weight may be.
    kappa : float, optional
        ‖A‖∞ ≤ kappa in the stored model.
    rescale : bool, optional
        Diagonal rescaling to ‖A‖∞ ≤ kappa.
    gamma : float, optional
        The paper's layered scaling.
    matching : str, optional
        ``relaxed`` or ``exact``.
    lambda1, lambda2 : float, optional
        Weights of the mismatch of states and outputs.
    normalize, output_aware, bias, refit, cascade : bool, optional
        Switches of the method.
    rounds : int, optional
        Convex solves with reweighting between them.
    reconstruct : int, optional
        Refit the weights between two joints together, so that values this many joints ahead match the network's; a joint is a
        layer that everything computed later goes through, such as a residual sum. 0 is no such refit.
    output_refit : int, optional
        Rounds of least squares over all non-zeros together; 0 is none.
    stages : bool, optional
        Approach a target in stages, each of which makes the refitted model before it sparser; needs ``output_refit`` and
        cardinality. Default: where both are so, but not for networks with convolutions.
    allocate : int, optional
        Rounds of moving non-zeros between layers to where they are worth most to the outputs of samples that were not fitted;
        needs a target and cardinality.
    robust : int, optional
        Train this many times more, with every weight priced by what it adds to the certificate of the model before.
    robust_refit : float, optional
        Refit the non-zeros in the end so that linear bounds certify more samples under changes of at most this size, in
        raw times scale units, such as 1/255.
    prove : float, optional
        Seconds for each row to prove its answer optimal, once the model is found; ``cardinality`` only.
    reach, positions : int, optional
        For convolutions: maps back that ``feedforward`` may read, and positions of a map that each sample gives.
    bounds : str, optional
        Cardinality rows that get a lower bound: ``off``, ``sampled`` or ``all``.
    samples : int, optional
        Use this many samples, chosen without replacement.
    augment : str, optional
        Train on every image and copies of it: ``flip`` (mirrored), ``shift:N`` (moved by up to N pixels), ``mix:N`` (N
        copies, each mixed with another image in random shares), or several as in ``flip,shift:2,mix:3``, drawn by the
        seed.
    seed : int, optional
        Seed of everything random.
    scale, mean, std : float or sequence, optional
        u = (raw·scale − mean)/std.
    threads : int, optional
        All by default; no result depends on it.
    device : str, optional
        ``auto`` (the default: a GPU that is there), ``cpu``, ``cuda`` or ``cuda:N``.
    memory : str or int, optional
        Bytes to stay within, or a number with K, M or G such as ``"4G"``: layers of all samples go to files beyond it.
        Half of what is free by default; no result depends on it.
    checkpoint : path-like, optional
        A directory of intermediate results, from which interrupted work continues.
    progress : str or callable, optional
        ``tqdm``, ``bar``, ``none``, a function of (what, done, total), or None: a bar in terminals and notebooks, tqdm's
        where that is installed.
    solver : str, optional
        The CVXPY solver of a `penalty` that is a function.
    zero_below : float, optional
        Weights of a `penalty` that is a function, relative to their row's largest, that count as zero.

    Attributes
    ----------
    model_ : ImplicitModel
    report_ : TrainReport
    n_features_in_ : int

    Examples
    --------
    >>> import numpy as np
    >>> from simplicit import SIM, Network
    >>> rng = np.random.default_rng(0)
    >>> network = Network.from_layers([rng.normal(size=(12, 6)), rng.normal(size=(2, 12))])
    >>> U = rng.normal(size=(400, 6))
    >>> sim = SIM(penalty="l1", network=network, target_sparsity=0.4).fit(U)
    >>> bool(abs(sim.model_.sparsity().sparsity - 0.4) < 0.03)
    True
    >>> sim.score(U, network.forward(U)) > 0.9
    True
    """

    def __init__(
        self,
        penalty: str | Callable[..., Any] | None = None,
        *,
        network: Any = None,
        beta: float | None = None,
        alpha: float | None = None,
        mu: float | None = None,
        break_point: float | None = None,
        target_sparsity: float | None = None,
        max_drop: float | None = None,
        preset: str | None = None,
        connectivity: str | None = None,
        include: Any = None,
        exclude: Any = None,
        mask: Any = None,
        kappa: float | None = None,
        rescale: bool = False,
        gamma: float | None = None,
        matching: str | None = None,
        lambda1: float | None = None,
        lambda2: float | None = None,
        normalize: bool | None = None,
        output_aware: bool | None = None,
        bias: bool | None = None,
        rounds: int | None = None,
        refit: bool | None = None,
        reconstruct: int | None = None,
        output_refit: int | None = None,
        stages: bool | None = None,
        allocate: int | None = None,
        cascade: bool | None = None,
        robust: int | None = None,
        robust_refit: float | None = None,
        prove: float | None = None,
        reach: int | None = None,
        positions: int | None = None,
        bounds: str | None = None,
        samples: int | None = None,
        augment: str | None = None,
        seed: int = 0,
        scale: float | None = None,
        mean: Any = None,
        std: Any = None,
        threads: int | None = None,
        device: str | None = None,
        memory: str | int | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        progress: str | Progress | None = None,
        solver: str | None = None,
        zero_below: float = 1e-6,
    ) -> None:
        self.penalty = penalty
        self.network = network
        self.beta = beta
        self.alpha = alpha
        self.mu = mu
        self.break_point = break_point
        self.target_sparsity = target_sparsity
        self.max_drop = max_drop
        self.preset = preset
        self.connectivity = connectivity
        self.include = include
        self.exclude = exclude
        self.mask = mask
        self.kappa = kappa
        self.rescale = rescale
        self.gamma = gamma
        self.matching = matching
        self.lambda1 = lambda1
        self.lambda2 = lambda2
        self.normalize = normalize
        self.output_aware = output_aware
        self.bias = bias
        self.rounds = rounds
        self.refit = refit
        self.reconstruct = reconstruct
        self.output_refit = output_refit
        self.stages = stages
        self.allocate = allocate
        self.cascade = cascade
        self.robust = robust
        self.robust_refit = robust_refit
        self.prove = prove
        self.reach = reach
        self.positions = positions
        self.bounds = bounds
        self.samples = samples
        self.augment = augment
        self.seed = seed
        self.scale = scale
        self.mean = mean
        self.std = std
        self.threads = threads
        self.device = device
        self.memory = memory
        self.checkpoint = checkpoint
        self.progress = progress
        self.solver = solver
        self.zero_below = zero_below

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """All parameters by name.

        Parameters
        ----------
        deep : bool, optional
            For scikit-learn; there is nothing deeper.
        """
        return {name: getattr(self, name) for name in _names()}

    def set_params(self, **params: Any) -> SIM:
        """Set parameters by name.

        Parameters
        ----------
        **params
            Names of the constructor.
        """
        known = _names()
        for name, value in params.items():
            if name not in known:
                raise SettingError(f"{name}: expected one of {', '.join(known)}")
            setattr(self, name, value)
        return self

    def fit(self, X: Any, y: Any = None) -> SIM:
        """Train.

        Parameters
        ----------
        X : array, m × p or m × C × H × W; or States, Statistics or path-like
            Raw inputs of the network that the constructor was given; or states to match, a file of them, or their sums.
            A float32 tensor on the GPU that trains is read where it lies.
        y : optional
            Labels, for scikit-learn: never read. Deprecated: where `X` is a network or model, its inputs.

        Returns
        -------
        SIM
            Itself, with ``model_`` and ``report_``.
        """
        if isinstance(X, (Network, ImplicitModel)) or isinstance(X, (str, os.PathLike)) and y is not None:
            if self.network is not None:
                raise SettingError("X: expected inputs beside the network that the constructor was given, got another network")
            warnings.warn("fit(network, U) is deprecated; use SIM(network=network).fit(U)", DeprecationWarning, stacklevel=2)
            return self._fit(_baseline(X, y), y, None)
        if isinstance(X, Statistics):
            if y is not None:
                raise SettingError("y: expected None with statistics, which have their own targets")
            return self._finish(*fit_statistics(self, X))
        if isinstance(X, (States, str, os.PathLike)):
            return self._fit(_baseline(X, y), None, None)
        if self.network is None:
            raise SettingError(
                "network: expected a network, an implicit model or a file in the constructor beside inputs, got none "
                f"with a {type(X).__name__}; "
                "for a torch module use simplicit.torch.compress"
            )
        return self._fit(_baseline(self.network, X), X, None)

    def _fit(self, baseline: States | Network | ImplicitModel, U: Any, engine: Any) -> SIM:
        if callable(self.penalty):
            from simplicit.custom import fit_custom

            return self._finish(*fit_custom(self, baseline, U))
        return self._finish(*self._train(baseline, U, engine))

    def _finish(self, model: ImplicitModel, report: TrainReport) -> SIM:
        self.model_, self.report_ = model, report
        self.n_features_in_ = self.model_.n_inputs
        for notice in self.report_.notices:
            warnings.warn(notice, ConvergenceWarning, stacklevel=4)
        return self

    def _train(self, baseline: States | Network | ImplicitModel, U: Any, engine: Any) -> tuple[ImplicitModel, TrainReport]:
        shown = watcher(self.progress)
        if self.device != "cpu":
            find_cuda()
        given: dict[str, Any] = {"baseline": None, "u": None, "states": None}
        if isinstance(baseline, States):
            if self.samples is not None:
                raise SettingError("samples: expected None with states; give fewer of them")
            given["states"] = baseline._for_core()
            hashes = {"states": content_hash(baseline.U, baseline.Z, baseline.X, baseline.Y)}
        else:
            u = U if self._reads_on_gpu(U, engine) else as_array(U, "U")
            given.update(baseline=baseline._core, u=u)
            hashes = {"inputs": content_hash(u)}
        try:
            core, results, notices = _core.train(
                self._flags(),
                **given,
                mask=None if self.mask is None else as_array(self.mask, "mask"),
                threads=self.threads,
                checkpoint=None if self.checkpoint is None else os.fspath(self.checkpoint),
                hashes=hashes,
                progress=shown,
                engine=engine,
            )
        finally:
            shown.close()
        return ImplicitModel(core), TrainReport(json.loads(results), notices)

    def _reads_on_gpu(self, U: Any, engine: Any) -> bool:
        """Whether training takes a tensor where it lies; a GPU other than the one that was asked for is an error."""
        if not on_gpu(U) or self.device == "cpu" or engine is not None:
            return False
        number = U.__dlpack_device__()[1]
        asked = (self.device or "auto").partition(":")
        if asked[0] == "cuda" and number != int(asked[2] or 0):
            raise SettingError(f"U: expected a tensor on {self.device}, the device of training, got one on cuda:{number}")
        return True

    def _flags(self) -> list[str]:
        flags = []
        for name, value in self.get_params().items():
            if name in _OURS or value is None or value is False and name == "rescale":
                continue
            flag = "--break" if name == "break_point" else "--" + name.replace("_", "-")
            if name == "rescale":
                flags.append(flag)
            elif name in _SWITCHES:
                flags.append(f"{flag}={'on' if value else 'off'}")
            elif name in ("include", "exclude"):
                flags += [f"{flag}={pattern}" for pattern in ([value] if isinstance(value, str) else value)]
            elif name in ("mean", "std"):
                flags.append(f"{flag}={','.join(repr(float(v)) for v in np.atleast_1d(value))}")
            else:
                flags.append(f"{flag}={value!r}" if isinstance(value, float) else f"{flag}={value}")
        return flags

    def predict(self, U: Any) -> Array:
        """Outputs of the model, one sample a row.

        Parameters
        ----------
        U : array, m × p or m × C × H × W
            Raw inputs.
        """
        return self._fitted().predict(U, threads=self.threads)

    def score(self, U: Any, y: Any = None) -> float:
        """Accuracy for integer labels of two classes or more, R² for outputs.

        Parameters
        ----------
        U : array
            Raw inputs.
        y : array, m or m × q, optional
            Labels: the share of samples whose largest output is theirs. Outputs: the coefficient of determination over
            all of them together. By default the outputs of the network that the constructor was given.
        """
        if y is None:
            if self.network is None:
                raise SettingError("y: expected labels or outputs, or a network in the constructor, got none")
            baseline = _baseline(self.network, U)
            y = baseline.predict(U) if isinstance(baseline, ImplicitModel) else baseline.forward(U)  # type: ignore[union-attr]
        outputs, y = self.predict(U), np.asarray(y)
        if len(y) != len(outputs):
            raise ShapeError(f"y: expected {len(outputs)} samples, got {len(y)}")
        if y.ndim == 1 and y.dtype.kind in "iu" and outputs.shape[1] > 1:
            return float(np.mean(outputs.argmax(axis=1) == y))
        y = y.reshape(outputs.shape).astype(np.float64)
        return float(1.0 - ((outputs - y) ** 2).sum() / ((y - y.mean(axis=0)) ** 2).sum())

    def report(self, path: str | os.PathLike[str] | None = None, **what: Any) -> Report:
        """The HTML page of ``simplicit report``, with the report of training.

        Parameters
        ----------
        path : path-like, optional
        **what
            As for :meth:`ImplicitModel.report`.
        """
        return self._fitted().report(path, results=self.report_.results, **what)

    def _fitted(self) -> ImplicitModel:
        if not hasattr(self, "model_"):
            raise NotFittedError("this SIM is not fitted yet; call fit first")
        return self.model_

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "model_")

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import Tags, TargetTags

        return Tags(
            estimator_type=None,
            target_tags=TargetTags(required=False),
            transformer_tags=None,
            classifier_tags=None,
            regressor_tags=None,
        )

    def __repr__(self) -> str:
        defaults = SIM.__init__.__kwdefaults__ or {}
        changed = [(k, v) for k, v in self.get_params().items() if v is not defaults.get(k) and v != defaults.get(k)]
        return f"SIM({', '.join(f'{k}={v!r}' for k, v in changed)})"

    def _repr_html_(self) -> str:
        rows = [("parameters", repr(self)[4:-1] or "defaults")]
        if hasattr(self, "model_"):
            return table("SIM", rows) + self.model_._repr_html_()
        return table("SIM, not fitted", rows)


def _names() -> list[str]:
    import inspect

    return [name for name in inspect.signature(SIM.__init__).parameters if name != "self"]


def _baseline(baseline: Any, U: Any) -> States | Network | ImplicitModel:
    """The baseline that `fit` was given; files are read."""
    if isinstance(baseline, (str, os.PathLike)):
        name = os.fspath(baseline)
        with open(name, "rb") as file:
            head = file.read(9)
        if head[8:9] != b"{":
            is_npz = head[:2] == b"PK"
            baseline = States.load(name) if is_npz else Network.from_onnx(name)
        else:
            baseline = States.load(name) if U is None else ImplicitModel.load(name)
    if isinstance(baseline, States):
        if U is not None:
            raise SettingError("U: expected None with states, which have their own")
        return baseline
    if not isinstance(baseline, (Network, ImplicitModel)):
        raise SettingError(
            f"baseline: expected States, Network, ImplicitModel or a file, got {type(baseline).__name__}; "
            "for a torch module use simplicit.torch.compress"
        )
    if U is None:
        raise SettingError("U: expected the inputs of the network, got None")
    return baseline
