"""What ``flash_attn_varlen_func`` would run and why."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from cute_kernels.plan.config import check_packed_size
from hopper.config import ForwardConfig
from hopper.decode.config import DecodeConfig
from hopper_attention import (
    backward_rules,
    checks,
    features,
    few_queries,
    forward_rules,
    fp8_rules,
    tile_turns,
)
from hopper_attention.api import Window
from hopper_attention.backends import KERNELS, Target, target_of
from hopper_attention.checks import FULL_WINDOW, TensorSpec
from hopper_attention.decode_rules import serving_config
from hopper_attention.dispatch import (
    DEQUANTIZED,
    NO_GRADIENT_WITH_QV,
    Plan,
    cast_by_autocast,
    check_inputs,
    check_margin,
    choose_in_16_bits,
    dequantized,
    describe_copies,
    describe_gradients,
    describe_scores,
    describe_window,
    first_part,
    imagined_target,
    of_one_launch,
)
from hopper_attention.dropout import no_draw
from hopper_attention.few_packed_queries import find_few_packed
from hopper_attention.forward_rules import ReferenceConfig
from hopper_attention.functions import MaskMod, ScoreMod
from hopper_attention.head_parts import packed_with_head_parts
from hopper_attention.launch.varlen import is_empty, sizes_of
from hopper_attention.lengths import Lengths, check_kinds, check_packed, specs_of
from hopper_attention.packed_fp8_plan import packed_config_of
from hopper_attention.problem import AttentionProblem, GradientProblem, PackedKeys
from hopper_attention.scores import NO_SCORES, check_scores
from hopper_attention.torch_rules import TorchConfig


def explain_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool | int = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = FULL_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int | None = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    dropout_p: float = 0.0,
    exact_lse: bool | None = None,
    backend: str | None = None,
    device_capability: tuple[int, int] | None = None,
) -> Plan:
    """What ``flash_attn_varlen_func`` with these arguments would run, and why. Computes and compiles nothing.

    Args:
        q, k, v and all others up to ``backend``: as for :func:`hopper_attention.flash_attn_varlen_func`. Meta tensors
            will do, as nothing is read: whether the lengths fit is found out by the call.
        device_capability: answer for a GPU of this compute capability, with everything installed, instead of for the
            device of q; (9, 0) is a Hopper GPU.

    Raises:
        ValueError, TypeError, NotImplementedError: as the call itself would, but for the values of lengths.
    """
    checks.check_are_tensors(q=q, k=k, v=v)
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    lengths = check_kinds(lengths)
    features.check_hints(num_splits, pack_gqa)
    scores = features.resolve_scores(softcap, alibi_slopes, sinks)
    if score_mod is not None or mask_mod is not None:
        scores = features.with_functions(scores, score_mod, mask_mod, qv=qv)
    scores = features.with_dropout(scores, dropout_p, q, no_draw)
    causal = checks.check_flag("causal", causal)
    mask = features.resolve_packed_mask(
        causal, window_size, attention_chunk, lengths.max_seqlen_q, lengths.max_seqlen_k
    )
    checks.check_backend(backend)
    sm_margin = checks.check_sm_margin(sm_margin)
    deterministic = checks.check_flag("deterministic", deterministic)
    exact_lse = checks.check_exact_lse(exact_lse, checks.check_flag("return_attn_probs", return_attn_probs))
    given = {"q": q, "k": k, "v": v} | ({} if qv is None else {"qv": qv})
    checks.check_are_tensors(**given)
    tensors, casts = cast_by_autocast(given)
    whole = {name: TensorSpec.of(x)._replace(device=given[name].device) for name, x in tensors.items()}
    check_inputs(whole, scores.kind, partial(check_packed, lengths=specs_of(lengths)))
    check_scores(scores, cu_seqlens_q.shape[0] - 1, q.shape[1], whole["q"].dtype, q.device)
    features.check_fp8_scores(whole["q"].dtype, scores)
    checks.check_descales_of((cu_seqlens_q.shape[0] - 1, k.shape[1]), q, q_descale, k_descale, v_descale)
    if softmax_scale is not None:
        checks.check_scale(softmax_scale)
    is_fp8 = whole["q"].dtype == checks.FP8_DTYPE
    target = target_of(q.device) if device_capability is None else imagined_target(device_capability)
    is_changed = scores is not NO_SCORES
    of_kernel = mask, scores.kind, backend, exact_lse
    in_16_bits = is_fp8 and is_changed and not fp8_rules.serves_in_e4m3(q.shape, v.shape, target, *of_kernel)
    if in_16_bits:
        whole = dequantized(whole)
    masked = mask.causal, (mask.has_window, mask.attention_chunk > 0)
    problem = forward_rules.packed_problem_of(whole["q"], whole["v"], *masked, scores.kind)
    specs, notes = of_one_launch(whole, problem, target, backend)
    problem = forward_rules.packed_problem_of(specs["q"], specs["v"], *masked, scores.kind)
    problem = replace(problem, has_qv=qv is not None)
    if is_fp8 and not in_16_bits:
        shapes, options = (specs["q"].shape, specs["v"].shape), (exact_lse, not return_attn_probs)
        kind = fp8_rules.packed_problem(*shapes, mask, lengths[4:], *options, scores.kind)
        choice = fp8_rules.choose_for(kind, target, backend)
        config = packed_config_of(kind, choice, target)
    else:
        has_work = not is_empty(q, k, lengths)
        choice = choose_in_16_bits(problem, in_16_bits, target, backend, has_work)
        config = forward_rules.select_for(problem, choice.backend, target.capability)
    few = few_queries.NOT_FEW
    served_by: forward_rules.Config | DecodeConfig = config
    if choice.backend == "hopper" and qv is None:
        given_specs = whole["q"], whole["k"], whole["v"]
        of_few, in_e4m3 = (mask, scores.kind, sm_margin), is_fp8 and not exact_lse
        few = find_few_packed(given_specs, specs_of(lengths), lengths[4:], *of_few, in_e4m3=in_e4m3)
    if few.call is None and few != few_queries.NOT_FEW:
        if is_fp8 and not in_16_bits:
            head_dims = q.shape[2], v.shape[2]
            tiles = few.e4m3_problem(head_dims, mask, is_packed=True, scores=scores.kind)
            config = fp8_rules.select_for(tiles)
        else:
            grouped = replace(problem, group=few.group, split_rows=few.split_rows)
            config = forward_rules.select_for(grouped, choice.backend, target.capability)
        served_by = config
        notes = (*notes, *few.notes_of_packed)
    elif few.call is None and isinstance(config, ForwardConfig) and (not is_fp8 or in_16_bits):
        usual = forward_rules.packed_problem_of(whole["q"], whole["v"], *masked, scores.kind)
        grouped = tile_turns.packed_in_fewer_turns(usual, whole["q"], whole["k"], lengths, sm_margin)
        if grouped.group > 1:
            served_by = config = forward_rules.select_for(grouped, choice.backend, target.capability)
            notes = (*notes, tile_turns.NOTE)
    if few.call is not None:
        served_by, notes = serving_config(few.call), (*notes, few_queries.NOTE)
    elif not isinstance(config, (ReferenceConfig, TorchConfig)):
        totals = specs["q"].shape[0], specs["k"].shape[0]
        check_packed_size("kernel", q.shape[1], cu_seqlens_q.shape[0] - 1, totals, config.tile_queries)
    notes = (
        ((choice.advice,) if choice.advice else ()) + describe_window(mask) + describe_scores(scores) + notes
    ) + fp8_rules.describe_lse(served_by)
    learned = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, qv, sinks) if x is not None)
    if learned and problem.has_qv:
        notes += (NO_GRADIENT_WITH_QV,)
    if choice.backend in KERNELS:
        notes += check_margin(sm_margin, target, q.device)
        if learned and not (problem.has_qv or is_fp8):
            in_order = deterministic or torch.are_deterministic_algorithms_enabled()
            width = first_part(whole)[0]["v"].shape[2]
            gradient = replace(problem, head_dim_v=width)
            keys = backward_rules.keys_within(lengths.max_seqlen_k, sinks is not None)
            asked = _gradients_of(gradient, in_order, keys)
            if choice.backend == "hopper":
                asked = backward_rules.packed_in_faster_order(asked, q.numel(), lengths[4:])
                asked, _ = packed_with_head_parts(asked, sizes_of(q, k, lengths), mask.sides)
            notes += (_note_on_gradients(asked, target, backend),)
    copies = (DEQUANTIZED,) if in_16_bits else describe_copies(served_by, specs, tensors)
    return Plan(choice.backend, served_by, choice.reason, casts + copies, notes)


def _gradients_of(forward: AttentionProblem, deterministic: bool, keys: PackedKeys) -> GradientProblem:
    return GradientProblem(
        forward.dtype,
        forward.out_dtype,
        forward.head_dim,
        forward.head_dim_v,
        forward.causal,
        has_window=forward.has_window,
        has_chunk=forward.has_chunk,
        is_packed=True,
        scores=forward.scores,
        deterministic=deterministic,
        keys=keys,
    )


def _note_on_gradients(problem: GradientProblem, target: Target, requested: str | None) -> str:
    return describe_gradients(
        lambda: backward_rules.choose_for(problem, target, requested),
        lambda backend: backward_rules.select_for(problem, backend, target.capability).name,
    )
