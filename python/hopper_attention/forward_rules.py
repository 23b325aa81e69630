"""Which config serves a 16-bit problem on a backend: one rule, without touching a tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cute_kernels import problem as sizes
from cute_kernels.ampere.config import (
    ARCH_OF_CAPABILITY,
    AmpereForwardConfig,
    select_ampere_forward_config,
)
from cute_kernels.problem import DENSE, MAX_HEAD_DIM, VARLEN
from hopper.config import ForwardConfig, check_problem_size
from hopper.forward.tilings import (
    has_many_tiles,
    select_forward_config,
    select_paged_config,
    select_plain_config,
    select_with_functions,
    with_dropout,
    with_group,
    with_parts,
)
from hopper.group_rows import rows_of_queries
from hopper.wide.config import WideForwardConfig, select_wide_config, why_not_wide
from hopper_attention.backends import Choice, Target, choose_backend
from hopper_attention.block_masks import is_divided
from hopper_attention.checks import DTYPE_NAMES, TensorSpec
from hopper_attention.masks import FULL_SIDES, MaskSpec, Sides
from hopper_attention.problem import AttentionProblem, longest_alike
from hopper_attention.qv import no_qv
from hopper_attention.scores import PLAIN, ScoreKind
from hopper_attention.torch_rules import TorchConfig, why_not_torch


@dataclass(frozen=True)
class ReferenceConfig:
    """How the tiled reference walks: tiles of ``tile_m`` queries by ``tile_n`` keys; FP8 is emulated."""

    tile_m: int = 128
    tile_n: int = 128
    fp8: bool = False

    @property
    def name(self) -> str:
        return f"reference_{'fp8' if self.fp8 else 'tiled'}_m{self.tile_m}n{self.tile_n}"


SMALL_TILE = 64
"""Keys of a tile that divides the blocks of a BlockMask where that of the tables does not."""

Config = ForwardConfig | WideForwardConfig | AmpereForwardConfig | ReferenceConfig | TorchConfig


def select_config(
    backend: str,
    capability: tuple[int, ...],
    q: TensorSpec,
    k: TensorSpec,
    v: TensorSpec,
    causal: bool,
    window: Sides = FULL_SIDES,
    scores: ScoreKind = PLAIN,
    has_qv: bool = False,
) -> Config:
    """The frozen config with which ``backend`` serves a checked problem on a GPU of this compute capability.

    Raises:
        NotImplementedError: the kernel cannot count sizes as large as these.
    """
    problem = replace(problem_of(q, k, v, causal, window, scores), has_qv=has_qv)
    config = select_for(problem, backend, capability)
    check_size(config, q.shape, k.shape)
    return config


def problem_of(
    q: TensorSpec,
    k: TensorSpec,
    v: TensorSpec,
    causal: bool,
    window: Sides = FULL_SIDES,
    scores: ScoreKind = PLAIN,
) -> AttentionProblem:
    """What of checked tensors decides on the kernel; ``causal`` and ``window`` are a ``MaskSpec`` and its sides."""
    batch, seqlen_q, heads, head_dim = q.shape
    head_dim_v = v.shape[3]
    is_empty = 0 in q.shape or not k.shape[1]
    seen = k.shape[1]
    if window != FULL_SIDES:
        seen = MaskSpec(causal, *window).most_keys(seen)
    return AttentionProblem(
        q.dtype,
        q.dtype,
        head_dim,
        head_dim_v,
        causal,
        longest_alike(seen),
        is_empty,
        window != FULL_SIDES,
        has_chunk=window[2] > 0,
        scores=scores,
        has_many_tiles=window == FULL_SIDES
        and head_dim_v <= MAX_HEAD_DIM
        and has_many_tiles(head_dim, head_dim_v, causal, (seqlen_q, k.shape[1]), batch * heads),
    )


def grouped_problem(
    problem: AttentionProblem, q: TensorSpec, k: TensorSpec, group: int, split_rows: int
) -> AttentionProblem:
    """A dense problem of ``problem_of`` with ``group`` query heads in the rows of a tile, and ``split_rows``."""
    if group == 1 and not split_rows:
        return problem
    p, (batch, seqlen_q, heads, _), seqlen_k = problem, q.shape, k.shape[1]
    lengths = rows_of_queries(seqlen_q, group), seqlen_k
    has_many = not p.has_window and has_many_tiles(
        p.head_dim, p.head_dim_v, p.causal, lengths, batch * heads // group
    )
    return replace(p, group=group, split_rows=split_rows, has_many_tiles=has_many)


def packed_problem_of(
    q: TensorSpec,
    v: TensorSpec,
    causal: bool,
    window: tuple[bool, bool],
    scores: ScoreKind = PLAIN,
) -> AttentionProblem:
    """The same of sequences of different lengths, (total, heads, head_dim), whatever the lengths; ``window`` are
    has_window and has_chunk."""
    has_window, has_chunk = window
    return AttentionProblem(
        q.dtype,
        q.dtype,
        q.shape[2],
        v.shape[2],
        causal,
        has_window=has_window,
        has_chunk=has_chunk,
        is_packed=True,
        scores=scores,
    )


def select_for(problem: AttentionProblem, backend: str, capability: tuple[int, ...]) -> Config:
    """``select_config`` of all problems of a kind, whatever their sizes.

    With packed sequences, which have no length here, the tiles are the same for all.

    Raises:
        NotImplementedError: the backend has no kernel for such problems.
    """
    p = problem
    if p.page_rows:
        return _select_paged(p, backend)
    if backend == "reference":
        return ReferenceConfig()
    if backend == "torch":
        return TorchConfig()
    dtype, layout = DTYPE_NAMES[p.dtype], VARLEN if p.is_packed else DENSE
    fields = p.scores.fields | {"chunk": p.has_chunk}
    if p.has_qv or p.head_dim_v > MAX_HEAD_DIM:
        return _select_wide(p, backend, dtype, layout, fields)
    if backend == "ampere":
        arch = ARCH_OF_CAPABILITY[capability[0], capability[1]]
        dims = p.head_dim, p.head_dim_v
        plain = select_ampere_forward_config(dtype, *dims, p.causal, arch, p.has_window, layout)
        return replace(plain, **fields | lists_of(p, (plain.tile_m, plain.tile_n)))
    if p.scores.functions:
        return _with_functions(p, dtype, layout, fields)
    options = p.causal, p.longest_k, p.has_window, layout, p.has_many_tiles
    config = select_forward_config(dtype, p.head_dim, p.head_dim_v, *options)
    config = replace(with_dropout(config) if p.scores.has_dropout else config, **fields)
    if p.split_rows:
        return with_parts(config, p.group, p.split_rows)
    if config.is_plain:
        config = select_plain_config(dtype, p.head_dim, p.head_dim_v, p.causal, p.longest_k, p.has_many_tiles)
    return with_group(config, p.group) if p.group > 1 else config


def _with_functions(
    problem: AttentionProblem, dtype: str, layout: str, fields: dict[str, Any]
) -> ForwardConfig:
    """The config of a problem with a user's functions."""
    p = problem
    options = dtype, p.head_dim, p.head_dim_v, p.causal, p.has_window, layout
    config = select_with_functions(*options, **fields)
    tiles = [(config.tile_m, tile_n) for tile_n in (config.tile_n, SMALL_TILE)]
    for _, block in p.scores.listed:
        tile = next((tile for tile in tiles if is_divided(block, tile)), tiles[0])
        if lists := lists_of(p, tile):
            return replace(config, tile_n=tile[1], **lists)
    return config


