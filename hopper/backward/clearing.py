"""A warp that clears the sums of dQ of packed sequences while other key tiles are at work.

Before the kernel nobody writes these zeros, which takes memory's time; in the kernel memory has time to spare. The
consumers take no part in it: the producer warp waits until all sums of a head are clear before it loads its queries.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.backward.step import CLAIMED_SHARES, CLEARED_SHARES, CLEARING_WORDS, SCHEDULER_WORDS
from cute_kernels.integers import ceil_div
from cute_kernels.invariant import LoopInvariant
from hopper.backward.config import BackwardConfig
from hopper.backward.work import BackwardWork

WORDS = 4
"""float32 that a lane clears at once."""

STORES_AT_ONCE = 8
"""Of a lane."""


class Clearing(LoopInvariant):
    """Sums are cleared in shares: of n key tiles of a head, number i clears query tiles i, i + n, i + 2 n and so on.

    ``mdQ`` is float32 (words, warpgroups, query tiles of all heads and batches), in any state before the launch.
    ``counter`` is int32 and zero before the launch: SCHEDULER_WORDS, then CLEARING_WORDS, and then a count for each
    query tile of all heads, of which a key/value head of a sequence has the first: its shares that are clear.

    Warps claim shares one by one, in the order of key tiles, and wait for nobody. So whoever waits for the shares of
    its head waits for warps that run.
    """

    def __init__(self, config: BackwardConfig, mdQ: cute.Tensor, counter: cute.Tensor):
        self.config, self.mdQ, self.counter = config, mdQ, counter

    @cute.jit
    def run(self, work: BackwardWork):
        """The warp that clears: shares, as long as there are any."""
        c, lane = self.config, cute.arch.lane_idx()
        share = self._claim(lane)
        while share < work.tiles_to_load:
            n_block, head_kv, batch = work.coordinates(share)
            seqlens = work.seqlens.of(batch)
            step = ceil_div(seqlens.seqlen_k, c.tile_n)
            first = work.first_tile(head_kv, batch)
            for i in cutlass.range(work.query_heads.count(head_kv), unroll=1):
                of_head = first + i * work.m_end
                end = of_head + ceil_div(seqlens.seqlen_q, c.tile_m)
                for tile in cutlass.range(of_head + n_block, end, step, unroll=1):
                    self._clear(tile, lane)
            # Sums are added to by bulk copies.
            cute.arch.inline_ptx("fence.proxy.async;", read_only_args=[])
            cute.arch.sync_warp()
            if lane == 0:
                for place in (self._count(first), self._word(CLEARED_SHARES)):
                    cute.arch.atomic_add(place, Int32(1), sem="release", scope="gpu")
            share = self._claim(lane)

    @cute.jit
    def wait(self, work: BackwardWork, head_kv: Int32, batch: Int32):
        """Producer warp: until all sums of a head's queries are clear, or no more will be: a plan of sequences that
        overlap each other may lack key tiles."""
        if cute.arch.lane_idx() == 0:
            shares = ceil_div(work.seqlens.of(batch).seqlen_k, self.config.tile_n)
            count = self._count(work.first_tile(head_kv, batch))
            clear = see(count)
            while clear < shares:
                of_all = see(self._word(CLEARED_SHARES))
                clear = see(count)
                if of_all >= work.tiles_to_load:
                    clear = shares
            cute.arch.inline_ptx("fence.proxy.async;", read_only_args=[])
        cute.arch.sync_warp()

    @cute.jit
    def _clear(self, tile: Int32, lane: Int32):
        """The sums of a query tile; those of the warpgroups lie behind each other."""
        c = self.config
        zeros = cute.make_rmem_tensor(WORDS, Float32)
        zeros.fill(Float32(0.0))
        size = c.dq_parts * c.dq_words
        words = cute.make_tensor(self.mdQ[None, 0, tile].iterator, cute.make_layout(size))
        for i in cutlass.range(size // (WORDS * cute.arch.WARP_SIZE), unroll=STORES_AT_ONCE):
            cute.autovec_copy(zeros, cute.local_tile(words, (WORDS,), (i * cute.arch.WARP_SIZE + lane,)))

    @cute.jit
    def _claim(self, lane: Int32) -> Int32:
        share = Int32(0)
        if lane == 0:
            share = cute.arch.atomic_add(self._word(CLAIMED_SHARES), Int32(1), sem="relaxed", scope="gpu")
        return cute.arch.make_warp_uniform(share)

    def _word(self, index: int) -> cute.Pointer:
        return self.counter.iterator + index

    def _count(self, tile: Int32) -> cute.Pointer:
        return self.counter.iterator + SCHEDULER_WORDS + CLEARING_WORDS + tile


@cute.jit
def see(place: cute.Pointer) -> Int32:
    """An int32 in global memory that others count up, and what was written before they did."""
    return cute.arch.inline_ptx(
        "ld.acquire.gpu.global.s32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[place.toint()],
    )
