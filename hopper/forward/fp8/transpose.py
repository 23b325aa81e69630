"""FP8 V that arrives in rows, transposed in shared memory by the producer warpgroup."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.pipeline import PipelineState

from cute_kernels.fast_math import pin
from cute_kernels.fragments import COLUMNS_PER_GROUP
from cute_kernels.invariant import LoopInvariant
from cute_kernels.seqlen import SeqlenInfo
from hopper.forward.fp8.config import FP8_KEYS_PER_STEP, Fp8ForwardConfig
from hopper.forward.operands import Pipelines
from hopper.swizzled_bytes import BytesByBits, SwizzledPlace
from hopper.tiles import TmaOperand

COLUMNS_PER_UNIT = 16
PRODUCER_WARPS = 4

EVEN_COLUMNS, TO_ODD_COLUMNS = 0x6420, 0x1111
"""Bytes 0 and 2 of a word are the even column of two keys, 1 and 3 the odd one: what selects the even ones from two
words, and what makes of it what selects the odd ones, by a sum or by flipping bits."""


class VTransposer(LoopInvariant):
    """Loads V in rows (keys, head_dim_v) and writes it as (head_dim_v, keys), keys in ``FP8_KEY_ORDER``.

    A unit is 32 keys x 16 columns. ``ldmatrix.trans`` gives a lane pairs of columns of two neighbouring keys, four
    times, 8 keys apart; two byte permutations make of them the four keys of one column that ``stmatrix`` wants, in
    the order in which the accumulator of Q K^T holds the keys. (FlashAttention-3 does it in this way, too.)
    A warp takes every fourth unit of columns, so that the addresses of its units differ by numbers that are known.
    """

    def __init__(
        self,
        config: Fp8ForwardConfig,
        v: TmaOperand,
        sVt: cute.Tensor,
        pipes: Pipelines,
        warp: Int32,
    ):
        self.config, self.v, self.pipes, self.warp = config, v, pipes, warp
        (self.pipe_rows,) = pipes.rows
        self.source = BytesByBits(v.smem, config.tile_n, config.head_dim_v)
        self.target = BytesByBits(sVt, config.head_dim_v, config.tile_n)

    @cute.jit
    def load(self, head_kv: Int32, seqlens: SeqlenInfo, n_block: Int32, state: PipelineState):
        """Issue the load of one block; by one warp."""
        tile = (self.config.tile_n, self.config.head_dim_v)
        smem, gmem = self.v.partition(tile, (None, 0), head_kv, seqlens.rows_k)
        self.pipe_rows.producer_acquire(state)
        barrier = self.pipe_rows.producer_get_barrier(state)
        cute.copy(self.v.atom, gmem[None, n_block], smem[None, state.index], tma_bar_ptr=barrier)

    @cute.jit
    def fetch(self, head_kv: Int32, seqlens: SeqlenInfo, n_block: Int32):
        """Have one block come to L2; by one warp."""
        tile = (self.config.tile_n, self.config.head_dim_v)
        _, gmem = self.v.partition(tile, (None, 0), head_kv, seqlens.rows_k)
        cute.prefetch(self.v.atom, gmem[None, n_block])

    @cute.jit
    def transpose(self, rows_state: PipelineState, v_state: PipelineState):
        """Make a stage of V of a loaded block; by all warps of the warpgroup."""
        self.pipe_rows.consumer_wait(rows_state)
        self._move_units(self._first_unit(rows_state.index, v_state.index), v_state)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            self.pipes.v.producer_commit(v_state)
        self.pipe_rows.consumer_release(rows_state)

    def _first_unit(self, rows_stage: Int32, v_stage: Int32) -> tuple[SwizzledPlace, SwizzledPlace, Int32]:
        """Of the warp's first unit: where a lane reads, where it writes, and the selector of ``_store_unit``."""
        # Pinned, so that nothing that comes of it is kept in registers from block to block.
        lane = pin(cute.arch.lane_idx(), Int32)
        # Lanes 8 i to 8 i + 7 name the rows of matrix i: a column of each pair, the other, and both again 16 keys on.
        # Even columns of four pairs go with odd ones of the others: eight rows that lie in different banks.
        pair, makes_quads = lane & 7, self.config.o_from_registers
        if makes_quads:
            row = row_of_quads(pair) + (((lane >> 3) + pair) & 1)
        else:
            row = pair * 2 + (((lane >> 3) + (pair >> 2)) & 1)
        row += self.warp * COLUMNS_PER_UNIT
        source = self.source.place(rows_stage, lane, self.warp)
        target = self.target.place(v_stage, row, lane >> 4)
        is_odd = (lane >> 2) & 1 if makes_quads else lane >> 4
        return source, target, EVEN_COLUMNS + is_odd * TO_ODD_COLUMNS

    @cute.jit
    def _move_units(self, first_unit: tuple[SwizzledPlace, SwizzledPlace, Int32], v_state: PipelineState):
        """``units_under_way`` are between their two places at a time: when one is stored, another is asked for. The
        first are at hand when the stage becomes free, which consumers wait for."""
        c, (source, target, selector) = self.config, first_unit
        units = [
            (step, columns)
            for step in range(c.tile_n // FP8_KEYS_PER_STEP)
            for columns in range(0, c.columns_pv // COLUMNS_PER_UNIT, PRODUCER_WARPS)
        ]
        loaded = []
        for i in cutlass.range_constexpr(len(units) + c.units_under_way):
            if const_expr(i == c.units_under_way):
                self.pipes.v.producer_acquire(v_state)
            if const_expr(i >= c.units_under_way):
                step, columns = units[i - c.units_under_way]
                address = target.address(columns * COLUMNS_PER_UNIT, step * 2)
                _store_unit(address, loaded.pop(0), selector)
            if const_expr(i < len(units)):
                step, columns = units[i]
                loaded.append(_load_unit(source.address(step * FP8_KEYS_PER_STEP, columns)))


def row_of_quads(pair: Int32) -> Int32:
    """Where the first column of a pair goes of 16 columns of V, so that P V leaves O's in the order of
    ``pair_of_quads``."""
    return (pair & 1) * COLUMNS_PER_GROUP + (pair >> 1) * 2


def _load_unit(address: Int32) -> tuple[Int32, ...]:
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def _store_unit(address: Int32, words: tuple[Int32, ...], selector: Int32) -> None:
    """``selector`` is of the column of the lane's pair that goes first."""
    selectors = selector, selector ^ TO_ODD_COLUMNS
    quads = [_select_bytes(words[i], words[i + 1], each) for i in (0, 2) for each in selectors]
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *quads],
    )


def _select_bytes(a: Int32, b: Int32, selector: Int32) -> Int32:
    """``permute_bytes`` by a selector that is known when the kernel runs."""
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Int32], read_only_args=[a, b, selector]
    )
