"""Forward kernels with the query heads of a K/V head in the rows of a tile, and with its keys in parts, run from their
PTX without a GPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hopper.config import SMEM_BYTES, ForwardConfig, validate_forward_config
from hopper.forward.tilings import select_forward_config, select_plain_config, with_group, with_parts
from hopper.group_rows import rows_of_queries
from hopper_attention.reference import attention_naive
from tests.compile_pool import usage_of_each
from tests.hopper.hopper_machine import Timing
from tests.hopper.on_numpy import forward_on_numpy, packed_forward_on_numpy
from tests.hopper.split_on_numpy import in_small_parts, packed_parts_on_numpy, parts_on_numpy
from tests.plans import Packed, plan_of

LATE = Timing(is_late=True, seed=1)


def compiled() -> tuple[ForwardConfig, ...]:
    """One of each kind: 8 heads a tile, and in parts, dense and packed."""
    found: list[ForwardConfig] = []
    for head_dim in (64, 96, 128, 192, 256):
        for causal in (False, True):
            short = select_plain_config("bfloat16", head_dim, head_dim, causal, 1024)
            long = select_forward_config("bfloat16", head_dim, head_dim, causal, 16384)
            packed = select_forward_config("bfloat16", head_dim, head_dim, causal, 0, layout="varlen")
            found += [with_group(short, 8), with_group(packed, 8)]
            if not causal:
                # Of many queries too (``hopper_attention.tile_turns``).
                found.append(
                    with_group(select_plain_config("bfloat16", head_dim, head_dim, causal, 16384), 2)
                )
            found += [with_parts(plain, 8, 200) for plain in (long, packed)]
    return tuple(found)


COMPILED = compiled()


def test_no_register_is_spilled() -> None:
    usages = usage_of_each(COMPILED)
    assert {c.name: usage for c, usage in usages.items() if usage.spills or usage.stack_bytes} == {}
    assert all(usage.shared_bytes <= SMEM_BYTES for usage in usages.values()) and len(usages) == 45


def draw(shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def check(found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> None:
    (out, lse), (exact_out, exact_lse) = found, exact
    seen = exact_lse > -math.inf
    assert (out.double() - exact_out).norm() < 2.0**-8 * exact_out.norm()
    assert torch.equal(lse > -math.inf, seen) and (lse.double() - exact_lse)[seen].abs().max() < 3e-6


DENSE = [
    # head_dim, causal, seqlens, group
    (64, True, (21, 150), 8),
    (128, True, (50, 300), 4),
    (128, False, (3, 130), 64),
    (256, True, (40, 90), 2),
    (72, False, (17, 100), 16),
    # Heads that do not divide a warpgroup's rows, of which some are nobody's.
    (64, True, (30, 150), 7),
    (96, True, (30, 77), 6),
    (128, True, (50, 300), 3),
    (128, False, (3, 130), 48),
    (256, True, (40, 90), 5),
]


@pytest.mark.parametrize("head_dim,causal,seqlens,group", DENSE)
def test_heads_in_a_tile(head_dim: int, causal: bool, seqlens: tuple[int, int], group: int) -> None:
    """Of two K/V heads and two sequences; the last tile of each is cut."""
    (seqlen_q, seqlen_k), heads = seqlens, 2 * group
    q, k, v = draw(((2, seqlen_q, heads, head_dim), *[(2, seqlen_k, 2, head_dim)] * 2))
    config = with_group(select_plain_config("bfloat16", head_dim, head_dim, causal, seqlen_k), group)
    found = forward_on_numpy(config, q, k, v, head_dim**-0.5, 3, LATE)
    check(found, attention_naive(q, k, v, causal=causal))


@pytest.mark.parametrize("head_dim,group", [(128, 2), (256, 4), (64, 8), (128, 3), (64, 7)])
def test_heads_in_tiles_of_many_queries(head_dim: int, group: int) -> None:
    """The tiles of long sequences, the last of which leaves a warpgroup without a query."""
    q, k, v = draw(((1, 300 // group, group, head_dim), *[(1, 370, 1, head_dim)] * 2))
    config = with_group(select_plain_config("bfloat16", head_dim, head_dim, False, 16384), group)
    found = forward_on_numpy(config, q, k, v, head_dim**-0.5, 2, LATE)
    check(found, attention_naive(q, k, v))


@pytest.mark.parametrize("group", [4, 7])
def test_heads_in_a_tile_under_a_window(group: int) -> None:
    q, k, v = draw(((1, 50, 2 * group, 64), *[(1, 200, 2, 64)] * 2))
    config = with_group(select_forward_config("bfloat16", 64, 64, False, 200, window=True), group)
    found = forward_on_numpy(config, q, k, v, 0.125, 2, LATE, sides=(40, 3))
    check(found, attention_naive(q, k, v, window_left=40, window_right=3))


Q, K = Packed.of((40, 0, 17, 5), behind=9), Packed.of((310, 33, 0, 96), behind=3)


def of_sequences(inputs: list[Tensor], causal: bool) -> tuple[Tensor, Tensor]:
    """out and lse of each sequence alone; rows without keys and of no sequence are 0 and -inf."""
    q, k, v = inputs
    out = torch.zeros_like(q, dtype=torch.float64)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float64)
    for sequence in range(Q.batch):
        (row, rows), (key, keys) = Q.rows(sequence), K.rows(sequence)
        if rows and keys:
            own, seen = slice(row, row + rows), slice(key, key + keys)
            found = attention_naive(q[None, own], k[None, seen], v[None, seen], causal=causal)
            out[own], lse[:, own] = found[0][0], found[1][0]
    return out, lse


@pytest.mark.parametrize(
    "head_dim,causal,group",
    [(64, True, 4), (128, False, 8), (64, True, 3), (128, True, 12), (128, False, 7), (96, False, 40)],
)
def test_heads_in_a_tile_of_packed_sequences(head_dim: int, causal: bool, group: int) -> None:
    inputs = draw(((Q.total, 2 * group, head_dim), *[(K.total, 2, head_dim)] * 2))
    plain = select_forward_config("bfloat16", head_dim, head_dim, causal, 0, layout="varlen")
    config = with_group(plain, group)
    plan = plan_of(Q, K, config.tile_queries)
    found = packed_forward_on_numpy(config, tuple(inputs), plan, Q.batch + 1, head_dim**-0.5, 3, LATE)
    check(found, of_sequences(inputs, causal))


def merged(parts: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, heads, columns) and (rows, heads), in float64, of parts of these."""
    lse = part_lse.double().logsumexp(0)
    shares = (part_lse.double() - lse).exp().nan_to_num(0.0)[..., None]
    # Of a part that there is not only the LSE says so.
    return torch.where(shares > 0, shares * parts.double(), 0.0).sum(0), lse


