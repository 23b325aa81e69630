"""A Llama of 1B random weights by Transformers: a training step, prefill and generation, by our attention and by sdpa.

    python benchmarks/models.py --out benchmarks/results/models_nvidia_h200.json
    python benchmarks/models.py --only generate --ways sdpa,hopper_attention --append --out SAME.json
    python benchmarks/models.py --only generate --ways sdpa,hopper_attention --layers 4 --answer 128 --out F.json
    python benchmarks/models.py --only train --profile --out F.json
    python benchmarks/models.py --only train,prefill --ways sdpa,sdpa_cudnn,sdpa_fa2,hopper_attention,none --out F.json
    python benchmarks/models.py --tiny --device cpu --out out/tiny.json

All ways of attention share one set of weights and take turns. ``none`` is a model whose attention adds up Q, K and V in
place of attending, so that the time of a step less that of ``none`` is that of attention. ``sdpa_cudnn`` and
``sdpa_fa2`` are sdpa by one of its backends, ``+rotary`` behind a name is rotary embedding by our kernel. Needs the
``transformers`` extra. Before the timing each way's result is held against that of sdpa.

What takes long of ``generate`` is that torch.compile compiles a model for each way, whose time goes with the layers:
the third command ends within a minute. ``--seconds`` ends the rounds of a workload early, after one at least.
``--profile`` measures nothing; it prints which kernels of the GPU a run of each way has, and their time.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.model_ways import (
    FA2,
    FA3,
    NONE,
    ROTARY,
    SDPA,
    SDPA_BY,
    base_of,
    make_models,
    register,
    rotating,
    sdpa_backend,
    usual_ways,
)
from hopper_attention.experiments.bench.machine import ClockSampler, find_gauge
from hopper_attention.experiments.bench.peers import Setting
from hopper_attention.experiments.bench.results import relative_spread
from hopper_attention.experiments.bench.run import describe_error, describe_run
from hopper_attention.experiments.bench.timing import BALANCED, order_of_round
from hopper_attention.experiments.reports import dump_rows, load_figures, write_text
from hopper_attention.integrations.transformers import FP8_NAME, NAME

KIND = "models"

LIMITS = {NAME: 0.1, SDPA: 0.1, FA2: 0.1, FA3: 0.1, FP8_NAME: 0.3} | dict.fromkeys(SDPA_BY, 0.1)
"""Of the relative error of logits against sdpa, which rounds elsewhere in every layer; a wrong mask is off by 1."""


@dataclass(frozen=True)
class Shape:
    """A model, and what it is given."""

    layers: int = 16
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 8
    feed_forward: int = 8192
    vocabulary: int = 32768
    tokens: int = 8192  # of a training step and of prefill
    batch: int = 8  # sequences to generate
    prompt: int = 1024
    answer: int = 512

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def forward_flops(self) -> float:
        """Of the attention of all layers on ``tokens``, causal."""
        return 2.0 * self.layers * self.hidden * self.tokens * (self.tokens + 1)


TINY = Shape(2, 64, 4, 2, 64, 128, tokens=24, batch=2, prompt=6, answer=4)

Run = Callable[[], Tensor]
"""Does the work once; what it returns is held against sdpa's."""


@dataclass(frozen=True)
class Workload:
    """Something to time.

    Attributes:
        make: from a model to a run.
        tokens: that one run takes or makes.
        flops: of its attention; None where ``none`` has no meaning.
        rounds: of measurements.
    """

    make: Callable[[LlamaForCausalLM], Run]
    tokens: int
    flops: float | None
    rounds: int


def config_of(shape: Shape) -> LlamaConfig:
    """A Llama of this shape, as Transformers describes it."""
    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=2 * max(shape.tokens, shape.prompt + shape.answer),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation=SDPA,
    )


# Workloads


