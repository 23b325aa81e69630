"""Heads that are written into memory which ranks share: files between processes here, GPUs' own in tests/gpu."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hopper_attention import compile_cache, flash_attn_fp8_func
from hopper_attention.distributed import (
    Machine,
    context_parallel_attention,
    explain_context_parallel,
    over_peers,
    pushed,
    ulysses,
)
from hopper_attention.distributed.attend import Call
from hopper_attention.distributed.division import Division, HeadParts
from hopper_attention.distributed.peers import SymmetricMemory, why_not
from hopper_attention.distributed.pieces import Problem
from hopper_attention.launch import backward
from hopper_attention.quantized import Fp8Quantization
from tests.python.distributed_ranks import DTYPE, Case, Pool, attend_by_peer_memory, error_of, groups, members
from tests.python.fake_gpu import forget_launchers, pretend
from tests.python.test_distributed import BUDGET, CAUSAL, ODD, compare, in_one_process, rows_of


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    ranks = Pool(tmp_path_factory.mktemp("ranks"), 4)
    yield ranks
    ranks.close()


CASES = [
    (Case(2, "ulysses", CAUSAL, heads=(8, 4), batch=1), 4),
    (Case(3, "ulysses", {"softcap": 2.0, "layout": "contiguous"}, heads=(6, 6), batch=1, head_dim_v=24), 4),
    (Case(2, "ulysses", {"window_size": (9, 4)}, heads=(4, 4), batch=1, seqlen=24), 4),
    (Case(2, "ulysses", CAUSAL, has_sinks=True), 4),
    (Case(4, "ulysses", {"window_size": (9, 4), "layout": "contiguous"}, seqlen=32), 4),
    (Case(4, "ulysses", CAUSAL | {"cu_seqlens": ODD}, batch=1), 4),
    (Case("2x2", "mesh", CAUSAL, head_dim_v=24), 4),
    (Case(2, "ulysses", CAUSAL, with_gradient=False), 2),
]


def test_ulysses_by_peer_memory_is_attention_of_the_whole(pool: Pool, tmp_path: Path) -> None:
    for number, (case, meetings) in enumerate(CASES):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = pool(members(case.ranks), "attend_by_peer_memory", case, str(folder))
        compare(case, [of_rank for of_rank, _ in found], in_one_process(case), BUDGET)
        # Q, K and V; the output with its LSE; and as often in the backward pass.
        assert [count for _, count in found] == [meetings] * len(found)


IN_WAVES = [
    # Q, K and V in two waves, and the output; alone with a softcap or one key/value head a rank in one.
    (Case(2, "ulysses", CAUSAL, heads=(8, 4), batch=1), 3),
    (Case(2, "ulysses", CAUSAL, heads=(16, 16), batch=2, head_dim_v=24), 3),
    (Case(2, "ulysses", {"window_size": (9, 4)}, heads=(4, 4), batch=1, seqlen=24), 3),
    (
        Case(3, "ulysses", {"window_size": (9, 4), "layout": "contiguous"}, heads=(6, 6), batch=2, seqlen=24),
        3,
    ),
    (Case(3, "ulysses", {"softcap": 2.0, "layout": "contiguous"}, heads=(6, 6), batch=1), 2),
    (Case(2, "ulysses", CAUSAL, heads=(4, 2), batch=1), 2),
]


def attend_in_waves(case: Case, folder: str) -> tuple[dict[str, np.ndarray], int]:
    """``attend_by_peer_memory`` where few bytes are enough for waves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(over_peers, "LEAST_IN_WAVES", 0)
        return attend_by_peer_memory(case, folder)


def test_heads_in_waves_are_attention_of_the_whole(pool: Pool, tmp_path: Path) -> None:
    for number, (case, meetings) in enumerate(IN_WAVES):
        folder = tmp_path / str(number)
        folder.mkdir()
        case = replace(case, with_gradient=False)
        found = pool(members(case.ranks), "test_distributed_peers.attend_in_waves", case, str(folder))
        compare(case, [of_rank for of_rank, _ in found], in_one_process(case), BUDGET)
        assert [count for _, count in found] == [meetings] * len(found), case


