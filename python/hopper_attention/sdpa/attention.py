"""Attention of dense tensors by torch's kernels, with this package's conventions.

Those of torch's fused attention differ: its causal mask is aligned top-left, a query without a key gives NaN, and there
are no sinks. So a call is cut into pieces that torch computes as we do, which are joined by their log-sum-exps. On a
CPU the products of ``blocks`` serve what fused attention lacks, and large problems where they are faster.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hopper_attention.autocast import ignores_autocast
from hopper_attention.reference.tiled import tiled_forward
from hopper_attention.reference.tiled_backward import tiled_backward
from hopper_attention.sdpa.bands import Bands, attend_in_bands, differentiate_in_bands, suits_bands
from hopper_attention.sdpa.blocks import attend_in_blocks, differentiate_in_blocks
from hopper_attention.sdpa.operators import COLUMN_STEP, Operators, operators_for
from hopper_attention.sdpa.products import LEAST_WORK, has_onednn, has_tiles
from hopper_attention.sdpa.terms import Terms


class Piece(NamedTuple):
    """Queries from ``first_row`` on, and keys from ``first_key`` up to ``last_key``.

    ``causal`` is a mask of as many queries as keys.
    """

    first_row: int
    first_key: int
    last_key: int
    causal: bool

    @property
    def rows(self) -> slice:
        return slice(self.first_row, None)

    @property
    def keys(self) -> slice:
        return slice(self.first_key, self.last_key)


def pieces_of(seqlen_q: int, seqlen_k: int, causal: bool) -> tuple[Piece, ...]:
    """The pieces of a problem with queries and keys. No piece has the queries that see no key."""
    shift = seqlen_k - seqlen_q
    if not causal or seqlen_q == 1:
        return (Piece(0, 0, seqlen_k, False),)
    if shift <= 0:
        return (Piece(-shift, 0, seqlen_k, True),)
    return Piece(0, 0, shift, False), Piece(0, shift, seqlen_k, True)


@torch.no_grad()
@ignores_autocast
def attend(q: Tensor, k: Tensor, v: Tensor, terms: Terms, wants_lse: bool = True) -> tuple[Tensor, Tensor]:
    """:func:`hopper_attention.reference.tiled_forward` by torch's kernels.

    Args:
        q: (batch, seqlen_q, heads, head_dim), float16 or bfloat16; on a CPU also float32.
        k, v: (batch, seqlen_k, kv_heads, head_dim) and (..., head_dim_v).
        terms: must be plain but on a CPU.
        wants_lse: False allows an LSE that is off by up to 1e-4.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v) and the LSE, float32 (batch, heads, seqlen_q), contiguous. A query that
        sees no key gives 0 and its sink, or -inf.
    """
    has_work = 0 not in (*q.shape, k.shape[1])
    if has_work and are_unusable(q, k, v):
        return tiled_forward(q, k, v, **terms.options, sinks=terms.sinks)
    if has_work and q.shape[1] == 1 and terms.alibi_slopes is None:
        # A window of one query is a slice of the keys.
        seen = terms.keys_of_one(k.shape[1])
        k, v, terms = k[:, seen], v[:, seen], terms.without_mask
        has_work = k.shape[1] > 0
    bands = find_bands(q, k, terms) if has_work else None
    if bands is not None:
        operators = operators_for(q, k, v, False, wants_output_alone=not wants_lse)
        out, lse = attend_in_bands(q, k, v, terms, bands, operators)
    elif has_work and suits_blocks(q, k, terms):
        out, lse = attend_in_blocks(q, k, v, terms)
    else:
        out, lse = _attend_in_pieces(q, k, v, terms, wants_lse)
    if terms.sinks is not None:
        with_sinks = torch.logaddexp(lse, terms.sinks.float()[:, None])
        # A row without a key has a LSE of -inf, and may have a sink of -inf too.
        shares = (lse - with_sinks).masked_fill(lse == -math.inf, -math.inf).exp()
        out.mul_(shares.mT[..., None])
        lse = with_sinks
    return out, lse


def find_bands(q: Tensor, k: Tensor, terms: Terms) -> Bands | None:
    """Those of a window, where torch's fused attention is the fastest that this CPU has."""
    is_fused = q.device.type == "cpu" and (has_tiles() or not has_onednn())
    return suits_bands(q, k, terms) if is_fused else None


def suits_blocks(q: Tensor, k: Tensor, terms: Terms) -> bool:
    """Whether products by blocks serve a problem, as nothing else can or as they are faster."""
    if not terms.is_plain:
        return True
    _, seqlen_q, heads, columns = q.shape
    work = seqlen_q * heads // k.shape[2] * k.shape[1] * columns
    return q.device.type == "cpu" and has_onednn() and not has_tiles() and work >= LEAST_WORK


def _attend_in_pieces(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, wants_lse: bool
) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, width = k.shape[1], v.shape[3]
    out = q.new_zeros(batch, seqlen_q, heads, width)
    lse = q.new_full((batch, heads, seqlen_q), -math.inf, dtype=torch.float32)
    if 0 in (*q.shape, seqlen_k):
        return out, lse
    q, k, v, operators = _prepared(q, k, v, terms.causal, wants_output_alone=not wants_lse)
    for piece in pieces_of(seqlen_q, seqlen_k, terms.causal):
        part = q[:, :, piece.rows], k[:, :, piece.keys], v[:, :, piece.keys]
        _join(out, lse, piece, operators.attend(*part, piece.causal, terms.scale))
    return out, lse


