"""Rotary position embedding of queries and keys as one operator, with gradients.

Out of torch's own operators it is many passes over Q and K; here it is one launch for both, and one more for the
gradients.
"""
# No `from __future__ import annotations`: custom_op reads the annotations of its function.

from typing import Any

import torch
from torch import Tensor

from hopper_attention.checks import check_are_tensors
from hopper_attention.launch.rotation import TABLE_NAMES, Angles
from hopper_attention.launch.rotation import rotate as launch
from hopper_attention.transforms import differentiable

FLOATS = (*TABLE_NAMES, torch.float64)


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions (RoFormer, arXiv 2104.09864, equation 34), before attention.

    Column i below rotary_dim / 2 and column i + rotary_dim / 2 of a row turn together: (x, y) becomes
    (x cos - y sin, y cos + x sin), in float32, rounded once. Columns from rotary_dim on stay as they are. On a GPU with
    kernels 16-bit tensors take one launch, where they lie, of any strides that TMA could address; others, and tensors
    on other devices, are rotated by torch. q and k have gradients of any order; cos and sin have none.

    Args:
        q: (batch, seqlen, heads, head_dim), float16 or bfloat16; float32 or float64 by torch.
        k: (batch, seqlen, kv_heads, head_dim), of that dtype.
        cos, sin: (batch, seqlen, rotary_dim / 2), or (1, seqlen, rotary_dim / 2) for all sequences; of one floating
            dtype. For the kernel rotary_dim is a multiple of 16.

    Returns:
        q and k, rotated, new contiguous tensors.

    Raises:
        TypeError: one of them is not a tensor.
        ValueError: shapes, dtypes or devices do not agree.
        NotImplementedError: cos or sin need a gradient.
    """
    _check(q, k, cos, sin)
    return rotate_by(q, k, Angles(cos, sin, cos, sin))


def rotate_by(q: Tensor, k: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
    """``apply_rotary`` with angles of their own for both columns of a pair, which are not checked but for gradients."""
    if torch.is_grad_enabled() and any(table.requires_grad for table in angles):
        raise NotImplementedError(
            "cos or sin needs a gradient, which the kernel of rotary embedding does not give; detach() them, or "
            "rotate by torch's operators"
        )
    batch = q.shape[0]
    of_all = (x if x.shape[0] == batch else x.expand(batch, -1, -1) for x in angles)
    rotated: tuple[Tensor, Tensor] = _call(q, k, *of_all, 1.0)
    return rotated


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    check_are_tensors(q=q, k=k, cos=cos, sin=sin)
    for name, x in (("q", q), ("k", k)):
        if x.dim() != 4 or x.shape[:2] != q.shape[:2] or x.shape[3] != q.shape[3]:
            wanted = (
                (*q.shape[:2], "any heads", q.shape[3])
                if q.dim() == 4
                else "(batch, seqlen, heads, head_dim)"
            )
            raise ValueError(f"{name} has shape {tuple(x.shape)}, allowed: {wanted}")
        if x.dtype not in FLOATS or x.dtype != q.dtype:
            allowed = q.dtype if q.dtype in FLOATS else ", ".join(map(str, FLOATS))
            raise ValueError(f"{name} has dtype {x.dtype}, allowed: {allowed}")
    batch, seqlen, _, head_dim = q.shape
    for name, x in (("cos", cos), ("sin", sin)):
        fits = x.dim() == 3 and x.shape[0] in (1, batch) and x.shape[1] == seqlen and x.shape == cos.shape
        if not fits or not 0 < 2 * x.shape[2] <= head_dim:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, allowed: (1 or {batch}, {seqlen}, 1 to {head_dim // 2} columns), "
                "that of cos and sin being one"
            )
        if x.dtype not in FLOATS or x.dtype != cos.dtype:
            allowed = cos.dtype if cos.dtype in FLOATS else ", ".join(map(str, FLOATS))
            raise ValueError(f"{name} has dtype {x.dtype}, allowed: {allowed}")
    if {x.device for x in (q, k, cos, sin)} != {q.device}:
        raise ValueError(
            f"k, cos and sin are on {k.device}, {cos.device} and {sin.device}, allowed: the device of q, {q.device}"
        )


@torch.library.custom_op("hopper_attention::rotate", mutates_args=())
def rotate(
    q: Tensor,
    k: Tensor,
    low_cos: Tensor,
    low_sin: Tensor,
    high_cos: Tensor,
    high_sin: Tensor,
    sign: float,
) -> tuple[Tensor, Tensor]:
    """``launch.rotation.rotate``: tables are (batch, seqlen, rotary_dim / 2)."""
    return launch(q, k, Angles(low_cos, low_sin, high_cos, high_sin), sign)


@rotate.register_fake
def _(
    q: Tensor,
    k: Tensor,
    low_cos: Tensor,
    low_sin: Tensor,
    high_cos: Tensor,
    high_sin: Tensor,
    sign: float,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *_, ctx.sign = inputs
    ctx.save_for_backward(*inputs[2:6])


def _gradients(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    """The transposed matrix, which turns back."""
    back = Angles(*ctx.saved_tensors).transposed
    return *_call(dq, dk, *back, -ctx.sign), *[None] * 5


_call = differentiable(rotate, _gradients, _save)
