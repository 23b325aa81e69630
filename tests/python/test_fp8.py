"""FP8 attention on the host side: the two halves on the CPU, what the kernel is given, and every refusal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hopper.config import (
    FP8_KEY_ORDER,
    Fp8ForwardConfig,
    select_fp8_forward_config,
    shipped_fp8_forward_configs,
)
from hopper_attention import fp8
from hopper_attention.backends import Target
from hopper_attention.fp8 import flash_attn_fp8_func, flash_attn_quantized_func
from hopper_attention.quantization import Fp8Quantization, QuantizedTensor, quantize_qkv
from hopper_attention.reference import attention_naive, attention_tiled_fp8

HOPPER = Target("fake H200", (9, 0), assume_installed=True)


def qkv(
    seqlen_k: int = 203, head_dim: int = 64, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 113, 4, head_dim), (2, seqlen_k, 2, head_dim), (2, seqlen_k, 2, head_dim)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


@pytest.mark.parametrize("causal", [False, True])
def test_quantize_and_attend_is_the_emulation_here(causal: bool) -> None:
    q, k, v = qkv()
    c = Fp8Quantization(granularity="head")
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


def test_gradients_are_refused() -> None:
    q, k, v = qkv()
    with pytest.raises(NotImplementedError, match="k requires grad"):
        flash_attn_fp8_func(q, k.requires_grad_(), v)
    with torch.no_grad():
        assert flash_attn_fp8_func(q, k, v).shape == q.shape


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
    moved = fp8.transpose_for_kernel(v)
    assert moved.shape == (1, 1, 16, 96) and moved.is_contiguous()
    for slot in (0, 1, 2, 3, 5, 17, 40, 69 // 32 * 32 + 1):
        key = slot // 32 * 32 + FP8_KEY_ORDER[slot % 32]
        expected = v[0, key, 0].float() if key < 70 else torch.zeros(16)
        assert torch.equal(moved[0, 0, :, slot].float(), expected)
    assert moved[0, 0, :, 64:].float().count_nonzero() == v[0, 64:].float().count_nonzero()


def test_v_scales_are_split_into_largest_and_ratio() -> None:
    data = torch.zeros(1, 3, 2, 16, dtype=torch.float8_e4m3fn)
    scale = torch.tensor([[[1.0, 4.0, 0.5], [2.0**-126, 1.0, 8.0]]])
    log2, largest = fp8.v_scales_for_kernel(QuantizedTensor(data, scale, 1))
    assert largest.tolist() == [[4.0, 8.0]]
    assert log2.tolist() == [[[-2.0, 0.0, -3.0], [-100.0, -3.0, 0.0]]]


class FakeKernel:
    def __init__(self) -> None:
        self.arguments: tuple[Any, ...] = ()

    def __call__(self, *arguments: Any) -> None:
        self.arguments = arguments
        arguments[3].zero_()
        arguments[4].zero_()


def test_what_the_kernel_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, configs = FakeKernel(), []

    class Properties:
        multi_processor_count = 132

    class Guard:
        def __init__(self, index: int) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *error: Any) -> None: ...

    monkeypatch.setattr(fp8, "target_of", lambda device: HOPPER)
    monkeypatch.setattr(fp8.compile_cache, "get_forward", lambda config: configs.append(config) or kernel)
    monkeypatch.setattr(fp8.launch, "tile_counter", lambda index: torch.zeros(2, dtype=torch.int32))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties())
    parts = quantize_qkv(*qkv())
    out, lse = flash_attn_quantized_func(parts, causal=True, return_attn_probs=True)
    q, k, vt, _, _, _, q_scale, k_scale, v_log2, v_max, block_q, block_k, scale, ctas = kernel.arguments
    assert q is parts.q.data and k is parts.k.data and vt.shape == (2, 2, 64, 224)
    assert q_scale is parts.q.scale and k_scale.shape == v_log2.shape == (2, 2, 2) and v_max.shape == (2, 2)
    assert (block_q, block_k, scale, ctas) == (128, 128, 0.125, 132)
    assert out.shape == (2, 113, 4, 64) and lse.shape == (2, 4, 113) and out.dtype == torch.float16
    assert configs == [select_fp8_forward_config(64, 64, True, "float16")]


def test_problems_that_the_kernel_does_not_do_are_emulated() -> None:
    parts = quantize_qkv(*qkv())
    assert fp8.choose_fp8_backend(parts, HOPPER, None).backend == "hopper"
    odd_blocks = quantize_qkv(*qkv(), quantization=Fp8Quantization(block_k=48))
    for other, reason in (
        (quantize_qkv(*qkv(head_dim=72)), "head_dim 72 and head_dim_v 72 must be multiples of 16"),
        (replace(parts, dtype=torch.float32), "not torch.float32"),
        (odd_blocks, "k has blocks of 48 rows, which must be a multiple of 128"),
        (quantize_qkv(*qkv(seqlen_k=0)), "the problem is empty"),
    ):
        choice = fp8.choose_fp8_backend(other, HOPPER, None)
        assert choice.backend == "reference" and reason in choice.reason and choice.advice
        with pytest.raises(ValueError, match="allowed here: 'reference' or None"):
            fp8.choose_fp8_backend(other, HOPPER, "hopper")
    older = fp8.choose_fp8_backend(parts, Target("fake A100", (8, 0), assume_installed=True), None)
    assert older.backend == "reference" and "8.0" in older.reason


def test_configs_are_valid_and_named_apart() -> None:
    configs = shipped_fp8_forward_configs()
    assert len({config.name for config in configs}) == len(configs) == 12
    assert all(isinstance(config, Fp8ForwardConfig) and not config.o_shares_q for config in configs)
    assert select_fp8_forward_config(80, 32, False, "bfloat16").head_dim == 128
    with pytest.raises(ValueError, match="at most 256"):
        select_fp8_forward_config(272, 64, False, "bfloat16")
