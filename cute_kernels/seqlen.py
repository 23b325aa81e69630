"""Where the sequences of a batch lie, and how long they are."""

from dataclasses import dataclass
from typing import Any

from cute_kernels.integers import ceil_div
from cute_kernels.invariant import LoopInvariant


@dataclass(frozen=True)
class PackedRows(LoopInvariant):
    """Of packed rows, the ``length`` from ``offset`` on."""

    offset: Any
    length: Any


@dataclass(frozen=True)
class SeqlenInfo(LoopInvariant):
    """One sequence: its lengths, its number in the batch, and the first of its rows in packed Q and O, and K and V.

    Offsets of sequences that have rows of their own are 0 when the kernel is compiled, and cost nothing.
    """

    seqlen_q: Any
    seqlen_k: Any
    batch: Any = 0
    offset_q: Any = 0
    offset_k: Any = 0
    is_packed: bool = False

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
        """Where its rows of Q and O lie: ``PackedRows``, or its number in a dimension for the batch."""
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
