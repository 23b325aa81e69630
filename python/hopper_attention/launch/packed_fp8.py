"""Runs FP8 attention of sequences of different lengths in one tensor.

As in :mod:`hopper_attention.launch.fp8`, without any size: lengths are read on the GPU alone, apart from the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from cute_kernels.plan.config import check_packed_size
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.forward.fp8.tilings import scores_fit_half
from hopper_attention import compile_cache, device_memory
from hopper_attention._kernels import Kernel
from hopper_attention.checks import FP8_DTYPE
from hopper_attention.fp8_rules import KeysOfPacked, packed_problem
from hopper_attention.launch.base import REMEMBERED_LAUNCHERS, Launcher, count_ctas, index_of, no_vectors
from hopper_attention.launch.forward import NO_SIDES
from hopper_attention.launch.fp8 import EmulationLaunch, changes_for_fp8, find_choice, find_config, vectors_of
from hopper_attention.launch.planners import Planner, find_planner
from hopper_attention.launch.transpose import transpose_packed_values
from hopper_attention.launch.varlen import is_empty, run_varlen
from hopper_attention.launch.widen import widened
from hopper_attention.layout import make_packed_addressable
from hopper_attention.lengths import rows_of_sequences
from hopper_attention.masks import FULL_SIDES, UNLIMITED, MaskSpec, Sides, kernel_sides
from hopper_attention.packed_quantized import (
    ONE_PER_SEQUENCE,
    PackedQuantizedQKV,
    PackedTransposedV,
    RowPlaces,
)
from hopper_attention.problem import ONE_BLOCK, Fp8AttentionProblem
from hopper_attention.rotation import rotate_back
from hopper_attention.scores import NO_SCORES, PLAIN, ScoreKind, Scores

PackedFp8Launch = Callable[[PackedQuantizedQKV, float, bool, Sides], tuple[Tensor, Tensor]]
"""(parts, softmax_scale, wants_lse, window) -> out (total_q, heads, head_dim_v), with what was done to V undone, and
lse (heads, total_q), which may lack its rows where it is not wanted."""


@dataclass(frozen=True)
class PackedEmulationLaunch:
    """The emulation, sequence by sequence, on the device of the inputs. It reads the lengths, and checks them."""

    causal: bool

    def __call__(
        self, parts: PackedQuantizedQKV, softmax_scale: float, wants_lse: bool, window: Sides
    ) -> tuple[Tensor, Tensor]:
        out, lse = no_results(parts)
        attend = EmulationLaunch(self.causal)
        for (rows, _), of_sequence in parts.sequences():
            results = attend(of_sequence, softmax_scale, True, window)
            out[rows.slice], lse[:, rows.slice] = (x[0] for x in results)
        return out, lse


@dataclass(frozen=True)
class PackedDequantizedLaunch:
    """The 16-bit ``backend`` on what the parts stand for, as ``DequantizedLaunch`` does it."""

    causal: bool
    backend: str
    sm_margin: int

    @torch.no_grad()
    def __call__(
        self, parts: PackedQuantizedQKV, softmax_scale: float, wants_lse: bool, window: Sides
    ) -> tuple[Tensor, Tensor]:
        q, k, v = parts.dequantize()
        options = self.causal, self.backend, self.sm_margin, wants_lse, window
        out, lse = run_varlen(q, k, v, parts.lengths, softmax_scale, *options)
        return restore(out, parts, self.causal, window), lse


@dataclass(frozen=True)
class PackedFp8Launcher(Launcher):
    """The FP8 kernel of ``config`` on a persistent grid of ``num_ctas``. ``causal`` is that of the mask; where the
    config has none, a side of the window stands for it. Tiles of several heads, and keys in parts, are those of
    ``few_packed_fp8.FewPackedFp8Launcher``."""

    config: Fp8ForwardConfig
    kernel: Kernel
    planner: Planner
    num_ctas: int
    causal: bool

    def __call__(
        self,
        parts: PackedQuantizedQKV,
        softmax_scale: float,
        wants_lse: bool,
        window: Sides,
        scores: Scores = NO_SCORES,
    ) -> tuple[Tensor, Tensor]:
        if self.device_index != torch.cuda.current_device():
            return self.call_there(parts, softmax_scale, wants_lse, window, scores)
        (total_q, heads, _), (total_k, kv_heads, _) = parts.q.shape, parts.k.shape
        batch, device, lengths = parts.batch, parts.q.data.device, parts.lengths
        check_packed_size("FP8 kernel", heads, batch, (total_q, total_k), self.config.tile_m)
        # The kernel writes the rows of sequences, and those behind the last one.
        writes_all = lengths.seqused_q is None
        out, lse = empty_results(parts, wants_lse) if writes_all else no_results(parts)
        # That of a rotated V comes after PyTorch has rotated the output back.
        adds = parts.mean_v.numel() > 0 and not parts.quantization.rotate_v
        plan = self.planner(*lengths[:4], (total_q, total_k), self.config.tile_m)
        self.kernel(
            *self._codes(parts.q.data, parts.k.data),
            self._values(parts),
            out,
            lse,
            device_memory.tile_counter(self.device_index),
            *self._scales(parts),
            vectors_of(parts.mean_v) if adds else no_vectors(batch + 1, kv_heads, device),
            parts.q.block,
            parts.k.block,
            softmax_scale,
            *self.sides(window),
            plan,
            batch + 1,
            *(() if scores is NO_SCORES else changes_for_fp8(scores)),
            self.num_ctas,
        )
        if wants_lse and scores.sinks is not None:
            clear_behind(lse, lengths.cu_seqlens_q)
        return (out if adds else restore(out, parts, self.causal, window)), lse

    def sides(self, window: Sides) -> tuple[int | None, ...]:
        """Those of the window as the kernel takes them."""
        if not self.config.window:
            return NO_SIDES
        left, right, chunk = window
        is_side = self.causal and not self.config.causal
        return kernel_sides(left, 0 if is_side else right, chunk)

    def _codes(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Q and K as the kernel takes them."""
        if self.config.wide_codes:
            return widened(q, k)
        return make_packed_addressable(q), make_packed_addressable(k)

    def _values(self, parts: PackedQuantizedQKV) -> Tensor:
        """V as the kernel takes it."""
        if isinstance(parts.v, PackedTransposedV):
            return make_packed_addressable(parts.v.data)
        if self.config.v_rows:
            return make_packed_addressable(parts.v.data)
        return transpose_packed_values(parts.v.data, parts.lengths)

    def _scales(self, parts: PackedQuantizedQKV) -> tuple[Tensor, ...]:
        """Those of Q and K, those of blocks of V, and the factors of the output. A lone scale of V is a factor,
        whatever its sign."""
        batch, kv_heads = parts.batch, parts.k.shape[1]
        ones = device_memory.unit_scales(batch + 1, kv_heads, parts.q.data.device)
        if self.config.lone_scales:
            of_q, of_k, of_v = (x.scale.t() for x in (parts.q, parts.k, parts.v))
            return of_q.unflatten(1, (kv_heads, -1)), of_k.unsqueeze(2), ones, of_v.unsqueeze(2)
        of_qk = parts.q.scale.contiguous()[None], parts.k.scale.contiguous()[None]
        if parts.v.block == ONE_PER_SEQUENCE:
            return *of_qk, ones.view(1, kv_heads, batch + 1), parts.v.scale.t().contiguous().unsqueeze(2)
        return *of_qk, parts.v.scale.contiguous()[None], ones


