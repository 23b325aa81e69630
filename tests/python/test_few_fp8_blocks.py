"""Few queries of what the quantizer made: what the FP8 forward kernel is given, by stand-ins."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import tvm_ffi
from torch import Tensor

from cute_kernels.combine.config import CombineConfig
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.mean.config import ValueMeanConfig
from hopper.quantize.config import QuantizeConfig
from hopper_attention import (
    Fp8Quantization,
    compile_cache,
    device_memory,
    few_blocks,
    flash_attn_fp8_func,
    flash_attn_quantized_func,
    fp8,
    parts_again,
    quantize_qkv,
)
from hopper_attention.few_blocks import find_few
from hopper_attention.few_queries import NOT_FEW, FewQueries
from hopper_attention.launch import fp8 as fp8_launch
from hopper_attention.launch import quantize, value_mean
from hopper_attention.launch.fp8 import ALL_ROWS, Fp8HopperLauncher, launch_for, problem_of
from hopper_attention.masks import FULL_SIDES
from hopper_attention.quantization_rules import mean_worth_subtracting
from hopper_attention.quantized import E4M3, MEMORY, QuantizedQKV, QuantizedTensor, TransposedV
from hopper_attention.quantizers import from_descales
from hopper_attention.reference import attention_naive
from tests.python.fake_gpu import SMS, forget_launchers, pretend
from tests.python.test_few_block_rules import Heads, Sizes, shapes_of
from tests.python.test_split_forward import Kernels as KernelsIn16Bits
from tests.python.test_split_forward import attend_to_part


def as_torch(x: Any) -> Any:
    """Of what is kept for kernels, which read it as TVM FFI's own."""
    return torch.from_dlpack(x) if isinstance(x, tvm_ffi.Tensor) else x


