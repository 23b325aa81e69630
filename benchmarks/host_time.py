"""Host time of calls on tiny tensors, of every kind: forward, backward, FP8, sizes that are new, decoding.

    python benchmarks/host_time.py [--calls 300] [--rounds 11] [--commit C] [--out host_time.json]

As ``hopper-attention bench latency``: the wall clock of calls that a GPU executes sooner than they are queued; the
median of several rounds, in which the kinds take turns. Run it twice with the same file, which is not there before: a
process may share its cores.
A backward call is what ``torch.autograd.grad`` takes, most of which is torch's own: it makes a pass in a thread that it
wakes and waits for, or where ``torch.autograd.set_multithreading_enabled(False)`` says so in the calling one. So a pass
through a function that saves as many tensors and computes nothing stands beside it. Several layers in one pass say what
a layer adds.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hopper_attention import (
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_quantized_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
    quantize_qkv,
)
from hopper_attention.experiments.bench.latency import WARM_UP_CALLS, time_calls
from hopper_attention.experiments.bench.run import describe_place
from hopper_attention.experiments.bench.timing import BALANCED, order_of_round
from hopper_attention.experiments.calls import HOST_KIND
from hopper_attention.experiments.reports import dump_figures, load_figures, rounded, write_text

Call = Callable[[], Any]
DEVICE = "cuda"
PROCESSES = 2
"""Whose figures a report has: more would give any call one good run."""
LAYERS = 8
"""Of attention, in one backward pass."""
IN_CALLING_THREAD = ", in the calling thread"
"""Ends names of backward passes that torch makes there."""
LENGTHS = 8192
"""Keys of the tensor whose first rows are K and V of calls with a length that is new."""


def draw(*shape: int, requires_grad: bool = False) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE).requires_grad_(requires_grad)


class Nothing(torch.autograd.Function):
    """Of q, k and v, with an output like q, as many saved tensors as attention has, and gradients that lie ready."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, gradients: tuple[Tensor, ...]) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, out.new_empty(1))
        ctx.set_materialize_grads(False)
        ctx.gradients = gradients
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        _, *_ = ctx.saved_tensors
        return *ctx.gradients, None


