"""The custom operators that ``torch.compile`` and autograd see, with their shapes on fake tensors.

``hopper_attention::forward``, ``::forward_fp8`` and ``::backward`` are functional: they return new contiguous
tensors and change none. Their gradients are registered in ``hopper_attention.autograd``.
"""
# No `from __future__ import annotations`: custom_op reads the annotations of its function.

from functools import lru_cache

import torch
from torch import Tensor

from hopper_attention.backends import target_of
from hopper_attention.checks import FP8_OUT_DTYPE
from hopper_attention.fp8_rules import serves_in_e4m3
from hopper_attention.launch.base import REMEMBERED_CALLS, without_rows
from hopper_attention.launch.dequantized import attend_dequantized
from hopper_attention.launch.few_fp8 import find_with_descales
from hopper_attention.launch.forward import run_forward
from hopper_attention.launch.fp8 import attend
from hopper_attention.launch.gradients import differentiate
from hopper_attention.masks import MaskSpec
from hopper_attention.quantizers import from_descales
from hopper_attention.scores import NO_SCORES, Scores
from hopper_attention.value_parts import attend_in_parts, needs_parts

_mask_of = lru_cache(maxsize=REMEMBERED_CALLS)(MaskSpec)
"""Made once, as its checks take a microsecond."""


@torch.library.custom_op("hopper_attention::forward", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    causal: bool,
    backend: str | None,
    sm_margin: int,
    deterministic: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    philox: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of 16-bit tensors: out (b, sq, h, dv) in the dtype of q, lse float32 (b, h, sq).

    ``deterministic`` is for the gradient: every run of the forward gives the same bits. ``causal``, the sides of the
    window and the chunk are those of a ``MaskSpec``; from ``softcap`` on they are those of ``Scores``.
    """
    window = _mask_of(causal, window_left, window_right, attention_chunk).sides
    scores = Scores.of(softcap, alibi_slopes, sinks, dropout_p, philox)
    options = softmax_scale, causal, backend, sm_margin
    return run_forward(q, k, v, *options, window=window, scores=scores)


@forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    causal: bool,
    backend: str | None,
    sm_margin: int,
    deterministic: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    philox: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return _fake_results(q, v, q.dtype)


@torch.library.custom_op("hopper_attention::forward_fp8", mutates_args=())
def forward_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    softmax_scale: float,
    causal: bool,
    backend: str | None,
    two_level: bool = False,
    sm_margin: int = 0,
    wants_lse: bool = True,
    exact_lse: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of e4m3 tensors, with (batch, kv_heads) descales: out bfloat16, lse float32.

    ``two_level`` asks the FP8 kernel for two-level accumulation. Without ``wants_lse`` the lse is (batch, heads, 0),
    and scores may be in float16; ``exact_lse`` is that of an ``Fp8AttentionProblem``. ``causal``, the sides of the
    window and the chunk are those of a ``MaskSpec``; from ``softcap`` on they are those of ``Scores``, with which 16
    bits compute unless ``serves_in_e4m3``.
    """
    mask = _mask_of(causal, window_left, window_right, attention_chunk)
    window, scores = mask.sides, Scores.of(softcap, alibi_slopes, sinks)
    descales = q_descale, k_descale, v_descale
    is_changed = scores is not NO_SCORES
    of_kernel = target_of(q.device), mask, scores.kind, backend, exact_lse or two_level
    if is_changed and not serves_in_e4m3(q.shape, v.shape, *of_kernel):
        whole = from_descales(q, k, v, *descales, FP8_OUT_DTYPE)
        out, lse = attend_dequantized(whole, softmax_scale, causal, backend, sm_margin, window, scores)
        return out, lse if wants_lse else without_rows(lse)

    in_tiles = not (exact_lse or two_level)
    few = find_with_descales(q, k, v, mask, backend, sm_margin, in_tiles, scores.kind)
    if few is not None:
        found: tuple[Tensor, Tensor] = few(
            q, k, v, softmax_scale, wants_lse, *window, descales=descales, scores=scores
        )
        out, lse = found
        return out, lse if wants_lse else q.new_empty((*out.shape[::2], 0), dtype=torch.float32)

    def attend_to(values: Tensor) -> tuple[Tensor, Tensor]:
        parts = from_descales(q, k, values, *descales, FP8_OUT_DTYPE)
        of_call = softmax_scale, causal, backend, two_level, wants_lse, sm_margin
        return attend(parts, *of_call, window=window, exact_lse=exact_lse, scores=scores)

    out, lse = attend_in_parts(v, attend_to) if needs_parts(v.shape[3]) else attend_to(v)
    return out, lse if wants_lse else without_rows(lse)


@forward_fp8.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    softmax_scale: float,
    causal: bool,
    backend: str | None,
    two_level: bool = False,
    sm_margin: int = 0,
    wants_lse: bool = True,
    exact_lse: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    out, lse = _fake_results(q, v, FP8_OUT_DTYPE)
    return out, lse if wants_lse else without_rows(lse)


@torch.library.custom_op("hopper_attention::backward", mutates_args=())
def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    causal: bool,
    backend: str | None = None,
    deterministic: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    philox: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``forward``: dq, dk, dv with the shapes and dtype of q, k, v. No ``dlse`` means zero.

    That of the sinks is ``hopper_attention.scores.sinks_gradient``. ``backend`` is what the forward was asked for.
    ``deterministic``, or torch.use_deterministic_algorithms, asks for the same bits in every run.
    """
    mask = _mask_of(causal, window_left, window_right, attention_chunk)
    scores = Scores.of(softcap, alibi_slopes, sinks, dropout_p, philox)
    options = softmax_scale, mask, scores, backend, deterministic
    return differentiate(dout, dlse, q, k, v, out, lse, *options)


@backward.register_fake
def _(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    causal: bool,
    backend: str | None = None,
    deterministic: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    philox: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v)


def _like(x: Tensor) -> Tensor:
    """A new contiguous tensor; ``empty_like`` would keep the strides of x."""
    return x.new_empty(x.shape)


def _fake_results(q: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, heads, _ = q.shape
    out = q.new_empty((batch, seqlen_q, heads, v.shape[3]), dtype=dtype)
    return out, q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)
