"""Compile the kernel that appends to a KV cache, for any sizes, with or without a GPU."""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_tensor

from cute_kernels.append.config import BY_SEQUENCE, VECTOR, AppendConfig
from cute_kernels.append.kernel import AppendKernel
from cute_kernels.arguments import compile_for_torch, strided, words
from cute_kernels.dtypes import DSL_DTYPES


def compile_append(config: AppendConfig, options: str = ""):
    """Compile the kernel of ``config``; ``options`` go to ``cute.compile`` and name the architecture.

    Gives ``fn(k, v, k_cache, v_cache, cache_seqlens, cu_seqlens_new, batch_idx, page_table, new_lengths, k_descale,
    v_descale, cos, sin, first_positions, q, rotated, cu_seqlens_q, query_step)``, with None for what the config has no
    use for. k (b, s, hk, d) and v (b, s, hk, dv), or (1, total, hk, d or dv) packed
    by cu_seqlens_new, which is (0,) if they are not; caches (pages, page_size, hk, d or dv), written in place, one page
    an entry where page_table is (0, 0). Token i of sequence b goes to position cache_seqlens[b] + i of entry
    batch_idx[b], or b if that is (0,): row position % page_size of page page_table[entry, position // page_size].
    new_lengths (b,) is written. All lengths and tables are int32.

    K and V are divided by descales, float32 (b, hk); with scales by page or token these are (pages, page_size, hk), and
    those by token are written. cos and sin are (positions, rotary_dim / 2); the first new token of a sequence has
    position first_positions[b], or cache_seqlens[b] where that is (0,). q (b, sq, h, d), or (1, total_q, h, d) with
    cu_seqlens_q (b + 1,) and not (0,), is rotated into ``rotated``: its first query has that position too, the others
    are ``query_step`` apart; rows of no sequence become zeros.

    What it does not check, and its callers must: batch and heads of the tensors agree, columns of Q and K are at least
    rotary_dim, that is a multiple of ROTARY_STEP, pages x page_size and numbers of rows fit 31 bits, the tables have a
    position, and nothing that is written overlaps what is read.
    """
    c = config
    number, cache = DSL_DTYPES[c.dtype], DSL_DTYPES[c.cache_dtype]
    hk = cute.sym_int()
    d, dv = (cute.sym_int(divisibility=VECTOR) for _ in range(2))
    lead, pages = (tuple(cute.sym_int() for _ in range(2)) for _ in range(2))
    return compile_for_torch(
        AppendKernel(c),
        strided(number, (*lead, hk, d), VECTOR),
        strided(number, (*lead, hk, dv), VECTOR),
        strided(cache, (*pages, hk, d), VECTOR),
        strided(cache, (*pages, hk, dv), VECTOR),
        *(words(cute.sym_int()) for _ in range(3)),
        strided(Int32, (cute.sym_int(), cute.sym_int()), 1),
        words(cute.sym_int()),
        *(
            (_descales((*pages, hk) if c.scales != BY_SEQUENCE else None) if c.is_scaled else None)
            for _ in range(2)
        ),
        *(_rotary(c) if c.rotates else (None,) * 3),
        *(_queries(c, d) if c.rotates else (None,) * 4),
        options=options,
    )


def _descales(of_rows: tuple | None):
    """float32 (b, hk), or of that shape, of any strides."""
    shape = of_rows or tuple(cute.sym_int() for _ in range(2))
    strides = tuple(cute.sym_int(64) for _ in shape)
    return make_fake_tensor(Float32, shape, strides, assumed_align=4)


def _rotary(config: AppendConfig) -> tuple:
    dtype = DSL_DTYPES[config.rotary_dtype]
    shape = cute.sym_int(), cute.sym_int(divisibility=VECTOR)
    return strided(dtype, shape, VECTOR), strided(dtype, shape, VECTOR), words(cute.sym_int())


def _queries(config: AppendConfig, head_dim) -> tuple:
    dtype = DSL_DTYPES[config.q_dtype]
    shape = *(cute.sym_int() for _ in range(3)), head_dim
    return strided(dtype, shape, VECTOR), strided(dtype, shape, VECTOR), words(cute.sym_int()), Int32(0)
