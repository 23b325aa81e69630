"""The FP8 kernel against its emulation, which rounds where it rounds, and against float64.

With ``backend="ampere"`` the parts are dequantized for a 16-bit kernel, which must be nearer to float64.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from hopper.forward.fp8.config import STALE_MAXIMUM, Softmax
from hopper_attention import flash_attn_fp8_func, flash_attn_func, flash_attn_quantized_func
from hopper_attention.experiments.bench.spec import parse_shapes
from hopper_attention.experiments.families.draws import FAMILIES, Family, draw_family
from hopper_attention.experiments.rmse.run import RmseExperiment, compute_oracle
from hopper_attention.experiments.rmse.spec import draw_problem
from hopper_attention.fp8_rules import select_config
from hopper_attention.launch.fp8 import attend, find_fp8_launch, problem_of
from hopper_attention.launch.transpose import transpose_values
from hopper_attention.quantization import (
    Fp8Quantization,
    QuantizedQKV,
    from_descales,
    quantize_qkv,
    restore_values,
)
from hopper_attention.quantized import transpose_for_kernel
from hopper_attention.reference import attention_naive
from hopper_attention.value_mean_rules import robust_mean_of_keys
from tests.hopper.fp8_errors import (
    LAGGING_LSE_ROUNDING,
    LSE_ROUNDING,
    allowed_ratio,
    emulate,
    exact_lse_error,
    lse_rounding,
    score_rounding,
)
from tests.hopper.fp8_sums import allowed_lse_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("usual_tiles")]

both_backends = pytest.mark.parametrize("backend", ["hopper", "ampere"])

LENGTHS = [(1, 1), (1, 239), (113, 203), (799, 3), (640, 640), (1023, 1024)]


LSE_16_BITS, LSE_RELATIVE = 2e-4, 1e-5
"""What the LSE of a 16-bit kernel may differ by, as in the tests of those."""


def dequantized(parts: QuantizedQKV) -> list[torch.Tensor]:
    """q, k and v as a 16-bit kernel gets them: rounded once."""
    return [x.dequantize().to(parts.dtype) for x in (parts.q, parts.k, parts.v)]


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def lags(parts: QuantizedQKV, causal: bool, two_level: bool = False, without_lse: bool = False) -> bool:
    """Whether the FP8 kernel that serves these parts takes few maxima."""
    config = select_config(problem_of(parts, causal, two_level, without_lse=without_lse))
    return config.softmax in STALE_MAXIMUM


def allowed_error(
    emulated: float, oracle: torch.Tensor, out: torch.Tensor, lagging: bool, keys: float = math.inf
) -> float:
    """The RMS error that ``out`` of an FP8 kernel may have where that of the emulation is ``emulated``."""
    return allowed_ratio(out, lagging, keys) * emulated + 2e-4 * rms(oracle) + 1e-12


def allowed_16_bit_error(emulated: float, oracle: torch.Tensor, out: torch.Tensor) -> float:
    """At most half the emulation's, whose P has 4 bits, and what inputs, P and output lose to 16."""
    return emulated / 2 + torch.finfo(out.dtype).eps / 2 * rms(oracle) + 1e-12


def oracle_of(parts: QuantizedQKV, causal: bool) -> torch.Tensor:
    """Attention of the dequantized parts in float64, what was done to V undone."""
    out, _ = attention_naive(*(x.dequantize() for x in (parts.q, parts.k, parts.v)), causal=causal)
    return restore_values(out, parts, causal)