def empty_results(parts: PackedQuantizedQKV, wants_lse: bool) -> tuple[Tensor, Tensor]:
    """Memory for out, and for lse, which lacks its rows if not wanted."""
    (total_q, heads, _), device = parts.q.shape, parts.q.data.device
    out = torch.empty(total_q, heads, parts.v.shape[2], dtype=parts.dtype, device=device)
    return out, torch.empty(heads, total_q if wants_lse else 0, dtype=torch.float32, device=device)


def no_results(parts: PackedQuantizedQKV, scores: Scores = NO_SCORES) -> tuple[Tensor, Tensor]:
    """out and lse of rows that see no key, of which those of sequences have their sink."""
    (total_q, heads, _), data = parts.q.shape, parts.q.data
    out = torch.zeros(total_q, heads, parts.v.shape[2], dtype=parts.dtype, device=data.device)
    lse = torch.full((heads, total_q), -math.inf, dtype=torch.float32, device=data.device)
    if scores.sinks is not None:
        rows = rows_of_sequences(parts.lengths.cu_seqlens_q, parts.lengths.seqused_q, total_q)
        lse = torch.where(rows, scores.sinks.float()[:, None], lse)
    return out, lse


def clear_behind(lse: Tensor, cu_seqlens_q: Tensor) -> None:
    """Make rows behind the last sequence -inf: to a kernel with sinks they are rows without keys, which have those."""
    lse.masked_fill_(~rows_of_sequences(cu_seqlens_q, None, lse.shape[1]), -math.inf)


