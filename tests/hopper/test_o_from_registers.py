"""O of e4m3 that goes from registers to global memory, on simulated machine code, to the bits of one stored by TMA."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from cute_kernels.problem import VARLEN
from hopper.config import TWO_CONSUMERS
from hopper.forward.fp8.config import Fp8ForwardConfig, Softmax
from hopper.forward.fp8.row_queries import transposes_v
from hopper.forward.fp8.tilings import select_fp8_forward_config, shipped_long_fp8_forward_configs
from hopper_attention.quantization import Fp8Quantization, quantize_qkv
from tests.hopper.on_numpy import fp8_forward_on_numpy
from tests.hopper.test_lagging_softmax import LATE


def rows_of(head_dim: int, causal: bool, seqlen_k: int) -> Fp8ForwardConfig:
    return select_fp8_forward_config(
        head_dim, head_dim, causal, "bfloat16", seqlen_k, v_rows=True, without_lse=True
    )


@pytest.mark.parametrize(("causal", "longest"), [(False, 1024), (True, 2560)])
def test_which_softmax_serves(causal: bool, longest: int) -> None:
    """Each maximum up to so many keys, whose O goes from registers; scores in float16 beyond, whose O is staged."""
    short, long = (rows_of(256, causal, longest + more) for more in (0, 1))
    assert short.softmax is Softmax.EXACT and short.o_from_registers and short.starts_early
    assert not short.ping_pong and not short.polynomial_pairs
    assert long.softmax is Softmax.HALF_SCORES and long.lowers_queries and long.o_shares_rows
    assert all(config.has_divisors and config.finalizes_early for config in (short, long))


@pytest.mark.parametrize("head_dim", [136, 160, 192])
def test_rows_of_fewer_columns_take_each_maximum_up_to_fewer_keys(head_dim: int) -> None:
    short, long = (rows_of(head_dim, False, keys) for keys in (384, 385))
    assert short.softmax is Softmax.EXACT and short.head_dim == 256
    assert long.softmax is Softmax.HALF_SCORES and long.head_dim == 192


@pytest.mark.parametrize("causal", [False, True])
def test_with_the_lse_each_maximum_serves_any_number_of_keys(causal: bool) -> None:
    """At head_dim 256, unless there is a window, sequences are packed, or P V is added up in two levels."""
    of_256 = partial(select_fp8_forward_config, 256, 256, causal, "bfloat16", v_rows=True)
    assert of_256(20_000) == of_256(256) == rows_of(256, causal, 384)
    others = of_256(256, window=True), of_256(256, layout=VARLEN), of_256(256, two_level=True)
    assert all(config.tile_n == 64 for config in others)


def test_v_is_awaited_where_its_product_starts() -> None:
    """At head_dim 256 with V in rows."""
    in_order, half = rows_of(256, False, 512), rows_of(256, False, 2048)
    assert in_order.awaits_v_late and half.awaits_v_late
    others = rows_of(128, False, 512), rows_of(128, False, 2048), replace(in_order, softmax=Softmax.EAGER)
    assert not any(config.awaits_v_late for config in (*others, replace(half, v_rows=False)))


def test_as_many_units_of_v_are_under_way_as_there_are_registers_for() -> None:
    in_order, half, of_128 = rows_of(256, False, 512), rows_of(256, False, 2048), rows_of(128, False, 512)
    assert [c.registers.producer for c in (in_order, half, of_128)] == [24, 40, 56]
    assert [c.units_under_way for c in (in_order, half, of_128)] == [3, 4, 4]
    for more in ({"group": 8}, {"sinks": True}):
        assert [replace(c, **more).units_under_way for c in (in_order, half, of_128)] == [2, 4, 4]


def test_others_have_no_short_ends() -> None:
    for config in (rows_of(128, False, 1024), rows_of(64, True, 512)):
        assert not config.o_from_registers and not config.finalizes_early


@pytest.mark.parametrize("causal", [False, True])
def test_where_there_are_registers_for_divisors(causal: bool) -> None:
    """Of parts, where V comes transposed: everywhere but where a causal kernel takes each maximum."""
    short, long = (
        select_fp8_forward_config(256, 256, causal, "bfloat16", keys, half_scores=True)
        for keys in (512, 8192)
    )
    assert short.softmax is Softmax.EAGER and not short.o_shares_rows and short.has_divisors is not causal
    assert long.softmax is Softmax.HALF_SCORES and long.has_divisors


def test_which_kernels_with_runs_are_quick_between_tiles() -> None:
    """Where tiles are shortest. Without runs none are, unless they take V in rows."""
    kernels = shipped_long_fp8_forward_configs()
    quick = {(c.head_dim, c.causal) for c in kernels if c.finalizes_early and c.has_block_divisor}
    assert quick == {(64, True)}
    others = [c for c in kernels if (c.head_dim, c.causal) != (64, True)]
    without_runs = [replace(c, run_blocks=0, mean_blocks=0) for c in kernels]
    assert not any(c.finalizes_early or c.has_block_divisor for c in (*others, *without_runs))


def test_up_to_how_many_queries_the_kernel_transposes() -> None:
    """More where no heads share K and V."""
    assert transposes_v(256, 256, True, 1280, True, 1) and not transposes_v(256, 256, True, 1281, True, 1)
    assert transposes_v(256, 256, True, 768, True, 4) and not transposes_v(256, 256, True, 769, True, 4)
    assert transposes_v(256, 256, False, 1024, True, 1) and not transposes_v(256, 256, False, 1025, True, 1)
    assert transposes_v(256, 256, True, 320, False, 1) and not transposes_v(256, 256, True, 321, False, 1)


@pytest.mark.parametrize(
    ("head_dim", "heads", "smooth_v", "seqlens"),
    [(208, 2, False, (70, 140)), (256, 1, True, (200, 40))],
    ids=["columns past the end, two heads", "a mean of V, rows past the end, two tiles"],
)
def test_it_has_the_bits_of_tma(head_dim: int, heads: int, smooth_v: bool, seqlens: tuple[int, int]) -> None:
    config = rows_of(head_dim, True, 512)
    assert config.o_from_registers and config.finalizes_early
    generator = torch.Generator().manual_seed(head_dim)
    q, k, v = (
        torch.randn(1, n, h, head_dim, generator=generator).bfloat16()
        for n, h in zip((seqlens[0], seqlens[1], seqlens[1]), (heads, 1, 1), strict=True)
    )
    quantization = Fp8Quantization(rotate=False, granularity="head", smooth_v=smooth_v)
    parts = quantize_qkv(q, k, v + 3.0, quantization=quantization)
    assert (parts.mean_v.numel() > 0) == smooth_v
    out, lse = fp8_forward_on_numpy(config, parts, head_dim**-0.5, LATE)
    before = replace(config, v_rows=False, registers=TWO_CONSUMERS)
    assert not before.o_from_registers
    expected = fp8_forward_on_numpy(before, parts, head_dim**-0.5, LATE)
    assert not out.isnan().any()
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


class WholeFirstBlock(Fp8ForwardConfig):
    """A config that works on all keys of a tile's first block."""

    @property
    def first_widths(self) -> tuple[int, ...]:
        return ()


@pytest.mark.parametrize(("seqlens", "heads"), [((200, 200), 1), ((200, 170), 2)], ids=["diagonal", "ragged"])
def test_half_of_a_first_block_has_the_bits_of_all_of_it(seqlens: tuple[int, int], heads: int) -> None:
    """The first warpgroup of a tile sees 64 keys of a diagonal block, or fewer, or none."""
    config = rows_of(256, True, 512)
    assert config.first_widths == (64,) and config.has_short_beginnings
    assert not rows_of(256, False, 256).first_widths and not rows_of(256, True, 4096).first_widths
    generator = torch.Generator().manual_seed(seqlens[1])
    q, k, v = (
        torch.randn(1, n, h, 256, generator=generator).bfloat16()
        for n, h in zip((seqlens[0], seqlens[1], seqlens[1]), (heads, 1, 1), strict=True)
    )
    parts = quantize_qkv(
        q, k, v, quantization=Fp8Quantization(rotate=False, granularity="head", smooth_v=False)
    )
    results = (
        fp8_forward_on_numpy(each, parts, 0.0625, LATE) for each in (config, WholeFirstBlock(**vars(config)))
    )
    for half, whole in zip(*results, strict=True):
        assert not half.isnan().any() and torch.equal(half, whole)
