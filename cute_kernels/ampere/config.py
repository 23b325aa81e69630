"""Configurations of the kernels for GPUs without WGMMA, as data: what one is built from, how it is chosen.

Nothing here imports the DSL or touches a GPU. A config is a frozen dataclass; an explicit one is validated and
never silently changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from cute_kernels.problem import (
    DENSE,
    DTYPES,
    MAX_HEAD_DIM,
    SHORT_NAMES,
    check_block_lists,
    check_kind,
    cover_head_dims,
    feature_names,
)
from cute_kernels.user_functions import NO_FUNCTIONS, UserFunctions

WARP_THREADS = 32
MMA_ROWS = 16
"""Rows of one mma.sync: a warp owns one or two such bands of the output tile."""

MMA_KEYS = 16
ELEMENT_BYTES = 2
CHUNK_BYTES = 16
"""What one cp.async brings."""

REGISTERS_PER_SM = 65_536
RESERVED_BYTES = 1_024
"""Shared memory that the driver keeps of each CTA."""


@dataclass(frozen=True)
class SharedMemory:
    """Bytes of shared memory: what one CTA may use, and what all CTAs of an SM share."""

    cta: int
    sm: int


KIB = 1_024
LARGE = SharedMemory(cta=163 * KIB, sm=164 * KIB)
SMALL = SharedMemory(cta=99 * KIB, sm=100 * KIB)
HOPPER = SharedMemory(cta=227 * KIB, sm=228 * KIB)
ARCHS = {"sm_80": LARGE, "sm_86": SMALL, "sm_89": SMALL, "sm_90a": HOPPER, "sm_120": SMALL}
"""Shared memory by what a kernel is compiled for."""

ARCH_OF_CAPABILITY = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 7): "sm_80",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (12, 0): "sm_120",
    (12, 1): "sm_120",
}
"""What kernels for a GPU of this compute capability are compiled for."""

NATIVE_HEAD_DIMS = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
"""(head_dim, head_dim_v) pairs that have a kernel of their own; any other runs on the cheapest one that covers
it, its rows filled with zeros on load and clipped on store."""


@dataclass(frozen=True)
class AmpereForwardConfig:
    """Everything that is fixed when a forward kernel is compiled.

    ``stages`` buffers take K and V in turns: K of a block, V of it, K of the next. ``q_in_registers`` reads Q from
    shared memory once and not for every key block. ``fused_exponentials`` computes P 16 keys at a time between the
    products with V, not all of it before them. ``ctas_per_sm`` bounds the registers of a thread. With ``window`` the
    kernel is given the sides of a sliding window, and with ``chunk`` the keys of a chunk. ``layout`` says how sequences
    lie in the tensors. ``softcap`` caps scores by a tanh, ``alibi`` adds ALiBi's bias to them, ``sinks`` a logit
    without a value to each row; ``dropout`` zeroes elements of P. ``functions`` are a user's. With
    ``block_lists`` the kernel visits the key blocks of a list alone, and asks the mask function only in those that the
    list calls seen in part.
    """

    dtype: str
    arch: str
    head_dim: int
    head_dim_v: int
    causal: bool
    tile_m: int
    tile_n: int
    warps: int
    stages: int
    ctas_per_sm: int
    q_in_registers: bool = False
    fused_exponentials: bool = True
    window: bool = False
    chunk: bool = False
    layout: str = DENSE
    softcap: bool = False
    alibi: bool = False
    sinks: bool = False
    dropout: bool = False
    functions: UserFunctions = NO_FUNCTIONS
    block_lists: bool = False

    @property
    def changes_scores(self) -> bool:
        return self.softcap or self.alibi or self.sinks or self.dropout or bool(self.functions)

    @property
    def threads(self) -> int:
        return WARP_THREADS * self.warps

    @property
    def tile_queries(self) -> int:
        return self.tile_m

    @property
    def rows_per_warp(self) -> int:
        return self.tile_m // self.warps

    @property
    def bands(self) -> int:
        """Bands of 16 rows that a warp owns."""
        return self.rows_per_warp // MMA_ROWS

    @property
    def q_bytes(self) -> int:
        return self.tile_m * self.head_dim * ELEMENT_BYTES

    @property
    def stage_bytes(self) -> int:
        return self.tile_n * max(self.head_dim, self.head_dim_v) * ELEMENT_BYTES

    @property
    def smem_bytes(self) -> int:
        """O is staged in Q's place, each warp's rows in its own."""
        return self.q_bytes + self.stages * self.stage_bytes

    @property
    def longest_first(self) -> bool:
        """Whether the tiles of a head differ in their keys, so that those with most of them come first."""
        return self.causal and not self.window

    @property
    def name(self) -> str:
        """Short unique name: kernel entry in profilers, file stem in the compile cache."""
        dims = f"d{self.head_dim}" + ("" if self.head_dim == self.head_dim_v else f"v{self.head_dim_v}")
        parts = ["ampere_fwd", self.arch, SHORT_NAMES[self.dtype], dims, "causal" if self.causal else "full"]
        parts += [f"m{self.tile_m}n{self.tile_n}w{self.warps}s{self.stages}c{self.ctas_per_sm}"]
        parts += ["qreg"] if self.q_in_registers else []
        parts += [] if self.fused_exponentials else ["apart"]
        return "_".join(parts + feature_names(self))


def swizzle_span(head_dim: int) -> int:
    """Chunks of 16 bytes among which a row's are permuted: 8 where they divide a row, else 4."""
    return 8 if head_dim % 64 == 0 else 4


