"""What the kernels can do with FP8, and which backend serves an FP8 problem: one rule, without touching a tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_kernels.problem import MAX_HEAD_DIM
from hopper.config import check_problem_size
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.forward.fp8.tilings import select_fp8_forward_config, transposes_v
from hopper_attention import checks
from hopper_attention.backends import HOPPER_CAPABILITY, Choice, Target, why_not_ampere, why_not_hopper
from hopper_attention.checks import DTYPE_NAMES

HEAD_DIM_STEP = 16
"""TMA counts in 16 bytes, which a row of the output and of the inputs must fill."""

NO_SPEED_UP = "the kernels without WGMMA take FP8 dequantized to 16 bits, which gives no speed-up"

ONE_BLOCK = 0
"""``block`` of a tensor in which everything of a head shares a scale."""


class Fp8Problem(NamedTuple):
    """Sizes, blocks and options of a problem with e4m3 inputs.

    ``q_shape`` (batch, seqlen_q, heads, head_dim), ``k_shape`` and ``v_shape`` (batch, seqlen_k, kv_heads, ...). The
    blocks are rows that share a scale, or ONE_BLOCK. ``v_rows`` says that V has a row of head_dim_v elements
    for each key, as FP8 tensors with descales have. ``two_level`` asks the FP8 kernel for two-level accumulation of
    P V; everything else adds in float32 as it is. ``half_scores`` says that scores fit float16, before they are scaled.
    """

    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    block_q: int
    block_k: int
    block_v: int
    out_dtype: torch.dtype
    causal: bool
    v_rows: bool = False
    two_level: bool = False
    half_scores: bool = False


def block_of(rows: int, seqlen: int) -> int:
    """``rows`` a scale as ``Fp8Problem`` has it."""
    return rows if rows < seqlen else ONE_BLOCK


def choose_fp8_backend(problem: Fp8Problem, target: Target, requested: str | None) -> Choice:
    """The FP8 kernel where it runs and can do the problem; on a GPU without WGMMA, 16 bits; else the emulation.

    Raises:
        ValueError: a kernel is asked for and cannot run.
    """
    if requested == "reference":
        return Choice("reference", "asked for with backend='reference'")
    blocked = {
        "hopper": why_not_hopper(target) or why_not_kernel(problem),
        "ampere": why_not_ampere(target) or why_not_dequantized(problem),
    }
    if requested is not None and blocked[requested]:
        allowed = "".join(f"{name!r}, " for name, reason in blocked.items() if not reason)
        raise ValueError(
            f"backend is {requested!r}, but {blocked[requested]}; allowed here: {allowed}'reference' or None"
        )
    if requested != "ampere" and not blocked["hopper"]:
        return Choice("hopper", f"{target.name} has compute capability 9.0 and q has dtype float8_e4m3fn")
    has_work = 0 not in (*problem.q_shape, *problem.k_shape)
    own = "hopper" if target.capability == HOPPER_CAPABILITY else "ampere"
    if requested == "ampere" or not blocked[own]:
        return _dequantized(target, requested, has_work)
    return Choice("reference", blocked[own], _how_to_leave_the_emulation(target, blocked, has_work))


def _dequantized(target: Target, requested: str | None, has_work: bool) -> Choice:
    """The 16-bit kernel, with advice where nobody asked for it."""
    major, minor = target.capability
    reason = f"{target.name} has compute capability {major}.{minor}; {NO_SPEED_UP}"
    if requested:
        return Choice("ampere", f"asked for with backend={requested!r}; {reason}")
    return Choice("ampere", reason, "16-bit inputs do not need the detour" if has_work else "")


def _how_to_leave_the_emulation(target: Target, blocked: dict[str, str], has_work: bool) -> str:
    if not target.is_gpu or not has_work:
        return ""
    other = "" if blocked["ampere"] else "backend='ampere', which dequantizes, or "
    return f"{other}flash_attn_func on bfloat16 may be faster"


def why_not_dequantized(problem: Fp8Problem) -> str:
    """What about a problem keeps a 16-bit kernel from doing it once it is dequantized; empty if nothing does."""
    p, step = problem, checks.HEAD_DIM_STEP
    head_dim, head_dim_v = p.q_shape[3], p.v_shape[3]
    if p.out_dtype not in DTYPE_NAMES:
        return f"the kernel writes float16 or bfloat16, not {p.out_dtype}"
    if head_dim % step or head_dim_v % step or max(head_dim, head_dim_v) > MAX_HEAD_DIM:
        return f"head_dim {head_dim} and head_dim_v {head_dim_v} must be multiples of {step} up to {MAX_HEAD_DIM}"
    return ""


def why_not_kernel(problem: Fp8Problem) -> str:
    """What about a problem keeps the FP8 kernel from doing it; empty if nothing does."""
    p = problem
    head_dim, head_dim_v = p.q_shape[3], p.v_shape[3]
    if p.out_dtype not in DTYPE_NAMES:
        return f"the kernel writes float16 or bfloat16, not {p.out_dtype}"
    if head_dim % HEAD_DIM_STEP or head_dim_v % HEAD_DIM_STEP:
        return f"head_dim {head_dim} and head_dim_v {head_dim_v} must be multiples of {HEAD_DIM_STEP}"
    if 0 in (*p.q_shape, *p.k_shape):
        return "the problem is empty"
    if p.block_v != p.block_k:
        return f"k has blocks of {p.block_k} rows and v of {p.block_v}, which must be the same"
    try:
        select_config(p)
    except ValueError as error:
        return str(error)
    return ""


def select_config(problem: Fp8Problem) -> Fp8ForwardConfig:
    """The config that serves a problem which passes ``why_not_kernel``.

    Its ``v_rows`` says whether the kernel transposes V. It does where V comes in rows, a head has one scale, and so few
    queries attend to it that this is faster. Elsewhere PyTorch transposes V in rows first.

    Raises:
        NotImplementedError: the problem has more tiles than the kernel can count.
    """
    p = problem
    seqlen_k = p.k_shape[1]
    queries = p.q_shape[1] * (p.q_shape[2] // max(p.k_shape[2], 1))
    transposes = p.v_rows and p.block_k == ONE_BLOCK and transposes_v(p.q_shape[3], p.v_shape[3], queries)
    dtype, options = DTYPE_NAMES[p.out_dtype], (p.block_k, transposes, p.two_level, p.half_scores)
    config = select_fp8_forward_config(p.q_shape[3], p.v_shape[3], p.causal, dtype, seqlen_k, *options)
    check_problem_size(config, p.q_shape[0], p.q_shape[2], p.q_shape[1], seqlen_k)
    return config
