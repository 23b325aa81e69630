"""What a CTA of the backward kernel loads: K and V of its keys, and of each query tile Q, dO, LSE and delta."""

import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.ampere.backward.config import FLOAT_BYTES, AmpereBackwardConfig
from cute_kernels.ampere.backward.operands import SharedMemory
from cute_kernels.ampere.config import CHUNK_BYTES
from cute_kernels.ampere.instructions import cp_async_16
from cute_kernels.ampere.shared_tile import SharedTile
from cute_kernels.ampere.tile_loader import TileLoader
from cute_kernels.invariant import LoopInvariant


class QueryLoader(LoopInvariant):
    """Loads query tiles of one head into the buffers of Q, dO, LSE and delta.

    ``rows`` are Q and dO of the head, (seqlen_q, columns), ``vectors`` LSE and delta, (seqlen_q in whole tiles). Some
    of the threads load LSE, the next ones delta.
    """

    def __init__(self, config: AmpereBackwardConfig, smem: SharedMemory, rows: tuple, vectors: tuple):
        c, tile = config, SharedTile(config.head_dim)
        self.config = c
        q, do = rows
        self.q = TileLoader(tile, c.tile_m, c.threads, smem.q, q)
        self.do = TileLoader(tile, c.tile_m, c.threads, smem.q + c.do_offset, do)
        self.thread = cute.arch.thread_idx()[0]
        self.lse, self.delta = (Int64(vector.iterator.toint()) for vector in vectors)
        self.targets = tuple(Int32(place.toint()) for place in (smem.lse, smem.delta))

    @cute.jit
    def load(self, m_block: Int32, stage: Int32):
        """Start the loads of a query tile, as one group."""
        c = self.config
        self.q.load(m_block * c.tile_m, stage * c.stage_bytes, True)
        self.do.load(m_block * c.tile_m, stage * c.stage_bytes, True)
        chunks = c.vector_bytes // CHUNK_BYTES
        if self.thread < 2 * chunks:
            is_lse = self.thread < chunks
            source = self.lse if is_lse else self.delta
            target = self.targets[0] if is_lse else self.targets[1]
            place = self.thread % chunks * CHUNK_BYTES
            source = source + Int64(m_block * c.tile_m) * FLOAT_BYTES + place
            cp_async_16(target + stage * c.vector_bytes + place, 0, source, 0, Int32(1))
        cute.arch.cp_async_commit_group()


def load_keys(
    config: AmpereBackwardConfig, smem: SharedMemory, k: cute.Tensor, v: cute.Tensor, n_block: Int32
) -> None:
    """Start the loads of K and V of a key tile, of (seqlen_k, columns) each."""
    c, tile = config, SharedTile(config.head_dim)
    for target, head in ((smem.k, k), (smem.k + c.v_offset, v)):
        TileLoader(tile, c.tile_n, c.threads, target, head).load(n_block * c.tile_n, Int32(0), True)
