"""``explain_varlen``: what a call with sequences of different lengths would run."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from hopper.forward.fp8.config import Fp8ForwardConfig, Softmax
from hopper_attention import explain_varlen, flash_attn_varlen_func, forward_rules
from hopper_attention.forward_rules import ReferenceConfig
from hopper_attention.problem import AttentionProblem
from hopper_attention.torch_rules import TorchConfig
from tests.python.varlen_cases import CASES

USED = CASES["used"]
WIDE = CASES["wide v"]


def plan(case: Any = USED, **options: Any) -> Any:
    return explain_varlen(*case.tensors(torch.bfloat16), *case.lengths, **options)


def test_it_takes_what_the_call_takes() -> None:
    theirs, ours = (inspect.signature(f).parameters for f in (flash_attn_varlen_func, explain_varlen))
    assert list(ours) == [*theirs, "device_capability"]
    assert all(ours[name].default == theirs[name].default for name in theirs)


def test_what_runs_without_a_kernel() -> None:
    found = plan(causal=True)
    assert found.backend == "torch" and found.config == TorchConfig() and found.notes == ()
    assert found.reason == "cpu is not an NVIDIA GPU"
    asked = plan(backend="reference", device_capability=(9, 0))
    assert asked.config == ReferenceConfig() and asked.reason == "asked for with backend='reference'"


def test_notes() -> None:
    assert plan(window_size=(3, 2)).notes == (
        "window: a query sees 3 of the keys before its own and 2 after it",
    )
    assert "columns of v are attended to in parts of 160 and 136" in plan(WIDE).notes[0]
    old = plan(window_size=(3, 2), device_capability=(7, 5))
    assert old.backend == "reference" and "flex_attention, compiled, may be faster" in old.notes[0]


def test_autocast_and_meta_tensors() -> None:
    tensors = [x.to("meta") for x in USED.tensors(torch.float32)]
    lengths = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in USED.lengths]
    with torch.autocast("cpu", torch.float16):
        with pytest.raises(TypeError, match=r"q has dtype torch\.float32"):
            explain_varlen(*tensors, *lengths)
        cast = explain_varlen(*USED.tensors(torch.float32), *USED.lengths)
    assert len(cast.copies) == 3 and "q is cast to torch.float16" in cast.copies[0]
    assert explain_varlen(*(x.half() for x in tensors), *lengths).backend == "torch"


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"max_seqlen_q": 2.5}, TypeError, "max_seqlen_q is a float"),
        ({"seqused_k": torch.ones(4)}, TypeError, "seqused_k has dtype torch.float32"),
        ({"backend": "cuda"}, ValueError, "backend is 'cuda'"),
        ({"softmax_scale": -1.0}, ValueError, "softmax_scale is -1.0"),
        ({"softcap": -3.0}, ValueError, "softcap is -3.0, allowed: 0, which is none"),
        ({"sinks": torch.ones(3)}, ValueError, r"sinks has shape \(3,\), allowed: \(heads,\), \(4,\)"),
        ({"q_descale": torch.ones(4, 2)}, ValueError, "q_descale is given but q has dtype torch.bfloat16"),
        ({"device_capability": 9}, ValueError, "device_capability is 9, allowed"),
        (
            {"q": torch.zeros(41, 4, 32).to(torch.float8_e4m3fn)},
            TypeError,
            "k has dtype torch.bfloat16, allowed: the dtype of q",
        ),
    ],
)
def test_it_raises_what_the_call_would(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    names = list(inspect.signature(explain_varlen).parameters)
    given = dict(zip(names, (*USED.tensors(torch.bfloat16), *USED.lengths), strict=False))
    with pytest.raises(error, match=message):
        explain_varlen(**given | changed)


@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_e4m3_tensors_have_scores_in_float16_where_nobody_gets_the_lse(
    columns: int, causal: bool
) -> None:
    """A fast one has scores in float32, and an exact one is another's."""
    q = torch.empty(50_000, 4, columns, dtype=torch.float8_e4m3fn, device="meta")
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    configs: list[Any] = [
        explain_varlen(
            *(q, q, q, cu, cu, 4096, 4096),
            causal=causal,
            return_attn_probs=wanted,
            exact_lse=exact_lse,
            device_capability=(9, 0),
        ).config
        for wanted, exact_lse in ((False, None), (True, False), (True, None), (False, True))
    ]
    without, fast, exact, asked = configs
    assert all(isinstance(config, Fp8ForwardConfig) for config in configs)
    assert without.softmax is Softmax.HALF_SCORES and without.lowers_queries and without.lone_scales
    assert fast.softmax is not Softmax.HALF_SCORES and fast.lone_scales and not fast.wide_codes
    assert exact == asked and exact.wide_codes and not exact.lone_scales


@pytest.mark.parametrize("window", [(-1, -1), (3, 2), (3, 0)], ids=str)
def test_the_config_is_that_of_the_problem(window: tuple[int, int]) -> None:
    for options, capability, backend in (
        ({}, (9, 0), "hopper"),
        ({"backend": "ampere"}, (9, 0), "ampere"),
        ({}, (8, 0), "ampere"),
    ):
        found = plan(**options, device_capability=capability, window_size=window)
        is_causal, has_window = window[1] == 0, window != (-1, -1)
        problem = AttentionProblem(
            *2 * (torch.bfloat16,), 32, 24, is_causal, has_window=has_window, is_packed=True
        )
        assert found.backend == backend
        assert found.config == forward_rules.select_for(problem, backend, capability)
        assert found.config.causal == is_causal


def test_what_a_kernel_cannot_address_is_copied() -> None:
    q, k, v = USED.tensors(torch.bfloat16)
    columns = q.transpose(1, 2).contiguous().transpose(1, 2)
    padded = torch.zeros(*k.shape[:2], 36, dtype=k.dtype)[:, :, :32]
    assert plan(device_capability=(9, 0)).copies == ()
    assert explain_varlen(columns, padded, v, *USED.lengths, device_capability=(9, 0)).copies == (
        "q is copied to contiguous memory: its stride in the last dimension is 4, and the kernel needs 1",
        "k is copied to contiguous memory: its stride in dimension 1 is 36, and the kernel needs a multiple of 8 "
        "elements other than 0",
    )
    assert explain_varlen(columns, padded, v, *USED.lengths).copies == ()


def test_more_rows_than_a_kernel_counts_are_refused() -> None:
    q, k = (torch.empty(n, 1, 64, dtype=torch.half, device="meta") for n in (2**29 + 1, 5))
    cu = torch.empty(2, dtype=torch.int32, device="meta")
    with pytest.raises(NotImplementedError, match="total_q is 536870913, the kernel takes at most 536870912"):
        explain_varlen(q, k, k, cu, cu, 5, 5, device_capability=(9, 0))
    assert explain_varlen(q, k, k, cu, cu, 5, 5).backend == "torch"


def test_a_kernel_and_its_gradient() -> None:
    tensors = [x.requires_grad_() for x in USED.tensors(torch.bfloat16)]
    found = explain_varlen(*tensors, *USED.lengths, device_capability=(9, 0), sm_margin=4)
    assert found.backend == "hopper" and found.config.head_dim >= 32
    assert "sm_margin 4 must be less than the GPU's multiprocessors" in found.notes[0]
    assert found.notes[1].startswith("the backward pass runs on the Hopper kernel hopper_bwd_")
