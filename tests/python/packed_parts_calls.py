"""FP8 calls on packed 16-bit tensors, and on parts, on a pretended GPU: what they are given, and what is to come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import (
    Fp8Quantization,
    explain_fp8,
    flash_attn_fp8_func,
    flash_attn_quantized_func,
    fp8,
    fp8_rules,
    packed_at_once,
    packed_parts_again,
    quantize_qkv,
)
from hopper_attention.launch.packed_fp8 import packed_problem_of
from hopper_attention.lengths import Lengths
from hopper_attention.masks import FULL_SIDES, MaskSpec
from hopper_attention.packed_quantization import quantize_packed_by_torch, with_packed_blocks
from hopper_attention.packed_quantized import PackedQuantizedQKV, RowPlaces
from hopper_attention.quantized import DEFAULT_QUANTIZATION
from hopper_attention.rotation import rotate_back
from tests.python.fp8_cases import relative, sides
from tests.python.packed_fp8_calls import Bounds, check, refuse
from tests.python.packed_parts_kernels import PartsKernels
from tests.python.varlen_cases import Case, offsets

attend: Any = flash_attn_fp8_func
attend_to_parts: Any = flash_attn_quantized_func
explain: Any = explain_fp8
"""Of any arguments, wrong ones too."""

LENGTHS = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "max_seqlen_q", "max_seqlen_k"
OF_BOTH = "softmax_scale", "causal", "return_attn_probs", "two_level_accumulation", "exact_lse", "backend"
"""Arguments of both functions."""

CALLS: dict[str, tuple[Case, Bounds]] = {
    "one list": (Case((50, 0, 33), (50, 0, 33), behind=9), (300, 300)),
    "equal": (Case((40, 40, 40), (40, 40, 40)), (64, 3000)),
    "different": (Case((50, 1, 33, 70), (60, 1, 0, 90), behind=5), (300, 260)),
    "long": (Case((90, 7, 0, 60), (95, 9, 130, 61), behind=3), (3000, 3000)),
    "used in part": (Case((70, 30), (90, 33), None, (85, 0)), (3000, 3000)),
    "one head": (Case((20, 30), (40, 33), heads=(1, 1)), (600, 2000)),
    "heads of their own": (Case((20, 30), (40, 33), heads=(2, 2)), (3000, 3000)),
}


def draw(
    name: str, head_dim: int = 64, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k and v, whose values have an offset, and where their sequences lie."""
    case, bounds = CALLS[name]
    return draw_case(replace(case, head_dims=(head_dim, head_dim)), bounds, dtype, seed, name == "one list")


def draw_case(
    case: Case, bounds: Bounds, dtype: torch.dtype = torch.bfloat16, seed: int = 0, one_list: bool = False
) -> tuple[list[Tensor], dict[str, Any]]:
    q, k, v = case.tensors(dtype, seed=seed)
    starts_q, starts_k, _, _, used_q, used_k = case.lengths
    lengths = starts_q, starts_q if one_list else starts_k, used_q, used_k, *bounds
    return [q, k, v + 1.5], dict(zip(LENGTHS, lengths, strict=True))


def parts_by_torch(tensors: list[Tensor], named: dict[str, Any]) -> PackedQuantizedQKV:
    """What a call with these arguments attends to."""
    q, k, v = tensors
    c = named.get("quantization", DEFAULT_QUANTIZATION)
    mask = MaskSpec(bool(named.get("causal", False)))
    kind = (k.shape[2], v.shape[2]), bool(named.get("two_level_accumulation", False)), mask
    return quantize_packed_by_torch(q, k, v, lengths_of(named), with_packed_blocks(c, *kind))


def lengths_of(named: dict[str, Any]) -> Lengths:
    return Lengths(*(named[name] for name in LENGTHS))


