"""Few queries of e4m3 with descales: what serves them, and what the FP8 forward kernel is given, by stand-ins."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.combine.config import MAX_SPLITS, CombineConfig
from hopper.config import ForwardConfig
from hopper.decode.config import DecodeConfig
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.forward.fp8.tilings import FEW_QUERIES, FEW_QUERIES_IN_PARTS
from hopper_attention import (
    api,
    compile_cache,
    descaled_again,
    device_memory,
    explain,
    few_queries,
    flash_attn_func,
)
from hopper_attention.few_e4m3_times import MOST_PARTS, few_cost, native_size, numbers_of_parts, usual_cost
from hopper_attention.few_queries import FewQueries
from hopper_attention.kvcache_checks import NAMES, CacheShape, read_shape
from hopper_attention.launch import few_fp8, fp8
from hopper_attention.launch.few_fp8 import FewFp8Launcher, find_with_descales
from hopper_attention.launch.few_queries import FewQueriesLaunch
from hopper_attention.masks import CAUSAL_MASK, NO_MASK, MaskSpec
from hopper_attention.reference import attention_naive
from hopper_attention.scores import PLAIN
from tests.python.fake_gpu import forget_launchers, pretend
from tests.python.test_split_forward import Kernels as KernelsIn16Bits
from tests.python.test_split_forward import attend_to_part

E4M3 = torch.float8_e4m3fn
DESCALES = "q_descale", "k_descale", "v_descale"
Sizes = tuple[int, int, int]
Heads = tuple[int, int]
Call = tuple[Sizes, Heads]


class Kernels:
    """The FP8 kernel, and what adds its parts up, in float64; ``calls`` has what the first was given."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.merged = 0
        self._merge = KernelsIn16Bits().merge

    def load(self, config: Any) -> Any:
        if isinstance(config, CombineConfig):
            return self.merge
        assert isinstance(config, Fp8ForwardConfig) and config.v_rows
        return lambda *given: self.attend(config, *given)

    def attend(self, config: Fp8ForwardConfig, *given: Any) -> None:
        q, k, v, out, lse, _, q_scale, k_scale, ones, v_scale, mean, *rest = given
        rows_q, rows_k, scale, *sides, ctas = rest
        assert sides == [None] * 5 * config.split and ctas == 132 * config.ctas_per_sm
        assert rows_q == rows_k == fp8.ALL_ROWS and bool((ones == 1).all()) and not mean.numel()
        assert all(x.data_ptr() % 16 == 0 and x.stride(3) == 1 and x.dtype == E4M3 for x in (q, k, v))
        splits = out.shape[0] if config.split else 1
        self.calls.append({"config": config, "splits": splits, "q_scale": q_scale, "scale": scale})
        (batch, _, heads, _), kv_heads = q.shape, k.shape[2]
        assert config.lone_scales != config.two_level
        of_tiles = heads // config.group
        outer = kv_heads if config.lone_scales else of_tiles
        assert q_scale.shape == (batch, outer, of_tiles // outer)
        assert k_scale.shape == v_scale.shape == ones.shape == (batch, kv_heads, 1)
        of_q = q.double() * q_scale.flatten(1).repeat_interleave(config.group, 1).double()[:, None, :, None]
        of_k, of_v = (x.double() * by.double()[:, None] for x, by in ((k, k_scale), (v, v_scale)))
        for i in range(batch):
            for part in range(splits):
                one = attend_to_part(of_q[i], of_k[i], of_v[i], scale, config.causal, None, (part, splits))
                if config.split:
                    out[part, i], lse[part, i] = one
                else:
                    out[i], lse[i] = one[0], one[1].T[:, : lse.shape[2]]

    def merge(self, *given: Tensor) -> None:
        self.merged += 1
        self._merge(*given)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Those of a pretended H200."""
    fake = Kernels()
    pretend(monkeypatch, few_fp8, fp8)
    empty = device_memory.empty_on_gpu
    monkeypatch.setattr(device_memory, "empty_on_gpu", lambda *facts: empty(*facts).fill_(math.nan))
    monkeypatch.setattr(fp8, "index_of", lambda device: 0)
    for name in ("get_forward", "get_serving"):
        monkeypatch.setattr(compile_cache, name, fake.load)
    monkeypatch.setattr(descaled_again, "current_device", lambda: torch.cuda.current_device())
    monkeypatch.setattr(descaled_again, "kept_argument", lambda x: x)
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    yield fake
    forget_launchers()


def plan_of(
    sizes: Sizes, heads: Heads, head_dim: int = 128, has_descales: bool = False, **given: Any
) -> tuple[Any, tuple[str, ...]]:
    """What ``explain`` says of a Hopper GPU: the config, and notes."""
    q, k, _ = (torch.empty(x.shape, dtype=E4M3, device="meta") for x in specs_of(sizes, heads, head_dim))
    if has_descales:
        given |= {name: torch.empty(sizes[0], heads[1], device="meta") for name in DESCALES}
    plan = explain(q, k, k, device_capability=(9, 0), **given)
    group, split = getattr(plan.config, "group", 1), getattr(plan.config, "split", False)
    assert (few_queries.NOTE in plan.notes) == isinstance(plan.config, DecodeConfig)
    assert (few_queries.NOTE_ON_GROUPS in plan.notes) == (group > 1)
    assert any("a part of a tile's keys" in note for note in plan.notes) == split
    assert group == 1 or " query rows x " in str(plan)
    assert not isinstance(plan.config, Fp8ForwardConfig) or bool(plan.copies) != plan.config.v_rows
    return plan.config, plan.notes


MANY_KEYS, MANY_TILES = ((1, 40, 20_000), (8, 2)), ((64, 16, 1000), (32, 4))


@pytest.mark.parametrize("has_descales", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("few_call", "head_dim", "group", "splits"),
    [
        *((MANY_KEYS, head_dim, 4, (16, 44)) for head_dim in (64, 80, 128, 256)),
        *((MANY_TILES, head_dim, 8, (1, 1)) for head_dim in (64, 80, 128, 256)),
        # 12 query heads share a K/V head, which do not divide a warpgroup's rows.
        (((64, 16, 1000), (48, 4)), 128, 12, (1, 1)),
        (((1, 40, 20_000), (24, 2)), 128, 12, (12, 20)),
        # A single query of many heads.
        (((64, 1, 4096), (32, 8)), 128, 4, (1, 1)),
        (((1, 1, 100_000), (64, 1)), 128, 64, (32, MOST_PARTS)),
    ],
)
def test_calls_that_the_fp8_kernel_serves(
    few_call: Call, head_dim: int, group: int, splits: tuple[int, int], causal: bool, has_descales: bool
) -> None:
    config, notes = plan_of(*few_call, head_dim, has_descales, causal=causal)
    few, (fewest, most) = few_of(*few_call, head_dim), splits
    assert isinstance(config, Fp8ForwardConfig) and config.v_rows and config.causal == causal
    assert (config.group, config.split) == (few.group, few.splits > 1) == (group, most > 1)
    assert config.tile_m == few.tile_rows and fewest <= few.splits <= most
    assert any(f" {few.splits} CTAs visit" in note for note in notes) == config.split
    assert config.head_dim == min(size for size in FEW_QUERIES if size >= head_dim)


@pytest.mark.parametrize(
    ("sizes", "heads"), [((1, 1, 2000), (32, 8)), ((1, 1, 300), (8, 8)), ((1, 16, 8000), (8, 8))]
)
def test_calls_that_the_decode_kernel_serves(sizes: Sizes, heads: Heads) -> None:
    for head_dim, causal in itertools.product((64, 128, 256), (False, True)):
        config, _ = plan_of(sizes, heads, head_dim, causal=causal)
        assert isinstance(config, DecodeConfig) and config.e4m3_queries


def test_calls_that_are_served_as_any_other() -> None:
    for sizes, heads, head_dim in (((1, 257, 20_000), (8, 2), 128), ((21, 93, 40_000), (6, 2), 256)):
        config, notes = plan_of(sizes, heads, head_dim)
        assert isinstance(config, Fp8ForwardConfig) and (config.group, config.split) == (1, False)
        assert few_of(sizes, heads, head_dim) == few_queries.NOT_FEW and not notes


@pytest.mark.parametrize("few_call", [MANY_KEYS, MANY_TILES], ids=["parts", "groups"])
def test_what_tiles_of_few_queries_do_not_do(few_call: Call) -> None:
    for given in (
        {"two_level_accumulation": True},
        {"return_attn_probs": True},
        {"exact_lse": True},
    ):
        config, _ = plan_of(*few_call, **given)
        assert isinstance(config, DecodeConfig) and config.is_widened, given
    for given in (
        {"return_attn_probs": True, "exact_lse": False},
        {"window_size": (-1, 0)},
        {"window_size": (40_000, 40_000)},
        {"backend": "hopper"},
        {"sm_margin": 5},
    ):
        config, _ = plan_of(*few_call, **given)
        assert isinstance(config, Fp8ForwardConfig) and config.group > 1, given
    # Slopes are of 16 bits.
    slopes = torch.empty(few_call[1][0], device="meta")
    config, _ = plan_of(*few_call, alibi_slopes=slopes)
    assert isinstance(config, ForwardConfig) and config.dtype == "bfloat16"


@pytest.mark.parametrize("few_call", [MANY_KEYS, MANY_TILES], ids=["parts", "groups"])
def test_tiles_of_few_queries_in_windows_and_with_changed_scores(few_call: Call) -> None:
    sinks = torch.empty(few_call[1][0], device="meta")
    for given in (
        {"window_size": (100, 0)},
        {"attention_chunk": 64},
        {"softcap": 1.0},
        {"sinks": sinks},
        {"window_size": (900, 3), "softcap": 1.0, "sinks": sinks},
    ):
        config, _ = plan_of(*few_call, **given)
        assert isinstance(config, Fp8ForwardConfig) and config.v_rows and config.lone_scales, given
        # A window leaves few keys, for which a tile of one head may do.
        is_masked = "window_size" in given or "attention_chunk" in given
        assert config.group > 1 or is_masked, given
        assert (config.window, config.chunk) == (is_masked, "attention_chunk" in given)
        assert (config.softcap, config.sinks) == ("softcap" in given, "sinks" in given)


def draw(sizes: Sizes, heads: Heads, head_dim: int = 64) -> Any:
    generator = torch.Generator().manual_seed(sum(sizes))
    shapes = (x.shape for x in specs_of(sizes, heads, head_dim))
    return [torch.randn(shape, generator=generator).to(E4M3) for shape in shapes]


def descales(how: str, batch: int, kv_heads: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    scales = [torch.rand(batch, kv_heads, generator=generator) + 0.5 for _ in DESCALES]
    if how == "strided":
        scales = [scale.T.contiguous().T for scale in scales]
    given = dict(zip(DESCALES, scales, strict=True))
    names = {"none": (), "q": ("q_descale",), "k and v": DESCALES[1:]}.get(how, DESCALES)
    return {name: scales[0] if how == "one" else given[name] for name in names}


def exact_of(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Tensor], **options: Any) -> Any:
    """What float64 makes of the values that these stand for."""
    ones = torch.ones(k.shape[0], k.shape[2])
    of_q, of_k, of_v = (given.get(name, ones).double()[:, None, :, None] for name in DESCALES)
    of_q = of_q.repeat_interleave(q.shape[2] // k.shape[2], 2)
    return attention_naive(q.double() * of_q, k.double() * of_k, v.double() * of_v, **options)


def check(found: Any, exact: tuple[Tensor, Tensor]) -> None:
    """Of out, or of out and lse."""
    out, *lse = found if isinstance(found, tuple) else (found,)
    assert out.dtype == torch.bfloat16 and out.is_contiguous()
    torch.testing.assert_close(out.double(), exact[0], atol=1e-2, rtol=1e-2)
    for x in lse:
        assert x.dtype == torch.float32 and x.is_contiguous()
        torch.testing.assert_close(x.double(), exact[1], atol=1e-4, rtol=1e-4)


CALLS: dict[str, tuple[Sizes, Heads, FewQueries]] = {
    "parts of a group": ((2, 10, 300), (8, 2), FewQueries(group=4, splits=3, tile_rows=64)),
    "parts of heads": ((2, 5, 100), (6, 2), FewQueries(splits=5, tile_rows=64)),
    "a group": ((3, 4, 120), (8, 2), FewQueries(group=4, tile_rows=192)),
    "heads": ((3, 3, 100), (10, 10), FewQueries(tile_rows=64)),
}


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Sizes, Heads, FewQueries]:
    """Of few heads and keys, as if what is said of it took least time."""
    found = CALLS[request.param]
    ways = few_queries.NOT_FEW, found[2]
    monkeypatch.setattr(few_queries, "find_few", lambda *given: ways[given[-1]])
    return found


OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"causal": True}, {"return_attn_probs": True, "exact_lse": False}),
    ({"softmax_scale": 0.3}, {}),
]


@pytest.mark.parametrize("how", ["none", "all", "one", "q", "k and v", "strided"])
def test_results(kernels: Kernels, call: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, heads, few = call
    tensors, given = draw(sizes, heads), descales(how, sizes[0], heads[1])
    for of_scores, of_lse in OPTIONS:
        options, exact = of_scores | of_lse, exact_of(*tensors, given, **of_scores)
        kernels.calls.clear()
        kernels.merged = 0
        for number in range(1, 5):
            with monkeypatch.context() as patch:
                if number > 2:
                    patch.setattr(api, "_call_operator", None)
                check(flash_attn_func(*tensors, **given, **options), exact)
            seen = kernels.calls[-1]
            assert len(kernels.calls) == number and kernels.merged == (few.splits > 1) * number
            assert (seen["config"].group, seen["splits"]) == (few.group, few.splits)
            assert seen["config"].tile_m == few.tile_rows
            assert seen["scale"] == of_scores.get("softmax_scale", 0.125)
            q_scale = given.get("q_descale", torch.ones(sizes[0], heads[1]))
            each = heads[0] // heads[1] // few.group
            assert torch.equal(seen["q_scale"].flatten(1), q_scale.repeat_interleave(each, 1))


def test_two_levels_are_of_any_number_of_queries(kernels: Kernels, call: Any) -> None:
    tensors = draw(*call[:2])
    for number in range(1, 5):
        check(flash_attn_func(*tensors, two_level_accumulation=True), exact_of(*tensors, {}))
        assert len(kernels.calls) == number and kernels.calls[-1]["config"].two_level


def test_what_takes_least_time_is_launched(kernels: Kernels) -> None:
    """Also of rows of V that are not as wide as those of K, nor as the kernel's."""
    for head_dim, head_dim_v in ((128, 64), (80, 48), (64, 256)):
        q, k, _ = draw((1, 20, 1000), (4, 1), head_dim)
        v = draw((1, 20, 1000), (4, 1), head_dim_v)[2]
        for _ in range(3):
            check(flash_attn_func(q, k, v), exact_of(q, k, v, {}))
            assert kernels.calls[-1]["splits"] > 1 and kernels.calls[-1]["scale"] == head_dim**-0.5


def test_tensors_that_tma_cannot_address(kernels: Kernels, call: Any) -> None:
    tensors, given = draw(*call[:2]), descales("all", call[0][0], call[1][1])
    exact = exact_of(*tensors, given)
    odd = [torch.zeros(x.numel() + 1, dtype=E4M3)[1:].view(x.shape).copy_(x) for x in tensors]
    turned = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in tensors]
    assert all(x.data_ptr() % 16 for x in odd)
    for each in (tensors, odd, turned) * 3:
        check(flash_attn_func(*each, **given), exact)
    assert len(kernels.calls) == 9