def find_differences(
    parts: QuantizedQKV, causal: bool, backend: str = "hopper", two_level: bool = False
) -> list[str]:
    """What a kernel has worse than the emulation, measured against float64 on the dequantized inputs: that of calls
    which return the LSE, and that of others where it is another."""
    scale = parts.q.shape[3] ** -0.5
    out, lse = attend(parts, scale, causal, backend, two_level)
    without_lse, _ = attend(parts, scale, causal, backend, two_level, wants_lse=False)
    oracle = oracle_of(parts, causal)
    wrong = [] if backend == "ampere" else find_wrong_with_exact_lse(parts, causal, two_level, oracle)
    for name, result, is_without in (("", out, False), ("without LSE: ", without_lse, True)):
        # The two may be of kernels with other softmaxes.
        lagging = backend == "hopper" and lags(parts, causal, two_level, is_without)
        emulations = emulate(parts, causal, lagging)
        error = rms(result.double() - oracle)
        emulated = max(rms(like.double() - oracle) for like, _ in emulations)
        if backend == "ampere":
            allowed_of_out = allowed_16_bit_error(emulated, oracle, out)
        else:
            allowed_of_out = allowed_error(emulated, oracle, out, lagging, parts.k.shape[1])
        # "not <=" so that NaN counts as wrong.
        if not error <= allowed_of_out:
            wrong.append(f"{name}RMS error {error:.3e}, emulation {emulated:.3e}, output {rms(oracle):.3e}")
    _, like_lse = emulations[0]
    visible = like_lse > -math.inf
    if not bool(torch.equal(lse > -math.inf, visible)):
        wrong.append("LSE of rows without keys")
    if backend == "ampere":
        _, like_lse = attention_naive(*dequantized(parts), causal=causal)
        allowed = LSE_16_BITS + LSE_RELATIVE * like_lse.abs()
    else:
        config = select_config(problem_of(parts, causal, two_level))
        allowed = allowed_lse_error(parts, scale, 0.0) + lse_rounding(config, like_lse)
    difference = (lse - like_lse)[visible].abs()
    if not bool((difference <= allowed[visible]).all()):
        wrong.append(f"LSE differs by {difference.max().item():.3e}")
    if not all(bool((x.transpose(1, 2)[~visible] == 0).all()) for x in (out, without_lse)):
        wrong.append("rows without keys are not 0")
    return wrong


def find_wrong_with_exact_lse(
    parts: QuantizedQKV, causal: bool, two_level: bool, oracle: torch.Tensor
) -> list[str]:
    """The same of the kernels of an exact LSE, which round P as the emulation does."""
    options = {"two_level_accumulation": two_level, "backend": "hopper", "exact_lse": True}
    out, lse = flash_attn_quantized_func(parts, None, causal, True, **options)
    ((like, _),) = emulate(parts, causal, lagging=False)
    _, exact_lse = attention_naive(*(x.dequantize() for x in (parts.q, parts.k, parts.v)), causal=causal)
    visible, wrong = exact_lse > -math.inf, []
    if not torch.equal(lse > -math.inf, visible):
        wrong.append("exact LSE of rows without keys")
    difference = (lse - exact_lse)[visible].abs()
    if not bool((difference <= exact_lse_error(exact_lse)[visible]).all()):
        wrong.append(f"exact LSE differs by {difference.max().item():.3e}")
    error, emulated = rms(out.double() - oracle), rms(like.double() - oracle)
    if not error <= allowed_error(emulated, oracle, out, False, parts.k.shape[1]):
        wrong.append(
            f"with exact LSE: RMS error {error:.3e}, emulation {emulated:.3e}, output {rms(oracle):.3e}"
        )
    return wrong


