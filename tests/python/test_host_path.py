"""What a short call asks of torch beside its kernels: counted, as the time of it is too small for a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd.profiler import profile

from hopper_attention import (
    compile_cache,
    device_memory,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_quantized_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    fp8_at_once,
    quantize_qkv,
)
from hopper_attention.launch import backward, decode, forward, fp8, kvcache, quantize, varlen
from tests.python.fake_gpu import forget_launchers, pretend

Call = Callable[[], object]
OWN = ("aten::", "hopper_attention::")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An H200 by name, whose kernels compute nothing, and whose work memory is kept as on a GPU."""
    pretend(monkeypatch, backward, forward, fp8, kvcache, quantize, varlen)
    for module in (decode, kvcache):
        monkeypatch.setattr(module, "index_of", lambda device: 0)
    for name in ("get_forward", "get_backward", "get_quantize", "get_serving"):
        monkeypatch.setattr(compile_cache, name, lambda config: lambda *arguments: None)
    counter, memory = torch.zeros(2, dtype=torch.int32), device_memory.WorkMemory()
    monkeypatch.setattr(device_memory, "tile_counter", lambda index: counter)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 1, raising=False)
    monkeypatch.setattr(
        device_memory, "_bytes_of_current_stream", lambda index, size: torch.zeros(size, dtype=torch.uint8)
    )
    monkeypatch.setattr(device_memory, "stream_memory", memory.get)
    monkeypatch.setattr(device_memory, "made_of_memory", memory.made)
    for module in (device_memory, fp8_at_once):
        monkeypatch.setattr(module, "work_memory", lambda device, *request: memory.get(*request))
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    yield
    forget_launchers()


def draw(*shape: int, requires_grad: bool = False) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16, requires_grad=requires_grad)


def qkv(requires_grad: bool = False) -> list[Tensor]:
    return [draw(1, 40, 2, 64, requires_grad=requires_grad) for _ in range(3)]


def operations(call: Call) -> list[str]:
    """Operators of torch and ours, outermost first, of a call that was made before."""
    for _ in range(2):
        call()
    with profile(use_kineto=False) as recorded:
        call()
    events = recorded.function_events
    own = [e for e in events if e.name.startswith(OWN)]
    return [e.name for e in own if e.cpu_parent is None or not e.cpu_parent.name.startswith(OWN)]


def test_a_forward_call_makes_its_results_and_no_more() -> None:
    inputs, leaves = qkv(), qkv(requires_grad=True)
    # The results are not made by torch's dispatcher, and with gradients no operator of ours is called by it.
    for given in (inputs, leaves):
        assert operations(lambda given=given: flash_attn_func(*given, causal=True)) == []


@pytest.mark.parametrize("rows", [40, 140])
def test_a_backward_call_makes_three_gradients_and_no_more(rows: int) -> None:
    # Of keys that are one tile, in one launch, and of more.
    leaves = [draw(1, rows, 2, 64, requires_grad=True) for _ in range(3)]
    out = flash_attn_func(*leaves, causal=True)
    dout = torch.ones_like(out)
    backward = partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)
    # What its launches share is kept from the first one that is like those before.
    backward()
    names = operations(backward)
    # The gradients are not made by the dispatcher.
    assert names == []


def test_no_operator_of_ours_is_between_packed_sequences_and_their_gradients() -> None:
    q, k, v = (draw(40, 2, 64, requires_grad=True) for _ in range(3))
    starts = torch.tensor([0, 16, 40], dtype=torch.int32)

    def step() -> None:
        out = flash_attn_varlen_func(q, k, v, starts, starts, 24, 24)
        torch.autograd.grad(out, (q, k, v), out)

    for _ in range(2):
        step()
    # Its results and gradients are not made by the dispatcher; plans lie in memory that the call before had too.
    assert operations(step) == []


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("wants_lse", [False, True])
def test_a_decode_call_makes_its_results_and_no_more(paged: bool, wants_lse: bool) -> None:
    q, k_cache, v_cache = draw(2, 1, 8, 64), draw(2, 64, 2, 64), draw(2, 64, 2, 64)
    lengths, table = torch.tensor([3, 60], dtype=torch.int32), torch.tensor([[0], [1]], dtype=torch.int32)
    options = {"page_table": table} if paged else {}

    def step() -> object:
        caches = k_cache, v_cache
        return flash_attn_with_kvcache(
            q, *caches, cache_seqlens=lengths, causal=True, return_softmax_lse=wants_lse, **options
        )

    # Its results are not made by the dispatcher.
    assert operations(step) == []


def test_fp8_from_16_bits_makes_its_results_and_no_more() -> None:
    inputs = qkv()
    # Nor are its results made by the dispatcher.
    assert operations(lambda: flash_attn_fp8_func(*inputs)) == []
    assert operations(lambda: flash_attn_fp8_func(*inputs, return_attn_probs=True)) == []


def test_quantization_and_attention_to_its_tensors_ask_nothing_of_torch() -> None:
    inputs = qkv()
    assert operations(lambda: quantize_qkv(*inputs)) == []
    parts = quantize_qkv(*inputs)
    assert operations(lambda: flash_attn_quantized_func(parts)) == []


def test_options_that_equal_others_are_not_taken_for_them() -> None:
    # What is remembered of a call goes by the types of its options: True is 1, and no number of splits.
    q, cache, lengths = draw(1, 1, 2, 64), draw(1, 64, 2, 64), torch.tensor([3], dtype=torch.int32)
    flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, num_splits=1, sm_margin=0)
    for name in ("num_splits", "sm_margin"):
        with pytest.raises(TypeError, match=f"{name} is a bool"):
            flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, **{name: name == "num_splits"})


def test_a_call_that_was_seen_is_checked_for_all_that_its_checks_read() -> None:
    q, cache, lengths = draw(1, 1, 2, 64), draw(1, 64, 2, 64), torch.tensor([3], dtype=torch.int32)
    flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths)
    for bad, error, message in (
        ({"cache_seqlens": lengths.long()}, TypeError, "cache_seqlens has dtype torch.int64"),
        ({"cache_seqlens": lengths.to("meta")}, ValueError, "cache_seqlens is on meta"),
        ({"cache_seqlens": lengths.expand(2)}, ValueError, r"cache_seqlens has shape \(2,\)"),
        ({"q": q.half()}, TypeError, "k_cache has dtype torch.bfloat16"),
        ({"q": q.clone().requires_grad_()}, NotImplementedError, "a tensor requires a gradient"),
        ({"q": q.numpy}, TypeError, "q is a builtin_function"),
        ({"v_cache": cache.mT.contiguous().mT}, ValueError, "v_cache has stride 2 in its last dimension"),
    ):
        given = {"q": q, "k_cache": cache, "v_cache": cache, "cache_seqlens": lengths} | bad
        with pytest.raises(error, match=message):
            flash_attn_with_kvcache(**given)
    inputs = qkv()
    flash_attn_fp8_func(*inputs)
    with pytest.raises(ValueError, match=r"k has shape \(1, 40, 1, 64\)|v has shape"):
        flash_attn_fp8_func(inputs[0], inputs[1][:, :, :1], inputs[2])
    with pytest.raises(TypeError, match=r"k has dtype torch\.float16"):
        flash_attn_fp8_func(inputs[0], inputs[1].half(), inputs[2])
