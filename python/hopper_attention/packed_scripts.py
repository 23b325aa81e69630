"""FP8 attention to packed sequences as one script: the plan, what is made for attention, attention, what adds up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from cute_kernels.plan.config import check_packed_size
from hopper_attention import checks, device_memory
from hopper_attention._kernels import kept_argument
from hopper_attention.device_memory import Facts, Piece, Pieces
from hopper_attention.launch import at_once
from hopper_attention.launch.at_once import Given, Script, Step
from hopper_attention.launch.base import current_device, no_vectors
from hopper_attention.launch.packed_fp8 import PackedFp8Launcher
from hopper_attention.layout import TMA_BYTES
from hopper_attention.lengths import Lengths
from hopper_attention.like_calls import Remembered
from hopper_attention.masks import FULL_SIDES, Sides

Q, K, V, OUT, LSE, COUNTER, SCALE, STARTS_Q, STARTS_K, USED_K, PLAN, FIRST = range(12)
"""Arguments of a script. From ``FIRST`` on come further tensors of the call, and behind them other work memory."""


@dataclass(frozen=True, slots=True)
class ScriptedCall:
    """What serves calls like an earlier one: ``script`` makes its launches, in memory for ``work``, of which the plan
    is the first piece. ``kept`` lives as long."""

    device_index: int
    script: Script
    work: Pieces
    out: Facts
    lse: Facts
    no_lse: Any
    default_scale: float
    kept: Any = ()

    def __call__(
        self, tensors: tuple[Tensor, ...], lengths: Lengths, scale: float, wants_lse: bool
    ) -> tuple[Tensor, Tensor]:
        """out and lse; an lse that is not wanted has no elements. ``tensors`` are q, k, v and further ones."""
        make, index = device_memory.empty_on_gpu, self.device_index
        out, lse = make(*self.out), make(*self.lse) if wants_lse else self.no_lse
        counter = device_memory.tile_counter(index)
        plan, *others = device_memory.work_memory(out.device, index, self.work).arguments
        q, k, v, *more = tensors
        of_lengths = lengths.cu_seqlens_q, lengths.cu_seqlens_k, lengths.seqused_k
        self.script.run(q, k, v, out, lse, counter, scale, *of_lengths, plan, *more, *others)
        return out, lse


class Serving(Protocol):
    """What serves calls of packed sequences, as ``ScriptedCall`` does."""

    @property
    def device_index(self) -> int: ...

    @property
    def default_scale(self) -> float: ...

    def __call__(
        self, tensors: tuple[Tensor, ...], lengths: Lengths, scale: float, wants_lse: bool
    ) -> tuple[Tensor, Tensor]: ...


ServingT = TypeVar("ServingT", bound=Serving)


def find_again(
    remembered: Remembered[ServingT], group: tuple[Any, ...], q: Tensor, k: Tensor, *others: Tensor
) -> ServingT | None:
    """What was kept for calls of a group, with tensors like these."""
    call = remembered.find_latest(group, q, k, *others)
    return remembered.find((q.shape, k.shape, *group), q, k, *others, group=group) if call is None else call


def serve(
    call: Serving | None,
    tensors: tuple[Tensor, ...],
    lengths: Lengths,
    softmax_scale: Any,
    wants_lse: bool,
) -> tuple[Tensor, Tensor] | None:
    """out and lse by ``call``; None if there is none, if q, k or v, which come first, lie where TMA does not reach, if
    another GPU is current, and in a CUDA graph, which would outlive constants that are kept with a call."""
    if call is None or (tensors[0].data_ptr() | tensors[1].data_ptr() | tensors[2].data_ptr()) % TMA_BYTES:
        return None
    index = call.device_index
    if current_device() != index or device_memory.records_graph(index):
        return None
    scale = call.default_scale if softmax_scale is None else checks.check_scale(softmax_scale)
    return call(tensors, lengths, scale, wants_lse)


@dataclass(frozen=True)
class PackedSteps:
    """What the launches of a script share: ``launcher`` attends, to q and v of these shapes, whose sequences lie as
    those of ``lengths`` do."""

    launcher: PackedFp8Launcher
    q_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    lengths: Lengths
    device: torch.device

    @classmethod
    def of(
        cls, launcher: PackedFp8Launcher, q: Tensor, v_shape: tuple[int, ...], lengths: Lengths
    ) -> PackedSteps:
        """Those of calls with tensors of these sizes.

        Raises:
            NotImplementedError: there are more tiles than the kernel can count.
        """
        steps = cls(launcher, tuple(q.shape), tuple(v_shape), lengths, q.device)
        totals = q.shape[0], v_shape[0]
        check_packed_size("FP8 kernel", q.shape[1], steps.batch, totals, launcher.config.tile_queries)
        return steps

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.lengths.cu_seqlens_q.shape[0] - 1

    @property
    def unused(self) -> Any:
        """In place of lengths, where all rows of sequences count."""
        return kept_argument(device_memory.no_lengths(self.device))

    @property
    def used_k(self) -> Any:
        """Lengths of K, or ``unused``."""
        return self.unused if self.lengths.seqused_k is None else Given(USED_K)

    @property
    def plan_memory(self) -> Piece:
        """Of the plan."""
        launcher = self.launcher
        return launcher.planner.memory(self.q_shape[0], self.batch, launcher.config.tile_queries)

    def plan(self) -> Step:
        """What makes the plan."""
        totals = self.q_shape[0], self.v_shape[0]
        starts = Given(STARTS_Q), Given(STARTS_K)
        planner, config = self.launcher.planner, self.launcher.config
        of_plan = *totals, *planner.options(config.tile_queries, self.q_shape[1] // config.group)
        return Step(planner.kernel, (*starts, self.unused, self.used_k, Given(PLAN), *of_plan))

    def attention(
        self,
        tensors: tuple[Any, Any, Any],
        filled: tuple[Any, Any],
        scales: tuple[Any, Any, Any, Any],
        mean: Any,
        blocks: tuple[int, int],
        window: Sides = FULL_SIDES,
        changes: tuple[Any, ...] = (),
    ) -> Step:
        """What attends: to ``tensors`` q, k and v, with ``scales`` of them and of the output, into ``filled``. Of Q and
        of K ``blocks`` of rows share a scale; ``window`` is that of a ``MaskSpec``, ``changes`` are those of
        ``changes_for_fp8``, if the kernel takes such."""
        of_plan = Given(PLAN), self.batch + 1
        options = *self.launcher.sides(window), *of_plan, *changes, self.launcher.num_ctas
        given = *tensors, *filled, Given(COUNTER), *scales, mean, *blocks, Given(SCALE), *options
        return Step(self.launcher.kernel, given)

    def call(self, steps: Sequence[Step], work: Pieces, dtype: torch.dtype, kept: Any = ()) -> ScriptedCall:
        """That of a script of these steps, whose output has ``dtype``; ``work`` comes behind the plan."""
        total_q, heads, head_dim = self.q_shape
        out = Piece((total_q, heads, self.v_shape[2]), dtype).facts
        no_lse = kept_argument(no_vectors(1, heads, self.device)[0])
        results = out, Piece((heads, total_q)).facts, no_lse, head_dim**-0.5
        memory = self.plan_memory, *work
        return ScriptedCall(self.launcher.device_index, at_once.make_script(steps), memory, *results, kept)
