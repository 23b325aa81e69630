"""Operators of variable lengths under torch's checks, torch.compile, torch.func; and where kernels will come in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, jvp, vjp, vmap

from cute_kernels.backward.step import FEW_KEYS
from hopper_attention import compile_cache, flash_attn_varlen_func
from hopper_attention.launch import backward, forward, varlen
from hopper_attention.launch.planners import OF_KEYS
from hopper_attention.lengths import Lengths
from hopper_attention.masks import kernel_sides
from hopper_attention.problem import AttentionProblem, GradientProblem
from tests.python.fake_gpu import SMS, forget_launchers, pretend
from tests.python.varlen_cases import CASES, Case, offsets

OPS = torch.ops.hopper_attention
USED = CASES["used"]


def clean(case: Case, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """q, k and v without NaN, which opcheck compares."""
    return case.tensors(dtype, poisoned=False)


def of_operator(case: Case) -> tuple[Any, ...]:
    """The lengths in the order of the operators."""
    cu_q, cu_k, longest_q, longest_k, used_q, used_k = case.lengths
    return cu_q, cu_k, used_q, used_k, longest_q, longest_k


CHUNK = (False, -1, 3, 5)
CHECKED = [
    *((name, CHUNK) for name in ("plain", "rows behind", "wide v", "no sequence", "no keys", "nothing")),
    *(("used", mask) for mask in ((False, -1, -1), (True, -1, -1), (True, 4, -1), CHUNK)),
]
"""Every kind of sequences and every mask, not each with each: no shape and no operand depends on both."""


@pytest.mark.parametrize("name,mask", CHECKED, ids=str)
def test_opcheck(name: str, mask: tuple[bool, int, ...]) -> None:
    case, (causal, *window) = CASES[name], mask
    q, k, v = (x.requires_grad_() for x in clean(case))
    lengths = of_operator(case)
    arguments = (q, k, v, *lengths, 0.2, causal, None, 0, False, *window)
    torch.library.opcheck(OPS.forward_varlen.default, arguments)
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = OPS.forward_varlen(q, k, v, *lengths, 0.2, causal, None, 0, False, *window)
    # With a gradient of the LSE where there are chunks, and without one under every other mask.
    dlse = torch.randn_like(lse).masked_fill(lse == -math.inf, 0.0) if mask == CHUNK else None
    rows = torch.randn_like(out), dlse, q, k, v, out, lse
    gradient = (*rows, *lengths, 0.2, causal, None, False, *window)
    torch.library.opcheck(OPS.backward_varlen.default, gradient)


def test_meta_and_fake_tensors_have_results() -> None:
    real, given = clean(USED), USED.lengths
    meta = [x.to("meta") for x in real]
    lengths = [x.to("meta") if isinstance(x, Tensor) else x for x in given]
    out, lse = flash_attn_varlen_func(*meta, *lengths, return_attn_probs=True)
    assert out.is_meta and out.shape == (41, 4, 24) and out.dtype == torch.bfloat16
    assert lse.shape == (4, 41) and lse.dtype == torch.float32
    with FakeTensorMode() as mode:
        tensors, lengths = (
            [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in group] for group in (real, given)
        )
        fake = flash_attn_varlen_func(*tensors, *lengths)
        assert fake.shape == (41, 4, 24) and fake.is_contiguous()


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": (3, 1)}], ids=str)
def test_one_graph_serves_every_length(needs_grad: bool, mask: dict[str, Any]) -> None:
    torch._dynamo.reset()
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(flash_attn_varlen_func, fullgraph=True, dynamic=True, backend=count)
    # In the first batch nothing has the size of something else: torch would take the two for one.
    for rooms in ((5, 17, 40, 1, 6, 8), (9, 0, 33), (60, 70, 80, 90), (128, 256), (7, 300)):
        case = Case(rooms, tuple(reversed(rooms)))
        tensors = [x.requires_grad_(needs_grad) for x in clean(case)]
        assert torch.equal(
            compiled(*tensors, *case.lengths, **mask), flash_attn_varlen_func(*tensors, *case.lengths, **mask)
        )
    assert len(graphs) == 1


@pytest.mark.parametrize("wants_lse", [False, True])
def test_e4m3_tensors_with_descales(wants_lse: bool) -> None:
    """Their operator is told whether anybody wants the LSE, which has no rows else."""
    case = CASES["used keys"]
    q, k, v = (x.to(torch.float8_e4m3fn) for x in clean(case))
    descales = [torch.rand(2, 2, generator=torch.Generator().manual_seed(i)) + 0.5 for i in range(3)]
    arguments = (q, k, v, *descales, *of_operator(case), 0.2, True, "reference", 0, False, -1, -1, 0)
    results = OPS.forward_varlen_fp8(*arguments, 0.0, None, None, wants_lse)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments]
        found = OPS.forward_varlen_fp8(*fake, 0.0, None, None, wants_lse)
    expected = (34, 4, 24), (4, 34 if wants_lse else 0)
    assert tuple(x.shape for x in results) == tuple(x.shape for x in found) == expected
    assert [x.dtype for x in results] == [x.dtype for x in found] == [torch.bfloat16, torch.float32]
    named = {**dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True)), "causal": True}
    named |= {"softmax_scale": 0.2, "return_attn_probs": wants_lse, "backend": "reference"}
    compiled = torch.compile(flash_attn_varlen_func, fullgraph=True, dynamic=True, backend="aot_eager")
    given = compiled(q, k, v, *case.lengths, **named)
    assert torch.equal(given[0] if wants_lse else given, results[0])
    assert not wants_lse or torch.equal(given[1], results[1])


def test_compiled_gradients() -> None:
    torch._dynamo.reset()

    def loss(q: Tensor, k: Tensor, v: Tensor, *lengths: Any) -> Tensor:
        out, lse = flash_attn_varlen_func(q * 2, k, v, *lengths, causal=True, return_attn_probs=True)
        return out.float().square().sum() + lse.masked_fill(lse == -math.inf, 0.0).sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for case in (USED, CASES["rows behind"], CASES["many tiles"]):
        leaves = [x.requires_grad_() for x in clean(case)]
        got, wanted = (torch.autograd.grad(f(*leaves, *case.lengths), leaves) for f in (compiled, loss))
        assert all(x.any() and torch.equal(x, y) for x, y in zip(got, wanted, strict=True))


def test_export() -> None:
    case = CASES["plain"]

    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
            return flash_attn_varlen_func(q, k, v, cu_q, cu_k, 40, 33, causal=True)

    inputs = (*clean(case), *case.lengths[:2])
    program = torch.export.export(Attention(), inputs)
    assert torch.equal(program.module()(*inputs), Attention()(*inputs))
    assert "hopper_attention.forward_varlen" in str(program.graph)


def test_checkpointing_recomputes() -> None:
    case = USED
    leaves = [x.requires_grad_() for x in clean(case)]

    def loss(*tensors: Tensor) -> Tensor:
        return flash_attn_varlen_func(*tensors, *case.lengths, causal=True).float().square().sum()

    again = torch.utils.checkpoint.checkpoint(loss, *leaves, use_reentrant=False)
    got, wanted = (torch.autograd.grad(x, leaves) for x in (again, loss(*leaves)))
    assert all(map(torch.equal, got, wanted))


def test_lengths_that_change_before_the_backward_are_noticed() -> None:
    case = CASES["plain"]
    leaves = [x.requires_grad_() for x in clean(case)]
    cu_q, *rest = case.lengths
    out = flash_attn_varlen_func(*leaves, cu_q, *rest)
    cu_q[1] += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_double_backward_is_refused() -> None:
    leaves = [x.requires_grad_() for x in clean(USED)]
    out = flash_attn_varlen_func(*leaves, *USED.lengths)
    (dq,) = torch.autograd.grad(out.float().sum(), leaves[0], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"double backward.*use hopper_attention.reference"):
        dq.float().sum().backward()


# torch.func


def loss_of(case: Case) -> Callable[..., Tensor]:
    return lambda *tensors: (
        flash_attn_varlen_func(*tensors, *case.lengths, causal=True).float().square().sum()
    )


def gradients(case: Case, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    return torch.autograd.grad(loss_of(case)(*leaves), leaves)


def test_reverse_mode() -> None:
    tensors = clean(USED)
    wanted = gradients(USED, tensors)
    assert all(map(torch.equal, grad(loss_of(USED), (0, 1, 2))(*tensors), wanted))
    value, pull = vjp(loss_of(USED), *tensors)
    assert all(map(torch.equal, pull(torch.ones_like(value)), wanted))


@pytest.mark.parametrize("samples", [1, 3])
def test_samples_are_computed_one_by_one(samples: int) -> None:
    tensors = clean(USED)
    scaled = [torch.stack([x * (i + 1) for i in range(samples)]) for x in tensors]
    found = vmap(grad(loss_of(USED), (0, 1, 2)))(*scaled)
    for i in range(samples):
        wanted = gradients(USED, [x[i] for x in scaled])
        assert all(torch.equal(x[i], y) for x, y in zip(found, wanted, strict=True))
    shared = vmap(lambda q: flash_attn_varlen_func(q, *tensors[1:], *USED.lengths))(scaled[0])
    for i in range(samples):
        assert torch.equal(shared[i], flash_attn_varlen_func(scaled[0][i], *tensors[1:], *USED.lengths))


def test_samples_may_differ_in_their_lengths() -> None:
    q, k, v = (x[:12] for x in clean(CASES["many tiles"]))
    cu = torch.stack([offsets((3, 9)), offsets((8, 2))])
    found = vmap(lambda c: flash_attn_varlen_func(q, k, v, c, c, 12, 12))(cu)
    for i in range(2):
        assert torch.equal(found[i], flash_attn_varlen_func(q, k, v, cu[i], cu[i], 12, 12))


def test_forward_mode_is_refused() -> None:
    tensors = tuple(clean(USED))
    with pytest.raises(NotImplementedError, match="forward-mode derivatives of attention"):
        jvp(loss_of(USED), tensors, tensors)


# Kernels


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A Hopper GPU by name."""
    pretend(monkeypatch, forward, backward)
    yield monkeypatch
    forget_launchers()