def dense_calls() -> dict[str, Call]:
    q, k, v = (draw(1, 128, 2, 128) for _ in range(3))
    leaves = [draw(1, 128, 2, 128, requires_grad=True) for _ in range(3)]
    # The parts, and the output, of a call like earlier ones, as most are.
    *_, parts = [quantize_qkv(q, k, v) for _ in range(3)]
    codes = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    grouped = [draw(1, 128, 8, 128).to(torch.float8_e4m3fn), *codes[1:]]
    of_rows = draw(1, 4096, 2, 128).to(torch.float8_e4m3fn), *codes[1:]
    names = "q_descale", "k_descale", "v_descale"
    scales = {name: torch.ones(1, 2, device=DEVICE) for name in names}
    *_, out = [flash_attn_func(*leaves) for _ in range(3)]
    dout, last = draw(1, 128, 2, 128), leaves[0]
    for _ in range(LAYERS):
        last = flash_attn_func(last, *leaves[1:])
    of_nothing = Nothing.apply(*leaves, tuple(map(torch.empty_like, leaves)))
    keys, lengths = draw(1, LENGTHS, 2, 128), itertools.cycle(range(1, LENGTHS))

    def attend_to_new_length() -> Tensor:
        first = keys[:, : next(lengths)]
        return flash_attn_func(q, first, first)

    step, past = draw(1, 1, 8, 128), draw(1, LENGTHS, 2, 128)
    growing = itertools.cycle(range(LENGTHS // 2, LENGTHS))
    codes_of_step = [x.to(torch.float8_e4m3fn) for x in (step, past, past)]

    def attend_to_one_key_more() -> Tensor:
        first = past[:, : next(growing)]
        return flash_attn_func(step, first, first)

    backward = partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)
    nothing = partial(torch.autograd.grad, of_nothing, leaves, dout, retain_graph=True)
    return {
        "forward, 16 bits": partial(flash_attn_func, q, k, v),
        "forward, on quantized parts": partial(flash_attn_quantized_func, parts),
        "forward, e4m3 with descales": partial(flash_attn_func, *codes, **scales),
        "forward, e4m3 with descales, grouped heads": partial(flash_attn_func, *grouped, **scales),
        "forward, e4m3 with descales, many queries": partial(flash_attn_func, *of_rows, **scales),
        "forward, e4m3 with descales, an exact LSE": partial(
            flash_attn_func, *codes, return_attn_probs=True, **scales
        ),
        "quantize_qkv": partial(quantize_qkv, q, k, v),
        "quantize_qkv and attention to its parts": lambda: flash_attn_quantized_func(quantize_qkv(q, k, v)),
        "flash_attn_fp8_func": partial(flash_attn_fp8_func, q, k, v),
        "forward with gradients": partial(flash_attn_func, *leaves),
        "backward": backward,
        "backward" + IN_CALLING_THREAD: backward,
        "backward of nothing": nothing,
        "backward of nothing" + IN_CALLING_THREAD: nothing,
        f"backward of {LAYERS} layers": partial(
            torch.autograd.grad, last, leaves[:1], dout, retain_graph=True
        ),
        "forward, seqlen_k not seen before": attend_to_new_length,
        "forward, a single query": partial(flash_attn_func, step, past, keys),
        "forward, a single query, seqlen_k not seen before": attend_to_one_key_more,
        "forward, a single query, e4m3 with descales": partial(flash_attn_func, *codes_of_step, **scales),
    }


def packed_calls() -> dict[str, Call]:
    leaves = [draw(128, 2, 128, requires_grad=True) for _ in range(3)]
    starts = torch.tensor([0, 64, 128], dtype=torch.int32, device=DEVICE)
    attend = partial(flash_attn_varlen_func, *leaves, starts, starts, 64, 64)
    *_, out = [attend() for _ in range(3)]
    backward = partial(torch.autograd.grad, out, leaves, draw(128, 2, 128), retain_graph=True)
    steps, past = draw(2, 8, 128), [draw(LENGTHS, 2, 128) for _ in range(2)]
    ones, ends = (torch.tensor([0, n, 2 * n], dtype=torch.int32, device=DEVICE) for n in (1, LENGTHS // 2))
    return {
        "packed forward, single queries": partial(
            flash_attn_varlen_func, steps, *past, ones, ends, 1, LENGTHS // 2
        ),
        "packed forward with gradients": attend,
        "packed backward": backward,
        "packed backward" + IN_CALLING_THREAD: backward,
    }


def decode_calls() -> dict[str, Call]:
    q, k_cache, v_cache = draw(1, 1, 32, 128), draw(1, 1024, 8, 128), draw(1, 1024, 8, 128)
    lengths = torch.tensor([1000], dtype=torch.int32, device=DEVICE)
    table = torch.arange(16, dtype=torch.int32, device=DEVICE).view(1, 16)
    pages = (x.view(16, 64, 8, 128) for x in (k_cache, v_cache))
    options = {"cache_seqlens": lengths, "causal": True}
    decode = partial(flash_attn_with_kvcache, q, k_cache, v_cache, **options)
    paged = partial(flash_attn_with_kvcache, q, *pages, page_table=table, **options)
    calls: dict[str, Call] = {"decode": torch.no_grad()(decode), "decode, pages": torch.no_grad()(paged)}
    plan = partial(get_scheduler_metadata, 1, 1, 1024, 32, 8, 128, lengths, causal=True)
    # Without torch.no_grad() as a decorator, which has its own host time; no tensor here asks for it.
    calls["decode, bare"], calls["decode, pages, bare"] = decode, paged
    calls["decode, with a schedule"] = partial(decode, scheduler_metadata=plan())
    calls["decode, pages, with a schedule"] = partial(paged, scheduler_metadata=plan(page_size=64))
    return calls | {"get_scheduler_metadata": plan}


def all_calls() -> dict[str, Call]:
    return dense_calls() | packed_calls() | decode_calls()


def time_call(name: str, call: Call, count: int) -> float:
    """Microseconds of one of so many calls."""
    with torch.autograd.set_multithreading_enabled(not name.endswith(IN_CALLING_THREAD)):
        return time_calls(call, count, torch.cuda.synchronize)


OUT_HELP = """JSON: microseconds by call, for each process the median and the least of its rounds; to a file that is
there of the same commit, machine and method this process is added, and it keeps the last two"""
SAME = "commit", "machine", "cores", "method"


def with_earlier(report: dict[str, Any], path: Path) -> dict[str, Any]:
    """The report with the figures of the process before, which lie at ``path``, in front of its own."""
    earlier = load_figures(path.read_text(encoding="utf-8"), HOST_KIND) if path.is_file() else report
    if earlier is report or any(earlier[key] != rounded(report[key]) for key in SAME):
        return report
    us = {
        call: [*earlier["us"].get(call, []), *figures][-PROCESSES:] for call, figures in report["us"].items()
    }
    return {**report, "us": us}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=300, help="calls a measurement")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--commit", default="", help="default: what git or a file COMMIT says")
    parser.add_argument("--out", type=Path, help=OUT_HELP)
    options = parser.parse_args(arguments)
    calls = all_calls()
    for name, call in calls.items():
        time_call(name, call, WARM_UP_CALLS)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    gc.disable()
    for number in range(options.rounds):
        for name in order_of_round(list(calls), number):
            samples[name].append(time_call(name, calls[name], options.calls))
    gc.enable()
    medians = {name: statistics.median(values) for name, values in samples.items()}
    for name, median in medians.items():
        print(f"{name:40} {median:8.1f} us, {min(samples[name]):8.1f} to {max(samples[name]):8.1f}")
    if options.out:
        head = describe_place(HOST_KIND, DEVICE, options.commit)
        method = (
            f"{options.rounds} rounds in turns of {options.calls} calls, which are queued while the GPU works"
        )
        us = {name: [[median, min(samples[name])]] for name, median in medians.items()}
        report = {**head, "cores": os.cpu_count(), "method": method, "order": BALANCED, "us": us}
        write_text(options.out, dump_figures(with_earlier(report, options.out)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
