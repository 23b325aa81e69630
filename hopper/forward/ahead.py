"""What a CTA asks for while the kernel in front of its own still runs."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.arch import WARP_SIZE

from cute_kernels.key_blocks import BlockRange
from cute_kernels.window import window_of
from hopper.config import WARPGROUP_THREADS, ForwardConfig
from hopper.forward.batch import DenseBatch

LINE_BYTES = 128
"""Of L2."""


@cute.jit
def ask_for_first_tile(
    config: ForwardConfig, inputs: tuple, v_row_mode: int, batch: DenseBatch, of_order: tuple
):
    """Have Q of the CTA's first tile come to L2, and the K and V that it visits first: by all threads, or with
    ``waits_to_load`` by the warps beside the one that loads.

    All SMs meet in L2, so what the kernel in front stores later is in it as well: nothing is read here, and no result
    depends on it. Without a mask the tiles of a head begin with the same keys, and ask for a part each. ``inputs`` are
    the views of Q (seqlen, head_dim, heads, batch), K, and V (head_dim_v, keys, kv_heads, batch), or as K is with a
    ``v_row_mode`` of 0; ``of_order`` is what ``batch`` makes the order of tiles from.
    """
    c, (lengths, _, group, *_) = config, of_order
    mQ, mK, mVt = inputs
    order = batch.order(*of_order)
    tile = cute.arch.block_idx()[0]
    if tile < order.num_tiles:
        m_block, head, number = order.coordinates(tile)
        head_kv = head // group
        seqlens = batch.seqlens(lengths).of_tile(m_block, number)
        blocks = BlockRange(c.tile_m, c.tile_n, window_of(c.causal, ()), c.few_keys).of(m_block, seqlens)
        first, step = (0, 1) if const_expr(c.causal) else (m_block, order.num_m_blocks)
        n_begin = blocks.last * c.tile_n
        queries, keys = mQ[None, None, head, number], mK[None, None, head_kv, number]
        values = mVt[None, None, head_kv, number]
        rows_first = [v_row_mode, 1 - v_row_mode]
        values = cute.make_tensor(values.iterator, cute.select(values.layout, mode=rows_first))
        threads = _asking_threads(c)
        _ask(threads, queries, m_block * c.tile_m - seqlens.lead_q, c.tile_m, c.head_dim)
        _ask(threads, keys, n_begin, c.tile_n, c.head_dim, first, step)
        _ask(threads, values, n_begin, c.tile_n, c.head_dim_v, first, step)


def _asking_threads(config: ForwardConfig) -> tuple[int, int]:
    """The first of those that ask, and how many there are."""
    return (WARP_SIZE, WARPGROUP_THREADS - WARP_SIZE) if config.waits_to_load else (0, config.threads)


@cute.jit
def _ask(
    threads: cutlass.Constexpr[tuple[int, int]],
    rows: cute.Tensor,
    begin: Int32,
    count: cutlass.Constexpr[int],
    columns: cutlass.Constexpr[int],
    first: Int32 = 0,
    step: Int32 = 1,
):
    """Of ``count`` rows from ``begin`` on every ``step``-th, from number ``first``: a line of L2 for each thread."""
    begin_of_threads, count_of_threads = threads
    of_line = LINE_BYTES * 8 // rows.element_type.width
    lines = -(-columns // of_line)
    for i in cutlass.range_constexpr(-(-count * lines // count_of_threads)):
        item = cute.arch.thread_idx()[0] - begin_of_threads + count_of_threads * i
        number, column = first + item // lines * step, item % lines * of_line
        row = begin + number
        if number < count and row < rows.shape[0] and column < rows.shape[1]:
            address = (rows.iterator + cute.crd2idx((row, column), rows.layout)).toint()
            cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])
