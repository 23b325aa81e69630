"""Where the sequences of a batch lie, and how long they are."""

from dataclasses import dataclass
from typing import Any

from cute_kernels.invariant import LoopInvariant


@dataclass(frozen=True)
class SeqlenInfo(LoopInvariant):
    """One sequence: its lengths, and the first of its rows in Q and O, and in K and V.

    An offset that is the same for all sequences is an int when the kernel is compiled, and costs nothing. Today all are
    0, and no kernel reads them: every sequence has rows of its own.
    """

    seqlen_q: Any
    seqlen_k: Any
    offset_q: Any = 0
    offset_k: Any = 0


@dataclass(frozen=True)
class DenseSeqlens(LoopInvariant):
    """A batch of sequences of one length, each with rows of its own in a tensor with a dimension for the batch."""

    seqlen_q: Any
    seqlen_k: Any

    def of(self, batch: Any) -> SeqlenInfo:
        return SeqlenInfo(self.seqlen_q, self.seqlen_k)
