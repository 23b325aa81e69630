"""How the sequences of a batch lie in the tensors of the paired backward kernel, and which key tile a cluster has."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.plan.packed import PackedTileOrder
from cute_kernels.problem import DENSE
from cute_kernels.seqlen import SeqlenInfo
from hopper.backward.batch import DenseBatch, PackedBatch
from hopper.backward.config import CLUSTER_CTAS, PairedBackwardConfig

PAIRS_UNDER_WAY = 66
"""Of the 132 SMs of an H100 or H200. Their grid is not made by their number, and the order is none of correctness."""


@dataclass(frozen=True)
class DensePairBatch(DenseBatch):
    """Sequences of one length. The grid is by CTA of a key tile, key/value head and batch, or
    of all of them in the order of sections."""

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

    def sections(self, mQ: cute.Tensor, mK: cute.Tensor) -> tuple:
        """Where there are some: what a ``TileOrder`` takes, key tiles, key/value heads, batches and ``Sections``."""
        if not self.config.has_sections:
            return ()
        tiles = cute.ceil_div(mK.shape[0], self.config.tile_n)
        return tiles, mK.shape[2], mK.shape[3], self.even_sections(mQ, mK, PAIRS_UNDER_WAY)

    def grid(self, mK: cute.Tensor, plan: tuple, sections: tuple) -> tuple:
        """For the view of K; with sections of one dimension."""
        tiles = cute.ceil_div(mK.shape[0], self.config.tile_n)
        if sections:
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

    def sections(self, mQ: cute.Tensor, mK: cute.Tensor) -> tuple:
        return ()

    def grid(self, mK: cute.Tensor, plan: tuple, sections: tuple) -> tuple:
        return CLUSTER_CTAS * PackedTileOrder.most(*plan, Int32(1)), mK.shape[2], 1

    def place(self, plan: cute.Tensor, sequences: Int32, entry: Int32) -> tuple[Int32, Int32]:
        """(key tile, batch) of an entry of the plan."""
        c = self.config
        order = PackedTileOrder(
            plan, sequences, entry + 1, Int32(1), Int32(1), c.tile_n, longest_first=False, of_keys=True
        )
        n_block, _, batch = order.coordinates(entry)
        return n_block, batch


def pair_batch_of(config: PairedBackwardConfig) -> DensePairBatch | PackedPairBatch:
    """By the layout of the config."""
    return DensePairBatch(config) if config.layout == DENSE else PackedPairBatch(config)
