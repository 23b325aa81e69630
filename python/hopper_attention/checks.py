"""Argument checks of the public functions. Every message says what an argument was and what is allowed.

They read sizes, strides, dtypes and devices, never data, so they run before any launch, on meta tensors and
under ``torch.compile`` alike.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.problem import MAX_HEAD_DIM

HEAD_DIM_STEP = 8
MAX_HEAD_DIM_V = 2 * MAX_HEAD_DIM
"""Columns of V that are attended to; more than MAX_HEAD_DIM of them in parts (``value_parts``)."""

HALF_DTYPES = (torch.float16, torch.bfloat16)
DTYPE_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
FP8_DTYPE = torch.float8_e4m3fn
FP8_OUT_DTYPE = torch.bfloat16
"""What FP8 tensors with descales give, as in FlashAttention-3."""

BACKENDS = ("hopper", "ampere", "torch", "reference")
FULL_WINDOW = (-1, -1)
"""FlashAttention-3's ``window_size`` for no window."""

Result = Tensor | tuple[Tensor, Tensor]
"""Of a public function: out, or (out, lse)."""

DIMENSIONS = {
    "q": "(batch, seqlen_q, heads, head_dim)",
    "k": "(batch, seqlen_k, kv_heads, head_dim)",
    "v": "(batch, seqlen_k, kv_heads, head_dim_v)",
}


class TensorSpec(NamedTuple):
    """What can be known of a tensor without reading it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def check_are_tensors(**tensors: Any) -> None:
    """Raise TypeError unless these are tensors that lie in memory by strides."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}, allowed: a torch.Tensor")
        if value.layout is not torch.strided or value.is_nested:
            kind = "a nested tensor" if value.is_nested else f"a tensor of layout {value.layout}"
            raise TypeError(
                f"{name} is {kind}, allowed: one of layout {torch.strided}; sequences of different lengths go one "
                "after another to flash_attn_varlen_func, with their offsets"
            )


def check_qkv(q: TensorSpec, k: TensorSpec, v: TensorSpec) -> None:
    """Raise ValueError or TypeError unless q, k and v make one dense attention problem."""
    named = (("q", q), ("k", k), ("v", v))
    for name, spec in named:
        check_dimensions(name, spec.shape)
    check_dtypes(q.dtype, k.dtype, v.dtype)
    check_device("k", k.device, q.device)
    check_device("v", v.device, q.device)
    _check_shapes(q.shape, k.shape, v.shape)


def check_dimensions(name: str, shape: tuple[int, ...]) -> None:
    if len(shape) != 4:
        raise ValueError(
            f"{name} has {len(shape)} dimensions, shape {tuple(shape)}, allowed: 4, {DIMENSIONS[name]}"
        )


def check_device(name: str, device: torch.device, device_of_q: torch.device) -> None:
    if device != device_of_q:
        raise ValueError(f"{name} is on {device}, allowed: the device of q, {device_of_q}")


def check_dtypes(q: torch.dtype, k: torch.dtype, v: torch.dtype) -> None:
    if q == torch.float8_e5m2:
        raise TypeError(
            f"q has dtype {q}, allowed: {FP8_DTYPE}; e5m2 keeps 2 bits of mantissa, too few for attention"
        )
    if q not in HALF_DTYPES and q != FP8_DTYPE:
        allowed = ", ".join(str(dtype) for dtype in (*HALF_DTYPES, FP8_DTYPE))
        raise TypeError(f"q has dtype {q}, allowed: {allowed}")
    for name, dtype in (("k", k), ("v", v)):
        if dtype != q:
            raise TypeError(f"{name} has dtype {dtype}, allowed: the dtype of q, {q}")


def _check_shapes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    batch, _, heads, head_dim = q
    _, seqlen_k, kv_heads, _ = k
    check_head_dims(head_dim, v[3])
    if k[0] != batch or k[3] != head_dim:
        raise ValueError(
            f"k has shape {tuple(k)}, allowed with q of shape {tuple(q)}: "
            f"({batch}, seqlen_k, kv_heads, {head_dim})"
        )
    if v[:3] != k[:3]:
        raise ValueError(
            f"v has shape {tuple(v)}, allowed with k of shape {tuple(k)}: "
            f"({batch}, {seqlen_k}, {kv_heads}, head_dim_v)"
        )
    check_heads(heads, kv_heads)


