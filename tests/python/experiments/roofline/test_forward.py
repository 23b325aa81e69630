"""The roofline: counts by hand, and against the kernels' own formulas; the page holds what was counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_kernels.key_blocks import BlockRange
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.window import window_of
from hopper.forward.fp8.tilings import shipped_fp8_forward_configs
from hopper.forward.tilings import shipped_forward_configs
from hopper_attention.experiments.bench.results import Cell, ForwardReport, Measured, PeerInfo
from hopper_attention.experiments.bench.spec import ABLATION, Problem
from hopper_attention.experiments.roofline import forward as roofline
from hopper_attention.experiments.roofline import units
from hopper_attention.experiments.roofline.forward import Kernel, block_work, count_work, tile_blocks
from hopper_attention.experiments.roofline.render import render_roofline, standings
from hopper_attention.experiments.roofline.units import bounds

D128 = Kernel(2, 128, 128, causal=False, tile_m=128, tile_n=176, polynomial_pairs=0)
NAME = "hopper_fwd_fp16_d128_full_m128n176s2_r240_24"
SHIPPED = (*shipped_forward_configs(), *shipped_fp8_forward_configs())


def test_one_block_of_the_kernel_of_the_ablation_by_hand() -> None:
    work = block_work(D128)
    # S = Q K^T and O += P V: two products of 128 x 176 x 128, two operations each.
    assert work.flops == 2 * 2 * 128 * 176 * 128 == 11_534_336
    # An exponential a score, and a rescaling factor in each of the four threads of a row.
    assert work.mufu == 128 * 176 + 4 * 128 == 23_040
    # K and V are 176 x 128 x 2 bytes each: written by TMA once and read by two warpgroups, each of which
    # also reads its 64 rows of Q.
    assert work.l2_bytes == 2 * 176 * 128 * 2 == 90_112
    assert work.shared_bytes == 90_112 + 2 * (90_112 + 64 * 128 * 2) == 303_104
    cycles = work.cycles(2)
    assert cycles == {"tensor": 2816.0, "mufu": 1440.0, "shared": 2368.0, "l2": pytest.approx(2323.2)}


def test_fp8_doubles_the_tensor_cores_and_spares_mufu_a_share() -> None:
    fp8 = D128._replace(element_bytes=1, polynomial_pairs=2)
    cycles = block_work(fp8).cycles(1)
    assert cycles["tensor"] == 1408.0
    assert cycles["mufu"] == (128 * 176 * 6 / 8 + 4 * 128) / 16 == 1088.0
    assert cycles["shared"] == 2368.0 / 2


def test_the_whole_ablation_by_hand() -> None:
    work = count_work(ABLATION, D128)
    tiles, blocks = 4 * 16 * 66, 48  # 8448 = 66 x 128 queries = 48 x 176 keys, with nothing left over
    assert work.flops == ABLATION.flops == tiles * blocks * 11_534_336
    assert work.mufu == tiles * (blocks * 23_040 + 2 * 4 * 128)
    assert work.hbm_bytes == 4 * (4 * 8448 * 16 * 128 * 2)
    assert work.l2_bytes == tiles * (blocks * 90_112 + 2 * 128 * 128 * 2)
    assert work.shared_bytes == tiles * (blocks * 303_104 + 3 * 128 * 128 * 2)
    assert work.balance == 1.0  # 4224 tiles are 32 for each of 132 SMs
    found = bounds(work, 2, clock_mhz=1650.0, hbm_bytes_per_s=4.8e12)
    assert found.unit == "tensor"
    assert found.seconds["tensor"] == pytest.approx(32 * 48 * 2816 / 1650e6)
    assert found.seconds["hbm"] == pytest.approx(work.hbm_bytes / 4.8e12)
    assert found.bound_s == found.seconds["tensor"]
    assert ABLATION.flops / found.bound_s * 1e-12 == pytest.approx(132 * 4096 * 1650e6 * 1e-12)


def test_whole_tiles_cost_more_than_was_asked_for() -> None:
    problem = replace(ABLATION, seqlen_q=8449, seqlen_k=8449)
    work = count_work(problem, D128)
    assert work.flops == pytest.approx(4 * 16 * 67 * 49 * 11_534_336)
    assert work.flops > 1.03 * problem.flops


@pytest.mark.parametrize("seqlens", [(8448, 8448), (1000, 1000), (300, 1000), (1000, 300), (1, 4096)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile", [(128, 176), (192, 128), (64, 80)])
def test_blocks_are_those_that_the_kernel_visits(
    seqlens: tuple[int, int], causal: bool, tile: tuple[int, int]
) -> None:
    kernel = D128._replace(tile_m=tile[0], tile_n=tile[1], causal=causal)
    visited = BlockRange(*tile, window_of(causal))
    expected = [visited.end(m, SeqlenInfo(*seqlens)) for m in range(-(-seqlens[0] // tile[0]))]
    assert tile_blocks(kernel, *seqlens) == expected


def test_tiles_are_dealt_out_longest_first() -> None:
    assert roofline.dealt_balance((1,), 132) == 1.0
    assert roofline.dealt_balance((1,), 133) == pytest.approx(133 / 264)
    # 132 tiles of 3 blocks leave every SM with 3; 66 of 2 and 66 of 1 then even out to 5 and 4.
    assert roofline.dealt_balance((3, 3, 2, 1), 66) == pytest.approx((9 * 66 / 132) / 5)


@pytest.mark.parametrize("config", SHIPPED, ids=lambda config: config.name)
def test_a_kernel_is_read_back_from_its_name(config) -> None:
    assert roofline.parse_kernel(config.name) == roofline.kernel_of(config)


def test_names_that_are_no_kernels_are_refused() -> None:
    for name in ("", "reference", "hopper_fwd_fp32_d64_full_m128n64s2", "hopper_quantize_bf16_d64"):
        with pytest.raises(ValueError, match="allowed: the name of a forward config"):
            roofline.parse_kernel(name)
    variant = f"{NAME}_nopipe_nopingpong_nows"
    assert roofline.parse_kernel(variant) == D128
    with pytest.raises(ValueError, match="gpu is 'NVIDIA B200', allowed: names with H200 or H100"):
        units.hbm_rate("NVIDIA B200")


def report_of(problem: Problem, tflops: float, note: str, clock: float | None = 1650.0) -> ForwardReport:
    ours = Measured(tflops, 1.0, 0.01, 9, 4, 1e-3, clock, 480.0, note)
    cell = Cell(problem, 1, clock, 480.0, {"ours": ours})
    info = {"ours": PeerInfo("hopper-attention", "1", "")}
    machine = {"gpu": "NVIDIA H200"}
    return ForwardReport(machine, "c0ffee" * 6, "2026-11-20T10:00:00Z", {}, info, (cell,))


def test_standing_is_the_measured_rate_over_the_bound() -> None:
    (standing,) = standings(report_of(ABLATION, 698.0, NAME))
    assert standing.bound_tflops == pytest.approx(892.1, abs=0.1)
    assert standing.share == pytest.approx(698 / 892.1, abs=1e-3)
    # Without a clock, a name or a figure there is nothing to stand on.
    assert standings(report_of(ABLATION, 698.0, NAME, clock=None)) == []
    assert standings(report_of(ABLATION, 698.0, "reference")) == []


def test_the_page_holds_constants_blocks_and_standings() -> None:
    page = render_roofline([report_of(ABLATION, 698.0, NAME)])
    for source in ("4096", "8192", "5120", "so this one is an assumption"):
        assert source in page
    assert "| 16 bit d128, 128 × 176 | **2816** | 1440 | 2368 | 2323 | 1.51 |" in page
    row = "| fp16 d128 full, b4 s8448 h16 | 1650 | **2621** | 1342 | 2219 | 2195 | 115 | 1.000 | 892 | 698 | 78 % |"
    assert row in page
    assert "| fp16 d128 full, b4 s8448 h16 | 128 × 176 | 2339 | 1.000 |" in page
    shipped = {roofline.kernel_of(config)._replace(causal=False) for config in SHIPPED}
    assert page.count("\n| 16 bit d") + page.count("\n| FP8 d") == len(shipped)
    assert "where we stand" not in render_roofline([report_of(ABLATION, 698.0, "reference")])
