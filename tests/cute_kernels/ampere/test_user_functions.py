"""A user's functions in the kernels without WGMMA, from their PTX without a GPU, against float64."""

from __future__ import annotations

from dataclasses import replace

import torch

from cute_kernels.ampere.backward.config import select_ampere_backward_config
from cute_kernels.ampere.config import select_ampere_forward_config
from hopper_attention.functions import trace_functions
from hopper_attention.reference import attention_naive
from tests.cute_kernels.ampere.test_backward_on_numpy import SMALL
from tests.function_examples import draw_example, relative_bias
from tests.hopper.on_numpy import Rules, ampere_forward_on_numpy, backward_on_numpy
from tests.hopper.test_kernels_on_numpy import EPSILON, LATE, draw, relative
from tests.hopper.test_score_rules import check


def test_forward() -> None:
    example = draw_example()
    rules = Rules(captured=trace_functions(example.score_mod, example.mask_mod))
    plain = select_ampere_forward_config("bfloat16", 32, 32, True, "sm_86")
    config = replace(plain, functions=rules.captured.functions, tile_m=64, tile_n=32)
    q, k, v = draw(torch.bfloat16, (90, 100), (2, 1), 32)
    out, lse = ampere_forward_on_numpy(config, q, k, v, 32**-0.5, timing=LATE, rules=rules)
    exact, exact_lse = attention_naive(q, k, v, causal=True, **vars(example))
    check(out[0], lse[0], (exact[0], exact_lse[0]), 1e-5)


def test_a_window_with_a_function_and_a_cap() -> None:
    example = relative_bias()
    rules = Rules(1.5, captured=trace_functions(example.score_mod, example.mask_mod))
    plain = select_ampere_forward_config("float16", 32, 32, False, "sm_86", window=True)
    config = replace(plain, softcap=True, functions=rules.captured.functions, tile_m=64, tile_n=32)
    q, k, v = draw(torch.float16, (90, 100), (1, 1), 32)
    options = {"window_left": 30, "window_right": 5}
    out, lse = ampere_forward_on_numpy(config, q, k, v, 32**-0.5, timing=LATE, sides=(30, 5), rules=rules)
    exact, exact_lse = attention_naive(q, k, v, softcap=1.5, **options, **vars(example))
    check(out[0], lse[0], (exact[0], exact_lse[0]), 1e-5)


def test_gradients() -> None:
    example = draw_example()
    rules = Rules(captured=trace_functions(example.score_mod, example.mask_mod))
    plain = select_ampere_backward_config("bfloat16", 32, 32, False, "sm_86")
    config = replace(plain, functions=rules.captured.functions, **vars(SMALL))
    inputs = draw(torch.bfloat16, (40, 100), (2, 1), 32)
    dout = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    leaves = [x.double().requires_grad_() for x in inputs]
    out, lse = attention_naive(*leaves, **vars(example))
    exact = torch.autograd.grad(out, leaves, dout.double())
    given = (dout, *inputs), out.detach().bfloat16(), lse.detach().float()
    ours = backward_on_numpy(config, *given, 32**-0.5, LATE, rules=rules)
    for gradient, wanted in zip(ours, exact, strict=True):
        assert relative(gradient, wanted) < 1.5 * EPSILON[dout.dtype]