def spread(scale: Tensor, rows: int, count: int) -> Tensor:
    """(batch, count, heads, 1) of scales of which each is of so many rows."""
    return scale.double()[:, :, torch.arange(count) // rows].transpose(1, 2)[..., None]


class Kernels:
    """The FP8 kernel, what adds its parts up, and the quantizer, in float64; ``calls`` has what the first was given."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.merged: list[tuple[Tensor, ...]] = []
        self._merge = KernelsIn16Bits().merge

    def load(self, config: Any) -> Any:
        if isinstance(config, CombineConfig):
            return lambda *given: self.merge(*map(as_torch, given))
        if isinstance(config, QuantizeConfig):
            return lambda *given: self.quantize(config, *map(as_torch, given))
        if isinstance(config, ValueMeanConfig):
            return lambda v, mean, *lengths: mean.copy_(mean_worth_subtracting(v))
        assert isinstance(config, Fp8ForwardConfig) and not config.v_rows
        return lambda *given: self.attend(config, *map(as_torch, given))

    def quantize(self, config: QuantizeConfig, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> None:
        c = Fp8Quantization(
            rotate=config.rotate, block_q=config.block_q, block_k=config.block_k, smooth_v=False
        )
        mean = given[9][:, None] if config.smooth_v else 0.0
        parts = quantize_qkv(q, k, (v.float() - mean).to(v.dtype), quantization=c, backend="torch")
        made = parts.q.data, parts.k.data, parts.v.data, parts.q.scale, parts.k.scale, parts.v.scale
        for target, source in zip(given[:6], made, strict=True):
            target.copy_(source)

    def attend(self, config: Fp8ForwardConfig, *given: Any) -> None:
        q, k, vt, out, lse, counter, q_scale, k_scale, v_scale, o_scale, mean, *rest = given
        rows_q, rows_k, scale, *others, ctas = rest
        if config.split:
            assert others == [None] * 5
        assert ctas == SMS * config.ctas_per_sm and counter.shape == (2,)
        assert all(x.data_ptr() % 16 == 0 and x.stride(3) == 1 and x.dtype == E4M3 for x in (q, k, vt))
        splits = out.shape[0] if config.split else 1
        (batch, seqlen_q, heads, _), (_, seqlen_k, kv_heads, _) = q.shape, k.shape
        blocks = -(-seqlen_k // rows_k)
        assert q_scale.shape == (batch, heads, -(-seqlen_q // rows_q)) and q_scale.stride(2) == 1
        assert k_scale.shape == (batch, kv_heads, blocks)
        of_values, ones = (o_scale, v_scale) if rows_k == ALL_ROWS else (v_scale, o_scale)
        assert of_values.shape == k_scale.shape and bool((ones == 1).all()) and ones.shape[2] == 1
        self.calls.append(
            {"config": config, "splits": splits, "scale": scale, "given": given, "mean": mean.clone()}
        )
        of_q, of_k = q.double() * spread(q_scale, rows_q, seqlen_q), k.double()
        of_k = of_k * spread(k_scale, rows_k, seqlen_k)
        rows = TransposedV(vt, of_values, min(rows_k, seqlen_k), seqlen_k).dequantize(torch.float64)
        add = mean.double().repeat_interleave(heads // kv_heads, 1) if mean.numel() else 0.0
        for i, part in itertools.product(range(batch), range(splits)):
            one, of_part = attend_to_part(
                of_q[i], of_k[i], rows[i], scale, config.causal, None, (part, splits)
            )
            one = torch.where((of_part > -math.inf)[..., None], one + (add[i] if mean.numel() else 0.0), 0.0)
            if config.split:
                out[part, i], lse[part, i] = one, of_part
            else:
                out[i] = one
                assert lse.shape == (batch, heads, 0)

    def merge(self, *given: Tensor) -> None:
        self.merged.append(given)
        self._merge(*given)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Those of a pretended H200."""
    fake = Kernels()
    modules = fp8_launch, quantize, value_mean
    pretend(monkeypatch, *modules)
    empty = device_memory.empty_on_gpu
    monkeypatch.setattr(device_memory, "empty_on_gpu", lambda *facts: filled(empty(*facts)))
    for module in modules:
        monkeypatch.setattr(module, "index_of", lambda device: 0, raising=False)
    for name in ("get_forward", "get_serving", "get_quantize"):
        monkeypatch.setattr(compile_cache, name, fake.load)
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    yield fake
    forget_launchers()


def filled(x: Tensor) -> Tensor:
    """With NaN, which nobody is to read."""
    return x.view(torch.uint8).fill_(0xFF).view(x.dtype) if x.numel() else x


CALLS: dict[str, tuple[Sizes, Heads, FewQueries]] = {
    "parts of a group": ((2, 10, 300), (8, 2), FewQueries(group=4, splits=3, tile_rows=64)),
    "parts of heads": ((2, 5, 200), (6, 2), FewQueries(splits=7, tile_rows=64)),
    "a group": ((3, 4, 120), (8, 2), FewQueries(group=4, tile_rows=192)),
    "heads": ((3, 3, 260), (10, 10), FewQueries(tile_rows=64)),
    "64 heads": ((1, 2, 150), (64, 1), FewQueries(group=64, splits=2, tile_rows=192)),
    "one query": ((2, 1, 300), (8, 2), FewQueries(group=4, splits=2, tile_rows=64)),
}


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Sizes, Heads, FewQueries]:
    """Of few heads and keys, as if what is said of it took least time where it may."""
    found = CALLS[request.param]
    find = few_blocks.find_few
    monkeypatch.setattr(few_blocks, "find_few", lambda p: NOT_FEW if find(p) == NOT_FEW else found[2])
    return found


def draw_tensors(sizes: Sizes, heads: Heads, head_dim: int = 64) -> list[Tensor]:
    """Values have an offset, and queries of each row and head another size."""
    generator = torch.Generator().manual_seed(sum(sizes))
    shapes = shapes_of(sizes, heads, (head_dim, head_dim))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    q = q * 2.0 ** torch.randint(-3, 2, (*q.shape[:3], 1), generator=generator)
    return [x.bfloat16() for x in (q, k, v + 2.0)]


def check(out: Tensor, tensors: list[Tensor], **options: Any) -> None:
    """To what is lost by e4m3."""
    exact = attention_naive(*(x.double() for x in tensors), **options)[0]
    assert out.dtype == torch.bfloat16 and out.is_contiguous() and out.shape == exact.shape
    assert (out.double() - exact).norm() <= 3e-2 * exact.norm()


