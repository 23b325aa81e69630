"""Sequences of different lengths with Q, K and V in one tensor, or K and V in one."""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import Tensor

from hopper_attention import checks
from hopper_attention.api import Window
from hopper_attention.checks import FULL_WINDOW, Result
from hopper_attention.lengths import check_max_seqlen
from hopper_attention.packed import split_heads
from hopper_attention.varlen import flash_attn_varlen_func


@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float | None = ...,
    causal: bool | int = ...,
    q_descale: Tensor | None = ...,
    k_descale: Tensor | None = ...,
    v_descale: Tensor | None = ...,
    window_size: Window = ...,
    attention_chunk: int = ...,
    softcap: float = ...,
    deterministic: bool = ...,
    num_heads_q: int | None = ...,
    sm_margin: int = ...,
    return_attn_probs: Literal[False] = ...,
    *,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    exact_lse: bool | None = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float | None = ...,
    causal: bool | int = ...,
    q_descale: Tensor | None = ...,
    k_descale: Tensor | None = ...,
    v_descale: Tensor | None = ...,
    window_size: Window = ...,
    attention_chunk: int = ...,
    softcap: float = ...,
    deterministic: bool = ...,
    num_heads_q: int | None = ...,
    sm_margin: int = ...,
    *,
    return_attn_probs: Literal[True],
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    exact_lse: bool | None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float | None = ...,
    causal: bool | int = ...,
    q_descale: Tensor | None = ...,
    k_descale: Tensor | None = ...,
    v_descale: Tensor | None = ...,
    window_size: Window = ...,
    attention_chunk: int = ...,
    softcap: float = ...,
    deterministic: bool = ...,
    num_heads_q: int | None = ...,
    sm_margin: int = ...,
    return_attn_probs: bool = ...,
    *,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    exact_lse: bool | None = ...,
    backend: str | None = ...,
) -> Result: ...


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float | None = None,
    causal: bool | int = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = FULL_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    exact_lse: bool | None = None,
    backend: str | None = None,
) -> Result:
    """:func:`flash_attn_varlen_func` on one tensor that holds Q, K and V; nothing is copied to take them apart.

    Args:
        qkv: (total, 3, heads, head_dim); or, with ``num_heads_q``, (total, heads, head_dim) whose heads are those of Q,
            then K's, then as many of V.
        cu_seqlens: int32 (batch + 1,), of queries and keys alike.
        max_seqlen: no sequence is longer.
        num_heads_q: query heads in a qkv of three dimensions.
        others: as for :func:`flash_attn_varlen_func`.

    Returns:
        As :func:`flash_attn_varlen_func`. The gradient of qkv comes in one tensor.

    Raises:
        ValueError, TypeError, NotImplementedError: as there, and for a qkv that is none of the above.
    """
    q, k, v = _unpack_qkv(qkv, num_heads_q)
    checks.check_are_tensors(cu_seqlens=cu_seqlens)
    max_seqlen = check_max_seqlen("max_seqlen", max_seqlen)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        softmax_scale=softmax_scale,
        causal=causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_p=dropout_p,
        exact_lse=exact_lse,
        softcap=softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
        backend=backend,
    )


@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = ...,
    causal: bool | int = ...,
    q_descale: Tensor | None = ...,
    k_descale: Tensor | None = ...,
    v_descale: Tensor | None = ...,
    window_size: Window = ...,
    attention_chunk: int = ...,
    softcap: float = ...,
    deterministic: bool = ...,
    sm_margin: int = ...,
    return_attn_probs: Literal[False] = ...,
    *,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    exact_lse: bool | None = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = ...,
    causal: bool | int = ...,
    q_descale: Tensor | None = ...,
    k_descale: Tensor | None = ...,
    v_descale: Tensor | None = ...,
    window_size: Window = ...,
    attention_chunk: int = ...,
    softcap: float = ...,
    deterministic: bool = ...,
    sm_margin: int = ...,
    *,
    return_attn_probs: Literal[True],
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    exact_lse: bool | None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = ...,
    causal: bool | int = ...,
    q_descale: Tensor | None = ...,
    k_descale: Tensor | None = ...,
    v_descale: Tensor | None = ...,
    window_size: Window = ...,
    attention_chunk: int = ...,
    softcap: float = ...,
    deterministic: bool = ...,
    sm_margin: int = ...,
    return_attn_probs: bool = ...,
    *,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    exact_lse: bool | None = ...,
    backend: str | None = ...,
) -> Result: ...


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool | int = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = FULL_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    exact_lse: bool | None = None,
    backend: str | None = None,
) -> Result:
    """:func:`flash_attn_varlen_func` with K and V in one tensor; nothing is copied to take them apart.

    Args:
        q: (total_q, heads, head_dim).
        kv: (total_k, 2, kv_heads, head_dim).
        others: as for :func:`flash_attn_varlen_func`.

    Returns:
        As :func:`flash_attn_varlen_func`. The gradient of kv comes in one tensor.

    Raises:
        ValueError, TypeError, NotImplementedError: as there, and for a kv that is none of the above.
    """
    checks.check_are_tensors(q=q, kv=kv)
    if kv.dim() != 4 or kv.shape[1] != 2:
        raise ValueError(f"kv has shape {tuple(kv.shape)}, allowed: (total_k, 2, kv_heads, head_dim)")
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_p=dropout_p,
        exact_lse=exact_lse,
        softcap=softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
        backend=backend,
    )


def _unpack_qkv(qkv: Any, num_heads_q: int | None) -> tuple[Tensor, ...]:
    checks.check_are_tensors(qkv=qkv)
    if num_heads_q is None:
        if qkv.dim() != 4 or qkv.shape[1] != 3:
            raise ValueError(
                f"qkv has shape {tuple(qkv.shape)}, allowed: (total, 3, heads, head_dim), or three dimensions and "
                "num_heads_q"
            )
        return qkv.unbind(1)
    if qkv.dim() != 3:
        raise ValueError(
            f"qkv has shape {tuple(qkv.shape)}, allowed with num_heads_q: (total, heads, head_dim)"
        )
    return split_heads(qkv, num_heads_q, 1)
