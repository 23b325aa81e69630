"""A user's functions in the Hopper kernels, from their PTX without a GPU, against float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from hopper.backward.config import select_backward_config
from hopper.config import ForwardConfig
from hopper.forward.tilings import select_with_functions
from hopper_attention.block_masks import BlockTable
from hopper_attention.functions import trace_functions
from hopper_attention.reference import attention_naive
from tests.function_examples import Example, draw_example, relative_bias
from tests.hopper.on_numpy import Rules, backward_on_numpy, forward_on_numpy, packed_forward_on_numpy
from tests.hopper.test_kernels_on_numpy import EPSILON, LATE, draw, relative
from tests.hopper.test_score_rules import check
from tests.plans import Packed, plan_of


def traced(example: Example) -> Rules:
    return Rules(captured=trace_functions(example.score_mod, example.mask_mod))


def select(dtype: str, causal: bool, **options: Any) -> ForwardConfig:
    """What is shipped, with fewer keys in a tile: it compiles in a third of the time."""
    return replace(select_with_functions(dtype, 64, 64, causal, **options), tile_n=32)


def test_forward() -> None:
    example = draw_example()
    rules = traced(example)
    config = select("bfloat16", True, functions=rules.captured.functions)
    q, k, v = draw(torch.bfloat16, (40, 140), (2, 1), 64)
    out, lse = forward_on_numpy(config, q, k, v, 0.125, timing=LATE, rules=rules)
    exact, exact_lse = attention_naive(
        q, k, v, causal=True, score_mod=example.score_mod, mask_mod=example.mask_mod
    )
    check(out[0], lse[0], (exact[0], exact_lse[0]), 1e-5)


def test_rows_that_a_mask_function_empties() -> None:
    example = Example(mask_mod=lambda b, h, q_idx, kv_idx: (q_idx % 3 > 0) & (kv_idx > q_idx))
    rules = traced(example)
    config = select("float16", False, functions=rules.captured.functions)
    q, k, v = draw(torch.float16, (90, 70), (1, 1), 64)
    out, lse = forward_on_numpy(config, q, k, v, 0.125, timing=LATE, rules=rules)
    exact, exact_lse = attention_naive(q, k, v, mask_mod=example.mask_mod)
    assert bool((exact_lse[0, 0] == -math.inf)[[0, 3, 70, 89]].all())
    check(out[0], lse[0], (exact[0], exact_lse[0]))


def test_packed_sequences_count_from_0() -> None:
    q_rows, k_rows = Packed.of((20, 0, 70), behind=9), Packed.of((70, 33, 90), behind=3)
    example = relative_bias(heads=2, of_sequences=3)
    rules = traced(example)
    functions = rules.captured.functions
    config = select("bfloat16", True, layout="varlen", functions=functions)
    generator = torch.Generator().manual_seed(0)
    shapes = (q_rows.total, 2, 64), (k_rows.total, 1, 64), (k_rows.total, 1, 64)
    q, k, v = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    plan = plan_of(q_rows, k_rows, config.tile_m)
    out, lse = packed_forward_on_numpy(config, (q, k, v), plan, 4, 0.125, 2, LATE, rules=rules)
    for b in (0, 2):
        (row, rows), (key, keys) = q_rows.rows(b), k_rows.rows(b)
        parts = q[row : row + rows], k[key : key + keys], v[key : key + keys]

        def score_mod(score, _, *place, b=b):
            return example.score_mod(score, torch.tensor(b), *place)

        exact, exact_lse = attention_naive(*(x[None] for x in parts), causal=True, score_mod=score_mod)
        check(out[row : row + rows], lse[:, row : row + rows], (exact[0], exact_lse[0]), 1e-5)


def test_lists_of_blocks() -> None:
    """The table decides over the function that goes with it."""
    kinds = torch.tensor([[[[0, 2, 1], [0, 0, 0]], [[1, 0, 2], [0, 1, 0]]]], dtype=torch.int32)
    table, documents = BlockTable(kinds, 128, 128), torch.arange(300) // 70
    # E731: a lambda, as users write it.
    mask_mod = lambda b, h, q_idx, kv_idx: documents[q_idx] == documents[kv_idx]  # noqa: E731
    bias = relative_bias(heads=2).score_mod
    captured = trace_functions(bias, mask_mod)
    others = {"functions": captured.functions, "block_lists": True}
    config = select_with_functions("bfloat16", 64, 64, False, **others)
    q, k, v = draw(torch.bfloat16, (200, 290), (2, 1), 64)
    lists = table.lists((config.tile_m, config.tile_n), (1, 2, 200, 290))
    out, lse = forward_on_numpy(config, q, k, v, 0.125, 2, LATE, rules=Rules(captured=captured, lists=lists))
    exact, exact_lse = attention_naive(q, k, v, score_mod=bias, mask_mod=table.with_mask(mask_mod))
    assert bool((exact_lse[0, 0, 128:] == -math.inf).all())
    check(out[0], lse[0], (exact[0], exact_lse[0]), 1e-5)


def test_gradients() -> None:
    """Those with a softcap, of float16 and of pairs of CTAs are with lists of blocks."""
    example = draw_example()
    rules = traced(example)
    config = select_backward_config("bfloat16", 64, 64, True, functions=rules.captured.functions)
    inputs = draw(torch.bfloat16, (70, 90), (2, 1), 64)
    leaves = [x.double().requires_grad_() for x in inputs]
    dout = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1)).to(inputs[0].dtype)
    out, lse = attention_naive(*leaves, causal=True, **vars(example))
    exact = torch.autograd.grad(out, leaves, dout.double())
    given = (dout, *inputs), out.detach().to(dout.dtype), lse.detach().float()
    ours = backward_on_numpy(config, *given, 0.125, LATE, rules=rules)
    for gradient, wanted in zip(ours, exact, strict=True):
        assert relative(gradient, wanted) < 1.5 * EPSILON[dout.dtype]
