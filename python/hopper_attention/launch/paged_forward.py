"""Attends to a key/value cache where it lies: contiguous, or in the pages of a table.

A contiguous cache is one of one page a sequence, whose table says which. Lengths are read on the GPU alone. The kernel
is that of ``packed_forward``, which finds its keys in pages (``hopper/forward/paged.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from cute_kernels.plan.config import check_packed_size
from hopper.config import ForwardConfig
from hopper.forward.tilings import END_TO_END, ONE_PAGE, PAGE_ROWS
from hopper_attention import checks, compile_cache, device_memory
from hopper_attention._kernels import Kernel
from hopper_attention.checks import TensorSpec
from hopper_attention.launch.base import (
    NO_SIDES,
    REMEMBERED_CALLS,
    REMEMBERED_LAUNCHERS,
    Launcher,
    count_ctas,
    index_of,
)
from hopper_attention.launch.forward import find_config
from hopper_attention.launch.planners import Planner, find_planner
from hopper_attention.layout import TMA_BYTES, Repair, copy_reason, make_packed_addressable, repair_for
from hopper_attention.lengths import rows_of_sequences
from hopper_attention.masks import MaskSpec, kernel_sides
from hopper_attention.problem import AttentionProblem
from hopper_attention.scores import NO_SCORES, ScoreKind, Scores, check_scores

MAX_CACHE_ROWS = 2**31 - 1
"""Rows of a cache are numbered in 32 bits, in steps of the stride of a row."""

CACHES = "k_cache", "v_cache"

IN_PLACE = "a cache is attended to where it lies, and nothing of it is copied"


@dataclass(frozen=True)
class CacheSpecs:
    """Tensors of a call, as far as they can be known without reading them: q (batch, seqlen_q, heads, head_dim), or
    with ``cu_seqlens_q`` (total_q, heads, head_dim). The last four may be None."""

    q: TensorSpec
    k: TensorSpec
    v: TensorSpec
    page_table: TensorSpec | None
    lengths: TensorSpec | None
    leftpad: TensorSpec | None
    cu_seqlens_q: TensorSpec | None

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def pages(self) -> int:
        """Of a sequence."""
        return 1 if self.page_table is None else self.page_table.shape[1]

    @property
    def page_size(self) -> int:
        return self.k.shape[1]

    @property
    def capacity(self) -> int:
        """Keys that a sequence has room for."""
        return self.pages * self.page_size

    @property
    def total_q(self) -> int:
        return math.prod(self.q.shape[:-2])

    @property
    def is_empty(self) -> bool:
        """Whether there is no score, as far as sizes tell."""
        return 0 in (self.batch, *self.q.shape[:-1], self.capacity, self.k.shape[0])

    def problem(self, causal: bool, window: tuple[bool, bool], scores: ScoreKind) -> AttentionProblem:
        """``window`` are has_window and has_chunk."""
        has_window, has_chunk = window
        return AttentionProblem(
            self.q.dtype,
            self.q.dtype,
            self.q.shape[-1],
            self.v.shape[3],
            causal,
            has_window=has_window,
            has_chunk=has_chunk,
            is_packed=True,
            scores=scores,
            page_rows=page_rows_of_cache(self.k, self.v, self.pages, is_plain=self.is_plain),
        )

    @property
    def is_plain(self) -> bool:
        """Whether sequence b has page b, from its first row on."""
        return self.page_table is None and self.leftpad is None


@dataclass(frozen=True)
class PagedForwardLauncher(Launcher):
    """The forward kernel of 16 bits on a cache in pages, or one whose sequences lie end to end."""

    config: ForwardConfig
    kernel: Kernel
    planner: Planner
    num_ctas: int

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        pages: tuple[Tensor, Tensor | None],
        lengths: tuple[Tensor, Tensor | None],
        softmax_scale: float,
        mask: MaskSpec,
        scores: Scores,
        results: tuple[Tensor, Tensor],
    ) -> None:
        """Queue the kernel. q is (total_q, heads, head_dim); ``pages`` are the table and left pads, ``lengths`` are
        cu_seqlens_q and the keys of each sequence; ``results`` are out, and lse (heads, total_q or 0)."""
        if self.device_index != torch.cuda.current_device():
            arguments = pages, lengths, softmax_scale, mask, scores, results
            return self.call_there(q, k_cache, v_cache, *arguments)
        (table, leftpad), (cu_seqlens_q, used), (total_q, heads, _) = pages, lengths, q.shape
        batch, capacity = table.shape[0], table.shape[1] * k_cache.shape[1]
        check_packed_size("kernel", heads, batch, (total_q, batch * capacity), self.config.tile_m)
        cu_seqlens_k = device_memory.multiples(batch + 1, capacity, q.device)
        totals = total_q, batch * capacity
        plan = self.planner(cu_seqlens_q, cu_seqlens_k, None, used, totals, self.config.tile_m)
        sides = kernel_sides(*mask.sides) if mask.has_window else NO_SIDES
        where: tuple[Tensor | None, ...] = (None, None)
        if self.config.page_box:
            where = table, device_memory.no_lengths(q.device) if leftpad is None else leftpad
        else:
            k_cache, v_cache = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        self.kernel(
            make_packed_addressable(q),
            k_cache,
            v_cache,
            *results,
            device_memory.tile_counter(self.device_index),
            softmax_scale,
            *sides,
            plan,
            batch + 1,
            *where,
            *scores.for_kernel(batch, heads),
            self.num_ctas,
        )


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find_paged(problem: AttentionProblem, device: torch.device, sm_margin: int) -> PagedForwardLauncher:
    """What runs problems of a kind; compiles or loads its kernel the first time.

    Raises:
        NotImplementedError: no kernel reads such a cache.
        ValueError: ``sm_margin`` leaves no multiprocessor.
    """
    config = find_config(problem, device, None)
    assert isinstance(config, ForwardConfig)
    index = index_of(device)
    num_ctas = count_ctas(index, sm_margin) * config.ctas_per_sm
    kernel = compile_cache.get_forward(config)
    return PagedForwardLauncher(index, config, kernel, find_planner(config), num_ctas)


def page_rows_of(page_size: int, pages: int) -> int:
    """``AttentionProblem.page_rows`` of a cache in which each sequence has so many pages; 0 if no kernel reads it."""
    if pages == 1:
        return ONE_PAGE
    return next((rows for rows in PAGE_ROWS if page_size % rows == 0), 0)


def page_rows_of_cache(k: TensorSpec, v: TensorSpec, pages: int, *, is_plain: bool) -> int:
    """``AttentionProblem.page_rows`` of caches like these, in which each sequence has so many pages. With ``is_plain``
    sequence b has page b, from its first row on."""
    end_to_end = all(x.strides[0] == x.shape[1] * x.strides[1] for x in (k, v))
    return END_TO_END if is_plain and end_to_end else page_rows_of(k.shape[1], pages)


def why_not_in_place(k: TensorSpec, v: TensorSpec, pages: int) -> str:
    """What keeps the kernel from reading a cache of these tensors, (pages, page_size, kv_heads, ...), where it lies;
    empty if it can. ``pages`` are those of a sequence."""
    if not page_rows_of(k.shape[1], pages):
        return f"pages have {k.shape[1]} rows, and the kernel that reads pages takes multiples of {PAGE_ROWS[-1]}"
    for name, spec in zip(CACHES, (k, v), strict=True):
        reason = copy_reason(spec, 0)
        if reason:
            return f"of {name}, {reason}"
    return _why_not_in_rows(k, v) if k.shape[0] > 1 else ""


def _why_not_in_rows(k: TensorSpec, v: TensorSpec) -> str:
    """The same of how far pages lie apart, which the kernel counts in rows."""
    if k.shape[1] == 1 and (repair_for(k), repair_for(v)) != (Repair.NONE, Repair.NONE):
        return "pages have one row, of which the stride is not one that TMA takes"
    steps = {spec.strides[0] / spec.strides[1] for spec in (k, v)}
    if len(steps) > 1 or any(step % 1 for step in steps):
        return (
            f"pages are {k.strides[0]} and {v.strides[0]} elements apart, and rows {k.strides[1]} and {v.strides[1]}, "
            "and the kernel needs pages the same whole number of rows apart in k_cache and v_cache"
        )
    if (k.shape[0] - 1) * max(steps) + k.shape[1] > MAX_CACHE_ROWS:
        return f"the cache has {k.shape[0]} pages {int(max(steps))} rows apart, more rows than 32 bits count"
    return ""


@lru_cache(maxsize=REMEMBERED_CALLS)
def find_paged_launch(
    specs: CacheSpecs, causal: bool, window: tuple[bool, bool], scores: ScoreKind, sm_margin: int
) -> tuple[PagedForwardLauncher, tuple[Repair, Repair]]:
    """What serves a call with these tensors, and what its caches need done to them, which copies nothing; ``window``
    are has_window and has_chunk.

    Raises:
        ValueError, TypeError, NotImplementedError: as ``paged_forward``.
    """
    check_cache(specs)
    checks.check_sm_margin(sm_margin)
    reason = why_not_in_place(specs.k, specs.v, specs.pages)
    if reason:
        raise NotImplementedError(
            f"{reason}, as {IN_PLACE}; use flash_attn_varlen_func on a copy of the keys in use"
        )
    launcher = find_paged(specs.problem(causal, window, scores), specs.q.device, sm_margin)
    return launcher, (repair_for(specs.k), repair_for(specs.v))


def check_cache(specs: CacheSpecs) -> None:
    """Raise ValueError or TypeError unless the tensors make one problem; the message names the first that does not."""
    q, k, v = specs.q, specs.k, specs.v
    wanted = 4 if specs.cu_seqlens_q is None else 3
    if len(q.shape) != wanted:
        raise ValueError(f"q has shape {tuple(q.shape)}, allowed: 4 dimensions, or 3 with cu_seqlens_q")
    checks.check_dtypes(q.dtype, k.dtype, v.dtype)
    heads, head_dim = q.shape[-2:]
    for name, spec in (("k_cache", k), ("v_cache", v)):
        if len(spec.shape) != 4:
            raise ValueError(
                f"{name} has shape {tuple(spec.shape)}, allowed: (pages, page_size, kv_heads, columns)"
            )
        checks.check_device(name, spec.device, q.device)
    checks.check_head_dims(head_dim, v.shape[3])
    if k.shape[3] != head_dim:
        raise ValueError(
            f"k_cache has shape {tuple(k.shape)}, allowed with q of shape {tuple(q.shape)}: (..., {head_dim})"
        )
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"v_cache has shape {tuple(v.shape)}, allowed with k_cache of shape {tuple(k.shape)}: its first three"
        )
    checks.check_heads(heads, k.shape[2])
    _check_vector("cu_seqlens_q", specs.cu_seqlens_q, (specs.batch + 1,), q.device)
    _check_vector("lengths", specs.lengths, (specs.batch,), q.device)
    _check_vector("leftpad", specs.leftpad, (specs.batch,), q.device)
    _check_vector("page_table", specs.page_table, (specs.batch, specs.pages), q.device)
    if specs.page_table is None and k.shape[0] != specs.batch:
        raise ValueError(
            f"k_cache has {k.shape[0]} sequences, allowed without page_table: the batch of q, {specs.batch}"
        )
    if specs.leftpad is not None and specs.pages != 1:
        raise ValueError(
            f"leftpad is given with {specs.pages} pages a sequence, allowed: one page a sequence"
        )


def _check_vector(name: str, spec: TensorSpec | None, shape: tuple[int, ...], device: torch.device) -> None:
    if spec is None:
        return
    if spec.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {spec.dtype}, allowed: torch.int32")
    if tuple(spec.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(spec.shape)}, allowed: {shape}")
    if len(shape) == 1 and shape[0] > 1 and spec.strides[0] != 1:
        raise ValueError(f"{name} has stride {spec.strides[0]}, allowed: 1; use {name}.contiguous()")
    checks.check_device(name, spec.device, device)


def paged_forward(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    page_table: Tensor | None,
    lengths: Tensor | None,
    leftpad: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    mask: MaskSpec,
    scores: Scores = NO_SCORES,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention of 16-bit queries to a cache, without autograd.

    Rows of the cache that no length reaches are never used, whatever they hold. What lies on the GPU alone is not
    checked: page numbers count as the nearest page, lengths end with the table and left pads with their page.

    Args:
        q: (batch, seqlen_q, heads, head_dim), or with ``cu_seqlens_q`` (total_q, heads, head_dim).
        k_cache, v_cache: (pages, page_size, kv_heads, head_dim) and (..., head_dim_v), of q's dtype, which are read
            where they lie: the last stride is 1, others are multiples of 8.
        page_table: int32 (batch, pages of a sequence): which pages hold the keys of a sequence, in their order. With
            one page a sequence a page may be of any size, else of a multiple of 8 rows. None: sequence b has page b.
        lengths: int32 (batch,): keys of each sequence; None: all that there is room for.
        leftpad: int32 (batch,): the row of its only page with which a sequence begins; 0 by default. ``lengths`` does
            not count the rows before it.
        cu_seqlens_q: int32 (batch + 1,), the queries of each sequence, as for ``flash_attn_varlen_func``.
        max_seqlen_q: no sequence has more queries; not needed.
        mask, scores: as for ``run_varlen``, without functions and dropout.
        softmax_scale: head_dim**-0.5 by default.
        return_lse: else the lse has no elements.
        out: where out goes, of its shape; a new tensor by default.

    Returns:
        out, of q's shape with head_dim_v columns, and lse, float32 (batch, heads, seqlen_q), or (heads, total_q).
        Queries that see no key have 0, and their sink or -inf.

    Raises:
        ValueError, TypeError: an argument is not allowed; the message names it, what it was and what is allowed.
        NotImplementedError: no kernel reads such a cache where it lies, or counts so many rows.
    """
    given = (None if x is None else TensorSpec.of(x) for x in (page_table, lengths, leftpad, cu_seqlens_q))
    specs = CacheSpecs(TensorSpec.of(q), TensorSpec.of(k_cache), TensorSpec.of(v_cache), *given)
    window = mask.has_window, mask.attention_chunk > 0
    launch, repairs = find_paged_launch(specs, mask.causal, window, scores.kind, sm_margin)
    if scores is not NO_SCORES:
        check_scores(scores, specs.batch, q.shape[-2], q.dtype, q.device)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else checks.check_scale(softmax_scale)
    out = _out_of(specs, out)
    rows, lse = _rows_for_kernel(out), _empty_lse(specs, return_lse)
    if specs.is_empty or max_seqlen_q == 0:
        _fill_unseen(specs, rows, lse, scores, cu_seqlens_q)
    else:
        k_cache, v_cache = (_in_place(*x) for x in zip(CACHES, (k_cache, v_cache), repairs, strict=True))
        if page_table is None:
            page_table = device_memory.multiples(specs.batch, 1, q.device)[:, None]
        pages = page_table if page_table.stride(1) == 1 else page_table.contiguous(), leftpad
        starts = cu_seqlens_q
        if starts is None:
            starts = device_memory.multiples(specs.batch + 1, q.shape[1], q.device)
        queries = q if cu_seqlens_q is not None else q.flatten(0, 1)
        launch(queries, k_cache, v_cache, pages, (starts, lengths), scale, mask, scores, (rows, lse))
        if return_lse and cu_seqlens_q is not None and scores.sinks is not None:
            # To the kernel rows behind the last sequence are rows without keys, which have their sink.
            lse.masked_fill_(~rows_of_sequences(cu_seqlens_q, None, specs.total_q), -math.inf)
    if rows.data_ptr() != out.data_ptr():
        out.copy_(rows.view(out.shape))
    if return_lse and cu_seqlens_q is None:
        lse = lse.view(q.shape[2], *q.shape[:2]).transpose(0, 1).contiguous()
    return out, lse


