"""The kernels that a model needs, from its Hugging Face config: what ``compile --for-model`` compiles."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch

from cute_kernels.ampere.config import ARCH_OF_CAPABILITY
from cute_kernels.backward.step import BackwardStep
from cute_kernels.launches.config import LaunchesConfig
from cute_kernels.plan.config import PlanConfig
from cute_kernels.problem import DENSE, VARLEN
from cute_kernels.rotation.config import RotationConfig
from hopper.backward.config import BackwardConfig, can_walk_back, gains_by_clearing_ahead
from hopper.compile import HOPPER_ARCH
from hopper.config import ForwardConfig
from hopper.decode.config import DecodeConfig
from hopper_attention import backward_rules, forward_rules
from hopper_attention.backends import HOPPER_CAPABILITY, KERNELS, Target
from hopper_attention.backward_rules import BackwardProblem, Division
from hopper_attention.checks import DTYPE_NAMES, TensorSpec, check_qkv
from hopper_attention.decode_rules import in_clusters, select_decode
from hopper_attention.few_packed_queries import find_few_packed
from hopper_attention.few_queries import NOT_FEW, FewQueries, contiguous_spec, find_few
from hopper_attention.few_queries_times import MOST_SPLITS
from hopper_attention.forward_rules import ReferenceConfig, choose_for, grouped_problem
from hopper_attention.head_parts import with_all_parts, with_head_parts
from hopper_attention.kvcache_plan import explain_kvcache
from hopper_attention.launch.append import append_facts, select_append_config
from hopper_attention.launch.split_forward import combine_config_of
from hopper_attention.masks import FULL_SIDES, MaskSpec, Sides
from hopper_attention.problem import (
    USUAL_KEYS,
    AttentionProblem,
    GradientProblem,
    PackedKeys,
    length_bounds,
)
from hopper_attention.scores import ScoreKind
from hopper_attention.tile_turns import may_have_group
from hopper_attention.torch_rules import TorchConfig
from hopper_attention.visit_pieces import may_divide_visits

PAGE_SIZES = (0, 16, 64, 128, 256)
"""Of caches: 0 is one without pages."""

ROTARY_FIELDS = ("rope_theta", "rope_parameters", "rope_scaling")
"""Of a config whose model rotates queries and keys, one or the other."""

DRAFTS, PART_OF_A_PROMPT = (4, 8), 64
"""Queries a sequence where tokens are guessed ahead, and of a prompt that comes in parts."""

CHUNKS = {1: None, **dict.fromkeys((*DRAFTS, PART_OF_A_PROMPT)), 128: True, 1024: None}
"""Queries a sequence, and pack_gqa: a step of decoding, drafts, short chunks of a prompt, and a long one."""


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides on its attention kernels.

    Attributes:
        dtype: of its weights, torch.float16 or torch.bfloat16.
        heads, kv_heads, head_dim, head_dim_v: of a layer.
        causal: the masks of its layers: True of a decoder.
        window: keys that a query sees, with its own, of layers with a sliding window; 0: there is none.
        chunk: keys of a chunk, of layers with chunked attention; 0: there is none.
        softcap: that of scores; 0 is none.
        has_sinks: whether heads have a logit that has no key.
        has_rotary: whether queries and keys are rotated by their positions.
    """

    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    causal: tuple[bool, ...] = (True,)
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    has_rotary: bool = False

    def __post_init__(self) -> None:
        check_qkv(*self.specs(64))

    def specs(self, seqlen: int) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
        """q, k and v of a sequence."""
        columns = (
            (self.heads, self.head_dim),
            (self.kv_heads, self.head_dim),
            (self.kv_heads, self.head_dim_v),
        )
        q, k, v = (
            TensorSpec.of(torch.empty(1, seqlen, *of, dtype=self.dtype, device="meta")) for of in columns
        )
        return q, k, v

    @property
    def scores(self) -> ScoreKind:
        return ScoreKind(self.softcap != 0.0, has_sinks=self.has_sinks)

    @property
    def masks(self) -> tuple[tuple[bool, Sides], ...]:
        """Causal and the sides of every mask: a layer with a window has none on a short sequence."""
        sides: list[Sides] = [FULL_SIDES]
        if self.window:
            sides.append((self.window - 1, -1, 0))
        if self.chunk:
            sides.append((-1, -1, self.chunk))
        return tuple(product(self.causal, sides))