def test_another_gpu_is_current(kernels: Kernels, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, heads, _ = call
    tensors, given = draw(sizes, heads), descales("all", sizes[0], heads[1])
    exact, entered = exact_of(*tensors, given, causal=True), pretend(monkeypatch, few_fp8, fp8)
    launcher = find_with_descales(*tensors, CAUSAL_MASK, None, 0, True)
    assert isinstance(launcher, FewFp8Launcher)
    for wants_lse in (True, False):
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        out, lse = launcher(*tensors, 0.125, wants_lse, descales=tuple(given.values()))
        check((out, lse) if wants_lse else out, exact)
        assert lse.shape[2] == sizes[1] * wants_lse
    assert entered == [0, 0]
    for number in range(3, 7):
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        check(flash_attn_func(*tensors, **given, causal=True), exact)
        assert entered == [0] * number


def test_launchers_that_are_found(kernels: Kernels) -> None:
    tensors = draw(*MANY_KEYS)
    for sm_margin in (0, 12):
        launcher = find_with_descales(*tensors, NO_MASK, "hopper", sm_margin, True)
        assert isinstance(launcher, FewFp8Launcher) and launcher.group == 4 and launcher.attention.splits > 1
        assert launcher.attention.num_ctas in (132 - sm_margin, 2 * (132 - sm_margin))
    with pytest.raises(ValueError, match="sm_margin"):
        find_with_descales(*tensors, NO_MASK, None, 132, True)
    for backend in ("reference", "ampere", "torch"):
        assert find_with_descales(*tensors, NO_MASK, backend, 0, True) is None
    assert find_with_descales(*draw((1, 257, 1500), (8, 2)), NO_MASK, None, 0, True) is None
    assert find_with_descales(*draw((2, 10, 1500), (8, 2)), NO_MASK, None, 0, False) is None
    assert isinstance(find_with_descales(*tensors, NO_MASK, None, 0, False), FewQueriesLaunch)
    launcher = find_with_descales(*tensors, MaskSpec(True, 99), None, 0, True)
    assert isinstance(launcher, FewFp8Launcher) and launcher.attention.has_window


def few_of(sizes: Sizes, heads: Heads, head_dim: int = 128) -> FewQueries:
    return few_queries.find_few(*specs_of(sizes, heads, head_dim), NO_MASK, PLAIN, 0)


def specs_of(sizes: Sizes, heads: Heads, head_dim: int) -> Any:
    (batch, seqlen_q, seqlen_k), (of_q, of_k) = sizes, heads
    shapes = (batch, seqlen_q, of_q, head_dim), *[(batch, seqlen_k, of_k, head_dim)] * 2
    return [few_queries.contiguous_spec(shape, E4M3, torch.device("meta")) for shape in shapes]


def shape_of(sizes: Sizes, heads: Heads, head_dim: int = 128) -> CacheShape:
    named = dict(zip(("q", "k_cache", "v_cache"), specs_of(sizes, heads, head_dim), strict=True))
    return read_shape(tuple((dict.fromkeys(NAMES) | named).values()), sizes[1], -1)


def test_numbers_of_parts() -> None:
    batches, keys = (1, 7, 132, 2**15, 2**19, 2**21), (1, 127, 255, 256, 1000, 10**5, 2**30)
    for batch, seqlen_k, head_dim in itertools.product(batches, keys, (64, 80, 128, 256)):
        for seqlen_q, group in ((1, 64), (9, 4), (256, 1)):
            shape = shape_of((batch, seqlen_q, seqlen_k), (64, 1), head_dim)
            for rows, tile in FEW_QUERIES_IN_PARTS[native_size(shape)].items():
                numbers = numbers_of_parts(shape, seqlen_k, group, rows)
                most = min(-(-seqlen_k // tile.tile_n), 2**20 // batch, MOST_PARTS)
                assert 1 in numbers and min(numbers) > 0 and max(numbers) <= max(most, 1)
    assert MOST_PARTS <= MAX_SPLITS


def test_times_of_parts() -> None:
    """Few tiles take less time in more parts, until the GPU is full."""
    shape = shape_of((1, 40, 2**15), (8, 2))
    times = {splits: few_cost(shape, 2**15, 4, splits, 64) for splits in range(1, 65)}
    falling = [times[2**i] for i in range(5)] + [times[43]]
    assert falling == sorted(falling, reverse=True) and 8 * times[43] < times[1] < usual_cost(shape, 2**15)
    assert times[43] <= 1.02 * min(times.values()) and times[64] > 1.1 * times[43]
    # Tiles that fill the GPU are in one part.
    shape = shape_of((64, 16, 1024), (32, 4))
    of_one, *of_parts = (few_cost(shape, 1024, 8, n, 128) for n in range(1, 9))
    assert 2 * of_one < min(of_parts)


def test_parts_are_as_many_as_pay() -> None:
    for sizes, heads in (
        ((1, 64, 20_000), (8, 1)),
        ((1, 50, 513), (3, 3)),
        ((4, 32, 4000), (32, 4)),
        ((3, 70, 1000), (4, 1)),
        ((1, 1, 100_000), (64, 1)),
    ):
        few, whole = few_of(sizes, heads), heads[0] // heads[1]
        shape = shape_of((*sizes[:2], few_queries.longest_alike(sizes[2])), heads)
        ways = itertools.product({1, whole}, range(1, 65), FEW_QUERIES[128])
        best = min(few_cost(shape, shape.seqlen_k, *way) for way in ways)
        cost = few_cost(shape, shape.seqlen_k, few.group, few.splits, few.tile_rows)
        assert few.call is None and few.splits > 1
        assert cost <= 1.05 * best and cost < usual_cost(shape, shape.seqlen_k)


def test_no_few_queries() -> None:
    for sizes in ((0, 10, 100), (1, 0, 100), (1, 10, 0), (1, 257, 100)):
        assert few_of(sizes, (8, 2)) == few_queries.NOT_FEW
    assert few_of((1, 10, 100), (8, 2), head_dim=0) == few_queries.NOT_FEW
    assert few_of((1, 40, 20_000), (8, 2), head_dim=72).tile_rows == 0
    # Batches of which no two parts are counted.
    few = few_of((2**20, 1, 4000), (2, 1))
    assert (few.group, few.splits) == (2, 1)
