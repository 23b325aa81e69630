"""What e4m3 inputs with block scales decide about the forward kernel."""

from dataclasses import replace
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.fragments import COLUMNS_PER_GROUP
from cute_kernels.problem import VARLEN
from cute_kernels.score_tile import ScoreTile, SoftCap
from cute_kernels.softmax import OnlineSoftmax
from hopper.config import WARPGROUP_ROWS, WARPGROUP_THREADS
from hopper.forward.consumer import Consumer
from hopper.forward.fp8.config import RUN_FLOATS, Fp8ForwardConfig, Softmax
from hopper.forward.fp8.consumers import HalfScoresConsumer, LaggingConsumer
from hopper.forward.fp8.lowered_queries import LoweredQueries
from hopper.forward.fp8.mean_v import MeanOfV, MeansOfRuns
from hopper.forward.fp8.partial_sums import PartialSumsOutput
from hopper.forward.fp8.scales import (
    SLOT_FLOATS,
    SLOTS_PER_STAGE,
    BlockScales,
    PartScalePublisher,
    ScalePublisher,
)
from hopper.forward.fp8.softmax.any_codes import HalfScoresOfAnyCodes
from hopper.forward.fp8.softmax.eager import EagerSoftmax
from hopper.forward.fp8.softmax.exact import ExactSoftmax
from hopper.forward.fp8.softmax.far import FarHalfScoresSoftmax
from hopper.forward.fp8.softmax.grouped import GroupedEager
from hopper.forward.fp8.softmax.lagging import LaggingSoftmax
from hopper.forward.fp8.softmax.lone import LoneEager, LoneExact, LoneHalfScores, LoneLagging, LoneScales
from hopper.forward.fp8.softmax.scored import ScaledSoftCap, with_scores
from hopper.forward.fp8.staging import Staging
from hopper.forward.fp8.two_level import TwoLevelOutput
from hopper.forward.fp8.warp_scores import WarpScores
from hopper.forward.operands import Mmas
from hopper.forward.output import Output
from hopper.forward.places import TilePlace
from hopper.forward.precision import SixteenBits
from hopper.forward.split import sequence_of
from hopper.forward.unscaled import NoScales
from hopper.tiles import swizzle_bytes, swizzled_layout

COLUMNS_WITH_REGISTERS_TO_SPARE = 128
"""Of O, beside which all registers are found that ``LaggingSoftmax`` wants, or producers that transpose."""

SOFTMAXES: dict[Softmax, type[ExactSoftmax]] = {
    Softmax.EXACT: ExactSoftmax,
    Softmax.EAGER: EagerSoftmax,
    Softmax.LAGGING: LaggingSoftmax,
    Softmax.HALF_SCORES: FarHalfScoresSoftmax,
}
"""By the softmax; ``HalfScoresOfAnyCodes`` with ``lowers_queries``."""

LONE: dict[type[ExactSoftmax], type[LoneScales]] = {
    ExactSoftmax: LoneExact,
    EagerSoftmax: LoneEager,
    LaggingSoftmax: LoneLagging,
    HalfScoresOfAnyCodes: LoneHalfScores,
}
"""What they are with ``lone_scales``."""

CONSUMERS = {Softmax.LAGGING: LaggingConsumer, Softmax.HALF_SCORES: HalfScoresConsumer}
"""By the softmax; ``Consumer`` for those that take each maximum."""


