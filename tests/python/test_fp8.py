"""FP8 attention on the host side: the two halves on the CPU, what the kernel is given, and every refusal."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from hopper.config import validate_forward_config
from hopper.forward.fp8.config import FP8_KEY_ORDER, Fp8ForwardConfig, Softmax
from hopper.forward.fp8.few_tilings import select_fp8_few_blocks_config
from hopper.forward.fp8.tilings import select_fp8_forward_config, shipped_fp8_forward_configs
from hopper_attention import (
    compile_cache,
    explain,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    fp8,
)
from hopper_attention.backends import Choice, Target
from hopper_attention.fp8 import flash_attn_fp8_func, flash_attn_quantized_func
from hopper_attention.fp8_rules import ONE_BLOCK, Fp8Problem, choose_fp8_backend, select_config
from hopper_attention.launch import fp8 as fp8_launch
from hopper_attention.launch.fp8 import ALL_ROWS, problem_of
from hopper_attention.quantization import (
    Fp8Quantization,
    QuantizedQKV,
    default_block_k,
    from_descales,
    quantize_qkv,
)
from hopper_attention.quantized import transpose_for_kernel
from hopper_attention.reference import attention_naive, attention_tiled_fp8
from tests.python.fake_gpu import H200 as HOPPER
from tests.python.fake_gpu import forget_launchers, pretend

SMOOTH = Fp8Quantization(smooth_v=True)


def qkv(
    seqlen_k: int = 203, head_dim: int = 64, dtype: torch.dtype = torch.float16, seqlen_q: int = 113
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, seqlen_q, 4, head_dim), (2, seqlen_k, 2, head_dim), (2, seqlen_k, 2, head_dim)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


@pytest.mark.parametrize("causal", [False, True])
def test_quantize_and_attend_is_the_emulation_here(causal: bool) -> None:
    q, k, v = qkv()
    c = Fp8Quantization(granularity="head", smooth_v=False)
    out, lse = flash_attn_fp8_func(q, k, v, 0.2, causal, True, quantization=c)
    parts = quantize_qkv(q, k, v, quantization=c)
    expected, expected_lse = attention_tiled_fp8(parts, causal=causal, softmax_scale=0.2)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse) and out.dtype == torch.float16
    assert torch.equal(flash_attn_quantized_func(parts, 0.2, causal), expected)
    oracle, _ = attention_naive(q, k, v, causal=causal, softmax_scale=0.2)
    assert ((out - oracle).norm() / oracle.norm()).item() < 0.08


@pytest.mark.parametrize("causal", [False, True])
def test_smooth_k_helps_where_channels_have_offsets_and_keeps_the_lse(causal: bool) -> None:
    q, k, v = qkv()
    k = (k.float() + 8 * torch.linspace(-1, 1, 64).roll(7)).half()
    oracle, oracle_lse = attention_naive(q, k, v, causal=causal)
    errors, lse_errors = {}, {}
    for smooth in (False, True):
        c = Fp8Quantization(smooth_k=smooth)
        out, lse = flash_attn_fp8_func(q, k, v, None, causal, True, quantization=c)
        errors[smooth] = ((out - oracle).norm() / oracle.norm()).item()
        lse_errors[smooth] = (lse - oracle_lse).abs().max().item()
    assert errors[True] < 0.08 and errors[True] < errors[False] / 2
    assert lse_errors[True] < 0.1 and lse_errors[True] < lse_errors[False]


def test_rows_without_keys_stay_empty_with_every_option() -> None:
    q, k, v = qkv(seqlen_k=10)
    c = Fp8Quantization(smooth_k=True, rotate_v=True)
    out, lse = flash_attn_fp8_func(q, k, v, None, True, True, quantization=c)
    assert not out[:, :103].any() and bool((lse[:, :, :103] == -torch.inf).all())
    assert bool(lse[:, :, 103:].isfinite().all())
    assert flash_attn_fp8_func(q, k[:, :0], v[:, :0], quantization=c).count_nonzero() == 0


def test_rotated_v_comes_back() -> None:
    q, k, v = qkv()
    v[:, :, :, 3] *= 60
    oracle, _ = attention_naive(q, k, v)
    errors = {}
    for rotate_v in (False, True):
        c = Fp8Quantization(granularity="tensor", rotate_v=rotate_v)
        out = flash_attn_fp8_func(q, k, v, quantization=c)
        errors[rotate_v] = ((out - oracle).norm() / oracle.norm()).item()
    assert errors[True] < 0.08 and errors[False] < 0.08


def test_bad_arguments_are_named() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match="softmax_scale is -1"):
        flash_attn_fp8_func(q, k, v, -1)
    with pytest.raises(ValueError, match="backend is 'gpu'"):
        flash_attn_fp8_func(q, k, v, backend="gpu")
    with pytest.raises(ValueError, match="backend is 'hopper', but cpu is not an NVIDIA GPU"):
        flash_attn_fp8_func(q, k, v, backend="hopper")
    with pytest.raises(TypeError, match="q"):
        flash_attn_fp8_func(None, k, v)  # type: ignore[arg-type]  # wrong on purpose


def test_each_word_of_p_meets_the_keys_that_its_thread_holds() -> None:
    # Thread t of a quad holds, of each 8 columns, 2 t and 2 t + 1; a word of the operand is slots 4 t to 4 t + 3.
    for half, t in ((half, t) for half in (0, 1) for t in range(4)):
        word = FP8_KEY_ORDER[16 * half + 4 * t :][:4]
        assert word == tuple(16 * half + 8 * group + 2 * t + e for group in (0, 1) for e in (0, 1))
    assert sorted(FP8_KEY_ORDER) == list(range(32))


def test_v_is_transposed_ordered_and_padded() -> None:
    v = torch.arange(70 * 16, dtype=torch.float32).remainder(64).view(1, 70, 1, 16).to(torch.float8_e4m3fn)
    moved = transpose_for_kernel(v)
    assert moved.shape == (1, 1, 16, 96) and moved.is_contiguous()
    for slot in (0, 1, 2, 3, 5, 17, 40, 69 // 32 * 32 + 1):
        key = slot // 32 * 32 + FP8_KEY_ORDER[slot % 32]
        expected = v[0, key, 0].float() if key < 70 else torch.zeros(16)
        assert torch.equal(moved[0, 0, :, slot].float(), expected)
    assert moved[0, 0, :, 64:].float().count_nonzero() == v[0, 64:].float().count_nonzero()


class FakeKernel:
    def __init__(self) -> None:
        self.arguments: tuple[Any, ...] = ()

    def __call__(self, *arguments: Any) -> None:
        self.arguments = arguments
        arguments[3].zero_()
        arguments[4].zero_()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeKernel, list[Fp8ForwardConfig]]:
    """The launcher believes that the CPU is a Hopper GPU; its kernels are all this one, built from these configs."""
    kernel, configs = FakeKernel(), []
    pretend(monkeypatch, fp8_launch)
    monkeypatch.setattr(compile_cache, "get_forward", lambda config: configs.append(config) or kernel)
    monkeypatch.setattr(fp8_launch, "widened", lambda q, k: (q.to(torch.float16), k.to(torch.float16)))
    yield kernel, configs
    forget_launchers()


def test_what_the_kernel_is_given(hopper: tuple[FakeKernel, list[Fp8ForwardConfig]]) -> None:
    kernel, configs = hopper
    many = qkv(seqlen_q=300)
    parts = quantize_qkv(*many, quantization=SMOOTH)
    out, lse = flash_attn_quantized_func(parts, causal=True, return_attn_probs=True, exact_lse=False)
    q, k, vt, _, _, _, q_scale, k_scale, v_scale, o_scale, mean_v, *numbers = kernel.arguments
    assert q is parts.q.data and k is parts.k.data and vt is parts.v.data and vt.shape == (2, 2, 64, 224)
    assert q_scale is parts.q.scale and k_scale is parts.k.scale and v_scale is parts.v.scale
    assert o_scale.tolist() == [[[1.0], [1.0]]] * 2
    config = select_fp8_forward_config(64, 64, True, "float16", 203)
    with_lse = select_fp8_forward_config(64, 64, True, "float16", 203, config.tile_n, exact_lse=True)
    assert numbers == [1, config.tile_n, 0.125, 132] and mean_v is parts.mean_v
    assert out.shape == (2, 300, 4, 64) and lse.shape == (2, 4, 300) and out.dtype == torch.float16
    assert configs == [config]
    flash_attn_quantized_func(parts, causal=True)
    assert kernel.arguments[4].shape == (2, 4, 0) and configs == 2 * [config]
    flash_attn_quantized_func(parts, causal=True, exact_lse=True)
    assert all(x.dtype == torch.float16 for x in kernel.arguments[:2])
    flash_attn_fp8_func(*many, causal=True, quantization=SMOOTH, exact_lse=True)
    assert configs == [*(2 * [config]), with_lse]
    # Few queries have tiles of their own, but where someone gets an exact LSE.
    few = quantize_qkv(*qkv(), quantization=SMOOTH)
    of_few = select_fp8_few_blocks_config((64, 64), True, "float16", 1, 64, False, config.tile_n)
    flash_attn_quantized_func(few, causal=True, return_attn_probs=True, exact_lse=False)
    assert configs[3:] == [of_few] and kernel.arguments[0] is few.q.data
    flash_attn_quantized_func(few, causal=True)
    assert configs[3:] == 2 * [of_few]
    flash_attn_quantized_func(few, causal=True, return_attn_probs=True, exact_lse=True)
    assert not {config.name for config in configs[5:]} & {of_few.name}


def test_the_mean_of_v_is_added_once(hopper: tuple[FakeKernel, list[Fp8ForwardConfig]]) -> None:
    """By the kernel, or after it where V is rotated; the kernel's argument is empty where it has nothing to add."""
    kernel, configs = hopper
    mean_v = quantize_qkv(*qkv(), quantization=SMOOTH).mean_v
    for options, of_kernel, of_torch in (
        ({}, True, False),
        ({"granularity": "head"}, True, False),
        ({"rotate_v": True}, False, True),
        ({"smooth_v": False}, False, False),
    ):
        parts = quantize_qkv(*qkv(), quantization=replace(SMOOTH, **options))
        assert (parts.mean_v.numel() > 0) == (of_kernel or of_torch)
        out = flash_attn_quantized_func(parts)
        given = kernel.arguments[10]
        assert given.shape == ((2, 2, 64) if of_kernel else (2, 2, 0)) and given.dtype == torch.float32
        assert all(stride % 4 == 0 for stride in given.stride()[:2])
        added = mean_v.repeat_interleave(2, 1).unsqueeze(1) if of_torch else torch.zeros(1)
        assert torch.equal(out, added.to(out.dtype).expand_as(out))
    assert len(set(configs)) == 1


