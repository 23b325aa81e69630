"""Scales of FP8 blocks, from global memory to the consumers."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.fast_math import maximum_or_nan
from hopper.forward.unscaled import NoScales

SLOT_FLOATS = 2
"""A slot: the scale of a block of K times softmax_scale log2(e), and the unit of O, which is the scale of V or more."""

SLOTS_PER_STAGE = 2
"""``ScalePublisher`` says why."""

UNIT_RANGE = 2.0**-64
"""The unit of O is no less than this part of the largest so far, so that O stays within float32. What a quieter block
adds is too large then, but below 2^-50 of the largest V that the tile has seen."""


class BlockScales(NamedTuple):
    """Scales in global memory, float32, and how many rows share one.

    ``q`` (batch, heads, blocks of Q) and ``k`` (batch, kv_heads, blocks of K) multiply S, ``v`` (batch, kv_heads,
    blocks of K) multiplies V and is positive; ``o`` (batch, kv_heads, 1) multiplies the output, to whose rows with keys
    ``mean_v`` (batch, kv_heads, head_dim_v), or (batch, kv_heads, 0) for none, is added then.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    mean_v: cute.Tensor
    block_q: Int32
    block_k: Int32


@dataclass(frozen=True)
class ScalePublisher(NoScales):
    """Writes the scales of each key block to shared memory, so that no consumer waits for global memory or divides.

    There are twice as many slots as stages of K. The slot of a block was last used 2 ``stages`` blocks ago, and
    the block ``stages`` + 1 ago has been released before the stage of the last block was acquired; so a slot
    can be written before its stage is acquired. The arrival with which the producer acquires the stage publishes it:
    one lane writes and one arrives, with the warp's barrier between them. ``largest_unit`` is a register.
    """

    scale_log2: Float32
    scales: BlockScales
    tile_n: int
    slots: cute.Tensor
    largest_unit: cute.Tensor

    def begin(self):
        self.largest_unit[0] = Float32(0.0)

    @cute.jit
    def publish(self, head_kv: Int32, batch: Int32, n_block: Int32, slot: Int32):
        s = self.scales
        block = n_block * self.tile_n // s.block_k
        if cute.arch.lane_idx() == 0:
            self.slots[slot, 0] = _valid(s.k[batch, head_kv, block]) * self.scale_log2
            least = self.largest_unit[0] * Float32(UNIT_RANGE)
            unit = maximum_or_nan(_valid(s.v[batch, head_kv, block]), least)
            self.largest_unit[0] = cute.arch.fmax(self.largest_unit[0], unit)
            self.slots[slot, 1] = unit
        cute.arch.sync_warp()


@cute.jit
def _valid(scale: Float32) -> Float32:
    """Where a scale is negative, NaN, which reaches all that it would make wrong: it would turn maxima into minima."""
    return scale if scale >= Float32(0.0) else Float32.nan
