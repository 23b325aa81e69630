"""FP8, quantizer and backward with sizes that were not seen before: nothing is loaded again, everything is checked.

Those of the 16-bit forward are in ``test_api_launch``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import compile_cache, device_memory
from hopper_attention.backward_rules import BackwardProblem
from hopper_attention.checks import TensorSpec
from hopper_attention.launch import backward, fp8, quantize
from hopper_attention.launch.backward import find_choice, run_backward
from hopper_attention.launch.fp8 import ALL_ROWS, attend, find_fp8_launch, problem_of
from hopper_attention.launch.quantize import quantize_fused, why_not_fused, why_not_fused_here
from hopper_attention.problem import length_bounds
from hopper_attention.quantization import Fp8Quantization, QuantizedQKV, from_descales, quantize_qkv
from hopper_attention.quantized import Means
from tests.python.fake_gpu import H200, SMS, forget_launchers, pretend

CPU = torch.device("cpu")
ALIKE = (1, 9, 100, 101, length_bounds()[0])
"""Lengths that get the same tiles."""


class Kernels:
    """A kernel that does nothing; notes what was loaded and what each launch was given."""

    def __init__(self) -> None:
        self.loaded: list[Any] = []
        self.calls: list[tuple[Any, ...]] = []

    def load(self, config: Any) -> Kernels:
        self.loaded.append(config)
        return self

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(arguments)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """A Hopper GPU for FP8, quantizer and backward; its tensors are the CPU's."""
    fake = Kernels()
    pretend(monkeypatch, backward, fp8, quantize)
    for name in ("get_forward", "get_backward", "get_quantize"):
        monkeypatch.setattr(compile_cache, name, fake.load)
    yield fake
    forget_launchers()


def draw(batch: int = 1, seqlens: tuple[int, int] = (3, 9), heads: tuple[int, int] = (4, 2)) -> list[Tensor]:
    """q, k and v."""
    sizes = (seqlens[0], heads[0]), (seqlens[1], heads[1]), (seqlens[1], heads[1])
    return [torch.zeros(batch, n, h, 64, dtype=torch.bfloat16) for n, h in sizes]


def quantized(seqlens: tuple[int, int] = (3, 9), **options: Any) -> QuantizedQKV:
    return quantize_qkv(*draw(seqlens=seqlens), quantization=Fp8Quantization(**options), backend="torch")


def attend_now(parts: QuantizedQKV, sm_margin: int = 0, wants_lse: bool = True) -> tuple[Tensor, Tensor]:
    return attend(parts, 0.125, True, None, False, wants_lse, sm_margin)


# FP8


def test_fp8_of_new_sizes_loads_nothing(kernels: Kernels) -> None:
    for seqlen_k in ALIKE:
        for seqlen_q in (1, 5):
            parts = quantized((seqlen_q, seqlen_k), block_k=128)
            attend_now(parts)
            assert kernels.calls[-1][11:13] == (
                1 if seqlen_q > 1 else ALL_ROWS,
                128 if seqlen_k > 128 else ALL_ROWS,
            )
    # With one block the scale of V is a factor of the output, with more it is not: these are two kinds, each with a
    # kernel for a query and one for more. A query of one key has tiles as any other.
    assert len(kernels.loaded) == 5 and len({config.name for config in kernels.loaded}) == 3
    for seqlen_k in range(2, 60):
        attend_now(quantized((7, seqlen_k), block_k=128))
    assert len(kernels.loaded) == 5


def test_fp8_results_have_the_sizes_of_the_call(kernels: Kernels) -> None:
    for batch, seqlen_q, heads in ((1, 3, 4), (2, 3, 4), (2, 5, 8)):
        q, k, v = draw(batch, (seqlen_q, 9), (heads, 2))
        parts = quantize_qkv(q, k, v, quantization=Fp8Quantization(smooth_v=False), backend="torch")
        for wants_lse, rows in ((True, seqlen_q), (False, 0)):
            out, _ = attend_now(parts, wants_lse=wants_lse)
            given = kernels.calls[-1]
            assert out.shape == q.shape and given[3] is out and given[4].shape == (batch, heads, rows)
            ones, no_mean = given[8], given[10]
            assert ones.shape == (batch, 2, 1) and bool((ones == 1).all())
            assert no_mean.shape == (batch, 2, 0) and all(s % 4 == 0 for s in no_mean.stride()[:2])
    assert len(set(kernels.loaded)) == 1


