"""What a kernel that makes several copies at once is built from, as data. Nothing here imports the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.problem import DTYPES, SHORT_NAMES

VECTOR = 8
"""Elements that are moved together, 16 bytes."""

THREADS = 256
"""Of a CTA, where as many SMs as there are may copy."""

THREADS_OF_FEW = 1024
"""Where few CTAs copy beside another kernel, which gets the other SMs: an SM has as much on its way as it can."""

VECTORS_A_THREAD = 4
"""Read before the first is written: what is far away takes a while to answer."""

MOST_COPIES = 32
"""Pieces of all sources of a launch."""


@dataclass(frozen=True)
class CopiesConfig:
    """Everything that is fixed when the kernel is compiled: of how many tensors it copies how many pieces each, their
    dtype, and which way.

    ``gathers``: what ``targets`` hold goes into the pieces of the ``sources``, and not the other way round. ``threads``
    are those of a CTA.
    """

    arch: str
    dtype: str
    sources: int
    pieces: int
    gathers: bool = False
    threads: int = THREADS

    @property
    def tile(self) -> int:
        """Vectors that a CTA moves at a time."""
        return self.threads * VECTORS_A_THREAD

    @property
    def copies(self) -> int:
        """Of a launch."""
        return self.sources * self.pieces

    @property
    def smem_bytes(self) -> int:
        """None."""
        return 0

    @property
    def name(self) -> str:
        """Unique among kernels."""
        way = "_gathers" if self.gathers else ""
        few = f"_t{self.threads}" if self.threads != THREADS else ""
        return f"copies_{self.arch}_{SHORT_NAMES[self.dtype]}_{self.sources}x{self.pieces}{way}{few}"


def validate_copies_config(config: CopiesConfig) -> None:
    """Raise ValueError for a config that no kernel can be built from."""
    if config.dtype not in DTYPES:
        raise ValueError(f"dtype is {config.dtype!r}, allowed: {', '.join(map(repr, DTYPES))}")
    if min(config.sources, config.pieces) < 1 or config.copies > MOST_COPIES:
        given = f"sources is {config.sources} and pieces {config.pieces}"
        raise ValueError(f"{given}, allowed: 1 or more, and {MOST_COPIES} copies at most")
    if config.threads not in (THREADS, THREADS_OF_FEW):
        raise ValueError(f"threads is {config.threads}, allowed: {THREADS}, {THREADS_OF_FEW}")
