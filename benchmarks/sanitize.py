"""One small case of every shipped kernel, for compute-sanitizer.

    compute-sanitizer --tool memcheck --report-api-errors no python benchmarks/sanitize.py
    compute-sanitizer --tool racecheck python benchmarks/sanitize.py --family forward --config d128_causal

Families are forward, paged, decode, wide, fp8, fp8-two-level, fp8-exact-lse, fp8-runs, quantize, value-mean, backward,
packed-backward, divided-heads, divided-visits, few-keys, few-blocks, and without WGMMA ampere_forward, ampere_backward.
No kernel but ours runs on the GPU: inputs, poison and the check of the result live on the CPU, because every kernel is
slow under the tool. Each case of attention has three blocks of keys, the last one partial, a partial tile of queries,
two heads on one KV head, and two CTAs or one for four tiles, so that shared memory is used again. Compile first
(``hopper-attention compile``, and with ``--arch sm_90a``), or the tool watches the compiler too.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.few_blocks_case import few_blocks_configs, run_few_blocks_case
from benchmarks.pieces_case import pieces_configs, run_pieces_case
from cute_kernels.ampere.backward.config import AmpereBackwardConfig, shipped_ampere_backward_configs
from cute_kernels.ampere.config import AmpereForwardConfig, shipped_ampere_forward_configs
from cute_kernels.backward.step import FEW_KEYS
from cute_kernels.problem import DENSE, VARLEN
from hopper.backward.config import BackwardConfig, select_backward_config
from hopper.backward.shipped import shipped_backward_configs
from hopper.compile import HOPPER_ARCH
from hopper.config import ForwardConfig
from hopper.forward.fp8.config import STALE_MAXIMUM, Fp8ForwardConfig, Softmax
from hopper.forward.fp8.tilings import (
    RUNLESS_KEYS,
    shipped_exact_lse_configs,
    shipped_fp8_forward_configs,
    shipped_long_fp8_forward_configs,
)
from hopper.forward.tilings import ONE_PAGE, select_paged_config, shipped_forward_configs
from hopper.mean.config import ValueMeanConfig, shipped_value_mean_configs
from hopper.quantize.config import QuantizeConfig, shipped_quantize_configs
from hopper.wide.config import WideForwardConfig, select_wide_config
from hopper_attention import flash_attn_with_kvcache
from hopper_attention.compile_cache import get_forward, get_quantize
from hopper_attention.fp8_at_once import find_at_once
from hopper_attention.fp8_in_runs import InRunsLauncher
from hopper_attention.launch.backward import find_divided, run_backward
from hopper_attention.launch.base import no_vectors
from hopper_attention.launch.fp8 import EmulationLaunch, adds_mean
from hopper_attention.launch.packed_backward import make_packed_backward_launcher
from hopper_attention.launch.paged_forward import PagedForwardLauncher
from hopper_attention.launch.planners import find_planner
from hopper_attention.launch.quantize import Outputs, empty_outputs
from hopper_attention.launch.quantize import find as find_quantizer
from hopper_attention.launch.widen import widened
from hopper_attention.masks import FULL_SIDES, MaskSpec
from hopper_attention.problem import GradientProblem
from hopper_attention.quantization import Fp8Quantization, quantize_qkv, restore_values
from hopper_attention.quantization_rules import means_of
from hopper_attention.quantized import Means
from hopper_attention.reference import attention_naive, attention_standard, attention_tiled
from hopper_attention.reference.fp8 import P_EXPONENT, ROUNDED_P_EXPONENT
from hopper_attention.reference.tiled_backward import tiled_backward
from hopper_attention.scores import NO_SCORES
from hopper_attention.value_mean_rules import mean_worth_subtracting

HEADS, KV_HEADS, CTAS = 2, 1, 2
FP8_LSE_ERROR, HALF_SCORES_LSE_ERROR = 1.1e-2, 3e-2
"""An exponential by chords is off by up to 1 %, or with scores in float16 by 3, and may be the only one that counts in
a row."""

RUNS_TOLERANCE = 0.02
"""RMS error over that of the output, where means of V change by 2."""

FP8_TOLERANCE = 1.1
"""RMS error of the FP8 kernel over that of its emulation: one small case has a wider spread than the tests' average."""


