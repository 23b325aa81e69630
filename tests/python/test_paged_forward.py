"""The launcher on caches in pages: what the kernel is given, results, and errors before any launch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.plan.config import PlanConfig
from hopper.config import ForwardConfig
from hopper.forward.tilings import ONE_PAGE, select_paged_config
from hopper_attention import compile_cache
from hopper_attention.forward_rules import select_for, why_not_paged
from hopper_attention.launch import forward
from hopper_attention.launch.paged_forward import page_rows_of, paged_forward
from hopper_attention.masks import MaskSpec
from hopper_attention.problem import AttentionProblem
from hopper_attention.reference import attention_naive
from hopper_attention.scores import Scores
from tests.python.fake_gpu import forget_launchers, pretend

CAUSAL, FULL = MaskSpec(True), MaskSpec(False)


class Kernels:
    """In place of the planner and of the forward kernel: notes what they are given, and attends by plain indexing."""

    def __init__(self) -> None:
        self.loaded: list[Any] = []
        self.plans: list[tuple[Any, ...]] = []
        self.calls: list[tuple[Any, ...]] = []

    def load(self, config: Any) -> Any:
        self.loaded.append(config)
        is_plan = isinstance(config, PlanConfig)
        return (
            (lambda *given: self.plans.append(given))
            if is_plan
            else (lambda *given: self.attend(config, given))
        )

    def attend(self, config: ForwardConfig, given: tuple[Any, ...]) -> None:
        self.calls.append(given)
        q, k, v, out, lse, _, scale, left, right, _, _, sequences, table, pads, cap, _, sinks, *_ = given
        if not config.page_box:
            assert table is None and pads is None and k.dim() == 3
            k, v = (x.unflatten(0, (sequences - 1, -1)) for x in (k, v))
            table, pads = torch.arange(sequences - 1)[:, None], ints()
        assert sequences == table.shape[0] + 1
        starts, capacity, _, used, *_ = self.plans[-1]
        out.zero_()
        # As the kernel leaves rows behind the last sequence.
        lse.fill_(-math.inf) if sinks is None else lse.copy_(sinks[:, None].expand_as(lse))
        for b in range(table.shape[0]):
            first = int(pads[b]) if pads.numel() else 0
            rows = torch.arange(first, first + int(used[b] if used.numel() else capacity[1]))
            pages = table[b, rows // k.shape[1]].long()
            keys = (x[pages, rows % k.shape[1]][None] for x in (k, v))
            span = slice(int(starts[b]), int(starts[b + 1]))
            sides = (
                {} if left is None else {"window_left": left, "window_right": -1 if config.causal else right}
            )
            options = {"softcap": cap or 0.0, "sinks": sinks, "softmax_scale": scale}
            exact, exact_lse = attention_naive(q[None, span], *keys, causal=config.causal, **sides, **options)
            out[span] = exact[0].to(out.dtype)
            if lse.numel():
                lse[:, span] = exact_lse[0].float()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """A Hopper GPU; its tensors are the CPU's."""
    fake = Kernels()
    pretend(monkeypatch, forward)
    monkeypatch.setattr(compile_cache, "get_forward", fake.load)
    yield fake
    forget_launchers()


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def caches(pages: int, page_size: int, kv_heads: int = 2, dims: tuple[int, int] = (64, 64)) -> list[Tensor]:
    return [draw(pages, page_size, kv_heads, d, seed=i + 1) for i, d in enumerate(dims)]


def gathered(cache: Tensor, table: Tensor, length: int, first: int = 0) -> Tensor:
    return torch.cat([cache[page] for page in table.tolist()])[None, first : first + length]


TABLE, LENGTHS = torch.tensor([[3, 0, 2], [1, 4, 5]], dtype=torch.int32), (40, 21)