def check_head_dims(head_dim: int, head_dim_v: int) -> None:
    limits = (
        ("head_dim of q", head_dim, MAX_HEAD_DIM),
        ("head_dim_v, the last size of v,", head_dim_v, MAX_HEAD_DIM_V),
    )
    for name, size, most in limits:
        if size % HEAD_DIM_STEP or not HEAD_DIM_STEP <= size <= most:
            raise ValueError(
                f"{name} is {size}, allowed: multiples of {HEAD_DIM_STEP} from {HEAD_DIM_STEP} to {most}"
            )


def check_is_dense(name: str, vector: TensorSpec) -> None:
    """That the numbers of a vector lie side by side."""
    if vector.shape[0] > 1 and vector.strides[0] != 1:
        raise ValueError(
            f"{name} has stride {vector.strides[0]}, allowed: 1, as it is not copied; use {name}.contiguous()"
        )


def check_can_be_written(name: str, spec: TensorSpec) -> None:
    """That no two elements of what is written are one in memory, as those of an expanded tensor are."""
    if any(size > 1 and stride == 0 for size, stride in zip(spec.shape, spec.strides, strict=True)):
        raise ValueError(
            f"{name} has shape {tuple(spec.shape)} and strides {tuple(spec.strides)}, allowed: a place in memory for "
            "each element"
        )


def check_heads(heads: int, kv_heads: int) -> None:
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q has {heads} heads and k has {kv_heads}, allowed: a multiple of the heads of k")


SMALLEST_SCALE, LARGEST_SCALE = 1e-37, 1e5
"""What softmax_scale may be. The kernels take it in float32, where less than the smallest is 0.

At the largest, scores of N(0, 1) inputs, up to a hundred before they are scaled, stay below 2^24 in base 2. From there
on float32 no longer tells one octave from the next. The kernels round a scaled maximum once and measure exponents from
it, so that the largest P would lose its accuracy and then its range. Large inputs make large scores too; they are not
read.
"""


def is_number(value: Any) -> bool:
    """Whether it is a real number of any kind, and no truth value."""
    return isinstance(value, (float, int, numbers.Real)) and not isinstance(value, bool)


def check_scale(softmax_scale: Any) -> float:
    """``softmax_scale`` as a float; raise unless it is a positive finite number."""
    if type(softmax_scale) is float and SMALLEST_SCALE <= softmax_scale <= LARGEST_SCALE:
        return softmax_scale
    if not is_number(softmax_scale):
        raise TypeError(
            f"softmax_scale is a {type(softmax_scale).__name__}, {softmax_scale!r}, "
            "allowed: a number, or None for head_dim**-0.5"
        )
    # Not math.isfinite, which torch.compile cannot trace for a symbolic number.
    if not 0.0 < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale is {softmax_scale}, allowed: a finite number greater than 0")
    if not SMALLEST_SCALE <= softmax_scale <= LARGEST_SCALE:
        raise ValueError(f"softmax_scale is {softmax_scale}, allowed: {SMALLEST_SCALE} to {LARGEST_SCALE}")
    return float(softmax_scale)


SMALLEST_SOFTCAP, LARGEST_SOFTCAP = 1e-30, 1e30
"""What softcap may be, if not 0: scores over it, scaled or not, fit float32."""


def check_softcap(softcap: Any) -> float:
    """``softcap`` as a float; raise unless it is 0 or a positive number that float32 can divide scores by."""
    if not is_number(softcap):
        raise TypeError(f"softcap is a {type(softcap).__name__}, {softcap!r}, allowed: a number")
    # Before it is a float, which not every int can be.
    if not (softcap == 0 or SMALLEST_SOFTCAP <= softcap <= LARGEST_SOFTCAP):
        raise ValueError(
            f"softcap is {softcap}, allowed: 0, which is none, or {SMALLEST_SOFTCAP} to {LARGEST_SOFTCAP}"
        )
    return float(softcap)


