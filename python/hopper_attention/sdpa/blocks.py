"""Attention on a CPU by blocks of queries, each with all keys that it sees, out of torch's matrix products.

A block's scores are in memory whole, so its softmax takes one pass, and its products are large enough for oneDNN. Keys
that no query of a block sees are left out, which makes windows and chunks as cheap as they are short. All blocks of a
head follow each other, so that its keys stay in the caches of a core.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from hopper_attention.reference.tiles import LN_2, LOG2_E, Mask, Span, fold_heads, spans, unfold_heads
from hopper_attention.sdpa.products import (
    multiplies_bfloat16,
    rows_by_rows,
    weigh,
    weigh_columns,
)
from hopper_attention.sdpa.terms import Terms

SCORES = 2**19
"""Scores in memory at once for each thread: 2 MiB, what the caches of a core hold. With very many keys there are
more."""

MUCH_WORK = 2**23
"""Multiplications that take far longer than Python takes to ask for them."""

MOST_ROWS, LEAST_ROWS = 256, 16
"""Queries of a block, where there are as many; with several threads there may be twice as many."""

MOST_THREADS = 16
"""Threads that there is more in memory for."""

LARGEST_BY_SIGMOID = 64.0
"""Softcaps up to this come from a sigmoid, which torch computes six times as fast as a tanh. It is off by up to 2e-7 of
the cap."""

LARGEST_EXPONENT = 60.0
"""Scores in base 2 that are no larger than this, by their sizes, are exponentiated as they are: their sums are float32
that neither overflow nor lose a key, with up to 2^60 keys. Larger ones have the maximum of their row subtracted."""

GRID = 64
"""Keys of a block begin and end at multiples of this, so that its products have few different shapes."""


class Block(NamedTuple):
    """Queries, the keys that some of them see, and limits of the scores in parts of those keys.

    A limit is -inf for what is hidden, else inf.
    """

    rows: Span
    keys: Span
    limits: list[tuple[slice, Tensor]]


class Changed(NamedTuple):
    """Scores in base 2, and their slope under the softcap, where there is one and it is wanted."""

    scores: Tensor
    slope: Tensor | None


@dataclass(frozen=True, eq=False)
class Heads:
    """Folded heads of a problem, and what is done to their scores. "Heads" are those of K and V, of the whole batch.

    Attributes:
        mask, terms: of the problem.
        q: (heads, group, seqlen_q, head_dim), in its own dtype.
        k: (heads, seqlen_k, head_dim), in its own dtype, or of some heads ``widened``.
        slopes: (heads, group, 1, 1) or None.
    """

    mask: Mask
    terms: Terms
    q: Tensor
    k: Tensor
    slopes: Tensor | None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, terms: Terms) -> Heads:
        """Of (batch, seqlen, heads, head_dim)."""
        kv_heads, slopes = k.shape[2], terms.alibi_slopes
        if slopes is not None:
            slopes = slopes.float().expand(q.shape[0], -1).reshape(q.shape[0] * kv_heads, -1, 1, 1)
        mask = Mask(q.shape[1], k.shape[1], terms.causal, *terms.sides)
        return cls(mask, terms, fold_heads(q, kv_heads, q.dtype).flatten(0, 1), fold_keys(k, k.dtype), slopes)

    @property
    def group(self) -> int:
        return self.q.shape[1]

    def blocks(self) -> list[Block]:
        """All blocks with keys. Rows of no block see none."""
        seqlen_q, seqlen_k = self.mask.seqlen_q, self.mask.seqlen_k
        seen, threads = self.mask.spec.most_keys(seqlen_k), threads_at_work()
        # A block of few queries computes few scores that its window hides.
        most = min(MOST_ROWS * min(threads, 2), max(2 * GRID, seen))
        rows = max(LEAST_ROWS, min(most, SCORES * threads // (self.group * seen)))
        known: dict[tuple[int, ...], Tensor | None] = {}
        found = []
        for own in spans(0, seqlen_q, rows):
            for keys in self.mask.key_tiles(own, seqlen_k):
                begin, end = keys.start - keys.start % GRID, min(seqlen_k, -(-keys.stop // GRID) * GRID)
                whole = Span(begin, end)
                found.append(Block(own, whole, list(self._limits(own, whole, known))))
        return found

    def _limits(
        self, rows: Span, keys: Span, known: dict[tuple[int, ...], Tensor | None]
    ) -> Iterator[tuple[slice, Tensor]]:
        """``known`` are those of other blocks: they are alike where keys lie alike to queries, and those to chunks."""
        chunk, offset = self.terms.sides[2], self.mask.seqlen_k - self.mask.seqlen_q
        in_chunk = (rows.start + offset) % chunk if chunk > 0 else 0
        for part in spans(*keys, MOST_ROWS):
            sizes = rows.stop - rows.start, part.stop - part.start
            where = *sizes, part.start - rows.start, in_chunk
            if where not in known:
                visible = self.mask.visible(rows, part, self.group, self.q.device)
                known[where] = None if visible is None else torch.where(visible, math.inf, -math.inf)
            limits = known[where]
            if limits is not None:
                yield slice(part.start - keys.start, part.stop - keys.start), limits

    def at_once(self, blocks: Sequence[Block]) -> list[slice]:
        """The heads, each alone where that is much work, else several together."""
        together = min((self._together(block) for block in blocks), default=1)
        return [span.slice for span in spans(0, self.k.shape[0], together)]

    def _together(self, block: Block) -> int:
        a_head = self.group * (block.rows.stop - block.rows.start) * (block.keys.stop - block.keys.start)
        is_much = a_head * self.k.shape[2] >= MUCH_WORK
        return 1 if is_much else max(1, SCORES * threads_at_work() // a_head)

    def some(self, heads: slice) -> Heads:
        """Some of them."""
        slopes = None if self.slopes is None else self.slopes[heads]
        return replace(self, q=self.q[heads], k=widened(self.k[heads]), slopes=slopes)

    @property
    def are_small(self) -> bool:
        """Whether no score, in base 2, is larger than ``LARGEST_EXPONENT`` or below its negative, by the lengths of
        queries and keys or by the softcap."""
        if self.slopes is not None:
            return False
        if 0.0 < self.terms.softcap * LOG2_E <= LARGEST_EXPONENT:
            return True
        lengths = (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax() for x in (self.q, self.k))
        return math.prod(float(x) for x in lengths) * abs(self.terms.scale) * LOG2_E <= LARGEST_EXPONENT

    def scores(self, block: Block, wants_slope: bool = False) -> Changed:
        """(heads, group * rows, keys), with -inf for what is hidden."""
        slope, softcap = None, self.terms.softcap
        is_changed = bool(softcap) or self.slopes is not None
        factor = self.terms.scale * (1.0 if is_changed else LOG2_E)
        # In float32 by blocks: a copy of the whole would cost more in memory than in time.
        own = rows_of(self.q, block).float() * factor
        x = rows_by_rows(own, self.k[:, block.keys.slice].float())
        if softcap:
            x = tanh_of_share(x, softcap)
            slope = 1.0 - x.square() if wants_slope else None
            x.mul_(softcap if self.slopes is not None else softcap * LOG2_E)
        if self.slopes is not None:
            x.sub_(self._bias(self.slopes, block)).mul_(LOG2_E)
        for part, limits in block.limits:
            x[..., part].clamp_(max=limits)
        return Changed(x, slope)

    def _bias(self, slopes: Tensor, block: Block) -> Tensor:
        # Not on the default device, which may be another one.
        rows, keys = (torch.arange(*part, device="cpu") for part in (block.rows, block.keys))
        own = rows[:, None] + (self.mask.seqlen_k - self.mask.seqlen_q)
        return (slopes * (own - keys).abs().float()).flatten(1, 2)


def rows_of(folded: Tensor, block: Block) -> Tensor:
    """(heads, group, seqlen_q, columns) -> (heads, group * rows, columns)."""
    return folded[:, :, block.rows.slice].flatten(1, 2)


def widened(x: Tensor) -> Tensor:
    """In float32 for all blocks, where that is no more than the scores of one: a copy of many heads or keys would cost
    more in memory than in time."""
    return x.float() if x.numel() <= SCORES else x


def threads_at_work() -> int:
    """Threads that share out each operation. They wait for each other at its end, so that it must be worth while."""
    return min(torch.get_num_threads(), MOST_THREADS)


def tanh_of_share(x: Tensor, softcap: float) -> Tensor:
    """tanh(x / softcap), in place: 2 sigmoid(2 x / softcap) - 1."""
    if softcap > LARGEST_BY_SIGMOID:
        return x.div_(softcap).tanh_()
    return x.mul_(2.0 / softcap).sigmoid_().mul_(2.0).sub_(1.0)


def fold_keys(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(batch, seqlen, heads, columns) -> contiguous (batch * heads, seqlen, columns)."""
    return fold_heads(x, x.shape[2], dtype).flatten(0, 2)


