"""When the factors of a tile's O are found, and its LSE."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.pipeline import PipelineState

from cute_kernels.fast_math import pin
from cute_kernels.fragments import ROWS_PER_THREAD
from cute_kernels.invariant import LoopInvariant
from cute_kernels.softmax import OnlineSoftmax
from hopper.forward.places import NumberedTiles, TilePlace


@dataclass(frozen=True)
class TileEnding(LoopInvariant):
    """Once O is complete. ``place`` is that of the tile; with ``recomputes`` it is found again in ``tiles``, by the
    number of the tile and the state of the mailbox, so that no register holds it from the begin of the tile."""

    tiles: NumberedTiles
    tile: Int32
    mail_state: PipelineState
    known_place: TilePlace
    recomputes: bool

    def place(self) -> TilePlace:
        if not self.recomputes:
            return self.known_place
        # `pin` hides from the compiler that this is known already, and so need not be held in registers.
        return self.tiles.place(pin(self.tile, Int32), self.mail_state)

    def under_last_product(self, softmax: OnlineSoftmax):
        """Called under the last P V of a tile, where there is no S any more."""

    def factors(self, softmax: OnlineSoftmax, place: TilePlace) -> tuple[cute.Tensor, cute.Tensor]:
        """What each of the thread's rows of O is multiplied with, and its LSE."""
        results = _rows(), _rows()
        softmax.finalize(*results, place.head_kv, place.seqlens.batch)
        return results


@dataclass(frozen=True)
class EarlyEnding(TileEnding):
    """Under the last P V: sums over lanes and a factor from global memory are awaited there."""

    results: tuple[cute.Tensor, cute.Tensor]

    @cute.jit
    def under_last_product(self, softmax: OnlineSoftmax):
        place = self.place()
        softmax.finalize(*self.results, place.head_kv, place.seqlens.batch)
        for r in range(ROWS_PER_THREAD):
            self.results[0][r] = pin(self.results[0][r])

    def factors(self, softmax: OnlineSoftmax, place: TilePlace) -> tuple[cute.Tensor, cute.Tensor]:
        return self.results


def ending_of(is_early: bool, *fields: Any) -> TileEnding:
    """``fields`` are those of ``TileEnding``."""
    return EarlyEnding(*fields, (_rows(), _rows())) if is_early else TileEnding(*fields)


def _rows() -> cute.Tensor:
    return cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
