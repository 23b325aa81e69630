"""How the sequences of a batch lie in the tensors of the backward kernels."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.integers import ceil_div, maximum, minimum
from cute_kernels.invariant import LoopInvariant
from cute_kernels.plan.packed import PackedSeqlens, PackedTileOrder
from cute_kernels.problem import DENSE
from cute_kernels.seqlen import DenseSeqlens, SeqlenInfo
from cute_kernels.tile_scheduler import (
    Sections,
    TailedTileOrder,
    TileOrder,
    TileScheduler,
    TurnedTileOrder,
    heads_in_turn,
)
from cute_kernels.window import Window
from hopper.backward.config import BackwardConfig
from hopper.backward.parts import QueryHeads
from hopper.backward.work import BackwardWork, PackedBackwardWork, PlacedBackwardWork
from hopper.tiles import ragged_view

TAIL_HEADS = 4
TAIL_ROWS = 65536
"""Key/value heads at the end of a launch whose shorter tiles come last (``TailedTileOrder``): those of TAIL_ROWS rows
of queries, and TAIL_HEADS at least, but see CTAS_UNDER_WAY. More of them share too little in L2."""

CTAS_UNDER_WAY = 132
"""On an H100 or H200. Under a causal mask alone, where several heads of Q share one of K, the tail of a dense launch
has at least so many key tiles: CTAs come to it at times that differ by up to a longest tile, as its tiles do
(``backward_shared_tails.json``)."""

SHORT_ROWS = 1024
"""Rows of queries of a key/value head, up to which half as many heads come last in a fixed order
(``TurnedTileOrder``)."""

LATE_ROWS = 2**20
"""Queries of a sequence times the rows of a query tile, above which no heads do (``backward_margins.json``)."""


def _flag(number: Int32 | int) -> Int32 | int:
    """1 for a number above 0, else 0."""
    return minimum(maximum(number, 0), 1)


def _heads_of_tail(
    config: BackwardConfig, rows: Int32, heads: Int32, num_n_blocks: Int32, least: Int32 | int = TAIL_HEADS
) -> Int32:
    """Of so many key/value heads, with so many rows of queries and key tiles each; ``least`` of them if there are."""
    tail = minimum(maximum(TAIL_ROWS // rows, least), heads)
    return tail * _flag(num_n_blocks - config.most_without_tail) if config.most_without_tail else tail


def _full_blocks(heads: Int32, num_n_blocks: Int32, shared: Int32) -> Int32:
    """Of the heads of a tail under a causal mask, where so many query heads share one of K and V."""
    is_long, is_shared = _flag(heads - TAIL_HEADS), _flag(shared - 1)
    return num_n_blocks // 2 * is_long * (1 - is_shared)


@dataclass(frozen=True, kw_only=True)
class PackedTailedOrder(PackedTileOrder):
    """The same of key tiles of a kernel with this config under a causal mask, where ``shared`` query heads share one of
    K and V: each sequence has a tail of its own (``TailedTileOrder``)."""

    config: BackwardConfig
    shared: Int32 | int

    def order_of(self, seqlens: SeqlenInfo) -> TailedTileOrder:
        num_blocks = ceil_div(seqlens.seqlen_k, self.tile)
        # Of a sequence without queries the order does not matter.
        rows = maximum(seqlens.seqlen_q, 1) * self.shared
        heads = _heads_of_tail(self.config, rows, self.num_heads, num_blocks)
        full_blocks = _full_blocks(heads, num_blocks, self.shared)
        return TailedTileOrder(num_blocks, self.num_heads, 1, heads, full_blocks)


@dataclass(frozen=True)
class DenseBatch(LoopInvariant):
    """Sequences of one length in tensors (batch, seqlen, heads, head_dim); LSE and delta are (batch, heads, padded
    seqlen_q), dQ (batch, heads, query tiles, parts, words)."""

    config: BackwardConfig

    mail_words = BackwardWork.mail_words
    ctas_under_way = CTAS_UNDER_WAY

    def view(self, tensor: cute.Tensor) -> cute.Tensor:
        """A tensor of rows as TMA sees it: (seqlen, head_dim, heads, batch)."""
        return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 3, 2, 0]))

    def view_vector(self, tensor: cute.Tensor) -> cute.Tensor:
        """LSE or delta."""
        return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[2, 1, 0]))

    def view_sums(self, mdQ: cute.Tensor) -> cute.Tensor:
        """(words, parts, query tiles of all heads and batches)."""
        batches, heads, tiles, parts, words = mdQ.shape
        layout = cute.make_layout(
            (words, parts, tiles * heads * batches), stride=(1, mdQ.stride[3], mdQ.stride[2])
        )
        return cute.make_tensor(mdQ.iterator, layout)

    def view_divided(self, tensor: cute.Tensor) -> cute.Tensor:
        """dK or dV, (batch, heads, key tiles, parts of a tile, words) and packed without batch, from the last mode to
        the first, as ``divided_part`` takes it."""
        modes = list(range(cute.rank(tensor)))
        return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes[::-1]))

    def divided_keys(self, mK: cute.Tensor, mdK: cute.Tensor) -> cute.Tensor:
        """The view of K with as many heads as are told apart: with ``divides_heads`` those of ``view_divided``. None
        but its shape is for use then."""
        if not self.config.divides_heads:
            return mK
        shape = *mK.shape[:2], mdK.shape[3], *mK.shape[3:]
        return cute.make_tensor(mK.iterator, cute.make_layout(shape, stride=mK.stride))

    def lengths(self, mQ: cute.Tensor, mK: cute.Tensor, plan: tuple) -> tuple:
        """What the kernel is given of them: those of Q and K."""
        return mQ.shape[0], mK.shape[0]

    def sizes(
        self, mQ: cute.Tensor, mK: cute.Tensor, mdQ: cute.Tensor, window: Window, num_ctas: Int32
    ) -> tuple[tuple, tuple]:
        """Of the views of Q and K: (key tiles, key/value heads, batches) and what ``TailedTileOrder``, ``TileOrder`` or
        ``TurnedTileOrder`` takes behind them; and (key tiles of all of them, query tiles of a head)."""
        num_n_blocks = cute.ceil_div(mK.shape[0], self.config.tile_n)
        tiles = num_n_blocks, mK.shape[2], mK.shape[3]
        if self.config.shortens:
            tiles = *tiles, *self.tail(mQ, mK, (window.left,) if window.has_left else ())
        if self.config.has_late_heads:
            tiles = *tiles, self.heads_of_section(mQ, mK, num_ctas), self.late_heads(mQ, mK)
        elif self.config.has_sections:
            tiles = *tiles, self.even_sections(mQ, mK, num_ctas)
        totals = num_n_blocks * mK.shape[2] * mK.shape[3], cute.ceil_div(mQ.shape[0], self.config.tile_m)
        return tiles, totals

    def heads_of_section(self, mQ: cute.Tensor, mK: cute.Tensor, workers: Int32 | int) -> Int32:
        """Key/value heads of one, of the views of Q and K, where so many key tiles are under way at a time."""
        most = workers * self.config.rows_apart // mQ.shape[0] // (mQ.shape[2] // mK.shape[2])
        return heads_in_turn(most, mK.shape[2] * mK.shape[3])

    def even_sections(self, mQ: cute.Tensor, mK: cute.Tensor, workers: Int32 | int) -> Sections:
        """Of ``TileOrder``, with so many heads in each."""
        return Sections.even(self.heads_of_section(mQ, mK, workers), mK.shape[2] * mK.shape[3])

    def tail(self, mQ: cute.Tensor, mK: cute.Tensor, left: tuple = ()) -> tuple:
        """What a ``TailedTileOrder`` has of heads and of full blocks at the end, of the views of Q and K. ``left`` has
        the left side of a window, if there is one.

        Under a causal mask alone no two tiles are as long as each other. Heads still come one behind the other with the
        longer half of theirs, unless several share K and V: then a CTA has too few tiles.
        """
        num_n_blocks = ceil_div(mK.shape[0], self.config.tile_n)
        for side in left:
            full = (mK.shape[0] - side) // self.config.tile_n
            return self._heads_of_tail(mQ, mK), minimum(maximum(full, 0), num_n_blocks)
        shared = mQ.shape[2] // mK.shape[2]
        of_each_cta = ceil_div(self.ctas_under_way, num_n_blocks) * _flag(shared - 1)
        heads = self._heads_of_tail(mQ, mK, maximum(of_each_cta, TAIL_HEADS))
        return heads, _full_blocks(heads, num_n_blocks, shared)

    def late_heads(self, mQ: cute.Tensor, mK: cute.Tensor) -> Int32:
        """Heads of the tail of a ``TurnedTileOrder``, of the views of Q and K: none where they would be more than half
        of all, which would begin together and wait."""
        rows, kv_heads = mQ.shape[0] * (mQ.shape[2] // mK.shape[2]), mK.shape[2] * mK.shape[3]
        late = self._heads_of_tail(mQ, mK) // (1 + _flag(SHORT_ROWS + 1 - rows))
        fits = _flag(kv_heads + 1 - 2 * late) * _flag(LATE_ROWS // self.config.tile_m + 1 - mQ.shape[0])
        return late * fits

    def _heads_of_tail(self, mQ: cute.Tensor, mK: cute.Tensor, least: Int32 | int = TAIL_HEADS) -> Int32:
        rows = mQ.shape[0] * (mQ.shape[2] // mK.shape[2])
        num_n_blocks = ceil_div(mK.shape[0], self.config.tile_n)
        return _heads_of_tail(self.config, rows, mK.shape[2] * mK.shape[3], num_n_blocks, least)

    def work(
        self,
        window: Window,
        scheduler: TileScheduler,
        lengths: tuple,
        heads_per_kv_head: Int32,
        sizes: tuple[tuple, tuple],
    ) -> BackwardWork:
        tiles, totals = sizes
        shortens = self.config.shortens
        if self.config.has_late_heads:
            order = TurnedTileOrder(*tiles)
        elif self.config.has_sections:
            order = TileOrder(*tiles, longest_first=True)
        else:
            order = (
                TailedTileOrder(*tiles)
                if shortens
                else TileOrder(*tiles, Sections(1, 0), longest_first=False)
            )
        seqlens = DenseSeqlens(*lengths)
        heads = QueryHeads(heads_per_kv_head)
        return BackwardWork(self.config, window, scheduler, order, *totals, seqlens, heads)


class PackedBatch(DenseBatch):
    """Sequences of any lengths behind each other in tensors (total, heads, head_dim); LSE and delta are (heads, rows of
    all query tiles), dQ (heads, query tiles, parts, words), in which sequences have whole tiles of their own
    (``cute_kernels/backward/packed.py``). ``lengths`` are a plan of key tiles and the number of its sequences."""

    def view(self, tensor: cute.Tensor) -> cute.Tensor:
        """(rows, head_dim, heads, ...), as ``ragged_view`` gives it."""
        return ragged_view(cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[0, 2, 1])))

    def view_vector(self, tensor: cute.Tensor) -> cute.Tensor:
        return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 0]))

    def view_sums(self, mdQ: cute.Tensor) -> cute.Tensor:
        heads, tiles, parts, words = mdQ.shape
        layout = cute.make_layout((words, parts, tiles * heads), stride=(1, mdQ.stride[2], mdQ.stride[1]))
        return cute.make_tensor(mdQ.iterator, layout)

    def lengths(self, mQ: cute.Tensor, mK: cute.Tensor, plan: tuple) -> tuple:
        return plan

    def sizes(
        self, mQ: cute.Tensor, mK: cute.Tensor, mdQ: cute.Tensor, window: Window, num_ctas: Int32
    ) -> tuple[tuple, tuple]:
        """(key/value heads), and (query tiles of a head, of all sequences)."""
        return (mK.shape[2],), (mdQ.shape[1],)

    def work(
        self,
        window: Window,
        scheduler: TileScheduler,
        lengths: tuple,
        heads_per_kv_head: Int32,
        sizes: tuple[tuple, tuple],
    ) -> BackwardWork:
        (plan, sequences), ((kv_heads,), (m_end,)) = lengths, sizes
        c, num_tiles = self.config, PackedTileOrder.count(plan, kv_heads)
        of_tiles = plan, sequences, num_tiles, kv_heads, Int32(1), c.tile_n
        order = order_of_keys(c, of_tiles, heads_per_kv_head)
        seqlens = PackedSeqlens(plan)
        rest = window, scheduler, order, num_tiles, m_end, seqlens, QueryHeads(heads_per_kv_head)
        return self._work_type(c, *rest)

    @property
    def _work_type(self) -> type[PackedBackwardWork]:
        """Couriers take numbers, and in windows the producer warp has no registers for messages."""
        c = self.config
        return PackedBackwardWork if c.ordered or c.window else PlacedBackwardWork

    @property
    def mail_words(self) -> int:
        return self._work_type.mail_words


def order_of_keys(config: BackwardConfig, of_tiles: tuple, shared: Int32) -> PackedTileOrder:
    """That of the key tiles of packed sequences. ``of_tiles`` is what ``PackedTileOrder`` takes first."""
    if config.shortens_packed:
        return PackedTailedOrder(*of_tiles, longest_first=False, of_keys=True, config=config, shared=shared)
    return PackedTileOrder(*of_tiles, longest_first=False, of_keys=True)


@dataclass(frozen=True)
class WrittenBatch(DenseBatch):
    """Sequences of one length, whose dQ is a tensor like Q."""

    def view_sums(self, mdQ: cute.Tensor) -> cute.Tensor:
        return self.view(mdQ)


def batch_of(config: BackwardConfig) -> DenseBatch:
    """By the layout of the config, and by what it makes of dQ."""
    if config.writes_dq:
        return WrittenBatch(config)
    return DenseBatch(config) if config.layout == DENSE else PackedBatch(config)
