"""What serves the backward pass, and what reaches its kernels, seen by stand-ins that compute in PyTorch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.backward.step import BackwardStep
from hopper.backward import config as backward_config
from hopper.backward.config import BackwardConfig, shipped_backward_kernels
from hopper_attention import backward_launch, compile_cache, explain, flash_attn_fp8_func, flash_attn_func
from hopper_attention.backends import Target
from hopper_attention.backward_rules import BackwardProblem, choose_backward, select_config, why_not_kernel
from hopper_attention.notices import warn_once
from hopper_attention.reference import attention_naive

H200 = Target("fake H200", (9, 0), assume_installed=True)
OPS = torch.ops.hopper_attention


class StandIns:
    """The three kernels of a backward pass, in float32; notes the configs and the inputs of each pass."""

    def __init__(self) -> None:
        self.configs: list[Any] = []
        self.inputs: list[tuple[Tensor, ...]] = []

    def get(self, config: BackwardConfig | BackwardStep) -> Callable[..., None]:
        self.configs.append(config)
        if isinstance(config, BackwardStep):
            return self.prepare if config.step == "prepare" else self.finish
        self.config = config
        return self.kernel

    def dq_of_a_tile(self) -> tuple[int, int]:
        """Parts and words of its sums."""
        return self.config.dq_parts, self.config.tile_m * self.config.head_dim // self.config.dq_parts

    def prepare(self, out: Tensor, dout: Tensor, lse: Tensor, lse_log2: Tensor, delta: Tensor) -> None:
        hidden = lse == -math.inf
        rows = slice(lse.shape[2])
        lse_log2.fill_(math.inf)[:, :, rows] = (lse * math.log2(math.e)).masked_fill(hidden, math.inf)
        sums = (out.float() * dout.float()).sum(-1).transpose(1, 2)
        delta.zero_()[:, :, rows] = sums.masked_fill(hidden, 0.0)

    def kernel(self, *arguments: Any) -> None:
        q, k, v, dout, lse_log2, delta, sums, dk, dv, counter, scale, *ctas = arguments
        assert ctas == ([132] if self.config.is_persistent else [])
        counts = sums[..., 0, 0].numel() * self.config.counts_per_tile
        assert counter.dtype == torch.int32 and counter.shape == (2 + self.config.ordered * counts,)
        assert not counter.any()
        self.inputs.append((q, k, v, dout))
        assert sums.shape == (
            q.shape[0],
            q.shape[2],
            lse_log2.shape[2] // self.config.tile_m,
            *self.dq_of_a_tile(),
        )
        assert not sums.any()
        group, rows = q.shape[2] // k.shape[2], slice(q.shape[1])
        q, dout, k, v = (x.float().transpose(1, 2) for x in (q, dout, k, v))
        k_all, v_all = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = q @ k_all.mT * (scale * math.log2(math.e))
        if self.config.causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
            scores.masked_fill_(hidden, -math.inf)
        p = torch.exp2(scores - lse_log2[:, :, rows, None])
        ds = p * (dout @ v_all.mT - delta[:, :, rows, None])
        self.dq = (ds @ k_all).transpose(1, 2)
        dk.copy_((scale * (ds.mT @ q)).unflatten(1, (-1, group)).sum(2).transpose(1, 2))
        dv.copy_((p.mT @ dout).unflatten(1, (-1, group)).sum(2).transpose(1, 2))

    def finish(self, sums: Tensor, dq: Tensor, scale: float) -> None:
        dq.copy_(self.dq * scale)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIns]:
    """A Hopper GPU for the backward pass alone, whose tensors are the CPU's."""
    fake = StandIns()
    monkeypatch.setattr(backward_launch, "target_of", lambda device: H200)
    monkeypatch.setattr(compile_cache, "get_backward", fake.get)
    monkeypatch.setattr(backward_launch, "count_multiprocessors", lambda device_index: 132)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    backward_launch.find_choice.cache_clear()
    warn_once.cache_clear()
    yield fake
    backward_launch.find_choice.cache_clear()