def _out_of(specs: CacheSpecs, out: Tensor | None) -> Tensor:
    """Where out goes: what is given, checked, or a new tensor."""
    q, shape = specs.q, (*specs.q.shape[:-1], specs.v.shape[3])
    if out is None:
        return torch.empty(shape, dtype=q.dtype, device=q.device)
    if tuple(out.shape) != shape or out.dtype != q.dtype:
        raise ValueError(
            f"out is {out.dtype} of shape {tuple(out.shape)}, allowed: {q.dtype} of shape {shape}"
        )
    checks.check_device("out", out.device, q.device)
    return out


def _rows_for_kernel(out: Tensor) -> Tensor:
    """(total_q, heads, head_dim_v) in the memory of ``out`` where the kernel can write there, else in its own."""
    shape = math.prod(out.shape[:-2]), *out.shape[-2:]
    if out.is_contiguous() and out.data_ptr() % TMA_BYTES == 0:
        return out.view(shape)
    return out.new_empty(shape)


def _empty_lse(specs: CacheSpecs, wants_lse: bool) -> Tensor:
    """(heads, total_q), or without its rows."""
    shape = specs.q.shape[-2], specs.total_q if wants_lse else 0
    return torch.empty(shape, dtype=torch.float32, device=specs.q.device)


def _fill_unseen(
    specs: CacheSpecs, out: Tensor, lse: Tensor, scores: Scores, cu_seqlens_q: Tensor | None
) -> None:
    """The results of queries that see no key."""
    out.zero_()
    lse.fill_(-math.inf)
    if scores.sinks is not None and lse.numel():
        sinks = scores.sinks.float()[:, None].expand_as(lse)
        of_sequences = torch.ones_like(lse[0], dtype=torch.bool)
        if cu_seqlens_q is not None:
            of_sequences = rows_of_sequences(cu_seqlens_q, None, specs.total_q)
        lse.copy_(torch.where(of_sequences, sinks, lse))


def _in_place(name: str, cache: Tensor, repair: Repair) -> Tensor:
    """The cache as the kernel takes it; other strides for dimensions of size 1 copy nothing."""
    if cache.data_ptr() % TMA_BYTES:
        raise NotImplementedError(
            f"{name} begins {cache.data_ptr() % TMA_BYTES} bytes past a multiple of {TMA_BYTES}, and the kernel needs "
            f"one, as {IN_PLACE}; use flash_attn_varlen_func on a copy of the keys in use"
        )
    return repair.apply(cache)
