"""Windows on a CPU by torch's fused attention, which has none: as a batch of bands, each some queries and their keys.

The queries from c on to 2c - 1 see, all in all, the same number of keys as the c before them, c keys further on. So
queries are cut into bands of c, and each has its own slice of K and V: a view of memory, as slices overlap. A mask says
which keys of the slice a query sees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from hopper_attention.reference.tiles import Mask
from hopper_attention.sdpa.operators import COLUMN_STEP, Operators
from hopper_attention.sdpa.terms import Terms

ROWS = 128
"""Queries of a band, for windows of 64 as of 256 keys."""

MOST_MASKED = 2**24
"""Scores of one head that the mask has an element for."""


@dataclass(frozen=True)
class Bands:
    """How a problem is cut.

    Attributes:
        seqlen_q, seqlen_k: its lengths.
        first: the key at which the slice of the first band begins; below 0 where that is before all keys.
        width: keys that a query sees where no end of the sequence is near.
        rows: queries of a band.
    """

    seqlen_q: int
    seqlen_k: int
    first: int
    width: int
    rows: int

    @classmethod
    def of(cls, seqlen_q: int, seqlen_k: int, terms: Terms) -> Bands | None:
        """None where bands are no way: without a window, or with one that is as long as the keys."""
        mask = Mask(seqlen_q, seqlen_k, terms.causal, *terms.sides)
        first, last = mask.reach
        width = last - first + 1
        if mask.spec.attention_chunk or not 0 < width < seqlen_k:
            return None
        return cls(seqlen_q, seqlen_k, first, width, min(ROWS, seqlen_q))

    @property
    def number(self) -> int:
        return -(-self.seqlen_q // self.rows)

    @property
    def span(self) -> int:
        """Keys of a slice."""
        return self.rows + self.width - 1

    @property
    def total(self) -> int:
        """Keys of all slices, each counted once."""
        return (self.number - 1) * self.rows + self.span

    def cut_rows(self, x: Tensor, kv_heads: int, dtype: torch.dtype, columns: int) -> Tensor:
        """(b, seqlen_q, h, d) -> (b * kv_heads, number, group * rows, columns), filled up with zeros."""
        batch, _, heads, own = x.shape
        filled = pad(x.to(dtype), (0, columns - own, 0, 0, 0, self.number * self.rows - self.seqlen_q))
        cut = filled.view(batch, self.number, self.rows, kv_heads, heads // kv_heads, columns)
        return cut.permute(0, 3, 1, 4, 2, 5).reshape(batch * kv_heads, self.number, -1, columns)

    def join_rows(self, x: Tensor, batch: int, group: int) -> Tensor:
        """(b * kv_heads, number, group * rows, columns) -> (b, seqlen_q, h, columns)."""
        kv_heads, columns = x.shape[0] // batch, x.shape[3]
        cut = x.view(batch, kv_heads, self.number, group, self.rows, columns).permute(0, 2, 4, 1, 3, 5)
        return cut.reshape(batch, self.number * self.rows, kv_heads * group, columns)[:, : self.seqlen_q]

    def cut_keys(self, x: Tensor, dtype: torch.dtype, columns: int) -> Tensor:
        """(b, seqlen_k, kv_heads, d) -> (b * kv_heads, number, span, columns), whose slices share their memory."""
        behind = self.first + self.total - self.seqlen_k
        sides = 0, columns - x.shape[3], -self.first, behind
        filled = pad(x.transpose(1, 2).to(dtype), sides).contiguous().flatten(0, 1)
        step = self.rows * columns
        return filled.as_strided(
            (filled.shape[0], self.number, self.span, columns), (filled.stride(0), step, columns, 1)
        )

    def add_keys(self, x: Tensor, batch: int) -> Tensor:
        """(b * kv_heads, number, span, columns) -> (b, seqlen_k, kv_heads, columns): sums of what slices have."""
        heads, _, _, columns = x.shape
        steps = -(-self.span // self.rows)
        parts = pad(x, (0, 0, 0, steps * self.rows - self.span)).unflatten(2, (steps, self.rows))
        whole = x.new_zeros(heads, self.number + steps - 1, self.rows, columns)
        for step in range(steps):
            whole[:, step : step + self.number] += parts[:, :, step]
        keys = whole.flatten(1, 2)
        behind = self.seqlen_k - self.first - keys.shape[1]
        return pad(keys, (0, 0, self.first, behind)).unflatten(0, (batch, -1)).transpose(1, 2)

    def mask(self, group: int, dtype: torch.dtype) -> Tensor:
        """(1, number, group * rows, span), added to scores: 0 or -inf. A query that sees no key sees all here."""
        # Not on the default device, which may be another one.
        rows, j = (torch.arange(n, device="cpu") for n in (self.rows, self.span))
        i, bands = rows[:, None], torch.arange(self.number, device="cpu")[:, None, None]
        keys = bands * self.rows + self.first + j
        seen = (j >= i) & (j < i + self.width) & (keys >= 0) & (keys < self.seqlen_k)
        hidden = ~(seen | ~seen.any(-1, keepdim=True))
        added = torch.zeros(hidden.shape, dtype=dtype, device="cpu").masked_fill_(hidden, -math.inf)
        return added.repeat(1, group, 1)[None]

    def blind_rows(self) -> Tensor:
        """Boolean (seqlen_q): the queries that see no key."""
        begin = torch.arange(self.seqlen_q, device="cpu") + self.first
        return (begin >= self.seqlen_k) | (begin + self.width <= 0)


def suits_bands(q: Tensor, k: Tensor, terms: Terms) -> Bands | None:
    """The bands of a problem of (b, s, h, d), if torch's fused attention can do it by them."""
    bands = Bands.of(q.shape[1], k.shape[1], terms)
    group = q.shape[2] // k.shape[2]
    if bands is None or not terms.has_plain_scores:
        return None
    masked = bands.number * bands.rows * bands.span * group
    return bands if masked <= MOST_MASKED else None


