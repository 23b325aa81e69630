"""Kernels of chosen configs as rows, with fake kernels in the place of compiled ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hopper.config import Registers
from hopper.forward.fp8.tilings import select_fp8_forward_config
from hopper.forward.tilings import select_forward_config
from hopper_attention.compile_cache import Compilation
from hopper_attention.experiments.bench import config_peers as bench_variants
from hopper_attention.experiments.bench import run as bench
from hopper_attention.experiments.bench.machine import NoGauge
from hopper_attention.experiments.bench.peers import Setting
from hopper_attention.experiments.bench.results import Failed
from hopper_attention.experiments.bench.spec import Problem
from hopper_attention.experiments.bench.timing import Effort
from hopper_attention.quantization import QuantizedTensor, TransposedV
from hopper_attention.reference import attention_naive
from tests.python.fake_gpu import forget_launchers, pretend

PROBLEM = Problem("float16", 1, 256, 256, 2, 1, 64, 64, causal=True)
BASE = select_forward_config("float16", 64, 64, True, 256)
FP8 = select_fp8_forward_config(64, 64, True, "float16", 256)
CTAS = 7


def test_labels_name_what_differs() -> None:
    assert bench_variants.label(BASE, BASE) == "shipped"
    changed = replace(BASE, tile_n=96, registers=Registers(232, 40), pipelined=False)
    assert bench_variants.label(changed, BASE) == "n96 r232/40 pipelined=False"
    poly = replace(FP8, polynomial_pairs=5)
    assert bench_variants.label(poly, FP8) == "polynomial_pairs=5"


def test_invalid_configs_have_a_reason() -> None:
    assert bench_variants.why_invalid(BASE) == ""
    assert bench_variants.why_invalid(replace(BASE, tile_n=24)).startswith("tile_n is 24")


def test_only_what_the_cache_lacks_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other, broken = replace(BASE, tile_n=96), replace(BASE, tile_n=80)
    compiled: list[str] = []

    def compile_all(configs: list, jobs: int, on_progress: Callable) -> tuple[Compilation, ...]:
        compiled.extend(config.name for config in configs)
        error = f"CompilerError: \x1b[91merror:\x1b[0m {'too few registers ' * 20}\nline 2"
        return tuple(Compilation(c, tmp_path, 1.0, error=error if c == broken else "") for c in configs)

    monkeypatch.setattr(bench_variants, "cached_kernels", lambda: (tmp_path / f"{BASE.name}.o",))
    monkeypatch.setattr(bench_variants, "compile_all", compile_all)
    failures = bench_variants.compile_missing([BASE, other, broken, other], 2)
    assert compiled == [other.name, broken.name]
    assert list(failures) == [broken.name]
    message = failures[broken.name]
    assert message.startswith("CompilerError: error: too few registers")
    assert message.endswith("...") and len(message) == bench_variants.MAX_MESSAGE + 3
    assert bench_variants.compile_missing([BASE], 2) == {}


@pytest.fixture
def on_fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Kernels run on the CPU; what asks for a GPU is answered."""
    pretend(monkeypatch, multiprocessors=CTAS)
    yield monkeypatch
    forget_launchers()


def right_kernel(q, k, v, out, lse, counter, softmax_scale, num_ctas) -> None:
    assert num_ctas == CTAS * BASE.ctas_per_sm and lse.shape == (1, 2, 0) and softmax_scale == 0.125
    out.copy_(attention_naive(q, k, v, causal=True, softmax_scale=softmax_scale)[0])


def right_fp8_kernel(
    q,
    k,
    vt,
    out,
    lse,
    counter,
    q_scale,
    k_scale,
    v_scale,
    o_scale,
    mean_v,
    block_q,
    block_k,
    softmax_scale,
    num_ctas,
) -> None:
    assert num_ctas == CTAS and block_k == FP8.tile_n and bool((o_scale == 1).all()) and not mean_v.numel()
    parts = (
        QuantizedTensor(q, q_scale, block_q),
        QuantizedTensor(k, k_scale, block_k),
        TransposedV(vt, v_scale, block_k, PROBLEM.seqlen_k),
    )
    exact = attention_naive(*(part.dequantize() for part in parts), causal=True, softmax_scale=softmax_scale)
    out.copy_(exact[0])


def idle_kernel(*arguments: object) -> None:
    """Launches and writes nothing."""


def run(kernels: dict[str, Callable], on_fake_gpu: pytest.MonkeyPatch, *configs) -> dict:
    on_fake_gpu.setattr(bench_variants, "get_forward", lambda config: kernels[config.name])
    effort = Effort(1e-4, 1, 1, 1.0)
    with bench.open_bench(Setting("cpu"), effort, NoGauge("none"), 0) as opened:
        peers = [bench_variants.variant_peer(config.name, config) for config in configs]
        return opened.run_cell(PROBLEM, peers, 1).peers


def test_a_kernel_is_launched_as_the_library_would(on_fake_gpu: pytest.MonkeyPatch) -> None:
    results = run({BASE.name: right_kernel}, on_fake_gpu, BASE)
    assert not isinstance(results[BASE.name], Failed), results
    assert results[BASE.name].note == BASE.name and results[BASE.name].error < 8e-4


def test_an_fp8_kernel_gets_blocks_as_wide_as_its_tile(on_fake_gpu: pytest.MonkeyPatch) -> None:
    results = run({FP8.name: right_fp8_kernel}, on_fake_gpu, FP8)
    assert not isinstance(results[FP8.name], Failed), results
    # Held against the quantized inputs, the fake kernel is right to the rounding of its output.
    assert results[FP8.name].error < 1e-3


def test_a_kernel_that_writes_nothing_does_not_pass_for_the_one_before_it(
    on_fake_gpu: pytest.MonkeyPatch,
) -> None:
    lazy = replace(BASE, tile_n=96)
    results = run({BASE.name: right_kernel, lazy.name: idle_kernel}, on_fake_gpu, BASE, lazy)
    assert results[lazy.name] == Failed(
        f"wrong result: {2 * 256 * 64} of {2 * 256 * 64} outputs are not finite"
    )


def test_variants_need_a_gpu_and_are_listed_once() -> None:
    peers = bench_variants.peers_of([BASE, BASE, FP8])
    assert [peer.name for peer in peers] == [BASE.name, FP8.name]
    assert peers[0].why_unavailable(Setting("cpu")).startswith("needs a CUDA device")
    assert bench_variants.rounding_for(128) is bench_variants.rounding_for(128)
    assert peers[1].limits("float16") == bench_variants.kernel_limits("float16")
