"""What a CTA of the backward kernel loads: K and V of its keys, and of each query tile Q, dO, LSE and delta."""

import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_kernels.ampere.backward.batch import DenseQueries, PackedQueries
from cute_kernels.ampere.backward.config import FLOAT_BYTES, AmpereBackwardConfig
from cute_kernels.ampere.backward.operands import SharedMemory
from cute_kernels.ampere.config import CHUNK_BYTES
from cute_kernels.ampere.instructions import cp_async_16
from cute_kernels.ampere.shared_tile import SharedTile
from cute_kernels.ampere.tile_loader import TileLoader
from cute_kernels.fast_math import pin
from cute_kernels.invariant import LoopInvariant


class QueryLoader(LoopInvariant):
    """Loads query tiles of one sequence into the buffers of Q, dO, LSE and delta.

    Some of the threads load LSE, the next ones delta.
    """

    def __init__(
        self, config: AmpereBackwardConfig, smem: SharedMemory, queries: DenseQueries | PackedQueries
    ):
        self.config, self.smem, self.queries = config, smem, queries

    @cute.jit
    def load(self, head: Int32, m_block: Int32, stage: Int32):
        """Start the loads of a query tile, as one group."""
        c, smem = self.config, self.smem
        # Pinned, or else addresses are computed before the loop over blocks and held in registers throughout.
        thread, head = pin(cute.arch.thread_idx()[0], Int32), pin(head, Int32)
        if const_expr(c.ordered or not c.has_mask):
            m_block = pin(m_block, Int32)
        first_row = m_block * c.tile_m
        targets = smem.q, smem.q + c.do_offset
        for target, rows in zip(targets, self.queries.head_rows(head), strict=True):
            loader = TileLoader(SharedTile(c.head_dim), c.tile_m, c.threads, target, rows, thread)
            loader.load(first_row, stage * c.stage_bytes, True)
        chunks = c.vector_bytes // CHUNK_BYTES
        if thread < 2 * chunks:
            is_lse = thread < chunks
            lse, delta = self.queries.head_vectors(head)
            source = (lse if is_lse else delta) + Int64(first_row) * FLOAT_BYTES
            target = Int32(smem.lse.toint()) if is_lse else Int32(smem.delta.toint())
            place = thread % chunks * CHUNK_BYTES
            cp_async_16(target + stage * c.vector_bytes + place, 0, source + place, 0, Int32(1))
        cute.arch.cp_async_commit_group()


def load_keys(
    config: AmpereBackwardConfig, smem: SharedMemory, k: cute.Tensor, v: cute.Tensor, n_block: Int32
) -> None:
    """Start the loads of K and V of a key tile, of (seqlen_k, columns) each."""
    c, tile, thread = config, SharedTile(config.head_dim), cute.arch.thread_idx()[0]
    for target, head in ((smem.k, k), (smem.k + c.v_offset, v)):
        TileLoader(tile, c.tile_n, c.threads, target, head, thread).load(n_block * c.tile_n, Int32(0), True)
