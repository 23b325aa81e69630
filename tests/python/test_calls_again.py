"""Calls with tensors like those of earlier ones: what was found is used again, and nothing else passes for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hopper_attention import (
    Fp8Quantization,
    api,
    autograd,
    compile_cache,
    device_memory,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_quantized_func,
    flash_attn_varlen_func,
    fp8,
    fused_again,
    ops,
    parts_again,
    quantization,
    quantize_qkv,
    varlen,
)
from hopper_attention.launch import backward, forward, quantize
from hopper_attention.launch import fp8 as fp8_launch
from hopper_attention.launch import varlen as varlen_launch
from hopper_attention.like_calls import Latest, Remembered, like, may_be_like
from tests.python.fake_gpu import MORE_THAN_A_TILE, forget_launchers, noting, pretend

BF16 = torch.bfloat16
Seen = list[tuple[Any, ...]]


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Arguments of the kernels of a pretended H200, which compute nothing."""
    found: Seen = []
    pretend(monkeypatch, backward, forward, fp8_launch, quantize, varlen_launch)
    for name in ("get_forward", "get_backward", "get_quantize"):
        monkeypatch.setattr(compile_cache, name, lambda config: noting(found))
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    yield found
    forget_launchers()


def draw(*shape: int, requires_grad: bool = False, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=requires_grad)


def qkv(rows: int = 40, requires_grad: bool = False) -> list[Tensor]:
    return [draw(1, rows, 2, 64, requires_grad=requires_grad) for _ in range(3)]


def packed(requires_grad: bool = False) -> tuple[Any, ...]:
    starts = torch.tensor([0, 16, 40], dtype=torch.int32)
    return *(draw(40, 2, 64, requires_grad=requires_grad) for _ in range(3)), starts, starts, 24, 24


def floats(given: tuple[Any, ...]) -> list[float]:
    return [x for x in given if isinstance(x, float)]


def refuse(*given: Any, **options: Any) -> Any:
    raise AssertionError("a call is found anew that was made before")


# what is like and what is not


def test_what_tensors_are_like() -> None:
    x, y = draw(2, 3, 4), draw(5, dtype=torch.int32)
    is_like = like(x, y)
    assert is_like(x, y) and is_like(draw(2, 3, 4), draw(5, dtype=torch.int32)) and is_like(x.clone(), y)
    assert is_like(draw(4, 3, 4)[2:], y)
    others: list[Any] = [
        draw(2, 3, 5),
        draw(1, 3, 4),
        draw(2, 12),
        x.half(),
        x.to("meta"),
        x.mT.contiguous().mT,
    ]
    others += [
        draw(2, 3, 8)[..., :4],
        torch.nn.Parameter(x, requires_grad=False),
        draw(2, 3, 4, requires_grad=True),
    ]
    others += [None, 3, x.numpy]
    for other in others:
        assert not is_like(other, y)
    assert not like(x, x)(x, x)


def test_what_changes_a_call_is_seen() -> None:
    x = draw(2, 3)
    is_like, inside = like(x), []
    with torch.autocast("cpu", dtype=BF16):
        assert not is_like(x)
    with torch.inference_mode():
        assert not is_like(x) and not is_like(draw(2, 3)) and like(x)(x)
    with torch.no_grad():
        assert is_like(x)
    torch.func.vmap(lambda sample: inside.append(is_like(x) or is_like(sample)) or sample)(draw(4, 2, 3))
    torch.func.grad(lambda sample: inside.append(is_like(sample)) or sample.sum())(torch.zeros(2, 3))
    assert inside == [False, False]
    assert may_be_like()
    with TorchDispatchMode():
        assert not may_be_like()
    with torch.autograd.forward_ad.dual_level():
        assert not may_be_like()


def test_a_torch_without_the_comparison_has_every_call_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    q = draw(2, 8)
    assert like(q)(q)
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    assert not like(q)(q)
    for _ in range(4):
        flash_attn_func(*qkv())