@pytest.mark.parametrize("is_packed", [False, True])
def test_pages(kernels: Kernels, is_packed: bool) -> None:
    k, v = caches(6, 16, dims=(64, 128))
    q = draw(2, 7, 4, 64)
    options: dict[str, Any] = {
        "page_table": TABLE,
        "lengths": ints(*LENGTHS),
        "mask": CAUSAL,
        "return_lse": True,
    }
    if is_packed:
        out, lse = paged_forward(
            q.flatten(0, 1), k, v, cu_seqlens_q=ints(0, 7, 14), max_seqlen_q=7, **options
        )
        assert out.shape == (14, 4, 128) and lse.shape == (4, 14)
        out, lse = out.unflatten(0, (2, 7)), lse.unflatten(1, (2, 7)).transpose(0, 1)
    else:
        out, lse = paged_forward(q, k, v, **options)
        assert out.shape == (2, 7, 4, 128) and lse.shape == (2, 4, 7) and lse.is_contiguous()
    for b, length in enumerate(LENGTHS):
        exact, exact_lse = attention_naive(
            q[b : b + 1], *(gathered(x, TABLE[b], length) for x in (k, v)), causal=True
        )
        torch.testing.assert_close(out[b].double(), exact[0], rtol=0.01, atol=0.01)
        torch.testing.assert_close(lse[b].double(), exact_lse[0], rtol=1e-5, atol=1e-5)
    (config, plan) = kernels.loaded
    assert config == select_paged_config("bfloat16", 64, 128, True, 16) and isinstance(plan, PlanConfig)
    assert config.page_box == 16
    cu_q, cu_k, used_q, used_k, *_ = kernels.plans[0]
    assert cu_q.tolist() == [0, 7, 14] and cu_k.tolist() == [0, 48, 96]
    assert used_q.numel() == 0 and used_k.tolist() == list(LENGTHS)


def test_a_contiguous_cache_with_rows_of_the_batch_and_pads(kernels: Kernels) -> None:
    k, v = caches(5, 37)
    q = draw(2, 3, 4, 64)
    options = {"lengths": ints(20, 9), "leftpad": ints(11, 28), "mask": FULL, "return_lse": True}
    out, _ = paged_forward(q, k, v, page_table=ints(4, 2)[:, None], **options)
    for b, (row, length, pad) in enumerate(((4, 20, 11), (2, 9, 28))):
        keys = (gathered(x, ints(row), length, pad) for x in (k, v))
        exact, _ = attention_naive(q[b : b + 1], *keys)
        torch.testing.assert_close(out[b].double(), exact[0], rtol=0.01, atol=0.01)
    assert kernels.loaded[0].page_box == kernels.loaded[0].tile_n
    sizes_of_all = ints(0, 5), ints(20, 8)
    for lengths, pads in zip(sizes_of_all, (ints(0, 3), ints(9, 9)), strict=True):
        paged_forward(q, k, v, page_table=ints(1, 1)[:, None], lengths=lengths, leftpad=pads, mask=FULL)
    assert len(kernels.loaded) == 2, "sizes, pads and lengths load nothing anew"
    # Without a table sequence b has page b, and without lengths all of it: they are packed keys.
    out, lse = paged_forward(q, k[:2], v[:2], page_table=None, lengths=None, mask=FULL)
    exact, _ = attention_naive(q, k[:2], v[:2])
    torch.testing.assert_close(out.double(), exact, rtol=0.01, atol=0.01)
    assert lse.shape[1] == 0 or lse.numel() == 0
    assert kernels.loaded[2].page_box == 0 and kernels.loaded[2].tile_n == kernels.loaded[0].tile_n
    # Not where rows lie between them.
    wide = [torch.cat((x, x), 1)[:2, :37] for x in (k, v)]
    out, _ = paged_forward(q, *wide, page_table=None, lengths=None, mask=FULL)
    torch.testing.assert_close(out.double(), exact, rtol=0.01, atol=0.01)
    assert len(kernels.loaded) == 4


