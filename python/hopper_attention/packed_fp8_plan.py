"""What ``flash_attn_fp8_func`` would run on packed sequences: sizes and options alone, without a tensor's data."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from cute_kernels.plan.config import check_packed_size
from hopper.config import ForwardConfig
from hopper.forward.fp8.tilings import scores_fit_half
from hopper.quantize.config import QuantizeConfig, largest_codes
from hopper_attention import forward_rules, fp8_rules
from hopper_attention.backends import Choice, Target
from hopper_attention.checks import FP8_DTYPE
from hopper_attention.dispatch import Plan, describe_window
from hopper_attention.forward_rules import Config, ReferenceConfig
from hopper_attention.launch.packed_quantize import packed_quantize_config, why_no_packed_kernel
from hopper_attention.lengths import Lengths
from hopper_attention.masks import MaskSpec
from hopper_attention.packed_quantization import check_packed_sources, with_packed_blocks
from hopper_attention.problem import ONE_BLOCK, AttentionProblem, Fp8AttentionProblem
from hopper_attention.quantized import Fp8Quantization


class PackedCall(NamedTuple):
    """A call's options: two-level accumulation, the mask, the backend that was asked for, whether the LSE is to be
    exact, and whether nobody gets it."""

    two_level: bool
    mask: MaskSpec
    backend: str | None
    exact_lse: bool = False
    without_lse: bool = False


class PackedPlan(NamedTuple):
    """The quantization with ``block_k`` as a number, why there is no quantizing kernel, or its config, and the plan of
    attention."""

    quantization: Fp8Quantization
    why_no_kernel: str
    quantizer: QuantizeConfig | None
    attention: Plan


def plan_packed(
    tensors: tuple[Tensor, Tensor, Tensor],
    lengths: Lengths,
    quantization: Fp8Quantization,
    call: PackedCall,
    target: Target,
) -> PackedPlan:
    """What would run on q, k and v.

    Raises:
        ValueError, TypeError, NotImplementedError: as the call itself would.
    """
    q, k, v = tensors
    check_packed_sources(q, k, v, lengths, quantization)
    head_dims = k.shape[2], v.shape[2]
    c = with_packed_blocks(quantization, head_dims, call.two_level, call.mask)
    problem = problem_of(q, head_dims, lengths, c, call)
    choice = fp8_rules.choose_for(problem, target, call.backend)
    config = packed_config_of(problem, choice, target)
    if isinstance(config, ForwardConfig):
        totals, batch = (q.shape[0], k.shape[0]), lengths.cu_seqlens_q.shape[0] - 1
        check_packed_size("FP8 kernel", q.shape[1], batch, totals, config.tile_m)
    copies = (f"q, k and v are dequantized to {q.dtype} by PyTorch",) if choice.backend == "ampere" else ()
    notes = ((choice.advice,) if choice.advice else ()) + describe_window(call.mask)
    notes += fp8_rules.describe_lse(config)
    attention = Plan(choice.backend, config, choice.reason, copies, notes)
    if call.backend == "reference":
        return PackedPlan(c, "backend is 'reference'", None, attention)
    reason = why_no_packed_kernel(q.dtype, *head_dims, c, target)
    kernel = None if reason else packed_quantize_config(q.dtype, *head_dims, c)
    return PackedPlan(c, reason, kernel, attention)


def problem_of(
    q: Tensor, head_dims: tuple[int, int], lengths: Lengths, c: Fp8Quantization, call: PackedCall
) -> Fp8AttentionProblem:
    """That of attention to what a quantizer makes of q and the rest; ``block_k`` of ``c`` is a number, and
    ``head_dims`` are those of K and V."""
    has_blocks = c.granularity == "block"
    block_k = c.keys_per_block(*head_dims, 0) if has_blocks else ONE_BLOCK
    largest = largest_codes(head_dims[0], c.scales_rows)
    mask, half_scores = call.mask, scores_fit_half(*largest, head_dims[0])
    known = fp8_rules.KeysOfPacked.of((q.shape[0], q.shape[1]), lengths[4:], mask, call.without_lse)
    return Fp8AttentionProblem(
        FP8_DTYPE,
        q.dtype,
        *head_dims,
        mask.causal,
        known.longest_k,
        has_window=mask.has_window,
        has_chunk=mask.attention_chunk > 0,
        is_packed=True,
        block_k=block_k,
        block_v=block_k,
        two_level=call.two_level,
        half_scores=half_scores,
        exact_lse=call.exact_lse,
        without_lse=call.without_lse,
        few_tiles=known.few_tiles,
    )


def packed_config_of(problem: Fp8AttentionProblem, choice: Choice, target: Target) -> Config:
    """The config of attention on packed e4m3 tensors; without WGMMA that of the 16-bit kernel on dequantized ones."""
    if choice.backend == "hopper":
        return fp8_rules.select_for(problem)
    if choice.backend == "reference":
        return ReferenceConfig(fp8=True)
    p = problem
    dequantized = AttentionProblem(
        p.out_dtype,
        p.out_dtype,
        p.head_dim,
        p.head_dim_v,
        p.causal,
        has_window=p.has_window,
        has_chunk=p.has_chunk,
        is_packed=True,
    )
    return forward_rules.select_for(dequantized, choice.backend, target.capability)
