"""Error of every precision this library offers, on inputs with outliers.

The experiment of FlashAttention-3 (section 4.3, table 3): Q, K and V are drawn from
N(0, 1) + N(0, 100) * Bernoulli(0.001), so that one element in a thousand has a standard deviation of
ten, and the root mean square error of each implementation's output is taken against a float64 oracle.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

OUTLIER_STD = 10.0
"""Standard deviation of the outliers: the paper's N(0, 100) gives the variance."""

OUTLIER_RATE = 0.001
"""Probability that an element (or, in "token-outliers", a whole token) is an outlier."""

CHANNELS_PER_OUTLIER = 64
"""In "channel-outliers", one channel of so many is an outlier, the same one for every token of a head."""

DISTRIBUTIONS = ("outliers", "token-outliers", "channel-outliers", "normal")
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

ORACLE_ROWS = 1024
"""Rows of Q that the oracle takes at once: a float64 score matrix of 1024 x seqlen is what it holds."""

PAPER_NOTE = (
    "The paper does not state the shape and normalisation of its table: its 16-bit figures compare with each "
    "other, not with ours."
)


@dataclass(frozen=True)
class RmseExperiment:
    """What to measure. Validated when made; the same spec gives the same inputs on every device."""

    batch: int = 1
    seqlen: int = 8448
    heads: int = 1
    head_dim: int = 128
    seeds: int = 1
    causal: bool = False
    dtype: str = "float16"
    device: str = "cpu"
    distribution: str = "outliers"

    def __post_init__(self) -> None:
        for name in ("batch", "seqlen", "heads", "seeds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed: 1 or more")
        if self.head_dim % 8 or not 8 <= self.head_dim <= 256:
            raise ValueError(f"head_dim is {self.head_dim}, allowed: multiples of 8 from 8 to 256")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, allowed: {', '.join(DTYPES)}")
        if self.distribution not in DISTRIBUTIONS:
            raise ValueError(f"distribution is {self.distribution!r}, allowed: {', '.join(DISTRIBUTIONS)}")
        try:
            kind = torch.device(self.device).type
        except RuntimeError:
            raise ValueError(f"device is {self.device!r}, allowed: a torch device, cpu or cuda:0") from None
        if kind == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device is {self.device!r}, but torch finds no CUDA GPU here; allowed: cpu")

    @property
    def is_papers(self) -> bool:
        """Whether the paper's figures may stand beside ours: its inputs, and the shape we take it to mean."""
        shape = (self.seqlen, self.head_dim, self.dtype, self.causal, self.distribution)
        return shape == (8448, 128, "float16", False, "outliers")


@dataclass(frozen=True)
class RmseRow:
    """One line of the table.

    ``paper`` is the figure printed in the paper's table 3, or None where it has none for these inputs;
    ``implementation`` says what computed the row; ``seconds`` is the time that took, the oracle left out.
    """

    method: str
    label: str
    rmse: float
    paper: float | None
    implementation: str
    seconds: float


@dataclass(frozen=True)
class RmseReport:
    experiment: RmseExperiment
    rows: tuple[RmseRow, ...]
    oracle_rms: float
    """Root mean square of the oracle's output: what the errors are small against."""


class Progress(Protocol):
    def __call__(self, done: int, total: int, label: str) -> None:
        """``done`` of ``total`` steps are finished and ``label`` is the next one; empty after the last."""


def draw(shape: Sequence[int], distribution: str, generator: torch.Generator) -> Tensor:
    """Float32 inputs of ``shape`` (batch, seqlen, heads, head_dim), made on the CPU.

    - "outliers": every element alone is an outlier with probability 0.001 (the paper's inputs);
    - "token-outliers": a token is, with all its channels, so that few blocks have any;
    - "channel-outliers": one channel in 64 is, for all tokens, as in the keys of language models;
    - "normal": none is.

    An outlier is N(0, 1) + N(0, 100), the second term having standard deviation 10. That is less than what
    e4m3, a floating-point format, holds at full precision under one scale, so block scales change the root
    mean square error by little on any of these; the rotation helps where outliers are single elements.
    """
    batch, seqlen, heads, head_dim = shape
    base = torch.randn(batch, seqlen, heads, head_dim, generator=generator)
    if distribution == "normal":
        return base
    if distribution == "channel-outliers":
        order = torch.rand(batch, 1, heads, head_dim, generator=generator).argsort(-1)
        outlier = order < math.ceil(head_dim / CHANNELS_PER_OUTLIER)
    else:
        per_token = distribution == "token-outliers"
        where = (batch, seqlen, heads, 1 if per_token else head_dim)
        outlier = torch.rand(where, generator=generator) < OUTLIER_RATE
    return base + OUTLIER_STD * torch.randn(base.shape, generator=generator) * outlier


