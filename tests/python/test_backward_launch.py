"""What serves the backward pass, and what reaches its kernels, seen by stand-ins that compute in PyTorch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.ampere.backward.config import AmpereBackwardConfig
from cute_kernels.backward import step
from cute_kernels.backward.step import BackwardStep
from cute_kernels.window import NO_LIMIT
from hopper.backward.config import BackwardConfig
from hopper.backward.shipped import shipped_backward_kernels
from hopper_attention import (
    _kernels,
    compile_cache,
    explain,
    flash_attn_fp8_func,
    flash_attn_func,
)
from hopper_attention.backends import Choice, Target
from hopper_attention.backward_rules import (
    BackwardProblem,
    KernelConfig,
    choose_backward,
    select_config,
)
from hopper_attention.launch import backward
from hopper_attention.launch.backward import run_backward
from hopper_attention.notices import warn_once
from hopper_attention.reference import attention_naive
from hopper_attention.scores import Scores
from tests.python.fake_gpu import H200, forget_launchers, pretend

A100 = Target("fake A100", (8, 0), assume_installed=True)
ADA = Target("fake L40", (8, 9), assume_installed=True)
BLACKWELL = Target("fake RTX PRO 6000", (12, 0), assume_installed=True)
TARGETS = {"hopper": H200, "ampere": A100}
OPS = torch.ops.hopper_attention


class StandIns:
    """The three kernels of a backward pass, in float32; notes what is asked for, and what each pass is given."""

    def __init__(self) -> None:
        self.configs: list[Any] = []
        self.passes: list[KernelConfig] = []
        self.inputs: list[tuple[Tensor, ...]] = []

    def use(self, target: Target) -> None:
        """Be another GPU."""
        self.target = target
        forget_launchers()

    def get(self, config: KernelConfig | BackwardStep) -> Callable[..., None]:
        self.configs.append(config)
        if isinstance(config, BackwardStep):
            return self.prepare if config.step == "prepare" else self.finish
        return lambda *arguments: self.kernel(config, *arguments)

    def prepare(
        self, out: Tensor, dout: Tensor, lse: Tensor, lse_log2: Tensor, delta: Tensor, dq_sums: Tensor
    ) -> None:
        dq_sums.zero_()
        hidden = lse == -math.inf
        rows = slice(lse.shape[2])
        lse_log2.fill_(math.inf)[:, :, rows] = (lse * math.log2(math.e)).masked_fill(hidden, math.inf)
        sums = (out.float() * dout.float()).sum(-1).transpose(1, 2)
        delta.zero_()[:, :, rows] = sums.masked_fill(hidden, 0.0)

    def kernel(self, config: KernelConfig, *arguments: Any) -> None:
        q, k, v, dout, lse_log2, delta, sums, dk, dv, counter, scale, *options = arguments
        self.passes.append(config)
        self.inputs.append((q, k, v, dout))
        assert not config.is_persistent or options.pop() == 132
        assert all(x is None for x in options[2:])
        counts = sums[..., 0, 0].numel() * config.counts_per_tile
        assert counter.dtype == torch.int32 and counter.shape == (2 + config.ordered * counts,)
        assert not counter.any()
        tiles = lse_log2.shape[2] // config.tile_m
        columns = config.head_dim
        if isinstance(config, BackwardConfig) and not config.splits_columns:
            columns = max(config.used_columns_k, columns // 2)
        of_tile = config.dq_parts, config.tile_m * columns // config.dq_parts
        assert sums.shape == (q.shape[0], q.shape[2], tiles, *of_tile)
        assert not sums.any()
        group, rows = q.shape[2] // k.shape[2], slice(q.shape[1])
        q, dout, k, v = (x.float().transpose(1, 2) for x in (q, dout, k, v))
        k_all, v_all = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = q @ k_all.mT * (scale * math.log2(math.e))
        distance = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - (k.shape[2] - q.shape[2])
        left, right = options[:2] or (NO_LIMIT, NO_LIMIT)
        hidden = (distance < -left) | (distance > (0 if config.causal else right))
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
    """A GPU for the backward pass alone, of Hopper unless told otherwise, whose tensors are the CPU's."""
    fake = StandIns()
    fake.use(H200)
    pretend(monkeypatch, backward, target=lambda: fake.target)
    monkeypatch.setattr(compile_cache, "get_backward", fake.get)
    warn_once.cache_clear()
    yield fake
    fake.use(H200)


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


