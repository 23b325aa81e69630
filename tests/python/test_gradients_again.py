"""Backward passes like earlier ones: what they find is of the same kind in all that decides on a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import compile_cache, dense_again, device_memory, flash_attn_func, ops
from hopper_attention.launch import backward, forward, gradients_again
from tests.python.fake_gpu import MORE_THAN_A_TILE, SMS, forget_launchers, made_anew, noting, pretend
from tests.python.test_calls_again import Seen, draw, qkv

LAUNCHES = 3
"""Of a backward pass of more keys than a tile has."""

A_TILE = 40
"""Keys, of which it takes one."""


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Arguments of the kernels of a pretended H200, which compute nothing."""
    found: Seen = []
    pretend(monkeypatch, backward, forward)
    for name in ("get_forward", "get_backward"):
        monkeypatch.setattr(compile_cache, name, lambda config: noting(found))
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    yield found
    forget_launchers()


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each backward pass that is found anew."""
    found: list[int] = []
    differentiate = ops.differentiate

    def counted(*arguments: Any) -> Any:
        found.append(1)
        return differentiate(*arguments)

    monkeypatch.setattr(ops, "differentiate", counted)
    return found


def passes(count: int = 3, rows: int = MORE_THAN_A_TILE, **options: Any) -> tuple[list[Tensor], Tensor]:
    """Leaves, and the output of the last of so many calls, each with a backward pass but the last."""
    for _ in range(count):
        leaves = qkv(rows, requires_grad=True)
        out = flash_attn_func(*leaves, **options)
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    leaves = qkv(rows, requires_grad=True)
    return leaves, flash_attn_func(*leaves, **options)


def test_an_lse_that_nobody_wants_is_saved_and_no_result(seen: Seen, anew: list[int]) -> None:
    leaves, out = passes()
    assert len(anew) == 2 and out.grad_fn is not None and len(out.grad_fn._input_metadata) == 1
    lse = seen[-1][4]
    assert out.grad_fn.saved_tensors[4].data_ptr() == lse.data_ptr() and lse.shape == (1, 2, MORE_THAN_A_TILE)
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert seen[-LAUNCHES][2].data_ptr() == lse.data_ptr() and len(anew) == 2
    # Where it is wanted it has a gradient, and calls with and without it do not take each other's place.
    for _ in range(3):
        out, wanted = flash_attn_func(*leaves, return_attn_probs=True)
        both = torch.autograd.grad((out, wanted), leaves, (torch.ones_like(out), torch.ones_like(wanted)))
        assert [x.shape for x in both] == [x.shape for x in leaves]
        # That of the LSE alone: the output's is zeros.
        for x in torch.autograd.grad(flash_attn_func(*leaves, return_attn_probs=True)[1].sum(), leaves):
            assert x.shape == leaves[0].shape
        before = len(anew)
        again = flash_attn_func(*leaves)
        assert again.grad_fn is not None and len(again.grad_fn._input_metadata) == 1
        torch.autograd.grad(again, leaves, torch.ones_like(again))
        assert len(anew) == before


def strided(x: Tensor) -> Tensor:
    return torch.ones(*x.shape[:3], 2 * x.shape[3], dtype=x.dtype)[..., : x.shape[3]]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.new_ones(()).expand(x.shape),
        lambda x: torch.ones_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2),
        strided,
        lambda x: draw(x.numel() + 1)[1:].view(x.shape),
    ],
    ids=["expanded", "transposed", "strided", "odd address"],
)
def test_a_gradient_of_another_layout_is_not_taken_for_those_before(
    make: Callable[[Tensor], Tensor], seen: Seen, anew: list[int]
) -> None:
    leaves, out = passes()
    before = len(anew)
    found = torch.autograd.grad(out, leaves, make(out))
    # What TMA cannot address is copied.
    assert len(anew) == before + 1 and all(x.is_contiguous() for x in found)
    for given in (seen[-LAUNCHES][1], seen[1 - LAUNCHES][3]):
        assert given.data_ptr() % 16 == 0 and given.stride(-1) == 1 and given.shape == out.shape


@pytest.mark.parametrize("rows", [A_TILE, MORE_THAN_A_TILE])
def test_one_node_takes_gradients_of_layouts_that_change(rows: int, seen: Seen, anew: list[int]) -> None:
    leaves, out = passes(rows=rows)
    before = len(anew)
    plain, row = torch.ones_like(out), out.new_ones(out.shape[-1])
    heads_first = torch.ones_like(out.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    held: list[tuple[Tensor, ...]] = []
    kept: set[int] = set()
    for dout in (plain, row.expand_as(out), plain, heads_first, strided(out), plain):
        seen.clear()
        found = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert [x.shape for x in found] == [x.shape for x in leaves] and all(x.is_contiguous() for x in found)
        # The kernel of one launch has dO behind V, that of three dK and dV behind the sums.
        dout_given, *written = (
            (seen[0][3], *seen[0][6:9]) if rows == A_TILE else (seen[1][3], seen[2][1], *seen[1][7:9])
        )
        assert dout_given.shape == out.shape and dout_given.stride(-1) == 1 and bool((dout_given == 1).all())
        assert [x.data_ptr() for x in written] == [x.data_ptr() for x in found]
        # Nothing that was returned is written again.
        assert kept.isdisjoint(x.data_ptr() for x in found)
        kept |= {x.data_ptr() for x in found}
        held.append(found)
    # Plain ones are known each time; the others are new, and those that TMA can address known the second time.
    assert len(anew) == before + 3


@pytest.mark.parametrize("rows", [A_TILE, MORE_THAN_A_TILE])
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_gradients_of_some_of_the_inputs(rows: int, wanted: tuple[int, ...], anew: list[int]) -> None:
    passes(rows=rows)
    for _ in range(3):
        inputs = qkv(rows)
        leaves = [inputs[i].requires_grad_() for i in wanted]
        out = flash_attn_func(*inputs)
        out.backward(torch.ones_like(out))
        for number, x in enumerate(inputs):
            assert (x.grad is not None) == (number in wanted)
        assert all(x.grad.shape == x.shape for x in leaves if x.grad is not None)
    # The first is not taken for one of which all are wanted.
    assert len(anew) == 3


@pytest.mark.parametrize("rows", [A_TILE, MORE_THAN_A_TILE])
def test_layers_of_several_kinds_do_not_drive_each_other_out(
    rows: int, seen: Seen, monkeypatch: pytest.MonkeyPatch, anew: list[int]
) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"causal": True},
        {"softmax_scale": 0.5},
        {"softmax_scale": 0.25, "deterministic": True},
        {"softmax_scale": 0.25},
    ]
    leaves = [qkv(size, requires_grad=True) for size in (rows, rows + 8)]

    def step() -> list[float]:
        """The scales that kernels were given."""
        scales = []
        for inputs in leaves:
            for options in kinds:
                out = flash_attn_func(*inputs, **options)
                before = len(seen)
                torch.autograd.grad(out, inputs, torch.ones_like(out))
                scales.append(seen[before][10] if rows == A_TILE else seen[before + 1][10])
        return scales

    for _ in range(4):
        scales = step()
    assert scales == [0.125, 0.125, 0.5, 0.25, 0.25] * 2

    def searched(*given: Any) -> Any:
        raise AssertionError("a pass was searched for")

    monkeypatch.setattr(gradients_again.remembered, "find_kept", searched)
    count = len(anew)
    assert step() == scales and len(anew) == count


def test_scales_that_are_always_others_are_not_kept_for_good(seen: Seen) -> None:
    leaves = qkv(requires_grad=True)
    scales = [0.01 * (1 + number) for number in range(3 * gradients_again.KEPT_OPTIONS)]
    for scale in (*scales, *scales):
        out = flash_attn_func(*leaves, scale)
        torch.autograd.grad(out, leaves, torch.ones_like(out))
        assert seen[-1][10] == scale
    (kinds,) = dense_again.remembered._calls.values()
    assert 0 < len(kinds[0].call.passes._others) <= gradients_again.KEPT_OPTIONS


def test_saved_tensors_that_hooks_change_are_compared(seen: Seen, anew: list[int]) -> None:
    passes()
    before = len(anew)
    leaves = qkv(MORE_THAN_A_TILE, requires_grad=True)

    def unpack(x: Tensor) -> Tensor:
        return x if x.dim() != 4 else x.mT.contiguous().mT

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), unpack):
        out = flash_attn_func(*leaves)
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert len(anew) == before + 1 and seen[-LAUNCHES][0].stride(-1) == 1


def test_hooks_get_the_gradients_of_their_own_pass(anew: list[int]) -> None:
    leaves, out = passes()
    noted: list[Tensor] = []
    for x in (*leaves, out):
        x.register_hook(noted.append)
    dout = torch.ones_like(out)
    found = torch.autograd.grad(out, leaves, dout)
    assert noted[0] is dout and len(anew) == 2
    assert {x.data_ptr() for x in noted[1:]} == {x.data_ptr() for x in found}


def test_results_of_two_passes_are_tensors_of_their_own(anew: list[int]) -> None:
    leaves, out = passes()
    first = torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
    second = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert len({x.data_ptr() for x in (*first, *second)}) == 6 and len(anew) == 2
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, leaves, torch.ones_like(out))


def test_an_output_that_was_written_since_is_refused() -> None:
    leaves, out = passes()
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, leaves, torch.ones_like(out))


def test_second_derivatives_are_refused_behind_passes_too(anew: list[int]) -> None:
    leaves, out = passes()
    found = torch.autograd.grad(out, leaves, torch.ones_like(out), create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.autograd.grad(found[0].sum(), leaves)
    assert len(anew) == 3


def test_equal_bits_are_not_taken_from_passes_without(anew: list[int]) -> None:
    leaves, out = passes()
    torch.use_deterministic_algorithms(True)
    try:
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    finally:
        torch.use_deterministic_algorithms(False)
    leaves, out = passes(0, deterministic=True)
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert len(anew) == 4


def test_another_gpu_that_is_current_is_not_launched_on(
    monkeypatch: pytest.MonkeyPatch, anew: list[int]
) -> None:
    leaves, out = passes()
    monkeypatch.setattr(gradients_again, "current_device", lambda: 1)
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert len(anew) == 3


def test_launches_are_those_of_memory_that_is_kept_and_of_memory_that_is_not(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, anew: list[int]
) -> None:
    leaves, out = passes()
    facts = []
    # In a graph, and where there is too much of it, memory is given in each pass.
    for made in (made_anew, lambda *given: None):
        monkeypatch.setattr(device_memory, "made_of_memory", made)
        seen.clear()
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
        prepare, kernel, finish = seen
        assert [x.data_ptr() for x in prepare[3:6]] == [x.data_ptr() for x in kernel[4:7]]
        assert [x.data_ptr() for x in (finish[1], *kernel[7:9])] == [x.data_ptr() for x in grads]
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else x for given in seen for x in given]
        facts.append(shapes)
    assert facts[0] == facts[1] and len(anew) == 2


def test_a_transform_is_not_served_by_what_was_kept(anew: list[int]) -> None:
    passes()
    for _ in range(3):
        before = len(anew)
        total = torch.func.grad(lambda *given: flash_attn_func(*given).float().sum(), argnums=(0, 1, 2))
        assert [x.shape for x in total(*qkv())] == [(1, 40, 2, 64)] * 3
        assert len(anew) == before + 1


def test_keys_that_are_one_tile_take_one_launch(seen: Seen, anew: list[int]) -> None:
    for _ in range(3):
        leaves = qkv(requires_grad=True)
        out, before = flash_attn_func(*leaves, 0.5), len(seen)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
        (given,) = seen[before:]
        q, k, v, dout, lse, rows, dq, dk, dv, _, scale, ctas = given
        assert [x.data_ptr() for x in (q, k, v)] == [x.data_ptr() for x in leaves]
        assert [x.data_ptr() for x in (dq, dk, dv)] == [x.data_ptr() for x in grads]
        assert rows.data_ptr() == out.data_ptr() and dout.shape == out.shape and lse.shape == (1, 2, 40)
        assert (scale, ctas) == (0.5, SMS)
    assert len(anew) == 2
    # The kernel says so where it cannot address a tensor, which is copied then.
    odd = draw(out.numel() + 1)[1:].view(out.shape)
    assert all(x.is_contiguous() for x in torch.autograd.grad(out, leaves, odd))
    assert len(anew) == 3 and seen[-1][3].data_ptr() % 16 == 0


def test_a_pass_in_strips_is_made_by_a_script_too(seen: Seen, anew: list[int]) -> None:
    launches = []
    for _ in range(3):
        leaves = qkv(MORE_THAN_A_TILE, requires_grad=True)
        out, before = flash_attn_func(*leaves, causal=True, window_size=(100, 0)), len(seen)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        prepare, kernel = seen[before:]
        assert [x.data_ptr() for x in kernel[6:9]] == [x.data_ptr() for x in grads]
        assert [x.data_ptr() for x in prepare[3:5]] == [x.data_ptr() for x in kernel[4:6]]
        launches.append([tuple(x.shape) if hasattr(x, "shape") else x for x in (*prepare, *kernel)])
    assert launches[0] == launches[1] == launches[2] and len(anew) == 2
