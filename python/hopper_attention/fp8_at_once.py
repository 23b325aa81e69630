"""FP8 attention of 16-bit tensors whose quantized form nobody asks for: quantizer and kernel are found in one look-up,
and what goes from one to the other lies in work memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.quantize.config import QuantizeConfig
from hopper_attention import device_memory
from hopper_attention._kernels import kept_argument
from hopper_attention.checks import TensorSpec
from hopper_attention.device_memory import Facts, Piece, Pieces, no_floats, unit_scales, work_memory
from hopper_attention.fp8_in_runs import InRunsLauncher
from hopper_attention.fp8_training import quantizer_of, with_blocks_of_the_tile
from hopper_attention.fused_again import FusedCalls
from hopper_attention.launch import at_once, value_mean
from hopper_attention.launch.at_once import Given, Script, Step
from hopper_attention.launch.base import REMEMBERED_CALLS, Launcher, no_vectors
from hopper_attention.launch.fp8 import ALL_ROWS, Fp8HopperLauncher, find_fp8_launch, problem_of_sizes
from hopper_attention.launch.quantize import (
    Extras,
    Outputs,
    QuantizeLauncher,
    addressable,
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
from hopper_attention.quantized import E4M3, Fp8Quantization, Means

OUTPUTS = len(Outputs._fields)

Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class Constants(NamedTuple):
    """What the kernels read that is the same in all calls of a launcher: extras of the quantizer, scales that are 1,
    and what stands for no mean of V and for no LSE."""

    extras: Extras
    ones: Any
    no_mean: Any
    no_lse: Any


@dataclass(frozen=True)
class AtOnceLauncher(Launcher):
    """The quantizer, with what finds the mean of V, and the FP8 kernel of calls with tensors of some sizes and strides.

    ``finder`` finds the mean of V, if that is subtracted. ``pieces`` are what these fill and the FP8 kernel reads, the
    mean last; ``out`` and ``lse`` what it fills. ``seed`` is that of the rotation; ``rows_q`` rows of Q share a scale.
    """

    quantizer: QuantizeLauncher
    finder: ValueMeanLauncher | None
    attention: Fp8HopperLauncher
    pieces: Pieces
    out: Facts
    lse: Facts
    seed: int
    rows_q: int
    window: Sides

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, wants_lse: bool
    ) -> tuple[Tensor, Tensor]:
        """out and lse; an lse that is not wanted has no elements."""
        if self.device_index != torch.cuda.current_device():
            out, lse = self.call_there(q, k, v, softmax_scale, wants_lse)
            return out, lse
        q, k, v = map(addressable, (q, k, v))
        return self.launch(q, k, v, softmax_scale, wants_lse, self.constants(q.device))

    def constants(self, device: torch.device) -> Constants:
        """What ``launch`` takes. Of a CUDA graph that is being captured they are its own, or are never freed."""
        (batch, heads, _), kv_heads, nothing = self.lse[0], self.pieces[1].shape[2], no_floats(device)
        return Constants(
            self.quantizer.extras(self.seed, Means(nothing, nothing), device),
            unit_scales(batch, kv_heads, device),
            no_vectors(batch, kv_heads, device),
            no_vectors(batch, heads, device),
        )

    def launch(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, wants_lse: bool, constants: Constants
    ) -> tuple[Tensor, Tensor]:
        """The same of tensors that the quantizer can address, on the current GPU, which is that of this launcher."""
        extras, ones, mean, lse = constants
        pieces, make = (
            work_memory(q.device, self.device_index, self.pieces).arguments,
            device_memory.empty_on_gpu,
        )
        parts = pieces[:OUTPUTS]
        if self.finder is not None:
            mean = pieces[OUTPUTS]
            self.finder.fill(v, mean)
            extras = Extras(*extras[:3], mean)
        self.quantizer.fill(parts, q, k, v, extras)
        out = make(*self.out)
        if wants_lse:
            lse = make(*self.lse)
        tensors, scales = (*parts[:3], out, lse), (*parts[3:], ones)
        self.attention.queue(tensors, scales, mean, self.rows_q, softmax_scale, self.window)
        return out, lse


@dataclass(frozen=True, slots=True)
class AtOnceCall:
    """A call of ``flash_attn_fp8_func`` and its quantization, as ``FusedCall``; ``script`` makes its launches."""

    launcher: AtOnceLauncher
    given: Fp8Quantization
    no_lse: Any
    script: Script

    @classmethod
    def of(cls, launcher: AtOnceLauncher, given: Fp8Quantization, device: torch.device) -> AtOnceCall:
        """That of the calls which ``launcher`` serves."""
        extras, *others = launcher.constants(device)
        constants = Constants(extras.kept(), *map(kept_argument, others))
        return cls(launcher, given, constants.no_lse, at_once.make_script(_steps(launcher, constants)))

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, wants_lse: bool
    ) -> tuple[Tensor, Tensor]:
        launcher, make = self.launcher, device_memory.empty_on_gpu
        index = launcher.device_index
        pieces = work_memory(q.device, index, launcher.pieces).arguments
        out, lse = make(*launcher.out), make(*launcher.lse) if wants_lse else self.no_lse
        counter = device_memory.tile_counter(index)
        self.script.run(q, k, v, out, lse, counter, softmax_scale, *pieces)
        return out, lse


def _steps(launcher: AtOnceLauncher, constants: Constants) -> list[Step]:
    """Its launches, of a call that gives q, k, v, out, lse, a tile counter, the scale and ``launcher.pieces``."""
    q, k, v, out, lse, counter, scale, *pieces = map(Given, range(7 + len(launcher.pieces)))
    extras, ones, mean, _ = constants
    parts, before = pieces[:OUTPUTS], []
    if launcher.finder is not None:
        mean = pieces[OUTPUTS]
        before.append(Step(launcher.finder.kernel, (v, mean)))
        extras = Extras(*extras[:3], mean)
    tensors, scales = (*parts[:3], out, lse), (*parts[3:], ones)
    of_call = counter, scales, mean, launcher.rows_q, scale, launcher.window
    quantizer, attention = launcher.quantizer, launcher.attention
    return [
        *before,
        Step(quantizer.kernel, (q, k, v, *parts, *extras, quantizer.num_ctas)),
        Step(attention.kernel, attention.arguments(tensors, *of_call)),
    ]


calls_at_once: FusedCalls[AtOnceCall] = FusedCalls()


def leaves_work_to_pytorch(quantization: Fp8Quantization) -> bool:
    """Whether something is done to K or V that PyTorch undoes in the results."""
    return quantization.smooth_k or quantization.rotate_v


def blocks_of_a_mean(attention: Fp8HopperLauncher | Fp8ForwardConfig, quantization: Fp8Quantization) -> int:
    """Of V, that lose a mean of their own where this kernel attends, with ``block_k`` as a number; 0 where all lose the
    same."""
    has_own = attention.note_floats > 0 and quantization.smooth_v
    return attention.mean_blocks if has_own and quantization.block_k == attention.tile_n else 0


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
    attends to them, or V is rotated, which is undone in the output, or K loses its mean, which is in the LSE. Nor where
    the kernel adds keys up in runs, and V has no mean for each. With ``exact_lse`` the quantizer stores Q and K in 16
    bits.

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
    if c.smooth_v:
        pieces = *pieces, Piece((shape.batch, shape.kv_heads, shape.head_dim_v))
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
    attention = find_fp8_launch(problem, *strides_8, q.device, backend)
    if not isinstance(attention, Fp8HopperLauncher):
        return None
    if attention.note_floats:
        return _in_runs(config, attention, v, c, window) if blocks_of_a_mean(attention, c) else None
    quantizer = find_launch(q.dtype, *head_dims, shape.seqlen_k, c, q.device, exact_lse)
    rows = shape.batch, shape.heads, shape.seqlen_q
    out = Piece((shape.batch, shape.seqlen_q, shape.heads, shape.head_dim_v), q.dtype)
    rows_q = block_q if block_q < shape.seqlen_q else ALL_ROWS
    finder = None
    if c.smooth_v:
        finder = value_mean.find_for(v.dtype, shape.batch, shape.kv_heads, shape.head_dim_v, v.device)
    options = pieces, out.facts, Piece(rows).facts, c.seed, rows_q, window
    return AtOnceLauncher(attention.device_index, quantizer, finder, attention, *options)


def _in_runs(
    config: QuantizeConfig,
    attention: Fp8HopperLauncher,
    v: TensorSpec,
    quantization: Fp8Quantization,
    window: Sides,
) -> InRunsLauncher:
    """``find_at_once`` for a kernel with runs; ``config`` is of the quantizer of a mean for all keys."""
    c, (_, seqlen_k, _, head_dim_v) = config, v.shape
    options = quantization, v.device, c.wide_codes, attention.mean_blocks
    return InRunsLauncher(
        attention.device_index,
        find_launch(v.dtype, c.head_dim, head_dim_v, seqlen_k, *options),
        value_mean.find_of_runs(v.dtype, tuple(v.shape), attention.mean_blocks, c.block_k, v.device),
        attention,
        quantization.seed,
        window,
    )