def validate_ampere_forward_config(config: AmpereForwardConfig) -> None:
    """Raise ValueError naming the first field that no kernel can be built from."""
    c = config
    if c.arch not in ARCHS:
        raise ValueError(f"arch is {c.arch!r}, allowed: {', '.join(ARCHS)}")
    check_kind(c)
    check_block_lists(c)
    for name in ("head_dim", "head_dim_v"):
        value = getattr(c, name)
        if value % 32 or not 32 <= value <= MAX_HEAD_DIM:
            raise ValueError(f"{name} is {value}, allowed: multiples of 32 from 32 to {MAX_HEAD_DIM}")
    if c.head_dim_v > c.head_dim:
        raise ValueError(f"head_dim_v is {c.head_dim_v}, allowed: at most head_dim, {c.head_dim}")
    if c.warps not in (4, 8):
        raise ValueError(f"warps is {c.warps}, allowed: 4 or 8")
    allowed_m = (MMA_ROWS * c.warps, 2 * MMA_ROWS * c.warps)
    if c.tile_m not in allowed_m:
        raise ValueError(
            f"tile_m is {c.tile_m}, allowed with {c.warps} warps: {allowed_m[0]} or {allowed_m[1]}"
        )
    for head_dim in (c.head_dim, c.head_dim_v):
        rows = c.threads // swizzle_span(head_dim)
        if c.tile_n % max(rows, MMA_KEYS) or not MMA_KEYS <= c.tile_n <= 256 or c.tile_m % rows:
            raise ValueError(
                f"tile_n is {c.tile_n}, allowed: multiples of {rows}, which one pass of the threads loads"
            )
    if not 2 <= c.stages <= 8:
        raise ValueError(f"stages is {c.stages}, allowed: 2 to 8")
    check_smem(c.arch, c.smem_bytes, c.ctas_per_sm)


def check_smem(arch: str, smem_bytes: int, ctas_per_sm: int) -> None:
    """Raise ValueError for CTAs that a GPU of ``arch`` has not shared memory enough for."""
    smem = ARCHS[arch]
    if smem_bytes > smem.cta or ctas_per_sm * (smem_bytes + RESERVED_BYTES) > smem.sm:
        raise ValueError(
            f"{ctas_per_sm} CTAs of {smem_bytes} bytes of shared memory, allowed on {arch}: {smem.cta} each and "
            f"{smem.sm} in all, of which {RESERVED_BYTES} a CTA are reserved"
        )


