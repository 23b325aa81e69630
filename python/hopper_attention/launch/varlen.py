"""Runs attention of sequences of different lengths in one tensor, forward and backward, on its backend.

As in :mod:`hopper_attention.launch.forward` and ``.backward``: what serves a call is remembered without any size.
Lengths are read on the GPU alone, apart from the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hopper.config import ForwardConfig
from hopper.wide.config import WideForwardConfig
from hopper_attention import backward_rules, checks
from hopper_attention.backends import KERNELS
from hopper_attention.checks import TensorSpec
from hopper_attention.few_packed_queries import find_few_packed
from hopper_attention.few_queries import FewQueries
from hopper_attention.forward_rules import ReferenceConfig, packed_problem_of
from hopper_attention.head_parts import PackedSizes, packed_with_head_parts
from hopper_attention.launch.backward import find_choice_for
from hopper_attention.launch.backward import find_config as find_backward_config
from hopper_attention.launch.base import REMEMBERED_CALLS, REMEMBERED_LAUNCHERS
from hopper_attention.launch.few_packed_queries import FewPackedLaunch
from hopper_attention.launch.forward import find_config, takes_wide
from hopper_attention.launch.packed_backward import make_packed_backward_launcher
from hopper_attention.launch.packed_forward import make_packed_launcher
from hopper_attention.launch.packed_wide import PackedWithoutQv, make_packed_wide_launcher
from hopper_attention.launch.sdpa import TorchVarlen, TorchVarlenGradient
from hopper_attention.launch.split_forward import PackedSplitLauncher, find_packed_split
from hopper_attention.lengths import Lengths, check_packed, read_sequences, rows_of_sequences, specs_of
from hopper_attention.masks import FULL_SIDES, MaskSpec, Sides
from hopper_attention.packing_rules import MOST_QUERIES
from hopper_attention.problem import AttentionProblem, GradientProblem, PackedKeys
from hopper_attention.reference.varlen import varlen_backward, varlen_forward
from hopper_attention.scores import NO_SCORES, PLAIN, ScoreKind, Scores, check_scores
from hopper_attention.tile_turns import packed_in_fewer_turns
from hopper_attention.torch_rules import TorchConfig
from hopper_attention.value_parts import attend_in_parts, needs_parts, part_widths

VarlenLaunch = Callable[..., tuple[Tensor, Tensor]]
"""(q, k, v, *lengths, softmax_scale, *sides, wants_lse, scores=NO_SCORES) -> (out, lse), new contiguous tensors.
``sides`` are window_left, window_right and attention_chunk. ``scores`` is given for problems whose kind is not plain.

``lengths`` are the six of ``Lengths``: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k.
q is (total_q, heads, head_dim), k and v (total_k, kv_heads, ...); all were checked, and no size is 0 but that of some
sequences. out is (total_q, heads, head_dim_v), lse float32 (heads, total_q), which may lack its rows where it is not
wanted. Rows of no sequence get 0 and -inf, those that see no key 0 and their sink, or -inf. A launcher reads no tensor
on the host.
"""

VarlenGradientLaunch = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""(dout, dlse, q, k, v, out, lse, *lengths, softmax_scale, *sides, scores=NO_SCORES) to gradients.

dout is (total_q, heads, head_dim_v), dlse None or (heads, total_q), both of any strides; the rest as for
``VarlenLaunch``. Rows of no sequence get gradients of 0, whatever the other tensors hold there.
"""


@dataclass(frozen=True)
class EmptyVarlen:
    """For problems without a score: no tokens, or none in any sequence. Nothing is launched."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *others: Any, scores: Scores = NO_SCORES
    ) -> tuple[Tensor, Tensor]:
        total_q, heads, _ = q.shape
        out = q.new_zeros(total_q, heads, v.shape[2])
        lse = q.new_full((heads, total_q), -math.inf, dtype=torch.float32)
        if scores.sinks is not None:
            rows = rows_of_sequences(others[0], others[2], total_q)
            lse = torch.where(rows, scores.sinks.float()[:, None], lse)
        return out, lse


EMPTY = EmptyVarlen()


@dataclass(frozen=True)
class PartsVarlen:
    """A launcher for each part of the columns of a V that is wider than a kernel's, by their number."""

    launches: dict[int, VarlenLaunch]

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *others: Any, **scores: Scores
    ) -> tuple[Tensor, Tensor]:
        return attend_in_parts(v, lambda part: self.launches[part.shape[2]](q, k, part, *others, **scores))


