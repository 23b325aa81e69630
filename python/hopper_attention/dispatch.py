"""What a call would run and why: ``explain`` for one problem, ``describe_machine`` for all of the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cute_kernels.ampere.config import AmpereForwardConfig
from hopper.config import ForwardConfig
from hopper.decode.config import DecodeConfig
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.wide.config import WideForwardConfig
from hopper_attention import backward_rules, checks, features, few_queries, fp8_rules, tile_turns
from hopper_attention.autocast import find_autocast_dtype
from hopper_attention.backends import (
    HOPPER_CAPABILITY,
    KERNELS,
    MOST_MULTIPROCESSORS,
    Choice,
    Target,
    target_of,
)
from hopper_attention.backward_rules import BackwardProblem
from hopper_attention.checks import FULL_WINDOW, TensorSpec
from hopper_attention.decode_rules import serving_config
from hopper_attention.dropout import STEPS, kept_steps, no_draw
from hopper_attention.forward_rules import (
    Config,
    ReferenceConfig,
    choose_for,
    grouped_problem,
    problem_of,
    select_config,
    select_for,
    takes_wide_values,
)
from hopper_attention.functions import MaskMod, ScoreMod
from hopper_attention.layout import copy_reason
from hopper_attention.machine import BackendStatus, Gpu, Machine, Missing, describe_machine
from hopper_attention.masks import UNLIMITED, MaskSpec
from hopper_attention.problem import AttentionProblem
from hopper_attention.qv import check_qv, check_qv_scores, fold, folds_heads
from hopper_attention.scores import NO_SCORES, ScoreKind, Scores, check_scores
from hopper_attention.torch_rules import TorchConfig, why_not_torch
from hopper_attention.value_parts import needs_parts, part_widths
from hopper_attention.visit_pieces import as_served

__all__ = [
    "BackendStatus",
    "Gpu",
    "Machine",
    "Missing",
    "Plan",
    "ReferenceConfig",
    "describe_machine",
    "explain",
    "select_config",
]


NOTE_ON_QV = "qv: a second query multiplies v, and its products join those of q and k"
NOTE_ON_HEADS = "the query heads of a key/value head become queries of one, as there is a single query"
NO_GRADIENT_WITH_QV = "a backward pass through the result raises NotImplementedError: qv has no gradient"
DEQUANTIZED = f"q, k and v are dequantized to {str(checks.FP8_OUT_DTYPE).removeprefix('torch.')} by PyTorch"
NO_FP8_GRADIENT = "e4m3 inputs have no gradient: a backward pass through the result raises"


@dataclass(frozen=True)
class Plan:
    """What a call runs. Printing it gives one line a fact.

    Attributes:
        backend: "hopper", "ampere", "torch" or "reference".
        config: what the kernel was compiled from, or how the reference walks.
        reason: why this backend.
        copies: a sentence for each input that is copied first, or for all.
        notes: what else is worth knowing.
    """

    backend: str
    config: Config | DecodeConfig
    reason: str
    copies: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [("backend", self.backend), ("reason", self.reason), ("config", self.config.name)]
        if not isinstance(self.config, TorchConfig):
            has_heads = isinstance(self.config, DecodeConfig) or getattr(self.config, "group", 1) > 1
            rows_of = "query rows" if has_heads else "queries"
            rows += [("tile", f"{self.config.tile_m} {rows_of} x {self.config.tile_n} keys")]
        if isinstance(self.config, ForwardConfig):
            rows += _kernel_rows(self.config)
        if isinstance(self.config, WideForwardConfig):
            rows += _wide_rows(self.config)
        if isinstance(self.config, AmpereForwardConfig):
            rows += _ampere_rows(self.config)
        rows += [("copies", text) for text in self.copies or ("none",)]
        rows += [("note", text) for text in self.notes]
        return "\n".join(f"{label:<11}{text}" for label, text in rows)


def _kernel_rows(c: ForwardConfig) -> list[tuple[str, str]]:
    overlaps = [
        "softmax under its own GEMMs" if c.pipelined else "",
        "warpgroups in ping-pong" if c.ping_pong else "",
        "O rescaled under the next Q K^T" if c.late_rescale else "",
        "P V added to O in float32" if isinstance(c, Fp8ForwardConfig) and c.two_level else "",
        "persistent grid",
        "longest causal tiles first" if c.causal else "",
    ]
    return [
        (
            "head dims",
            f"{c.head_dim} and {c.head_dim_v} in the kernel; shorter rows are filled with zeros by TMA",
        ),
        ("stages", f"{c.stages} of K and of V, {c.smem_bytes} bytes of shared memory"),
        ("warpgroups", f"{c.consumers} consumers and 1 producer, {c.threads} threads"),
        ("registers", f"{c.registers.consumer} a consumer thread, {c.registers.producer} a producer thread"),
        ("schedule", ", ".join(text for text in overlaps if text)),
    ]


def _wide_rows(c: WideForwardConfig) -> list[tuple[str, str]]:
    dims = f"{c.head_dim} and {c.head_dim_v} in the kernel; shorter rows are filled with zeros by TMA"
    overlaps = ["softmax under P V of the second warpgroup", "persistent grid"]
    overlaps += [f"keys by multicast to {c.cluster} CTAs"] if c.cluster > 1 else []
    overlaps += ["longest causal tiles first"] if c.causal else []
    return [
        ("head dims", dims),
        ("stages", f"{c.stages} of K and of V, {c.smem_bytes} bytes of shared memory"),
        ("warpgroups", f"{c.consumers} consumers, each with half of the columns of O, and 1 producer"),
        ("registers", f"{c.registers.consumer} a consumer thread, {c.registers.producer} a producer thread"),
        ("schedule", ", ".join(overlaps)),
    ]


def _ampere_rows(c: AmpereForwardConfig) -> list[tuple[str, str]]:
    overlaps = [
        "P made between its own products with V" if c.fused_exponentials else "",
        "O rescaled where a maximum is new",
        "longest causal tiles first" if c.causal else "",
    ]
    where = "registers" if c.q_in_registers else "shared memory"
    return [
        ("head dims", f"{c.head_dim} and {c.head_dim_v} in the kernel; shorter rows are filled with zeros"),
        ("compiled", f"for {c.arch}, with cp.async and mma.sync"),
        ("stages", f"{c.stages} that K and V take in turns, {c.smem_bytes} bytes of shared memory"),
        ("warps", f"{c.warps} of {c.rows_per_warp} queries each, Q in {where}; {c.ctas_per_sm} CTAs an SM"),
        ("schedule", ", ".join(text for text in overlaps if text)),
    ]


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Any = FULL_WINDOW,
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
    block_mask: Any = None,
    dropout_p: float = 0.0,
    two_level_accumulation: bool = False,
    exact_lse: bool | None = None,
    backend: str | None = None,
    device_capability: tuple[int, int] | None = None,
) -> Plan:
    """What ``flash_attn_func`` with these arguments would run, and why. Computes and compiles nothing.

    Args:
        q, k, v and all others up to ``backend``: as for :func:`hopper_attention.flash_attn_func`. Meta
            tensors will do, as nothing is read.
        device_capability: answer for a GPU of this compute capability, with everything installed, instead
            of for the device of q; (9, 0) is a Hopper GPU.

    Raises:
        ValueError, TypeError, NotImplementedError: as the call itself would.
    """
    checks.check_are_tensors(q=q, k=k, v=v)
    mask = features.resolve_mask(
        q,
        k,
        checks.check_flag("causal", causal),
        window_size=window_size,
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
    )
    scores = features.resolve_scores(softcap, alibi_slopes, sinks)
    if score_mod is not None or mask_mod is not None or block_mask is not None:
        scores = features.with_functions(scores, score_mod, mask_mod, block_mask, qv)
        features.check_lists(scores, q, k)
    scores = features.with_dropout(scores, dropout_p, q, no_draw)
    deterministic = checks.check_flag("deterministic", deterministic)
    returns_lse = checks.check_flag("return_attn_probs", return_attn_probs)
    exact_lse = checks.check_exact_lse(exact_lse, returns_lse)
    checks.check_backend(backend)
    sm_margin = checks.check_sm_margin(sm_margin)
    checks.check_two_level_accumulation(two_level_accumulation)
    given = {"q": q, "k": k, "v": v} | ({} if qv is None else {"qv": qv})
    checks.check_are_tensors(**given)
    tensors, casts = cast_by_autocast(given)
    whole = {name: TensorSpec.of(x)._replace(device=given[name].device) for name, x in tensors.items()}
    check_inputs(whole, scores.kind, checks.check_qkv)
    checks.check_descales(q, k, q_descale, k_descale, v_descale)
    if softmax_scale is not None:
        checks.check_scale(softmax_scale)
    check_scores(scores, q.shape[0], q.shape[2], whole["q"].dtype, q.device)
    features.check_fp8_scores(whole["q"].dtype, scores)
    causal = mask.causal
    is_fp8 = q.dtype == checks.FP8_DTYPE
    target = target_of(q.device) if device_capability is None else imagined_target(device_capability)
    is_changed = scores is not NO_SCORES
    of_kernel = mask, scores.kind, backend, exact_lse or two_level_accumulation
    in_16_bits = is_fp8 and is_changed and not fp8_rules.serves_in_e4m3(q.shape, v.shape, target, *of_kernel)
    if in_16_bits:
        whole = dequantized(whole)
    problem = problem_of(whole["q"], whole["k"], whole["v"], causal, mask.sides, scores.kind)
    specs, notes = of_one_launch(whole, problem, target, backend)
    if "qv" in specs and folds_heads(q.shape, k.shape[2], mask, scores.kind):
        specs = specs | {name: fold(specs[name], k.shape[2]) for name in ("q", "qv")}
        notes, mask, causal = (*notes, NOTE_ON_HEADS), MaskSpec(False), False
    if is_fp8 and not in_16_bits:
        options_8 = two_level_accumulation, exact_lse, not returns_lse, scores.kind
        choice, config = _plan_fp8(specs, mask, options_8, target, backend)
    else:
        has_work = 0 not in (*q.shape, *k.shape)
        served = replace(problem, has_qv=qv is not None)
        choice = choose_in_16_bits(served, in_16_bits, target, backend, has_work)
        where, (q_spec, k_spec, v_spec) = (choice.backend, target.capability), (specs[name] for name in "qkv")
        config = select_config(
            *where, q_spec, k_spec, v_spec, causal, mask.sides, scores.kind, qv is not None
        )
    served_by: Config | DecodeConfig = config
    if qv is None and choice.backend == "hopper":
        # Calls on e4m3 tensors are not asked for by parts of V.
        parted = whole if is_fp8 and not in_16_bits else specs
        q_spec, k_spec, v_spec = (parted[name] for name in "qkv")
        in_e4m3 = not (two_level_accumulation or exact_lse)
        few = few_queries.find_few(q_spec, k_spec, v_spec, mask, scores.kind, sm_margin, in_e4m3)
        if few.call is not None:
            served_by, notes = serving_config(few.call), (*notes, few_queries.NOTE)
        elif few != few_queries.NOT_FEW:
            served_by = config_of_few(few, (q_spec, k_spec, v_spec), mask, scores.kind)
            notes = (*notes, *few.notes)
        elif isinstance(config, ForwardConfig) and q_spec.dtype != checks.FP8_DTYPE:
            usual = problem_of(q_spec, k_spec, v_spec, causal, mask.sides, scores.kind)
            grouped = tile_turns.in_fewer_turns(usual, q_spec, k_spec, sm_margin)
            if grouped.group > 1:
                served_by = select_for(grouped, "hopper", HOPPER_CAPABILITY)
                notes = (*notes, tile_turns.NOTE)
    notes = _notes(choice.advice, given) + describe_window(mask) + describe_scores(scores) + notes
    notes += fp8_rules.describe_lse(served_by)
    is_launched = choice.backend in KERNELS and 0 not in (*specs["q"].shape, *specs["k"].shape)
    if is_launched:
        notes += check_margin(sm_margin, target, q.device)
    differentiated = [
        x for x in (q, k, v, qv, q_descale, k_descale, v_descale, sinks) if x is not None and x.requires_grad
    ]
    if torch.is_grad_enabled() and differentiated:
        shapes = whole["q"].shape, whole["k"].shape, first_part(whole)[0]["v"].shape
        in_order = deterministic or torch.are_deterministic_algorithms_enabled()
        gradient = BackwardProblem(*shapes, specs["q"].dtype, causal, in_order, mask.has_window, scores.kind)
        gradient = gradient._replace(has_chunk=mask.attention_chunk > 0)
        if choice.backend == "hopper":
            gradient = as_served(gradient, mask.sides)
        if is_fp8:
            notes += (NO_FP8_GRADIENT,)
        elif qv is not None:
            notes += (NO_GRADIENT_WITH_QV,)
        elif is_launched:
            notes += (_note_on_gradients(gradient, target, backend),)
    copies = (DEQUANTIZED,) if in_16_bits else describe_copies(served_by, specs, tensors)
    return Plan(choice.backend, served_by, choice.reason, casts + copies, notes)


def dequantized(specs: dict[str, TensorSpec]) -> dict[str, TensorSpec]:
    """What is made of e4m3 tensors where 16 bits compute."""
    return {
        name: TensorSpec(
            x.shape, torch.empty(x.shape, device="meta").stride(), checks.FP8_OUT_DTYPE, x.device
        )
        for name, x in specs.items()
    }


def choose_in_16_bits(
    problem: AttentionProblem, is_dequantized: bool, target: Target, requested: str | None, has_work: bool
) -> Choice:
    """The backend of 16-bit tensors, or of e4m3 ones that are dequantized for what is done to their scores."""
    if is_dequantized:
        return fp8_rules.choose_with_scores(target, requested, has_work, why_not_torch(problem, target))
    return choose_for(problem, target, requested)


def check_inputs(specs: dict[str, TensorSpec], scores: ScoreKind, check: Callable[..., None]) -> None:
    """``check`` of q, k and v, and the checks of qv where it is among ``specs``."""
    check(*(specs[name] for name in "qkv"))
    if "qv" in specs:
        check_qv_scores(scores.has_dropout)
        check_qv(specs["q"], specs["v"], specs["qv"])


def describe_window(mask: MaskSpec) -> tuple[str, ...]:
    """Notes on the keys that a window and a chunk leave to a query."""
    notes: tuple[str, ...] = ()
    if mask.attention_chunk:
        notes = (f"attention_chunk: a query sees keys of its own chunk of {mask.attention_chunk} alone",)
    if mask.window == FULL_WINDOW:
        return notes
    left, right = ("all" if side == UNLIMITED else str(side) for side in mask.window)
    right = "0" if mask.causal else right
    return (f"window: a query sees {left} of the keys before its own and {right} after it", *notes)


def describe_scores(scores: Scores) -> tuple[str, ...]:
    """A note on each thing that is done to scores."""
    spec, functions = scores.spec, scores.captured.functions
    notes = (
        (spec.softcap != 0.0, f"softcap: a score s becomes {spec.softcap} tanh(s / {spec.softcap})"),
        (
            spec.has_alibi,
            "alibi_slopes: scores fall by a slope of their head with the distance of query and key",
        ),
        (spec.has_sinks, "sinks: a logit of each head joins the sum of a row"),
        (
            spec.dropout_p != 0.0,
            f"dropout_p: {STEPS - kept_steps(spec.dropout_p)} of {STEPS} elements of P are dropped",
        ),
        (functions.has_score, "score_mod: a function of yours, traced into the kernel, changes scores"),
        (
            functions.has_mask,
            "mask_mod or block_mask: a function of yours, traced into the kernel, hides keys",
        ),
    )
    return tuple(note for is_there, note in notes if is_there)


def cast_by_autocast(given: dict[str, Tensor]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The tensors that autocast makes of q, k and v, without their data, and a sentence about them."""
    dtype = find_autocast_dtype(*given.values())
    if dtype is None:
        return given, ()
    tensors = {
        name: torch.empty_like(x, dtype=dtype, device="meta", requires_grad=False)
        for name, x in given.items()
    }
    names = [name for name, x in given.items() if x.dtype != dtype]
    return tensors, tuple(f"{name} is cast to {dtype}, which torch.autocast asks for" for name in names)


