"""FP8 attention of packed 16-bit tensors like those of an earlier call, whose quantized form nobody asks for: the mean
of V, the quantizer, the plan and attention are one script, and what goes from one to the other is work memory."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from cute_kernels.problem import MAX_SEQLEN
from hopper_attention import device_memory
from hopper_attention._kernels import kept_argument
from hopper_attention.device_memory import Piece, Pieces
from hopper_attention.features import with_mask
from hopper_attention.fp8_rules import classes_of_lengths
from hopper_attention.launch import packed_quantize, value_mean
from hopper_attention.launch.at_once import Given, Part, Step
from hopper_attention.launch.base import REMEMBERED_CALLS, no_vectors
from hopper_attention.launch.packed_fp8 import PackedFp8Launcher, find_packed_fp8
from hopper_attention.launch.packed_quantize import PackedQuantizeLauncher
from hopper_attention.launch.varlen import is_empty
from hopper_attention.layout import make_packed_addressable
from hopper_attention.lengths import Lengths
from hopper_attention.like_calls import Remembered, may_be_like
from hopper_attention.masks import Sides
from hopper_attention.packed_fp8_plan import PackedCall, problem_of
from hopper_attention.packed_quantization import with_packed_blocks
from hopper_attention.packed_scripts import (
    FIRST,
    LSE,
    OUT,
    STARTS_K,
    STARTS_Q,
    K,
    PackedSteps,
    Q,
    ScriptedCall,
    V,
    find_again,
    serve,
)
from hopper_attention.quantized import Fp8Quantization

remembered: Remembered[ScriptedCall] = Remembered(REMEMBERED_CALLS)


def attend(
    tensors: tuple[Any, Any, Any],
    given: tuple[Any, ...],
    quantization: Any,
    softmax_scale: Any,
    options: tuple[Any, ...],
    window: tuple[Any, Any],
) -> tuple[Tensor, Tensor] | None:
    """out and lse of a call on q, k and v, if one like it was made and ``serve`` can; else None.

    Args:
        given: where sequences lie, as ``Lengths``, unchecked.
        options: all other arguments of the call, causal first, ``return_attn_probs`` second. They count with their
            types.
        window: window_size and attention_chunk.
    """
    (q, k, v), lengths = tensors, Lengths(*given)
    longest_q, longest_k = lengths[4:]
    if not (type(q) is type(k) is Tensor and type(longest_q) is type(longest_k) is int and may_be_like()):
        return None
    if not (0 < longest_q <= MAX_SEQLEN and 0 < longest_k <= MAX_SEQLEN):
        return None
    masked = with_mask(options, window, longest_q, longest_k)
    if masked is None:
        return None
    group = _group_of(lengths, quantization, masked)
    call = find_again(remembered, group, q, k, v, *lengths.different)
    return serve(call, tensors, lengths, softmax_scale, bool(options[1]))


def remember(
    tensors: tuple[Tensor, Tensor, Tensor],
    lengths: Lengths,
    quantization: Fp8Quantization,
    options: tuple[Any, ...],
    window: tuple[Any, Any],
    checked: PackedCall,
) -> None:
    """Let ``attend`` find a call that was made with these arguments, of plain tensors, if kernels do all of it and take
    the tensors as they are."""
    q, k, v = tensors
    compared = *tensors, *lengths.different
    if not q.is_cuda or any(type(x) is not Tensor or x.requires_grad for x in compared):
        return
    c = with_packed_blocks(quantization, (k.shape[2], v.shape[2]), checked.two_level, checked.mask)
    if c.rotate_v or checked.exact_lse or lengths.seqused_q is not None or is_empty(q, k, lengths):
        return
    if not 0 < min(lengths[4:]) <= max(lengths[4:]) <= MAX_SEQLEN or device_memory.is_capturing(q.device):
        return
    masked = with_mask(options, window, *lengths[4:])
    if masked is None:
        return
    key = q.shape, k.shape, *_group_of(lengths, quantization, masked)
    if not remembered.comes_again(key) or any(make_packed_addressable(x) is not x for x in tensors):
        return
    if packed_quantize.why_not_fused_packed(q, k, v, lengths, c) or not remembered.has_room(key, *compared):
        return
    problem = problem_of(q, (k.shape[2], v.shape[2]), lengths, c, checked)
    launch = find_packed_fp8(problem, q.device, checked.backend, 0)
    if isinstance(launch, PackedFp8Launcher):
        remembered.keep(
            key, _call_of(tensors, lengths, (quantization, c), launch, checked.mask.sides), *compared
        )


def _group_of(lengths: Lengths, quantization: Any, options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of calls that one would serve, but for the sizes of tensors. A quantization counts by its identity, as the call
    that is kept keeps it."""
    classes = classes_of_lengths(*lengths[4:])
    return id(quantization), classes, lengths.pattern, options, tuple(map(type, options))


