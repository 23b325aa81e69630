"""What the kernel that transposes V is built from, as data. Nothing here imports the DSL."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cute_kernels.problem import DENSE, VARLEN
from hopper.quantize.config import BANK_LINE, CHUNK, HEAD_DIM_STEP

KEYS = 128
"""Of a tile."""

THREADS = 128
CTAS_PER_SM = 8
"""That there are registers for; as many tiles are on their way at a time."""

TILE_COLUMNS = (128, 64, 32, 16)

KEYS_PER_STORE = 16
"""Keys that a thread stores at once for one dimension of V: 16 bytes."""


@dataclass(frozen=True)
class TransposeTiling:
    """A block of bytes (rows, head_dim) in shared memory, written by rows and read by columns.

    A row is padded to a power of two of chunks of 8 bytes. The chunks of each 128 bytes, or of each row if that is
    longer, are permuted by an XOR, so that those which a warp writes or reads at once lie in different banks: eight
    rows when it writes, one of each 16 rows when it reads.
    """

    head_dim: int
    rows: int

    @property
    def pitch(self) -> int:
        """Bytes between two rows."""
        return 1 << (self.head_dim - 1).bit_length()

    @property
    def line(self) -> int:
        """Bytes within which chunks are permuted."""
        return max(self.pitch, BANK_LINE)

    @property
    def size(self) -> int:
        return self.rows * self.pitch

    @property
    def runs(self) -> int:
        """Runs of 16 keys in a block."""
        return self.rows // KEYS_PER_STORE

    @property
    def stores(self) -> int:
        """Patches of 4 dimensions by 16 keys; a thread takes one at a time."""
        return self.head_dim // 4 * self.runs

    def store(self, index: Any) -> tuple[Any, Any]:
        """(run of keys, first dimension) of a patch: neighbours hold neighbouring keys."""
        return index % self.runs, index // self.runs * 4

    def offset(self, run: Any, key: Any, column: Any) -> Any:
        """Byte at which ``column``, a multiple of 4, of row 16 ``run`` + ``key`` lies."""
        rows_of_line = self.line // self.pitch
        number = run * (KEYS_PER_STORE // rows_of_line) + key // rows_of_line
        chunk = key % rows_of_line * (self.pitch // CHUNK) + column // CHUNK
        permuted = chunk ^ (run ^ key // rows_of_line % 4 * 4) & (self.line // CHUNK - 1)
        return number * self.line + permuted * CHUNK + column % CHUNK


@dataclass(frozen=True)
class TransposeConfig:
    """Everything that is fixed when the kernel is compiled: a tile is KEYS keys of ``columns`` columns of V. ``layout``
    is ``DENSE``, or ``VARLEN`` for packed sequences."""

    columns: int
    layout: str = DENSE

    @property
    def tiling(self) -> TransposeTiling:
        """Where its bytes lie in shared memory."""
        return TransposeTiling(self.columns, KEYS)

    @property
    def smem_bytes(self) -> int:
        return self.tiling.size

    @property
    def name(self) -> str:
        """Unique among kernels."""
        name = f"hopper_transpose_k{KEYS}c{self.columns}"
        return name if self.layout == DENSE else f"{name}_{self.layout}"


def select_transpose_config(head_dim_v: int, layout: str = DENSE) -> TransposeConfig:
    """The config for values of ``head_dim_v`` columns: the widest tiles that divide them.

    Raises:
        ValueError: there is none.
    """
    config = TransposeConfig(math.gcd(head_dim_v, TILE_COLUMNS[0]), layout)
    validate_transpose_config(config)
    return config


def validate_transpose_config(config: TransposeConfig) -> None:
    """Raise ValueError for a config that no kernel can be built from."""
    if config.columns not in TILE_COLUMNS:
        raise ValueError(
            f"columns is {config.columns}, allowed: {', '.join(map(str, TILE_COLUMNS))}; head_dim_v must be a multiple "
            f"of {HEAD_DIM_STEP}"
        )
    if config.layout not in (DENSE, VARLEN):
        raise ValueError(f"layout is {config.layout!r}, allowed: {DENSE!r}, {VARLEN!r}")


def shipped_transpose_configs() -> tuple[TransposeConfig, ...]:
    """Every config that ``select_transpose_config`` can return."""
    return tuple(TransposeConfig(columns, layout) for layout in (DENSE, VARLEN) for columns in TILE_COLUMNS)
