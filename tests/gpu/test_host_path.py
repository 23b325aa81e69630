"""Short calls on a GPU: gradients without the dispatcher of torch, and work memory that calls on a stream share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from hopper_attention import flash_attn_fp8_func, flash_attn_func, flash_attn_with_kvcache

pytestmark = pytest.mark.gpu

Call = Callable[[], Tensor]
REPEATS = 40


def gradients(inputs, causal: bool = True) -> Tensor:
    """dq, dk and dv in a row; the same bits in every run."""
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = flash_attn_func(*leaves, causal=causal, deterministic=True)
    return torch.cat([x.flatten() for x in torch.autograd.grad(out, leaves, out.detach())])


def decoded(inputs) -> Tensor:
    """One query a sequence on all of its keys but one."""
    lengths = torch.full((len(inputs.q),), inputs.k.shape[1] - 1, dtype=torch.int32, device="cuda")
    return flash_attn_with_kvcache(inputs.q[:, :1], inputs.k, inputs.v, cache_seqlens=lengths)


def calls_on(inputs) -> dict[str, Call]:
    return {
        "backward": partial(gradients, inputs),
        "decode": partial(decoded, inputs),
        "fp8": partial(flash_attn_fp8_func, inputs.q, inputs.k, inputs.v, causal=True),
    }


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_those_of_the_operators(draw, causal: bool) -> None:
    x = draw(torch.bfloat16, 2, (130, 190), (4, 2), 64)
    options = 64**-0.5, causal, None
    out, lse = torch.ops.hopper_attention.forward(x.q, x.k, x.v, *options, 0, True)
    parts = torch.ops.hopper_attention.backward(out, None, x.q, x.k, x.v, out, lse, *options, True)
    assert torch.equal(gradients(x, causal), torch.cat([part.flatten() for part in parts]))


def test_calls_of_different_kinds_take_turns_with_one_work_memory(draw) -> None:
    sizes = (1, (64, 300)), (3, (200, 700)), (1, (64, 300))
    calls = [
        call
        for batch, seqlens in sizes
        for call in calls_on(draw(torch.bfloat16, batch, seqlens, (4, 2), 64)).values()
    ]
    expected = [call() for call in calls]
    torch.cuda.synchronize()
    for _ in range(REPEATS):
        # Queued without waiting, so that a call is made before the one before it has run.
        results = [call() for call in calls]
        assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


@pytest.mark.parametrize("own_streams", [False, True])
def test_threads_do_not_share_work_memory(draw, own_streams: bool) -> None:
    tasks = [calls_on(draw(torch.bfloat16, 2, (128, 400), (4, 2), 64)) for _ in range(4)]
    expected = [{name: call() for name, call in task.items()} for task in tasks]
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work(number: int) -> None:
        stream = torch.cuda.Stream() if own_streams else torch.cuda.default_stream()
        with torch.cuda.stream(stream):
            for _ in range(REPEATS):
                for name, call in tasks[number].items():
                    if not torch.equal(call(), expected[number][name]):
                        wrong.append(f"{name} in thread {number}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("name", ["decode", "fp8"])
def test_a_graph_has_work_memory_of_its_own(draw, name: str) -> None:
    calls, others = (calls_on(draw(torch.bfloat16, 2, (128, 400), (4, 2), 64)) for _ in range(2))
    expected = calls[name]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = calls[name]()
    for _ in range(REPEATS):
        out.zero_()
        others["backward"]()
        graph.replay()
        others[name]()
        assert torch.equal(out, expected)