def _join(out: Tensor, lse: Tensor, piece: Piece, results: tuple[Tensor, Tensor]) -> None:
    """Add a piece's results, (batch, heads, rows, columns) and (batch, heads, rows), to those of the pieces before."""
    part, own = results[0].transpose(1, 2)[..., : out.shape[3]], results[1]
    before = lse[:, :, piece.rows]
    if not piece.first_key:
        out[:, piece.rows], lse[:, :, piece.rows] = part, own
        return
    both = torch.logaddexp(before, own)
    shares = ((x - both).exp().mT[..., None] for x in (before, own))
    old, new = (share * x.float() for share, x in zip(shares, (out[:, piece.rows], part), strict=True))
    out[:, piece.rows], lse[:, :, piece.rows] = old + new, both


@torch.no_grad()
@ignores_autocast
def differentiate(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    terms: Terms,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`hopper_attention.reference.tiled_backward` by torch's kernels; sinks are in the LSE.

    Where torch has no backward pass that takes an LSE, or the gradient of an LSE, that one serves.

    Args:
        dout: gradient of out, (batch, seqlen_q, heads, head_dim_v).
        dlse: gradient of lse, (batch, heads, seqlen_q); None means zero.
        q, k, v: the inputs of the forward pass.
        out, lse: its results.
        terms: as there.

    Returns:
        dq, dk, dv with the shapes and dtype of q, k, v, contiguous.
    """
    if 0 in (*out.shape, *k.shape):
        dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
        return dq, dk, dv
    if are_unusable(q, k, v):
        return tiled_backward(dout, dlse, q, k, v, out, lse, **terms.options)
    bands = find_bands(q, k, terms)
    if bands is not None or suits_blocks(q, k, terms):
        # A row without keys has no gradient, whatever is given for it.
        known = dlse if dlse is None else dlse.masked_fill(lse == -math.inf, 0.0)
        if not are_unusable(dout, *(() if known is None else (known,))):
            if bands is not None:
                operators = operators_for(q, k, v, False)
                return differentiate_in_bands(dout, known, q, k, v, out, lse, terms, bands, operators)
            return differentiate_in_blocks(dout, known, q, k, v, out, lse, terms)
    if not terms.is_plain:
        return tiled_backward(dout, dlse, q, k, v, out, lse, **terms.options)
    return _differentiate_in_pieces(dout, dlse, q, k, v, out, lse, terms)


def _differentiate_in_pieces(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, terms: Terms
) -> tuple[Tensor, Tensor, Tensor]:
    causal, softmax_scale = terms.causal, terms.scale
    columns = v.shape[3] + 1 if dlse is not None else 0
    wide_q, wide_k, wide_v, operators = _prepared(q, k, v, causal, columns)
    is_lse_taken = dlse is None or operators.dtype is not None
    if operators.differentiate is None or not is_lse_taken:
        return tiled_backward(dout, dlse, q, k, v, out, lse, **terms.options)
    dtype, width = wide_q.dtype, wide_q.shape[3]
    wide_dout, wide_out = (_heads_first(x, dtype, width) for x in (dout, out))
    # Where a score is not finite, P of torch is 0, and the gradients would be.
    wide_dout = wide_dout.masked_fill((lse.isnan() | (lse == math.inf))[..., None], math.nan)
    if dlse is not None:
        # The kernel takes rowsum(dO * O) from dO V^T. In a column where V is 0, this adds -dlse to the one alone.
        wide_dout[..., v.shape[3]], wide_out[..., v.shape[3]] = 1.0, -dlse
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (wide_q, wide_k, wide_v))
    for piece in pieces_of(q.shape[1], k.shape[1], causal):
        rows, keys = piece.rows, piece.keys
        of_rows = wide_out[:, :, rows], lse[:, :, rows].contiguous()
        inputs = wide_dout[:, :, rows], wide_q[:, :, rows], wide_k[:, :, keys], wide_v[:, :, keys]
        parts = operators.differentiate(*inputs, *of_rows, piece.causal, softmax_scale)
        for whole, span, part in zip((dq, dk, dv), (rows, keys, keys), parts, strict=True):
            whole[:, :, span] += part
    return tuple(  # type: ignore[return-value]  # Three: mypy does not count a generator.
        grad[..., : x.shape[3]].transpose(1, 2).to(x.dtype).contiguous()
        for grad, x in zip((dq, dk, dv), (q, k, v), strict=True)
    )


def are_unusable(*tensors: Tensor) -> bool:
    """Whether one of these has a NaN or an infinity, which torch's kernel for CPUs carries to queries that may not see
    it, or loses: with few keys it gives 0 where a score is NaN.

    Only of a CPU, as it would have to wait for a GPU.
    """
    if tensors[0].device.type != "cpu":
        return False
    # In one pass, and the largest of what has a NaN is NaN.
    return not all(math.isfinite(end.item()) for x in tensors if x.numel() for end in torch.aminmax(x))


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, columns: int = 0, wants_output_alone: bool = False
) -> tuple[Tensor, Tensor, Tensor, Operators]:
    """q, k and v as (batch, heads, seqlen, columns), and what computes them, of ``columns`` or more."""
    width = -(-max(q.shape[3], v.shape[3], columns) // COLUMN_STEP) * COLUMN_STEP
    of_q, of_k, of_v = (x.transpose(1, 2) for x in (q, k, v))
    operators = operators_for(of_q, of_k, of_v, causal, wants_output_alone)
    dtype = operators.dtype or q.dtype
    q, k, v = (_heads_first(x, dtype, width) for x in (q, k, v))
    return q, k, v, operators


def _heads_first(x: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    """(b, s, h, d) -> (b, h, s, width) in ``dtype``, filled up with zeros."""
    batch, seqlen, heads, columns = x.shape
    if columns == width:
        # A copy is contiguous, so that products are rounded alike whatever the strides were.
        return x.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format)
    wide = x.new_zeros(batch, heads, seqlen, width, dtype=dtype)
    wide[..., :columns] = x.transpose(1, 2)
    return wide