def read_model(path: Path) -> ModelShape:
    """The shape of a model from its ``config.json``, or the folder that has one.

    Raises:
        OSError: there is no such file.
        ValueError: it is no config of a model with attention that has kernels.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"for-model is {str(path)!r}, which is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"for-model is {str(path)!r}, allowed: a config.json, which is a JSON object")
    return shape_of(config)


def shape_of(config: dict[str, Any]) -> ModelShape:
    """The shape from what a config says; that of a model for text and pictures has its text in ``text_config``.

    Raises:
        ValueError: a size is missing or not allowed.
    """
    text = config | config.get("text_config", {})
    heads = _size(text, "num_attention_heads", "n_head")
    latent = text.get("qk_nope_head_dim")
    if latent:
        head_dim, kv_heads = latent + text["qk_rope_head_dim"], heads
        head_dim_v = text["v_head_dim"]
    else:
        head_dim = head_dim_v = text.get("head_dim") or _size(text, "hidden_size", "n_embd") // heads
        kv_heads = text.get("num_key_value_heads") or heads
    names = text.get("architectures") or ()
    is_decoder = any(name.endswith(("ForCausalLM", "ForConditionalGeneration")) for name in names)
    kinds = text.get("layer_types") or ()
    has_window = text.get("use_sliding_window", True) and (not kinds or "sliding_attention" in kinds)
    return ModelShape(
        dtype=_dtype(text),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        causal=(True,) if is_decoder else (False, True) if not names else (False,),
        window=(text.get("sliding_window") or 0) if has_window else 0,
        chunk=text.get("attention_chunk_size") or 0,
        softcap=text.get("attn_logit_softcapping") or 0.0,
        has_sinks=str(text.get("model_type", "")).startswith("gpt_oss"),
        has_rotary=any(text.get(name) for name in ROTARY_FIELDS),
    )


def _size(config: dict[str, Any], *names: str) -> int:
    """The first of these that the config has."""
    for name in names:
        if isinstance(config.get(name), int) and config[name] > 0:
            return int(config[name])
    raise ValueError(f"the config has no {' or '.join(names)}, allowed: that of a model with attention")


def _dtype(config: dict[str, Any]) -> torch.dtype:
    """That of the weights; bfloat16 where there is none or it is float32, which no kernel takes."""
    given = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    names = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    return names.get(given, torch.bfloat16)


def kernels_of(model: ModelShape, arch: str, train: bool = False) -> tuple[Any, ...]:
    """The configs of a model's kernels on GPUs of ``arch``: dense and packed prefill, rotary embedding by
    ``apply_rotary``, a key/value cache for a decoder, and with ``train`` the backward passes. None is there twice.

    Raises:
        ValueError: there are no kernels for ``arch``.
    """
    capability = next((c for c, name in ARCH_OF_CAPABILITY.items() if name == arch), (9, 0))
    target = Target("the given GPU", capability, assume_installed=True)
    found: list[Any] = [PlanConfig(arch)]
    if model.has_rotary:
        found.append(RotationConfig(arch, DTYPE_NAMES[model.dtype], DTYPE_NAMES[model.dtype]))
    for problem in problems_of(model):
        choice = choose_for(problem, target, None)
        found.append(forward_rules.select_for(problem, choice.backend, capability))
        if train:
            for keys in get_args(PackedKeys) if problem.is_packed else (USUAL_KEYS,):
                found += backward_of(problem, target, keys)
    if train:
        found += strips_of(model, target)
        found += of_one_tile(model, target)
        found += of_many_short(model, target)
        found += of_shared_keys(model, target)
        found += of_divided_heads(model, target)
        found += of_divided_visits(model, target)
        found += [LaunchesConfig()] if capability == HOPPER_CAPABILITY else []
    if True in model.causal:
        found += serving_of(model, capability)
        found += few_queries_of(model) if capability == HOPPER_CAPABILITY else ()
    without_kernel = ReferenceConfig, TorchConfig
    return tuple({c.name: c for c in found if not isinstance(c, without_kernel)}.values())


def problems_of(model: ModelShape) -> Iterator[AttentionProblem]:
    """Every problem of a forward pass, dense of every length and packed."""
    q, _, v = model.specs(64)
    flat_q, flat_v = (TensorSpec(x.shape[1:], x.strides[1:], x.dtype, x.device) for x in (q, v))
    for causal, sides in model.masks:
        for seqlen in length_bounds():
            specs = model.specs(min(seqlen, 2**20))
            problem = forward_rules.problem_of(*specs, causal, sides, model.scores)
            # Prompts of a batch have more tiles than one, and one that is attended to in parts has fewer.
            for is_many in (False, True):
                yield from _with_groups(replace(problem, has_many_tiles=is_many), model)
        window = sides != FULL_SIDES, sides[2] > 0
        packed = forward_rules.packed_problem_of(flat_q, flat_v, causal, window, model.scores)
        yield from _with_groups(packed, model)


def _with_groups(problem: AttentionProblem, model: ModelShape) -> Iterator[AttentionProblem]:
    """A problem, and the same with the tiles that serve where they save turns."""
    group = model.heads // model.kv_heads
    yield problem
    if may_have_group(problem, group):
        yield replace(problem, group=group)


def backward_of(problem: AttentionProblem, target: Target, keys: PackedKeys = USUAL_KEYS) -> tuple[Any, ...]:
    """The kernels of the gradients of a problem; none where the reference gives them. ``keys`` says how long packed
    sequences are; where there are sinks, few keys have no kernels of their own."""
    p = problem
    gradient = GradientProblem(
        p.dtype,
        p.out_dtype,
        p.head_dim,
        p.head_dim_v,
        p.causal,
        has_window=p.has_window,
        has_chunk=p.has_chunk,
        is_packed=p.is_packed,
        scores=p.scores,
        keys=USUAL_KEYS if keys == "few" and p.scores.has_sinks else keys,
    )
    choice = backward_rules.choose_for(gradient, target, None)
    if choice.backend not in KERNELS:
        return ()
    config = backward_rules.select_for(gradient, choice.backend, target.capability)
    return BackwardStep("prepare", config), config, BackwardStep("finish", config)


def of_special_problems(
    model: ModelShape,
    target: Target,
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
    special: Callable[[BackwardProblem, Sides], BackwardProblem],
) -> Iterator[Any]:
    """The configs of gradients of these shapes of q, k and v, for each mask of which ``special`` makes another problem
    that a Hopper kernel serves."""
    q, k, v = shapes
    for causal, sides in model.masks:
        options = model.dtype, causal, False, sides != FULL_SIDES, model.scores
        usual = BackwardProblem(q, k, v, *options)
        asked = special(usual, sides)
        choice = backward_rules.choose_for(asked.kind, target, None)
        if asked != usual and choice.backend == "hopper":
            yield backward_rules.select_for(asked.kind, choice.backend, target.capability)


def strips_of(model: ModelShape, target: Target) -> Iterator[Any]:
    """The kernels of the gradients of a window that is so narrow that it has kernels of its own, of long sequences."""
    q, k, v = (x.shape for x in model.specs(2**16))
    for config in of_special_problems(model, target, (q, k, v), backward_rules.in_strips):
        yield from (BackwardStep("prepare", config), config)


def of_one_tile(model: ModelShape, target: Target) -> Iterator[Any]:
    """The kernels of the gradients of sequences whose keys are one tile."""
    # As many heads as any walk is served with.
    batch = backward_rules.LONGEST_WALKS[0][0]
    q, k, v = ((batch, *x.shape[1:]) for x in model.specs(64))
    yield from of_special_problems(
        model, target, (q, k, v), lambda asked, _: backward_rules.in_one_tile(asked)
    )


def of_many_short(model: ModelShape, target: Target) -> Iterator[Any]:
    """The kernels of the gradients of short sequences, dense and packed, that are so many that their sums have an
    order."""
    batch = backward_rules.MANY_ELEMENTS // 256
    q, k, v = ((batch, *x.shape[1:]) for x in model.specs(256))
    for layout in (DENSE, VARLEN):
        in_order = partial(_in_faster_order, may_walk_back=layout == DENSE)
        for config in of_special_problems(model, target, (q, k, v), in_order):
            config = replace(config, layout=layout)
            yield from (BackwardStep("prepare", config), config)


def of_shared_keys(model: ModelShape, target: Target) -> Iterator[Any]:
    """The kernels of the gradients of as many query heads a head of K and V as are visited together."""
    q, k, v = (x.shape for x in model.specs(2048))
    for causal, sides in model.masks:
        problem = BackwardProblem(q, k, v, model.dtype, causal, False, sides != FULL_SIDES, model.scores)
        choice = backward_rules.choose_for(problem.kind, target, None)
        if choice.backend in KERNELS:
            config = backward_rules.select_for(problem.kind, choice.backend, target.capability)
            yield from (config,) if isinstance(config, BackwardConfig) and config.walks_back else ()


def of_divided_heads(model: ModelShape, target: Target) -> Iterator[Any]:
    """The kernels of the gradients of so few keys that the query heads of a head of K and V are divided, dense and
    packed."""
    many = -(-backward_rules.MANY_ELEMENTS // (512 * model.heads * model.head_dim))
    for batch, seqlen in ((1, 384), (1, 1024), (many, 512)):
        q, k, v = ((batch, *x.shape[1:]) for x in model.specs(seqlen))
        for config in of_special_problems(model, target, (q, k, v), _divided_in_faster_order):
            if config.divides_heads:
                # Of other lengths a part has other heads.
                walks = (False, True) if can_walk_back(config) else (False,)
                for each in (replace(config, walks_back=back) for back in walks):
                    yield from (each, BackwardStep("finish", each))
    q, k, v = ((many, *x.shape[1:]) for x in model.specs(512))
    for in_order in (False, True):
        all_parts = partial(_with_all_parts, in_order=in_order)
        for config in of_special_problems(model, target, (q, k, v), all_parts):
            if config.divides_heads:
                packed = replace(config, layout=VARLEN, walks_back=False)
                clearing = (replace(packed, clears_ahead=True),) if gains_by_clearing_ahead(packed) else ()
                for each in (packed, *clearing):
                    yield from (each, BackwardStep("finish", each))


def _in_faster_order(problem: BackwardProblem, sides: Sides, may_walk_back: bool) -> BackwardProblem:
    return backward_rules.in_faster_order(problem, may_walk_back)


def _divided_in_faster_order(problem: BackwardProblem, sides: Sides) -> BackwardProblem:
    return with_head_parts(backward_rules.in_faster_order(problem), sides)


def _with_all_parts(problem: BackwardProblem, sides: Sides, in_order: bool) -> BackwardProblem:
    """As packed sequences may be served, whose lengths say into how many parts."""
    ordered = backward_rules.in_faster_order(problem, may_walk_back=False) if in_order else problem
    return with_all_parts(ordered)


def of_divided_visits(model: ModelShape, target: Target) -> Iterator[Any]:
    """The kernels of the gradients of so few key tiles that CTAs share what some of them visit."""
    q, k, v = (x.shape for x in model.specs(1024))
    for config in of_special_problems(model, target, (q, k, v), _with_any_division):
        yield from (config, BackwardStep("finish", config))


def _with_any_division(problem: BackwardProblem, _: Sides) -> BackwardProblem:
    return problem._replace(division=Division(0, 1, 2)) if may_divide_visits(problem) else problem


def serving_of(model: ModelShape, capability: tuple[int, int]) -> Iterator[Any]:
    """The kernels of a key/value cache: steps and chunks of prompts, with and without pages, and what writes to it."""
    target = Target("the given GPU", capability, assume_installed=True)
    # A window as long as the cache hides nothing, and is none.
    capacity = -(-max(4096, 2 * model.window, 2 * model.chunk) // 4096) * 4096
    for page, (seqlen_q, pack_gqa) in product(PAGE_SIZES, CHUNKS.items()):
        rows = (4 * capacity // page, page) if page else (4, capacity)
        like: dict[str, Any] = {"dtype": model.dtype, "device": "meta"}
        k = torch.empty(*rows, model.kv_heads, model.head_dim, **like)
        v = torch.empty(*rows, model.kv_heads, model.head_dim_v, **like)
        q = torch.empty(4, seqlen_q, model.heads, model.head_dim, **like)
        lengths = torch.empty(4, dtype=torch.int32, device="meta")
        table = torch.empty(4, capacity // page, dtype=torch.int32, device="meta") if page else None
        sinks = torch.empty(model.heads, dtype=torch.float32, device="meta") if model.has_sinks else None
        for causal, (left, right, chunk) in model.masks:
            if causal:
                plan = explain_kvcache(
                    q,
                    k,
                    v,
                    cache_seqlens=lengths,
                    page_table=table,
                    causal=True,
                    window_size=(left, right),
                    attention_chunk=chunk,
                    softcap=model.softcap,
                    pack_gqa=pack_gqa,
                    sinks=sinks,
                    device_capability=capability,
                )
                yield plan.config
                if isinstance(plan.config, ForwardConfig) and plan.config.split:
                    yield PlanConfig(HOPPER_ARCH, in_parts=True)
                    for parts in (2, MOST_SPLITS):
                        yield combine_config_of(plan.config, parts)
                if isinstance(plan.config, DecodeConfig):
                    yield from in_clusters(plan.config, model.kv_heads)
        new = k.new_empty(4, seqlen_q, *k.shape[2:]), v.new_empty(4, seqlen_q, *v.shape[2:])
        yield select_append_config(append_facts(*new, k, v, table), target)


def few_queries_of(model: ModelShape) -> Iterator[Any]:
    """The Hopper kernels of steps of decoding without a key/value cache of ours: dense, and of packed sequences, of a
    query each, of some, and of parts of a prompt."""
    batch, keys = 4, 4096
    bounds = TensorSpec((batch + 1,), (1,), torch.int32, torch.device("meta"))
    for queries, (causal, sides) in product((1, *DRAFTS, PART_OF_A_PROMPT), model.masks):
        mask = MaskSpec(causal, *sides)
        of_q, of_k, of_v = model.specs(1)
        q, k, v = _with_rows(of_q, queries), _with_rows(of_k, keys), _with_rows(of_v, keys)
        dense = forward_rules.problem_of(q, k, v, causal, sides, model.scores)
        few = find_few(q, k, v, mask, model.scores, 0)
        yield from _kernels_of(few, grouped_problem(dense, q, k, few.group, few.split_rows), model)
        packed = _without_batch(_with_rows(of_q, batch * queries)), _without_batch(k), _without_batch(v)
        window = sides != FULL_SIDES, sides[2] > 0
        of_packed = forward_rules.packed_problem_of(packed[0], packed[2], causal, window, model.scores)
        lengths = bounds, bounds, None, None
        few = find_few_packed(packed, lengths, (queries, keys), mask, model.scores, 0)
        of_packed = replace(of_packed, group=few.group, split_rows=few.split_rows)
        yield from _kernels_of(few, of_packed, model)


def _kernels_of(few: FewQueries, problem: AttentionProblem, model: ModelShape) -> Iterator[Any]:
    """Those of a call that ``few`` serves; none where ``problem`` is served as any other."""
    if few.call is not None:
        config = select_decode(few.call)
        yield from (config, *in_clusters(config, model.kv_heads))
    elif few != NOT_FEW:
        of_forward = forward_rules.select_for(problem, "hopper", HOPPER_CAPABILITY)
        yield of_forward
        if few.splits > 1 and isinstance(of_forward, ForwardConfig):
            yield combine_config_of(of_forward, few.splits)
            yield from [PlanConfig(HOPPER_ARCH, in_parts=True)] if problem.is_packed else ()


def _with_rows(x: TensorSpec, rows: int) -> TensorSpec:
    """Of a sequence of so many, from that of another length."""
    return contiguous_spec((1, rows, *x.shape[2:]), x.dtype, x.device)


def _without_batch(x: TensorSpec) -> TensorSpec:
    return x._replace(shape=x.shape[1:], strides=x.strides[1:])
