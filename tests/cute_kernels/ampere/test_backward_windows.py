"""Windows in the backward kernel without WGMMA, run from its PTX on a CPU, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_kernels.ampere.backward.config import AmpereBackwardConfig, select_ampere_backward_config
from cute_kernels.window import NO_LIMIT, Window, window_of
from tests.cute_kernels.ampere.test_backward_on_numpy import SMALL
from tests.cute_kernels.ampere.test_forward_windows import EPSILON, LATE, NAMES, draw
from tests.cute_kernels.exact import attend
from tests.hopper.on_numpy import NO_RULES, Rules, backward_on_numpy


def select(
    dtype: torch.dtype, head_dim: int, causal: bool, ordered: bool, window: bool, layout: str = "dense"
) -> AmpereBackwardConfig:
    """For head_dim 64 with smaller tiles than are shipped, which compile in half of the time."""
    config = select_ampere_backward_config(
        NAMES[dtype], head_dim, head_dim, causal, "sm_80", ordered, window, layout
    )
    return replace(config, **vars(SMALL)) if head_dim == 64 else config


def exact_gradients(
    inputs: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    window: Window,
    rules: Rules = NO_RULES,
    sequence: int = 0,
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """(dq, dk, dv), out and lse of one sequence, in float64."""
    leaves = tuple(x.double().requires_grad_() for x in inputs)
    out, lse = attend(*leaves, window, inputs[0].shape[2] ** -0.5, rules, sequence)
    gradients = torch.autograd.grad(out, leaves, dout.double(), allow_unused=True, materialize_grads=True)
    return gradients, out.detach(), lse.detach()


def check(ours: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> None:
    for name, a, e in zip(("dq", "dk", "dv"), ours, exact, strict=True):
        assert a.shape == e.shape and bool(a.isfinite().all()), name
        # Twice what it is with many keys: with few, dP and delta, of a rounded O, nearly cancel each other.
        allowed = 2 * EPSILON[a.dtype] * e.norm().item() + 1e-4
        assert (a.double() - e).norm().item() <= allowed, (name, (a.double() - e).norm() / e.norm())


def check_gradients(config, inputs, dout: Tensor, sides: tuple[int, ...]) -> None:
    """Of one sequence (q, k, v), against those by definition."""
    exact, out, lse = exact_gradients(inputs, dout, window_of(config.causal, sides))
    batched = tuple(x[None] for x in (dout, *inputs))
    rows = out[None].to(dout.dtype), lse[None].float()
    ours = backward_on_numpy(config, batched, *rows, config.head_dim**-0.5, LATE, sides=sides)
    check(tuple(x[0] for x in ours), exact)


WINDOWS = [
    (torch.bfloat16, 64, False, (140, 100), (2, 1), (40, 20), False),
    (torch.bfloat16, 64, True, (100, 200), (1, 1), (33, 7), True),
    (torch.float16, 64, True, (140, 140), (1, 1), (0, 0), False),
    (torch.bfloat16, 64, False, (200, 100), (2, 1), (20, 10), True),
    (torch.bfloat16, 64, False, (60, 450), (1, 1), (50, 5), True),
    (torch.bfloat16, 64, False, (100, 150), (1, 1), (NO_LIMIT, 3), True),
    (torch.bfloat16, 64, False, (100, 150), (1, 1), (3, NO_LIMIT), True),
]


@pytest.mark.parametrize("dtype,head_dim,causal,seqlens,heads,sides,ordered", WINDOWS, ids=str)
def test_windows(dtype, head_dim, causal, seqlens, heads, sides, ordered) -> None:
    config = select(dtype, head_dim, causal, ordered, window=True)
    (sq, sk), (h, hk) = seqlens, heads
    q, dout, k, v = draw(0, dtype, *[(sq, h, head_dim)] * 2, *[(sk, hk, head_dim)] * 2)
    check_gradients(config, (q, k, v), dout, sides)