@both_backends
@pytest.mark.parametrize("granularity", ["tensor", "head", "block"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [48, 64, 96, 128, 192, 256])
def test_kernel_is_as_good_as_its_emulation(
    draw, head_dim: int, causal: bool, granularity: str, backend: str
) -> None:
    failures = {}
    for seqlens in LENGTHS:
        for heads in ((2, 2), (4, 1)):
            x = draw(torch.bfloat16, 2, seqlens, heads, head_dim)
            c = Fp8Quantization(granularity=granularity, rotate=head_dim != 96)
            wrong = find_differences(quantize_qkv(x.q, x.k, x.v, quantization=c), causal, backend)
            if wrong:
                failures[seqlens, heads] = wrong
    assert failures == {}


@both_backends
def test_scales_of_every_block_are_applied(draw, backend: str) -> None:
    # Each block gets a scale of its own, far from the others', whatever its data would have asked for.
    x = draw(torch.float16, 2, (300, 700), (4, 2), 128)
    parts = quantize_qkv(x.q, x.k, x.v)

    def rescaled(tensor: Any, spread: float) -> Any:
        factors = torch.linspace(-spread, spread, tensor.scale.numel(), device=tensor.scale.device).exp2()
        return replace(tensor, scale=tensor.scale * factors.view_as(tensor.scale))

    odd = QuantizedQKV(
        rescaled(parts.q, 0.5),
        rescaled(parts.k, 0.5),
        rescaled(parts.v, 6.0),
        parts.quantization,
        parts.dtype,
    )
    assert find_differences(odd, False, backend) == [] and find_differences(odd, True, backend) == []


@both_backends
def test_head_dim_v_differs(draw, backend: str) -> None:
    for head_dim, head_dim_v in ((192, 128), (64, 128), (128, 32)):
        x = draw(torch.bfloat16, 1, (333, 517), (2, 1), head_dim, head_dim_v)
        assert find_differences(quantize_qkv(x.q, x.k, x.v), True, backend) == []


@pytest.mark.parametrize("block_k", [64, 128, 384, 1024])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_blocks_of_other_sizes(draw, head_dim: int, block_k: int) -> None:
    x = draw(torch.bfloat16, 2, (300, 1100), (4, 2), head_dim)
    parts = quantize_qkv(x.q, x.k, x.v, quantization=Fp8Quantization(block_q=64, block_k=block_k))
    assert find_differences(parts, False) == [] and find_differences(parts, True) == []


def test_rows_of_negative_scores(draw) -> None:
    # Their maximum is found in a branch of its own, for one row of a warp or for all of them.
    for dtype, head_dim in ((torch.float16, 64), (torch.bfloat16, 128), (torch.bfloat16, 256)):
        x = draw(dtype, 1, (256, 1000), (2, 2), head_dim)
        k = x.k.abs() + 0.25
        for q in (
            -x.q.abs() - 0.25,
            torch.where(torch.arange(256, device=k.device).view(1, -1, 1, 1) % 7 == 0, -1, 1) * x.q.abs(),
        ):
            parts = quantize_qkv(q.to(dtype), k, x.v, quantization=Fp8Quantization(rotate=False))
            assert find_differences(parts, False) == [] and find_differences(parts, True) == []


@both_backends
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_fp8_tensors_with_descales(draw, head_dim: int, backend: str) -> None:
    x = draw(torch.float16, 2, (300, 517), (4, 2), head_dim)
    descales = [torch.rand(2, 2, device=x.q.device) + 0.5 for _ in range(3)]
    data = [(0.7 * t).to(torch.float8_e4m3fn) for t in (x.q, x.k, x.v)]
    descales[2][0, 1] *= -1
    parts = from_descales(*data, *descales, torch.bfloat16)
    assert find_differences(parts, True, backend) == []
    names = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    out = flash_attn_func(*data, causal=True, **names, backend=backend)
    assert torch.equal(out, flash_attn_quantized_func(parts, causal=True, backend=backend))
    if backend == "hopper":
        assert torch.equal(out, flash_attn_func(*data, causal=True, **names))


@pytest.mark.parametrize(
    ("head_dim", "causal", "seqlen"),
    [*product([64, 112, 128, 256], [False, True], [3100]), (64, True, 1500)],
)
def test_codes_up_to_448(draw, head_dim: int, causal: bool, seqlen: int) -> None:
    """Whose scores float16 holds only if the kernel lowers rows of Q, of which one is 0 and one has 448 alone. A call
    that returns the LSE has them in float32."""
    x = draw(torch.float16, 2, (seqlen, seqlen), (4, 2), head_dim)
    x.q[:, 5] = 0.0
    x.q[:, 70, :, 3] = 9.0
    factors = [448.0 / t.float().abs().amax((1, 3), keepdim=True) for t in (x.q, x.k, x.v)]
    factors[0] = factors[0].unflatten(2, (2, 2)).amin(3).repeat_interleave(2, 2)
    data = [(f * t.float()).to(torch.float8_e4m3fn) for f, t in zip(factors, (x.q, x.k, x.v), strict=True)]
    descales = [1.0 / factors[0][:, 0, ::2, 0], 1.0 / factors[1][:, 0, :, 0], 1.0 / factors[2][:, 0, :, 0]]
    parts = from_descales(*data, *descales, torch.bfloat16)
    assert select_config(problem_of(parts, causal, without_lse=True)).lowers_queries
    assert select_config(problem_of(parts, causal)).softmax is not Softmax.HALF_SCORES
    assert find_differences(parts, causal) == []
    names = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    for returns_lse in (False, True):
        options = {"return_attn_probs": returns_lse, "exact_lse": False}
        found = flash_attn_func(*data, causal=causal, **names, **options)
        like = attend(parts, head_dim**-0.5, causal, "hopper", False, returns_lse)
        assert all(map(torch.equal, found, like)) if returns_lse else torch.equal(found, like[0])


@pytest.mark.parametrize(
    "shape", [(2, 1, 3, 16), (1, 333, 2, 96), (3, 4097, 5, 128), (2, 640, 1, 256), (1, 70, 9, 80)]
)
def test_a_kernel_transposes_v(device: str, shape: tuple[int, ...]) -> None:
    """Any bits, NaN among them, and rows with gaps between them."""
    bits = torch.randint(0, 256, (*shape[:2], 2 * shape[2], shape[3]), device=device, dtype=torch.uint8)
    v = bits[:, :, ::2].view(torch.float8_e4m3fn)
    twin = transpose_for_kernel(v).view(torch.uint8)
    assert torch.equal(transpose_values(v).view(torch.uint8), twin)
    assert torch.equal(transpose_values(v[..., :16]).view(torch.uint8), twin[:, :, :16])


def test_a_transposed_v_of_many_gigabytes(device: str) -> None:
    v = torch.randint(0, 256, (1, 2**21 + 5, 9, 128), device=device, dtype=torch.uint8)
    found = transpose_values(v.view(torch.float8_e4m3fn))
    last = transpose_for_kernel(v[:, -37:, -1:].view(torch.float8_e4m3fn))
    assert torch.equal(found[:, -1:, :, -64:].view(torch.uint8), last.view(torch.uint8))


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_the_kernel_transposes_v_in_rows(draw, head_dim: int) -> None:
    for seqlens in LENGTHS:
        x = draw(torch.float16, 2, seqlens, (4, 2), head_dim)
        data = [(0.7 * t).to(torch.float8_e4m3fn) for t in (x.q, x.k, x.v)]
        parts = from_descales(*data, None, None, None, torch.bfloat16)
        for causal in (False, True):
            assert find_differences(parts, causal) == []
            out, lse = attend(parts, head_dim**-0.5, causal, "hopper", False)
            problem = problem_of(parts, causal)
            assert problem.v_rows
            strides = parts.q.data.stride(), parts.k.data.stride()
            transposed = problem._replace(v_rows=False)
            launch = find_fp8_launch(transposed, *strides, x.q.device, "hopper")
            like, like_lse = launch(parts, head_dim**-0.5, True)
            # Measured from different maxima, P is rounded differently: by 2.7 % in either kernel.
            lagging = select_config(transposed).softmax is Softmax.LAGGING
            assert (out - like).float().norm() <= (0.05 if lagging else 0.02) * like.float().norm()
            visible = like_lse > -math.inf
            # Both make the same sums of Q K^T.
            rounding = LAGGING_LSE_ROUNDING if lagging else LSE_ROUNDING
            assert ((lse - like_lse)[visible].abs() <= rounding).all()
            # Where nobody gets the LSE scores are in float16, and the error may be no larger.
            transposed = transposed._replace(without_lse=True)
            launch = find_fp8_launch(transposed, *strides, x.q.device, "hopper")
            like, _ = launch(parts, head_dim**-0.5, False)
            found, _ = attend(parts, head_dim**-0.5, causal, "hopper", False, False)
            pair = [select_config(transposed._replace(v_rows=v_rows)) for v_rows in (False, True)]
            if len({(config.softmax, config.tile_m, config.tile_n) for config in pair}) == 1:
                # A block cut for some rows has its terms added in another order, which moves few roundings by one.
                assert int((found != like).sum()) <= 2 + 1e-5 * found.numel()
                assert torch.allclose(found, like, rtol=torch.finfo(found.dtype).eps, atol=0)
            oracle, emulations = oracle_of(parts, causal), emulate(parts, causal, lagging)
            emulated = max(rms(emulation.double() - oracle) for emulation, _ in emulations)
            for each in (like, found):
                assert rms(each.double() - oracle) <= allowed_error(emulated, oracle, each, lagging)


@pytest.mark.parametrize("exact_lse", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_values_reach_only_what_sees_them(draw, bad: float, exact_lse: bool) -> None:
    x = draw(torch.float16, 1, (512, 512), (2, 2), 128)
    clean = flash_attn_fp8_func(x.q, x.k, x.v, causal=True)
    x.k[0, 500, 0, 3] = bad
    x.q[0, 7, 1, 5] = bad
    out, lse = flash_attn_fp8_func(x.q, x.k, x.v, None, True, True, exact_lse=exact_lse)
    assert bool(out[0, 500:, 0].isnan().all()) and bool(out[0, 7, 1].isnan().all())
    same = torch.ones(512, 2, dtype=torch.bool, device=out.device)
    same[500:, 0] = same[7, 1] = False
    assert bool(out[0][same].isfinite().all()) and bool(lse[0].T[same].isfinite().all())
    # The scale of a block may change with the value that became NaN, so the rest is near and not equal.
    assert ((out - clean)[0][same].norm() / clean[0][same].norm()).item() < 0.06


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_keys_that_jump_above_all_others(draw, head_dim: int, causal: bool) -> None:
    """By 5 to 200 octaves, random keys for random rows: in blocks without a maximum P is beyond what e4m3, polynomials
    or float32 hold. The output is near float64 but for P's rounding and for what the sums of scores lose."""
    columns, loud = 8, 40.0
    x = draw(torch.bfloat16, 2, (1024, 2048), (2, 2), head_dim)
    generator = torch.Generator(x.q.device).manual_seed(1)
    x.q[..., :columns], x.k[..., :columns] = 0.0, 0.0
    for tensor, share in ((x.q, 0.02), (x.k, 0.002)):
        shape = *tensor.shape[:3], columns
        chosen = torch.rand(shape, device=tensor.device, generator=generator) < share
        octaves = 5 + 195 * torch.rand(shape, device=tensor.device, generator=generator)
        size = octaves / (loud * math.log2(math.e) * head_dim**-0.5) if tensor is x.q else loud
        tensor[..., :columns] = torch.where(chosen, size, 0.0).to(tensor.dtype)
    parts = quantize_qkv(x.q, x.k, x.v, quantization=Fp8Quantization(rotate=False, smooth_v=False))
    assert lags(parts, causal)
    out, lse = attend(parts, head_dim**-0.5, causal, "hopper", False)
    again = attend(parts, head_dim**-0.5, causal, "hopper", False)
    assert torch.equal(again[0], out) and torch.equal(again[1], lse)
    q, k, v = (part.dequantize() for part in (parts.q, parts.k, parts.v))
    oracle, oracle_lse = attention_naive(q, k, v, causal=causal)
    of_p, _ = attention_naive(q, k, v.abs(), causal=causal)
    config = select_config(problem_of(parts, causal, False))
    lost = allowed_lse_error(parts, head_dim**-0.5, 0.0)
    assert bool(((lse - oracle_lse).abs() <= lost + lse_rounding(config, oracle_lse)).all())
    of_scores = score_rounding(config, head_dim) * oracle_lse.abs().nan_to_num(posinf=0.0)
    lost = lost + LAGGING_LSE_ROUNDING + of_scores
    rounded = torch.expm1(2 * lost.double()).transpose(1, 2).unsqueeze(-1)
    subnormal = 2.0**-15 * v.double().abs().sum(1, keepdim=True)
    allowed = (2.0**-4 + 0.01 + rounded) * of_p + subnormal + 2.0**-8 * oracle.abs()
    assert bool(((out - oracle).abs() <= allowed).all()) and rms(out - oracle) < 0.04 * rms(oracle)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_an_exact_lse_is_exact_enough_to_merge_by(device: str, head_dim: int, family: Family) -> None:
    """Whatever scores are."""
    (problem,) = parse_shapes(f"bf16-b1-s4096-h2-d{head_dim}-full")
    x = draw_family(family, problem, 0, device)
    parts = quantize_qkv(x.q, x.k, x.v)
    _, lse = flash_attn_quantized_func(parts, None, False, True, backend="hopper", exact_lse=True)
    _, exact = attention_naive(*(part.dequantize() for part in (parts.q, parts.k, parts.v)))
    assert bool(((lse - exact).abs() <= exact_lse_error(exact)).all())


def test_growing_scores(draw) -> None:
    x = draw(torch.float16, 1, (256, 2048), (2, 2), 128)
    weights = torch.linspace(0.05, 2.0, 2048, device=x.k.device, dtype=x.k.dtype).view(1, -1, 1, 1)
    for k in (0.02 * x.k + weights, 0.02 * x.k + weights.flip(1)):
        parts = quantize_qkv(x.q.abs() + 0.5, k, x.v, quantization=Fp8Quantization(rotate=False))
        assert find_differences(parts, False) == [] and find_differences(parts, True) == []


def test_twenty_runs_give_the_same_bits(draw) -> None:
    x = draw(torch.bfloat16, 2, (1000, 1000), (4, 2), 128)
    parts = quantize_qkv(x.q, x.k, x.v)
    first = flash_attn_quantized_func(parts, causal=True, backend="hopper")
    assert all(torch.equal(first, flash_attn_quantized_func(parts, causal=True)) for _ in range(19))


def test_rmse_on_the_papers_outlier_inputs(device: str) -> None:
    experiment = RmseExperiment(seqlen=8448, heads=4, head_dim=128, dtype="float16", device=device)
    problem = draw_problem(experiment, seed=0)
    oracle = compute_oracle(problem)

    out = flash_attn_fp8_func(problem.q, problem.k, problem.v, backend="hopper")
    parts = quantize_qkv(problem.q, problem.k, problem.v)
    lagging = lags(parts, False)
    emulated = max(rms(like - oracle) for like, _ in emulate(parts, False, lagging))
    error = rms(out - oracle)
    assert error <= 9.5e-3 and error <= allowed_ratio(out, lagging) * emulated


@pytest.mark.parametrize("granularity", ["head", "block"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [48, 64, 96, 128, 192, 256])
def test_two_level_kernel_is_as_good_as_its_emulation(
    draw, head_dim: int, causal: bool, granularity: str
) -> None:
    failures = {}
    # Above 1280 keys at head_dim 128 blocks are wider than a two-level tile can be.
    for seqlens in (*LENGTHS, (131, 2777)):
        for heads in ((2, 2), (4, 1)):
            x = draw(torch.bfloat16, 2, seqlens, heads, head_dim)
            parts = quantize_qkv(x.q, x.k, x.v, quantization=Fp8Quantization(granularity=granularity))
            wrong = find_differences(parts, causal, two_level=True)
            if wrong:
                failures[seqlens, heads] = wrong
    assert failures == {}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_two_level_kernel_on_odd_scales_blocks_and_v_in_rows(draw, head_dim: int) -> None:
    x = draw(torch.float16, 2, (300, 1100), (4, 2), head_dim)
    growing = torch.linspace(0.2, 3.0, 1100, device=x.k.device).view(1, -1, 1, 1).to(x.k.dtype)
    louder = torch.linspace(-12, 0, 1100, device=x.k.device).exp2().view(1, -1, 1, 1).to(x.v.dtype)
    for block_k in (64, 128, 384, 1024):
        c = Fp8Quantization(block_q=64, block_k=block_k)
        for k, v in ((x.k * growing, x.v * louder), (x.k * growing.flip(1), x.v * louder.flip(1))):
            parts = quantize_qkv(x.q, k, v, quantization=c)
            for causal in (False, True):
                assert find_differences(parts, causal, two_level=True) == []
    data = [(0.7 * t).to(torch.float8_e4m3fn) for t in (x.q, x.k, x.v)]
    parts = from_descales(*data, None, None, None, torch.bfloat16)
    for causal in (False, True):
        assert problem_of(parts, causal).v_rows and find_differences(parts, causal, two_level=True) == []
        out = flash_attn_func(*data, causal=causal, two_level_accumulation=True)
        options = {"two_level_accumulation": True, "backend": "hopper"}
        assert torch.equal(out, flash_attn_quantized_func(parts, causal=causal, **options))


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_two_levels_lose_no_more_than_one_over_many_keys(draw, head_dim: int, offset: float) -> None:
    """With an offset the terms of P V have one sign, so that their sum grows, and with it what one level drops."""
    x = draw(torch.bfloat16, 1, (256, 65536), (1, 1), head_dim)
    parts = quantize_qkv(x.q, x.k, x.v + offset, quantization=Fp8Quantization(smooth_v=False))
    oracle = oracle_of(parts, False)
    one, two = (
        rms(flash_attn_quantized_func(parts, two_level_accumulation=levels, backend="hopper") - oracle)
        for levels in (False, True)
    )
    # Where neither loses anything, the order of the additions is a matter of chance.
    assert two <= (1 + 2 / math.sqrt(256 * head_dim)) * one
    assert find_differences(parts, False, two_level=True) == []


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_two_level_kernel_repeats_its_bits(draw, head_dim: int) -> None:
    x = draw(torch.bfloat16, 2, (1000, 3000), (4, 2), head_dim)
    parts = quantize_qkv(x.q, x.k, x.v)
    options = {"causal": True, "two_level_accumulation": True, "backend": "hopper"}
    first = flash_attn_quantized_func(parts, **options)
    assert all(torch.equal(first, flash_attn_quantized_func(parts, **options)) for _ in range(19))


@both_backends
@pytest.mark.parametrize("rotate_v", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [48, 64, 96, 128, 192, 256])
def test_smooth_v_is_as_good_as_its_emulation(
    draw, head_dim: int, causal: bool, rotate_v: bool, backend: str
) -> None:
    failures = {}
    c = Fp8Quantization(smooth_v=True, rotate_v=rotate_v)
    for seqlens in LENGTHS:
        for heads in ((2, 2), (4, 1)):
            x = draw(torch.bfloat16, 2, seqlens, heads, head_dim)
            parts = quantize_qkv(x.q, x.k, x.v + 1, quantization=c)
            assert parts.mean_v.numel()
            wrong = find_differences(parts, causal, backend)
            if wrong:
                failures[seqlens, heads] = wrong
    assert failures == {}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_smooth_v_keeps_what_one_level_loses_of_many_keys(draw, head_dim: int) -> None:
    """N(1, 1) values, against float64 on the inputs themselves."""
    x = draw(torch.bfloat16, 1, (256, 65536), (1, 1), head_dim)
    v = x.v + 1
    oracle, _ = attention_naive(x.q, x.k, v)
    errors = {}
    for smooth_v in (False, True):
        parts = quantize_qkv(x.q, x.k, v, quantization=Fp8Quantization(smooth_v=smooth_v))
        ours, like = (flash_attn_quantized_func(parts, backend=name) for name in ("hopper", "reference"))
        errors[smooth_v] = rms(ours - oracle), rms(like - oracle)
    assert errors[True][0] <= 1.5 * errors[True][1]
    # Of the emulation mostly the rounding of a bfloat16 output near 1 is left.
    assert errors[True][0] < errors[False][0] / 10 and errors[True][1] <= 1.5 * errors[False][1]


def test_a_captured_graph_adds_the_mean_of_what_its_inputs_hold(draw) -> None:
    static, fresh = (draw(torch.bfloat16, 2, (300, 517), (4, 2), 128) for _ in range(2))
    options = {"causal": True, "quantization": Fp8Quantization(smooth_v=True, rotate_v=False)}
    expected = flash_attn_fp8_func(fresh.q, fresh.k, fresh.v + 1, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_fp8_func(static.q, static.k, static.v, **options)
    for target, source in ((static.q, fresh.q), (static.k, fresh.k), (static.v, fresh.v + 1)):
        target.copy_(source)
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_values_of_a_smooth_v_reach_the_tiles_that_load_them(draw, bad: float) -> None:
    """In their column of their head: the mean of that column is finite, so that queries of other tiles are clean."""
    x = draw(torch.bfloat16, 2, (512, 512), (4, 2), 128)
    x.v[1, 500, 0, 3] = bad
    out = flash_attn_fp8_func(x.q, x.k, x.v, causal=True, quantization=Fp8Quantization(smooth_v=True))
    spoilt, may_be_spoilt = (torch.zeros_like(out, dtype=torch.bool) for _ in range(2))
    spoilt[1, 500:, :2, 3] = True
    # No tile of queries, nor a block of keys that it loads, crosses row 384.
    may_be_spoilt[1, 384:, :2, 3] = True
    assert bool(out[spoilt].isnan().all()) and bool(out[~may_be_spoilt].isfinite().all())


@pytest.mark.parametrize("two_level", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
def test_the_kernel_adds_the_mean_in_float32(draw, head_dim: int, two_level: bool) -> None:
    """As to what it gives without: rounded once, and nothing in rows without keys."""
    x = draw(torch.bfloat16, 2, (799, 300), (4, 2), head_dim)
    parts = quantize_qkv(x.q, x.k, x.v + 3, quantization=Fp8Quantization(smooth_v=True))
    assert parts.mean_v.numel()
    options = {"two_level_accumulation": two_level, "backend": "hopper"}
    for causal in (False, True):
        out = flash_attn_quantized_func(parts, causal=causal, **options)
        without = replace(parts, mean_v=torch.empty(0, device=x.v.device))
        centred = flash_attn_quantized_func(without, causal=causal, **options)
        added = restore_values(centred.double(), parts, causal)
        unit = torch.finfo(out.dtype).eps / 2
        assert bool(((out - added).abs() <= 1.01 * unit * (added.abs() + centred.abs()) + 1e-6).all())
        if causal:
            assert not out[:, :499].any() and bool((out[:, 499:] != 0).any())


@pytest.mark.parametrize("seqlen", [1, 31, 500, 2049, 30000])
def test_the_robust_mean_is_that_of_the_cpu(draw, seqlen: int) -> None:
    x = draw(torch.float16, 2, (1, seqlen), (4, 2), 64)
    mean = robust_mean_of_keys(x.v)
    torch.testing.assert_close(mean.cpu(), robust_mean_of_keys(x.v.cpu()), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(robust_mean_of_keys(x.v), mean) for _ in range(5))
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(robust_mean_of_keys(x.v), mean)
    finally:
        torch.use_deterministic_algorithms(was)
