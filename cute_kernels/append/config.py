"""What a kernel that appends to a KV cache is built from, as data. Nothing here imports the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.problem import DTYPES, SHORT_NAMES

E4M3 = "float8_e4m3fn"
ELEMENTS = (*DTYPES, E4M3)
ROTARY_DTYPES = (*ELEMENTS, "float32")

NONE, INTERLEAVED, HALVES = "none", "interleaved", "halves"
ROTARIES = (NONE, INTERLEAVED, HALVES)
"""What a rotation turns together: columns 2i and 2i + 1, or i and i + rotary_dim / 2."""

BY_SEQUENCE, BY_PAGE, BY_TOKEN = "sequence", "page", "token"
SCALES = (BY_SEQUENCE, BY_PAGE, BY_TOKEN)
"""What shares a scale of a head in a cache of e4m3. That of a token is its own, and written."""

MAX_SPREAD = 256
"""Columns of a row that the lanes of a warp have together, where they need each other's."""

VECTOR = 8
"""Columns that a thread moves: 16 bytes, of e4m3 8."""

ROTARY_STEP = 2 * VECTOR
"""What rotary_dim is a multiple of."""

THREADS = 128

SIGN_WORDS = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0, 0x082EFA98, 0xEC4E6C89)
"""Of the Hadamard rotation, a bit for each of 256 columns, the lowest first, 1 for a minus: the binary digits of pi
behind its point. No tensor has them, so that they are the same in all kernels and for ever."""


def has_minus(column: int) -> bool:
    """Whether a column of K changes its sign before it is multiplied by a Hadamard matrix."""
    return SIGN_WORDS[column // 32] >> column % 32 & 1 == 1


ARCHS_WITHOUT_E4M3 = ("sm_80", "sm_86")


@dataclass(frozen=True)
class AppendConfig:
    """Everything that is fixed when the kernel is compiled; sizes, strides and pages are not.

    ``dtype`` is that of the new K and V, ``cache_dtype`` that of the cache. With a ``rotary`` other than "none" K is
    rotated, and queries of ``q_dtype`` are too, by tables of ``rotary_dtype``. With ``hadamard`` both are multiplied by
    signs and a Hadamard matrix behind that. ``scales`` says what shares a scale where K and V are divided by some.
    """

    arch: str
    dtype: str
    cache_dtype: str
    rotary: str = NONE
    rotary_dtype: str = ""
    q_dtype: str = ""
    scales: str = BY_SEQUENCE
    hadamard: bool = False

    @property
    def spreads_keys(self) -> bool:
        """Whether the lanes that have a row of K need each other's columns."""
        return self.hadamard or self.spreads_values

    @property
    def spreads_values(self) -> bool:
        return self.scales == BY_TOKEN

    @property
    def is_scaled(self) -> bool:
        """Whether K and V are divided by descales."""
        return self.cache_dtype != self.dtype

    @property
    def rotates(self) -> bool:
        return self.rotary != NONE

    @property
    def smem_bytes(self) -> int:
        return 0

    @property
    def name(self) -> str:
        """Unique among kernels."""
        names = SHORT_NAMES | {"float32": "fp32"}
        rotary = f"_{self.rotary}_{names[self.rotary_dtype]}_q{names[self.q_dtype]}" if self.rotates else ""
        scales = "" if self.scales == BY_SEQUENCE else f"_by_{self.scales}"
        hadamard = "_hadamard" if self.hadamard else ""
        return f"append_{self.arch}_{names[self.dtype]}_{names[self.cache_dtype]}{scales}{rotary}{hadamard}"


def validate_append_config(config: AppendConfig) -> None:
    """Raise ValueError for a config that no kernel can be built from, NotImplementedError for its GPU."""
    c = config
    _check("dtype", c.dtype, ELEMENTS)
    _check("cache_dtype", c.cache_dtype, (c.dtype,) if c.dtype == E4M3 else (c.dtype, E4M3))
    _check("rotary", c.rotary, ROTARIES)
    _check("rotary_dtype", c.rotary_dtype, ROTARY_DTYPES if c.rotates else ("",))
    _check("q_dtype", c.q_dtype, ELEMENTS if c.rotates else ("",))
    _check("scales", c.scales, SCALES if c.is_scaled else (BY_SEQUENCE,))
    reads_e4m3 = c.is_scaled or (c.rotates and E4M3 in (c.dtype, c.q_dtype, c.rotary_dtype))
    if reads_e4m3 and c.arch in ARCHS_WITHOUT_E4M3:
        raise NotImplementedError(
            f"arch is {c.arch}, which has no instructions for {E4M3}: append in PyTorch, with reference.append"
        )


def _check(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}, allowed: {', '.join(map(repr, allowed))}")
