"""FP8 attention to so many keys that the kernel adds O up in runs (``with_runs``)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hopper.forward.fp8.tilings import RUNLESS_KEYS
from hopper_attention import flash_attn_fp8_func, flash_attn_quantized_func, quantize_qkv
from hopper_attention.fp8_rules import select_config
from hopper_attention.launch.fp8 import problem_of
from hopper_attention.launch.value_mean import find_of_runs
from hopper_attention.quantization import Fp8Quantization, QuantizedQKV, restore_values
from hopper_attention.reference import attention_naive
from hopper_attention.value_mean_rules import means_of_runs
from tests.gpu.test_fp8 import allowed_error, oracle_of, rms
from tests.hopper.edges import differences_of
from tests.hopper.fp8_errors import emulate

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("few_tiles")]

VALUES = {
    "N(0, 1)": lambda v: v,
    "N(1, 1)": lambda v: v + 1,
    "lognormal": torch.exp,
    "squares": lambda v: v.clamp(min=0).square(),
    "a mean from 0 to 2": lambda v: v + 2 * share_of_keys(v),
    "a mean from 0 to 8": lambda v: v + 8 * share_of_keys(v),
    "lognormal, and a mean from 0 to 2": lambda v: v.exp() + 2 * share_of_keys(v),
    "a mean of 2 in the last quarter": lambda v: v + 2 * (share_of_keys(v) > 0.75),
    "a mean of 2 sin, three periods": lambda v: v + 2 * torch.sin(6 * math.pi * share_of_keys(v)),
    "-1 in one half, 1 in the other": lambda v: v + torch.where(share_of_keys(v) < 0.5, -1.0, 1.0),
    "-0.3 in one half, 0.3 in the other": lambda v: v + torch.where(share_of_keys(v) < 0.5, -0.3, 0.3),
    "a mean of 0.4 in the last quarter": lambda v: v + 0.4 * (share_of_keys(v) > 0.75),
    "a mean of their own for each 1500 keys": lambda v: v + 2 * means_of_documents(v, 1500),
    "a mean of their own for each 300 keys": lambda v: v + 2 * means_of_documents(v, 300),
}


def share_of_keys(v: Tensor) -> Tensor:
    return torch.linspace(0, 1, v.shape[1], device="cuda")[:, None, None]


def means_of_documents(v: Tensor, keys: int) -> Tensor:
    """N(0, 1) for each so many keys, and each column of a head."""
    documents = -(-v.shape[1] // keys)
    means = torch.randn(v.shape[0], documents, *v.shape[2:], device="cuda")
    return means.repeat_interleave(keys, 1)[:, : v.shape[1]]


def draw(
    seqlen_q: int, seqlen_k: int, head_dim: int, heads: int = 4, kv_heads: int = 2, batch: int = 1
) -> list[Tensor]:
    return [
        torch.randn(batch, n, h, head_dim, device="cuda")
        for n, h in ((seqlen_q, heads), (seqlen_k, kv_heads), (seqlen_k, kv_heads))
    ]


def quantized(*tensors: Tensor, dtype: torch.dtype = torch.bfloat16, **options: int) -> QuantizedQKV:
    return quantize_qkv(*(x.to(dtype) for x in tensors), quantization=Fp8Quantization(**options))


def has_runs(parts: QuantizedQKV, causal: bool) -> bool:
    return select_config(problem_of(parts, causal, False, without_lse=True)).run_blocks > 0


@pytest.mark.parametrize("lengths", [(300, RUNLESS_KEYS + 1), (1, 3 * RUNLESS_KEYS - 77)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_agrees_with_emulation(head_dim: int, causal: bool, lengths: tuple[int, int]) -> None:
    """Also with queries times 4, whose maxima rise between runs."""
    for scale in (1.0, 4.0):
        q, k, v = draw(*lengths, head_dim, batch=2)
        parts = quantized(scale * q, k, v)
        assert has_runs(parts, causal)
        out = flash_attn_quantized_func(parts, causal=causal)
        oracle = oracle_of(parts, causal)
        emulated = max(rms(like.double() - oracle) for like, _ in emulate(parts, causal, lagging=True))
        assert rms(out.double() - oracle) <= allowed_error(emulated, oracle, out, True, lengths[1])


@pytest.mark.parametrize("causal", [False, True])
def test_float16_and_the_lse(causal: bool, few_tiles: bool) -> None:
    """With the LSE tiles are the same, however few. Without a mask low ones have the bits of high ones too."""
    parts = quantized(*draw(200, 20_000, 128), dtype=torch.float16)
    out, lse = flash_attn_quantized_func(parts, causal=causal, return_attn_probs=True, exact_lse=False)
    without_lse = flash_attn_quantized_func(parts, causal=causal)
    assert has_runs(parts, causal) and (torch.equal(out, without_lse) or (few_tiles and causal))
    assert rms(out.double() - without_lse) < 0.03 * rms(out)
    exact, exact_lse = attention_naive(*(x.dequantize() for x in (parts.q, parts.k, parts.v)), causal=causal)
    exact = restore_values(exact, parts, causal)
    assert rms(out.double() - exact) < 0.04 * rms(exact) and (lse - exact_lse).abs().max() < 0.01


@pytest.mark.parametrize(("keys", "causal"), [(65_536, False), (20_011, True)])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("values", VALUES)
def test_sums_of_values_of_any_kind(values: str, head_dim: int, keys: int, causal: bool) -> None:
    """Keys that all count: within 1.5 of the error of sums in float32."""
    q, k, v = draw(1000 if causal else 256, keys, head_dim)
    tensors = [x.bfloat16() for x in (q, k, VALUES[values](v))]
    exact, _ = attention_naive(*tensors, causal=causal)
    outs = [
        flash_attn_fp8_func(*tensors, causal=causal, two_level_accumulation=two_level)
        for two_level in (False, True)
    ]
    error, of_float32 = (rms(out.double() - exact) for out in outs)
    assert error < 1.5 * of_float32


SKEWED = {"lognormal": torch.exp, "squares": torch.square, "SiLU": lambda v: torch.nn.functional.silu(2 * v)}


@pytest.mark.parametrize("queries", [0.1, 1.0, 2.0])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("values", SKEWED)
def test_skewed_values_pay_for_what_their_sum_loses(values: str, head_dim: int, queries: float) -> None:
    """Of 8192 keys, which are one sum beyond head_dim 64: up to 1.5 of float32's error unless they pay, 1.34 if so."""
    q, k, v = draw(128, 8192, head_dim)
    tensors = [x.bfloat16() for x in (queries * q, k, SKEWED[values](v))]
    exact, _ = attention_naive(*tensors)
    error, of_float32 = (
        rms(flash_attn_fp8_func(*tensors, two_level_accumulation=two_level).double() - exact)
        for two_level in (False, True)
    )
    assert error < 1.42 * of_float32


