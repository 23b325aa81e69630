"""One of the two processes of ``benchmarks/trees.py``: times calls of the checkout that its PYTHONPATH names.

It uses public functions and the families of inputs alone, so that it serves older checkouts too.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from hopper_attention import flash_attn_fp8_func, flash_attn_func, flash_attn_quantized_func, quantize_qkv
from hopper_attention.experiments.bench.fp8_peers import scaled_by_head
from hopper_attention.experiments.bench.peers import Inputs
from hopper_attention.experiments.bench.spec import Problem
from hopper_attention.experiments.families.draws import FAMILIES

TOKENS, WIDTH = 16_384, 2_048
BURST_S = 0.005
FORWARD, FP8, FP8_END_TO_END, BACKWARD = "forward", "fp8", "fp8 end to end", "backward"
QUANTIZE, DROP_IN, DROP_IN_LSE = "quantize", "drop-in", "drop-in with a fast LSE"


def problem_of(cell: dict[str, Any]) -> Problem:
    """Sequences of ``TOKENS`` tokens in all, or a longer one of which as many fewer heads are taken, but one."""
    seqlen, head_dim = cell["seqlen"], cell["head_dim"]
    batch, heads = max(TOKENS // seqlen, 1), WIDTH // head_dim
    if seqlen > TOKENS:
        heads = max(heads * TOKENS // seqlen, 1)
    return Problem(cell["dtype"], batch, seqlen, seqlen, heads, heads, head_dim, head_dim, cell["causal"])


def make_call(cell: dict[str, Any]) -> Callable[[], Any]:
    """The call of a cell: kind, dtype, head_dim, seqlen, causal, the family of inputs, and how many times as large
    queries are."""
    kind, causal, problem = cell["kind"], cell["causal"], problem_of(cell)
    family = next(family for family in FAMILIES if family.name == cell["family"])
    generator, dtype = torch.Generator("cuda").manual_seed(0), getattr(torch, cell["dtype"])
    inputs = family.draw(problem, generator)
    q, k, v = (x.to(dtype) for x in (cell["queries"] * inputs.q, inputs.k, inputs.v))
    dout = torch.randn(q.shape, device="cuda", dtype=dtype, generator=generator)
    if kind in (DROP_IN, DROP_IN_LSE):
        codes, options = scaled_by_head(Inputs(q, k, v), problem)
        if kind == DROP_IN_LSE:
            options = options | {"return_attn_probs": True, "exact_lse": False}
        return lambda: flash_attn_func(codes.q, codes.k, codes.v, causal=causal, **options)
    if kind == FORWARD:
        return lambda: flash_attn_func(q, k, v, causal=causal)
    if kind == FP8:
        parts = quantize_qkv(q, k, v)
        return lambda: flash_attn_quantized_func(parts, causal=causal)
    if kind == QUANTIZE:
        return lambda: quantize_qkv(q, k, v)
    if kind == FP8_END_TO_END:
        return lambda: flash_attn_fp8_func(q, k, v, causal=causal)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*inputs, causal=causal)
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def work() -> None:
    """A worker: a line with a cell prepares it, an empty line times one burst of it; answers with seconds a call."""

    def burst(call: Callable[[], Any], count: int) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3 / count

    call, repeats = make_call(json.loads(sys.stdin.readline())), 1
    print(burst(call, repeats), flush=True)
    for line in sys.stdin:
        if line.strip():
            call = make_call(json.loads(line))
            burst(call, 3)
            repeats = max(3, round(BURST_S / burst(call, 10)))
        print(burst(call, repeats), flush=True)


if __name__ == "__main__":
    work()