def test_a_kernel_without_wgmma_gets_a_cap_and_slopes_of_every_head(kernels: StandIns) -> None:
    """And nothing for sinks, which are in the LSE."""
    kernels.use(A100)
    given: list[tuple[Any, ...]] = []
    kernels.kernel = lambda config, *arguments: given.append((config, *arguments[10:]))
    kernels.finish = lambda *arguments: None
    q, k, v = (x.detach() for x in leaves())
    slopes, sinks = torch.tensor([1.0, 0.5, 0.25, 0.125]), torch.zeros(4)
    out, lse = attention_naive(q, k, v)
    rows = out.half(), lse.float()
    for softcap, alibi in ((30.0, slopes), (30.0, None), (0.0, slopes), (0.0, None)):
        scores = Scores(softcap, alibi, sinks)
        backward.run_backward(q, q, k, v, *rows, 0.125, True, window=(9, 0, 0), scores=scores)
        config, scale, left, right, *terms = given.pop()
        assert (config.softcap, config.alibi) == (bool(softcap), alibi is not None)
        assert (scale, left, right) == (0.125, 9, 0)
        assert bool(terms) == config.changes_scores
        if terms:
            assert terms[0] == (softcap or None)
            assert terms[1] is None if alibi is None else torch.equal(terms[1], slopes.expand(2, 4))


