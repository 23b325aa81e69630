"""Q as operand A of Q K^T: in shared memory, or in a consumer's registers."""

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warp

from cute_kernels.invariant import LoopInvariant


class SharedQueries(LoopInvariant):
    """Where TMA puts it; ``fragment`` has its descriptors."""

    def __init__(self, fragment: cute.Tensor):
        self.fragment = fragment

    def read(self):
        """Once a tile, when its Q has come."""


class KeptQueries(SharedQueries):
    """In registers, which are read from shared memory once a tile: a product of Q then reads K alone.

    ``sQ`` are the rows of the warpgroup, (WARPGROUP_ROWS, head_dim), of which ``thread`` is the number of one.
    """

    def __init__(self, qk: cute.TiledMma, sQ: cute.Tensor, thread: Int32):
        dtype = sQ.element_type
        super().__init__(cute.make_rmem_tensor(qk.partition_shape_A(sQ.shape), dtype))
        self.qk, self.sQ, self.thread = qk, sQ, thread

    @cute.jit
    def read(self):
        atom = cute.make_copy_atom(
            warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), self.sQ.element_type
        )
        copy = cute.make_tiled_copy_A(atom, self.qk).get_slice(self.thread)
        cute.copy(atom, copy.partition_S(self.sQ), copy.retile(self.fragment))
