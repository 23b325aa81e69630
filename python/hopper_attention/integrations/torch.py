"""``torch.nn.functional.scaled_dot_product_attention`` on the kernels of this package, without a change to a model.

:func:`activate` registers them beneath torch's FlashAttention, which torch then prefers to its other ways: forward,
backward, and under ``torch.compile``. What they do not serve runs on torch's own kernels, as before.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import lru_cache
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.nn import attention

from cute_kernels.problem import MAX_HEAD_DIM
from hopper_attention.backends import KERNELS, choose_backend, target_of
from hopper_attention.backward_rules import BackwardProblem
from hopper_attention.checks import HALF_DTYPES, HEAD_DIM_STEP, LARGEST_SCALE, SMALLEST_SCALE
from hopper_attention.launch.backward import find_choice
from hopper_attention.launch.forward import run_forward
from hopper_attention.launch.gradients import differentiate
from hopper_attention.masks import MaskSpec
from hopper_attention.scores import NO_SCORES

NAME = "hopper_attention"
"""That of the implementation in torch's registry, for ``torch.nn.attention.activate_flash_attention_impl``."""

FORWARD = "aten::_scaled_dot_product_flash_attention"
BACKWARD = "aten::_scaled_dot_product_flash_attention_backward"

NO_GET_KERNEL = (
    "torch.library.get_kernel, which this version of torch ({version}) does not have, is needed to give torch's own "
    "kernel what ours do not serve; use a newer torch, or call hopper_attention.flash_attn_func"
)


def why_not_kernel(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, scale: float | None = None
) -> str:
    """What keeps the kernels from a call of torch's FlashAttention; empty if nothing does.

    Args:
        q: (batch, heads, seqlen_q, head_dim); k and v (batch, kv_heads, seqlen_k, head_dim).
        dropout_p, is_causal, scale: as of ``scaled_dot_product_attention``, whose causal mask is aligned top-left and
            whose scale may be 0 or less, where the largest product is no longer the largest score.
    """
    (_, heads, seqlen_q, head_dim), (_, kv_heads, seqlen_k, _) = q.shape, k.shape
    if q.dtype not in HALF_DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"the dtypes are {q.dtype}, {k.dtype} and {v.dtype}"
    if dropout_p:
        return "there is dropout, whose mask is to be that of torch"
    if is_causal and seqlen_q != seqlen_k:
        return "a causal mask of more keys than queries is aligned top-left in torch"
    if scale is not None and not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        return f"the scale is {scale}"
    if head_dim % HEAD_DIM_STEP or not 0 < head_dim <= MAX_HEAD_DIM or v.shape[3] != head_dim:
        return f"the head dimensions are {head_dim} and {v.shape[3]}"
    if 0 in (*q.shape, *k.shape) or heads % kv_heads:
        return "there is no score"
    return _why_no_backend(q.device, q.dtype)


@lru_cache
def _why_no_backend(device: torch.device, dtype: torch.dtype) -> str:
    choice = choose_backend(target_of(device), dtype)
    return "" if choice.backend in KERNELS else choice.reason


