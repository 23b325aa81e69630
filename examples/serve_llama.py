"""A small Llama with random weights, served: a paged cache, continuous batching, chunked prefill, CUDA graphs.

    python examples/serve_llama.py --check
    python examples/serve_llama.py --layers 8 --hidden 4096 --heads 32 --kv-heads 8 --feed-forward 14336 \\
        --requests 256 --prompt 2000 --answer 200 --batch 64 --chunk 2048 --pages 16384 --gap 0.5

Requests arrive over time, with prompts and answers of different lengths. Every turn of the loop (``serve``) lets in
what the cache has pages for, takes some tokens of prompts that are not in the cache yet (a chunk, packed:
``prefill``), and one step of all sequences that are answering (``DecodeStep``). ``flash_attn_with_kvcache`` is all
there is of attention: it rotates, appends and attends. Where there is a GPU a decode step is a CUDA graph, one for each
power of 2 that a batch may be filled up to. Tokens are the most likely ones, so that a run can be checked. Its table
needs the extra ``cli``.
"""

from __future__ import annotations

import argparse
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import accumulate
from time import perf_counter
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from hopper_attention import flash_attn_with_kvcache

NO_PAGE = -1
"""Of a page table: nothing is written there, and nothing that is read there is used."""

MAX_GAP = 0.25
"""By how many standard deviations of its logits a token may be below the one that float32 finds most likely."""


@dataclass(frozen=True)
class Options:
    """What is served, and how: each is an option of the command line."""

    layers: int = 4
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 2
    feed_forward: int = 1024
    vocabulary: int = 2048
    requests: int = 12
    prompt: int = 80  # tokens at most
    answer: int = 24  # tokens at most
    gap: float = 1.5  # turns of the loop between two arrivals, on average
    page_size: int = 16
    pages: int = 64
    batch: int = 8  # sequences at a time, at most
    chunk: int = 64  # tokens of prompts that a turn takes, at most
    seed: int = 0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def pages_a_sequence(self) -> int:
        return self.pages_of(self.prompt + self.answer)

    def pages_of(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def check(self) -> None:
        """Raise ValueError for what cannot be served."""
        for item in fields(self):
            if item.name != "seed" and getattr(self, item.name) <= 0:
                raise ValueError(f"{item.name} is {getattr(self, item.name)}, allowed: above 0")
        if self.hidden % (self.heads * 16) or self.heads % self.kv_heads:
            raise ValueError(
                f"hidden is {self.hidden}, heads {self.heads} and kv_heads {self.kv_heads}, allowed: a head_dim, "
                "hidden / heads, that is a multiple of 16, and heads that are a multiple of kv_heads"
            )
        if self.pages < self.pages_a_sequence:
            raise ValueError(
                f"pages is {self.pages}, allowed: {self.pages_a_sequence} or more, for one sequence"
            )


# The model.

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q, k, v) -> attention of tokens: all are (tokens, heads, head_dim), k and v of kv_heads, nothing rotated."""


class Layer(NamedTuple):
    """Weights (columns in, columns out)."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


class Llama:
    """RMSNorm, RoPE (in ``Attend``), grouped heads and SwiGLU. Weights of the norms are ones."""

    def __init__(self, options: Options, dtype: torch.dtype, device: str):
        o = self.options = options
        generator = torch.Generator().manual_seed(o.seed)

        def random_weight(rows: int, columns: int, scale: float = 1.0) -> Tensor:
            weight = torch.randn(rows, columns, generator=generator) * (scale * rows**-0.5)
            return weight.to(device, dtype)

        kv_columns = 2 * o.kv_heads * o.head_dim
        self.layers = [
            Layer(
                # Scores are spread enough that a head looks at few tokens, and the answer depends on all layers.
                random_weight(o.hidden, o.hidden + kv_columns, 1.5),
                random_weight(o.hidden, o.hidden),
                random_weight(o.hidden, 2 * o.feed_forward),
                random_weight(o.feed_forward, o.hidden),
            )
            for _ in range(o.layers)
        ]
        self.embeddings = random_weight(o.vocabulary, o.hidden, o.vocabulary**0.5)
        self.head = random_weight(o.hidden, o.vocabulary)

    def __call__(self, tokens: Tensor, attend: Attend) -> Tensor:
        """tokens (n,) -> (n, hidden)"""
        o = self.options
        x = self.embeddings[tokens]
        for i, layer in enumerate(self.layers):
            heads = (self._norm(x) @ layer.qkv).view(len(x), -1, o.head_dim)
            attention = attend(i, *heads.split((o.heads, o.kv_heads, o.kv_heads), 1))
            x = x + attention.reshape(x.shape) @ layer.out
            gate, up = (self._norm(x) @ layer.gate_up).chunk(2, 1)
            x = x + (silu(gate) * up) @ layer.down
        return self._norm(x)

    def logits(self, x: Tensor) -> Tensor:
        return x @ self.head

    def _norm(self, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], eps=1e-5)

    def in_float32(self) -> Llama:
        """The same weights, wider."""
        wide = copy(self)
        wide.layers = [Layer(*(weight.float() for weight in layer)) for layer in self.layers]
        wide.embeddings, wide.head = self.embeddings.float(), self.head.float()
        return wide

    def angles(self, positions: int) -> Tensor:
        """float32 (positions, head_dim / 2) of the rotary embedding."""
        columns = torch.arange(0, self.options.head_dim, 2) / self.options.head_dim
        return torch.outer(torch.arange(positions), 10_000.0**-columns).to(self.embeddings.device)


