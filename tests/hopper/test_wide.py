"""The Hopper kernel for wide values: what the assembler makes of it, and its numbers on NumPy against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hopper.config import SMEM_BYTES, Registers
from hopper.inspection import ResourceUsage
from hopper.wide.config import WideForwardConfig, select_wide_config, validate_wide_config, why_not_wide
from hopper_attention.reference import attention_naive
from tests.compile_pool import usage_of_each
from tests.hopper.hopper_machine import AT_ONCE, Timing, parse
from tests.hopper.on_numpy import Rules
from tests.hopper.test_forward_compile import registers_suffice
from tests.hopper.test_kernels_on_numpy import EPSILON, LATE, relative
from tests.hopper.wgmma_hazards import find_hazards
from tests.hopper.wide_on_numpy import Inputs, packed_wide_on_numpy, wide_on_numpy
from tests.plans import Packed, plan_of
from tests.ptx import ptx_of

CAUSAL_QV = select_wide_config("bfloat16", 512, True, True)
FULL = select_wide_config("float16", 512, False, False)
PACKED_WINDOW = select_wide_config("bfloat16", 256, True, True, True, "varlen", chunk=True)
ALL_SCORES = replace(
    select_wide_config("float16", 512, False, True, softcap=True, alibi=True, sinks=True), cluster=1
)
EVERYTHING = select_wide_config(
    "float16", 512, True, True, True, "varlen", softcap=True, alibi=True, sinks=True
)


COMPILED = [CAUSAL_QV, EVERYTHING]


@pytest.fixture(scope="module")
def usages() -> dict[WideForwardConfig, ResourceUsage]:
    return usage_of_each(COMPILED)


@pytest.mark.parametrize("config", COMPILED, ids=lambda c: c.name)
def test_compiles_without_spills(config: WideForwardConfig, usages) -> None:
    usage = usages[config]
    assert usage.local_bytes == 0
    assert registers_suffice(config, usage) and usage.shared_bytes <= SMEM_BYTES


@pytest.mark.parametrize("config", [CAUSAL_QV, FULL], ids=lambda c: c.name)
def test_nothing_touches_a_product_in_flight(config: WideForwardConfig) -> None:
    count, hazards = find_hazards(ptx_of(config))
    # Two sites of S with 36 steps each or 4, twice P V of the first warpgroup, and once that of the second.
    sites = 2 + config.causal
    assert count >= (36 if config.qv else 4) * sites and hazards == []


def draw(
    config: WideForwardConfig, seqlens: tuple[int, ...], heads: tuple[int, ...], dims=(64, 512)
) -> Inputs:
    """q, k, v and qv of two sequences."""
    generator = torch.Generator().manual_seed(sum(seqlens))
    (sq, sk), (h, hk), (d, dv) = seqlens, heads, dims
    shapes = (2, sq, h, d), (2, sk, hk, d), (2, sk, hk, dv), (2, sq, h, dv)
    dtype = getattr(torch, config.dtype)
    q, k, v, qv = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v, qv


def exact_of(config: WideForwardConfig, inputs: Inputs, scale: float, **options) -> tuple[Tensor, Tensor]:
    q, k, v, qv = inputs
    options |= {"causal": config.causal, "softmax_scale": scale, "qv": qv if config.qv else None}
    return attention_naive(q, k, v, **options)


def check(out: Tensor, lse: Tensor, exact: Tensor, exact_lse: Tensor, lse_error: float = 3e-6) -> None:
    visible = exact_lse > -math.inf
    assert bool((lse[~visible] == -math.inf).all()) and bool((out.transpose(-2, -3)[~visible] == 0).all())
    if visible.any():
        assert relative(out, exact) < EPSILON[out.dtype]
        assert (lse.double() - exact_lse)[visible].abs().max() < lse_error


@pytest.mark.parametrize(
    ("seqlens", "heads", "dims", "ctas"),
    [
        ((70, 200), (2, 1), (64, 512), 3),
        # The second CTA of the cluster has no query.
        ((5, 70), (1, 1), (64, 512), 1),
        # Rows without keys; sizes that TMA fills up, the second half of the columns but for a part.
        ((130, 65), (1, 1), (40, 264), 1),
    ],
)
def test_causal_with_qv(seqlens, heads, dims, ctas) -> None:
    inputs = draw(CAUSAL_QV, seqlens, heads, dims)
    scale = sum(dims) ** -0.5
    out, lse = wide_on_numpy(CAUSAL_QV, inputs, scale, ctas, LATE)
    check(out, lse, *exact_of(CAUSAL_QV, inputs, scale))


def rising_and_falling(seqlen_q: int) -> Inputs:
    """Every block has another maximum than the one before, by many octaves, so that O shrinks in both warpgroups."""
    q, k, v, qv = draw(CAUSAL_QV, (seqlen_q, 330), (1, 1))
    k = k * (1 + torch.arange(330).view(1, -1, 1, 1) % 64 / 16).flip(1).bfloat16()
    v = v * (1 + torch.arange(330, 0, -1).view(1, -1, 1, 1) / 100).bfloat16()
    return q, k, v, qv


def test_maxima_that_rise_and_fall() -> None:
    inputs = rising_and_falling(64)
    out, lse = wide_on_numpy(CAUSAL_QV, inputs, 0.5, 1, LATE)
    check(out, lse, *exact_of(CAUSAL_QV, inputs, 0.5), 2e-4)


def test_without_qv() -> None:
    inputs = draw(FULL, (100, 150), (2, 2))
    out, lse = wide_on_numpy(FULL, inputs, 0.125, 2, LATE)
    check(out, lse, *exact_of(FULL, inputs, 0.125))


def test_changed_scores() -> None:
    """On CTAs by themselves, which claim their tiles."""
    inputs = draw(ALL_SCORES, (65, 100), (2, 1), (64, 448))
    slopes, sinks = torch.tensor([[0.1, 0.3], [0.2, 0.4]]), torch.tensor([1.0, -0.5])
    out, lse = wide_on_numpy(ALL_SCORES, inputs, 0.3, 3, LATE, (), Rules(5.0, slopes, sinks))
    options = {"softcap": 5.0, "alibi_slopes": slopes, "sinks": sinks}
    check(out, lse, *exact_of(ALL_SCORES, inputs, 0.3, **options), 1e-4)


Q = Packed.of((70, 0, 130, 5), behind=9, used=(70, 0, 100, 5))
K = Packed.of((90, 33, 0, 200), behind=3)


def test_packed_sequences_with_a_window_and_a_chunk() -> None:
    config, generator = PACKED_WINDOW, torch.Generator().manual_seed(3)
    shapes = (Q.total, 2, 64), (K.total, 1, 64), (K.total, 1, 256), (Q.total, 2, 256)
    q, k, v, qv = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    for x, lengths in ((q, Q), (qv, Q), (k, K), (v, K)):
        x[lengths.cu_seqlens[-1] :] = math.nan
    plan = plan_of(Q, K, config.tile_m)
    out, lse = packed_wide_on_numpy(config, (q, k, v, qv), plan, Q.batch + 1, 0.06, 2, LATE, (40, 0, 50))
    for i in range(Q.batch):
        (first, rows), (start, keys) = Q.rows(i), K.rows(i)
        rows_q, rows_k = slice(first, first + rows), slice(start, start + keys)
        inputs = q[None, rows_q], k[None, rows_k], v[None, rows_k], qv[None, rows_q]
        if rows and keys:
            exact = exact_of(config, inputs, 0.06, window_left=40, attention_chunk=50)
            check(out[None, rows_q], lse[None, :, rows_q], *exact)
        else:
            assert not out[rows_q].any() and bool((lse[:, rows_q] == -math.inf).all())
        unused = slice(first + rows, Q.cu_seqlens[i + 1])
        assert bool(out[unused].isnan().all())
    assert not out[Q.cu_seqlens[-1] :].any()


def test_bits_do_not_depend_on_timing() -> None:
    inputs = draw(CAUSAL_QV, (20, 180), (1, 1))
    timings = AT_ONCE, LATE, Timing(is_late=True, seed=2)
    results = [wide_on_numpy(CAUSAL_QV, inputs, 0.04, 1, timing) for timing in timings]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("missing", ["wgmma.wait_group", "fence.proxy.async", "bar.sync \t3", "bar.sync \t5"])
def test_a_kernel_without_its_waits_is_caught(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the named barriers WRITTEN and READ; SCORED only says when the tensor cores have time."""
    inputs = rising_and_falling(20)
    lines = ptx_of(CAUSAL_QV).splitlines()
    kept = [line for line in lines if missing not in line]
    assert len(kept) < len(lines)
    monkeypatch.setattr("tests.hopper.wide_on_numpy.program_of", lambda config: parse("\n".join(kept)))
    with pytest.raises(AssertionError):
        out, lse = wide_on_numpy(CAUSAL_QV, inputs, 0.5, 1, LATE)
        check(out, lse, *exact_of(CAUSAL_QV, inputs, 0.5), 2e-4)


