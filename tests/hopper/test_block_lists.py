"""The backward kernels that walk by the lists of a block mask, from their PTX without a GPU, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hopper.backward.config import BackwardConfig, select_backward_config
from hopper_attention.block_masks import BlockTable, is_divided
from hopper_attention.functions import CapturedFunctions, trace_functions
from hopper_attention.reference import attention_naive
from tests.function_examples import relative_bias
from tests.hopper.on_numpy import Rules, backward_on_numpy
from tests.hopper.test_kernels_on_numpy import EPSILON, LATE, draw, relative

TILE = 64, 128
SEEN_BY_HEADS = [
    [[0, 2, 0, 0], [1, 0, 0, 0], [2, 1, 0, 0], [0, 2, 0, 0]],
    [[0, 0, 2, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]],
]
"""HIDDEN, PARTLY_SEEN and SEEN blocks, of which no query of either head sees the keys of the last column, and the
queries of a row see no key. In hidden blocks, and in some part of seen ones, the mask function says the opposite."""

CASES: list[tuple[str, int, tuple[int, int], tuple[int, int], tuple[int, int], dict[str, Any]]] = [
    ("float16", 64, (400, 290), (128, 256), (2, 2), {"softcap": True}),
    ("bfloat16", 64, (330, 350), (100, 96), (2, 1), {"ordered": True}),
    ("float16", 192, (210, 400), (64, 128), (2, 1), {"ordered": True}),
]


def by_documents(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx // 70 == kv_idx // 70) | (kv_idx % 7 == 3)


def config_and_functions(
    dtype: str, head_dim: int, table: BlockTable, options: dict[str, Any]
) -> tuple[BackwardConfig, CapturedFunctions]:
    """The kernel's, with a bias."""
    mask_mod = by_documents if is_divided(table.block, TILE) else table.with_mask(by_documents)
    captured = trace_functions(relative_bias(heads=2).score_mod, mask_mod)
    fields = {"functions": captured.functions, "block_lists": True, **options}
    return select_backward_config(dtype, head_dim, head_dim, False, **fields), captured


@pytest.mark.parametrize(("dtype", "head_dim", "lengths", "block", "heads", "options"), CASES)
def test_gradients(
    dtype: str,
    head_dim: int,
    lengths: tuple[int, int],
    block: tuple[int, int],
    heads: tuple[int, int],
    options: dict[str, Any],
) -> None:
    table = BlockTable(torch.tensor([SEEN_BY_HEADS], dtype=torch.int32), *block)
    config, captured = config_and_functions(dtype, head_dim, table, options)
    lists = table.query_lists(TILE, (1, heads[0], *lengths), config.least_blocks)
    softcap = 1.5 * config.softcap
    inputs = draw(getattr(torch, dtype), lengths, heads, head_dim)
    leaves = [x.double().requires_grad_() for x in inputs]
    dout = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1)).to(inputs[0].dtype)
    functions = {"score_mod": relative_bias(heads=2).score_mod, "mask_mod": table.with_mask(by_documents)}
    out, lse = attention_naive(*leaves, softcap=softcap, **functions)
    exact = torch.autograd.grad(out, leaves, dout.double())
    given = (dout, *inputs), out.detach().to(dout.dtype), lse.detach().float()
    rules = Rules(softcap, captured=captured, lists=lists)
    dq, dk, dv = backward_on_numpy(config, *given, head_dim**-0.5, LATE, rules=rules)
    for gradient, wanted in zip((dq, dk, dv), exact, strict=True):
        assert relative(gradient, wanted) < 1.5 * EPSILON[dout.dtype]
    unseen = ~exact[2].any(-1)
    assert unseen.any() and not dk[unseen].any() and not dv[unseen].any()


def test_the_config_needs_a_mask_function_and_no_other_mask() -> None:
    functions = trace_functions(None, by_documents).functions
    for others in ({"causal": True}, {"window": True}, {"layout": "varlen"}, {"functions": relative_only()}):
        fields = {"causal": False, "functions": functions, **others}
        with pytest.raises(
            ValueError, match=r"block_lists is True with causal=.*, allowed: False, False and"
        ):
            select_backward_config("bfloat16", 64, 64, block_lists=True, **fields)


def relative_only() -> Any:
    return trace_functions(relative_bias().score_mod, None).functions
