"""The roofline of the backward kernels: counts by hand, against the kernels' own formulas, and on the page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_kernels.query_range import QueryRange
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.window import window_of
from hopper.backward.config import can_divide_visits, can_walk_back, select_backward_config
from hopper.backward.shipped import shipped_backward_configs
from hopper_attention.experiments.bench.results import Cell, ForwardReport, Measured, PeerInfo
from hopper_attention.experiments.bench.spec import Problem
from hopper_attention.experiments.bench.suites import BACKWARD
from hopper_attention.experiments.roofline import backward as roofline_backward
from hopper_attention.experiments.roofline.backward import (
    BackwardKernel,
    SharedBytes,
    backward_block_work,
    count_backward,
    hbm_bytes,
    query_tiles,
    shared_bytes,
)
from hopper_attention.experiments.roofline.render import SHARED_TITLES, render_roofline, standings
from hopper_attention.experiments.roofline.units import Bounds, bounds

D64 = BackwardKernel(64, causal=False, tile_m=128, tile_n=128, is_paired=False)
D128 = BackwardKernel(128, causal=False, tile_m=64, tile_n=128, is_paired=False)
D256 = BackwardKernel(256, causal=False, tile_m=64, tile_n=128, is_paired=True)
LONG = Problem("bfloat16", 1, 16384, 16384, 16, 16, 128, 128, causal=False)
WIDE = Problem("bfloat16", 1, 16384, 16384, 8, 8, 256, 256, causal=False)
NAME = "hopper_bwd_bf16_d128_full_m64n128s2_r240_24"


def test_one_block_of_an_unpaired_kernel_by_hand() -> None:
    work = backward_block_work(D128)
    # Five products of 64 queries x 128 keys x 128 columns, two operations each; an exponential a score.
    assert work.flops == 5 * 2 * 64 * 128 * 128 == 10_485_760
    assert work.mufu == 64 * 128 == 8192
    # Q, dO, and 64 keys of K or V are 16 KiB each, dS is too, and dQ in float32 twice that.
    kib16 = 64 * 128 * 2
    assert shared_bytes(D128) == SharedBytes(
        loads=2 * kib16,
        s_dp=8 * kib16,  # both warpgroups: K and V of their keys as A, all of Q and dO as B
        dv_dk=4 * kib16,  # both: dO and Q as B
        dq_gemm=4 * kib16,  # both: all of dS as A, and half of the columns of 128 keys as B
        scores=kib16,  # dS written
        dq=4 * kib16,  # dQ written, and read to be added
    )
    assert work.shared_bytes == 23 * kib16 == 376_832
    assert work.l2_bytes == 4 * kib16
    cycles = work.cycles(2)
    assert cycles == {"tensor": 2560.0, "mufu": 512.0, "shared": 2944.0, "l2": pytest.approx(1689.6)}


def test_a_block_of_as_many_queries_as_keys_by_hand() -> None:
    # Q and dO are 16 KiB each, K or V of a warpgroup 8 KiB, dS 32 KiB, dQ in float32 32 KiB. Each warpgroup takes 64
    # rows of dQ: half of dS as A, all of K as B.
    kib = {"loads": 32, "s_dp": 2 * 48, "dv_dk": 2 * 32, "dq_gemm": 2 * 32, "scores": 32, "dq": 64}
    assert shared_bytes(D64)._asdict() == {name: 1024 * size for name, size in kib.items()}
    assert backward_block_work(D64).cycles(2)["mufu"] == 128 * 128 / 16


def test_one_block_of_a_cta_of_a_pair_by_hand() -> None:
    work = backward_block_work(D256)
    # 64 keys of the pair's 128: half of five products of 64 x 128 x 256.
    assert work.flops == 5 * 2 * 64 * 64 * 256 == 10_485_760
    assert work.mufu == 64 * 64 == 4096
    # Q, dO, K and V of the CTA are 32 KiB each, P and dS 8 KiB.
    kib = {
        "loads": 2 * 32,
        "s_dp": 4 * 32,  # K, Q by one warpgroup; V, dO by the other
        "dv_dk": 2 * 32 + 4 * 8,  # dO and Q in halves; P and dS by both as A
        "dq_gemm": 2 * 2 * (8 + 8),  # both, of the keys of both CTAs: dS as A, 64 columns of 64 keys as B
        "scores": 5 * 8,  # P written and read to make dS; dS written, read to be sent, received
        "dq": 0,
    }
    assert shared_bytes(D256)._asdict() == {name: 1024 * size for name, size in kib.items()}
    assert work.shared_bytes == 392 * 1024
    # Half of Q and of dO, and half of the columns of dQ in float32, are 32 KiB.
    assert work.l2_bytes == 64 * 1024
    cycles = work.cycles(2)
    assert cycles == {"tensor": 2560.0, "mufu": 256.0, "shared": 3136.0, "l2": pytest.approx(1689.6)}


def test_a_whole_problem_by_hand() -> None:
    work = count_backward(LONG, D128)
    tiles, blocks = 16 * 128, 256
    assert work.flops == 2.5 * LONG.flops == tiles * blocks * 10_485_760
    assert work.mufu == 16 * 16384 * 16384
    # A key tile's K and V are 32 KiB each, and so are its dK and dV.
    assert work.shared_bytes == tiles * (blocks * 376_832 + 6 * 32_768)
    assert work.l2_bytes == tiles * (blocks * 65_536 + 4 * 32_768)
    size = 16384 * 16 * 128 * 2  # of q, k, v, out and every gradient; the sums of dQ are twice that
    assert hbm_bytes(LONG, D128) == (2 * size, 2 * size, 6 * size, 3 * size)
    assert (work.hbm_bytes, work.small_steps_bytes) == (13 * size, 7 * size)
    assert work.balance == pytest.approx(2048 / 132 / 16)
    found = bounds(work, 2, clock_mhz=1785.0, hbm_bytes_per_s=4.8e12)
    assert found.unit == "shared"
    assert found.bound_s == pytest.approx(16 * (256 * 2944 + 6 * 256) / 1785e6)
    assert found.in_turn_s == pytest.approx(found.bound_s + 7 * size / 4.8e12)


def test_a_whole_problem_of_pairs_by_hand() -> None:
    work = count_backward(WIDE, D256)
    pairs, blocks = 8 * 128, 256
    assert work.flops == 2.5 * WIDE.flops == pairs * blocks * 2 * 10_485_760
    assert work.mufu == 8 * 16384 * 16384
    # A CTA's K and V are 32 KiB each, and it takes half of the columns of the other's K.
    assert work.shared_bytes == 2 * pairs * (blocks * 401_408 + (2 + 0.5 + 4) * 32_768)
    assert work.l2_bytes == 2 * pairs * (blocks * 65_536 + (2 + 0.5 + 2) * 32_768)
    assert work.hbm_bytes == 13 * 16384 * 8 * 256 * 2
    assert work.balance == pytest.approx(1024 / 66 / 16)


def test_heads_that_share_keys_read_them_once_and_ragged_tiles_are_whole() -> None:
    grouped = replace(LONG, heads_kv=4)
    plain, shared = count_backward(LONG, D128), count_backward(grouped, D128)
    assert shared.flops == plain.flops and shared.mufu == plain.mufu
    size = 16384 * 16 * 128 * 2
    assert plain.hbm_bytes - shared.hbm_bytes == 4 * size * 3 / 4  # k, v, dk and dv
    assert shared.balance == pytest.approx(512 / 132 / 4)
    ragged = count_backward(replace(LONG, seqlen_q=65, seqlen_k=129), D128)
    assert ragged.flops == 16 * 2 * 2 * 10_485_760
    assert hbm_bytes(replace(LONG, seqlen_q=65), D128).zeros == 16 * 128 * 128 * 4


@pytest.mark.parametrize("seqlens", [(8448, 8448), (1000, 1000), (300, 1000), (1000, 300), (1, 4096)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", [D64, D128, D256])
def test_query_tiles_are_those_that_the_kernel_visits(
    seqlens: tuple[int, int], causal: bool, kernel: BackwardKernel
) -> None:
    visited = QueryRange(kernel.tile_m, kernel.tile_n, window_of(causal))
    lengths = SeqlenInfo(*seqlens)
    key_tiles = range(-(-seqlens[1] // kernel.tile_n))
    expected = [visited.end(n, lengths) - visited.begin(n, lengths) for n in key_tiles]
    assert query_tiles(kernel._replace(causal=causal), *seqlens) == expected


WALKING = [replace(config, walks_back=True) for config in shipped_backward_configs() if can_walk_back(config)]
SHARED = [
    replace(config, divides_visits=True) for config in shipped_backward_configs() if can_divide_visits(config)
]


@pytest.mark.parametrize(
    "config", (*shipped_backward_configs(), *WALKING, *SHARED), ids=lambda config: config.name
)
def test_a_backward_kernel_is_read_back_from_its_name(config) -> None:
    kernel = roofline_backward.parse_backward_kernel(config.name)
    assert kernel == roofline_backward.backward_kernel_of(config)
    # The widths that the counts derive from the tile are the config's own.
    parts = config.dq_parts if config.splits_columns else 1
    assert config.consumers == roofline_backward.CONSUMERS and config.dq_columns * parts == kernel.head_dim
    takes_rows = kernel.tile_m == config.consumers * 64
    assert takes_rows != config.splits_columns
    assert kernel.keys == (config.keys if kernel.is_paired else config.tile_n)


@pytest.mark.parametrize("head_dim", [32, 80, 104])
def test_of_a_kernel_that_leaves_out_zeros_the_other_columns_count(head_dim: int) -> None:
    config = select_backward_config("bfloat16", head_dim, head_dim, False)
    kernel = roofline_backward.parse_backward_kernel(config.name)
    assert kernel == roofline_backward.backward_kernel_of(config) and kernel.head_dim == head_dim
    whole = roofline_backward.parse_backward_kernel(config.name.partition("_used")[0])
    works = [roofline_backward.backward_block_work(each) for each in (kernel, whole)]
    assert works[0].flops * whole.head_dim == works[1].flops * head_dim


def test_names_that_are_no_backward_kernels_are_refused() -> None:
    for name in ("", "hopper_fwd_fp16_d128_full_m128n176s2_r240_24", "hopper_bwd_prepare_bf16_d64_m64n128"):
        with pytest.raises(ValueError, match="allowed: the name of a backward config"):
            roofline_backward.parse_backward_kernel(name)


def test_small_steps_that_hbm_bounds_come_before_what_is_left_of_it() -> None:
    busy = {"tensor": 2.0, "mufu": 0.0, "shared": 1.0, "l2": 0.0, "hbm": 5.0}
    assert Bounds(busy, 0.5, small_steps_s=3.0).bound_s == 5.0
    assert Bounds(busy, 0.5, small_steps_s=3.0).in_turn_s == 3.0 + 2.0 / 0.5
    assert Bounds(busy, 1.0, small_steps_s=1.0).in_turn_s == 5.0
    assert Bounds(busy, 1.0).in_turn_s == Bounds(busy, 1.0).bound_s


def report_of(problem: Problem, tflops: float, note: str) -> ForwardReport:
    ours = Measured(tflops, 1.0, 0.01, 9, 4, 1e-3, 1785.0, 480.0, note)
    cell = Cell(problem, 1, 1785.0, 480.0, {"ours": ours})
    info = {"ours": PeerInfo("hopper-attention", "1", "")}
    machine = {"gpu": "NVIDIA H200"}
    return ForwardReport(machine, "c0ffee" * 6, "2026-11-20T10:00:00Z", {}, info, (cell,), "backward")


def test_standing_counts_operations_as_the_benchmark_does() -> None:
    (standing,) = standings(report_of(LONG, 673.0, NAME))
    assert standing.flops == BACKWARD.work * LONG.flops
    assert standing.bound_tflops == pytest.approx(standing.flops / standing.bounds.bound_s * 1e-12)
    assert standing.share == pytest.approx(0.828, abs=1e-3)
    assert standing.share_in_turn == pytest.approx(0.840, abs=1e-3)
    # A forward kernel's name says nothing of a backward report.
    assert standings(report_of(LONG, 673.0, "hopper_fwd_fp16_d128_full_m128n176s2_r240_24")) == []


def test_the_page_holds_blocks_and_standings_of_the_backward() -> None:
    page = render_roofline([report_of(LONG, 673.0, NAME)])
    assert "| d128, 64 × 128 | 2560 | 512 | **2944** | 1690 |" in page
    assert "| d256, 64 × 128 of a pair | 2560 | 256 | **3136** | 1690 |" in page
    assert "| d256, 64 × 128 of a pair | 64 | 128 | 96 | 64 | 40 | 0 | 392 |" in page
    row = "| bf16 d128 full, b1 s16384 h16 | 1785 | 5696 | 1139 | **6564** | 3789 | 182 | 0.970 "
    assert f"{row}| 812 | 673 | 83 % | 98 | 84 % |" in page
    assert "| bf16 d128 full, b1 s16384 h16 | 64 × 128 | 5498 | 1.000 | 4.29 |" in page
    assert "We are at 84 to 84 % of that." in page
    assert len(SHARED_TITLES) == len(SharedBytes._fields)
    shipped = {
        roofline_backward.backward_kernel_of(config)._replace(causal=False)
        for config in shipped_backward_configs()
    }
    blocks = page.split("## One block of the backward")[1].split("KiB that go")[0]
    assert blocks.count("\n| d") == len(shipped)
