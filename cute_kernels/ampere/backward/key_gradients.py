"""The gradients of the keys of one CTA of the backward kernel, and what they add to dQ."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, const_expr

from cute_kernels.ampere.backward.batch import (
    DenseBatch,
    DenseQueries,
    DenseTiles,
    PackedBatch,
    PackedQueries,
    PackedTiles,
)
from cute_kernels.ampere.backward.config import AmpereBackwardConfig
from cute_kernels.ampere.backward.dq import GradientOfQ
from cute_kernels.ampere.backward.epilogue import Epilogue
from cute_kernels.ampere.backward.key_tile import KeyTile
from cute_kernels.ampere.backward.loader import QueryLoader, load_keys
from cute_kernels.ampere.backward.mainloop import Mainloop
from cute_kernels.ampere.backward.operands import SharedMemory, WarpShare
from cute_kernels.ampere.backward.walk import Walk
from cute_kernels.ampere.shared_tile import ALIGNMENT
from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.fast_math import pin
from cute_kernels.fragments import first_column_of_thread, first_row_of_thread
from cute_kernels.invariant import LoopInvariant
from cute_kernels.key_mask import KeyMask
from cute_kernels.key_score_tile import KeyRules
from cute_kernels.problem import VARLEN
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.sequence_rows import rows_of
from cute_kernels.window import Window

COUNTS_BEFORE_TURNS = 2
"""Words of the counter before those that say whose turn it is; the first one hands out key tiles."""


class Tensors(NamedTuple):
    """Of all sequences, as the kernel is given them."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    lse: cute.Tensor
    delta: cute.Tensor
    dq: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    counter: cute.Tensor


@dataclass(frozen=True)
class KeyGradients(LoopInvariant):
    """What one CTA does; ``claimed`` is a word in shared memory for the number of its tile. ``lists`` are those of
    ``KeyTile``."""

    config: AmpereBackwardConfig
    tensors: Tensors
    window: Window
    smem: SharedMemory
    claimed: cute.Tensor
    lists: tuple = ()

    @staticmethod
    def of(
        config: AmpereBackwardConfig, tensors: Tensors, window: Window, lists: tuple = ()
    ) -> "KeyGradients":
        return KeyGradients(config, tensors, window, *allocate(config), lists)

    @cute.jit
    def claim(self) -> Int32:
        """The number of this CTA's key tile.

        Where key tiles wait for those before them, each CTA claims one when it runs, so that none waits for a CTA that
        has found no SM.
        """
        tile = cute.arch.block_idx()[0]
        if const_expr(self.config.ordered):
            if cute.arch.thread_idx()[0] == 0:
                counter = self.tensors.counter.iterator
                self.claimed[0] = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
            cute.arch.sync_threads()
            tile = cute.arch.make_warp_uniform(self.claimed[0])
        return tile

    @cute.jit
    def compute(
        self,
        batch: DenseBatch | PackedBatch,
        tile: Int32,
        heads_per_kv_head: Int32,
        softmax_scale: Float32,
        rules: KeyRules,
    ):
        """dK and dV of key tile ``tile``, and its part of dQ."""
        c, smem, tensors = self.config, self.smem, self.tensors
        place = batch.first_place(tile)
        seqlens, head_kv = place.seqlens, place.head_kv
        k, v = (rows_of(tensor, seqlens.rows_k, head_kv) for tensor in (tensors.k, tensors.v))
        load_keys(c, smem, k, v, place.n_block)

        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        share = WarpShare(c, warp)
        key = place.n_block * c.tile_n + share.score_row + first_row_of_thread(0, lane)
        column = share.score_query + first_column_of_thread(lane)
        mask = KeyMask(self.window, c.tile_m, seqlens, key, column)
        turns = self._turns()
        key_tile = KeyTile(c, self.window, place.n_block, place.n_blocks, seqlens, self.lists)
        dq = GradientOfQ(c, tensors.dq, turns, key_tile, self._tiles(seqlens), (warp, lane))
        mainloop = Mainloop(c, DSL_DTYPES[c.dtype], smem, share, mask, dq, rules)
        mainloop.clear()
        walk = Walk(c, QueryLoader(c, smem, self._queries(seqlens)), mainloop, key_tile)
        for i in cutlass.range(heads_per_kv_head, unroll=1):
            if const_expr(c.block_lists):
                walk.listed_head(head_kv * heads_per_kv_head + i)
            else:
                walk.head(head_kv * heads_per_kv_head + i)
        if const_expr(c.can_miss_queries):
            # Where no query sees the keys, nobody has waited for them.
            if const_expr(c.block_lists):
                # Nor has a query tile, loaded behind them, made them part of a group.
                cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
        # All anew and pinned, since from before the loops it would take registers throughout.
        thread = pin(cute.arch.thread_idx()[0], Int32)
        tile = self.claimed[0] if const_expr(c.ordered) else pin(cute.arch.block_idx()[0], Int32)
        place = batch.place_again(tile)
        targets = tuple(
            rows_of(tensor, place.seqlens.rows_k, place.head_kv) for tensor in (tensors.dk, tensors.dv)
        )
        Epilogue(c, smem, thread).store(mainloop, targets, place.n_block, softmax_scale)

    def _queries(self, seqlens: SeqlenInfo) -> DenseQueries | PackedQueries:
        rows, vectors = (self.tensors.q, self.tensors.do), (self.tensors.lse, self.tensors.delta)
        if self.config.layout == VARLEN:
            return PackedQueries(self.config, rows, vectors, seqlens)
        return DenseQueries(rows, vectors, seqlens)

    def _tiles(self, seqlens: SeqlenInfo) -> DenseTiles | PackedTiles:
        if self.config.layout == VARLEN:
            return PackedTiles(seqlens.first_query_tile(self.config.tile_m))
        return DenseTiles(seqlens.batch)

    def _turns(self) -> cute.Tensor:
        """(batch, heads, query tiles, parts), or packed without the first."""
        *tiles, _, _ = self.tensors.dq.shape
        shape = (*tiles, self.config.warps)
        order = tuple(reversed(range(len(shape))))
        return cute.make_tensor(
            self.tensors.counter.iterator + COUNTS_BEFORE_TURNS, cute.make_ordered_layout(shape, order=order)
        )


def allocate(config: AmpereBackwardConfig) -> tuple[SharedMemory, cute.Tensor]:
    """Where everything lies in shared memory, and a word for the number of a tile."""
    c = config

    def of(count: int, dtype: type[cutlass.Numeric] = cutlass.Uint8):
        return cute.struct.Align[cute.struct.MemRange[dtype, count], ALIGNMENT]

    @cute.struct
    class SharedStorage:
        sKV: of(c.kv_bytes)
        sQdO: of(2 * c.stages * c.stage_bytes)
        scores: of(c.ds_offset + c.score_bytes)
        sLSE: of(c.stages * c.tile_m, Float32)
        sDelta: of(c.stages * c.tile_m, Float32)
        claimed: cute.struct.MemRange[Int32, 4]

    storage = cutlass.memory.SmemAllocator().allocate(SharedStorage)
    tiles = (storage.sKV, storage.sQdO, storage.scores)
    addresses = (Int32(tile.data_ptr().toint()) for tile in tiles)
    claimed = storage.claimed.get_tensor(cute.make_layout(1))
    return SharedMemory(*addresses, storage.sLSE.data_ptr(), storage.sDelta.data_ptr()), claimed
