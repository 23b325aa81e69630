"""A second query that multiplies V: FlashAttention-3's ``qv``, for attention over a latent (MLA, of DeepSeek-V2).

Scores are softmax_scale (Q K^T + QV V^T): V is the values and, beside K, more columns of the keys.
"""

from __future__ import annotations

from typing import Any

from hopper_attention import checks
from hopper_attention.checks import FP8_DTYPE, TensorSpec
from hopper_attention.masks import UNLIMITED, MaskSpec
from hopper_attention.scores import ScoreKind

NO_QV_GRADIENT = (
    "a backward pass reached attention with qv, whose gradient no backend has; use "
    "hopper_attention.reference.attention_tiled(..., qv=qv), which is differentiable, or call under torch.no_grad()"
)


def check_qv(q: TensorSpec, v: TensorSpec, qv: TensorSpec) -> None:
    """Raise unless ``qv`` fits q and v, dense or packed, which were checked.

    Raises:
        ValueError, TypeError: its shape, dtype or device is another than allowed.
        NotImplementedError: q is of 8 bits.
    """
    if q.dtype == FP8_DTYPE:
        raise NotImplementedError(
            f"qv is given: a second query of {FP8_DTYPE} tensors is not implemented; use 16-bit tensors"
        )
    expected = (*q.shape[:-1], v.shape[-1])
    if tuple(qv.shape) != expected:
        dims = (
            "(batch, seqlen_q, heads, head_dim_v)" if len(expected) == 4 else "(total_q, heads, head_dim_v)"
        )
        raise ValueError(f"qv has shape {tuple(qv.shape)}, allowed with these q and v: {dims}, {expected}")
    if qv.dtype != q.dtype:
        raise TypeError(f"qv has dtype {qv.dtype}, allowed: the dtype of q, {q.dtype}")
    checks.check_device("qv", qv.device, q.device)


def folds_heads(q_shape: tuple[int, ...], kv_heads: int, mask: MaskSpec, scores: ScoreKind) -> bool:
    """Whether the query heads that share a key/value head can be given to the kernel as queries of one head.

    That is so where there is a single query a head, which sees all keys, and where no slope and no sink differs by
    head. A tile then has as many rows as there are such heads, and the keys are read once for all of them.
    """
    _, seqlen_q, heads, _ = q_shape
    tells_apart = scores.has_alibi or scores.has_sinks
    sees_all = mask.window_left == UNLIMITED and not mask.attention_chunk
    return seqlen_q == 1 and heads > kv_heads and sees_all and not tells_apart


def fold(spec: TensorSpec, kv_heads: int) -> TensorSpec:
    """A q or qv of ``folds_heads`` with heads as queries: (batch, heads // kv_heads, kv_heads, columns)."""
    (batch, _, heads, columns), (batch_stride, _, head_stride, last) = spec.shape, spec.strides
    group = heads // kv_heads
    strides = batch_stride, head_stride, group * head_stride, last
    return spec._replace(shape=(batch, group, kv_heads, columns), strides=strides)


def scale_with_qv(softmax_scale: Any, head_dim: int, head_dim_v: int) -> float:
    """``softmax_scale``, checked; by default (head_dim + head_dim_v) ** -0.5, as in FlashAttention-3."""
    if softmax_scale is None:
        return float((head_dim + head_dim_v) ** -0.5)
    return checks.check_scale(softmax_scale)


def check_qv_scores(has_dropout: bool) -> None:
    """Raise NotImplementedError for dropout with a second query; ``features`` refuses functions of scores with it."""
    if has_dropout:
        raise NotImplementedError(
            "dropout_p is given with qv, which is not implemented; leave out one of them, or concatenate qv to q and v "
            "to k where head_dim + head_dim_v is at most 256"
        )


def no_qv(backend: str, reason: str) -> NotImplementedError:
    """The error of a backend that has no kernel with qv for a problem."""
    return NotImplementedError(
        f"qv is given: {reason}; use backend='reference', which is slow, or concatenate qv to q and v to k where "
        f"head_dim + head_dim_v is at most 256 (asked of backend {backend!r})"
    )
