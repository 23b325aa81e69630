"""dK and dV of a key tile, from registers to global memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warp
from cutlass.pipeline import PipelineState

from cute_kernels.dropout import multiply_all
from cute_kernels.fast_math import pin
from cute_kernels.invariant import LoopInvariant
from cute_kernels.seqlen import SeqlenInfo
from hopper.backward.barriers import sync_consumers, sync_warpgroup
from hopper.backward.config import BackwardConfig
from hopper.backward.consumer import BackwardConsumer, previous_stage
from hopper.backward.dq import WORDS_PER_STORE
from hopper.config import WARPGROUP_ROWS, WARPGROUP_THREADS
from hopper.tiles import TmaOperand

SWIZZLE_BYTES = 1024
"""After which a swizzle repeats."""


class BackwardEpilogue(LoopInvariant):
    """Stages the rows of a warpgroup where dS and dQ were, so that K, V, Q and dO of the next tile can be loaded.

    ``layouts`` has those of the staged rows, ``dk`` and ``dv``; ``memory`` is where dS and the staged dQ lie;
    ``targets`` the TMA atoms and tensors of dK and dV. ``scales`` are the factor of dK, and a tuple of that of dV,
    which has one with dropout.
    """

    def __init__(
        self,
        config: BackwardConfig,
        layouts,
        memory: tuple[cute.Pointer, cute.Pointer],
        targets: tuple,
        scales: tuple,
        wg: Int32,
    ):
        self.config, self.layouts, self.memory = config, layouts, memory
        self.targets, self.wg = targets, wg
        self.softmax_scale, self.factors = scales

    @cute.jit
    def store(self, consumer: BackwardConsumer, state: PipelineState, coordinates: tuple):
        """Store dK and dV of the tile at ``coordinates``: n_block, head_kv, and the ``SeqlenInfo``.

        ``state`` is that of the last block. The dQ that was sent under it is in the buffer before; the part that
        ``acc`` of dQ holds will take the other one.
        """
        c = self.config
        scaled = consumer.acc_dK.load() * self.softmax_scale
        consumer.acc_dK.store(scaled)
        multiply_all(consumer.acc_dV, self.factors)
        consumer.dq.wait_sent(state)
        sync_consumers(c)
        buffer = consumer.dq.free_buffer(previous_stage(c, state.index))
        sdK, sdV = self._staging(consumer, buffer)
        self._stage(consumer, consumer.acc_dK, consumer.mmas.dk, sdK)
        self._stage(consumer, consumer.acc_dV, consumer.mmas.dv, sdV)
        cute.arch.fence_view_async_shared()
        sync_warpgroup(self.wg)
        if consumer.dq.is_issuer:
            n_block, head_kv, seqlens = coordinates
            for i, (smem, columns) in enumerate(((sdK, c.head_dim), (sdV, c.head_dim_v))):
                operand = TmaOperand(self.targets[0][i], self.targets[1][i], smem)
                tile = (n_block * c.consumers + self.wg, 0)
                source, target = operand.partition((WARPGROUP_ROWS, columns), tile, head_kv, seqlens.rows_k)
                cute.copy(operand.atom, source[None, 0], target)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        sync_consumers(c)

    def _staging(self, consumer: BackwardConsumer, buffer: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """(rows, columns, 1) for dK and dV of this warpgroup."""
        c, (sdS, sdQ) = self.config, self.memory
        dtype = consumer.mmas.dk.op.a_dtype
        dk_offset = self.wg * (WARPGROUP_ROWS * c.head_dim)
        dq_offset = (self.wg * c.stages + buffer) * c.staged_words
        places = (sdS + dk_offset, sdQ + dq_offset)
        return tuple(
            cute.make_tensor(
                cute.recast_ptr(place.align(SWIZZLE_BYTES), layout.inner, dtype=dtype), layout.outer
            )
            for place, layout in zip(places, (self.layouts.dk, self.layouts.dv), strict=True)
        )

    @cute.jit
    def _stage(self, consumer: BackwardConsumer, acc: cute.Tensor, mma: cute.TiledMma, target: cute.Tensor):
        atom = cute.make_copy_atom(
            warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), target.element_type
        )
        # Pinned, or else addresses are computed before the loop over tiles and held in registers throughout.
        copy = cute.make_tiled_copy_C(atom, mma).get_slice(pin(consumer.thread, Int32))
        rounded = cute.make_rmem_tensor_like(acc, target.element_type)
        rounded.store(acc.load().to(target.element_type))
        cute.copy(atom, copy.retile(rounded), copy.partition_D(target[None, None, 0]))


class DividedEpilogue(BackwardEpilogue):
    """Stores dK and dV as float32 parts, in the order in which the accumulators hold them (``dk_order``): what
    threads write lies one behind the other. Nothing is staged, so nothing has to be read before."""

    @cute.jit
    def store(self, consumer: BackwardConsumer, state: PipelineState, coordinates: tuple):
        n_block, head_kv, seqlens = coordinates
        scaled = consumer.acc_dK.load() * self.softmax_scale
        consumer.acc_dK.store(scaled)
        multiply_all(consumer.acc_dV, self.factors)
        accumulators = consumer.acc_dK, consumer.acc_dV
        for i in cutlass.range_constexpr(2):
            target = divided_part(self.targets[1][i], self.wg, n_block, head_kv, seqlens, self.config.tile_n)
            store_words(accumulators[i], target, pin(consumer.thread, Int32))


def divided_part(
    tensor: cute.Tensor, part: Int32, n_block: Int32, head_kv: Int32, seqlens: SeqlenInfo, tile_n: int
) -> cute.Tensor:
    """The words of a part of key tile ``n_block`` in dK or dV, of ``view_divided``."""
    if seqlens.is_packed:
        return tensor[None, part, seqlens.first_key_block(tile_n) + n_block, head_kv]
    return tensor[None, part, n_block, head_kv, seqlens.batch]


@cute.jit
def store_words(acc: cute.Tensor, target: cute.Tensor, thread: Int32):
    """The float32 that a thread of a warpgroup holds, to its places among the words of all threads: four next to each
    other, and the threads in order."""
    groups = cute.size(acc) // WORDS_PER_STORE
    words = cute.make_tensor(acc.iterator, cute.make_layout((WORDS_PER_STORE, groups)))
    places = cute.make_layout((WORDS_PER_STORE, WARPGROUP_THREADS, groups))
    by_thread = cute.make_tensor(target.iterator, places)
    for i in cutlass.range_constexpr(groups):
        cute.autovec_copy(words[None, i], by_thread[None, thread, i])
