"""Windows, packed sequences and what is done to scores, on the Hopper forward kernel from its PTX, against float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper.config import ForwardConfig
from hopper.forward.tilings import select_forward_config
from tests.hopper.hopper_machine import AT_ONCE
from tests.hopper.on_numpy import NO_RULES, Rules, forward_on_numpy, packed_forward_on_numpy
from tests.hopper.test_kernels_on_numpy import EPSILON, LATE, draw, relative
from tests.plans import Packed, plan_of

EVERYTHING = (None, None)


def select(dtype: str, head_dim: int, causal: bool, *sizes_and_mask: Any, **options: Any) -> ForwardConfig:
    """What is shipped, with fewer keys in a tile: it compiles in half of the time, and a sequence has more tiles."""
    config = select_forward_config(dtype, head_dim, head_dim, causal, *sizes_and_mask, **options)
    return replace(config, tile_n=64)


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, window: tuple[int | None, int | None], rules: Rules = NO_RULES
) -> tuple[Tensor, Tensor]:
    """out (rows, heads, columns) and lse (heads, rows) of one sequence, in float64."""
    (seqlen_q, heads, head_dim), (seqlen_k, kv_heads, _) = q.shape, k.shape
    keys, values = (x.double().repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * head_dim**-0.5
    if rules.softcap:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    distance = torch.arange(seqlen_k) - (torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q)
    if rules.slopes is not None:
        scores = scores - rules.slopes[0].double()[:, None, None] * distance.abs()
    left, right = window
    hidden = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool)
    hidden |= False if left is None else distance < -left
    hidden |= False if right is None else distance > right
    scores = scores.masked_fill(hidden, -math.inf)
    total = scores.logsumexp(-1)
    if rules.sinks is not None:
        total = torch.logaddexp(total, rules.sinks.double()[:, None])
    p = torch.exp(scores - total[..., None]).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", p, values), total


def check(out: Tensor, lse: Tensor, exact: tuple[Tensor, Tensor], lse_error: float = 3e-6) -> None:
    visible = exact[1] > -math.inf
    assert bool((lse[~visible] == -math.inf).all()) and bool((out.transpose(0, 1)[~visible] == 0).all())
    if visible.any() and exact[0].norm() > 0:
        assert relative(out, exact[0]) < EPSILON[out.dtype]
        assert (lse.double() - exact[1])[visible].abs().max() < lse_error


@pytest.mark.parametrize(
    "head_dim,causal,sides,seqlens",
    [
        (64, True, (50, 0), (200, 300)),
        (64, True, (500, 0), (100, 700)),
        (96, False, (30, 70), (150, 250)),
        (96, False, (10, 5), (200, 90)),
        (64, True, (0, 0), (70, 100)),
    ],
)
def test_windows(head_dim: int, causal: bool, sides: tuple[int, int], seqlens: tuple[int, int]) -> None:
    config = select("bfloat16", head_dim, causal, sides[0], window=True)
    q, k, v = draw(torch.bfloat16, seqlens, (2, 1), head_dim)
    # With a causal mask the right side counts for nothing.
    out, lse = forward_on_numpy(
        config, q, k, v, head_dim**-0.5, 2, LATE, (sides[0], 99 if causal else sides[1])
    )
    check(out[0], lse[0], exact_attention(q[0], k[0], v[0], sides))


@pytest.mark.parametrize("sides,seqlens", [((100, 0), (400, 420)), ((30, 0), (330, 90))])
def test_warpgroups_that_visit_different_blocks(sides: tuple[int, int], seqlens: tuple[int, int]) -> None:
    """Of a tile of three warpgroups each leaves out blocks at either end of its walk, or, without a query, all but one;
    of fewer keys than queries some warpgroups see none."""
    config = replace(select("bfloat16", 64, True, 16384), window=True)
    assert config.walks_apart
    q, k, v = draw(torch.bfloat16, seqlens, (2, 1), 64)
    for timing in (AT_ONCE, LATE):
        out, lse = forward_on_numpy(config, q, k, v, 0.125, 2, timing, sides)
        check(out[0], lse[0], exact_attention(q[0], k[0], v[0], sides))


@pytest.mark.parametrize("head_dim,seqlen_k,tile_n", [(64, 16384, 128), (128, 512, 128), (128, 8192, 160)])
def test_half_of_the_first_block_where_a_warpgroup_sees_no_more(
    head_dim: int, seqlen_k: int, tile_n: int
) -> None:
    """Tiles as shipped, whose blocks are twice as wide as a warpgroup is high or more; the second rows see few keys or
    none."""
    config = select_forward_config("bfloat16", head_dim, head_dim, True, seqlen_k)
    assert config.first_widths == (tile_n // 2,) and config.tile_n == tile_n
    for seqlens in ((230, 300), (330, 90)):
        q, k, v = draw(torch.bfloat16, seqlens, (2, 1), head_dim)
        out, lse = forward_on_numpy(config, q, k, v, head_dim**-0.5, 2, LATE)
        check(out[0], lse[0], exact_attention(q[0], k[0], v[0], (None, 0)))


def test_two_warpgroups_that_walk_apart() -> None:
    """O leaves from registers, so that they meet nowhere."""
    config = select_forward_config("bfloat16", 256, 256, True, 1024)
    assert config.walks_apart and config.consumers == 2 and config.o_from_registers
    q, k, v = draw(torch.bfloat16, (140, 200), (2, 1), 256)
    out, lse = forward_on_numpy(config, q, k, v, 0.0625, 2, LATE)
    check(out[0], lse[0], exact_attention(q[0], k[0], v[0], (None, 0)))


def test_a_window_with_sinks_in_wide_blocks() -> None:
    """Tiles as shipped: the second row's maximum comes late, and O is shrunk in a branch."""
    config = replace(select_forward_config("float16", 112, 112, True, 8192, window=True), sinks=True)
    assert config.finds_second_maximum_late and config.shrinks_in_branch
    q, k, v = draw(torch.float16, (150, 800), (1, 1), 112)
    rules = Rules(sinks=torch.tensor([1.5]))
    out, lse = forward_on_numpy(config, q, k, v, 112**-0.5, 2, LATE, (300, 0), rules)
    check(out[0], lse[0], exact_attention(q[0], k[0], v[0], (300, 0), rules))