def of_one_launch(
    specs: dict[str, TensorSpec], problem: AttentionProblem, target: Target, requested: str | None
) -> tuple[dict[str, TensorSpec], tuple[str, ...]]:
    """What a launch of the forward pass takes of a call, and notes on it; ``problem`` is that of all columns of V."""
    if "qv" in specs:
        return specs, (NOTE_ON_QV,)
    if needs_parts(problem.head_dim_v) and takes_wide_values(problem, target, requested):
        return specs, ()
    return first_part(specs)


def first_part(specs: dict[str, TensorSpec]) -> tuple[dict[str, TensorSpec], tuple[str, ...]]:
    """The problem of one launch, and a note where V is attended to in parts."""
    v = specs["v"]
    head_dim_v = v.shape[-1]
    if not needs_parts(head_dim_v):
        return specs, ()
    widths = part_widths(head_dim_v)
    note = (
        f"the {head_dim_v} columns of v are attended to in parts of {' and '.join(map(str, widths))}, "
        "and Q K^T is computed for each"
    )
    return specs | {"v": v._replace(shape=(*v.shape[:-1], widths[0]))}, (note,)


def check_margin(sm_margin: int, target: Target, device: torch.device) -> tuple[str, ...]:
    """Raise for a margin that a launch would refuse; a note where it depends on the GPU, which is not known.

    Raises:
        ValueError: no multiprocessor is left.
    """
    if not target.assume_installed:
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        checks.check_sm_margin_fits(sm_margin, multiprocessors)
        return ()
    most = MOST_MULTIPROCESSORS[target.capability]
    major, minor = target.capability
    if sm_margin >= most:
        raise ValueError(
            f"sm_margin is {sm_margin}, allowed on GPUs of compute capability {major}.{minor}, which have at most "
            f"{most} multiprocessors: 0 to {most - 1}"
        )
    if not sm_margin:
        return ()
    return (
        f"sm_margin {sm_margin} must be less than the GPU's multiprocessors, of which it has at most {most}",
    )