@dataclass(frozen=True)
class Problem:
    """One draw of Q, K, V, each (batch, seqlen, heads, head_dim) in the 16-bit dtype."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool

    @property
    def on(self) -> str:
        return str(self.q.device.type)


def draw_problem(experiment: RmseExperiment, seed: int) -> Problem:
    e = experiment
    generator = torch.Generator().manual_seed(seed)
    shape = (e.batch, e.seqlen, e.heads, e.head_dim)
    q, k, v = (draw(shape, e.distribution, generator).to(e.device, DTYPES[e.dtype]) for _ in range(3))
    return Problem(q, k, v, e.causal)


def run_standard(problem: Problem) -> tuple[Tensor, str]:
    """16-bit standard attention, every intermediate rounded to 16 bits."""
    from hopper_attention.reference import attention_standard

    p = problem
    return attention_standard(p.q, p.k, p.v, causal=p.causal), f"plain PyTorch on {p.on}"


def run_flash(problem: Problem) -> tuple[Tensor, str]:
    """16-bit attention through the public function, on the backend that the dispatcher picks."""
    from hopper_attention import explain, flash_attn_func

    p = problem
    plan = explain(p.q, p.k, p.v, causal=p.causal)
    out = flash_attn_func(p.q, p.k, p.v, causal=p.causal)
    return out, "hopper kernel" if plan.backend == "hopper" else f"tiled reference on {p.on}"


def run_fp8_per_tensor(problem: Problem) -> tuple[Tensor, str]:
    """The paper's FP8 baseline: one scale a tensor, no rotation."""
    from hopper_attention.reference import attention_fp8_per_tensor

    p = problem
    return attention_fp8_per_tensor(p.q, p.k, p.v, causal=p.causal), f"tiled reference on {p.on}"


def run_fp8(rotate: bool, granularity: str) -> Callable[[Problem], tuple[Tensor, str]]:
    """A method that quantizes to e4m3 as told and attends, on the FP8 kernel or its emulation."""

    def run(problem: Problem) -> tuple[Tensor, str]:
        from hopper_attention.backends import target_of
        from hopper_attention.fp8 import choose_fp8_backend, flash_attn_quantized_func
        from hopper_attention.quantization import Fp8Quantization, quantize_qkv

        p = problem
        quantization = Fp8Quantization(rotate=rotate, granularity=granularity)
        parts = quantize_qkv(p.q, p.k, p.v, quantization=quantization)
        backend = choose_fp8_backend(parts, target_of(p.q.device), None).backend
        out = flash_attn_quantized_func(parts, causal=p.causal, backend=backend)
        return out, "hopper kernel" if backend == "hopper" else f"tiled reference on {p.on}"

    return run


@dataclass(frozen=True)
class Method:
    """A row to be: ``run`` gives the output and what computed it; ``paper`` is table 3's figure for it."""

    name: str
    label: str
    paper: float
    run: Callable[[Problem], tuple[Tensor, str]]


METHODS = (
    Method("standard", "16-bit standard attention", 3.2e-4, run_standard),
    Method("flash", "16-bit flash attention", 1.9e-4, run_flash),
    Method("fp8-per-tensor", "FP8 baseline: per-tensor scales", 2.4e-2, run_fp8_per_tensor),
    Method("fp8-block", "FP8 with block scales", 2.4e-2, run_fp8(False, "block")),
    Method("fp8-rotation", "FP8 with rotation", 9.3e-3, run_fp8(True, "tensor")),
    Method("fp8-both", "FP8 with block scales and rotation", 9.1e-3, run_fp8(True, "block")),
)
"""The rows, in the table's order. The paper's lines for them, from top to bottom: baseline FP16,
FlashAttention-3 FP16, baseline FP8, "no incoherent processing", "no block quant", FlashAttention-3 FP8."""