def exact_of_parts(parts: PackedQuantizedQKV, named: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What float64 makes of the values that parts stand for."""
    (starts_q, starts_k, used_q, used_k), kind = parts.lengths[:4], torch.float64
    q, k, v = (
        x.dequantize(starts, kind)
        for x, starts in zip((parts.q, parts.k, parts.v), (starts_q, starts_k, starts_k), strict=True)
    )
    c, of_rows = parts.quantization, RowPlaces.of(starts_k, None, v.shape[0]).sequence
    values = rotate_back(v.float(), c.seed).double() if c.rotate_v else v
    if parts.mean_v.numel():
        values = values + parts.mean_v[of_rows]
    rooms = (tuple(starts.diff().tolist()) for starts in (starts_q, starts_k))
    used = (None if x is None else tuple(x.tolist()) for x in (used_q, used_k))
    scale, causal = named.get("softmax_scale"), bool(named.get("causal", False))
    of_mask = {"causal": causal, **sides(named.get("window_size", (-1, -1)))}
    of_mask["attention_chunk"] = named.get("attention_chunk", 0)
    return Case(*rooms, *used).oracle(q, k, values, softmax_scale=scale, **of_mask)


def exact_of(tensors: list[Tensor], named: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The same of a call that quantizes."""
    return exact_of_parts(parts_by_torch(tensors, named), named)


def near_sources(out: Tensor, tensors: list[Tensor], named: dict[str, Any]) -> bool:
    """Whether an output is as near as FP8 is to what it would be without."""
    rooms = (tuple(named[name].diff().tolist()) for name in LENGTHS[:2])
    used = None if named["seqused_k"] is None else tuple(named["seqused_k"].tolist())
    options = {"causal": named.get("causal", False), "softmax_scale": named.get("softmax_scale")}
    exact, _ = Case(*rooms, None, used).oracle(*tensors, **options)
    return relative(out, exact) < 0.08


def parts_of(tensors: list[Tensor], named: dict[str, Any]) -> PackedQuantizedQKV:
    """Those of the fused quantizer."""
    lengths = {name: named[name] for name in LENGTHS}
    c: Fp8Quantization = named.get("quantization", DEFAULT_QUANTIZATION)
    return quantize_qkv(*tensors, quantization=c, **lengths)


def options_of(named: dict[str, Any]) -> dict[str, Any]:
    """Those of attention to parts."""
    return {name: x for name, x in named.items() if name in (*OF_BOTH, "window_size", "attention_chunk")}


def call_again(kernels: PartsKernels, monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> Any:
    """What three calls give, of which the second is kept, and the third is not to be found anew. They launch alike."""
    found, launches = list[Any](), []
    for number in range(3):
        kernels.launches.clear()
        with monkeypatch.context() as patch:
            if number == 2:
                refuse_to_find(patch)
            found.append(call())
        launches.append(tuple(kernels.launches))
    pairs = [x if isinstance(x, tuple) else (x,) for x in found]
    assert all(torch.equal(x, y) for other in pairs[1:] for x, y in zip(pairs[0], other, strict=True))
    assert launches == launches[:1] * 3
    return found[2]


def refuse_to_find(patch: pytest.MonkeyPatch) -> None:
    """Let no call that was not kept be served."""
    for name in ("attend_packed", "quantize_packed_here", "differentiable_packed_fp8"):
        patch.setattr(fp8, name, refuse)


def is_nothing_remembered() -> bool:
    return not (packed_at_once.remembered._calls or packed_parts_again.remembered._calls)


def check_call(kernels: PartsKernels, found: Any, tensors: list[Tensor], named: dict[str, Any]) -> None:
    """Results of the last call, and that it ran what is said of it."""
    out, *lse = found if isinstance(found, tuple) else (found,)
    check(found, exact_of(tensors, named))
    assert near_sources(out, tensors, named) and out.dtype == tensors[0].dtype
    smooth_v = named.get("quantization", DEFAULT_QUANTIZATION).smooth_v
    assert kernels.launches == ["mean"] * smooth_v + ["quantize", "plan", "attend"]
    plan = explain(*tensors, **named, device_capability=(9, 0))
    check_attention(kernels, plan.attention.config, named, tensors[0], bool(lse))


def check_call_of_parts(
    kernels: PartsKernels, found: Any, parts: PackedQuantizedQKV, named: dict[str, Any]
) -> None:
    """The same of attention to parts."""
    out, *lse = found if isinstance(found, tuple) else (found,)
    check(found, exact_of_parts(parts, named))
    assert out.dtype == parts.dtype and kernels.launches == ["plan", "attend"]
    flags = bool(named.get("causal", False)), bool(named.get("two_level_accumulation", False))
    problem = packed_problem_of(parts, *flags, FULL_SIDES, without_lse=not lse)
    check_attention(kernels, fp8_rules.select_for(problem), named, parts.q.data, bool(lse))


def check_attention(
    kernels: PartsKernels, config: Any, named: dict[str, Any], q: Tensor, has_lse: bool
) -> None:
    call, scale = kernels.calls[-1], named.get("softmax_scale")
    assert call["config"] == config and call["lse"].shape == (q.shape[1], len(q) if has_lse else 0)
    assert call["scale"] == (q.shape[2] ** -0.5 if scale is None else scale)
    smooth_v = named.get("quantization", DEFAULT_QUANTIZATION).smooth_v
    assert (call["mean"].shape[2] > 0) == smooth_v


def moved(tensors: list[Tensor], named: dict[str, Any], number: int) -> None:
    """Let sequences have other lengths, and q, k and v other numbers, in the same memory."""
    q, _, v = tensors
    generator = torch.Generator().manual_seed(number)
    starts = [named[name] for name in LENGTHS[:2]]
    behind = tuple(len(x) - int(of_x[-1]) for x, of_x in zip((q, v), starts, strict=True))
    rooms = [x.diff()[torch.randperm(len(x) - 1, generator=generator)] for x in starts]
    for x, of_x in zip(starts, rooms, strict=True):
        x.copy_(offsets(tuple(of_x.tolist())))
    if starts[0] is starts[1]:
        rooms[0] = rooms[1]
    if named["seqused_k"] is not None:
        named["seqused_k"].copy_(rooms[1] * number // 4)
    used = None if named["seqused_k"] is None else tuple(named["seqused_k"].tolist())
    heads, head_dims = (q.shape[1], v.shape[1]), (q.shape[2], v.shape[2])
    of_q, of_k = (tuple(x.tolist()) for x in rooms)
    case = Case(of_q, of_k, None, used, min(behind), heads, head_dims)
    for x, drawn in zip(tensors, case.tensors(q.dtype, seed=number), strict=True):
        x.copy_(drawn)
    v.add_(number)


def make_known(name: str = "long", **options: Any) -> tuple[list[Tensor], dict[str, Any]]:
    """Tensors and other arguments of calls that were made twice, of both functions."""
    tensors, named = draw(name)
    named |= options
    for _ in range(2):
        attend(*tensors, **named)
        attend_to_parts(parts_of(tensors, named), **options_of(named))
    return tensors, named


def wide(x: Tensor) -> Tensor:
    """The same rows, further apart."""
    return torch.zeros(len(x), 2, *x.shape[1:], dtype=x.dtype)[:, 1].copy_(x)


def launched(kernels: PartsKernels, call: Any, tensors: list[Tensor], named: dict[str, Any]) -> Any:
    """Results of a call, whose launches alone are noted then."""
    kernels.launches.clear()
    return call(*tensors, **named)
