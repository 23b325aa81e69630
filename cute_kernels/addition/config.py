"""What a kernel that adds tensors to one is built from, as data. Nothing here imports the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.problem import DTYPES, SHORT_NAMES

VECTOR = 8
"""Elements of a thread, 16 bytes."""

THREADS = 256

PARTS = (2, 3)
"""How many a kernel may add; PyTorch adds one in a single pass too."""


@dataclass(frozen=True)
class AdditionConfig:
    """Everything that is fixed when the kernel is compiled. ``dtype`` is that of the total and of the parts."""

    arch: str
    dtype: str
    parts: int

    @property
    def smem_bytes(self) -> int:
        """None."""
        return 0

    @property
    def name(self) -> str:
        """Unique among kernels."""
        return f"addition_{self.arch}_{SHORT_NAMES[self.dtype]}_{self.parts}"


def validate_addition_config(config: AdditionConfig) -> None:
    """Raise ValueError for a config that no kernel can be built from."""
    if config.dtype not in DTYPES:
        raise ValueError(f"dtype is {config.dtype!r}, allowed: {', '.join(map(repr, DTYPES))}")
    if config.parts not in PARTS:
        raise ValueError(f"parts is {config.parts}, allowed: {', '.join(map(str, PARTS))}")
