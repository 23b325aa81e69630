"""Configurations of the backward kernel for GPUs without WGMMA, as data. Nothing here imports the DSL."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from cute_kernels.ampere.config import (
    ARCHS,
    ELEMENT_BYTES,
    HOPPER,
    LARGE,
    MMA_ROWS,
    SMALL,
    WARP_THREADS,
    SharedMemory,
    check_smem,
    swizzle_span,
)
from cute_kernels.backward.step import BackwardStep, check_step_size, steps_of
from cute_kernels.backward.word_order import COLUMNS_PER_GROUP, WORDS_PER_FRAGMENT, WordOrder
from cute_kernels.problem import (
    DENSE,
    DTYPES,
    MAX_HEAD_DIM,
    SHORT_NAMES,
    check_block_lists,
    check_kind,
    feature_names,
)
from cute_kernels.user_functions import NO_FUNCTIONS, UserFunctions

FLOAT_BYTES = 4
MAX_CTAS = 2**31 - 1
"""What the first dimension of a CUDA grid can count."""

NATIVE_HEAD_DIMS = (32, 64, 96, 128, 192, 256)
"""Any other head_dim, and a head_dim_v that differs, runs on the next larger one, filled with zeros on load."""


@dataclass(frozen=True)
class AmpereBackwardConfig:
    """Everything that is fixed when a backward kernel is compiled.

    A CTA owns ``tile_n`` keys of one key/value head and walks over the queries in tiles of ``tile_m``; Q and dO run
    through ``stages`` buffers. Its warps share out each product in two directions: ``score_warps`` of them stand along
    the keys of S^T and dP^T, the others along the queries; ``gradient_warps`` along the keys of dK and dV, the others
    along their columns; ``dq_warps`` along the queries of dQ, the others along its columns, of which it makes a part in
    each of ``dq_passes``, for want of registers. With ``ordered`` the parts of dQ are added in an order that does not
    depend on timing. With ``window`` the kernel is given the sides of a sliding window, and with ``chunk`` the keys of
    a chunk. ``layout`` says how sequences lie in the tensors. ``softcap``, ``alibi`` and a user's ``functions`` are of
    scores that the forward kernel changed so, ``dropout`` of a P that it dropped from; its sinks are in the LSE. With
    ``block_lists`` a key tile visits the query tiles of a list alone, and the mask function is not asked in those that
    the list calls seen.
    """

    dtype: str
    arch: str
    head_dim: int
    head_dim_v: int
    causal: bool
    tile_m: int
    tile_n: int
    warps: int
    score_warps: int
    gradient_warps: int
    dq_warps: int
    stages: int
    ctas_per_sm: int
    dq_passes: int = 1
    ordered: bool = False
    window: bool = False
    chunk: bool = False
    layout: str = DENSE
    softcap: bool = False
    alibi: bool = False
    dropout: bool = False
    functions: UserFunctions = NO_FUNCTIONS
    block_lists: bool = False

    @property
    def changes_scores(self) -> bool:
        return self.softcap or self.alibi or self.dropout or bool(self.functions)

    @property
    def has_mask(self) -> bool:
        """Whether some blocks are masked, of keys past the end too."""
        return self.causal or self.window

    @property
    def can_miss_queries(self) -> bool:
        """Whether there may be key tiles that no query sees."""
        return self.window or self.layout != DENSE or self.block_lists

    @property
    def least_blocks(self) -> int:
        """Query tiles that a key tile visits at least, though none may see it."""
        return 0

    @property
    def clears_ahead(self) -> bool:
        """Not tried."""
        return False

    @property
    def stores_first(self) -> bool:
        """Whether the first key tile of a query tile stores its part of dQ."""
        return False

    @property
    def few_keys(self) -> bool:
        """Its kernels find no delta."""
        return False

    @property
    def divides_heads(self) -> bool:
        """Not tried."""
        return False

    @property
    def divides_visits(self) -> bool:
        """Not tried."""
        return False

    @property
    def threads(self) -> int:
        return WARP_THREADS * self.warps

    @property
    def keeps_probabilities(self) -> bool:
        """Whether P^T and dS^T of a warp's keys are the register operands of its dV and dK as they are."""
        return self.score_warps == self.gradient_warps == self.warps

    @property
    def score_bands(self) -> int:
        """Bands of 16 keys of a warp's part of S^T."""
        return self.tile_n // (MMA_ROWS * self.score_warps)

    @property
    def score_queries(self) -> int:
        """Queries of a warp's part of S^T."""
        return self.tile_m * self.score_warps // self.warps

    @property
    def gradient_bands(self) -> int:
        """Bands of 16 keys of a warp's part of dK and dV."""
        return self.tile_n // (MMA_ROWS * self.gradient_warps)

    @property
    def gradient_splits(self) -> int:
        """Warps that share out the columns of dK and dV, 16 at a time in turns."""
        return self.warps // self.gradient_warps

    @property
    def dq_bands(self) -> int:
        """Bands of 16 queries of a warp's part of dQ."""
        return self.tile_m // (MMA_ROWS * self.dq_warps)

    @property
    def dq_splits(self) -> int:
        """Warps that share out the columns of dQ, 16 at a time in turns."""
        return self.warps // self.dq_warps

    @property
    def dq_parts(self) -> int:
        """Warps that share out a dQ tile."""
        return self.warps

    @property
    def dq_columns(self) -> int:
        """Columns of dQ that a warp makes at once."""
        return self.head_dim // (self.dq_splits * self.dq_passes)

    @property
    def dq_words(self) -> int:
        """float32 of a warp's part of a dQ tile."""
        return self.tile_m * self.head_dim // self.warps

    @property
    def dq_order(self) -> WordOrder:
        """Where the words of a dQ tile lie: fragments of a band next to each other, and the lanes in order."""
        groups = self.head_dim // (self.dq_splits * COLUMNS_PER_GROUP)
        return WordOrder(
            bands=self.dq_bands,
            groups=groups,
            row_parts=self.dq_warps,
            column_parts=self.dq_splits,
            groups_in_turn=2,
            band_stride=groups * WORDS_PER_FRAGMENT,
            group_stride=WORDS_PER_FRAGMENT,
            lane_stride=1,
            element_stride=WARP_THREADS,
        )

    def step_name(self, step: str) -> str:
        """Of "prepare" or "finish": the same for two configs only where their machine code is."""
        parts = ["ampere_bwd", step, self.arch, SHORT_NAMES[self.dtype]]
        layout = [] if self.layout == DENSE else [self.layout]
        if step == "prepare":
            return "_".join([*parts, f"d{self.head_dim_v}", f"m{self.tile_m}", *layout])
        tile = f"m{self.tile_m}w{self.warps}dq{self.dq_warps}"
        return "_".join([*parts, f"d{self.head_dim}", tile, *layout])

    @property
    def counts_per_tile(self) -> int:
        """Counters of a query tile, of how many key tiles have added to it: one for each warp."""
        return self.warps

    @property
    def is_persistent(self) -> bool:
        return False

    @property
    def kv_bytes(self) -> int:
        return self.tile_n * (self.head_dim + self.head_dim_v) * ELEMENT_BYTES

    @property
    def v_offset(self) -> int:
        """Bytes from K to V in shared memory."""
        return self.kv_bytes // 2

    @property
    def do_offset(self) -> int:
        """Bytes from Q to dO."""
        return self.stages * self.stage_bytes

    @property
    def ds_offset(self) -> int:
        """Bytes from P^T to dS^T, or nothing if P^T is not there."""
        return 0 if self.keeps_probabilities else self.score_bytes

    @property
    def stage_bytes(self) -> int:
        """Of Q, or of dO, which has as many columns."""
        return self.tile_m * self.head_dim * ELEMENT_BYTES

    @property
    def vector_bytes(self) -> int:
        """Of LSE, or of delta."""
        return self.tile_m * FLOAT_BYTES

    @property
    def score_bytes(self) -> int:
        """Of dS^T, or of P^T."""
        return self.tile_m * self.tile_n * ELEMENT_BYTES

    @property
    def smem_bytes(self) -> int:
        scores = self.ds_offset + self.score_bytes
        return self.kv_bytes + 2 * self.stages * (self.stage_bytes + self.vector_bytes) + scores

    @property
    def name(self) -> str:
        """Short unique name: kernel entry in profilers, file stem in the compile cache."""
        parts = ["ampere_bwd", self.arch, SHORT_NAMES[self.dtype], f"d{self.head_dim}"]
        parts += ["causal" if self.causal else "full"]
        warps = f"{self.score_warps}{self.gradient_warps}{self.dq_warps}"
        parts += [f"m{self.tile_m}n{self.tile_n}w{self.warps}_{warps}_s{self.stages}c{self.ctas_per_sm}"]
        parts += [f"p{self.dq_passes}"] if self.dq_passes > 1 else []
        parts += ["ordered"] if self.ordered else []
        return "_".join(parts + feature_names(self))


