from collections.abc import Callable
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

__version__: str

_F32 = NDArray[np.float32]
_F64 = NDArray[np.float64]
_Array = NDArray[Any]
_Bytes = bytes
_States = tuple[_Array, _Array, _Array, _Array, str | None, str, int | None]

@final
class Model:
    @staticmethod
    def load(path: str) -> Model: ...
    @staticmethod
    def from_bytes(bytes: bytes) -> Model: ...
    @staticmethod
    def from_parts(
        matrices: list[tuple[_Array, _Array, _F32]],
        state_bias: _F32,
        output_bias: _F32,
        layout: str,
        inputs: int,
        outputs: int,
        kappa: float | None = None,
        baseline_nonzeros: int | None = None,
        provenance: dict[str, str] | None = None,
        preprocessing: str | None = None,
    ) -> Model: ...
    def to_bytes(self) -> bytes: ...
    def save(self, path: str) -> None: ...
    @property
    def shape(self) -> tuple[int, int, int]: ...
    def csr(self, letter: str) -> tuple[_Array, _Array, _F32, tuple[int, int]]: ...
    def taps(self) -> list[dict[str, Any]]: ...
    @property
    def state_bias(self) -> _F32: ...
    @property
    def output_bias(self) -> _F32: ...
    @property
    def layout(self) -> str: ...
    @property
    def preprocessing(self) -> str: ...
    @property
    def output_factor(self) -> float: ...
    @property
    def kappa(self) -> float | None: ...
    @property
    def provenance(self) -> dict[str, str]: ...
    def sparsity(self) -> str: ...
    def well_posedness(self) -> dict[str, Any]: ...
    def run(
        self,
        u: _Array,
        *,
        preprocess: bool = True,
        states: bool = False,
        threads: int | None = None,
        tolerance: float = 1e-6,
        max_iterations: int = 2000,
        memory: int = 5,
    ) -> dict[str, Any]: ...
    def input_gradient(
        self,
        u: _Array,
        v: _Array,
        *,
        preprocess: bool = True,
        threads: int | None = None,
        tolerance: float = 1e-6,
        max_iterations: int = 2000,
    ) -> _F32: ...
    def to_onnx(self, path: str, *, tolerance: float = 1e-7, max_iterations: int = 10_000) -> None: ...
    def rescale(self, kappa: float) -> tuple[Model, bool]: ...

def train_blocks(
    flags: list[str],
    source: Any,
    *,
    threads: int | None = None,
    checkpoint: str | None = None,
    hashes: dict[str, str] | None = None,
    progress: Callable[[str, int, int], object] | None = None,
) -> tuple[str, list[str]]: ...
def prove_row(
    gram: _Array, cross: list[float], energy: float, prices: list[float], answer: list[float] | None, seconds: float
) -> tuple[float, float, float, list[float], str, list[list[float]], list[Any]]: ...

@final
class Network:
    @staticmethod
    def from_onnx(
        path: str,
        input: str | None = None,
        output: str | None = None,
        input_shape: list[int] | None = None,
        fill: list[tuple[str, float]] | None = None,
    ) -> Network: ...
    @staticmethod
    def from_onnx_bytes(
        bytes: bytes,
        input: str | None = None,
        output: str | None = None,
        input_shape: list[int] | None = None,
        fill: list[tuple[str, float]] | None = None,
    ) -> Network: ...
    @property
    def shape(self) -> tuple[int, int, int]: ...
    @property
    def layout(self) -> str: ...
    @property
    def nonzeros(self) -> int: ...
    @property
    def multiply_adds(self) -> int: ...
    def forward(self, u: _Array, *, threads: int | None = None) -> _F32: ...
    def states(self, u: _Array) -> list[_F64]: ...
    def implicit(self, baseline_nonzeros: int | None = None) -> Model: ...

