"""What ``flash_attn_with_kvcache`` would run and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hopper.decode.config import DecodeConfig
from hopper.mla.config import MlaConfig
from hopper_attention.api import Window
from hopper_attention.backends import KERNELS, Target, target_of
from hopper_attention.cache_tiles import tiles_of
from hopper_attention.checks import FULL_WINDOW, TensorSpec
from hopper_attention.dispatch import (
    NOTE_ON_QV,
    check_margin,
    describe_scores,
    describe_window,
    first_part,
    imagined_target,
)
from hopper_attention.forward_rules import Config
from hopper_attention.kvcache_call import CacheExtras, read_call
from hopper_attention.kvcache_checks import CacheCall, CacheOptions, CacheShape, CacheTensors
from hopper_attention.kvcache_rules import choose_path
from hopper_attention.launch.append import append_facts, select_append_config, why_not_append
from hopper_attention.launch.cache_copy import select_dequantize, why_not_copied
from hopper_attention.reference.append import Rotation


@dataclass(frozen=True)
class CachePlan:
    """What a call on a cache runs. Printing it gives one line a fact.

    Attributes:
        path: the way that serves it, of ``kvcache_rules.RULES``.
        what: what that does.
        refused: each faster way, and what kept it from serving.
        backend: "hopper", "ampere", "torch" or "reference".
        config: what the kernel that attends was compiled from, or how the reference walks.
        reason: why this backend.
        steps: what is done to the cache and the tensors before.
        notes: what else is worth knowing.
    """

    path: str
    what: str
    refused: tuple[str, ...]
    backend: str
    config: Config | DecodeConfig | MlaConfig
    reason: str
    steps: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [("path", f"{self.path}: {self.what}"), ("backend", self.backend), ("reason", self.reason)]
        rows += [("config", self.config.name)]
        rows += [("not", text) for text in self.refused]
        rows += [("before", text) for text in self.steps or ("nothing",)]
        rows += [("note", text) for text in self.notes]
        return "\n".join(f"{label:<11}{text}" for label, text in rows)


def explain_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool | int = False,
    window_size: Window = FULL_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    out: Tensor | None = None,
    hadamard: bool | int = False,
    backend: str | None = None,
    device_capability: tuple[int, int] | None = None,
) -> CachePlan:
    """What ``flash_attn_with_kvcache`` with these arguments would run, and why. Computes and compiles nothing.

    Args:
        q and all others up to ``backend``: as for :func:`hopper_attention.flash_attn_with_kvcache`. Meta tensors will
            do, as nothing is read.
        device_capability: answer for a GPU of this compute capability, with everything installed, instead of for the
            device of q; (9, 0) is a Hopper GPU. Whether it would decode in clusters, only a GPU can tell, on which q
            has to be: of other tensors the config has none.

    Raises:
        ValueError, TypeError, NotImplementedError: as the call itself would.
    """
    given = CacheTensors(
        q,
        k_cache,
        v_cache,
        k,
        v,
        qv,
        rotary_cos,
        rotary_sin,
        cache_seqlens,  # type: ignore[arg-type]  # An int becomes a tensor once it is checked.
        cache_batch_idx,
        cache_leftpad,
        page_table,
        cu_seqlens_q,
        cu_seqlens_k_new,
        rotary_seqlens,
        q_descale,
        k_descale,
        v_descale,
        scheduler_metadata,
    )
    options = CacheOptions(
        max_seqlen_q,
        softmax_scale,
        causal,
        window_size,
        attention_chunk,
        softcap,
        rotary_interleaved,
        num_splits,
        pack_gqa,
        sm_margin,
        return_softmax_lse,
        backend,
        hadamard,
    )
    call, tensors, scores, _ = read_call(given, CacheExtras(sinks, alibi_slopes, out), options)
    target = target_of(q.device) if device_capability is None else imagined_target(device_capability)
    chosen = choose_path(call, target)
    choice, rule, selection = chosen.backend, chosen.rule, chosen.selection
    notes = ((choice.advice,) if choice.advice else ()) + describe_window(call.mask) + describe_scores(scores)
    if call.shape.has_qv:
        notes += (NOTE_ON_QV,)
    elif selection.problem.head_dim_v < call.shape.head_dim_v:
        notes += first_part({"v": TensorSpec.of(tensors.v_cache)})[1]
    if choice.backend in KERNELS:
        notes += check_margin(sm_margin, target, q.device)
    if rule.path == "tiles":
        notes += tiles_of(call).notes_of_packed
    steps = (
        *_append_steps(call, tensors, target, choice.backend),
        *_copy_steps(call.shape, rule.path, target, choice.backend),
    )
    return CachePlan(
        rule.path,
        rule.what,
        chosen.refused,
        choice.backend,
        selection.config,
        choice.reason,
        steps,
        notes,
    )


def _append_steps(call: CacheCall, tensors: CacheTensors, target: Target, backend: str) -> tuple[str, ...]:
    shape, t = call.shape, tensors
    rotation, pairs = None, ""
    steps: tuple[str, ...] = ("queries are multiplied by a Hadamard matrix",) if call.hadamard else ()
    if t.k is None or t.v is None:
        return steps
    if t.rotary_cos is not None and t.rotary_sin is not None:
        rotation = Rotation(t.rotary_cos, t.rotary_sin, call.rotary_interleaved, t.rotary_seqlens)
        other = "2i and 2i + 1" if call.rotary_interleaved else f"i and i + {shape.rotary_dim // 2}"
        pairs = f", their keys rotated in columns {other}"
        whose = "each for a position of its own" if call.rotates_each_query else "all for one position"
        steps = (f"queries are rotated, {whose}", *steps)
    pairs += ", these multiplied by a Hadamard matrix" if call.hadamard else ""
    how = "by PyTorch"
    if backend in KERNELS:
        q = None if rotation is None else t.q
        caches = t.k_cache, t.v_cache, t.page_table
        facts = append_facts(t.k, t.v, *caches, rotation, q, t.k_descale, call.hadamard)
        reason = why_not_append(facts, target)
        how = f"by PyTorch, as {reason}" if reason else f"by {select_append_config(facts, target).name}"
    scales = ", with a scale of its own each" if call.writes_scales else ""
    return f"{shape.total_new} new tokens are written into the cache{pairs}{scales}, {how}", *steps


def _copy_steps(shape: CacheShape, path: str, target: Target, backend: str) -> tuple[str, ...]:
    if path not in ("copied", "general"):
        return ()
    name = str(shape.out_dtype).removeprefix("torch.")
    of_queries = ("q is dequantized to bfloat16 by PyTorch",) * (shape.dtype == torch.float8_e4m3fn)
    if backend in KERNELS and not why_not_copied(shape, target):
        by = select_dequantize(shape, target).name
        return f"keys and values in use are copied to {name}, by {by}", *of_queries
    reasons = [
        (shape.is_paged, f"lie in pages of {shape.page_size}"),
        (shape.has_batch_idx, "are of a choice of the cache's sequences"),
        (shape.has_leftpad, "begin behind a leftpad"),
    ]
    why = " and ".join(reason for is_so, reason in reasons if is_so)
    steps: tuple[str, ...] = ()
    if why:
        steps = (f"keys and values are copied, {shape.seqlen_k} rows a sequence, as they {why}",)
    if shape.is_fp8_cache:
        steps += (f"keys and values, {shape.seqlen_k} rows a sequence, are dequantized to {name} by PyTorch",)
    return steps + of_queries
