"""Attention over ranks, forward and backward, against attention of the whole sequence in float64. Gloo on a CPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hopper_attention import flash_attn_fp8_func
from hopper_attention.distributed.layout import positions_of, shard
from hopper_attention.distributed.schedule import Schedule
from hopper_attention.quantized import Fp8Quantization
from hopper_attention.reference import attention_naive
from tests.python.distributed_errors import DIFFERENT
from tests.python.distributed_ranks import MESHES, Case, Pool, members

ODD = (0, 1, 6, 23, 23, 24, 41)
BUDGET = 2e-3
"""Largest error relative to the largest value: float16 has 5e-4, and a value is rounded a few times on its way."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    ranks = Pool(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


def in_one_process(case: Case) -> dict[str, Tensor]:
    """Of the whole sequence, in float64, document by document."""
    *whole, sinks = (x.double().requires_grad_() for x in case.tensors())
    q, k, v, dout, dlse = whole
    o = case.options
    left, right = o.get("window_size", (-1, -1))
    options: dict[str, Any] = {"causal": o.get("causal", False), "softcap": o.get("softcap", 0.0)}
    options |= {"window_left": left, "window_right": right, "softmax_scale": o.get("softmax_scale")}
    if case.has_sinks:
        options["sinks"] = sinks
    bounds = case.documents or (0, max(case.seqlen, case.seqlen_k))
    outs, lses = [], []
    for start, stop in pairwise(bounds):
        out, lse = attention_naive(*(x[:, start:stop] for x in (q, k, v)), **options)
        outs.append(out)
        lses.append(lse.mT)
    behind = case.seqlen - bounds[-1] if case.documents else 0
    outs.append(torch.zeros(case.batch, behind, *outs[0].shape[2:], dtype=torch.float64))
    lses.append(torch.full((case.batch, behind, case.heads[0]), -torch.inf, dtype=torch.float64))
    out, lse = torch.cat(outs, 1), torch.cat(lses, 1)
    loss = (out * dout).sum() + (torch.where(lse.isfinite(), lse, 0.0) * dlse).sum()
    wanted = [q, k, v, sinks] if case.has_sinks else [q, k, v]
    grads = torch.autograd.grad(loss, wanted)
    found = {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv", "dsinks"), grads, strict=False))}
    return {name: x.detach() for name, x in found.items()}


def rows_of(case: Case, rank: int, seqlen: int) -> Tensor:
    layout = case.options.get("layout", "zigzag")
    if isinstance(case.ranks, int):
        return positions_of(rank, case.ranks, seqlen, layout)
    ring, ulysses = len(MESHES[case.ranks]), len(MESHES[case.ranks][0])
    rows = positions_of(rank // ulysses, ring, seqlen, layout)
    return shard(rows, rank % ulysses, ulysses, "contiguous", 0)


def compare(
    case: Case, of_ranks: list[dict[str, np.ndarray]], wanted: dict[str, Tensor], budget: float
) -> None:
    sums: dict[str, Tensor] = {}
    for rank, found in enumerate(of_ranks):
        of_q, of_k = rows_of(case, rank, case.seqlen), rows_of(case, rank, case.seqlen_k)
        for name, values in found.items():
            got = torch.from_numpy(values).double()
            if name == "dsinks":
                sums[name] = sums.get(name, 0.0) + got
                continue
            got = got[None] if case.documents else got
            here = wanted[name][:, of_k if name in ("dk", "dv") else of_q]
            check(f"{name} of rank {rank} in {case}", got, here, wanted[name], budget)
    for name, total in sums.items():
        check(f"{name} in {case}", total, wanted[name], wanted[name], budget)


def check(what: str, got: Tensor, here: Tensor, whole: Tensor, budget: float) -> None:
    assert got.shape == here.shape, what
    assert torch.equal(got.isfinite(), here.isfinite()), what
    error = (got - here).masked_fill(~here.isfinite(), 0.0).abs().max()
    scale = whole.masked_fill(~whole.isfinite(), 0.0).abs().max()
    assert error <= budget * scale, f"{what}: {error:.2e} of {scale:.2e}"


CAUSAL = {"causal": True}
RING = [
    Case(2, "ring"),
    Case(2, "ring", CAUSAL),
    Case(3, "ring", CAUSAL | {"layout": "contiguous"}),
    Case(4, "ring", CAUSAL | {"softcap": 2.0}, has_sinks=True, head_dim_v=24),
    Case(4, "ring", {"window_size": (7, 0), "layout": "contiguous"}),
    Case(4, "ring", {"window_size": (9, 4)}, has_sinks=True),
    Case(2, "ring", CAUSAL, heads=(3, 1)),
    Case(4, "ring", CAUSAL | {"cu_seqlens": ODD}, batch=1, has_sinks=True),
    Case(3, "ring", {"cu_seqlens": ODD, "layout": "contiguous"}, batch=1),
    Case(3, "ring", {"cu_seqlens": ODD, "window_size": (4, 2), "softcap": 3.0}, batch=1),
    Case(2, "ring", CAUSAL, seqlen=16),
    Case(8, "ring", CAUSAL, batch=1),
    Case(4, "auto", CAUSAL | {"memory": "least"}, has_sinks=True),
]
GATHER = [
    Case(2, "all_gather"),
    Case(4, "all_gather", CAUSAL, has_sinks=True),
    Case(3, "all_gather", CAUSAL | {"layout": "contiguous", "softcap": 2.0}, heads=(3, 1)),
    Case(4, "all_gather", {"window_size": (9, 4)}),
    Case(4, "all_gather", CAUSAL | {"cu_seqlens": ODD}, batch=1, has_sinks=True),
    Case(3, "all_gather", {"cu_seqlens": ODD, "window_size": (4, 2)}, batch=1),
    Case(2, "all_gather", {"window_size": (20, 0)}, seqlen=16),
    Case(8, "all_gather", CAUSAL, batch=1),
]
ULYSSES = [
    Case(2, "ulysses", CAUSAL, has_sinks=True),
    Case(4, "ulysses", {"window_size": (9, 4), "layout": "contiguous"}),
    Case(2, "ulysses", CAUSAL | {"cu_seqlens": ODD, "softcap": 2.0}, batch=1, has_sinks=True),
    # A rank has two rows, of one head and of two.
    Case(2, "ulysses", CAUSAL, seqlen=4, seqlen_k=4),
    Case(2, "ulysses", seqlen=4, seqlen_k=4, heads=(2, 1)),
    Case("2x2", "mesh", CAUSAL, has_sinks=True),
    Case("2x2", "auto", CAUSAL | {"cu_seqlens": ODD}, batch=1),
    Case("2x4", "mesh", {"window_size": (9, 0), "layout": "contiguous"}),
    Case(4, "auto", CAUSAL),
    Case(8, "ulysses", CAUSAL, heads=(8, 2), batch=1),
]


def attend_and_compare(pool: Pool, cases: list[Case]) -> None:
    for case in cases:
        found = pool(members(case.ranks), "attend", case)
        compare(case, found, in_one_process(case), BUDGET)


def test_ring_is_attention_of_the_whole_forward_and_backward(pool: Pool) -> None:
    attend_and_compare(pool, RING)


def test_all_gather_is_attention_of_the_whole_forward_and_backward(pool: Pool) -> None:
    attend_and_compare(pool, GATHER)


@pytest.mark.parametrize(
    ("case", "launches"),
    [
        (Case(2, "ring", CAUSAL), [3, 3]),
        # Half the rows of a rank are whole tiles, whose sums of dQ go into those of all.
        (Case(2, "ring", CAUSAL, batch=1, seqlen=512, seqlen_k=512), [3, 3]),
        (Case(4, "ring", CAUSAL, batch=1, has_sinks=True, heads=(6, 2)), [3, 4, 4, 3]),
        (Case(3, "ring", batch=3), [4, 4, 4]),
        (Case(2, "all_gather", CAUSAL), [4, 2]),
        (Case(2, "all_gather"), [2, 2]),
    ],
    ids=["causal", "whole tiles", "four ranks", "full", "gathered", "gathered and full"],
)
def test_kernels_add_dq_of_all_shards_to_the_same_sums(pool: Pool, case: Case, launches: list[int]) -> None:
    found = pool(members(case.ranks), "attend_with_kernels", case)
    compare(case, [of_rank for of_rank, _ in found], in_one_process(case), BUDGET)
    assert [count for _, count in found] == launches


@pytest.mark.parametrize(
    ("case", "schedule", "launches"),
    [
        (Case(4, "ring", CAUSAL, batch=1), Schedule(), [5, 5, 5, 5]),
        (Case(4, "ring", CAUSAL), Schedule(2), [8, 8, 8, 8]),
        (Case(4, "ring", CAUSAL, batch=1), Schedule(2, at_once=True), [4, 6, 6, 4]),
        # Whole tiles: sums of half of the rows go into those of all, which are there earlier or later.
        (Case(2, "ring", CAUSAL, batch=1, seqlen=512, seqlen_k=512), Schedule(2), [4, 4]),
        (
            Case(2, "ring", CAUSAL, batch=1, seqlen=512, seqlen_k=512, heads=(8, 4)),
            Schedule(halves=True),
            [6, 5],
        ),
        (Case(2, "ring", CAUSAL, batch=1, heads=(8, 4)), Schedule(4, halves=True), [8, 8]),
        (Case(2, "ring", CAUSAL, batch=4), Schedule(halves=True), [6, 5]),
        # Chunks of 12: own keys are of half of the rows each, in two parts, and others' too, in one.
        (Case(2, "ring", {"window_size": (12, 0)}), Schedule(), [5, 7]),
        (Case(2, "ring", {"window_size": (-1, 12)}, batch=1, heads=(8, 4)), Schedule(halves=True), [12, 12]),
    ],
    ids=[
        "one by one",
        "in parts",
        "at once in parts",
        "whole tiles",
        "halves",
        "halves in parts",
        "halves of batches",
        "windows",
        "halves of windows",
    ],
)
def test_kernels_add_to_sums_by_any_schedule(
    pool: Pool, case: Case, schedule: Schedule, launches: list[int]
) -> None:
    found = pool(members(case.ranks), "attend_with_kernels", case, schedule)
    compare(case, [of_rank for of_rank, _ in found], in_one_process(case), BUDGET)
    assert [count for _, count in found] == launches


SCHEDULED = [
    (Case(4, "ring", CAUSAL, batch=1, heads=(8, 4), has_sinks=True), (1, 2, 4)),
    (Case(4, "ring", CAUSAL | {"cu_seqlens": ODD}, batch=1, has_sinks=True), (1, 2)),
    (Case(3, "ring", {"window_size": (20, 4)}, batch=1, head_dim_v=24), (1, 2)),
    (Case(4, "ring", CAUSAL, seqlen=16, batch=1), (1, 2)),
]


def test_heads_in_parts_are_as_those_of_all_and_shards_at_once_as_exact(pool: Pool) -> None:
    for case, parts in SCHEDULED:
        wanted = in_one_process(case)
        for at_once in (False, True):
            found = [pool(members(case.ranks), "attend_by", case, Schedule(n, at_once)) for n in parts]
            for of_ranks in found:
                compare(case, of_ranks, wanted, BUDGET)
            # But for the last bit: PyTorch's exp has another one where a row begins elsewhere in a vector.
            for whole, *others in zip(*found, strict=True):
                for name, other in product(("out", "lse", "dk", "dv"), others):
                    assert np.allclose(whole[name], other[name], 2.0**-10, 1e-6, equal_nan=True), (case, name)


def test_ulysses_and_meshes_are_attention_of_the_whole_forward_and_backward(pool: Pool) -> None:
    attend_and_compare(pool, ULYSSES)


def test_a_ring_repeats_its_bits(pool: Pool) -> None:
    assert pool(4, "attend_twice", Case(4, "ring", CAUSAL)) == [True] * 4


@pytest.mark.parametrize(
    ("ranks", "granularity"), [(2, "block"), ("2x2", "block"), (3, "block"), (2, "head"), (8, "tensor")]
)
def test_keys_and_values_travel_in_e4m3(pool: Pool, ranks: int | str, granularity: str) -> None:
    # The same quantization on one process, of the whole sequence, is off by as much.
    quantization = Fp8Quantization(smooth_v=True, granularity=granularity)
    seqlen = 192 if ranks == 3 else 256
    for causal in (False, True):
        options = {"causal": causal, "quantization": quantization}
        case = Case(
            ranks,
            "auto",
            options,
            batch=1,
            seqlen=seqlen,
            seqlen_k=seqlen,
            with_gradient=False,
            head_dim_v=16,
            has_sinks=ranks != 3,
        )
        exact = in_one_process(replace(case, options={"causal": causal}))
        plain = in_one_process(replace(case, options={"causal": causal}, has_sinks=False))
        q, k, v = case.tensors()[:3]
        one = flash_attn_fp8_func(q, k, v, causal=causal, quantization=quantization)
        error_of_one = (one.double() - plain["out"]).abs().max() / plain["out"].abs().max()
        assert 1e-3 < error_of_one < 0.2
        found = pool(members(ranks), "attend", case)
        compare(case, found, exact, 1.5 * float(error_of_one))
        if ranks == 2:
            in_parts = pool(ranks, "attend_by", case, Schedule(2))
            for whole, parts in zip(found, in_parts, strict=True):
                assert np.array_equal(whole["out"], parts["out"])


@pytest.mark.parametrize("ranks", [2, "2x2"])
def test_dtensors_come_back_as_dtensors(pool: Pool, ranks: int | str) -> None:
    wanted = in_one_process(Case(ranks, "auto", CAUSAL))
    *whole, _ = Case(ranks, "auto").tensors()
    q, k, v, dout = (x.double().requires_grad_() for x in whole[:4])
    out, _ = attention_naive(q, k, v, causal=True)
    (dq,) = torch.autograd.grad((out * dout).sum(), [q])
    for found in pool(members(ranks), "of_dtensors", ranks):
        check("out", torch.from_numpy(found["out"]).double(), wanted["out"], wanted["out"], BUDGET)
        check("dq", torch.from_numpy(found["dq"]).double(), dq, dq, BUDGET)


def test_what_autocast_casts_is_cast_in_every_call(pool: Pool) -> None:
    assert all(pool(2, "attend_under_autocast"))


def test_a_second_derivative_is_refused(pool: Pool) -> None:
    for method in ("ring", "all_gather", "ulysses"):
        for told in pool(2, "differentiated_twice", method):
            assert told.startswith(("RuntimeError", "NotImplementedError")) and "different" in told


def test_dtensors_sharded_by_heads_are_refused(pool: Pool) -> None:
    for told in pool(2, "of_dtensors_sharded_elsewhere"):
        assert told.startswith("ValueError: q has placements") and "Shard(dim=1)" in told


def test_a_model_of_transformers_gets_it_by_name(pool: Pool) -> None:
    case = Case(4, "ring", {"window_size": (8, 0), "softmax_scale": 0.3, "causal": True}, has_sinks=True)
    compare(case, pool(4, "of_a_model", case), in_one_process(case), BUDGET)
    told, _ = pool(2, "of_a_model_with_padding")
    assert told.startswith("NotImplementedError: attention_mask is given")


def test_a_compiled_call_breaks_the_graph_and_is_right(pool: Pool) -> None:
    assert pool(2, "compiled", Case(2, "ring", CAUSAL)) == [True, True]


@pytest.mark.parametrize(("ranks", "layout"), [(3, "zigzag"), ("2x4", "zigzag"), ("2x2", "contiguous")])
def test_sequences_are_cut_and_put_together(pool: Pool, ranks: int | str, layout: str) -> None:
    assert all(pool(members(ranks), "round_trip", ranks, layout))


@pytest.mark.parametrize(
    ("about", "name", "of_ranks"),
    [
        ("shape", "shape of x", ("[2, 8, 3]", "[2, 4, 3]")),
        ("dtype", "dtype of x", ("'torch.float32'", "'torch.int64'")),
        ("layout", "layout", ("'zigzag'", "'contiguous'")),
    ],
)
def test_parts_that_do_not_fit_together_are_told_to_all_ranks(
    pool: Pool, about: str, name: str, of_ranks: tuple[str, str]
) -> None:
    """Gloo ends the process where lengths differ, and NCCL waits."""
    here, there = of_ranks
    first, second = pool(2, "distributed_errors.put_together", about)
    assert first.startswith(f"DisagreementError: {name} is {here} on rank 0 and {there} on rank 1, allowed")
    assert second.startswith(f"DisagreementError: {name} is {there} on rank 1 and {here} on rank 0, allowed")


def test_a_sequence_put_together_where_another_rank_attends(pool: Pool) -> None:
    first, second = pool(2, "distributed_errors.put_together", "attention")
    assert first.startswith("DisagreementError: call is 'unshard_sequence' on rank 0 and None on rank 1")
    assert second.startswith("DisagreementError: ") and "and None on rank 0" in second


def test_arguments_of_sequences_are_checked_before_anything_is_sent(pool: Pool) -> None:
    for told in pool(2, "distributed_errors.mistaken_sequences"):
        assert [message.partition(", allowed")[0] for message in told] == [
            "TypeError: x is a NoneType",
            "ValueError: dim is 3",
            "ValueError: layout is 'rows'",
            "TypeError: mesh is a int, 3",
            "TypeError: seqlen is a str, '8'",
            "ValueError: seqlen is -4",
        ]


def test_options_are_checked_by_name(pool: Pool) -> None:
    for told in pool(2, "distributed_errors.mistaken_options"):
        assert [message.partition(", allowed")[0] for message in told] == [
            "TypeError: timeout is a str, '3'",
            "ValueError: timeout is inf",
            "TypeError: timeout is a bool, True",
            "TypeError: sinks is a list",
            told[4].partition(", allowed")[0],
            "TypeError: cu_seqlens has 7.6, a float",
            "TypeError: cu_seqlens has 0.0, a float",
        ]
        assert told[4].startswith("TypeError: mesh is a list, [")


def test_ranks_that_disagree_are_told_who_and_in_what(pool: Pool) -> None:
    first, second = pool(2, "distributed_errors.disagree", "shape")
    assert first.startswith(
        "DisagreementError: the shape of q is [1, 8, 2, 16] on rank 0 and [1, 12, 2, 16] on rank 1"
    )
    assert "[1, 12, 2, 16] on rank 1 and [1, 8, 2, 16] on rank 0" in second
    assert "the window, with causal," in pool(2, "distributed_errors.disagree", "causal")[0]
    told = pool(2, "distributed_errors.disagree", "sinks")[0]
    assert "whether there are sinks is False on rank 0 and True on rank 1" in told
    told = pool(2, "distributed_errors.disagree", "gradient of sinks")[0]
    assert "whether a gradient is wanted is False on rank 0 and True on rank 1" in told
    told = pool(2, "distributed_errors.disagree", "hooks")[0]
    assert "whether hooks save tensors is False on rank 0 and True on rank 1" in told
    for name, (here, there) in DIFFERENT.items():
        of_ranks = pool(2, "distributed_errors.disagree", name)
        if name in ("quantization", "cu_seqlens"):
            assert all(told.startswith(f"DisagreementError: {name}") for told in of_ranks)
            continue
        assert of_ranks[0].startswith(
            f"DisagreementError: {name} is {here!r} on rank 0 and {there!r} on rank 1,"
        )
        assert of_ranks[1].startswith(
            f"DisagreementError: {name} is {there!r} on rank 1 and {here!r} on rank 0,"
        )
    *others, last = pool(3, "distributed_errors.disagree", "timeout", 3)
    for rank, told in enumerate(others):
        assert told.startswith(
            f"DisagreementError: timeout is 20.0 on rank {rank} and 30.0 on rank 2, allowed: the"
        )
    assert last.startswith(
        "DisagreementError: timeout is 30.0 on rank 2 and 20.0 on rank 0, allowed: the same on all"
    )
    # And after that the same ranks can go on.
    assert all(pool(2, "round_trip", 2, "zigzag"))


def test_ranks_that_part_later_are_told_so_after_their_time(pool: Pool) -> None:
    # What was agreed on is not said again, so that nobody knows it sooner.
    old, new = pool(2, "distributed_errors.change")
    assert old.startswith("PeerError: rank 0 waited in vain to send K and V to rank 1")
    assert old.endswith("; meanwhile rank 1 came to another call, whose shapes or options are new there")
    assert new.startswith(
        "PeerError: rank 1 waited in vain for rank 0 to call attention with new shapes or options"
    )


@pytest.mark.parametrize("calls_before", [0, 1, 2])
def test_a_rank_that_checks_is_told_of_one_that_does_not(pool: Pool, calls_before: int) -> None:
    told, other = pool(2, "distributed_errors.check_or_not", calls_before)
    assert told.startswith(
        "DisagreementError: check is 'first' on rank 0 and 'never' on rank 1, allowed: the same"
    )
    assert other.startswith("PeerError: rank 1 waited in vain to")


def test_a_rank_that_does_not_come_is_named(pool: Pool) -> None:
    told, *_ = pool(8, "distributed_errors.stay_away", "ring", "first")
    assert told.startswith("PeerError: rank 0 waited in vain for rank 1 to call attention")
    # Where calls are not checked, the transfer has to time out.
    told, *_ = pool(8, "distributed_errors.stay_away", "ring", "never")
    assert told.startswith("PeerError: rank 0 waited in vain to send K and V to rank 1")
    told, *_ = pool(8, "distributed_errors.stay_away", "ulysses", "never")
    assert told.startswith("PeerError: rank 0 waited in vain to exchange heads with all ranks")


def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    ranks = Pool(tmp_path, 2)
    survivor, dying = ranks.connections
    for connection in (survivor, dying):
        connection.send(("distributed_errors.die", ()))
    assert survivor.poll(60)
    is_right, told = survivor.recv()
    assert is_right and told.startswith("PeerError: rank 0 waited in vain to ") and "rank 1" in told
    ranks.processes[1].join(10)
    ranks.processes[0].kill()


REFUSALS = {
    "rows": "ValueError: q has 7 rows on this rank, allowed with layout 'zigzag': multiples of 2",
    "heads": "ValueError: q has 3 heads and k 3, allowed for ulysses attention on 2 ranks: multiples of 2",
    "method": "ValueError: method is 'sing', allowed: 'ring', 'all_gather', 'ulysses', 'mesh', 'auto'",
    "mesh": "ValueError: method is 'mesh' and mesh has 1 dimensions",
    "documents": "ValueError: cu_seqlens ends with 17, allowed: at most 16",
    "packed": "ValueError: q has shape (1, 8, 4, 16), allowed with cu_seqlens: (rows, heads, head_dim)",
    "fp8 window": "NotImplementedError: quantization goes with the ring and ulysses, causal or not, forward only, "
    "and not with a window",
    "fp8 gradient": "NotImplementedError: quantization goes with the ring and ulysses, causal or not, forward only, "
    "and not with a gradient",
    "fp8 lengths": "NotImplementedError: quantization goes with the ring and ulysses, causal or not, forward only, "
    "and not with another length of q than of k",
    "fp8 mean": "NotImplementedError: quantization has smooth_k",
    "timeout": "ValueError: timeout is -1.0, allowed: seconds",
    "memory": "ValueError: memory is 'little', allowed: 'auto', 'least'",
    "memory of gathered keys": "ValueError: memory is 'least' and method 'all_gather', with a mesh of 1 dimensions, "
    "allowed: 'ring', 'ulysses' and 'auto'",
}


def test_bad_calls_are_refused_before_anything_is_sent(pool: Pool) -> None:
    for what, message in REFUSALS.items():
        told, _ = pool(2, "distributed_errors.refuse", what)
        assert told.startswith(message), (what, told)


def test_the_examples_of_the_page_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    # On one rank, which is a group too.
    page = (Path(__file__).resolve().parents[2] / "docs" / "distributed.md").read_text()
    found = re.findall(r"^```python\n(.*?)^```$", page, re.S | re.M)
    settings = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    names: dict[str, Any] = {}
    try:
        for number, example in enumerate(found):
            on_a_cpu = example.replace('"cuda"', '"cpu"').replace('"nccl"', '"gloo"')
            on_a_cpu = on_a_cpu.replace("4096, 16, 128", "64, 2, 32").replace("1024, 16, 128", "64, 2, 32")
            on_a_cpu = on_a_cpu.replace("1024, 8, 128", "64, 2, 32").replace(
                "sequence_positions(4096", "sequence_positions(64"
            )
            on_a_cpu = re.sub(r"torch\.cuda\.set_device.*", "", on_a_cpu)
            exec(compile(on_a_cpu, f"docs/distributed.md, example {number + 1}", "exec"), names)
    finally:
        torch.distributed.destroy_process_group()
    assert len(found) >= 7
    assert names["whole"].shape == (1, 64, 2, 32) and names["positions"].tolist() == list(range(64))
