"""What a kernel that makes several copies at once is built from, as data. Nothing here imports the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.problem import DTYPES, SHORT_NAMES

VECTOR = 8
"""Elements that are moved together, 16 bytes."""

THREADS = 256

VECTORS_A_THREAD = 4
"""Read before the first is written: what is far away takes a while to answer."""

TILE = THREADS * VECTORS_A_THREAD
"""Vectors of a CTA."""

MOST_COPIES = 32


@dataclass(frozen=True)
class CopiesConfig:
    """Everything that is fixed when the kernel is compiled: how many copies it makes, and their dtype."""

    arch: str
    dtype: str
    copies: int

    @property
    def smem_bytes(self) -> int:
        """None."""
        return 0

    @property
    def name(self) -> str:
        """Unique among kernels."""
        return f"copies_{self.arch}_{SHORT_NAMES[self.dtype]}_{self.copies}"


def validate_copies_config(config: CopiesConfig) -> None:
    """Raise ValueError for a config that no kernel can be built from."""
    if config.dtype not in DTYPES:
        raise ValueError(f"dtype is {config.dtype!r}, allowed: {', '.join(map(repr, DTYPES))}")
    if not 1 <= config.copies <= MOST_COPIES:
        raise ValueError(f"copies is {config.copies}, allowed: 1 to {MOST_COPIES}")
