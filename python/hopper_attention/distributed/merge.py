"""Partial results of attention, added up by their LSE as they come."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from hopper_attention.launch.merge import merge
from hopper_attention.reference.tiles import Span


class Merged:
    """Attention to all keys that were added so far.

    Attributes:
        out: (batch, rows, heads, head_dim_v), 0 for rows that saw no key.
        lse: float32 (batch, heads, rows), natural log, -inf for these.
    """

    def __init__(self, out: Tensor, lse: Tensor, dtype: torch.dtype = torch.float32) -> None:
        """``out`` of any float dtype and ``lse``: those of the first part, of all rows.

        Sums are kept in ``dtype``. In 16 bits they take half the memory and are rounded at every ``add``, which is as
        exact as float32 for a single one. An ``out`` of this dtype is added to where it lies.
        """
        self.out = out.to(dtype)
        self.lse = lse.clone()

    @classmethod
    def empty(cls, q: Tensor, head_dim_v: int) -> Merged:
        """Without any keys, for q (batch, rows, heads, head_dim)."""
        batch, rows, heads, _ = q.shape
        out = torch.zeros(batch, rows, heads, head_dim_v, dtype=torch.float32, device=q.device)
        return cls(out, torch.full((batch, heads, rows), -math.inf, dtype=torch.float32, device=q.device))

    def add(self, rows: Span, out: Tensor, lse: Tensor) -> None:
        """The part of some more keys: ``out`` (batch, rows, heads, head_dim_v) and ``lse`` of these rows.

        With w = exp(lse) / (exp(lse) + exp(lse so far)) the output moves by the share w towards the part's. A part
        that has no keys for a row has an output of 0 there, and moves nothing. On a GPU one kernel does it.
        """
        here = slice(rows.start, rows.stop)
        so_far = self.lse[:, :, here]
        if out.is_cuda and merge(self.out[:, here], so_far, out, lse):
            return
        share = torch.sigmoid(lse - so_far).nan_to_num_(0.0)
        sums = self.out[:, here]
        sums.copy_(torch.lerp(sums.float(), out.float(), share.mT.unsqueeze(-1)))
        so_far.copy_(torch.logaddexp(so_far, lse))

    def add_sinks(self, sinks: Tensor, without: Iterable[Span] = ()) -> None:
        """The logits (heads,), which have no value: they take their share of the sum of every row but some."""
        logits = sinks.detach().float()[None, :, None]
        lse = torch.logaddexp(self.lse, logits)
        self.out.mul_(torch.exp(self.lse - lse).mT.unsqueeze(-1))
        for rows in without:
            lse[:, :, rows.start : rows.stop] = -math.inf
        self.lse = lse
