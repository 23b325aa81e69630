"""The backward kernels whose products leave out the zeros that rows are filled up with, run from their PTX without a
GPU, against float64, and against the kernels that multiply them."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from cute_kernels.backward.step import BackwardStep, steps_of
from hopper.backward.config import BackwardConfig, select_backward_config, validate_backward_config
from hopper.backward.used_columns import leave_out_zeros
from hopper.backward.written_configs import select_one_tile_config
from hopper.config import SMEM_BYTES
from tests.compile_pool import usage_of_each
from tests.hopper.hopper_machine import AT_ONCE, Timing
from tests.hopper.on_numpy import backward_on_numpy
from tests.hopper.test_backward_divided_heads import EVERYTHING, Case
from tests.hopper.test_backward_packed import UNEVEN
from tests.hopper.test_backward_packed import check as check_packed
from tests.hopper.test_backward_windows import EPSILON, LATE, attend, draw, visible
from tests.hopper.wgmma_hazards import find_hazards
from tests.ptx import ptx_of

HEAD_DIMS = 16, 24, 32, 40, 48, 56, 72, 80, 88, 104, 112, 120
OF_ALL_KINDS = 32, 40, 80, 120


def of_every_kind(size: int, causal: bool, ordered: bool) -> list[BackwardConfig]:
    """What serves calls of a head_dim, a mask and an order."""
    dense = select_backward_config("bfloat16", size, size, causal, ordered)
    packed = select_backward_config("bfloat16", size, size, causal, ordered, layout="varlen")
    few = replace(packed, few_keys=True, clears_ahead=False, stores_first=False)
    found = [
        dense,
        *{packed.name: packed, few.name: few, "usual": replace(packed, clears_ahead=False)}.values(),
    ]
    found += [replace(config, divides_heads=True) for config in found]
    if ordered:
        return [*found, replace(dense, stores_first=False)]
    found += [replace(dense, divides_visits=True), select_one_tile_config("bfloat16", size, size, causal)]
    if causal:
        found += [replace(dense, walks_back=True, divides_heads=divides) for divides in (False, True)]
    return found


def compiled() -> tuple[BackwardConfig | BackwardStep, ...]:
    """At four head_dims all kinds, at the others the kernels of dense and packed calls; some in float16, some with two
    head_dims; and the steps around all of these."""
    found: list[BackwardConfig] = []
    for size, causal in product(HEAD_DIMS, (False, True)):
        for ordered in (False, True):
            every = of_every_kind(size, causal, ordered)
            found += every if size in OF_ALL_KINDS else every[:2]
        found.append(select_backward_config("float16", size, size, causal))
    for sizes in ((96, 72), (40, 64), (128, 80)):
        found.append(select_backward_config("bfloat16", *sizes, True))
    every_one = {config.name: config for config in (*found, *steps_of(tuple(found)))}
    return tuple(config for config in every_one.values() if "used" in config.name or "_q" in config.name)


COMPILED = compiled()


def test_no_register_is_spilled() -> None:
    usages = usage_of_each(COMPILED)
    assert {c.name: usage for c, usage in usages.items() if usage.local_bytes} == {}
    assert (
        all(usage.shared_bytes <= SMEM_BYTES for usage in usages.values())
        and len(usages) == len(COMPILED) > 200
    )


def whole(config: BackwardConfig) -> BackwardConfig:
    """The kernel that multiplies all columns."""
    return replace(config, used_head_dim=0, used_head_dim_v=0)


@pytest.mark.parametrize(
    "dtype,head_dim,causal,ordered,seqlens,heads,batch",
    [
        ("bfloat16", 8, False, False, (130, 200), (2, 2), 1),
        ("float16", 32, True, False, (200, 131), (2, 1), 2),
        ("bfloat16", 40, True, True, (129, 129), (2, 2), 1),
        ("bfloat16", 72, False, False, (65, 257), (3, 1), 1),
        ("float16", 72, True, True, (150, 140), (2, 2), 1),
        ("bfloat16", 80, True, False, (133, 200), (2, 2), 2),
        ("float16", 88, False, True, (70, 129), (2, 1), 1),
        ("bfloat16", 104, True, False, (129, 140), (2, 2), 1),
        ("float16", 120, False, False, (64, 128), (2, 2), 1),
    ],
)
def test_gradients(dtype, head_dim, causal, ordered, seqlens, heads, batch) -> None:
    """They are right, and those of the kernel that multiplies zeros, but for the order of sums on the machine."""
    config = select_backward_config(dtype, head_dim, head_dim, causal, ordered)
    case = Case(dtype, seqlens, heads, head_dim, batch, causal)
    assert config.used_head_dim == config.used_head_dim_v == max(head_dim, 16)
    ours = case.run(config)
    case.check(ours)
    check_alike(ours, case.run(whole(config)))


def check_alike(ours: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> None:
    """Rounded once from sums of the same terms."""
    for a, b in zip(ours, others, strict=True):
        torch.testing.assert_close(a, b, rtol=2 * EPSILON[a.dtype], atol=1e-4)


@pytest.mark.parametrize("timing", [AT_ONCE, LATE], ids=["at once", "late"])
@pytest.mark.parametrize("head_dim,head_dim_v,causal", [(96, 72, True), (40, 64, False), (128, 80, False)])
def test_gradients_of_two_head_dims(head_dim: int, head_dim_v: int, causal: bool, timing: Timing) -> None:
    """Rows of V, O and dO are shorter than those of Q and K, or longer."""
    config = select_backward_config("bfloat16", head_dim, head_dim_v, causal)
    assert (config.used_head_dim, config.used_head_dim_v) == (head_dim, head_dim_v)
    drawn = draw(torch.bfloat16, (140, 150), (2, 2), 128, 1)
    columns = head_dim_v, head_dim, head_dim, head_dim_v
    inputs = tuple(x[..., :size].contiguous() for x, size in zip(drawn, columns, strict=True))
    leaves = [x.double().requires_grad_() for x in inputs[1:]]
    out, lse = attend(*leaves, visible(140, 150, EVERYTHING, 0 if causal else EVERYTHING))
    exact = torch.autograd.grad(out, leaves, inputs[0].double())
    rows = out.detach().bfloat16(), lse.detach().float()
    ours = backward_on_numpy(config, inputs, *rows, head_dim**-0.5, timing)
    for a, e in zip(ours, exact, strict=True):
        assert (a.double() - e).norm().item() <= EPSILON[torch.bfloat16] * e.norm().item() + 1e-5


@pytest.mark.parametrize(
    "head_dim,causal,field,parts",
    [
        (72, False, "divides_heads", 2),
        (40, True, "divides_heads", 2),
        (80, True, "walks_back", 1),
        (104, True, "walks_back", 1),
    ],
)
def test_gradients_of_shared_heads(head_dim: int, causal: bool, field: str, parts: int) -> None:
    config = replace(select_backward_config("bfloat16", head_dim, head_dim, causal), **{field: True})
    case = Case("bfloat16", (150, 140), (4, 1), head_dim, 1, causal)
    ours = case.run(config, parts)
    case.check(ours)
    check_alike(ours, case.run(whole(config), parts))


@pytest.mark.parametrize("dtype,head_dim,causal", [("bfloat16", 32, False), ("float16", 80, True)])
def test_gradients_of_one_tile(dtype: str, head_dim: int, causal: bool) -> None:
    config = select_one_tile_config(dtype, head_dim, head_dim, causal)
    assert config.used_head_dim == head_dim
    case = Case(dtype, (100, 100), (2, 2), head_dim, 2, causal)
    case.check(case.run(config))


@pytest.mark.parametrize(
    "head_dim,causal,ordered", [(80, True, False), (72, False, True), (120, False, False)]
)
def test_gradients_of_packed_sequences(head_dim: int, causal: bool, ordered: bool) -> None:
    assert select_backward_config("bfloat16", head_dim, head_dim, causal, layout="varlen").used_head_dim
    check_packed("bfloat16", head_dim, causal, *UNEVEN, (2, 1), ordered, has_dlse=True)


@pytest.mark.parametrize("head_dim,divides", [(120, False), (104, True)])
def test_gradients_of_packed_sequences_whose_sums_the_kernel_clears(head_dim: int, divides: bool) -> None:
    options = {"clears_ahead": True, "head_parts": 2 if divides else 0}
    check_packed("bfloat16", head_dim, False, *UNEVEN, (4, 1), False, **options)


@pytest.mark.parametrize("head_dim", [32, 80, 104])
def test_it_has_fewer_products_and_no_hazards(head_dim: int) -> None:
    config = select_backward_config("bfloat16", head_dim, head_dim, False)
    (count, hazards), (of_all, _) = find_hazards(ptx_of(config)), find_hazards(ptx_of(whole(config)))
    assert hazards == [] and count < of_all
    columns = {int(n) for n in re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k16", ptx_of(config))}
    assert columns == {config.tile_m, head_dim, config.dq_columns}


def test_what_it_cannot_have_is_named() -> None:
    config = select_backward_config("bfloat16", 80, 80, True)
    assert (config.used_head_dim, config.used_head_dim_v) == (80, 80) and config.name.endswith("_used80v80")
    for field, value in (("used_head_dim", 0), ("used_head_dim_v", 84), ("used_head_dim", 104)):
        with pytest.raises(ValueError, match=f"{field} is {value}, allowed: multiples of 8 from 16 to 96"):
            validate_backward_config(replace(config, **{field: value}))
    others = (
        select_backward_config("bfloat16", 80, 80, False, window=True),
        select_backward_config("bfloat16", 40, 40, True, softcap=True),
        select_backward_config("bfloat16", 160, 160, True),
        select_backward_config("bfloat16", 104, 104, False, ordered=True, layout="varlen"),
    )
    for other in others:
        assert leave_out_zeros(other, 80, 80) == (0, 0) == (other.used_head_dim, other.used_head_dim_v)
        with pytest.raises(
            ValueError, match=r"used_head_dim is 16 in hopper_bwd_.*, allowed: 0 in a window, by "
        ):
            validate_backward_config(replace(other, used_head_dim=16, used_head_dim_v=16))
    with pytest.raises(
        ValueError, match=r"tile_m is 128 in hopper_bwd_.*, allowed with strips and one_tile: 64"
    ):
        validate_backward_config(replace(select_backward_config("bfloat16", 32, 32, True), one_tile=True))
    for size in (64, 96, 128):
        assert select_backward_config("float16", size, size, False).used_head_dim == 0
