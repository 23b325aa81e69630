"""The peers of the backward benchmark, as rows of a registry.

A peer's ``prepare`` runs its forward, and what is timed is ``torch.autograd.grad`` of the output: the kernels of the
backward pass with whatever that peer launches around them, and no forward. The timing keeps host time out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from hopper_attention import flash_attn_func
from hopper_attention.backends import KERNELS, target_of
from hopper_attention.backward_rules import BackwardProblem, choose_backward, select_config
from hopper_attention.experiments.bench import peers as bench_peers
from hopper_attention.experiments.bench.gradients import draw_output_gradient
from hopper_attention.experiments.bench.peers import Inputs, Limits, Peer, Prepared, Setting
from hopper_attention.experiments.bench.results import AMPERE, OURS, OURS_DETERMINISTIC
from hopper_attention.experiments.bench.spec import Problem
from hopper_attention.masks import FULL_SIDES
from hopper_attention.visit_pieces import as_served

GRADIENT_LIMITS = {
    "float16": Limits(1.3e-3, 5e-2),
    "bfloat16": Limits(1e-2, 1.5e-1),
    "float32": Limits(1e-5, 1e-3),
}
"""By dtype. The first is about 1.5 times what the formula in plain PyTorch shows on N(0, 1) inputs. The second finds a
single wrong row; it is wide because dq nearly vanishes in rows that see few keys, and the rounding of out does not."""


def gradient_limits(dtype: str) -> Limits:
    return GRADIENT_LIMITS[dtype]


def leaves_of(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same memory, as what gradients are taken of."""
    return q.detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_()


