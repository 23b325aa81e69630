"""What reaches a kernel, seen by a stand-in for it: arguments, repairs, device, tile counter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from hopper.config import ForwardConfig
from hopper_attention import compile_cache
from hopper_attention.checks import TensorSpec
from hopper_attention.launch import forward
from hopper_attention.launch.forward import ForwardLauncher, find_launch, run_forward
from hopper_attention.plain_calls import wants_only_a_launch
from hopper_attention.problem import length_bounds
from tests.python.fake_gpu import SMS, forget_launchers, pretend


class FakeKernel:
    """Notes what it is called with, and leaves the results as a kernel would find them: uninitialised."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.configs: list[ForwardConfig] = []
        self.entered: list[int] = []

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(arguments)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKernel]:
    """A Hopper GPU by name, whose tensors are the CPU's and whose kernels are all this one."""
    fake = FakeKernel()
    fake.entered = pretend(monkeypatch, forward)
    monkeypatch.setattr(compile_cache, "get_forward", lambda config: fake.configs.append(config) or fake)
    yield fake
    forget_launchers()


def qkv(seqlen_k: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(2, 5, 4, 64, dtype=torch.bfloat16)
    return q, *(torch.randn(2, seqlen_k, 2, d, dtype=torch.bfloat16) for d in (64, 32))


def test_arguments_of_the_kernel(kernel: FakeKernel) -> None:
    q, k, v = qkv()
    out, lse = run_forward(q, k, v, None, True, None, 0)
    ((*tensors, counter, scale, num_ctas),) = kernel.calls
    assert all(x is y for x, y in zip(tensors, (q, k, v, out, lse), strict=True))
    assert out.shape == (2, 5, 4, 32) and out.dtype == q.dtype and out.is_contiguous()
    assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32
    assert (scale, num_ctas, counter.tolist()) == (0.125, SMS * kernel.configs[0].ctas_per_sm, [0, 0])
    assert kernel.configs[0].causal and kernel.configs[0].dtype == "bfloat16"


def test_an_lse_that_nobody_wants_is_not_written(kernel: FakeKernel) -> None:
    q, k, v = qkv()
    run_forward(q, k, v, None, False, None, 0, wants_lse=False)
    assert kernel.calls[-1][4].shape == (2, 4, 0)
    run_forward(q, k, v, None, False, None, 0)
    assert kernel.calls[-1][4].shape == (2, 4, 5)


def test_out_is_contiguous_whatever_q_is(kernel: FakeKernel) -> None:
    wide = torch.randn(2, 5, 3, 4, 64, dtype=torch.bfloat16)
    for q in (
        wide[:, :, 0].contiguous(),
        wide[:, :, 0],
        wide[:, :, 0].transpose(1, 2).contiguous().transpose(1, 2),
    ):
        out, _ = run_forward(q, wide[:, :, 1], wide[:, :, 2], None, False, None, 0)
        assert out.is_contiguous() and out.shape == q.shape


def test_scale_and_sm_margin_reach_the_kernel(kernel: FakeKernel) -> None:
    run_forward(*qkv(), 2, False, None, 12)
    ctas = (SMS - 12) * kernel.configs[0].ctas_per_sm
    assert kernel.calls[0][-2:] == (2.0, ctas) and type(kernel.calls[0][-2]) is float
    with pytest.raises(ValueError, match=r"sm_margin is 132, allowed on this GPU: 0 to 131"):
        run_forward(*qkv(), None, False, None, 132)


def test_a_repeated_problem_is_looked_up(kernel: FakeKernel) -> None:
    for _ in range(3):
        run_forward(*qkv(), None, True, None, 0)
    assert len(kernel.calls) == 3 and find_launch.cache_info().hits == 2 and len(kernel.configs) == 1


def launcher_of(*specs: TensorSpec, sm_margin: int = 0) -> Any:
    """What serves causal attention on such tensors."""
    return find_launch(*(fact for spec in specs for fact in spec), True, None, sm_margin)


def sized(
    batch: int = 1, seqlens: tuple[int, int] = (1, 9), heads: tuple[int, int] = (4, 2)
) -> list[TensorSpec]:
    """Contiguous q, k and v of any size."""

    def spec(*shape: int) -> TensorSpec:
        strides = shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1
        return TensorSpec(shape, strides, torch.bfloat16, torch.device("cpu"))

    keys = batch, seqlens[1], heads[1]
    return [spec(batch, seqlens[0], heads[0], 64), spec(*keys, 64), spec(*keys, 64)]


def test_new_sizes_share_a_launcher(kernel: FakeKernel) -> None:
    first, most = launcher_of(*sized()), length_bounds()[0]
    assert most >= 64
    for seqlen_k in range(1, most + 1):
        assert launcher_of(*sized(seqlens=(1, seqlen_k))) is first
    for batch, seqlen_q, heads in ((1, 7, (4, 4)), (3, 1, (8, 1)), (64, 512, (2, 2))):
        assert launcher_of(*sized(batch, (seqlen_q, most), heads)) is first
    assert len(kernel.configs) == 1


def test_lengths_that_want_other_tiles_get_them(kernel: FakeKernel) -> None:
    for seqlen_k in (1280, 1281, 10**6, 10**6 + 1):
        launcher_of(*sized(seqlens=(300, seqlen_k)))
    assert [config.tile_n for config in kernel.configs] == [64, 96, 128]


def test_results_have_the_sizes_of_the_call(kernel: FakeKernel) -> None:
    for batch, seqlen_q, heads in ((1, 5, 4), (3, 2, 4), (2, 5, 8)):
        q = torch.zeros(batch, seqlen_q, heads, 64, dtype=torch.bfloat16)
        k = torch.zeros(batch, 9, 2, 64, dtype=torch.bfloat16)
        for wants_lse, rows in ((True, seqlen_q), (False, 0)):
            out, _ = run_forward(q, k, k[..., :32], None, True, None, 0, wants_lse)
            assert out.shape == (batch, seqlen_q, heads, 32) and out.is_contiguous()
            assert kernel.calls[-1][3] is out and kernel.calls[-1][4].shape == (batch, heads, rows)
            assert kernel.calls[-1][4].dtype == torch.float32
    assert len(kernel.configs) == 1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda q, k, v: (q, k, v[:, :-1]),
            ValueError,
            r"v has shape \(2, 8, 2, 32\), allowed with k of shape",
        ),
        (lambda q, k, v: (q, k[..., :32], v), ValueError, r"k has shape \(2, 9, 2, 32\), allowed with q"),
        (lambda q, k, v: (q[:, :, :3], k, v), ValueError, "q has 3 heads and k has 2"),
        (lambda q, k, v: (q, k.half(), v), TypeError, "k has dtype torch.float16"),
        (lambda q, k, v: (q, k, v.to("meta")), ValueError, "v is on meta"),
        (lambda q, k, v: (q[0], k, v), ValueError, "q has 3 dimensions"),
    ],
)
def test_new_sizes_are_checked_although_the_launcher_is_there(
    kernel: FakeKernel, change: Callable[..., Any], error: type[Exception], message: str
) -> None:
    good = qkv()
    run_forward(*good, None, True, None, 0)
    with pytest.raises(error, match=message):
        run_forward(*change(*good), None, True, None, 0)
    assert len(kernel.calls) == 1


