"""The public functions: FlashAttention-3's names, argument order and conventions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hopper_attention import autograd as _autograd  # noqa: F401  (registers the gradients of the operators)
from hopper_attention import checks, ops
from hopper_attention.checks import FP8_DTYPE, FULL_WINDOW, TensorSpec
from hopper_attention.launch.forward import run_forward


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = FULL_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    two_level_accumulation: bool = False,
    backend: str | None = None,
) -> Any:
    """softmax(softmax_scale * Q K^T) V, exact, with memory linear in the sequence lengths.

    Query head i reads key/value head i // (heads / kv_heads). A query that sees no key gives 0, with LSE
    -inf. 16-bit inputs are differentiable, once; gradients flow through the output and through the LSE.
    NaN or infinity in K at a key that a query may not see never reaches that query. In V it can, on the Hopper
    kernel, where causal queries share a tile with one that may see the key: 0 times NaN is NaN. Gradients come from
    the backend's backward kernel, and where it cannot give them from the tiled reference, with a warning on a GPU;
    ``explain`` says which.

    Args:
        q: (batch, seqlen_q, heads, head_dim), float16, bfloat16 or float8_e4m3fn. head_dim is a multiple
            of 8, at most 256. Strides are free except the last, which is 1. A tensor that TMA cannot
            address (strides that are not multiples of 8 elements, address not a multiple of 16 bytes,
            expanded dimensions) is copied first for a kernel; ``explain`` says so.
        k: (batch, seqlen_k, kv_heads, head_dim), of q's dtype and device; heads is a multiple of kv_heads.
        v: (batch, seqlen_k, kv_heads, head_dim_v), likewise; head_dim_v may differ from head_dim.
        softmax_scale: factor of the scores, positive; head_dim**-0.5 by default.
        causal: query i sees the keys j <= i + seqlen_k - seqlen_q (the mask is aligned bottom-right).
        q_descale, k_descale, v_descale: for float8_e4m3fn only: float32 (batch, kv_heads) factors that
            the data is multiplied by; ones by default. Where that of q or k is negative,
            the FP8 kernel gives NaN. FP8 gives a bfloat16 output and has no gradient. The "ampere" backend
            dequantizes the tensors to bfloat16 first, which gives no speed-up.
        deterministic: gradients of the same bits in every run. The backward kernel then sums dQ in a fixed
            order, for which key tiles wait for each other; else in the order in which they finish. The output has
            the same bits in every run either way. torch.use_deterministic_algorithms(True) does the same.
        sm_margin: streaming multiprocessors that the Hopper kernel leaves to others.
        return_attn_probs: also return the LSE (FlashAttention's name for it, kept).
        two_level_accumulation: for float8_e4m3fn on the Hopper kernel: add the products of its key tiles in float32,
            as in :func:`hopper_attention.flash_attn_fp8_func`. Changes nothing elsewhere.
        backend: "hopper", "ampere" (runs on Hopper GPUs too), "reference", or None to have one chosen; see
            ``explain``.
        qv, window_size, attention_chunk, softcap, num_splits, pack_gqa: FlashAttention-3's features that
            are not implemented yet; anything but the default raises NotImplementedError.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v), contiguous; with ``return_attn_probs``, (out, lse),
        where lse is the natural log of the sum of exp(scores), float32 (batch, heads, seqlen_q).

    Raises:
        ValueError, TypeError: an argument is not allowed; the message names it, what it was and what is
            allowed.
        NotImplementedError: a feature is not implemented; the message says what to use instead.
    """
    if (
        qv is not None
        or window_size != FULL_WINDOW
        or attention_chunk
        or softcap
        or num_splits != 1
        or pack_gqa is not None
    ):
        checks.check_features(
            qv=qv,
            window_size=window_size,
            attention_chunk=attention_chunk,
            softcap=softcap,
            num_splits=num_splits,
            pack_gqa=pack_gqa,
        )
    if backend is not None:
        checks.check_backend(backend)
    if sm_margin != 0:
        checks.check_sm_margin(sm_margin)
    if two_level_accumulation is not False:
        checks.check_two_level_accumulation(two_level_accumulation)
    no_descales = q_descale is None and k_descale is None and v_descale is None
    if no_descales and _wants_only_a_launch(q, k, v) and q.is_cuda:
        # The dispatcher of torch costs more than the rest of a call on a short sequence.
        results = run_forward(q, k, v, softmax_scale, bool(causal), backend, sm_margin, return_attn_probs)
    else:
        descales = (q_descale, k_descale, v_descale)
        options = (bool(causal), backend, sm_margin, bool(deterministic))
        results = _call_operator(q, k, v, softmax_scale, descales, options, two_level_accumulation)
    return results if return_attn_probs else results[0]


def _wants_only_a_launch(q: Any, k: Any, v: Any) -> bool:
    """Whether these are plain 16-bit tensors that nothing traces, transforms or differentiates."""
    return (
        not torch.compiler.is_compiling()
        and type(q) is Tensor
        and type(k) is Tensor
        and type(v) is Tensor
        and q.dtype != FP8_DTYPE
        and not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None
    )


def _call_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    descales: tuple[Tensor | None, Tensor | None, Tensor | None],
    options: tuple[bool, str | None, int, bool],
    two_level: bool,
) -> tuple[Tensor, Tensor]:
    """Through torch's dispatcher, which traces, differentiates and transforms.

    ``options`` are causal, backend, sm_margin and deterministic.
    """
    causal, backend, *others = options
    checks.check_are_tensors(q=q, k=k, v=v)
    checks.check_qkv(TensorSpec.of(q), TensorSpec.of(k), TensorSpec.of(v))
    checks.check_descales(q, k, *descales)
    scale = q.shape[3] ** -0.5 if softmax_scale is None else checks.check_scale(softmax_scale)
    if q.dtype == FP8_DTYPE:
        checks.check_fp8_has_no_grad(q, k, v, *descales)
        return ops.forward_fp8(q, k, v, *descales, scale, causal, backend, two_level)
    return ops.forward(q, k, v, scale, causal, backend, *others)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = FULL_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    two_level_accumulation: bool = False,
    backend: str | None = None,
) -> Any:
    """:func:`flash_attn_func` on one tensor that holds Q, K and V; nothing is copied to take them apart.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim); or, with ``num_heads_q``, (batch, seqlen, heads,
            head_dim) whose heads are those of Q, then K's, then as many of V.
        num_heads_q: query heads in a qkv of four dimensions.
        others: as for :func:`flash_attn_func`.

    Returns:
        As :func:`flash_attn_func`. The gradient of qkv comes in one tensor.
    """
    q, k, v = _unpack_qkv(qkv, num_heads_q)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
        two_level_accumulation=two_level_accumulation,
        backend=backend,
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = FULL_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    two_level_accumulation: bool = False,
    backend: str | None = None,
) -> Any:
    """:func:`flash_attn_func` with K and V in one tensor; nothing is copied to take them apart.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        kv: (batch, seqlen_k, 2, kv_heads, head_dim).
        others: as for :func:`flash_attn_func`.

    Returns:
        As :func:`flash_attn_func`. The gradient of kv comes in one tensor.
    """
    checks.check_are_tensors(q=q, kv=kv)
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(f"kv has shape {tuple(kv.shape)}, allowed: (batch, seqlen_k, 2, kv_heads, head_dim)")
    k, v = kv.unbind(2)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
        two_level_accumulation=two_level_accumulation,
        backend=backend,
    )


def _unpack_qkv(qkv: Any, num_heads_q: int | None) -> tuple[Tensor, ...]:
    checks.check_are_tensors(qkv=qkv)
    if num_heads_q is None:
        if qkv.dim() != 5 or qkv.shape[2] != 3:
            raise ValueError(
                f"qkv has shape {tuple(qkv.shape)}, allowed: (batch, seqlen, 3, heads, head_dim), or four "
                "dimensions and num_heads_q"
            )
        return qkv.unbind(2)
    if qkv.dim() != 4:
        raise ValueError(
            f"qkv has shape {tuple(qkv.shape)}, allowed with num_heads_q: (batch, seqlen, heads, head_dim)"
        )
    both_kv = qkv.shape[2] - num_heads_q
    if not 0 < num_heads_q < qkv.shape[2] or both_kv % 2:
        raise ValueError(
            f"num_heads_q is {num_heads_q}, allowed with the {qkv.shape[2]} heads of qkv: above 0, and "
            "leaving as many heads for K as for V"
        )
    return qkv.split([num_heads_q, both_kv // 2, both_kv // 2], dim=2)