IN_PARTS = [
    # A meeting for each part that comes and each that goes, two forward and four backward, and one for each that takes
    # the room of another.
    (Case(2, "ulysses", CAUSAL, heads=(16, 8), batch=1), 4 + 10),
    (Case(2, "ulysses", CAUSAL, heads=(8, 8), with_gradient=False, head_dim_v=24), 4),
    (Case(3, "ulysses", {"softcap": 2.0, "layout": "contiguous"}, heads=(6, 6), batch=1, head_dim_v=24), 8),
    (Case(2, "ulysses", {"window_size": (9, 4)}, heads=(4, 4), batch=2, seqlen=24), 8),
    # A head of keys for each rank is one part.
    (Case(2, "ulysses", CAUSAL, heads=(4, 2), batch=1), 4),
]
LEAST = CAUSAL | {"memory": "least"}
AT_LEAST = [
    (Case(2, "auto", LEAST, heads=(8, 8), batch=1, head_dim_v=16), 4 + 10),
    # Sinks, and heads of Q that take more than those of K and V, are for the ring, which writes to no files.
    (Case(2, "auto", LEAST, heads=(8, 8), batch=1, head_dim_v=16, has_sinks=True), 0),
    (Case(2, "auto", LEAST, heads=(16, 4), batch=1, head_dim_v=16), 0),
    # Eleven parts are too many.
    (Case(2, "auto", LEAST, heads=(22, 22), batch=1, head_dim_v=16), 0),
]


