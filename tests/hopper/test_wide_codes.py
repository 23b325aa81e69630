"""The FP8 kernels that return an exact LSE, on a machine whose WGMMA of e4m3 cuts off as the tensor cores do."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from hopper.config import DTYPES, validate_forward_config
from hopper.forward.fp8.config import FP8_DTYPE, Fp8ForwardConfig, Softmax
from hopper.forward.fp8.tilings import (
    FP8_HALF_SCORES_TILINGS,
    FP8_TILINGS,
    select_fp8_forward_config,
    shipped_exact_lse_configs,
)
from hopper_attention.quantization import Fp8Quantization, QuantizedQKV, quantize_qkv
from hopper_attention.reference import attention_naive, attention_tiled_fp8
from tests.hopper import wgmma_steps
from tests.hopper.fp8_sums import add_as_the_tensor_cores
from tests.hopper.hopper_machine import Timing
from tests.hopper.on_numpy import fp8_forward_on_numpy
from tests.hopper.wgmma_hazards import find_hazards
from tests.ptx import ptx_of

SHIPPED = shipped_exact_lse_configs()
HEAD_DIMS = (64, 128, 256)
LATE = Timing(is_late=True, seed=1)
ALLOWED = 1e-4
"""Of the LSE, absolute."""


def select(head_dim: int, block_k: int = 128, causal: bool = False) -> Fp8ForwardConfig:
    return select_fp8_forward_config(head_dim, head_dim, causal, "bfloat16", 8192, block_k, exact_lse=True)


# configs


def test_every_block_that_is_made_for_another_kernel_has_one() -> None:
    assert len({config.name for config in SHIPPED}) == len(SHIPPED) == 24
    for (head_dim, causal), dtype in product(FP8_TILINGS, DTYPES):
        others = FP8_TILINGS[head_dim, causal] + FP8_HALF_SCORES_TILINGS[head_dim, causal]
        for width in (0, *(tiling.tile_n for tiling in others)):
            options = {"half_scores": True, "exact_lse": True}
            config = select_fp8_forward_config(head_dim, 64, causal, dtype, 2048, width, **options)
            assert config in SHIPPED and width % config.tile_n == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "widths"),
    [
        (64, {0: (192, 96), 64: (64, 64), 96: (96, 96), 128: (64, 64), 192: (192, 96), 384: (192, 96)}),
        (128, {0: (128, 128), 64: (64, 64), 128: (128, 128), 192: (64, 64), 256: (128, 128)}),
        (256, {0: (64, 64), 64: (64, 64), 128: (64, 64), 192: (64, 64)}),
    ],
)
def test_blocks_by_those_of_a_scale(head_dim: int, widths: dict[int, tuple[int, int]], causal: bool) -> None:
    """The widest that divide it, and narrower ones at head_dim 64 where two levels are asked for."""
    for block_k, keys in widths.items():
        configs = [
            select_fp8_forward_config(
                head_dim, head_dim, causal, "bfloat16", 4096, block_k, two_level=two_level, exact_lse=True
            )
            for two_level in (False, True)
        ]
        assert tuple(config.tile_n for config in configs) == keys
        assert all(config in SHIPPED for config in configs)


@pytest.mark.parametrize(
    ("head_dim", "block_k", "allowed"),
    [(64, 80, "64 or 96 or 192"), (128, 96, "64 or 128"), (128, 176, "64 or 128"), (256, 160, "64")],
)
def test_a_scale_of_other_keys_is_refused(head_dim: int, block_k: int, allowed: str) -> None:
    message = f"block_k is {block_k}, allowed at head_dim {head_dim}: multiples of {allowed}$"
    with pytest.raises(ValueError, match=message):
        select(head_dim, block_k)


def test_invalid_fields_are_named() -> None:
    for change, message in (
        ({"polynomial_pairs": 3}, "polynomial_pairs is 3, allowed with wide_codes: 0"),
        ({"softmax": Softmax.LAGGING}, "wide_codes is True, allowed with softmax 'lagging': False"),
    ):
        with pytest.raises(ValueError, match=message):
            validate_forward_config(replace(select(128), **change))
    with pytest.raises(ValueError, match="v_rows is True, allowed with exact_lse: False"):
        select_fp8_forward_config(128, 128, False, "bfloat16", 2048, v_rows=True, exact_lse=True)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_no_instruction_touches_a_register_of_a_wgmma_in_flight(head_dim: int) -> None:
    assert find_hazards(ptx_of(select(head_dim)))[1] == []


# numbers


def peaky(head_dim: int, seqlen_k: int = 100) -> QuantizedQKV:
    """Scores of some 25, the largest of which have columns that agree in sign."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 1, head_dim, generator=generator) for n in (40, seqlen_k, seqlen_k))
    q, k = 1.2 * q + 1.5 * q.sign(), 1.2 * k + 1.5 * k[:, :1].sign()
    k[:, ::7] = q[:, : len(k[0, ::7])] * 1.2
    q = q * 25 / (head_dim**0.5 * 10)
    quantization = Fp8Quantization(rotate=False, block_k=64, smooth_v=False)
    return quantize_qkv(*(x.bfloat16() for x in (q, k, v)), quantization=quantization)


def errors(parts: QuantizedQKV, config: Fp8ForwardConfig, causal: bool = False) -> tuple[float, float]:
    """The largest of the LSE, and the relative one of the output over the emulation's."""
    scale = parts.q.shape[3] ** -0.5
    out, lse = fp8_forward_on_numpy(config, parts, scale, LATE)
    exact, exact_lse = attention_naive(*(x.dequantize() for x in (parts.q, parts.k, parts.v)), causal=causal)
    like, _ = attention_tiled_fp8(parts, causal=causal)
    visible = exact_lse > -torch.inf
    assert torch.equal(visible, lse > -torch.inf)
    error, emulated = ((x.double() - exact).norm() for x in (out, like))
    return (lse - exact_lse)[visible].abs().max().item(), (error / emulated).item()


@pytest.mark.parametrize(("head_dim", "causal"), [(64, False), (128, True), (256, False)])
def test_the_lse_is_exact_where_single_keys_count(
    head_dim: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the output as good as the emulation's, which takes every maximum."""
    monkeypatch.setattr(wgmma_steps, "add_products", add_as_the_tensor_cores)
    of_lse, of_out = errors(peaky(head_dim), select(head_dim, 64, causal), causal)
    assert of_lse < ALLOWED and of_out < 1.01


def test_codes_of_eight_bits_lose_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma_steps, "add_products", add_as_the_tensor_cores)
    narrow = replace(select(128, 64, causal=True), wide_codes=False)
    assert errors(peaky(128), narrow, causal=True)[0] > 20 * ALLOWED


def test_only_q_and_k_are_wider() -> None:
    """In shared memory, where that of V and of O stays as it is."""
    config = select(128)
    assert (config.qk_dtype, config.dtype, config.element_bytes) == ("float16", FP8_DTYPE, 1)
    narrow = replace(config, wide_codes=False)
    assert config.q_bytes == 2 * narrow.q_bytes and config.o_bytes == narrow.o_bytes
    assert config.kv_bytes == narrow.kv_bytes * 3 // 2