def workloads(shape: Shape, device: str, rounds: int) -> dict[str, Workload]:
    """All of them, by name."""
    torch.manual_seed(1)
    ids = torch.randint(shape.vocabulary, (1, shape.tokens), device=device)
    prompts = torch.randint(shape.vocabulary, (shape.batch, shape.prompt), device=device)

    def train(model: LlamaForCausalLM) -> Run:
        # The rate is 0: the work of a step is done, and weights stay those of all other models.
        options = {"lr": 0.0, "weight_decay": 0.0, "fused": ids.is_cuda}
        optimizer = torch.optim.AdamW(model.parameters(), **options)

        def run() -> Tensor:
            model.train()
            loss: Tensor = model(ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return run

    def prefill(model: LlamaForCausalLM) -> Run:
        @torch.inference_mode()
        def run() -> Tensor:
            logits: Tensor = model.eval()(ids, use_cache=True, logits_to_keep=64).logits
            return logits

        return run

    def generate(model: LlamaForCausalLM, **options: Any) -> Run:
        options |= {"max_new_tokens": shape.answer, "do_sample": False, "cache_implementation": "static"}
        options |= {"attention_mask": torch.ones_like(prompts), "use_cache": True}

        def run() -> Tensor:
            found: Tensor = model.eval().generate(prompts, **options)
            return found

        return run

    made, few = shape.batch * shape.answer, min(rounds, 3)
    return {
        "train": Workload(train, shape.tokens, 3.5 * shape.forward_flops, rounds),
        "prefill": Workload(prefill, shape.tokens, shape.forward_flops, rounds),
        "generate": Workload(generate, made, None, few),
        "generate_eager": Workload(lambda model: generate(model, disable_compile=True), made, None, few),
    }


def difference(name: str, found: Tensor, wanted: Tensor) -> float:
    """Relative error; of generated tokens the share that is another: ties of random logits fall either way, and one
    token that differs changes all that follow, so this is to be read and not to be held against a limit."""
    if name.startswith("generate"):
        return float((found != wanted).double().mean())
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


# Measuring

SHOWN_KERNELS = 25
"""Of a profile, those that take longest."""


@dataclass(frozen=True)
class Row:
    """One way of attention on one workload; ``failed`` says why there is no figure."""

    workload: str
    attention: str
    failed: str = ""
    median_ms: float | None = None
    spread: float | None = None
    rounds: int = 0
    tokens_a_second: float | None = None
    over_sdpa: float | None = None
    attention_ms: float | None = None
    attention_tflops: float | None = None
    difference: float | None = None
    peak_mib: float | None = None
    first_s: float | None = None


def synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def seconds_of(run: Run, device: str) -> tuple[float, Tensor]:
    """Wall time of one run, the device idle before and after."""
    synchronize(device)
    begin = time.perf_counter()
    result = run()
    synchronize(device)
    return time.perf_counter() - begin, result


def measure(
    name: str, workload: Workload, models: dict[str, LlamaForCausalLM], device: str, seconds: float
) -> tuple[list[Row], list[tuple[float, float]]]:
    """A row for each model, and when it was timed: for so many seconds, or one round where that takes longer."""
    rows, runs = {}, {}
    wanted: Tensor | None = None
    for way, model in models.items():
        if way == NONE and workload.flops is None:
            continue
        try:
            with rotating(way, model):
                row, run, result = first_run(name, way, workload, model, device)
        except Exception as error:  # a way may fail in any manner; the others are measured
            rows[way] = Row(name, way, failed=describe_error(error))
            continue
        if way == SDPA:
            wanted = result
        if way != NONE and wanted is not None:
            row = replace(row, difference=difference(name, result, wanted))
            limit = LIMITS.get(base_of(way), 0.1)
            if not name.startswith("generate") and not (row.difference or 0.0) <= limit:
                rows[way] = replace(row, failed=f"wrong result: off by {row.difference:.2e} from sdpa")
                continue
        rows[way], runs[way] = row, run
        print(f"  {way}: ready, the first run took {row.first_s:.1f} s", flush=True)
    taken: dict[str, list[float]] = {way: [] for way in runs}
    begin = time.perf_counter()
    order = list(runs)
    for number in range(workload.rounds):
        if number and time.perf_counter() - begin > seconds:
            break
        for way in order_of_round(order, number):
            with rotating(way, models[way]):
                taken[way].append(seconds_of(runs[way], device)[0])
    span = (begin, time.perf_counter())
    for way, seconds in taken.items():
        rows[way] = with_times(rows[way], seconds, workload)
    return [with_ratios(row, rows, workload) for row in rows.values()], [span]


def first_run(
    name: str, way: str, workload: Workload, model: LlamaForCausalLM, device: str
) -> tuple[Row, Run, Tensor]:
    """What compiles runs here; then once more, for the memory of a run."""
    run = workload.make(model)
    first_s, _ = seconds_of(run, device)
    if torch.device(device).type != "cuda":
        return Row(name, way, first_s=first_s), run, run()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _, result = seconds_of(run, device)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return Row(name, way, first_s=first_s, peak_mib=peak), run, result


def show_kernels(
    name: str, workload: Workload, models: dict[str, LlamaForCausalLM], device: str, console: Console
) -> None:
    """Print what a run of each way spends the GPU's time on; on a CPU, the operators."""
    on_gpu = torch.device(device).type == "cuda"
    kind = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    for way, model in models.items():
        if way == NONE and workload.flops is None:
            continue
        run = workload.make(model)
        with rotating(way, model):
            run()
            synchronize(device)
            with torch.profiler.profile(activities=[kind]) as profile:
                run()
                synchronize(device)
        table = Table("kernel", "calls", "ms", title=f"{name}, {way}", title_justify="left")
        own = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        events = sorted(profile.key_averages(), key=lambda event: -getattr(event, own))
        for event in events[:SHOWN_KERNELS]:
            table.add_row(event.key[:100], str(event.count), f"{getattr(event, own) / 1e3:.3f}")
        table.add_row("all", "", f"{sum(getattr(event, own) for event in events) / 1e3:.3f}")
        console.print(table)


def with_times(row: Row, seconds: Sequence[float], workload: Workload) -> Row:
    median = statistics.median(seconds)
    return replace(
        row,
        median_ms=median * 1e3,
        spread=relative_spread(seconds),
        rounds=len(seconds),
        tokens_a_second=workload.tokens / median,
    )


def with_ratios(row: Row, rows: dict[str, Row], workload: Workload) -> Row:
    """With its speed over that of sdpa, and what attention takes of it."""
    if row.median_ms is None:
        return row
    sdpa, none = (rows[way].median_ms if way in rows else None for way in (SDPA, NONE))
    if sdpa is not None:
        row = replace(row, over_sdpa=sdpa / row.median_ms)
    if none is None or workload.flops is None or row.attention == NONE or row.median_ms <= none:
        return row
    if row.attention.endswith(ROTARY):  # what it saves is none of attention's time
        return row
    milliseconds = row.median_ms - none
    return replace(row, attention_ms=milliseconds, attention_tflops=workload.flops / milliseconds * 1e-9)


# What is shown


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(title="Llama by Transformers", title_justify="left")
    for column in (
        "workload",
        "attention",
        "ms",
        "spread",
        "tokens/s",
        "over sdpa",
        "attention ms",
        "TFLOP/s",
    ):
        table.add_column(column, justify="left" if column in ("workload", "attention") else "right")
    for row in rows:
        if row.failed:
            table.add_row(row.workload, row.attention, row.failed)
            continue
        times = (row.median_ms, row.spread, row.tokens_a_second, row.over_sdpa)
        figures = (*times, row.attention_ms, row.attention_tflops)
        formats = ("{:.2f}", "{:.3f}", "{:,.0f}", "{:.3f}", "{:.2f}", "{:.0f}")
        cells = ("–" if x is None else f.format(x) for f, x in zip(formats, figures, strict=True))
        table.add_row(row.workload, row.attention, *cells)
    return table


def rows_to_keep(path: Path, head: dict[str, Any], measured: Sequence[str]) -> dict[str, Any]:
    """Of the report that is there: rows and clocks of workloads that are not measured now.

    Raises:
        ValueError: it is of another commit, GPU or shape.
    """
    data = load_figures(path.read_text(encoding="utf-8"), KIND)
    for key in ("commit", "shape"):
        if data[key] != head[key]:
            raise ValueError(f"{path} has {key} {data[key]}, allowed with --append: {head[key]}")
    if data["machine"]["gpu"] != head["machine"]["gpu"]:
        raise ValueError(
            f"{path} is of {data['machine']['gpu']}, allowed with --append: {head['machine']['gpu']}"
        )
    rows = [row for row in data["rows"] if row["workload"] not in measured]
    return {"rows": rows, "clocks": {k: v for k, v in data["clocks"].items() if k not in measured}}


METHOD = {
    "weights": "random, bfloat16, shared by all ways of attention",
    "train": "forward, backward and a step of AdamW at rate 0, one sequence, no recomputation",
    "prefill": "one sequence into an empty dynamic cache, logits of the last 64 tokens",
    "generate": "model.generate, greedy, static cache, prefill included; compiled as Transformers does by itself, "
    "generate_eager without",
    "timing": "median wall time over rounds in which all ways take turns, the GPU idle before and after",
    "order": BALANCED,
    "attention": "time less that of a model whose attention is Q + K + V; FLOP 4*b*h*d for each query and key that it "
    "sees, in training 3.5 times that",
    "difference": "relative, of the loss or of logits against sdpa; of generate the share of other tokens",
    "sdpa": "sdpa_backend is what torch takes by itself for train and prefill; sdpa_cudnn and sdpa_fa2, torch's "
    "FlashAttention-2, are its backends by name; fa3 is FlashAttention-3's own forward kernel",
    "rotary": "+rotary: rotary embedding of Q and K by one kernel, fuse_rotary of hopper_attention, in place of "
    "Transformers' operators",
    "memory": "peak of a run beyond what was allocated before it",
}


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="train,prefill,generate", help="comma-separated; also generate_eager"
    )
    parser.add_argument("--ways", default="", help="comma-separated; default: all that can run here")
    parser.add_argument("--append", action="store_true", help="keep what the report has of other workloads")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--heads", type=int, help="query heads; head_dim is hidden over these")
    parser.add_argument("--tokens", type=int, help="of a training step and of prefill")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--answer", type=int, help="tokens to generate for each sequence")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of a workload, once it is compiled")
    parser.add_argument(
        "--profile", action="store_true", help="print the kernels of a run, and measure nothing"
    )
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU, to try the script")
    parser.add_argument(
        "--fa3-library", default="", help="flash_ops.abi3.so of sglang-kernel, for the way fa3"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default="", help="default: what git or a file COMMIT says")
    parser.add_argument("--out", "--json", type=Path, required=True)
    given = parser.parse_args(arguments)
    changed = ("heads", "tokens", "layers", "answer")
    sizes = {key: getattr(given, key) for key in changed if getattr(given, key) is not None}
    shape = replace(TINY if given.tiny else Shape(), **sizes)
    all_workloads = workloads(shape, given.device, given.rounds)
    if unknown := set(given.only.split(",")) - set(all_workloads):
        parser.error(f"--only has {', '.join(sorted(unknown))}, allowed: {', '.join(all_workloads)}")
    ways = given.ways.split(",") if given.ways else usual_ways()
    if given.fa3_library and not given.ways:
        ways.append(FA3)
    register(given.fa3_library)
    names = given.only.split(",")
    head = describe_run(KIND, {}, Setting(given.device, ""), given.commit)
    head |= {"transformers": transformers.__version__, "method": METHOD, "shape": asdict(shape)}
    heads = shape.heads, shape.kv_heads, shape.head_dim
    head["sdpa_backend"] = sdpa_backend(*heads, shape.tokens, given.device)
    kept: dict[str, Any] = {"rows": [], "clocks": {}}
    if given.append and given.out.is_file():
        kept = rows_to_keep(given.out, head, names)
    models = make_models(config_of(shape), ways, given.device)
    console = Console() if sys.stdout.isatty() else Console(width=150)
    if given.profile:
        for name in names:
            show_kernels(name, all_workloads[name], models, given.device, console)
        return []
    rows: list[Row] = []
    clocks = kept["clocks"]
    with ClockSampler(find_gauge(given.device)) as sampler:
        for name in names:
            console.print(f"{name} ...")
            found, spans = measure(name, all_workloads[name], models, given.device, given.seconds)
            rows += found
            clocks[name] = dict(zip(("clock_mhz", "power_w"), sampler.window(spans), strict=True))
            records = kept["rows"] + [asdict(row) for row in rows]
            write_text(given.out, dump_rows(head | {"clocks": clocks}, "rows", records))
            if torch.device(given.device).type == "cuda":
                torch.cuda.empty_cache()
    console.print(table_of(rows))
    return rows


if __name__ == "__main__":
    main()
