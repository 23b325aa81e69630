"""Attention over the GPUs of this machine, with NCCL, against attention of the whole sequence in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.gpu.conftest import compile_for_ranks
from tests.python.distributed_ranks import Case, Pool, members
from tests.python.test_distributed import GATHER, RING, ULYSSES, compare, in_one_process

pytestmark = pytest.mark.gpu

BUDGET = 3e-3
"""As on CPUs, with P in 16 bits."""


@pytest.fixture(scope="module", autouse=True)
def compiled_kernels() -> None:
    """Those of the cases, for all ranks. What is not shipped compiles as it is met."""
    compile_for_ranks("float16", 64)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    count = min(torch.cuda.device_count(), 8)
    if count < 2:
        pytest.skip(f"{count} GPU, and a group with NCCL needs 2 or more")
    ranks = Pool(tmp_path_factory.mktemp("ranks"), count, "nccl")
    yield ranks
    ranks.close()


@pytest.mark.parametrize("case", [*RING, *GATHER, *ULYSSES], ids=lambda case: f"{case.method}-{case.options}")
def test_gpus_together_are_as_exact_as_one(case: Case, pool: Pool) -> None:
    world = len(pool.connections)
    if members(case.ranks) > world:
        # A method with fewer ranks than the case asks for; of a mesh there is no smaller one.
        if isinstance(case.ranks, str):
            pytest.skip(f"{world} GPUs, and a mesh of {case.ranks} needs {members(case.ranks)}")
        case = replace(case, ranks=2)
    # The kernels take head_dim 16, and one tile is more than the 48 rows of the CPU's case.
    case = replace(case, seqlen=case.seqlen * 8, seqlen_k=case.seqlen_k * 8)
    if case.documents:
        ends = tuple(end * 8 - (end > 1) for end in case.documents)
        case = replace(case, options=case.options | {"cu_seqlens": ends})
    compare(case, pool(members(case.ranks), "attend", case), in_one_process(case), BUDGET)


def test_a_ring_repeats_its_bits(pool: Pool) -> None:
    case = Case(2, "ring", {"causal": True, "deterministic": True}, seqlen=512, seqlen_k=512)
    assert pool(2, "attend_twice", case) == [True, True]


def test_heads_are_written_into_the_memory_of_peers(pool: Pool) -> None:
    world = len(pool.connections)
    for layout in ("zigzag", "contiguous"):
        found = pool(world, "exchange_between_gpus", layout)
        assert len(set(found)) == 1
        if found[0] != "peer memory":
            pytest.skip(f"GPUs of this machine do not share memory: {found[0]}")


def test_calls_that_are_alike_write_what_the_first_one_wrote(pool: Pool) -> None:
    for is_right, plans in pool(2, "attend_again_on_gpus", 6, "at once"):
        assert is_right
        if plans == 0:
            pytest.skip("GPUs of this machine do not share memory")
        # What each of the first two calls sends: Q, K and V, the output, and its gradient; this one goes elsewhere from
        # the second call on, whose Q, K and V stay in the buffer. What tests before have sent is known.
        assert plans <= 7


def test_parts_of_the_heads_write_what_messages_bring(pool: Pool) -> None:
    # A rank has four key/value heads, so two parts of a forward and four of a backward pass.
    for is_right, plans in pool(2, "attend_again_on_gpus", 6, "parts"):
        assert is_right
        if plans == 0:
            pytest.skip("GPUs of this machine do not share memory")
        assert plans == 6


def test_heads_in_waves_write_what_messages_bring(pool: Pool) -> None:
    for is_right, plans in pool(2, "attend_again_on_gpus", 8, "waves"):
        assert is_right
        if plans == 0:
            pytest.skip("GPUs of this machine do not share memory")
        # Of 24 exchanges: those of the first call, which is not known to come again, and each later kind twice.
        assert plans <= 9


def test_heads_go_by_messages_where_a_call_has_a_timeout(pool: Pool) -> None:
    case = Case(2, "ulysses", {"causal": True, "timeout": 30.0}, seqlen=384, seqlen_k=384, has_sinks=True)
    compare(case, pool(2, "attend", case), in_one_process(case), BUDGET)
