"""Ulysses attention: ranks exchange their rows of all heads for all rows of their heads, attend, and exchange back.

The attention between the two exchanges is that of one GPU, whatever it can do. It needs as many heads of Q as ranks, or
a multiple; key/value heads that are fewer than the ranks go to each rank that reads them (DeepSpeed-Ulysses).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hopper_attention.distributed.attend import Call
from hopper_attention.distributed.division import Division, divide
from hopper_attention.distributed.exchange import Ranks
from hopper_attention.distributed.heads import HeadExchange, MessageExchange
from hopper_attention.distributed.merge import Merged
from hopper_attention.distributed.over_peers import (
    AttentionOverPeers,
    exchanged,
    may_take_their_places,
    whole_mask,
)
from hopper_attention.distributed.parts_over_peers import AttentionInParts
from hopper_attention.distributed.peers import PeerMemory, share_memory
from hopper_attention.distributed.pieces import Problem
from hopper_attention.distributed.pushed import LEAST_BYTES, MOST_BYTES, PushedExchange
from hopper_attention.fp8 import flash_attn_fp8_func
from hopper_attention.plain_calls import needs_gradient
from hopper_attention.quantized import Fp8Quantization


def check_heads(heads: int, kv_heads: int, size: int) -> None:
    """Raise ValueError unless the heads can be shared out."""
    if heads % size or (kv_heads % size and size % kv_heads):
        raise ValueError(
            f"q has {heads} heads and k {kv_heads}, allowed for ulysses attention on {size} ranks: multiples of {size} "
            f"in q, and in k multiples or divisors of {size}; use method='ring', or a mesh with fewer ranks for ulysses"
        )


@lru_cache(maxsize=64)
def _pushes_between(group: dist.ProcessGroup, ranks: Ranks, device: torch.device) -> PushedExchange | str:
    memory = share_memory(ranks, device, LEAST_BYTES)
    if isinstance(memory, str):
        return memory

    def larger(nbytes: int) -> PeerMemory:
        made = share_memory(ranks, device, nbytes)
        if isinstance(made, str):
            raise RuntimeError(f"no {nbytes} bytes that ranks can read of each other: {made}")
        return made

    return PushedExchange(ranks, memory, larger)


def exchange_for(ranks: Ranks, nbytes: int, device: torch.device) -> HeadExchange:
    """What carries an exchange in which a rank gives ``nbytes`` at most.

    Peer memory where the ranks have it and the tensors are short; it is asked for once a group, by all ranks. Otherwise
    messages, as with a time-out of the call, since the host cannot wait for writes, and under CUDA graph capture, since
    a replay would not take turns.
    """
    is_replayed = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if nbytes > MOST_BYTES or ranks.timeout or is_replayed or ranks.size == 1:
        return MessageExchange(ranks)
    found = _pushes_between(ranks.group, ranks, device)
    return MessageExchange(ranks) if isinstance(found, str) else found


class _ToHeads(torch.autograd.Function):
    """``HeadExchange.to_heads``, whose gradient is ``to_rows``."""

    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, layout: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.layout = exchange, layout
        return tuple(exchange.to_heads(tensors, layout))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.exchange.to_rows(grads, ctx.layout)


class _ToRows(torch.autograd.Function):
    """``HeadExchange.to_rows``, whose gradient is ``to_heads``."""

    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, layout: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.layout = exchange, layout
        return tuple(exchange.to_rows(tensors, layout))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.exchange.to_heads(grads, ctx.layout)


class Fp8Options(NamedTuple):
    """Of attention in FP8, beside those of every call."""

    quantization: Fp8Quantization
    causal: bool


class Heads:
    """The heads of this rank, of one call: how they get here, and how results get back."""

    def __init__(self, ranks: Ranks, layout: str, nbytes: int, device: torch.device) -> None:
        """``nbytes``: that this rank gives at most in an exchange."""
        self.ranks = ranks
        self.layout = layout
        self.exchange = exchange_for(ranks, nbytes, device)

    @classmethod
    def of(cls, ranks: Ranks, q: Tensor, k: Tensor, v: Tensor, layout: str) -> Heads:
        copies = copies_of_keys(ranks, k)
        given, of_out = q.nbytes + copies * (k.nbytes + v.nbytes), q.nbytes // q.shape[3] * v.shape[3]
        return cls(ranks, layout, max(given, of_out), q.device)

    def gather(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V of all positions and of the heads of this rank, differentiable; ``check_heads`` holds of them."""
        q, k, v = _ToHeads.apply(self.exchange, self.layout, *self._as_many_keys(q, k, v))
        return q, k, v

    def _as_many_keys(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """K and V with a head for each rank at least."""
        copies = copies_of_keys(self.ranks, k)
        if copies > 1:
            k, v = (x.repeat_interleave(copies, 2) for x in (k, v))
        return q, k, v

    def attend(
        self, tensors: tuple[Tensor, Tensor, Tensor], problem: Problem, call: Call, wants_lse: bool
    ) -> tuple[Tensor, Tensor | None] | None:
        """out and lse of the local rows; None where messages carry the heads."""
        if not isinstance(self.exchange, PushedExchange):
            return None
        qkv, is_kept = self._as_many_keys(*tensors), needs_gradient(*tensors)
        given = *qkv, self.exchange, problem, call
        # All heads at once take less time.
        parts = parts_of(qkv, self.ranks.size, problem, call, is_kept) if call.is_least else None
        if parts is None:
            return _with_lse(AttentionOverPeers.apply(*given, wants_lse, is_kept))
        return _with_lse(AttentionInParts.apply(*given, parts, wants_lse, is_kept))

    def attend_in_fp8(
        self,
        tensors: tuple[Tensor, Tensor, Tensor],
        sinks: Tensor | None,
        call: Call,
        options: Fp8Options,
        wants_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """out and lse of the local rows, of 16-bit tensors that become e4m3 where they are attended to. No gradient. An
        lse that sinks alone ask for is that of the fast kernel."""
        exchange, given = self.exchange, self._as_many_keys(*tensors)
        if isinstance(exchange, PushedExchange):
            q, k, v = exchange.lend_heads(given, self.layout).tensors
        else:
            q, k, v = exchange.to_heads(given, self.layout)
        has_lse, own_sinks = wants_lse or sinks is not None, self.of_sinks(sinks)
        quantized: dict[str, Any] = {"quantization": options.quantization, "backend": call.backend}
        quantized["exact_lse"] = wants_lse
        found = flash_attn_fp8_func(q, k, v, call.softmax_scale, options.causal, has_lse, **quantized)
        if isinstance(found, Tensor):
            return _with_lse(exchange.to_rows([found], self.layout))
        whole = Merged(*found, found[0].dtype)
        if own_sinks is not None:
            whole.add_sinks(own_sinks)
        return _with_lse(exchange.to_rows(exchanged(whole.out, whole.lse, wants_lse), self.layout))

    def give_back(self, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """out (batch, positions, heads / size, d) and lse (batch, heads / size, positions) of all heads, local rows."""
        tensors = [out] if lse is None else exchanged(out, lse, True)
        return _with_lse(_ToRows.apply(self.exchange, self.layout, *tensors))

    def of_sinks(self, sinks: Tensor | None) -> Tensor | None:
        """Those of the heads of this rank."""
        return None if sinks is None else sinks.unflatten(0, (self.ranks.size, -1))[self.ranks.rank]


def parts_of(
    qkv: tuple[Tensor, Tensor, Tensor], ranks: int, problem: Problem, call: Call, is_kept: bool
) -> Division | None:
    """The parts in which heads over peer memory may go, forward and backward; None where there are none. ``is_kept`` as
    of ``AttentionOverPeers``."""
    q, k, _ = qkv
    parts = divide(k.shape[2] // ranks)
    if parts is None or not q.numel() or not k.numel():
        return None
    share = parts.backward.part(0)
    sizes = ((x.shape[0], ranks * x.shape[1], share.of(x.shape[2] // ranks), x.shape[3]) for x in qkv)
    shapes = tuple(map(torch.Size, sizes))
    may_be = not is_kept or may_take_their_places(shapes, q, whole_mask(problem), call)
    return parts if may_be else None


def _with_lse(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """out, and lse (batch, heads, rows) if it was exchanged too."""
    out, *lse = rows
    return out, lse[0].squeeze(-1).mT if lse else None


def copies_of_keys(ranks: Ranks, k: Tensor) -> int:
    """Ranks that read each key/value head, where these are fewer than the ranks."""
    return max(1, ranks.size // k.shape[2])