def test_fp8_sizes_are_checked_although_the_launcher_is_there(kernels: Kernels) -> None:
    parts = quantized()
    attend_now(parts)
    with pytest.raises(ValueError, match=r"v has shape \(1, 8, 2, 64\), allowed with k \(1, 9, 2, 64\)"):
        attend_now(replace(parts, v=quantized((3, 8)).v))
    many = problem_of(parts, True)._replace(
        q_shape=(2**16, 300, 2**16, 64), k_shape=(2**16, 9, 2, 64), v_shape=(2**16, 9, 2, 64)
    )
    with pytest.raises(NotImplementedError, match=r"tiles of \d+ queries, the Hopper kernel counts at most"):
        find_fp8_launch(many, (1, 1, 1, 1), (1, 1, 1, 1), CPU, None)
    assert len(kernels.calls) == 1 and len(kernels.loaded) == 1


def test_the_margin_of_fp8_reaches_the_kernel_and_has_bounds(kernels: Kernels) -> None:
    for margin in (0, 12, SMS - 1):
        attend_now(quantized(), margin)
        assert kernels.calls[-1][-1] == SMS - margin
    for seqlen_k in (9, 10):
        with pytest.raises(ValueError, match=rf"sm_margin is {SMS}, allowed on this GPU: 0 to {SMS - 1}"):
            attend_now(quantized((3, seqlen_k)), SMS)


