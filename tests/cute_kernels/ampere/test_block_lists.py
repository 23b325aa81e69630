"""The kernels without WGMMA that walk by the lists of a block mask, from their PTX without a GPU, against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cute_kernels.ampere.backward.config import select_ampere_backward_config
from cute_kernels.ampere.config import select_ampere_forward_config, validate_ampere_forward_config
from hopper_attention.block_masks import BlockTable, is_divided
from hopper_attention.functions import trace_functions
from hopper_attention.reference import attention_naive
from tests.cute_kernels.ampere.test_backward_on_numpy import SMALL
from tests.function_examples import relative_bias
from tests.hopper.on_numpy import Rules, ampere_forward_on_numpy, backward_on_numpy
from tests.hopper.test_block_lists import SEEN_BY_HEADS, by_documents
from tests.hopper.test_kernels_on_numpy import EPSILON, LATE, draw, relative
from tests.hopper.test_score_rules import check


def test_forward() -> None:
    table, block = BlockTable(torch.tensor([SEEN_BY_HEADS], dtype=torch.int32), 64, 48), (64, 48)
    plain = replace(select_ampere_forward_config("bfloat16", 64, 64, False, "sm_86"), tile_m=64, tile_n=32)
    validate_ampere_forward_config(plain)
    tile, bias = (plain.tile_m, plain.tile_n), relative_bias(heads=2).score_mod
    assert not is_divided(block, tile)
    visible = table.with_mask(by_documents)
    captured = trace_functions(bias, visible)
    config = replace(plain, functions=captured.functions, block_lists=True)
    q, k, v = draw(torch.bfloat16, (230, 180), (2, 1), 64)
    rules = Rules(captured=captured, lists=table.lists(tile, (1, 2, 230, 180)))
    out, lse = ampere_forward_on_numpy(config, q, k, v, 0.125, timing=LATE, rules=rules)
    exact, exact_lse = attention_naive(q, k, v, score_mod=bias, mask_mod=visible)
    assert bool((exact_lse[0, 1, 128:192] == -math.inf).all())
    check(out[0], lse[0], (exact[0], exact_lse[0]), 1e-5)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "lengths", "block", "is_ordered"),
    [("bfloat16", 64, (170, 250), (64, 128), False), ("float16", 64, (300, 230), (90, 64), True)],
)
def test_gradients(
    dtype: str, head_dim: int, lengths: tuple[int, int], block: tuple[int, int], is_ordered: bool
) -> None:
    table, heads = BlockTable(torch.tensor([SEEN_BY_HEADS], dtype=torch.int32), *block), (2, 1)
    plain = select_ampere_backward_config(dtype, head_dim, head_dim, False, "sm_86", is_ordered)
    # Tiles so small that no query sees one of them.
    plain = replace(plain, **vars(SMALL))
    tile, bias = (plain.tile_m, plain.tile_n), relative_bias(heads=2).score_mod
    visible = table.with_mask(by_documents)
    captured = trace_functions(bias, by_documents if is_divided(block, tile) else visible)
    config = replace(plain, functions=captured.functions, block_lists=True)
    lists = table.query_lists(tile, (1, 2, *lengths), config.least_blocks)
    inputs = draw(getattr(torch, dtype), lengths, heads, head_dim)
    leaves = [x.double().requires_grad_() for x in inputs]
    dout = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1)).to(inputs[0].dtype)
    out, lse = attention_naive(*leaves, score_mod=bias, mask_mod=visible)
    exact = torch.autograd.grad(out, leaves, dout.double())
    given = (dout, *inputs), out.detach().to(dout.dtype), lse.detach().float()
    rules = Rules(captured=captured, lists=lists)
    ours = backward_on_numpy(config, *given, head_dim**-0.5, LATE, rules=rules)
    for gradient, wanted in zip(ours, exact, strict=True):
        assert relative(gradient, wanted) < 1.5 * EPSILON[dout.dtype]
