"""The peers of the features' benchmark: what each is called with, and that ours and torch's agree with float64."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from hopper_attention import dispatch, flash_attn_func, flash_attn_varlen_func, varlen_plan
from hopper_attention.experiments.bench.peers import Setting, inspect_peers, parse_peers
from hopper_attention.experiments.bench.results import AMPERE
from hopper_attention.experiments.features import checks, peers, score_terms
from hopper_attention.experiments.features.peers import FEATURE_PEERS, FeaturePeer
from hopper_attention.experiments.features.run import draw_tokens
from hopper_attention.experiments.features.spec import FAMILIES, Workload, backward_of
from tests.python.experiments.fakes import FakeFa3Operator
from tests.python.fake_gpu import H200

CPU, GPU = Setting("cpu"), Setting("cuda:0")
PACKED = Workload(lengths=(90, 1, 70), heads=4, heads_kv=2, head_dim=16, is_packed=True)
EQUAL = replace(PACKED, lengths=(80, 80))
WINDOWED = Workload(lengths=(150, 150), heads=2, heads_kv=1, head_dim=16, window=(20, 0))
TWO_SIDED = replace(WINDOWED, causal=False, window=(-1, 30))
CAPPED = replace(WINDOWED, softcap=2.0)
BIASED = replace(WINDOWED, window=(-1, -1), alibi=True)
SUNK = replace(PACKED, sinks=True)
LATENT = Workload(lengths=(70, 70), heads=4, heads_kv=1, head_dim=16, latent=32)
FORWARD = (PACKED, replace(PACKED, causal=False), EQUAL, WINDOWED, TWO_SIDED)
DROPPED = replace(WINDOWED, window=(-1, -1), heads=4, dropout=0.3)
CHANGED = (CAPPED, BIASED, SUNK, DROPPED, replace(DROPPED, causal=False, softcap=2.0, window=(20, 10)))
BIASED_BY_FUNCTION = replace(WINDOWED, window=(-1, -1), functions="bias")
DOCUMENTS = replace(PACKED, functions="documents")
WITH_FUNCTIONS = (BIASED_BY_FUNCTION, DOCUMENTS)
ALL = (*FORWARD, *CHANGED, *WITH_FUNCTIONS)


def errors_of(peer: FeaturePeer, workload: Workload) -> str:
    """Prepare, launch and check a peer on the CPU; what is wrong."""
    inputs = draw_tokens(workload, FAMILIES["normal"], 0, "cpu")
    prepared = peer.prepare(workload, inputs, CPU)
    pieces = checks.compute_pieces(workload, inputs)
    result = prepared.read(prepared.launch())
    return checks.check_result(workload, result, pieces, checks.limits_of(workload))[1]


@pytest.mark.parametrize("workload", (*ALL, *backward_of(*ALL)), ids=lambda w: w.name)
def test_ours_is_right_forward_and_backward(workload: Workload) -> None:
    assert errors_of(FEATURE_PEERS["ours"], workload) == ""
    dense = FEATURE_PEERS["ours_dense"]
    assert dense.takes(workload) == (workload.lengths == (80, 80))
    if dense.takes(workload):
        assert errors_of(dense, workload) == ""


FP8 = tuple(replace(workload, is_fp8=True) for workload in FORWARD)


@pytest.mark.parametrize("workload", FP8, ids=lambda w: w.name)
def test_ours_in_fp8_with_and_without_quantization_and_in_16_bits(workload: Workload) -> None:
    for name in ("ours", "ours_e2e", "ours_bf16"):
        assert FEATURE_PEERS[name].takes(workload)
        assert errors_of(FEATURE_PEERS[name], workload) == ""
    others = "ours_dense", "fa4", "flex", "ampere"
    assert not any(FEATURE_PEERS[name].takes(workload) for name in others)
    assert not FEATURE_PEERS["ours_e2e"].takes(replace(workload, is_fp8=False))


@pytest.mark.parametrize("workload", FP8, ids=lambda w: w.name)
def test_fa3_gets_a_descale_for_each_sequence(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeFa3().installed(monkeypatch)
    assert errors_of(FEATURE_PEERS["fa3"], workload) == ""
    (call,) = fake.calls
    assert call["q"].dtype == torch.float8_e4m3fn
    assert call["k_descale"].shape == (len(workload.lengths), workload.heads_kv)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("workload", (*FORWARD, CAPPED, BIASED, *WITH_FUNCTIONS), ids=lambda w: w.name)
def test_flex_sees_the_same_keys(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.bench_peers, "compile_flex", lambda workload: flex_attention)
    assert errors_of(replace(FEATURE_PEERS["flex"], why_unavailable=lambda setting: ""), workload) == ""


def test_peers_without_functions_are_no_rows_of_workloads_with_them() -> None:
    takers = {
        name
        for name, peer in FEATURE_PEERS.items()
        if peer.takes(BIASED_BY_FUNCTION) and peer.takes(DOCUMENTS)
    }
    assert takers == {"ours", "flex", AMPERE}


class FakeFa3(FakeFa3Operator):
    """By our reference."""

    def compute(self, c: dict[str, Any]) -> tuple[Tensor, ...]:
        q, k, v = c["q"], c["k"], c["v"]
        options = {"causal": c["is_causal"], "window_size": (c["window_size_left"], c["window_size_right"])}
        options |= {name: c[name] for name in ("q_descale", "k_descale", "v_descale")}
        if c["cu_seqlens_q"] is None:
            return (flash_attn_func(q, k, v, **options),)
        lengths = (c[f"{name}_{side}"] for name in ("cu_seqlens", "max_seqlen") for side in "qk")
        return (flash_attn_varlen_func(q, k, v, *lengths, **options),)


class FakeFa3WithLatent(FakeFa3):
    """FA3's operator with its second query, as the public function computes it."""

    def compute(self, c: dict[str, Any]) -> tuple[Tensor, ...]:
        options = {"causal": c["is_causal"], "softmax_scale": c["softmax_scale"], "qv": c["q_v"]}
        return (flash_attn_func(c["q"], c["k"], c["v"], **options),)


