"""FP8 attention below the public functions: finds what serves a problem, remembers it, and calls it.

In two steps as in :mod:`hopper_attention.launch.forward`: by sizes and strides, and without them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hopper.forward.fp8.tilings import scores_fit_half
from hopper_attention import compile_cache, device_memory, few_blocks
from hopper_attention._kernels import Kernel
from hopper_attention.backends import Choice, target_of
from hopper_attention.checks import FP8_DTYPE, TensorSpec
from hopper_attention.device_memory import Facts, Pieces
from hopper_attention.few_queries import NOT_FEW
from hopper_attention.fp8_rules import Fp8Problem, block_of, check_size, choose_for, select_for
from hopper_attention.launch.at_once import Given, Step
from hopper_attention.launch.base import (
    NO_PLAN,
    NO_SIDES,
    REMEMBERED_CALLS,
    REMEMBERED_LAUNCHERS,
    Launcher,
    ResultSpec,
    count_ctas,
    index_of,
    no_runs,
    no_vectors,
)
from hopper_attention.launch.forward import run_forward
from hopper_attention.launch.split_forward import SplitSizes, find_combine, merge_in_script
from hopper_attention.launch.transpose import transpose_values
from hopper_attention.launch.widen import widened
from hopper_attention.layout import (
    TMA_BYTES,
    Repair,
    contiguous_copy,
    lies_in_vectors,
    make_addressable,
    repairs_for,
)
from hopper_attention.masks import FULL_SIDES, Sides, kernel_sides
from hopper_attention.notices import warn_once
from hopper_attention.problem import Fp8AttentionProblem
from hopper_attention.quantization_rules import restore_values
from hopper_attention.quantized import QuantizedQKV, QuantizedTensor, TransposedV
from hopper_attention.reference.fp8 import P_EXPONENT, attention_tiled_fp8
from hopper_attention.scores import NO_SCORES, PLAIN, ScoreKind, Scores
from hopper_attention.shapes import fit_shapes

ALL_ROWS = 2**31 - 1
"""Rows that share a scale, where all do, as the kernel is told."""


@dataclass(frozen=True)
class EmulationLaunch:
    """The tiled emulation, on the device of the inputs. P of the largest score is 2^p_exponent."""

    causal: bool
    p_exponent: float = P_EXPONENT

    def __call__(
        self,
        parts: QuantizedQKV,
        softmax_scale: float,
        wants_lse: bool,
        window: Sides = FULL_SIDES,
    ) -> tuple[Tensor, Tensor]:
        # As the kernel: a mean is added before the output is rounded, a rotation undone after.
        dtype = torch.float32 if adds_mean(parts) else parts.dtype
        out, lse = attention_tiled_fp8(
            parts,
            causal=self.causal,
            softmax_scale=softmax_scale,
            out_dtype=dtype,
            p_exponent=self.p_exponent,
            window=window,
        )
        return restore_values(out, parts, self.causal, window).to(parts.dtype), lse


@dataclass(frozen=True)
class NoScoresLaunch:
    """For problems without a score: seqlen_k is 0, or the output is empty. Nothing is launched."""

    result: ResultSpec

    def __call__(
        self,
        parts: QuantizedQKV,
        softmax_scale: float,
        wants_lse: bool,
        window: Sides = FULL_SIDES,
    ) -> tuple[Tensor, Tensor]:
        q = parts.q.data
        return self.result.empty_out(q).zero_(), self.result.empty_lse(q).fill_(-math.inf)


@dataclass(frozen=True)
class DequantizedLaunch:
    """The 16-bit ``backend`` on what the parts stand for, rounded to the dtype of the output.

    Q and K stay rotated, both by the same signs, which leaves their scores as they are; so does V, and it stays without
    its mean: what was done to it is undone in the output.
    """

    causal: bool
    backend: str
    sm_margin: int = 0

    @torch.no_grad()
    def __call__(
        self,
        parts: QuantizedQKV,
        softmax_scale: float,
        wants_lse: bool,
        window: Sides = FULL_SIDES,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (part.dequantize(parts.dtype) for part in (parts.q, parts.k, parts.v))
        options = self.causal, self.backend, self.sm_margin, wants_lse, window
        out, lse = run_forward(q, k, v, softmax_scale, *options)
        return restore_values(out, parts, self.causal, window).to(parts.dtype), lse


@dataclass(frozen=True)
class Fp8HopperLauncher(Launcher):
    """An FP8 kernel on a persistent grid of ``num_ctas``.

    ``repairs`` is empty, or what q and k each need before the kernel can address them. ``block_k`` are the keys that
    share a scale, or ALL_ROWS. ``transposes`` says that the kernel takes V in rows, ``has_window`` that it takes the
    sides of a window, ``widens`` that it takes Q and K as ``widened`` makes them, ``lone_scales`` that it takes a scale
    for each head of Q, K and V. ``note_floats``, ``mean_blocks`` and ``tile_n`` are those of its config. ``combine`` is
    empty, or what adds up the ``splits`` parts of results that the kernel leaves then. ``changes_scores`` says that the
    kernel takes those of ``changes_for_fp8``.
    """

    kernel: Kernel
    result: ResultSpec
    repairs: tuple[Repair, ...]
    num_ctas: int
    causal: bool
    block_k: int
    transposes: bool
    has_window: bool = False
    widens: bool = False
    lone_scales: bool = False
    note_floats: int = 0
    mean_blocks: int = 0
    tile_n: int = 0
    splits: int = 1
    combine: tuple[Kernel, ...] = ()
    changes_scores: bool = False

    def __call__(
        self,
        parts: QuantizedQKV,
        softmax_scale: float,
        wants_lse: bool,
        window: Sides = FULL_SIDES,
        scores: Scores = NO_SCORES,
    ) -> tuple[Tensor, Tensor]:
        if self.device_index != torch.cuda.current_device():
            return self.call_there(parts, softmax_scale, wants_lse, window, scores)
        q, k = parts.q.data, parts.k.data
        batch, seqlen_q, heads, _ = q.shape
        if self.widens:
            q, k = widened(q, k)
        elif self.repairs:
            q, k = (repair.apply(x) for repair, x in zip(self.repairs, (q, k), strict=True))
        if (q.data_ptr() | k.data_ptr()) % TMA_BYTES:
            q, k = (contiguous_copy(x) if x.data_ptr() % TMA_BYTES else x for x in (q, k))
        kv_heads, device = k.shape[2], q.device
        adds = adds_mean(parts)
        out = self.result.empty_out(q)
        lse = self.result.empty_lse(q) if wants_lse else no_vectors(batch, heads, device)
        of_q, *of_kv = (_dense_rows(x.scale) for x in (parts.q, parts.k, parts.v))
        if self.lone_scales:
            of_q = of_q.unflatten(1, (kv_heads, -1))[..., 0]
        mean = vectors_of(parts.mean_v) if adds else no_vectors(batch, kv_heads, device)
        rows_q = parts.q.block if parts.q.block < seqlen_q else ALL_ROWS
        values = self._values(parts.v)
        ones = device_memory.unit_scales(batch, kv_heads, device)
        of_scores = changes_for_fp8(scores) if self.changes_scores else ()
        of_call = (of_q, *of_kv, ones), mean, rows_q, softmax_scale, window
        self.queue((q, k, values, out, lse), *of_call, of_scores=of_scores)
        if adds or not changes_values(parts):
            return out, lse
        return restore_values(out, parts, self.causal, window).to(out.dtype), lse

    def queue(
        self,
        tensors: tuple[Any, ...],
        scales: tuple[Any, ...],
        mean: Any,
        rows_q: int,
        softmax_scale: float,
        window: Sides,
        of_runs: tuple[Any, ...] | None = None,
        of_parts: tuple[Any, ...] = (),
        of_scores: tuple[Any, ...] = (),
    ) -> None:
        """Queue the kernel on q, k, v, out and lse, with the scales of the first three, ``unit_scales`` and the mean of
        V, all as it reads them. ``rows_q`` rows of Q share a scale. Where V has lost means of runs, ``of_runs`` are
        their differences and changes (``RunMeans``), and room for ``notes_of`` these; else ``no_runs_of`` the call.
        Memory ``of_parts``, ``pieces_of`` out, is the stream's if none is given; lse may have no rows there.
        ``of_scores`` are those of ``changes_for_fp8``, where the kernel takes them."""
        counter = device_memory.tile_counter(self.device_index)
        if of_runs is None:
            of_runs = no_runs_of(self, tensors[0].shape[0], tensors[0].device)
        of_call = counter, scales, mean, rows_q, softmax_scale, window, of_runs, of_scores
        if not self.combine:
            self.kernel(*self.arguments(tensors, *of_call))
        for combine in self.combine:
            *inputs, out, lse = tensors
            sizes = SplitSizes(self.splits, *out.shape)
            memory = of_parts or device_memory.stream_memory(self.device_index, sizes.parts).tensors
            parts, part_lse, no_lse = memory
            self.kernel(*self.arguments((*inputs, parts, part_lse), *of_call))
            combine(parts, part_lse, out, lse.as_strided(*sizes.lse[:2]) if lse.numel() else no_lse)

    def pieces_of(self, out_shape: tuple[int, ...]) -> Pieces:
        """Of parts of results of this shape, if the kernel leaves such."""
        return SplitSizes(self.splits, *out_shape).parts if self.combine else ()

    def merge_in_script(
        self, out: Facts, results: tuple[Given, Given], wants_lse: bool, first: int
    ) -> tuple[tuple[Given, Given], list[Step]]:
        """What the kernel fills in a script whose ``results`` are out, like this one, and lse, and the launches behind
        it; ``pieces_of`` out are arguments from ``first`` on."""
        shape, _, dtype = out
        sizes = SplitSizes(self.splits, *shape)
        return merge_in_script(self.combine, sizes, results, dtype, wants_lse, first)[:2]

    def notes_of(self, runs: int) -> tuple[int, int, int]:
        """The shape of what the kernel notes where V has lost so many means of runs."""
        return self.num_ctas, runs, self.note_floats

    def arguments(
        self,
        tensors: tuple[Any, ...],
        counter: Any,
        scales: tuple[Any, ...],
        mean: Any,
        rows_q: int,
        softmax_scale: Any,
        window: Sides,
        of_runs: tuple[Any, ...],
        of_scores: tuple[Any, ...] = (),
    ) -> tuple[Any, ...]:
        """What the kernel takes, in its order."""
        q_scale, k_scale, v_scale, o_scale = scales
        if self.block_k == ALL_ROWS:
            # A lone scale is a factor of the output, whatever its sign.
            v_scale, o_scale = o_scale, v_scale
        return (
            *tensors,
            counter,
            q_scale,
            k_scale,
            v_scale,
            o_scale,
            mean,
            rows_q,
            self.block_k,
            softmax_scale,
            *(self.of_window(window) or ((*NO_SIDES, *NO_PLAN) if self.combine or of_scores else ())),
            *of_scores,
            *of_runs,
            self.num_ctas,
        )

    def of_window(self, window: Sides) -> tuple[Any, ...]:
        """What the kernel takes of the sides of a mask."""
        return (*kernel_sides(*window), *NO_PLAN) if self.has_window else ()

    def _values(self, v: QuantizedTensor | TransposedV) -> Tensor:
        """V as the kernel takes it."""
        if isinstance(v, TransposedV):
            return make_addressable(v.data)
        return make_addressable(v.data) if self.transposes else transpose_values(v.data)


def changes_for_fp8(scores: Scores) -> tuple[Any, ...]:
    """softcap and sinks as FP8 kernels take them, None for what there is not."""
    softcap, _, sinks = scores.changes_for_kernel(1, 1)
    return softcap, sinks


def no_runs_of(launcher: Fp8HopperLauncher, batch: int, device: torch.device) -> tuple[Any, ...]:
    """What its kernel takes where V has lost one mean or none: nothing, unless it has runs."""
    return no_runs(batch, device) if launcher.note_floats else ()


def adds_mean(parts: QuantizedQKV) -> bool:
    """Whether the FP8 kernel adds a mean of V. That of a rotated V comes after PyTorch has rotated the output back."""
    return not parts.quantization.rotate_v and parts.mean_v.numel() > 0


def changes_values(parts: QuantizedQKV) -> bool:
    """Whether something was done to V that is to be undone in the output."""
    return parts.quantization.rotate_v or parts.mean_v.numel() > 0


def _dense_rows(scale: Tensor) -> Tensor:
    """Scales of neighbouring blocks next to each other, as the kernel reads them."""
    return scale if scale.stride(2) == 1 or scale.shape[2] == 1 else contiguous_copy(scale)


def vectors_of(mean: Tensor) -> Tensor:
    """The mean with vectors of neighbouring elements that begin at multiples of 16 bytes."""
    return mean if lies_in_vectors(mean, TMA_BYTES // mean.itemsize) else contiguous_copy(mean)


Fp8Launch = EmulationLaunch | NoScoresLaunch | DequantizedLaunch | Fp8HopperLauncher

HOW = {
    "ampere": "FP8 attention in 16 bits",
    "reference": "FP8 attention on its emulation, which is slow",
}
"""What a warning says of backends other than the FP8 kernel."""


def attend(
    parts: QuantizedQKV,
    softmax_scale: float,
    causal: bool,
    backend: str | None,
    two_level: bool,
    wants_lse: bool = True,
    sm_margin: int = 0,
    window: Sides = FULL_SIDES,
    exact_lse: bool = False,
    scores: Scores = NO_SCORES,
) -> tuple[Tensor, Tensor]:
    """Attention of quantized tensors: out, with what was done to V undone, and lse.

    Without ``wants_lse`` the lse may lack its rows, and the problem is one ``without_lse``; ``exact_lse`` too is that
    of an ``Fp8AttentionProblem``.
    ``causal`` and ``window`` are those of a ``MaskSpec``. ``two_level`` is that of ``Fp8Problem``. ``sm_margin``
    multiprocessors are left to others by the FP8 kernel. ``scores`` are ``NO_SCORES``, or some that ``serves_in_e4m3``
    has nothing against.

    Raises:
        ValueError: the tensors do not fit together, ``backend`` cannot run the problem, or ``sm_margin`` leaves the
            kernel no multiprocessor.
        NotImplementedError: the problem has more tiles than the kernel can count.
    """
    of_call = causal, backend, two_level, sm_margin, window, exact_lse, not wants_lse, scores.kind
    launch = launch_for(parts, *of_call)
    if scores is NO_SCORES:
        return launch(parts, softmax_scale, wants_lse, window)
    assert isinstance(launch, Fp8HopperLauncher)
    return launch(parts, softmax_scale, wants_lse, window, scores)


def launch_for(
    parts: QuantizedQKV,
    causal: bool,
    backend: str | None,
    two_level: bool,
    sm_margin: int,
    window: Sides,
    exact_lse: bool,
    without_lse: bool,
    scores: ScoreKind = PLAIN,
) -> Fp8Launch:
    """What serves a call of ``attend``, which says what the arguments are and what is raised."""
    q, k, v = parts.q, parts.k, parts.v
    if scores != PLAIN:
        problem = problem_of(parts, causal, two_level, window, exact_lse, without_lse)
        of_call = q.data.stride(), k.data.stride(), q.data.device, backend, sm_margin
        return find_fp8_launch(problem._replace(scores=scores), *of_call, may_be_few=False)
    return _find_flat(
        q.data.shape,
        q.data.stride(),
        q.block,
        q.largest,
        k.data.shape,
        k.data.stride(),
        k.block,
        k.largest,
        v.data.shape,
        v.seqlen if isinstance(v, TransposedV) else None,
        v.block,
        parts.dtype,
        q.data.device,
        causal,
        two_level,
        backend,
        sm_margin,
        window,
        exact_lse,
        without_lse,
    )


@lru_cache(maxsize=REMEMBERED_CALLS)
def _find_flat(
    q_shape: tuple[int, ...],
    q_strides: tuple[int, ...],
    block_q: int,
    largest_q: float,
    k_shape: tuple[int, ...],
    k_strides: tuple[int, ...],
    block_k: int,
    largest_k: float,
    v_shape: tuple[int, ...],
    keys: int | None,
    block_v: int,
    dtype: torch.dtype,
    device: torch.device,
    causal: bool,
    two_level: bool,
    backend: str | None,
    sm_margin: int,
    window: Sides,
    exact_lse: bool,
    without_lse: bool,
) -> Fp8Launch:
    """``find_fp8_launch`` by what ``problem_of`` reads, which costs less than to make a problem at every call. V has
    rows, or ``keys`` of them if it is transposed."""
    if keys is not None:
        batch, kv_heads, head_dim_v, _ = v_shape
        v_shape = batch, keys, kv_heads, head_dim_v
    problem = problem_of_sizes(
        (q_shape, k_shape, v_shape),
        (block_q, block_k, block_v),
        (largest_q, largest_k),
        dtype,
        causal,
        two_level,
        window,
        v_rows=keys is None,
        exact_lse=exact_lse,
        without_lse=without_lse,
    )
    return find_fp8_launch(problem, q_strides, k_strides, device, backend, sm_margin)


def problem_of(
    parts: QuantizedQKV,
    causal: bool,
    two_level: bool = False,
    window: Sides = FULL_SIDES,
    exact_lse: bool = False,
    without_lse: bool = False,
) -> Fp8Problem:
    """What the rules need to know of quantized tensors; ``causal`` and ``window`` are those of a ``MaskSpec``."""
    q, k, v = parts.q, parts.k, parts.v
    return problem_of_sizes(
        (q.data.shape, k.data.shape, v.shape),
        (q.block, k.block, v.block),
        (q.largest, k.largest),
        parts.dtype,
        causal,
        two_level,
        window,
        v_rows=isinstance(v, QuantizedTensor),
        exact_lse=exact_lse,
        without_lse=without_lse,
    )


def problem_of_sizes(
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
    blocks: tuple[int, int, int],
    largest: tuple[float, float],
    dtype: torch.dtype,
    causal: bool,
    two_level: bool,
    window: Sides,
    v_rows: bool = False,
    exact_lse: bool = False,
    without_lse: bool = False,
) -> Fp8Problem:
    """``problem_of`` tensors of these shapes, with so many rows a scale and no larger codes of Q and K than these."""
    block_q, block_k, block_v = (block_of(rows, shape[1]) for rows, shape in zip(blocks, shapes, strict=True))
    return Fp8Problem(
        *shapes,
        block_q,
        block_k,
        block_v,
        dtype,
        causal,
        v_rows=v_rows,
        two_level=two_level,
        half_scores=scores_fit_half(*largest, shapes[0][3]),
        window=window,
        exact_lse=exact_lse,
        without_lse=without_lse,
    )


@lru_cache(maxsize=REMEMBERED_CALLS)
def find_fp8_launch(
    problem: Fp8Problem,
    q_strides: tuple[int, ...],
    k_strides: tuple[int, ...],
    device: torch.device,
    backend: str | None,
    sm_margin: int = 0,
    may_be_few: bool = True,
) -> Fp8Launch:
    """What serves a problem, checked; ``may_be_few`` says whether tiles for few queries may.

    Raises:
        ValueError: the shapes do not fit together, ``backend`` cannot run the problem, or ``sm_margin`` leaves the
            kernel no multiprocessor.
        NotImplementedError: the problem has more tiles than the kernel can count.
    """
    p = problem
    fit_shapes(p.q_shape, p.k_shape, p.v_shape)
    kind = p.kind
    choice = find_choice(kind, device, backend)
    if choice.backend == "reference":
        return EmulationLaunch(p.causal)
    if choice.backend == "ampere":
        return DequantizedLaunch(p.causal, choice.backend, sm_margin)
    if kind.is_empty:
        return NoScoresLaunch(ResultSpec(p.out_dtype, kind.head_dim_v))
    few = few_blocks.find_few(p) if may_be_few else NOT_FEW
    kind = few_blocks.kind_of(p, few)
    check_size(find_config(kind), p.q_shape, p.k_shape)
    q = TensorSpec(p.q_shape, q_strides, FP8_DTYPE, device)
    k = TensorSpec(p.k_shape, k_strides, FP8_DTYPE, device)
    return find(kind, device, sm_margin, repairs_for(q, k), few.splits)


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find_choice(problem: Fp8AttentionProblem, device: torch.device, backend: str | None) -> Choice:
    """``choose_for`` a device, with a warning where it is slow."""
    choice = choose_for(problem, target_of(device), backend)
    if choice.advice:
        warn_once(f"{HOW[choice.backend]}: {choice.reason}; {choice.advice}")
    return choice


find_config = lru_cache(maxsize=REMEMBERED_LAUNCHERS)(select_for)
"""The config of problems of a kind that the FP8 kernel serves."""


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find(
    problem: Fp8AttentionProblem,
    device: torch.device,
    sm_margin: int,
    repairs: tuple[Repair, ...],
    splits: int = 1,
) -> Fp8HopperLauncher:
    """The launcher of problems of a kind that the FP8 kernel serves; compiles or loads it the first time.

    ``repairs`` and ``splits`` are those of ``Fp8HopperLauncher``.

    Raises:
        ValueError: ``sm_margin`` leaves no multiprocessor.
    """
    config = find_config(problem)
    index = index_of(device)
    return Fp8HopperLauncher(
        device_index=index,
        num_ctas=count_ctas(index, sm_margin) * config.ctas_per_sm,
        kernel=compile_cache.get_forward(config),
        result=ResultSpec(problem.out_dtype, problem.head_dim_v),
        repairs=repairs,
        causal=problem.causal,
        block_k=problem.block_k or ALL_ROWS,
        transposes=config.v_rows,
        has_window=config.window,
        widens=config.wide_codes,
        lone_scales=config.lone_scales,
        note_floats=config.note_floats,
        mean_blocks=config.mean_blocks,
        tile_n=config.tile_n,
        splits=splits,
        combine=find_combine(config, splits),
        changes_scores=problem.scores != PLAIN,
    )
