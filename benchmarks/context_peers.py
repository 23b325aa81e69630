"""Peers of context parallelism: torch's own ``context_parallel``, and ring-flash-attn over the fastest kernels here.

ring-flash-attn (github.com/zhuzilin/ring-flash-attention) is measured as its release is, messages, merges and all. The
attention of its steps is that of the package ``flash-attn``, FlashAttention-2, which few machines have built. In its
place stands a module with the same two functions over other kernels. As published it runs FlashAttention-2 both ways,
here that of PyTorch. The strongest setting of this peer has FlashAttention-3's forward and cuDNN's backward, which on
Hopper are about twice as fast. FlashAttention-4's backward is not used.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from hopper_attention.experiments.bench.peers import (
    FA3_NEUTRAL,
    Setting,
    positional_arguments,
    why_no_fa3,
)

PACKAGE = "ring_flash_attn"
ZIGZAG = f"{PACKAGE}.zigzag_{PACKAGE}"
FLASH, INTERFACE = "flash_attn", "flash_attn.flash_attn_interface"
ROTATIONS = "allgather", "alltoall"

Run = Callable[[], Any]
Gradients = tuple[Tensor, Tensor, Tensor]


class Step(NamedTuple):
    """What the attention of a step does beside its tensors, all (batch, rows, heads, head_dim)."""

    scale: float
    causal: bool


class Kernels(NamedTuple):
    """The attention of a step.

    Attributes:
        name: of the kernels.
        forward: out and lse (batch, heads, rows), of q, k and v.
        backward: dq, dk and dv, of dout, q, k, v, and the out and lse of all keys.
    """

    name: str
    forward: Callable[[Step, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    backward: Callable[[Step, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Gradients]


class Peer(NamedTuple):
    """A way of others.

    Attributes:
        name: of the row.
        prepare: with q, k, v and dout of the whole, gives a forward and a backward pass of this rank's rows.
    """

    name: str
    prepare: Callable[[DeviceMesh, list[Tensor], list[Tensor]], Any]


@lru_cache(maxsize=1)
def _fa3_operator() -> tuple[Any, list[Any], dict[str, int]]:
    """FlashAttention-3's operator, what it takes where nothing is asked for, and the place of each argument."""
    operator = torch.ops.sgl_kernel.fwd.default
    names = [argument.name for argument in operator._schema.arguments]
    changing = ("q", "k", "v", "is_causal", "softmax_scale")
    given = {name: value for name, value in FA3_NEUTRAL.items() if name in names} | dict.fromkeys(changing)
    return (
        operator,
        positional_arguments(operator._schema, given),
        {name: names.index(name) for name in changing},
    )


def _fa3_forward(step: Step, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    operator, arguments, places = _fa3_operator()
    arguments = list(arguments)
    values = {"q": q, "k": k, "v": v, "is_causal": step.causal, "softmax_scale": step.scale}
    for name, value in values.items():
        arguments[places[name]] = value
    out, lse, *_ = operator(*arguments)
    return out, lse


def _fa2_forward(step: Step, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    lengths = None, None, q.shape[1], k.shape[1]
    options = 0.0, step.causal, False
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *lengths, *options, scale=step.scale)
    return out, lse


def _fa2_backward(step: Step, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *merged: Tensor) -> Gradients:
    lengths = None, None, q.shape[1], k.shape[1]
    # Without dropout nothing is drawn.
    drawn = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    options = 0.0, step.causal, *drawn
    tensors = dout, q, k, v, *merged
    return torch.ops.aten._flash_attention_backward(*tensors, *lengths, *options, scale=step.scale)


def _cudnn_backward(step: Step, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *merged: Tensor) -> Gradients:
    out, lse = merged
    heads_first = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    drawn = tuple(torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
    # Neither a bias nor packed sequences.
    options = *drawn, None, None, None, q.shape[1], k.shape[1], 0.0, step.causal
    found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *heads_first, lse.unsqueeze(-1), *options, scale=step.scale
    )
    dq, dk, dv = (x.transpose(1, 2) for x in found)
    return dq, dk, dv


def _plain_scores(step: Step, q: Tensor, k: Tensor) -> Tensor:
    """float32 (batch, heads, rows, keys)."""
    scores = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) * step.scale
    if step.causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def _plain_forward(step: Step, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = _plain_scores(step, q, k)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.float())
    return out.to(q.dtype), scores.logsumexp(-1)


