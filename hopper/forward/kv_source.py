"""How Q and a key block reach shared memory: the atoms, the pipelines, and what the producer warpgroup does."""

from dataclasses import dataclass, replace
from typing import Any

import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.pipeline import Agent, CooperativeGroup, PipelineAsync, PipelineTmaAsync

from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.fast_math import pin
from cute_kernels.invariant import LoopInvariant
from cute_kernels.tile_scheduler import MAILBOX_STAGES
from hopper import mail
from hopper.config import ForwardConfig
from hopper.forward.barriers import MAX_CONSUMERS, NamedBarrier
from hopper.forward.batch import DenseBatch
from hopper.forward.operands import PerOperand, Pipelines, Work, first_turn, next_turn
from hopper.forward.places import WORDS, KeptPlaces, NumberedTiles, PlacedTiles, message_of
from hopper.forward.producer import NoWord, Producer
from hopper.group_rows import used_rows
from hopper.tiles import WARPS_PER_WARPGROUP, ragged_view, swizzled_layout

LOADING_WARP, FINDING_WARP = 0, 1
THREADS_OF_TWO_WARPS = 64

NEXT_TILE = NamedBarrier.PING_PONG + MAX_CONSUMERS
"""The named barrier at which a loading warp asks for the next tile."""

BLOCKS_AHEAD = 2
"""Blocks of a tile that are not yet loaded when the next one is asked for."""


class WordOfNextTile(NoWord):
    """Asks for the next tile."""

    @cute.jit
    def of_tile(self, blocks: Int32):
        if blocks <= BLOCKS_AHEAD:
            self._ask()

    @cute.jit
    def of_block(self, left: Int32):
        if left == BLOCKS_AHEAD:
            self._ask()

    def _ask(self):
        cute.arch.barrier_arrive(barrier_id=NEXT_TILE, number_of_threads=THREADS_OF_TWO_WARPS)


