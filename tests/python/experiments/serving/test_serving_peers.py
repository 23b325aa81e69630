"""The peers of the serving benchmark: what each is called with, and that what it returns agrees with float64."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import flash_attn_with_kvcache, kvcache_plan
from hopper_attention.experiments.bench.peers import Setting, inspect_peers, parse_peers
from hopper_attention.experiments.features.spec import FAMILIES
from hopper_attention.experiments.serving import checks, peers, spec
from hopper_attention.experiments.serving.inputs import CacheInputs, draw_set
from hopper_attention.experiments.serving.peers import SERVING_PEERS
from hopper_attention.experiments.serving.spec import ServingWorkload
from tests.python.experiments.fakes import FakeFa3Operator, FakeOperator, install
from tests.python.fake_gpu import H200

CPU, GPU = Setting("cpu"), Setting("cuda:0")
RAGGED = ServingWorkload(lengths=(90, 33, 128), heads=4, heads_kv=2, head_dim=64)
EQUAL = replace(RAGGED, lengths=(80, 80))
PAGED = replace(RAGGED, page_size=16)
FEW = replace(PAGED, queries=4, page_size=32)
CHUNK = replace(RAGGED, queries=20)
APPENDED = replace(RAGGED, appends=True)
APPENDED_PAGED = replace(APPENDED, page_size=16, queries=3)
FP8 = replace(EQUAL, is_fp8=True)
ALL = (RAGGED, EQUAL, PAGED, FEW, CHUNK, APPENDED, APPENDED_PAGED, FP8)

METADATA_SCHEMA = (
    "sgl_kernel::get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, "
    "int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? leftpad_k, int? page_size, "
    "int max_seqlen_k_new=0, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "int attention_chunk=0, bool has_softcap=False, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) "
    "-> Tensor"
)
"""Of sglang-kernel 0.4.3."""


def wrong_with(name: str, workload: ServingWorkload, way: str = "") -> str:
    """Bind, launch and check a peer on the CPU; what is wrong."""
    peer, inputs = SERVING_PEERS[name], draw_set(workload, FAMILIES["normal"], 0, "cpu")
    pieces = checks.compute_pieces(workload, inputs)
    launch = peer.bind(workload, inputs, CPU)[way]
    checks.poison_new_rows(inputs)
    out = peer.leave(launch())
    limits = checks.limits_of(workload, peer.rounds_queries)
    return checks.check_output(workload, out, pieces, limits)[1]


@pytest.mark.parametrize("workload", ALL, ids=lambda w: w.name)
def test_ours_is_right_with_pages_new_keys_and_e4m3(workload: ServingWorkload) -> None:
    assert wrong_with("ours", workload) == ""
    plain, fp8 = SERVING_PEERS["ours_plain"], SERVING_PEERS["ours_fp8q"]
    assert plain.takes(workload) == bool(workload.page_size or workload.appends)
    assert fp8.takes(workload) == workload.is_fp8
    for peer in (plain, fp8):
        if peer.takes(workload):
            assert wrong_with(peer.name, workload) == ""


def test_ours_is_also_called_with_lengths_as_an_int(monkeypatch: pytest.MonkeyPatch) -> None:
    known = SERVING_PEERS["ours_known"]
    assert [w.name for w in spec.ALL_WORKLOADS if known.takes(w)] == [w.name for w in spec.KNOWN]
    assert not any(w.is_ragged or w.page_size for w in spec.KNOWN)
    calls: list[dict[str, Any]] = []
    for workload in (EQUAL, FP8):
        assert wrong_with("ours_known", workload) == ""
    monkeypatch.setattr(peers, "flash_attn_with_kvcache", lambda **given: calls.append(given))
    known.bind(EQUAL, draw_set(EQUAL, FAMILIES["normal"], 0, "cpu"), CPU)[""]()
    assert calls[0]["cache_seqlens"] == 80


def test_ours_plain_has_neither_pages_nor_new_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(peers, "flash_attn_with_kvcache", lambda **given: calls.append(given))
    for workload in (PAGED, APPENDED_PAGED):
        inputs = draw_set(workload, FAMILIES["normal"], 0, "cpu")
        SERVING_PEERS["ours_plain"].bind(workload, inputs, CPU)[""]()
    paged, appended = calls
    assert paged["page_table"] is None and paged["k_cache"].shape == (3, 128, 2, 64)
    assert appended["page_table"] is not None and "k" not in appended
    assert appended["cache_seqlens"].tolist() == [90, 33, 128] and appended["causal"]


class FakeFa3(FakeFa3Operator):
    """By our reference."""

    def compute(self, c: dict[str, Any]) -> tuple[Tensor, ...]:
        options = {"causal": c["is_causal"], "softmax_scale": c["softmax_scale"]}
        options |= {"k": c["k_new"], "v": c["v_new"], "cache_seqlens": c["seqused_k"]}
        options |= {"rotary_interleaved": c["is_rotary_interleaved"]}
        same = "page_table", "rotary_cos", "rotary_sin", "q_descale", "k_descale", "v_descale"
        options |= {name: c[name] for name in same}
        return (flash_attn_with_kvcache(c["q"], c["k"], c["v"], **options),)


class FakeMetadata(FakeOperator):
    """Stands for ``torch.ops.sgl_kernel.get_scheduler_metadata.default``."""

    schema, name = METADATA_SCHEMA, "get_scheduler_metadata"

    def compute(self, call: dict[str, Any]) -> Tensor:
        return torch.tensor([len(self.calls)])


@pytest.fixture
def fa3(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeFa3, FakeMetadata]:
    fakes = FakeFa3(), FakeMetadata()
    install(monkeypatch, *fakes)
    return fakes


@pytest.mark.parametrize("workload", ALL, ids=lambda w: w.name)
def test_fa3_gets_the_cache_by_its_own_names(
    workload: ServingWorkload, fa3: tuple[FakeFa3, FakeMetadata]
) -> None:
    assert wrong_with("fa3", workload) == ""
    ((call,), made) = (fake.calls for fake in fa3)
    assert made == [] and call["num_splits"] == 0 and call["scheduler_metadata"] is None
    assert call["seqused_k"].tolist() == [x - workload.queries * workload.appends for x in workload.lengths]
    assert (call["page_table"] is None) == (workload.page_size == 0)
    assert call["is_causal"] == (workload.queries > 1) and (call["k_new"] is None) == (not workload.appends)
    assert (call["q"].dtype == torch.float8_e4m3fn) == workload.is_fp8


@pytest.mark.parametrize("workload", [RAGGED, FEW, CHUNK, FP8], ids=lambda w: w.name)
def test_the_best_fa3_tries_splits_with_a_schedule_made_ahead(
    workload: ServingWorkload, fa3: tuple[FakeFa3, FakeMetadata]
) -> None:
    inputs = draw_set(workload, FAMILIES["normal"], 0, "cpu")
    ways = SERVING_PEERS["fa3_best"].bind(workload, inputs, CPU)
    tried = (0, 1, 2, 4) if workload is CHUNK else (0, 1, 2, 4, 8, 16, 32, 64, 128)
    assert list(ways) == [f"{splits} splits, schedule ahead" for splits in tried]
    assert wrong_with("fa3_best", workload, "2 splits, schedule ahead") == ""
    operator, metadata = fa3
    (call,), made = operator.calls, metadata.calls[len(tried) + 2]
    assert call["num_splits"] == 2 and call["scheduler_metadata"].item() == len(tried) + 3
    assert made["num_splits"] == 2 and made["qkv_dtype"] == call["q"].dtype
    assert made["max_seqlen_k"] == (128 if workload is not FP8 else 80)
    assert made["page_size"] == (workload.page_size or None) and made["is_causal"] == workload.is_causal
    assert (made["num_heads"], made["num_heads_k"], made["headdim"]) == (4, 2, 64)
    assert not SERVING_PEERS["fa3_best"].takes(APPENDED)


def test_a_library_without_schedules_is_tried_without(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeFa3())
    assert wrong_with("fa3_best", RAGGED, "4 splits, no schedule ahead") == ""


@pytest.mark.parametrize("workload", [EQUAL, RAGGED, PAGED, FEW], ids=lambda w: w.name)
def test_fa4_gets_lengths_and_pages_where_there_are_some(
    workload: ServingWorkload, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []

    def dense(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, num_splits: int) -> Tensor:
        calls.append({"num_splits": num_splits})
        return flash_attn_with_kvcache(q, k, v, causal=causal)

    def packed(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **given: Any) -> tuple[Tensor, None]:
        calls.append(given)
        lengths = {"cache_seqlens": given["seqused_k"], "page_table": given["page_table"]}
        return flash_attn_with_kvcache(q, k, v, causal=causal, **lengths), None

    module = ModuleType("flash_attn.cute")
    # An empty module is made into the library: mypy knows no attribute of it.
    vars(module).update(flash_attn_func=dense, flash_attn_varlen_func=packed)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    assert wrong_with("fa4", workload, "1 split") == ""
    assert wrong_with("fa4", workload, "its own splits") == ""
    assert [call["num_splits"] for call in calls] == [1, 0]
    assert all(("seqused_k" in call) == (workload is not EQUAL) for call in calls)
    assert not any(SERVING_PEERS["fa4"].takes(w) for w in (FP8, APPENDED))


def test_sdpa_takes_full_caches_and_one_query_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    backends: list[Any] = []
    real = peers.sdpa_kernel

    def on_any(backend: Any) -> Any:
        backends.append(backend)
        return real(peers.SDPBackend.MATH)

    monkeypatch.setattr(peers, "sdpa_kernel", on_any)
    assert wrong_with("cudnn", EQUAL) == wrong_with("fa2", EQUAL) == wrong_with("torch", EQUAL) == ""
    assert backends == [peers.SDPBackend.CUDNN_ATTENTION, peers.SDPBackend.FLASH_ATTENTION]
    for name in ("cudnn", "fa2", "torch"):
        assert [w for w in (*ALL, replace(EQUAL, queries=4)) if SERVING_PEERS[name].takes(w)] == [EQUAL]


def test_ours_must_be_a_kernel_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def described(workload: ServingWorkload) -> str:
        inputs: CacheInputs = draw_set(workload, FAMILIES["normal"], 0, "cpu")
        return SERVING_PEERS["ours"].note(workload, inputs, GPU)

    with pytest.raises(NotImplementedError, match="runs on the torch backend here"):
        described(EQUAL)
    monkeypatch.setattr(kvcache_plan, "target_of", lambda device: H200)
    assert described(EQUAL).startswith("decode: ") and "reference" not in described(EQUAL)


def test_peers_are_picked_by_name_and_those_that_lack_are_named() -> None:
    usual = [
        "ours",
        "ours_plain",
        "ours_known",
        "ours_fp8q",
        "fa3",
        "fa3_best",
        "flashmla",
        "fa4",
        "cudnn",
        "fa2",
    ]
    assert [p.name for p in parse_peers("", SERVING_PEERS, peers.DEFAULT_SERVING_PEERS)] == usual
    assert [p.name for p in parse_peers("fa4, ours,fa4", SERVING_PEERS)] == ["fa4", "ours"]
    with pytest.raises(
        ValueError, match=r"peers is 'fa9', allowed: comma-separated names out of ours, ours_"
    ):
        parse_peers("fa9", SERVING_PEERS)
    infos = inspect_peers(tuple(SERVING_PEERS.values()), CPU)
    absent = {name for name, info in infos.items() if info.unavailable}
    assert absent == {"fa3", "fa3_best", "flashmla", "fa4", "cudnn", "fa2"}
    assert infos["fa3"].unavailable == "needs a CUDA device, this run is on cpu"
