"""Softcap and sinks of e4m3 tensors: which calls the FP8 kernel serves, which 16 bits, and what the kernel is given."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.window import NO_LIMIT
from hopper.config import ForwardConfig
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.forward.fp8.kernel import ScoredFp8ForwardKernel
from hopper_attention import (
    api,
    compile_cache,
    descaled_again,
    explain,
    explain_varlen,
    flash_attn_func,
    flash_attn_varlen_func,
    ops,
    packed_descaled_again,
    packed_scripts,
    varlen_ops,
)
from hopper_attention import varlen as varlen_function
from hopper_attention.backends import Target
from hopper_attention.fp8_rules import serves_in_e4m3
from hopper_attention.launch import (
    dequantized,
    few_fp8,
    few_packed_fp8,
    forward,
    fp8,
    transpose,
    varlen,
)
from hopper_attention.masks import MaskSpec
from hopper_attention.scores import ScoreKind
from tests.python.fake_gpu import H200, SMS, forget_launchers, pretend
from tests.python.test_packed_quantization import lengths_of
from tests.python.varlen_cases import Case

E4M3 = torch.float8_e4m3fn
A100 = Target("fake A100", (8, 0), assume_installed=True)
HOPPER = {"device_capability": (9, 0)}
OF_KERNEL = list(inspect.signature(ScoredFp8ForwardKernel.__call__).parameters)[1:-1]
"""Arguments of the kernel, by name."""


def draw(seqlens: tuple[int, int] = (45, 33), head_dims: tuple[int, int] = (64, 64)) -> list[Tensor]:
    """q of 4 heads, k and v of 2, of two sequences."""
    generator, (rows, keys) = torch.Generator().manual_seed(0), seqlens
    shapes = (2, rows, 4, head_dims[0]), (2, keys, 2, head_dims[0]), (2, keys, 2, head_dims[1])
    return [torch.randn(shape, generator=generator).to(E4M3) for shape in shapes]


def descales() -> dict[str, Tensor]:
    generator, names = torch.Generator().manual_seed(1), ("q_descale", "k_descale", "v_descale")
    return {name: torch.rand(2, 2, generator=generator) + 0.5 for name in names}


def packed(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of packed sequences, of a batch of one length."""

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        case = Case((q.shape[1],) * q.shape[0], (k.shape[1],) * k.shape[0])
        return function(*(x.flatten(0, 1) for x in (q, k, v)), **lengths_of(case), **options)

    return call


CALLS = {"dense": flash_attn_func, "packed": packed(flash_attn_varlen_func)}
EXPLAINS = {"dense": explain, "packed": packed(explain_varlen)}
LAYOUT = pytest.mark.parametrize("layout", ["dense", "packed"])
SINKS = torch.tensor([0.5, -1.0, 0.0, -math.inf])
SERVED: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 30.0},
    "softcap, causal": {"softcap": 30.0, "causal": True},
    "sinks": {"sinks": SINKS},
    "sinks of 16 bits": {"sinks": SINKS.bfloat16(), "causal": True},
    "sinks far apart": {"sinks": torch.stack((SINKS, SINKS), 1)[:, 0]},
    "both and a window": {"softcap": 15.0, "sinks": SINKS, "window_size": (7, 3)},
    "both and one side": {"softcap": 15.0, "sinks": SINKS, "window_size": (7, -1), "causal": True},
    "both and a chunk": {"softcap": 15.0, "sinks": SINKS, "attention_chunk": 20},
    "an LSE": {"softcap": 30.0, "sinks": SINKS, "return_attn_probs": True, "exact_lse": False},
    "hopper": {"softcap": 30.0, "backend": "hopper"},
}
IN_16_BITS: dict[str, dict[str, Any]] = {
    "slopes": {"alibi_slopes": torch.ones(4)},
    "slopes and the others": {"alibi_slopes": torch.ones(4), "softcap": 30.0, "sinks": SINKS},
    "an exact LSE": {"softcap": 30.0, "return_attn_probs": True},
    "sinks and an exact LSE": {"sinks": SINKS, "return_attn_probs": True, "exact_lse": True},
    "ampere": {"softcap": 30.0, "backend": "ampere"},
}
IS_DEQUANTIZED = ("q, k and v are dequantized to bfloat16 by PyTorch",)


def kernel_options(options: dict[str, Any]) -> dict[str, bool]:
    """Fields of the config."""
    chunk = options.get("attention_chunk", 0) > 0
    return {
        "softcap": "softcap" in options,
        "sinks": "sinks" in options,
        "window": "window_size" in options or chunk,
        "chunk": chunk,
        "causal": options.get("causal", False),
    }


class FakeGpu:
    """The CPU under another name. Its kernels of attention note their configs and arguments, and give ones."""

    def __init__(self) -> None:
        self.target = H200
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def get(self, config: Any) -> Any:
        def kernel(*arguments: Any) -> None:
            if hasattr(config, "softcap"):
                self.calls.append((config, arguments))
                arguments[3].fill_(1.0)
                arguments[4].fill_(0.25)

        return kernel


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    of_few = few_fp8, few_packed_fp8
    fake, modules = FakeGpu(), (dequantized, forward, fp8, ops, transpose, varlen, varlen_ops, *of_few)
    pretend(monkeypatch, *modules, target=lambda: fake.target)
    for get in ("get_forward", "get_quantize"):
        monkeypatch.setattr(compile_cache, get, fake.get)
    yield fake
    forget_launchers()


