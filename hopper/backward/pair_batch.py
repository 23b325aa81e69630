"""How the sequences of a batch lie in the tensors of the paired backward kernel, and which key tile a cluster has."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.plan.packed import PackedTileOrder
from cute_kernels.problem import DENSE
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.tile_scheduler import TailedTileOrder, TileOrder
from hopper.backward.batch import DenseBatch, PackedBatch, order_of_keys
from hopper.backward.config import CLUSTER_CTAS, PairedBackwardConfig

PAIRS_UNDER_WAY = 66
"""Of the 132 SMs of an H100 or H200. Their grid is not made by their number, and the order is none of correctness."""


@dataclass(frozen=True)
class DensePairBatch(DenseBatch):
    """Sequences of one length. The grid is by CTA of a key tile, key/value head and batch, or of all of them in an
    order."""

    ctas_under_way = PAIRS_UNDER_WAY

    def view_sums(self, mdQ: cute.Tensor) -> cute.Tensor:
        """(words, parts, query tiles of all heads, batches)."""
        batches, heads, tiles, parts, words = mdQ.shape
        strides = mdQ.stride
        layout = cute.make_layout(
            (words, parts, tiles * heads, batches), stride=(1, strides[3], strides[2], strides[0])
        )
        return cute.make_tensor(mdQ.iterator, layout)

    def of_sums(self, seqlens: SeqlenInfo) -> Int32 | int:
        """The batch of a sequence in them."""
        return seqlens.batch

    def m_ends(self, mdQ: cute.Tensor) -> tuple:
        """What the kernel has to be told of query tiles: nothing."""
        return ()

    def ordered_tiles(self, mQ: cute.Tensor, mK: cute.Tensor) -> tuple:
        """What ``order`` takes, if key tiles have one: their number in a head, key/value heads, batches, and sections
        or a tail."""
        c, tiles = self.config, (cute.ceil_div(mK.shape[0], self.config.tile_n), mK.shape[2], mK.shape[3])
        if c.has_sections:
            return *tiles, self.even_sections(mQ, mK, PAIRS_UNDER_WAY)
        return (*tiles, *self.tail(mQ, mK)) if c.shortens else ()

    def order(self, tiles: tuple) -> TileOrder | TailedTileOrder:
        """Of ``ordered_tiles``."""
        return TailedTileOrder(*tiles) if self.config.shortens else TileOrder(*tiles, longest_first=True)

    def grid(self, mK: cute.Tensor, plan: tuple, ordered: tuple) -> tuple:
        """For the view of K; in an order of one dimension."""
        tiles = cute.ceil_div(mK.shape[0], self.config.tile_n)
        if ordered:
            return CLUSTER_CTAS * tiles * mK.shape[2] * mK.shape[3], 1, 1
        return CLUSTER_CTAS * tiles, mK.shape[2], mK.shape[3]


class PackedPairBatch(PackedBatch):
    """Packed sequences. The grid has a cluster for each key tile that there may be, by the size of the plan."""

    def view_sums(self, mdQ: cute.Tensor) -> cute.Tensor:
        """(words, parts, query tiles of all heads, 1)."""
        heads, tiles, parts, words = mdQ.shape
        layout = cute.make_layout(
            (words, parts, tiles * heads, 1), stride=(1, mdQ.stride[2], mdQ.stride[1], 0)
        )
        return cute.make_tensor(mdQ.iterator, layout)

    def of_sums(self, seqlens: SeqlenInfo) -> Int32 | int:
        return 0

    def m_ends(self, mdQ: cute.Tensor) -> tuple:
        """(query tiles of a head, of all sequences)."""
        return (mdQ.shape[1],)

    def ordered_tiles(self, mQ: cute.Tensor, mK: cute.Tensor) -> tuple:
        return ()

    def grid(self, mK: cute.Tensor, plan: tuple, ordered: tuple) -> tuple:
        """By CTA of an entry and head. Where sequences have tails CTAs are counted from the first to the last, and
        take tiles in their order."""
        return CLUSTER_CTAS * PackedTileOrder.most(*plan, Int32(1)), mK.shape[2], 1

    def number(self) -> tuple[Int32, Int32]:
        """That of the tile of this cluster, and among the tiles of how many heads it is one."""
        x, y, _ = cute.arch.block_idx()
        entries, heads, _ = cute.arch.grid_dim()
        if self.config.shortens_packed:
            return (y * entries + x) // CLUSTER_CTAS, heads
        return x // CLUSTER_CTAS, Int32(1)

    def place(self, plan: tuple, number: Int32, heads: Int32, shared: Int32) -> tuple[Int32, Int32, Int32]:
        """(key tile, key/value head, batch) of a number; ``plan`` is followed by the number of its sequences, and
        ``shared`` query heads share one of K and V."""
        of_tiles = *plan, number + 1, heads, Int32(1), self.config.tile_n
        n_block, head_kv, batch = order_of_keys(self.config, of_tiles, shared).coordinates(number)
        return n_block, head_kv if self.config.shortens_packed else cute.arch.block_idx()[1], batch


def pair_batch_of(config: PairedBackwardConfig) -> DensePairBatch | PackedPairBatch:
    """By the layout of the config."""
    return DensePairBatch(config) if config.layout == DENSE else PackedPairBatch(config)