class FlashKernels:
    """The implementations of torch's two operators, in front of those that were there.

    Attributes:
        forward_before, backward_before: torch's own, or None where it has none.
    """

    def __init__(self, dispatch_key: str) -> None:
        self.forward_before = _kernel_of(FORWARD, dispatch_key)
        self.backward_before = _kernel_of(BACKWARD, dispatch_key)

    def forward(
        self,
        keys: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        """``_scaled_dot_product_flash_attention``: out like query, lse (batch, heads, seqlen_q) and seven more,
        which say nothing without dropout and packed sequences."""
        if return_debug_mask or why_not_kernel(query, key, value, dropout_p, is_causal, scale):
            given = query, key, value, dropout_p, is_causal, return_debug_mask
            return _call_before(self.forward_before, keys, *given, scale=scale)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out, lse = run_forward(q, k, v, scale, is_causal, None, 0)
        state, offset = query.new_empty(2, dtype=torch.uint64), query.new_empty((), dtype=torch.uint64)
        sizes = None, None, query.shape[2], key.shape[2]
        return _like(query, out.transpose(1, 2)), lse, *sizes, state, offset, query.new_empty(0)

    def backward(
        self,
        keys: Any,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: Tensor,
        philox_offset: Tensor,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        """``_scaled_dot_product_flash_attention_backward``: gradients like query, key and value.

        LSE and output mean the same to torch's kernel, so either backward pass fits either forward pass.
        """
        if why_not_kernel(query, key, value, dropout_p, is_causal, scale) or not has_backward_kernel(
            query, key, value, is_causal
        ):
            tensors = grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k
            options = max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset
            return _call_before(self.backward_before, keys, *tensors, *options, scale=scale)
        dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
        factor = query.shape[3] ** -0.5 if scale is None else scale
        mask = MaskSpec(is_causal)
        grads = differentiate(dout, None, q, k, v, o, logsumexp, factor, mask, NO_SCORES, None, False)
        inputs = query, key, value
        return tuple(_like(x, grad.transpose(1, 2)) for x, grad in zip(inputs, grads, strict=True))


def has_backward_kernel(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> bool:
    """Whether a kernel gives the gradients of tensors (batch, heads, seqlen, head_dim)."""
    q_shape, k_shape, v_shape = (x.transpose(1, 2).shape for x in (q, k, v))
    in_order = torch.are_deterministic_algorithms_enabled()
    problem = BackwardProblem(q_shape, k_shape, v_shape, q.dtype, is_causal, in_order)
    return find_choice(problem, q.device, None).backend in KERNELS


def _kernel_of(operator: str, dispatch_key: str) -> Any:
    """torch's kernel, or None where it was built without."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operator, dispatch_key):
        return None
    return torch.library.get_kernel(operator, dispatch_key)


def _call_before(kernel: Any, keys: Any, *given: Any, scale: float | None) -> tuple[Any, ...]:
    if kernel is None:
        raise NotImplementedError(
            "torch was built without FlashAttention, and the kernels of hopper_attention do not serve this call; use "
            "torch.nn.attention.sdpa_kernel to leave FlashAttention out"
        )
    return tuple(kernel.call_boxed(keys, *given, scale=scale))


def _like(like: Tensor, x: Tensor) -> Tensor:
    """x in the memory layout of ``empty_like(like)``, which is what torch expects under ``torch.compile``."""
    wanted = torch.empty_like(like, device="meta").stride()
    return x if x.stride() == wanted else torch.empty_like(like).copy_(x)


class Activation:
    """The kernels at work, until ``remove``; as a context manager, until its end."""

    def __init__(self, dispatch_key: str = "CUDA") -> None:
        kernels, self._library = FlashKernels(dispatch_key), Library("aten", "IMPL")
        options: dict[str, Any] = {"with_keyset": True, "allow_override": True}
        self._library.impl(FORWARD.removeprefix("aten::"), kernels.forward, dispatch_key, **options)
        self._library.impl(BACKWARD.removeprefix("aten::"), kernels.backward, dispatch_key, **options)
        self._before = ExitStack()
        self._before.enter_context(_prefer_flash())

    def remove(self) -> None:
        """Give everything back to torch. To do so again changes nothing."""
        self._library._destroy()
        self._before.close()

    def __enter__(self) -> Activation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        deactivate()


def _prefer_flash() -> Any:
    """A context in which torch tries FlashAttention first, of the ways that are enabled."""
    ways = {
        attention.SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled(),
        attention.SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled(),
        attention.SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled(),
        attention.SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled(),
        # That of devices of other makers, which has no switch in public.
        attention.SDPBackend.OVERRIDEABLE: True,
    }
    return attention.sdpa_kernel([way for way, enabled in ways.items() if enabled], set_priority=True)


_ACTIVE: list[Activation] = []
"""What ``activate`` made, where torch has no registry to hold it."""


def activate() -> Activation:
    """Have ``scaled_dot_product_attention`` on a GPU run on this package's kernels where they serve.

    They serve float16 and bfloat16 on the GPUs that they are for, of one head_dim up to 256, with GQA, with no mask or
    ``is_causal`` of as many queries as keys, a scale from 1e-37 to 1e5, and without dropout. Calls with a mask or
    dropout, and all other devices, run as they did. Active twice is active once.

    Returns:
        what undoes it at the end of a ``with`` statement; outside of one, :func:`deactivate` does.

    Raises:
        NotImplementedError: torch is too old to have its own kernel called for the rest.
    """
    if not hasattr(torch.library, "get_kernel"):
        raise NotImplementedError(NO_GET_KERNEL.format(version=torch.__version__))
    if not is_active():
        if _HAS_REGISTRY:
            attention.activate_flash_attention_impl(NAME)
        else:
            _register()
    return _ACTIVE[-1]


def deactivate() -> None:
    """Give ``scaled_dot_product_attention`` back to torch. Where nothing was active, this does nothing."""
    if not is_active():
        return
    if _HAS_REGISTRY and attention.current_flash_attention_impl() == NAME:
        attention.restore_flash_attention_impl()
    else:
        _ACTIVE[-1].remove()
    _ACTIVE.clear()


def is_active() -> bool:
    """Whether the kernels are active, by :func:`activate` or by torch's own function."""
    if _HAS_REGISTRY:
        return attention.current_flash_attention_impl() == NAME
    return bool(_ACTIVE)


def _register() -> Activation:
    """What torch's registry calls."""
    _ACTIVE[:] = [Activation()]
    return _ACTIVE[-1]


_HAS_REGISTRY = hasattr(attention, "register_flash_attention_impl")
if _HAS_REGISTRY:
    attention.register_flash_attention_impl(NAME, register_fn=_register)