def test_a_window_and_scores_and_where_out_goes(kernels: Kernels) -> None:
    k, v = caches(6, 16)
    q, sinks = draw(2, 7, 4, 64), torch.tensor([0.5, -1.0, 3.0, 0.0])
    given = torch.full((2, 7, 4, 64), math.nan).bfloat16()
    scattered = torch.full((2, 7, 4, 128), math.nan).bfloat16()[..., ::2]
    options = {"mask": MaskSpec(True, window_left=5), "scores": Scores(softcap=7.0, sinks=sinks)}
    for out in (given, scattered):
        result, _ = paged_forward(q, k, v, page_table=TABLE, lengths=ints(*LENGTHS), out=out, **options)
        assert result is out
        for b, length in enumerate(LENGTHS):
            keys = (gathered(x, TABLE[b], length) for x in (k, v))
            exact, _ = attention_naive(
                q[b : b + 1], *keys, causal=True, window_left=5, softcap=7.0, sinks=sinks
            )
            torch.testing.assert_close(out[b].double(), exact[0], rtol=0.01, atol=0.01)
    assert kernels.calls[0][3].data_ptr() == given.data_ptr()
    config = kernels.loaded[0]
    assert config.window and config.softcap and config.sinks and not config.alibi


def test_rows_of_no_sequence_have_no_sink(kernels: Kernels) -> None:
    k, v = caches(6, 16)
    options = {"page_table": TABLE, "lengths": ints(*LENGTHS), "mask": FULL, "return_lse": True}
    scores = Scores(sinks=torch.zeros(4))
    out, lse = paged_forward(draw(9, 4, 64), k, v, cu_seqlens_q=ints(0, 4, 6), scores=scores, **options)
    assert bool((lse[:, 6:] == -math.inf).all()) and bool(lse[:, :6].isfinite().all())
    assert bool((out[6:] == 0).all())
    # Nor is there anything to launch where no key can be.
    launched = len(kernels.calls)
    empty = {"page_table": TABLE[:, :0], "cu_seqlens_q": ints(0, 4, 6), "scores": scores}
    out, lse = paged_forward(draw(9, 4, 64), k, v, **(options | empty))
    assert bool((out == 0).all()) and bool((lse[:, :6] == 0).all()) and bool((lse[:, 6:] == -math.inf).all())
    assert len(kernels.calls) == launched


def test_caches_are_read_where_they_lie(kernels: Kernels) -> None:
    """Heads before rows, K and V of a page beside each other, a single head of any stride."""
    q, options = draw(2, 3, 4, 64), {"page_table": TABLE, "lengths": ints(*LENGTHS), "mask": FULL}
    by_heads = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in caches(6, 16)]
    beside = torch.stack(caches(6, 16), 1)
    for k, v in (by_heads, (beside[:, 0], beside[:, 1])):
        paged_forward(q, k, v, **options)
        assert kernels.calls[-1][1].data_ptr() == k.data_ptr() and kernels.calls[-1][2].stride() == v.stride()
    one_head = [x[:, :, :1] for x in caches(6, 16)]
    paged_forward(q, *one_head, **options)
    assert kernels.calls[-1][1].data_ptr() == one_head[0].data_ptr()
    mixed = by_heads[0], caches(6, 16)[1]
    with pytest.raises(NotImplementedError, match="same whole number of rows apart in k_cache and v_cache"):
        paged_forward(q, *mixed, **options)
    with pytest.raises(NotImplementedError, match="of v_cache, its stride in the last dimension is 2"):
        paged_forward(q, caches(6, 16)[0], draw(6, 16, 2, 128)[..., ::2], **options)
    odd = draw(6 * 16 * 2 * 64 + 1)[1:].view(6, 16, 2, 64)
    with pytest.raises(NotImplementedError, match="k_cache begins 2 bytes past a multiple of 16"):
        paged_forward(q, odd, caches(6, 16)[1], **options)