# The cache, and who is served.


@dataclass(frozen=True)
class Request:
    """A prompt that comes in some turn of the loop, and how many tokens its answer is to have."""

    arrival: int
    prompt: tuple[int, ...]
    answer: int


def draw_requests(o: Options) -> list[Request]:
    """In the order in which they come."""
    draw, arrival, requests = random.Random(o.seed), 0.0, []
    for _ in range(o.requests):
        prompt = tuple(draw.randrange(o.vocabulary) for _ in range(draw.randint(1, o.prompt)))
        requests.append(Request(int(arrival), prompt, draw.randint(1, o.answer)))
        arrival += draw.expovariate(1 / o.gap)
    return requests


@dataclass
class Served:
    """A request that was let in: its pages, its tokens, and how many of them have keys in the cache."""

    request: Request
    pages: list[int]
    tokens: list[int]
    cached: int = 0

    @property
    def waits_for(self) -> int:
        """Tokens of the prompt that are not in the cache."""
        return max(len(self.request.prompt) - self.cached, 0)

    @property
    def is_done(self) -> bool:
        return len(self.tokens) == len(self.request.prompt) + self.request.answer


class PagedCache:
    """Keys and values of all layers (layers, pages, page_size, kv_heads, head_dim), and the pages that are free."""

    def __init__(self, o: Options, dtype: torch.dtype, device: str):
        shape = o.layers, o.pages, o.page_size, o.kv_heads, o.head_dim
        # Neither is cleared: a row that nobody wrote is never used.
        self.k, self.v = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        self.free = deque(range(o.pages))

    def take(self, pages: int) -> list[int]:
        return [self.free.popleft() for _ in range(pages)]

    def give_back(self, pages: list[int]) -> None:
        self.free.extend(pages)


# One step of the model on the cache.