def attend_in_bands(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, bands: Bands, operators: Operators
) -> tuple[Tensor, Tensor]:
    """out and lse as of ``attention.attend``."""
    batch, _, heads, _ = q.shape
    kv_heads, dtype = k.shape[2], operators.dtype or q.dtype
    columns = columns_of(q.shape[3], v.shape[3])
    rows = bands.cut_rows(q, kv_heads, dtype, columns)
    keys, values = (bands.cut_keys(x, dtype, columns) for x in (k, v))
    mask = bands.mask(heads // kv_heads, dtype)
    part, own = operators.attend(rows, keys, values, False, terms.scale, mask)
    out = bands.join_rows(part, batch, heads // kv_heads)[..., : v.shape[3]]
    lse = bands.join_rows(own[..., None], batch, heads // kv_heads)[..., 0].transpose(1, 2)
    blind = bands.blind_rows()
    out = out.to(q.dtype).masked_fill(blind[:, None, None], 0.0)
    return out.contiguous(), lse.masked_fill(blind, -math.inf).contiguous()


def differentiate_in_bands(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    terms: Terms,
    bands: Bands,
    operators: Operators,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv as of ``attention.differentiate``; of operators that have a backward pass."""
    assert operators.differentiate is not None and operators.dtype is not None
    batch, kv_heads, dtype, width = q.shape[0], k.shape[2], operators.dtype, v.shape[3]
    group = q.shape[2] // kv_heads
    columns = columns_of(q.shape[3], width + (dlse is not None))
    rows, do, o = (bands.cut_rows(x, kv_heads, dtype, columns) for x in (q, dout, out))
    # exp(score - inf) is 0: rows without a key have no part in a gradient, whatever their sinks are.
    blind = bands.blind_rows()
    known = lse.masked_fill(blind, math.inf)
    own = bands.cut_rows(known.mT[..., None], kv_heads, dtype, 1)[..., 0]
    if dlse is not None:
        # As in ``attention``: a column where V is 0 adds -dlse to rowsum(dO * O).
        do[..., width] = 1.0
        o[..., width] = -bands.cut_rows(dlse.mT[..., None], kv_heads, dtype, 1)[..., 0]
    keys, values = (bands.cut_keys(x, dtype, columns) for x in (k, v))
    mask = bands.mask(group, dtype)
    dq, dk, dv = operators.differentiate(do, rows, keys, values, o, own, False, terms.scale, mask)
    of_q = bands.join_rows(dq, batch, group)[..., : q.shape[3]].masked_fill(blind[:, None, None], 0.0)
    of_k = bands.add_keys(dk, batch)[..., : k.shape[3]]
    of_v = bands.add_keys(dv, batch)[..., :width]
    return of_q.to(q.dtype).contiguous(), of_k.to(k.dtype).contiguous(), of_v.to(v.dtype).contiguous()


def columns_of(*columns: int) -> int:
    """As many as these, filled up."""
    return -(-max(columns) // COLUMN_STEP) * COLUMN_STEP
