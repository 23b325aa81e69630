"""The fused quantizer on the host side: when it serves, what its kernel is given, and what comes back."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from hopper.quantize.config import QuantizeConfig
from hopper_attention import compile_cache, device_memory
from hopper_attention.backends import Target
from hopper_attention.checks import TensorSpec
from hopper_attention.fp8 import flash_attn_fp8_func
from hopper_attention.launch import quantize
from hopper_attention.launch.quantize import quantize_fused, select_quantize_config, why_not_fused
from hopper_attention.quantization import Fp8Quantization, TransposedV, default_block_k, quantize_qkv
from hopper_attention.quantized import Means
from hopper_attention.rotation import rotation_signs
from tests.python.fake_gpu import H200 as HOPPER
from tests.python.fake_gpu import forget_launchers, pretend

fused_qkv = partial(quantize_qkv, backend="fused")

BLOCKS = Fp8Quantization(block_k=96, smooth_v=False)
NO_MEANS = Means(torch.empty(0), torch.empty(0))


def qkv(seqlens=(113, 203), head_dim=64, head_dim_v=64, dtype=torch.float16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, seqlens[0], 4, head_dim), (2, seqlens[1], 2, head_dim), (2, seqlens[1], 2, head_dim_v)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def reason(inputs: list[torch.Tensor], c: Fp8Quantization, target: Target = HOPPER) -> str:
    q, k, v = map(TensorSpec.of, inputs)
    return why_not_fused(q, k, v, c, target)


def test_the_kernel_serves_blocks_of_sixteen_bit_tensors_on_hopper() -> None:
    for head_dim, head_dim_v in ((64, 64), (80, 16), (192, 128), (256, 256)):
        for dtype in (torch.float16, torch.bfloat16):
            inputs = qkv(head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype)
            assert reason(inputs, Fp8Quantization(smooth_k=True, rotate_v=True, smooth_v=True)) == ""


@pytest.mark.parametrize(
    ("inputs", "c", "expected"),
    [
        (qkv(dtype=torch.float32), BLOCKS, "reads float16 and bfloat16, not torch.float32"),
        (qkv(), Fp8Quantization(granularity="head"), "granularity is 'head'"),
        (qkv(head_dim=72), BLOCKS, "head_dim 72 and head_dim_v 64 must be multiples of 16 in FP8"),
        (qkv(head_dim_v=8), BLOCKS, "head_dim 64 and head_dim_v 8 must be multiples of 16 in FP8"),
        (qkv(seqlens=(5, 0)), BLOCKS, "the problem is empty"),
        (qkv(), Fp8Quantization(block_k=48), "block_k is 48, allowed: multiples of 32"),
        (qkv(), Fp8Quantization(block_q=512), "block_q is 512, allowed: 1 or multiples of 32 from 32 to 256"),
        (qkv(head_dim=256), Fp8Quantization(block_k=256), "more than the registers of a CTA hold"),
    ],
)
def test_what_keeps_the_kernel_from_serving(
    inputs: list[torch.Tensor], c: Fp8Quantization, expected: str
) -> None:
    assert expected in reason(inputs, c)


def test_what_is_too_large_and_where_it_does_not_run() -> None:
    q, k, v = map(TensorSpec.of, qkv())
    long = replace_shape(q, (1, 2**31, 4, 64))
    assert "seqlen_q 2147483648" in why_not_fused(long, k, v, BLOCKS, HOPPER)
    many = replace_shape(q, (2**28, 1024, 4, 64))
    assert "groups of rows are more than 1073741824" in why_not_fused(many, k, v, BLOCKS, HOPPER)
    # A scale for each of 2^31 rows, which are 2^24 items.
    assert why_not_fused(replace_shape(q, (2**19, 1024, 4, 64)), k, v, BLOCKS, HOPPER) == ""
    older = Target("fake A100", (8, 0), assume_installed=True)
    assert "8.0" in why_not_fused(q, k, v, BLOCKS, older)
    assert "not an NVIDIA GPU" in why_not_fused(q, k, v, BLOCKS, Target("cpu"))


def replace_shape(spec: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    return spec._replace(shape=shape)


def test_config_of_a_problem() -> None:
    c = Fp8Quantization(rotate=False, block_q=64, smooth_k=True, smooth_v=False)
    expected = QuantizeConfig(
        "bfloat16", 128, 64, 64, default_block_k(128, 64, 9000), rotate=False, smooth_k=True
    )
    assert select_quantize_config(torch.bfloat16, 128, 64, 9000, c) == expected
    c, expected = replace(c, smooth_v=True), replace(expected, smooth_v=True)
    assert select_quantize_config(torch.bfloat16, 128, 64, 9000, c) == expected


class FakeKernel:
    def __init__(self) -> None:
        self.arguments: tuple[Any, ...] = ()
        self.means: list[tuple[torch.Tensor, torch.Tensor]] = []

    def find_mean(self, v: torch.Tensor, mean: torch.Tensor) -> None:
        self.means.append((v, mean))

    def __call__(self, *arguments: Any) -> None:
        self.arguments = arguments
        for tensor in arguments[3:9]:
            tensor.view(torch.uint8).zero_()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    """A machine with a Hopper GPU, which computes on the CPU, and badly."""
    fake = FakeKernel()
    pretend(monkeypatch, quantize)
    monkeypatch.setattr(
        compile_cache,
        "get_quantize",
        lambda config: fake if isinstance(config, QuantizeConfig) else fake.find_mean,
    )
    yield fake
    forget_launchers()


def test_what_the_kernel_is_given(kernel: FakeKernel) -> None:
    q, k, v = qkv(head_dim=64, head_dim_v=32)
    parts = fused_qkv(q, k, v, quantization=replace(BLOCKS, seed=5))
    config = select_quantize_config(torch.float16, 64, 32, 203, BLOCKS)
    *tensors, ctas = kernel.arguments
    assert ctas == 132 * config.ctas_per_sm and len(tensors) == 13
    assert [x.data_ptr() for x in tensors[:3]] == [x.data_ptr() for x in (q, k, v)]
    assert tensors[3] is parts.q.data and tensors[4] is parts.k.data and tensors[5] is parts.v.data
    assert tensors[6] is parts.q.scale and tensors[7] is parts.k.scale and tensors[8] is parts.v.scale
    assert all(x.is_contiguous() for x in tensors[3:9])
    flipped = torch.ones(64, dtype=torch.float16).view(torch.int32) ^ tensors[9]
    assert torch.equal(flipped.view(torch.float16).float(), rotation_signs(64, 5))
    assert tensors[10].shape == tensors[11].shape == tensors[12].shape == (0,)
    assert isinstance(parts.v, TransposedV)
    assert parts.v.data.shape == (2, 2, 32, 224) and parts.v.seqlen == 203
    assert parts.q.scale.shape == (2, 4, 113) and parts.k.scale.shape == parts.v.scale.shape == (2, 2, 3)
    assert (parts.q.block, parts.k.block, parts.v.block) == (1, 96, 96)
    assert (parts.q.largest, parts.k.largest) == config.largest_codes == (16.0, 28.0)
    assert parts.dtype == torch.float16
    assert parts.shift.numel() == parts.mean_v.numel() == 0


def test_the_means_and_the_signs_of_v_are_given_where_they_are_used(kernel: FakeKernel) -> None:
    q, k, v = qkv(head_dim_v=32)
    v = v + 1.0
    c = Fp8Quantization(rotate=False, rotate_v=True, smooth_k=True, smooth_v=True, block_k=96)
    parts = fused_qkv(q, k, v, quantization=c)
    signs, signs_v, mean_k, mean_v = kernel.arguments[9:13]
    assert signs.numel() == 0 and signs_v.shape == (16,)
    torch.testing.assert_close(mean_k, k.float().mean(1), rtol=0, atol=1e-6)
    assert [found for found, _ in kernel.means] == [v] and kernel.means[0][1] is mean_v
    assert mean_k.is_contiguous() and mean_v.is_contiguous()
    assert parts.shift.shape == (2, 4, 113) and parts.mean_v is mean_v


def test_what_the_kernel_cannot_address_is_copied(kernel: FakeKernel) -> None:
    q, k, v = qkv()
    shifted = torch.zeros(q.numel() + 8, dtype=q.dtype)[1 : 1 + q.numel()].view(q.shape)
    shifted.copy_(q)
    columns = torch.empty(2, 203, 64, 2, dtype=k.dtype).transpose(2, 3).copy_(k)
    odd = torch.zeros(2, 203, 2, 67, dtype=v.dtype)[..., :64].copy_(v)
    assert columns.stride(3) != 1 and odd.stride(2) == 67
    quantize_fused(shifted, columns, odd, BLOCKS, NO_MEANS)
    for given, wanted in zip(kernel.arguments[:3], (q, k, v), strict=True):
        assert torch.equal(given, wanted) and given.data_ptr() % 16 == 0
        assert given.stride(3) == 1 and all(stride % 8 == 0 for stride in given.stride()[:3])
    heads_first = q.transpose(1, 2).contiguous().transpose(1, 2)
    quantize_fused(heads_first, k, v, BLOCKS, NO_MEANS)
    assert kernel.arguments[0] is heads_first
    expanded = k[:, :, :1].expand(-1, -1, 2, -1)
    quantize_fused(q, expanded, v, BLOCKS, NO_MEANS)
    assert kernel.arguments[1] is expanded


def test_the_kernel_is_the_default_where_it_can_do_the_problem(kernel: FakeKernel) -> None:
    q, k, v = qkv()
    assert not quantize_qkv(q, k, v).q.data.float().any() and kernel.arguments[0] is q
    kernel.arguments = ()
    assert quantize_qkv(q, k, v, backend="torch").q.data.float().any()
    assert quantize_qkv(q.float(), k.float(), v.float()).q.data.float().any()
    assert kernel.arguments == ()


def test_attention_on_the_reference_does_not_quantize_with_the_kernel(kernel: FakeKernel) -> None:
    q, k, v = qkv()
    out = flash_attn_fp8_func(q, k, v, backend="reference")
    q.requires_grad_()
    assert torch.equal(flash_attn_fp8_func(q, k, v, backend="reference"), out) and kernel.arguments == ()
    assert flash_attn_fp8_func(q, k, v).shape == out.shape and len(kernel.arguments) == 14


def test_what_is_traced_gets_to_the_kernel_with_real_tensors(kernel: FakeKernel) -> None:
    q, k, v = qkv()
    with FakeTensorMode() as mode:
        fused_qkv(*map(mode.from_tensor, (q, k, v)))
    assert kernel.arguments == ()
    torch.func.vmap(lambda *x: fused_qkv(*x).q.scale)(*(x[None] for x in (q, k, v)))
    assert [x.shape for x in kernel.arguments[:3]] == [x.shape for x in (q, k, v)]
    kernel.arguments = ()
    torch.compile(fused_qkv, fullgraph=True, backend="eager")(q, k, v)
    assert kernel.arguments[0].data_ptr() == q.data_ptr()


def test_signs_are_not_copied_while_a_graph_is_captured(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = qkv()
    new, plain = (Fp8Quantization(smooth_v=False, **x) for x in ({"seed": 987}, {"rotate": False}))
    with monkeypatch.context() as capture:
        capture.setattr(device_memory, "is_capturing", lambda device: True)
        with pytest.raises(
            RuntimeError, match="head_dim 64 and seed 987 are not on cpu yet: make the same call"
        ):
            quantize_qkv(q, k, v, quantization=new)
        assert kernel.arguments == ()
        quantize_qkv(q, k, v, quantization=plain)
    quantize_qkv(q, k, v, quantization=new)
    monkeypatch.setattr(device_memory, "is_capturing", lambda device: True)
    quantize_qkv(q, k, v, quantization=new)


def test_the_kernel_runs_where_it_is_asked_for_and_torch_elsewhere(kernel: FakeKernel) -> None:
    q, k, v = qkv()
    c = Fp8Quantization(granularity="head")
    with pytest.raises(
        ValueError, match=r"backend is 'fused', but granularity is 'head'.*allowed here: 'torch'"
    ):
        fused_qkv(q, k, v, quantization=c)
    with pytest.raises(ValueError, match="backend is 'fast', allowed: 'fused', 'torch' or None"):
        quantize_qkv(q, k, v, backend="fast")
    for backend in (None, "torch"):
        parts = quantize_qkv(q, k, v, quantization=c, backend=backend)
        assert kernel.arguments == () and parts.k.data.float().abs().max() == parts.k.largest == 28.0
    assert quantize_qkv(q, k[:, :0], v[:, :0]).v.shape == (2, 0, 2, 64)


def test_the_compiled_function_takes_what_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOPPER_ATTENTION_CACHE_DIR", str(tmp_path))
    function = compile_cache.get_quantize(QuantizeConfig("bfloat16", 32, 48, 32, 32))
    assert [path.stem for path in compile_cache.cached_kernels()] == [
        "hopper_quantize_bf16_d32v48_q32k32_rotate"
    ]
    x = torch.zeros(1, 1, 1, 32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="expected device_type=cuda") as error:
        function(*[x] * 13, 1)
    parameters = re.findall(r"(\w+): (Tensor\(\[.*?\], \w+\)|int32)", str(error.value))
    shapes = [re.sub(r"n\d+", "n", kind) for _, kind in parameters]
    assert shapes == [
        "Tensor([n, n, n, 32], bfloat16)",
        "Tensor([n, n, n, 32], bfloat16)",
        "Tensor([n, n, n, 48], bfloat16)",
        "Tensor([n, n, n, 32], float8_e4m3fn)",
        "Tensor([n, n, n, 32], float8_e4m3fn)",
        "Tensor([n, n, 48, n], float8_e4m3fn)",
        *3 * ["Tensor([n, n, n], float32)"],
        *4 * ["Tensor([n], int32)"],
        "int32",
    ]