def gradients_of(out: Tensor, leaves: Sequence[Tensor], dout: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """A launch of the backward pass from out to the leaves, as often as wanted."""
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


# ours


def describe_ours(
    problem: Problem,
    inputs: Inputs,
    setting: Setting,
    backend: str | None = None,
    deterministic: bool = False,
) -> str:
    """What will run where ``backend`` is asked for.

    Raises:
        NotImplementedError: on a GPU it is not a kernel, and nothing else is to be measured as ours.
    """
    if not setting.is_cuda:
        return "reference"
    shapes = tuple(inputs.q.shape), tuple(inputs.k.shape), tuple(inputs.v.shape)
    asked = BackwardProblem(*shapes, inputs.q.dtype, problem.causal, deterministic)
    target = target_of(inputs.q.device)
    choice = choose_backward(asked, target, backend)
    if choice.backend not in KERNELS:
        raise NotImplementedError(choice.reason)
    if choice.backend == "hopper":
        asked = as_served(asked, FULL_SIDES)
    return select_config(asked, choice.backend, target.capability).name


def prepare_ours(
    problem: Problem,
    inputs: Inputs,
    setting: Setting,
    backend: str | None = None,
    deterministic: bool = False,
) -> Prepared:
    """The public function, differentiated."""
    note = describe_ours(problem, inputs, setting, backend, deterministic)
    q, k, v = leaves = leaves_of(inputs.q, inputs.k, inputs.v)
    out = flash_attn_func(q, k, v, causal=problem.causal, deterministic=deterministic, backend=backend)
    return Prepared(gradients_of(out, leaves, draw_output_gradient(problem, setting.device)), note)


# FlashAttention-3: the library that the forward is compared with


def why_no_fa3(setting: Setting) -> str:
    return "its library (sglang-kernel) has the forward alone"


def prepare_fa3(problem: Problem, inputs: Inputs, setting: Setting) -> Prepared:
    raise NotImplementedError(why_no_fa3(setting))


# FlashAttention-4, in the CuTe DSL


def prepare_fa4(problem: Problem, inputs: Inputs, setting: Setting) -> Prepared:
    from flash_attn.cute import flash_attn_func

    leaves = leaves_of(inputs.q, inputs.k, inputs.v)
    result = flash_attn_func(*leaves, causal=problem.causal)
    out = result[0] if isinstance(result, tuple) else result
    return Prepared(gradients_of(out, leaves, draw_output_gradient(problem, setting.device)))


# torch's scaled_dot_product_attention: cuDNN and FlashAttention-2


def heads_second(gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """(batch, heads, seqlen, head_dim) as (batch, seqlen, heads, head_dim), or back."""
    return tuple(gradient.transpose(1, 2) for gradient in gradients)


def prepare_sdpa(problem: Problem, inputs: Inputs, setting: Setting, backend: SDPBackend) -> Prepared:
    """SDPA takes (batch, heads, seqlen, head_dim): storage in that order is made here, no launch copies."""
    if problem.causal and problem.seqlen_q != problem.seqlen_k:
        raise NotImplementedError("SDPA's is_causal is aligned top-left; seqlen_q must equal seqlen_k")
    dout = draw_output_gradient(problem, setting.device)
    q, k, v, dout = (x.contiguous() for x in heads_second((inputs.q, inputs.k, inputs.v, dout)))
    leaves, gqa = leaves_of(q, k, v), problem.heads != problem.heads_kv
    # The backward pass is that of the forward which ran.
    with sdpa_kernel(backend):
        attention = partial(functional.scaled_dot_product_attention, is_causal=problem.causal, enable_gqa=gqa)
        out = attention(*leaves)
    return Prepared(gradients_of(out, leaves, dout), read=heads_second)


# FlexAttention


def prepare_flex(problem: Problem, inputs: Inputs, setting: Setting) -> Prepared:
    """Compiled for the problem, storage as for SDPA. What the backward reads is kept, since it runs many times."""
    dout = draw_output_gradient(problem, setting.device)
    q, k, v, dout = (x.contiguous() for x in heads_second((inputs.q, inputs.k, inputs.v, dout)))
    leaves, gqa = leaves_of(q, k, v), problem.heads != problem.heads_kv
    attention = bench_peers.compile_flex(problem)
    mask = bench_peers.flex_mask(problem, setting.device)
    with functorch_config.patch(donated_buffer=False):
        out = attention(*leaves, block_mask=mask, enable_gqa=gqa)
    return Prepared(gradients_of(out, leaves, dout), read=heads_second)


# the formula in plain PyTorch


def prepare_torch(problem: Problem, inputs: Inputs, setting: Setting) -> Prepared:
    """softmax(q k^T scale) v with the scores in memory, differentiated by autograd."""
    leaves = leaves_of(inputs.q, inputs.k, inputs.v)
    out = bench_peers.prepare_torch(problem, Inputs(*leaves), setting).launch()
    return Prepared(gradients_of(out, leaves, draw_output_gradient(problem, setting.device)))


BACKWARD_PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(
            OURS, "hopper-attention", bench_peers.always_available, bench_peers.our_version, prepare_ours,
            limits=gradient_limits,
        ),
        Peer(
            OURS_DETERMINISTIC, "hopper-attention, deterministic", bench_peers.always_available,
            bench_peers.our_version, partial(prepare_ours, deterministic=True), limits=gradient_limits,
        ),
        Peer(
            "fa3", "FlashAttention-3 (CUDA C++)", why_no_fa3, bench_peers.fa3_version, prepare_fa3,
            limits=gradient_limits,
        ),
        Peer(
            "fa4", "FlashAttention-4 (CuTe DSL)", bench_peers.why_no_fa4, bench_peers.fa4_version, prepare_fa4,
            limits=gradient_limits,
        ),
        Peer(
            "cudnn", "cuDNN (torch SDPA)", bench_peers.needs_gpu, bench_peers.cudnn_version,
            partial(prepare_sdpa, backend=SDPBackend.CUDNN_ATTENTION), limits=gradient_limits,
        ),
        Peer(
            "fa2", "FlashAttention-2 (torch SDPA)", bench_peers.needs_gpu, bench_peers.torch_version,
            partial(prepare_sdpa, backend=SDPBackend.FLASH_ATTENTION), limits=gradient_limits,
        ),
        Peer(
            "flex", "FlexAttention (torch, compiled)", bench_peers.why_no_flex, bench_peers.torch_version, prepare_flex,
            limits=gradient_limits,
        ),
        Peer(
            "torch", "plain PyTorch", bench_peers.always_available, bench_peers.torch_version, prepare_torch,
            limits=gradient_limits,
        ),
        Peer(
            AMPERE, "hopper-attention without WGMMA", bench_peers.needs_gpu, bench_peers.our_version,
            partial(prepare_ours, backend="ampere"), limits=gradient_limits,
        ),
    )
}  # fmt: skip

DEFAULT_BACKWARD_PEERS = (OURS, OURS_DETERMINISTIC, "fa3", "fa4", "cudnn", "fa2")
