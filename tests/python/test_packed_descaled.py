"""Packed e4m3 tensors with descales on the host: what serves them, and calls that are found again, by stand-ins."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper.decode.config import DecodeConfig
from hopper.forward.fp8.config import Fp8ForwardConfig, Softmax
from hopper_attention import device_memory, few_queries, packed_descaled_again, varlen
from hopper_attention.few_queries import FewQueries
from tests.python.fake_gpu import forget_launchers, pretend
from tests.python.packed_fp8_calls import (
    DESCALES,
    Bounds,
    apart,
    attend,
    attend_again,
    check,
    check_launches,
    descales,
    draw_call,
    exact_of,
    explain,
    moved,
    plan_of_call,
    refuse,
)
from tests.python.packed_fp8_kernels import E4M3, LAUNCHING, Kernels, pretended
from tests.python.varlen_cases import Case, offsets


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Those of a pretended H200, of which the decode kernel serves few queries. What is new is NaN."""
    monkeypatch.setattr(few_queries, "fastest_in_e4m3", lambda call, mean_k: FewQueries(call))
    yield from pretended(monkeypatch)


CALLS: dict[str, tuple[Case, Bounds]] = {
    "short": (Case((50, 1, 33, 70), (60, 1, 0, 90)), (300, 260)),
    "medium": (Case((40, 0, 33, 70), (60, 21, 33, 90), behind=7), (600, 2000)),
    "long": (Case((90, 7, 0, 60), (95, 9, 130, 61), behind=5), (3000, 3000)),
    "used in part": (Case((70, 30), (90, 33), None, (85, 0)), (3000, 3000)),
    "one head": (Case((20, 30), (40, 33), heads=(1, 1)), (600, 2000)),
    "heads of their own": (Case((20, 30), (40, 33), heads=(2, 2)), (3000, 3000)),
    "few queries": (Case((3, 1, 2, 3), (400, 1, 90, 70), heads=(8, 2)), (3, 400)),
    "few queries, used in part": (Case((2, 3), (90, 70), None, (80, 70), heads=(8, 2)), (3, 90)),
}


def draw(name: str, head_dim: int = 64, seed: int = 0) -> tuple[Case, list[Tensor], dict[str, Any]]:
    """q, k and v, and where their sequences lie."""
    case, bounds = CALLS[name]
    case = replace(case, head_dims=(head_dim, head_dim))
    return case, *draw_call(case, bounds, seed)


