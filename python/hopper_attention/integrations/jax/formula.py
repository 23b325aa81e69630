"""Attention and its gradients in jax.numpy, in float32: what runs where there is no kernel.

Queries are taken in chunks, so that memory is bounded, and P is computed anew for the gradients, as the kernels do it.
XLA compiles it for any device.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from hopper_attention.integrations.jax.call import Call, Gradients, Result
from hopper_attention.masks import UNLIMITED

CHUNK_SCORES = 1 << 24
"""Scores held at a time, over batch and heads."""


class Keys(NamedTuple):
    """float32 (batch, kv_heads, seqlen_k, ...)."""

    k: Array
    v: Array


class Scores(NamedTuple):
    """Of one chunk, (batch, kv_heads, group, rows, seqlen_k).

    ``values`` are -inf where a query does not see the key; ``slopes`` is d value / d (q k).
    """

    values: Array
    slopes: Array | float


def attend(call: Call, q: Array, k: Array, v: Array) -> Result:
    """out and lse. No size may be 0."""
    keys = _keys(k, v)

    def of_chunk(rows: Array, first: Array) -> Result:
        scores = _scores(call, rows, keys, first, q.shape[1]).values
        largest = scores.max(-1, keepdims=True)
        shift = jnp.where(largest == -jnp.inf, 0.0, largest)
        p = jnp.exp(scores - shift)
        total = p.sum(-1, keepdims=True)
        out = _product("bhgqk,bhkd->bhgqd", p, keys.v) / jnp.where(total == 0.0, 1.0, total)
        return out, (shift + jnp.log(total))[..., 0]

    chunks, firsts = _chunks(q, k)
    out, lse = jax.lax.map(lambda x: of_chunk(*x), (chunks, firsts))
    lse = _joined(lse[..., None], q.shape[1])[..., 0]
    return _as_rows(_joined(out, q.shape[1]), q.dtype), lse.reshape(lse.shape[0], -1, lse.shape[-1])


def differentiate(
    call: Call, q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array, dlse: Array | None = None
) -> Gradients:
    """dq, dk and dv from what ``attend`` gave, and the gradients of that. No size may be 0."""
    keys, kv_heads = _keys(k, v), k.shape[2]
    # P of a single key is 1 whatever its score; as a difference of two sums the zero would be off by their rounding.
    dout_of_scores = jnp.zeros_like(dout) if k.shape[1] == 1 else dout
    delta = jnp.einsum("bqhd,bqhd->bhq", dout_of_scores.astype(jnp.float32), out.astype(jnp.float32))
    if dlse is not None:
        delta = delta - jnp.where(lse == -jnp.inf, 0.0, dlse)
    statistics = jnp.stack([lse, delta], -1)
    statistics = statistics.reshape(lse.shape[0], kv_heads, -1, *statistics.shape[2:])

    def step(sums: Keys, chunk: tuple[Array, ...]) -> tuple[Keys, Array]:
        rows, drows, drows_of_scores, of_rows, first = chunk
        scores = _scores(call, rows, keys, first, q.shape[1])
        row_lse, row_delta = of_rows[..., :1], of_rows[..., 1:]
        p = jnp.where(row_lse == -jnp.inf, 0.0, jnp.exp(scores.values - row_lse))
        dp = _product("bhgqd,bhkd->bhgqk", drows_of_scores, keys.v)
        ds = p * (dp - row_delta) * scores.slopes
        dk = sums.k + _product("bhgqk,bhgqd->bhkd", ds, rows)
        dv = sums.v + _product("bhgqk,bhgqd->bhkd", p, drows)
        return Keys(dk, dv), _product("bhgqk,bhkd->bhgqd", ds, keys.k)

    chunks, firsts = _chunks(q, k)
    parts = (_chunks(x, k)[0] for x in (dout, dout_of_scores))
    # Zeros made of the keys vary over a mesh as the keys do, which shard_map wants of a loop's sums.
    zeros = Keys(*(jnp.where(False, x, 0.0) for x in keys))
    of_rows = _split(statistics, chunks.shape[0], chunks.shape[4])
    sums, dq = jax.lax.scan(step, zeros, (chunks, *parts, of_rows, firsts))
    dk, dv = (x.swapaxes(1, 2).astype(k.dtype) for x in sums)
    return _as_rows(_joined(dq, q.shape[1]), q.dtype), dk, dv


def _keys(k: Array, v: Array) -> Keys:
    return Keys(*(x.swapaxes(1, 2).astype(jnp.float32) for x in (k, v)))


def _scores(call: Call, rows: Array, keys: Keys, first: Array, seqlen_q: int) -> Scores:
    """The scores of a chunk (batch, kv_heads, group, rows, head_dim) that begins with query ``first``."""
    scores = _product("bhgqd,bhkd->bhgqk", rows, keys.k) * call.softmax_scale
    slopes: Array | float = call.softmax_scale
    if call.softcap:
        capped = jnp.tanh(scores / call.softcap)
        scores, slopes = call.softcap * capped, call.softmax_scale * (1.0 - capped * capped)
    visible = _visible(call, first, rows.shape[3], seqlen_q, keys.k.shape[2])
    if visible is None:
        return Scores(scores, slopes)
    return Scores(jnp.where(visible, scores, -jnp.inf), slopes)


def _visible(call: Call, first: Array, rows: int, seqlen_q: int, seqlen_k: int) -> Array | None:
    """Boolean (1, 1, 1, rows, seqlen_k): whether a query sees the key. None where every one does."""
    mask = call.mask
    if not mask.causal and not mask.has_window:
        return None
    # The place of a query among the keys: the last query stands at the last key.
    place = (first + jnp.arange(rows) + (seqlen_k - seqlen_q))[:, None]
    key = jnp.arange(seqlen_k)[None]
    visible = jnp.ones((rows, seqlen_k), bool)
    right = 0 if mask.causal else mask.window_right
    if right != UNLIMITED:
        visible &= key <= place + right
    if mask.window_left != UNLIMITED:
        visible &= key >= place - mask.window_left
    if mask.attention_chunk:
        visible &= key // mask.attention_chunk == place // mask.attention_chunk
    return visible[None, None, None]


def _chunks(x: Array, k: Array) -> tuple[Array, Array]:
    """x (batch, seqlen_q, heads, n) as float32 (chunks, batch, kv_heads, group, rows, n), and each chunk's first query.

    The last chunk is filled up with zeros.
    """
    batch, seqlen_q, heads, n = x.shape
    seqlen_k, kv_heads = k.shape[1:3]
    rows = min(seqlen_q, max(1, CHUNK_SCORES // (batch * heads * seqlen_k)))
    count = -(-seqlen_q // rows)
    grouped = x.swapaxes(1, 2).astype(jnp.float32).reshape(batch, kv_heads, heads // kv_heads, seqlen_q, n)
    return _split(grouped, count, rows), rows * jnp.arange(count)


def _split(x: Array, count: int, rows: int) -> Array:
    """(batch, kv_heads, group, seqlen_q, n) in ``count`` chunks of ``rows``, filled up with zeros."""
    padding = count * rows - x.shape[3]
    padded = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, padding), (0, 0)))
    return jnp.moveaxis(padded.reshape(*x.shape[:3], count, rows, x.shape[4]), 3, 0)


def _joined(x: Array, seqlen_q: int) -> Array:
    """What ``_split`` splits."""
    joined = jnp.moveaxis(x, 0, 3)
    return joined.reshape(*joined.shape[:3], -1, joined.shape[5])[:, :, :, :seqlen_q]


def _as_rows(x: Array, dtype: jnp.dtype) -> Array:
    """(batch, kv_heads, group, seqlen_q, n) as (batch, seqlen_q, heads, n) of ``dtype``."""
    return x.reshape(x.shape[0], -1, *x.shape[3:]).swapaxes(1, 2).astype(dtype)


def _product(subscripts: str, a: Array, b: Array) -> Array:
    # By default a GPU or a TPU multiplies float32 with fewer bits.
    return jnp.einsum(subscripts, a, b, precision=jax.lax.Precision.HIGHEST)