BAD = [
    ({"dtype": "float32"}, "dtype is 'float32', allowed: float16, bfloat16"),
    ({"layout": "paged"}, "layout is 'paged', allowed: dense, varlen"),
    ({"head_dim_v": 384}, "head_dim_v is 384, allowed: 256, 512"),
    ({"tile_n": 32}, "tile_n is 32, allowed: 64"),
    ({"chunk": True}, "window is False, allowed with chunk=True: True"),
    ({"cluster": 4}, "cluster is 4, allowed: 1 or 2"),
    ({"stages": 1}, "stages is 1, allowed: 2 or more"),
    ({"stages": 3}, "the tiles need 304640 bytes of shared memory, allowed: 232448"),
    ({"registers": Registers(240, 24)}, "registers are Registers"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_configs(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_wide_config(replace(CAUSAL_QV, **change))


def test_selection() -> None:
    assert select_wide_config("float16", 8, False, True).head_dim_v == 256
    assert select_wide_config("float16", 264, False, True).head_dim_v == 512
    assert why_not_wide(64, 512) == "" and "head_dim is 72" in why_not_wide(72, 8)
    names = {config.name for config in (CAUSAL_QV, FULL, PACKED_WINDOW, ALL_SCORES, EVERYTHING)}
    assert len(names) == 5
