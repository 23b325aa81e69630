"""Scales of FP8 blocks, from global memory to the consumers."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.fast_math import maximum_or_nan
from cute_kernels.integers import minimum
from cute_kernels.seqlen import SeqlenInfo
from hopper.forward.unscaled import NoScales

SLOT_FLOATS = 2
"""A slot: the scale of a block of K times softmax_scale log2(e), and the unit of O, which is the scale of V or more."""

SLOTS_PER_STAGE = 2
"""``ScalePublisher`` says why."""

UNIT_RANGE = 2.0**-64
"""The unit of O is no less than this part of the largest so far, so that O stays within float32. What a quieter block
adds is too large then, but below 2^-50 of the largest V that the tile has seen."""


def blocks_of_sequence(seqlens: SeqlenInfo, offset: Int32, block: Int32) -> tuple:
    """Where the scales of a sequence are whose blocks of ``block`` rows begin at row ``offset``: (entry of the first
    dimension, its first block). Packed sequences have whole blocks to themselves in one row of blocks."""
    return (0, offset // block + seqlens.batch) if seqlens.is_packed else (seqlens.batch, 0)


def blocks_before(row: Int32, block: Int32 | cute.FastDivmodDivisorV2) -> Int32:
    """Whole blocks of so many rows before a row of a sequence. A division by a plain number takes some hundred cycles,
    which a tile begins with."""
    if isinstance(block, cute.FastDivmodDivisorV2):
        return Int32(divmod(row, block)[0])
    return row // block


class Runs(NamedTuple):
    """Tensors of a kernel with ``run_blocks``, those of ``MeansOfRuns``."""

    differences: cute.Tensor
    changes: cute.Tensor
    notes: cute.Tensor


class BlockScales(NamedTuple):
    """Scales in global memory, float32, and how many rows share one.

    ``q`` (batch, heads, blocks of Q) and ``k`` (batch, kv_heads, blocks of K) multiply S, ``v`` (batch, kv_heads,
    blocks of K) multiplies V and is positive; ``o`` (batch, kv_heads, 1) multiplies the output, to whose rows with keys
    ``mean_v`` (batch, kv_heads, head_dim_v), or (batch, kv_heads, 0) for none, is added then.

    Of packed sequences batch is 1 in the first three (``blocks_of_sequence``), and one more than the caller's in the
    others, since rows of no sequence stand behind the last. ``runs`` are there with ``run_blocks`` alone.

    With ``lone_scales`` ``q`` is (batch, kv_heads, heads of each, or tiles of heads), with any strides, and ``k`` and
    ``v`` are (batch, kv_heads, 1), of packed sequences too. Batch may be the caller's sequences alone there, behind
    which the scale is 1; that of ``mean_v`` is the one of ``o``. ``factor`` is empty, or of a softcap and has
    softmax_scale / cap; ``sinks`` is empty or has those of all heads.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    mean_v: cute.Tensor
    block_q: Int32 | cute.FastDivmodDivisorV2
    block_k: Int32
    runs: tuple[Runs, ...] = ()
    factor: tuple[Float32, ...] = ()
    sinks: tuple[cute.Tensor, ...] = ()


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
    def publish(self, head_kv: Int32, seqlens: SeqlenInfo, n_block: Int32, slot: Int32):
        s = self.scales
        entry, first = blocks_of_sequence(seqlens, seqlens.offset_k, s.block_k)
        block = self._block_of_scale(first + n_block * self.tile_n // s.block_k)
        if cute.arch.lane_idx() == 0:
            self.slots[slot, 0] = valid(s.k[entry, head_kv, block]) * self.scale_log2
            least = self.largest_unit[0] * Float32(UNIT_RANGE)
            unit = maximum_or_nan(valid(s.v[entry, head_kv, block]), least)
            self.largest_unit[0] = cute.arch.fmax(self.largest_unit[0], unit)
            self.slots[slot, 1] = unit
        cute.arch.sync_warp()

    def _block_of_scale(self, block: Int32) -> Int32:
        """Which the scales of ``block`` are read of."""
        return block


@dataclass(frozen=True)
class PartScalePublisher(ScalePublisher):
    """``ScalePublisher`` of dense tiles in parts. One without keys visits a block behind all (``SplitRange``), which
    has no scales: those of the last will do."""

    def _block_of_scale(self, block: Int32) -> Int32:
        return minimum(block, Int32(self.scales.k.shape[2]) - 1)


@cute.jit
def ask_for_scale(scales: cute.Tensor, sequence: Int32, head_kv: Int32, place: Int32) -> Float32:
    """With ``lone_scales``: what ``scale_of_sequence`` makes the scale of."""
    return scales[minimum(sequence, Int32(scales.shape[0]) - 1), head_kv, place]


@cute.jit
def scale_of_sequence(asked: Float32, scales: cute.Tensor, sequence: Int32) -> Float32:
    """1 behind the last sequence."""
    return asked if sequence < Int32(scales.shape[0]) else Float32(1.0)


@cute.jit
def valid(scale: Float32) -> Float32:
    """Where a scale is negative, NaN, which reaches all that it would make wrong: it would turn maxima into minima."""
    return scale if scale >= Float32(0.0) else Float32.nan