class Stopwatch:
    """The time that attention takes in each layer of a step: on a GPU by events, in a CUDA graph too."""

    def __init__(self, layers: int, device: str):
        self.seconds, self.events = 0.0, []
        if device == "cuda":
            self.events = [[self._event(), self._event()] for _ in range(layers)]

    @staticmethod
    def _event() -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True, external=True)

    @contextmanager
    def running(self, layer: int) -> Iterator[None]:
        begin = perf_counter()
        if self.events:
            self.events[layer][0].record()
        yield
        if self.events:
            self.events[layer][1].record()
        else:
            self.seconds += perf_counter() - begin

    def take_seconds(self) -> float:
        """Of the last step, which the GPU has finished."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds + sum(start.elapsed_time(stop) for start, stop in self.events) / 1e3


class Parts:
    """What all steps have in common: the model, the cache, and attention on it."""

    def __init__(self, options: Options, dtype: torch.dtype, device: str):
        self.options, self.device = options, device
        self.model, self.cache = Llama(options, dtype, device), PagedCache(options, dtype, device)
        angles = self.model.angles(options.prompt + options.answer)
        # Llama turns the halves of a head together, not neighbouring columns.
        self.rotary = {
            "rotary_cos": angles.cos(),
            "rotary_sin": angles.sin(),
            "rotary_interleaved": False,
        }
        self.watch = Stopwatch(options.layers, device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **places: Any) -> Tensor:
        """New tokens are rotated and go into the cache, and each query sees what is there up to it."""
        caches = self.cache.k[layer], self.cache.v[layer]
        with self.watch.running(layer):
            return flash_attn_with_kvcache(q, *caches, k, v, causal=True, **self.rotary, **places)

    def numbers(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(self.device)

    def row_of_table(self, served: Served) -> list[int]:
        return served.pages + [NO_PAGE] * (self.options.pages_a_sequence - len(served.pages))


def prefill(parts: Parts, chunks: Sequence[tuple[Served, int]]) -> list[int]:
    """The token that follows each chunk of a prompt: (sequence, tokens of it). Chunks are packed into one tensor."""
    counts = [count for _, count in chunks]
    starts = parts.numbers([0, *accumulate(counts)])
    places = {
        "cache_seqlens": parts.numbers([served.cached for served, _ in chunks]),
        "page_table": parts.numbers([parts.row_of_table(served) for served, _ in chunks]),
        "cu_seqlens_q": starts,
        "cu_seqlens_k_new": starts,
        "max_seqlen_q": max(counts),
    }
    tokens = parts.numbers([t for s, count in chunks for t in s.tokens[s.cached : s.cached + count]])
    x = parts.model(tokens, partial(parts.attend, **places))
    return parts.model.logits(x[starts[1:].long() - 1]).argmax(1).tolist()


class DecodeStep:
    """A step of up to ``size`` sequences, one token each. Sequences that are not there have no pages.

    What it reads lies at fixed places, in one tensor of int32, so that a step is one copy and one graph.
    """

    def __init__(self, parts: Parts, size: int):
        self.parts, self.size, on_gpu = parts, size, parts.device == "cuda"
        numbers = size * (2 + parts.options.pages_a_sequence)
        self.on_host = torch.zeros(numbers, dtype=torch.int32, pin_memory=on_gpu)
        self.state = torch.zeros(numbers, dtype=torch.int32, device=parts.device)
        self.tokens, self.lengths, self.table = self._named(self.state)
        self.table.fill_(NO_PAGE)
        self.answer = torch.zeros(size, dtype=torch.int64, device=parts.device)
        self.run = self._captured() if on_gpu else self._compute

    def __call__(self, sequences: Sequence[Served]) -> list[int]:
        """The next token of each sequence."""
        tokens, lengths, table = self._named(self.on_host.zero_())
        table.fill_(NO_PAGE)
        for i, served in enumerate(sequences):
            tokens[i], lengths[i] = served.tokens[-1], served.cached
            table[i] = torch.tensor(self.parts.row_of_table(served))
        self.state.copy_(self.on_host, non_blocking=True)
        self.run()
        return self.answer.tolist()[: len(sequences)]

    def _named(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens, lengths, table = state.split((self.size, self.size, len(state) - 2 * self.size))
        return tokens, lengths, table.view(self.size, -1)

    def _compute(self) -> None:
        model = self.parts.model
        self.answer.copy_(model.logits(model(self.tokens, self._attend)).argmax(1))

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tokens = (x[:, None] for x in (q, k, v))  # (batch, 1, heads, head_dim)
        return self.parts.attend(layer, *tokens, cache_seqlens=self.lengths, page_table=self.table)

    def _captured(self) -> Callable[[], None]:
        """The step as a CUDA graph. Kernels are compiled in the call before, since in a capture they may not."""
        self._compute()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._compute()
        return graph.replay


# The loop.


@dataclass
class Numbers:
    """What is counted while serving."""

    seconds: float = 0.0
    attention_seconds: float = 0.0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    batches: list[int] = field(default_factory=list)
    cache_use: list[float] = field(default_factory=list)


class Engine:
    """Takes prompts and decode steps, and counts."""

    def __init__(self, options: Options, dtype: torch.dtype, device: str):
        self.options, self.parts, self.numbers = options, Parts(options, dtype, device), Numbers()
        sizes = [1 << i for i in range((options.batch - 1).bit_length() + 1)]
        self.decode_steps = {size: DecodeStep(self.parts, size) for size in sizes}

    def prefill(self, waiting: Sequence[Served]) -> None:
        """Take a chunk of tokens of prompts, the first come first served."""
        chunks, room = [], self.options.chunk
        for served in waiting:
            count = min(served.waits_for, room)
            room -= count
            chunks += [(served, count)] if count else []
        following = self._timed(lambda: prefill(self.parts, chunks))
        for (served, count), token in zip(chunks, following, strict=True):
            served.cached += count
            self.numbers.prompt_tokens += count
            if not served.waits_for:
                self._answer(served, token)

    def decode(self, sequences: Sequence[Served]) -> None:
        """Take a step of each sequence."""
        step = self.decode_steps[1 << (len(sequences) - 1).bit_length()]
        for served, token in zip(sequences, self._timed(lambda: step(sequences)), strict=True):
            served.cached += 1
            self._answer(served, token)
        self.numbers.batches.append(len(sequences))

    def _answer(self, served: Served, token: int) -> None:
        served.tokens.append(token)
        self.numbers.answer_tokens += 1

    def _timed(self, step: Callable[[], list[int]]) -> list[int]:
        """The tokens of a step, which ends when they are on the host."""
        begin = perf_counter()
        tokens = step()
        self.numbers.seconds += perf_counter() - begin
        self.numbers.attention_seconds += self.parts.watch.take_seconds()
        return tokens


def serve(engine: Engine, requests: Sequence[Request]) -> list[Served]:
    """All requests with their answers, in the order in which they end."""
    o, cache, turn = engine.options, engine.parts.cache, 0
    coming, running, done = deque(requests), list[Served](), list[Served]()
    while coming or running:
        if not running:
            turn = max(turn, coming[0].arrival)
        while coming and coming[0].arrival <= turn and len(running) < o.batch:
            # All pages that a request will need are taken now, so that none has to be put out later.
            pages = o.pages_of(len(coming[0].prompt) + coming[0].answer)
            if pages > len(cache.free):
                break
            request = coming.popleft()
            running.append(Served(request, cache.take(pages), list(request.prompt)))
        answering = [served for served in running if not served.waits_for]
        if waiting := [served for served in running if served.waits_for]:
            engine.prefill(waiting)
        if answering:
            engine.decode(answering)
        engine.numbers.cache_use.append(sum(s.cached for s in running) / (o.pages * o.page_size))
        for served in [served for served in running if served.is_done]:
            running.remove(served)
            cache.give_back(served.pages)
            done.append(served)
        turn += 1
    return done


# What came of it.


def plain_attend(angles: Tensor) -> Attend:
    """Attention of one sequence without a cache, in plain PyTorch."""

    def rotate(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        cos, sin = angles[: len(x), None].cos(), angles[: len(x), None].sin()
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        q, k, v = rotate(q), rotate(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)

    return attend


def check(engine: Engine, done: Sequence[Served]) -> str:
    """Compare every token with those of the same weights in float32, of each request alone and without a cache.

    Raises:
        AssertionError: a token was served that float32 finds far less likely than another.
    """
    model = engine.parts.model.in_float32()
    attend = plain_attend(model.angles(max(len(served.tokens) for served in done)))
    same, worst = 0, 0.0
    for served in done:
        first = len(served.request.prompt)
        tokens = torch.tensor(served.tokens, device=engine.parts.device)
        logits = model.logits(model(tokens[:-1], attend)[first - 1 :])
        chosen = logits.gather(1, tokens[first:, None]).squeeze(1)
        gaps = (logits.amax(1) - chosen) / logits.std(1)
        same, worst = same + int((gaps == 0).sum()), max(worst, gaps.max().item())
    text = f"{same} of {engine.numbers.answer_tokens} tokens are float32's own, the others"
    text += f" at most {worst:.3f} standard deviations of logits below"
    assert worst <= MAX_GAP, f"{text}, allowed: {MAX_GAP}"
    return text


def table_of(engine: Engine, requests: int) -> Table:
    n, steps = engine.numbers, engine.numbers.batches
    rows = {
        "requests": f"{requests}",
        "tokens of prompts, of answers": f"{n.prompt_tokens}, {n.answer_tokens}",
        "tokens a second": f"{(n.prompt_tokens + n.answer_tokens) / n.seconds:.0f}",
        "answered tokens a second": f"{n.answer_tokens / n.seconds:.0f}",
        "decode steps, mean batch": f"{len(steps)}, {sum(steps) / max(len(steps), 1):.1f}",
        "cache in use, mean and most": f"{sum(n.cache_use) / len(n.cache_use):.0%}, {max(n.cache_use):.0%}",
        "share of attention": f"{n.attention_seconds / n.seconds:.0%}",
    }
    table = Table(show_header=False, title=f"served on {engine.parts.device}")
    for row in rows.items():
        table.add_row(*row)
    return table


def read_arguments(arguments: Sequence[str] | None) -> tuple[Options, bool, torch.dtype]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for option in fields(Options):
        name = "--" + option.name.replace("_", "-")
        parser.add_argument(name, type=type(option.default), default=option.default, help="%(default)s")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--check", action="store_true", help="compare with each request alone, in float32")
    read = vars(parser.parse_args(arguments))
    wants_check, dtype = read.pop("check"), getattr(torch, read.pop("dtype"))
    options = Options(**read)
    options.check()
    return options, wants_check, dtype


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    options, wants_check, dtype = read_arguments(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine, requests = Engine(options, dtype, device), draw_requests(options)
    if device == "cuda":
        # Kernels are compiled before the clock runs.
        serve(engine, [Request(0, requests[0].prompt, 1)])
        engine.numbers = Numbers()
    done = serve(engine, requests)
    Console().print(table_of(engine, len(done)))
    if wants_check:
        print("checked:", check(engine, done))


if __name__ == "__main__":
    main()