def _plain_backward(step: Step, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *merged: Tensor) -> Gradients:
    out, lse = merged
    group, dout = q.shape[2] // k.shape[2], dout.float()
    keys, values = (x.repeat_interleave(group, 2).float() for x in (k, v))
    p = torch.exp(_plain_scores(step, q, keys) - lse.unsqueeze(-1))
    delta = (dout * out.float()).sum(-1).mT.unsqueeze(-1)
    ds = p * (torch.einsum("bihd,bjhd->bhij", dout, values) - delta) * step.scale
    dq = torch.einsum("bhij,bjhd->bihd", ds, keys)
    dk = torch.einsum("bhij,bihd->bjhd", ds, q.float())
    dv = torch.einsum("bhij,bihd->bjhd", p, dout)
    dk, dv = (x.unflatten(2, (-1, group)).sum(3) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


AS_PUBLISHED = Kernels("as published: FlashAttention-2 both ways", _fa2_forward, _fa2_backward)
PLAIN = Kernels("plain PyTorch", _plain_forward, _plain_backward)


def kernels_there() -> tuple[Kernels, ...]:
    """What a step of ring-flash-attn can be made of on this machine, the fastest first, as it is published last."""
    if not torch.cuda.is_available():
        return (PLAIN,)
    fa3 = not why_no_fa3(Setting("cuda", os.environ.get("FA3_LIBRARY", "")))
    forward, name = (_fa3_forward, "FlashAttention-3") if fa3 else (_fa2_forward, "FlashAttention-2")
    by_cudnn = Kernels(f"{name}, cuDNN backward", forward, _cudnn_backward)
    mixed = (Kernels(f"{name}, FlashAttention-2 backward", forward, _fa2_backward),) if fa3 else ()
    return by_cudnn, *mixed, AS_PUBLISHED


def flash_attn_of(kernels: Kernels) -> ModuleType:
    """What stands for ``flash_attn.flash_attn_interface``: two functions, whose names and defaults the package reads.

    Gradients are written where it asks for them, which takes a copy each."""

    def _flash_attn_forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        return_softmax: bool = False,
    ) -> tuple[Tensor, Tensor, None, None]:
        _refuse(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes)
        out, lse = kernels.forward(Step(softmax_scale, causal), q, k, v)
        return out, lse, None, None

    def _flash_attn_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        rng_state: Tensor | None = None,
    ) -> None:
        _refuse(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes)
        found = kernels.backward(Step(softmax_scale, causal), dout, q, k, v, out, softmax_lse.contiguous())
        for target, gradient in zip((dq, dk, dv), found, strict=True):
            target.copy_(gradient)

    module = ModuleType(INTERFACE)
    vars(module).update(_flash_attn_forward=_flash_attn_forward, _flash_attn_backward=_flash_attn_backward)
    return module


def _refuse(dropout_p: float, window: tuple[int, int], softcap: float, alibi_slopes: Tensor | None) -> None:
    if dropout_p or window != (-1, -1) or softcap or alibi_slopes is not None:
        raise NotImplementedError(
            "the stand-in of flash-attn has neither dropout, windows, softcap nor ALiBi"
        )


def why_no_ring_flash_attn() -> str:
    return "" if importlib.util.find_spec(PACKAGE) else f"{PACKAGE} is not installed"


def ring_flash_attn(kernels: Kernels) -> Callable[..., Tensor]:
    """Its ``zigzag_ring_flash_attn_func`` over these kernels.

    The file is imported anew for each, and nothing else of the package, whose other parts ask for Triton, Transformers
    and more of flash-attn.

    Raises:
        ImportError: it is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        raise ImportError(why_no_ring_flash_attn())
    shell, flash = ModuleType(PACKAGE), ModuleType(FLASH)
    shell.__path__, flash.__path__ = list(spec.submodule_search_locations or ()), []
    stands = {PACKAGE: shell, FLASH: flash, INTERFACE: flash_attn_of(kernels)}
    before = {name: x for name, x in sys.modules.items() if name.split(".")[0] in (PACKAGE, FLASH)}
    _forget()
    sys.modules.update(stands)
    try:
        found: Callable[..., Tensor] = importlib.import_module(ZIGZAG).zigzag_ring_flash_attn_func
    finally:
        _forget()
        sys.modules.update(before)
    return found


def _forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in (PACKAGE, FLASH)]:
        del sys.modules[name]


@contextmanager
def _runs_ring_flash_attn(kernels: Kernels, mesh: DeviceMesh, local: list[Tensor]) -> Iterator[Run]:
    # The group of all ranks is None to it, and it asks for the ranks of any other at each step.
    group = mesh.get_group(0) if mesh.size() != dist.get_world_size() else None
    attention = ring_flash_attn(kernels)
    leaves, dout = [x.detach().clone().requires_grad_() for x in local[:3]], local[3]

    def run() -> list[Tensor]:
        out = attention(*leaves, causal=True, group=group)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    yield run


@contextmanager
def _runs_torch(rotate: str, backend: str, mesh: DeviceMesh, whole: list[Tensor]) -> Iterator[Run]:
    """Forward and backward of torch's context_parallel, with the SDPA of a backend."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    set_rotate_method(rotate)
    group = whole[0].shape[2] // whole[1].shape[2]
    q, k, v, dout = (x.transpose(1, 2).contiguous() for x in whole)
    # Its ring knows no groups of heads; what it costs to make K and V of as many heads as Q is not timed.
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    with (
        context_parallel(mesh, buffers=[q, k, v, dout], buffer_seq_dims=[2] * 4),
        sdpa_kernel(getattr(SDPBackend, backend)),
    ):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]

        def run() -> list[Tensor]:
            out = functional.scaled_dot_product_attention(*leaves, is_causal=True)
            return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

        yield run


def torchs_own(backends: tuple[str, ...], rotations: tuple[str, ...] = ROTATIONS) -> list[Peer]:
    """PyTorch's ways."""

    def peer(rotate: str, backend: str) -> Peer:
        name = f"torch context_parallel, {rotate}, {backend}"
        return Peer(name, lambda mesh, whole, local: _runs_torch(rotate, backend, mesh, whole))

    return [peer(rotate, backend) for backend in backends for rotate in rotations]


def ring_flash_attns() -> list[Peer]:
    """ring-flash-attn over each of the kernels there are."""

    def peer(kernels: Kernels) -> Peer:
        name = f"ring-flash-attn, {kernels.name}"
        return Peer(name, lambda mesh, whole, local: _runs_ring_flash_attn(kernels, mesh, local))

    return [peer(kernels) for kernels in kernels_there()]
