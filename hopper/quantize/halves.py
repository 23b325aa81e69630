"""Pairs of float16 in words of 32 bits."""

import struct

import cutlass.cute as cute
from cutlass import Int32


def halves_of(x: float) -> int:
    """A number as both float16 of a word."""
    bits = int.from_bytes(struct.pack("<e", x), "little")
    return bits << 16 | bits


def add_halves(a: Int32, b: Int32) -> Int32:
    return of_halves("add.rn.f16x2", a, b)


def multiply_halves(a: Int32, b: Int32) -> Int32:
    return of_halves("mul.rn.f16x2", a, b)


def magnitude_of_halves(a: Int32) -> Int32:
    return cute.arch.inline_ptx("abs.f16x2 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[a])


def limit_halves(a: Int32, most: Int32) -> Int32:
    """a, or ``most`` >= 0 with its sign where its magnitude is larger, or where it is NaN."""
    return of_halves("min.xorsign.abs.f16x2", a, most)


def of_halves(instruction: str, a: Int32, b: Int32) -> Int32:
    """An operation on two pairs of float16 in words."""
    return cute.arch.inline_ptx(
        f"{instruction} {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Int32], read_only_args=[a, b]
    )


def not_a_number(pair: Int32) -> Int32:
    """All bits of each float16 of a word that is NaN or infinite."""
    is_so = (pair & 0x7FFF7FFF) + 0x04000400 >> 15 & 0x00010001
    return is_so * 0xFFFF