@pytest.mark.parametrize("window", [(-1, -1, 0), (3, 2, 0), (3, 2, 9)], ids=str)
@pytest.mark.parametrize("backend", ["hopper", "ampere"])
def test_what_gradient_kernels_are_given(
    backend: str, window: tuple[int, int, int], gpu: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []

    def get(config: Any) -> Callable[..., None]:
        return lambda *a: seen.append(a)

    gpu.setattr(compile_cache, "get_backward", get)
    gpu.setattr(compile_cache, "get_forward", get)
    tensors, lengths = clean(USED), of_operator(USED)
    out, lse = OPS.forward_varlen(*tensors, *lengths, 0.2, False, "reference", 0)
    slopes = torch.rand(4)
    OPS.backward_varlen(
        out, None, *tensors, out, lse, *lengths, 0.3, False, backend, False, *window, 2.0, slopes
    )
    plan_call, prepare, kernel, finish = seen
    *given, plan, total_q, total_k, tile, rows = plan_call
    assert all(x is y for x, y in zip(given, lengths[:4], strict=True))
    assert (total_q, total_k, rows) == (41, len(tensors[1]), OF_KEYS) and tile in (64, 128)
    # A plan has a word more than there are sequences for where each starts.
    assert prepare[7] is plan and prepare[8] == 5 and finish[2:] == (plan, 5, 0.3)
    assert all(x is y for x, y in zip(prepare[4:7], kernel[4:7], strict=True)) and finish[0] is kernel[6]
    sides = kernel_sides(*window) if window != (-1, -1, 0) else ()
    if backend == "hopper":
        sides = sides or (None, None, None)
        scale, *options, cap, slopes_given, philox, kept, ctas = kernel[10:]
        assert (scale, cap, ctas) == (0.3, 2.0, SMS) and options[:3] == [*sides]
        found_plan, sequences = options[3:]
    else:
        found_plan, sequences, scale, *options, cap, slopes_given, philox, kept = kernel[10:]
        assert (scale, cap) == (0.3, 2.0) and options == [side for side in sides if side is not None]
    assert found_plan is plan and sequences == 5 and philox is None and kept is None
    assert torch.equal(slopes_given, slopes.expand(4, 4))


@pytest.mark.parametrize(
    ("keys", "sinks"), [(FEW_KEYS, None), (FEW_KEYS + 1, None), (FEW_KEYS, torch.zeros(4))]
)
def test_the_kernel_finds_delta_where_keys_are_few_and_all_that_the_lse_has(
    keys: int, sinks: Tensor | None, gpu: pytest.MonkeyPatch
) -> None:
    """Sinks may also stand for other keys."""
    asked: list[Any] = []
    for name in ("get_backward", "get_forward"):
        gpu.setattr(compile_cache, name, lambda config: asked.append(config) or (lambda *a: None))
    tensors, lengths = clean(USED), (*of_operator(USED)[:-1], keys)
    out, lse = OPS.forward_varlen(*tensors, *of_operator(USED), 0.2, False, "reference", 0)
    options = 0.3, False, "hopper", False, -1, -1, 0, 2.0, None, sinks
    OPS.backward_varlen(out, None, *tensors, out, lse, *lengths, *options)
    prepare, kernel, _ = (config for config in asked if "bwd" in config.name)
    expected = keys == FEW_KEYS and sinks is None
    assert prepare.config.few_keys == kernel.few_keys == expected
    assert kernel.name.endswith("_few") == prepare.name.endswith("_few") == expected


def test_what_a_forward_launcher_is_given(gpu: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    calls: list[tuple[Any, ...]] = []

    def find(problem: AttentionProblem, *where: Any) -> Callable[..., Any]:
        asked.append(problem)

        def launch(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
            calls.append((q, k, v, *others))
            return q.new_zeros(*q.shape[:2], v.shape[2]), torch.zeros(q.shape[1], q.shape[0])

        return launch

    gpu.setattr(varlen, "find_varlen", find)
    q, k, v = clean(USED)
    cu_q, cu_k, longest_q, longest_k, used_q, used_k = lengths = USED.lengths
    flash_attn_varlen_func(q, k, v, *lengths, softmax_scale=0.3, window_size=(3, 2))
    *tensors, scale, left, right, chunk, wants_lse = calls[0]
    assert all(x is y for x, y in zip(tensors[:7], (q, k, v, cu_q, cu_k, used_q, used_k), strict=True))
    assert (*tensors[7:], scale, left, right, wants_lse) == (longest_q, longest_k, 0.3, 3, 2, True)
    assert chunk == 0
    plain = AttentionProblem(torch.bfloat16, torch.bfloat16, 32, 24, False, is_packed=True)
    assert asked == [replace(plain, has_window=True)]
    # No length, and no size of a window, decides on the launcher.
    flash_attn_varlen_func(q, k, v, cu_q, cu_k, 99, 98, window_size=(4, 1))
    assert (
        len(asked) == 2
        and asked[1] == asked[0]
        and calls[1][5:] == (None, None, 99, 98, 32**-0.5, 4, 1, 0, True)
    )
    flash_attn_varlen_func(q, k, v, cu_q, cu_k, 99, 98, causal=True)
    assert asked[2] == replace(plain, causal=True) and calls[2][-4:] == (-1, -1, 0, True)
    wide = torch.zeros(*k.shape[:2], 296, dtype=k.dtype)
    assert flash_attn_varlen_func(q, k, wide, cu_q, cu_k, 99, 98).shape == (41, 4, 296)
    # The kernel for wide values takes narrow heads; those of more columns are served in parts.
    assert calls[3][2] is wide and asked[3].head_dim_v == 296
    q, k = (torch.zeros(*x.shape[:2], 72, dtype=x.dtype) for x in (q, k))
    assert flash_attn_varlen_func(q, k, wide, cu_q, cu_k, 99, 98).shape == (41, 4, 296)
    assert [x[2].shape[2] for x in calls[4:]] == [160, 136] == [problem.head_dim_v for problem in asked[4:]]


def test_what_a_backward_launcher_is_given(gpu: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    calls: list[tuple[Any, ...]] = []

    def find(problem: GradientProblem, *where: Any) -> Callable[..., Any]:
        asked.append(problem)

        def launch(dout: Tensor, dlse: Tensor | None, *tensors: Any) -> tuple[Tensor, ...]:
            calls.append((dout, dlse, *tensors))
            return tuple(torch.zeros_like(x) for x in tensors[:3])

        return launch

    gpu.setattr(varlen, "find_varlen_backward", find)
    q, k, v = clean(USED)
    lengths = of_operator(USED)
    out, lse, dlse = torch.randn(41, 4, 24).bfloat16(), torch.zeros(4, 41), torch.ones(4, 41)
    given = (out, dlse, q, k, v, out, lse, *lengths)
    OPS.backward_varlen(*given, 0.3, False, None, True, 3, 2)
    assert all(x is y for x, y in zip(calls[0][:-4], given, strict=True)) and calls[0][-4:] == (0.3, 3, 2, 0)
    expected = GradientProblem(
        *(torch.bfloat16, torch.bfloat16, 32, 24, False),
        has_window=True,
        is_packed=True,
        deterministic=True,
        keys="few",
    )
    assert asked == [expected]
    OPS.backward_varlen(*given, 0.3, True)
    assert asked[1] == replace(expected, causal=True, has_window=False, deterministic=False)
    torch.use_deterministic_algorithms(True)
    try:
        OPS.backward_varlen(*given, 0.3, True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked[2].deterministic and calls[2][-3:] == (-1, -1, 0)


@pytest.mark.parametrize("name", ["no sequence", "no queries", "no keys", "nothing"])
def test_nothing_to_launch_gives_what_the_reference_gives(name: str) -> None:
    q, k, v = clean(CASES[name], torch.float16)
    lengths = Lengths(*of_operator(CASES[name]))
    assert varlen.is_empty(q, k, lengths)
    empty = varlen.EMPTY(q, k, v, *lengths, 0.2, -1, -1, 0, True)
    wanted = varlen.run_varlen(q, k, v, lengths, 0.2, False, None, 0)
    for mine, theirs in zip(empty, wanted, strict=True):
        assert torch.equal(mine, theirs) and mine.dtype == theirs.dtype and mine.is_contiguous()
    # Bounds of 0 say as much, whatever the rows hold.
    plain = CASES["plain"]
    q, k, _ = clean(plain)
    assert not varlen.is_empty(q, k, Lengths(*of_operator(plain)))
    assert varlen.is_empty(q, k, Lengths(*of_operator(plain))._replace(max_seqlen_k=0))