def validate_ampere_backward_config(config: AmpereBackwardConfig) -> None:
    """Raise ValueError naming the first field that no kernel can be built from."""
    c = config
    if c.arch not in ARCHS:
        raise ValueError(f"arch is {c.arch!r}, allowed: {', '.join(ARCHS)}")
    if c.head_dim not in NATIVE_HEAD_DIMS or c.head_dim_v != c.head_dim:
        raise ValueError(
            f"head_dim is {c.head_dim} and head_dim_v {c.head_dim_v}, allowed: the same, one of {NATIVE_HEAD_DIMS}"
        )
    check_kind(c)
    check_block_lists(c)
    if c.warps not in (4, 8):
        raise ValueError(f"warps is {c.warps}, allowed: 4 or 8")
    for name in ("tile_m", "tile_n"):
        if getattr(c, name) not in (32, 64, 128):
            raise ValueError(f"{name} is {getattr(c, name)}, allowed: 32, 64 or 128")
    shares = {
        "score_warps": (c.tile_n, c.tile_m, MMA_ROWS),
        "gradient_warps": (c.tile_n, c.head_dim, MMA_ROWS),
        "dq_warps": (c.tile_m, c.head_dim, MMA_ROWS),
    }
    for name, (rows, columns, unit) in shares.items():
        along = getattr(c, name)
        allowed = [
            n
            for n in (1, 2, 4, 8)
            if c.warps % n == 0 and rows % (unit * n) == 0 and columns % (unit * (c.warps // n)) == 0
        ]
        if along not in allowed:
            raise ValueError(f"{name} is {along}, allowed with these tiles and {c.warps} warps: {allowed}")
    rows_at_once = c.threads // swizzle_span(c.head_dim)
    for name in ("tile_m", "tile_n"):
        if getattr(c, name) % rows_at_once:
            raise ValueError(
                f"{name} is {getattr(c, name)}, allowed: multiples of {rows_at_once}, what the threads load at once"
            )
    if c.dq_passes < 1 or c.head_dim % (MMA_ROWS * c.dq_splits * c.dq_passes):
        raise ValueError(
            f"dq_passes is {c.dq_passes}, allowed: what shares out {c.head_dim} columns, 16 at a time"
        )
    if c.stages not in (1, 2):
        raise ValueError(f"stages is {c.stages}, allowed: 1 or 2")
    check_smem(c.arch, c.smem_bytes, c.ctas_per_sm)


@dataclass(frozen=True)
class Tiling:
    """The tuned part of a config."""

    tile_m: int
    tile_n: int
    warps: int
    score_warps: int
    gradient_warps: int
    dq_warps: int
    stages: int
    ctas_per_sm: int
    dq_passes: int = 1


TILINGS: dict[SharedMemory, dict[int, Tiling]] = {
    HOPPER: {
        32: Tiling(32, 128, 4, 4, 4, 2, 2, 2),
        64: Tiling(32, 128, 4, 4, 4, 2, 2, 2),
        96: Tiling(64, 128, 8, 8, 8, 4, 2, 1),
        128: Tiling(64, 128, 8, 4, 4, 2, 2, 1),
        192: Tiling(64, 64, 8, 4, 4, 4, 2, 1),
        256: Tiling(64, 64, 8, 4, 1, 2, 2, 1, dq_passes=2),
    },
    LARGE: {
        32: Tiling(32, 128, 4, 4, 4, 2, 2, 2),
        64: Tiling(128, 128, 8, 4, 4, 4, 2, 1),
        96: Tiling(64, 128, 8, 8, 8, 4, 2, 1),
        128: Tiling(64, 128, 8, 4, 4, 2, 2, 1),
        192: Tiling(64, 64, 8, 4, 4, 4, 1, 1),
        256: Tiling(64, 64, 8, 4, 2, 2, 1, 1),
    },
    SMALL: {
        32: Tiling(32, 128, 4, 4, 4, 2, 2, 1),
        64: Tiling(64, 128, 8, 4, 4, 4, 2, 1),
        96: Tiling(64, 64, 8, 4, 4, 4, 2, 1),
        128: Tiling(64, 64, 8, 4, 4, 2, 1, 1),
        192: Tiling(32, 64, 8, 4, 4, 2, 1, 1),
        256: Tiling(32, 32, 4, 2, 2, 2, 1, 1, dq_passes=2),
    },
}
"""By shared memory, of which at least so much is there, and head_dim."""


def tilings_of(arch: str) -> dict[int, Tiling]:
    """The tilings for an architecture: the first table whose shared memory it has."""
    return next(table for smem, table in TILINGS.items() if ARCHS[arch].cta >= smem.cta)


@lru_cache(maxsize=4096)
def select_ampere_backward_config(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    causal: bool,
    arch: str,
    ordered: bool = False,
    window: bool = False,
    layout: str = DENSE,
) -> AmpereBackwardConfig:
    """The config that serves a problem; the tiles are those of its mask without a window. Reads sizes only, never a
    tensor; cached.

    Raises:
        ValueError: a head dimension is larger than the kernel takes.
    """
    size = max(head_dim, head_dim_v)
    fits = [native for native in NATIVE_HEAD_DIMS if native >= size]
    if not fits:
        raise ValueError(
            f"head_dim {head_dim} and head_dim_v {head_dim_v}: both may be at most {MAX_HEAD_DIM}"
        )
    return make_config(dtype, arch, fits[0], causal, tilings_of(arch)[fits[0]], ordered, window, layout)


def make_config(
    dtype: str,
    arch: str,
    head_dim: int,
    causal: bool,
    tiling: Tiling,
    ordered: bool = False,
    window: bool = False,
    layout: str = DENSE,
) -> AmpereBackwardConfig:
    """The config of a tiling, validated."""
    options = {**vars(tiling), "ordered": ordered, "window": window, "layout": layout}
    config = AmpereBackwardConfig(dtype, arch, head_dim, head_dim, causal, **options)
    validate_ampere_backward_config(config)
    return config


def check_ampere_backward_size(
    config: AmpereBackwardConfig, batch: int, heads: tuple[int, int], seqlens: tuple[int, int]
) -> None:
    """Raise NotImplementedError for sizes that the grids of the backward kernels cannot count.

    ``heads`` are those of Q and of K, ``seqlens`` likewise. The grid has a CTA for each key tile of each
    key/value head.
    """
    check_step_size("backward kernel", (batch, heads[0]), seqlens)
    ctas = batch * heads[1] * -(-seqlens[1] // config.tile_n)
    if ctas > MAX_CTAS:
        raise NotImplementedError(
            f"batch {batch} x kv_heads {heads[1]} x seqlen_k {seqlens[1]} are {ctas} tiles of {config.tile_n} keys, "
            f"the backward kernel counts at most {MAX_CTAS}: split the batch"
        )


def shipped_ampere_backward_configs(
    archs: tuple[str, ...] = tuple(ARCHS),
) -> tuple[AmpereBackwardConfig, ...]:
    """Every config without a window and of dense sequences that ``select_ampere_backward_config`` can return for these
    archs, each once."""
    return tuple(
        make_config(dtype, arch, head_dim, causal, tiling, ordered)
        for arch in archs
        for dtype in DTYPES
        for head_dim, tiling in tilings_of(arch).items()
        for causal in (False, True)
        for ordered in (False, True)
    )


def shipped_ampere_backward_kernels(
    archs: tuple[str, ...] = tuple(ARCHS),
) -> tuple[AmpereBackwardConfig | BackwardStep, ...]:
    """All that a backward pass launches: the shipped configs, and the steps on either side of each, each once."""
    configs = shipped_ampere_backward_configs(archs)
    return *configs, *steps_of(configs)
