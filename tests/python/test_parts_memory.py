"""Quantized tensors that lie in two: what is in them when someone asks, and that nobody sees a difference."""

from __future__ import annotations

import copy
import ctypes
import io
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import tvm_ffi
from torch import Tensor

from cute_kernels.combine.config import CombineConfig
from hopper_attention import (
    Fp8Quantization,
    compile_cache,
    flash_attn_quantized_func,
    fp8,
    fused_again,
    parts_memory,
    quantize_qkv,
)
from hopper_attention.few_blocks import class_of_keys
from hopper_attention.launch import at_once, quantize
from hopper_attention.launch import fp8 as fp8_launch
from hopper_attention.launch.at_once import Given, ListedPart, Part, Step
from hopper_attention.problem import longest_alike
from hopper_attention.quantized import MEMORY, QuantizedQKV
from tests.python.fake_gpu import forget_launchers, pretend

E4M3 = torch.float8_e4m3fn
make_script = at_once.make_script


def fill(number: int, x: Tensor) -> None:
    """With bytes that no other tensor of a call has."""
    x.copy_((torch.arange(x.numel()) % 13 + number).view(x.shape).to(x.dtype))


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Arguments of the attention kernels of a pretended H200, whose quantizer fills its results with numbers."""
    found: list[tuple[Any, ...]] = []

    def quantizer(*given: Any) -> None:
        outputs = given[1:2] if len(given) == 2 else given[3:9]
        for number, x in enumerate(outputs, 7 if len(given) == 2 else 1):
            fill(number, x)

    pretend(monkeypatch, fp8_launch, quantize)
    monkeypatch.setattr(compile_cache, "get_quantize", lambda config: quantizer)
    monkeypatch.setattr(compile_cache, "get_forward", lambda config: lambda *given: found.append(given))
    load = compile_cache.get_serving

    def serving(config: Any) -> Any:
        # What adds up parts of few queries' keys computes nothing either.
        return (lambda *given: None) if isinstance(config, CombineConfig) else load(config)

    monkeypatch.setattr(compile_cache, "get_serving", serving)
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    yield found
    forget_launchers()


def qkv(rows: int = 40) -> list[Tensor]:
    return [torch.zeros(2, rows, 2, 64, dtype=torch.bfloat16) for _ in range(3)]


def quantized(rows: int = 40, **options: Any) -> QuantizedQKV:
    """From the third call on, of tensors that nobody has asked for."""
    c = Fp8Quantization(**options) if options else None
    given = {} if c is None else {"quantization": c}
    *_, parts = [quantize_qkv(*qkv(rows), **given) for _ in range(3)]
    assert MEMORY in vars(parts)
    return parts


def tensors_of(parts: QuantizedQKV) -> list[Tensor]:
    q, k, v = parts.q, parts.k, parts.v
    return [q.data, k.data, v.data, q.scale, k.scale, v.scale, parts.mean_v]


def assert_same(parts: QuantizedQKV, expected: QuantizedQKV) -> None:
    for x, y in zip(tensors_of(parts), tensors_of(expected), strict=True):
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype) and x.is_contiguous()
        assert torch.equal(x.float(), y.float()) and x.data_ptr() % 16 == 0 and not x._is_view()
    for x, y in ((parts.q, expected.q), (parts.k, expected.k)):
        assert (x.block, x.largest) == (y.block, y.largest)
    assert (parts.v.block, parts.v.seqlen) == (expected.v.block, expected.v.seqlen)
    assert parts.quantization == expected.quantization and parts.dtype == expected.dtype
    assert parts.shift.numel() == expected.shift.numel() == 0


@pytest.mark.parametrize("options", [{}, {"smooth_v": False}, {"seed": 3}])
@pytest.mark.parametrize("rows", [1, 40, 70])
def test_tensors_are_those_that_first_calls_make(rows: int, options: dict[str, Any]) -> None:
    first = quantize_qkv(*qkv(rows), quantization=Fp8Quantization(**options))
    assert MEMORY not in vars(first)
    assert_same(quantized(rows, **options), first)


def test_what_is_asked_for_stays_what_it_is() -> None:
    parts = quantized()
    assert parts.q is parts.q and parts.mean_v is parts.mean_v and MEMORY not in vars(parts)
    parts.k.data.zero_()
    assert not parts.k.data.float().any() and parts.q.data.float().all()
    with pytest.raises(AttributeError, match="no attribute 'key'"):
        parts.key  # noqa: B018  (to ask is all that is tested)
    assert not hasattr(quantized(), "_nothing")


def test_copies_have_tensors_of_their_own() -> None:
    for copied in (copy.copy, copy.deepcopy, lambda x: replace(x, dtype=torch.bfloat16), QuantizedQKV.opened):
        parts = quantized()
        assert_same(copied(parts), quantized())
        assert MEMORY not in vars(copied(parts))
    stored = io.BytesIO()
    torch.save(quantized(), stored)
    stored.seek(0)
    assert_same(torch.load(stored, weights_only=False), quantized())
    assert {f.name for f in fields(QuantizedQKV)} <= set(vars(quantized().opened()))


def test_threads_may_ask_at_the_same_time() -> None:
    for _ in range(50):
        parts = quantized()
        with ThreadPoolExecutor(4) as pool:
            found = list(
                pool.map(lambda name, parts=parts: getattr(parts, name), ["q", "k", "v", "mean_v"] * 2)
            )
        assert [x is not None for x in found] == [True] * 8
        assert_same(parts, quantized())


def test_large_results_do_not_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_memory, "MAX_BYTES", 1000)
    *_, parts = [quantize_qkv(*qkv()) for _ in range(4)]
    assert MEMORY not in vars(parts)
    assert_same(parts, quantize_qkv(*qkv()))


def test_a_compiled_function_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def total(parts: QuantizedQKV) -> Tensor:
        return parts.q.data.float().sum() + parts.v.scale.sum() + parts.mean_v.sum() + parts.k.block

    *others, expected = [quantized() for _ in range(3)]
    # No GPU is pretended to torch.compile.
    monkeypatch.undo()
    compiled = torch.compile(total, fullgraph=True, backend="eager")
    for parts in (*others, *others):
        assert torch.equal(compiled(parts), total(expected))
        assert MEMORY in vars(parts)
    assert_same(others[0], expected)
    assert torch.equal(compiled(others[0]), total(expected))


def test_attention_reads_them_where_they_lie(seen: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        flash_attn_quantized_func(quantize_qkv(*qkv()), causal=True)
    (*first,) = seen[-1]
    monkeypatch.setattr(fp8, "attend_and_undo", lambda *given: pytest.fail("found anew"))
    parts = quantize_qkv(*qkv())
    for wants_lse in (False, True):
        if wants_lse:
            with pytest.raises(pytest.fail.Exception):
                flash_attn_quantized_func(parts, 0.25, True, return_attn_probs=True)
        else:
            for _ in range(2):
                out = flash_attn_quantized_func(parts, 0.25, True)
    assert MEMORY in vars(parts) and out.shape == (2, 40, 2, 64)
    given = seen[-1]
    assert len(given) == len(first) and given[3] is out
    assert [x for x in given if isinstance(x, float)] == [0.25]
    for x, y in zip(given, first, strict=True):
        if isinstance(y, Tensor):
            assert tuple(x.shape) == tuple(y.shape)
        if isinstance(y, Tensor) and isinstance(x, Tensor):
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
        elif isinstance(y, int):
            assert x == y
    of_kernel = [given[n] for n in (0, 1, 2, 6, 7, 9, 10)]
    expected = tensors_of(parts)
    for x, y in zip(of_kernel, expected, strict=True):
        assert x.data_ptr() == y.data_ptr() and x.shape == y.shape
    # They are ordinary tensors now.
    flash_attn_quantized_func(parts, 0.5, True)
    assert seen[-1][0] is parts.q.data and [x for x in seen[-1] if isinstance(x, float)] == [0.5]


# a number of keys that is new


@pytest.mark.parametrize("options", [{}, {"smooth_v": False}, {"seed": 3}])
def test_tensors_of_a_new_length_are_those_that_first_calls_make(options: dict[str, Any]) -> None:
    c = Fp8Quantization(**options)
    for rows in (1, 15, 16, 17, 31, 32, 35, 63, 64):
        fused_again.quantizing.cache_clear()
        q, k, v = qkv(50)[0], *qkv(rows)[1:]
        first = quantize_qkv(q, k, v, quantization=c)
        fused_again.quantizing.cache_clear()
        for known in (33, 34):
            quantize_qkv(q, *qkv(known)[1:], quantization=c)
        parts, known = (quantize_qkv(q, k, v, quantization=c) for _ in range(2))
        layout, codes, floats = vars(parts)[MEMORY]
        assert isinstance(layout, parts_memory.LengthLayout)
        of_known, *_ = vars(known)[MEMORY]
        assert isinstance(of_known, parts_memory.PartsLayout)
        assert (layout.codes, layout.floats) == (of_known.codes, of_known.floats)
        offsets = [x.data_ptr() for x in tensors_of(replace(parts, **of_known.fields(codes, floats)))]
        assert_same(parts, first)
        assert [x.data_ptr() for x in tensors_of(parts)] == offsets


def test_codes_of_a_new_length_that_are_large_do_not_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    q = qkv(3)[0]
    for known in (33, 34):
        quantize_qkv(q, *qkv(known)[1:])
    monkeypatch.setattr(parts_memory, "MAX_BYTES", 20000)
    small, large = (quantize_qkv(q, *qkv(rows)[1:]) for rows in (20, 64))
    assert MEMORY in vars(small) and MEMORY not in vars(large)
    fused_again.quantizing.cache_clear()
    assert_same(large, quantize_qkv(q, *qkv(64)[1:]))


@pytest.mark.parametrize("queries", [3, 300])
@pytest.mark.parametrize(("known", "lengths"), [((33, 34), (35, 60, 64)), ((2100, 2101), (2099, 2049, 2300))])
def test_attention_reads_parts_of_a_new_length_where_they_lie(
    seen: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    known: tuple[int, ...],
    lengths: tuple[int, ...],
    queries: int,
) -> None:
    q, options = qkv(queries)[0], {"causal": True, "softmax_scale": 0.25}
    for rows in (*known, known[1] + 1):
        flash_attn_quantized_func(quantize_qkv(q, *qkv(rows)[1:]), **options)
    with monkeypatch.context() as patch:
        patch.setattr(fp8, "attend_and_undo", lambda *given: pytest.fail("found anew"))
        # A single key is of the class of those that many queries attend to.
        for rows in (*lengths, *((1,) if queries > 256 and known[0] < 64 else ())):
            parts = quantize_qkv(q, *qkv(rows)[1:])
            out = flash_attn_quantized_func(parts, **options)
            assert MEMORY in vars(parts) and out.shape == q.shape
            given = seen[-1]
            read = [given[n] for n in (0, 1, 2, 6, 7, 9 if rows < 2048 else 8, 10)]
            for x, y in zip(read, tensors_of(parts), strict=True):
                assert (x.data_ptr(), x.shape, x.stride()) == (y.data_ptr(), y.shape, y.stride())
    # Those of a length that is not alike are served by a kernel of their own.
    assert flash_attn_quantized_func(quantize_qkv(q, *qkv(known[1] + 500)[1:]), **options).shape == q.shape


def test_numbers_of_keys_that_few_queries_are_not_alike_for(
    seen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they lie in memory like others, but another kernel may serve them."""
    few, many = ((2, rows, 2, 64) for rows in (3, 300))
    assert longest_alike(32) == longest_alike(33) and class_of_keys(many, 32) == class_of_keys(many, 33)
    assert class_of_keys(few, 32) != class_of_keys(few, 33)
    anew: list[int] = []
    attend = fp8.attend_and_undo

    def noted(parts: QuantizedQKV, *given: Any) -> Any:
        anew.append(parts.k.shape[1])
        return attend(parts, *given)

    monkeypatch.setattr(fp8, "attend_and_undo", noted)
    for queries, found_anew in ((300, [33, 34]), (3, [33, 34, 32, 31])):
        q = qkv(queries)[0]
        anew.clear()
        for rows in (33, 34, 35, 32, 31, 20):
            parts = quantize_qkv(q, *qkv(rows)[1:])
            assert flash_attn_quantized_func(parts).shape == q.shape and seen[-1][1].shape[1] == rows
        # The second of a class is what later ones are found by.
        assert anew == found_anew


