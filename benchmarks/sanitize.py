"""One small case of every shipped forward config, for compute-sanitizer.

    compute-sanitizer --tool memcheck  python benchmarks/sanitize.py
    compute-sanitizer --tool racecheck python benchmarks/sanitize.py --config d128_causal

No kernel but ours runs on the GPU: inputs, poison and the check against float64 live on the CPU, because
every kernel is slow under the tool. Each case has three blocks of keys, the last one partial, a partial tile
of queries, two heads on one KV head, and two CTAs for four tiles, so that shared memory is reused across
tiles. Compile first (``hopper-attention compile``), or the tool watches the compiler too.
"""

from __future__ import annotations

import argparse
import math
import sys
import time

import torch

from hopper.config import ForwardConfig, shipped_forward_configs
from hopper_attention.compile_cache import get_forward
from hopper_attention.reference import attention_naive, attention_standard

HEADS, KV_HEADS, CTAS = 2, 1, 2


def run_case(config: ForwardConfig, device: str) -> str:
    """Run the kernel once; returns what is wrong with its output, empty if nothing is."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, config.dtype)
    seqlen_q, seqlen_k = config.tile_m + 17, 2 * config.tile_n + 5
    q = torch.randn(1, seqlen_q, HEADS, config.head_dim, generator=generator).to(dtype)
    k = torch.randn(1, seqlen_k, KV_HEADS, config.head_dim, generator=generator).to(dtype)
    v = torch.randn(1, seqlen_k, KV_HEADS, config.head_dim_v, generator=generator).to(dtype)
    out = torch.full((1, seqlen_q, HEADS, config.head_dim_v), math.nan, dtype=dtype)
    lse = torch.full((1, HEADS, seqlen_q), math.nan)
    counter = torch.zeros(2, dtype=torch.int32)
    on_gpu = [tensor.to(device) for tensor in (q, k, v, out, lse, counter)]
    get_forward(config)(*on_gpu, config.head_dim**-0.5, CTAS)
    torch.cuda.synchronize()
    out, lse, counter = (tensor.cpu() for tensor in on_gpu[3:])

    oracle, oracle_lse = attention_naive(q, k, v, causal=config.causal)
    plain = attention_standard(q, k, v, causal=config.causal)
    rounding = torch.finfo(dtype).eps / 2 * oracle.abs().max().item()
    allowed = 2 * (plain.double() - oracle).abs().max().item() + rounding
    error = (out.double() - oracle).abs().max().item()
    hidden = oracle_lse == -math.inf
    lse_error = (lse.double() - oracle_lse)[~hidden].abs().max().item()
    # "not <=" so that a NaN, which is an unwritten element, counts as wrong.
    wrong = [f"error {error:.2e}, allowed {allowed:.2e}"] if not error <= allowed else []
    wrong += [f"LSE error {lse_error:.2e}, allowed 2e-4"] if not lse_error <= 2e-4 else []
    wrong += ["LSE of rows without keys is not -inf"] if not bool((lse[hidden] == -math.inf).all()) else []
    wrong += [f"tile counter left at {counter.tolist()}"] if bool(counter.any()) else []
    return "; ".join(wrong)


def main(arguments: list[str]) -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--config", default="", help="only configs whose name holds this")
    parser.add_argument("--list", action="store_true", help="print the configs' names and stop")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    configs = [config for config in shipped_forward_configs() if options.config in config.name]
    if not configs:
        parser.error(f"--config is {options.config!r}, allowed: a part of a name that --list shows")
    if options.list:
        print("\n".join(config.name for config in configs))
        return 0
    failures = 0
    for config in configs:
        start = time.perf_counter()
        wrong = run_case(config, options.device)
        failures += bool(wrong)
        print(f"{config.name}: {wrong or 'ok'} ({time.perf_counter() - start:.1f} s)", flush=True)
    print(f"{len(configs) - failures} of {len(configs)} configs right")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