@pytest.mark.parametrize("splits", [2, 5])
@pytest.mark.parametrize(
    "head_dim,causal,seqlens,group",
    [
        (64, True, (21, 150), 8),
        (64, False, (90, 300), 2),
        (128, True, (50, 400), 4),
        (256, False, (70, 170), 1),
        (64, True, (40, 150), 7),
        (128, True, (30, 400), 6),
        (256, False, (11, 170), 24),
    ],
)
def test_keys_in_parts(
    head_dim: int, causal: bool, seqlens: tuple[int, int], group: int, splits: int
) -> None:
    """Where there are fewer blocks than parts, some have no key."""
    (seqlen_q, seqlen_k), heads = seqlens, 2 * group
    q, k, v = draw(((2, seqlen_q, heads, head_dim), *[(2, seqlen_k, 2, head_dim)] * 2))
    plain = select_forward_config("bfloat16", head_dim, head_dim, causal, 16384)
    config = with_parts(plain, group, rows_of_queries(seqlen_q, group))
    parts, lse = parts_on_numpy(config, (q, k, v), head_dim**-0.5, splits, 3, LATE)
    out, lse = merged(parts, lse)
    check((out, lse.transpose(1, 2)), attention_naive(q, k, v, causal=causal))


@pytest.mark.parametrize(
    "head_dim,causal,group,splits",
    [(64, True, 4, 3), (128, False, 1, 2), (64, True, 3, 3), (128, True, 12, 2)],
)
def test_keys_of_packed_sequences_in_parts(head_dim: int, causal: bool, group: int, splits: int) -> None:
    inputs = draw(((Q.total, 2 * group, head_dim), *[(K.total, 2, head_dim)] * 2))
    plain = select_forward_config("bfloat16", head_dim, head_dim, causal, 0, layout="varlen")
    config = with_parts(plain, group, rows_of_queries(40, group))
    plan = plan_of(Q, K, config.tile_queries, in_parts=in_small_parts(config, splits))
    parts, lse = packed_parts_on_numpy(
        config, tuple(inputs), plan, Q.batch + 1, head_dim**-0.5, splits, 3, LATE
    )
    out, lse = merged(parts[:, 0], lse[:, 0])
    check((out, lse.T), of_sequences(inputs, causal))


def test_what_no_kernel_can_be_built_from() -> None:
    plain = select_forward_config("bfloat16", 128, 128, True, 4096)
    for given in (
        {"group": 0},
        {"group": 65},
        {"group": 4, "sinks": True},
        {"group": 4, "alibi": True},
        {"group": 4, "dropout": True},
    ):
        with pytest.raises(ValueError, match=r"group is .* allowed"):
            validate_forward_config(replace(plain, **given))
    with pytest.raises(ValueError, match="split is True, allowed with a window in 16 bits: False"):
        validate_forward_config(replace(plain, split=True, window=True))
    with pytest.raises(ValueError, match=r"group is 1 and split True, allowed"):
        validate_forward_config(replace(plain, split=True, sinks=True))


def test_names_and_tiles() -> None:
    plain = select_forward_config("bfloat16", 64, 64, True, 4096)
    heights = {rows: with_parts(plain, 8, rows).tile_m for rows in (8, 64, 65, 128, 129, 1000)}
    assert heights == {8: 64, 64: 64, 65: 128, 128: 128, 129: 192, 1000: 192}
    config: ForwardConfig = with_parts(select_forward_config("bfloat16", 128, 128, True, 4096), 8, 100)
    assert config.name.endswith("g8_split") and config.ping_pong and config.tile_queries == 16
    assert config.o_from_registers and not (config.walks_apart or config.is_plain or config.first_widths)
    assert with_group(plain, 4).name.endswith("g4") and with_group(plain, 4).is_plain
