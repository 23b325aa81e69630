"""Which gradients have sums of dQ in a fixed order although nobody asks for one: where that is faster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_kernels.backward.step import BackwardStep
from hopper_attention.backends import HOPPER_CAPABILITY
from hopper_attention.backward_rules import (
    FASTER_IN_ORDER,
    MANY_ELEMENTS,
    BackwardProblem,
    in_faster_order,
    packed_in_faster_order,
    select_config,
    select_for,
)
from hopper_attention.model_kernels import ModelShape, kernels_of
from hopper_attention.problem import GradientProblem
from hopper_attention.scores import ScoreKind


def problem(
    head_dim: int, batch: int, seqlen: int, heads: tuple[int, int], causal: bool = True, **changed: Any
) -> BackwardProblem:
    q_shape, k_shape = ((batch, seqlen, count, head_dim) for count in heads)
    return BackwardProblem(q_shape, k_shape, k_shape, torch.bfloat16, causal)._replace(**changed)


@pytest.mark.parametrize(
    "asked",
    [
        problem(128, 64, 256, (16, 16)),
        problem(128, 32, 512, (16, 4)),
        problem(128, 16, 1024, (16, 16)),
        problem(64, 21, 768, (32, 32)),
        problem(64, 21, 768, (32, 8)),
        problem(64, 60, 400, (32, 4)),
        problem(256, 32, 512, (8, 2)),
    ],
)
def test_many_short_sequences_have_one(asked: BackwardProblem) -> None:
    found = in_faster_order(asked)
    assert found == asked._replace(deterministic=True)
    assert "_ordered" in select_config(found, "hopper", HOPPER_CAPABILITY).name
    # What was asked for is kept.
    assert in_faster_order(found) == found


@pytest.mark.parametrize(
    "asked",
    [
        problem(128, 8, 2048, (16, 16)),
        problem(64, 16, 1024, (32, 32)),
        # Key tiles walk back over many heads.
        problem(64, 21, 768, (32, 4)),
        problem(256, 21, 768, (8, 8)),
        problem(128, 8, 512, (16, 16)),
        problem(128, 32, 512, (16, 16), causal=False),
        problem(96, 32, 512, (21, 21)),
        problem(192, 32, 512, (11, 11)),
        problem(128, 32, 512, (16, 16), has_window=True),
        problem(128, 32, 512, (16, 16), has_chunk=True),
        problem(128, 32, 512, (16, 16), scores=ScoreKind(has_softcap=True)),
        problem(128, 32, 512, (16, 16), q_shape=(32, 1024, 16, 128)),
    ],
)
def test_others_have_none(asked: BackwardProblem) -> None:
    assert in_faster_order(asked) == asked


def packed_problem(head_dim: int, **changed: Any) -> GradientProblem:
    given = {"causal": True, "is_packed": True, "keys": "usual"} | changed
    return GradientProblem(torch.bfloat16, torch.bfloat16, head_dim, head_dim, **given)


@pytest.mark.parametrize("head_dim", FASTER_IN_ORDER)
def test_many_short_packed_sequences_have_one(head_dim: int) -> None:
    asked, bound = packed_problem(head_dim), FASTER_IN_ORDER[head_dim]
    found = packed_in_faster_order(asked, MANY_ELEMENTS, (bound, bound))
    assert found == replace(asked, deterministic=True)
    assert "_ordered_varlen_stores" in select_for(found, "hopper", HOPPER_CAPABILITY).name
    assert packed_in_faster_order(found, MANY_ELEMENTS, (bound, bound)) == found
    for elements, bounds in (
        (MANY_ELEMENTS - 1, (bound, bound)),
        (MANY_ELEMENTS, (bound + 1, bound + 1)),
        (MANY_ELEMENTS, (bound - 1, bound)),
        (MANY_ELEMENTS, (bound, bound - 1)),
    ):
        assert packed_in_faster_order(asked, elements, bounds) is asked


@pytest.mark.parametrize(
    "asked",
    [
        packed_problem(96),
        packed_problem(192),
        packed_problem(128, causal=False),
        packed_problem(128, has_window=True),
        packed_problem(128, has_chunk=True),
        packed_problem(128, scores=ScoreKind(has_softcap=True)),
        packed_problem(128, scores=ScoreKind(has_sinks=True)),
        packed_problem(128, keys="few"),
    ],
)
def test_other_packed_sequences_have_none(asked: GradientProblem) -> None:
    assert packed_in_faster_order(asked, MANY_ELEMENTS, (256, 256)) is asked


def test_packed_sequences_with_few_keys_add_to_zeros() -> None:
    names = [
        select_for(
            packed_problem(128, deterministic=True, keys=keys), "hopper", HOPPER_CAPABILITY
        ).name.removeprefix("hopper_bwd_bf16_d128_causal_m64n128s2_r240_24_ordered_varlen")
        for keys in ("few", "usual", "many")
    ]
    assert names == ["_few", "_stores", "_stores"]


def test_a_model_has_the_kernels_compiled_ahead() -> None:
    model = ModelShape(torch.bfloat16, 16, 16, 128, 128)
    names = {config.name for config in kernels_of(model, "sm_90a", train=True)}
    packed = replace(packed_problem(128), deterministic=True)
    config = select_for(packed, "hopper", HOPPER_CAPABILITY)
    assert {config.name, BackwardStep("prepare", config).name, BackwardStep("finish", config).name} <= names
    assert any("bwd_bf16_d128_causal" in name and "_ordered" in name for name in names)
    assert not any("bwd_bf16_d128_full" in name and "_ordered" in name for name in names)