def test_threads_quantize_new_lengths_at_the_same_time() -> None:
    q = qkv(3)[0]
    lengths = [*range(35, 64)]
    expected = {rows: quantize_qkv(q, *qkv(rows)[1:]) for rows in lengths}
    fused_again.quantizing.cache_clear()
    for known in (33, 34):
        quantize_qkv(q, *qkv(known)[1:])
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda rows: quantize_qkv(q, *qkv(rows)[1:]), lengths))
    for rows, parts in zip(lengths, found, strict=True):
        assert_same(parts, expected[rows])


# the native code


def seen_by_native(found: list[list[Any]]) -> Any:
    def kernel(*given: Any) -> None:
        found.append(
            [
                (tuple(x.shape), tuple(x.strides), str(x.dtype), x.data_ptr(), str(x.device))
                if isinstance(x, tvm_ffi.Tensor)
                else x
                for x in given
            ]
        )

    return kernel


def test_launches_get_parts_of_what_a_call_gives() -> None:
    found: list[list[Any]] = []
    kernel = seen_by_native(found)
    kept = torch.ones(4, dtype=torch.int32)
    codes = Part(1, 256, ((2, 3, 4), (12, 4, 1), E4M3))
    floats = Part(0, 16, ((2, 2), (2, 1), torch.float32))
    script = make_script(
        [Step(kernel, (Given(1), codes, None, 7, 0.25, kept, Given(2))), Step(kernel, (floats, Given(0), -3))]
    )
    for _ in range(3):
        x, memory = torch.zeros(3, 5), torch.zeros(4096, dtype=E4M3)
        script.run(x, memory, 0.5)
        first, second = found[-2:]
        whole, part, *others, constant, number = first
        assert whole[:3] == ((4096,), (1,), "float8_e4m3fn") and whole[3] == memory.data_ptr()
        assert part == ((2, 3, 4), (12, 4, 1), "float8_e4m3fn", memory.data_ptr() + 256, "cpu:0")
        assert others == [None, 7, 0.25] and constant[3] == kept.data_ptr() and number == 0.5
        assert second[0] == ((2, 2), (2, 1), "float32", x.data_ptr() + 16, "cpu:0")
        assert second[1][3] == x.data_ptr() and second[2] == -3