class Sources(NamedTuple):
    """Where the quantizer finds q, k and v, and lengths."""

    tensors: tuple[Part, Part, Part]
    lengths: tuple[Any, Any, Any, Any]

    @classmethod
    def of(cls, tensors: tuple[Tensor, Tensor, Tensor], steps: PackedSteps) -> Sources:
        """Those of calls with tensors like these, as one batch."""
        q, k, v = (
            Part(number, 0, ((1, *x.shape), (x.shape[0] * x.stride(0), *x.stride()), x.dtype))
            for number, x in zip((Q, K, V), tensors, strict=True)
        )
        return cls((q, k, v), (Given(STARTS_Q), Given(STARTS_K), steps.unused, steps.used_k))


def _call_of(
    tensors: tuple[Tensor, Tensor, Tensor],
    lengths: Lengths,
    quantizations: tuple[Fp8Quantization, Fp8Quantization],
    launcher: PackedFp8Launcher,
    sides: Sides,
) -> ScriptedCall:
    """That of calls with tensors like these and a mask of these sides; of ``quantizations`` the first was given, the
    second has numbers."""
    (q, k, v), (given, c) = tensors, quantizations
    quantizer = packed_quantize.find(q.dtype, k.shape[2], v.shape[2], c, q.device)
    steps = PackedSteps.of(launcher, q, v.shape, lengths)
    batch, kv_heads, device = steps.batch, k.shape[1], q.device
    work: Pieces = packed_quantize.output_pieces(quantizer.config, q.shape, v.shape, batch)
    of_mean = Given(FIRST + len(work))
    mean: Any = kept_argument(no_vectors(batch + 1, kv_heads, device))
    sources, before = Sources.of(tensors, steps), list[Step]()
    if c.smooth_v:
        mean, finder = of_mean, value_mean.find_packed(v, batch + 1)
        before.append(Step(finder.kernel, (sources.tensors[2], mean, Given(STARTS_K), steps.used_k)))
    before.append(_quantizing(quantizer, sources, work, c, mean if c.smooth_v else None, device))
    codes = Given(FIRST), Given(FIRST + 1), Given(FIRST + 2)
    of_q, of_k, of_v = (_as_batch(work, number) for number in range(3, 6))
    ones = kept_argument(device_memory.unit_scales(batch + 1, kv_heads, device))
    blocks, filled = (quantizer.config.block_q, quantizer.config.block_k), (Given(OUT), Given(LSE))
    attention = steps.attention(codes, filled, (of_q, of_k, of_v, ones), mean, blocks, sides)
    if c.smooth_v:
        work = *work, packed_quantize.mean_piece(v.shape, batch)
    return steps.call([*before, steps.plan(), attention], work, q.dtype, kept=given)


def _quantizing(
    quantizer: PackedQuantizeLauncher,
    sources: Sources,
    work: Pieces,
    c: Fp8Quantization,
    mean: Given | None,
    device: Any,
) -> Step:
    """What makes ``work`` of the sources, less the mean, if there is one."""
    constants = tuple(map(kept_argument, quantizer.constants(c, device)))
    outputs = tuple(_as_batch(work, number) for number in range(len(work)))
    *_, nothing = constants
    given = sources.tensors, outputs, constants, nothing if mean is None else mean, sources.lengths
    return Step(quantizer.kernel, quantizer.arguments(*given))


def _as_batch(work: Pieces, number: int) -> Part:
    """A piece with a dimension of 1 in front."""
    piece = work[number]
    return Part(FIRST + number, 0, Piece((1, *piece.shape), piece.dtype).facts)
