"""What the kernels can do with FP8, and which backend serves an FP8 problem: one rule, without touching a tensor."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from cute_kernels.problem import DENSE, MAX_HEAD_DIM, VARLEN
from hopper.config import check_problem_size
from hopper.forward.fp8.capped_tilings import select_fp8_capped_config
from hopper.forward.fp8.changes import Changes
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.forward.fp8.few_tilings import select_fp8_few_blocks_config
from hopper.forward.fp8.native import BETWEEN
from hopper.forward.fp8.row_queries import transposes_v
from hopper.forward.fp8.tilings import (
    are_few_tiles,
    select_fp8_few_queries_config,
    select_fp8_forward_config,
    with_lone_scales,
    with_runs,
)
from hopper.forward.tilings import ANY_LENGTH, END_TO_END
from hopper_attention import checks
from hopper_attention.backends import (
    HOPPER_CAPABILITY,
    KERNELS,
    Choice,
    Target,
    choose_backend,
    why_not_ampere,
    why_not_hopper,
)
from hopper_attention.checks import DTYPE_NAMES, FP8_DTYPE
from hopper_attention.masks import FULL_SIDES, MaskSpec, Sides
from hopper_attention.problem import ONE_BLOCK, Fp8AttentionProblem, longest_alike
from hopper_attention.scores import PLAIN, ScoreKind
from hopper_attention.value_parts import needs_parts

HEAD_DIM_STEP = 16
"""TMA counts in 16 bytes, which a row of the output and of the inputs must fill."""

NO_SPEED_UP = "the kernels without WGMMA take FP8 dequantized to 16 bits, which gives no speed-up"

NO_KERNEL_WITH_SCORES = (
    "no FP8 kernel has alibi_slopes, nor a softcap or sinks with an exact LSE, two levels or a head_dim that is no "
    "multiple of 16 up to 256: q, k and v are dequantized to bfloat16, and the call has the speed of 16 bits"
)

NOTE_ON_EXACT_LSE = (
    "lse: exact, as codes of q and k are multiplied in 16 bits; exact_lse=False takes less time, and its lse is off by "
    "up to 8e-2"
)

NO_FP8_IN_TORCH = (
    "backend is 'torch', which has no FP8; use backend='reference', which emulates it, or flash_attn_func on "
    "bfloat16"
)
NO_DETOUR = "16-bit inputs do not need the detour"


WIDE_ROWS = 128
"""Columns beyond which few products fit beside O."""

REMEMBERED_LENGTHS = 4096
"""Bounds of lengths whose classes are kept."""


class Fp8Problem(NamedTuple):
    """Sizes, blocks and options of a problem with e4m3 inputs.

    ``q_shape`` (batch, seqlen_q, heads, head_dim), ``k_shape`` and ``v_shape`` (batch, seqlen_k, kv_heads, ...). The
    blocks are rows that share a scale, or ONE_BLOCK. ``v_rows`` says that V has a row of head_dim_v elements
    for each key, as FP8 tensors with descales have. ``two_level`` asks the FP8 kernel for two-level accumulation of
    P V; everything else adds in float32 as it is. ``half_scores`` says that scores fit float16, before they are scaled.
    ``causal`` and ``window`` are those of a ``MaskSpec``, ``exact_lse``, ``without_lse`` and ``scores`` those of an
    ``Fp8AttentionProblem``.
    """

    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    block_q: int
    block_k: int
    block_v: int
    out_dtype: torch.dtype
    causal: bool
    v_rows: bool = False
    two_level: bool = False
    half_scores: bool = False
    window: Sides = FULL_SIDES
    exact_lse: bool = False
    without_lse: bool = False
    scores: ScoreKind = PLAIN

    @property
    def kind(self) -> Fp8AttentionProblem:
        """What of it decides on the kernel."""
        (batch, seqlen_q, heads, head_dim), (_, seqlen_k, kv_heads, _) = self.q_shape, self.k_shape
        head_dim_v = self.v_shape[3]
        group = heads // max(kv_heads, 1)
        seen = MaskSpec(self.causal, *self.window).most_keys(seqlen_k)
        queries = queries_that_count(seqlen_q * group, seqlen_q, seqlen_k, self.causal, seen)
        values = batch * kv_heads * seqlen_k * head_dim_v, seen
        rows = queries_that_count(seqlen_q, seqlen_q, seqlen_k, self.causal)
        lone_scales = self.v_rows and self.block_q == self.block_k == ONE_BLOCK
        is_plain = self.window == FULL_SIDES and not self.scores.has_softcap
        is_wide = max(head_dim, head_dim_v) > BETWEEN.head_dim
        half = (self.without_lse or is_wide) and not self.two_level and is_plain
        half = half or (self.causal and caps_wide_rows(self.scores, head_dim, head_dim_v))
        transposes = lone_scales and not self.exact_lse
        of_v = self.causal, queries, half, group, values
        transposes = transposes and transposes_v(head_dim, head_dim_v, *of_v)
        return Fp8AttentionProblem(
            FP8_DTYPE,
            self.out_dtype,
            head_dim,
            head_dim_v,
            self.causal,
            longest_alike(seen),
            has_window=self.window != FULL_SIDES,
            has_chunk=self.window[2] > 0,
            is_empty=0 in self.q_shape or 0 in self.k_shape,
            scores=self.scores,
            block_k=self.block_k,
            block_v=self.block_v,
            v_rows=self.v_rows,
            lone_scales=lone_scales,
            transposes=transposes,
            two_level=self.two_level,
            half_scores=self.half_scores,
            exact_lse=self.exact_lse,
            without_lse=self.without_lse,
            few_tiles=self.without_lse and are_few_tiles(batch * heads, rows, self.causal),
        )


def caps_wide_rows(scores: ScoreKind, *head_dims: int) -> bool:
    """Whether there is a softcap on rows that are so wide that under a causal mask a kernel which transposes V itself
    is faster with more queries, as it is where scores are in float16 (``fp8_softcap_tiles.json``)."""
    return scores.has_softcap and max(head_dims) > WIDE_ROWS


def queries_that_count(
    queries: int, seqlen_q: int, seqlen_k: int, causal: bool, seen: int | None = None
) -> int:
    """``queries``, of which one that sees half of the keys under a causal mask counts half, and one that sees so many
    in a window as much less."""
    if seen is not None and seen < seqlen_k:
        return queries * seen // seqlen_k
    return queries - queries * min(seqlen_q, seqlen_k) // max(2 * seqlen_k, 1) if causal else queries


@lru_cache(maxsize=REMEMBERED_LENGTHS)
def classes_of_lengths(longest_q: int, longest_k: int) -> tuple[int, int]:
    """The largest bounds of lengths of packed sequences that are served as these: powers of two of queries."""
    return 1 << max(longest_q - 1, 0).bit_length(), longest_alike(min(longest_k, ANY_LENGTH))


class KeysOfPacked(NamedTuple):
    """What bounds of lengths say of packed sequences: the keys that a query sees at most, of a class, and whether tiles
    are few."""

    longest_k: int
    few_tiles: bool

    @classmethod
    def of(
        cls, q_sizes: tuple[int, int], lengths: tuple[int, int], mask: MaskSpec, without_lse: bool
    ) -> KeysOfPacked:
        """``q_sizes`` are rows and heads of Q."""
        total_q, heads = q_sizes
        longest_q, longest_k = classes_of_lengths(*lengths)
        if mask.has_window:
            return cls(longest_alike(mask.most_keys(longest_k)), False)
        rows = queries_that_count(total_q, longest_q, longest_k, mask.causal)
        return cls(longest_k, without_lse and are_few_tiles(heads, rows, mask.causal))


def packed_problem(
    q_shape: tuple[int, ...],
    v_shape: tuple[int, ...],
    mask: MaskSpec,
    lengths: tuple[int, int],
    exact_lse: bool,
    without_lse: bool,
    scores: ScoreKind = PLAIN,
) -> Fp8AttentionProblem:
    """That of packed e4m3 tensors with descales, q (total_q, heads, head_dim) and v (total_k, kv_heads, head_dim_v).
    ``lengths`` are bounds of those in Q and in K, of which their ``classes_of_lengths`` count."""
    (total_q, heads, head_dim), (_, kv_heads, head_dim_v) = q_shape, v_shape
    head_dims, group = (head_dim, head_dim_v), heads // max(kv_heads, 1)
    longest_q, longest_k = classes_of_lengths(*lengths)
    seen = mask.most_keys(longest_k)
    queries = queries_that_count(longest_q * group, longest_q, longest_k, mask.causal)
    if seen < longest_k:
        # Bounds are those of a class, so that queries and keys are taken to be as many.
        queries = min(queries, seen * group)
    values = v_shape[0] * kv_heads * head_dim_v, seen
    half = without_lse and not mask.has_window and not scores.has_softcap
    half_or_capped = half or (mask.causal and caps_wide_rows(scores, *head_dims))
    transposes = not exact_lse and transposes_v(
        *head_dims, mask.causal, queries, half_or_capped, group, values
    )
    known = KeysOfPacked.of((total_q, heads), lengths, mask, without_lse)
    return Fp8AttentionProblem(
        FP8_DTYPE,
        checks.FP8_OUT_DTYPE,
        *head_dims,
        mask.causal,
        known.longest_k if half or mask.has_window else ANY_LENGTH,
        has_window=mask.has_window,
        has_chunk=mask.attention_chunk > 0,
        is_packed=True,
        scores=scores,
        v_rows=True,
        lone_scales=True,
        transposes=transposes,
        exact_lse=exact_lse,
        without_lse=without_lse,
        few_tiles=known.few_tiles,
    )


def block_of(rows: int, seqlen: int) -> int:
    """``rows`` a scale as ``Fp8Problem`` has it."""
    return rows if rows < seqlen else ONE_BLOCK


def choose_fp8_backend(problem: Fp8Problem, target: Target, requested: str | None) -> Choice:
    """``choose_for`` a problem with sizes.

    Raises:
        ValueError: a kernel is asked for and cannot run.
        NotImplementedError: the problem has more tiles than the FP8 kernel can count.
    """
    choice = choose_for(problem.kind, target, requested)
    if choice.backend == "hopper":
        select_config(problem)
    return choice


def choose_for(problem: Fp8AttentionProblem, target: Target, requested: str | None) -> Choice:
    """The FP8 kernel where it runs and can do the problem; on a GPU without WGMMA, 16 bits; else the emulation.

    Raises:
        ValueError: a kernel is asked for and cannot run.
    """
    if requested == "reference":
        return Choice("reference", "asked for with backend='reference'")
    if requested == "torch":
        raise NotImplementedError(NO_FP8_IN_TORCH)
    blocked = {
        "hopper": why_not_hopper(target) or why_not_kernel(problem),
        "ampere": why_not_ampere(target) or why_not_dequantized(problem),
    }
    if requested is not None and blocked[requested]:
        allowed = "".join(f"{name!r}, " for name, reason in blocked.items() if not reason)
        raise ValueError(
            f"backend is {requested!r}, but {blocked[requested]}; allowed here: {allowed}'reference' or None"
        )
    if requested != "ampere" and not blocked["hopper"]:
        return Choice("hopper", f"{target.name} has compute capability 9.0 and q has dtype float8_e4m3fn")
    has_work = not problem.is_empty
    own = "hopper" if target.capability == HOPPER_CAPABILITY else "ampere"
    if requested == "ampere" or not blocked[own]:
        return _dequantized(target, requested, has_work)
    return Choice("reference", blocked[own], _how_to_leave_the_emulation(target, blocked, has_work))


def _dequantized(target: Target, requested: str | None, has_work: bool) -> Choice:
    """The 16-bit kernel, with advice where nobody asked for it."""
    major, minor = target.capability
    reason = f"{target.name} has compute capability {major}.{minor}; {NO_SPEED_UP}"
    if requested:
        return Choice("ampere", f"asked for with backend={requested!r}; {reason}")
    return Choice("ampere", reason, NO_DETOUR if has_work else "")


def choose_with_scores(
    target: Target, requested: str | None, has_work: bool = True, unserved: str = ""
) -> Choice:
    """The 16-bit backend of e4m3 tensors with softcap, slopes or sinks, with advice where it is a kernel and FP8 could
    have been meant. ``has_work`` says that there are queries and keys, ``unserved`` is that of ``choose_backend``.

    Raises:
        ValueError: a kernel is asked for and cannot run.
    """
    choice = choose_backend(target, FP8_DTYPE, requested, unserved)
    is_a_surprise = has_work and choice.backend in KERNELS and requested != "ampere"
    advice = NO_DETOUR if is_a_surprise else choice.advice
    return replace(choice, reason=f"{choice.reason}; {NO_KERNEL_WITH_SCORES}", advice=advice)


def _how_to_leave_the_emulation(target: Target, blocked: dict[str, str], has_work: bool) -> str:
    if not target.is_gpu or not has_work:
        return ""
    other = "" if blocked["ampere"] else "backend='ampere', which dequantizes, or "
    return f"{other}flash_attn_func on bfloat16 may be faster"


def why_not_dequantized(problem: Fp8AttentionProblem) -> str:
    """What about a problem keeps a 16-bit kernel from doing it once it is dequantized; empty if nothing does."""
    p, step = problem, checks.HEAD_DIM_STEP
    if p.out_dtype not in DTYPE_NAMES:
        return f"the kernel writes float16 or bfloat16, not {p.out_dtype}"
    if p.head_dim % step or p.head_dim_v % step or max(p.head_dim, p.head_dim_v) > MAX_HEAD_DIM:
        return f"head_dim {p.head_dim} and head_dim_v {p.head_dim_v} must be multiples of {step} up to {MAX_HEAD_DIM}"
    return ""


@lru_cache(maxsize=REMEMBERED_LENGTHS)
def serves_in_e4m3(
    q_shape: tuple[int, ...],
    v_shape: tuple[int, ...],
    target: Target,
    mask: MaskSpec,
    scores: ScoreKind,
    requested: str | None,
    in_float32: bool,
) -> bool:
    """Whether an FP8 kernel serves tensors of these shapes with descales, dense or packed, with ``scores`` changed.
    Else they are dequantized. ``in_float32`` asks for two levels or an exact LSE."""
    if requested not in (None, "hopper") or needs_parts(v_shape[-1]) or 0 in (*q_shape, *v_shape):
        return False
    problem = Fp8AttentionProblem(
        FP8_DTYPE,
        checks.FP8_OUT_DTYPE,
        q_shape[-1],
        v_shape[-1],
        mask.causal,
        has_window=mask.has_window,
        has_chunk=mask.attention_chunk > 0,
        is_packed=len(q_shape) == 3,
        scores=scores,
        v_rows=True,
        lone_scales=True,
        exact_lse=in_float32,
    )
    return not (why_not_hopper(target) or why_not_kernel(problem))


def why_not_scores(problem: Fp8AttentionProblem) -> str:
    """What keeps FP8 kernels from changing scores as asked for; empty if nothing does."""
    p, known = problem, ScoreKind(has_softcap=True, has_sinks=True).names
    others = [name for name in p.scores.names if name not in known]
    if others:
        return f"no FP8 kernel has {' and '.join(others)}"
    has_blocks = not (p.lone_scales or (p.v_rows and p.tile_rows))
    if p.scores != PLAIN and (p.exact_lse or p.two_level or has_blocks):
        what = "an exact LSE" if p.exact_lse else "two levels" if p.two_level else "scales of blocks"
        return f"no FP8 kernel has {' and '.join(p.scores.names)} with {what}"
    return ""


def why_not_kernel(problem: Fp8AttentionProblem) -> str:
    """What about a problem keeps the FP8 kernel from doing it; empty if nothing does."""
    p = problem
    reason = why_not_scores(p)
    if reason:
        return reason
    if p.out_dtype not in DTYPE_NAMES:
        return f"the kernel writes float16 or bfloat16, not {p.out_dtype}"
    if p.head_dim % HEAD_DIM_STEP or p.head_dim_v % HEAD_DIM_STEP:
        return (
            f"head_dim {p.head_dim} and head_dim_v {p.head_dim_v} must be multiples of {HEAD_DIM_STEP} in FP8"
        )
    if p.block_v != p.block_k:
        return f"k has blocks of {p.block_k} rows and v of {p.block_v}, which must be the same"
    try:
        select_for(p)
    except ValueError as error:
        return str(error)
    return ""


def select_config(problem: Fp8Problem) -> Fp8ForwardConfig:
    """The config that serves a problem which passes ``why_not_kernel``.

    Raises:
        NotImplementedError: the problem has more tiles than the kernel can count.
    """
    config = select_for(problem.kind)
    check_size(config, problem.q_shape, problem.k_shape)
    return config


def select_for(problem: Fp8AttentionProblem) -> Fp8ForwardConfig:
    """``select_config`` of all problems of a kind.

    Its ``v_rows`` says whether the kernel transposes V. Where V comes in rows and it does not, a kernel before it does.
    """
    p = problem
    layout = VARLEN if p.is_packed else DENSE
    changes = Changes(p.has_window, p.has_chunk, p.scores.has_softcap, p.scores.has_sinks)
    if p.tile_rows and not p.v_rows:
        of_tile = p.group, p.tile_rows, p.split_rows > 0, p.block_k, layout
        dims, output = (p.head_dim, p.head_dim_v), DTYPE_NAMES[p.out_dtype]
        return select_fp8_few_blocks_config(dims, p.causal, output, *of_tile, changes)
    if p.tile_rows:
        sizes = p.head_dim, p.head_dim_v, p.causal, DTYPE_NAMES[p.out_dtype]
        of_rows = p.group, p.tile_rows, p.split_rows > 0, layout, p.page_rows or END_TO_END
        return select_fp8_few_queries_config(*sizes, *of_rows, changes)
    if p.scores.has_softcap:
        dims, output = (p.head_dim, p.head_dim_v), DTYPE_NAMES[p.out_dtype]
        of_tiles = p.transposes, changes, layout, p.few_tiles
        return select_fp8_capped_config(dims, p.causal, output, *of_tiles)
    flags = p.transposes, p.two_level, p.half_scores, p.has_window
    # Scores in float16, both sides of a window and sinks leave too few registers at head_dim 256.
    is_short = changes.sinks and p.has_window and not p.causal and max(p.head_dim, p.head_dim_v) > WIDE_ROWS
    options = p.block_k, *flags, layout, p.has_chunk, p.exact_lse, p.without_lse and not is_short, p.few_tiles
    dtype = DTYPE_NAMES[p.out_dtype]
    config = select_fp8_forward_config(p.head_dim, p.head_dim_v, p.causal, dtype, p.longest_k, *options)
    config = replace(config, sinks=p.scores.has_sinks)
    if p.lone_scales and config.takes_lone_scales:
        return with_lone_scales(config)
    return with_runs(config, p.longest_k)


def describe_lse(config: Any) -> tuple[str, ...]:
    """A note on the kernel of an exact LSE, if ``config`` is one of it."""
    return (NOTE_ON_EXACT_LSE,) if isinstance(config, Fp8ForwardConfig) and config.wide_codes else ()


def check_size(config: Fp8ForwardConfig, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
    """Raise NotImplementedError for sizes that the kernel of ``config`` cannot count."""
    check_problem_size(config, q_shape[0], q_shape[2], q_shape[1], k_shape[1])
