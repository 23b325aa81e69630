"""The serving benchmark over a latent: useful work, inputs, the check against float64, and FlashMLA's operators."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention.experiments.bench.peers import Limits, Setting
from hopper_attention.experiments.features.spec import FAMILIES
from hopper_attention.experiments.serving import checks, flashmla, spec
from hopper_attention.experiments.serving.inputs import CacheInputs, draw_set, plain_of
from hopper_attention.experiments.serving.peers import SERVING_PEERS, bind_ours, fa3_arguments, our_arguments
from hopper_attention.experiments.serving.results import ServingCell, cell_record, promise_of, read_cell
from hopper_attention.experiments.serving.spec import ServingWorkload

SMALL = ServingWorkload(
    lengths=(40, 9, 33), heads=8, heads_kv=1, head_dim=16, page_size=8, queries=2, latent=32, dtype="float32"
)
SETTING = Setting("cpu")


def drawn(workload: ServingWorkload) -> CacheInputs:
    return draw_set(workload, FAMILIES["normal"], 3, "cpu")


def attend_plainly(workload: ServingWorkload, inputs: CacheInputs) -> Tensor:
    """From rows of all columns, as they lie, query by query in float64."""
    queries, cache = inputs.joined
    out = torch.zeros(workload.batch, workload.queries, workload.heads, workload.latent).double()
    assert inputs.table is not None
    for b, length in enumerate(workload.lengths):
        rows = cache[inputs.table[b].long(), :, 0].flatten(0, 1)[:length].double()
        for i in range(workload.queries):
            seen = rows[: length - workload.queries + i + 1]
            scores = queries[b, i].double() @ seen.mT / math.sqrt(48)
            out[b, i] = torch.softmax(scores, -1) @ seen[:, :32]
    return out


def test_useful_work_is_that_of_one_row_a_key() -> None:
    pairs = SMALL.visible
    assert SMALL.flops == 2 * 8 * (48 + 32) * pairs
    assert SMALL.kv_bytes == sum(SMALL.lengths) * 48 * 4
    assert SMALL.moved_bytes == SMALL.kv_bytes + 3 * 2 * 8 * (48 + 32) * 4
    few, many = spec.LATENT[:2]
    assert few.name == "bf16-decode-128x8k-q1-h16-hk1-d64-v512-page64" and few.cache_name.startswith(
        "latent of 512"
    )
    assert few.kv_bytes == many.kv_bytes == 128 * 8192 * 1152
    assert many.flops == 8 * few.flops and promise_of(many).least_of_best == 1.0
    for wrong in ({"is_fp8": True, "page_size": 0}, {"appends": True}):
        with pytest.raises(ValueError, match="latent is 32, allowed: 0 with"):
            replace(SMALL, **wrong)


@pytest.mark.parametrize("page_size", [8, 0])
def test_float64_is_that_of_the_formula(page_size: int) -> None:
    paged = drawn(SMALL)
    right = attend_plainly(SMALL, paged)
    workload = replace(SMALL, page_size=page_size)
    inputs = paged if page_size else plain_of(SMALL, paged)
    pieces = checks.compute_pieces(workload, inputs)
    error, wrong = checks.check_output(workload, right, pieces, Limits(1e-6, 1e-6))
    assert wrong == "" and error < 1e-6
    assert checks.check_output(workload, right * 1.01, pieces, checks.limits_of(workload, False))[1] != ""


@pytest.mark.parametrize("page_size", [8, 0])
def test_our_call(page_size: int) -> None:
    paged = replace(SMALL, dtype="bfloat16")
    workload = replace(paged, page_size=page_size)
    inputs = drawn(paged) if page_size else plain_of(paged, drawn(paged))
    out = bind_ours(workload, inputs, SETTING, our_arguments)[""]()
    pieces = checks.compute_pieces(workload, inputs)
    assert checks.check_output(workload, out, pieces, checks.limits_of(workload, False))[1] == ""


def test_who_is_meant_for_a_latent() -> None:
    meant = {name for name, peer in SERVING_PEERS.items() if peer.takes(spec.LATENT[0])}
    assert meant == {"ours", "ours_plain", "fa3", "fa3_best", "flashmla"}
    assert not SERVING_PEERS["flashmla"].takes(spec.SHORT)
    given = fa3_arguments(SMALL, drawn(SMALL))
    assert given["q_v"].shape == (3, 2, 8, 32) and given["softmax_scale"] == pytest.approx(48**-0.5)


def test_a_cell_comes_back_from_json() -> None:
    cell = ServingCell(SMALL, 2, None, None, {}, 4)
    assert read_cell(cell_record(cell, "NVIDIA H200")) == cell


# FlashMLA


def schema_of(text: str) -> Any:
    return torch._C.parse_schema(text)


PLAN = (
    "a::plan(Tensor seqlens_k, int num_q_tokens_per_head_k, int h_k, int? h_q, bool is_fp8_kvcache, int? topk)"
    " -> Tensor[]"
)
OLD_PLAN = "a::plan(Tensor cache_seqlens, int num_heads_per_head_k, int num_heads_k) -> Tensor[]"


def test_arguments_go_under_the_names_of_a_release() -> None:
    given = {"cache_seqlens": "lengths", "num_q_tokens_per_head_k": 16, "h_k": 1, "is_fp8_kvcache": False}
    assert flashmla.fit(schema_of(PLAN), given) == ["lengths", 16, 1, None, False, None]
    assert flashmla.fit(schema_of(OLD_PLAN), given) == ["lengths", 16, 1]
    with pytest.raises(ValueError, match=r"no such arguments \['h_k'\]"):
        flashmla.fit(schema_of("a::plan(Tensor cache_seqlens, int num_heads_per_head_k) -> Tensor"), given)


def test_its_operators_are_given_rows_of_all_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, dict[str, Any]] = {}

    def arguments_of(name: str, given: dict[str, Any]) -> list[Any]:
        seen[name] = given
        return []

    results = {flashmla.PLAN: ("plan", "splits"), flashmla.ATTEND: ("out", "lse")}
    monkeypatch.setattr(flashmla, "arguments_of", arguments_of)
    monkeypatch.setattr(flashmla, "operator", lambda name: lambda: results[name])
    inputs = drawn(SMALL)
    assert flashmla.call_of_flashmla(SMALL, inputs)() == "out"
    assert seen[flashmla.PLAN]["num_q_tokens_per_head_k"] == 16
    attend = seen[flashmla.ATTEND]
    assert attend["k_cache"].shape == (12, 8, 1, 48) and attend["k_cache"].is_contiguous()
    assert attend["q"].shape == (3, 2, 8, 48) and torch.equal(attend["q"][..., 32:], inputs.q)
    assert (attend["tile_scheduler_metadata"], attend["num_splits"], attend["is_causal"]) == (
        "plan",
        "splits",
        True,
    )
    with pytest.raises(NotImplementedError, match="no pages"):
        flashmla.call_of_flashmla(SMALL, replace(inputs, table=None))


def test_the_library_lies_beside_that_of_flash_attention_3(tmp_path: Path) -> None:
    setting = Setting("cuda:0", str(tmp_path / "flash_ops.abi3.so"))
    assert flashmla.find_flashmla_library(setting) is None
    (tmp_path / "flashmla_ops.abi3.so").touch()
    assert flashmla.find_flashmla_library(setting) == tmp_path / "flashmla_ops.abi3.so"
    assert flashmla.why_no_flashmla(SETTING) != ""
