"""A small GPT, trained on the bytes of Python's standard library: attention in 16 bits, in FP8, and by torch's SDPA.

    python examples/train_gpt.py --fp8 --plot out/train.png --json out/train.json
    python examples/train_gpt.py --fp8 --tiny --steps 20     # on a CPU

Every way of attention trains a model of its own: with the same first weights, on the same batches, in turns, so that
clocks and temperature meet all alike. What differs between their losses is then what attention rounds differently; SDPA
against ours in 16 bits shows how much that is without FP8. Weights are float32, layers run in bfloat16. Its tables need
the extra ``cli``, and ``--plot`` the extra ``plot``.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, rms_norm, scaled_dot_product_attention

from hopper_attention import flash_attn_fp8_func, flash_attn_func

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention of (batch, tokens, heads, head_dim)."""

KIND = "training"
VOCABULARY = 256
HELD_OUT = 0.05
"""Of the text, its end, which is not trained on."""


@dataclass(frozen=True)
class Options:
    """A model, and how it is trained."""

    layers: int = 8
    width: int = 768
    heads: int = 6
    context: int = 4096  # tokens of a sequence
    batch: int = 8
    steps: int = 500
    warm_up: int = 50
    rate: float = 1e-3
    seed: int = 0

    @property
    def tokens(self) -> int:
        return self.batch * self.context


TINY = {"layers": 2, "width": 32, "heads": 2, "context": 32, "batch": 2}


# The text


def read_text() -> Tensor:
    """The modules of the standard library that are files of their own, in order, as uint8."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def batches(text: Tensor, options: Options, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens (batch, context), and those that follow each, from random places; int64 on the device of the text."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - options.context - 1, (options.batch, 1), generator=generator)
        window = text[(starts + torch.arange(options.context + 1)).to(text.device)].long()
        yield window[:, :-1], window[:, 1:]


# The model


def by_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def in_16_bits(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_func(q, k, v, causal=True)


def in_fp8(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_fp8_func(q, k, v, causal=True)


WAYS: dict[str, Attention] = {"sdpa": by_sdpa, "16 bits": in_16_bits, "fp8": in_fp8}


class Block(nn.Module):
    """Attention, then two layers for each token; both are added to what came in."""

    def __init__(self, options: Options, attention: Attention) -> None:
        super().__init__()
        width = options.width
        self.heads, self.attention = options.heads, attention
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        qkv = self.qkv(rms_norm(x, x.shape[-1:]))
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).unbind(2)
        # Norms of Q and K keep scores small, as many models have them; they are of use to FP8 too.
        q, k = (rotate(rms_norm(y, y.shape[-1:]), angles).to(v.dtype) for y in (q, k))
        x = x + self.out(self.attention(q, k, v).flatten(2))
        return x + self.down(gelu(self.up(rms_norm(x, x.shape[-1:]))))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding of (batch, tokens, heads, head_dim) by angles (tokens, 1, head_dim / 2)."""
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Gpt(nn.Module):
    """Blocks between an embedding of bytes and what predicts the next byte."""

    def __init__(self, options: Options, attention: Attention) -> None:
        super().__init__()
        half = options.width // options.heads // 2
        frequencies = 10000.0 ** (-torch.arange(half) / half)
        angles = torch.arange(options.context)[:, None, None] * frequencies
        self.register_buffer("angles", angles, persistent=False)
        self.embedding = nn.Embedding(VOCABULARY, options.width)
        self.blocks = nn.ModuleList(Block(options, attention) for _ in range(options.layers))
        self.head = nn.Linear(options.width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            is_last_of_block = name.endswith(("out.weight", "down.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * options.layers) if is_last_of_block else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a token, in nats."""
        with torch.autocast(tokens.device.type, torch.bfloat16):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x, self.angles)
            logits = self.head(rms_norm(x, x.shape[-1:]))
        return cross_entropy(logits.float().flatten(0, 1), targets.flatten())


# Training


@dataclass
class Run:
    """A model in training by one way of attention, and what was measured of it."""

    model: Gpt
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    step_bytes: int = 0

    @classmethod
    def start(cls, options: Options, attention: Attention, device: str) -> Run:
        torch.manual_seed(options.seed)
        model = Gpt(options, attention).to(device)
        is_cuda = torch.device(device).type == "cuda"
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=is_cuda)
        return cls(model, optimizer)

    def step(self, tokens: Tensor, targets: Tensor, rate: float) -> None:
        before = allocated(tokens.device)
        begin = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())  # waits for the GPU
        if tokens.is_cuda:
            torch.cuda.synchronize()
            # The first step has the optimizer's moments too.
            if len(self.losses) > 1:
                self.step_bytes = max(self.step_bytes, torch.cuda.max_memory_allocated() - before)
        self.seconds.append(time.perf_counter() - begin)

    @torch.no_grad()
    def held_out_loss(self, text: Tensor, options: Options, count: int = 8) -> float:
        """Of the text that was not trained on."""
        drawn = batches(text, options, seed=options.seed + 1)
        return statistics.fmean(self.model(*next(drawn)).item() for _ in range(count))


