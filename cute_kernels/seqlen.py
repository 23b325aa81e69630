"""Where the sequences of a batch lie, and how long they are."""

from dataclasses import dataclass
from typing import Any

from cute_kernels.integers import ceil_div, maximum, minimum
from cute_kernels.invariant import LoopInvariant


@dataclass(frozen=True)
class PackedRows(LoopInvariant):
    """Of packed rows, the ``length`` from ``offset`` on."""

    offset: Any
    length: Any


@dataclass(frozen=True)
class LedRows(LoopInvariant):
    """Those of number ``batch`` in a dimension for the batch, with ``lead`` that there are not counted in front."""

    batch: Any
    lead: Any


@dataclass(frozen=True)
class SeqlenInfo(LoopInvariant):
    """One sequence: its lengths, its number in the batch, and the first of its rows in packed Q and O, and K and V.

    Offsets of sequences that have rows of their own are 0 when the kernel is compiled, and cost nothing. Of such
    sequences ``lead_q`` queries may be counted in front of the first, which there are not: ``seqlen_q`` has them in it,
    so that the last tile is whole and the first one is not. Where there never are, it is 0 when compiled.
    """

    seqlen_q: Any
    seqlen_k: Any
    batch: Any = 0
    offset_q: Any = 0
    offset_k: Any = 0
    is_packed: bool = False
    lead_q: Any = 0

    @property
    def is_led(self) -> bool:
        """Whether there may be queries in front of the first."""
        return not isinstance(self.lead_q, int)

    def first_query_tile(self, tile: int) -> Any:
        """Of packed sequences that each have whole tiles of ``tile`` queries to themselves, in buffers of
        ``total_q // tile + batch + 1`` tiles: the first of this one."""
        return self.offset_q // tile + self.batch

    def first_key_block(self, block: int | Any) -> Any:
        """The same of blocks of ``block`` keys."""
        return self.offset_k // block + self.batch

    def padded_rows_k(self, step: int) -> PackedRows:
        """Where the rows of K and V lie in packed tensors in which each sequence has whole steps of ``step`` rows to
        itself (``first_key_block``)."""
        return PackedRows(self.first_key_block(step) * step, ceil_div(self.seqlen_k, step) * step)

    @property
    def rows_q(self) -> Any:
        """Where its rows of Q and O lie: ``PackedRows``, ``LedRows`` or its number in a dimension for the batch."""
        if self.is_led:
            return LedRows(self.batch, self.lead_q)
        return PackedRows(self.offset_q, self.seqlen_q) if self.is_packed else self.batch

    @property
    def rows_k(self) -> Any:
        """Those of K and V."""
        return PackedRows(self.offset_k, self.seqlen_k) if self.is_packed else self.batch


@dataclass(frozen=True)
class DenseSeqlens(LoopInvariant):
    """A batch of sequences of one length, each with rows of its own in a tensor with a dimension for the batch."""

    seqlen_q: Any
    seqlen_k: Any

    def of(self, batch: Any) -> SeqlenInfo:
        return SeqlenInfo(self.seqlen_q, self.seqlen_k, batch)

    def of_tile(self, m_block: Any, batch: Any) -> SeqlenInfo:
        """As query tile ``m_block`` counts them."""
        return self.of(batch)


@dataclass(frozen=True)
class LedSeqlens(DenseSeqlens):
    """The same with queries counted in front of the first (``lead_of_queries``)."""

    lead_q: Any

    def of(self, batch: Any) -> SeqlenInfo:
        return SeqlenInfo(self.seqlen_q + self.lead_q, self.seqlen_k, batch, lead_q=self.lead_q)


@dataclass(frozen=True)
class CutSeqlens(LedSeqlens):
    """The same for tiles of ``tile_m`` queries, of which the first one is a short sequence of its own: the queries that
    are left for it, and the keys that they see. None lead these."""

    tile_m: int

    def of_tile(self, m_block: Any, batch: Any) -> SeqlenInfo:
        is_later = minimum(m_block, 1)
        behind = (self.seqlen_q - self.first_rows) * (1 - is_later)
        lead_q = self.lead_q * is_later
        lengths = self.seqlen_q - behind + lead_q, self.seqlen_k - behind
        return SeqlenInfo(*lengths, batch, lead_q=lead_q)

    @property
    def first_rows(self) -> Any:
        """Of the first query tile where some would lead it; else all."""
        return self.seqlen_q + minimum(self.lead_q, 1) * (self.tile_m - self.lead_q - self.seqlen_q)


def lead_of_queries(seqlens: tuple[Any, Any], tile_m: int) -> Any:
    """Queries that are counted in front of the first one, so that the last tile of ``tile_m`` is whole; none where some
    see no key. ``seqlens`` are those of Q and K."""
    seqlen_q, seqlen_k = seqlens
    see_keys = minimum(maximum(seqlen_k - seqlen_q + 1, 0), 1)
    return (ceil_div(seqlen_q, tile_m) * tile_m - seqlen_q) * see_keys


def lead_of_few_keys(seqlens: tuple[Any, Any], tile_m: int, rows: int, width: int) -> Any:
    """``lead_of_queries`` where keys are at most ``width`` more than a multiple of ``rows``, those of a warpgroup; else
    none."""
    few = (seqlens[1] + rows - 1) % rows
    return lead_of_queries(seqlens, tile_m) * minimum(maximum(width - few, 0), 1)