def weighed_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what a tensor of ``dtype`` is multiplied with P and dS."""
    return dtype if dtype == torch.bfloat16 and multiplies_bfloat16() else torch.float32


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """out and LSE as of ``attention.attend``, without the sinks."""
    batch, seqlen_q, all_heads, _ = q.shape
    problem = Heads.of(q, k, terms)
    values, rounded = fold_keys(v, v.dtype), weighed_dtype(v.dtype)
    rows = problem.q.shape[:3]
    out = q.new_zeros(*rows, v.shape[3])
    lse = q.new_full(rows, -math.inf, dtype=torch.float32)
    blocks = problem.blocks()
    for heads in problem.at_once(blocks):
        some, own_values = problem.some(heads), values[heads].to(rounded)
        are_small = some.are_small
        for block in blocks:
            p, own_lse = softmax(some.scores(block).scores, are_small)
            group = problem.group, -1
            part = weigh(p, own_values[:, block.keys.slice])
            out[heads, :, block.rows.slice] = part.unflatten(1, group)
            lse[heads, :, block.rows.slice] = own_lse.unflatten(1, group)
    whole = out.unflatten(0, (batch, -1))
    return unfold_heads(whole, q.dtype), lse.reshape(batch, all_heads, seqlen_q)


def softmax(x: Tensor, are_small: bool) -> tuple[Tensor, Tensor]:
    """P, in the place of scores (heads, rows, keys) in base 2, and the LSE (heads, rows). Rows without keys are 0."""
    if are_small:
        row_sum = x.exp2_().sum(-1, keepdim=True)
        log2_sum = row_sum.log2()
    else:
        row_max = x.amax(-1, keepdim=True)
        row_sum = x.sub_(row_max.masked_fill(row_max == -math.inf, 0.0)).exp2_().sum(-1, keepdim=True)
        log2_sum = row_max + row_sum.log2()
    x.mul_(row_sum.masked_fill(row_sum == 0.0, 1.0).reciprocal())
    return x, log2_sum.squeeze(-1) * LN_2


def differentiate_in_blocks(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, terms: Terms
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients as of ``attention.differentiate``.

    With P = exp(S - LSE) and D = rowsum(dO * O) - dLSE, dS = P * (dO V^T - D) by the slope of the softcap; then
    dV = P^T dO, dQ = scale * dS K and dK = scale * dS^T Q (FlashAttention-3, appendix B.1).
    """
    batch, kv_heads = q.shape[0], k.shape[2]
    problem = Heads.of(q, k, terms)
    rounded = weighed_dtype(q.dtype)
    do, o = (fold_heads(x, kv_heads, x.dtype).flatten(0, 1) for x in (dout, out))
    values = fold_keys(v, v.dtype)
    delta = torch.mul(do.float(), o).sum(-1, keepdim=True)
    if dlse is not None:
        delta -= dlse.reshape(delta.shape)
    # +inf in place of the LSE of a row without keys makes its P zero instead of NaN.
    lse_log2 = (lse.float() * LOG2_E).masked_fill(lse == -math.inf, math.inf).reshape(delta.shape)
    dq = problem.q.new_zeros(problem.q.shape, dtype=torch.float32)
    # (heads, columns, seqlen_k): a product in this order copies no P and no dS.
    dk, dv = (x.new_zeros(x.mT.shape, dtype=torch.float32) for x in (problem.k, values))
    blocks = problem.blocks()
    for heads in problem.at_once(blocks):
        some, own_values = problem.some(heads), widened(values[heads])
        rounded_keys = problem.k[heads].to(rounded)
        of_heads = tuple(x[heads] for x in (problem.q, do, delta, lse_log2))
        for block in blocks:
            keys = block.keys.slice
            tile_q, tile_do, tile_delta, tile_lse = (rows_of(x, block) for x in of_heads)
            x, slope = some.scores(block, wants_slope=True)
            p = x.sub_(tile_lse).exp2_()
            ds = rows_by_rows(tile_do.float(), own_values[:, keys].float()).sub_(tile_delta).mul_(p)
            if slope is not None:
                ds.mul_(slope)
            dv[heads, :, keys] += weigh_columns(p, tile_do.to(rounded))
            dk[heads, :, keys] += weigh_columns(ds, tile_q.to(rounded))
            of_rows = weigh(ds, rounded_keys[:, keys])
            dq[heads, :, block.rows.slice] = of_rows.unflatten(1, (problem.group, -1)).float()
    for x in (dq, dk):
        x.mul_(terms.scale)
    whole = (x.unflatten(0, (batch, -1)) for x in (dq, dk.mT.unsqueeze(1), dv.mT.unsqueeze(1)))
    of_q, of_k, of_v = (unfold_heads(x, q.dtype) for x in whole)
    return of_q, of_k, of_v
