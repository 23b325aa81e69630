"""What runs backward kernels: what they are given, and what is made of what they leave."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cute_kernels.backward.step import BackwardStep
from hopper.backward.config import BackwardConfig
from hopper_attention import compile_cache, device_memory
from hopper_attention._kernels import Kernel
from hopper_attention.backward_rules import Division, KernelConfig
from hopper_attention.device_memory import Pieces, Work
from hopper_attention.launch.at_once import Given, Step
from hopper_attention.launch.base import Launcher, count_ctas
from hopper_attention.launch.forward import NO_PLAN, NO_SIDES
from hopper_attention.launch.gradient_memory import (
    FEWEST_WORDS,
    DqTile,
    backward_counter,
    divided_pieces,
    divided_tile_pieces,
    empty_gradients,
    subtract_lse_gradient,
    work_pieces,
)
from hopper_attention.layout import TMA_BYTES, make_addressable, new_strides
from hopper_attention.masks import kernel_sides, present
from hopper_attention.scores import NO_SCORES, Scores


@dataclass(frozen=True)
class GradientLauncher(Launcher):
    """The kernels of a backward pass: that of ``config``, and what comes before and after it.

    ``grid`` has the CTAs of a persistent grid, or nothing.
    """

    config: KernelConfig
    kernel: Kernel
    grid: tuple[int, ...]

    def __call__(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        softmax_scale: float,
        dlse: Tensor | None,
        *window: int,
        scores: Scores = NO_SCORES,
    ) -> tuple[Tensor, ...]:
        """As ``run_backward``."""
        if self.device_index != torch.cuda.current_device():
            return self.call_there(dout, q, k, v, out, lse, softmax_scale, dlse, *window, scores=scores)
        gradients = empty_gradients(q, k, v)
        dout, out, q, k, v = map(make_addressable, (dout, out, q, k, v))
        options = self._options(window, scores, q, k)
        self.launch(dout, q, k, v, out, lse.contiguous(), gradients, softmax_scale, dlse, options)
        return gradients

    @abstractmethod
    def launch(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        gradients: tuple[Tensor, ...],
        softmax_scale: float,
        dlse: Tensor | None,
        options: tuple[Any, ...],
    ) -> None:
        """Queue the kernels on tensors that they can address, on the current GPU, which is that of this launcher.

        ``gradients`` are filled; ``options`` is what the kernel takes behind the scale.
        """

    def _start(
        self,
        inputs: tuple[Tensor, ...],
        memory: tuple[Any, ...],
        counter: Any,
        softmax_scale: float,
        options: tuple[Any, ...],
    ) -> None:
        self.kernel(*inputs, *memory, counter, softmax_scale, *options, *self.grid)

    def _counter(self, sums: Tensor) -> Any:
        """``backward_counter``, of which only that of ordered sums depends on them."""
        if self.config.ordered:
            return backward_counter(self.config, sums)
        return device_memory.tile_counter(self.device_index)

    def _options(self, window: tuple[int, ...], scores: Scores, q: Tensor, k: Tensor) -> tuple[Any, ...]:
        """What the kernel takes behind the scale."""
        if self.config.block_lists:
            return listed_options(self.config, scores, q, k)
        if window or scores is not NO_SCORES or not self.is_plain:
            return kernel_options(self.config, kernel_sides(*window), NO_PLAN, scores, q)
        return ()

    @cached_property
    def is_plain(self) -> bool:
        """Whether the kernel takes nothing behind the scale (``kernel_options``)."""
        return isinstance(self.config, BackwardConfig) and self.config.is_plain

    @cached_property
    def dq_tile(self) -> DqTile:
        """That of ``config``, whose properties take longer to compute than memory to find."""
        return DqTile(self.config.tile_m, self.config.dq_parts, self.config.dq_words)


def kernel_options(
    config: KernelConfig, sides: tuple[int | None, ...], plan: tuple[Any, Any], scores: Scores, q: Tensor
) -> tuple[Any, ...]:
    """What a dense kernel takes behind the scale, or a packed one of Hopper; nothing if it is plain.

    That of Hopper takes everything a call may have, or None (``hopper.backward.kernel.GeneralBackwardKernel``), the
    others the sides of a window, a chunk and what changes scores, each only where there is some.
    """
    if isinstance(config, BackwardConfig) and config.is_plain:
        return ()
    changes: tuple[Any, ...] = None, None, None, None
    if scores is not NO_SCORES:
        batch = q.shape[0] if plan is NO_PLAN else plan[1] - 1
        changes = scores.for_gradient(batch, q.shape[-2])
    if isinstance(config, BackwardConfig):
        return *(sides or NO_SIDES), *plan, *changes
    return *present(sides), *(changes if any(x is not None for x in changes) else ())


def listed_options(config: KernelConfig, scores: Scores, q: Tensor, k: Tensor) -> tuple[Any, ...]:
    """The same of a kernel that goes by lists of query tiles."""
    sizes = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    before = (*NO_SIDES, *NO_PLAN) if isinstance(config, BackwardConfig) else ()
    tile = config.tile_m, config.tile_n
    return *before, *scores.for_listed_gradient(tile, sizes, config.least_blocks)


@dataclass(frozen=True)
class PreparedLauncher(GradientLauncher):
    """That of a kernel which ``prepare`` comes before."""

    prepare: Kernel

    @abstractmethod
    def pieces(self, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> Pieces:
        """The work memory of a pass of queries and keys of these shapes."""

    @abstractmethod
    def steps(self, softmax_scale: float, options: tuple[Any, ...], memory: tuple[Any, ...]) -> list[Step]:
        """The launches of a pass that gives dout, q, k, v, out and lse, and dq, dk and dv to fill; ``memory`` is that
        of ``pieces`` and a counter, ``options`` as of ``launch``."""

    def _prepare(self, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, work: Work) -> None:
        """Fill ``work``: the lse in base 2, delta, and zeros to add dQ to, unless the first key tile stores."""
        self.prepare(out, dout, lse, *work.arguments)
        if dlse is not None:
            subtract_lse_gradient(work.tensors[1], lse, dlse)


@dataclass(frozen=True)
class FinishedLauncher(PreparedLauncher):
    """That of a kernel which adds dQ up in float32, which ``finish`` rounds. The first three pieces of work memory are
    the LSE in base 2, delta and these sums."""

    finish: Kernel

    @abstractmethod
    def memory_of_each(
        self, work: tuple[Any, ...], gradients: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """What the kernel and ``finish`` are given, of the pieces of work memory, and dq, dk and dv."""

    def behind_scale(self, options: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the kernel is given behind the scale, ``options`` being that of ``launch``."""
        return options

    def steps(self, softmax_scale: float, options: tuple[Any, ...], memory: tuple[Any, ...]) -> list[Step]:
        dout, q, k, v, out, lse, *gradients = map(Given, range(9))
        *work, counter = memory
        for_kernel, for_finish = self.memory_of_each(tuple(work), tuple(gradients))
        of_call = softmax_scale, *self.behind_scale(options), *self.grid
        return [
            Step(self.prepare, (out, dout, lse, *work[:3])),
            Step(self.kernel, (q, k, v, dout, *for_kernel, counter, *of_call)),
            Step(self.finish, (*for_finish, softmax_scale)),
        ]

    def launch(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        gradients: tuple[Tensor, ...],
        softmax_scale: float,
        dlse: Tensor | None,
        options: tuple[Any, ...],
    ) -> None:
        work = device_memory.work_memory(q.device, self.device_index, self.pieces(q.shape, k.shape))
        self._prepare(dout, out, lse, dlse, Work(work.tensors[:3], work.arguments[:3]))
        for_kernel, for_finish = self.memory_of_each(work.arguments, gradients)
        counter = self._counter(work.tensors[2])
        self._start((q, k, v, dout), for_kernel, counter, softmax_scale, self.behind_scale(options))
        self.finish(*for_finish, softmax_scale)


