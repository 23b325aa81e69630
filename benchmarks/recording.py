"""The 16-bit forward kernel with a clock: when each warpgroup of one tile began and ended each GEMM and softmax.

It is ``ForwardKernel`` with another softmax, other turns and other ends of two pipelines, which read the clock where
they are called and do what they did. The kernel that ships has none of it. A reading is a predicated store without a
branch: a branch would end a basic block, across which no WGMMA stays in flight. It costs a few cycles, so a recorded
tile is a little slower than others.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_tensor
from cutlass.pipeline import PipelineState, PipelineTmaAsync

from cute_kernels.arguments import VECTOR_ELEMENTS, compile_for_torch, strided, words
from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.fragments import ROWS_PER_THREAD
from cute_kernels.invariant import LoopInvariant
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.softmax import OnlineSoftmax
from hopper.config import WARPGROUP_THREADS, ForwardConfig
from hopper.forward.barriers import PingPong
from hopper.forward.batch import DenseBatch
from hopper.forward.consumer import Consumer
from hopper.forward.kernel import ForwardKernel
from hopper.forward.kv_source import DenseTma
from hopper.forward.operands import PerOperand, Pipelines
from hopper.forward.parts import KernelParts, LaunchOptions
from hopper.forward.precision import SixteenBits

UNITS = 3
"""Of a block, in this order: S = Q K^T, the softmax, O += P V. Each has a start and a stop."""

WORD_BYTES = 8
BLOCK_BYTES = 2 * UNITS * WORD_BYTES
SPARE_BLOCKS = 2
"""Places for what is stamped before the first block of a tile and after the last."""


def stamp_shape(config: ForwardConfig, blocks: int) -> tuple[int, int, int, int]:
    """(consumer warpgroups, key blocks of a tile and spare ones, units, start and stop) of the int64 stamps.

    Those of the block that is visited as number i lie at i + 1.
    """
    return config.consumers, blocks + SPARE_BLOCKS, UNITS, 2


class Recorder(LoopInvariant):
    """Where the next stamp of a warpgroup goes.

    In the pipelined loop P V of a block ends after Q K^T of the next has begun; ``place`` is that of the block whose
    P V is due, and what belongs to the scores lies ``ahead`` of it by a block. The start of the last P V of a tile is
    not stamped there.
    """

    def __init__(self, config: ForwardConfig, recorded_tile: int):
        self.config, self.recorded_tile = config, recorded_tile
        self.ahead = BLOCK_BYTES if config.pipelined else 0

    @cute.jit
    def open(self, stamps: cute.Tensor):
        """Take the memory for stamps, flat. Called once by each consumer, before any tile."""
        consumers = self.config.consumers
        self.place, self.first = (cute.make_rmem_tensor(1, Int64) for _ in range(2))
        self.tile, self.is_on, self.leader = (cute.make_rmem_tensor(1, Int32) for _ in range(3))
        thread = cute.arch.thread_idx()[0]
        warpgroup = thread // WARPGROUP_THREADS - (1 if const_expr(self.config.warp_specialized) else 0)
        is_leader = thread % WARPGROUP_THREADS == 0 and cute.arch.block_idx()[0] == 0
        warpgroup_bytes = stamps.shape[0] // consumers * WORD_BYTES
        self.first[0] = stamps.iterator.toint() + Int64(
            warpgroup * warpgroup_bytes + BLOCK_BYTES - self.ahead
        )
        self.leader[0] = Int32(1) if is_leader else Int32(0)
        self.tile[0] = Int32(0)

    @cute.jit
    def enter_tile(self):
        """One thread of each warpgroup of the first CTA records one of its tiles."""
        is_recorded = self.tile[0] == self.recorded_tile
        self.is_on[0] = self.leader[0] if is_recorded else Int32(0)
        self.tile[0] = self.tile[0] + 1
        self.place[0] = self.first[0]

    def next_block(self):
        self.place[0] = self.place[0] + BLOCK_BYTES

    def start(self, unit: int, ahead: int = 0):
        self._stamp(ahead + 2 * unit * WORD_BYTES)

    def stop(self, unit: int, ahead: int = 0):
        self._stamp(ahead + (2 * unit + 1) * WORD_BYTES)

    def _stamp(self, offset: int):
        now = Int64(cute.arch.clock64())
        cute.arch.inline_ptx(
            f"st.global.b64 [{{$r0}}+{offset}], {{$r1}};",
            read_only_args=[self.place[0], now],
            predicate=self.is_on[0] != 0,
        )


QK, SOFTMAX, PV = range(UNITS)


class RecordedSoftmax(OnlineSoftmax):
    """Stamps the softmax, and when P V has been issued before it."""

    def __init__(self, scale_log2: Float32, recorder: Recorder):
        super().__init__(scale_log2)
        self.recorder = recorder

    def enter_tile(self, rows: tuple, head: Int32, seqlens: SeqlenInfo):
        self.recorder.enter_tile()

    def enter_block(self, slot: Int32):
        if self.recorder.config.pipelined:
            self.recorder.start(PV)

    def take_scores(self, acc_S: cute.Tensor, is_first: cutlass.Constexpr[bool]):
        self.recorder.start(SOFTMAX, self.recorder.ahead)
        super().take_scores(acc_S, is_first)
        if self.recorder.config.pipelined and is_first:
            self.recorder.next_block()

    def store_P(self, operand: cute.Tensor, acc_S: cute.Tensor, r: cutlass.Constexpr[int]):
        super().store_P(operand, acc_S, r)
        if r == ROWS_PER_THREAD - 1:
            self.recorder.stop(SOFTMAX)


class RecordedPipe(LoopInvariant):
    """A pipeline whose consumers go through :class:`RecordedKeys` or :class:`RecordedValues`."""

    def __init__(self, pipe: PipelineTmaAsync, recorder: Recorder):
        self.pipe, self.recorder = pipe, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pipe, name)

    def consumer_wait(self, state: PipelineState, *has_come: Boolean):
        self.pipe.consumer_wait(state, *has_come)


class RecordedKeys(RecordedPipe):
    """Q K^T is issued once K is there, and K released as soon as Q K^T has been waited for.

    Where a turn has to come before the issue, :class:`RecordedTurns` stamps the start again.
    """

    def consumer_wait(self, state: PipelineState, *has_come: Boolean):
        self.pipe.consumer_wait(state, *has_come)
        self.recorder.start(QK, self.recorder.ahead)

    def consumer_release(self, state: PipelineState):
        self.recorder.stop(QK, self.recorder.ahead)
        self.pipe.consumer_release(state)


class RecordedValues(RecordedPipe):
    """V is released as soon as P V has been waited for. Without pipelining, P V is issued once V is there."""

    def consumer_wait(self, state: PipelineState, *has_come: Boolean):
        self.pipe.consumer_wait(state, *has_come)
        if not self.recorder.config.pipelined:
            self.recorder.start(PV)

    def consumer_release(self, state: PipelineState):
        self.recorder.stop(PV)
        self.recorder.next_block()
        self.pipe.consumer_release(state)


class RecordedTurns(PingPong):
    """Stamps the start of Q K^T once a warpgroup has its turn on the tensor cores.

    After the issue would be too late: that of P V, which follows, takes until Q K^T is almost done, since its operand
    lies in registers.
    """

    def __init__(self, config: ForwardConfig, wg: Int32, recorder: Recorder):
        super().__init__(config, wg)
        self.recorder = recorder

    def take_turn(self):
        super().take_turn()
        self.recorder.start(QK, self.recorder.ahead)


class RecordedConsumer(Consumer):
    """Stamps what its softmax, its pipelines and its turns do."""

    def __init__(self, config, mmas, operands, pipes, softmax: RecordedSoftmax, output, loads, wg: Int32):
        super().__init__(config, mmas, operands, pipes, softmax, output, loads, wg)
        self.ping_pong = RecordedTurns(config, wg, softmax.recorder)


@dataclass(frozen=True)
class RecordingPrecision(SixteenBits):
    """Its consumers and their softmax record; ``extras`` are the stamps."""

    recorder: Recorder

    consumer_type = RecordedConsumer

    def make_softmax(self, scale_log2: Float32, extras: tuple, storage: Any) -> OnlineSoftmax:
        self.recorder.open(extras[0])
        return RecordedSoftmax(scale_log2, self.recorder)


@dataclass(frozen=True)
class RecordingTma(DenseTma):
    """Its pipelines of K and V record what consumers do with them."""

    recorder: Recorder

    def make_pipelines(self, storage: Any) -> Pipelines:
        pipes = super().make_pipelines(storage)
        keys, values = RecordedKeys(pipes.k, self.recorder), RecordedValues(pipes.v, self.recorder)
        return pipes._replace(k=keys, v=values)


class RecordingKernel(ForwardKernel):
    """``ForwardKernel`` that records tile number ``recorded_tile``, from 0, of the first CTA."""

    def __init__(self, config: ForwardConfig, recorded_tile: int):
        recorder = Recorder(config, recorded_tile)
        source, batch = RecordingTma(config, recorder), DenseBatch(config)
        parts = KernelParts(RecordingPrecision(config, recorder), source, batch)
        super().__init__(config, parts)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        tile_counter: cute.Tensor,
        stamps: cute.Tensor,
        softmax_scale: Float32,
        num_ctas: Int32,
        stream,
    ):
        """Launch. ``stamps`` is int64, flat, of the size of :func:`stamp_shape`; the rest is as for the kernel."""
        tensors, options = PerOperand(mQ, mK, mV, mO), LaunchOptions(extras=(stamps,))
        self._launch(tensors, mLSE, tile_counter, options, softmax_scale, num_ctas, stream)


def compile_recording(config: ForwardConfig, recorded_tile: int, options: str = ""):
    """``compile_forward`` of a 16-bit config, with ``stamps`` between tile_counter and softmax_scale."""
    dtype = DSL_DTYPES[config.dtype]
    b, sq, sk, h, hk, count = (cute.sym_int() for _ in range(6))
    d, dv = (cute.sym_int(divisibility=VECTOR_ELEMENTS) for _ in range(2))
    return compile_for_torch(
        RecordingKernel(config, recorded_tile),
        strided(dtype, (b, sq, h, d), VECTOR_ELEMENTS),
        strided(dtype, (b, sk, hk, d), VECTOR_ELEMENTS),
        strided(dtype, (b, sk, hk, dv), VECTOR_ELEMENTS),
        strided(dtype, (b, sq, h, dv), VECTOR_ELEMENTS),
        strided(Float32, (b, h, cute.sym_int()), 1),
        words(2),
        make_fake_tensor(Int64, (count,), (1,), assumed_align=WORD_BYTES),
        Float32(0.0),
        Int32(0),
        options=options,
    )
