"""dQ: summed over key tiles in global memory, in float32 and in the order of the accumulators.

A key tile's part of dQ goes from the registers of a warpgroup to shared memory, four words of a thread next to each
other and threads in order, and from there by one bulk reduction to the same place of the tile in global memory. No
address has to be computed, and there are no bank conflicts. ``BackwardConfig.dq_order`` says which element a word is.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.pipeline import PipelineAsync, PipelineState

from cute_kernels.invariant import LoopInvariant
from hopper.backward.barriers import sync_warpgroup
from hopper.backward.config import BackwardConfig
from hopper.config import WARPGROUP_ROWS, WARPGROUP_THREADS

WORDS_PER_STORE = 4


NO_TILE = -1
"""In the place of a query tile: nothing is staged."""


class QueryTile(NamedTuple):
    """A query tile that a key tile visits, where dQ of it is finished on the chip (``WrittenGradientOfQ``): whether the
    key tile before has begun it, and whether it gets nothing from the next."""

    m_block: Int32
    head: Int32
    batch: Int32
    is_carried: Boolean
    is_final: Boolean


class GradientOfQ(LoopInvariant):
    """The part of dQ that one warpgroup computes, on its way to global memory.

    ``acc`` holds the part of a block until the next block's first GEMM is under way. It is staged in shared memory
    then, and sent when the next block's dS is complete: the fence and the barrier which make dS visible to the tensor
    cores make the staged part visible to the copy engine. A fence of its own would wait for the GEMMs that are under
    way. Of the buffers one is written while another is read.

    ``sdQ`` is float32 (words, buffers) in shared memory, of this warpgroup alone. ``mdQ`` is float32 (words,
    warpgroups, query tiles of all heads and batches), zero before the launch unless ``stores_first``. ``tile`` is the
    query tile whose part is in ``acc`` or staged.
    """

    accumulates = False
    """Whether products are added to what ``resume`` leaves in ``acc``."""

    def __init__(
        self,
        config: BackwardConfig,
        mma: cute.TiledMma,
        sdQ: cute.Tensor,
        mdQ: cute.Tensor,
        wg: Int32,
        thread: Int32,
    ):
        self.config, self.sdQ, self.mdQ = config, sdQ, mdQ
        self.wg, self.thread = wg, thread
        self.tile = cute.make_rmem_tensor(1, Int32)
        self.acc = cute.make_rmem_tensor(mma.partition_shape_C((WARPGROUP_ROWS, config.dq_columns)), Float32)
        # Uniform, or else ptxas computes descriptors lane by lane where a branch on it divides a block.
        self.is_issuer = cute.arch.make_warp_uniform(thread // cute.arch.WARP_SIZE) == 0

    @cute.jit
    def clear(self):
        self.tile[0] = Int32(NO_TILE)
        self.acc.fill(0.0)

    @cute.jit
    def resume(self, tile: Int32):
        """Before the products of query tile ``tile``: nothing, since its sums lie in global memory."""

    @cute.jit
    def hold(self, tile: Int32):
        """``acc`` is from now on the part of query tile ``tile``, counted among all heads and batches."""
        self.tile[0] = tile

    def free_buffer(self, buffer: Int32) -> Int32:
        """A buffer that nothing lies in while ``acc`` holds a part; ``buffer`` is the one that was sent last."""
        return buffer

    @cute.jit
    def stage(self, buffer: Int32, state: PipelineState):
        """Write the part in ``acc`` to ``buffer``, which was sent before the last ``free``; a barrier lies between.
        ``state`` is that of the dS under whose barrier it will be sent."""
        words = cute.make_tensor(
            self.acc.iterator, cute.make_layout((WORDS_PER_STORE, cute.size(self.acc) // WORDS_PER_STORE))
        )
        groups = self.config.dq_words // WARPGROUP_THREADS // WORDS_PER_STORE
        target = cute.make_tensor(
            self.sdQ[None, buffer].iterator, cute.make_layout((WORDS_PER_STORE, WARPGROUP_THREADS, groups))
        )
        for i in cutlass.range_constexpr(cute.size(words, mode=[1])):
            cute.autovec_copy(words[None, i], target[None, self.thread, i])

    @cute.jit
    def send(self, buffer: Int32):
        """Start the reduction of the part staged in ``buffer``, if there is one; fence and barrier lie behind."""
        if self.is_issuer:
            if self.tile[0] != NO_TILE:
                with cute.arch.elect_one():
                    self._reduce(buffer, self.mdQ[None, self.wg, self.tile[0]])
                cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def free(self):
        """Wait, in the warp that sends, until every part that was sent has been read."""
        if self.is_issuer:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def wait_sent(self, state: PipelineState):
        """Wait, in the warp that sends, until what was sent under the dS of ``state`` has been read."""
        self.free()

    @cute.jit
    def finish(self, buffer: Int32, state: PipelineState):
        """Send the last part by way of ``buffer`` and wait until it has been read; the CTA may end only then."""
        self.stage(buffer, state)
        cute.arch.fence_view_async_shared()
        sync_warpgroup(self.wg)
        self.send(buffer)
        self.free()

    @cute.jit
    def _reduce(self, buffer: Int32, target: cute.Tensor):
        add_in_bulk(self.sdQ[None, buffer], target)


class OrderedGradientOfQ(GradientOfQ):
    """The same where a courier warp sends what is staged, in its turn. ``pipe`` is that of dS: a stage of it is full
    when dS of a block and dQ of the one before are written, and empty when that dQ has been added."""

    def __init__(self, pipe: PipelineAsync, *rest):
        super().__init__(*rest)
        self.pipe = pipe

    @cute.jit
    def stage(self, buffer: Int32, state: PipelineState):
        before = PipelineState(state.stages, state.count, state.index, state.phase ^ 1)
        self.pipe.producer_acquire(before)
        super().stage(buffer, state)

    @cute.jit
    def send(self, buffer: Int32):
        """Nothing: the courier does."""

    @cute.jit
    def free(self):
        """Nothing: ``stage`` waits."""

    @cute.jit
    def wait_sent(self, state: PipelineState):
        self.pipe.producer_acquire(state)

    @cute.jit
    def finish(self, buffer: Int32, state: PipelineState):
        self.stage(buffer, state)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.pipe.producer_commit(state)


@cute.jit
def add_in_bulk(source: cute.Tensor, target: cute.Tensor):
    """Start adding float32 words in shared memory to as many in global memory, both contiguous; by one thread."""
    _copy_in_bulk("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32", source, target)


@cute.jit
def store_in_bulk(source: cute.Tensor, target: cute.Tensor):
    """``add_in_bulk`` that writes over what is there."""
    _copy_in_bulk("cp.async.bulk.global.shared::cta.bulk_group", source, target)


@cute.jit
def store_or_add_in_bulk(source: cute.Tensor, target: cute.Tensor, added: Int32):
    """``store_in_bulk`` where ``added`` is 0, else ``add_in_bulk``; without a branch, for which couriers of
    packed sequences have no register left."""
    cute.arch.inline_ptx(
        "{ .reg .pred stores; setp.eq.s32 stores, {$r3}, 0;"
        " @stores cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};"
        " @!stores cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2}; }",
        read_only_args=[
            target.iterator.toint(),
            source.iterator.toint(),
            Int32(4 * cute.size(source)),
            added,
        ],
    )


def _copy_in_bulk(instruction: str, source: cute.Tensor, target: cute.Tensor) -> None:
    """Start an instruction that copies all words of ``source``, of 4 bytes, to ``target``."""
    cute.arch.inline_ptx(
        f"{instruction} [{{$r0}}], [{{$r1}}], {{$r2}};",
        read_only_args=[target.iterator.toint(), source.iterator.toint(), Int32(4 * cute.size(source))],
    )
