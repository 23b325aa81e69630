"""Which of the ways to attend to a key/value cache serves a call, and why: read by the launcher and by ``explain``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from cute_kernels.plan.config import check_packed_size
from hopper.config import ForwardConfig
from hopper.decode.config import DecodeConfig
from hopper.forward.tilings import END_TO_END
from hopper.mla.config import MlaConfig
from hopper_attention import cache_tiles, fp8_rules
from hopper_attention.backends import Choice, Target
from hopper_attention.cache_tiles import page_rows_of_call, pages_of_a_sequence, problem_of_tiles
from hopper_attention.decode_rules import serving_config, why_not_decode
from hopper_attention.forward_rules import Config, ReferenceConfig, choose_for, select_for, takes_wide_values
from hopper_attention.forward_rules import why_not_paged as why_no_paged_kernel
from hopper_attention.kvcache_checks import CacheCall
from hopper_attention.launch.cache_copy import why_not_copied
from hopper_attention.launch.paged_forward import why_not_in_place
from hopper_attention.mla_rules import select_mla, why_not_mla
from hopper_attention.packing_rules import why_not_packed
from hopper_attention.problem import AttentionProblem, Fp8AttentionProblem
from hopper_attention.torch_rules import TorchConfig
from hopper_attention.value_parts import needs_parts, part_widths


@dataclass(frozen=True)
class Selection:
    """What a way runs: the problem of a launch, whose values may be a part of them, and the config that serves it."""

    problem: AttentionProblem
    config: Config | DecodeConfig | MlaConfig


@dataclass(frozen=True)
class Rule:
    """A way, which ``launch/kvcache.py`` has under the same name.

    Attributes:
        path: its name.
        what: what it does, in a sentence.
        why_not: what of a call, a GPU or the backend that was chosen keeps it from serving; empty if nothing does.
        select: what it runs where nothing does. It raises NotImplementedError for a problem that the backend has no
            kernel for, or no kernel that can count its sizes.
    """

    path: str
    what: str
    why_not: Callable[[CacheCall, Target, str], str]
    select: Callable[[CacheCall, Target, str], Selection]


@dataclass(frozen=True)
class PathChoice:
    """How a call is served: by which rule, on which backend, and what kept each of the rules before from serving."""

    rule: Rule
    backend: Choice
    selection: Selection
    refused: tuple[str, ...]


def nothing(call: CacheCall, target: Target, backend: str) -> str:
    """Of a way that serves every call."""
    return ""


def _general_problem(call: CacheCall) -> AttentionProblem:
    """That of packed sequences."""
    shape = call.shape
    return AttentionProblem(
        shape.out_dtype,
        shape.out_dtype,
        shape.head_dim,
        shape.head_dim_v,
        call.mask.causal,
        has_window=call.mask.has_window,
        has_chunk=call.mask.attention_chunk > 0,
        is_packed=True,
        scores=call.scores,
        has_qv=shape.has_qv,
    )


def select_in_general(call: CacheCall, target: Target, backend: str) -> Selection:
    """What attends to sequences of one tensor."""
    shape, problem = call.shape, _general_problem(call)
    in_parts = not shape.has_qv and needs_parts(shape.head_dim_v)
    if in_parts and not takes_wide_values(problem, target, call.backend):
        problem = replace(problem, head_dim_v=part_widths(shape.head_dim_v)[0])
    config = select_for(problem, backend, target.capability)
    if not isinstance(config, (ReferenceConfig, TorchConfig)):
        totals = shape.total_q, shape.batch * shape.capacity
        check_packed_size("kernel", shape.heads, shape.batch, totals, config.tile_m)
    return Selection(problem, config)


def why_not_tiles(call: CacheCall, target: Target, backend: str) -> str:
    """What keeps tiles of several heads and parts of keys from a call, or speaks for another kernel."""
    return cache_tiles.why_not_tiles(call, backend)


def select_tiles(call: CacheCall, target: Target, backend: str) -> Selection:
    """The forward kernel with such tiles."""
    problem = problem_of_tiles(call, cache_tiles.tiles_of(call))
    if isinstance(problem, Fp8AttentionProblem):
        return Selection(problem, fp8_rules.select_for(problem))
    return Selection(problem, select_for(problem, backend, target.capability))


def why_not_decode_kernel(call: CacheCall, target: Target, backend: str) -> str:
    """What keeps the decode kernel from a call, or speaks for the one that packs no heads."""
    reason = why_not_decode(call, target, backend)
    if reason:
        return reason
    counted = cache_tiles.why_not_tiles(call, backend)
    if not counted:
        return "by count tiles of the forward kernel take less time"
    if counted in cache_tiles.COUNTED and call.pack_gqa is None:
        return "" if counted == cache_tiles.DECODE_TAKES_LESS else counted
    return why_not_packed(call, not why_not_paged(call, target, backend))


def select_decode_kernel(call: CacheCall, target: Target, backend: str) -> Selection:
    """The decode kernel."""
    problem = replace(_general_problem(call), is_packed=call.shape.is_packed_q)
    return Selection(problem, serving_config(call))


def select_mla_kernel(call: CacheCall, target: Target, backend: str) -> Selection:
    """The kernel for decoding over a latent."""
    problem = replace(_general_problem(call), is_packed=call.shape.is_packed_q)
    return Selection(problem, select_mla(call))


def why_not_paged(call: CacheCall, target: Target, backend: str) -> str:
    """What keeps the kernel that reads a cache where it lies from serving."""
    shape = call.shape
    if not shape.has_keys or not shape.has_queries:
        return "there is no score"
    if shape.is_fp8_cache:
        return f"the cache has dtype {shape.cache_dtype}, and the kernel that reads pages takes 16 bits"
    pages = pages_of_a_sequence(call)
    if shape.has_leftpad and pages > 1:
        return "there is a leftpad, which the kernel takes for caches of one page a sequence"
    reason = why_not_in_place(*shape.caches, pages)
    return reason or why_no_paged_kernel(_paged_problem(call), backend)


def select_paged(call: CacheCall, target: Target, backend: str) -> Selection:
    """What attends to a cache where it lies."""
    return _select_forward(_paged_problem(call), call, call.shape.capacity, target, backend)


def why_not_copied_rule(call: CacheCall, target: Target, backend: str) -> str:
    """What keeps the keys from being copied by a kernel, for the one that reads a cache where it lies."""
    if not call.shape.has_queries:
        return "there is no score"
    reason = why_no_paged_kernel(_copied_problem(call), backend)
    return reason or why_not_copied(call.shape, target)


def select_copied(call: CacheCall, target: Target, backend: str) -> Selection:
    """What attends to the copy."""
    return _select_forward(_copied_problem(call), call, call.shape.seqlen_k, target, backend)


def _select_forward(
    problem: AttentionProblem, call: CacheCall, room: int, target: Target, backend: str
) -> Selection:
    """What attends to keys of which each sequence has ``room`` rows."""
    config = select_for(problem, backend, target.capability)
    if isinstance(config, ForwardConfig):
        totals = call.shape.total_q, call.shape.batch * room
        check_packed_size("kernel", call.shape.heads, call.shape.batch, totals, config.tile_m)
    return Selection(problem, config)


def _copied_problem(call: CacheCall) -> AttentionProblem:
    return replace(_general_problem(call), page_rows=END_TO_END)


def _paged_problem(call: CacheCall) -> AttentionProblem:
    return replace(_general_problem(call), page_rows=page_rows_of_call(call))


RULES = (
    Rule(
        "decode",
        "a kernel shares all keys out over the GPU, wherever sequences end, or with clusters in its config (_c2, _c8) "
        "each tile's over a cluster, reads them where they lie, and has the query heads of a K/V head as the rows of a "
        "tile",
        why_not_decode_kernel,
        select_decode_kernel,
    ),
    Rule(
        "mla",
        "a kernel for qv shares all keys out over the GPU, as decode does, and reads every value once for the scores "
        "and the output of all query heads",
        why_not_mla,
        select_mla_kernel,
    ),
    Rule(
        "tiles",
        "the kernel of flash_attn_varlen_func reads keys and values in the cache, where they lie, with the query heads "
        "of a K/V head as the rows of a tile, or keys in parts, or e4m3 by e4m3",
        why_not_tiles,
        select_tiles,
    ),
    Rule(
        "paged",
        "the kernel of flash_attn_varlen_func reads keys and values in the cache, where they lie",
        why_not_paged,
        select_paged,
    ),
    Rule(
        "copied",
        "a kernel copies keys and values in use to 16 bits, and the kernel of flash_attn_varlen_func attends to these",
        why_not_copied_rule,
        select_copied,
    ),
    Rule(
        "general",
        "keys and values become sequences of one tensor, copied from the cache where they do not lie so, and the "
        "kernels of flash_attn_varlen_func attend to them",
        nothing,
        select_in_general,
    ),
)
"""From the fastest to the one that serves all."""


def choose_path(call: CacheCall, target: Target, rules: tuple[Rule, ...] = RULES) -> PathChoice:
    """The first way that can serve a call on a GPU.

    Raises:
        ValueError: the backend that is asked for cannot run there.
        NotImplementedError: it has no kernel for the call.
    """
    choice = choose_for(_general_problem(call), target, call.backend)
    refused: tuple[str, ...] = ()
    for rule in rules:
        reason = rule.why_not(call, target, choice.backend)
        if not reason:
            return PathChoice(rule, choice, rule.select(call, target, choice.backend), refused)
        refused += (f"{rule.path}: {reason}",)
    raise NotImplementedError(f"no way to attend to this cache: {'; '.join(refused)}")
