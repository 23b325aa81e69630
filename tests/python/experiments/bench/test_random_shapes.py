"""Problems that are drawn: the same for a seed, of every kind, and none too large to time."""

from __future__ import annotations

import pytest

from hopper_attention.experiments.bench.spec import (
    MOST_ELEMENTS,
    MOST_PAIRS,
    Problem,
    parse_problem,
    parse_shapes,
    random_problems,
)

MANY = random_problems(400, 3)


def test_a_seed_gives_the_same_problems() -> None:
    assert parse_shapes("random:12:3") == MANY[:12] and parse_shapes(" random:5 ") == random_problems(5, 0)
    assert len(set(MANY) & set(random_problems(400, 4))) < 8
    assert len(parse_shapes("random:3:1, paper,random:4:1")) == 4 + 36
    assert [parse_problem(problem.name) for problem in MANY] == list(MANY)


@pytest.mark.parametrize(
    "text", ["random", "random:", "random:0", "random:-3", "random:4:", "random:4:x", "Random:4"]
)
def test_what_is_no_number_of_problems_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="allowed: names such as"):
        parse_shapes(text)


def test_they_are_of_every_kind() -> None:
    assert {problem.head_dim for problem in MANY} == {64, 96, 128, 192, 256}
    groups = {problem.heads // problem.heads_kv for problem in MANY}
    assert {1, 3, 4, 5, 7, 8, 16} <= groups and all(p.heads % p.heads_kv == 0 for p in MANY)
    for share in (
        sum(p.causal for p in MANY),
        sum(p.seqlen_q % 128 == 0 for p in MANY),
        sum(p.seqlen_q != p.seqlen_k for p in MANY),
        sum(p.batch == 1 for p in MANY),
        sum(p.seqlen_q > 2048 for p in MANY),
    ):
        assert 0.1 < share / len(MANY) < 0.8


def test_none_is_too_large() -> None:
    def work(p: Problem) -> float:
        return p.batch * p.seqlen_q * p.seqlen_k * p.heads * p.head_dim / 128

    assert all(work(p) <= MOST_PAIRS and min(p.seqlen_q, p.seqlen_k) > 0 for p in MANY)
    assert all(p.batch * max(p.seqlen_q, p.seqlen_k) * p.heads * p.head_dim <= MOST_ELEMENTS for p in MANY)
    assert max(map(work, MANY)) > MOST_PAIRS / 2
