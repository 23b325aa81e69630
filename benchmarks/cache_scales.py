"""Decoding on a cache of e4m3 by what shares a scale, and appending to it, in turns; each row is checked first.

    python benchmarks/cache_scales.py [--sizes 64x8,8x8,1x64] [--commit C] [--out F.json]

Sequences times thousand keys, in pages of 64 in a random order, with 32 query and 8 K/V heads of 128 columns. Rows are
scales by sequence, by page, by token, and by token where all of a head lie together in a page; each of a call that
only attends, and of one that appends a token, rotated, in front of that.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hopper_attention import flash_attn_with_kvcache
from hopper_attention.experiments.bench.machine import ClockSampler, find_gauge
from hopper_attention.experiments.bench.run import describe_place
from hopper_attention.experiments.bench.timing import Effort, Launch, seconds_in_turns, stopwatch_for
from hopper_attention.experiments.reports import dump_rows, write_text

PAGE_SIZE, HEADS, KV_HEADS, HEAD_DIM = 64, 32, 8, 128
BY_SEQUENCE, BY_PAGE, BY_TOKEN, BY_TOKEN_OF_A_HEAD = "sequence", "page", "token", "token, of a head together"
KINDS = (BY_SEQUENCE, BY_PAGE, BY_TOKEN, BY_TOKEN_OF_A_HEAD)
SCALE = 2.0**-6
EFFORT = Effort()


@dataclass(frozen=True)
class Row:
    """Microseconds of a call, and the median SM clock while the calls of its size took turns."""

    sequences: int
    keys: int
    scales: str
    appends: bool
    hadamard: bool
    us: float
    clock_mhz: float | None


def scales_of(kind: str, batch: int, pages: int, device: str) -> Tensor:
    """All the same, so that every kind gives the same results."""
    shape = {BY_SEQUENCE: (batch, KV_HEADS), BY_PAGE: (pages, 1, KV_HEADS)}
    if kind == BY_TOKEN_OF_A_HEAD:
        return torch.full((pages, KV_HEADS, PAGE_SIZE), SCALE, device=device).transpose(1, 2)
    return torch.full(shape.get(kind, (pages, PAGE_SIZE, KV_HEADS)), SCALE, device=device)


def launches_of(batch: int, keys: int, device: str) -> dict[tuple[str, bool, bool], Launch]:
    """By what shares a scale, whether a token is appended, and whether it is multiplied by a Hadamard matrix."""
    a_sequence = keys // PAGE_SIZE
    pages = batch * a_sequence
    caches = [torch.randn(pages, PAGE_SIZE, KV_HEADS, HEAD_DIM, device=device) / SCALE / 4.0 for _ in "kv"]
    small = [x.clamp_(-448.0, 448.0).to(torch.float8_e4m3fn) for x in caches]
    table = torch.randperm(pages, device=device).int().view(batch, a_sequence)
    q, k, v = (
        torch.randn(batch, 1, heads, HEAD_DIM, device=device).bfloat16()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    angles = torch.rand(keys, HEAD_DIM // 2, device=device)
    full = torch.full((batch,), keys, dtype=torch.int32, device=device)
    new = {"k": k, "v": v, "rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "cache_seqlens": full - 1}
    found: dict[tuple[str, bool, bool], Launch] = {}
    for kind in KINDS:
        given = {name: scales_of(kind, batch, pages, device) for name in ("k_descale", "v_descale")}
        call = partial(flash_attn_with_kvcache, q, *small, page_table=table, **given)
        found[kind, False, False] = partial(call, cache_seqlens=full)
        found[kind, True, False] = partial(call, causal=True, rotary_interleaved=False, **new)
        if kind in (BY_SEQUENCE, BY_TOKEN):
            found[kind, True, True] = partial(
                call, causal=True, rotary_interleaved=False, hadamard=True, **new
            )
    return found


def check(launches: dict[tuple[str, bool, bool], Launch]) -> None:
    """That all which only attend give the same; before anything is appended, with a scale of its own where tokens have
    one.

    Raises:
        AssertionError: one does not.
    """
    wanted = launches[BY_SEQUENCE, False, False]()
    for (kind, appends, _), launch in launches.items():
        if not appends:
            torch.testing.assert_close(
                launch(), wanted, rtol=2e-2, atol=2e-2, msg=lambda why, kind=kind: f"scales by {kind}: {why}"
            )


def measure(batch: int, keys: int, device: str, effort: Effort) -> list[Row]:
    launches = launches_of(batch, keys, device)
    check(launches)
    named = {repr(key): [launch] for key, launch in launches.items()}
    begin = time.perf_counter()
    with ClockSampler(find_gauge(device)) as sampler:
        taken = seconds_in_turns(named, stopwatch_for(device), effort)
        clock, _ = sampler.window([(begin, time.perf_counter())])
    return [Row(batch, keys, *key, taken[repr(key)] * 1e6, clock) for key in launches]


def main(arguments: list[str], effort: Effort = EFFORT) -> list[Row]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="64x8,8x8,1x64", help="sequences x thousand keys")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--commit", default="", help="default: what git or a file COMMIT says")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    for size in options.sizes.split(","):
        batch, thousands = map(int, size.split("x"))
        rows += measure(batch, thousands * 1024, options.device, effort)
    for row in rows:
        what = ("append, " if row.appends else "") + ("hadamard, " if row.hadamard else "")
        print(f"{row.sequences:4} x {row.keys:6}  {what + 'by ' + row.scales:40} {row.us:9.1f} us")
    if options.out:
        head = describe_place("cache_scales", options.device, options.commit)
        method = f"{effort.max_rounds} rounds in turns, bursts of {effort.measure_s * 1e3:g} ms, device time, N(0, 1)"
        write_text(options.out, dump_rows({**head, "method": method}, "rows", [asdict(row) for row in rows]))
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