class BlockScaled(SixteenBits):
    """Inputs in e4m3, whose blocks have scales; ``extras`` are those of ``BlockScales``."""

    config: Fp8ForwardConfig

    @property
    def consumer_type(self) -> type[Consumer]:
        return CONSUMERS.get(self.config.softmax, Consumer)

    @property
    def scale_floats(self) -> int:
        return SLOTS_PER_STAGE * self.config.stages * SLOT_FLOATS

    @property
    def mean_floats(self) -> int:
        c = self.config
        return c.mean_bytes // 4 + (c.consumers * RUN_FLOATS if c.run_blocks else 0)

    @property
    def recomputes_addresses(self) -> bool:
        c = self.config
        is_half = c.softmax is Softmax.HALF_SCORES
        takes_registers = c.softmax is Softmax.LAGGING or (is_half and (c.v_rows or c.run_blocks > 0))
        takes_registers = takes_registers or (c.wide_codes and c.layout == VARLEN)
        return takes_registers and c.head_dim_v > COLUMNS_WITH_REGISTERS_TO_SPARE

    def make_softmax(self, scale_log2: Float32, extras: tuple, storage: Any) -> OnlineSoftmax:
        c, scales = self.config, BlockScales(*extras)
        tile_scales = (scales.q, scales.o, scales.block_q)
        of_scores = self._of_scores(scale_log2, scales)
        arguments: tuple[Any, ...] = (
            self._scale(scale_log2, scales),
            tile_scales,
            self._slots(storage),
            c.polynomial_pairs,
        )
        kind = SOFTMAXES[c.softmax]
        if c.softmax is Softmax.LAGGING:
            arguments = *arguments, self._warp_scores(storage)
        if c.softmax is Softmax.HALF_SCORES:
            arguments = *arguments, c.tile_n // COLUMNS_PER_GROUP
        if c.lowers_queries:
            kind, arguments = HalfScoresOfAnyCodes, (*arguments, (self._queries(storage),))
        if not c.lone_scales:
            of_group = {"group": c.group} if c.group > 1 else {}
            kind = GroupedEager if c.group > 1 else kind
            return with_scores(kind, c.softcap, c.sinks)(*arguments, **of_group, **of_scores)
        has_registers = c.head_dim_v <= COLUMNS_WITH_REGISTERS_TO_SPARE
        begins = {"makes_words_once": has_registers, "blocks_a_wary_block": c.blocks_a_wary_block}
        of_half = begins if c.lowers_queries else {}
        kind = with_scores(LONE[kind], c.softcap, c.sinks)
        return kind(*arguments, head_scales=(scales.k, scales.v), **of_half, **of_scores)

    def softcaps(self, factors: tuple[Float32, ...]) -> tuple[SoftCap, ...]:
        """Nothing is done to all of them alike: rows have scales."""
        return ()

    def score_tile(self, scores: ScoreTile, softmax: OnlineSoftmax) -> ScoreTile:
        return replace(scores, changes=(ScaledSoftCap(softmax.factors),)) if self.config.softcap else scores

    def _scale(self, scale_log2: Float32, scales: BlockScales) -> Float32:
        """What scores are multiplied by beside the scales of Q and K."""
        return scales.factor[0] if self.config.softcap else scale_log2

    def _of_scores(self, scale_log2: Float32, scales: BlockScales) -> dict[str, Any]:
        """Arguments of ``with_scores``."""
        c = self.config
        of_cap = {"cap_log2": scale_log2} if c.softcap else {}
        of_rows = {"heads_of_tile": c.group, "in_parts": c.split}
        return of_cap | ({"sinks": scales.sinks[0], **of_rows} if c.sinks else {})

    def enter_head(self, softmax: OnlineSoftmax, place: TilePlace):
        if self.config.lone_scales:
            sequence = sequence_of(place.seqlens) if self.config.split else place.seqlens.batch
            softmax.enter_head(place.head, place.head_kv, sequence)

    def make_output(self, mmas: Mmas, part_mma: Any, consumer: Any) -> Output:
        sV, softmax = consumer.operands.v.smem, consumer.softmax
        if self.config.run_blocks:
            return PartialSumsOutput(consumer.correction, self.config, mmas, sV, softmax)
        if not self.config.two_level:
            return super().make_output(mmas, part_mma, consumer)
        return TwoLevelOutput(self.config, mmas, part_mma(self.config.pv_columns), sV, softmax)

    def make_scales(self, scale_log2: Float32, extras: tuple, storage: Any) -> NoScales:
        if self.config.lone_scales:
            return NoScales()
        largest_unit = cute.make_rmem_tensor(1, Float32)
        kind = PartScalePublisher if self.config.split else ScalePublisher
        scales = BlockScales(*extras)
        return kind(
            self._scale(scale_log2, scales), scales, self.config.tile_n, self._slots(storage), largest_unit
        )

    def make_correction(self, extras: tuple, storage: Any) -> MeanOfV:
        c, scales = self.config, BlockScales(*extras)
        memory = storage.means.get_tensor(cute.make_layout((self.mean_floats // c.consumers, c.consumers)))
        has_quads = c.v_rows and c.o_from_registers
        common = scales.mean_v, memory, self._first_consumer, has_quads, c.o_from_registers
        for runs in scales.runs:
            layout = cute.make_layout((WARPGROUP_ROWS * c.head_dim_v // 2, c.consumers))
            of_output = storage.sO.get_tensor(layout, dtype=Float32)
            staging = Staging(of_output, memory, self._first_consumer)
            of_block = (cute.make_rmem_tensor(1, Int32) for _ in range(3))
            return MeansOfRuns(*common, c, runs.differences, runs.changes, runs.notes, staging, *of_block)
        return MeanOfV(*common)

    @property
    def _first_consumer(self) -> int:
        """The number of the first thread that consumes."""
        return self.config.threads - WARPGROUP_THREADS * self.config.consumers

    def _slots(self, storage: Any) -> cute.Tensor:
        slots = SLOTS_PER_STAGE * self.config.stages
        layout = cute.make_layout((slots, SLOT_FLOATS), stride=(SLOT_FLOATS, 1))
        return storage.scales.get_tensor(layout)

    def _queries(self, storage: Any) -> LoweredQueries:
        c = self.config
        layout = swizzled_layout(WARPGROUP_ROWS, c.head_dim, c.consumers, DSL_DTYPES[c.dtype])
        return LoweredQueries(c, storage.sQ.get_tensor(layout.outer), self._first_consumer)

    def _warp_scores(self, storage: Any) -> WarpScores:
        """Q and K as words, for the scores that a warp computes again by itself."""
        c, dtype = self.config, DSL_DTYPES[self.config.dtype]
        layout_q = swizzled_layout(WARPGROUP_ROWS, c.head_dim, c.consumers, dtype)
        layout_k = swizzled_layout(c.tile_n, c.head_dim, c.stages, dtype)
        sQ, sK = storage.sQ.get_tensor(layout_q.outer), storage.sK.get_tensor(layout_k.outer)
        words = (cute.recast_tensor(operand, Int32) for operand in (sQ, sK))
        return WarpScores(*words, swizzle_bytes(c.head_dim), 1)