def test_a_captured_launch_of_fp8_makes_nothing_that_is_kept(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = device_memory.Constants()
    monkeypatch.setattr(device_memory, "constants", constants)
    with monkeypatch.context() as capture:
        capture.setattr(device_memory, "is_capturing", lambda device: True)
        attend_now(quantized())
        of_graph = kernels.calls[-1][8]
        assert of_graph.shape == (1, 2, 1) and not constants._kept
    attend_now(quantized())
    kept = kernels.calls[-1][8]
    assert kept is not of_graph and len(kernels.loaded) == 1
    with monkeypatch.context() as capture:
        capture.setattr(device_memory, "is_capturing", lambda device: True)
        attend_now(quantized())
        assert kernels.calls[-1][8] is kept and list(constants._of_graphs.values()) == [kept]


def test_v_in_rows_of_new_sizes(kernels: Kernels) -> None:
    for seqlen_k in (9, 10, 33):
        q, k, v = (x.to(torch.float8_e4m3fn) for x in draw(seqlens=(3, seqlen_k)))
        attend_now(from_descales(q, k, v, None, None, None, torch.bfloat16))
        assert kernels.calls[-1][2] is v and kernels.calls[-1][11:13] == (ALL_ROWS, ALL_ROWS)
    assert [config.v_rows for config in kernels.loaded] == [True]


# quantizer

NO_MEANS = Means(torch.empty(0), torch.empty(0))
BLOCKS = Fp8Quantization(block_k=96)


def test_the_quantizer_of_new_sizes_loads_nothing(kernels: Kernels) -> None:
    for seqlen_k in (*ALIKE, 5000):
        for batch, heads in ((1, (4, 2)), (3, (2, 2))):
            q, k, v = draw(batch, (3, seqlen_k), heads)
            assert why_not_fused_here(q, k, v, BLOCKS) == ""
            q8, k8, vt8 = quantize_fused(q, k, v, BLOCKS, NO_MEANS)
            assert q8.shape == q.shape and k8.shape == k.shape and vt8.shape == v.shape
            assert q8.scale.shape == (batch, heads[0], 3)
            assert k8.scale.shape == vt8.scale.shape == (batch, heads[1], -(-seqlen_k // 96))
    assert len(kernels.loaded) == 1


def test_new_sizes_of_the_quantizer_are_checked(kernels: Kernels) -> None:
    q, k, v = draw()
    assert why_not_fused_here(q, k, v, BLOCKS) == ""
    assert why_not_fused_here(q, k[:, :0], v[:, :0], BLOCKS) == "the problem is empty"
    assert "reads float16 and bfloat16" in why_not_fused_here(q.float(), k.float(), v.float(), BLOCKS)
    specs = [TensorSpec.of(x) for x in (q, k, v)]
    long = specs[0]._replace(shape=(1, 2**31, 4, 64))
    assert "seqlen_q 2147483648" in why_not_fused(long, *specs[1:], BLOCKS, H200)


def test_results_of_the_quantizer_are_contiguous_whatever_its_inputs_are(kernels: Kernels) -> None:
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in draw(2, (5, 7))]
    parts = quantize_fused(*heads_first, BLOCKS, NO_MEANS)
    assert all(part.data.is_contiguous() and part.scale.is_contiguous() for part in parts)


def test_signs_that_a_graph_was_captured_with_are_never_let_go(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "constants", device_memory.Constants(limit=8))

    def signs(seed: int) -> Tensor:
        quantize_fused(*draw(), replace(BLOCKS, seed=seed), NO_MEANS)
        return kernels.calls[-1][9]

    of_graph, other = signs(0), signs(1)
    with monkeypatch.context() as capture:
        capture.setattr(device_memory, "is_capturing", lambda device: True)
        assert signs(0) is of_graph
        with pytest.raises(RuntimeError, match="seed 2 are not on cpu yet"):
            signs(2)
    for seed in range(2, 100):
        signs(seed)
    assert signs(0) is of_graph and signs(1) is not other


# backward


def run_gradients(batch: int, seqlens: tuple[int, int], deterministic: bool = False) -> tuple[Tensor, ...]:
    q, k, v = draw(batch, seqlens)
    lse = torch.zeros(batch, 4, seqlens[0])
    return run_backward(q, q, k, v, q, lse, 0.125, True, deterministic=deterministic)


def test_gradients_of_new_sizes_load_nothing(kernels: Kernels) -> None:
    for batch, seqlens in ((1, (3, 9)), (2, (3, 9)), (1, (200, 10)), (1, (1, 5000))):
        dq, dk, dv = run_gradients(batch, seqlens)
        assert dq.shape == (batch, seqlens[0], 4, 64) and dk.shape == dv.shape == (batch, seqlens[1], 2, 64)
        prepare, kernel, _ = kernels.calls[-3:]
        rows = -(-seqlens[0] // 128) * 128
        assert prepare[3].shape == prepare[4].shape == kernel[4].shape == (batch, 4, rows)
        assert kernel[6].shape[:3] == (batch, 4, rows // 128)
    assert len(kernels.loaded) == 3
    run_gradients(1, (3, 9), deterministic=True)
    assert len(kernels.loaded) == 6


def test_new_sizes_of_gradients_are_checked(kernels: Kernels) -> None:
    k = (2, 9, 2, 64)
    fits = BackwardProblem((2, 3, 4, 64), k, k, torch.bfloat16, True)
    assert find_choice(fits, CPU, None).backend == "hopper"
    for seqlen_q in range(4, 20):
        assert find_choice(fits._replace(q_shape=(2, seqlen_q, 4, 64)), CPU, None).backend == "hopper"
    many = find_choice(fits._replace(q_shape=(65_536, 3, 4, 64)), CPU, None)
    assert many.backend == "reference" and "batch is 65536, the Hopper backward kernel takes" in many.reason
    wide = find_choice(fits._replace(v_shape=(2, 9, 2, 264)), CPU, None)
    assert wide.backend == "reference" and "may be at most 256" in wide.reason
    assert find_choice(fits, CPU, "reference").backend == "reference"
