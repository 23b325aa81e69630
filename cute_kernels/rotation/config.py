"""What a kernel that rotates queries and keys by their positions is built from, as data. Nothing here imports the
DSL."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.problem import DTYPES, SHORT_NAMES

VECTOR = 8
"""Elements that a thread moves at a time, 16 bytes of 16 bits."""

THREADS = 256

HEADS = 2
"""Of a thread."""

FLOAT32 = "float32"
TABLE_DTYPES = (*DTYPES, FLOAT32)


@dataclass(frozen=True)
class RotationConfig:
    """Everything that is fixed when the kernel is compiled: ``dtype`` of Q and K, ``table_dtype`` of cosines and
    sines."""

    arch: str
    dtype: str
    table_dtype: str

    @property
    def smem_bytes(self) -> int:
        """None."""
        return 0

    @property
    def name(self) -> str:
        """Unique among kernels."""
        names = SHORT_NAMES | {FLOAT32: "fp32"}
        return f"rotation_{self.arch}_{names[self.dtype]}_by_{names[self.table_dtype]}"


def validate_rotation_config(config: RotationConfig) -> None:
    """Raise ValueError for a config that no kernel can be built from."""
    if config.dtype not in DTYPES:
        raise ValueError(f"dtype is {config.dtype!r}, allowed: {', '.join(map(repr, DTYPES))}")
    if config.table_dtype not in TABLE_DTYPES:
        raise ValueError(
            f"table_dtype is {config.table_dtype!r}, allowed: {', '.join(map(repr, TABLE_DTYPES))}"
        )