@final
class Builder:
    def __new__(cls, shape: list[int]) -> Builder: ...
    def linear(self, at: int, weights: _Array, bias: list[float] | None = None) -> int: ...
    def convolution(
        self,
        at: int,
        weights: _Array,
        kernel: list[int],
        stride: list[int],
        padding: list[int],
        bias: list[float] | None = None,
    ) -> int: ...
    def batch_norm(
        self,
        at: int,
        scale: list[float],
        shift: list[float],
        mean: list[float],
        variance: list[float],
        epsilon: float,
    ) -> int: ...
    def activation(self, at: int, activation: str, name: str) -> int: ...
    def plus(self, at: int, other: int) -> int: ...
    def average_pool(
        self, at: int, kernel: list[int], stride: list[int], padding: list[int], count_padding: bool
    ) -> int: ...
    def max_pool(self, at: int, kernel: list[int], stride: list[int], padding: list[int]) -> int: ...
    def global_average(self, at: int) -> int: ...
    def flatten(self, at: int) -> int: ...
    def build(self, at: int) -> Network: ...

@final
class Statistics:
    def __new__(cls, features: int, targets: int) -> Statistics: ...
    def push(self, features: _Array, targets: _Array) -> None: ...
    def finish(self) -> tuple[int, _F64, _F64, _F64]: ...

def attack_model(
    model: Model,
    u: _Array,
    labels: list[int],
    *,
    baseline: Network | Model | None = None,
    epsilon: list[float],
    methods: list[str],
    pixels: float,
    iterations: int,
    restarts: int,
    step: float | None,
    queries: int,
    seed: int,
    norm: str = "linf",
    threads: int | None = None,
) -> dict[str, Any]: ...
def certify_model(
    model: Model,
    u: _Array,
    labels: list[int],
    *,
    epsilon: list[float],
    bound: str,
    slopes: int = 0,
    norm: str = "linf",
    arithmetic: str = "single",
    work: float = 2.2e12,
    threads: int | None = None,
) -> dict[str, Any]: ...
def connections(connectivity: str, layout: str, inputs: int, outputs: int) -> _F32: ...
def read_tensor(tensor: Any, first: int, end: int) -> _F32: ...
def train(
    flags: list[str],
    baseline: Network | Model | None,
    u: Any,
    states: _States | None,
    *,
    own: str | None = None,
    mask: _Array | None = None,
    threads: int | None = None,
    checkpoint: str | None = None,
    hashes: dict[str, str] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    engine: Any = None,
) -> tuple[Model, str, list[str]]: ...
def page(
    title: str,
    model: Model,
    *,
    baseline: Network | Model | None = None,
    results: str | None = None,
    attack: str | None = None,
    certify: str | None = None,
    u: _Array | None = None,
    labels: list[int] | None = None,
    threads: int | None = None,
) -> str: ...
@final
class Branch:
    def __new__(cls) -> Branch: ...
    def add(self, shards: int, sum: _Bytes, features: int, targets: int) -> None: ...
    def finish(self) -> _Bytes: ...

def fingerprint(statistics: _Bytes) -> _Bytes: ...
def run_statistics(
    branch: Branch,
    task: bytes,
    baseline: Network | Model | None,
    u: _Array | None,
    states: Any,
    preprocessing: str,
    threads: int,
) -> None: ...
def run_sums(
    task: bytes, baseline: Network | Model | None, u: _Array, first: int, preprocessing: str, threads: int
) -> list[_Bytes]: ...
def free_memory() -> int | None: ...
@final
class Design:
    @property
    def bytes(self) -> int: ...
    @property
    def made(self) -> int: ...
    def __new__(cls, statistics: _Bytes, features: int, targets: int) -> Design: ...
    def rows(self, decided: str, tasks: list[_Bytes], threads: int, device: str) -> list[_Bytes]: ...
    def inverse(self, task: _Bytes, number: int, threads: int) -> _Bytes: ...
    def know(self, task: _Bytes, number: int, inverse: _Bytes) -> None: ...
@final
class Shard:
    PIECE: int
    def __new__(
        cls, task: bytes, decided: str, u: _Array, first: int, preprocessing: str, threads: int, device: str, share: float
    ) -> Shard: ...
    def step(self, step: bytes) -> None: ...
    def statistics(self, group: int, branch: Branch) -> None: ...