def test_no_more_is_remembered_than_the_limit() -> None:
    calls: Remembered[int] = Remembered(2)
    x = draw(2)
    for key in (1, 2, 3):
        assert not calls.comes_again(key) and calls.find(key, x) is None
        calls.keep(key, 10 * key, x)
        assert calls.find(key, x) == 10 * key and calls.find(key, draw(3)) is None
    assert calls.find(1, x) is None and calls.find([3], x) is None
    assert calls.comes_again(3)


def test_tensors_of_several_kinds_have_one_key() -> None:
    calls: Remembered[int] = Remembered(2)
    kinds = [draw(n + 1) for n in range(6)]
    for n, x in enumerate(kinds):
        calls.keep("key", n, x)
    assert [calls.find("key", x) for x in kinds] == [0, 1, 2, 3, None, None]
    calls.keep("one twice", 7, kinds[0], kinds[0])
    assert calls.find("one twice", kinds[0], kinds[0]) is None


# forward and gradients


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_forward_call_is_found_once(
    requires_grad: bool, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        flash_attn_func(*qkv(requires_grad=requires_grad), causal=True)
    for module, name in ((api, "run_forward"), (api, "is_plain_16_bit_call"), (forward, "find_launch")):
        monkeypatch.setattr(module, name, refuse)
    given = qkv(requires_grad=requires_grad)
    out, lse = flash_attn_func(*given, 0.25, True, return_attn_probs=True)
    assert out.shape == (1, 40, 2, 64) and out.requires_grad == requires_grad and lse.shape == (1, 2, 40)
    assert all(x is y for x, y in zip(given, seen[-1], strict=False)) and 0.25 in floats(seen[-1])
    assert seen[0][6] == 64**-0.5
    with pytest.raises(AssertionError, match="found anew"):
        flash_attn_func(*qkv(41), causal=True)
    with pytest.raises(ValueError, match="softmax_scale is -1"):
        flash_attn_func(*given, -1.0, True)


def test_a_forward_call_that_is_unlike_is_checked() -> None:
    given = qkv()
    for _ in range(3):
        flash_attn_func(*given)
    q, k, v = given
    for bad, error, message in (
        ((q, k.half(), v), TypeError, "k has dtype torch.float16"),
        ((q, k, v[:, :39]), ValueError, "v has shape"),
        ((q.tolist(), k, v), TypeError, "q is a list"),
        ((q, None, v), TypeError, "k is a NoneType"),
    ):
        with pytest.raises(error, match=message):
            flash_attn_func(*bad)
    with pytest.raises(TypeError, match="sm_margin is a bool"):
        flash_attn_func(*given, sm_margin=True)
    out = flash_attn_func(q, k, v.clone().requires_grad_())
    assert out.requires_grad
    with torch.no_grad():
        assert not flash_attn_func(q, k, v.clone().requires_grad_()).requires_grad


def test_tensors_at_odd_addresses_are_copied(seen: Seen) -> None:
    given = qkv()
    for _ in range(3):
        flash_attn_func(*given)
    flash_attn_func(odd := draw(given[0].numel() + 1)[1:].view(given[0].shape), *given[1:])
    assert seen[-1][0].data_ptr() % 16 == 0
    leaves = qkv(requires_grad=True)
    for dout in (*given, odd):
        torch.autograd.grad(flash_attn_func(*leaves), leaves, dout)
    assert all(x.data_ptr() % 16 == 0 for x in (seen[-3][1], seen[-2][3]))


def keys_of(rows: int, batch: int = 2, heads: int = 2) -> Tensor:
    """The first rows of a larger tensor, as of a cache."""
    return draw(batch, 100, heads, 64)[:, :rows]


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_call_with_another_number_of_keys_is_found(
    is_shared: bool, requires_grad: bool, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = draw(2, 3, 2, 64, requires_grad=requires_grad)

    def attend(rows: int) -> Tensor:
        k = keys_of(rows)
        return flash_attn_func(q, k, k if is_shared else keys_of(rows))

    attend(50), attend(51)
    monkeypatch.setattr(api, "run_forward", refuse)
    monkeypatch.setattr(autograd, "forward", refuse)
    for rows in (52, 60, 49, 64):
        out = attend(rows)
        assert out.shape == q.shape and out.requires_grad == requires_grad
        assert seen[-1][1].shape == seen[-1][2].shape == (2, rows, 2, 64)
    # Of other lengths another kernel may be the faster one, and no length is no problem of a kernel.
    for rows in (65, 0):
        with pytest.raises(AssertionError, match="found anew"):
            attend(rows)


def test_keys_that_are_unlike_in_more_than_their_number_are_checked(seen: Seen) -> None:
    q = draw(2, 3, 2, 64)
    for rows in (33, 34, 35):
        flash_attn_func(q, keys_of(rows), keys_of(rows))
    for k, v, error, message in (
        (keys_of(40), keys_of(41), ValueError, r"v has shape \(2, 41, 2, 64\)"),
        (keys_of(40), keys_of(40).half(), TypeError, "v has dtype"),
        (keys_of(40, heads=3), keys_of(40, heads=3), ValueError, "q has 2 heads and k has 3"),
        (keys_of(40, batch=1), keys_of(40, batch=1), ValueError, r"k has shape \(1, 40, 2, 64\)"),
        (keys_of(40)[0], keys_of(40)[0], ValueError, "k has 3 dimensions"),
        (draw(), draw(), ValueError, "k has 0 dimensions"),
        (keys_of(40), None, TypeError, "v is a NoneType"),
        (keys_of(40), keys_of(40).to("meta"), ValueError, "v is on meta"),
    ):
        with pytest.raises(error, match=message):
            flash_attn_func(q, k, v)
    # What TMA cannot address is copied: a batch whose stride is 0, or no multiple of 16 bytes.
    for base in (
        keys_of(40)[:1].expand(2, -1, -1, -1),
        draw(2 * 5121).as_strided((2, 40, 2, 64), (5121, 128, 64, 1)),
    ):
        flash_attn_func(q, base, keys_of(40))
        assert seen[-1][1].is_contiguous() and seen[-1][1].shape == base.shape
    # A window reads its sides against the number of keys.
    for rows in (36, 37, 38):
        flash_attn_func(q, keys_of(rows), keys_of(rows), window_size=(rows - 34, 0))
    lefts = [x for x in seen[-1] if isinstance(x, int) and not isinstance(x, bool)]
    assert 38 - 34 in lefts


def gradients_of(
    attend: Callable[..., Tensor], leaves: tuple[Tensor, ...], **options: Any
) -> tuple[Tensor, ...]:
    out = attend()
    return torch.autograd.grad(out, leaves, torch.ones_like(out), **options)


def test_a_backward_call_is_found_once(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        leaves = qkv(MORE_THAN_A_TILE, requires_grad=True)
        gradients_of(lambda leaves=leaves: flash_attn_func(*leaves, 0.5), tuple(leaves))
    for module, name in ((ops, "differentiate"), (backward, "find_plain")):
        monkeypatch.setattr(module, name, refuse)
    leaves, before = qkv(MORE_THAN_A_TILE, requires_grad=True), len(seen)
    found = gradients_of(lambda: flash_attn_func(*leaves, 0.5), tuple(leaves))
    assert [x.shape for x in found] == [x.shape for x in leaves] and all(x.is_contiguous() for x in found)
    # The forward kernel, and the three of the backward pass.
    _, prepare, kernel, finish = seen[before:]
    assert kernel[7] is found[1] and kernel[8] is found[2] and kernel[10] == finish[2] == 0.5
    assert finish[1] is found[0] and prepare[2].shape == (1, 2, MORE_THAN_A_TILE)
    assert [x.data_ptr() for x in kernel[:3]] == [x.data_ptr() for x in leaves]
    with pytest.raises(AssertionError, match="found anew"):
        gradients_of(lambda: flash_attn_func(*leaves, 0.25), tuple(leaves))


@pytest.mark.parametrize("causal", [False, True])
def test_launches_of_a_backward_pass_get_what_those_of_the_first_got(seen: Seen, causal: bool) -> None:
    passes = []
    for _ in range(4):
        leaves = qkv(MORE_THAN_A_TILE, requires_grad=True)
        out, lse = flash_attn_func(*leaves, 0.25, causal, return_attn_probs=True)
        seen.clear()
        dout = torch.ones_like(out)
        grads = torch.autograd.grad(out, leaves, dout)
        passes.append([tuple(launch) for launch in seen])
        (o, do, of_rows, *work), (q, k, v, also_do, *rest), (sums, dq, scale) = seen
        given = (o, out), (do, dout), (of_rows, lse), (also_do, dout), *zip((q, k, v), leaves, strict=True)
        assert all(x.data_ptr() == y.data_ptr() for x, y in given) and scale == 0.25
        assert [x.data_ptr() for x in work] == [x.data_ptr() for x in rest[:3]] and sums is work[2]
        assert [x.data_ptr() for x in (dq, *rest[3:5])] == [x.data_ptr() for x in grads]
    first, *others = [[facts_of(x) for launch in each for x in launch] for each in passes]
    assert others == [first] * 3


def facts_of(x: Any) -> Any:
    """Of a tensor, torch's or TVM FFI's, what is not its memory; anything else as it is."""
    if not hasattr(x, "data_ptr"):
        return x
    strides = x.stride() if isinstance(x, Tensor) else x.strides
    return tuple(x.shape), tuple(strides), str(x.dtype).removeprefix("torch.")


def test_what_served_the_latest_call_serves_no_other() -> None:
    calls: Remembered[int] = Remembered(4)
    x, y, before = draw(2), draw(3), Latest[int]()
    assert before.find((1, None), x) is None
    calls.keep("key", 7, x)
    kept = calls.find_kept("key", x)
    assert kept is not None and calls.find_kept("key", y) is None and calls.find_kept("other", x) is None
    before.keep((1, None, 0.0), kept, 1)
    assert before.find((1, None, 0.0), x) == before.find((1, None, -0.0), draw(2)) == 7
    for options in ((True, None, 0.0), (1, None, 0), (1, False, 0.0), (2, None, 0.0), (1, None), (1, x, 0.0)):
        assert before.find(options, x) is None
    assert before.find((1, None, 0.0), y) is None and before.find((1, None, 0.0), x, y) is None
    before.keep(((1, 2),), kept, 1)
    assert before.find(((torch.ones(2), 2),), x) is None
    before.cache_clear()
    assert before.find(((1, 2),), x) is None


def test_the_latest_call_of_a_group_is_found() -> None:
    calls: Remembered[int] = Remembered(2)
    x, y = draw(2), draw(3)
    calls.keep("x", 1, x)
    calls.keep("y", 2, y)
    assert calls.find_latest("group", x) is None
    for key, tensor, other, found in (("x", x, y, 1), ("y", y, x, 2)):
        assert calls.find(key, tensor, group="group") == calls.find_latest("group", tensor) == found
        assert calls.find_latest("group", other) is None and calls.find_latest("other", tensor) is None
    # What is forgotten serves nothing.
    calls.keep("z", 3, draw(4))
    assert calls.find_latest("group", y) is None


def test_flags_of_a_call_are_not_those_of_the_latest(seen: Seen) -> None:
    given, leaves = qkv(), qkv(requires_grad=True)
    for _ in range(4):
        for options in ({}, {"causal": True}, {"window_size": (3, 0)}, {"sm_margin": 4}):
            seen.clear()
            flash_attn_func(*given, **options)
            numbers = [x for x in seen[-1] if isinstance(x, int)]
            assert numbers[-1] % (132 - options.get("sm_margin", 0)) == 0
            assert (3 in numbers) == ("window_size" in options)
            assert flash_attn_func(*leaves, **options).requires_grad
            with torch.no_grad():
                assert not flash_attn_func(*leaves, **options).requires_grad
            q, k, _ = given
            flash_attn_func(q, k, k, **options)
            assert seen[-1][1] is seen[-1][2] is k
            flash_attn_func(*given, **options)
            assert seen[-1][2] is given[2]


def test_gradients_that_are_asked_for_in_another_way_are_not_those_before() -> None:
    leaves = qkv(requires_grad=True)
    for _ in range(3):
        gradients_of(lambda: flash_attn_func(*leaves), tuple(leaves))
    dq, *_ = gradients_of(lambda: flash_attn_func(*leaves), tuple(leaves), create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.autograd.grad(dq.sum(), leaves)
    out, lse = flash_attn_func(*leaves, return_attn_probs=True)
    both = torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), torch.ones_like(lse)))
    assert both[0].shape == leaves[0].shape
    with torch.no_grad(), pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(flash_attn_func, tuple(qkv()), tuple(qkv()))
    assert torch.func.vmap(flash_attn_func)(*(draw(3, 1, 40, 2, 64) for _ in range(3))).shape[0] == 3


# packed sequences


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("used", [False, True])
def test_a_packed_call_is_found_once(
    requires_grad: bool, used: bool, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"causal": True}
    if used:
        options |= {name: torch.tensor([3, 4], dtype=torch.int32) for name in ("seqused_q", "seqused_k")}

    def step(*, longest: int = 24) -> None:
        *given, _, _ = packed(requires_grad)
        out = flash_attn_varlen_func(*given, longest, longest, **options)
        assert out.shape == (40, 2, 64) and out.requires_grad == requires_grad
        if requires_grad:
            found = torch.autograd.grad(out, given[:3], torch.ones_like(out))
            assert [x.shape for x in found] == [x.shape for x in given[:3]]

    for _ in range(2):
        step()
    monkeypatch.setattr(varlen, "check_kinds", refuse)
    monkeypatch.setattr(varlen_launch, "find_varlen_launch", refuse)
    monkeypatch.setattr(varlen_launch, "gradient_problem", refuse)
    before = len(seen)
    step()
    # The bounds decide on nothing.
    step(longest=30)
    # A plan and a kernel, and backward a plan and three kernels.
    assert len(seen) - before == (12 if requires_grad else 4)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q is -1"),
        ({"max_seqlen_k": 24.0}, TypeError, "max_seqlen_k is a float"),
        ({"max_seqlen_k": True}, TypeError, "max_seqlen_k is a bool"),
        ({"cu_seqlens_q": torch.zeros(3)}, TypeError, "cu_seqlens_q has dtype torch.float32"),
        ({"cu_seqlens_k": torch.zeros(4, dtype=torch.int32)}, ValueError, "cu_seqlens_k has 4 elements"),
        ({"num_splits": -1}, ValueError, "num_splits is -1"),
        ({"sm_margin": True}, TypeError, "sm_margin is a bool"),
        ({"causal": 2}, ValueError, "causal is 2"),
        ({"causal": [1]}, TypeError, "causal is a list"),
        ({"q_descale": torch.ones(2, 2)}, ValueError, "q_descale is given"),
    ],
    ids=str,
)
def test_a_packed_call_that_is_unlike_is_checked(
    bad: dict[str, Any], error: type[Exception], message: str
) -> None:
    names = "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    for _ in range(3):
        flash_attn_varlen_func(*packed())
    given = dict(zip(names, packed(), strict=True))
    with pytest.raises(error, match=re.escape(message)):
        flash_attn_varlen_func(**{**given, **bad})


