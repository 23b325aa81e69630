"""FP8 V that arrives in rows, transposed in shared memory by the producer warpgroup."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import PipelineState

from cute_kernels.fast_math import permute_bytes
from cute_kernels.invariant import LoopInvariant
from cute_kernels.seqlen import SeqlenInfo
from hopper.forward.fp8.config import FP8_KEYS_PER_STEP, Fp8ForwardConfig
from hopper.forward.operands import Pipelines
from hopper.swizzled_bytes import SwizzledBytes
from hopper.tiles import TmaOperand

COLUMNS_PER_UNIT = 16
PRODUCER_WARPS = 4


class VTransposer(LoopInvariant):
    """Loads V in rows (keys, head_dim_v) and writes it as (head_dim_v, keys), keys in ``FP8_KEY_ORDER``.

    A unit is 32 keys x 16 columns. ``ldmatrix.trans`` gives a lane pairs of columns of two neighbouring keys, four
    times, 8 keys apart; two byte permutations make of them the four keys of one column that ``stmatrix`` wants, in
    the order in which the accumulator of Q K^T holds the keys. (FlashAttention-3 does it in this way, too.)
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
        self.source = SwizzledBytes(v.smem, config.tile_n, config.head_dim_v)
        self.target = SwizzledBytes(sVt, config.head_dim_v, config.tile_n)

    @cute.jit
    def load(self, head_kv: Int32, seqlens: SeqlenInfo, n_block: Int32, state: PipelineState):
        """Issue the load of one block; by one warp."""
        tile = (self.config.tile_n, self.config.head_dim_v)
        smem, gmem = self.v.partition(tile, (None, 0), head_kv, seqlens.rows_k)
        self.pipe_rows.producer_acquire(state)
        barrier = self.pipe_rows.producer_get_barrier(state)
        cute.copy(self.v.atom, gmem[None, n_block], smem[None, state.index], tma_bar_ptr=barrier)

    @cute.jit
    def transpose(self, rows_state: PipelineState, v_state: PipelineState):
        """Make a stage of V of a loaded block; by all warps of the warpgroup."""
        c = self.config
        self.pipe_rows.consumer_wait(rows_state)
        self.pipes.v.producer_acquire(v_state)
        units = c.tile_n // FP8_KEYS_PER_STEP * (c.head_dim_v // COLUMNS_PER_UNIT)
        for i in cutlass.range_constexpr(units // PRODUCER_WARPS):
            self._unit(i * PRODUCER_WARPS + self.warp, rows_state.index, v_state.index)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            self.pipes.v.producer_commit(v_state)
        self.pipe_rows.consumer_release(rows_state)

    @cute.jit
    def _unit(self, unit: Int32, source_stage: Int32, target_stage: Int32):
        lane = cute.arch.lane_idx()
        column_units = self.config.head_dim_v // COLUMNS_PER_UNIT
        step, columns = unit // column_units, unit % column_units
        key = step * FP8_KEYS_PER_STEP + lane
        words = cute.arch.inline_ptx(
            "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Int32] * 4,
            read_only_args=[self.source.address(source_stage, key, columns)],
        )
        # Bytes 0 and 2 of a word are the even column of two keys, 1 and 3 the odd one.
        quads = [
            permute_bytes(words[i], words[i + 1], selector) for i in (0, 2) for selector in (0x6420, 0x7531)
        ]
        # Lanes 8 i to 8 i + 7 name the rows of matrix i: even columns, odd columns, and both again 16 keys on.
        column = columns * COLUMNS_PER_UNIT + lane % 8 * 2 + lane // 8 % 2
        chunk = step * 2 + lane // 16
        cute.arch.inline_ptx(
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[self.target.address(target_stage, column, chunk), *quads],
        )
