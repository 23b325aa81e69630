"""The public function: its checks, its gradient, and its batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal, cast, overload

import jax
import jax.numpy as jnp
import torch
from jax import Array
from jax.custom_batching import custom_vmap

from cute_kernels.problem import MAX_HEAD_DIM
from hopper_attention import checks, features
from hopper_attention.checks import FULL_WINDOW, HALF_DTYPES, TensorSpec
from hopper_attention.integrations.jax import ffi, kernels
from hopper_attention.integrations.jax.call import Call, Gradients, Result
from hopper_attention.integrations.jax.kernels import TORCH_DTYPES
from hopper_attention.plain_calls import PLAIN_VALUES

REMEMBERED_CALLS = 1024
"""Functions kept for calls that differ in more than arrays."""

Window = tuple[int | None, int | None]
Arrays = tuple[Array, ...]


@overload
def flash_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    window_size: Window = ...,
    attention_chunk: int = ...,
    softcap: float = ...,
    return_lse: Literal[False] = ...,
    deterministic: bool = ...,
    backend: str | None = ...,
) -> Array: ...


@overload
def flash_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    window_size: Window = ...,
    attention_chunk: int = ...,
    softcap: float = ...,
    return_lse: Literal[True],
    deterministic: bool = ...,
    backend: str | None = ...,
) -> tuple[Array, Array]: ...


def flash_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: Window = FULL_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
) -> Array | tuple[Array, Array]:
    """softmax(softmax_scale * Q K^T) V for JAX, exact, with memory linear in the sequence lengths.

    It shares its kernels with :func:`hopper_attention.flash_attn_func`. Query head i reads key/value head
    i // (heads / kv_heads). A query that sees no key gives 0, with LSE -inf. Gradients are of first order and reverse
    mode; they flow through the output and the LSE. What ``jax.vmap`` maps over becomes a part of the batch, in one
    launch. Inside ``jax.shard_map`` each device attends to what it has of batch and heads; outside of it XLA brings
    whole arrays to each device. Where there is no kernel, XLA compiles the formula in float32, for any of its devices.

    Args:
        q: (batch, seqlen_q, heads, head_dim), float16 or bfloat16. head_dim is a multiple of 8, at most 256.
        k: (batch, seqlen_k, kv_heads, head_dim), of q's dtype; heads is a multiple of kv_heads.
        v: (batch, seqlen_k, kv_heads, head_dim_v), likewise; head_dim_v may differ, and be at most 256.
        causal: query i sees the keys j <= i + seqlen_k - seqlen_q (the mask is aligned bottom-right).
        softmax_scale: factor of the scores, from 1e-37 to 1e5; head_dim**-0.5 by default. A Python number, as all that
            follows: it is fixed when JAX traces the call.
        window_size: (left, right): query i sees the keys from i + seqlen_k - seqlen_q - left to
            i + seqlen_k - seqlen_q + right; -1 or None is no limit. With ``causal`` the right side is 0.
        attention_chunk: c above 0 cuts the keys into chunks of c, of which a query sees its own alone; 0 is none.
        softcap: c above 0, from 1e-30 to 1e30, makes of a scaled score s c tanh(s / c), before masks; 0 is none.
        return_lse: also return the LSE.
        deterministic: gradients of the same bits in every run; the output has them either way.
        backend: "hopper", "ampere", "reference", which is the formula, or None to have one chosen.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v) of q's dtype; with ``return_lse``, (out, lse), where lse is the natural
        log of the sum of exp(scores), float32 (batch, heads, seqlen_q).

    Raises:
        ValueError, TypeError: an argument is not allowed; the message names it, what it was and what is allowed.
        NotImplementedError: no kernel counts sizes as large as these; the message says so.
    """
    given = causal, softmax_scale, window_size, attention_chunk, softcap, return_lse, deterministic, backend
    # Checks take as long as half of what JAX takes for a call, so they are made when it is traced. What has no hash is
    # checked each time, and so is what is no array, as JAX would say something else of it.
    is_plain = type(window_size) is tuple and PLAIN_VALUES.issuperset(
        map(type, (*given[:2], *given[3:], *window_size))
    )
    if is_plain and isinstance(q, Array) and isinstance(k, Array) and isinstance(v, Array):
        return _compiled_as_given(*given)(q, k, v)
    return _compiled(_read(q, k, v, *given))(q, k, v)


Attention = Callable[[Array, Array, Array], Array | tuple[Array, Array]]


@lru_cache(maxsize=REMEMBERED_CALLS, typed=True)
def _compiled_as_given(*given: Any) -> Attention:
    """The jitted function of a call's options as they were given; numbers count with their types."""

    def attend(q: Array, k: Array, v: Array) -> Array | tuple[Array, Array]:
        return _give(_read(q, k, v, *given), q, k, v)

    return cast(Attention, jax.jit(attend))


@lru_cache(maxsize=REMEMBERED_CALLS)
def _compiled(call: Call) -> Attention:
    """That of a call that was checked."""
    return cast(Attention, jax.jit(partial(_give, call)))


