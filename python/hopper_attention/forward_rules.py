"""Which config serves a 16-bit problem on a backend: one rule, without touching a tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cute_kernels import problem as sizes
from cute_kernels.ampere.config import (
    ARCH_OF_CAPABILITY,
    AmpereForwardConfig,
    select_ampere_forward_config,
)
from cute_kernels.problem import DENSE, VARLEN
from hopper.config import ForwardConfig, check_problem_size
from hopper.forward.tilings import select_forward_config
from hopper_attention.checks import DTYPE_NAMES, FULL_WINDOW, TensorSpec
from hopper_attention.masks import MaskSpec
from hopper_attention.problem import AttentionProblem, longest_alike
from hopper_attention.scores import PLAIN, ScoreKind


@dataclass(frozen=True)
class ReferenceConfig:
    """How the tiled reference walks: tiles of ``tile_m`` queries by ``tile_n`` keys; FP8 is emulated."""

    tile_m: int = 128
    tile_n: int = 128
    fp8: bool = False

    @property
    def name(self) -> str:
        return f"reference_{'fp8' if self.fp8 else 'tiled'}_m{self.tile_m}n{self.tile_n}"


LENGTH_WITH_FUNCTIONS = 1024
"""Whose tiles serve all lengths where there are a user's functions."""

SMALL_TILE = 64
"""Keys of a tile that divides more blocks than those of the tables do."""

Config = ForwardConfig | AmpereForwardConfig | ReferenceConfig


def select_config(
    backend: str,
    capability: tuple[int, ...],
    q: TensorSpec,
    k: TensorSpec,
    v: TensorSpec,
    causal: bool,
    window: tuple[int, int] = FULL_WINDOW,
    scores: ScoreKind = PLAIN,
) -> Config:
    """The frozen config with which ``backend`` serves a checked problem on a GPU of this compute capability.

    Raises:
        NotImplementedError: the kernel cannot count sizes as large as these.
    """
    config = select_for(problem_of(q, k, v, causal, window, scores), backend, capability)
    check_size(config, q.shape, k.shape)
    return config


def problem_of(
    q: TensorSpec,
    k: TensorSpec,
    v: TensorSpec,
    causal: bool,
    window: tuple[int, int] = FULL_WINDOW,
    scores: ScoreKind = PLAIN,
) -> AttentionProblem:
    """What of checked tensors decides on the kernel; ``causal`` and ``window`` are those of a ``MaskSpec``."""
    head_dim, head_dim_v = q.shape[3], v.shape[3]
    is_empty = 0 in q.shape or not k.shape[1]
    seen = k.shape[1]
    if window != FULL_WINDOW:
        seen = MaskSpec(causal, *window).most_keys(seen)
    return AttentionProblem(
        q.dtype,
        q.dtype,
        head_dim,
        head_dim_v,
        causal,
        longest_alike(seen),
        is_empty,
        window != FULL_WINDOW,
        scores=scores,
    )


def packed_problem_of(
    q: TensorSpec, v: TensorSpec, causal: bool, has_window: bool, scores: ScoreKind = PLAIN
) -> AttentionProblem:
    """The same of sequences of different lengths, (total, heads, head_dim), whatever the lengths."""
    head_dims = q.shape[2], v.shape[2]
    return AttentionProblem(
        q.dtype, q.dtype, *head_dims, causal, has_window=has_window, is_packed=True, scores=scores
    )


def select_for(problem: AttentionProblem, backend: str, capability: tuple[int, ...]) -> Config:
    """``select_config`` of all problems of a kind, whatever their sizes.

    With packed sequences, which have no length here, the tiles are the same for all.
    """
    if backend == "reference":
        return ReferenceConfig()
    p = problem
    dtype, layout = DTYPE_NAMES[p.dtype], VARLEN if p.is_packed else DENSE
    if backend == "ampere":
        arch = ARCH_OF_CAPABILITY[capability[0], capability[1]]
        dims = p.head_dim, p.head_dim_v
        plain = select_ampere_forward_config(dtype, *dims, p.causal, arch, p.has_window, layout)
        return replace(plain, **p.scores.fields)
    if p.scores.functions:
        return _with_functions(p, dtype, layout)
    config = select_forward_config(
        dtype, p.head_dim, p.head_dim_v, p.causal, p.longest_k, p.has_window, layout
    )
    return replace(config, **p.scores.fields)


def _with_functions(problem: AttentionProblem, dtype: str, layout: str) -> ForwardConfig:
    """A user's functions need registers, which the tiles of short causal sequences leave."""
    p = problem
    config = select_forward_config(dtype, p.head_dim, p.head_dim_v, True, LENGTH_WITH_FUNCTIONS)
    fields = p.scores.fields | {"causal": p.causal, "window": p.has_window, "layout": layout}
    for functions, (rows, keys) in p.scores.listed:
        tile_n = next((n for n in (config.tile_n, SMALL_TILE) if keys % n == 0), 0)
        # Lists know of no other mask.
        if rows % config.tile_m == 0 and tile_n and not (p.causal or p.has_window or p.is_packed):
            fields |= {"functions": functions, "block_lists": True, "tile_n": tile_n}
    return replace(config, **fields)


def check_size(config: Config, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
    """Raise NotImplementedError for sizes that the kernel of ``config`` cannot count."""
    (batch, seqlen_q, heads, _), seqlen_k = q_shape, k_shape[1]
    if isinstance(config, AmpereForwardConfig):
        sizes.check_problem_size("kernel", config.tile_m, (batch, heads), (seqlen_q, seqlen_k))
    elif isinstance(config, ForwardConfig):
        check_problem_size(config, batch, heads, seqlen_q, seqlen_k)