@dataclass(frozen=True)
class ReferenceVarlen:
    """The tiled reference, sequence by sequence, on the device of the inputs. It reads the lengths, and checks them."""

    causal: bool

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        seqused_q: Tensor | None,
        seqused_k: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        window_left: int,
        window_right: int,
        attention_chunk: int,
        wants_lse: bool,
        scores: Scores = NO_SCORES,
    ) -> tuple[Tensor, Tensor]:
        lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
        return varlen_forward(
            q,
            k,
            v,
            read_sequences(lengths, q.shape[0], k.shape[0]),
            causal=self.causal,
            softmax_scale=softmax_scale,
            window_left=window_left,
            window_right=window_right,
            attention_chunk=attention_chunk,
            **scores.options,
        )


@dataclass(frozen=True)
class ReferenceVarlenGradient:
    """The gradient of ``ReferenceVarlen``."""

    causal: bool

    def __call__(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        seqused_q: Tensor | None,
        seqused_k: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        window_left: int,
        window_right: int,
        attention_chunk: int,
        scores: Scores = NO_SCORES,
    ) -> tuple[Tensor, Tensor, Tensor]:
        lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
        return varlen_backward(
            dout,
            dlse,
            q,
            k,
            v,
            out,
            lse,
            read_sequences(lengths, q.shape[0], k.shape[0]),
            causal=self.causal,
            softmax_scale=softmax_scale,
            window_left=window_left,
            window_right=window_right,
            attention_chunk=attention_chunk,
            **scores.options,
        )


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find_varlen(
    problem: AttentionProblem, device: torch.device, backend: str | None, sm_margin: int
) -> VarlenLaunch:
    """What runs packed problems of a kind; compiles or loads its kernel the first time.

    Raises:
        ValueError: ``backend`` cannot run there.
    """
    config = find_config(problem, device, backend)
    if isinstance(config, ReferenceConfig):
        return ReferenceVarlen(problem.causal)
    if isinstance(config, TorchConfig):
        return TorchVarlen(problem.causal)
    if isinstance(config, WideForwardConfig):
        return PackedWithoutQv(make_packed_wide_launcher(config, device, problem.head_dim_v, sm_margin))
    return make_packed_launcher(config, device, problem.head_dim_v, sm_margin)


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find_varlen_backward(
    problem: GradientProblem, device: torch.device, backend: str | None, head_parts: int = 1
) -> VarlenGradientLaunch:
    """What gives the gradients of packed problems of a kind: a kernel where there is one, else the reference.
    ``head_parts`` are those of a problem that ``divides_heads``."""
    choice = find_choice_for(problem, device, backend)
    if choice.backend in KERNELS:
        config = find_backward_config(problem, device, choice.backend)
        return make_packed_backward_launcher(config, device, head_parts)
    choice.advise("the backward pass of attention")
    if choice.backend == "torch":
        return TorchVarlenGradient(problem.causal)
    return ReferenceVarlenGradient(problem.causal)


@lru_cache(maxsize=REMEMBERED_CALLS)
def find_varlen_launch(
    specs: tuple[TensorSpec, TensorSpec, TensorSpec],
    lengths: tuple[TensorSpec | None, ...],
    causal: bool,
    window: tuple[bool, bool],
    backend: str | None,
    sm_margin: int,
    scores: ScoreKind = PLAIN,
    group: int = 1,
) -> VarlenLaunch:
    """What serves a call with these tensors, checked; ``lengths`` are those of ``specs_of``, ``window`` has_window and
    has_chunk, ``group`` that of ``AttentionProblem``.

    Raises:
        ValueError, TypeError: the arguments do not make a problem, or ``backend`` cannot run it.
    """
    q, k, v = specs
    check_packed(q, k, v, lengths)
    checks.check_backend(backend)
    checks.check_sm_margin(sm_margin)
    problem = packed_problem_of(q, v, causal, window, scores)
    if needs_parts(v.shape[2]) and not takes_wide(problem, q.device, backend):
        shapes = {width: (*v.shape[:2], width) for width in part_widths(v.shape[2])}
        options = lengths, causal, window, backend, sm_margin, scores
        return PartsVarlen(
            {
                width: find_varlen_launch((q, k, v._replace(shape=shape)), *options)
                for width, shape in shapes.items()
            }
        )
    return find_varlen(replace(problem, group=group), q.device, backend, sm_margin)


