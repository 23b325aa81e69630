"""Warpgroup matrix multiplies (WGMMA) on fragments."""

import cutlass
import cutlass.cute as cute
from cutlass import Int64, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.tcgen05.helpers import int_to_smem_descriptor, smem_descriptor_to_int


def keep_descriptor(operand: cute.Tensor) -> cute.Tensor:
    """An operand in shared memory whose descriptor is made here, once, and not again for every GEMM."""
    descriptor = smem_descriptor_to_int(operand.iterator)
    kept = cute.arch.inline_ptx(
        "mov.b64 {$w0}, {$r0};", write_only_types=[Int64], read_only_args=[descriptor]
    )
    return cute.make_tensor(int_to_smem_descriptor(kept), operand.layout)


@cute.jit
def issue_gemm(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    tA: cute.Tensor,
    tB: cute.Tensor,
    accumulate: cutlass.Constexpr[bool],
    closes: cutlass.Constexpr[bool] = True,
    steps: cutlass.Constexpr[int] = 0,
):
    """Start acc (+)= A B^T as one group of asynchronous WGMMAs and return at once.

    With ``closes=False`` the group is left open for the next call. With ``steps`` only so many are made, from the first
    on, of those that A and B have.

    The atom is made here and not taken from ``tiled_mma``, because its ACCUMULATE field is state: set inside a
    dynamic loop on an atom from outside, it would have to be carried around that loop.
    """
    atom = cute.make_mma_atom(tiled_mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    warpgroup.fence()
    for k in cutlass.range_constexpr(steps or cute.size(tA.shape[2])):
        cute.gemm(atom, acc, tA[None, None, k], tB[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    if const_expr(closes):
        warpgroup.commit_group()