def describe_copies(
    config: Config | DecodeConfig, specs: dict[str, TensorSpec], tensors: dict[str, Tensor]
) -> tuple[str, ...]:
    """What is made of the inputs before the kernel of ``config`` reads them."""
    if isinstance(config, (ReferenceConfig, TorchConfig)):
        return ()
    if isinstance(config, AmpereForwardConfig) and specs["q"].dtype == checks.FP8_DTYPE:
        return (f"q, k and v are dequantized to {config.dtype} by PyTorch",)
    reasons = ((name, copy_reason(specs[name], _address(tensors[name]))) for name in specs)
    copies = tuple(f"{name} is copied to contiguous memory: {why}" for name, why in reasons if why)
    if isinstance(config, Fp8ForwardConfig) and not config.v_rows:
        copies += ("v is transposed by PyTorch, which is faster with so many queries at this head_dim",)
    return copies


def config_of_few(
    few: few_queries.FewQueries,
    specs: tuple[TensorSpec, TensorSpec, TensorSpec],
    mask: MaskSpec,
    scores: ScoreKind,
) -> ForwardConfig:
    """Of the forward kernel that serves a dense call on a Hopper GPU as ``few`` says, which is not ``NOT_FEW``."""
    q, k, v = specs
    if q.dtype == checks.FP8_DTYPE:
        head_dims = q.shape[3], v.shape[3]
        return fp8_rules.select_for(few.e4m3_problem(head_dims, mask, is_packed=False, scores=scores))
    problem = problem_of(q, k, v, mask.causal, mask.sides, scores)
    config = select_for(
        grouped_problem(problem, q, k, few.group, few.split_rows), "hopper", HOPPER_CAPABILITY
    )
    assert isinstance(config, ForwardConfig)
    return config