@lru_cache(maxsize=REMEMBERED_CALLS)
def find_split_varlen(
    specs: tuple[TensorSpec, TensorSpec, TensorSpec],
    lengths: tuple[TensorSpec | None, ...],
    causal: bool,
    backend: str | None,
    sm_margin: int,
    scores: ScoreKind,
    few: FewQueries,
) -> PackedSplitLauncher:
    """``find_varlen_launch`` of few queries, without a window, whose tiles are in parts."""
    q, _, v = specs
    problem = packed_problem_of(q, v, causal, (False, False), scores)
    config = find_config(replace(problem, group=few.group, split_rows=few.split_rows), q.device, backend)
    assert isinstance(config, ForwardConfig)
    return find_packed_split(config, q.device, (q.shape[2], v.shape[2]), few.splits, sm_margin)


def find_for(
    specs: tuple[TensorSpec, TensorSpec, TensorSpec],
    lengths: Lengths,
    mask: MaskSpec,
    backend: str | None,
    sm_margin: int,
    scores: ScoreKind = PLAIN,
) -> VarlenLaunch:
    """What serves a call with these tensors and lengths: the decode kernel, or that of ``find_varlen_launch``."""
    window = mask.has_window, mask.attention_chunk > 0
    given = specs, specs_of(lengths)
    of_kind, group = (backend, sm_margin, scores), 1
    if lengths.max_seqlen_q <= MOST_QUERIES and is_on_hopper(*given, mask.causal, window, *of_kind):
        few = find_few_packed(*given, lengths[4:], mask, scores, sm_margin)
        if few.call is not None:
            return FewPackedLaunch(few.call)
        if few.splits > 1:
            return find_split_varlen(*given, mask.causal, *of_kind, few)
        group = few.group
    elif not any(window) and is_on_hopper(*given, mask.causal, window, *of_kind):
        q, k, v = specs
        problem = packed_problem_of(q, v, mask.causal, window, scores)
        group = packed_in_fewer_turns(problem, q, k, lengths, sm_margin).group
    return find_varlen_launch(*given, mask.causal, window, *of_kind, group)


@lru_cache(maxsize=REMEMBERED_CALLS)
def is_on_hopper(
    specs: tuple[TensorSpec, TensorSpec, TensorSpec],
    lengths: tuple[TensorSpec | None, ...],
    causal: bool,
    window: tuple[bool, bool],
    backend: str | None,
    sm_margin: int,
    scores: ScoreKind,
) -> bool:
    """Whether a kernel for Hopper serves such a call, which is checked. Raises as ``find_varlen_launch``."""
    check_packed(*specs, lengths)
    checks.check_backend(backend)
    checks.check_sm_margin(sm_margin)
    q, _, v = specs
    problem = packed_problem_of(q, v, causal, window, scores)
    if needs_parts(v.shape[2]):
        return False
    return isinstance(find_config(problem, q.device, backend), ForwardConfig)


def run_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    softmax_scale: float | None,
    causal: bool,
    backend: str | None,
    sm_margin: int,
    wants_lse: bool = True,
    window: Sides = FULL_SIDES,
    scores: Scores = NO_SCORES,
) -> tuple[Tensor, Tensor]:
    """Attention of 16-bit tensors without autograd: out and lse, in new contiguous tensors.

    Without ``wants_lse`` the lse that comes back may lack its rows. ``causal`` and ``window`` are those of a
    ``MaskSpec``, the latter its sides.
    """
    specs = TensorSpec.of(q), TensorSpec.of(k), TensorSpec.of(v)
    launch = find_for(specs, lengths, MaskSpec(causal, *window), backend, sm_margin, scores.kind)
    return run_by(launch, (q, k, v), lengths, softmax_scale, wants_lse, window, scores)