def test_parts_of_a_tensor_of_the_ffi_itself() -> None:
    found: list[list[Any]] = []
    script = make_script([Step(seen_by_native(found), (Part(0, 8, ((3,), (1,), torch.int32)),))])
    memory = torch.arange(8, dtype=torch.int32)
    script.run(tvm_ffi.from_dlpack(memory))
    ((_, _, _, address, _),) = found[-1]
    assert ctypes.cast(address, ctypes.POINTER(ctypes.c_int32))[0] == 2


def test_launches_get_parts_that_a_call_lists() -> None:
    found: list[list[Any]] = []
    codes, floats = ListedPart(1, 2, 3, 3, E4M3), ListedPart(0, 2, 0, 1, torch.float32)
    script = make_script(
        [Step(seen_by_native(found), (codes, Given(0), floats, Part(1, 8, ((1,), (1,), E4M3))))]
    )
    x, memory = torch.zeros(3, 5), torch.zeros(4096, dtype=E4M3)
    for n in (1, 7):
        listed = array("q", (4 * n, 2, 1, 512 * n, 2, n, 4, 4 * n, 4, 1))
        script.run(x, memory, listed.buffer_info()[0])
        part, whole, of_floats, constant = found[-1]
        assert part == ((2, n, 4), (4 * n, 4, 1), "float8_e4m3fn", memory.data_ptr() + 512 * n, "cpu:0")
        assert whole[3] == x.data_ptr() and constant[3] == memory.data_ptr() + 8
        assert of_floats == ((2,), (1,), "float32", x.data_ptr() + 4 * n, "cpu:0")


def test_an_error_of_a_launch_is_raised_and_ends_the_call() -> None:
    found: list[list[Any]] = []

    def failing(*given: Any) -> None:
        raise ValueError("not this one")

    script = make_script([Step(failing, (Given(0),)), Step(seen_by_native(found), (Given(0),))])
    with pytest.raises(ValueError, match="not this one"):
        script.run(torch.zeros(1))
    assert not found
    with pytest.raises(ValueError, match="takes 65 arguments, allowed: 64"):
        make_script([Step(failing, (None,) * 65)])


def test_scripts_run_in_many_threads() -> None:
    def kernel(part: Any, number: int) -> None:
        pointer = ctypes.cast(part.data_ptr(), ctypes.POINTER(ctypes.c_int32))
        assert pointer[0] == number

    script = make_script([Step(kernel, (Part(0, 16, ((1,), (1,), torch.int32)), Given(1)))] * 3)

    def run(number: int) -> None:
        memory = torch.full((8,), number, dtype=torch.int32)
        for _ in range(50):
            script.run(memory, number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(8)))
