"""The ring of shared-memory stages that K and V of the key blocks take in turns."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.ampere.config import AmpereForwardConfig
from cute_kernels.ampere.tile_loader import TileLoader
from cute_kernels.invariant import LoopInvariant
from cute_kernels.key_blocks import KeyBlocks


@dataclass(frozen=True)
class KeyValueRing(LoopInvariant):
    """Loads item 2 t, which is K of the t-th key block visited, and item 2 t + 1, which is V of it.

    ``stages - 1`` items are under way or waiting while one is used. A stage is known by its first byte in the ring, its
    slot; what was used before the current item frees the slot that is filled next. ``n_block`` is a place of the walk
    over ``blocks``.
    """

    config: AmpereForwardConfig
    k: TileLoader
    v: TileLoader
    blocks: KeyBlocks

    @cute.jit
    def fill(self, n_block: Int32):
        """Start the first ``stages - 1`` items, block ``n_block`` on down; a commit each."""
        for item in cutlass.range_constexpr(self.config.stages - 1):
            self._load(item, n_block, Int32(item * self.config.stage_bytes), True)

    @cute.jit
    def await_item(self):
        """Wait until the next item is there for all threads, and all have done with the one before."""
        cute.arch.cp_async_wait_group(self.config.stages - 2)
        cute.arch.sync_threads()

    @cute.jit
    def refill(
        self, item: cutlass.Constexpr[int], n_block: Int32, slot: Int32, is_guarded: cutlass.Constexpr[bool]
    ):
        """While item 0 (K) or 1 (V) of ``n_block`` is used at ``slot``, load what comes ``stages - 1`` items later."""
        last = (self.config.stages - 1) * self.config.stage_bytes
        free = last if slot == 0 else slot - self.config.stage_bytes
        self._load(item + self.config.stages - 1, n_block, free, is_guarded)

    @cute.jit
    def next_slot(self, slot: Int32) -> Int32:
        last = (self.config.stages - 1) * self.config.stage_bytes
        return 0 if slot == last else slot + self.config.stage_bytes

    @cute.jit
    def _load(
        self, item: cutlass.Constexpr[int], n_block: Int32, slot: Int32, is_guarded: cutlass.Constexpr[bool]
    ):
        """Item ``item`` counted from K of ``n_block``; only the first block may reach past the end."""
        block = n_block - item // 2
        if block >= self.blocks.begin:
            loader = self.k if const_expr(item % 2 == 0) else self.v
            loader.load(self.blocks.number(block) * self.config.tile_n, slot, is_guarded and item < 2)
        cute.arch.cp_async_commit_group()