def run_by(
    launch: VarlenLaunch,
    tensors: tuple[Tensor, Tensor, Tensor],
    lengths: Lengths,
    softmax_scale: float | None,
    wants_lse: bool,
    window: Sides,
    scores: Scores,
) -> tuple[Tensor, Tensor]:
    """``run_varlen`` by what was found for it."""
    q, k, v = tensors
    given = {}
    if scores is not NO_SCORES:
        check_packed_scores(scores, q, lengths)
        given = {"scores": scores}
    if q.is_cuda and is_empty(q, k, lengths):
        launch = EMPTY
    scale = q.shape[2] ** -0.5 if softmax_scale is None else checks.check_scale(softmax_scale)
    return launch(q, k, v, *lengths, scale, *window, wants_lse, **given)


def check_packed_scores(scores: Scores, q: Tensor, lengths: Lengths) -> None:
    """``check_scores`` of sequences of different lengths."""
    check_scores(scores, lengths.cu_seqlens_q.shape[0] - 1, q.shape[1], q.dtype, q.device)


def is_empty(q: Tensor, k: Tensor, lengths: Lengths) -> bool:
    """Whether there is no score, as far as sizes tell."""
    batch = lengths.cu_seqlens_q.shape[0] - 1
    return 0 in (batch, *q.shape[:2], k.shape[0], lengths.max_seqlen_q, lengths.max_seqlen_k)


def run_varlen_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lengths: Lengths,
    softmax_scale: float,
    causal: bool,
    backend: str | None = None,
    deterministic: bool = False,
    window: Sides = FULL_SIDES,
    scores: Scores = NO_SCORES,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``run_varlen``: dq, dk, dv with the shapes and dtype of q, k, v, contiguous.

    ``backend`` is what the forward was asked for. ``deterministic`` asks for the same bits in every run.
    """
    given = {}
    if scores is not NO_SCORES:
        check_packed_scores(scores, q, lengths)
        given = {"scores": scores}
    if is_empty(q, k, lengths):
        dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
        return dq, dk, dv
    keys = backward_rules.keys_within(lengths.max_seqlen_k, scores.sinks is not None)
    kind = scores.kind if given else PLAIN
    problem = gradient_problem(q, v, causal, window, deterministic, keys, kind)
    launch = find_for_lengths(problem, q, k, lengths, window, backend)
    return launch(dout, dlse, q, k, v, out, lse, *lengths, softmax_scale, *window, **given)


def find_for_lengths(
    problem: GradientProblem, q: Tensor, k: Tensor, lengths: Lengths, window: Sides, backend: str | None
) -> VarlenGradientLaunch:
    """``find_varlen_backward`` of a problem of these tensors, whose sums of dQ are made in a fixed order where that is
    faster, and whose query heads are divided where that is."""
    parts = 1
    if find_choice_for(problem, q.device, backend).backend == "hopper":
        problem = backward_rules.packed_in_faster_order(problem, q.numel(), lengths[4:])
        problem, parts = packed_with_head_parts(problem, sizes_of(q, k, lengths), window)
    return find_varlen_backward(problem, q.device, backend, parts)


def sizes_of(q: Tensor, k: Tensor, lengths: Lengths) -> PackedSizes:
    """What is known of these lengths on a host."""
    return PackedSizes(q.shape, k.shape, lengths.cu_seqlens_q.shape[0] - 1, lengths[4:])


def gradient_problem(
    q: Tensor,
    v: Tensor,
    causal: bool,
    window: Sides,
    deterministic: bool,
    keys: PackedKeys,
    scores: ScoreKind = PLAIN,
) -> GradientProblem:
    """The kind of a packed problem of these tensors."""
    return gradient_kind(q.dtype, (q.shape[2], v.shape[2]), causal, window, deterministic, keys, scores)


def gradient_kind(
    dtype: torch.dtype,
    head_dims: tuple[int, int],
    causal: bool,
    window: Sides,
    deterministic: bool,
    keys: PackedKeys,
    scores: ScoreKind = PLAIN,
) -> GradientProblem:
    """The same of tensors with this dtype and these head_dims, of q and of v."""
    return GradientProblem(
        dtype,
        dtype,
        *head_dims,
        causal,
        has_window=window != FULL_SIDES,
        has_chunk=window[2] > 0,
        is_packed=True,
        scores=scores,
        deterministic=deterministic,
        keys=keys,
    )
