"""Which gradients have sums of dQ in a fixed order although nobody asks for one: where that is faster."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hopper_attention.backends import HOPPER_CAPABILITY
from hopper_attention.backward_rules import BackwardProblem, in_faster_order, select_config
from hopper_attention.model_kernels import ModelShape, kernels_of
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


def test_a_model_has_the_kernels_compiled_ahead() -> None:
    model = ModelShape(torch.bfloat16, 16, 16, 128, 128)
    names = {config.name for config in kernels_of(model, "sm_90a", train=True)}
    assert any("bwd_bf16_d128_causal" in name and "_ordered" in name for name in names)
    assert not any("bwd_bf16_d128_full" in name and "_ordered" in name for name in names)