def lists_of(problem: AttentionProblem, tile: tuple[int, int]) -> dict[str, Any]:
    """The fields of a config of a problem with a BlockMask whose kernel visits what lists name (``block_lists``), where
    there is no other mask and nothing is packed; else none. A ``tile``, (queries, keys), that has parts of several
    blocks needs the functions that know the table (``CapturedFunctions.for_tiles``)."""
    p = problem
    if p.causal or p.has_window or p.is_packed:
        return {}
    for functions, block in p.scores.listed:
        is_part = is_divided(block, tile)
        return {"functions": functions if is_part else p.scores.functions, "block_lists": True}
    return {}


def why_not_paged(problem: AttentionProblem, backend: str) -> str:
    """What keeps a kernel from attending to a cache where it lies; empty if one can."""
    p = problem
    if backend != "hopper":
        return f"the backend {backend!r} has no kernel that reads the pages of a cache"
    if p.dtype not in DTYPE_NAMES:
        return (
            f"q has dtype {p.dtype}, and the kernel that reads pages takes {', '.join(DTYPE_NAMES.values())}"
        )
    if p.has_qv or p.head_dim_v > MAX_HEAD_DIM:
        return (
            f"the kernel that reads pages has no second query, and values of at most {MAX_HEAD_DIM} columns"
        )
    if p.scores.functions or p.scores.has_dropout:
        return "the kernel that reads pages has no score_mod, mask_mod or dropout"
    return ""


