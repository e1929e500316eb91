"""Records the linear maps of a module while it runs: which weight was applied to which input.

A module may keep its weights in ``nn.Linear`` or hand them to a function, use one weight in several places or hide it
inside attention. What they have in common is the call: ``F.linear``, a convolution, or Hugging Face's ``addmm``, with a
parameter as its weight. :class:`Calls` sees these calls, whatever module makes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from simplicit.errors import UnsupportedError

#: Functions that only look at a tensor.
_LOOKS = frozenset((
    "__get__", "__len__", "__repr__", "__format__", "__hash__", "__bool__", "__set__", "dim", "size", "numel",
    "nelement", "ndimension", "stride", "storage_offset", "type", "element_size", "is_contiguous", "is_floating_point",
    "is_complex", "data_ptr", "untyped_storage", "get_device", "has_names", "split", "chunk", "is_sparse", "is_nested",
    "is_same_size", "is_cuda",
))  # fmt: skip


class Stop(BaseException):
    """Everything that was asked for has been seen: the rest of the forward pass is not needed."""


@dataclass(frozen=True)
class Key:
    """Some rows of a parameter: all of them, or those of a projection inside attention."""

    parameter: str
    start: int
    stop: int


@dataclass
class Call:
    """One use of a weight."""

    key: Key
    #: ``linear`` (weight rows × features), ``transposed`` (features × rows) or ``conv``.
    kind: str
    input: torch.Tensor
    bias: torch.Tensor | None
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    kernel: tuple[int, int] = (1, 1)
    #: The same call with another weight and bias.
    again: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor] | None = None

    def rows_of(self, out: torch.Tensor) -> torch.Tensor:
        """The call's output with one sample (a row, a token, a position) a line."""
        if self.kind != "conv":
            return out.reshape(-1, out.shape[-1])
        out = out.flatten(2) if out.dim() > 2 else out.unsqueeze(0)
        return out.transpose(1, 2).reshape(-1, out.shape[1])

    def lines(self, out: torch.Tensor) -> int:
        """How many lines :meth:`rows_of` has."""
        return out.numel() // out.shape[1 if self.kind == "conv" else -1]

    def features(self, chosen: torch.Tensor | None) -> torch.Tensor:
        """The features of some lines, groups × lines × features."""
        if self.kind != "conv":
            x = self.input.reshape(-1, self.input.shape[-1])
            return (x if chosen is None else x[chosen]).unsqueeze(0)
        x = self.input if self.input.dim() == 4 else self.input.unsqueeze(-2)
        top, bottom, left, right = self.padding
        if any(self.padding):
            x = F.pad(x, (left, right, top, bottom))
        (kh, kw), (dy, dx), (sy, sx) = self.kernel, self.dilation, self.stride
        height = (x.shape[2] - dy * (kh - 1) - 1) // sy + 1
        width = (x.shape[3] - dx * (kw - 1) - 1) // sx + 1
        b, c, h, w = x.stride()
        # Windows are a view: only those that are chosen are ever written down.
        windows = x.as_strided(
            (x.shape[0], height, width, x.shape[1], kh, kw), (b, h * sy, w * sx, c, h * dy, w * dx), x.storage_offset()
        )
        if chosen is None:
            chosen = torch.arange(x.shape[0] * height * width, device=x.device)
        image, place = chosen // (height * width), chosen % (height * width)
        taken = windows[image, place // width, place % width]
        return taken.reshape(len(chosen), self.groups, -1).transpose(0, 1)


class Known:
    """The parameters of a module that may be weights of linear maps, found again by identity or by their memory."""

    def __init__(self, module: nn.Module) -> None:
        self.names: dict[int, str] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self._memory: dict[int, str] = {}
        for name, parameter in module.named_parameters():
            if parameter.layout is torch.strided:
                self.names[id(parameter)] = name
                self.parameters[name] = parameter
                if parameter.numel():
                    self._memory.setdefault(parameter.untyped_storage().data_ptr(), name)

    def name(self, tensor: Any) -> str | None:
        """The parameter that a tensor is."""
        return self.names.get(id(tensor))

    def part(self, tensor: torch.Tensor) -> Key | None:
        """The rows of a parameter that a tensor is, or is a view of."""
        name = self.names.get(id(tensor))
        if name is not None:
            return Key(name, 0, tensor.shape[0])
        if not tensor.numel() or tensor.layout is not torch.strided:
            return None
        name = self._memory.get(tensor.untyped_storage().data_ptr())
        if name is None:
            return None
        whole = self.parameters[name]
        step = whole.stride(0)
        at = tensor.storage_offset() - whole.storage_offset()
        if whole.shape[1:] != tensor.shape[1:] or whole.stride() != tensor.stride() or at % step:
            return None
        first = int(at // step)
        return Key(name, first, first + tensor.shape[0])


def _pair(value: Any, dimensions: int) -> tuple[int, int]:
    value = tuple(value) if isinstance(value, (tuple, list)) else (value,) * dimensions
    if len(value) == 1 and dimensions == 2:
        value = value * 2
    return (1, value[0]) if dimensions == 1 else (value[0], value[1])


def _conv(key: Key, again: Any, input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> Call:  # noqa: E501, A002
    n = weight.dim() - 2
    kernel = (1, weight.shape[2]) if n == 1 else (weight.shape[2], weight.shape[3])
    spread = _pair(dilation, n)
    if padding == "same":
        total = [spread[k] * (kernel[k] - 1) for k in range(2)]
        pad = (total[0] // 2, total[0] - total[0] // 2, total[1] // 2, total[1] - total[1] // 2)
    else:
        rows, columns = (0, 0) if padding == "valid" else _pair(padding, n)
        rows = 0 if n == 1 else rows
        pad = (rows, rows, columns, columns)
    batched = input if input.dim() == n + 2 else input.unsqueeze(0)
    return Call(key, "conv", batched, bias, _pair(stride, n), pad, spread, groups, kernel, again)


class Calls(TorchFunctionMode):
    """Hands every linear map to `see`, which may return another output in its place.

    `note` is called with every other function before it runs, and may return a function that is then called with its output.
    """

    def __init__(
        self,
        known: Known,
        see: Callable[[Call, torch.Tensor], torch.Tensor],
        note: Callable[[Any, tuple[Any, ...], dict[str, Any]], Callable[[Any], None] | None] | None = None,
    ) -> None:
        super().__init__()
        self._known, self._see, self._note = known, see, note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                return attention(*args, **kwargs)
        call = self._read(func, args, kwargs)
        if call is not None:
            return self._see(call, func(*args, **kwargs))
        after = None
        if self._note is not None and getattr(func, "__name__", "") not in _LOOKS:
            after = self._note(func, args, kwargs)
        out = func(*args, **kwargs)
        if after is not None:
            after(out)
        return out

    def _read(self, func: Any, args: Any, kwargs: Any) -> Call | None:
        if func is F.linear:
            x, weight, bias = _bound(args, kwargs, "input", "weight", "bias")
            key = self._known.part(weight)
            return None if key is None else Call(key, "linear", x, bias, again=lambda w, b: F.linear(x, w, b))
        if func is torch.addmm:
            bias, x, weight = _bound(args, kwargs, "input", "mat1", "mat2")
            if kwargs.get("beta", 1) != 1 or kwargs.get("alpha", 1) != 1 or self._known.name(weight) is None:
                return None
            key = Key(self._known.names[id(weight)], 0, weight.shape[1])
            return Call(key, "transposed", x, bias, again=lambda w, b: F.linear(x, w, b))
        if func in (F.conv1d, F.conv2d):
            given = dict(zip(("input", "weight", "bias", "stride", "padding", "dilation", "groups"), args, strict=False), **kwargs)
            key = self._known.part(given["weight"])
            if key is None:
                return None

            def again(w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
                out: torch.Tensor = func(**{**given, "weight": w, "bias": b})
                return out

            return _conv(key, again, **given)
        return None


def _bound(args: Any, kwargs: Any, *names: str) -> list[Any]:
    given = dict(zip(names, args, strict=False))
    return [given.get(name, kwargs.get(name)) for name in names]


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: torch.Tensor | None,
    in_proj_bias: torch.Tensor | None,
    bias_k: torch.Tensor | None,
    bias_v: torch.Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    training: bool = True,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: torch.Tensor | None = None,
    k_proj_weight: torch.Tensor | None = None,
    v_proj_weight: torch.Tensor | None = None,
    static_k: torch.Tensor | None = None,
    static_v: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of ``nn.MultiheadAttention`` in evaluation mode, its four linear maps as calls, samples first."""
    if bias_k is not None or bias_v is not None or add_zero_attn or static_k is not None or static_v is not None:
        raise UnsupportedError("MultiheadAttention with add_bias_kv, add_zero_attn or static keys is not supported; exclude it")
    batched = query.dim() == 3
    if not batched:
        query, key, value = (t.unsqueeze(1) for t in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    same_keys, same = key is value, query is key
    weights: Any
    biases: Any
    q, k, v = (t.transpose(0, 1) for t in (query, key, value))
    size = q.shape[-1]
    if use_separate_proj_weight:
        biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
        q, k, v = (F.linear(t, w, b) for t, w, b in zip((q, k, v), weights, biases, strict=True))
    elif same_keys and same:
        q, k, v = F.linear(q, in_proj_weight, in_proj_bias).chunk(3, -1)  # type: ignore[arg-type]
    else:
        assert in_proj_weight is not None
        parts = [size, 2 * size] if same_keys else [size, size, size]
        weights = torch.split(in_proj_weight, parts)
        biases = (None,) * len(parts) if in_proj_bias is None else torch.split(in_proj_bias, parts)
        if same_keys:
            q = F.linear(q, weights[0], biases[0])
            k, v = F.linear(k, weights[1], biases[1]).chunk(2, -1)
        else:
            q, k, v = (F.linear(t, w, b) for t, w, b in zip((q, k, v), weights, biases, strict=True))
    samples, length = q.shape[:2]
    q, k, v = (t.reshape(samples, t.shape[1], num_heads, -1).transpose(1, 2) for t in (q, k, v))
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if is_causal and attn_mask is None:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    if attn_mask is not None:
        mask = attn_mask.reshape(samples, num_heads, *scores.shape[-2:]) if attn_mask.dim() == 3 else attn_mask
        scores = scores.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if key_padding_mask is not None:
        mask = key_padding_mask[:, None, None]
        scores = scores.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    shares = torch.softmax(scores, -1)
    mixed = (shares @ v).transpose(1, 2).reshape(samples, length, -1)
    out = F.linear(mixed, out_proj_weight, out_proj_bias).transpose(0, 1)
    if need_weights and average_attn_weights:
        shares = shares.mean(1)
    if not batched:
        out, shares = out.squeeze(1), shares.squeeze(0)
    return out, shares if need_weights else None


@contextmanager
def no_fast_path() -> Iterator[None]:
    """Attention by its ordinary way, whose calls can be seen."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