def leaves(
    seqlens: tuple[int, int] = (70, 90),
    head_dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.float16,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = (
        (2, seqlens[0], 4, head_dims[0]),
        (2, seqlens[1], 2, head_dims[0]),
        (2, seqlens[1], 2, head_dims[1]),
    )
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def exact_gradients(inputs: list[Tensor], dout: Tensor, dlse: Tensor, causal: bool) -> tuple[Tensor, ...]:
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out, lse = attention_naive(*exact, causal=causal)
    dlse = dlse.double().masked_fill(lse == -math.inf, 0.0)
    return torch.autograd.grad((out, lse), exact, (dout.double(), dlse))


def relative(x: Tensor, exact: Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm()).item()


# What reaches the kernels


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("seqlens", "head_dims"), [((70, 90), (64, 64)), ((90, 40), (40, 104)), ((70, 90), (136, 200))], ids=str
)
def test_gradients_of_output_and_lse(kernels: StandIns, seqlens, head_dims, causal: bool) -> None:
    inputs = leaves(seqlens, head_dims)
    out, lse = flash_attn_func(*inputs, causal=causal, return_attn_probs=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    dlse[lse == -math.inf] = math.nan
    ours = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    for gradient, e in zip(ours, exact_gradients(inputs, dout, dlse, causal), strict=True):
        assert gradient.dtype == torch.float16 and gradient.is_contiguous() and relative(gradient, e) < 2e-3
    prepare, config, finish = kernels.configs
    assert config == select_config(
        BackwardProblem(*(x.shape for x in inputs), torch.float16, causal)
    ) and isinstance(config, BackwardConfig)
    assert prepare == BackwardStep("prepare", config) and finish == BackwardStep("finish", config)


def test_what_tma_cannot_address_is_copied(kernels: StandIns) -> None:
    inputs = leaves()
    dout = torch.randn(2, 70, 4, 67).half()[..., 1:65]
    expected = torch.autograd.grad(flash_attn_func(*inputs), inputs, dout.contiguous())
    assert [x.data_ptr() for x in kernels.inputs[0][:3]] == [x.data_ptr() for x in inputs]
    ours = torch.autograd.grad(flash_attn_func(*inputs), inputs, dout)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    flash_attn_func(*inputs).sum().backward()
    for passed in kernels.inputs:
        for x in passed:
            assert x.data_ptr() % 16 == 0 and all(s > 0 and s % 8 == 0 for s in x.stride()[:3]), x.stride()


@pytest.mark.parametrize("seqlens", [(0, 9), (9, 0)])
def test_empty_problems_run_no_kernel(kernels: StandIns, seqlens: tuple[int, int]) -> None:
    inputs = leaves(seqlens)
    flash_attn_func(*inputs).sum().backward()
    assert kernels.configs == [] and not any(x.grad.any() for x in inputs)


def test_fp8_attention_has_its_gradients_from_the_kernel(kernels: StandIns) -> None:
    inputs = leaves(dtype=torch.bfloat16)
    out = flash_attn_fp8_func(*inputs, causal=True)
    dout = torch.randn_like(out)
    ours = torch.autograd.grad(out, inputs, dout)
    assert len(kernels.inputs) == 1
    no_dlse = torch.zeros(2, 4, 70)
    for gradient, e in zip(ours, exact_gradients(inputs, dout, no_dlse, True), strict=True):
        assert relative(gradient, e) < 0.08


def test_the_operator_passes_opcheck(kernels: StandIns) -> None:
    q, k, v = (x.detach() for x in leaves((9, 13)))
    out, lse = OPS.forward(q, k, v, 0.125, True, None, 0, False)
    for dlse, backend in ((None, None), (torch.randn_like(lse), "hopper")):
        arguments = (torch.randn_like(out), dlse, q, k, v, out, lse, 0.125, True, backend, False)
        torch.library.opcheck(OPS.backward.default, arguments)
    assert kernels.inputs


def ordered_passes(kernels: StandIns) -> list[bool]:
    """Of each backward pass so far, whether its kernel sums dQ in a fixed order."""
    return [config.ordered for config in kernels.configs if isinstance(config, BackwardConfig)]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_gradients_come_from_the_ordered_kernel(kernels: StandIns, head_dim: int) -> None:
    def gradient(deterministic: bool) -> None:
        flash_attn_func(*leaves((70, 90), (head_dim, head_dim)), deterministic=deterministic).sum().backward()

    gradient(True)
    torch.use_deterministic_algorithms(True)
    try:
        gradient(False)
    finally:
        torch.use_deterministic_algorithms(False)
    gradient(False)
    assert ordered_passes(kernels) == [True, True, False]


def test_compilation_keeps_deterministic(kernels: StandIns) -> None:
    for deterministic in (True, False):
        compiled = torch.compile(
            lambda *x, d=deterministic: flash_attn_func(*x, deterministic=d),
            fullgraph=True,
            backend="aot_eager",
        )
        compiled(*leaves()).sum().backward()
    assert ordered_passes(kernels) == [True, False]


# Where the reference serves


def test_the_reference_can_be_asked_for(kernels: StandIns) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flash_attn_func(*leaves(), backend="reference").sum().backward()
    assert kernels.configs == []


def test_what_a_grid_cannot_count_warns_once(kernels: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_config, "MAX_BATCH_OR_HEADS", 1)
    inputs = leaves()
    expected = r"batch is 2, the Hopper backward kernel takes at most 1: split it; torch's"
    with pytest.warns(UserWarning, match=expected) as caught:
        for _ in range(2):
            flash_attn_func(*inputs).sum().backward()
    assert len(caught) == 1 and kernels.configs == []


# The rule


def problem(
    batch: int = 2, seqlens: tuple[int, int] = (9, 9), heads: int = 4, **options: Any
) -> BackwardProblem:
    q, k = (batch, seqlens[0], heads, 64), (batch, seqlens[1], heads, 64)
    return BackwardProblem(
        q, k, k, options.get("dtype", torch.float16), True, options.get("deterministic", False)
    )


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (problem(), ""),
        (problem(65_535, heads=65_535), ""),
        (problem(65_536), "batch is 65536, the Hopper backward kernel takes at most 65535"),
        (problem(heads=65_536), "heads is 65536, the Hopper backward kernel takes at most 65535"),
        (problem(seqlens=(2**31, 9)), "seqlen_q is 2147483648, the Hopper backward kernel takes at most"),
        (problem(seqlens=(9, 2**31)), "seqlen_k is 2147483648, the Hopper backward kernel takes at most"),
        (problem(dtype=torch.float8_e4m3fn), "takes float16 and bfloat16, not torch.float8_e4m3fn"),
    ],
)
def test_why_not(asked: BackwardProblem, reason: str) -> None:
    assert (reason in why_not_kernel(asked)) if reason else why_not_kernel(asked) == ""
    choice = choose_backward(asked, H200, None)
    assert choice.backend == ("reference" if reason else "hopper") and reason in choice.reason