# FP8


def test_an_fp8_call_is_found_once(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        flash_attn_fp8_func(*qkv(), causal=True)
        quantize_qkv(*qkv())
    monkeypatch.setattr(fp8, "find_at_once", refuse)
    monkeypatch.setattr(quantization, "quantize_plain", refuse)
    given = qkv()
    assert flash_attn_fp8_func(*given, 0.5, True).shape == (1, 40, 2, 64)
    assert all(x is y for x, y in zip(given, seen[-2], strict=False)) and 0.5 in floats(seen[-1])
    parts = quantize_qkv(*given)
    assert parts.q.data.dtype == torch.float8_e4m3fn and parts.q.data.data_ptr() == seen[-1][3].data_ptr()
    assert (
        parts.q.data.is_contiguous()
        and parts.dtype == BF16
        and parts.v.scale.data_ptr() == seen[-1][8].data_ptr()
    )
    other = Fp8Quantization(seed=7)
    for attend in (flash_attn_fp8_func, quantize_qkv):
        with pytest.raises(AssertionError, match="found anew"):
            attend(*given, quantization=other)


OF_FP8 = {"causal": True}, {"quantization": Fp8Quantization(smooth_v=False)}, {"window_size": (30, 5)}


@pytest.mark.parametrize(("options", "wants_lse"), zip(OF_FP8, (False, True, True), strict=True))
def test_launches_of_an_fp8_call_get_what_those_of_the_first_got(
    seen: Seen, options: dict[str, Any], wants_lse: bool
) -> None:
    calls = []
    for _ in range(4):
        given = qkv(100)
        seen.clear()
        results = flash_attn_fp8_func(*given, 0.25, return_attn_probs=wants_lse, **options)
        out, *lse = results if wants_lse else (results,)
        calls.append([facts_of(x) for launch in seen for x in launch])
        *before, quantizer, attention = seen
        assert [x.data_ptr() for x in quantizer[:3]] == [x.data_ptr() for x in given]
        assert attention[3].data_ptr() == out.data_ptr() and 0.25 in floats(attention)
        assert not wants_lse or attention[4].data_ptr() == lse[0].data_ptr()
        # One kernel reads what the other filled: codes, the scales of Q and K, and of V, which may be a factor of out.
        codes, scales = quantizer[3:6], quantizer[6:9]
        assert [x.data_ptr() for x in attention[:3]] == [x.data_ptr() for x in codes]
        read = [x.data_ptr() for x in attention[6:10]]
        assert read[:2] == [x.data_ptr() for x in scales[:2]] and scales[2].data_ptr() in read[2:]
        for value, mean in before:
            assert value is given[2] and mean is quantizer[12] is attention[10]
    first, *others = calls
    assert others == [first] * 3


def test_an_fp8_call_that_is_unlike_is_checked() -> None:
    for _ in range(3):
        flash_attn_fp8_func(*qkv(), two_level_accumulation=True)
        quantize_qkv(*qkv())
    q, k, v = qkv()
    with pytest.raises(TypeError, match="k has dtype"):
        flash_attn_fp8_func(q, k.half(), v, two_level_accumulation=True)
    with pytest.raises(TypeError, match="two_level_accumulation is 1"):
        flash_attn_fp8_func(q, k, v, two_level_accumulation=1)
    with pytest.raises(ValueError, match="backend is 'cuda'"):
        quantize_qkv(q, k, v, backend="cuda")
    with pytest.raises(TypeError, match=r"quantization is \{\}"):
        quantize_qkv(q, k, v, quantization={})


def test_attention_to_parts_is_found_once(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        flash_attn_quantized_func(quantize_qkv(*qkv()), causal=True)
    first = seen[-1]
    monkeypatch.setattr(fp8, "attend_and_undo", refuse)
    parts = quantize_qkv(*qkv()).opened()
    out = flash_attn_quantized_func(parts, 0.25, True)
    assert out.shape == (1, 40, 2, 64) and out.dtype == BF16
    # What the kernel is given is what it was given by the call that was found, but for tensors and the scale.
    given = seen[-1]
    tensors = parts.q.data, parts.k.data, parts.v.data, out
    assert all(x is y for x, y in zip(given, tensors, strict=False)) and given[10] is parts.mean_v
    # A lone scale of V is a factor of the output, behind that of V.
    q_scale, k_scale, _, o_scale = given[6:10]
    assert q_scale is parts.q.scale and k_scale is parts.k.scale and o_scale is parts.v.scale
    numbers = [x for x in given if isinstance(x, int | float)]
    expected = [0.25 if x == 64**-0.5 else x for x in first if isinstance(x, int | float)]
    assert numbers == expected
    with pytest.raises(ValueError, match="softmax_scale is -1"):
        flash_attn_quantized_func(parts, -1.0, True)
    without_mean = quantize_qkv(*qkv(), quantization=Fp8Quantization(smooth_v=False))
    for options in (
        {"parts": parts, "causal": False},
        {"parts": parts, "causal": True, "return_attn_probs": True},
        {"parts": parts, "causal": True, "exact_lse": True},
        {"parts": parts, "causal": True, "window_size": (5, 0)},
        {"parts": replace(parts, dtype=torch.float16), "causal": True},
        {"parts": replace(parts, q=replace(parts.q, largest=200.0)), "causal": True},
        {"parts": without_mean, "causal": True},
    ):
        with pytest.raises(AssertionError, match="found anew"):
            flash_attn_quantized_func(**options)
    with pytest.raises(TypeError, match="two_level_accumulation is 1"):
        flash_attn_quantized_func(parts, causal=True, two_level_accumulation=1)


def test_parts_that_want_more_than_a_kernel_are_not_taken_for_others(seen: Seen) -> None:
    rotated, shifted = Fp8Quantization(rotate_v=True), Fp8Quantization(smooth_k=True, smooth_v=False)
    for c, exact_lse in ((rotated, False), (shifted, False), (Fp8Quantization(), True)):
        parts = quantize_qkv(*qkv(), quantization=c)
        for _ in range(3):
            flash_attn_quantized_func(parts, exact_lse=exact_lse)
    assert not parts_again.remembered._calls
    plain = [quantize_qkv(*qkv(), quantization=Fp8Quantization(smooth_v=False)) for _ in range(3)]
    for parts in plain:
        flash_attn_quantized_func(parts)
    options = False, False, False, None, None
    assert parts_again.find(plain[0], options) is not None
    rotated = quantize_qkv(*qkv(), quantization=Fp8Quantization(rotate_v=True, smooth_v=False))
    assert rotated.q.data.shape == plain[0].q.data.shape and parts_again.find(rotated, options) is None


@pytest.mark.parametrize("how", ["graph", "address", "gpu"])
def test_what_was_found_does_not_serve_elsewhere(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A graph outlives constants that are kept with a call, and TMA wants multiples of 16 bytes.
    inputs = qkv()
    parts = quantize_qkv(*inputs)
    for _ in range(2):
        quantize_qkv(*inputs)
        flash_attn_fp8_func(*inputs)
        flash_attn_quantized_func(parts)
    for module, name in ((quantization, "quantize_plain"), (fp8, "find_at_once"), (fp8, "attend_and_undo")):
        monkeypatch.setattr(module, name, refuse)
    quantize_qkv(*inputs), flash_attn_fp8_func(*inputs), flash_attn_quantized_func(parts)
    if how == "graph":
        monkeypatch.setattr(device_memory, "records_graph", lambda index: True)
    elif how == "gpu":
        for module in (fused_again, parts_again):
            monkeypatch.setattr(module, "current_device", lambda: 1)
    else:
        inputs[2] = draw(inputs[2].numel() + 1)[1:].view(inputs[2].shape)
        data = draw(parts.v.data.numel() + 1, dtype=torch.float8_e4m3fn)[1:].view(parts.v.data.shape)
        parts = replace(parts, v=replace(parts.v, data=data))
    calls = (
        lambda: quantize_qkv(*inputs),
        lambda: flash_attn_fp8_func(*inputs),
        lambda: flash_attn_quantized_func(parts),
    )
    for call in calls:
        with pytest.raises(AssertionError, match="found anew"):
            call()


@pytest.mark.parametrize("name", ["causal", "backend", "exact_lse"])
def test_an_option_without_a_hash_is_named(name: str) -> None:
    parts = quantize_qkv(*qkv())
    with pytest.raises((TypeError, ValueError), match=f"{name} is"):
        flash_attn_quantized_func(parts, **{name: [1]})
