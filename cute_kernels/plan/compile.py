"""Compile the kernel that plans launches on packed sequences, with or without a GPU."""

import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.arguments import compile_for_torch, plan_argument, words
from cute_kernels.plan.config import PlanConfig
from cute_kernels.plan.kernel import PlanKernel
from cute_kernels.plan.parts_kernel import PartsPlanKernel


def compile_plan(config: PlanConfig, options: str = ""):
    """Compile the kernel of ``config``; ``options`` go to ``cute.compile`` and name the architecture.

    Gives ``fn(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, plan, total_q, total_k, tile, of_keys)``, as
    ``PlanKernel`` has it; all tensors are int32 vectors, plan of ``plan_words`` and 16-byte aligned. With ``in_parts``
    ``tile_n, seen, heads, slots, most_parts`` come behind ``tile``, as ``PartsPlanKernel`` has them.
    """
    batch_and_one = cute.sym_int()
    return compile_for_torch(
        PartsPlanKernel(config) if config.in_parts else PlanKernel(config),
        words(batch_and_one),
        words(batch_and_one),
        words(cute.sym_int()),
        words(cute.sym_int()),
        plan_argument(),
        *(Int32(0) for _ in range(8 if config.in_parts else 4)),
        options=options,
    )
