"""What a warp of the backward kernel reads of the tiles in shared memory, and where it writes scores and gradients."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.ampere.backward.config import AmpereBackwardConfig
from cute_kernels.ampere.config import MMA_ROWS
from cute_kernels.ampere.shared_tile import SharedTile, chunks_first, rows_first
from cute_kernels.ampere.warp_operand import WarpOperand, WarpTarget
from cute_kernels.invariant import LoopInvariant


@dataclass(frozen=True)
class SharedMemory:
    """First bytes of the tiles in shared memory, as addresses; those of ``lse`` and ``delta`` as pointers.

    V lies behind K, the buffers of dO behind those of Q, and dS^T behind P^T, where that is there. Q, dO, LSE and delta
    have ``stages`` buffers behind one another. P^T and dS^T have keys as rows.
    """

    k: Int32
    q: Int32
    p: Int32
    lse: cute.Pointer
    delta: cute.Pointer


class WarpShare(LoopInvariant):
    """Which part of each product is this warp's.

    ``score_row`` and ``score_query`` are its first key and query in S^T and dP^T, ``gradient_row`` its first key in dK
    and dV, ``dq_row`` its first query in dQ. The columns of those are dealt out 16 at a time: ``gradient_turn`` and
    ``dq_turn`` are its place in that.
    """

    def __init__(self, config: AmpereBackwardConfig, warp: Int32):
        c = config
        self.score_row = warp % c.score_warps * (c.score_bands * MMA_ROWS)
        self.score_query = warp // c.score_warps * c.score_queries
        self.gradient_row = warp % c.gradient_warps * (c.gradient_bands * MMA_ROWS)
        self.gradient_turn = warp // c.gradient_warps
        self.dq_row = warp % c.dq_warps * (c.dq_bands * MMA_ROWS)
        self.dq_turn = warp // c.dq_warps


class WarpOperands(LoopInvariant):
    """The operands of the five products of one warp, and the targets of P^T and dS^T.

    | product | A | B |
    |---|---|---|
    | S^T = K Q^T | ``k`` | ``q`` |
    | dP^T = V dO^T | ``v`` | ``do`` |
    | dV += P^T dO | ``p`` | ``do_t`` |
    | dK += dS^T Q | ``ds`` | ``q_t`` |
    | dQ = dS K | ``ds_t`` | ``k_t`` |
    """

    def __init__(self, config: AmpereBackwardConfig, smem: SharedMemory, share: WarpShare, lane: Int32):
        c = config
        rows, scores = SharedTile(c.head_dim), SharedTile(c.tile_m)
        by_rows, by_chunks = rows_first(lane), chunks_first(lane)
        keys, gradient_keys = share.score_row, share.gradient_row
        self.k = WarpOperand(rows, smem.k + keys * rows.pitch, by_rows, transpose=False)
        self.v = self.k.beyond(c.v_offset)
        self.q = WarpOperand(rows, smem.q + share.score_query * rows.pitch, by_chunks, transpose=False)
        self.do = self.q.beyond(c.do_offset)
        self.p = WarpOperand(scores, smem.p + gradient_keys * scores.pitch, by_rows, transpose=False)
        self.ds = self.p.beyond(c.ds_offset)
        self.q_t = WarpOperand(rows, smem.q, by_rows, True, share.gradient_turn)
        self.do_t = self.q_t.beyond(c.do_offset)
        self.ds_t = WarpOperand(scores, smem.p, by_chunks, True, share.dq_row // MMA_ROWS).beyond(c.ds_offset)
        self.k_t = WarpOperand(rows, smem.k, by_rows, True, share.dq_turn)
        first = share.score_query // MMA_ROWS
        self.p_target = WarpTarget(scores, smem.p + keys * scores.pitch, lane, first)
        self.ds_target = self.p_target.beyond(c.ds_offset)

    def at(self, slot: Int32, zero: Int32) -> WarpOperands:
        """The same with Q and dO in the buffers that begin ``slot`` bytes further, and all else ``zero`` bytes."""
        other = copy(self)
        for name in ("q", "do", "q_t", "do_t"):
            setattr(other, name, getattr(self, name).at(slot))
        for name in ("k", "v", "p", "ds", "ds_t", "k_t", "p_target", "ds_target"):
            setattr(other, name, getattr(self, name).at(zero))
        return other
