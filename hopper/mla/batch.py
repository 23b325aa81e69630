"""Sequences of a cache over a latent, whose tiles are counted beside their key blocks."""

from dataclasses import dataclass
from typing import Any

from cute_kernels.integers import divide
from cute_kernels.seqlen import SeqlenInfo
from hopper.decode.batch import CacheBatch


@dataclass(frozen=True)
class LatentBatch(CacheBatch):
    """``CacheBatch`` that counts tiles too. A K/V head has the tiles of this CTA alone, where ``together`` of them are
    visited at the same time."""

    together: Any = 1

    def row_tiles(self, seqlens: SeqlenInfo) -> Any:
        """Tiles of a K/V head that this CTA visits."""
        return divide(CacheBatch.row_tiles(self, seqlens), self.together)

    def counts(self, seqlens: SeqlenInfo) -> tuple[Any, ...]:
        tiles = self.tiles(seqlens)
        return self.blocks(seqlens).units * tiles, tiles