@dataclass(frozen=True)
class Tiling:
    """The tuned part of a config."""

    tile_m: int
    tile_n: int
    warps: int
    stages: int
    ctas_per_sm: int
    q_in_registers: bool = False
    fused_exponentials: bool = True


TILINGS: dict[SharedMemory, dict[tuple[int, int], Tiling]] = {
    LARGE: {
        (32, 32): Tiling(128, 128, 4, 4, 2),
        (64, 64): Tiling(128, 128, 4, 4, 2),
        (96, 96): Tiling(128, 64, 4, 3, 2),
        (128, 128): Tiling(128, 64, 4, 2, 2),
        (192, 128): Tiling(64, 32, 4, 4, 2, q_in_registers=True),
        (192, 192): Tiling(64, 32, 4, 4, 2, q_in_registers=True),
        (256, 256): Tiling(64, 32, 4, 3, 2, q_in_registers=True),
    },
    SMALL: {
        (32, 32): Tiling(128, 64, 4, 4, 2, q_in_registers=True),
        (64, 64): Tiling(128, 64, 4, 4, 2, q_in_registers=True),
        (96, 96): Tiling(128, 32, 4, 4, 2),
        (128, 128): Tiling(128, 32, 4, 2, 2),
        (192, 128): Tiling(128, 32, 8, 4, 1, q_in_registers=True),
        (192, 192): Tiling(128, 32, 8, 4, 1, q_in_registers=True),
        (256, 256): Tiling(64, 64, 4, 2, 1),
    },
}
"""By shared memory, of which at least so much is there, and (head_dim, head_dim_v). Two CTAs of 4 warps overlap one's
softmax with the other's products. With 32 rows a warp they read K and V least; from head_dim 192 on O leaves registers
for 16, and Q for as long as there are. Those for head_dim 64, 128 and 256 of the larger shared memory are the fastest
of 36 that were timed on an H200, the others follow them as far as their shared memory reaches."""


@lru_cache(maxsize=4096)
def select_ampere_forward_config(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    causal: bool,
    arch: str,
    window: bool = False,
    layout: str = DENSE,
) -> AmpereForwardConfig:
    """The config that serves a problem; the tiles are those of its mask without a window. Reads sizes only, never a
    tensor; cached."""
    pair = cover_head_dims(NATIVE_HEAD_DIMS, head_dim, head_dim_v)
    return make_config(dtype, arch, pair, causal, tilings_of(arch)[pair], window, layout)


def tilings_of(arch: str) -> dict[tuple[int, int], Tiling]:
    """The tilings for an architecture: the first table whose shared memory it has."""
    return next(table for smem, table in TILINGS.items() if ARCHS[arch].cta >= smem.cta)


def make_config(
    dtype: str,
    arch: str,
    head_dims: tuple[int, int],
    causal: bool,
    tiling: Tiling,
    window: bool = False,
    layout: str = DENSE,
) -> AmpereForwardConfig:
    """The config of a tiling, validated."""
    config = AmpereForwardConfig(
        dtype=dtype,
        arch=arch,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        causal=causal,
        tile_m=tiling.tile_m,
        tile_n=tiling.tile_n,
        warps=tiling.warps,
        stages=tiling.stages,
        ctas_per_sm=tiling.ctas_per_sm,
        q_in_registers=tiling.q_in_registers,
        fused_exponentials=tiling.fused_exponentials,
        window=window,
        layout=layout,
    )
    validate_ampere_forward_config(config)
    return config


def shipped_ampere_forward_configs(archs: tuple[str, ...] = tuple(ARCHS)) -> tuple[AmpereForwardConfig, ...]:
    """Every config without a window and of dense sequences that ``select_ampere_forward_config`` can return for these
    archs, each once."""
    return tuple(
        make_config(dtype, arch, pair, causal, tiling)
        for arch in archs
        for dtype in DTYPES
        for pair, tiling in tilings_of(arch).items()
        for causal in (False, True)
    )
