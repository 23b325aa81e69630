"""What lies in the forward kernel's shared memory, and how."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.tile_scheduler import MAILBOX_STAGES
from hopper.config import WARPGROUP_ROWS, ForwardConfig
from hopper.forward.kv_source import DenseTma
from hopper.forward.operands import PerOperand
from hopper.forward.precision import SixteenBits
from hopper.tiles import swizzled_layout

SWIZZLED = 1024
"""Bytes to which a swizzled operand is aligned."""


class SmemLayouts(NamedTuple):
    """Staged, swizzled layouts of the four operands in shared memory; V is seen transposed."""

    q: cute.ComposedLayout
    k: cute.ComposedLayout
    vt: cute.ComposedLayout
    o: cute.ComposedLayout


def smem_layouts(c: ForwardConfig, kv_source: DenseTma) -> SmemLayouts:
    """The layout of each operand; its last mode is the pipeline stage, or of Q and O the consumer warpgroup."""
    qk_dtype, out_dtype = DSL_DTYPES[c.qk_dtype], DSL_DTYPES[c.out_dtype]
    o_stride = WARPGROUP_ROWS * (c.head_dim if c.o_shares_q else c.head_dim_v)
    return SmemLayouts(
        q=swizzled_layout(WARPGROUP_ROWS, c.head_dim, c.consumers * c.q_stages, qk_dtype),
        k=swizzled_layout(c.tile_n, c.head_dim, c.stages, qk_dtype),
        vt=kv_source.v_layout(DSL_DTYPES[c.dtype]),
        o=swizzled_layout(WARPGROUP_ROWS, c.head_dim_v, c.consumers, out_dtype, stage_stride=o_stride),
    )


def few_tensors(kv_source: DenseTma, storage: Any) -> tuple[cute.Tensor, cute.Tensor]:
    """``few_keys`` of K and V in the memory ``storage``."""
    k, v = kv_source.few_layouts()
    return storage.sKfew.get_tensor(k.outer, swizzle=k.inner), storage.sVfew.get_tensor(
        v.outer, swizzle=v.inner
    )


def words_of_mailbox(kv_source: DenseTma) -> int:
    """int32 of the mailbox in which warps learn of tiles."""
    return MAILBOX_STAGES * kv_source.words_of_tile


def storage_type(c: ForwardConfig, layouts: SmemLayouts, kv_source: DenseTma, precision: SixteenBits) -> type:
    """The struct of all shared memory of a CTA. A pipeline has two barriers a stage: full and empty."""
    dtype, qk_dtype, out_dtype = (DSL_DTYPES[each] for each in (c.dtype, c.qk_dtype, c.out_dtype))
    has_no_own_o = c.o_shares_q or c.o_shares_v or c.o_shares_rows or c.o_from_registers
    o_elements = 0 if has_no_own_o else cute.cosize(layouts.o.outer)
    row_stages = kv_source.row_stages
    row_elements = row_stages * c.tile_n * c.head_dim_v
    few = c.few_keys * c.consumers

    @cute.struct
    class SharedStorage:
        barriers_q: cute.struct.MemRange[cutlass.Int64, 2 * c.consumers * c.q_stages]
        barriers_k: cute.struct.MemRange[cutlass.Int64, 2 * c.stages]
        barriers_v: cute.struct.MemRange[cutlass.Int64, 2 * c.stages]
        barriers_o: cute.struct.MemRange[cutlass.Int64, 2 * (c.o_shares_v or c.o_shares_rows)]
        barriers_few: cute.struct.MemRange[cutlass.Int64, 2 * c.consumers * (c.few_keys > 0)]
        barriers_mailbox: cute.struct.MemRange[cutlass.Int64, 2 * MAILBOX_STAGES]
        mailbox: cute.struct.Align[cute.struct.MemRange[Int32, words_of_mailbox(kv_source)], 16]
        barriers_rows: cute.struct.MemRange[cutlass.Int64, 2 * row_stages]
        scales: cute.struct.Align[cute.struct.MemRange[Float32, precision.scale_floats], 16]
        means: cute.struct.Align[cute.struct.MemRange[Float32, precision.mean_floats], 16]
        sQ: cute.struct.Align[cute.struct.MemRange[qk_dtype, cute.cosize(layouts.q.outer)], SWIZZLED]
        sK: cute.struct.Align[cute.struct.MemRange[qk_dtype, cute.cosize(layouts.k.outer)], SWIZZLED]
        sV: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.vt.outer)], SWIZZLED]
        sO: cute.struct.Align[cute.struct.MemRange[out_dtype, o_elements], SWIZZLED]
        sVrows: cute.struct.Align[cute.struct.MemRange[dtype, row_elements], SWIZZLED]
        sKfew: cute.struct.Align[cute.struct.MemRange[dtype, few * c.head_dim], SWIZZLED]
        sVfew: cute.struct.Align[cute.struct.MemRange[dtype, few * c.head_dim_v], SWIZZLED]

    return SharedStorage


def smem_tensors(c: ForwardConfig, storage: Any, layouts: SmemLayouts) -> PerOperand:
    """sQ, sK, sVt and sO in the memory ``storage``, which is a ``storage_type``."""
    memory_of_o = _memory_of_o(c, storage)
    return PerOperand(
        storage.sQ.get_tensor(layouts.q.outer, swizzle=layouts.q.inner),
        storage.sK.get_tensor(layouts.k.outer, swizzle=layouts.k.inner),
        storage.sV.get_tensor(layouts.vt.outer, swizzle=layouts.vt.inner),
        memory_of_o.get_tensor(layouts.o.outer, swizzle=layouts.o.inner, dtype=DSL_DTYPES[c.out_dtype]),
    )


def _memory_of_o(c: ForwardConfig, storage: Any) -> Any:
    """Where O is staged for TMA: in a place of its own, or in one whose operand has been read by then."""
    if c.o_shares_q or c.o_from_registers:
        # An O that goes from registers has no place, and none is touched.
        return storage.sQ
    if c.o_shares_v:
        return storage.sV
    return storage.sVrows if c.o_shares_rows else storage.sO
