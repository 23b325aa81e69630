"""Ulysses attention: ranks exchange their rows of all heads for all rows of their heads, attend, and exchange back.

The attention between the two exchanges is that of one GPU, whatever it can do. It needs as many heads of Q as ranks, or
a multiple; key/value heads that are fewer than the ranks go to each rank that reads them (DeepSpeed-Ulysses).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hopper_attention.distributed.exchange import Ranks, all_to_all
from hopper_attention.distributed.layout import shard, unshard


def check_heads(heads: int, kv_heads: int, size: int) -> None:
    """Raise ValueError unless the heads can be shared out."""
    if heads % size or (kv_heads % size and size % kv_heads):
        raise ValueError(
            f"q has {heads} heads and k {kv_heads}, allowed for ulysses attention on {size} ranks: multiples of {size} "
            f"in q, and in k multiples or divisors of {size}; use method='ring', or a mesh with fewer ranks for ulysses"
        )


def _to_heads(ranks: Ranks, x: Tensor, layout: str) -> Tensor:
    """(batch, rows, heads, d) -> (batch, positions, heads / size, d), of the heads of this rank."""
    by_rank = x.unflatten(2, (ranks.size, -1)).movedim(2, 0).contiguous()
    received, transfer = all_to_all(ranks, by_rank, "heads")
    transfer.wait()
    return unshard(received.movedim(0, 1).flatten(1, 2), ranks.size, layout).contiguous()


def _to_rows(ranks: Ranks, x: Tensor, layout: str) -> Tensor:
    """The inverse: (batch, positions, heads / size, d) -> (batch, rows, heads, d)."""
    # Stacking keeps an order of strides that may not be that of rows, as of shards of two rows of an LSE.
    by_rank = torch.stack([shard(x, r, ranks.size, layout) for r in range(ranks.size)]).contiguous()
    received, transfer = all_to_all(ranks, by_rank, "rows")
    transfer.wait()
    return received.movedim(0, 2).flatten(2, 3).contiguous()


class _ToHeads(torch.autograd.Function):
    """``_to_heads``, whose gradient is ``_to_rows``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, layout: str) -> Tensor:
        ctx.ranks, ctx.layout = ranks, layout
        return _to_heads(ranks, x, layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _to_rows(ctx.ranks, grads[0], ctx.layout), None, None


class _ToRows(torch.autograd.Function):
    """``_to_rows``, whose gradient is ``_to_heads``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, layout: str) -> Tensor:
        ctx.ranks, ctx.layout = ranks, layout
        return _to_rows(ranks, x, layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _to_heads(ctx.ranks, grads[0], ctx.layout), None, None


def rows_to_heads(
    ranks: Ranks, q: Tensor, k: Tensor, v: Tensor, layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V of all positions and of the heads of this rank, differentiable; ``check_heads`` holds of them."""
    copies = max(1, ranks.size // k.shape[2])
    if copies > 1:
        k, v = (x.repeat_interleave(copies, 2) for x in (k, v))
    q, k, v = (_ToHeads.apply(x, ranks, layout) for x in (q, k, v))
    return q, k, v


def heads_to_rows(ranks: Ranks, out: Tensor, lse: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """out (batch, positions, heads / size, d) and lse (batch, heads / size, positions) of all heads and local rows."""
    rows: Tensor = _ToRows.apply(out, ranks, layout)
    lse_rows: Tensor = _ToRows.apply(lse.mT.unsqueeze(-1), ranks, layout)
    return rows, lse_rows.squeeze(-1).mT


def heads_of(ranks: Ranks, sinks: Tensor) -> Tensor:
    """The sinks of the heads of this rank."""
    return sinks.unflatten(0, (ranks.size, -1))[ranks.rank]