@pytest.mark.parametrize("backend", TARGETS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("seqlens", "head_dims"), [((70, 90), (64, 64)), ((90, 40), (40, 104)), ((70, 90), (136, 200))], ids=str
)
def test_gradients_of_output_and_lse(
    kernels: StandIns, seqlens, head_dims, causal: bool, backend: str
) -> None:
    kernels.use(TARGETS[backend])
    inputs = leaves(seqlens, head_dims)
    out, lse = flash_attn_func(*inputs, causal=causal, return_attn_probs=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    dlse[lse == -math.inf] = math.nan
    ours = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    for gradient, e in zip(ours, exact_gradients(inputs, dout, dlse, causal), strict=True):
        assert gradient.dtype == torch.float16 and gradient.is_contiguous() and relative(gradient, e) < 2e-3
    prepare, config, finish = kernels.configs
    asked = BackwardProblem(*(x.shape for x in inputs), torch.float16, causal)
    assert config == select_config(asked, backend, TARGETS[backend].capability)
    assert isinstance(config, BackwardConfig if backend == "hopper" else AmpereBackwardConfig)
    assert prepare == BackwardStep("prepare", config) and finish == BackwardStep("finish", config)


@pytest.mark.parametrize("backend", TARGETS)
def test_what_a_kernel_cannot_address_is_copied(kernels: StandIns, backend: str) -> None:
    kernels.use(TARGETS[backend])
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


@pytest.mark.parametrize("backend", TARGETS)
def test_fp8_attention_has_its_gradients_from_the_kernel(kernels: StandIns, backend: str) -> None:
    kernels.use(TARGETS[backend])
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
    return [config.ordered for config in kernels.passes]


@pytest.mark.parametrize("backend", TARGETS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_gradients_come_from_the_ordered_kernel(
    kernels: StandIns, head_dim: int, backend: str
) -> None:
    kernels.use(TARGETS[backend])

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


# Whose kernel


def gradients_on(backend: str | None, direct: bool) -> None:
    """A backward pass for which ``backend`` was asked, by the operator or as the host code calls it."""
    q, k, v = (x.detach() for x in leaves())
    out, lse = OPS.forward(q, k, v, 0.125, True, None, 0, False)
    if direct:
        run_backward(torch.ones_like(out), q, k, v, out, lse, 0.125, True, backend=backend)
    else:
        OPS.backward(torch.ones_like(out), None, q, k, v, out, lse, 0.125, True, backend, False)


@pytest.mark.parametrize("direct", [False, True], ids=["operator", "launch"])
@pytest.mark.parametrize(
    ("target", "backend", "arch"),
    [
        (A100, None, "sm_80"),
        (A100, "ampere", "sm_80"),
        (ADA, None, "sm_89"),
        (BLACKWELL, None, "sm_120"),
        (H200, "ampere", "sm_90a"),
        (H200, None, ""),
        (H200, "hopper", ""),
    ],
    ids=lambda value: value.name if isinstance(value, Target) else str(value),
)
def test_the_kernel_is_that_of_the_gpu_or_of_the_request(
    kernels: StandIns, target: Target, backend: str | None, arch: str, direct: bool
) -> None:
    kernels.use(target)
    gradients_on(backend, direct)
    prepare, config, finish = kernels.configs
    assert (prepare.config, finish.config) == (config, config)
    if arch:
        assert isinstance(config, AmpereBackwardConfig) and config.arch == arch and config.head_dim == 64
    else:
        assert isinstance(config, BackwardConfig)


def test_a_launch_names_a_backend_or_a_gpu_without_a_kernel(kernels: StandIns) -> None:
    with pytest.raises(
        ValueError, match="backend is 'torch', allowed for a backward kernel: 'hopper' or 'amp"
    ):
        gradients_on("torch", direct=True)
    kernels.use(Target("fake T4", (7, 5), assume_installed=True))
    with pytest.raises(
        ValueError, match=r"compute capability is 7\.5, allowed .* 8\.0, 8\.6, 8\.7, 8\.9, 9\.0"
    ):
        gradients_on(None, direct=True)
    assert kernels.configs == []


@pytest.mark.parametrize("ordered", [False, True])
def test_what_a_launch_without_wgmma_is_given(
    kernels: StandIns, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels.use(A100)
    seen: list[tuple[Any, ...]] = []
    kernel = kernels.kernel

    def note(config: KernelConfig, *arguments: Any) -> None:
        seen.append(arguments)
        kernel(config, *arguments)

    monkeypatch.setattr(kernels, "kernel", note)
    q, k, v = (x.detach() for x in leaves((150, 90), (104, 64)))
    out, lse = OPS.forward(q, k, v, 0.125, True, None, 0, False)
    run_backward(torch.ones_like(out), q, k, v, out, lse, 0.5, True, deterministic=ordered)
    (arguments,) = seen
    *_, lse_log2, delta, sums, dk, dv, counter, scale = arguments
    # At head_dim 128 tiles of 64 queries, three of them, and 8 warps.
    assert lse_log2.shape == delta.shape == (2, 4, 192)
    assert sums.shape == (2, 4, 3, 8, 64 * 128 // 8) and sums.dtype == torch.float32
    assert (dk.shape, dv.shape, scale) == (k.shape, v.shape, 0.5)
    assert counter.shape == (2 + (2 * 4 * 3 * 8 if ordered else 0),)


# Where the reference serves


def test_the_reference_can_be_asked_for(kernels: StandIns) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flash_attn_func(*leaves(), backend="reference").sum().backward()
    assert kernels.configs == []


@pytest.mark.parametrize("backend", TARGETS)
def test_what_a_grid_cannot_count_warns_once(
    kernels: StandIns, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr(step, "MAX_BATCH_OR_HEADS", 1)
    kernels.use(TARGETS[backend])
    inputs = leaves()
    name = {"hopper": "Hopper backward", "ampere": "backward"}[backend]
    expected = rf"batch is 2, the {name} kernel takes at most 1: split it; torch's"
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


@pytest.mark.parametrize("backend", TARGETS)
@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (problem(), ""),
        (problem(65_535, heads=32_768), ""),
        (problem(65_536), "batch is 65536, the {}backward kernel takes at most 65535"),
        (problem(heads=65_536), "heads is 65536, the {}backward kernel takes at most 65535"),
        (problem(seqlens=(2**31, 9)), "seqlen_q is 2147483648, the {}backward kernel takes at most"),
        (problem(seqlens=(9, 2**31)), "seqlen_k is 2147483648, the {}backward kernel takes at most"),
        (problem(dtype=torch.float8_e4m3fn), "take float16 and bfloat16, not torch.float8_e4m3fn"),
    ],
)
def test_why_not(asked: BackwardProblem, reason: str, backend: str) -> None:
    target, reason = TARGETS[backend], reason.format("Hopper " if backend == "hopper" else "")
    choice = choose_backward(asked, target, None)
    assert choice.backend == ("reference" if reason else backend) and reason in choice.reason


def test_a_grid_of_one_dimension_counts_key_tiles() -> None:
    q, k = (65_535, 1, 65_535, 64), (65_535, 128, 32_768, 64)
    most = BackwardProblem(q, k, k, torch.float16, False)
    assert choose_backward(most, A100, None).backend == "ampere"
    more = most._replace(k_shape=(65_535, 129, 32_768, 64))
    assert choose_backward(more, A100, None) == Choice(
        "reference",
        "batch 65535 x kv_heads 32768 x seqlen_k 129 are 4294901760 tiles of 128 keys, the backward kernel counts at "
        "most 2147483647: split the batch",
        "torch's scaled_dot_product_attention has a fast one",
    )
    assert choose_backward(more, H200, None).backend == "hopper"


def test_the_rule_by_target_and_request() -> None:
    assert choose_backward(problem(), H200, "hopper").backend == "hopper"
    assert choose_backward(problem(), H200, "reference").reason == "asked for with backend='reference'"
    reason = "fake A100 has compute capability 8.0 and the kernel takes these sizes"
    assert choose_backward(problem(), A100, None) == Choice("ampere", reason)
    asked_for = f"asked for with backend='ampere'; {reason}"
    assert choose_backward(problem(), A100, "ampere") == Choice("ampere", asked_for)
    assert choose_backward(problem(), H200, "ampere").backend == "ampere"
    older = choose_backward(problem(), Target("T4", (7, 5), assume_installed=True), None)
    assert older.backend == "torch" and older.advice == ""
    assert older.reason.startswith("T4 has compute capability 7.5 and the kernels are for 8.0, 8.6,")
    other = choose_backward(problem(), A100, "hopper")
    assert other.backend == "reference" and "the Hopper kernels need 9.0 exactly" in other.reason
    assert "has a fast one" in other.advice
    cpu = choose_backward(problem(deterministic=True), Target("cpu"), None)
    assert cpu == Choice("torch", "cpu is not an NVIDIA GPU")
    ordered = choose_backward(problem(deterministic=True), Target("T4", (7, 5), assume_installed=True), None)
    assert ordered.backend == "reference" and "same bits in every run" in ordered.reason
    for name, target in TARGETS.items():
        for ordered in (False, True):
            asked = problem(deterministic=ordered)
            assert choose_backward(asked, target, None).backend == name
            assert select_config(asked, name, target.capability).ordered == ordered


@pytest.mark.parametrize(
    ("target", "backend"), [(H200, None), (H200, "hopper"), (A100, None), (A100, "ampere")]
)
def test_what_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, target: Target, backend: str | None
) -> None:
    monkeypatch.setattr(_kernels, "missing_packages", lambda: ("apache-tvm-ffi",))
    choice = choose_backward(problem(), replace(target, assume_installed=False), backend)
    assert choice.backend == ("reference" if backend else "torch")
    assert "need apache-tvm-ffi, not installed here" in choice.reason
    assert choice.advice.startswith("install them with: pip install")


@pytest.mark.parametrize(
    ("head_dim", "options", "note"),
    [
        (64, {}, "runs on the Hopper kernel hopper_bwd_bf16_d64_full_m128n128s2_r240_24"),
        (192, {}, "runs on the Hopper kernel hopper_bwd_bf16_d192_full_m64n128s2_r240_24_pair"),
        (
            64,
            {"deterministic": True},
            "runs on the Hopper kernel hopper_bwd_bf16_d64_full_m128n128s2_r240_24_ordered_stores",
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
    assert len(set(names)) == len(names) == 40 + 20 + 10
