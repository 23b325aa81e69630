"""One group of pieces on one GPU, forward and backward, by the launchers and operators of one GPU.

The backward gets the output and the LSE of all keys, merged, where those of one GPU would be its own: P of a piece is
then exp(score - LSE), its share of the whole row, and gradients of pieces add up to those of the whole.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hopper_attention import varlen_ops
from hopper_attention.distributed.pieces import Group, length
from hopper_attention.launch.forward import run_forward
from hopper_attention.launch.gradients import differentiate
from hopper_attention.masks import MaskSpec
from hopper_attention.reference.tiles import Span
from hopper_attention.scores import Scores

REMEMBERED = 1024

Gradients = tuple[Tensor, Tensor, Tensor]


class Call(NamedTuple):
    """What all pieces of a call share.

    Attributes:
        softmax_scale: of the scores.
        softcap: of the scaled ones; 0 is none.
        backend: "hopper", "ampere", "reference", or None to have one chosen.
        deterministic: gradients of the same bits in every run.
        sm_margin: streaming multiprocessors that the forward kernel leaves to transfers.
        is_least: whether a ring goes by the schedule that holds the least, and not by the fastest.
    """

    softmax_scale: float
    softcap: float = 0.0
    backend: str | None = None
    deterministic: bool = False
    sm_margin: int = 0
    is_least: bool = False


class Saved(NamedTuple):
    """Of the rows of Q: what the backward needs beside K and V. ``dlse`` is None where it is 0."""

    q: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None

    def of_part(self, batch: slice, heads: slice) -> Saved:
        """Of some entries of the batch and some heads alone."""
        dlse = None if self.dlse is None else self.dlse[batch, heads].contiguous()
        q, out, dout = (x[batch, :, heads] for x in (self.q, self.out, self.dout))
        return Saved(q, out, self.lse[batch, heads].contiguous(), dout, dlse)

    def of_rows(self, span: Span) -> Saved:
        here = slice(span.start, span.stop)
        dlse = None if self.dlse is None else self.dlse[:, :, here].contiguous()
        q, out, dout = (x[:, here] for x in (self.q, self.out, self.dout))
        return Saved(q, out, self.lse[:, :, here].contiguous(), dout, dlse)


class Lengths(NamedTuple):
    """Where the pieces of a group lie, as ``flash_attn_varlen_func`` has them."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_q: Tensor
    seqused_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


@lru_cache(maxsize=REMEMBERED)
def _lengths_of(group: Group, device: torch.device) -> Lengths:
    rows, keys = [p.rows for p in group.pieces], [p.keys for p in group.pieces]
    tensors = [_starts(rows), _starts(keys), [length(span) for span in rows], [length(span) for span in keys]]
    cu_q, cu_k, used_q, used_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in tensors)
    return Lengths(cu_q, cu_k, used_q, used_k, max(tensors[2]), max(tensors[3]))


def _starts(spans: list[Span]) -> list[int]:
    """From the first one's, with the end of the last."""
    return [span.start - spans[0].start for span in spans] + [spans[-1].stop - spans[0].start]


def _packed_mask(group: Group, lengths: Lengths) -> MaskSpec:
    first = group.pieces[0]
    return MaskSpec.canonical(False, first.left, first.right, lengths.max_seqlen_q, lengths.max_seqlen_k)


def attend(q: Tensor, k: Tensor, v: Tensor, group: Group, call: Call) -> tuple[Tensor, Tensor]:
    """out (batch, rows, heads, head_dim_v) of q's dtype and lse float32 (batch, heads, rows) of ``group.rows``.

    Args:
        q: (batch, local rows, heads, head_dim).
        k, v: those of ``group.keys`` and no others.
    """
    rows = group.rows
    q = q[:, rows.start : rows.stop]
    scale, softcap, backend, _, sm_margin, _ = call
    if len(group.pieces) == 1:
        mask, scores = group.pieces[0].mask, Scores.of(softcap, None, None)
        return run_forward(q, k, v, scale, mask.causal, backend, sm_margin, window=mask.sides, scores=scores)
    lengths = _lengths_of(group, q.device)
    mask = _packed_mask(group, lengths)
    packed = q[0], k[0], v[0], *lengths, scale, mask.causal, backend, sm_margin, False, *mask.sides, softcap
    out, lse = varlen_ops.forward_varlen(*packed)
    return out[None], lse[None]


def differentiate_group(saved: Saved, k: Tensor, v: Tensor, group: Group, call: Call) -> Gradients:
    """dq of ``group.rows``, dk and dv of ``group.keys``, in the dtype of q; arguments as for :func:`attend`."""
    q, out, lse, dout, dlse = saved.of_rows(group.rows)
    scale, softcap, backend, deterministic, *_ = call
    # The LSE has more than these keys, which is what sinks mean to a backward pass: P of a single key is not 1.
    more = torch.zeros(q.shape[2], dtype=torch.float32, device=q.device)
    if len(group.pieces) == 1:
        mask, scores = group.pieces[0].mask, Scores.of(softcap, None, more if k.shape[1] == 1 else None)
        options = scale, mask, scores, backend, deterministic
        return differentiate(dout, dlse, q, k, v, out, lse, *options)
    lengths = _lengths_of(group, q.device)
    mask = _packed_mask(group, lengths)
    tensors = (None if x is None else x[0] for x in (dout, dlse, q, k, v, out, lse))
    options_2 = scale, mask.causal, backend, deterministic, *mask.sides, softcap, None, more
    dq, dk, dv = varlen_ops.backward_varlen(*tensors, *lengths, *options_2)
    return dq[None], dk[None], dv[None]
