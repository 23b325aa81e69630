"""Merging of partial results against attention over all keys, in float64."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import flash_attn_combine
from hopper_attention.reference import attention_naive

OPS = torch.ops.hopper_attention


def parts_of(splits: int, batch: int = 2, seqlen: int = 5, heads: int = 4, dv: int = 24) -> list[Tensor]:
    """out and lse of parts of the keys, and those of all keys in float64."""
    torch.manual_seed(splits)
    q, k, v = (torch.randn(batch, n, heads, d) for n, d in ((seqlen, 16), (3 * splits, 16), (3 * splits, dv)))
    found = [attention_naive(q, *(x[:, 3 * i : 3 * i + 3] for x in (k, v))) for i in range(splits)]
    out, lse = (torch.stack(x).float() for x in zip(*found, strict=True))
    whole, whole_lse = attention_naive(q, k, v)
    return [out, lse.transpose(2, 3), whole, whole_lse.transpose(1, 2)]


@pytest.mark.parametrize("splits", [1, 2, 5, 17])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_parts_make_the_whole(splits: int, dtype: torch.dtype | None) -> None:
    out_partial, lse_partial, exact, exact_lse = parts_of(splits)
    out, lse = flash_attn_combine(out_partial, lse_partial, out_dtype=dtype)
    assert out.dtype == (dtype or torch.float32) and lse.dtype == torch.float32
    assert out.shape == exact.shape and lse.shape == exact_lse.shape
    step = {torch.float16: 1e-3, torch.bfloat16: 8e-3}.get(dtype, 3e-6)
    assert (out - exact).abs().max() <= step * exact.abs().max()
    assert (lse - exact_lse).abs().max() <= 1e-5


def test_parts_of_any_strides_and_packed_rows() -> None:
    out_partial, lse_partial, _, _ = parts_of(3)
    wanted, wanted_lse = flash_attn_combine(out_partial, lse_partial)
    room = torch.full((6, 2, 4, 5, 40), math.nan).transpose(2, 3)[:3, ..., :24]
    room.copy_(out_partial)
    turned = lse_partial.transpose(2, 3).contiguous().transpose(2, 3)
    for one, other in zip(flash_attn_combine(room, turned), (wanted, wanted_lse), strict=True):
        assert torch.equal(one, other)
    out, lse = flash_attn_combine(out_partial.flatten(1, 2), lse_partial.flatten(1, 2))
    assert torch.equal(out, wanted.flatten(0, 1)) and torch.equal(lse, wanted_lse.flatten(0, 1))


def test_parts_without_keys_count_nothing() -> None:
    out_partial, lse_partial, _, _ = parts_of(4)
    wanted, wanted_lse = flash_attn_combine(out_partial[1:3].contiguous(), lse_partial[1:3].contiguous())
    lse_partial[0], out_partial[0] = -math.inf, math.nan
    lse_partial[3], out_partial[3] = -math.inf, math.inf
    lse_partial[:, 1, 2], wanted[1, 2], wanted_lse[1, 2] = -math.inf, 0.0, -math.inf
    out, lse = flash_attn_combine(out_partial, lse_partial)
    assert torch.allclose(out, wanted, atol=1e-6) and torch.allclose(lse, wanted_lse, atol=1e-6)


def test_large_and_small_sums() -> None:
    lse_partial = torch.tensor([-1e4, 3e3, 3e3 - 200.0])[:, None, None]
    out_partial = torch.tensor([1.0, 2.0, 4.0])[:, None, None, None].expand(3, 1, 1, 8)
    out, lse = flash_attn_combine(out_partial, lse_partial)
    assert torch.equal(out, torch.full((1, 1, 8), 2.0)) and torch.equal(lse, torch.full((1, 1), 3e3))


def test_out_is_written_and_the_lse_left_out() -> None:
    out_partial, lse_partial, exact, _ = parts_of(3)
    room = torch.full((2, 5, 4, 32), math.nan, dtype=torch.float16)
    out = flash_attn_combine(out_partial, lse_partial, room[..., :24], return_lse=False)
    assert isinstance(out, Tensor) and out.data_ptr() == room.data_ptr()
    assert (room[..., :24] - exact).abs().max() <= 2e-3 and room[..., 24:].isnan().all()


def test_operator() -> None:
    out_partial, lse_partial, _, _ = parts_of(3)
    torch.library.opcheck(OPS.combine.default, (out_partial, lse_partial, torch.bfloat16))
    wanted = flash_attn_combine(out_partial, lse_partial, out_dtype=torch.bfloat16)

    def merged(out_partial: Tensor, lse_partial: Tensor) -> Any:
        return flash_attn_combine(out_partial, lse_partial, out_dtype=torch.bfloat16)

    compiled = torch.compile(merged, fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(out_partial, lse_partial), wanted, strict=True):
        assert torch.equal(one, other)


OUT, LSE = torch.zeros(3, 2, 5, 4, 24), torch.zeros(3, 2, 5, 4)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"out_partial": OUT.half()}, TypeError, "out_partial has dtype torch.float16, allowed: torch.float32"),
        ({"lse_partial": LSE.double()}, TypeError, "lse_partial has dtype torch.float64, allowed: torch.float32"),
        ({"out_partial": OUT[0, 0]}, ValueError, "out_partial has 3 dimensions, shape (5, 4, 24), allowed: 5"),
        ({"lse_partial": LSE.mT}, ValueError, "lse_partial has shape (3, 2, 4, 5), allowed with out_partial of shape"),
        ({"lse_partial": LSE.to("meta")}, ValueError, "lse_partial is on meta, allowed: the device of out_partial"),
        ({"out_partial": OUT[:0], "lse_partial": LSE[:0]}, ValueError, "out_partial has 0 splits, allowed: 1 to 256"),
        ({"out_partial": [1]}, TypeError, "out_partial is a list, allowed: a torch.Tensor"),
        ({"out_dtype": torch.float64}, TypeError, "out_dtype is torch.float64, allowed: torch.float32"),
        ({"out": OUT[0].half(), "out_dtype": torch.bfloat16}, TypeError, "out has dtype torch.float16, allowed: out"),
        ({"out": OUT[0, 0]}, ValueError, "out has shape (5, 4, 24), allowed: (2, 5, 4, 24)"),
        (
            {"out": OUT[0, :1].expand(2, 5, 4, 24)},
            ValueError,
            r"out has shape (2, 5, 4, 24) and strides (0, 96, 24, 1), allowed: a place in memory",
        ),
        ({"out": OUT[0].to("meta")}, ValueError, "out is on meta, allowed: the device of out_partial, cpu"),
        ({"return_lse": 2}, ValueError, "return_lse is 2, allowed: True or False"),
        ({"out_partial": OUT.clone().requires_grad_()}, NotImplementedError, "requires a gradient: merging has none"),
        ({"out": OUT[0].clone().requires_grad_()}, NotImplementedError, "out requires a gradient: merging has none"),
    ],
)  # fmt: skip
def test_bad_arguments(bad: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        flash_attn_combine(**({"out_partial": OUT, "lse_partial": LSE} | bad))