def check_dropout_p(dropout_p: Any) -> float:
    """``dropout_p`` as a float; raise unless it is a number from 0 on, below 1."""
    if not is_number(dropout_p):
        raise TypeError(f"dropout_p is a {type(dropout_p).__name__}, {dropout_p!r}, allowed: a number")
    # One that is below 1 may be 1 as a float.
    if not (0 <= dropout_p < 1 and float(dropout_p) < 1.0):
        raise ValueError(f"dropout_p is {dropout_p}, allowed: 0, which drops nothing, or more, below 1")
    return float(dropout_p)


def check_backend(backend: Any) -> None:
    if backend is not None and not (isinstance(backend, str) and backend in BACKENDS):
        allowed = ", ".join(map(repr, BACKENDS))
        raise ValueError(f"backend is {backend!r}, allowed: {allowed} or None to have one chosen")


def python_int(value: Any) -> Any:
    """``value``, which is an int if it is an integer of another kind, such as NumPy's."""
    return value if isinstance(value, int) or not isinstance(value, numbers.Integral) else int(value)


def check_count(name: str, value: Any, least: int = 1) -> int:
    """``value`` as an int; raise unless it is one, ``least`` or more."""
    count = python_int(value)
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{name} is a {type(count).__name__}, {count!r}, allowed: an int")
    if count < least:
        raise ValueError(f"{name} is {count}, allowed: {least} or more")
    return count


def check_sm_margin(sm_margin: Any) -> int:
    """``sm_margin`` as an int; raise unless it is one, 0 or more."""
    sm_margin = python_int(sm_margin)
    if isinstance(sm_margin, bool) or not isinstance(sm_margin, int):
        raise TypeError(f"sm_margin is a {type(sm_margin).__name__}, {sm_margin!r}, allowed: an int")
    if sm_margin < 0:
        raise ValueError(
            f"sm_margin is {sm_margin}, allowed: 0 or more streaming multiprocessors to leave free"
        )
    return sm_margin


def check_sm_margin_fits(sm_margin: int, multiprocessors: int) -> None:
    if sm_margin >= multiprocessors:
        raise ValueError(f"sm_margin is {sm_margin}, allowed on this GPU: 0 to {multiprocessors - 1}")


def check_two_level_accumulation(two_level_accumulation: Any) -> None:
    if not isinstance(two_level_accumulation, bool):
        raise TypeError(f"two_level_accumulation is {two_level_accumulation!r}, allowed: True or False")


def check_flag(name: str, value: Any, allowed: str = "True or False") -> bool:
    """``value`` as a bool: True, False, NumPy's of these, or 0 or 1."""
    if isinstance(value, (bool, torch.SymBool)):
        return bool(value)
    if type(value).__module__ == "numpy" and not getattr(value, "shape", ()):
        value = value.item()
    if not isinstance(value, int):
        raise TypeError(f"{name} is a {type(value).__name__}, {value!r}, allowed: {allowed}")
    if value not in (0, 1):
        raise ValueError(f"{name} is {value}, allowed: {allowed}")
    return bool(value)


def check_exact_lse(exact_lse: Any, returns_lse: bool) -> bool:
    """Whether the LSE of an FP8 call is to be exact. None leaves it to this rule: it is where the caller gets one."""
    return returns_lse if exact_lse is None else check_flag("exact_lse", exact_lse, "True, False or None")


def check_descales(
    q: Tensor, k: Tensor, q_descale: Tensor | None, k_descale: Tensor | None, v_descale: Tensor | None
) -> None:
    """FP8 tensors take a float32 (batch, kv_heads) factor each; 16-bit tensors take none."""
    check_descales_of((k.shape[0], k.shape[2]), q, q_descale, k_descale, v_descale)


def check_descales_of(
    shape: tuple[int, int],
    q: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
) -> None:
    """``check_descales`` where (batch, kv_heads) is ``shape``."""
    for name, scale in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
        if scale is None:
            continue
        check_are_tensors(**{name: scale})
        if q.dtype != FP8_DTYPE:
            raise ValueError(
                f"{name} is given but q has dtype {q.dtype}, allowed: descales with {FP8_DTYPE} only"
            )
        if scale.dtype != torch.float32:
            raise TypeError(f"{name} has dtype {scale.dtype}, allowed: torch.float32")
        if tuple(scale.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(scale.shape)}, allowed: (batch, kv_heads), {shape}")
        if scale.device != q.device:
            raise ValueError(f"{name} is on {scale.device}, allowed: the device of q, {q.device}")