def _plan_fp8(
    specs: dict[str, TensorSpec],
    mask: MaskSpec,
    options: tuple[bool, bool, bool, ScoreKind],
    target: Target,
    backend: str | None,
) -> tuple[Choice, Config]:
    """Backend and config of e4m3 tensors with a descale for each head; ``options`` are ``two_level``,
    ``exact_lse``, ``without_lse`` and ``scores`` of an ``Fp8Problem``."""
    two_level, exact_lse, without_lse, scores = options
    shapes = specs["q"].shape, specs["k"].shape, specs["v"].shape
    blocks = fp8_rules.ONE_BLOCK, fp8_rules.ONE_BLOCK, fp8_rules.ONE_BLOCK
    problem = fp8_rules.Fp8Problem(
        *shapes,
        *blocks,
        checks.FP8_OUT_DTYPE,
        mask.causal,
        v_rows=True,
        two_level=two_level,
        window=mask.sides,
        exact_lse=exact_lse,
        without_lse=without_lse,
        scores=scores,
    )
    choice = fp8_rules.choose_fp8_backend(problem, target, backend)
    if choice.backend == "hopper":
        return choice, fp8_rules.select_config(problem)
    if choice.backend == "ampere":
        dequantized = {name: spec._replace(dtype=problem.out_dtype) for name, spec in specs.items()}
        q, k, v = (dequantized[name] for name in "qkv")
        return choice, select_config(choice.backend, target.capability, q, k, v, mask.causal, mask.sides)
    return choice, ReferenceConfig(fp8=True)


