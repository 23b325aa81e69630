"""The instructions of these kernels that CuTe would wrap in layouts: addresses here are plain integers.

A 32-bit address is one of shared memory. The constant part of an address is given apart, since the instruction has a
field for it and a register is saved.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warp


def cp_async_16(target: Int32, target_offset: int, source: Int64, source_offset: int, exists: Int32) -> None:
    """Start a copy of 16 bytes from global to shared memory, of zeros instead where ``exists`` is not positive.

    Its form with a number of bytes to read would let ptxas add to every address what that number might demand.
    """
    places = f"[{{$r0}}+{target_offset}], [{{$r1}}+{source_offset}]"
    cute.arch.inline_ptx(
        "{ .reg .pred is_missing; setp.le.s32 is_missing, {$r2}, 0; "
        f"cp.async.cg.shared.global.L2::128B {places}, 16, is_missing; }}",
        read_only_args=[target, source, exists],
    )


def ldmatrix_x4(address: Int32, offset: int, transpose: bool) -> tuple[Int32, Int32, Int32, Int32]:
    """Four 8 x 8 matrices of 16 bits; lane 8 i + r gives the address of row r of matrix i."""
    variant = ".trans" if transpose else ""
    return cute.arch.inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x4{variant}.shared.b16 "
        f"{{ {{$w0}}, {{$w1}}, {{$w2}}, {{$w3}} }}, [{{$r0}}+{offset}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def as_fragment(words: tuple, dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """Words of two elements each, the lower first, as an operand of ``mma``."""
    held = cute.make_rmem_tensor(len(words), Int32)
    for i, word in enumerate(words):
        held[i] = word
    shape = ((2,) * len(words).bit_length(),)
    return cute.make_tensor(cute.recast_tensor(held, dtype).iterator, cute.make_layout(shape))


def mma(acc: cute.Tensor, first: int, a: cute.Tensor, b: cute.Tensor) -> None:
    """acc[first : first + 4] += A B of one m16n8k16; fragments of four words and of two."""
    atom = cute.make_mma_atom(warp.MmaF16BF16Op(a.element_type, Float32, (16, 8, 16)))
    sums = cute.make_tensor(acc.iterator + first, cute.make_layout(((2, 2),)))
    cute.mma_atom_call(atom, sums, a, b, sums)


def store_word(address: Int32, offset: int, word: Int32) -> None:
    """32 bits to shared memory."""
    cute.arch.inline_ptx(f"st.shared.b32 [{{$r0}}+{offset}], {{$r1}};", read_only_args=[address, word])


def load_words(address: Int32, offset: int) -> tuple[Int32, Int32, Int32, Int32]:
    """16 bytes from shared memory."""
    return cute.arch.inline_ptx(
        f"ld.shared.v4.b32 {{ {{$w0}}, {{$w1}}, {{$w2}}, {{$w3}} }}, [{{$r0}}+{offset}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def store_words_global(address: Int64, offset: int, words: tuple) -> None:
    """16 bytes to global memory."""
    cute.arch.inline_ptx(
        f"st.global.v4.b32 [{{$r0}}+{offset}], {{ {{$r1}}, {{$r2}}, {{$r3}}, {{$r4}} }};",
        read_only_args=[address, *words],
    )