def test_a_mean_that_the_kernel_cannot_read_is_copied(
    hopper: tuple[FakeKernel, list[Fp8ForwardConfig]],
) -> None:
    parts = quantize_qkv(*qkv(), quantization=SMOOTH)
    shifted = torch.empty(parts.mean_v.numel() + 1)[1:].view_as(parts.mean_v).copy_(parts.mean_v)
    by_column = parts.mean_v.mT.contiguous().mT
    for mean in (shifted, by_column):
        flash_attn_quantized_func(replace(parts, mean_v=mean))
        given = hopper[0].arguments[10]
        assert torch.equal(given, mean) and given.is_contiguous() and given.data_ptr() % 16 == 0


def test_two_level_accumulation_reaches_the_kernel_from_every_function(
    hopper: tuple[FakeKernel, list[Fp8ForwardConfig]],
) -> None:
    kernel, configs = hopper
    q, k, v = qkv()
    parts, e4m3 = quantize_qkv(q, k, v), [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    both = {"two_level_accumulation": True, "causal": True}
    calls = (
        lambda: flash_attn_quantized_func(parts, **both),
        lambda: flash_attn_fp8_func(q, k, v, **both),
        lambda: flash_attn_fp8_func(q.clone().requires_grad_(), k, v, **both),
        lambda: flash_attn_func(*e4m3, **both),
        lambda: flash_attn_kvpacked_func(e4m3[0], torch.stack(e4m3[1:], 2), **both),
        lambda: flash_attn_qkvpacked_func(torch.stack([e4m3[1]] * 3, 2), **both),
    )
    for call in calls:
        forget_launchers()
        call()
        assert configs.pop().two_level and configs == []
    block_k = kernel.arguments[12]
    flash_attn_quantized_func(parts, **both)
    assert kernel.arguments[2] is parts.v.data and kernel.arguments[12] == parts.k.block != block_k
    flash_attn_quantized_func(parts, causal=True)
    assert [config.two_level for config in configs] == [True, False]


def test_blocks_follow_the_tile_of_two_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [default_block_k(64, 64, 16384, two) for two in (False, True)] == [192, 128]
    assert [default_block_k(64, 64, 4096, two) for two in (False, True)] == [128, 128]
    assert [default_block_k(128, 128, 16384, two) for two in (False, True)] == [128, 128]
    assert [default_block_k(256, 256, 16384, two) for two in (False, True)] == [128, 128]
    q, k, v = (torch.randn(1, 8, 1, 64).half() for _ in range(3))
    k, v = (x.repeat(1, 600, 1, 1) for x in (k, v))
    seen = []
    quantize = fp8.quantize_here

    def note(*arguments: Any) -> QuantizedQKV:
        parts = quantize(*arguments)
        seen.append(parts.k.block)
        return parts

    monkeypatch.setattr(fp8, "quantize_here", note)
    for options in ({}, {"two_level_accumulation": True}):
        flash_attn_fp8_func(q, k, v, **options)
        flash_attn_fp8_func(q, k, v, quantization=Fp8Quantization(block_k=64), **options)
    assert seen == [192, 64, 128, 64]


def test_the_emulation_is_the_same_with_two_level_accumulation() -> None:
    q, k, v = qkv()
    parts = quantize_qkv(q, k, v)
    expected = flash_attn_quantized_func(parts)
    assert torch.equal(flash_attn_quantized_func(parts, two_level_accumulation=True), expected)
    q.requires_grad_()
    gradients = []
    for two_level in (False, True):
        out = flash_attn_fp8_func(q, k, v, two_level_accumulation=two_level)
        assert torch.equal(out, expected)
        gradients.append(torch.autograd.grad(out.sum(), q)[0])
    assert torch.equal(*gradients)


@pytest.mark.parametrize("bad", [None, 1, "two_level"])
def test_two_level_accumulation_is_a_bool(bad: Any) -> None:
    q, k, v = qkv()
    for call in (
        lambda: flash_attn_fp8_func(q, k, v, two_level_accumulation=bad),
        lambda: flash_attn_quantized_func(quantize_qkv(q, k, v), two_level_accumulation=bad),
        lambda: flash_attn_func(q, k, v, two_level_accumulation=bad),
    ):
        with pytest.raises(TypeError, match=f"two_level_accumulation is {bad!r}, allowed: True or False"):
            call()


def test_lone_scales_of_v_are_factors_of_the_output(
    hopper: tuple[FakeKernel, list[Fp8ForwardConfig]],
) -> None:
    kernel, configs = hopper
    q, k, v = (x.to(torch.float8_e4m3fn) for x in qkv())
    descale = torch.tensor([[1.0, -2.0], [0.0, 4.0]])
    flash_attn_quantized_func(from_descales(q, k, v, None, None, descale, torch.bfloat16))
    rows, v_scale, o_scale, block_k = (kernel.arguments[i] for i in (2, 8, 9, 12))
    assert rows is v and [config.v_rows for config in configs] == [True]
    assert torch.equal(v_scale, torch.ones(2, 2, 1)) and torch.equal(o_scale[..., 0], descale)
    assert block_k == ALL_ROWS


def test_v_in_rows_that_tma_cannot_address_is_copied(
    hopper: tuple[FakeKernel, list[Fp8ForwardConfig]],
) -> None:
    q, k, v = (x.to(torch.float8_e4m3fn) for x in qkv())
    odd = torch.zeros(2, 203, 2, 67).to(torch.float8_e4m3fn)[..., :64].copy_(v)
    flash_attn_quantized_func(from_descales(q, k, odd, None, None, None, torch.bfloat16))
    given = hopper[0].arguments[2]
    assert torch.equal(given.float(), v.float()) and given.data_ptr() % 16 == 0
    assert all(stride % 16 == 0 for stride in given.stride()[:3])


def test_v_in_rows_with_scales_by_block_is_transposed_first(
    hopper: tuple[FakeKernel, list[Fp8ForwardConfig]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, configs = hopper
    monkeypatch.setattr(fp8_launch, "transpose_values", transpose_for_kernel)
    parts = quantize_qkv(*qkv())
    flash_attn_quantized_func(replace(parts, v=parts.v.row_major()))
    assert torch.equal(kernel.arguments[2].view(torch.uint8), parts.v.data.view(torch.uint8))
    assert [config.v_rows for config in configs] == [False]


@pytest.mark.parametrize(
    ("head_dim", "queries", "heads", "transposes"),
    [
        (64, 321, 1, False),
        (64, 80, 4, True),
        (72, 448, 1, True),
        (128, 225, 2, False),
        (136, 320, 1, True),
        (192, 321, 1, False),
        (256, 1025, 1, False),
        (256, 1024, 1, True),
        (256, 1, 8, True),
    ],
)
def test_many_queries_have_v_transposed_first(head_dim, queries, heads, transposes):
    shapes = (1, queries, heads, head_dim), (1, 4096, 1, head_dim), (1, 4096, 1, head_dim)
    problem = Fp8Problem(*shapes, *3 * (ONE_BLOCK,), torch.bfloat16, False, v_rows=True)
    assert select_config(problem).v_rows == transposes


def test_tensors_that_do_not_fit_are_refused(hopper: tuple[FakeKernel, list[Fp8ForwardConfig]]) -> None:
    c = Fp8Quantization(smooth_v=False)
    parts = quantize_qkv(*qkv(), quantization=c)
    longer, wider, more_heads = (
        quantize_qkv(*(torch.randn(2, *size).half() for size in sizes), quantization=c)
        for sizes in (
            ((113, 4, 64), (230, 2, 64), (230, 2, 64)),
            ((113, 4, 96), (203, 2, 96), (203, 2, 96)),
            ((113, 3, 64), (203, 3, 64), (203, 3, 64)),
        )
    )
    with pytest.raises(ValueError, match=r"v has shape \(2, 230, 2, 64\), allowed with k \(2, 203, 2, 64\)"):
        flash_attn_quantized_func(replace(parts, v=longer.v), backend="hopper")
    with pytest.raises(ValueError, match=r"k has shape \(2, 203, 2, 96\), allowed with q \(2, 113, 4, 64\)"):
        flash_attn_quantized_func(replace(parts, k=wider.k), backend="hopper")
    with pytest.raises(ValueError, match="q has 4 heads and k has 3"):
        flash_attn_quantized_func(replace(parts, k=more_heads.k, v=more_heads.v), backend="hopper")
    assert hopper[1] == []


def test_misaligned_inputs_are_copied(hopper: tuple[FakeKernel, list[Fp8ForwardConfig]]) -> None:
    kernel, _ = hopper
    parts = quantize_qkv(*qkv(), quantization=SMOOTH)
    shifted = torch.empty(parts.k.data.numel() + 8, dtype=torch.uint8)[8:].view(torch.float8_e4m3fn)
    shifted = shifted.view(parts.k.data.shape).copy_(parts.k.data)
    flash_attn_quantized_func(replace(parts, k=replace(parts.k, data=shifted)))
    given = kernel.arguments[1]
    assert given.data_ptr() % 16 == 0 and torch.equal(given.float(), parts.k.data.float())


def test_problems_that_the_kernel_does_not_do_are_emulated() -> None:
    parts = quantize_qkv(*qkv())

    def choose(parts: QuantizedQKV, target: Target = HOPPER, backend: str | None = None) -> Choice:
        return choose_fp8_backend(problem_of(parts, False), target, backend)

    assert choose(parts).backend == "hopper"
    for block_q in (7, 64, 200):
        assert choose(quantize_qkv(*qkv(), quantization=Fp8Quantization(block_q=block_q))).backend == "hopper"
    odd_blocks = quantize_qkv(*qkv(), quantization=Fp8Quantization(block_k=48))
    for other, reason, dequantizable in (
        (
            quantize_qkv(*qkv(head_dim=72)),
            "head_dim 72 and head_dim_v 72 must be multiples of 16 in FP8",
            True,
        ),
        (replace(parts, dtype=torch.float32), "not torch.float32", False),
        (odd_blocks, "block_k is 48, allowed at head_dim 64: multiples of", True),
    ):
        choice = choose(other)
        assert choice.backend == "reference" and reason in choice.reason and choice.advice
        assert ("backend='ampere'" in choice.advice) == dequantizable
        allowed = "'ampere', " if dequantizable else ""
        with pytest.raises(ValueError, match=f"allowed here: {allowed}'reference' or None"):
            choose(other, backend="hopper")
    older = choose(parts, Target("fake T4", (7, 5), assume_installed=True))
    assert older.backend == "reference" and "7.5" in older.reason


@pytest.mark.parametrize("backend", [None, "hopper", "reference"])
@pytest.mark.parametrize("sizes", [(2, 5, 0, 4), (2, 0, 5, 4), (0, 5, 5, 4), (2, 5, 5, 0)], ids=str)
def test_a_problem_without_a_score_is_served_as_one_of_16_bits(
    sizes: tuple[int, ...], backend: str | None, hopper: tuple[FakeKernel, list[Fp8ForwardConfig]]
) -> None:
    batch, seqlen_q, seqlen_k, heads = sizes
    shapes = (batch, seqlen_q, heads, 64), (batch, seqlen_k, 2, 64), (batch, seqlen_k, 2, 64)
    given = [torch.zeros(shape).to(torch.bfloat16) for shape in shapes]
    for out, lse in (
        flash_attn_func(*(x.to(torch.float8_e4m3fn) for x in given), return_attn_probs=True, backend=backend),
        flash_attn_fp8_func(*given, return_attn_probs=True, backend=backend),
    ):
        assert out.shape == shapes[0] and out.dtype == torch.bfloat16 and not out.any()
        assert lse.shape == (batch, heads, seqlen_q) and bool((lse == -math.inf).all())
    assert not hopper[0].arguments


@pytest.mark.parametrize("seqlen_k", [512, 2048, 16384])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_blocks_choose_the_tile(head_dim: int, seqlen_k: int) -> None:
    def select(causal: bool, block_k: int = 0) -> Fp8ForwardConfig:
        return select_fp8_forward_config(
            head_dim, head_dim, causal, "bfloat16", seqlen_k, block_k, half_scores=True
        )

    for causal in (False, True):
        width = select(causal).tile_n
        assert width == default_block_k(head_dim, head_dim, seqlen_k, causal=causal)
        assert select(causal, 2 * width) == select(causal)
    for block_k in (64, 128, 192, 1024):
        assert block_k % select(True, block_k).tile_n == 0
    with pytest.raises(ValueError, match="block_k is 96, allowed at head_dim"):
        select(False, 96)


def test_configs_are_valid_and_named_apart() -> None:
    configs = shipped_fp8_forward_configs()
    assert len({config.name for config in configs}) == len(configs)
    assert all(isinstance(config, Fp8ForwardConfig) and not config.o_shares_q for config in configs)
    assert select_fp8_forward_config(80, 32, False, "bfloat16", 100).head_dim == 128
    with pytest.raises(ValueError, match="at most 256"):
        select_fp8_forward_config(272, 64, False, "bfloat16", 100)
    with pytest.raises(ValueError, match="polynomial_pairs is 9, allowed: 0 to 8"):
        validate_forward_config(replace(configs[0], polynomial_pairs=9))
    with pytest.raises(ValueError, match="tile_n is 48"):
        validate_forward_config(replace(configs[0], tile_n=48))


def test_parts_on_different_devices_are_refused() -> None:
    parts = quantize_qkv(*qkv())
    with pytest.raises(ValueError, match="k is on meta, allowed: the device of q, cpu"):
        replace(parts, k=replace(parts.k, data=parts.k.data.to("meta"), scale=parts.k.scale.to("meta")))
    with pytest.raises(ValueError, match="scale is on meta, allowed: the device of its data, cpu"):
        replace(parts.q, scale=parts.q.scale.to("meta"))


def test_gradients_take_whatever_quantization_takes() -> None:
    """float32 inputs, and head dimensions that no kernel has, with gradients as without."""
    q, k, v = (x.float() for x in qkv(head_dim=20))
    expected = flash_attn_fp8_func(q, k, v)
    q.requires_grad_()
    out = flash_attn_fp8_func(q, k, v)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert q.grad is not None and bool(q.grad.isfinite().all()) and bool(q.grad.any())


@pytest.mark.parametrize("way", ["e4m3 tensors", "parts", "compiled e4m3 tensors", "compiled parts"])
def test_scores_are_in_float16_only_where_nobody_gets_the_lse(
    hopper: tuple[FakeKernel, list[Fp8ForwardConfig]], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Of codes that promise nothing. What runs is what ``explain`` says, with the LSE and without."""
    kernel, configs = hopper
    monkeypatch.setattr(fp8_launch, "transpose_values", transpose_for_kernel)
    e4m3 = [torch.zeros(9, 2000, 1, 64, dtype=torch.float8_e4m3fn) for _ in range(3)]
    parts = from_descales(*e4m3, None, None, None, torch.bfloat16)
    function, given = (flash_attn_quantized_func, [parts]) if "parts" in way else (flash_attn_func, e4m3)
    if "compiled" in way:
        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    softmaxes = {False: Softmax.HALF_SCORES, True: Softmax.LAGGING}
    for returns_lse in (False, True, False):
        options = {"return_attn_probs": returns_lse, "exact_lse": False}
        found = function(*given, **options)
        planned = explain(*e4m3, **options, device_capability=(9, 0)).config
        assert configs[-1 if returns_lse else 0] == planned and planned.softmax is softmaxes[returns_lse]
        assert kernel.arguments[4].shape == (9, 1, 2000 if returns_lse else 0)
        assert not returns_lse or found[1].shape == (9, 1, 2000)
    assert len(configs) == 2
