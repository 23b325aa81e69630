"""What a kernel that merges partial results of attention is built from, as data. Nothing here imports the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.early_start import starts_early_on
from cute_kernels.problem import DTYPES, SHORT_NAMES

MAX_SPLITS = 256
VECTOR = 4
"""Columns of a lane, 16 bytes of float32."""

LANES, WARPS = 32, 4
COLUMNS = VECTOR * LANES
"""Of a row, that a warp merges."""

OUT_DTYPES = (*DTYPES, "float32")

FEW_SPLITS = 8
"""What a warp reads at once of a row."""

ROWS = LANES // FEW_SPLITS
"""That a warp merges at once: it has a lane for each log-sum-exp of FEW_SPLITS parts of them."""

END = 0x7FA5C0DE
"""Bits of what stands behind the log-sum-exps of a row's parts, if there are fewer than there is room for: a NaN that
no instruction makes."""

MANY_JOBS = 1024
"""With so many rows, each once for every ``COLUMNS`` columns, all multiprocessors are busy with a warp for each."""


@dataclass(frozen=True)
class CombineConfig:
    """Everything that is fixed when the kernel is compiled.

    ``dtype`` is that of the result. With ``few_splits`` there are FEW_SPLITS at most, and a warp merges ROWS rows at
    once (``few_kernel.py``). With ``has_ends`` rows may have fewer parts than there is room for: the log-sum-exp behind
    their last one has the bits END then, and what follows is anything.
    """

    arch: str
    dtype: str
    few_splits: bool
    has_ends: bool = False

    @property
    def starts_early(self) -> bool:
        """Whether CTAs may start before the kernel in front of this one has ended (programmatic dependent launch)."""
        return starts_early_on(self.arch)

    @property
    def smem_bytes(self) -> int:
        """The shares of the splits, and what the warps of a row have; few splits need none."""
        return 0 if self.few_splits else 4 * WARPS * (SHARES + COLUMNS)

    @property
    def name(self) -> str:
        """Unique among kernels."""
        dtype = (SHORT_NAMES | {"float32": "fp32"})[self.dtype]
        return f"combine_{self.arch}_{dtype}{'_few' * self.few_splits}{'_ends' * self.has_ends}"


SHARES = MAX_SPLITS + FEW_SPLITS * WARPS
"""Splits that a warp has a share of, in memory, with those behind the last that are read with it."""


def select_combine_config(dtype: str, num_splits: int, arch: str, *, has_ends: bool = False) -> CombineConfig:
    """The config for results of ``dtype``; ``has_ends`` is its own.

    Raises:
        ValueError: there is none.
    """
    if not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits is {num_splits}, allowed: 1 to {MAX_SPLITS}")
    config = CombineConfig(arch, dtype, num_splits <= FEW_SPLITS, has_ends)
    validate_combine_config(config)
    return config


def validate_combine_config(config: CombineConfig) -> None:
    """Raise ValueError for a config that no kernel can be built from."""
    if config.dtype not in OUT_DTYPES:
        raise ValueError(f"dtype is {config.dtype!r}, allowed: {', '.join(map(repr, OUT_DTYPES))}")