def attend_with_small_buffers(case: Case, folder: str) -> tuple[dict[str, np.ndarray], int]:
    """``attend_by_peer_memory`` where a buffer takes no more than is needed, for these shapes to keep to the aim."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pushed, "LEAST_BYTES", 1)
        return attend_by_peer_memory(case, folder)


def test_ulysses_in_parts_is_attention_of_the_whole(pool: Pool, tmp_path: Path) -> None:
    for number, (case, meetings) in enumerate((*IN_PARTS, *AT_LEAST)):
        folder = tmp_path / str(number)
        folder.mkdir()
        run = ("attend_by_peer_memory", case, str(folder), True)
        if number >= len(IN_PARTS):
            run = ("test_distributed_peers.attend_with_small_buffers", case, str(folder))
        found = pool(members(case.ranks), *run)
        compare(case, [of_rank for of_rank, _ in found], in_one_process(case), BUDGET)
        assert [count for _, count in found] == [meetings] * len(found), case


def attend_in_no_parts(what: str) -> str:
    """What a call is refused with whose heads cannot go in parts."""
    x, options = torch.zeros(1, 8, 4, 16, dtype=DTYPE), {"method": "ulysses", "memory": "least"}
    calls = {
        "sinks": lambda: context_parallel_attention(
            x, x, x, groups()[2], sinks=torch.zeros(4, dtype=DTYPE), **options
        ),
        "cu_seqlens": lambda: context_parallel_attention(
            x[0], x[0], x[0], groups()[2], cu_seqlens=(0, 16), **options
        ),
        "quantization": lambda: context_parallel_attention(
            x, x, x, groups()[2], quantization=Fp8Quantization(), **options
        ),
    }
    return error_of(calls[what])


@pytest.mark.parametrize("what", ["sinks", "cu_seqlens", "quantization"])
def test_what_heads_do_not_go_in_parts_with_is_refused(pool: Pool, what: str) -> None:
    message = f"memory='least' with method='ulysses' is not implemented with {what}; use method='ring'"
    for told in pool(2, "test_distributed_peers.attend_in_no_parts", what):
        assert told.startswith(f"NotImplementedError: {message}")


HALVES = HeadParts((2, 2), 2)
DIVISIONS = [
    (Division(HALVES, HALVES), 8),
    (Division(HeadParts((1, 3), 2), HeadParts((3, 1), 2)), 8),
    (Division(HeadParts((2, 1, 1), 3), HeadParts((2, 2), 1)), 6 + 5),
]


def test_heads_may_be_divided_in_any_way(pool: Pool, tmp_path: Path) -> None:
    for number, (division, meetings) in enumerate(DIVISIONS):
        folder = tmp_path / str(number)
        folder.mkdir()
        case = Case(
            2, "ulysses", CAUSAL, heads=(16, 8), batch=1 + number % 2, head_dim_v=8 + 8 * (number % 2)
        )
        found = pool(2, "attend_by_peer_memory", case, str(folder), True, division)
        compare(case, [of_rank for of_rank, _ in found], in_one_process(case), BUDGET)
        assert [count for _, count in found] == [meetings] * 2, division


def test_parts_are_for_kernels_that_may_write_gradients_over_what_they_read(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    # Of wide heads two CTAs read a tile of keys.
    pretend(monkeypatch, backward)
    request.addfinalizer(forget_launchers)
    monkeypatch.setattr(compile_cache, "get_backward", lambda config: None)
    problem = Problem(4, 1 << 11, 1 << 11, "zigzag", -1, 0)
    for head_dim, may_be in ((64, True), (128, True), (256, False)):
        q, k, v = (torch.empty(1, 1 << 9, 16, head_dim, dtype=torch.float16) for _ in range(3))
        found = ulysses.parts_of((q, k, v), 4, problem, Call(1.0, 0.0, None, False, 0, True), True)
        assert (found is not None) == may_be, head_dim
        assert ulysses.parts_of((q, k, v), 4, problem, Call(1.0, 0.0, None, False, 0, True), False)


@pytest.mark.parametrize("by_peer_memory", [True, False], ids=["peer memory", "messages"])
def test_heads_are_quantized_where_they_are_attended_to(
    pool: Pool, tmp_path: Path, by_peer_memory: bool
) -> None:
    # The blocks and their scales are those of one process on the whole, and so is the mean of K.
    quantization = Fp8Quantization(smooth_k=True)
    # Two names of a causal mask.
    mask = {"causal": True} if by_peer_memory else {"window_size": (-1, 0)}
    options = {**mask, "quantization": quantization}
    case = Case(2, "ulysses", options, 256, 256, heads=(8, 4), batch=1, with_gradient=False, head_dim_v=16)
    q, k, v, *_ = case.tensors()
    out, lse = flash_attn_fp8_func(q, k, v, causal=True, return_attn_probs=True, quantization=quantization)
    for sinks in (False, True):
        case = replace(case, has_sinks=sinks)
        run = ("attend_by_peer_memory", case, str(tmp_path)) if by_peer_memory else ("attend", case)
        for rank, found in enumerate(pool(2, *run)):
            rows = rows_of(case, rank, case.seqlen)
            results, meetings = found if by_peer_memory else (found, 2)
            assert meetings == 2
            if sinks:
                gate = torch.sigmoid(lse.mT - case.tensors()[-1])[:, rows]
                assert np.allclose(results["out"], (out[:, rows] * gate[..., None]).numpy(), 2e-3, 1e-4)
            else:
                assert np.array_equal(results["out"], out[:, rows].float().numpy())
                assert np.allclose(results["lse"], lse.mT[:, rows].numpy(), 1e-6, 1e-6)


@pytest.mark.parametrize(("ranks", "layout"), [(2, "zigzag"), (3, "zigzag"), (3, "contiguous")])
def test_writes_bring_what_messages_bring(pool: Pool, tmp_path: Path, ranks: int, layout: str) -> None:
    assert all(pool(ranks, "exchange_both_ways", ranks, layout, str(tmp_path)))


ANOTHER = {
    "like": (0, 0),
    "misaligned": (0, 1),
    "strides": (1, 1),
    "no gradient": (1, 1),
    "options": (1, 0),
    "shape": (1, 3),
    "dtype": (1, 3),
    "layout": (1, 3),
    "group": (1, 3),
}
"""What a call of each kind is found anew in: the request, and what it sends. The last of three is the gradient of the
output; those of Q, K and V are read by others, whatever is sent."""


def test_only_a_call_like_earlier_ones_is_not_found_anew(pool: Pool, tmp_path: Path) -> None:
    for kind, (requests, exchanges) in ANOTHER.items():
        folder = tmp_path / kind
        folder.mkdir()
        for like, other in pool(2, "call_again", kind, str(folder)):
            assert like == (0, 0, 0)
            assert other[:2] == (requests, exchanges), kind
            assert (other[2] > 0) == (exchanges > 0), kind


def test_layers_of_two_groups_share_rooms_with_their_own_group_alone(pool: Pool, tmp_path: Path) -> None:
    for in_parts in (False, True):
        folder = str(tmp_path / f"layers {in_parts}")
        assert pool(2, "layers_by_peer_memory", folder, in_parts) == [True, True]


def test_one_rank_that_cannot_keeps_all_to_messages(pool: Pool) -> None:
    assert (
        pool(2, "share_memory", "cpu")
        == ["tensors are on cpu, which has no memory that peers read on rank 0"] * 2
    )
    assert pool(2, "share_memory", "cannot") == ["no luck on rank 1"] * 2
    assert pool(2, "share_memory", "elsewhere") == ["rank 1 is in another place than rank 0"] * 2
    assert pool(2, "share_memory", "fails") == ["RuntimeError: CUDA driver error on rank 1"] * 2


def test_rooms_first_seen_in_inference_mode_are_written_to_outside_of_it() -> None:
    memory = object.__new__(SymmetricMemory)
    memory.views = {}
    memory.handle = SimpleNamespace(
        get_buffer=lambda rank, shape, dtype, first: torch.zeros(shape, dtype=dtype)
    )
    with torch.inference_mode():
        memory.view(0, (2, 3), torch.float32, 0)
    assert memory.view(0, (2, 3), torch.float32, 0).copy_(torch.ones(2, 3)).sum() == 6


def test_a_gpu_needs_symmetric_memory_and_a_system_that_passes_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert why_not(torch.device("cuda")) == ""

    def refuse(*arguments: object) -> None:
        raise PermissionError("forbidden")

    monkeypatch.setattr("socket.send_fds", refuse)
    assert why_not(torch.device("cuda")) == "this system passes no file descriptors (forbidden)"


def test_an_explanation_says_what_carries_the_heads() -> None:
    short = explain_context_parallel(4, 1 << 15, 16, 16, 128, causal=True)
    assert short.method == "ulysses" and short.transport == "peer memory"
    assert "heads go by peer memory" in short.reason
    on_two = explain_context_parallel(2, 1 << 15, 32, 8, 128, causal=True)
    assert (on_two.method, on_two.transport) == ("ulysses", "peer memory")
    apart = explain_context_parallel(4, 1 << 15, 16, 16, 128, causal=True, machine=Machine(host_gpus=1))
    assert apart.seconds["ulysses"] > short.seconds["ulysses"]
    # Long shards hide what messages cost, and would want much memory.
    long = explain_context_parallel(4, 1 << 17, 16, 16, 128, causal=True)
    assert long.transport in ("", "messages")
    fp8 = explain_context_parallel(4, 1 << 15, 16, 16, 128, causal=True, fp8=True)
    assert (fp8.method, fp8.transport) == (
        "ulysses",
        "peer memory",
    ) and "in 16 bits it would take" in fp8.reason
    mesh = explain_context_parallel(8, 1 << 15, 16, 16, 128, causal=True, ulysses=4)
    assert mesh.transport == "peer memory"
