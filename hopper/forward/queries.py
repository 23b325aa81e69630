"""Q as operand A of Q K^T: in shared memory, or in a consumer's registers."""

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import warp
from cutlass.cute.nvgpu.tcgen05.helpers import int_to_smem_descriptor, smem_descriptor_to_int

from cute_kernels.invariant import LoopInvariant


class SharedQueries(LoopInvariant):
    """Where TMA puts it, always in the same place."""

    def __init__(self, operand: cute.Tensor):
        self.operand = operand

    @property
    def fragment(self) -> cute.Tensor:
        """Operand A."""
        return self.operand

    def read(self, stage: Int32):
        """Once a tile, when its Q has come to ``stage``."""


class StagedQueries(SharedQueries):
    """Where TMA puts it, in one stage after the other: the last mode of ``operand``."""

    def __init__(self, operand: cute.Tensor):
        super().__init__(operand)
        self.descriptor = cute.make_rmem_tensor(1, Int64)

    @property
    def fragment(self) -> cute.Tensor:
        """That of the stage which was read last."""
        layout = self.operand[None, None, None, 0].layout
        return cute.make_tensor(int_to_smem_descriptor(self.descriptor[0]), layout)

    def read(self, stage: Int32):
        self.descriptor[0] = smem_descriptor_to_int(self.operand[None, None, None, stage].iterator)


class KeptQueries(SharedQueries):
    """In registers, which are read from shared memory once a tile: a product of Q then reads K alone.

    ``sQ`` are the rows of the warpgroup, (WARPGROUP_ROWS, head_dim), of which ``thread`` is the number of one.
    """

    def __init__(self, qk: cute.TiledMma, sQ: cute.Tensor, thread: Int32):
        dtype = sQ.element_type
        super().__init__(cute.make_rmem_tensor(qk.partition_shape_A(sQ.shape), dtype))
        self.qk, self.sQ, self.thread = qk, sQ, thread

    @cute.jit
    def read(self, stage: Int32):
        atom = cute.make_copy_atom(
            warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), self.sQ.element_type
        )
        copy = cute.make_tiled_copy_A(atom, self.qk).get_slice(self.thread)
        cute.copy(atom, copy.partition_S(self.sQ), copy.retile(self.fragment))