def draw(
    seqlen_q: int, seqlen_k: int, head_dim: int, head_dim_v: int, dtype: str
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the case, N(0, 1), on the CPU."""
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (seqlen_q, HEADS, head_dim),
        (seqlen_k, KV_HEADS, head_dim),
        (seqlen_k, KV_HEADS, head_dim_v),
    )
    q, k, v = (torch.randn(1, *shape, generator=generator).to(getattr(torch, dtype)) for shape in shapes)
    return q, k, v


def poisoned_results(q: Tensor, head_dim_v: int, dtype: torch.dtype) -> list[Tensor]:
    """out, lse and a tile counter for a problem with these queries, on the CPU."""
    out = torch.full((*q.shape[:3], head_dim_v), math.nan, dtype=dtype)
    return [out, torch.full((1, HEADS, q.shape[1]), math.nan), torch.zeros(2, dtype=torch.int32)]


def _faults(
    inputs: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, causal: bool, qv: Tensor | None = None
) -> list[str]:
    """What is wrong with the results of a kernel of 16 bits."""
    oracle, oracle_lse = attention_naive(*inputs, causal=causal, qv=qv)
    plain = attention_standard(*inputs, causal=causal, qv=qv)
    rounding = torch.finfo(out.dtype).eps / 2 * oracle.abs().max().item()
    allowed = 2 * (plain.double() - oracle).abs().max().item() + rounding
    error = (out.double() - oracle).abs().max().item()
    # "not <=" so that a NaN, which is an unwritten element, counts as wrong.
    wrong = [f"error {error:.2e}, allowed {allowed:.2e}"] if not error <= allowed else []
    return wrong + _lse_faults(lse, oracle_lse, 2e-4)


def run_case(config: ForwardConfig | AmpereForwardConfig, device: str) -> str:
    """Run the kernel once; returns what is wrong with its output, empty if nothing is."""
    lengths = config.tile_m + 17, 2 * config.tile_n + 5
    q, k, v = draw(*lengths, config.head_dim, config.head_dim_v, config.dtype)
    on_gpu = [x.to(device) for x in (q, k, v, *poisoned_results(q, config.head_dim_v, q.dtype))]
    scale = config.head_dim**-0.5
    if isinstance(config, AmpereForwardConfig):
        get_forward(config)(*on_gpu[:5], scale)
    else:
        get_forward(config)(*on_gpu, scale, ctas_for(config))
    torch.cuda.synchronize()
    out, lse, counter = (tensor.cpu() for tensor in on_gpu[3:])
    return "; ".join(_faults((q, k, v), out, lse, config.causal) + _counter_faults(counter))


def ctas_for(config: ForwardConfig) -> int:
    """CTAs that share four tiles out: one where Q has two stages, so that both are used again."""
    return CTAS if config.q_stages == 1 else 1


def run_wide_case(config: WideForwardConfig, device: str) -> str:
    """``run_case`` for wide values, with a second query where the config has one."""
    lengths = config.tile_m + 17, 3 * config.tile_n + 5
    q, k, v = draw(*lengths, config.head_dim, config.head_dim_v, config.dtype)
    generator = torch.Generator().manual_seed(1)
    qv = torch.randn(*q.shape[:3], config.head_dim_v, generator=generator).to(q.dtype) if config.qv else None
    results = poisoned_results(q, config.head_dim_v, q.dtype)
    on_gpu = [None if x is None else x.to(device) for x in (q, k, v, qv, *results)]
    scale = (config.head_dim + config.head_dim_v * config.qv) ** -0.5
    get_forward(config)(*on_gpu, scale, *[None] * 8, CTAS)
    torch.cuda.synchronize()
    out, lse, counter = (tensor.cpu() for tensor in on_gpu[4:] if tensor is not None)
    return "; ".join(_faults((q, k, v), out, lse, config.causal, qv=qv) + _counter_faults(counter))


def paged_configs() -> tuple[ForwardConfig, ...]:
    """Boxes of 16 rows, and a contiguous cache."""
    return tuple(
        select_paged_config("bfloat16", head_dim, head_dim, causal, rows)
        for head_dim in (64, 128, 256)
        for causal in (False, True)
        for rows in (16, ONE_PAGE)
    )


def run_paged_case(config: ForwardConfig, device: str) -> str:
    """Queries on a cache of which the pages are in reverse order, from the last of the memory on. Pages that are not in
    use have no place in it: their numbers are out of range, and keys behind the last one are NaN."""
    seqlen_q, seqlen_k = config.tile_m + 17, 2 * config.tile_n + 5
    q, k, v = draw(seqlen_q, seqlen_k, config.head_dim, config.head_dim_v, config.dtype)
    page_size = seqlen_k + 3 if config.page_box == config.tile_n else 16
    pages = -(-seqlen_k // page_size)
    caches = [
        functional.pad(x, (0, 0, 0, 0, 0, pages * page_size - seqlen_k), value=math.nan) for x in (k, v)
    ]
    caches = [x.view(pages, page_size, *x.shape[2:]).flip(0).to(device) for x in caches]
    table = torch.arange(pages - 1, -1, -1, dtype=torch.int32)
    if pages > 1:
        table = functional.pad(table, (0, 1), value=2**31 - 1)
    out, lse, _ = (x[0].to(device) for x in poisoned_results(q, config.head_dim_v, q.dtype))
    launch = PagedForwardLauncher(
        torch.cuda.current_device(), config, get_forward(config), find_planner(config), CTAS
    )
    lengths = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, seqlen_q], [seqlen_k]))
    options = tuple(lengths), config.head_dim**-0.5, MaskSpec(config.causal), NO_SCORES, (out, lse)
    launch(q[0].to(device), *caches, (table[None].to(device), None), *options)
    torch.cuda.synchronize()
    return "; ".join(_faults((q, k, v), out.cpu()[None], lse.cpu()[None], config.causal))


@dataclass(frozen=True)
class DecodeStep:
    """A token a sequence, which the append kernel writes to a cache of ``cache_dtype`` in pages of ``page_size`` rows,
    or of one page a sequence with 0, and which the decode kernel attends to; with ``is_latent`` that of ``qv``."""

    cache_dtype: str
    page_size: int
    head_dim: int = 128
    head_dim_v: int = 128
    is_latent: bool = False
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        kind = "latent" if self.is_latent else "step"
        return f"{kind}_{self.dtype}_{self.cache_dtype}_d{self.head_dim}_page{self.page_size}"


LENGTHS = (261, 3, 0)
"""Keys of the sequences of a step before it."""


def decode_steps() -> tuple[DecodeStep, ...]:
    """Of 16 bits, of e4m3 that is multiplied as it is and that is widened, and over a latent."""
    return (
        *(DecodeStep("bfloat16", page_size, d, d) for page_size in (0, 8, 64) for d in (64, 128, 256)),
        *(
            DecodeStep("float8_e4m3fn", page_size, dtype=dtype)
            for page_size in (0, 16)
            for dtype in ("bfloat16", "float16")
        ),
        *(DecodeStep("bfloat16", page_size, 64, 512, is_latent=True) for page_size in (0, 64)),
    )


def run_decode_case(step: DecodeStep, device: str) -> str:
    """A step on a cache of NaN but for its keys, of which the pages are in reverse order and those that are not in use
    have numbers out of range. Then one whose lengths and pages make no sense, of which nothing is asked but that it
    stays within the tensors, as the tool sees."""
    dtype, cache_dtype = getattr(torch, step.dtype), getattr(torch, step.cache_dtype)
    page_size = step.page_size or max(LENGTHS) + 7
    width = -(-(max(LENGTHS) + 1) // page_size)
    generator, batch = torch.Generator().manual_seed(0), len(LENGTHS)
    columns = step.head_dim, step.head_dim_v
    rows = [torch.full((batch, width * page_size, KV_HEADS, n), math.nan) for n in columns]
    for x in rows:
        for row, length in zip(x, LENGTHS, strict=True):
            row[: length + 1] = torch.randn(length + 1, *x.shape[2:], generator=generator)
    rows = [x.to(cache_dtype).to(dtype) for x in rows]
    new = [
        torch.stack([row[n : n + 1] for row, n in zip(x, LENGTHS, strict=True)]).to(device, copy=True)
        for x in rows
    ]
    caches = [x.to(cache_dtype).view(-1, page_size, *x.shape[2:]).flip(0).to(device) for x in rows]
    pages = torch.arange(batch * width - 1, -1, -1, dtype=torch.int32).view(batch, width)
    needed = torch.tensor([[-(-(n + 1) // page_size)] for n in LENGTHS])
    given: dict[str, Any] = {
        "cache_seqlens": torch.tensor(LENGTHS, dtype=torch.int32, device=device),
        "page_table": torch.where(torch.arange(width) < needed, pages, 2**31 - 1).to(device),
    }
    qs = [torch.randn(batch, 1, HEADS, n, generator=generator).to(dtype) for n in columns]
    q, qv = qs[0], qs[1] if step.is_latent else None
    # Positions of these tables turn nothing, but have to be read.
    angles = torch.ones(max(LENGTHS) + 1, step.head_dim // 2, device=device, dtype=dtype)
    rotary = {"rotary_cos": angles, "rotary_sin": torch.zeros_like(angles)}
    options = {"k": new[0], "v": new[1], "qv": None if qv is None else qv.to(device), **rotary}
    options |= {"causal": True, "return_softmax_lse": True}
    out, lse = (x.cpu() for x in flash_attn_with_kvcache(q.to(device), *caches, **given, **options)[:2])
    wrong = []
    for i, length in enumerate(LENGTHS):
        inputs = q[i : i + 1], *(x[i : i + 1, : length + 1] for x in rows)
        of_latent = None if qv is None else qv[i : i + 1]
        wrong += _faults(inputs, out[i : i + 1], lse[i : i + 1], True, qv=of_latent)
    for length, page in ((2**31 - 1, -(2**31)), (-(2**31), 2**31 - 1), (width * page_size - 1, -1)):
        given["cache_seqlens"].fill_(length)
        given["page_table"].fill_(page)
        flash_attn_with_kvcache(q.to(device), *caches, **given, **options)
    torch.cuda.synchronize()
    return "; ".join(wrong)


def wide_configs() -> tuple[WideForwardConfig, ...]:
    """A plain one of each kind."""
    kinds = ((512, True), (256, True), (512, False))
    return tuple(select_wide_config("bfloat16", v, causal, qv) for v, qv in kinds for causal in (False, True))


def run_fp8_case(config: Fp8ForwardConfig, device: str) -> str:
    """``run_case`` for FP8: scales of rows and blocks and a mean of V, or one scale a head if V has rows, or the config
    is to have that."""
    lengths = config.tile_m + 17, 2 * config.tile_n + 5
    q, k, v = draw(*lengths, config.head_dim, config.head_dim_v, config.out_dtype)
    by_block = Fp8Quantization(block_k=config.tile_n, smooth_v=True)
    by_head = Fp8Quantization(granularity="head", smooth_v=False)
    is_by_head = config.v_rows or config.lone_scales
    parts = quantize_qkv(q, k, v, quantization=by_head if is_by_head else by_block)
    values = parts.v.row_major().data if config.v_rows else parts.v.data
    ones = torch.ones(1, KV_HEADS, 1)
    of_q = parts.q.scale
    scales = (
        of_q.unflatten(1, (KV_HEADS, -1))[..., 0] if config.lone_scales else of_q,
        parts.k.scale,
        *((ones, parts.v.scale) if is_by_head else (parts.v.scale, ones)),
        parts.mean_v if adds_mean(parts) else no_vectors(1, KV_HEADS, torch.device("cpu")),
    )
    results = poisoned_results(q, config.head_dim_v, q.dtype)
    on_gpu = [x.to(device) for x in (parts.q.data, parts.k.data, values, *results, *scales)]
    if config.wide_codes:
        on_gpu[:2] = widened(*on_gpu[:2])
    num_ctas = ctas_for(config)
    get_forward(config)(*on_gpu, parts.q.block, parts.k.block, config.head_dim**-0.5, num_ctas)
    torch.cuda.synchronize()
    out, lse, counter = (tensor.cpu() for tensor in on_gpu[3:6])

    is_stale = config.softmax in STALE_MAXIMUM
    exponents = (P_EXPONENT, ROUNDED_P_EXPONENT) if is_stale else (P_EXPONENT,)
    emulations = [
        EmulationLaunch(config.causal, exponent)(parts, config.head_dim**-0.5, wants_lse=True)
        for exponent in exponents
    ]
    dequantized = (x.dequantize() for x in (parts.q, parts.k, parts.v))
    oracle, _ = attention_naive(*dequantized, causal=config.causal)
    oracle = restore_values(oracle, parts, config.causal)
    error = _rms(out.double() - oracle)
    allowed = FP8_TOLERANCE * max(_rms(like.double() - oracle) for like, _ in emulations)
    wrong = [f"RMS error {error:.2e}, allowed {allowed:.2e}"] if not error <= allowed else []
    _, like_lse = emulations[0]
    is_half = config.softmax is Softmax.HALF_SCORES
    of_lse = _lse_faults(lse, like_lse, HALF_SCORES_LSE_ERROR if is_half else FP8_LSE_ERROR)
    return "; ".join(wrong + of_lse + _counter_faults(counter))


def configs_in_runs() -> tuple[Fp8ForwardConfig, ...]:
    """Those of calls of 16-bit tensors, whose tiles are the widest."""
    widest = {
        c.head_dim: c.tile_n for c in sorted(shipped_long_fp8_forward_configs(), key=lambda c: c.tile_n)
    }
    return tuple(c for c in shipped_long_fp8_forward_configs() if c.tile_n == widest[c.head_dim])


def run_case_in_runs(config: Fp8ForwardConfig, device: str) -> str:
    """All kernels of a call whose mean of V changes: those that find means of runs, the quantizer, and attention."""
    lengths = config.tile_m + 17, RUNLESS_KEYS + 2 * config.tile_n + 5
    q, k, v = draw(*lengths, config.head_dim, config.head_dim_v, config.output)
    v[:, v.shape[1] // 2 :] += 2.0
    on_gpu = [x.to(device) for x in (q, k, v)]
    facts = ([getattr(x, name) for x in on_gpu] for name in ("shape", "dtype", "device"))
    shapes, dtypes, devices = map(tuple, facts)
    strides = tuple(x.stride() for x in on_gpu)
    of_call = Fp8Quantization(), config.causal, FULL_SIDES, None, False, False, True
    launcher = find_at_once(shapes, strides, dtypes, devices, *of_call)
    if not isinstance(launcher, InRunsLauncher):
        return f"a call of {lengths[1]} keys has no runs"
    few = {part: replace(getattr(launcher, part), num_ctas=CTAS) for part in ("quantizer", "attention")}
    launcher = replace(launcher, **few)
    out, _ = launcher(*on_gpu, config.head_dim**-0.5, False)
    torch.cuda.synchronize()
    exact, _ = attention_naive(q, k, v, causal=config.causal)
    error, allowed = _rms(out.cpu().double() - exact), RUNS_TOLERANCE * _rms(exact)
    return "" if error <= allowed else f"RMS error {error:.2e}, allowed {allowed:.2e}"


def run_quantize_case(config: QuantizeConfig, device: str) -> str:
    """The fused quantizer, whose twin in PyTorch has the same bits."""
    lengths = config.q.rows + 17, 2 * config.block_k + 5
    inputs = draw(*lengths, config.head_dim, config.head_dim_v, config.dtype)
    c = Fp8Quantization(
        rotate=config.rotate,
        block_q=config.block_q,
        block_k=config.block_k,
        smooth_k=config.smooth_k,
        rotate_v=config.rotate_v,
        smooth_v=config.smooth_v,
    )
    twin = quantize_qkv(*inputs, quantization=c)
    on_gpu = [x.to(device) for x in inputs]
    outputs = empty_outputs(config, *on_gpu)
    means = means_of(*inputs[1:], c)
    quantizer = replace(find_quantizer(config, on_gpu[0].device), num_ctas=CTAS)
    on_device = Means(means.k.to(device), means.v.to(device))
    quantizer.fill(outputs, *on_gpu, quantizer.extras(c.seed, on_device, on_gpu[0].device))
    torch.cuda.synchronize()
    expected = Outputs(
        *(part.data for part in (twin.q, twin.k, twin.v)), *(part.scale for part in (twin.q, twin.k, twin.v))
    )
    return "; ".join(
        f"{name} differs from its twin"
        for name, result, right in zip(Outputs._fields, outputs, expected, strict=True)
        if not torch.equal(result.cpu().view(torch.uint8), right.to(result.dtype).view(torch.uint8))
    )


def draw_for_gradients(config: BackwardConfig | AmpereBackwardConfig) -> tuple[Tensor, ...]:
    """dout, q, k, v, out and lse of the case, on the CPU."""
    lengths = 2 * config.tile_m + 17, 2 * config.tile_n + 5
    q, k, v = draw(*lengths, config.head_dim, config.head_dim_v, config.dtype)
    out, lse = attention_tiled(q, k, v, causal=config.causal)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return dout, q, k, v, out, lse


def run_backward_case(config: BackwardConfig | AmpereBackwardConfig, device: str) -> str:
    """All three kernels of the backward: prepare, the main one, finish."""
    given, scale = draw_for_gradients(config), config.head_dim**-0.5
    on_gpu = [x.to(device) for x in given]
    backend = "ampere" if isinstance(config, AmpereBackwardConfig) else "hopper"
    results = run_backward(*on_gpu, scale, config.causal, deterministic=config.ordered, backend=backend)
    gradients = [x.cpu() for x in results]
    torch.cuda.synchronize()
    return _gradient_faults(given, gradients, config.causal, scale)


def packed_backward_configs() -> tuple[BackwardConfig, ...]:
    """Those that clear the sums of dQ themselves."""
    return tuple(
        select_backward_config(dtype, 128, 128, False, layout=VARLEN) for dtype in ("bfloat16", "float16")
    )


def run_packed_backward_case(config: BackwardConfig, device: str) -> str:
    """The same of packed sequences: one, and one behind it without keys. Two CTAs have three key tiles, and
    wait for each other's zeros."""
    given, scale = draw_for_gradients(config), config.head_dim**-0.5
    parts = (HEADS // KV_HEADS,) if config.divides_heads else ()
    launcher = make_packed_backward_launcher(config, torch.device(device), *parts)
    launcher = replace(launcher, grid=(CTAS,) if config.is_persistent else ())
    lengths = given[1].shape[1], given[2].shape[1]
    bounds = [torch.tensor([0, n, n], dtype=torch.int32, device=device) for n in lengths]
    on_gpu = [x[0].to(device) for x in given]
    results = launcher(on_gpu[0], None, *on_gpu[1:], *bounds, None, None, *lengths, scale, -1, -1, 0)
    gradients = [x.cpu()[None] for x in results]
    torch.cuda.synchronize()
    return _gradient_faults(given, gradients, config.causal, scale)


def divided_heads_configs() -> tuple[BackwardConfig, ...]:
    """Those that share out the query heads of a head of K and V, dense and packed, in any order and a fixed one."""
    kinds = (
        *((64, True, False, DENSE), (96, False, True, DENSE), (128, True, True, DENSE)),
        *((256, True, False, DENSE), (64, True, True, VARLEN), (128, False, False, VARLEN)),
        (192, False, True, VARLEN),
    )
    plain = (
        select_backward_config(dtype, size, size, causal, ordered, layout=layout)
        for dtype in ("bfloat16", "float16")
        for size, causal, ordered, layout in kinds
    )
    divided = [replace(config, divides_heads=True) for config in plain]
    return *divided, replace(divided[0], walks_back=True)


def run_divided_heads_case(config: BackwardConfig, device: str) -> str:
    """The same where each of the two query heads is a part."""
    if config.layout == VARLEN:
        return run_packed_backward_case(config, device)
    given, scale = draw_for_gradients(config), config.head_dim**-0.5
    sizes = *(given[0].dtype,) * 2, config.head_dim, config.head_dim_v, config.causal
    facts = {"deterministic": config.ordered, "divides_heads": True, "walks_back": config.walks_back}
    launcher = find_divided(GradientProblem(*sizes, **facts), torch.device(device), HEADS // KV_HEADS)
    launcher = replace(launcher, grid=(CTAS,) if config.is_persistent else ())
    gradients = [x.cpu() for x in launcher(*(x.to(device) for x in given), scale, None)]
    torch.cuda.synchronize()
    return _gradient_faults(given, gradients, config.causal, scale)


FEW_LENGTHS = ((150, FEW_KEYS - 3), (17, FEW_KEYS), (0, 3), (70, 1), (9, 0))
"""Queries and keys of packed sequences."""


def few_keys_configs() -> tuple[BackwardConfig, ...]:
    """Those that find delta themselves: of each tile, in a fixed order, and of a pair of CTAs."""
    kinds = ((64, True, False), (96, True, True), (128, False, False), (256, False, False))
    plain = (
        select_backward_config(dtype, size, size, causal, ordered, layout=VARLEN)
        for dtype in ("bfloat16", "float16")
        for size, causal, ordered in kinds
    )
    return tuple(replace(config, few_keys=True, clears_ahead=False, stores_first=False) for config in plain)


def run_few_keys_case(config: BackwardConfig, device: str) -> str:
    """The same of packed sequences with few keys, by the config that is for such calls."""
    scale, cases = config.head_dim**-0.5, []
    for seqlen_q, seqlen_k in FEW_LENGTHS:
        q, k, v = draw(seqlen_q, seqlen_k, config.head_dim, config.head_dim_v, config.dtype)
        out, lse = attention_tiled(q, k, v, causal=config.causal)
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
        cases.append((dout, q, k, v, out, lse))
    *rows, lse = ([x[0] for x in column] for column in zip(*cases, strict=True))
    dout, *others = (torch.cat(x).to(device) for x in rows)
    launcher = make_packed_backward_launcher(config, torch.device(device))
    launcher = replace(launcher, grid=(CTAS,) if config.is_persistent else ())
    lengths = [list(x) for x in zip(*FEW_LENGTHS, strict=True)]
    bounds = [torch.tensor([0, *x]).cumsum(0).to(torch.int32).to(device) for x in lengths]
    of_call = *bounds, None, None, max(lengths[0]), FEW_KEYS, scale, -1, -1, 0
    results = launcher(dout, None, *others, torch.cat(lse, 1).to(device), *of_call)
    gradients = [x.cpu().split(lengths[i > 0]) for i, x in enumerate(results)]
    torch.cuda.synchronize()
    wrong = []
    for case, *each in zip(cases, *gradients, strict=True):
        # A norm: of so few elements the largest error is a matter of chance.
        wrong += [_gradient_faults(case, [x[None] for x in each], config.causal, scale, norm=2)]
    return "; ".join(filter(None, wrong))


def _gradient_faults(
    tensors: tuple[Tensor, ...],
    gradients: list[Tensor],
    causal: bool,
    softmax_scale: float,
    norm: float = math.inf,
) -> str:
    """What is wrong with dq, dk and dv; ``tensors`` are dout, q, k, v, out and lse. Errors are compared by the largest,
    or by another norm of them all."""
    inputs = [x.double() for x in tensors]
    exact = tiled_backward(inputs[0], None, *inputs[1:], causal=causal, softmax_scale=softmax_scale)
    like = tiled_backward(tensors[0], None, *tensors[1:], causal=causal, softmax_scale=softmax_scale)
    wrong = []
    for name, gradient, right, emulated in zip(("dq", "dk", "dv"), gradients, exact, like, strict=True):
        if not right.numel():
            continue
        error, of_emulation = (
            torch.linalg.vector_norm(x.double() - right, norm).item() for x in (gradient, emulated)
        )
        allowed = 2 * of_emulation + 1e-4
        if not error <= allowed:
            wrong.append(f"error of {name} {error:.2e}, allowed {allowed:.2e}")
    return "; ".join(wrong)


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def _lse_faults(lse: Tensor, expected: Tensor, allowed: float) -> list[str]:
    hidden = expected == -math.inf
    error = (lse.double() - expected)[~hidden].abs().max().item()
    wrong = [f"LSE error {error:.2e}, allowed {allowed:.0e}"] if not error <= allowed else []
    return wrong + (
        ["LSE of rows without keys is not -inf"] if not bool((lse[hidden] == -math.inf).all()) else []
    )


def _counter_faults(counter: Tensor) -> list[str]:
    return [f"tile counter left at {counter.tolist()}"] if bool(counter.any()) else []


def run_value_mean_case(config: ValueMeanConfig, device: str) -> str:
    """The kernel of the mean of V, on values whose keys and columns are no whole number of anything."""
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(2, 1003, KV_HEADS, 80, generator=generator).add(1).to(getattr(torch, config.dtype))
    lengths, entries, source = [], v.shape[0], v
    if config.layout == VARLEN:
        bounds = torch.tensor([0, 1003, 1003, 1900], dtype=torch.int32, device=device)
        lengths, entries, source = [bounds, bounds[:0]], bounds.numel(), v.flatten(0, 1)[None]
    mean = torch.full((entries, KV_HEADS, 80), math.nan, device=device)
    get_quantize(config)(source.to(device), mean, *lengths)
    torch.cuda.synchronize()
    found, twin = mean[0].cpu(), mean_worth_subtracting(v)[0]
    wrong = [] if (found - twin).abs().max() < 0.05 else ["another mean than its twin"]
    return "; ".join(wrong + ([] if mean.isfinite().all() else ["not all written"]))


FAMILIES: dict[str, tuple[Callable[[], tuple[Any, ...]], Callable[[Any, str], str]]] = {
    "forward": (shipped_forward_configs, run_case),
    "paged": (paged_configs, run_paged_case),
    "decode": (decode_steps, run_decode_case),
    "wide": (wide_configs, run_wide_case),
    "fp8": (shipped_fp8_forward_configs, run_fp8_case),
    "fp8-two-level": (partial(shipped_fp8_forward_configs, two_level=True), run_fp8_case),
    "fp8-exact-lse": (shipped_exact_lse_configs, run_fp8_case),
    "fp8-runs": (configs_in_runs, run_case_in_runs),
    "quantize": (shipped_quantize_configs, run_quantize_case),
    "value-mean": (shipped_value_mean_configs, run_value_mean_case),
    "backward": (shipped_backward_configs, run_backward_case),
    "packed-backward": (packed_backward_configs, run_packed_backward_case),
    "divided-heads": (divided_heads_configs, run_divided_heads_case),
    "divided-visits": (pieces_configs, run_pieces_case),
    "few-keys": (few_keys_configs, run_few_keys_case),
    "few-blocks": (few_blocks_configs, run_few_blocks_case),
    "ampere_forward": (partial(shipped_ampere_forward_configs, (HOPPER_ARCH,)), run_case),
    "ampere_backward": (partial(shipped_ampere_backward_configs, (HOPPER_ARCH,)), run_backward_case),
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, help="only these kernels")
    parser.add_argument("--config", default="", help="only configs whose name holds this")
    parser.add_argument("--list", action="store_true", help="print the configs' names and stop")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    asked = [FAMILIES[options.family]] if options.family else FAMILIES.values()
    cases = [(config, run) for find, run in asked for config in find() if options.config in config.name]
    if not cases:
        parser.error(f"--config is {options.config!r}, allowed: a part of a name that --list shows")
    if options.list:
        print("\n".join(config.name for config, _ in cases))
        return 0
    failures = 0
    for config, run in cases:
        start = time.perf_counter()
        wrong = run(config, options.device)
        failures += bool(wrong)
        print(f"{config.name}: {wrong or 'ok'} ({time.perf_counter() - start:.1f} s)", flush=True)
    print(f"{len(cases) - failures} of {len(cases)} configs right")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
