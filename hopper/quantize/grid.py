"""The items of the quantizer, blocks of Q, K and V: which one a CTA takes next, and where it lies."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from cute_kernels.integers import ceil_div, maximum, minimum
from cute_kernels.invariant import LoopInvariant
from cute_kernels.plan.kernel import rows_of
from cute_kernels.tile_scheduler import CLAIMED_TILES, FINISHED_CTAS
from hopper.quantize.config import MAILS

PHASES = 4
"""Groups of CTAs that are at different parts of their work at any time."""


@dataclass(frozen=True)
class Grid(LoopInvariant):
    """Numbers the items of Q, then those of K, then those of V, and shares them out.

    An item is a block, or some blocks or rows that follow each other. Neighbours are heads of the same rows, whose
    memory is neighbouring too. ``of_q`` and ``of_kv`` divide by the heads, and by the items of a sequence.

    CTA c takes the items c, c + ctas, c + 2 ctas and so on, but begins in the middle of them and comes to the first
    ones last, each quarter of the CTAs a quarter later: a rotation keeps the ALUs busy and V the memory, so the two
    had better happen at the same time. With ``v_is_late`` none begins with V, whose mean another kernel is still at,
    and quarters are those of the items in front of V.
    """

    first_of_k: Int32
    first_of_v: Int32
    end: Int32
    of_q: tuple
    of_kv: tuple
    v_is_late: bool

    def share(self, cta: Int32, ctas: Int32) -> tuple[Int32, Int32]:
        """(items of a CTA, the one to begin with)."""
        count = ceil_div(self.end - cta, ctas)
        to_begin_with = maximum(self.first_of_v - cta, 0) // ctas if self.v_is_late else count
        return count, cta + PHASES * cta // ctas * to_begin_with // PHASES * ctas

    def at(self, position: Int32, ctas: cute.FastDivmodDivisorV2) -> Int32:
        """The item at a position where the first items of all shares come first, and then the second ones; ``end``
        behind the last. Without branches, so that ints serve too."""
        row, cta = (Int32(x) for x in divmod(minimum(position, self.end), ctas))
        count = Int32(divmod(self.end - cta + ctas.divisor - 1, ctas)[0])
        in_front = Int32(divmod(maximum(self.first_of_v - cta, 0), ctas)[0]) if self.v_is_late else count
        index = row + Int32(divmod(PHASES * cta, ctas)[0]) * in_front // PHASES
        index = index - count * minimum(maximum(index - count + 1, 0), 1)
        is_there = minimum(maximum(self.end - position, 0), 1)
        return self.end + is_there * (cta + index * ctas.divisor - self.end)

    @cute.jit
    def place(self, item: Int32) -> tuple[Int32, Int32, Int32]:
        """(item of the sequence, head, batch entry)."""
        number, head, batch = Int32(0), Int32(0), Int32(0)
        if item < self.first_of_k:
            number, head, batch = split(item, *self.of_q)
        else:
            first = self.first_of_k if item < self.first_of_v else self.first_of_v
            number, head, batch = split(item - first, *self.of_kv)
        return number, head, batch


@dataclass(frozen=True)
class PackedSide(LoopInvariant):
    """Packed sequences of Q, or of K and V: which rows an item of ``rows`` rows has, by its number.

    Those of sequence b begin with item cu_seqlens[b] // rows + b (``SeqlenInfo.first_key_block``), so that no item has
    rows of two sequences, and some have none. ``total`` is the number of rows of the tensor.
    """

    cu_seqlens: cute.Tensor
    seqused: cute.Tensor
    total: Int32
    rows: int

    @cute.jit
    def find(self, item: Int32) -> tuple[Int32, Int32, Int32, Int32]:
        """(item of the sequence, sequence, its first row, its rows), the sequence by bisection of the offsets. Rows
        behind the last sequence count as one more."""
        sequence, high = Int32(0), self.cu_seqlens.shape[0] - 1
        while sequence < high:
            middle = (sequence + high + 1) // 2
            is_before = self._first_item(middle) <= item
            sequence = middle if is_before else sequence
            high = high if is_before else middle - 1
        offset, length = rows_of(self.cu_seqlens, self.seqused, self.total, sequence)
        # Whatever the offsets say, nothing outside of the tensors is touched.
        number = maximum(item - self._first_item(sequence), 0)
        return number, sequence, offset, length

    def _first_item(self, sequence: Int32) -> Int32:
        offset = minimum(maximum(self.cu_seqlens[sequence], 0), self.total)
        return offset // self.rows + sequence


@dataclass(frozen=True)
class PackedGrid(Grid):
    """``Grid`` for packed sequences; ``of_q`` and ``of_kv`` divide by the heads alone."""

    q: PackedSide
    k: PackedSide

    @cute.jit
    def place(self, item: Int32) -> tuple[Int32, Int32, Int32, Int32, Int32]:
        """(item of the sequence, head, sequence, its first row, its rows)."""
        number, head, sequence, offset, length = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        if item < self.first_of_k:
            row, head_q = divmod(item, self.of_q[0])
            head = Int32(head_q)
            number, sequence, offset, length = self.q.find(Int32(row))
        else:
            first = self.first_of_k if item < self.first_of_v else self.first_of_v
            row, head_kv = divmod(item - first, self.of_kv[0])
            head = Int32(head_kv)
            number, sequence, offset, length = self.k.find(Int32(row))
        return number, head, sequence, offset, length


def split(
    index: Int32, heads: cute.FastDivmodDivisorV2, numbers: cute.FastDivmodDivisorV2
) -> tuple[Int32, Int32, Int32]:
    row, head = divmod(index, heads)
    batch, number = divmod(Int32(row), numbers)
    return Int32(number), Int32(head), Int32(batch)


@dataclass(frozen=True)
class Shares(LoopInvariant):
    """Each CTA works through its share of ``grid``. ``count`` is how many items are left, the current one included."""

    grid: Grid
    cta: Int32
    ctas: Int32

    def begin(self) -> tuple[Int32, Int32]:
        """(the first item, the count)."""
        count, item = self.grid.share(self.cta, self.ctas)
        return item, count

    def is_open(self, item: Int32, count: Int32) -> Boolean:
        """Whether there is an item."""
        return count > 0

    @cute.jit
    def following(self, item: Int32, count: Int32) -> Int32:
        """The item behind one."""
        return item + self.ctas if item + self.ctas < self.grid.end else self.cta

    def has(self, following: Int32, count: Int32) -> Boolean:
        """Whether that is one of this CTA."""
        return count > 1

    def claim(self, count: Int32) -> Int32:
        """Ask for an item of which ``pass_on`` tells all warps."""
        return Int32(0)

    def pass_on(self, claimed: Int32, count: Int32):
        """What ``claim`` was given."""

    def advance(self, count: Int32) -> Int32:
        return count - 1

    def finish(self):
        """When there are no more items."""


@dataclass(frozen=True)
class Claims(Shares):
    """The first ``known`` items of each share, two or more, and then, one at a time, the first one of all shares that
    nobody has claimed. ``count`` is the number of the step.

    Where two kernels in front find means, CTAs begin at different times, as they get the place of those that have
    ended. So those that are late take fewer items. The order is that of ``Shares``: first the items of all CTAs that
    are the next of their shares, then those behind them; so a CTA mostly stays with what it is at, and with its code.

    ``counter`` is that of ``TileScheduler``, zero before and behind the kernel. Thread 0 asks it in each step for the
    item of the step after the next, before it waits for data, and passes on what it gets behind that; at once, it would
    hold up its warp for the trip to L2, and the others at their next barrier. Warps may run ahead of each other as far
    as the mailbox lets them:

    =====  ====================  =====================================================
    full   1 arrival, thread 0   an item is in the mailbox
    empty  an arrival each warp  all have read it, so that the next but one may lie there
    =====  ====================  =====================================================
    """

    counter: cute.Tensor
    known: Int32
    divisor: cute.FastDivmodDivisorV2
    warps: int
    thread: Int32
    mailbox: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer

    @cute.jit
    def prepare(self):
        """Make the mailbox, in front of a barrier of the CTA."""
        if self.thread == 0:
            for i in cutlass.range_constexpr(MAILS):
                cute.arch.mbarrier_init(self.full + i, 1)
                cute.arch.mbarrier_init(self.empty + i, self.warps)
            cute.arch.mbarrier_init_fence()

    def begin(self) -> tuple[Int32, Int32]:
        return self.grid.share(self.cta, self.ctas)[1], Int32(0)

    def is_open(self, item: Int32, count: Int32) -> Boolean:
        return item < self.grid.end

    @cute.jit
    def following(self, item: Int32, count: Int32) -> Int32:
        """By whole warps; ``end`` of the grid if there is none."""
        number = count + 1 - self.known
        following = item + self.ctas if item + self.ctas < self.grid.end else self.cta
        following = following if self.cta + self.ctas < self.grid.end else self.grid.end
        if number >= 0:
            place, phase = number % MAILS, number // MAILS & 1
            cute.arch.mbarrier_wait(self.full + place, phase)
            if cute.arch.lane_idx() == 0:
                following = self.mailbox[place]
                cute.arch.mbarrier_arrive(self.empty + place)
            following = cute.arch.make_warp_uniform(following)
        return following

    def has(self, following: Int32, count: Int32) -> Boolean:
        return following < self.grid.end

    @cute.jit
    def claim(self, count: Int32) -> Int32:
        claimed = Int32(0)
        if self.thread == 0 and count + 2 >= self.known:
            claimed = cute.arch.atomic_add(self._word(CLAIMED_TILES), Int32(1), sem="relaxed", scope="gpu")
        return claimed

    @cute.jit
    def pass_on(self, claimed: Int32, count: Int32):
        number = count + 2 - self.known
        if self.thread == 0 and number >= 0:
            place, phase = number % MAILS, number // MAILS & 1
            cute.arch.mbarrier_wait(self.empty + place, phase ^ 1)
            self.mailbox[place] = self.grid.at(self.known * self.ctas + claimed, self.divisor)
            cute.arch.mbarrier_arrive(self.full + place)

    def advance(self, count: Int32) -> Int32:
        return count + 1

    @cute.jit
    def finish(self):
        """The last CTA to come here zeroes the counter again."""
        if self.thread == 0:
            before = cute.arch.atomic_add(self._word(FINISHED_CTAS), Int32(1), sem="acq_rel", scope="gpu")
            if before == self.ctas - 1:
                self.counter[CLAIMED_TILES] = Int32(0)
                self.counter[FINISHED_CTAS] = Int32(0)

    def _word(self, index: int) -> cute.Pointer:
        return self.counter.iterator + index
