"""Merging of partial results by their LSE: FlashAttention-3's ``flash_attn_combine``."""
# No `from __future__ import annotations`: custom_op reads the annotations of its function.

from typing import Literal, overload

import torch
from torch import Tensor

from hopper_attention import checks
from hopper_attention.checks import HALF_DTYPES, Result, TensorSpec
from hopper_attention.launch.combine import combine as combine_by_kernel
from hopper_attention.plain_calls import check_no_tangent, is_plain_call, needs_gradient
from hopper_attention.reference.combine import combine_parts

OUT_DTYPES = (torch.float32, *HALF_DTYPES)
MOST_SPLITS = 256


@overload
def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = ...,
    out_dtype: torch.dtype | None = ...,
    return_lse: Literal[True] = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = ...,
    out_dtype: torch.dtype | None = ...,
    *,
    return_lse: Literal[False],
) -> Tensor: ...


@overload
def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = ...,
    out_dtype: torch.dtype | None = ...,
    return_lse: bool = ...,
) -> Result: ...


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = True,
) -> Result:
    """The attention of all keys, from that of each of some parts of them.

    A part without keys, whose LSE is -inf, counts nothing, whatever its output holds. There is no gradient.

    Args:
        out_partial: float32 (num_splits, batch, seqlen_q, heads, head_dim_v), or of packed sequences (num_splits,
            total_q, heads, head_dim_v), with up to 256 splits. Strides are free.
        lse_partial: float32 (num_splits, batch, seqlen_q, heads), or (num_splits, total_q, heads): natural logs.
        out: where the output goes, of ``out_dtype``.
        out_dtype: float32, float16 or bfloat16; that of ``out`` by default, or float32.
        return_lse: also return the LSE.

    Returns:
        out, (batch, seqlen_q, heads, head_dim_v) or (total_q, heads, head_dim_v). With ``return_lse``, (out, lse): the
        float32 lse lacks the last dimension. A query without keys in any part has 0 and -inf.

    Raises:
        ValueError, TypeError: an argument is not allowed; the message names it, what it was and what is allowed.
        NotImplementedError: a gradient would be wanted.
    """
    checks.check_are_tensors(out_partial=out_partial, lse_partial=lse_partial)
    _check_parts(TensorSpec.of(out_partial), TensorSpec.of(lse_partial))
    dtype = _dtype_of(out, out_dtype)
    if out is not None:
        _check_out(TensorSpec.of(out), TensorSpec.of(out_partial), dtype)
    wants_lse = checks.check_flag("return_lse", return_lse)
    if needs_gradient(out_partial, lse_partial, *(() if out is None else (out,))):
        raise NotImplementedError(
            "out_partial, lse_partial or out requires a gradient: merging has none; call it under torch.no_grad()"
        )
    is_plain = is_plain_call(out_partial, lse_partial, out_partial if out is None else out)
    if is_plain:
        result, lse = merge(out_partial, lse_partial, dtype, out)
    else:
        check_no_tangent("merging", (out_partial, lse_partial, out))
        merged, lse = combine(out_partial, lse_partial, dtype)
        result = merged if out is None else out.copy_(merged)
    return (result, lse) if wants_lse else result


@torch.library.custom_op("hopper_attention::combine", mutates_args=())
def combine(out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The operator: new contiguous tensors out, of ``dtype``, and lse."""
    return merge(out_partial, lse_partial, dtype)


@combine.register_fake
def _(out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = out_partial.shape[1:]
    return out_partial.new_empty(shape, dtype=dtype), out_partial.new_empty(shape[:-1])


def merge(
    out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out and lse of checked parts, by the kernel where there is one for them; ``out`` is where the output goes."""
    if out_partial.is_cuda:
        try:
            return combine_by_kernel(out_partial, lse_partial, dtype, out)
        except NotImplementedError:
            # Its way to say that it does not do this one.
            pass
    merged, lse = combine_parts(out_partial, lse_partial, dtype)
    return merged.contiguous() if out is None else out.copy_(merged), lse.contiguous()


def _check_parts(out: TensorSpec, lse: TensorSpec) -> None:
    for name, spec in (("out_partial", out), ("lse_partial", lse)):
        if spec.dtype != torch.float32:
            raise TypeError(f"{name} has dtype {spec.dtype}, allowed: torch.float32")
    if len(out.shape) not in (4, 5):
        raise ValueError(
            f"out_partial has {len(out.shape)} dimensions, shape {tuple(out.shape)}, allowed: 5, (num_splits, batch, "
            "seqlen_q, heads, head_dim_v), or 4, (num_splits, total_q, heads, head_dim_v)"
        )
    if not 1 <= out.shape[0] <= MOST_SPLITS:
        raise ValueError(f"out_partial has {out.shape[0]} splits, allowed: 1 to {MOST_SPLITS}")
    if lse.shape != out.shape[:-1]:
        raise ValueError(
            f"lse_partial has shape {tuple(lse.shape)}, allowed with out_partial of shape {tuple(out.shape)}: "
            f"{tuple(out.shape[:-1])}"
        )
    if lse.device != out.device:
        raise ValueError(f"lse_partial is on {lse.device}, allowed: the device of out_partial, {out.device}")


def _dtype_of(out: Tensor | None, out_dtype: torch.dtype | None) -> torch.dtype:
    if out is not None:
        checks.check_are_tensors(out=out)
    allowed = ", ".join(map(str, OUT_DTYPES))
    if out_dtype is None:
        out_dtype = torch.float32 if out is None else out.dtype
    elif not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype is a {type(out_dtype).__name__}, {out_dtype!r}, allowed: {allowed}")
    if out_dtype not in OUT_DTYPES:
        raise TypeError(f"out_dtype is {out_dtype}, allowed: {allowed}")
    return out_dtype


def _check_out(out: TensorSpec, partial: TensorSpec, dtype: torch.dtype) -> None:
    if out.dtype != dtype:
        raise TypeError(f"out has dtype {out.dtype}, allowed: out_dtype, {dtype}")
    if out.shape != partial.shape[1:]:
        raise ValueError(f"out has shape {tuple(out.shape)}, allowed: {tuple(partial.shape[1:])}")
    if out.device != partial.device:
        raise ValueError(f"out is on {out.device}, allowed: the device of out_partial, {partial.device}")
    checks.check_can_be_written("out", out)