def test_the_rule_by_target_and_request() -> None:
    assert choose_backward(problem(), H200, "hopper").backend == "hopper"
    assert choose_backward(problem(), H200, "reference").reason == "asked for with backend='reference'"
    old = choose_backward(problem(), Target("A100", (8, 0)), None)
    assert old.backend == "reference" and "8.0" in old.reason and "has a fast one" in old.advice
    assert choose_backward(problem(), Target("cpu"), None).advice == ""
    assert choose_backward(problem(deterministic=True), H200, None).backend == "hopper"
    assert select_config(problem(deterministic=True)).ordered and not select_config(problem()).ordered


@pytest.mark.parametrize(
    ("head_dim", "options", "note"),
    [
        (64, {}, "runs on the Hopper kernel hopper_bwd_bf16_d64_full_m128n128s2_r240_24"),
        (192, {}, "runs on the Hopper kernel hopper_bwd_bf16_d192_full_m64n128s2_r240_24_pair"),
        (
            64,
            {"deterministic": True},
            "runs on the Hopper kernel hopper_bwd_bf16_d64_full_m128n128s2_r240_24_ordered",
        ),
    ],
)
def test_explain_says_what_the_gradients_run_on(head_dim: int, options: dict[str, bool], note: str) -> None:
    q = torch.empty(1, 9, 2, head_dim, dtype=torch.bfloat16, device="meta", requires_grad=True)
    plan = explain(q, q, q, device_capability=(9, 0), **options)
    assert plan.backend == "hopper" and note in plan.notes[-1]
    assert explain(q, q, q, device_capability=(9, 0), backend="reference").notes == ()


def test_each_kernel_is_shipped_once() -> None:
    names = [config.name for config in shipped_backward_kernels()]
    assert len(set(names)) == len(names) == 40 + 10 + 10
