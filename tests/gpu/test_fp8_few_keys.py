"""FP8 kernels for few keys, and those of head_dim 256 that load K ahead: lengths around tiles, and peaky inputs."""

from __future__ import annotations

import pytest
import torch

from hopper_attention import flash_attn_fp8_func, flash_attn_quantized_func, quantize_qkv
from hopper_attention.quantization import Fp8Quantization
from hopper_attention.quantizers import from_descales
from tests.gpu.test_fp8 import find_differences

pytestmark = pytest.mark.gpu

LENGTHS = [
    (1, 1),
    (63, 65),
    (128, 128),
    (129, 200),
    (300, 300),
    (512, 512),
    (700, 640),
    (200, 1023),
    (1025, 1025),
    (300, 2100),
    (1600, 1600),
    (1, 5000),
]


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> None:
    """Few kernels are needed."""


def drawn(
    lengths: tuple[int, int], head_dim: int, factor: float, batch: int = 2
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries so many times N(0, 1), four heads over two. Where that is once, one key of 64 is 20 times as large."""
    generator = torch.Generator("cuda").manual_seed(lengths[0] + head_dim)
    shapes = (batch, lengths[0], 4, head_dim), *(2 * [(batch, lengths[1], 2, head_dim)])
    q, k, v = (torch.randn(shape, device="cuda", generator=generator) for shape in shapes)
    if factor == 1:
        k[:, ::64] *= 20
    return (factor * q).bfloat16(), k.bfloat16(), v.bfloat16()


@pytest.mark.parametrize("factor", [1.0, 8.0])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_few_keys_are_as_good_as_their_emulation(head_dim: int, causal: bool, factor: float) -> None:
    for lengths in LENGTHS:
        # Of the longest, tiles are few, which are those of few keys.
        parts = quantize_qkv(*drawn(lengths, head_dim, factor), quantization=Fp8Quantization(smooth_v=False))
        assert not find_differences(parts, causal), lengths


@pytest.mark.parametrize("factor", [1.0, 8.0])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.usefixtures("few_tiles")
def test_few_tiles_of_e4m3_tensors_are_as_good_as_their_emulation(
    head_dim: int, causal: bool, factor: float
) -> None:
    """V in rows, which the kernel transposes of few queries, and codes that promise nothing."""
    for lengths in ((200, 2100), (1600, 1600), (100, 9000)):
        tensors = drawn(lengths, head_dim, factor)
        descales = [
            x.float().abs().amax((1, 3))[:, ::step] / 448 for x, step in zip(tensors, (2, 1, 1), strict=True)
        ]
        descales[0] = torch.maximum(descales[0], tensors[0].float().abs().amax((1, 3))[:, 1::2] / 448)
        codes = [
            (x.float() / scale.repeat_interleave(x.shape[2] // 2, 1)[:, None, :, None]).to(
                torch.float8_e4m3fn
            )
            for x, scale in zip(tensors, descales, strict=True)
        ]
        assert not find_differences(from_descales(*codes, *descales, torch.bfloat16), causal), lengths


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.usefixtures("few_tiles")
def test_a_tile_has_the_bits_that_it_has_alone(head_dim: int, causal: bool) -> None:
    """Whatever its CTA did before: many copies of a sequence, of two tiles and a part of a third, and twice."""
    for keys in (300, 1500, 2100):
        q, k, v = drawn((300, keys), head_dim, 8.0, batch=1)
        alone = flash_attn_quantized_func(quantize_qkv(q, k, v), causal=causal)
        parts = quantize_qkv(*(x.expand(200, *x.shape[1:]).contiguous() for x in (q, k, v)))
        for _ in range(2):
            together = flash_attn_quantized_func(parts, causal=causal)
            assert torch.isfinite(together).all()
            assert torch.equal(together, alone.expand_as(together))


def test_windows_of_few_keys_are_the_causal_call_where_they_hide_nothing() -> None:
    for head_dim in (64, 128, 256):
        q, k, v = drawn((500, 500), head_dim, 4.0)
        dense = flash_attn_fp8_func(q, k, v, causal=True).float()
        windowed = flash_attn_fp8_func(q, k, v, causal=True, window_size=(498, 0)).float()
        # The last query alone sees a key less. Both round P alike, but sum parts of a first block in another order.
        same = (windowed - dense)[:, :-1].norm() / dense[:, :-1].norm()
        assert same.item() < 2e-2
