"""What consumers do for those who load: in between they return O's place, or load themselves."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import PipelineAsync, PipelineState

from cute_kernels.invariant import LoopInvariant
from cute_kernels.key_blocks import KeyBlocks
from cute_kernels.seqlen import SeqlenInfo
from hopper.config import ForwardConfig
from hopper.forward.operands import o_state
from hopper.forward.places import TilePlace
from hopper.forward.producer import Producer


class NoConsumerLoads(LoopInvariant):
    """What a consumer has where a producer warp loads, and O has a place that no load needs."""

    def begin(self, tile: Int32, place: TilePlace, blocks: KeyBlocks, q_phase: Int32):
        """Called once a tile, before its first block is awaited."""

    def await_queries(self):
        """Called once a tile, before its Q is awaited."""

    def load_next(self):
        """Called once a key block, while its softmax runs."""


class ReturnOfO(NoConsumerLoads):
    """Gives O's place back once O of the tile before has been read there: before Q of the next tile is awaited, so that
    V comes while queries are lowered. Warp 0 of a warpgroup, by ``warp_in_group``, is the one that stores its O."""

    def __init__(self, pipes: tuple[PipelineAsync, ...], warp_in_group: Int32, lane: Int32):
        (self.pipe,), self.warp_in_group, self.lane = pipes, warp_in_group, lane

    def begin(self, tile: Int32, place: TilePlace, blocks: KeyBlocks, q_phase: Int32):
        # The first tile of a CTA has its number.
        self.is_behind_another = tile != cute.arch.block_idx()[0]
        self.phase = q_phase

    @cute.jit
    def await_queries(self):
        if self.warp_in_group == 0 and self.is_behind_another:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            # Whichever lane issued the copy, it has been read.
            cute.arch.sync_warp()
            if self.lane == 0:
                self.pipe.consumer_release(o_state(self.phase))


class ConsumerLoads(NoConsumerLoads):
    """Loads without a producer warp, for comparison with warp specialization: those of a tile, issued by the first warp
    of the CTA between the steps of its own softmax.

    Before a tile it fills the stages of K, and all but one of V. Each ``load_next`` then loads a block of each into the
    stages that the block before freed: K of ``stages`` blocks ahead of it, and V of the one before that.
    """

    def __init__(self, config: ForwardConfig, producer: Producer, warp_idx: Int32):
        self.config, self.producer = config, producer
        self.is_loader = warp_idx == 0
        self.k_state, self.v_state = (cute.make_rmem_tensor(3, Int32) for _ in range(2))
        self.head, self.begin_block = cute.make_rmem_tensor(2, Int32), cute.make_rmem_tensor(1, Int32)
        for state in (self.k_state, self.v_state):
            state[0], state[1] = Int32(0), Int32(1)

    @cute.jit
    def begin(self, tile: Int32, place: TilePlace, blocks: KeyBlocks, q_phase: Int32):
        """Load Q and the first blocks of a tile."""
        batch = place.seqlens.batch
        self.head[0], self.head[1] = place.head_kv, batch
        self.k_state[2], self.v_state[2] = blocks.last, blocks.last
        self.begin_block[0] = Int32(blocks.begin)
        if self.is_loader:
            self.producer.load_queries(place.m_block, place.head, SeqlenInfo(0, 0, batch), q_phase)
        for _ in cutlass.range_constexpr(self.config.stages - 1):
            self.load_next()
        self._feed_k()

    @cute.jit
    def load_next(self):
        self._feed_k()
        self._feed_v()

    @cute.jit
    def _feed_k(self):
        c, n_block = self.config, self.k_state[2]
        if self.is_loader and n_block >= self.begin_block[0]:
            state = PipelineState(c.stages, Int32(0), self.k_state[0], self.k_state[1])
            self.producer.load_keys(self.head[0], SeqlenInfo(0, 0, self.head[1]), n_block, state)
        self._advance(self.k_state)

    @cute.jit
    def _feed_v(self):
        c, n_block = self.config, self.v_state[2]
        if self.is_loader and n_block >= self.begin_block[0]:
            state = PipelineState(c.stages, Int32(0), self.v_state[0], self.v_state[1])
            self.producer.load_values(self.head[0], SeqlenInfo(0, 0, self.head[1]), n_block, state)
        self._advance(self.v_state)

    @cute.jit
    def _advance(self, state: cute.Tensor):
        """To the next stage and block; past the tile's last nothing moves, as nothing is loaded."""
        if state[2] >= self.begin_block[0]:
            is_last = state[0] == self.config.stages - 1
            state[0] = Int32(0) if is_last else state[0] + 1
            state[1] = state[1] ^ 1 if is_last else state[1]
            state[2] = state[2] - 1
