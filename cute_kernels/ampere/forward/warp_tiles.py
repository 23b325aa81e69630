"""What a warp reads of the tiles in shared memory as operands of mma.sync."""

import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.ampere.config import MMA_ROWS, AmpereForwardConfig
from cute_kernels.ampere.shared_tile import SharedTile, chunks_first, rows_first
from cute_kernels.ampere.warp_operand import WarpOperand
from cute_kernels.invariant import LoopInvariant


class WarpTiles(LoopInvariant):
    """The operands of one warp: its rows of Q, and all of K and V of a stage.

    ``q`` may have been read to registers, as ``q_blocks`` by band and step.
    """

    def __init__(self, config: AmpereForwardConfig, sQ: Int32, sKV: Int32, warp: Int32, lane: Int32):
        c = config
        q_tile, v_tile = SharedTile(c.head_dim), SharedTile(c.head_dim_v)
        rows_of_warp = sQ + warp * c.rows_per_warp * q_tile.pitch
        self.config = config
        self.q = WarpOperand(q_tile, rows_of_warp, rows_first(lane), transpose=False)
        self.k = WarpOperand(q_tile, sKV, chunks_first(lane), transpose=False)
        self.v = WarpOperand(v_tile, sKV, rows_first(lane), transpose=True)
        self.q_words = cute.make_rmem_tensor(
            4 * c.bands * (c.head_dim // MMA_ROWS) if c.q_in_registers else 1, Int32
        )

    def keep_q(self) -> None:
        """Read Q to registers, if that is where it stays."""
        if self.config.q_in_registers:
            steps = self.config.head_dim // MMA_ROWS
            for number in range(self.config.bands * steps):
                words = self.q.block(number // steps, number % steps, Int32(0))
                for i in range(4):
                    self.q_words[4 * number + i] = words[i]

    def q_block(self, band: int, step: int) -> tuple:
        """An A operand of 16 rows."""
        if self.config.q_in_registers:
            first = 4 * (band * (self.config.head_dim // MMA_ROWS) + step)
            return tuple(self.q_words[first + i] for i in range(4))
        return self.q.block(band, step, Int32(0))
