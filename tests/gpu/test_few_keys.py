"""Gradients of packed sequences with few keys on the Hopper kernels that find delta from P and dP, with all that
changes scores and P, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.backward.step import FEW_KEYS
from hopper_attention import flash_attn_varlen_func
from hopper_attention.backward_rules import keys_within
from hopper_attention.dropout import draw_philox
from hopper_attention.reference import attention_naive
from tests.function_examples import draw_example, relative_bias

pytestmark = pytest.mark.gpu

LENGTHS_Q, LENGTHS_K = (33, 20, 0, 70, 140, 9), (1, 3, 5, FEW_KEYS, 2, 0)
OFFSET = 6.0
"""Of V. In 16 bits O loses bits that dP and its mean do not: what they differ by is small."""

CASES: dict[str, tuple[torch.dtype, int, dict[str, Any]]] = {
    "d128": (torch.bfloat16, 128, {}),
    "d128 in a fixed order": (torch.bfloat16, 128, {"deterministic": True}),
    "d96 causal in a fixed order": (torch.float16, 96, {"causal": True, "deterministic": True}),
    "d64 in a window": (torch.float16, 64, {"window_size": (2, 1)}),
    "d192 softcap": (torch.bfloat16, 192, {"softcap": 2.0, "causal": True}),
    "d256 dropout, softcap": (torch.bfloat16, 256, {"dropout_p": 0.25, "softcap": 2.0}),
    "d64 slopes": (torch.bfloat16, 64, {"alibi": True}),
    "d128 slopes, causal": (torch.float16, 128, {"alibi": True, "causal": True}),
    "d256 slopes, softcap": (torch.bfloat16, 256, {"alibi": True, "softcap": 2.0}),
    "d64 functions that bend": (torch.bfloat16, 64, {"functions": draw_example}),
    "d96 functions that bend, in a fixed order": (
        torch.bfloat16,
        96,
        {"functions": draw_example, "deterministic": True},
    ),
    "d128 functions that bend, softcap": (torch.float16, 128, {"functions": draw_example, "softcap": 2.0}),
    "d192 functions that bend, causal": (torch.float16, 192, {"functions": draw_example, "causal": True}),
    "d256 functions that bend": (torch.bfloat16, 256, {"functions": draw_example}),
    "d256 a bias, softcap": (torch.bfloat16, 256, {"functions": relative_bias, "softcap": 2.0}),
}


def draw(dtype: torch.dtype, head_dim: int) -> list[Tensor]:
    """q, k, v of two heads and one key/value head, and dout."""
    shapes = (
        (sum(LENGTHS_Q), 2, head_dim),
        *[(sum(LENGTHS_K), 1, head_dim)] * 2,
        (sum(LENGTHS_Q), 2, head_dim),
    )
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(shape, generator=generator) for shape in shapes)
    return [x.cuda().to(dtype) for x in (q, k, v + OFFSET, dout)]


def on_gpu(functions: dict[str, Any]) -> dict[str, Any]:
    """The functions of an example with the tensors that they read on the GPU."""
    for function in functions.values():
        for cell in getattr(function, "__closure__", None) or ():
            if isinstance(cell.cell_contents, Tensor):
                cell.cell_contents = cell.cell_contents.cuda()
    return functions


def wanted_of(
    leaves: list[Tensor], causal: bool, softcap: float, window: tuple[int, int], options: dict[str, Any]
) -> list[Tensor]:
    """The output of each sequence in float64, alone. Dropout, slopes and functions go by the number of a sequence: it
    is the last of as many that are alike."""
    found, (q, k, v) = [], leaves
    rows, keys = (x.split(lengths) for x, lengths in ((q, LENGTHS_Q), (torch.stack((k, v), 1), LENGTHS_K)))
    sides = dict(zip(("window_left", "window_right"), window, strict=True))
    for i, (of_q, of_k) in enumerate(zip(rows, keys, strict=True)):
        parts = (x.expand(i + 1, *x.shape) for x in (of_q, *of_k.unbind(1)))
        given = dict(options)
        if "alibi_slopes" in given:
            given["alibi_slopes"] = given["alibi_slopes"][: i + 1]
        out, _ = attention_naive(*parts, causal=causal, softcap=softcap, **sides, **given)
        found.append(out[-1])
    return found


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    dtype, head_dim, given = CASES[name]
    given = dict(given)
    batch, has_dropout = len(LENGTHS_Q), "dropout_p" in given
    options: dict[str, Any] = {}
    if "functions" in given:
        options |= on_gpu(vars(given.pop("functions")(2, batch)))
    if given.pop("alibi", False):
        options["alibi_slopes"] = torch.rand(batch, 2, generator=torch.Generator().manual_seed(1)).cuda()
    *inputs, dout = draw(dtype, head_dim)
    leaves = [x.requires_grad_() for x in inputs]
    bounds = [torch.tensor([0, *lengths]).cumsum(0).int().cuda() for lengths in (LENGTHS_Q, LENGTHS_K)]
    assert keys_within(FEW_KEYS, has_sinks=False) == "few"

    def differentiate() -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        out = flash_attn_varlen_func(*leaves, *bounds, max(LENGTHS_Q), FEW_KEYS, **given, **options)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    out, *ours = differentiate()
    if has_dropout:
        torch.manual_seed(3)
        options |= {"dropout_p": given["dropout_p"], "philox": draw_philox(dout.device)}
    exact = [x.detach().double().requires_grad_() for x in inputs]
    window = given.get("window_size", (-1, -1))
    wanted = torch.cat(
        wanted_of(exact, given.get("causal", False), given.get("softcap", 0.0), window, options)
    )
    right = torch.autograd.grad(wanted, exact, dout.double())
    eps = torch.finfo(dtype).eps
    assert (out.double() - wanted).norm() < eps * wanted.norm()
    for gradient, a, e in zip(("dq", "dk", "dv"), ours, right, strict=True):
        assert (a.double() - e).norm() < 1.5 * eps * e.norm(), gradient
    if not has_dropout:
        assert not ours[0][: LENGTHS_Q[0]].any() and not ours[1][0].any(), "P of a single key is 1"
    if given.get("deterministic"):
        assert all(map(torch.equal, ours, differentiate()[1:]))
