"""What the GPU tests share: kernels compiled ahead, poisoned outputs, a watchdog, and the error budget.

Run with ``pytest -m gpu tests/gpu``. Every output buffer of the public functions is filled with NaN before
the launch, in every test, so that an element which the kernel does not write fails whatever test meets it.
"""

from __future__ import annotations

import faulthandler
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch import Tensor

from cute_kernels.addition.config import PARTS, AdditionConfig
from cute_kernels.ampere.backward.config import shipped_ampere_backward_kernels
from cute_kernels.ampere.config import shipped_ampere_forward_configs
from cute_kernels.copies.config import THREADS, THREADS_OF_FEW, CopiesConfig
from cute_kernels.merge.config import MergeConfig
from hopper.backward.shipped import shipped_backward_kernels
from hopper.forward.tilings import shipped_forward_configs
from hopper_attention import (
    compile_cache,
    descaled_again,
    device_memory,
    flash_attn_func,
    fp8_at_once,
    fp8_rules,
    parts_again,
)
from hopper_attention.checks import FULL_WINDOW
from hopper_attention.launch import fp8, packed_forward, packed_fp8
from hopper_attention.launch.base import ResultSpec
from hopper_attention.reference import attention_naive, attention_standard
from tests.c_library import Library
from tests.gpu.c_calls import open_library

WATCHDOG_S = 240
"""A test that takes this long hangs: its traceback is printed and the run ends."""

LSE_TOLERANCE = 2e-4
LSE_RELATIVE = 1e-5
"""An LSE is as large as the largest score, which float32 holds to about 1e-6 of itself."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="needs a GPU of compute capability 9.0; this machine has none")
    available = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    for item in items:
        if item.get_closest_marker("gpu") and not available:
            item.add_marker(missing)


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda"


def serve_tiles(monkeypatch: pytest.MonkeyPatch, few: bool) -> Iterator[bool]:
    """Serve FP8 as where tiles are few, or as where they are many, however many there are."""

    def forget() -> None:
        for cache in (fp8._find_flat, fp8.find_fp8_launch, fp8_at_once.find_at_once):
            cache.cache_clear()
        again = parts_again.remembered, parts_again.of_any_length, parts_again.in_memory
        for kept in (*again, descaled_again.remembered, fp8_at_once.calls_at_once):
            kept.cache_clear()

    monkeypatch.setattr(fp8_rules, "are_few_tiles", lambda *sizes: few)
    forget()
    yield few
    forget()


@pytest.fixture
def usual_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """FP8 tiles as where there are many: most tests have few."""
    yield from serve_tiles(monkeypatch, False)


@pytest.fixture(params=[False, True], ids=["many tiles", "few tiles"])
def few_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """FP8 tiles as where there are many, and where there are few."""
    yield from serve_tiles(monkeypatch, request.param)


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels(device: str) -> None:
    """All shipped kernels, compiled in parallel before the first test needs one. A file whose tests need few of them
    has a fixture of this name."""
    archs = ("sm_90a",)
    ampere = *shipped_ampere_forward_configs(archs), *shipped_ampere_backward_kernels(archs)
    compile_together((*shipped_forward_configs(), *shipped_backward_kernels(), *ampere))


def compile_for_ranks(dtype: str, head_dim: int) -> None:
    """The shipped kernels of a dtype and head_dim, and those that merge, add up gradients and exchange heads."""
    shipped = *shipped_forward_configs(), *shipped_backward_kernels()
    sizes = dtype, head_dim, head_dim
    kinds = [(config, getattr(config, "config", config)) for config in shipped]
    wanted = [config for config, of in kinds if (of.dtype, of.head_dim, of.head_dim_v) == sizes]
    merges = [MergeConfig("sm_90a", dtype, in_float32) for in_float32 in (True, False)]
    additions = [AdditionConfig("sm_90a", dtype, parts) for parts in PARTS]
    # One tensor, three or five, to each of two, three or four ranks.
    kinds = (1, False), (1, True), (3, False), (3, True), (5, False)
    copies = [
        CopiesConfig("sm_90a", dtype, n, ranks, g, threads)
        for ranks in (2, 3, 4)
        for n, g in kinds
        for threads in (THREADS, THREADS_OF_FEW)
    ]
    compile_together([*wanted, *merges, *additions, *copies])


def compile_together(configs: Sequence[Any]) -> None:
    """Compile what is missing, once: of several test processes the first does, and the others find it."""
    with FileLock(compile_cache.cache_dir() / "gpu_tests.lock"):
        results = compile_cache.compile_all(tuple(configs), min(os.cpu_count() or 1, 16))
    assert {result.config.name: result.error for result in results if result.error} == {}


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def poisoned_outputs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output buffers start as NaN in place of whatever memory held, but where host time is measured: each takes a
    launch of torch's."""
    if request.node.get_closest_marker("host_time"):
        return
    empty_out, empty_lse = ResultSpec.empty_out, ResultSpec.empty_lse
    monkeypatch.setattr(ResultSpec, "empty_out", lambda spec, q: empty_out(spec, q).fill_(math.nan))
    monkeypatch.setattr(ResultSpec, "empty_lse", lambda spec, q: empty_lse(spec, q).fill_(math.nan))
    for module in (packed_forward, packed_fp8):
        monkeypatch.setattr(module, "empty_results", partial(poisoned_results, module.empty_results))
    make = device_memory.empty_on_gpu

    def poisoned(*facts: Any) -> Tensor:
        made = make(*facts)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(device_memory, "empty_on_gpu", poisoned)