@pytest.mark.parametrize("how", ["none", "one", "q", "all", "strided"])
@pytest.mark.parametrize("name", CALLS)
def test_results(kernels: Kernels, name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for head_dim, causal in ((64, True), (128, False), (256, True)):
        case, tensors, lengths = draw(name, head_dim)
        given = descales(how, case)
        named = {**lengths, **given, "causal": causal}
        out = attend_again(kernels, monkeypatch, tensors, named)
        is_few = name.startswith("few")
        check(out, exact_of(case, tensors, given, causal=causal), 2e-2 if is_few else 8e-3)
        check_launches(kernels, plan_of_call(tensors, named))
        if not is_few:
            of_q, group = kernels.calls[-1]["scales"][0], case.heads[0] // case.heads[1]
            expected = given.get("q_descale", torch.ones(len(case.rooms_q), case.heads[1]))
            assert torch.equal(of_q, expected[..., None].expand(-1, -1, group))
            assert kernels.calls[-1]["scale"] == head_dim**-0.5


@pytest.mark.parametrize("name", CALLS)
def test_an_lse(kernels: Kernels, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, tensors, lengths = draw(name)
    given = descales("all", case)
    named = {**lengths, **given, "softmax_scale": 0.3, "return_attn_probs": True, "exact_lse": False}
    found = attend_again(kernels, monkeypatch, tensors, named)
    check(found, exact_of(case, tensors, given, softmax_scale=0.3), 4e-2 if name.startswith("few") else 8e-3)
    assert found[1].shape == (case.heads[0], len(tensors[0])) and found[1].dtype == torch.float32
    check_launches(kernels, plan_of_call(tensors, named))
    out = attend(*tensors, **lengths, **given, softmax_scale=0.3)
    torch.testing.assert_close(out, found[0])
    assert all(call["lse"].shape[1] == len(tensors[0]) for call in kernels.calls[:-1])
    assert all(call["lse"].shape[1] == 0 for call in kernels.calls[-1:])


def test_an_exact_lse_is_not_found_again(kernels: Kernels) -> None:
    """Its kernel wants Q and K in 16 bits."""
    for name in ("short", "long"):
        case, tensors, lengths = draw(name)
        given = descales("all", case)
        exact = exact_of(case, tensors, given, causal=True)
        for _ in range(3):
            named = {**lengths, **given, "causal": True, "return_attn_probs": True}
            check(attend(*tensors, **named), exact)
            assert kernels.calls[-1]["config"].wide_codes
    assert len(kernels.calls) == 6 and not packed_descaled_again.remembered._calls


@pytest.mark.parametrize("name", ["medium", "long", "used in part", "few queries"])
def test_other_lengths_in_the_same_place(
    kernels: Kernels, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, tensors, lengths = draw(name)
    given = descales("all", case)
    attend_again(kernels, monkeypatch, tensors, lengths | given)
    monkeypatch.setattr(varlen, "_call_operator", refuse)
    for other, drawn, scales, named in moved(case, lengths, given):
        out = attend(*drawn, **named)
        check(out, exact_of(other, drawn, scales), 4e-2 if name.startswith("few") else 2e-2)


def test_one_list_of_lengths(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of self-attention, of which the same tensor says where queries lie and keys."""
    case = Case((50, 0, 33), (50, 0, 33), behind=9, head_dims=(64, 64))
    tensors, starts = [x.to(E4M3) for x in case.tensors(torch.float32)], offsets(case.rooms_q)
    given = descales("all", case)
    for longest in (300, 3000):
        named = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest}
        named |= {"max_seqlen_k": longest, "causal": True, **given}
        out = attend_again(kernels, monkeypatch, tensors, named)
        check(out, exact_of(case, tensors, given, causal=True))
        check_launches(kernels, plan_of_call(tensors, named))


def make_known(
    name: str = "long", **options: Any
) -> tuple[Case, list[Tensor], dict[str, Any], tuple[Tensor, Tensor]]:
    """A call that was made twice, its tensors and other arguments, and what float64 makes of it."""
    case, tensors, lengths = draw(name)
    given = descales("all", case)
    for _ in range(2):
        attend(*tensors, **lengths, **given, **options)
    return case, tensors, lengths | given, exact_of(case, tensors, given)


def test_layers_of_several_sizes_do_not_drive_each_other_out(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [make_known(name) for name in ("long", "heads of their own", "few queries") * 2]
    monkeypatch.setattr(varlen, "_call_operator", refuse)
    for _, tensors, named, exact in calls:
        check(attend(*tensors, **named), exact, 2e-2)


def test_queries_used_in_part_are_not_found_again(kernels: Kernels) -> None:
    case, tensors, lengths = draw("long")
    case = replace(case, used_q=(80, 7, 0, 31))
    given = descales("all", case) | {"seqused_q": case.lengths[4]}
    exact, _ = exact_of(case, tensors, given)
    for number in range(1, 4):
        check(attend(*tensors, **lengths, **given), (exact, exact))
        assert len(kernels.calls) == number
    assert not packed_descaled_again.remembered._calls


@pytest.mark.parametrize("kind", ["gradients", "a graph", "odd rows", "no keys", "a subclass"])
def test_what_is_not_remembered(kernels: Kernels, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, tensors, lengths = draw("short")
    given = descales("all", case)
    exact = exact_of(case, tensors, given)
    if kind == "gradients":
        given["k_descale"].requires_grad_()
    if kind == "a graph":
        monkeypatch.setattr(device_memory, "is_capturing", lambda device: True)
    if kind == "odd rows":
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    if kind == "no keys":
        tensors, lengths["cu_seqlens_k"] = [tensors[0], *(x[:0] for x in tensors[1:])], offsets((0,) * 4)
        exact = torch.zeros_like(exact[0]), torch.full_like(exact[1], -math.inf)
    if kind == "a subclass":
        tensors[1] = torch.nn.Parameter(tensors[1], requires_grad=False)
    for _ in range(3):
        check(attend(*tensors, **lengths, **given).detach(), exact)
    assert len(kernels.calls) == (0 if kind == "no keys" else 3)
    assert not packed_descaled_again.remembered._calls


def test_other_calls_are_found_anew(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    _, tensors, named, exact = make_known()
    (q, k, v), starts = tensors, named["cu_seqlens_q"]
    monkeypatch.setattr(varlen, "_call_operator", refuse)
    check(attend(*tensors, **named), exact)
    of_one = dict.fromkeys(DESCALES, named["q_descale"])
    others: list[tuple[list[Tensor], dict[str, Any]]] = [
        ([q[1:], k, v], {}),
        ([q, k[1:], v[1:]], {}),
        ([q, k, v[..., :48].contiguous()], {}),
        ([q, k, k], {}),
        ([q, k, apart(v)], {}),
        *((tensors, changed) for changed in ({"causal": True}, {"sm_margin": 4}, {"backend": "hopper"})),
        (tensors, {"return_attn_probs": True}),
        (tensors, {"return_attn_probs": True, "exact_lse": False}),
        (tensors, {"window_size": (5, 0)}),
        (tensors, {"softcap": 1.0}),
        (tensors, {"max_seqlen_q": 4097}),
        (tensors, {"max_seqlen_k": 300}),
        (tensors, {"cu_seqlens_k": starts}),
        (tensors, {"cu_seqlens_q": offsets((30,) * 5), "cu_seqlens_k": offsets((30,) * 5)}),
        (tensors, {"seqused_k": torch.zeros(4, dtype=torch.int32)}),
        (tensors, {"seqused_q": torch.zeros(4, dtype=torch.int32)}),
        (tensors, {"v_descale": None}),
        (tensors, of_one),
        (tensors, {"v_descale": named["v_descale"].double()}),
        (tensors, {"v_descale": named["v_descale"][:, :1]}),
        (tensors, {"v_descale": named["v_descale"].clone().requires_grad_()}),
    ]
    for given, changed in others:
        with pytest.raises(AssertionError, match="found anew"):
            attend(*given, **(named | changed))


@pytest.mark.parametrize("how", ["graph", "mode", "address"])
def test_what_was_found_does_not_serve_elsewhere(
    kernels: Kernels, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("long", "few queries"):
        _, tensors, named, exact = make_known(name)
        with monkeypatch.context() as patch:
            if how == "graph":
                patch.setattr(device_memory, "records_graph", lambda index: True)
            elif how == "mode":
                patch.setattr(packed_descaled_again, "may_be_like", lambda: False)
            else:
                tensors = [apart(x) for x in tensors]
            check(attend(*tensors, **named), exact, 2e-2)
            patch.setattr(varlen, "_call_operator", refuse)
            with pytest.raises(AssertionError, match="found anew"):
                attend(*tensors, **named)


def test_another_gpu_is_current(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = pretend(monkeypatch, *LAUNCHING)
    for name in ("long", "few queries"):
        _, tensors, named, exact = make_known(name)
        entered.clear()
        for number in range(1, 3):
            monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
            check(attend(*tensors, **named), exact, 2e-2)
            assert set(entered) == {0} and len(entered) >= number


def test_errors_are_those_of_first_calls(kernels: Kernels) -> None:
    _, tensors, named, _ = make_known()
    for changed, error, message in (
        ({"softmax_scale": "1"}, TypeError, "softmax_scale is"),
        ({"softmax_scale": math.nan}, ValueError, "softmax_scale is"),
        ({"k_descale": torch.ones(4, 3)}, ValueError, "k_descale has shape"),
        ({"v_descale": 1.0}, TypeError, "v_descale is"),
        ({"v": None}, TypeError, "v is a NoneType"),
        ({"max_seqlen_k": 1.5}, TypeError, "max_seqlen_k is a float"),
    ):
        given = dict(zip("qkv", tensors, strict=True)) | named | changed
        with pytest.raises(error, match=message):
            attend(**given)
    assert len(kernels.calls) == 2


def test_what_was_kept_without_gradients_does_not_serve_with_them(kernels: Kernels) -> None:
    case, tensors, lengths = draw("long")
    given = descales("all", case)
    given["k_descale"].requires_grad_()
    with torch.no_grad():
        for _ in range(3):
            assert not attend(*tensors, **lengths, **given).requires_grad
    out = attend(*tensors, **lengths, **given)
    with pytest.raises(NotImplementedError, match="which have no gradient"):
        out.float().sum().backward()


def test_values_that_are_attended_to_in_parts(kernels: Kernels) -> None:
    """Calls like earlier ones are served as these were, and without a word of slowness."""
    case = replace(CALLS["short"][0], head_dims=(64, 320))
    tensors, (starts_q, starts_k, *_) = [x.to(E4M3) for x in case.tensors(torch.float32)], case.lengths
    exact = exact_of(case, tensors, {})
    for backend in ("hopper", None):
        for _ in range(3):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                out = attend(*tensors, starts_q, starts_k, 200, 260, backend=backend)
            check(out, exact)
    assert len(kernels.calls) == 12


def test_bounds_of_lengths_decide_on_what_is_found_again(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few queries too: as if the decode kernel were faster with very many keys alone."""
    ways: dict[bool, Any] = {False: lambda call: few_queries.NOT_FEW, True: FewQueries}
    monkeypatch.setattr(
        few_queries, "fastest_in_e4m3", lambda call, mean_k: ways[call.shape.seqlen_k >= 65_536](call)
    )
    case = Case((16,), (90,), heads=(2, 1), head_dims=(64, 64), behind=69_910)
    tensors, (starts_q, starts_k, *_) = [x.to(E4M3) for x in case.tensors(torch.float32)], case.lengths
    exact = exact_of(case, tensors, {})
    tensors[0] = tensors[0][:16].contiguous()
    for longest_k in (8192, 65_536) * 4:
        kernels.calls.clear()
        named = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, "max_seqlen_q": 16}
        named |= {"max_seqlen_k": longest_k}
        out = attend(*tensors, **named)
        check(out, (exact[0][:16], exact[1]), 2e-2)
        is_decode = isinstance(plan_of_call(tensors, named).config, DecodeConfig)
        assert is_decode == (longest_k == 65_536) == (kernels.calls == [])


@pytest.fixture
def usual_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if tiles for any number of queries took least time for few ones too."""
    monkeypatch.setattr(few_queries, "fastest_in_e4m3", lambda call, mean_k: few_queries.NOT_FEW)
    forget_launchers()
    yield
    forget_launchers()


@pytest.mark.usefixtures("usual_tiles")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "bounds", "softmax", "v_rows"),
    [
        (64, (100, 200), Softmax.EAGER, True),
        (64, (200, 2000), Softmax.HALF_SCORES, False),
        (64, (4096, 4096), Softmax.HALF_SCORES, False),
        (128, (100, 450), Softmax.EAGER, True),
        (128, (400, 2000), Softmax.HALF_SCORES, True),
        (128, (4096, 4096), Softmax.HALF_SCORES, False),
        (256, (100, 200), Softmax.HALF_SCORES, True),
        (256, (200, 2000), Softmax.HALF_SCORES, True),
        (256, (4096, 4096), Softmax.HALF_SCORES, False),
    ],
)
def test_the_kernels_of_many_tiles(
    head_dim: int, bounds: Bounds, softmax: Softmax, v_rows: bool, causal: bool
) -> None:
    q, k = (torch.empty(50_000, heads, head_dim, dtype=E4M3, device="meta") for heads in (4, 2))
    starts = torch.empty(9, dtype=torch.int32, device="meta")
    plan = explain(q, k, k, starts, starts, *bounds, causal=causal, device_capability=(9, 0))
    config = plan.config
    assert isinstance(config, Fp8ForwardConfig) and config.lone_scales and config.layout == "varlen"
    assert (config.softmax, config.v_rows, config.causal) == (softmax, v_rows, causal)
    assert config.lowers_queries == (softmax is Softmax.HALF_SCORES) and bool(plan.copies) != v_rows