def _select_paged(problem: AttentionProblem, backend: str) -> ForwardConfig:
    """The config of a problem whose keys lie in the pages of a cache."""
    p = problem
    reason = why_not_paged(p, backend)
    if reason:
        raise NotImplementedError(f"{reason}; use flash_attn_varlen_func on a copy of the keys in use")
    options = p.causal, p.page_rows, p.has_window
    config = select_paged_config(DTYPE_NAMES[p.dtype], p.head_dim, p.head_dim_v, *options)
    config = replace(config, chunk=p.has_chunk, **p.scores.fields)
    if p.split_rows:
        return with_parts(config, p.group, p.split_rows, p.page_rows)
    return with_group(config, p.group) if p.group > 1 else config


def takes_wide_values(problem: AttentionProblem, target: Target, requested: str | None) -> bool:
    """Whether what serves ``problem`` takes more columns of V than MAX_HEAD_DIM at once, and not in parts.

    Raises:
        ValueError: ``requested`` cannot run there.
    """
    if problem.dtype not in DTYPE_NAMES or why_not_wide(problem.head_dim, problem.head_dim_v):
        return False
    if problem.scores.has_dropout or problem.scores.functions:
        return False
    return choose_for(problem, target, requested).backend == "hopper"


def choose_for(problem: AttentionProblem, target: Target, requested: str | None) -> Choice:
    """The backend of a problem of 16 bits.

    Raises:
        ValueError: ``requested`` cannot run there.
        NotImplementedError: ``requested`` does not serve such problems.
    """
    return choose_backend(target, problem.dtype, requested, why_not_torch(problem, target))


def _select_wide(
    p: AttentionProblem, backend: str, dtype: str, layout: str, fields: dict[str, Any]
) -> WideForwardConfig:
    """The config of a problem with a second query or wide values, for which only Hopper has a kernel."""
    reason = why_not_wide(p.head_dim, p.head_dim_v)
    if fields.pop("dropout"):
        reason = "no kernel has a second query and dropout"
    if fields.pop("functions"):
        reason = "no kernel has a second query and score_mod, mask_mod or block_mask"
    if backend != "hopper":
        reason = "the kernels without WGMMA have no second query"
    if reason:
        raise no_qv(backend, reason)
    return select_wide_config(dtype, p.head_dim_v, p.causal, p.has_qv, p.has_window, layout, **fields)


def check_size(config: Config, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
    """Raise NotImplementedError for sizes that the kernel of ``config`` cannot count."""
    (batch, seqlen_q, heads, _), seqlen_k = q_shape, k_shape[1]
    if isinstance(config, (AmpereForwardConfig, WideForwardConfig)):
        sizes.check_problem_size("kernel", config.tile_m, (batch, heads), (seqlen_q, seqlen_k))
    elif isinstance(config, ForwardConfig):
        check_problem_size(config, batch, heads, seqlen_q, seqlen_k)
