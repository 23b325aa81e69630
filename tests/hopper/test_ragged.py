"""Kernels that leave out what lies behind the end of a sequence: which do, and their PTX run without a GPU."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.problem import DENSE, VARLEN
from hopper.config import ForwardConfig
from hopper.forward.fp8.config import Fp8ForwardConfig, Softmax
from hopper.forward.fp8.tilings import select_fp8_forward_config, with_lone_scales, with_runs
from hopper.forward.tilings import select_forward_config, select_plain_config
from hopper_attention.quantization import Fp8Quantization, quantize_qkv
from hopper_attention.reference import attention_naive
from tests.hopper.fp8_errors import allowed_ratio, emulate
from tests.hopper.on_numpy import fp8_forward_on_numpy
from tests.hopper.test_kernels_on_numpy import LATE, check_forward, draw, relative


def plain(head_dim: int, keys: int, causal: bool = False) -> ForwardConfig:
    return select_plain_config("bfloat16", head_dim, head_dim, causal, keys, True)


PARTS = {"half_scores": True, "without_lse": True}
TENSORS = {"without_lse": True}
"""What is asked of parts of ``quantize_qkv``, and of e4m3 tensors with descales."""


def fp8(head_dim: int, keys: int, causal: bool = False, **asked) -> Fp8ForwardConfig:
    config = select_fp8_forward_config(head_dim, head_dim, causal, "bfloat16", keys, **asked)
    return config if "half_scores" in asked or "exact_lse" in asked else with_lone_scales(config)


def test_kernels_of_16_bits_that_let_blocks_pass() -> None:
    for head_dim, keys in (
        (64, 2048),
        (80, 2048),
        (96, 300),
        (104, 300),
        (128, 300),
        (192, 2048),
        (256, 2048),
    ):
        assert plain(head_dim, keys).lets_blocks_pass
        assert not plain(head_dim, keys, causal=True).lets_blocks_pass
    assert plain(64, 2048).first_widths == (64,) and not plain(192, 2048).first_widths
    packed = select_forward_config("bfloat16", 128, 128, False, 0, layout=VARLEN)
    assert packed.lets_blocks_pass and packed.first_widths == (64,) and packed.ping_pong
    # One warpgroup has a tile for itself, two that walk apart do so already, and others are slower by it.
    left_alone = (64, 512), (128, 4096), (128, 1024), (72, 2048), (160, 2048)
    assert not any(plain(*each).lets_blocks_pass for each in left_alone)
    for layout in (DENSE, VARLEN):
        assert not select_forward_config("bfloat16", 192, 128, False, 2048, layout=layout).lets_blocks_pass
        packed = select_forward_config("bfloat16", 160, 160, False, 2048, layout=layout)
        assert packed.lets_blocks_pass == (layout == VARLEN)


def test_fp8_kernels_that_let_blocks_pass() -> None:
    for head_dim in (64, 128, 256):
        for keys in (400, 2048):
            assert fp8(head_dim, keys, **PARTS).lets_blocks_pass
        assert fp8(head_dim, 400, **TENSORS).lets_blocks_pass == (head_dim == 64)
        assert fp8(head_dim, 400, layout=VARLEN, **TENSORS).lets_blocks_pass
        assert fp8(head_dim, 2048, exact_lse=True).lets_blocks_pass == (head_dim < 256)
    assert fp8(128, 2048, **TENSORS).lets_blocks_pass and not fp8(64, 2048, **TENSORS).lets_blocks_pass
    few_causal = [fp8(head_dim, 400, causal=True, **PARTS) for head_dim in (64, 128, 256)]
    assert [c.lets_blocks_pass for c in few_causal] == [True, True, False] and few_causal[2].walks_apart
    assert fp8(256, 400, True, v_rows=True, layout=VARLEN, **TENSORS).lets_blocks_pass
    assert not fp8(256, 400, True, v_rows=True, **TENSORS).lets_blocks_pass
    assert not with_runs(fp8(128, 9000, **PARTS), 9000).lets_blocks_pass
    rows = {"v_rows": True, **TENSORS}
    assert [fp8(d, 400, **rows).lets_blocks_pass for d in (64, 128, 256)] == [True, False, False]
    assert fp8(128, 400, layout=VARLEN, **rows).lets_blocks_pass
    assert fp8(128, 1000, **rows).lets_blocks_pass and fp8(256, 2000, **rows).lets_blocks_pass


def test_widths_of_the_last_block() -> None:
    assert fp8(64, 2048, **PARTS).first_widths == (32, 64, 96)
    assert fp8(64, 400, **PARTS).first_widths == fp8(128, 400, **PARTS).first_widths == (64,)
    assert fp8(128, 2048, **PARTS).first_widths == fp8(256, 2048, **PARTS).first_widths == (64,)
    wide = fp8(64, 9000, **PARTS)
    assert wide.tile_n == 192 and wide.lets_blocks_pass and not wide.first_widths
    assert not fp8(128, 2048, exact_lse=True).first_widths and not fp8(128, 2048, **TENSORS).first_widths
    assert fp8(128, 1000, v_rows=True, **TENSORS).first_widths == (64,)
    assert fp8(128, 2048, layout=VARLEN, **TENSORS).first_widths == (64,)


REST = [(70, 1), (140, 300), (260, 96), (330, 190)]
"""Queries and keys: tiles with one warpgroup or two that have no query, after others and alone; last blocks of few
keys and of nearly all."""


@pytest.mark.parametrize("seqlens", REST)
@pytest.mark.parametrize(("head_dim", "keys"), [(64, 2048), (96, 300), (128, 300), (128, 410), (192, 2048)])
def test_blocks_pass_in_the_turns_of_others(head_dim: int, keys: int, seqlens: tuple[int, int]) -> None:
    """With and without turns, and where the first product of a tile takes one too."""
    config = select_plain_config("bfloat16", head_dim, head_dim, False, keys)
    assert config.lets_blocks_pass and config.ping_pong == (head_dim > 64)
    check_forward(config, draw(torch.bfloat16, seqlens, (2, 1), head_dim), ctas=2)


@pytest.mark.parametrize("seqlens", REST)
@pytest.mark.parametrize(
    ("head_dim", "keys", "causal"),
    [
        (64, 400, False),
        (64, 2048, False),
        (64, 400, True),
        (128, 400, False),
        (128, 400, True),
        (128, 2048, False),
        (256, 400, False),
        (256, 2048, False),
    ],
)
def test_ragged_ends_in_fp8(head_dim: int, keys: int, causal: bool, seqlens: tuple[int, int]) -> None:
    q, k, v = draw(torch.bfloat16, seqlens, (2, 1), head_dim)
    parts = quantize_qkv(q, 2 * k, v, quantization=Fp8Quantization(block_k=128, smooth_v=False))
    config = fp8(head_dim, keys, causal, **PARTS)
    assert config.lets_blocks_pass and config.first_widths
    out, _ = fp8_forward_on_numpy(config, parts, head_dim**-0.5, LATE)
    exact, _ = attention_naive(*(x.dequantize() for x in (parts.q, parts.k, parts.v)), causal=causal)
    lags = config.softmax is Softmax.HALF_SCORES
    emulated = max(relative(like, exact) for like, _ in emulate(parts, causal, lags))
    assert relative(out, exact) <= (allowed_ratio(out, lagging=True) if lags else 1.03) * emulated + 2e-4
