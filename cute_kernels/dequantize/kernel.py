"""Copies the keys and values that a call reads out of a cache of e4m3, times their descales, to 16 bits."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.append.kernel import Places
from cute_kernels.append.rotary import load, widen
from cute_kernels.dequantize.config import (
    AT_A_TIME,
    CTAS,
    LANES,
    VECTOR,
    WARPS,
    DequantizeConfig,
    validate_dequantize_config,
)
from cute_kernels.integers import ceil_div, divide, maximum, minimum


class DequantizeKernel:
    """A warp a key: it looks up the place once, and each lane moves VECTOR columns of K and as many of V at a time.

    CTAs are shared out evenly over the sequences, and those of a sequence take its keys in turn, ``WARPS`` at a time,
    so that a short sequence costs what its keys cost. What lies behind a length is neither read nor written; a key that
    has no place in the cache becomes zeros.
    """

    def __init__(self, config: DequantizeConfig):
        validate_dequantize_config(config)
        self.config = config

    @cute.jit
    def __call__(
        self,
        mKCache: cute.Tensor,
        mVCache: cute.Tensor,
        mLengths: cute.Tensor,
        mFirst: cute.Tensor,
        mBatchIdx: cute.Tensor,
        mPageTable: cute.Tensor,
        mKDescale: cute.Tensor,
        mVDescale: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        stream,
    ):
        """Launch, with what ``compile_dequantize`` describes."""
        batch, room = mK.shape[0], mK.shape[1]
        ctas = minimum(ceil_div(room, WARPS), maximum(ceil_div(CTAS, batch), 1))
        self.kernel(
            (mKCache, mVCache), (mLengths, mFirst, mBatchIdx, mPageTable), (mKDescale, mVDescale), (mK, mV)
        ).launch(grid=(ctas, batch, 1), block=(WARPS * LANES, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, caches: tuple, where: tuple, descales: tuple, copies: tuple):
        cta, sequence, _ = cute.arch.block_idx()
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        mLengths, mFirst, mBatchIdx, mPageTable = where
        places = Places(mLengths, mBatchIdx, mPageTable, caches[0].shape[0], caches[0].shape[1])
        entry, first = places.entry(sequence), Int32(0)
        if mFirst.shape[0] > 0:
            first = mFirst[sequence]
        keys = minimum(mLengths[sequence], copies[0].shape[1])
        step = cute.arch.grid_dim()[0] * WARPS
        for key in cutlass.range(cta * WARPS + warp, keys, step, unroll=1):
            page, row = places.find(entry, first + key)
            self._move(caches, descales, copies, (sequence, key), (page, row), lane)

    @cute.jit
    def _move(self, caches: tuple, descales: tuple, copies: tuple, to: tuple, at: tuple, lane: Int32):
        """One key, and its value."""
        page, row = at
        chunks = [x.shape[3] // VECTOR for x in caches]
        number = [x.shape[2] * n for x, n in zip(caches, chunks, strict=True)]
        for first in cutlass.range(lane, maximum(*number), AT_A_TIME * LANES, unroll=1):
            # Loads of all go before what is done with any; past the end, the last is loaded again.
            moved = []
            for i in cutlass.range_constexpr(2 * AT_A_TIME):
                n, own = i % 2, first + i // 2 * LANES
                place = minimum(own, number[n] - 1)
                head = divide(place, chunks[n])
                column = place - head * chunks[n]
                found = load(caches[n][maximum(page, 0), row, head, None], column, VECTOR)
                if const_expr(self.config.row_scales):
                    scale = descales[n][maximum(page, 0), row, head]
                else:
                    scale = descales[n][to[0], head]
                target = copies[n][to[0], to[1], head, None]
                moved.append((own < number[n], found, scale, target, column))
            for i in cutlass.range_constexpr(2 * AT_A_TIME):
                is_in, found, scale, target, column = moved[i]
                if is_in:
                    self._store(found, scale, page >= 0, target, column)

    @cute.jit
    def _store(self, found: cute.Tensor, scale: Float32, is_there, target: cute.Tensor, column: Int32):
        values = widen(found)
        part = cute.make_rmem_tensor(VECTOR, target.element_type)
        for i in cutlass.range_constexpr(VECTOR):
            values[i] = values[i] * scale if is_there else Float32(0.0)
        part.store(values.load().to(target.element_type))
        cute.autovec_copy(part, cute.local_tile(target, (VECTOR,), (column,)))
