"""Where a tile lies, and how the warps of a CTA learn of it."""

from dataclasses import dataclass
from typing import Any

from cutlass import Int32
from cutlass.pipeline import PipelineState

from cute_kernels.invariant import LoopInvariant
from cute_kernels.seqlen import SeqlenInfo
from hopper import mail

WORDS = 8
"""int32 of a place in the mailbox: m_block, head, head_kv, batch, and the four of ``SeqlenInfo``."""


@dataclass(frozen=True)
class TilePlace(LoopInvariant):
    """An output tile: query tile ``m_block`` of a head and of a sequence; ``head_kv`` is the head of K and V."""

    m_block: Any
    head: Any
    head_kv: Any
    seqlens: SeqlenInfo


@dataclass(frozen=True)
class NumberedTiles(LoopInvariant):
    """Consumers are told the number of a tile, and work out where it lies. ``work`` is ``Work``.

    ``state`` is that of the mailbox.
    """

    work: Any

    words = 1
    """int32 of a message."""

    @property
    def end(self) -> Any:
        """What is below it is a tile."""
        return self.work.order.num_tiles

    def first(self, state: PipelineState) -> Int32:
        return self.work.scheduler.first()

    def place(self, tile: Int32, state: PipelineState) -> TilePlace:
        """Where the tile lies that ``first`` or ``next`` gave."""
        return self.work.place(tile)

    def next(self, state: PipelineState) -> tuple[Int32, PipelineState]:
        """The next tile, once this one is done, and the state after it."""
        tile = self.work.scheduler.receive(state)
        state.advance()
        return tile, state


class PlacedTiles(NumberedTiles):
    """The producer tells consumers where a tile lies.

    For packed sequences. Two loads from the plan that wait for each other, and some divisions by what is not known
    before, take about a thousand cycles. The producer's are hidden by the blocks that are in the pipeline; a consumer's
    would stand between two tiles. What a consumer takes for a tile's number is its m_block.
    """

    words = WORDS
    end = mail.NO_TILE

    def first(self, state: PipelineState) -> Int32:
        return mail.await_first_word(self.work.scheduler, WORDS, state)

    def place(self, tile: Int32, state: PipelineState) -> TilePlace:
        return place_of(mail.read(self.work.scheduler, WORDS, state))

    def next(self, state: PipelineState) -> tuple[Int32, PipelineState]:
        state.advance()
        return self.first(state), state


class KeptPlaces(PlacedTiles):
    """A message stays in the mailbox until its tile is done, so that it can be read again where registers are few."""

    def place(self, tile: Int32, state: PipelineState) -> TilePlace:
        return place_of(mail.look_at(self.work.scheduler, WORDS, state))

    def next(self, state: PipelineState) -> tuple[Int32, PipelineState]:
        mail.release(self.work.scheduler, state)
        return super().next(state)


def place_of(message: tuple) -> TilePlace:
    """What ``message_of`` has made the words of."""
    m_block, head, head_kv, batch, *lengths = message
    seqlen_q, seqlen_k, offset_q, offset_k = lengths
    return TilePlace(
        m_block, head, head_kv, SeqlenInfo(seqlen_q, seqlen_k, batch, offset_q, offset_k, is_packed=True)
    )


def message_of(place: TilePlace) -> tuple:
    """The words of a place in the mailbox."""
    seqlens = place.seqlens
    lengths = seqlens.seqlen_q, seqlens.seqlen_k, seqlens.offset_q, seqlens.offset_k
    return place.m_block, place.head, place.head_kv, seqlens.batch, *lengths