@dataclass(frozen=True)
class DenseTma(LoopInvariant):
    """K and V of a problem whose sequences are all of one length: one warp loads every block by TMA.

    ``v_major`` is how V lies in shared memory as operand B of P V. ``row_stages`` are blocks of V that wait there to be
    transposed. ``v_row_mode`` is the mode of V, as ``arrange_v`` gives it, that has its keys; each packed sequence has
    whole steps of ``v_row_step`` of them.
    """

    config: ForwardConfig

    v_major = OperandMajorMode.MN
    v_row_mode = 1
    v_row_step = 1
    row_stages = 0
    words_of_tile = NumberedTiles.words
    """int32 that say in the mailbox which tile comes next."""

    @property
    def receiving_warps(self) -> int:
        """Warps that are told which tile comes next."""
        return WARPS_PER_WARPGROUP * self.config.consumers

    def tiles(self, work: Work, reads_again: bool) -> NumberedTiles:
        """How consumers learn of the tiles. With ``reads_again`` they ask where one lies at its end too."""
        return NumberedTiles(work)

    def arrange_k(self, mK: cute.Tensor, batch: DenseBatch) -> cute.Tensor:
        """K as TMA sees it: with its rows first, then head_dim, then kv_heads."""
        return batch.view(mK)

    def arrange_v(self, mV: cute.Tensor) -> cute.Tensor:
        """V as (head_dim_v, keys, kv_heads, batch), of an argument (batch, keys, kv_heads, head_dim_v)."""
        return cute.make_tensor(mV.iterator, cute.select(mV.layout, mode=[3, 1, 2, 0]))

    def pages(self, arguments: PerOperand, given: tuple) -> tuple:
        """What a launch gives a kernel of the pages in which K and V lie; ``given`` are arguments of it."""
        return ()

    def v_layout(self, dtype) -> cute.ComposedLayout:
        """Of V in shared memory, (head_dim_v, tile_n, stages)."""
        c = self.config
        rows = swizzled_layout(c.tile_n, c.head_dim_v, c.stages, dtype)
        return cute.make_composed_layout(rows.inner, 0, cute.select(rows.outer, mode=[1, 0, 2]))

    def make_k_atom(self, mK: cute.Tensor, layout: cute.ComposedLayout) -> tuple[cute.CopyAtom, cute.Tensor]:
        """The TMA that loads a block of K, whose ``layout`` in shared memory is (tile_n, head_dim, stages)."""
        load, tile = cpasync.CopyBulkTensorTileG2SOp(), (self.config.tile_n, self.config.head_dim)
        return cpasync.make_tiled_tma_atom(load, mK, layout, tile)

    def make_v_atom(self, mVt: cute.Tensor, dtype) -> tuple[cute.CopyAtom, cute.Tensor]:
        """The TMA that loads a block of V."""
        load, tile = cpasync.CopyBulkTensorTileG2SOp(), (self.config.head_dim_v, self.config.tile_n)
        return cpasync.make_tiled_tma_atom(load, mVt, self.v_layout(dtype), tile)

    def few_layouts(self) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
        """Of ``few_keys`` of K, (keys, head_dim, consumers), and of V, (head_dim_v, keys, consumers)."""
        c = self.config
        k, v = (
            swizzled_layout(c.few_keys, d, c.consumers, DSL_DTYPES[c.dtype])
            for d in (c.head_dim, c.head_dim_v)
        )
        return k, cute.make_composed_layout(v.inner, 0, cute.select(v.outer, mode=[1, 0, 2]))

    def make_few_atoms(self, mK: cute.Tensor, mVt: cute.Tensor) -> tuple:
        """The TMA that loads ``few_keys`` of K, and that of V: atom and tensor of each."""
        c, (k, v) = self.config, self.few_layouts()
        load = cpasync.CopyBulkTensorTileG2SOp()
        of_k = cpasync.make_tiled_tma_atom(load, mK, k, (c.few_keys, c.head_dim))
        return *of_k, *cpasync.make_tiled_tma_atom(load, mVt, v, (c.head_dim_v, c.few_keys))

    def make_pipelines(self, storage: Any) -> Pipelines:
        """The docstring of ``ForwardKernel`` has their table."""
        c = self.config
        warps_of_one = CooperativeGroup(Agent.Thread, WARPS_PER_WARPGROUP)
        warps_of_all = CooperativeGroup(Agent.Thread, WARPS_PER_WARPGROUP * c.consumers)
        row_bytes = c.head_dim * c.qk_bytes
        return Pipelines(
            self._tma_pipeline(
                storage.barriers_q,
                c.consumers * c.q_stages,
                warps_of_one,
                (used_rows(c.group) + c.few_keys) * row_bytes,
            ),
            self._tma_pipeline(storage.barriers_k, c.stages, warps_of_all, c.tile_n * row_bytes),
            self._make_v_pipeline(storage, warps_of_all),
            self._make_row_pipelines(storage),
            self._make_o_pipelines(storage),
            self._make_few_pipelines(storage, warps_of_one),
        )

    def _make_v_pipeline(self, storage: Any, consumers: CooperativeGroup):
        c = self.config
        v_bytes = c.tile_n * c.head_dim_v * c.element_bytes
        return self._tma_pipeline(storage.barriers_v, c.stages, consumers, v_bytes)

    def _make_few_pipelines(self, storage: Any, warps: CooperativeGroup) -> tuple[PipelineTmaAsync, ...]:
        c = self.config
        if not c.few_keys:
            return ()
        v_bytes = c.few_keys * c.head_dim_v * c.element_bytes
        return (self._tma_pipeline(storage.barriers_few, c.consumers, warps, v_bytes),)

    def _make_row_pipelines(self, storage: Any) -> tuple[PipelineTmaAsync, ...]:
        return ()

    def _make_o_pipelines(self, storage: Any) -> tuple[PipelineAsync, ...]:
        if not (self.config.o_shares_v or self.config.o_shares_rows):
            return ()
        pipe = PipelineAsync.create(
            num_stages=1,
            producer_group=CooperativeGroup(Agent.Thread, 1),
            consumer_group=CooperativeGroup(Agent.Thread, self.config.consumers),
            barrier_storage=storage.barriers_o.data_ptr(),
            defer_sync=True,
        )
        return (pipe,)

    def _tma_pipeline(
        self, barriers: Any, stages: int, consumers: CooperativeGroup, size: int
    ) -> PipelineTmaAsync:
        """Of stages that are full with ``size`` bytes."""
        return PipelineTmaAsync.create(
            num_stages=stages,
            producer_group=CooperativeGroup(Agent.Thread),
            consumer_group=consumers,
            tx_count=size,
            barrier_storage=barriers.data_ptr(),
            defer_sync=True,
        )

    @cute.jit
    def produce(self, work: Work, producer: Producer, storage: Any, warp: Int32):
        """What warp number ``warp`` of the producer warpgroup does; here only one has something to do."""
        if warp == 0:
            self._load_tiles(work, producer)

    @cute.jit
    def _load_tiles(self, work: Work, producer: Producer):
        """Claim tiles and load them."""
        kv_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.stages)
        mail_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, MAILBOX_STAGES)
        q_turn = first_turn(self.config, loads=True)
        if const_expr(self.config.waits_to_load):
            cute.arch.griddepcontrol_wait()
        tile = work.scheduler.first()
        while tile < work.order.num_tiles:
            m_block, head, batch = work.order.coordinates(tile)
            head_kv = work.head_kv(head)
            blocks = work.key_blocks(m_block, head, batch)
            kv_state = producer.load_tile((m_block, head, batch), head_kv, blocks, kv_state, q_turn)
            if const_expr(self.config.waits_to_load):
                cute.arch.griddepcontrol_launch_dependents()
            q_turn = next_turn(self.config, q_turn)
            tile = work.scheduler.claim(mail_state)
            mail_state.advance()
        work.scheduler.finish()


