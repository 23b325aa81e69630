"""FP8 attention of 16-bit tensors whose quantized form nobody asks for: quantizer and kernel are found in one look-up,
and what goes from one to the other lies in work memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.forward.fp8.tilings import RUNLESS_KEYS
from hopper_attention import device_memory
from hopper_attention._kernels import kept_argument
from hopper_attention.checks import TensorSpec
from hopper_attention.device_memory import Piece, Pieces, work_memory
from hopper_attention.fp8_call import OUTPUTS, Constants, QuantizeAndAttend
from hopper_attention.fp8_in_runs import InRunsLauncher
from hopper_attention.fp8_training import quantizer_of, with_blocks_of_the_tile
from hopper_attention.fused_again import FusedCalls
from hopper_attention.launch import at_once, value_mean
from hopper_attention.launch.at_once import Given, Script, Step
from hopper_attention.launch.base import REMEMBERED_CALLS
from hopper_attention.launch.fp8 import ALL_ROWS, Fp8HopperLauncher, find_fp8_launch, problem_of_sizes
from hopper_attention.launch.quantize import (
    Extras,
    find_launch,
    known_target,
    output_pieces,
    select_quantize_config,
    why_not_fused,
)
from hopper_attention.launch.value_mean import ValueMeanLauncher
from hopper_attention.launch.widen import WIDE_CODES
from hopper_attention.layout import new_layout
from hopper_attention.masks import MaskSpec, Sides
from hopper_attention.problem import longest_alike
from hopper_attention.quantization_rules import check_sources, with_numbers
from hopper_attention.quantized import E4M3, Fp8Quantization

Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class AtOnceLauncher(QuantizeAndAttend):
    """``QuantizeAndAttend`` with what finds the mean of V, ``finder``, if that is subtracted, which is a piece behind
    ``Outputs``. ``parts`` are the last pieces, of results in parts, if attention leaves such."""

    finder: ValueMeanLauncher | None
    parts: Pieces = ()

    def launch(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, wants_lse: bool, constants: Constants
    ) -> tuple[Tensor, Tensor]:
        extras, ones, mean, no_lse, no_runs = constants
        pieces = work_memory(q.device, self.device_index, self.pieces).arguments
        parts, of_parts = pieces[:OUTPUTS], pieces[len(pieces) - len(self.parts) :]
        if self.finder is not None:
            mean = pieces[OUTPUTS]
            self.finder.fill(v, mean)
            extras = Extras(*extras[:3], mean)
        self.quantizer.fill(parts, q, k, v, extras)
        out, lse = self.results(wants_lse, no_lse)
        tensors, scales = (*parts[:3], out, lse), (*parts[3:], ones)
        options = self.rows_q, softmax_scale, self.window, no_runs, of_parts
        self.attention.queue(tensors, scales, mean, *options)
        return out, lse

    def steps(self, constants: Constants) -> list[Step]:
        q, k, v, out, lse, counter, scale, *pieces = map(Given, range(7 + len(self.pieces)))
        extras, ones, mean, _, no_runs = constants
        parts, before = pieces[:OUTPUTS], []
        if self.finder is not None:
            mean = pieces[OUTPUTS]
            before.append(Step(self.finder.kernel, (v, mean)))
            extras = Extras(*extras[:3], mean)
        first = 7 + len(self.pieces) - len(self.parts)
        filled, behind = self.attention.merge_in_script(self.out, (out, lse), False, first)
        tensors, scales = (*parts[:3], *filled), (*parts[3:], ones)
        of_call = counter, scales, mean, self.rows_q, scale, self.window, no_runs
        return [
            *before,
            Step(self.quantizer.kernel, (q, k, v, *parts, *extras, self.quantizer.num_ctas)),
            Step(self.attention.kernel, self.attention.arguments(tensors, *of_call)),
            *behind,
        ]


@dataclass(frozen=True, slots=True)
class AtOnceCall:
    """A call of ``flash_attn_fp8_func`` and its quantization, as ``FusedCall``; ``script`` makes its launches."""

    launcher: QuantizeAndAttend
    given: Fp8Quantization
    no_lse: Any
    script: Script

    @classmethod
    def of(cls, launcher: QuantizeAndAttend, given: Fp8Quantization, device: torch.device) -> AtOnceCall:
        """That of the calls which ``launcher`` serves."""
        extras, *others, no_runs = launcher.constants(device)
        kept = *map(kept_argument, others), tuple(map(kept_argument, no_runs))
        constants = Constants(extras.kept(), *kept)
        return cls(launcher, given, constants.no_lse, at_once.make_script(launcher.steps(constants)))

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, wants_lse: bool
    ) -> tuple[Tensor, Tensor]:
        launcher, index = self.launcher, self.launcher.device_index
        pieces = work_memory(q.device, index, launcher.pieces).arguments
        out, lse = launcher.results(wants_lse, self.no_lse)
        counter = device_memory.tile_counter(index)
        self.script.run(q, k, v, out, lse, counter, softmax_scale, *pieces)
        return out, lse


calls_at_once: FusedCalls[AtOnceCall] = FusedCalls()


def leaves_work_to_pytorch(quantization: Fp8Quantization) -> bool:
    """Whether something is done to K or V that PyTorch undoes in the results."""
    return quantization.smooth_k or quantization.rotate_v


def blocks_of_a_mean(attention: Fp8HopperLauncher | Fp8ForwardConfig, quantization: Fp8Quantization) -> int:
    """Of V, that lose a mean of their own where this kernel attends, with ``block_k`` as a number; 0 where all lose the
    same."""
    has_own = attention.note_floats > 0 and quantization.smooth_v
    return attention.mean_blocks if has_own and quantization.block_k == attention.tile_n else 0


def loses_means_of_runs(quantization: Fp8Quantization, seqlen_k: int) -> bool:
    """Whether V may lose a mean for each run of so many keys, which tiles for few queries do not know."""
    return quantization.smooth_v and seqlen_k > RUNLESS_KEYS


@lru_cache(maxsize=REMEMBERED_CALLS)
def find_at_once(
    shapes: Shapes,
    strides: Shapes,
    dtypes: tuple[torch.dtype, ...],
    devices: tuple[torch.device, ...],
    quantization: Fp8Quantization,
    causal: bool,
    window: Sides,
    backend: str | None,
    two_level: bool,
    exact_lse: bool,
    without_lse: bool,
) -> AtOnceLauncher | InRunsLauncher | None:
    """What serves a call with q, k and v like these, which are checked.

    None where PyTorch has a part in it: the kernel does not quantize the tensors, or something else than the FP8 kernel
    attends to them, or V is rotated, which is undone in the output, or K loses its mean, which is in the LSE. With
    ``exact_lse`` the quantizer stores Q and K in 16 bits.

    Raises:
        ValueError, TypeError: q, k and v do not make a problem, or ``backend`` cannot run it.
        NotImplementedError: the problem has more tiles than the kernel can count.
    """
    q, k, v = (TensorSpec(*facts) for facts in zip(shapes, strides, dtypes, devices, strict=True))
    shape, mask = check_sources(q, k, v), MaskSpec(causal, *window)
    head_dims = shape.head_dim, shape.head_dim_v
    c = with_blocks_of_the_tile(quantization, head_dims, shape.seqlen_k, two_level, mask)
    c = with_numbers(c, shape)
    if leaves_work_to_pytorch(c) or quantizer_of(backend) is not None:
        return None
    if why_not_fused(q, k, v, c, known_target(q.device)):
        return None
    config = select_quantize_config(q.dtype, *head_dims, longest_alike(shape.seqlen_k), c, exact_lse)
    block_q, block_k = config.block_q, config.block_k
    pieces = output_pieces(block_q, block_k, *shapes, WIDE_CODES if exact_lse else E4M3)
    blocks, of_call = (block_q, block_k, block_k), (causal, two_level, window)
    problem = problem_of_sizes(
        shapes,
        blocks,
        config.largest_codes,
        q.dtype,
        *of_call,
        exact_lse=exact_lse,
        without_lse=without_lse,
    )
    strides_8 = (new_layout(shape)[1] for shape in shapes[:2])
    may_be_few = not loses_means_of_runs(c, shape.seqlen_k)
    attention = find_fp8_launch(problem, *strides_8, q.device, backend, may_be_few=may_be_few)
    if not isinstance(attention, Fp8HopperLauncher):
        return None
    rows = shape.batch, shape.heads, shape.seqlen_q
    out = Piece((shape.batch, shape.seqlen_q, shape.heads, shape.head_dim_v), q.dtype)
    rows_q = block_q if block_q < shape.seqlen_q else ALL_ROWS
    results = out.facts, Piece(rows).facts, c.seed, rows_q, window
    if blocks_of_a_mean(attention, c):
        wanted = *head_dims, shape.seqlen_k, c, v.device, config.wide_codes, attention.mean_blocks
        finder = value_mean.find_of_runs(v.dtype, v.shape, attention.mean_blocks, block_k, v.device)
        runs = value_mean.RunShape.of(v.shape, finder)
        pieces = *pieces, *runs.pieces, Piece(attention.notes_of(runs.runs))
        options = attention.device_index, find_launch(v.dtype, *wanted), attention, pieces, *results
        return InRunsLauncher(*options, finder, runs)
    mean_finder = None
    if c.smooth_v:
        pieces = *pieces, Piece((shape.batch, shape.kv_heads, shape.head_dim_v))
        mean_finder = value_mean.find_for(v.dtype, shape.batch, shape.kv_heads, shape.head_dim_v, v.device)
    quantizer = find_launch(q.dtype, *head_dims, shape.seqlen_k, c, q.device, exact_lse)
    parts = attention.pieces_of(out.shape)
    options = attention.device_index, quantizer, attention, (*pieces, *parts), *results
    return AtOnceLauncher(*options, mean_finder, parts)