@pytest.mark.parametrize("workload", FORWARD, ids=lambda w: w.name)
def test_fa3_gets_lengths_and_windows_by_name(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeFa3().installed(monkeypatch)
    assert errors_of(FEATURE_PEERS["fa3"], workload) == ""
    (call,) = fake.calls
    assert call["is_causal"] == (workload.causal and not workload.has_window)
    if workload is WINDOWED:
        assert (call["window_size_left"], call["window_size_right"]) == (20, 0)
    if workload is PACKED:
        assert call["cu_seqlens_k"].tolist() == [0, 90, 91, 161] and call["max_seqlen_k"] == 90
        assert (call["window_size_left"], call["window_size_right"], call["num_splits"]) == (-1, -1, 1)
    with pytest.raises(NotImplementedError, match="has the forward alone"):
        errors_of(FEATURE_PEERS["fa3"], *backward_of(workload))


def test_a_latent_is_a_second_query(monkeypatch: pytest.MonkeyPatch) -> None:
    assert errors_of(FEATURE_PEERS["ours"], LATENT) == ""
    assert LATENT.name == "bf16-2x70-h4-hk1-d16-latent-32-causal-forward"
    assert LATENT.flops == 2 * 4 * (48 + 32) * 2 * (70 * 71 // 2)
    assert LATENT.input_bytes == 140 * (4 * 48 + 48) * 2
    FakeFa3WithLatent().installed(monkeypatch)
    assert errors_of(FEATURE_PEERS["fa3"], LATENT) == ""
    takers = {name for name, peer in FEATURE_PEERS.items() if peer.takes(LATENT)}
    assert takers == {"ours", "fa3"}


@pytest.mark.parametrize("workload", FORWARD + backward_of(*FORWARD), ids=lambda w: w.name)
def test_fa4_gets_no_limit_as_none(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def dense(
        q: Tensor, k: Tensor, v: Tensor, *, window_size=(None, None), causal=False
    ) -> tuple[Tensor, None]:
        calls.append({"window_size": window_size, "causal": causal})
        window = tuple(-1 if side is None else side for side in window_size)
        return flash_attn_func(q, k, v, window_size=window, causal=causal), None

    def packed(q: Tensor, k: Tensor, v: Tensor, *, causal=False, **lengths: Any) -> tuple[Tensor, None]:
        calls.append({"causal": causal, **lengths})
        return flash_attn_varlen_func(q, k, v, causal=causal, **lengths), None

    module = ModuleType("flash_attn.cute")
    # An empty module is made into the library: mypy knows no attribute of it.
    module.flash_attn_func, module.flash_attn_varlen_func = dense, packed  # type: ignore[attr-defined]  # a new module has no names
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    assert errors_of(FEATURE_PEERS["fa4"], workload) == ""
    if workload.has_window:
        expected = (20, 0) if workload.causal else (None, 30)
        assert calls[0] == {"window_size": expected, "causal": False}
    else:
        assert calls[0]["causal"] == workload.causal
        assert calls[0]["max_seqlen_q"] == calls[0]["max_seqlen_k"] == workload.longest


def test_each_peer_gets_what_changes_scores_by_its_own_names() -> None:
    terms = {name: getattr(score_terms, f"{name}_terms")(SUNK, "cpu") for name in ("our", "fa3", "fa4")}
    assert [list(found) for found in terms.values()] == [["sinks"], ["sinks"], ["learnable_sink"]]
    assert score_terms.fa3_terms(CAPPED, "cpu") == score_terms.fa4_terms(CAPPED, "cpu") == {"softcap": 2.0}
    torch.testing.assert_close(score_terms.slopes_of(BIASED, "cpu"), torch.tensor([2.0**-4, 2.0**-8]))
    with pytest.raises(NotImplementedError, match="FlashAttention-3 has no ALiBi"):
        score_terms.fa3_terms(BIASED, "cpu")
    with pytest.raises(NotImplementedError, match="FlexAttention has no sinks"):
        score_terms.flex_score(SUNK, "cpu")


def test_cudnn_drops_and_draws_its_own_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        calls.append(options)
        return q + 0 * (k + v).repeat_interleave(2, 1)

    monkeypatch.setattr(peers.functional, "scaled_dot_product_attention", sdpa)
    cudnn = FEATURE_PEERS["cudnn"]
    workload = replace(DROPPED, heads_kv=2)
    assert cudnn.takes(workload) and not cudnn.takes(WINDOWED) and cudnn.draws_mask
    for each in (workload, *backward_of(workload)):
        prepared = cudnn.prepare(each, draw_tokens(each, FAMILIES["normal"], 0, "cpu"), CPU)
        result = prepared.read(prepared.launch())
        assert checks.check_result(each, result, (), checks.limits_of(each)) == (0.0, "")
    assert calls[0] == {"is_causal": True, "dropout_p": 0.3, "enable_gqa": True}
    for name in ("fa3_terms", "fa4_terms", "flex_score"):
        with pytest.raises(NotImplementedError, match="has no dropout"):
            getattr(score_terms, name)(DROPPED, "cpu")
    with pytest.raises(ValueError, match=r"dropout is 0\.3, allowed of packed sequences: 0"):
        replace(PACKED, dropout=0.3)


def test_ours_must_be_a_kernel_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def described(workload: Workload, **options: Any) -> str:
        inputs = draw_tokens(workload, FAMILIES["normal"], 0, "cpu")
        monkeypatch.setattr(peers, "offsets_of", lambda workload, device: offsets)
        offsets = torch.tensor((0, *workload.lengths)).cumsum(0).to(torch.int32)
        return peers.describe_ours(workload, inputs, GPU, **options)

    with pytest.raises(NotImplementedError, match="runs on the torch backend here"):
        described(PACKED)
    for module in (dispatch, varlen_plan, peers):
        monkeypatch.setattr(module, "target_of", lambda device: H200)
    forward = {described(w) for w in (PACKED, EQUAL, WINDOWED)}
    assert all("reference" not in name for name in forward)
    assert described(EQUAL, dense=True) != described(EQUAL)
    assert described(WINDOWED) != described(replace(WINDOWED, direction="backward"))


def test_peers_are_picked_by_name_and_those_that_lack_are_named() -> None:
    usual = ["ours", "ours_dense", "ours_e2e", "ours_bf16", "fa3", "fa4", "cudnn"]
    assert [p.name for p in parse_peers("", FEATURE_PEERS, peers.DEFAULT_FEATURE_PEERS)] == usual
    assert [p.name for p in parse_peers("fa4, ours,fa4", FEATURE_PEERS)] == ["fa4", "ours"]
    with pytest.raises(
        ValueError, match=r"peers is 'fa9', allowed: comma-separated names out of ours, ours_dense"
    ):
        parse_peers("fa9", FEATURE_PEERS)
    infos = inspect_peers(tuple(FEATURE_PEERS.values()), CPU)
    absent = {name for name, info in infos.items() if info.unavailable}
    assert absent == {"fa3", "fa4", "flex", "ampere", "cudnn"}
    assert infos["fa3"].unavailable == "needs a CUDA device, this run is on cpu"


def test_inputs_are_brought_into_each_peers_form() -> None:
    x = torch.randn(160, 4, 16)
    assert torch.equal(peers.as_tokens(peers.as_given(PACKED, x)), x)
    batch = peers.as_given(replace(EQUAL, is_packed=False), x)
    assert batch.shape == (2, 80, 4, 16) and torch.equal(peers.as_tokens(batch), x)
    for workload, shape in ((PACKED, (1, 4, 160, 16)), (replace(EQUAL, is_packed=False), (2, 4, 80, 16))):
        heads = peers.heads_second(workload, x)
        assert heads.shape == shape and heads.is_contiguous()
        assert torch.equal(peers.tokens_of_heads(heads), x)
