"""Which query tiles see a key tile, and which of them need no mask: the transpose of ``key_blocks``.

Plain arithmetic on integers: the same functions serve the kernels (traced) and the host tests (Python ints).
"""

from dataclasses import dataclass
from typing import Any

from cute_kernels.integers import ceil_div, maximum, minimum
from cute_kernels.seqlen import SeqlenInfo


@dataclass(frozen=True)
class QueryRange:
    """Query tiles of a key tile, visited from ``begin`` up to ``end``; those below ``unmasked_begin`` need a mask."""

    tile_m: int
    tile_n: int
    causal: bool

    def begin(self, n_block: Any, seqlens: SeqlenInfo) -> Any:
        """The first tile with a query that sees a key of the tile. Every key is seen by the last query."""
        if not self.causal:
            return 0 * n_block
        return maximum(n_block * self.tile_n - seqlens.seqlen_k + seqlens.seqlen_q, 0) // self.tile_m

    def end(self, seqlens: SeqlenInfo) -> Any:
        return ceil_div(seqlens.seqlen_q, self.tile_m)

    def unmasked_begin(self, n_block: Any, seqlens: SeqlenInfo) -> Any:
        """The first tile from which on every query sees every key of the tile; none where keys are past the end."""
        past_last_key = (n_block + 1) * self.tile_n
        first = self.begin(n_block, seqlens)
        if self.causal:
            first_full_query = maximum(past_last_key - 1 - seqlens.seqlen_k + seqlens.seqlen_q, 0)
            first = maximum(first, ceil_div(first_full_query, self.tile_m))
        end = self.end(seqlens)
        # As arithmetic and not as a branch: 1 where the tile holds keys past the end.
        is_ragged = minimum(maximum(past_last_key - seqlens.seqlen_k, 0), 1)
        return minimum(first + is_ragged * end, end)

    def visitors(self, m_block: Any, num_n_blocks: Any, seqlens: SeqlenInfo) -> Any:
        """How many of ``num_n_blocks`` key tiles visit query tile ``m_block``: all, or the first few."""
        if not self.causal:
            return num_n_blocks
        past_last_key = maximum((m_block + 1) * self.tile_m + seqlens.seqlen_k - seqlens.seqlen_q, 0)
        return minimum(ceil_div(past_last_key, self.tile_n), num_n_blocks)

    def turn(self, n_block: Any, m_block: Any, num_n_blocks: Any, seqlens: SeqlenInfo) -> Any:
        """How many key tiles add to query tile ``m_block`` before this one does, where that has an order.

        Without a mask they come one behind the other. Under a causal mask each starts at its diagonal, and the last one
        is the first at its queries.
        """
        if not self.causal:
            return n_block
        return self.visitors(m_block, num_n_blocks, seqlens) - 1 - n_block
