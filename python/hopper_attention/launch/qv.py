"""Runs 16-bit attention with a second query, ``qv``, on its backend: dense, and sequences of different lengths.

As in :mod:`hopper_attention.launch.forward`, what serves a call is remembered without any size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hopper_attention import checks
from hopper_attention.checks import TensorSpec
from hopper_attention.forward_rules import ReferenceConfig, check_size, packed_problem_of, problem_of
from hopper_attention.launch.base import REMEMBERED_CALLS, REMEMBERED_LAUNCHERS, ResultSpec
from hopper_attention.launch.forward import NoKeysLaunch, find_config
from hopper_attention.launch.packed_wide import make_packed_wide_launcher
from hopper_attention.launch.varlen import EMPTY, check_packed_scores, is_empty
from hopper_attention.launch.wide import make_wide_launcher
from hopper_attention.lengths import Lengths, check_packed, read_sequences, specs_of
from hopper_attention.masks import FULL_SIDES, MaskSpec, Sides
from hopper_attention.problem import AttentionProblem
from hopper_attention.qv import check_qv, fold, folds_heads, scale_with_qv
from hopper_attention.reference.tiled import tiled_forward
from hopper_attention.reference.varlen import varlen_forward
from hopper_attention.scores import ScoreKind, Scores, check_scores


class QvInputs(NamedTuple):
    """Tensors of a call, dense or packed."""

    q: Tensor
    k: Tensor
    v: Tensor
    qv: Tensor

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec.of(x) for x in self)


QvLaunch = Callable[[QvInputs, float, Sides, Scores], tuple[Tensor, Tensor]]
"""(inputs, softmax_scale, sides, scores) -> (out, lse), new contiguous tensors: out (batch, seqlen_q, heads,
head_dim_v), lse float32 (batch, heads, seqlen_q). Sizes were checked, and none is 0. ``sides`` are a ``MaskSpec``'s."""

PackedQvLaunch = Callable[[QvInputs, Lengths, float, Sides, Scores], tuple[Tensor, Tensor]]
"""The same with the lengths of packed sequences: out (total_q, heads, head_dim_v), lse (heads, total_q)."""


