"""How the sequences of a batch lie in the tensors of the forward kernel, and the order of their tiles."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.invariant import LoopInvariant
from cute_kernels.key_blocks import BlockRange
from cute_kernels.mask import TileMask
from cute_kernels.plan.packed import PackedSeqlens, PackedTileOrder
from cute_kernels.seqlen import (
    CutSeqlens,
    DenseSeqlens,
    LedSeqlens,
    SeqlenInfo,
    lead_of_few_keys,
    lead_of_queries,
)
from cute_kernels.tile_scheduler import (
    Sections,
    ShortTiles,
    TileDivisors,
    TileOrder,
    heads_of_last,
    short_m_blocks,
)
from cute_kernels.window import Window
from hopper.config import WARPGROUP_ROWS, ForwardConfig
from hopper.forward.store import DenseTmaStore, PackedTmaStore
from hopper.tiles import TmaOperand, ragged_view


@dataclass(frozen=True)
class DenseBatch(LoopInvariant):
    """Sequences of one length in tensors (batch, seqlen, heads, head_dim); LSE is (batch, heads, seqlen_q or 0).

    ``lengths`` is what the kernel is given of them: those of Q and K, and where tiles are counted from the end the
    queries that lead.
    """

    config: ForwardConfig

    store_type = DenseTmaStore

    def view(self, tensor: cute.Tensor) -> cute.Tensor:
        """A tensor of rows as TMA sees it: (seqlen, head_dim, heads, batch)."""
        return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 3, 2, 0]))

    @property
    def rows_of_box(self) -> int | tuple[int, int]:
        """Of Q and O, that TMA copies for a warpgroup."""
        return WARPGROUP_ROWS

    def view_queries(self, tensor: cute.Tensor) -> cute.Tensor:
        """``view`` of Q or O."""
        return self.view(tensor)

    def view_outputs(self, mO: cute.Tensor) -> cute.Tensor:
        """O as the store takes it."""
        return self.view_queries(mO)

    def make_o_atom(self, mO: cute.Tensor, layout: cute.ComposedLayout) -> tuple:
        """The TMA atom that stores O, and its coordinate tensor; ``mO`` is ``view_outputs``."""
        store, box = cpasync.CopyBulkTensorTileS2GOp(), (self.rows_of_box, self.config.head_dim_v)
        return cpasync.make_tiled_tma_atom(store, mO, self.layout_of_box(layout), box)

    def layout_of_box(self, layout: cute.ComposedLayout) -> cute.ComposedLayout:
        """Of a warpgroup's rows in shared memory those of ``rows_of_box``."""
        return layout

    def queries_and_heads(self, mQ: cute.Tensor) -> tuple[Int32, Int32, Int32]:
        """Of the view of Q the queries of a sequence, the heads that have tiles of their own, and the sequences."""
        return mQ.shape[0], mQ.shape[2], mQ.shape[3]

    def group(self, mQ: cute.Tensor, mK: cute.Tensor) -> Int32:
        """Heads with tiles of their own that share the keys of a head."""
        return self.queries_and_heads(mQ)[1] // mK.shape[2]

    def operand(self, *parts) -> TmaOperand:
        """Q or O, as TMA copies them."""
        return TmaOperand(*parts)

    def heads_and_sequences(self, mLSE: cute.Tensor) -> tuple[Int32, Int32]:
        """Heads that have tiles of their own, and sequences; ``mLSE`` is ``view_lse``."""
        return mLSE.shape[1] // self.config.group, mLSE.shape[2]

    def block_range(self, window: Window, mLSE: cute.Tensor) -> BlockRange:
        """Which keys tiles visit."""
        return BlockRange(self.config.tile_queries, self.config.tile_n, window, self.config.few_keys)

    def mask(self, window: Window, seqlens: SeqlenInfo, row: Int32, col: Int32) -> TileMask:
        """That of a thread whose first row of a sequence's tiles is ``row``."""
        return TileMask(window, self.config.tile_n, seqlens, row, col)

    def view_lse(self, mLSE: cute.Tensor) -> cute.Tensor:
        return cute.make_tensor(mLSE.iterator, cute.select(mLSE.layout, mode=[2, 1, 0]))

    def lengths(self, mQ: cute.Tensor, mK: cute.Tensor, plan: tuple) -> tuple:
        c, seqlens = self.config, (self.queries_and_heads(mQ)[0], mK.shape[0])
        if c.few_keys:
            return *seqlens, lead_of_few_keys(seqlens, c.tile_m, WARPGROUP_ROWS, c.few_keys)
        return (*seqlens, lead_of_queries(seqlens, c.tile_m)) if c.counts_from_end else seqlens

    def sections(self, mQ: cute.Tensor, mK: cute.Tensor, num_ctas: Int32) -> Sections:
        """Of ``TileOrder``, for the views of Q and K."""
        seqlen_q, heads, batches = self.queries_and_heads(mQ)
        m_blocks, kv_heads = cute.ceil_div(seqlen_q, self.config.tile_queries), mK.shape[2] * batches
        group = heads // mK.shape[2]
        last = heads_of_last(m_blocks, kv_heads, group, num_ctas)
        return Sections.of_keys(self._bytes_per_key, mK.shape[0], kv_heads, group, last)

    def num_ctas(self, mQ: cute.Tensor, num_ctas: Int32) -> Int32:
        """No more than there are tiles."""
        seqlen_q, heads, batches = self.queries_and_heads(mQ)
        return cutlass.min(num_ctas, cute.ceil_div(seqlen_q, self.config.tile_queries) * heads * batches)

    def divisors(
        self, mQ: cute.Tensor, mK: cute.Tensor, sections: Sections
    ) -> tuple[TileDivisors | ShortTiles, ...]:
        """Of ``order``, for the views of Q and K, and its ``ShortTiles`` if it has them; none where there are no
        registers for them."""
        if not self.config.has_divisors:
            return ()
        sizes, group = self.queries_and_heads(mQ), self.group(mQ, mK)
        if not self.config.ends_with_short_tiles:
            return (self._order(*sizes, sections).make_divisors(group),)
        seqlens, kv_heads = (mQ.shape[0], mK.shape[0]), mK.shape[2] * mK.shape[3]
        c = self.config
        m_blocks = short_m_blocks(self._bytes_per_key, seqlens, kv_heads, c.tile_m, c.least_m_blocks)
        short = ShortTiles(m_blocks, cute.FastDivmodDivisorV2(Int32(mQ.shape[2] * mQ.shape[3])))
        return self._order(*sizes, sections, (), (short,)).make_divisors(group), short

    def order(
        self,
        lengths: tuple,
        mLSE: cute.Tensor,
        heads_per_kv_head: Int32,
        sections: Sections,
        divisors: tuple = (),
    ) -> TileOrder:
        """For the views of the kernel."""
        num_heads, num_batches = self.heads_and_sequences(mLSE)
        return self._order(lengths[0], num_heads, num_batches, sections, divisors[:1], divisors[1:])

    def _order(
        self,
        seqlen_q: Int32,
        num_heads: Int32,
        num_batches: Int32,
        sections: Sections,
        divisors: tuple[TileDivisors, ...] = (),
        short_tiles: tuple[ShortTiles, ...] = (),
    ) -> TileOrder:
        return TileOrder(
            cute.ceil_div(seqlen_q, self.config.tile_queries),
            num_heads,
            num_batches,
            sections,
            longest_first=self._longest_first,
            divisors=divisors,
            short_tiles=short_tiles,
        )

    def seqlens(self, lengths: tuple) -> DenseSeqlens:
        if self.config.stores_first_apart:
            return CutSeqlens(*lengths, self.config.tile_m)
        return LedSeqlens(*lengths) if self.config.counts_from_end else DenseSeqlens(*lengths)

    def view_first(self, mO: cute.Tensor, lengths: tuple) -> cute.Tensor:
        """Of the view of O the rows of the first query tile, which may be fewer than a tile."""
        shape = self.seqlens(lengths).first_rows, *mO.shape[1:]
        return cute.make_tensor(mO.iterator, cute.make_layout(shape, stride=mO.stride))

    @property
    def _bytes_per_key(self) -> int:
        c = self.config
        return (c.head_dim + c.head_dim_v) * (DSL_DTYPES[c.dtype].width // 8)

    @property
    def _longest_first(self) -> bool:
        """Under a sliding window too: its tiles take as long as each other, but for the first ones of a sequence."""
        return self.config.causal


class PackedBatch(DenseBatch):
    """Sequences of any lengths behind each other in tensors (total, heads, head_dim); LSE is (heads, total_q or 0).

    ``lengths`` are a plan (``cute_kernels/plan/packed.py``) and the number of its sequences.
    """

    store_type = PackedTmaStore
    order_type = PackedTileOrder

    def heads_and_sequences(self, mLSE: cute.Tensor) -> tuple[Int32, Int32]:
        """Sequences lie in one."""
        return mLSE.shape[1] // self.config.group, Int32(1)

    def view(self, tensor: cute.Tensor) -> cute.Tensor:
        """(rows, head_dim, heads, ...), as ``ragged_view`` gives it."""
        return ragged_view(cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[0, 2, 1])))

    def view_lse(self, mLSE: cute.Tensor) -> cute.Tensor:
        return cute.make_tensor(mLSE.iterator, cute.select(mLSE.layout, mode=[1, 0]))

    def lengths(self, mQ: cute.Tensor, mK: cute.Tensor, plan: tuple) -> tuple:
        return plan

    def sections(self, mQ: cute.Tensor, mK: cute.Tensor, num_ctas: Int32) -> tuple:
        """None: the kernel works them out for each sequence."""
        return ()

    def num_ctas(self, mQ: cute.Tensor, num_ctas: Int32) -> Int32:
        return num_ctas

    def divisors(self, mQ: cute.Tensor, mK: cute.Tensor, sections: Sections) -> tuple[TileDivisors, ...]:
        """None: each sequence has other tiles."""
        return ()

    def order(
        self,
        lengths: tuple,
        mLSE: cute.Tensor,
        heads_per_kv_head: Int32,
        sections: Sections,
        divisors: tuple = (),
    ) -> PackedTileOrder:
        (plan, sequences), (num_heads, _) = lengths, self.heads_and_sequences(mLSE)
        return self.order_type(
            plan,
            sequences,
            PackedTileOrder.count(plan, num_heads),
            num_heads,
            heads_per_kv_head,
            self.config.tile_queries,
            self._longest_first,
        )

    def seqlens(self, lengths: tuple) -> PackedSeqlens:
        return PackedSeqlens(lengths[0])
