"""What ``explain_fp8`` says of a call of ``flash_attn_fp8_func``, against what such a call runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hopper.forward.fp8.tilings import select_fp8_forward_config
from hopper_attention import Fp8Quantization, explain_fp8, quantize_qkv
from hopper_attention.experiments.bench.results import load_forward
from hopper_attention.fp8 import flash_attn_fp8_func
from hopper_attention.fp8_pays import describe_gain
from hopper_attention.fp8_plan import Fp8Plan
from hopper_attention.fp8_rules import select_config
from hopper_attention.launch import fp8 as fp8_launch
from hopper_attention.launch.fp8 import problem_of
from hopper_attention.launch.quantize import select_quantize_config
from hopper_attention.masks import MaskSpec
from hopper_attention.quantization import from_descales
from hopper_attention.shapes import AttentionShape

HOPPER = (9, 0)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def qkv(head_dim: int = 128, seqlen: int = 4096, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    shapes = ((2, seqlen, 8, head_dim), *2 * ((2, seqlen, 2, head_dim),))
    return tuple(meta(*shape, dtype=dtype) for shape in shapes)


def on_hopper(*tensors: Tensor, **options) -> Fp8Plan:
    return explain_fp8(*tensors, device_capability=HOPPER, **options)


def test_the_default_on_hopper_is_the_fused_quantizer_and_the_fp8_kernel() -> None:
    plan = on_hopper(*qkv())
    assert (plan.quantizer, plan.attention.backend) == ("fused", "hopper")
    assert plan.scales == ("q: a scale for each row", "k and v: a scale for each 128 keys of a head")
    assert plan.quantizer_config is not None and plan.quantizer_config.rotate
    assert plan.quantization == Fp8Quantization(block_k=128)
    assert plan.attention.config == select_fp8_forward_config(
        128, 128, False, "bfloat16", 4096, 128, half_scores=True
    )
    text = str(plan)
    for line in (
        "quantizer  fused",
        f"kernel     {plan.quantizer_config.name}",
        "options    q and k rotated, the mean of v subtracted",
        "backend    hopper",
        f"config     {plan.attention.config.name}",
    ):
        assert line in text.splitlines()


def test_an_exact_lse_has_kernels_of_its_own() -> None:
    """Also of packed sequences and windows, and whatever V and its sums are like."""
    q, k, v = qkv()
    named = {"exact_lse": True}
    expected = select_fp8_forward_config(128, 128, False, "bfloat16", 4096, 128, exact_lse=True)
    assert on_hopper(q, k, v, **named).attention.config == expected
    assert on_hopper(q, k, v, two_level_accumulation=True, **named).attention.config == expected
    bounds = meta(3, dtype=torch.int32)
    lengths = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 9, "max_seqlen_k": 9}
    packed = on_hopper(q[0], k[0], v[0], window_size=(5, 3), **lengths, **named).attention.config
    assert packed == replace(expected, window=True, layout="varlen")
    e4m3 = (torch.zeros(1, 40, 2, 128).to(torch.float8_e4m3fn) for _ in range(3))
    rows = from_descales(*e4m3, None, None, None, torch.bfloat16)
    assert (
        problem_of(rows, False).kind.transposes
        and not problem_of(rows, False, exact_lse=True).kind.transposes
    )
    assert select_config(problem_of(rows, False, exact_lse=True)) == expected
    with pytest.raises(TypeError, match="exact_lse is a str, 'yes'"):
        on_hopper(q, k, v, exact_lse="yes")


OPTIONS = [
    Fp8Quantization(),
    Fp8Quantization(rotate=False, smooth_v=True),
    Fp8Quantization(block_q=64),
    Fp8Quantization(block_k=128, smooth_k=True),
    Fp8Quantization(granularity="head"),
    Fp8Quantization(granularity="tensor", rotate_v=True),
]


@pytest.mark.parametrize("two_level", [False, True])
@pytest.mark.parametrize("quantization", OPTIONS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_plan_is_what_the_call_hands_to_the_rules(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, quantization: Fp8Quantization, two_level: bool
) -> None:
    # The call itself, on this CPU: the problem that it hands on decides everything.
    seen = []

    def find(problem, *others):
        seen.append(problem)
        raise InterruptedError

    monkeypatch.setattr(fp8_launch, "find_fp8_launch", find)
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 384, 2, head_dim), *2 * ((1, 384, 1, head_dim),)
    tensors = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    options = {"causal": True, "quantization": quantization, "two_level_accumulation": two_level}
    with pytest.raises(InterruptedError):
        flash_attn_fp8_func(*tensors, **options)
    plan = on_hopper(*tensors, **options)
    (problem,) = seen
    assert plan.attention.backend == "hopper" and plan.attention.config == select_config(problem)
    assert plan.quantizer == ("fused" if quantization.granularity == "block" else "torch")
    if plan.quantizer_config is not None:
        block_k = plan.quantization.block_k
        assert (plan.quantizer_config.block_k, problem.block_k) == (block_k, block_k)
        sizes = head_dim, head_dim, 384
        chosen = replace(quantization, block_k=block_k)
        assert plan.quantizer_config == select_quantize_config(torch.bfloat16, *sizes, chosen)


def test_coarser_scales_are_quantized_by_torch_and_the_reason_says_so() -> None:
    head = on_hopper(*qkv(), quantization=Fp8Quantization(granularity="head"))
    assert (head.quantizer, head.quantizer_config) == ("torch", None)
    assert "granularity is 'head'" in head.quantizer_reason
    assert head.scales == (
        "q: a scale for the query heads of each key/value head",
        "k and v: a scale for each head",
    )
    tensor = on_hopper(*qkv(), quantization=Fp8Quantization(granularity="tensor"))
    assert tensor.scales == ("q: one scale", "k and v: one scale each")


def test_two_levels_and_options_change_the_kernels() -> None:
    plain, two = on_hopper(*qkv(64)), on_hopper(*qkv(64), two_level_accumulation=True)
    assert (plain.attention.config.two_level, two.attention.config.two_level) == (False, True)
    options = Fp8Quantization(rotate=False, smooth_k=True, rotate_v=True, smooth_v=True)
    plan = on_hopper(*qkv(), quantization=options)
    config = plan.quantizer_config
    assert config is not None
    assert (config.rotate, config.smooth_k, config.rotate_v, config.smooth_v) == (False, True, True, True)
    assert "options    v rotated, the mean of k subtracted, the mean of v subtracted" in str(plan)
    unchanged = on_hopper(
        *qkv(), quantization=replace(options, rotate_v=False, smooth_k=False, smooth_v=False)
    )
    assert "options    none" in str(unchanged)


def test_an_older_gpu_attends_in_16_bits() -> None:
    plan = explain_fp8(*qkv(), device_capability=(8, 0))
    assert (plan.quantizer, plan.attention.backend) == ("torch", "ampere")
    assert plan.attention.config.name.startswith("ampere_fwd_sm_80_bf16_d128_full_")
    assert plan.attention.copies == ("q, k and v are dequantized to torch.bfloat16 by PyTorch",)
    assert "compute capability 8.0" in plan.quantizer_reason and "no speed-up" in plan.attention.reason


def test_the_reference_calls_no_kernel_at_all() -> None:
    plan = on_hopper(*qkv(), backend="reference")
    assert (plan.quantizer, plan.quantizer_reason) == ("torch", "backend is 'reference'")
    assert plan.attention.config.name == "reference_fp8_m128n128"


def test_it_says_what_this_cpu_does() -> None:
    tensors = [torch.zeros(1, 8, 1, 64, dtype=torch.float16)] * 3
    plan = explain_fp8(*tensors)
    assert (plan.quantizer, plan.quantizer_reason) == ("torch", "cpu is not an NVIDIA GPU")
    assert plan.attention.backend == "reference"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"backend": "cuda"}, ValueError, "backend is 'cuda', allowed"),
        ({"softmax_scale": -1.0}, ValueError, "softmax_scale is -1.0"),
        ({"device_capability": "9.0"}, ValueError, "device_capability is '9.0', allowed"),
    ],
)
def test_mistakes_are_those_of_the_call(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        explain_fp8(*qkv(), **arguments)


def test_shapes_and_dtypes_are_checked_as_by_the_call() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match="heads"):
        explain_fp8(q[:, :, :7], k, v, quantization=Fp8Quantization(block_k=128))
    with pytest.raises(TypeError, match="q has dtype"):
        explain_fp8(*(x.int() for x in (q, k, v)))


def test_the_sizes_without_data_are_those_of_quantized_tensors() -> None:
    tensors = [torch.randn(1, 300, 2, 96).half() for _ in range(3)]
    for quantization in OPTIONS:
        parts = quantize_qkv(*tensors, quantization=replace(quantization, block_k=128))
        plan = on_hopper(*tensors, quantization=replace(quantization, block_k=128))
        assert plan.attention.config == select_config(problem_of(parts, False, without_lse=True))


REPORT = Path(__file__).parents[2] / "benchmarks/results/fp8_nvidia_h200.json"


def test_it_says_when_fp8_pays_as_measured() -> None:
    """In each of the 36 cells, but for those within 3 % of 16 bits."""
    known = 0
    for cell in load_forward(REPORT.read_text(), "fp8").cells:
        p = cell.problem
        shape = AttentionShape(p.batch, p.seqlen_q, p.seqlen_k, p.heads, p.heads_kv, p.head_dim, p.head_dim_v)
        found = describe_gain(shape, MaskSpec(p.causal))
        assert found.split(":")[0] in ("yes", "no")
        if abs(cell.gain - 1) > 0.03:
            known += 1
            assert found.startswith("yes" if cell.gain > 1 else "no"), (p.name, cell.gain, found)
    assert known >= 30


def test_what_pays_follows_the_mask_and_the_sizes() -> None:
    q, k, v = qkv(seqlen=8192)
    assert on_hopper(q, k, v).pays == (
        "yes: a query sees 8192 keys on average, and the pre-pass is worth it from about 768 on"
    )
    assert "pays       yes: a query sees 8192" in str(on_hopper(q, k, v))
    for options, seen in (
        ({"causal": True}, 4081),
        ({"window_size": (255, 0)}, 252),
        ({"attention_chunk": 1024}, 1024),
    ):
        assert f"sees {seen} keys" in on_hopper(q, k, v, **options).pays
    few = meta(2, 1, 8, 128)
    assert on_hopper(few, k, v).pays.startswith(
        "no: a query sees 8192 keys on average, and the pre-pass is worth it from ab"
    )
    assert not explain_fp8(q, k, v, device_capability=(8, 0)).pays
    assert not on_hopper(q, k, v, quantization=Fp8Quantization(granularity="head")).pays
