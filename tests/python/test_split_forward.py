"""Few queries on the forward kernel: several heads in a tile, and keys in parts, by stand-ins of the kernels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.combine.config import CombineConfig
from cute_kernels.plan.config import PlanConfig
from hopper.config import ForwardConfig
from hopper_attention import (
    api,
    compile_cache,
    explain,
    explain_varlen,
    few_queries,
    flash_attn_func,
    flash_attn_varlen_func,
)
from hopper_attention.few_queries_times import best_splits, forward_cost
from hopper_attention.launch import (
    forward,
    packed_again,
    packed_forward,
    split_forward,
    varlen,
)
from hopper_attention.launch.split_forward import SplitLauncher
from hopper_attention.masks import NO_MASK
from hopper_attention.reference import attention_naive
from hopper_attention.scores import PLAIN
from tests.python.fake_gpu import forget_launchers, pretend

BF16 = torch.bfloat16


class Kernels:
    """The forward kernel of parts, what adds them up, and plans, in float64; ``calls`` has the forward's tensors."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.loaded: list[Any] = []
        self._starts: tuple[Tensor, Tensor] | None = None

    def load(self, config: Any) -> Any:
        self.loaded.append(config)
        if isinstance(config, CombineConfig):
            return self.merge
        if isinstance(config, PlanConfig):
            return self.plan
        assert isinstance(config, ForwardConfig) and config.split
        return lambda *given: self.attend(config, *given)

    def plan(self, starts_q: Tensor, starts_k: Tensor, used_q: Tensor, used_k: Tensor, *rest: Any) -> None:
        ends_k = starts_k[1:] if not used_k.numel() else starts_k[:-1] + used_k
        self._starts = starts_q, torch.stack((starts_k[:-1], ends_k))

    def attend(
        self, config: ForwardConfig, q: Tensor, k: Tensor, v: Tensor, parts: Tensor, lse: Tensor, *rest: Any
    ) -> None:
        _, scale, left, right, chunk, plan, _, table, pad, cap, *others, ctas = rest
        assert (
            (left, right, chunk, table, pad) == (None,) * 5
            and others == [None] * len(others)
            and ctas == 132 * config.ctas_per_sm
        )
        self.calls.append({"q": q, "k": k, "v": v, "splits": parts.shape[0], "config": config})
        parts.fill_(math.nan)
        lse.fill_(math.nan)
        for batch, (of_q, of_k) in self._sequences(q, k, plan):
            for part in range(parts.shape[0]):
                rows = [
                    (x if batch is None else x[batch])[of_x] for x, of_x in ((q, of_q), (k, of_k), (v, of_k))
                ]
                given = scale, config.causal, cap, (part, parts.shape[0])
                place = part, batch or 0, of_q
                parts[place], lse[place] = attend_to_part(*rows, *given)
        if q.dim() == 3:
            behind = slice(int(self._starts[0][-1]), None)
            parts[:, 0, behind], lse[:, 0, behind] = 0.0, -math.inf

    def _sequences(self, q: Tensor, k: Tensor, plan: Any) -> Iterator[tuple[Any, tuple[slice, slice]]]:
        if plan is None:
            yield from ((i, (slice(None), slice(None))) for i in range(q.shape[0]))
        else:
            starts, keys = self._starts
            for i in range(starts.shape[0] - 1):
                yield None, (slice(int(starts[i]), int(starts[i + 1])), slice(*keys[:, i].tolist()))

    def merge(self, parts: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> None:
        whole = part_lse.double().logsumexp(0)
        shares = (part_lse.double() - whole).exp().nan_to_num(0.0)
        out.copy_(torch.where(shares[..., None] > 0, shares[..., None] * parts.double(), 0.0).sum(0))
        lse.copy_(whole)


def attend_to_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    cap: float | None,
    part: tuple[int, int],
    sides: Sequence[int | None] = (None, None, None),
) -> tuple[Tensor, Tensor]:
    """out (rows, heads, columns) and lse (rows, heads) of a part of the keys, float64; ``sides`` are those of a window
    and its chunk, as kernels take them."""
    (number, count), (rows, heads, _), keys = part, q.shape, k.shape[0]
    of_k, of_v = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->qhk", q.double(), of_k) * scale
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    at = torch.arange(keys)
    seen = (keys * number // count <= at) & (at < keys * (number + 1) // count)
    level = torch.arange(rows)[:, None, None] + keys - rows
    if causal:
        seen = seen & (at <= level)
    left, right, chunk = sides
    if left is not None and right is not None:
        seen = seen & (at >= level - left) & (at <= level + right)
    if chunk is not None:
        seen = seen & (at // chunk == level // chunk)
    scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    return torch.einsum("qhk,khd->qhd", (scores - lse[..., None]).exp().nan_to_num(0.0), of_v), lse


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Those of a pretended H200."""
    fake = Kernels()
    pretend(monkeypatch, forward, varlen, packed_forward, packed_again, split_forward)
    for module in (split_forward, packed_forward):
        monkeypatch.setattr(module, "index_of", lambda device: 0)
    monkeypatch.setattr(compile_cache, "get_serving", fake.load)
    monkeypatch.setattr(compile_cache, "get_forward", fake.load)
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    forget_launchers()
    yield fake
    forget_launchers()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(BF16)


def qkv(seqlen_q: int = 33, seqlen_k: int = 3000) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (draw(1, n, h, 64, seed=i) for i, (n, h) in enumerate(((seqlen_q, 4), *[(seqlen_k, 1)] * 2)))
    return q, k, v


def config_of(
    sizes: tuple[int, int, int], heads: tuple[int, int], head_dim: int = 128, **given: Any
) -> tuple[Any, tuple[str, ...]]:
    """What ``explain`` says of a Hopper GPU: the config, and notes."""
    batch, seqlen_q, seqlen_k = sizes
    q, k = (
        torch.empty(batch, rows, count, head_dim, dtype=BF16, device="meta")
        for rows, count in zip((seqlen_q, seqlen_k), heads, strict=True)
    )
    plan = explain(q, k, k, device_capability=(9, 0), **given)
    assert (" query rows x " in str(plan)) == (getattr(plan.config, "group", 2) > 1)
    return plan.config, plan.notes


@pytest.mark.parametrize(
    ("sizes", "heads", "head_dim", "group"),
    [
        ((64, 16, 512), (32, 4), 128, 8),
        ((32, 33, 400), (64, 16), 64, 4),
        ((70, 9, 130), (64, 1), 128, 64),
        ((64, 6, 5), (64, 4), 128, 16),
        # 12 query heads share a K/V head, which do not divide a warpgroup's rows; nor do 7.
        ((64, 100, 512), (48, 4), 128, 12),
        ((64, 17, 512), (28, 4), 128, 7),
    ],
)
def test_several_heads_in_a_tile(
    sizes: tuple[int, int, int], heads: tuple[int, int], head_dim: int, group: int
) -> None:
    for causal in (False, True):
        config, notes = config_of(sizes, heads, head_dim, causal=causal)
        assert isinstance(config, ForwardConfig) and (config.group, config.split) == (group, False)
        assert (few_queries.NOTE_ON_GROUPS in notes) == (group > 1)


@pytest.mark.parametrize(
    ("sizes", "heads", "head_dim", "group"),
    [
        ((4, 32, 4000), (32, 4), 128, 8),
        ((4, 32, 4000), (32, 4), 256, 8),
        ((4, 16, 9000), (8, 1), 64, 8),
        # Tiles are full without a group, and too few.
        ((2, 200, 30_000), (4, 4), 128, 1),
    ],
)
def test_keys_in_parts(
    sizes: tuple[int, int, int], heads: tuple[int, int], head_dim: int, group: int
) -> None:
    for causal in (False, True):
        config, notes = config_of(sizes, heads, head_dim, causal=causal, softcap=3.0)
        assert isinstance(config, ForwardConfig) and (config.group, config.split) == (group, True)
        assert config.softcap and any("a part of a tile's keys" in note for note in notes)


def test_what_differs_by_head_is_of_tiles_of_a_head() -> None:
    sizes, heads = (64, 64, 512), (32, 4)
    for given in (
        {"alibi_slopes": torch.ones(32, device="meta")},
        {"sinks": torch.ones(32, device="meta")},
        {"dropout_p": 0.5},
        {"score_mod": lambda score, b, h, q_idx, kv_idx: score + 1.0},
    ):
        config, _ = config_of(sizes, heads, **given)
        assert not isinstance(config, ForwardConfig) or (config.group, config.split) == (1, False), given
    config, _ = config_of(sizes, heads, window_size=(100, 0))
    assert (config.group, config.split) == (8, False)
    # A window's keys are in no parts.
    config, _ = config_of((4, 100, 9000), (8, 1), window_size=(5000, 0))
    assert not getattr(config, "split", False)


def test_parts_are_as_many_as_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    found, fastest = [], few_queries.fastest

    def noted(call: Any, mean_k: float, in_e4m3: bool) -> Any:
        found.append((call, mean_k))
        return fastest(call, mean_k, in_e4m3)

    monkeypatch.setattr(few_queries, "fastest", noted)
    forget_launchers()
    for keys, most in ((60_000, 64), (300, 1), (513, 3)):
        shapes = (1, 64, 8, 128), (1, keys, 1, 128), (1, keys, 1, 128)
        specs = (few_queries.contiguous_spec(x, BF16, torch.device("meta")) for x in shapes)
        few = few_queries.find_few(*specs, NO_MASK, PLAIN, 0)
        call, mean_k = found[-1]
        costs = [forward_cost(call.shape, mean_k, 8, n) for n in range(1, most + 1)]
        number = best_splits(call.shape, mean_k, 8)
        assert 1 <= number <= most and costs[number - 1] <= 1.05 * min(costs)
        if most == 64:
            assert 8 < few.splits < 64 and (few.group, few.split_rows) == (8, 512)
        assert best_splits(dataclasses.replace(call.shape, batch=2**19), mean_k, 8) <= 2
    forget_launchers()


OPTIONS = [{}, {"causal": True}, {"softmax_scale": 0.3}, {"softcap": 1.5, "causal": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_results(kernels: Kernels, options: dict[str, Any]) -> None:
    q, k, v = qkv()
    exact, exact_lse = attention_naive(q, k, v, **options)
    for number in range(1, 5):
        out, lse = flash_attn_func(q, k, v, return_attn_probs=True, **options)
        assert len(kernels.calls) == number and kernels.calls[-1]["splits"] > 1
        torch.testing.assert_close(out.double(), exact, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=1e-4)
        assert out.is_contiguous() and lse.is_contiguous()
    out = flash_attn_func(q, k, v, **options)
    torch.testing.assert_close(out.double(), exact, atol=1e-2, rtol=1e-2)
    assert len(kernels.loaded) == 2


def test_keys_that_grow_are_found_once(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(33, 4000)
    for rows in (3000, 3001):
        flash_attn_func(q, k[:, :rows], v[:, :rows])
    monkeypatch.setattr(api, "run_forward", None)
    for rows in (3002, 2600, 3072):
        out = flash_attn_func(q, k[:, :rows], v[:, :rows])
        exact, _ = attention_naive(q, k[:, :rows], v[:, :rows])
        torch.testing.assert_close(out.double(), exact, atol=1e-2, rtol=1e-2)
    assert len(kernels.calls) == 5


def test_tensors_that_tma_cannot_address(kernels: Kernels) -> None:
    q, k, v = qkv()
    exact, _ = attention_naive(q, k, v)
    odd = [torch.zeros(x.numel() + 1, dtype=BF16)[1:].view(x.shape).copy_(x) for x in (q, k, v)]
    for tensors in ([q, k, v], odd, [q, k, v], odd):
        out = flash_attn_func(*tensors)
        torch.testing.assert_close(out.double(), exact, atol=1e-2, rtol=1e-2)
        assert all(kernels.calls[-1][name].data_ptr() % 16 == 0 for name in ("q", "k", "v"))


def test_another_gpu_is_current(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    launcher = forward.find_launch(*(fact for x in (q, k, v) for fact in facts(x)), False, None, 0)
    assert isinstance(launcher, SplitLauncher)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    out, _ = launcher(q, k, v, None, True)
    torch.testing.assert_close(out.double(), attention_naive(q, k, v)[0], atol=1e-2, rtol=1e-2)


def facts(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device


LENGTHS_Q, LENGTHS_K = (33, 0, 16, 40), (3000, 40, 0, 2999)


def packed() -> tuple[list[Tensor], tuple[Any, ...]]:
    """q, k and v of four sequences and 5 rows of none, and where they lie."""
    rows = (sum(LENGTHS_Q) + 5, 4), *[(sum(LENGTHS_K) + 5, 1)] * 2
    sums = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (LENGTHS_Q, LENGTHS_K)]
    tensors = [draw(*shape, 64, seed=i) for i, shape in enumerate(rows)]
    return tensors, (*sums, max(LENGTHS_Q), max(LENGTHS_K))


@pytest.mark.parametrize("is_used", [False, True], ids=["whole", "seqused_k"])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(kernels: Kernels, is_used: bool, causal: bool) -> None:
    tensors, lengths = packed()
    used = (2500, 40, 0, 999) if is_used else LENGTHS_K
    options = {"causal": causal, "seqused_k": torch.tensor(used).int() if is_used else None}
    config = explain_varlen(*tensors, *lengths, **options, device_capability=(9, 0)).config
    assert isinstance(config, ForwardConfig) and config.split and config.layout == "varlen"
    for number in range(1, 5):
        out, lse = flash_attn_varlen_func(*tensors, *lengths, return_attn_probs=True, **options)
        assert len(kernels.calls) == number
        row = key = 0
        for n, m, seen in zip(LENGTHS_Q, LENGTHS_K, used, strict=True):
            places = zip(tensors, (row, key, key), (n, seen, seen), strict=True)
            rows = (x[first : first + count][None] for x, first, count in places)
            exact, exact_lse = attention_naive(*rows, causal=causal)
            torch.testing.assert_close(out[row : row + n].double(), exact[0], atol=1e-2, rtol=1e-2)
            torch.testing.assert_close(lse[:, row : row + n].double(), exact_lse[0], atol=1e-4, rtol=1e-4)
            row, key = row + n, key + m
        assert not out[row:].any() and bool((lse[:, row:] == -math.inf).all())
    assert flash_attn_varlen_func(*tensors, *lengths, **options).equal(out)
