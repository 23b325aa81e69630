"""Kernels that leave out what lies behind the end of a sequence, on a GPU: warpgroups without a query let the key
blocks of their tile pass, and of a last block few keys are worked on."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from hopper.forward.fp8.tilings import shipped_fp8_forward_configs
from hopper.forward.tilings import select_plain_config, shipped_forward_configs, shipped_plain_configs
from hopper_attention import flash_attn_func, flash_attn_quantized_func, flash_attn_varlen_func, quantize_qkv
from hopper_attention.quantization import Fp8Quantization
from tests.gpu.conftest import compile_together
from tests.gpu.test_fp8 import find_differences

pytestmark = pytest.mark.gpu

HEAD_DIMS = (
    (64, 64),
    (72, 72),
    (80, 80),
    (96, 96),
    (104, 104),
    (128, 128),
    (160, 160),
    (192, 128),
    (192, 192),
)
HEAD_DIMS += ((256, 256),)
LENGTHS = ((1, 300), (70, 129), (140, 333), (200, 1), (330, 700), (257, 1301), (600, 2049))
"""Queries and keys: of the last tile of 128 or 192 queries one warpgroup has some, or two; the last block has few keys
or nearly all."""


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> None:
    """Those that this is about, side by side."""
    shipped = *shipped_forward_configs(), *shipped_plain_configs(), *shipped_fp8_forward_configs()
    compile_together([config for config in shipped if config.lets_blocks_pass])


def test_such_kernels_are_what_runs() -> None:
    for head_dim in (64, 80, 96, 128, 192, 256):
        config = select_plain_config("bfloat16", head_dim, head_dim, False, 300, has_many_tiles=True)
        assert config.lets_blocks_pass or config.consumers == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pair", HEAD_DIMS, ids=str)
def test_16_bits(draw, judge, pair: tuple[int, int], dtype: torch.dtype) -> None:
    """Few tiles, and many a CTA; a CTA that had other tiles before leaves nothing behind in them."""
    for lengths in LENGTHS:
        for batch in (1, 60):
            x = draw(dtype, batch, lengths, (8, 4), *pair)
            out, lse = flash_attn_func(x.q, x.k, x.v, return_attn_probs=True)
            assert judge(x, out, lse, False) == [], (lengths, batch)
            for _ in range(3):
                assert torch.equal(flash_attn_func(x.q, x.k, x.v), out), (lengths, batch)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_packed_sequences_have_the_results_that_they_have_alone(draw, head_dim: int) -> None:
    lengths = [n for n, _ in LENGTHS for _ in range(20)], [n for _, n in LENGTHS for _ in range(20)]
    totals = sum(lengths[0]), sum(lengths[1])
    x = draw(torch.bfloat16, 1, totals, (8, 4), head_dim)
    q, k, v = x.q[0], x.k[0], x.v[0]
    starts = [torch.tensor([0, *accumulate(n)], device="cuda", dtype=torch.int32) for n in lengths]
    most = max(lengths[0]), max(lengths[1])
    out = flash_attn_varlen_func(q, k, v, *starts, *most)
    assert torch.equal(flash_attn_varlen_func(q, k, v, *starts, *most), out)
    for number in range(0, len(lengths[0]), 17):
        of_q, of_k = (slice(int(each[number]), int(each[number + 1])) for each in starts)
        alone = flash_attn_func(q[None, of_q], k[None, of_k], v[None, of_k])[0]
        # Blocks of other widths are added up in another order.
        assert (out[of_q].float() - alone.float()).norm() < 4e-3 * alone.float().norm()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_fp8(draw, head_dim: int, causal: bool) -> None:
    """Peaky scores have the same bits at each call."""
    quantization = Fp8Quantization(smooth_v=False)
    for lengths in LENGTHS:
        for batch in (1, 30):
            x = draw(torch.bfloat16, batch, lengths, (4, 2), head_dim)
            peaky = quantize_qkv(4 * x.q, x.k, x.v, quantization=quantization)
            out = flash_attn_quantized_func(peaky, causal=causal)
            for _ in range(3):
                assert torch.equal(flash_attn_quantized_func(peaky, causal=causal), out), (lengths, batch)
            assert torch.isfinite(out).all()
        parts = quantize_qkv(x.q, x.k, x.v, quantization=quantization)
        assert not find_differences(parts, causal), lengths
