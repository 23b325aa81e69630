"""What serves the backward pass of a problem, and why: one rule, without touching a tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hopper.backward.config import BackwardConfig, check_backward_size, select_backward_config
from hopper_attention.backends import HOPPER_CAPABILITY, Choice, Target, how_to_go_faster, why_not_hopper
from hopper_attention.checks import DTYPE_NAMES

SDPA_HAS_ONE = "torch's scaled_dot_product_attention has a fast one"
AMPERE_HAS_NONE = "backend='ampere' was asked for, which has no backward kernel yet"


class BackwardProblem(NamedTuple):
    """Sizes and options of a 16-bit problem whose gradients are wanted.

    ``q_shape`` (batch, seqlen_q, heads, head_dim), ``k_shape`` and ``v_shape`` (batch, seqlen_k, kv_heads, ...).
    ``deterministic`` asks for gradients of the same bits in every run.
    """

    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    dtype: torch.dtype
    causal: bool
    deterministic: bool = False


def choose_backward(problem: BackwardProblem, target: Target, requested: str | None) -> Choice:
    """The kernel where it runs and can do the problem, else the tiled reference.

    ``requested`` is the backend that the forward was asked for. "hopper" is no promise of a backward kernel: not
    every problem of the forward has one.
    """
    if requested == "reference":
        return Choice("reference", "asked for with backend='reference'")
    blocked = why_not_hopper(target) or ("" if requested != "ampere" else AMPERE_HAS_NONE)
    if blocked:
        is_installable = target.capability == HOPPER_CAPABILITY and requested != "ampere"
        faster = how_to_go_faster(target) if is_installable else SDPA_HAS_ONE
        return Choice("reference", blocked, faster if target.is_gpu else "")
    blocked = why_not_kernel(problem)
    if blocked:
        return Choice("reference", blocked, SDPA_HAS_ONE)
    return Choice("hopper", f"{target.name} has compute capability 9.0 and the kernel takes these sizes")


def why_not_kernel(problem: BackwardProblem) -> str:
    """What about sizes and dtype keeps the backward kernel from doing a problem; empty if nothing does."""
    if problem.dtype not in DTYPE_NAMES:
        return f"the Hopper backward kernel takes float16 and bfloat16, not {problem.dtype}"
    try:
        select_config(problem)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return ""


def select_config(problem: BackwardProblem) -> BackwardConfig:
    """The config that serves a problem of 16 bits.

    Raises:
        ValueError: a head dimension is larger than the kernel takes.
        NotImplementedError: the problem has more batches, heads or rows than the kernel can count.
    """
    p = problem
    config = select_backward_config(
        DTYPE_NAMES[p.dtype], p.q_shape[3], p.v_shape[3], p.causal, p.deterministic
    )
    check_backward_size(p.q_shape[0], p.q_shape[2], p.q_shape[1], p.k_shape[1])
    return config