Q = Packed.of((70, 0, 200, 5), behind=9, used=(70, 0, 150, 5))
K = Packed.of((90, 33, 0, 300), behind=3)


@pytest.mark.parametrize("head_dim,causal,sides", [(64, True, ()), (128, False, ()), (96, True, (40, 0))])
def test_packed_sequences(head_dim: int, causal: bool, sides: tuple[int, ...]) -> None:
    config = select("bfloat16", head_dim, causal, 300, window=bool(sides), layout="varlen")
    generator = torch.Generator().manual_seed(0)
    shapes = (Q.total, 2, head_dim), (K.total, 1, head_dim), (K.total, 1, head_dim)
    q, k, v = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    # In V, NaN times a P of 0 is NaN, if a tile reaches into it.
    for tensor, packed in ((q, Q), (k, K), (v, K)):
        tensor[packed.cu_seqlens[-1] :] = math.nan
    plan = plan_of(Q, K, config.tile_m)
    scale = head_dim**-0.5
    out, lse = packed_forward_on_numpy(config, (q, k, v), plan, Q.batch + 1, scale, 2, LATE, sides)
    window = sides or (None, 0 if causal else None)
    for sequence in range(Q.batch + 1):
        (row, rows), (key, keys) = Q.rows(sequence), K.rows(sequence)
        keys = 0 if sequence == Q.batch else keys
        exact = exact_attention(q[row : row + rows], k[key : key + keys], v[key : key + keys], window)
        check(out[row : row + rows], lse[:, row : row + rows], exact)
    # Rows that a sequence does not use are left alone.
    assert out[220:270].isnan().all() and lse[:, 220:270].isnan().all()


@pytest.mark.parametrize(
    "name,causal",
    [("softcap", False), ("alibi", True), ("sinks", True), ("all", False)],
)
def test_rules(name: str, causal: bool) -> None:
    q, k, v = draw(torch.bfloat16, (70, 150), (4, 2), 64)
    slopes = torch.tensor([[0.5, 0.25, 0.03, 0.0]]) if name in ("alibi", "all") else None
    sinks = torch.tensor([-30.0, 0.0, 2.0, 60.0]) if name in ("sinks", "all") else None
    rules = Rules(1.5 if name in ("softcap", "all") else 0.0, slopes, sinks)
    plain = select("bfloat16", 64, causal, 200)
    config = replace(plain, softcap=bool(rules.softcap), alibi=slopes is not None, sinks=sinks is not None)
    out, lse = forward_on_numpy(config, q, k, v, 0.125, timing=LATE, rules=rules)
    exact = exact_attention(q[0], k[0], v[0], (None, 0 if causal else None), rules)
    # NumPy's tanh is exact; that of the GPU is good to 11 bits.
    check(out[0], lse[0], exact, 1e-5)


def test_alibi_by_columns_and_rows() -> None:
    """Tiles as shipped: of a row's bias the maxima know, and the exponents. With a negative slope it grows with the
    distance, and is no maximum itself where far keys have scores far below it."""
    config = replace(select_forward_config("bfloat16", 128, 128, True, 8192), alibi=True)
    assert config.adds_row_bias_late and config.finds_second_maximum_late and config.shrinks_in_branch
    q, k, v = draw(torch.bfloat16, (150, 500), (2, 1), 128)
    rules = Rules(slopes=torch.tensor([[0.5, 0.01]]))
    out, lse = forward_on_numpy(config, q, k, v, 128**-0.5, 2, LATE, rules=rules)
    check(out[0], lse[0], exact_attention(q[0], k[0], v[0], (None, 0), rules), 1e-5)
    q, k, rules = q.abs(), k.abs(), Rules(slopes=torch.tensor([[-1.0, -0.9]]))
    k[:, :340] *= -64
    out, lse = forward_on_numpy(config, q, k, v, 128**-0.5, 2, LATE, rules=rules)
    exact = exact_attention(q[0], k[0], v[0], (None, 0), rules)
    assert exact[1].abs().max() < 300
    check(out[0], lse[0], exact, 1e-4)


def test_a_sink_is_all_that_a_row_without_keys_has() -> None:
    q, k, v = draw(torch.bfloat16, (100, 40), (2, 1), 64)
    config = replace(select("bfloat16", 64, True, 40), sinks=True)
    rules = Rules(sinks=torch.tensor([3.0, -1e4]))
    out, lse = forward_on_numpy(config, q, k, v, 0.125, timing=LATE, rules=rules)
    assert bool((out[0, :60] == 0).all())
    torch.testing.assert_close(lse[0, :, :60], rules.sinks[:, None].expand(2, 60), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_one_key_at_a_large_scale_is_its_value(dtype: str) -> None:
    # P is 2^r for what rounding took from the scaled maximum, and 1 as an operand of P V.
    torch_dtype = getattr(torch, dtype)
    q, k, v = draw(torch_dtype, (64, 1), (1, 1), 64)
    config = select(dtype, 64, False, 1)
    out, _ = forward_on_numpy(config, q, k, v, 370.0, timing=LATE)
    assert torch.equal(out, v.expand_as(out))