def poisoned_results(
    empty_results: Callable[..., tuple[Tensor, Tensor]], *options: Any
) -> tuple[Tensor, ...]:
    return tuple(x.fill_(math.nan) for x in empty_results(*options))


@pytest.fixture(scope="session")
def library(compiled_kernels: None, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The C library."""
    return open_library(tmp_path_factory.mktemp("c_library"))


@dataclass(frozen=True)
class Inputs:
    """q (batch, seqlen_q, heads, head_dim), k and v (batch, seqlen_k, kv_heads, ...)."""

    q: Tensor
    k: Tensor
    v: Tensor


Draw = Callable[..., Inputs]


@pytest.fixture(scope="session")
def draw(device: str) -> Draw:
    """Draws N(0, 1) inputs; every call takes fresh numbers from one seeded stream."""
    generator = torch.Generator(device).manual_seed(2026)

    def draw(
        dtype: torch.dtype,
        batch: int,
        seqlens: tuple[int, int],
        heads: tuple[int, int],
        head_dim: int,
        head_dim_v: int = 0,
    ) -> Inputs:
        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        q = normal(batch, seqlens[0], heads[0], head_dim)
        k = normal(batch, seqlens[1], heads[1], head_dim)
        return Inputs(q, k, normal(batch, seqlens[1], heads[1], head_dim_v or head_dim))

    return draw


def find_errors(
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    softmax_scale: float | None = None,
    window: tuple[int, int] = FULL_WINDOW,
    chunk: int = 0,
) -> list[str]:
    """What is wrong with a result, against float64.

    The budget: twice the error of the same formula in plain PyTorch at the input dtype, plus the rounding of
    the output. Rows that see no key must be exactly 0, with an LSE of exactly -inf.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    options = {"causal": causal, "softmax_scale": softmax_scale}
    options |= {"window_left": window[0], "window_right": window[1], "attention_chunk": chunk}
    oracle, oracle_lse = attention_naive(q, k, v, **options)
    plain = attention_standard(q, k, v, **options)
    wrong = []
    if out.shape != oracle.shape or lse.shape != oracle_lse.shape or out.dtype != q.dtype:
        return [f"shapes {tuple(out.shape)}, {tuple(lse.shape)}, dtype {out.dtype}"]
    if oracle.numel() == 0:
        return []
    rounding = torch.finfo(q.dtype).eps / 2 * oracle.abs().max().item()
    allowed = 2 * (plain.double() - oracle).abs().max().item() + rounding
    error = (out.double() - oracle).abs().max().item()
    # "not <=", here and below, so that NaN counts as wrong.
    if not error <= allowed:
        wrong.append(f"error {error:.3e}, allowed {allowed:.3e}")
    hidden = oracle_lse == -math.inf
    lse_error = (lse.double() - oracle_lse)[~hidden].abs()
    lse_allowed = LSE_TOLERANCE + LSE_RELATIVE * oracle_lse[~hidden].abs()
    if not bool((lse_error <= lse_allowed).all()):
        wrong.append(f"LSE error {lse_error.max().item():.3e}, allowed {LSE_TOLERANCE:.0e}")
    if not bool((lse[hidden] == -math.inf).all() and (out.transpose(1, 2)[hidden] == 0).all()):
        wrong.append("rows that see no key are not 0 with LSE -inf")
    return wrong


Check = Callable[..., list[str]]


@pytest.fixture(scope="session")
def judge() -> Check:
    """``find_errors``: what is wrong with a result that is already there."""
    return find_errors


@pytest.fixture
def backend() -> str:
    """What ``attend`` and ``check`` run, unless a module has ``BACKENDS`` that its tests run on."""
    return "hopper"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    backends = getattr(metafunc.module, "BACKENDS", None)
    if backends and "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", backends)


Attend = Callable[..., Any]


@pytest.fixture
def attend(backend: str) -> Attend:
    """``flash_attn_func`` on the backend under test."""
    return partial(flash_attn_func, backend=backend)


@pytest.fixture
def check(attend: Attend) -> Check:
    """Runs ``attend`` on inputs and returns what is wrong with its result; empty if nothing is."""

    def check(
        inputs: Inputs,
        causal: bool,
        softmax_scale: float | None = None,
        window: tuple[int, int] = FULL_WINDOW,
        chunk: int = 0,
    ) -> list[str]:
        options = {"window_size": window, "attention_chunk": chunk, "return_attn_probs": True}
        out, lse = attend(inputs.q, inputs.k, inputs.v, softmax_scale, causal, **options)
        return find_errors(inputs, out, lse, causal, softmax_scale, window, chunk)

    return check