@dataclass(frozen=True)
class ReferenceQv:
    """The tiled reference, on the device of the inputs."""

    config: ReferenceConfig
    causal: bool

    def __call__(
        self, inputs: QvInputs, softmax_scale: float, sides: Sides, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        q, k, v, qv = inputs
        return tiled_forward(
            q,
            k,
            v,
            causal=self.causal,
            softmax_scale=softmax_scale,
            tile_m=self.config.tile_m,
            tile_n=self.config.tile_n,
            window_left=sides[0],
            window_right=sides[1],
            attention_chunk=sides[2],
            **scores.options,
            qv=qv,
        )


@dataclass(frozen=True)
class ReferencePackedQv:
    """The tiled reference, sequence by sequence. It reads the lengths, and checks them."""

    causal: bool

    def __call__(
        self,
        inputs: QvInputs,
        lengths: Lengths,
        softmax_scale: float,
        sides: Sides,
        scores: Scores,
    ) -> tuple[Tensor, Tensor]:
        q, k, v, qv = inputs
        return varlen_forward(
            q,
            k,
            v,
            read_sequences(lengths, q.shape[0], k.shape[0]),
            causal=self.causal,
            softmax_scale=softmax_scale,
            window_left=sides[0],
            window_right=sides[1],
            attention_chunk=sides[2],
            **scores.options,
            qv=qv,
        )


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find_qv(problem: AttentionProblem, device: torch.device, backend: str | None, sm_margin: int) -> QvLaunch:
    """What runs dense problems of a kind; compiles or loads its kernel the first time."""
    config = find_config(problem, device, backend)
    if isinstance(config, ReferenceConfig):
        return ReferenceQv(config, problem.causal)
    return make_wide_launcher(config, device, problem.head_dim_v, sm_margin)


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find_packed_qv(
    problem: AttentionProblem, device: torch.device, backend: str | None, sm_margin: int
) -> PackedQvLaunch:
    """``find_qv`` of sequences of different lengths."""
    config = find_config(problem, device, backend)
    if isinstance(config, ReferenceConfig):
        return ReferencePackedQv(problem.causal)
    return make_packed_wide_launcher(config, device, problem.head_dim_v, sm_margin)


@lru_cache(maxsize=REMEMBERED_CALLS)
def find_qv_launch(
    specs: tuple[TensorSpec, ...],
    causal: bool,
    backend: str | None,
    sm_margin: int,
    sides: Sides,
    scores: ScoreKind,
) -> QvLaunch | None:
    """What serves a call with these tensors, which were checked; None if there is no score, and nothing to launch.

    Raises:
        ValueError: ``backend`` cannot run it.
        NotImplementedError: no kernel of the backend takes it.
    """
    q, k, v, _ = specs
    checks.check_backend(backend)
    checks.check_sm_margin(sm_margin)
    problem = replace(problem_of(q, k, v, causal, sides, scores), has_qv=True)
    config = find_config(problem, q.device, backend)
    if problem.is_empty:
        return None
    check_size(config, q.shape, k.shape)
    return find_qv(problem, q.device, backend, sm_margin)


@lru_cache(maxsize=REMEMBERED_CALLS)
def check_inputs(specs: tuple[TensorSpec, ...]) -> None:
    """Raise unless q, k, v and qv make a dense problem."""
    q, k, v, qv = specs
    checks.check_qkv(q, k, v)
    check_qv(q, v, qv)


def fold_heads(x: Tensor, kv_heads: int) -> Tensor:
    """``fold`` of a tensor."""
    folded = fold(TensorSpec.of(x), kv_heads)
    return x.as_strided(folded.shape, folded.strides)


def run_qv(
    inputs: QvInputs,
    softmax_scale: float | None,
    causal: bool,
    backend: str | None,
    sm_margin: int,
    sides: Sides,
    scores: Scores,
) -> tuple[Tensor, Tensor]:
    """Attention with ``qv`` without autograd: out and lse, in new contiguous tensors."""
    q, k, v, qv = inputs
    check_inputs(inputs.specs)
    if folds_heads(q.shape, k.shape[2], MaskSpec(causal, *sides), scores.kind):
        check_scores(scores, q.shape[0], q.shape[2], q.dtype, q.device)
        scale = scale_with_qv(softmax_scale, q.shape[3], v.shape[3])
        folded = QvInputs(fold_heads(q, k.shape[2]), k, v, fold_heads(qv, k.shape[2]))
        out, lse = run_qv(folded, scale, False, backend, sm_margin, FULL_SIDES, scores)
        return out.transpose(1, 2).reshape(qv.shape), lse.flatten(1)[..., None]
    launch = find_qv_launch(inputs.specs, causal, backend, sm_margin, sides, scores.kind)
    scale = scale_with_qv(softmax_scale, q.shape[3], v.shape[3])
    check_scores(scores, q.shape[0], q.shape[2], q.dtype, q.device)
    if launch is None:
        return NoKeysLaunch(ResultSpec(q.dtype, v.shape[3]))(*inputs[:3], scale, True, scores=scores)
    return launch(inputs, scale, sides, scores)


@lru_cache(maxsize=REMEMBERED_CALLS)
def find_packed_qv_launch(
    specs: tuple[TensorSpec, ...],
    lengths: tuple[TensorSpec | None, ...],
    causal: bool,
    window: tuple[bool, bool],
    backend: str | None,
    sm_margin: int,
    scores: ScoreKind,
) -> PackedQvLaunch:
    """``find_qv_launch`` of sequences of different lengths; ``lengths`` are those of ``specs_of``, ``window``
    has_window and has_chunk."""
    q, k, v, qv = specs
    check_packed(q, k, v, lengths)
    check_qv(q, v, qv)
    checks.check_backend(backend)
    checks.check_sm_margin(sm_margin)
    problem = replace(packed_problem_of(q, v, causal, window, scores), has_qv=True)
    return find_packed_qv(problem, q.device, backend, sm_margin)


def run_packed_qv(
    inputs: QvInputs,
    lengths: Lengths,
    softmax_scale: float | None,
    causal: bool,
    backend: str | None,
    sm_margin: int,
    sides: Sides,
    scores: Scores,
) -> tuple[Tensor, Tensor]:
    """``run_qv`` of sequences of different lengths."""
    q, k, v, _ = inputs
    window = sides != FULL_SIDES, sides[2] > 0
    kind = causal, window, backend, sm_margin, scores.kind
    launch = find_packed_qv_launch(inputs.specs, specs_of(lengths), *kind)
    scale = scale_with_qv(softmax_scale, q.shape[2], v.shape[2])
    check_packed_scores(scores, q, lengths)
    if q.is_cuda and is_empty(q, k, lengths):
        return EMPTY(q, k, v, *lengths, scores=scores)
    return launch(inputs, lengths, scale, sides, scores)