def test_sizes_that_the_kernel_cannot_count_are_refused_although_the_launcher_is_there(
    kernel: FakeKernel,
) -> None:
    launcher_of(*sized())
    with pytest.raises(NotImplementedError, match="seqlen_k is 2147483648, the Hopper kernel takes at most"):
        launcher_of(*sized(seqlens=(1, 2**31)))
    launcher_of(*sized(seqlens=(300, 20_000)))
    with pytest.raises(NotImplementedError, match="are 4294967296 tiles of 192 queries, the Hopper kernel"):
        launcher_of(*sized(2**16, (1, 20_000), (2**16, 2**15)))
    assert len(kernel.configs) == 2


def test_layouts_are_repaired_whatever_the_sizes(kernel: FakeKernel) -> None:
    wide = torch.zeros(2, 64, 2, 67, dtype=torch.bfloat16)[..., :64]
    launchers = set()
    for seqlen_k in range(5, 60):
        q, k, v = wide[:, :1], wide[:, :seqlen_k], wide[:, :seqlen_k]
        run_forward(q, k, v, None, True, None, 0)
        seen = kernel.calls[-1]
        assert [x.stride() for x in seen[1:3]] == [(seqlen_k * 128, 128, 64, 1)] * 2
        launchers.add(id(launcher_of(*map(TensorSpec.of, (q, k, v)))))
    assert len(launchers) == 1 and len(kernel.configs) == 1


