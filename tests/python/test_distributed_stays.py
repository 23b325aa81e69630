"""Q, K and V of heads that stay in the buffer of peers until their backward pass: programs of calls drawn at random,
against the same by messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from hopper_attention.distributed import context_parallel_attention, over_peers, ulysses
from hopper_attention.distributed.exchange import Ranks
from hopper_attention.distributed.pushed import PushedExchange
from hopper_attention.launch import copies
from hopper_attention.quantized import Fp8Quantization
from tests.python.distributed_ranks import DTYPE, Pool, groups, writes_to_files
from tests.python.file_memory import copies_by_torch

STEPS = 24
SHAPES = (
    (1, 4, 4, 2, 16, 16),
    (1, 8, 4, 4, 16, 8),
    (2, 4, 8, 2, 8, 24),
    (2, 4, 32, 16, 8, 8),
    (1, 32, 4, 4, 16, 16),
)
"""Of a rank: batch, rows, heads, key/value heads, head_dim, head_dim_v. With the last one buffers grow."""


@dataclass
class Made:
    """A call that waits for its backward pass, by peer memory and by messages."""

    leaves: list[Tensor]
    results: list[tuple[Tensor, ...]]
    dout: list[Tensor]


class Program:
    """Calls in an order that is the same on all ranks, of values that are not."""

    def __init__(self, folder: str, seed: int) -> None:
        self.folder = folder
        self.draw = Random(seed)
        # Every second program has no short calls.
        self.least_in_waves = seed % 2 << 30
        self.group = groups()[2]
        torch.manual_seed(seed * 10 + dist.get_rank())
        self.exchanges: list[PushedExchange] = []
        self.counts: Counter[str] = Counter()
        self.waiting: list[Made] = []

    @contextmanager
    def by_files(self) -> Iterator[None]:
        def find(group: dist.ProcessGroup, ranks: Ranks, device: torch.device) -> PushedExchange:
            # To make it anew would empty the files.
            if not self.exchanges:
                self.exchanges.append(writes_to_files(ranks, self.folder, 1 << 13))
            return self.exchanges[0]

        def counted(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *given: (self.counts.update([name]), run(*given))[1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ulysses, "_pushes_between", find)
            patch.setattr(copies, "find", copies_by_torch)
            patch.setattr(copies, "current_device", lambda: 0)
            patch.setattr(over_peers, "LEAST_IN_WAVES", self.least_in_waves)
            for name in ("offer_over", "make_way", "offer", "lend_in_waves"):
                patch.setattr(PushedExchange, name, counted(name, getattr(PushedExchange, name)))
            yield

    def ways(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return self.by_files(), nullcontext()

    def tensors(self) -> list[Tensor]:
        batch, rows, heads, kv_heads, head_dim, head_dim_v = self.draw.choice(SHAPES)
        sizes = (heads, head_dim), (kv_heads, head_dim), (kv_heads, head_dim_v)
        return [torch.randn(batch, rows, *size).to(DTYPE) for size in sizes]

    def call(self, options: dict[str, Any]) -> Callable[..., tuple[Tensor, ...]]:
        def run(*given: Tensor) -> tuple[Tensor, ...]:
            found = context_parallel_attention(*given, self.group, method="ulysses", **options)
            return found if isinstance(found, tuple) else (found,)

        return run

    def options(self) -> dict[str, Any]:
        found: dict[str, Any] = {"causal": self.draw.random() < 0.5, "return_lse": self.draw.random() < 0.3}
        found["memory"] = self.draw.choice(["auto"] * 4 + ["least"])
        return found

    def forward(self) -> bool:
        """A call that may be differentiated."""
        leaves, run = [x.requires_grad_() for x in self.tensors()], self.call(self.options())
        how = self.draw.choice(["plain"] * 5 + ["saved elsewhere", "checkpoint", "reentrant"])
        results = []
        for way in self.ways():
            with way, save_on_cpu() if how == "saved elsewhere" else nullcontext():
                if how in ("checkpoint", "reentrant"):
                    results.append(checkpoint(run, *leaves, use_reentrant=how == "reentrant"))
                else:
                    results.append(run(*leaves))
        self.waiting.append(Made(leaves, results, [torch.randn_like(x) for x in results[0]]))
        return all(map(torch.equal, *results))

    def forward_alone(self) -> bool:
        """A call without gradients."""
        given, options = self.tensors(), self.options()
        if self.draw.random() < 0.2:
            options |= {"quantization": Fp8Quantization(), "memory": "auto", "return_lse": False}
        results = []
        for way in self.ways():
            with way, torch.no_grad():
                results.append(self.call(options)(*given))
        return all(map(torch.equal, *results))

    def backward(self) -> bool:
        """Of the latest call, or of any; perhaps not for the last time."""
        if not self.waiting:
            return True
        place = -1 if self.draw.random() < 0.7 else self.draw.randrange(len(self.waiting))
        made, is_kept = self.waiting[place], self.draw.random() < 0.3
        found = []
        for way, results in zip(self.ways(), made.results, strict=True):
            with way:
                for x in made.leaves:
                    x.grad = None
                torch.autograd.backward(results, made.dout, retain_graph=is_kept)
                found.append([x.grad for x in made.leaves])
        if not is_kept:
            del self.waiting[place]
        return all(map(torch.equal, *found))

    def drop(self) -> bool:
        """A call that is never differentiated."""
        if self.waiting:
            del self.waiting[self.draw.randrange(len(self.waiting))]
        return True

    def turn(self) -> bool:
        """A layer at a time."""
        return all((self.forward(), self.backward()))

    def run(self) -> tuple[list[str], Counter[str]]:
        wrong = []
        kinds = [self.forward] * 3 + [self.backward] * 3 + [self.forward_alone, self.drop] + [self.turn] * 3
        for number in range(STEPS):
            step = self.draw.choice(kinds)
            if not step():
                wrong.append(f"step {number}: {step.__name__}")
        return wrong, self.counts


def run_program(folder: str, seed: int) -> tuple[list[str], Counter[str]]:
    Path(folder).mkdir(exist_ok=True)
    return Program(folder, seed).run()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    ranks = Pool(tmp_path_factory.mktemp("ranks"), 2)
    yield ranks
    ranks.close()


PROGRAMS = 12


def test_programs_of_calls_have_the_bits_of_messages(pool: Pool, tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    for seed in range(PROGRAMS):
        for wrong, found in pool(2, "test_distributed_stays.run_program", str(tmp_path / str(seed)), seed):
            assert wrong == [], seed
            counts += found
    # Some stayed, some were copied on the way, and some were copied from the beginning.
    assert counts["offer_over"] > PROGRAMS and counts["make_way"] > PROGRAMS and counts["offer"] > PROGRAMS
    assert counts["lend_in_waves"] > PROGRAMS