@pytest.mark.parametrize("keys", [RUNLESS_KEYS + 1, 12_001, 66_001])
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_means_of_runs_are_those_of_the_twin(head_dim: int, keys: int) -> None:
    """Of two heads one has a mean that changes. The other goes up and down, so that no run lies apart by chance."""
    v = draw(1, keys, head_dim, batch=2)[2] + 1
    v[:, ::2, 0], v[:, 1::2, 0] = 1.5, 0.5
    v[:, keys // 3 :, 1, ::3] += 1
    v[:, 5, :, 1] = math.nan
    v = v.bfloat16()
    found = find_of_runs(v.dtype, tuple(v.shape), 8, 128, v.device)(v)
    means, changes = means_of_runs(v, 1024, -(-keys // 128) * 128)
    assert torch.equal(found.changes.amax(-1), changes) and changes.tolist() == [[0, 1]] * 2
    more = found.means[:, :-1] - found.means[:, 1:]
    differences = differences_of(found.differences.cpu(), more.shape[1] + 1)
    assert (
        torch.allclose(differences[:, 1:], more.cpu(), rtol=2.0**-16, atol=0) and not differences[:, 0].any()
    )
    # They add up in another order, which may move what is rounded by a step of 1/64.
    assert (found.means == means).float().mean() > 0.99 and (found.means - means).abs().max() < 2.0**-5


@pytest.mark.parametrize("causal", [False, True])
def test_every_tile_where_a_mean_changes(causal: bool) -> None:
    """Each has the bits that it has in a call of its own, whatever was noted in its place before."""
    q, k, v = draw(20_011, 20_011, 128, 2, 1)
    v = v + 2 * torch.sin(9 * share_of_keys(v))
    options = {"quantization": Fp8Quantization(block_q=1), "causal": causal}
    whole = flash_attn_fp8_func(*(x.bfloat16() for x in (q, k, v)), **options)
    for head in range(2):
        of_head = [x.bfloat16() for x in (q[:, :, head : head + 1].contiguous(), k, v)]
        assert torch.equal(flash_attn_fp8_func(*of_head, **options)[:, :, 0], whole[:, :, head])
    tensors = [x.bfloat16() for x in (q, k, v)]
    expected = flash_attn_fp8_func(*tensors, two_level_accumulation=True, **options)
    off = (whole.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    assert off.max() < 0.3 and rms(whole.double() - expected.double()) < 0.05 * rms(expected)


@pytest.mark.parametrize("causal", [False, True])
def test_every_tile_of_a_long_sequence(causal: bool) -> None:
    """More tiles than CTAs, whose sums lie in the same memory one after the other: each has the bits that it has in a
    call of its own, and rows that are masked nothing of others."""
    q, k, v = draw(20_011, 20_011, 128, 2, 1)
    parts = quantized(q, k, v, block_q=1)
    whole = flash_attn_quantized_func(parts, causal=causal)
    assert torch.equal(whole, flash_attn_quantized_func(parts, causal=causal))
    expected = flash_attn_quantized_func(parts, causal=causal, two_level_accumulation=True)
    off = (whole.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    assert off.max() < 0.2 and rms(whole.double() - expected.double()) < 0.04 * rms(expected)
    for head in range(2):
        alone = flash_attn_quantized_func(quantized(q[:, :, head : head + 1], k, v, block_q=1), causal=causal)
        assert torch.equal(alone[:, :, 0], whole[:, :, head])


def test_streams_and_graphs() -> None:
    """Each call has memory of its own."""
    tensors = [x.bfloat16() for x in draw(3000, 20_000, 128)]
    expected = flash_attn_fp8_func(*tensors, causal=True)
    streams, outs = [torch.cuda.Stream() for _ in range(3)], []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(4):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(flash_attn_fp8_func(*tensors, causal=True))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flash_attn_fp8_func(*tensors, causal=True)
    captured.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)