def restore(out: Tensor, parts: PackedQuantizedQKV, causal: bool, window: Sides) -> Tensor:
    """The output of attention on ``parts``, with what was done to V undone. Rows that see no key stay 0."""
    c = parts.quantization
    values = rotate_back(out, c.seed) if c.rotate_v else out
    if parts.mean_v.numel():
        mean = mean_of_rows(parts, causal, window).repeat_interleave(out.shape[1] // parts.k.shape[1], 1)
        values = values + mean
    return values.to(out.dtype)


def mean_of_rows(parts: PackedQuantizedQKV, causal: bool, window: Sides) -> Tensor:
    """What V lost, for each row of Q: float32 (total_q, kv_heads, head_dim_v), 0 where a row sees no key."""
    cu_seqlens_q, cu_seqlens_k, used_q, used_k = parts.lengths[:4]
    places = RowPlaces.of(cu_seqlens_q, used_q, parts.q.shape[0])
    seqlens_q = pad(cu_seqlens_q.diff() if used_q is None else used_q, (0, 1))
    seqlens_k = pad(cu_seqlens_k.diff() if used_k is None else used_k, (0, 1))
    _, right, chunk = window
    first = torch.zeros_like(seqlens_q)
    if causal or chunk or right != UNLIMITED:
        first = seqlens_q - seqlens_k - (0 if causal or chunk else right)
    first = torch.where(seqlens_k > 0, first, seqlens_q)
    sees = places.is_used & (places.row >= first[places.sequence])
    return torch.where(sees[:, None, None], parts.mean_v[places.sequence], 0.0)


def packed_problem_of(
    parts: PackedQuantizedQKV,
    causal: bool,
    two_level: bool,
    window: Sides,
    exact_lse: bool = False,
    without_lse: bool = False,
    scores: ScoreKind = PLAIN,
) -> Fp8AttentionProblem:
    """What of them decides on the kernel; ``causal`` and ``window`` are those of a ``MaskSpec``, ``scores`` is what
    changes those of tensors with descales."""
    q, k, v = parts.q, parts.k, parts.v
    has_rows = not isinstance(v, PackedTransposedV)
    if has_rows and q.block == k.block == v.block == ONE_PER_SEQUENCE and not two_level:
        of_mask, longest = MaskSpec(causal, *window), parts.lengths[4:]
        problem = packed_problem(q.shape, v.shape, of_mask, longest, exact_lse, without_lse, scores)
        return replace(problem, out_dtype=parts.dtype)
    half_scores = scores_fit_half(q.largest, k.largest, q.shape[2])
    sizes, of_mask = (q.shape[0], q.shape[1]), MaskSpec(causal, *window)
    known = KeysOfPacked.of(sizes, parts.lengths[4:], of_mask, without_lse)
    return Fp8AttentionProblem(
        FP8_DTYPE,
        parts.dtype,
        q.shape[2],
        v.shape[2],
        causal,
        known.longest_k,
        has_window=window != FULL_SIDES,
        has_chunk=window[2] > 0,
        is_packed=True,
        block_k=_block(k.block),
        block_v=_block(v.block),
        v_rows=has_rows,
        two_level=two_level,
        half_scores=half_scores,
        exact_lse=exact_lse,
        without_lse=without_lse,
        few_tiles=known.few_tiles,
    )


def _block(block: int) -> int:
    return ONE_BLOCK if block == ONE_PER_SEQUENCE else block


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find_packed_fp8(
    problem: Fp8AttentionProblem, device: torch.device, backend: str | None, sm_margin: int
) -> PackedFp8Launch:
    """What runs packed FP8 problems of a kind; compiles or loads its kernel the first time.

    Raises:
        ValueError: ``backend`` cannot run there, or ``sm_margin`` leaves the kernel no multiprocessor.
    """
    choice = find_choice(problem, device, backend)
    if choice.backend == "reference":
        return PackedEmulationLaunch(problem.causal)
    if choice.backend == "ampere":
        return PackedDequantizedLaunch(problem.causal, choice.backend, sm_margin)
    config, index = find_config(problem), index_of(device)
    kernel = compile_cache.get_forward(config)
    num_ctas = count_ctas(index, sm_margin) * config.ctas_per_sm
    return PackedFp8Launcher(index, config, kernel, find_planner(config), num_ctas, problem.causal)


def attend_packed(
    parts: PackedQuantizedQKV,
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
    """Attention of packed quantized tensors: out (total_q, heads, head_dim_v), with what was done to V undone, and lse
    (heads, total_q). Arguments and errors are those of ``launch.fp8.attend``.

    Rows of no sequence get 0 and -inf, as do rows that see no key, but for their sink.
    """
    problem = packed_problem_of(parts, causal, two_level, window, exact_lse, not wants_lse, scores.kind)
    launch = find_packed_fp8(problem, parts.q.data.device, backend, sm_margin)
    if is_empty(parts.q.data, parts.k.data, parts.lengths):
        return no_results(parts, scores)
    if scores is NO_SCORES:
        return launch(parts, softmax_scale, wants_lse, window)
    assert isinstance(launch, PackedFp8Launcher)
    return launch(parts, softmax_scale, wants_lse, window, scores)