def oracle_steps(experiment: RmseExperiment) -> int:
    """How many pieces of Q's rows ``compute_oracle`` takes one by one."""
    return experiment.batch * experiment.heads * math.ceil(experiment.seqlen / ORACLE_ROWS)


def compute_oracle(problem: Problem, step: Callable[[], None] = lambda: None) -> Tensor:
    """Attention in float64, ``ORACLE_ROWS`` rows of a head at a time; calls ``step`` after each piece."""
    from hopper_attention.reference import attention_naive

    q, k, v = problem.q, problem.k, problem.v
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            for first in range(0, q.shape[1], ORACLE_ROWS):
                last = min(first + ORACLE_ROWS, q.shape[1])
                # The causal mask is aligned bottom-right: cut the keys off behind the piece's last row.
                keys = last if problem.causal else k.shape[1]
                rows = (slice(b, b + 1), slice(first, last), slice(h, h + 1))
                seen = (slice(b, b + 1), slice(keys), slice(h, h + 1))
                out[rows] = attention_naive(q[rows], k[seen], v[seen], causal=problem.causal)[0]
                step()
    return out


def ignore_progress(done: int, total: int, label: str) -> None:
    """The progress callback that shows nothing."""


def run_rmse(experiment: RmseExperiment, progress: Progress = ignore_progress) -> RmseReport:
    """Measure every method on every seed; errors of several seeds are pooled before the root is taken."""
    total = experiment.seeds * (oracle_steps(experiment) + len(METHODS))
    done = 0

    def announce(label: str) -> None:
        progress(done, total, label)

    def oracle_step() -> None:
        nonlocal done
        done += 1
        announce("float64 oracle")

    squared_error = dict.fromkeys((m.name for m in METHODS), 0.0)
    seconds = dict.fromkeys((m.name for m in METHODS), 0.0)
    implementation: dict[str, str] = {}
    oracle_square = 0.0
    for seed in range(experiment.seeds):
        problem = draw_problem(experiment, seed)
        announce("float64 oracle")
        oracle = compute_oracle(problem, oracle_step)
        oracle_square += oracle.square().mean().item() / experiment.seeds
        for method in METHODS:
            announce(method.label)
            start = time.perf_counter()
            out, implementation[method.name] = method.run(problem)
            error = (out.double() - oracle).square().mean().item()
            seconds[method.name] += time.perf_counter() - start
            squared_error[method.name] += error / experiment.seeds
            done += 1
    announce("")
    rows = tuple(
        RmseRow(
            method=m.name,
            label=m.label,
            rmse=math.sqrt(squared_error[m.name]),
            paper=m.paper if experiment.is_papers else None,
            implementation=implementation[m.name],
            seconds=seconds[m.name],
        )
        for m in METHODS
    )
    return RmseReport(experiment, rows, math.sqrt(oracle_square))


def describe(experiment: RmseExperiment) -> str:
    """The inputs and the shape in one line."""
    e = experiment
    heads = "1 head" if e.heads == 1 else f"{e.heads} heads"
    shape = f"batch {e.batch} · seqlen {e.seqlen} · {heads} · head_dim {e.head_dim}"
    mask = "causal" if e.causal else "not causal"
    seeds = f" · {e.seeds} seeds" if e.seeds > 1 else ""
    inputs = "N(0,1) inputs" if e.distribution == "normal" else f"inputs with {e.distribution}"
    return f"{e.dtype} {inputs} · {shape} · {mask}{seeds}"


def gain_over_baseline(report: RmseReport) -> float:
    """How many times the error of the full FP8 method goes into that of the FP8 baseline (paper: 2.6)."""
    errors = {row.method: row.rmse for row in report.rows}
    return errors["fp8-per-tensor"] / errors["fp8-both"]


def report_as_data(report: RmseReport) -> dict[str, Any]:
    """The report as JSON's own types."""
    return {**asdict(report), "rows": [asdict(row) for row in report.rows]}
