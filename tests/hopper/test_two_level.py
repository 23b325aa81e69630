"""Two-level accumulation in the FP8 kernel: its configs, its numbers without a GPU, and what it is for."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from hopper.config import DTYPES, validate_forward_config
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.forward.fp8.tilings import FP8_TILINGS, select_fp8_forward_config, shipped_fp8_forward_configs
from hopper_attention.quantization import Fp8Quantization, quantize_qkv
from hopper_attention.reference import attention_naive, attention_tiled_fp8
from tests.hopper import wgmma_steps
from tests.hopper.fp8_sums import add_as_the_tensor_cores, wgmma_product
from tests.hopper.hopper_machine import Timing
from tests.hopper.on_numpy import fp8_forward_on_numpy
from tests.hopper.wgmma_hazards import find_hazards
from tests.ptx import ptx_of

TWO_LEVEL = shipped_fp8_forward_configs(two_level=True)

LATE = Timing(is_late=True, seed=1)
"""What is asynchronous happens as late as the waits allow: a missing one shows."""


def select(head_dim: int, block_k: int, causal: bool = False, v_rows: bool = False) -> Fp8ForwardConfig:
    return select_fp8_forward_config(
        head_dim, head_dim, causal, "bfloat16", 8192, block_k, v_rows, two_level=True
    )


# configs


def test_configs_are_named_apart_and_selected() -> None:
    one_level = shipped_fp8_forward_configs()
    names = {config.name for config in (*one_level, *TWO_LEVEL)}
    assert len(names) == len(one_level) + len(TWO_LEVEL)
    assert all(c.two_level and c.name.endswith("_twolevel") and not c.late_rescale for c in TWO_LEVEL)
    assert not any(config.two_level or "twolevel" in config.name for config in one_level)
    sizes = product((16, 64, 80, 128, 136, 256), (False, True), DTYPES, (128, 2048, 65536), (0, 64, 128))
    for head_dim, causal, dtype, seqlen_k, block_k in sizes:
        dims = head_dim, 64
        assert select_fp8_forward_config(*dims, causal, dtype, seqlen_k, block_k, two_level=True) in TWO_LEVEL
    for head_dim, causal in product((64, 128, 256), (False, True)):
        assert select(head_dim, 0, causal, v_rows=True) in TWO_LEVEL


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_what_is_quantized_for_one_level_can_be_attended_to_with_two(head_dim: int) -> None:
    widths = {
        tiling.tile_n for (size, _), tilings in FP8_TILINGS.items() if size == head_dim for tiling in tilings
    }
    for block_k in (*widths, *(2 * width for width in widths), 1024):
        config = select(head_dim, block_k)
        assert config.two_level and block_k % config.tile_n == 0
    with pytest.raises(ValueError, match="block_k is 48, allowed at head_dim"):
        select(head_dim, 48)


def test_invalid_fields_are_named() -> None:
    narrow, wide = select(128, 128), select(256, 128)
    for config, change, message in (
        (narrow, {"late_rescale": True}, "late_rescale is True, allowed with two_level: False"),
        (wide, {"pipelined": True}, "pipelined is True, allowed with two_level at head_dim_v 256: False"),
        (wide, {"head_dim_v": 160}, "head_dim_v is 160, allowed with two_level: multiples of 64 above 128"),
    ):
        with pytest.raises(ValueError, match=message):
            validate_forward_config(replace(config, **change))


@pytest.mark.parametrize(
    "config",
    [select(64, 64), select(128, 192, True), select(256, 128), select(256, 0, True, v_rows=True)],
    ids=lambda config: config.name,
)
def test_no_instruction_touches_a_register_of_a_wgmma_in_flight(config: Fp8ForwardConfig) -> None:
    count, hazards = find_hazards(ptx_of(config))
    parts = config.head_dim_v // config.pv_columns
    of_block = config.head_dim // 32 + parts * config.tile_n // 32
    # Pipelined: the first S and the last P V apart from the loops. In order: the first block before them.
    assert count == of_block * (3 if config.causal else 2)
    assert hazards == []


# numbers


def draw(head_dim: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 140, 1, head_dim), (1, 460, 1, head_dim), (1, 460, 1, head_dim)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def relative(x: torch.Tensor, exact: torch.Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(
    "head_dim,causal,block_k,v_rows",
    [
        (64, False, 64, False),
        (64, True, 128, False),
        (128, True, 192, False),
        (128, False, 128, False),
        (256, False, 128, False),
        (128, True, 192, True),
        (256, True, 64, True),
    ],
)
def test_kernel_is_as_good_as_its_emulation(head_dim: int, causal: bool, block_k: int, v_rows: bool) -> None:
    """Maxima that rise from block to block, and scales of V that change the unit of O."""
    q, k, v = draw(head_dim)
    k[:, :192] *= 3
    v[:, :160] *= 2.0**-9
    parts = quantize_qkv(q, k, v, quantization=Fp8Quantization(block_q=64, block_k=block_k, smooth_v=False))
    config = select(head_dim, block_k, causal, v_rows)
    out, lse = fp8_forward_on_numpy(config, parts, head_dim**-0.5, LATE)
    like, like_lse = attention_tiled_fp8(parts, causal=causal)
    exact, _ = attention_naive(*(x.dequantize() for x in (parts.q, parts.k, parts.v)), causal=causal)
    assert relative(out, exact) <= 1.03 * relative(like, exact) + 2e-4
    assert (lse - like_lse).abs().max() < 4e-3


def same_schedule(config: Fp8ForwardConfig) -> Fp8ForwardConfig:
    return replace(config, two_level=False)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_where_nothing_is_lost_one_level_gives_the_same(head_dim: int) -> None:
    """The machine's WGMMA adds in float32, so only the order of the additions differs, and the LSE not at all.

    Nor does it matter when a WGMMA is done: a part of P V is read only once it is.
    """
    parts = quantize_qkv(
        *draw(head_dim), quantization=Fp8Quantization(block_q=64, block_k=128, smooth_v=False)
    )
    config = select(head_dim, 128)
    out, lse = fp8_forward_on_numpy(config, parts, head_dim**-0.5, LATE)
    again, _ = fp8_forward_on_numpy(config, parts, head_dim**-0.5)
    assert torch.equal(again, out)
    other, other_lse = fp8_forward_on_numpy(same_schedule(config), parts, head_dim**-0.5, LATE)
    assert torch.equal(lse, other_lse)
    assert relative(out, other.double()) < 1e-3


# what it is for


@pytest.mark.parametrize("mean", [0.0, 64.0])
def test_errors_of_one_level_grow_with_the_keys_and_those_of_two_do_not(mean: float) -> None:
    generator = torch.Generator().manual_seed(0)

    def errors(keys: int, tile_n: int = 128) -> tuple[float, float]:
        p = (256 * torch.rand(8, keys, generator=generator)).to(torch.float8_e4m3fn)
        v = (mean + 64 * torch.randn(8, keys, generator=generator)).to(torch.float8_e4m3fn)
        exact = p.double() @ v.double().T
        tiles = zip(p.split(tile_n, 1), v.split(tile_n, 1), strict=True)
        two = torch.stack([wgmma_product(*tile) for tile in tiles]).sum(0)
        return relative(wgmma_product(p, v), exact), relative(two, exact)

    (short_one, short_two), (long_one, long_two) = errors(1024), errors(16384)
    assert long_one > 3 * short_one and long_one > 10 * long_two
    assert long_two < 2 * short_two < 1e-3


@pytest.mark.parametrize("head_dim", [64, 256])
def test_kernel_with_two_levels_loses_less(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both on a machine whose WGMMA truncates, values of one sign, and scores alike enough for all keys to count."""
    monkeypatch.setattr(wgmma_steps, "add_products", add_as_the_tensor_cores)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, rows, 1, head_dim, generator=generator) for rows in (64, 1536, 1536))
    parts = quantize_qkv(
        0.1 * q, k, v.abs() + 1, quantization=Fp8Quantization(block_q=64, block_k=128, smooth_v=False)
    )
    parts = replace(parts, dtype=torch.bfloat16)
    exact, _ = attention_naive(*(x.dequantize() for x in (parts.q, parts.k, parts.v)))
    config = select(head_dim, 128)
    errors = [
        relative(fp8_forward_on_numpy(c, parts, head_dim**-0.5)[0], exact)
        for c in (same_schedule(config), config)
    ]
    assert errors[0] > 3 * errors[1] and errors[1] < 3e-3