@dataclass(frozen=True)
class BackwardLauncher(FinishedLauncher):
    """The same of a kernel which writes dK and dV as they are to be."""

    def pieces(self, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> Pieces:
        return work_pieces(self.dq_tile, q_shape)

    def memory_of_each(
        self, work: tuple[Any, ...], gradients: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        dq, *of_keys = gradients
        return (*work, *of_keys), (work[2], dq)

    @cached_property
    def adding(self) -> BackwardLauncher:
        """The same of a kernel that only adds to sums, for those that several launches add to."""
        if not isinstance(self.config, BackwardConfig) or not self.config.stores_first:
            return self
        config = replace(self.config, stores_first=False)
        prepare = compile_cache.get_backward(BackwardStep("prepare", config))
        return BackwardLauncher(*find_parts(config, self.device_index), prepare, self.finish)

    @cached_property
    def with_all_columns(self) -> BackwardLauncher:
        """The same of a kernel that leaves out no columns of zeros: its sums are those of one in a window."""
        if not isinstance(self.config, BackwardConfig) or not self.config.used_head_dim:
            return self
        config = replace(self.config, used_head_dim=0, used_head_dim_v=0)
        steps = (compile_cache.get_backward(BackwardStep(step, config)) for step in ("prepare", "finish"))
        return BackwardLauncher(*find_parts(config, self.device_index), *steps)

    def start(
        self,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor],
        memory: tuple[Tensor, ...],
        softmax_scale: float,
        window: tuple[int, ...] = (),
        scores: Scores = NO_SCORES,
    ) -> None:
        """The kernel between the other two: q, k, v and dout that it can address, and what it fills or adds to, lse in
        base 2 and delta of ``prepare``, sums of dQ, dk and dv."""
        counter = self._counter(memory[2])
        self._start(inputs, memory, counter, softmax_scale, self._options(window, scores, *inputs[:2]))


@dataclass(frozen=True)
class DividedLauncher(FinishedLauncher):
    """That of a kernel which leaves dK and dV in float32, of each of ``head_parts`` parts of the query heads of a head
    of K and V. ``finish`` adds them up, and rounds dQ as well."""

    head_parts: int

    def pieces(self, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> Pieces:
        return divided_pieces(self.config, self.dq_tile, q_shape, k_shape, self.head_parts)

    def memory_of_each(
        self, work: tuple[Any, ...], gradients: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        dq, *of_keys = gradients
        return work, (work[2], dq, *work[3:], *of_keys)


@dataclass(frozen=True)
class PieceLauncher(FinishedLauncher):
    """That of a kernel which leaves dK and dV of the key tiles of ``division`` in float32, in pieces. ``finish`` adds
    them up, and rounds dQ as well."""

    division: Division

    def pieces(self, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> Pieces:
        return divided_tile_pieces(self.config, self.dq_tile, q_shape, self.division)

    def memory_of_each(
        self, work: tuple[Any, ...], gradients: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        dq, *of_keys = gradients
        return (*work[:3], *of_keys, *work[3:]), (work[2], dq, *work[3:], *of_keys)

    def behind_scale(self, options: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.division.first,)


@dataclass(frozen=True)
class StripLauncher(PreparedLauncher):
    """That of a kernel with strips, which writes dQ itself."""

    def pieces(self, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> Pieces:
        return work_pieces(self.dq_tile._replace(dq_parts=1, dq_words=FEWEST_WORDS), q_shape)

    def steps(self, softmax_scale: float, options: tuple[Any, ...], memory: tuple[Any, ...]) -> list[Step]:
        dout, q, k, v, out, lse, *gradients = map(Given, range(9))
        lse_log2, delta, sums, counter = memory
        of_call = softmax_scale, *options, *self.grid
        return [
            Step(self.prepare, (out, dout, lse, lse_log2, delta, sums)),
            Step(self.kernel, (q, k, v, dout, lse_log2, delta, *gradients, counter, *of_call)),
        ]

    def launch(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        gradients: tuple[Tensor, ...],
        softmax_scale: float,
        dlse: Tensor | None,
        options: tuple[Any, ...],
    ) -> None:
        work = device_memory.work_memory(q.device, self.device_index, self.pieces(q.shape, k.shape))
        self._prepare(dout, out, lse, dlse, work)
        counter = self._counter(work.tensors[2])
        self._start((q, k, v, dout), (*work.arguments[:2], *gradients), counter, softmax_scale, options)


@dataclass(frozen=True)
class OneTileLauncher(GradientLauncher):
    """That of a kernel which nothing comes before or behind. There is no gradient of the LSE."""

    def launch(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        gradients: tuple[Tensor, ...],
        softmax_scale: float,
        dlse: Tensor | None,
        options: tuple[Any, ...],
    ) -> None:
        assert dlse is None, "asked of ``find_for_call``"
        counter = device_memory.tile_counter(self.device_index)
        # Of TMA, as that of no other launcher.
        is_addressable = lse.stride() == new_strides(lse.shape) and lse.data_ptr() % TMA_BYTES == 0
        rows = (
            lse if is_addressable else torch.empty(lse.shape, dtype=lse.dtype, device=lse.device).copy_(lse)
        )
        self._start((q, k, v, dout), (rows, out, *gradients), counter, softmax_scale, options)


def find_parts(config: KernelConfig, index: int) -> tuple[int, KernelConfig, Kernel, tuple[int, ...]]:
    """What every ``GradientLauncher`` of a config and a GPU has, in order."""
    kernel = compile_cache.get_backward(config)
    return index, config, kernel, (count_ctas(index),) if config.is_persistent else ()