def test_sm_margin_has_a_launcher_of_its_own_and_bounds(kernel: FakeKernel) -> None:
    assert launcher_of(*sized()).num_ctas == 3 * SMS and kernel.configs[0].ctas_per_sm == 3
    assert launcher_of(*sized(), sm_margin=SMS - 1).num_ctas == 3
    for size in (9, 10):
        with pytest.raises(ValueError, match=rf"sm_margin is {SMS}, allowed on this GPU: 0 to {SMS - 1}"):
            launcher_of(*sized(seqlens=(1, size)), sm_margin=SMS)
    with pytest.raises(ValueError, match="sm_margin is -1, allowed: 0 or more"):
        launcher_of(*sized(), sm_margin=-1)
    with pytest.raises(TypeError, match="sm_margin is a float"):
        launcher_of(*sized(seqlens=(1, 11)), sm_margin=1.0)


def test_a_device_has_launchers_of_its_own(kernel: FakeKernel) -> None:
    def on(device: str) -> Any:
        return launcher_of(*(spec._replace(device=torch.device(device)) for spec in sized()))

    first, second = on("cuda:0"), on("cuda:1")
    assert (first.device_index, second.device_index) == (0, 1) and on("cuda:1") is second


def test_errors_are_not_remembered(kernel: FakeKernel) -> None:
    q, k, v = qkv()
    for _ in range(2):
        with pytest.raises(ValueError, match="k has shape"):
            run_forward(q, k[:1], v, None, False, None, 0)
    assert kernel.calls == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: torch.nn.functional.pad(x, (0, 1))[..., :-1],
        lambda x: x[:, :, :1].expand(-1, -1, x.shape[2], -1),
        lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    ],
    ids=["odd strides", "expanded", "misaligned"],
)
def test_the_kernel_sees_only_what_tma_can_address(
    kernel: FakeKernel, spoil: Callable[[Tensor], Tensor]
) -> None:
    q, k, v = qkv()
    bad = [spoil(x) for x in (q, k, v)]
    run_forward(*bad, None, False, None, 0)
    for seen, given in zip(kernel.calls[0], bad, strict=False):
        assert seen.data_ptr() != given.data_ptr() and seen.data_ptr() % 16 == 0
        assert seen.is_contiguous() and torch.equal(seen, given)


def test_a_size_of_one_is_restrided_in_place(kernel: FakeKernel) -> None:
    q, k, v = (x[:1].as_strided((1, *x.shape[1:]), (3, *x.stride()[1:])) for x in qkv())
    run_forward(q, k, v, None, False, None, 0)
    seen = kernel.calls[0]
    assert [x.stride(0) for x in seen[:3]] == [8, 8, 8]
    assert [x.data_ptr() for x in seen[:3]] == [x.data_ptr() for x in (q, k, v)]


def test_nothing_is_launched_for_empty_problems(kernel: FakeKernel) -> None:
    out, lse = run_forward(*qkv(0), None, False, None, 0)
    assert kernel.calls == [] and kernel.configs == []
    assert not out.any() and (lse == -math.inf).all()


def test_another_gpu_becomes_current_for_the_launch(kernel: FakeKernel) -> None:
    tensors = qkv()
    run_forward(*tensors, None, False, None, 0)
    here = find_launch(
        *(a for x in tensors for a in (x.shape, x.stride(), x.dtype, x.device)), False, None, 0
    )
    assert isinstance(here, ForwardLauncher) and kernel.entered == []
    there = replace(here, device_index=3)
    there(*tensors, 0.5, True)
    assert kernel.entered == [3] and len(kernel.calls) == 2


# when torch's dispatcher may be left out


def test_plain_tensors_need_only_a_launch() -> None:
    q = torch.zeros(1, 1, 1, 8, dtype=torch.float16)
    assert wants_only_a_launch(q, q, q)
    learned = q.clone().requires_grad_()
    assert not wants_only_a_launch(q, learned, q)
    with torch.no_grad():
        assert wants_only_a_launch(q, learned, q)


def test_subclasses_and_fp8_go_through_the_operator() -> None:
    q = torch.zeros(1, 1, 1, 8, dtype=torch.float16)
    assert not wants_only_a_launch(q, torch.nn.Parameter(q, requires_grad=False), q)
    assert not wants_only_a_launch([1], q, q)
    assert not wants_only_a_launch(*[q.to(torch.float8_e4m3fn)] * 3)


def test_modes_and_transforms_go_through_the_operator() -> None:
    q = torch.zeros(1, 1, 1, 8, dtype=torch.float16)
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(wants_only_a_launch(x, x, x))
        return x.float().sum()

    with FakeTensorMode():
        look(torch.zeros(1, 1, 1, 8))
    with FlopCounterMode(display=False):
        look(q)
    torch.func.vmap(look)(q)
    torch.func.grad(look)(q)
    torch.func.jvp(look, (q,), (q,))
    with forward_ad.dual_level():
        look(forward_ad.make_dual(q, q))
    assert seen == [False] * 6
