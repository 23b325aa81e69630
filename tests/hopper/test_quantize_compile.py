"""The quantizer compiles without a GPU, and run on NumPy it gives the bits of its twin in PyTorch."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from hopper.forward.fp8.tilings import RUNLESS_KEYS, select_fp8_forward_config, with_runs
from hopper.inspection import ResourceUsage
from hopper.quantize.config import (
    CARRY_KEYS,
    CHUNK,
    MOST_FIT,
    WARP_THREADS,
    BlockTiling,
    QuantizeConfig,
    RunTiling,
    default_block_sizes,
    hadamard_blocks,
    largest_codes,
    shipped_long_quantize_configs,
    shipped_quantize_configs,
    validate_quantize_config,
)
from hopper.quantize.grid import Grid
from hopper_attention.quantization import Fp8Quantization
from hopper_attention.quantization_rules import means_of, paid_by_values, quantize_by_torch
from hopper_attention.quantized import Means
from tests.compile_pool import usage_of_each
from tests.hopper.floats import to_e4m3
from tests.hopper.quantize_on_numpy import quantize_on_numpy
from tests.ptx import ptx_of

D64 = QuantizeConfig("bfloat16", 64, 64, 128, 160)
D128 = QuantizeConfig("bfloat16", 128, 128, 128, 192)
ALL_OPTIONS = QuantizeConfig(
    "float16", 96, 96, 64, 128, rotate=True, rotate_v=True, smooth_k=True, smooth_v=True
)
SMOOTH_V = QuantizeConfig("bfloat16", 64, 64, 128, 160, smooth_v=True)
PLAIN = QuantizeConfig("float16", 192, 128, 128, 128, rotate=False)
ODD = QuantizeConfig("bfloat16", 80, 48, 192, 64, rotate_v=True)
D256 = QuantizeConfig("bfloat16", 256, 256, 128, 128, smooth_k=True, smooth_v=True)
BLOCKS_OF_Q = (D64, D128, ALL_OPTIONS, SMOOTH_V, PLAIN, ODD, D256)
ROWS_OF_Q = (
    replace(D64, dtype="float16", block_q=1),
    replace(D128, block_q=1),
    replace(ALL_OPTIONS, block_q=1),
    replace(PLAIN, block_q=1),
    replace(ODD, block_q=1),
    replace(D256, block_q=1),
)
WIDE = (replace(ROWS_OF_Q[1], wide_codes=True, smooth_v=True), replace(PLAIN, wide_codes=True))
CONFIGS = (*BLOCKS_OF_Q, *ROWS_OF_Q, *WIDE)
RUN = (D64, D128, ALL_OPTIONS, PLAIN, ODD, D256, ROWS_OF_Q[0], replace(PLAIN, block_q=1), *WIDE)
"""Where Q has a scale for each row, what is done to K and V is what is done to them elsewhere."""


def draw(config: QuantizeConfig, batch=1, seqlens=(300, 500), heads=(2, 1)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(seqlens))
    shapes = (
        (batch, seqlens[0], heads[0], config.head_dim),
        (batch, seqlens[1], heads[1], config.head_dim),
        (batch, seqlens[1], heads[1], config.head_dim_v),
    )
    dtype = getattr(torch, config.dtype)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def find_differences(
    config: QuantizeConfig, inputs: list[torch.Tensor], ctas: int = 3, by_warp: bool = False
) -> list[str]:
    """Where the bits of the kernel are not those of its twin."""
    q, k, v = inputs
    c = Fp8Quantization(
        rotate=config.rotate,
        block_q=config.block_q,
        block_k=config.block_k,
        seed=7,
        smooth_k=config.smooth_k,
        rotate_v=config.rotate_v,
        smooth_v=config.smooth_v,
    )
    means = means_of(k, v, c)
    data, scales = quantize_on_numpy(config, q, k, v, c.seed, means, ctas, by_warp)
    twins = quantize_by_torch(q, k, v, c, means)
    wrong = []
    for name, ours, scale, twin in zip("qkv", data, scales, twins, strict=True):
        codes = twin.data.to(torch.float16) if config.wide_codes and name != "v" else twin.data
        differing = (ours != codes.view(torch.uint8).numpy().reshape(-1)).sum()
        if differing:
            wrong.append(f"{differing} of {ours.size} bytes of {name}")
        if not np.array_equal(scale, twin.scale.view(torch.int32).numpy().reshape(-1)):
            wrong.append(f"scales of {name}")
    return wrong


@pytest.mark.parametrize("config", RUN, ids=lambda config: config.name)
def test_kernel_has_the_bits_of_its_twin(config: QuantizeConfig) -> None:
    failures = {}
    for seqlens, heads in (((200, 350), (2, 1)), ((1, 1), (3, 3)), ((257, 223), (1, 1))):
        # Few CTAs, so that each works through items of Q, K and V; and one.
        wrong = find_differences(config, draw(config, 2, seqlens, heads), ctas=1 if heads == (1, 1) else 5)
        if wrong:
            failures[seqlens, heads] = wrong
    assert failures == {}


@pytest.mark.parametrize("config", [D64, ROWS_OF_Q[0]], ids=lambda config: config.name)
def test_warps_that_run_ahead_change_nothing(config: QuantizeConfig) -> None:
    """One or two CTAs come from items without a barrier to items with one, and back."""
    for ctas in (1, 2):
        assert find_differences(config, draw(config, 1, (300, 500), (3, 1)), ctas, by_warp=True) == []


@pytest.mark.parametrize(
    ("block_q", "blocks", "seqlen_k", "ctas", "by_warp"),
    [
        (128, 2, 223, 5, False),
        (1, 1, 64, 5, False),
        (128, 3, 300, 5, False),
        (1, 2, 600, 1, True),
        (128, 2, 600, 2, True),
        (1, 1, 600, 3, False),
    ],
)
def test_runs_of_blocks_lose_a_mean_each(
    block_q: int, blocks: int, seqlen_k: int, ctas: int, by_warp: bool
) -> None:
    """Counted from the last block of V back. On NumPy a CTA begins when the one in front has ended, and that one has
    claimed what others may: those that are late take what they know of, and each item is there once."""
    config = replace(D64, block_q=block_q, smooth_v=True, mean_blocks=blocks)
    assert config.claims_items
    q, k, v = draw(config, 2, (330, seqlen_k), (2, 2))
    v[0, 0, 0, 3], v[1, 40, 1, 5], v[1, 41, 1, 6] = math.nan, math.inf, math.nan
    last = -(-seqlen_k // config.block_k) - 1
    run = (last - torch.arange(seqlen_k) // config.block_k) // blocks
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(2, int(run.max()) + 1, 2, config.head_dim_v, generator=generator)
    nothing = torch.empty(0)
    given = Means(nothing, means.flatten(0, 1).contiguous())
    data, scales = quantize_on_numpy(config, q, k, v, 7, given, ctas, by_warp)
    c = Fp8Quantization(block_q=config.block_q, block_k=config.block_k, smooth_v=False, seed=7)
    paid = paid_by_values(seqlen_k)
    twins = quantize_by_torch(q, k, v.float() - means[:, run], c, Means(nothing, nothing), paid)
    for codes, scale, twin in zip(data, scales, twins, strict=True):
        assert np.array_equal(codes, twin.data.view(torch.uint8).numpy().reshape(-1))
        assert np.array_equal(scale, twin.scale.view(torch.int32).numpy().reshape(-1))


@pytest.mark.parametrize("causal", [False, True])
def test_kernels_of_runs_are_those_that_attention_asks_for(causal: bool) -> None:
    """Of each native head_dim and block, with the means that its attention kernel walks along."""
    long = {(c.dtype, c.head_dim, c.head_dim_v, c.block_k): c for c in shipped_long_quantize_configs()}
    for config in shipped_quantize_configs():
        dims = config.head_dim, config.head_dim_v
        options = {"block_k": config.block_k, "half_scores": True}
        attention = select_fp8_forward_config(*dims, causal, config.dtype, RUNLESS_KEYS + 1, **options)
        attention = with_runs(attention, RUNLESS_KEYS + 1)
        has_runs = attention.run_blocks > 0 and attention.tile_n == config.block_k
        found = long.get((config.dtype, *dims, config.block_k))
        assert (found.mean_blocks if found else 0) == (attention.mean_blocks if has_runs else 0)
    assert {(c.block_k, c.mean_blocks) for c in long.values() if c.head_dim == 64} == {(192, 6)}


def test_which_kernels_claim_items() -> None:
    """Those for means of runs, where an SM has several CTAs."""
    claiming = {c.head_dim for c in shipped_long_quantize_configs() if c.claims_items}
    assert claiming == {64, 96, 128}
    assert not any(c.claims_items for c in shipped_quantize_configs())


def test_each_row_of_q_has_a_scale() -> None:
    config = ROWS_OF_Q[0]
    assert config.scales_rows and not D64.scales_rows
    q, k, v = draw(config, 2, (37, 40), (3, 1))
    q *= torch.arange(1, 38).view(1, -1, 1, 1)
    means = Means(torch.empty(0), torch.empty(0))
    plain = replace(config, rotate=False)
    (q8, _, _), (bits, _, _) = quantize_on_numpy(plain, q, k, v, 0, means, 3)
    scale = torch.from_numpy(bits).view(torch.float32).view(2, 3, 37)
    amax = q.float().abs().amax(-1).transpose(1, 2)
    assert torch.allclose(scale, amax / 16, rtol=MOST_FIT, atol=0.0) and not torch.equal(scale, amax / 16)
    assert (torch.from_numpy(q8).view(torch.float8_e4m3fn).view(q.shape).float().abs().amax(-1) == 16).all()


@pytest.mark.parametrize(
    "config",
    [D128, D256, replace(PLAIN, block_q=1)],
    ids=lambda config: config.name,
)
def test_values_that_are_no_numbers_or_hardly_any(config: QuantizeConfig) -> None:
    q, k, v = draw(config)
    q[0, 5, 0, 3], q[0, 200, 1, 77], q[0, 201, 1, 78] = math.inf, -math.inf, math.nan
    q[0, 130:256, 0], q[0, 128:130, 0] = 0.0, -0.0
    k[0, :192], k[0, 200], k[0, 201, 0, 5] = 0.0, math.inf, -math.nan
    k[0, 384:] *= 2.0**-126 if config.dtype == "bfloat16" else 2.0**-20
    v[0, 0], v[0, 230, 0, 9], v[0, 499, 0, 127] = -math.inf, math.inf, math.nan
    v[0, 256:384] = torch.finfo(v.dtype).max
    assert find_differences(config, [q, k, v]) == []
    assert find_differences(config, [q, k, -v.sign()]) == []


def test_strided_inputs() -> None:
    q, k, v = draw(D64, 2)
    larger = torch.full((2, 2, 302, 64 + 24), math.nan, dtype=q.dtype)
    larger[:, :, 1:301, 8:72] = q.transpose(1, 2)
    heads_first = larger[:, :, 1:301, 8:72].transpose(1, 2)
    k, v = torch.stack((k, v), 2).unbind(2)
    assert not heads_first.is_contiguous() and not k.is_contiguous()
    assert find_differences(D64, [heads_first, k, v]) == []


def test_the_machine_rounds_to_e4m3_as_torch_does() -> None:
    steps = (
        torch.arange(0x3A000000, 0x44000000, 0x4321, dtype=torch.int64).to(torch.int32).view(torch.float32)
    )
    values = torch.cat(
        (steps.clamp(max=448.0), torch.zeros(1), torch.tensor([2.0**-10, 2.0**-9, 3 * 2.0**-10]))
    )
    for x in (values, -values):
        expected = x.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        assert np.array_equal(to_e4m3(x.numpy()), expected)
    assert to_e4m3(np.array([np.inf, -np.inf, np.nan], np.float32)).tolist() == [0x7E, 0xFE, 0x7F]


@pytest.fixture(scope="module")
def usages() -> dict[QuantizeConfig, ResourceUsage]:
    return usage_of_each(CONFIGS)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_compiles_without_spills(config: QuantizeConfig, usages) -> None:
    usage = usages[config]
    assert usage.local_bytes == 0
    assert usage.registers * config.threads * config.ctas_per_sm <= 65536
    assert (config.smem_bytes + 1024) * config.ctas_per_sm <= 228 * 1024


@pytest.mark.parametrize("config", RUN, ids=lambda config: config.name)
def test_memory_is_touched_in_vectors_and_nothing_is_contracted(config: QuantizeConfig) -> None:
    ptx = ptx_of(config)
    loads = len(re.findall(r"cp\.async\.cg\.shared\.global \[.*\], \[.*\], 16,", ptx))
    chunks = sum(tiling.passes * tiling.chunks for tiling in (config.q, config.k, config.v))
    means = config.smooth_k + config.smooth_v
    assert loads == 2 * (chunks + means)  # before the loop and in it
    stores = re.findall(r"st\.global\.(\S+)", ptx)
    scales, rows, columns = (stores.count(kind) for kind in ("b32", "v2.b32", "v4.b32"))
    of_q = config.q.passes if config.scales_rows else config.q.blocks
    assert scales == of_q + 2 and scales + rows + columns == len(stores)
    of_rows = sum(tiling.passes * tiling.chunks for tiling in (config.q, config.k))
    assert rows == (0 if config.wide_codes else of_rows)
    assert columns == 4 * math.ceil(config.vt.patches / config.warps) + (of_rows if config.wide_codes else 0)
    # A product that is added to something could become an FMA, which rounds once: none is.
    products = set(re.findall(r"mul(?:\.rn)?\.f32\s+(%\w+),", ptx))
    added = {x for pair in re.findall(r"(?:add|sub)\.f32\s+%\w+, (%\w+), (%\w+);", ptx) for x in pair}
    assert products and added.isdisjoint(products)


def test_shipped_configs_are_what_default_options_ask_for() -> None:
    configs = shipped_quantize_configs()
    assert len({config.name for config in configs}) == len(configs)
    for config in configs:
        validate_quantize_config(config)
        for option in ("rotate", "rotate_v", "smooth_k", "smooth_v"):
            assert getattr(config, option) == getattr(Fp8Quantization(), option)
        assert config.block_q == Fp8Quantization().block_q == 1
        assert config.block_k in default_block_sizes(config.head_dim, config.head_dim_v)
    assert {(c.dtype, c.head_dim) for c in configs} >= {("float16", 64), ("bfloat16", 256)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, "dtype is 'float32', allowed: float16, bfloat16"),
        ({"head_dim": 72}, "head_dim is 72, allowed: multiples of 16 from 16 to 256"),
        ({"head_dim_v": 272}, "head_dim_v is 272, allowed"),
        ({"block_q": 0}, "block_q is 0, allowed: 1 or multiples of 32 from 32 to 256"),
        ({"block_q": 2}, "block_q is 2, allowed: 1 or multiples of 32 from 32 to 256"),
        ({"block_k": 1}, "block_k is 1, allowed: multiples of 32 from 32 to 256"),
        ({"block_k": 48}, "block_k is 48, allowed: multiples of 32 from 32 to 256"),
        ({"mean_blocks": -1}, "mean_blocks is -1, allowed: 0, or more with smooth_v, not packed"),
        ({"mean_blocks": 2, "smooth_v": False}, "mean_blocks is 2, allowed: 0, or more with smooth_v"),
        ({"mean_blocks": 2, "smooth_v": True, "layout": "varlen"}, "mean_blocks is 2, allowed"),
        ({"layout": "varlen", "wide_codes": True}, "wide_codes is True, allowed for packed sequences: False"),
        (
            {"head_dim": 256, "block_q": 256},
            "blocks of 256 x 256 .* are more than the registers of a CTA hold",
        ),
    ],
)
def test_configs_that_no_kernel_can_be_built_from(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_quantize_config(replace(D128, **change))


@pytest.mark.parametrize(
    ("head_dim", "of_rows", "of_blocks"),
    [
        (16, (16, 28), (28, 28)),
        (64, (16, 28), (28, 28)),
        (80, (8, 28), (14, 28)),
        (128, (8, 28), (14, 28)),
        (144, (8, 14), (14, 14)),
        (256, (8, 14), (14, 14)),
    ],
)
def test_codes_of_q_and_k_are_so_small_that_scores_fit_float16(head_dim, of_rows, of_blocks) -> None:
    for scales_rows, codes in ((True, of_rows), (False, of_blocks)):
        config = replace(D128, head_dim=head_dim, block_q=1 if scales_rows else 64, block_k=64)
        assert largest_codes(head_dim, scales_rows) == config.largest_codes == codes
        is_exact = torch.tensor(codes).to(torch.float8_e4m3fn).float().tolist() == list(codes)
        assert is_exact and math.prod(codes) * head_dim <= torch.finfo(torch.float16).max
    assert largest_codes(264, True) == (256.0, 448.0)


def test_names_tell_configs_apart() -> None:
    changes = [
        {},
        {"dtype": "float16"},
        {"head_dim_v": 64},
        {"block_q": 1},
        {"block_q": 64},
        {"block_k": 224},
        {"wide_codes": True},
        {"rotate": False},
        {"rotate_v": True},
        {"smooth_k": True},
        {"smooth_v": True},
    ]
    names = {replace(D128, **change).name for change in changes}
    assert len(names) == len(changes) and "hopper_quantize_bf16_d128_q128k192_rotate" in names


# Where each element lies


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_every_element_of_a_block_is_held_once(config: QuantizeConfig, operand: str) -> None:
    tiling: BlockTiling = getattr(config, operand)
    held = np.zeros((tiling.rows, tiling.head_dim), int)
    for p in range(tiling.passes):
        for warp in range(tiling.warps):
            if not tiling.is_full(p) and tiling.first_row(p, warp) >= tiling.rows:
                continue
            for lane in range(WARP_THREADS):
                row = tiling.row(p, warp, lane)
                assert row // (tiling.rows // tiling.blocks) == tiling.block(p)
                for c in range(tiling.chunks):
                    column = tiling.column(c, lane)
                    held[row, column : column + CHUNK] += 1
    assert (held == 1).all()


@pytest.mark.parametrize("head_dim", range(16, 257, 16))
def test_butterflies_of_a_lane_find_their_columns(head_dim: int) -> None:
    """A Hadamard block's columns on a lane follow each other, and columns 8 lanes apart are neighbouring chunks."""
    tiling = BlockTiling(head_dim, 32, 2 if head_dim % 32 else 4, 4)
    columns = [
        [tiling.column(c, lane) + i for c in range(tiling.chunks) for i in range(CHUNK)]
        for lane in range(tiling.lanes)
    ]
    first = start = 0
    for size in hadamard_blocks(head_dim):
        of_lane = size // tiling.lanes
        for lane, mine in enumerate(columns):
            part = [column - start for column in mine[first : first + of_lane]]
            expected = [8 * tiling.lanes * c + 8 * lane + i for c in range(of_lane // 8) for i in range(8)]
            assert part == expected
        first, start = first + of_lane, start + size


@pytest.mark.parametrize(("head_dim", "rows"), [(16, 32), (64, 160), (80, 96), (128, 224), (256, 128)])
def test_the_runs_of_v_have_a_place_for_every_element(head_dim: int, rows: int) -> None:
    tiling = RunTiling(head_dim, rows)
    places = [
        tiling.offset(row // CARRY_KEYS, row % CARRY_KEYS, column)
        for row in range(rows)
        for column in range(0, head_dim, 2)
    ]
    assert len(set(places)) == head_dim * rows // 2 and max(places) + 4 <= tiling.size
    chunk = [tiling.offset(1, 5, column) - tiling.offset(1, 5, 8) for column in range(8, 16, 2)]
    assert rows == CARRY_KEYS or chunk == [0, 4, 8, 12]
    chains = [tiling.chain(patch, lane) for patch in range(tiling.patches) for lane in range(WARP_THREADS)]
    there = [(run, column) for run, column in chains if run < tiling.runs]
    everywhere = [(run, column) for run in range(tiling.runs) for column in range(0, head_dim, 2)]
    assert sorted(there) == everywhere


def wavefronts(addresses: list[int], size: int) -> int:
    """Passes of shared memory, of 32 banks of 4 bytes, that a warp's accesses of ``size`` bytes take."""
    words = {address // 4 + i for address in addresses for i in range(size // 4)}
    return max(np.bincount([word % 32 for word in words]))


@pytest.mark.parametrize("config", [D64, D128, D256, ODD], ids=lambda config: config.name)
def test_the_runs_of_v_have_no_bank_conflicts(config: QuantizeConfig) -> None:
    tiling, lanes = config.vt, range(WARP_THREADS)
    for part in range(0, WARP_THREADS, 8):
        rows = [(config.v.row(0, 1, lane), config.v.column(0, lane)) for lane in lanes[part : part + 8]]
        writes = [tiling.offset(row // CARRY_KEYS, row % CARRY_KEYS, column) for row, column in rows]
        assert wavefronts(writes, 16) == 1
    for patch in range(tiling.patches):
        there = [chain for chain in (tiling.chain(patch, lane) for lane in lanes) if chain[0] < tiling.runs]
        for key in range(CARRY_KEYS):
            assert wavefronts([tiling.offset(run, key, column) for run, column in there], 4) == 1


def test_only_the_mean_of_v_is_waited_for() -> None:
    """The quantizer starts beside the kernel of the mean, so Q and K are on their way before anybody waits for that."""
    texts = ptx_of(replace(SMOOTH_V, block_q=1)).split("griddepcontrol.wait;")
    assert "cp.async" in texts[0] and len(texts) == 3
    for after in texts[1:]:
        mean = after[: after.index("cp.async.commit_group")]
        assert len(re.findall(r"cp\.async\.cg", mean)) == 1
    assert "griddepcontrol" not in ptx_of(replace(SMOOTH_V, smooth_v=False))


@pytest.mark.parametrize("v_is_late", [False, True])
@pytest.mark.parametrize(
    ("of_q", "of_kv", "ctas"), [(2048, 2048, 264), (96, 12, 264), (5, 700, 264), (1, 1, 2), (77, 30, 9)]
)
def test_each_item_has_one_cta_and_none_begins_with_v(
    of_q: int, of_kv: int, ctas: int, v_is_late: bool
) -> None:
    grid = Grid(of_q, of_q + of_kv, end := of_q + 2 * of_kv, (), (), v_is_late)
    done, begun_with_v, ctas = [], [], min(ctas, end)
    for cta in range(ctas):
        left, item = grid.share(cta, ctas)
        begun_with_v.append(item >= grid.first_of_v > cta)
        for _ in range(left):
            done.append(item)
            item = item + ctas if item + ctas < end else cta
    assert sorted(done) == list(range(end))
    assert not (v_is_late and any(begun_with_v))


class Divisor:
    """What a kernel divides by."""

    def __init__(self, divisor: int) -> None:
        self.divisor = divisor

    def __rdivmod__(self, x: int) -> tuple[int, int]:
        return divmod(int(x), self.divisor)


@pytest.mark.parametrize("v_is_late", [False, True])
@pytest.mark.parametrize(
    ("of_q", "of_kv", "ctas"), [(204, 204, 26), (96, 12, 264), (5, 70, 26), (1, 1, 2), (77, 30, 9)]
)
def test_claimed_items_are_those_of_the_shares(of_q: int, of_kv: int, ctas: int, v_is_late: bool) -> None:
    grid = Grid(of_q, of_q + of_kv, end := of_q + 2 * of_kv, (), (), v_is_late)
    ctas, rows = min(ctas, end), []
    for cta in range(ctas):
        left, item = grid.share(cta, ctas)
        for row in range(left):
            rows.append((row, cta, item))
            item = item + ctas if item + ctas < end else cta
    in_order = [item for _, _, item in sorted(rows)]
    assert [int(grid.at(position, Divisor(ctas))) for position in range(end + 3)] == [*in_order, *[end] * 3]