ERRORS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "page size": (NotImplementedError, "pages have 12 rows.*multiples of 8", {"cache": caches(6, 12)}),
    "cache dtype": (TypeError, "v has dtype torch.float16", {"v_cache": caches(6, 16)[1].half()}),
    "head_dim": (ValueError, "k_cache has shape .* allowed with q", {"k_cache": draw(6, 16, 2, 128)}),
    "shapes": (ValueError, "v_cache has shape", {"v_cache": draw(5, 16, 2, 64)}),
    "heads": (ValueError, "heads", {"cache": caches(6, 16, 3)}),
    "dimensions": (ValueError, r"k_cache has shape \(6, 16, 64\)", {"k_cache": draw(6, 16, 64)}),
    "q": (ValueError, "q has shape .* 3 with cu_seqlens_q", {"cu_seqlens_q": ints(0, 1, 2)}),
    "table dtype": (TypeError, "page_table has dtype torch.int64", {"page_table": TABLE.long()}),
    "table batch": (ValueError, r"page_table has shape \(1, 3\)", {"page_table": TABLE[:1]}),
    "lengths": (ValueError, r"lengths has shape \(3,\), allowed: \(2,\)", {"lengths": ints(1, 2, 3)}),
    "stride": (ValueError, "lengths has stride 2, allowed: 1", {"lengths": ints(1, 2, 3, 4)[::2]}),
    "pads": (ValueError, "leftpad is given with 3 pages", {"leftpad": ints(1, 2)}),
    "no table": (ValueError, "allowed without page_table: the batch of q, 2", {"page_table": None}),
    "out": (ValueError, "out is torch.bfloat16 of shape", {"out": draw(2, 3, 4, 128)}),
    "dropout": (
        NotImplementedError,
        "has no score_mod, mask_mod or dropout",
        {"scores": Scores(dropout_p=0.5, philox=torch.zeros(2, dtype=torch.int64))},
    ),
    "columns": (NotImplementedError, "values of at most 256 columns", {"cache": caches(6, 16, 2, (64, 512))}),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_before_any_launch(kernels: Kernels, name: str) -> None:
    kind, message, changes = ERRORS[name]
    k, v = changes.get("cache", caches(6, 16))
    options = {"page_table": TABLE, "lengths": ints(*LENGTHS), "mask": FULL, "k_cache": k, "v_cache": v}
    options |= {name: value for name, value in changes.items() if name != "cache"}
    with pytest.raises(kind, match=message):
        paged_forward(draw(2, 3, 4, 64), **options)
    assert kernels.calls == []


def test_a_cache_of_more_rows_than_are_counted(kernels: Kernels) -> None:
    """The rows of a cache with heads before rows are numbered over all heads."""
    on_meta = {"device": "meta", "dtype": torch.bfloat16}
    k, v = (torch.empty(2**24, 32, 16, 64, **on_meta).transpose(1, 2) for _ in "kv")
    q = torch.empty(2, 3, 32, 64, **on_meta)
    with pytest.raises(
        NotImplementedError, match="16777216 pages 512 rows apart, more rows than 32 bits count"
    ):
        paged_forward(q, k, v, page_table=TABLE.to("meta"), lengths=ints(*LENGTHS).to("meta"), mask=FULL)


def test_boxes_are_as_wide_as_pages_and_tiles_allow() -> None:
    assert [page_rows_of(size, 2) for size in (1, 12, 8, 16, 48, 64, 192, 256)] == [
        0,
        0,
        8,
        16,
        16,
        64,
        64,
        128,
    ]
    assert page_rows_of(12, 1) == ONE_PAGE
    boxes = {
        rows: select_paged_config("float16", 128, 128, True, rows).page_box
        for rows in (8, 16, 32, 128, ONE_PAGE)
    }
    assert boxes == {8: 8, 16: 16, 32: 32, 128: 128, ONE_PAGE: 160}
    assert select_paged_config("float16", 192, 128, False, 128).page_box == 128


def test_other_gpus_have_no_kernel_for_pages() -> None:
    problem = AttentionProblem(torch.float16, torch.float16, 64, 64, True, is_packed=True, page_rows=16)
    assert why_not_paged(problem, "hopper") == ""
    for backend in ("ampere", "reference"):
        with pytest.raises(
            NotImplementedError, match=f"backend '{backend}' has no kernel that reads the pages"
        ):
            select_for(problem, backend, (8, 0))