def imagined_target(capability: Any) -> Target:
    """A GPU of this compute capability that is not here, with everything installed.

    Raises:
        ValueError: it is no pair of numbers.
    """
    valid = (
        isinstance(capability, tuple) and len(capability) == 2 and all(isinstance(n, int) for n in capability)
    )
    if not valid:
        raise ValueError(f"device_capability is {capability!r}, allowed: (major, minor), for instance (9, 0)")
    return Target("the given GPU", capability, assume_installed=True)


def _address(tensor: Tensor) -> int:
    """Where the tensor lies; 0, which is aligned to anything, for meta and fake tensors."""
    has_memory = type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta
    return tensor.data_ptr() if has_memory else 0


def _notes(advice: str, tensors: dict[str, Tensor]) -> tuple[str, ...]:
    notes = [advice] if advice else []
    sizes = {
        "batch": tensors["q"].shape[0],
        "seqlen_q": tensors["q"].shape[1],
        "seqlen_k": tensors["k"].shape[1],
    }
    return *notes, *(f"{name} is 0: no kernel runs" for name, size in sizes.items() if size == 0)


def _note_on_gradients(problem: BackwardProblem, target: Target, requested: str | None) -> str:
    scores = problem.scores
    if problem.k_shape[1] == 1 and not (scores.has_sinks or scores.has_dropout or scores.functions):
        return "the backward pass is PyTorch's: with one key P is 1, and scores have a gradient through the LSE alone"
    return describe_gradients(
        lambda: backward_rules.choose_backward(problem, target, requested),
        lambda backend: backward_rules.select_config(problem, backend, target.capability).name,
    )


def describe_gradients(choose: Callable[[], Choice], name_of: Callable[[str], str]) -> str:
    """A note on what the backward pass runs on, from its choice and the config of a backend by name."""
    try:
        choice = choose()
    except NotImplementedError as error:
        return f"the backward pass raises NotImplementedError: {error}"
    if choice.backend == "torch":
        return f"the backward pass runs on torch's fused attention: {choice.reason}"
    if choice.backend == "reference":
        return f"the backward pass runs on the tiled reference, which is slow: {choice.reason}"
    return f"the backward pass runs on the {KERNELS[choice.backend]} {name_of(choice.backend)}"
