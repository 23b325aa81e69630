"""Which calls on a cache with ``qv`` the kernel for decoding over a latent serves, with which config, and why not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper.mla.config import MlaConfig
from hopper_attention import explain_kvcache
from hopper_attention.mla_rules import pieces_of, select_mla, why_not_mla
from tests.python.kvcache_cases import FP8, CacheCase
from tests.python.test_decode_rules import H200, HOPPER, call_of, with_columns

PAGES = CacheCase(page_size=8, head_dims=(64, 512), heads=(16, 1))
ONE_PAGE = replace(PAGES, page_size=0)


def qv_of(case: CacheCase) -> Tensor:
    rows = (sum(case.queries),) if case.packed_q else (case.batch, max(case.queries))
    return torch.zeros(*rows, case.heads[0], case.head_dims[1]).bfloat16()


SERVED: dict[str, tuple[CacheCase, dict[str, Any], dict[str, Any]]] = {
    "pages": (PAGES, {}, {"cta_rows": 64, "box_rows": 8, "paged": True}),
    "a single query": (
        replace(PAGES, queries=(1, 1, 1)),
        {"causal": True},
        {"cta_rows": 32, "causal": False},
    ),
    "more rows than a CTA has": (
        replace(PAGES, heads=(128, 1)),
        {"causal": True},
        {"cluster": 2, "causal": True},
    ),
    "no pages": (ONE_PAGE, {}, {"box_rows": 64, "paged": False}),
    "no pages, a cluster": (replace(ONE_PAGE, heads=(128, 1)), {}, {"box_rows": 32, "cluster": 2}),
    "narrow columns": (replace(PAGES, head_dims=(32, 256)), {}, {"head_dim_v": 256, "stages": 4}),
    "packed queries": (replace(PAGES, queries=(4, 0, 1), packed_q=True), {}, {"layout": "varlen"}),
    "leftpad in one page": (replace(ONE_PAGE, leftpad=(4, 0, 7)), {}, {"leftpad": True}),
    "a choice of sequences": (replace(ONE_PAGE, batch_idx=(4, 0, 2)), {}, {"paged": True}),
    "window, cap, sinks, splits": (
        PAGES,
        {"window_size": (5, 0), "softcap": 3.0, "sinks": torch.zeros(16), "num_splits": 2},
        {"window": True, "softcap": True, "sinks": True, "limits_splits": True},
    ),
}


@pytest.mark.parametrize("name", SERVED)
def test_what_is_served(name: str) -> None:
    case, given, fields = SERVED[name]
    given = given | {"qv": qv_of(case)}
    call = call_of(case, **given)
    assert why_not_mla(call, H200, "hopper") == ""
    config = select_mla(call)
    assert config == replace(config, **fields)
    plan = explain_kvcache(**case.build(torch.bfloat16, **given), device_capability=HOPPER)
    assert plan.path == "mla" and plan.config == config and plan.refused == ("decode: there is a qv",)


REFUSED: dict[str, tuple[CacheCase, dict[str, Any], str]] = {
    "a wide head": (
        replace(PAGES, head_dims=(72, 512)),
        {},
        "head_dim is 72, and its kernel takes at most 64",
    ),
    "slopes": (PAGES, {"alibi_slopes": torch.zeros(3, 16)}, "there are alibi_slopes"),
    "leftpad and pages": (
        replace(PAGES, leftpad=(4, 0, 7)),
        {},
        "there is a leftpad, which its kernel takes for caches of one page a sequence",
    ),
    "many queries": (
        replace(PAGES, queries=(65, 65, 65)),
        {},
        "1040 query rows share a K/V head, and its kernel takes 1024",
    ),
    "short pages": (
        replace(PAGES, page_size=12),
        {},
        "no 8 rows of a page of 12 lie together at multiples of 8",
    ),
    "no keys": (replace(PAGES, lengths=(0, 0, 0), capacity=0), {}, "there is no query or no key"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_and_why(name: str) -> None:
    case, given, reason = REFUSED[name]
    given = given | {"qv": qv_of(case)}
    assert why_not_mla(call_of(case, **given), H200, "hopper") == reason


def test_other_backends_caches_and_strides_are_refused() -> None:
    call = call_of(PAGES, qv=qv_of(PAGES))
    assert why_not_mla(call_of(PAGES), H200, "hopper") == "there is no qv"
    assert "the backend is reference" in why_not_mla(call, H200, "reference")
    of_e4m3 = call_of(PAGES, qv=qv_of(PAGES), cache_dtype=FP8)
    assert "its kernel takes 16 bits" in why_not_mla(of_e4m3, H200, "hopper")
    arguments = PAGES.build(torch.bfloat16, qv=qv_of(PAGES))
    arguments["v_cache"] = with_columns(arguments["v_cache"], 516)
    plan = explain_kvcache(**arguments, device_capability=HOPPER)
    assert plan.path == "general" and "mla: TMA cannot address the strides of the cache" in plan.refused


@pytest.mark.parametrize(
    ("heads", "queries", "packed", "pieces"),
    [
        (16, (1, 1, 1), False, 132),
        (128, (1, 1, 1), False, 66),
        (512, (1, 1, 1), False, 66),
        (128, (1,), False, 64),
        (16, (4, 0, 1), True, 128),
    ],
)
def test_pieces(heads: int, queries: tuple[int, ...], packed: bool, pieces: int) -> None:
    """A cluster has two multiprocessors, a tile up to 64 parts, and the kernel does not choose for packed queries."""
    lengths = (9, 0, 21)[: len(queries)]
    case = replace(PAGES, heads=(heads, 1), lengths=lengths, queries=queries, packed_q=packed)
    call = call_of(case, qv=qv_of(case))
    config: MlaConfig = select_mla(call)
    assert config.cluster == (1 if heads == 16 else 2)
    assert pieces_of(config, call, 132) == pieces
