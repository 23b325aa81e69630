"""The backward kernels up to head_dim 128 on packed sequences, run from their PTX without a GPU, against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_kernels.backward.step import BackwardStep
from cute_kernels.window import NO_LIMIT
from hopper.backward.config import select_backward_config, validate_backward_config
from tests.hopper.hopper_machine import AT_ONCE, Timing
from tests.hopper.packed_backward import packed_backward_on_numpy
from tests.hopper.test_backward_windows import DTYPES, EPSILON, attend, select, visible
from tests.plans import Packed

LATE = Timing(is_late=True, seed=1)


def draw(dtype: torch.dtype, q: Packed, k: Packed, heads: tuple[int, int], head_dim: int) -> list[Tensor]:
    """dout, q, k, v; NaN in rows that belong to no sequence."""
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for packed, number in ((q, heads[0]), (q, heads[0]), (k, heads[1]), (k, heads[1])):
        tensor = torch.full((packed.total, number, head_dim), math.nan, dtype=dtype)
        for offset, length in map(packed.rows, range(packed.batch)):
            tensor[offset : offset + length] = torch.randn(length, number, head_dim, generator=generator).to(
                dtype
            )
        tensors.append(tensor)
    return tensors


def gradients(inputs: list[Tensor], q: Packed, k: Packed, sides: tuple[int, int], dlse: Tensor) -> tuple:
    """out, lse, dq, dk, dv in float64, of one sequence after the other; NaN, or 0 in dq, where there is none."""
    dout, *leaves = inputs
    out, lse = (
        torch.full(dout.shape, math.nan).double(),
        torch.full((dout.shape[1], q.total), math.nan).double(),
    )
    grads = [torch.zeros(leaves[0].shape).double()]
    grads += [torch.full(x.shape, math.nan).double() for x in leaves[1:]]
    for i in range(q.batch):
        (at_q, len_q), (at_k, len_k) = q.rows(i), k.rows(i)
        rows = slice(at_q, at_q + len_q), slice(at_k, at_k + len_k), slice(at_k, at_k + len_k)
        own = [x[part][None].double().requires_grad_() for x, part in zip(leaves, rows, strict=True)]
        if len_k == 0:
            out[rows[0]], lse[:, rows[0]] = 0, -math.inf
            continue
        part_out, part_lse = attend(*own, visible(len_q, len_k, *sides))
        seen = part_lse > -math.inf
        of_lse = torch.where(seen, dlse[None, :, rows[0]].double(), 0.0)
        found = torch.autograd.grad(
            (part_out, part_lse), own, (dout[rows[0]][None].double(), of_lse), allow_unused=True
        )
        out[rows[0]], lse[:, rows[0]] = part_out[0].detach(), part_lse[0].detach()
        for grad, part, value in zip(grads, rows, found, strict=True):
            grad[part] = value[0]
    # Behind the last sequence the kernels write zeros.
    for grad in grads[1:]:
        grad[k.rows(k.batch)[0] :] = 0
    return out, lse, *grads


def check(
    dtype,
    head_dim,
    causal,
    q,
    k,
    heads,
    ordered,
    sides=None,
    has_dlse=False,
    ctas=1,
    clears_ahead=False,
    timing=LATE,
    head_parts=0,
) -> None:
    """With ``head_parts`` by a kernel that divides heads."""
    config = select(dtype, head_dim, causal, ordered, sides is not None, layout="varlen")
    config = replace(config, clears_ahead=clears_ahead, divides_heads=head_parts > 0)
    inputs = draw(DTYPES[dtype], q, k, heads, head_dim)
    left, right = sides or (NO_LIMIT, NO_LIMIT)
    dlse = torch.zeros(heads[0], q.total)
    if has_dlse:
        dlse = torch.randn(dlse.shape, generator=torch.Generator().manual_seed(2))
    out, lse, *exact = gradients(inputs, q, k, (left, 0 if causal else right), dlse)
    if has_dlse:
        dlse[lse == -math.inf] = math.nan
    rows = out.to(DTYPES[dtype]), lse.float()
    options = {"dlse": dlse if has_dlse else None, "sides": sides or (), "ctas": ctas}
    options["head_parts"] = max(head_parts, 1)
    ours = packed_backward_on_numpy(config, tuple(inputs), rows, (q, k), timing, **options)
    for name, a, e in zip(("dq", "dk", "dv"), ours, exact, strict=True):
        assert torch.equal(a.isnan(), e.isnan()), name
        error = (a.double() - e).nan_to_num().norm().item()
        assert error <= EPSILON[DTYPES[dtype]] * e.nan_to_num().norm().item() + 1e-5, name


UNEVEN = Packed.of((70, 0, 101, 1), behind=5), Packed.of((33, 40, 140, 0), behind=70)
"""Sequences without queries, without keys, and of odd lengths; rows of no sequence behind them."""

USED = Packed.of((100, 90), used=(75, 90)), Packed.of((150, 100), behind=3, used=(131, 64))


@pytest.mark.parametrize(
    "dtype,head_dim,causal,sequences,heads,sides,ordered",
    [
        ("bfloat16", 128, False, UNEVEN, (2, 1), None, True),
        ("bfloat16", 64, True, UNEVEN, (2, 1), None, False),
        ("float16", 64, True, USED, (2, 2), None, True),
        ("bfloat16", 72, False, UNEVEN, (1, 1), (40, 20), True),
        ("bfloat16", 96, False, USED, (2, 1), (50, NO_LIMIT), True),
    ],
)
def test_gradients_of_packed_sequences(dtype, head_dim, causal, sequences, heads, sides, ordered) -> None:
    check(dtype, head_dim, causal, *sequences, heads, ordered, sides)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_of_the_lse_of_packed_sequences(head_dim) -> None:
    check("bfloat16", head_dim, head_dim == 64, *UNEVEN, (2, 1), head_dim == 128, has_dlse=True)


@pytest.mark.parametrize("ctas", [3, 9])
def test_grids_of_fewer_and_of_more_ctas_than_tiles(ctas: int) -> None:
    """Without ``ordered`` the producer tells the consumers where a tile lies, and a CTA may be told of none."""
    check("bfloat16", 64, True, *UNEVEN, (2, 1), False, ctas=ctas)


@pytest.mark.parametrize("ctas", [1, 3])
@pytest.mark.parametrize("sequences,head_dim,heads", [(UNEVEN, 64, (2, 1)), (USED, 128, (2, 2))])
def test_a_warp_of_the_kernel_clears_sums_before_they_are_added_to(
    sequences, head_dim, heads, ctas: int
) -> None:
    """Sums are NaN before the first launch, and the counter is that of an earlier call; some queries have no key tile,
    and some have two."""
    check("bfloat16", head_dim, False, *sequences, heads, False, ctas=ctas, clears_ahead=True)


UNSEEN = Packed.of((300, 130, 64, 0, 5), behind=3), Packed.of((140, 1, 0, 70, 260), behind=1)
"""Queries that come before the first key of theirs, in whole query tiles and in parts of one; sequences without keys,
without queries, and with more keys than queries."""

ONE = Packed.of((200,), used=(197,)), Packed.of((160,), behind=10, used=(129,))


@pytest.mark.parametrize(
    "dtype,head_dim,causal,sequences,heads,ctas,timing",
    [
        ("bfloat16", 128, True, UNSEEN, (2, 1), 1, LATE),
        ("float16", 128, True, UNSEEN, (2, 2), 4, AT_ONCE),
        ("bfloat16", 64, True, UNSEEN, (2, 1), 3, LATE),
        ("float16", 96, True, ONE, (2, 1), 2, AT_ONCE),
        ("bfloat16", 64, True, ONE, (3, 1), 3, LATE),
        ("bfloat16", 96, False, UNSEEN, (1, 1), 3, LATE),
        ("float16", 128, False, ONE, (2, 1), 4, LATE),
    ],
)
def test_the_first_key_tile_stores_its_part(dtype, head_dim, causal, sequences, heads, ctas, timing) -> None:
    """Sums are NaN before the first launch."""
    check(dtype, head_dim, causal, *sequences, heads, True, ctas=ctas, timing=timing)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("offsets", [(0, 140, 30, 150), (0, 300, 340, 0)], ids=str)
def test_sequences_that_overlap_do_not_wait_for_ever(head_dim: int, offsets: tuple[int, ...]) -> None:
    """Which share query tiles, and so their counts. dQ is anything then."""
    total = max(offsets)
    rows, every = Packed(offsets, total), Packed.of((total,))
    inputs = draw(torch.bfloat16, every, every, (1, 1), head_dim)
    out, lse = torch.zeros(total, 1, head_dim).bfloat16(), torch.zeros(1, total)
    for ordered in (False, True):
        config = select("bfloat16", head_dim, True, ordered, False, layout="varlen")
        assert config.stores_first == ordered
        _, *of_keys = packed_backward_on_numpy(config, tuple(inputs), (out, lse), (rows, rows), LATE, ctas=2)
        assert all(grad.shape == (total, 1, head_dim) for grad in of_keys)


def test_first_parts_are_stored_of_packed_sequences_in_a_fixed_order() -> None:
    for head_dim in (64, 96, 128, 192, 256):
        for causal in (False, True):
            chosen = select_backward_config("bfloat16", head_dim, head_dim, causal, True, layout="varlen")
            assert chosen.stores_first and not (chosen.has_sections or chosen.has_late_heads)
            assert chosen.name.removesuffix("_pair").endswith("_ordered_varlen_stores")
    plain = select_backward_config("bfloat16", 128, 128, True, layout="varlen")
    for options in ({"ordered": False}, {"window": True}, {"softcap": True}, {"alibi": True}):
        given = {"ordered": True, "layout": "varlen"} | options
        other = select_backward_config("bfloat16", 128, 128, True, **given)
        assert not other.stores_first
        with pytest.raises(
            ValueError, match="allowed: with ordered, plain scores and no mask but a causal one"
        ):
            validate_backward_config(replace(other, stores_first=True))
    steps = [BackwardStep(step, config).name for config in (chosen, plain) for step in ("prepare", "finish")]
    assert steps[0].endswith("_varlen_stores") and steps[2].endswith("_varlen")


def test_sums_are_cleared_ahead_of_packed_sequences_without_a_mask() -> None:
    chosen = select_backward_config("bfloat16", 128, 128, False, layout="varlen")
    assert chosen.clears_ahead and chosen.name.endswith("_varlen_clears")
    for options in (
        {"layout": "dense"},
        {"causal": True},
        {"ordered": True},
        {"window": True},
        {"softcap": True},
    ):
        given = {"causal": False, "layout": "varlen"} | options
        other = select_backward_config("bfloat16", 128, 128, **given)
        assert not other.clears_ahead
        if "softcap" not in options:
            with pytest.raises(ValueError, match="clears_ahead is True with"):
                validate_backward_config(replace(other, clears_ahead=True))
    for head_dim in (64, 96, 256):
        assert not select_backward_config("bfloat16", head_dim, head_dim, False, layout="varlen").clears_ahead
    steps = [BackwardStep(step, config).name for config in (chosen, other) for step in ("prepare", "finish")]
    assert steps[0] == f"{steps[2]}_clears" and steps[1] == steps[3]
