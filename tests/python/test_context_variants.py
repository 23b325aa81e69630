"""The other ways for heads to go that the benchmark of context parallelism times give the bits of messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hopper_attention.distributed import context_parallel_attention
from hopper_attention.launch import copies
from tests.python.distributed_ranks import DTYPE, Pool, groups
from tests.python.file_memory import FileMemory, copies_by_torch

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
CALLS = 3
"""The last of them is one that was made before."""


def run_variant(name: str, folder: str) -> bool:
    """Whether out, dQ, dK and dV over files, in each call, have the bits of messages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        import context_variants as variants

        patch.setattr(copies, "find", copies_by_torch)
        patch.setattr(copies, "current_device", lambda: 0)
        patch.setattr(variants, "share_memory", lambda ranks, device, n: FileMemory(ranks, folder, n))
        variants.of_any_length.cache_clear()
        torch.manual_seed(dist.get_rank())
        q, k, v, dout = (torch.randn(1, 8, heads, 16).to(DTYPE) for heads in (4, 2, 2, 4))

        def both() -> tuple[Tensor, ...]:
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = context_parallel_attention(*leaves, groups()[2], method="ulysses", causal=True)
            return out.detach(), *torch.autograd.grad(out, leaves, dout)

        with variants.messages_only():
            right = both()
        with variants.VARIANTS[name]():
            found = [both() for _ in range(CALLS)]
    return all(map(torch.equal, (x for each in found for x in each), right * CALLS))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    ranks = Pool(tmp_path_factory.mktemp("ranks"), 2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    "name",
    [
        "ulysses, gradients written",
        "ulysses, heads copied",
        "ulysses by peer memory, of any length",
    ],
)
def test_other_ways_have_the_bits_of_messages(pool: Pool, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    assert pool(2, "test_context_variants.run_variant", name, str(folder)) == [True, True]
