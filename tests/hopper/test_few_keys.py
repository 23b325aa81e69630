"""FP8 kernels for few keys, and those of head_dim 256, which load K ahead and whose two warpgroups walk apart: which
config serves, and their PTX run without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_kernels.key_blocks import KeyBlocks, PartOfBlocks, SharedBlocks
from cute_kernels.problem import VARLEN
from hopper.forward.fp8.config import Fp8ForwardConfig, Softmax
from hopper.forward.fp8.kernel import Fp8ForwardKernel
from hopper.forward.fp8.tilings import (
    FP8_TILINGS,
    select_fp8_forward_config,
    shipped_fp8_forward_configs,
    shipped_long_fp8_forward_configs,
)
from hopper_attention.quantization import Fp8Quantization, QuantizedQKV, quantize_qkv
from hopper_attention.reference import attention_naive
from tests.hopper.fp8_errors import allowed_ratio, emulate
from tests.hopper.on_numpy import fp8_forward_on_numpy
from tests.hopper.test_kernels_on_numpy import LATE, check_fp8, draw, relative

FEW = {
    (64, False): 512,
    (64, True): 1024,
    (128, False): 512,
    (128, True): 1024,
    (256, False): 640,
    (256, True): 1536,
}


def chosen(head_dim: int, causal: bool, keys: int, **asked: bool) -> Fp8ForwardConfig:
    return select_fp8_forward_config(head_dim, head_dim, causal, "bfloat16", keys, **asked)


@pytest.mark.parametrize(("head_dim", "causal"), FP8_TILINGS)
def test_few_keys_take_each_maximum(head_dim: int, causal: bool) -> None:
    most = FEW[head_dim, causal]
    few, many = (chosen(head_dim, causal, n, half_scores=True, without_lse=True) for n in (most, most + 1))
    assert few.softmax is Softmax.EAGER and many.softmax is Softmax.HALF_SCORES
    assert few.tile_n == many.tile_n == 128 and few.tile_m == 128
    # What the quantizer made for one serves the other, and codes of any size need no lowered queries here.
    assert not few.lowers_queries and chosen(head_dim, causal, most, without_lse=True) == few


@pytest.mark.parametrize(("head_dim", "causal"), FP8_TILINGS)
def test_a_returned_lse_has_scores_in_float32_wherever_keys_are_few(head_dim: int, causal: bool) -> None:
    for keys in (1, 512, FEW[head_dim, causal]):
        assert chosen(head_dim, causal, keys, half_scores=True).score_dtype == "float32"
        assert chosen(head_dim, causal, keys).softmax is Softmax.EAGER


def test_lowered_queries_have_this_softmax_longer_at_head_dim_64() -> None:
    asked = {"without_lse": True}
    assert chosen(64, False, 1024, **asked).softmax is Softmax.EAGER
    assert chosen(64, False, 1024, half_scores=True, **asked).softmax is Softmax.HALF_SCORES


def test_short_ends() -> None:
    few = {d: chosen(d, True, 512, half_scores=True) for d in (64, 128, 256)}
    assert [few[d].starts_early for d in few] == [True, True, False]
    assert [few[d].has_divisors for d in few] == [True, True, False]
    assert [few[d].finalizes_early for d in few] == [False, True, False]
    assert [few[d].shares_first_block for d in few] == [True, True, False]
    assert [few[d].walks_apart for d in few] == [False, False, True]
    assert {few[d].first_widths for d in few} == {(64,)}
    full = chosen(128, False, 512, half_scores=True)
    assert full.finalizes_early and full.has_divisors and not full.shares_first_block
    window, packed = replace(few[64], window=True), replace(few[128], layout=VARLEN)
    assert not window.shares_first_block and not window.first_widths
    # Packed sequences have it where they end.
    assert not packed.shares_first_block and packed.first_widths == (64,)


def test_k_is_loaded_ahead_where_there_are_two_stages() -> None:
    configs = *shipped_fp8_forward_configs(), *shipped_long_fp8_forward_configs()
    assert {c.head_dim for c in configs if c.loads_k_ahead} == {256}
    others = [c for c in configs if c.pipelined and not c.v_rows and c.softmax is not Softmax.LAGGING]
    assert all(c.loads_k_ahead == (c.stages == 2) for c in others)
    assert not any(c.loads_k_ahead for c in configs if c.softmax is Softmax.LAGGING)


def test_two_warpgroups_walk_apart_at_head_dim_256_alone() -> None:
    configs = *shipped_fp8_forward_configs(), *shipped_long_fp8_forward_configs()
    two = [c for c in configs if c.consumers == 2 and c.walks_apart]
    assert two and {c.head_dim for c in two} == {256}
    assert all(c.causal and not c.v_rows and not c.two_level for c in two)
    assert not any(replace(c, layout=VARLEN).walks_apart for c in two if not c.run_blocks)
    kinds = {
        chosen(256, True, 9000, half_scores=True): PartOfBlocks,
        chosen(128, True, 512, half_scores=True): SharedBlocks,
        chosen(128, False, 512, half_scores=True): KeyBlocks,
    }
    blocks = KeyBlocks(*[None] * 5)
    for config, kind in kinds.items():
        kernel = Fp8ForwardKernel(config)
        if kind is not PartOfBlocks:
            assert type(kernel._blocks_of_warpgroup(blocks, 0)) is kind
        assert config.walks_apart == (kind is PartOfBlocks)


def quantized(seqlens: tuple[int, int], head_dim: int) -> QuantizedQKV:
    q, k, v = draw(torch.bfloat16, seqlens, (2, 1), head_dim)
    k[:, 64:] *= 2
    return quantize_qkv(q, k, v, quantization=Fp8Quantization(block_k=128))


@pytest.mark.parametrize(
    ("head_dim", "causal", "seqlens"),
    [
        (64, True, (200, 200)),
        (64, True, (150, 333)),
        (128, True, (300, 300)),
        (128, True, (129, 64)),
        (256, True, (200, 330)),
        (256, True, (300, 300)),
        (256, False, (140, 333)),
    ],
)
def test_each_maximum_of_few_keys(head_dim: int, causal: bool, seqlens: tuple[int, int]) -> None:
    """Tiles whose warpgroups see different parts of the block visited first, rows without keys, and several tiles a
    CTA, with what is asynchronous as late as the waits allow."""
    check_fp8(quantized(seqlens, head_dim), causal, 128)


@pytest.mark.parametrize("seqlens", [(300, 300), (140, 470), (260, 64), (64, 640)])
@pytest.mark.parametrize("causal", [False, True])
def test_loads_of_k_ahead(causal: bool, seqlens: tuple[int, int]) -> None:
    """Scores in float16 at head_dim 256: one block, two, and more, of tiles whose warpgroups visit as many or not."""
    parts = quantized(seqlens, 256)
    config = select_fp8_forward_config(256, 256, causal, "bfloat16", 2048, 128, half_scores=True)
    assert config.softmax is Softmax.HALF_SCORES and config.loads_k_ahead
    out, _ = fp8_forward_on_numpy(config, parts, 256**-0.5, LATE)
    exact, _ = attention_naive(*(x.dequantize() for x in (parts.q, parts.k, parts.v)), causal=causal)
    emulated = max(relative(like, exact) for like, _ in emulate(parts, causal, True))
    assert relative(out, exact) <= allowed_ratio(out, lagging=True) * emulated + 2e-4
