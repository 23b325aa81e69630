"""A kernel for the tests: the tiles of a plan, as kernels on packed sequences find them."""

import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.arguments import compile_for_torch, plan_argument, words
from cute_kernels.plan.packed import PackedSeqlens, PackedTileOrder

THREADS = 128
WORDS = 8
"""Of a tile: its number of heads, block, head and sequence, and where that lies."""


class ListTiles:
    """A thread for each tile that the plan may hold writes what ``PackedTileOrder`` and ``PackedSeqlens`` say."""

    def __init__(self, tile: int, longest_first: bool, of_keys: bool):
        self.tile, self.longest_first, self.of_keys = tile, longest_first, of_keys

    @cute.jit
    def __call__(
        self, plan: cute.Tensor, tiles: cute.Tensor, sequences: Int32, heads: Int32, group: Int32, stream
    ):
        """Launch. ``tiles`` is int32, WORDS for each tile of each head."""
        most = PackedTileOrder.most(plan, sequences, heads)
        self.kernel(plan, tiles, sequences, heads, group).launch(
            grid=(cute.ceil_div(most, THREADS), 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, plan: cute.Tensor, tiles: cute.Tensor, sequences: Int32, heads: Int32, group: Int32):
        num_tiles = PackedTileOrder.count(plan, heads)
        number = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        if number < num_tiles:
            order = PackedTileOrder(
                plan,
                sequences,
                num_tiles,
                heads,
                group,
                self.tile,
                self.longest_first,
                self.of_keys,
            )
            block, head, sequence = order.coordinates(number)
            seqlens = PackedSeqlens(plan).of(sequence)
            place = WORDS * number
            tiles[place], tiles[place + 1], tiles[place + 2] = block, head, sequence
            tiles[place + 3], tiles[place + 4] = seqlens.offset_q, seqlens.seqlen_q
            tiles[place + 5], tiles[place + 6] = seqlens.offset_k, seqlens.seqlen_k


def compile_list_tiles(tile: int, longest_first: bool, of_keys: bool, options: str):
    kernel = ListTiles(tile, longest_first, of_keys)
    counts = (Int32(0) for _ in range(3))
    return compile_for_torch(kernel, plan_argument(), words(cute.sym_int()), *counts, options=options)
