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
from hopper_attention import api, compile_cache
from hopper_attention.launch import forward
from hopper_attention.launch.forward import HopperLauncher, find_launch, run_forward
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
    assert (scale, num_ctas, counter.tolist()) == (0.125, SMS, [0, 0])
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
    assert kernel.calls[0][-2:] == (2.0, SMS - 12) and type(kernel.calls[0][-2]) is float
    with pytest.raises(ValueError, match=r"sm_margin is 132, allowed on this GPU: 0 to 131"):
        run_forward(*qkv(), None, False, None, 132)


def test_a_repeated_problem_is_looked_up(kernel: FakeKernel) -> None:
    for _ in range(3):
        run_forward(*qkv(), None, True, None, 0)
    assert len(kernel.calls) == 3 and find_launch.cache_info().hits == 2 and len(kernel.configs) == 1


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
    assert isinstance(here, HopperLauncher) and kernel.entered == []
    there = replace(here, device_index=3)
    there(*tensors, 0.5, True)
    assert kernel.entered == [3] and len(kernel.calls) == 2


# when torch's dispatcher may be left out


def test_plain_tensors_need_only_a_launch() -> None:
    q = torch.zeros(1, 1, 1, 8, dtype=torch.float16)
    assert api._wants_only_a_launch(q, q, q)
    learned = q.clone().requires_grad_()
    assert not api._wants_only_a_launch(q, learned, q)
    with torch.no_grad():
        assert api._wants_only_a_launch(q, learned, q)


def test_subclasses_and_fp8_go_through_the_operator() -> None:
    q = torch.zeros(1, 1, 1, 8, dtype=torch.float16)
    assert not api._wants_only_a_launch(q, torch.nn.Parameter(q, requires_grad=False), q)
    assert not api._wants_only_a_launch([1], q, q)
    assert not api._wants_only_a_launch(*[q.to(torch.float8_e4m3fn)] * 3)


def test_modes_and_transforms_go_through_the_operator() -> None:
    q = torch.zeros(1, 1, 1, 8, dtype=torch.float16)
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(api._wants_only_a_launch(x, x, x))
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
