"""Backward kernels that divide the visits of key tiles, for ``sanitize.py``."""

from __future__ import annotations

from dataclasses import replace

import torch

from hopper.backward.config import BackwardConfig, select_backward_config
from hopper_attention.backward_rules import Division
from hopper_attention.launch.backward import find_in_pieces
from hopper_attention.problem import GradientProblem
from hopper_attention.reference import attention_naive

HEADS, KV_HEADS, CTAS, SCALE = 2, 1, 2, 0.1
DIVISION = Division(1, 2, 3)
"""Of three key tiles, the last one partial, the first is whole: seven items for two CTAs."""

TOLERANCE = 1e-2


def pieces_configs() -> tuple[BackwardConfig, ...]:
    """Each head_dim, with a causal mask and without."""
    plain = [
        select_backward_config(dtype, size, size, causal)
        for dtype, size in (("bfloat16", 64), ("float16", 96), ("bfloat16", 128))
        for causal in (False, True)
    ]
    return tuple(replace(config, divides_visits=True) for config in plain)


def run_pieces_case(config: BackwardConfig, device: str) -> str:
    """All three kernels of a backward pass; what is wrong, or nothing."""
    generator, dtype = torch.Generator().manual_seed(0), getattr(torch, config.dtype)
    lengths, heads = (5 * config.tile_m + 17, 2 * config.tile_n + 5), (HEADS, KV_HEADS)
    shapes = [(1, lengths[i], heads[i], config.head_dim) for i in (0, 1, 1, 0)]
    q, k, v, dout = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = attention_naive(*leaves, causal=config.causal, softmax_scale=SCALE)
    expected = torch.autograd.grad(out, leaves, dout.double())

    sizes = dtype, dtype, config.head_dim, config.head_dim_v, config.causal
    problem = GradientProblem(*sizes, divides_visits=True)
    launcher = replace(find_in_pieces(problem, torch.device(device), DIVISION), grid=(CTAS,))
    given = dout, q, k, v, out.detach().to(dtype), lse.detach().float()
    gradients = [x.cpu() for x in launcher(*(x.to(device) for x in given), SCALE, None)]
    torch.cuda.synchronize()
    named = zip(("dq", "dk", "dv"), gradients, expected, strict=True)
    errors = {name: ((x.double() - e).norm() / e.norm()).item() for name, x, e in named}
    return "; ".join(f"error of {name} {x:.1e}" for name, x in errors.items() if not x <= TOLERANCE)
