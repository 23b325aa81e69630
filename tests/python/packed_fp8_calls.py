"""Calls of packed e4m3 tensors with descales on a pretended GPU: what they are given, and what is to come of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper.decode.config import DecodeConfig
from hopper_attention import explain_varlen, few_queries, flash_attn_varlen_func, varlen
from tests.python.packed_fp8_kernels import E4M3, Kernels
from tests.python.varlen_cases import Case, offsets

DESCALES = "q_descale", "k_descale", "v_descale"
Bounds = tuple[int, int]
attend: Any = flash_attn_varlen_func
explain: Any = explain_varlen
"""Of any arguments, wrong ones too."""


def draw_call(case: Case, bounds: Bounds, seed: int = 0) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k and v, and where their sequences lie; ``bounds`` are those of lengths."""
    cu_seqlens_q, cu_seqlens_k, _, _, _, used_k = case.lengths
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": used_k}
    lengths |= {"max_seqlen_q": bounds[0], "max_seqlen_k": bounds[1]}
    return [x.to(E4M3) for x in case.tensors(torch.float32, seed=seed)], lengths


def descales(how: str, case: Case) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = len(case.rooms_q), case.heads[1]
    scales = [torch.rand(shape, generator=generator) + 0.5 for _ in DESCALES]
    if how == "strided":
        scales = [torch.stack((x, x + 1), 2)[..., 0] for x in scales]
    names = {"none": (), "q": DESCALES[:1]}.get(how, DESCALES)
    given = dict(zip(DESCALES, scales, strict=True))
    return {name: scales[0] if how == "one" else given[name] for name in names}


def exact_of(
    case: Case, tensors: list[Tensor], given: dict[str, Any], **options: Any
) -> tuple[Tensor, Tensor]:
    """What float64 makes of the values that these stand for."""
    whole = [x.double() for x in tensors]
    for name, x, side in zip(DESCALES, whole, (0, 1, 1), strict=True):
        for number, spans in enumerate(case.spans() if name in given else ()):
            scale = given[name][number].double()
            x[spans[side]] *= scale.repeat_interleave(x.shape[1] // len(scale))[:, None]
    return case.oracle(*whole, **options)


def check(found: Any, exact: tuple[Tensor, Tensor], tolerance: float = 8e-3) -> None:
    out, *lse = found if isinstance(found, tuple) else (found,)
    torch.testing.assert_close(out.double(), exact[0], atol=tolerance, rtol=tolerance)
    for x in lse:
        torch.testing.assert_close(x.double(), exact[1], atol=tolerance, rtol=1e-4)


def refuse(*given: Any, **options: Any) -> Any:
    raise AssertionError("found anew")


def attend_again(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, tensors: list[Tensor], named: dict[str, Any]
) -> Any:
    """What three calls give, of which the second is kept, and the third is not to be found anew. They launch alike."""
    found, launches = [], []
    for number in range(3):
        kernels.launches.clear()
        kernels.decode.calls.clear()
        with monkeypatch.context() as patch:
            if number == 2:
                patch.setattr(varlen, "_call_operator", refuse)
            found.append(attend(*tensors, **named))
        launches.append((*kernels.launches, len(kernels.decode.calls)))
    pairs = [x if isinstance(x, tuple) else (x,) for x in found]
    assert all(torch.equal(x, y) for other in pairs[1:] for x, y in zip(pairs[0], other, strict=True))
    assert launches == launches[:1] * 3
    return found[2]


def plan_of_call(tensors: list[Tensor], named: dict[str, Any]) -> Any:
    """What ``explain_varlen`` says of a Hopper GPU."""
    return explain(*tensors, **named, device_capability=(9, 0))


def check_launches(kernels: Kernels, plan: Any) -> None:
    """The last call ran what was said of it."""
    if isinstance(plan.config, DecodeConfig):
        assert kernels.decode.loaded[-1] == plan.config
        assert kernels.launches == [] and len(kernels.decode.calls) == 1
    else:
        config, call = plan.config, kernels.calls[-1]
        steps = ["plan", "attend"] if config.v_rows else ["plan", "transpose", "attend"]
        assert kernels.launches == steps + ["merge"] * config.split and kernels.decode.calls == []
        assert call["config"] == config and config.lone_scales and bool(plan.copies) != config.v_rows
        assert (few_queries.NOTE_ON_GROUPS in plan.notes) == (config.group > 1)
        of_parts = f"{call['splits']} CTAs visit a part of a tile's keys"
        assert any(of_parts in note for note in plan.notes) == config.split == (call["splits"] > 1)
        assert (few_queries.NOTE_ON_LENGTHS in plan.notes) == config.split


def apart(x: Tensor) -> Tensor:
    """The same at an address that TMA cannot have."""
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


def moved(
    case: Case, lengths: dict[str, Any], given: dict[str, Tensor]
) -> Iterator[tuple[Case, list[Tensor], dict[str, Tensor], dict[str, Any]]]:
    """Sequences of other lengths in the same place, four times: their case, tensors and descales, and all that a call
    with these is given by name."""
    generator = torch.Generator().manual_seed(3)
    for number in range(4):
        rooms = [
            tuple(torch.tensor(x)[torch.randperm(len(x), generator=generator)].tolist())
            for x in (case.rooms_q, case.rooms_k)
        ]
        used = None if case.used_k is None else tuple(n * number // 4 for n in rooms[1])
        other = replace(case, rooms_q=rooms[0], rooms_k=rooms[1], used_k=used)
        drawn = [x.to(E4M3) for x in other.tensors(torch.float32, seed=number)]
        scales = {x: y + number / 8 for x, y in given.items()}
        places = {"cu_seqlens_q": offsets(rooms[0]), "cu_seqlens_k": offsets(rooms[1])}
        places |= {"seqused_k": other.lengths[5]}
        yield other, drawn, scales, lengths | scales | places
