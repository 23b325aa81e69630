"""End of a tile: half of O from registers through shared memory to global memory, LSE straight to global memory."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warp
from cutlass.pipeline import PipelineState

from cute_kernels.invariant import LoopInvariant
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.softmax import normalize_rows
from hopper.config import WARPGROUP_ROWS
from hopper.forward.barriers import sync_warpgroup
from hopper.forward.store import DenseTmaStore
from hopper.wide.config import WideForwardConfig
from hopper.wide.operands import Place, WidePipelines


@dataclass(frozen=True)
class WideEpilogue(LoopInvariant):
    """Writes one ``half`` of the columns of 64 rows, which are staged in the place of the last block's V, and gives
    that back."""

    config: WideForwardConfig
    store: DenseTmaStore
    pipes: WidePipelines
    mma: cute.TiledMma
    place: Place
    warp_in_group: Int32
    lane: Int32

    @cute.jit
    def finish(
        self,
        half: cutlass.Constexpr[int],
        acc: cute.Tensor,
        inverse_sum: cute.Tensor,
        coordinates: tuple,
        seqlens: SeqlenInfo,
        state: PipelineState,
    ):
        """``coordinates`` are m_block and head, ``state`` is where the last block's V lies."""
        m_block, head = coordinates
        stage = half * self.config.stages + state.index
        normalize_rows(acc, inverse_sum)
        # A warp's product may be done while that of another one still reads V.
        sync_warpgroup(half)
        self._registers_to_shared(acc, self.store.o.smem[None, None, stage])
        cute.arch.fence_view_async_shared()
        sync_warpgroup(half)
        if self.warp_in_group == 0:
            self._start(half, stage, self.place.own(m_block), head, seqlens)
            # Whichever lane issued the copy, no lane of the warp goes on before it has been read.
            self.store.wait()
            cute.arch.sync_warp()
        self.pipes.v[half].consumer_release(state)

    def _start(self, half: int, stage: Int32, m_block: Int32, head: Int32, seqlens: SeqlenInfo) -> None:
        o, tile = self.store.o, (WARPGROUP_ROWS, self.config.half)
        tOsO, tOgO = o.partition(tile, (m_block, half), head, seqlens.rows_q)
        cute.copy(o.atom, tOsO[None, stage], tOgO)
        cute.arch.cp_async_bulk_commit_group()

    def _registers_to_shared(self, acc: cute.Tensor, sO: cute.Tensor) -> None:
        dtype = self.store.o.smem.element_type
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), dtype)
        thread = self.warp_in_group * cute.arch.WARP_SIZE + self.lane
        copy = cute.make_tiled_copy_C(atom, self.mma).get_slice(thread)
        rO = cute.make_rmem_tensor_like(acc, dtype)
        rO.store(acc.load().to(dtype))
        cute.copy(atom, copy.retile(rO), copy.partition_D(sO))