def check_parts(out: Tensor, parts: QuantizedQKV, **options: Any) -> None:
    """To what is lost by rounding the output."""
    exact, lse = attention_naive(
        *(x.dequantize(torch.float64) for x in (parts.q, parts.k, parts.v)), **options
    )
    mean = parts.mean_v.double().repeat_interleave(exact.shape[2] // parts.mean_v.shape[1], 1)[:, None]
    exact += torch.where((lse > -math.inf).transpose(1, 2)[..., None], mean, 0.0)
    torch.testing.assert_close(out.double(), exact, atol=1e-6, rtol=2.0**-8)


def refuse(*given: Any, **options: Any) -> Any:
    raise AssertionError("found anew")


def how_it_attends(how: str, tensors: list[Tensor], **options: Any) -> Tensor:
    if how == "at once":
        return flash_attn_fp8_func(*tensors, **options)
    parts = quantize_qkv(*tensors)
    return flash_attn_quantized_func(parts.opened() if how == "parts" else parts, **options)


@pytest.mark.parametrize("how", ["at once", "parts", "in memory"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softmax_scale": 0.3}], ids=str)
def test_results(
    kernels: Kernels, call: Any, how: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of first calls, and of those that are found again."""
    sizes, heads, few = call
    tensors = draw_tensors(sizes, heads)
    for number in range(1, 6):
        with monkeypatch.context() as patch:
            if number > 3:
                for name in ("find_at_once", "attend_and_undo"):
                    patch.setattr(fp8, name, refuse)
            out = how_it_attends(how, tensors, **options)
        check(out, tensors, **options)
        if how != "at once":
            check_parts(out, quantize_qkv(*tensors).opened(), **options)
        seen = kernels.calls[-1]
        assert len(kernels.calls) == number and len(kernels.merged) == (few.splits > 1) * number
        assert (seen["config"].group, seen["splits"], seen["config"].tile_m) == (
            few.group,
            few.splits,
            few.tile_rows,
        )
        assert seen["scale"] == options.get("softmax_scale", 0.125) and seen["mean"].shape == (
            sizes[0],
            heads[1],
            64,
        )
        assert seen["config"].causal == (options.get("causal", False) and sizes[1] > 1)
        for _, part_lse, whole, lse in kernels.merged[-1:]:
            # An LSE that nobody wants has memory of its own.
            assert whole.data_ptr() == out.data_ptr() and lse.shape == part_lse.shape[1:]


def test_what_the_kernel_is_given(kernels: Kernels, call: Any) -> None:
    sizes, heads, few = call
    parts = quantize_qkv(*draw_tensors(sizes, heads)).opened()
    for _ in range(4):
        out = flash_attn_quantized_func(parts)
        q, k, vt, first, _, _, q_scale, k_scale, *of_v, mean, rows_q, rows_k, scale = kernels.calls[-1][
            "given"
        ][:14]
        assert q is parts.q.data and k is parts.k.data and vt is parts.v.data and mean is parts.mean_v
        assert q_scale is parts.q.scale and k_scale is parts.k.scale
        assert of_v[rows_k == ALL_ROWS] is parts.v.scale
        assert rows_q == (1 if sizes[1] > 1 else ALL_ROWS) and scale == 0.125
        assert rows_k == (parts.k.block if parts.k.block < sizes[2] else ALL_ROWS)
        assert (first is out) == (few.splits == 1)
    # An LSE that need not be exact is theirs too, an exact one that of other kernels.
    config = kernels.calls[-1]["config"]
    flags = False, None, False, 0, FULL_SIDES
    kinds = (False, True), (False, False), (True, False)
    launchers = [launch_for(parts, *flags, *exact_and_without) for exact_and_without in kinds]
    for launcher, splits in zip(launchers, (few.splits, few.splits, 1), strict=True):
        assert isinstance(launcher, Fp8HopperLauncher) and launcher.splits == splits
        assert len(launcher.combine) == (splits > 1)
    assert launchers[0].num_ctas == SMS * config.ctas_per_sm


def test_memory_of_parts(kernels: Kernels, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for is that of results, in parts and of an LSE that is not wanted; at once it comes last."""
    (batch, seqlen_q, _), (heads, _), few = call
    asked: list[tuple[Any, ...]] = []
    memory = device_memory.stream_memory

    def noted(index: int, pieces: Any) -> Any:
        asked.append(pieces)
        return memory(index, pieces)

    monkeypatch.setattr(device_memory, "stream_memory", noted)
    tensors = draw_tensors(*call[:2])
    rows, parts = (batch, seqlen_q, heads), quantize_qkv(*tensors)
    expected = [(few.splits, *rows, 64), (few.splits, *rows), rows]
    for each in (parts, parts.opened()) * 4:
        asked.clear()
        flash_attn_quantized_func(each)
        assert [[piece.shape for piece in pieces] for pieces in asked] == [expected] * (few.splits > 1)
    flags = (torch.bfloat16,) * 3, (tensors[0].device,) * 3, Fp8Quantization(), False, FULL_SIDES
    facts = tuple(tuple(x.shape) for x in tensors), tuple(x.stride() for x in tensors)
    launcher = fp8.find_at_once(*facts, *flags, None, False, False, True)
    assert [piece.shape for piece in launcher.parts] == (expected if few.splits > 1 else [])
    assert launcher.pieces[7:] == launcher.parts and launcher.finder is not None


@pytest.mark.parametrize(
    "options",
    [
        {"block_q": 16},
        {"smooth_v": False},
        {"rotate_v": True},
        {"granularity": "head"},
        {"granularity": "tensor"},
    ],
    ids=str,
)
def test_other_ways_to_quantize(kernels: Kernels, call: Any, options: dict[str, Any]) -> None:
    """PyTorch undoes a rotation of V, and adds its mean then."""
    tensors, c = draw_tensors(*call[:2]), Fp8Quantization(**options)
    for how in ("function", "parts"):
        for causal in (False, True):
            for _ in range(3):
                if how == "parts":
                    parts = quantize_qkv(*tensors, quantization=c, backend="torch")
                    out = flash_attn_quantized_func(parts, causal=causal)
                elif "block_q" in options or "smooth_v" in options:
                    out = flash_attn_fp8_func(*tensors, causal=causal, quantization=c)
                else:
                    continue
                exact = attention_naive(*(x.double() for x in tensors), causal=causal)[0]
                assert (out.double() - exact).norm() <= 4e-2 * exact.norm()
                assert kernels.calls[-1]["config"].group == call[2].group
                has_mean = not options.get("rotate_v") and options.get("smooth_v", True)
                assert bool(kernels.calls[-1]["mean"].numel()) == has_mean


def test_rows_without_keys(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are 0, without the mean of V, though a part of their tile's keys has some."""
    for few in (FewQueries(group=4, splits=3, tile_rows=64), FewQueries(tile_rows=64)):
        forget_launchers()
        monkeypatch.setattr(few_blocks, "find_few", lambda p, few=few: few)
        tensors = draw_tensors((2, 50, 30), (8, 2))
        for how in ("at once", "parts", "in memory") * 3:
            out = how_it_attends(how, tensors, causal=True)
            check(out, tensors, causal=True)
            assert not out[:, :20].any() and bool(out[:, 20:].all(1).any())


def test_tensors_that_kernels_cannot_address(kernels: Kernels, call: Any) -> None:
    tensors = draw_tensors(*call[:2])
    odd = [torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x) for x in tensors]
    turned = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in tensors]
    assert all(x.data_ptr() % 16 for x in odd)
    for each in (tensors, odd, turned) * 3:
        check(flash_attn_fp8_func(*each), tensors)
    parts = quantize_qkv(*tensors).opened()
    codes = parts.q.data
    moved = torch.zeros(codes.numel() + 1, dtype=E4M3)[1:].view(codes.shape).copy_(codes)
    for data in (codes, moved, codes.transpose(1, 2).contiguous().transpose(1, 2)) * 3:
        check(flash_attn_quantized_func(replace(parts, q=replace(parts.q, data=data))), tensors)
    assert len(kernels.calls) == 18


def test_another_gpu_is_current(kernels: Kernels, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = draw_tensors(*call[:2])
    parts = quantize_qkv(*tensors).opened()
    entered = pretend(monkeypatch, fp8_launch, quantize, value_mean)
    for number in range(1, 9):
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        out = flash_attn_quantized_func(parts) if number % 2 else flash_attn_fp8_func(*tensors)
        check(out, tensors)
        assert set(entered) == {0} and len(entered) >= number


def test_graphs_are_served_by_what_is_found_anew(
    kernels: Kernels, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = draw_tensors(*call[:2])
    for _ in range(3):
        parts = quantize_qkv(*tensors)
        flash_attn_quantized_func(parts), flash_attn_fp8_func(*tensors)
    monkeypatch.setattr(device_memory, "records_graph", lambda index: True)
    assert parts_again.find(parts, (False, False, False, None, None)) is None
    check(flash_attn_quantized_func(parts), tensors)
    check(flash_attn_fp8_func(*tensors), tensors)
    assert {seen["splits"] for seen in kernels.calls} == {call[2].splits}


def test_multiprocessors_that_are_left_to_others(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = quantize_qkv(*draw_tensors((1, 40, 3000), (8, 2)))
    flags = False, None, False
    launchers = [launch_for(parts, *flags, margin, FULL_SIDES, False, True) for margin in (0, 12)]
    for margin, launcher in zip((0, 12), launchers, strict=True):
        assert isinstance(launcher, Fp8HopperLauncher) and launcher.splits > 1 and launcher.combine
        assert launcher.num_ctas == 2 * (SMS - margin)
    with pytest.raises(ValueError, match="sm_margin"):
        launch_for(parts, *flags, SMS, FULL_SIDES, False, True)


def test_values_in_rows_are_served_as_before(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = [x.to(E4M3) for x in draw_tensors((1, 40, 3000), (8, 2))]
    parts = from_descales(*codes, None, None, None, torch.bfloat16)
    assert isinstance(parts.v, QuantizedTensor)
    monkeypatch.setattr(compile_cache, "get_forward", lambda config: lambda *given: None)
    launcher = launch_for(parts, False, None, False, 0, FULL_SIDES, False, True)
    assert isinstance(launcher, Fp8HopperLauncher) and launcher.splits == 1 and launcher.transposes


def test_empty_tensors(kernels: Kernels) -> None:
    for sizes in ((0, 5, 100), (2, 0, 100), (2, 5, 0)):
        out = flash_attn_fp8_func(*draw_tensors(sizes, (8, 2)))
        assert out.shape == (*sizes[:2], 8, 64) and not out.any()
    assert not kernels.calls


def test_lengths_that_grow(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that a cache gains one by one are served by few kernels, and each by the one that the rule says."""
    q, *_ = draw_tensors((1, 4, 1), (8, 2))
    for keys in (*range(125, 132), 300, 1100, 1101, 1102):
        k, v = draw_tensors((1, keys, keys), (2, 2))[1:]
        parts: QuantizedQKV = quantize_qkv(q, k, v)
        for _ in range(2):
            check(flash_attn_quantized_func(parts), [q, k, v])
            few = find_few(problem_of(parts.opened(), False, without_lse=True))
            seen = kernels.calls[-1]
            assert (seen["config"].group, seen["splits"]) == (few.group, few.splits)
    assert MEMORY in vars(parts)


def test_other_dtypes(kernels: Kernels, call: Any) -> None:
    """The output is in that of the tensors which were quantized, and so is what parts are added up to."""
    tensors = [x.half() for x in draw_tensors(*call[:2])]
    for attend in (flash_attn_fp8_func, lambda *x: flash_attn_quantized_func(quantize_qkv(*x))):
        for _ in range(3):
            out = attend(*tensors)
            check(out.bfloat16(), tensors)
            assert out.dtype == torch.float16 and kernels.calls[-1]["config"].output == "float16"
            assert not kernels.merged or kernels.merged[-1][2].dtype == torch.float16
