"""Attention of e4m3 tensors whose scores are changed as no FP8 kernel does it, so that 16 bits compute.

Q, K and V are data times descale, rounded once to the dtype of the output, as the backend without WGMMA takes all FP8
tensors. What then runs is what runs such a call of 16-bit tensors.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from hopper_attention.backends import KERNELS, target_of
from hopper_attention.fp8_rules import choose_with_scores
from hopper_attention.launch.base import REMEMBERED_LAUNCHERS
from hopper_attention.launch.forward import run_forward
from hopper_attention.launch.fp8 import HOW
from hopper_attention.launch.varlen import is_empty, run_varlen
from hopper_attention.masks import Sides
from hopper_attention.notices import warn_once
from hopper_attention.packed_quantized import PackedQuantizedQKV
from hopper_attention.quantized import QuantizedQKV
from hopper_attention.scores import Scores


def attend_dequantized(
    parts: QuantizedQKV,
    softmax_scale: float,
    causal: bool,
    backend: str | None,
    sm_margin: int,
    window: Sides,
    scores: Scores,
) -> tuple[Tensor, Tensor]:
    """Attention of e4m3 tensors with descales: out (batch, seqlen_q, heads, head_dim_v) in the dtype of the parts, and
    lse. ``causal`` and ``window`` are those of a ``MaskSpec``.

    Raises:
        ValueError, TypeError: ``scores`` do not fit, ``backend`` cannot run the problem, or ``sm_margin`` leaves the
            kernel no multiprocessor.
        NotImplementedError: the problem is larger than the kernel can count.
    """
    _check_is_whole(parts)
    q, k = parts.q.data, parts.k.data
    _give_notice(q.device, backend, 0 not in (*q.shape, *k.shape))
    q, k, v = (part.dequantize(parts.dtype) for part in (parts.q, parts.k, parts.v))
    options = causal, backend, sm_margin
    return run_forward(q, k, v, softmax_scale, *options, window=window, scores=scores)


def attend_packed_dequantized(
    parts: PackedQuantizedQKV,
    softmax_scale: float,
    causal: bool,
    backend: str | None,
    sm_margin: int,
    window: Sides,
    scores: Scores,
) -> tuple[Tensor, Tensor]:
    """The same of packed sequences: out (total_q, heads, head_dim_v), lse (heads, total_q)."""
    _check_is_whole(parts)
    q, k = parts.q.data, parts.k.data
    _give_notice(q.device, backend, not is_empty(q, k, parts.lengths))
    options = causal, backend, sm_margin
    return run_varlen(
        *parts.dequantize(), parts.lengths, softmax_scale, *options, window=window, scores=scores
    )


def _check_is_whole(parts: QuantizedQKV | PackedQuantizedQKV) -> None:
    """Raise unless the tensors are what is to be attended to: nothing here is undone in the output."""
    if parts.mean_v.numel() or parts.quantization.rotate_v:
        raise NotImplementedError(
            "V was quantized without its mean or rotated, which is not undone where scores are changed: use "
            "flash_attn_quantized_func, or Fp8Quantization(smooth_v=False, rotate_v=False)"
        )


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def _give_notice(device: torch.device, backend: str | None, has_work: bool) -> None:
    """Say once that a kernel computes in 16 bits. That the reference is slow is said where it is found."""
    choice = choose_with_scores(target_of(device), backend, has_work)
    if choice.advice and choice.backend in KERNELS:
        warn_once(f"{HOW['ampere']}: {choice.reason}; {choice.advice}")
