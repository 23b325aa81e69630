"""Which key blocks a query tile visits, and which of them need no mask.

Plain arithmetic on integers: the same functions serve the kernels (traced) and the host tests (Python ints).
"""

from dataclasses import dataclass
from typing import Any

from cute_kernels.integers import ceil_div, maximum, minimum


@dataclass(frozen=True)
class BlockRange:
    """Key blocks of a query tile, visited from the last one down to block 0."""

    tile_m: int
    tile_n: int
    causal: bool

    def end(self, m_block: Any, seqlen_q: Any, seqlen_k: Any) -> Any:
        """One past the last block with a visible key; at least 1, so that a row without keys is still written."""
        n_end = ceil_div(seqlen_k, self.tile_n)
        if self.causal:
            last_row_keys = (m_block + 1) * self.tile_m + seqlen_k - seqlen_q
            n_end = minimum(n_end, ceil_div(last_row_keys, self.tile_n))
        return maximum(n_end, 1)

    def unmasked_end(self, m_block: Any, seqlen_q: Any, seqlen_k: Any) -> Any:
        """One past the last block in which every row of the tile sees every key."""
        n_full = seqlen_k // self.tile_n
        if self.causal:
            first_row_keys = m_block * self.tile_m + 1 + seqlen_k - seqlen_q
            n_full = minimum(n_full, maximum(first_row_keys, 0) // self.tile_n)
        return n_full
