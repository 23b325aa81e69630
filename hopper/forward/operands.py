"""What the roles of the forward kernel share: its operands, and the pipelines between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import PipelineAsync, PipelineState, PipelineTmaAsync

from cute_kernels.invariant import LoopInvariant
from cute_kernels.key_blocks import BlockRange, KeyBlocks, ListedBlocks
from cute_kernels.mask import TileMask
from cute_kernels.plan.packed import PackedSeqlens, PackedTileOrder
from cute_kernels.score_tile import ScoreRules, ScoreTile
from cute_kernels.seqlen import DenseSeqlens, SeqlenInfo
from cute_kernels.tile_scheduler import TileOrder, TileScheduler, divide_with_rest
from hopper.config import ForwardConfig
from hopper.forward.places import TilePlace


class PerOperand(NamedTuple):
    """One thing for each operand: its TMA atom, its coordinate tensor, its layout in shared memory."""

    q: Any
    k: Any
    v: Any
    o: Any


class Pipelines(NamedTuple):
    """From the producer to the consumers; the docstring of ``ForwardKernel`` has their table.

    ``rows`` is empty, or that of V in rows, within the producer. ``o`` is empty, or says when O, which lies in V's
    place, has been read. ``few`` is empty, or that of V of few keys, a stage for each warpgroup and a phase a tile.
    """

    q: PipelineTmaAsync
    k: PipelineTmaAsync
    v: PipelineTmaAsync
    rows: tuple[PipelineTmaAsync, ...]
    o: tuple[PipelineAsync, ...] = ()
    few: tuple[PipelineTmaAsync, ...] = ()


class Mmas(NamedTuple):
    """The tiled MMAs of S = Q K^T and O += P V, each for one warpgroup; ``narrow_qk`` has those of so many of
    a block's keys (``first_widths``). ``tile_pv`` is empty, or has that of all columns that V has in shared memory,
    where ``pv`` makes fewer."""

    qk: cute.TiledMma
    pv: cute.TiledMma
    narrow_qk: Mapping[int, cute.TiledMma] = MappingProxyType({})
    tile_pv: tuple[cute.TiledMma, ...] = ()

    @property
    def whole_pv(self) -> cute.TiledMma:
        """Whose operand B, and whose result, are as wide as V and O in shared memory."""
        return self.tile_pv[0] if self.tile_pv else self.pv


@dataclass(frozen=True)
class Work(LoopInvariant):
    """The tiles of a launch: who hands them out, in which order, which key blocks each visits, and what is done to
    scores. ``lists`` is empty, or has the int32 tensor (batch, heads, query tiles, 1 + key tiles) from which
    ``ListedBlocks`` are read; ``pages`` is empty, or has the ``Pages`` of K and V."""

    scheduler: TileScheduler
    order: TileOrder | PackedTileOrder
    block_range: BlockRange
    seqlens: DenseSeqlens | PackedSeqlens
    heads_per_kv_head: Int32
    rules: ScoreRules
    lists: tuple = ()
    pages: tuple = ()

    def head_kv(self, head: Int32) -> Int32:
        """The head of K and V that a head of Q attends to."""
        for divisors in self.order.divisors:
            return divide_with_rest(head, divisors.group)[0]
        return head // self.heads_per_kv_head

    def place(self, tile: Int32) -> TilePlace:
        """Where the tile of a number below ``order.num_tiles`` lies."""
        m_block, head, batch = self.order.coordinates(tile)
        return TilePlace(m_block, head, self.head_kv(head), self.seqlens.of_tile(m_block, batch))

    def key_blocks(self, m_block: Int32, head: Int32, batch: Int32) -> KeyBlocks:
        return self._key_blocks(m_block, head, self.seqlens.of_tile(m_block, batch))

    def key_blocks_of(self, place: TilePlace) -> KeyBlocks:
        return self._key_blocks(place.m_block, place.head, place.seqlens)

    def _key_blocks(self, m_block: Int32, head: Int32, seqlens: SeqlenInfo) -> KeyBlocks:
        for lists in self.lists:
            return ListedBlocks.of(
                self.block_range, m_block, seqlens, lists[seqlens.batch, head, m_block, None]
            )
        return self.block_range.of(m_block, seqlens)

    def score_tile(self, mask: TileMask, head: Int32, batch: Int32, blocks: KeyBlocks) -> ScoreTile:
        """What is done to the scores of a thread's rows of a tile that visits ``blocks``."""
        if self.lists:
            return self.rules.listed_tile(mask, head, batch, blocks)
        return self.rules.tile(mask, head, batch)


def first_turn(config: ForwardConfig, loads: bool) -> Int32:
    """That of the first tile (``q_state``), for the producer, which ``loads``, or for consumers: stages are empty."""
    return Int32(config.q_stages if loads else 0)


def next_turn(config: ForwardConfig, turn: Int32) -> Int32:
    """That of the tile behind the one of ``turn``."""
    return turn ^ 1 if config.q_stages == 1 else (turn + 1) & 3


def q_state(config: ForwardConfig, wg: Int32, turn: Int32) -> PipelineState:
    """Where Q's pipeline stands for warpgroup ``wg``, which owns the stage of its number; a tile is a phase.

    With two stages it owns also the one that lies as far behind all of the first, and has them in turns. ``turn`` is
    then a number of two bits that counts tiles: which of both, and the phase.
    """
    if config.q_stages == 1:
        return PipelineState(config.consumers, Int32(0), Int32(wg), turn)
    return PipelineState(2 * config.consumers, Int32(0), wg + config.consumers * (turn & 1), turn >> 1)


def o_state(phase: Int32) -> PipelineState:
    """Where the pipeline of V's memory stands that O is staged in; a tile is a phase."""
    return PipelineState(1, Int32(0), Int32(0), phase)


def consumer_slot(state: PipelineState) -> Int32:
    """A number in 0 .. 2 stages - 1 that a consumer's state and the producer's agree on (``producer_slot``)."""
    return state.index + state.stages * state.phase


def producer_slot(state: PipelineState) -> Int32:
    """``consumer_slot`` of the block that a producer is about to load: its phase runs opposite to theirs."""
    return state.index + state.stages * (state.phase ^ 1)