@LAYOUT
@pytest.mark.parametrize("name", SERVED)
def test_explain_says_that_an_fp8_kernel_serves(name: str, layout: str) -> None:
    options = SERVED[name]
    for rows in (45, 3000):
        plan = EXPLAINS[layout](*draw((rows, rows)), **HOPPER, **options)
        config = plan.config
        assert plan.backend == "hopper" and isinstance(config, Fp8ForwardConfig) and config.lone_scales
        assert {field: getattr(config, field) for field in kernel_options(options)} == kernel_options(options)
        assert (config.group, config.split, config.layout == "varlen") == (1, False, layout == "packed")
        assert IS_DEQUANTIZED[0] not in plan.copies and (config.takes_maxima or "softcap" not in options)
        assert not any("few queries" in note for note in plan.notes)


@LAYOUT
@pytest.mark.parametrize("name", IN_16_BITS)
def test_explain_says_that_16_bits_serve(name: str, layout: str) -> None:
    plan = EXPLAINS[layout](*draw(), **HOPPER, **IN_16_BITS[name])
    assert plan.copies == IS_DEQUANTIZED and plan.config.dtype == "bfloat16"
    assert plan.backend == ("ampere" if name == "ampere" else "hopper")


@LAYOUT
@pytest.mark.parametrize(
    ("head_dims", "is_served"),
    [
        ((80, 80), True),
        ((64, 256), True),
        ((192, 128), True),
        ((72, 64), False),
        ((64, 24), False),
        ((64, 264), False),
    ],
)
def test_head_dims(head_dims: tuple[int, int], is_served: bool, layout: str) -> None:
    plan = EXPLAINS[layout](*draw(head_dims=head_dims), softcap=30.0, **HOPPER)
    assert isinstance(plan.config, Fp8ForwardConfig) == is_served
    assert (plan.copies == IS_DEQUANTIZED) != is_served


def test_what_else_16_bits_serve() -> None:
    """Two levels, GPUs without the kernel, and no query or key."""
    two_levels = explain(*draw(), softcap=30.0, two_level_accumulation=True, **HOPPER)
    ampere = explain(*draw(), softcap=30.0, device_capability=(8, 9))
    empty = explain(*draw((0, 33)), softcap=30.0, **HOPPER)
    for plan in (two_levels, ampere, empty):
        assert plan.copies == IS_DEQUANTIZED and not isinstance(plan.config, Fp8ForwardConfig)