def allocated(device: torch.device) -> int:
    """Bytes in use, from where the peak is counted anew; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def rate_of(step: int, options: Options) -> float:
    """Of learning: it rises for ``warm_up`` steps, then falls to a tenth along a cosine."""
    if step < options.warm_up:
        return options.rate * (step + 1) / options.warm_up
    done = (step - options.warm_up) / max(options.steps - options.warm_up, 1)
    return options.rate * (0.55 + 0.45 * math.cos(math.pi * done))


def train(options: Options, ways: Sequence[str], device: str, console: Console) -> dict[str, Any]:
    """Train a model by each way, in turns; what was measured, by way."""
    text = read_text().to(device)
    cut = int(len(text) * (1 - HELD_OUT))
    runs = {way: Run.start(options, WAYS[way], device) for way in ways}
    drawn = batches(text[:cut], options, options.seed)
    for step in track(range(options.steps), "training", console=console):
        batch = next(drawn)
        first = step % len(ways)
        for way in (*ways[first:], *ways[:first]):
            runs[way].step(*batch, rate_of(step, options))
    return {way: summary(run, text[cut:], options) for way, run in runs.items()}


def summary(run: Run, held_out: Tensor, options: Options) -> dict[str, Any]:
    # The first steps compile and warm up.
    timed = run.seconds[min(10, len(run.seconds) - 1) :]
    return {
        "tokens_a_second": options.tokens / statistics.median(timed),
        "step_ms": statistics.median(timed) * 1e3,
        "step_mib": run.step_bytes / 2**20 or None,  # not counted on a CPU
        "last_loss": statistics.fmean(last_tenth(run.losses)),
        "held_out_loss": run.held_out_loss(held_out, options),
        "losses": run.losses,
    }


def last_tenth(values: Sequence[float]) -> Sequence[float]:
    return values[-max(1, len(values) // 10) :]


def differences(found: dict[str, Any], base: str) -> dict[str, dict[str, float]]:
    """Of the losses of each way from those of ``base``: means over the last tenth of the steps, and the largest."""
    result = {}
    for way, of_way in found.items():
        if way != base:
            apart = [a - b for a, b in zip(of_way["losses"], found[base]["losses"], strict=True)]
            result[way] = {
                "mean_of_last_tenth": statistics.fmean(last_tenth(apart)),
                "mean_size_of_last_tenth": statistics.fmean(map(abs, last_tenth(apart))),
                "largest": max(map(abs, apart)),
                "held_out": of_way["held_out_loss"] - found[base]["held_out_loss"],
            }
    return result


# What is shown


def table_of(found: dict[str, Any], apart: dict[str, dict[str, float]], base: str) -> Table:
    table = Table(title="training", title_justify="left")
    heads = ("tokens a second", f"over {base}", "step, MiB", "last loss", f"from {base}", "held out")
    table.add_column("attention")
    for head in heads:
        table.add_column(head, justify="right")
    for way, of_way in found.items():
        speed = of_way["tokens_a_second"]
        shift = f"{apart[way]['mean_of_last_tenth']:+.4f}" if way in apart else "–"
        table.add_row(
            way,
            f"{speed:,.0f}",
            f"{speed / found[base]['tokens_a_second']:.2f}",
            f"{of_way['step_mib']:,.0f}" if of_way["step_mib"] else "–",
            f"{of_way['last_loss']:.4f}",
            shift,
            f"{of_way['held_out_loss']:.4f}",
        )
    return table


def report(
    options: Options, found: dict[str, Any], apart: dict[str, dict[str, float]], device: str
) -> dict[str, Any]:
    """The figures, with the machine and the commit that they are of."""
    from hopper_attention.experiments.bench.peers import Setting
    from hopper_attention.experiments.bench.run import describe_run

    method = {
        "text": "the standard library's modules that are files of their own, as bytes",
        "precision": "weights and optimizer float32, layers under bfloat16 autocast",
        "turns": "all ways take each step one after the other, with the same batch",
        "timing": "median wall time of a step, the GPU idle before and after; tokens are those of a batch",
        "memory": "peak of a step beyond what was allocated before it",
    }
    head = describe_run(KIND, {}, Setting(device, ""), "") | {"method": method, "options": asdict(options)}
    return head | {f"way {way}": of_way for way, of_way in found.items()} | {"differences": apart}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fp8", action="store_true", help="train by FP8 too")
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU trains in seconds")
    parser.add_argument("--steps", type=int, default=Options.steps)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--plot", type=Path, help="draw the losses to this file")
    given = parser.parse_args(arguments)
    if given.steps < 1:
        parser.error(f"--steps is {given.steps}, allowed: 1 or more")
    if torch.device(given.device).type == "cpu" and not given.tiny:
        parser.error("--device is cpu, allowed there: --tiny, a model that it trains in seconds")
    options = replace(Options(**TINY) if given.tiny else Options(), steps=given.steps)
    ways = [way for way in WAYS if way != "fp8" or given.fp8]
    console = Console()
    found = train(options, ways, given.device, console)
    base = ways[0]
    apart = differences(found, base)
    console.print(table_of(found, apart, base))
    if given.plot is not None:
        from hopper_attention.experiments.models.plot import plot_losses, title_of

        plot_losses(found, title_of(asdict(options)), given.plot)
        console.print(f"drawn to {given.plot}")
    if given.json is not None:
        from hopper_attention.experiments.reports import dump_figures, write_text

        write_text(given.json, dump_figures(report(options, found, apart, given.device)))
        console.print(f"written to {given.json}")
    return found


if __name__ == "__main__":
    main()