class FoundTiles(DenseTma):
    """For packed sequences: one warp finds tiles in the plan, and others load them.

    A tile is claimed when BLOCKS_AHEAD blocks of the one before are still to be loaded, so that nothing waits while it
    is looked up. A message of the mailbox says where a tile lies. In ``ForwardKernel``'s table it has 32 bytes then,
    and `4 * consumers + loading_warps` arrivals empty it.
    """

    words_of_tile = WORDS
    loading_warps = 1

    def tiles(self, work: Work, reads_again: bool) -> PlacedTiles:
        return KeptPlaces(work) if reads_again else PlacedTiles(work)

    @property
    def receiving_warps(self) -> int:
        return super().receiving_warps + self.loading_warps

    @cute.jit
    def produce(self, work: Work, producer: Producer, storage: Any, warp: Int32):
        if warp == LOADING_WARP:
            self._load_tiles(work, producer, WordOfNextTile())
        elif warp == FINDING_WARP:
            self._find_tiles(work)

    @cute.jit
    def _find_tiles(self, work: Work):
        """Claim tiles, find each in the plan and tell the other warps where it lies."""
        sent = Int32(0)
        tile = work.scheduler.first()
        while tile < work.order.num_tiles:
            mail.send(work.scheduler, message_of(self._in_few_registers(work).place(tile)), sent)
            sent += 1
            cute.arch.barrier(barrier_id=NEXT_TILE, number_of_threads=THREADS_OF_TWO_WARPS)
            tile = work.scheduler.claim_alone()
        mail.send_end(work.scheduler, WORDS, sent)
        work.scheduler.finish()

    def _in_few_registers(self, work: Work) -> Work:
        """What is divided by the group is not kept from tile to tile, where it would take one of few registers."""
        group = pin(work.heads_per_kv_head, Int32)
        return replace(work, order=work.order.with_group(group), heads_per_kv_head=group)

    @cute.jit
    def _load_tiles(self, work: Work, producer: Producer, word: NoWord):
        """Load the tiles that are found. ``word`` is told of each block."""
        kv_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.stages)
        mail_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, MAILBOX_STAGES)
        q_turn = first_turn(self.config, loads=True)
        tiles = PlacedTiles(work)
        tile = tiles.first(mail_state)
        while tile < tiles.end:
            place = tiles.place(tile, mail_state)
            coordinates = place.m_block, place.head, place.seqlens.batch
            blocks = work.key_blocks_of(place)
            kv_state = producer.load_tile(coordinates, place.head_kv, blocks, kv_state, q_turn, word)
            q_turn = next_turn(self.config, q_turn)
            tile, mail_state = tiles.next(mail_state)


class PackedTma(FoundTiles):
    """V is (total_k, kv_heads, head_dim_v)."""

    def arrange_v(self, mV: cute.Tensor) -> cute.Tensor:
        return ragged_view(
            cute.make_tensor(mV.iterator, cute.select(mV.layout, mode=[2, 0, 1])), self.v_row_mode
        )

    def _in_few_registers(self, work: Work) -> Work:
        """There are enough, and divisions would take time."""
        return work