def _give(call: Call, q: Array, k: Array, v: Array) -> Array | tuple[Array, Array]:
    """What the caller asked for. An array that each device of a ``shard_map`` has whole varies here as others do, so
    that JAX adds its gradients up over the devices."""
    q, k, v = ffi.varying_alike([q, k, v])
    out, lse = _attend(call, q, k, v)
    return (out, lse) if call.returns_lse else out


def _read(
    q: Any,
    k: Any,
    v: Any,
    causal: bool,
    softmax_scale: float | None,
    window_size: Window,
    attention_chunk: int,
    softcap: float,
    return_lse: bool,
    deterministic: bool,
    backend: str | None,
) -> Call:
    """The checked call of ``flash_attention``."""
    _check_arrays(q, k, v)
    checks.check_backend(backend)
    if backend == "torch":
        raise ValueError(f"backend is {backend!r}, allowed in JAX: 'hopper', 'ampere', 'reference' or None")
    return_lse = checks.check_flag("return_lse", return_lse)
    causal = checks.check_flag("causal", causal)
    deterministic = checks.check_flag("deterministic", deterministic)
    return Call(
        mask=features.resolve_packed_mask(causal, window_size, attention_chunk, q.shape[1], k.shape[1]),
        softmax_scale=q.shape[3] ** -0.5 if softmax_scale is None else checks.check_scale(softmax_scale),
        softcap=checks.check_softcap(softcap),
        returns_lse=return_lse,
        deterministic=deterministic,
        backend=backend,
    )


def _check_arrays(q: Any, k: Any, v: Any) -> None:
    """Raise ValueError or TypeError unless q, k and v make a problem of 16 bits."""
    specs = []
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, jax.Array):
            raise TypeError(f"{name} is a {type(x).__name__}, allowed: a jax.Array")
        if x.dtype.name not in TORCH_DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype.name}, allowed: {', '.join(TORCH_DTYPES)}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {x.dtype.name}, allowed: the dtype of q, {q.dtype.name}")
        specs.append(TensorSpec(x.shape, (), HALF_DTYPES[0], torch.device("meta")))
    checks.check_qkv(*specs)
    if v.shape[3] > MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim_v, the last size of v, is {v.shape[3]}, allowed in JAX: at most {MAX_HEAD_DIM}; "
            "attend to its columns in parts"
        )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: Call, q: Array, k: Array, v: Array) -> Result:
    """out and lse; only where the call returns the latter does its gradient count."""
    return _forward(call)(q, k, v)


def _attend_and_save(call: Call, q: Array, k: Array, v: Array) -> tuple[Result, Arrays]:
    out, lse = _once(_forward(call))(q, k, v)
    return (out, lse), (q, k, v, out, lse)


def _differentiate(call: Call, saved: Arrays, gradients: Result) -> Gradients:
    dout, dlse = gradients
    return _once(_backward(call))(*saved, dout, *([dlse] if call.returns_lse else []))


_attend.defvjp(_attend_and_save, _differentiate)


@lru_cache(maxsize=REMEMBERED_CALLS)
def _forward(call: Call) -> Callable[..., Result]:
    """(q, k, v) -> (out, lse)."""

    def run(q: Array, k: Array, v: Array) -> Result:
        if 0 in q.shape or not k.shape[1]:
            batch, seqlen_q, heads, _ = q.shape
            out = jnp.zeros((batch, seqlen_q, heads, v.shape[3]), q.dtype)
            return out, jnp.full((batch, heads, seqlen_q), -math.inf, jnp.float32)
        return kernels.attend(call, q, k, v)

    return batched(run)


@lru_cache(maxsize=REMEMBERED_CALLS)
def _backward(call: Call) -> Callable[..., Gradients]:
    """(q, k, v, out, lse, dout[, dlse]) -> (dq, dk, dv)."""

    def run(q: Array, k: Array, v: Array, *saved: Array) -> Gradients:
        if 0 in q.shape or not k.shape[1]:
            return jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)
        return kernels.differentiate(call, q, k, v, *saved)

    return batched(run)


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which is of a gradient, with a message for who differentiates that too."""
    shielded = jax.custom_vjp(function)

    def refuse(*_: Any) -> Any:
        raise NotImplementedError(
            "flash_attention has no second derivative; use jax.nn.dot_product_attention, which has one"
        )

    shielded.defvjp(refuse, refuse)
    return shielded


def batched(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of arrays that begin with a batch, which ``jax.vmap`` makes longer."""
    mapped = custom_vmap(function)

    @mapped.def_vmap
    def add_to_batch(axis_size: int, is_mapped: list[bool], *arrays: Array) -> tuple[Any, Any]:
        folded = []
        for x, has_axis in zip(arrays, is_mapped, strict=True):
            each = x if has_axis else jnp.broadcast_to(x, (axis_size, *x.shape))
            folded.append(each.reshape(axis_size * each.shape[1], *each.shape[2:]))
        batch = arrays[0].shape[1] if is_mapped[0] else arrays[0].shape[0]
        unfolded = tuple(x.reshape(axis_size, batch, *x.shape[1:]) for x in mapped(*folded))
        return unfolded, (True,) * len(unfolded)

    return mapped