@pytest.mark.parametrize(
    "shapes", [((2, 45, 4, 64), (2, 33, 2, 64)), ((90, 4, 64), (66, 2, 64))], ids=["dense", "packed"]
)
def test_the_rule(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    both, mask = ScoreKind(has_softcap=True, has_sinks=True), MaskSpec(True)
    assert serves_in_e4m3(*shapes, H200, mask, both, None, False)
    assert serves_in_e4m3(*shapes, H200, MaskSpec(False, 7, 3, 20), both, "hopper", False)
    assert not serves_in_e4m3(*shapes, H200, mask, both, None, True)
    assert not serves_in_e4m3(*shapes, A100, mask, both, None, False)
    assert not serves_in_e4m3(*shapes, H200, mask, both._replace(has_alibi=True), None, False)
    assert not serves_in_e4m3(*shapes, H200, mask, both._replace(has_dropout=True), None, False)
    for backend in ("ampere", "torch", "reference"):
        assert not serves_in_e4m3(*shapes, H200, mask, both, backend, False)


@LAYOUT
@pytest.mark.parametrize("rows", [45, 1500])
@pytest.mark.parametrize("name", SERVED)
def test_what_the_kernel_is_given(name: str, rows: int, layout: str, gpu: FakeGpu) -> None:
    """V in rows, or transposed before, of many queries that see many keys."""
    options, tensors, factors = SERVED[name], draw((rows, rows)), descales()
    found = CALLS[layout](*tensors, softmax_scale=0.2, **factors, **options)
    ((config, arguments),) = gpu.calls
    plan = EXPLAINS[layout](*tensors, softmax_scale=0.2, **factors, **HOPPER, **options)
    assert isinstance(config, Fp8ForwardConfig) and plan.config == config
    given = dict(zip(OF_KERNEL, arguments, strict=True))
    out, lse = found[:2] if isinstance(found, tuple) else (found, None)
    assert out.dtype == torch.bfloat16 and bool((out == 1).all())
    assert lse is None or bool((lse == 0.25).all())
    flat = tensors if layout == "dense" else [x.flatten(0, 1) for x in tensors]
    for x, wanted in zip((given["mQ"], given["mK"]), flat, strict=False):
        assert x.data_ptr() == wanted.data_ptr() and x.shape == wanted.shape
    assert config.v_rows == (rows == 45 or config.window)
    assert not config.v_rows or given["mV"].data_ptr() == flat[2].data_ptr()
    # Scales of heads; that of V is a factor of the output.
    of_q, of_k, of_v = (x[..., None] for x in factors.values())
    for name_, wanted in (("q_scale", of_q.expand(2, 2, 2)), ("k_scale", of_k), ("o_scale", of_v)):
        assert torch.equal(given[name_][:2], wanted) and given[name_].dtype == torch.float32
    assert bool((given["v_scale"] == 1).all()) and given["mean_v"].shape[2] == 0
    assert given["softmax_scale"] == 0.2 and given["softcap"] == options.get("softcap")
    sides = None, None, None
    if "window_size" in options or "attention_chunk" in options:
        left, right = (NO_LIMIT if x < 0 else x for x in options.get("window_size", (-1, -1)))
        right = 0 if config.causal and given["window_right"] == 0 else right
        sides = left, right, options.get("attention_chunk")
    assert (given["window_left"], given["window_right"], given["attention_chunk"]) == sides
    sinks = given["sinks"]
    if "sinks" in options:
        assert sinks.dtype == torch.float32 and sinks.is_contiguous()
        assert torch.equal(sinks, options["sinks"].float())
    else:
        assert sinks is None
    assert (given["sequences"], given["plan"] is None) == ((None, True) if layout == "dense" else (3, False))
    assert given["num_ctas"] == SMS * config.ctas_per_sm


@pytest.mark.filterwarnings("ignore:FP8 attention in 16 bits")
@LAYOUT
@pytest.mark.parametrize("name", [name for name in IN_16_BITS if name != "ampere"])
def test_16_bits_are_given_what_they_serve(name: str, layout: str, gpu: FakeGpu) -> None:
    CALLS[layout](*draw(), **descales(), **IN_16_BITS[name])
    ((config, _),) = gpu.calls
    assert isinstance(config, ForwardConfig) and config.dtype == "bfloat16"


@pytest.mark.filterwarnings("ignore:FP8 attention in 16 bits")
@LAYOUT
def test_gpus_without_the_kernel_get_16_bits(layout: str, gpu: FakeGpu) -> None:
    gpu.target = A100
    CALLS[layout](*draw(), **descales(), softcap=30.0)
    ((config, _),) = gpu.calls
    assert config.dtype == "bfloat16" and not isinstance(config, ForwardConfig)


def test_another_gpu_is_made_current(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    for layout, call in CALLS.items():
        call(*draw(), softcap=30.0, sinks=SINKS)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        call(*draw(), softcap=30.0, sinks=SINKS)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        (_, here), (_, there) = gpu.calls[-2:]
        assert there[-3] == 30.0 and torch.equal(there[-2], here[-2]), layout


@pytest.mark.parametrize("sinks", [SINKS, None], ids=["sinks", "none"])
def test_rows_of_no_sequence_have_no_sink(sinks: Tensor | None, gpu: FakeGpu) -> None:
    """To the kernel they are rows without keys, whose LSE is their sink."""
    q, k, v = (x.flatten(0, 1) for x in draw())
    case = Case((45, 40), (33, 33), behind=5)
    options = {"softcap": 9.0, "sinks": sinks, "return_attn_probs": True, "exact_lse": False}
    _, lse, *_ = flash_attn_varlen_func(q, k, v, **lengths_of(case), **options)
    assert len(gpu.calls) == 1 and bool((lse[:, :85] == 0.25).all())
    assert bool((lse[:, 85:] == (0.25 if sinks is None else -math.inf)).all())


def found_anew(*given: Any, **options: Any) -> Any:
    raise AssertionError("found anew")


@LAYOUT
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sinks_that_are_a_parameter_are_found_again(
    layout: str, dtype: torch.dtype, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As models have them: their numbers are those of the call. Where a gradient of them is wanted, they are not."""
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    for module in (descaled_again, packed_scripts):
        monkeypatch.setattr(module, "current_device", lambda: 0)
    for module in (descaled_again, packed_descaled_again, packed_scripts):
        monkeypatch.setattr(module, "kept_argument", lambda x: x)
    for module in (descaled_again, packed_descaled_again):
        monkeypatch.setattr(module, "target_of", lambda device: gpu.target)
    sinks, call = torch.nn.Parameter(SINKS.to(dtype)), CALLS[layout]
    options = {"causal": True, "window_size": (9, 0), "sinks": sinks}
    with torch.no_grad():
        for _ in range(2):
            call(*draw(), **options)
        monkeypatch.setattr(api, "_call_operator", found_anew)
        monkeypatch.setattr(varlen_function, "_call_operator", found_anew)
        for number in (1.0, 2.0):
            sinks.fill_(number)
            call(*draw(), **options)
            (given,) = [x for x in gpu.calls[-1][1] if isinstance(x, Tensor) and x.shape == (4,)]
            assert given.dtype == torch.float32 and given.tolist() == [number] * 4
    with pytest.raises(AssertionError, match="found anew"):
        call(*draw(), **options)
