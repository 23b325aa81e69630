"""The scripts around the forward benchmark: tuning, sanitizing and accuracy, with fake kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import few_blocks_case, pieces_case, rmse, sanitize, tune
from cute_kernels.ampere.backward.config import shipped_ampere_backward_configs
from cute_kernels.ampere.config import select_ampere_forward_config
from cute_kernels.backward.step import FEW_KEYS
from cute_kernels.problem import VARLEN
from hopper.backward.config import BackwardConfig
from hopper.backward.shipped import shipped_backward_configs
from hopper.config import ForwardConfig, Registers
from hopper.forward.tilings import select_forward_config, shipped_forward_configs
from hopper.quantize.config import QuantizeConfig, shipped_quantize_configs
from hopper_attention import backward_rules, compile_cache, quantize_qkv
from hopper_attention.experiments.bench import peers as bench_peers
from hopper_attention.experiments.bench.spec import Problem
from hopper_attention.experiments.rmse.methods import METHODS
from hopper_attention.experiments.rmse.spec import RmseExperiment
from hopper_attention.launch import forward, fp8
from hopper_attention.launch.quantize import Outputs, QuantizeLauncher, output_pieces
from hopper_attention.problem import GradientProblem
from hopper_attention.quantization import Fp8Quantization
from hopper_attention.reference.tiled import attention_tiled
from hopper_attention.reference.tiled_backward import tiled_backward
from tests.python.fake_gpu import SMS, forget_launchers, pretend
from tests.python.test_few_fp8_blocks import Kernels as FewKernels
from tests.python.test_paged_forward import Kernels

SETTING = bench_peers.Setting("cpu")
PROBLEM = Problem("bfloat16", 1, 512, 512, 2, 2, 128, 128, causal=True)
SHIPPED = select_forward_config("bfloat16", 128, 128, True, 512)


# Tuning


def test_variants_are_all_combinations_on_the_shipped_config() -> None:
    other = SHIPPED.tile_n - 16
    variants = tune.make_variants(PROBLEM, [f"tile_n={SHIPPED.tile_n},{other}", "pipelined=true,false"])
    assert next(iter(variants.configs.items())) == ("shipped", SHIPPED)
    assert variants.configs == {
        "shipped": SHIPPED,
        "pipelined=False": replace(SHIPPED, pipelined=False),
        f"n{other}": replace(SHIPPED, tile_n=other),
        f"n{other} pipelined=False": replace(SHIPPED, tile_n=other, pipelined=False),
    }
    assert variants.skipped == {}


def test_variants_that_cannot_be_built_are_left_out_with_the_reason() -> None:
    variants = tune.make_variants(PROBLEM, ["tile_n=8", "registers=240/24"])
    assert list(variants.configs) == ["shipped"]
    assert [reason.split(",")[0] for reason in variants.skipped.values()] == ["tile_n is 8"]


def test_values_are_of_the_fields_type() -> None:
    varied = tune.parse_vary(["registers=232/40", "stages=2,3", "ping_pong=false", "dtype=float16"], SHIPPED)
    assert varied == {
        "registers": [Registers(232, 40)],
        "stages": [2, 3],
        "ping_pong": [False],
        "dtype": ["float16"],
    }


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("tile_k=64", "vary is 'tile_k=64', allowed: FIELD=VALUE"),
        ("tile_n=wide", "tile_n is 'wide', allowed: int"),
        ("ping_pong=1", "ping_pong is '1', allowed: true or false"),
        ("registers=240", "registers is '240', allowed: consumer/producer"),
    ],
)
def test_a_value_that_cannot_be_read_is_named(option: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tune.parse_vary([option], SHIPPED)


# Sanitizing


def fake_kernels(change: Callable[[Tensor, Tensor, Tensor], None]) -> Callable[[ForwardConfig], object]:
    """Kernels that are the tiled reference, with ``change`` applied to (out, lse, tile_counter) after it."""

    def get_forward(config: ForwardConfig) -> object:
        def kernel(q, k, v, out, lse, counter, softmax_scale, num_ctas) -> None:
            # A stage of Q is filled again only by a third tile of a CTA where there are two.
            assert num_ctas == (1 if config.q_stages == 2 else 2)
            right, right_lse = attention_tiled(q, k, v, causal=config.causal, softmax_scale=softmax_scale)
            out.copy_(right)
            lse.copy_(right_lse)
            change(out, lse, counter)

        return kernel

    return get_forward


def leave(out: Tensor, lse: Tensor, counter: Tensor) -> None:
    pass


def spoil_out(out: Tensor, lse: Tensor, counter: Tensor) -> None:
    out[0, -1, 0, 3] = math.nan


def spoil_lse(out: Tensor, lse: Tensor, counter: Tensor) -> None:
    lse[0, 1, 7] += 0.01


def spoil_counter(out: Tensor, lse: Tensor, counter: Tensor) -> None:
    counter[1] = 5


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (leave, ""),
        (spoil_out, "error nan, allowed"),
        (spoil_lse, "LSE error 1.00e-02, allowed 2e-04"),
        (spoil_counter, "tile counter left at [0, 5]"),
    ],
)
def test_the_sanitizers_case_tells_right_from_wrong(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor, Tensor, Tensor], None], wrong: str
) -> None:
    monkeypatch.setattr(sanitize, "get_forward", fake_kernels(change))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    verdict = sanitize.run_case(shipped_forward_configs()[0], "cpu")
    assert verdict.startswith(wrong) and bool(verdict) == bool(wrong)


def test_the_sanitizers_case_has_partial_tiles_and_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def note(out: Tensor, lse: Tensor, counter: Tensor) -> None:
        seen.append(out.shape)

    monkeypatch.setattr(sanitize, "get_forward", fake_kernels(note))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    config = shipped_forward_configs()[-1]
    assert sanitize.main(["--device", "cpu", "--family", "forward", "--config", config.name]) == 0
    assert seen == [(1, config.tile_m + 17, 2, config.head_dim_v)]


def test_the_sanitizer_runs_caches_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels()
    pretend(monkeypatch, forward)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for module in (sanitize, compile_cache):
        monkeypatch.setattr(module, "get_forward", kernels.load)
    for config in sanitize.paged_configs()[:2]:
        assert sanitize.run_paged_case(config, "cpu") == ""
    assert [call[1].shape[1] for call in kernels.calls] == [16, 2 * 128 + 8]
    monkeypatch.setattr(kernels, "attend", lambda *given: None)
    assert sanitize.run_paged_case(config, "cpu").startswith("error nan")
    forget_launchers()


def test_the_sanitizer_runs_quantizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the right arguments a fake kernel makes what the twin does; then one byte less."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(sanitize, "empty_outputs", empty_outputs_on_cpu)
    spoiled = 0

    def find(config: QuantizeConfig, device: torch.device) -> QuantizeLauncher:
        def kernel(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> None:
            c = Fp8Quantization(block_q=config.block_q, block_k=config.block_k)
            parts = quantize_qkv(q, k, v, quantization=c)
            made = [x.data for x in (parts.q, parts.k, parts.v)] + [
                x.scale for x in (parts.q, parts.k, parts.v)
            ]
            *outputs, signs, signs_v, mean_k, mean_v, num_ctas = given
            assert signs.numel() and mean_v.numel() and not signs_v.numel() + mean_k.numel()
            assert num_ctas == sanitize.CTAS
            for output, right in zip(outputs, made, strict=True):
                output.copy_(right.to(output.dtype))
            outputs[2].view(torch.uint8)[0, 0, 0, 0] += spoiled

        return QuantizeLauncher(0, config, kernel, 3, config.largest_codes)

    monkeypatch.setattr(sanitize, "find_quantizer", find)
    configs = [c for c in shipped_quantize_configs() if c.head_dim == 64][:2]
    assert [sanitize.run_quantize_case(config, "cpu") for config in configs] == ["", ""]
    spoiled = 1
    assert sanitize.run_quantize_case(configs[0], "cpu") == "vt8 differs from its twin"


def empty_outputs_on_cpu(config: QuantizeConfig, q: Tensor, k: Tensor, v: Tensor) -> Outputs:
    codes = getattr(torch, config.code_dtype)
    pieces = output_pieces(config.block_q, config.block_k, q.shape, k.shape, v.shape, codes)
    return Outputs(*[torch.empty(piece.shape, dtype=piece.dtype) for piece in pieces])


def test_the_sanitizer_runs_steps_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    steps = sanitize.decode_steps()
    assert [sanitize.run_decode_case(step, "cpu") for step in steps] == [""] * len(steps)
    assert len({step.name for step in steps}) == len(steps)
    given, attend = [], sanitize.flash_attn_with_kvcache

    def lose_a_row(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        given.append((options["cache_seqlens"].tolist(), options["page_table"].flatten().tolist()))
        out, lse = attend(*tensors, **options)
        return out.index_fill(2, torch.tensor([1]), 0.0), lse

    monkeypatch.setattr(sanitize, "flash_attn_with_kvcache", lose_a_row)
    assert sanitize.run_decode_case(steps[0], "cpu").startswith("error ")
    assert given[0] == ([261, 3, 0], [2, 1, 0]), "pages in reverse order"
    assert given[1:] == [
        ([x] * 3, [y] * 3) for x, y in ((2**31 - 1, -(2**31)), (-(2**31), 2**31 - 1), (267, -1))
    ]


def test_the_sanitizer_runs_what_has_no_wgmma(monkeypatch: pytest.MonkeyPatch) -> None:
    config = select_ampere_forward_config("bfloat16", 64, 64, True, "sm_90a")

    def kernel(q, k, v, out, lse, softmax_scale) -> None:
        for target, right in zip((out, lse), attention_tiled(q, k, v, causal=True), strict=True):
            target.copy_(right)

    monkeypatch.setattr(sanitize, "get_forward", lambda asked: kernel if asked == config else None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert sanitize.run_case(config, "cpu") == ""

    asked = []

    def differentiate(dout, q, k, v, out, lse, scale, causal, *, deterministic, backend):
        asked.append((deterministic, backend))
        return tiled_backward(dout, None, q, k, v, out, lse, causal=causal, softmax_scale=scale)

    monkeypatch.setattr(sanitize, "run_backward", differentiate)
    for configs in (shipped_backward_configs(), shipped_ampere_backward_configs(("sm_90a",))):
        assert [sanitize.run_backward_case(config, "cpu") for config in configs[:2]] == ["", ""]
    assert asked == [(False, "hopper"), (True, "hopper"), (False, "ampere"), (True, "ampere")]


@dataclass(frozen=True)
class PackedGradients:
    """A launcher of packed sequences that has the tiled reference for its kernels, of the first one alone."""

    change: Callable[[Tensor], None]
    grid: tuple[int, ...] = (132,)

    def __call__(self, dout, dlse, q, k, v, out, lse, bounds, *rest) -> tuple[Tensor, ...]:
        assert self.grid == (sanitize.CTAS,) and bounds.tolist() == [0, q.shape[0], q.shape[0]]
        rows = (x[None] for x in (q, k, v, out, lse))
        found = tiled_backward(dout[None], dlse, *rows, causal=False, softmax_scale=rest[5])
        self.change(found[0])
        return tuple(x[0] for x in found)


@pytest.mark.parametrize(
    ("change", "wrong"), [(lambda dq: None, ""), (lambda dq: dq[0, 70].zero_(), "error of dq")]
)
def test_the_sanitizer_runs_gradients_of_packed_sequences(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], None], wrong: str
) -> None:
    fake = PackedGradients(change)
    monkeypatch.setattr(sanitize, "make_packed_backward_launcher", lambda config, device: fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    configs = sanitize.packed_backward_configs()
    assert len({config.name for config in configs}) == 2 and all(c.clears_ahead for c in configs)
    verdict = sanitize.run_packed_backward_case(configs[0], "cpu")
    assert verdict.startswith(wrong) and bool(verdict) == bool(wrong)


@dataclass(frozen=True)
class DividedGradients:
    """A launcher that has the tiled reference for its kernels, of a dense batch or of the first packed sequence."""

    config: BackwardConfig
    head_parts: int
    change: Callable[[Tensor], None]
    grid: tuple[int, ...] = (132,)

    def __call__(self, dout, *given) -> tuple[Tensor, ...]:
        assert self.grid == ((sanitize.CTAS,) if self.config.is_persistent else ()) and self.head_parts == 2
        if is_packed := self.config.layout == VARLEN:
            _, *rows = given[:6]
            tensors, scale = [x[None] for x in rows], given[12]
            dout = dout[None]
        else:
            *tensors, scale, _ = given
        options = {"causal": self.config.causal, "softmax_scale": scale}
        found = tiled_backward(dout, None, *tensors, **options)
        self.change(found[1])
        return tuple(x[0] for x in found) if is_packed else found


@pytest.mark.parametrize(
    ("change", "wrong"), [(lambda dk: None, ""), (lambda dk: dk[0, 130].zero_(), "error of dk")]
)
def test_the_sanitizer_runs_gradients_of_divided_heads(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], None], wrong: str
) -> None:
    def find(problem: GradientProblem, device: torch.device, head_parts: int) -> DividedGradients:
        config = backward_rules.select_for(problem, "hopper", (9, 0))
        asked.append(config)
        return DividedGradients(config, head_parts, change)

    def make(config: BackwardConfig, device: torch.device, head_parts: int) -> DividedGradients:
        asked.append(config)
        return DividedGradients(config, head_parts, change)

    asked: list[BackwardConfig] = []
    monkeypatch.setattr(sanitize, "find_divided", find)
    monkeypatch.setattr(sanitize, "make_packed_backward_launcher", make)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    configs = sanitize.divided_heads_configs()
    assert len({config.name for config in configs}) == 15 and all(c.divides_heads for c in configs)
    assert [c.walks_back for c in configs] == [False] * 14 + [True]
    tried = *configs[:7], configs[-1]
    for config in tried:
        verdict = sanitize.run_divided_heads_case(config, "cpu")
        assert verdict.startswith(wrong) and bool(verdict) == bool(wrong)
    assert asked == list(tried)


@dataclass(frozen=True)
class EachGradients:
    """A launcher of packed sequences that has the tiled reference for its kernels, of each one."""

    config: BackwardConfig
    change: Callable[[Tensor], None]
    grid: tuple[int, ...] = (132,)

    def __call__(self, dout, dlse, q, k, v, out, lse, of_q, of_k, *rest) -> tuple[Tensor, ...]:
        assert self.grid == ((sanitize.CTAS,) if self.config.is_persistent else ()) and rest[3] == FEW_KEYS
        found = [torch.zeros_like(x) for x in (q, k, v)]
        for begin, end, first, last in zip(of_q[:-1], of_q[1:], of_k[:-1], of_k[1:], strict=True):
            rows, keys = slice(begin, end), slice(first, last)
            parts = q[None, rows], k[None, keys], v[None, keys], out[None, rows], lse[None, :, rows]
            options = {"causal": self.config.causal, "softmax_scale": rest[4]}
            each = tiled_backward(dout[None, rows], dlse, *parts, **options)
            for x, y, where in zip(found, each, (rows, keys, keys), strict=True):
                x[where] = y[0]
        self.change(found[0])
        return tuple(found)


@pytest.mark.parametrize(
    ("change", "wrong"), [(lambda dq: None, ""), (lambda dq: dq[160].zero_(), "error of dq")]
)
def test_the_sanitizer_runs_gradients_of_few_keys(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], None], wrong: str
) -> None:
    monkeypatch.setattr(
        sanitize, "make_packed_backward_launcher", lambda config, device: EachGradients(config, change)
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    configs = sanitize.few_keys_configs()
    assert len({config.name for config in configs}) == 8 and all(c.few_keys for c in configs)
    for config in configs:
        verdict = sanitize.run_few_keys_case(config, "cpu")
        assert verdict.startswith(wrong) and bool(verdict) == bool(wrong)


@pytest.mark.parametrize(("family", "count"), [("ampere_forward", 28), ("ampere_backward", 48)])
def test_the_sanitizer_has_every_kernel_without_wgmma(
    capsys: pytest.CaptureFixture[str], family: str, count: int
) -> None:
    assert sanitize.main(["--list", "--family", family]) == 0
    names = capsys.readouterr().out.split()
    assert len(names) == count and all("_sm_90a_" in name for name in names)


# Accuracy


def test_errors_are_measured_peer_by_peer_on_the_draws_of_the_table() -> None:
    experiment = RmseExperiment(seqlen=256, heads=2, head_dim=64)
    peers = [bench_peers.PEERS["torch"], replace(bench_peers.PEERS["torch"], name="broken", prepare=broken)]
    errors, table = rmse.measure(peers, experiment, SETTING)
    # The formula in 16 bit on these inputs: 1e-4 to 3e-4 at every length (paper, table 3).
    assert 5e-5 < errors["torch"] < 5e-4
    assert errors["broken"] == {"failed": "no such kernel"}
    # The table has the same computation as a row of its own, and none of the peers'.
    names = {entry.method for entry in (*table.rows, *table.left_out)}
    assert names == {method.name for method in METHODS}
    assert errors["torch"] == pytest.approx(table.row("standard").rmse, rel=0.2)


def broken(*given: object) -> bench_peers.Prepared:
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize(
    ("change", "wrong"), [(lambda dk: None, ""), (lambda dk: dk[0, 130].zero_(), "error of dk")]
)
def test_the_sanitizer_runs_gradients_of_divided_visits(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], None], wrong: str
) -> None:
    @dataclass(frozen=True)
    class InPieces:
        config: BackwardConfig
        grid: tuple[int, ...] = (132,)

        def __call__(self, dout: Tensor, *given: Any) -> tuple[Tensor, ...]:
            *tensors, scale, _ = given
            assert self.grid == (pieces_case.CTAS,)
            found = tiled_backward(dout, None, *tensors, causal=self.config.causal, softmax_scale=scale)
            change(found[1])
            return found

    def find(problem: GradientProblem, device: torch.device, division: Any) -> InPieces:
        asked.append(backward_rules.select_for(problem, "hopper", (9, 0)))
        assert division == pieces_case.DIVISION
        return InPieces(asked[-1])

    asked: list[Any] = []
    monkeypatch.setattr(pieces_case, "find_in_pieces", find)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    configs = pieces_case.pieces_configs()
    assert sanitize.FAMILIES["divided-visits"] == (pieces_case.pieces_configs, pieces_case.run_pieces_case)
    for config in configs:
        verdict = pieces_case.run_pieces_case(config, "cpu")
        assert verdict.startswith(wrong) and bool(verdict) == bool(wrong)
    assert asked == list(configs) and len({config.name for config in configs}) == 6


def test_the_sanitizer_runs_few_queries_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of a tile's keys, and what adds them up; then a scale that is another head's."""
    kernels = FewKernels()
    pretend(monkeypatch, fp8)
    for getter in ("get_forward", "get_serving"):
        monkeypatch.setattr(compile_cache, getter, kernels.load)
    monkeypatch.setattr(few_blocks_case, "index_of", lambda device: 0)
    monkeypatch.setattr(few_blocks_case, "CTAS", SMS)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    configs = few_blocks_case.few_blocks_configs()
    assert len({config.name for config in configs}) == len(configs) == 112
    assert sanitize.FAMILIES["few-blocks"][1] is few_blocks_case.run_few_blocks_case
    for config in configs[::9]:
        assert few_blocks_case.run_few_blocks_case(replace(config, ctas_per_sm=1), "cpu") == ""
        assert kernels.calls[-1]["splits"] == (few_blocks_case.SPLITS if config.split else 1)
    attend = kernels.attend
    monkeypatch.setattr(kernels, "attend", lambda c, *x: attend(c, *x[:6], x[6].roll(1, 1), *x[7:]))
    for config in configs[::40]:
        wrong = few_blocks_case.run_few_blocks_case(replace(config, ctas_per_sm=1), "cpu")
        assert wrong.startswith("error ") and wrong.endswith("allowed 2e-2")
    forget_launchers()
