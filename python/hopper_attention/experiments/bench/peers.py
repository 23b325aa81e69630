"""The peers of the forward benchmark, as rows of a registry.

A peer's ``prepare`` does everything that is not the kernel (layout, argument lists) and returns a launch that
runs only the kernel through that peer's own entry point. A new peer is one more row in ``PEERS``.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from hopper_attention.experiments.bench.machine import package_version
from hopper_attention.experiments.bench.results import AMPERE, MATMUL, OURS, PeerInfo
from hopper_attention.experiments.bench.spec import Problem
from hopper_attention.experiments.bench.timing import Launch

if TYPE_CHECKING:
    from hopper_attention.dispatch import Plan
    from hopper_attention.kvcache_plan import CachePlan


@dataclass(frozen=True)
class Inputs:
    """One set of q (batch, seqlen_q, heads, head_dim), k and v (batch, seqlen_k, heads_kv, ...)."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Setting:
    """Where peers run and where libraries lie. ``fa3_library`` empty: look in the installed packages."""

    device: str
    fa3_library: str = ""

    @property
    def is_cuda(self) -> bool:
        return torch.device(self.device).type == "cuda"


class Limits(NamedTuple):
    """Allowed relative error against float64: of a whole head (Frobenius), and of its worst row."""

    head: float
    row: float


ERROR_LIMITS = {
    "float16": Limits(8e-4, 4e-3),
    "bfloat16": Limits(6e-3, 3e-2),
    "float32": Limits(1e-5, 1e-4),
}
"""By dtype. The first is 1.4 times what the formula in plain PyTorch shows on N(0, 1) inputs; a single key too many or
too few among 16384 exceeds it. The second finds a single wrong row."""


def limits_of_dtype(dtype: str) -> Limits:
    return ERROR_LIMITS[dtype]


def as_drawn(inputs: Inputs) -> Inputs:
    return inputs


def as_returned(result: Any) -> Any:
    return result


@dataclass(frozen=True)
class Prepared:
    """A launch, and what it will run where the peer can tell.

    ``read`` turns what the launch returns into values, where those are scaled.
    """

    launch: Launch
    note: str = ""
    read: Callable[[Any], Any] = field(default=as_returned)


@dataclass(frozen=True)
class ListedPeer:
    """A row of a registry. ``why_unavailable`` returns an empty string where the peer can run, else the reason."""

    name: str
    title: str
    why_unavailable: Callable[[Setting], str]
    version: Callable[[Setting], str]


@dataclass(frozen=True)
class Peer(ListedPeer):
    """A row of the benchmarks of dense attention.

    ``context`` is entered once around a batch of launches, never inside one. ``rounding`` gives what is left of the
    inputs where the peer gets them rounded: that is what its output is checked on, within ``limits`` by dtype. One that
    is no attention has no output to check.
    """

    prepare: Callable[[Problem, Inputs, Setting], Prepared]
    context: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)
    rounding: Callable[[Inputs], Inputs] = field(default=as_drawn)
    limits: Callable[[str], Limits] = field(default=limits_of_dtype)
    is_attention: bool = True


def needs_gpu(setting: Setting) -> str:
    return "" if setting.is_cuda else f"needs a CUDA device, this run is on {setting.device}"


def always_available(setting: Setting) -> str:
    return ""


# ours


def our_version(setting: Setting) -> str:
    return f"hopper-attention {package_version('hopper-attention') or 'from the source tree'}"


def check_runs_kernel(setting: Setting, plan: Plan | CachePlan) -> None:
    """Raise NotImplementedError if a call of ours on a GPU is served by anything else, which is not to be measured."""
    from hopper_attention.backends import KERNELS

    if setting.is_cuda and plan.backend not in KERNELS:
        raise NotImplementedError(f"runs on the {plan.backend} backend here: {plan.reason}")


def prepare_ours(problem: Problem, inputs: Inputs, setting: Setting, backend: str | None = None) -> Prepared:
    """The public function. On a GPU it must run a kernel: a fallback would be measured as ours."""
    from hopper_attention import explain, flash_attn_func

    q, k, v, causal = inputs.q, inputs.k, inputs.v, problem.causal
    plan = explain(q, k, v, causal=causal, backend=backend)
    check_runs_kernel(setting, plan)
    note = getattr(plan.config, "name", plan.backend)
    return Prepared(lambda: flash_attn_func(q, k, v, causal=causal, backend=backend), note)


# FlashAttention-3, the CUDA C++ library

FA3_NEUTRAL: dict[str, Any] = {
    "window_size_left": -1,
    "window_size_right": -1,
    "attention_chunk": 0,
    "softcap": 0.0,
    "is_rotary_interleaved": False,
    "num_splits": 1,
    "sm_margin": 0,
}
"""Values that switch a feature of FA3's operator off, by argument name; optional arguments get None."""


def find_fa3_library(setting: Setting) -> str:
    """Path of the library with FA3's operator: the one given, or that of the installed sglang-kernel."""
    if setting.fa3_library:
        return setting.fa3_library
    spec = importlib.util.find_spec("sgl_kernel")
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = [str(path) for folder in folders for path in sorted(Path(folder).glob("flash_ops*.so"))]
    return found[0] if found else ""


def why_no_fa3(setting: Setting) -> str:
    if needs_gpu(setting):
        return needs_gpu(setting)
    library = find_fa3_library(setting)
    if not library:
        return "no library: install sglang-kernel, or give its flash_ops.abi3.so with --fa3-library"
    if not Path(library).is_file():
        return f"no library at {library}"
    try:
        torch.ops.load_library(library)
    except (OSError, RuntimeError) as error:
        return f"{library} does not load: {error}"
    return "" if hasattr(torch.ops.sgl_kernel, "fwd") else f"{library} registers no operator sgl_kernel::fwd"


def fa3_version(setting: Setting) -> str:
    if not setting.fa3_library:
        return f"sglang-kernel {package_version('sglang-kernel')}"
    # A bare library does not know its release; its size tells two of them apart.
    library = Path(setting.fa3_library)
    return f"{library.name} of {library.stat().st_size} bytes"


def positional_arguments(schema: Any, given: dict[str, Any]) -> list[Any]:
    """Values in an operator schema's own order, each placed by its name.

    Args:
        schema: a ``torch.FunctionSchema``, whose argument names are read at run time, so that a release with
            other arguments cannot be called with values in the wrong place.
        given: values by name. Arguments not given take their default, else None if they are optional.

    Raises:
        ValueError: a given name is not in the schema, or an argument has no value.
    """
    names = [argument.name for argument in schema.arguments]
    unknown = [name for name in given if name not in names]
    values, missing = [], []
    for argument in schema.arguments:
        if argument.name in given:
            values.append(given[argument.name])
        elif argument.has_default_value():
            values.append(argument.default_value)
        elif str(argument.type).startswith("Optional["):
            values.append(None)
        else:
            missing.append(f"{argument.type} {argument.name}")
    if unknown or missing:
        raise ValueError(
            f"operator {schema.name}: no such arguments {unknown}, no value for {missing}; it is {schema}"
        )
    return values


def prepare_fa3(problem: Problem, inputs: Inputs, setting: Setting, **more: Any) -> Prepared:
    """``more``: further arguments of the operator, by name."""
    return Prepared(call_of_fa3(inputs, problem.causal, **more))


def call_of_fa3(inputs: Inputs, causal: bool, **more: Any) -> Launch:
    """A launch of FA3's operator. ``more`` goes over the neutral values, and fills what is optional."""
    operator = torch.ops.sgl_kernel.fwd.default
    names = {argument.name for argument in operator._schema.arguments}
    given = {name: value for name, value in FA3_NEUTRAL.items() if name in names}
    given |= {"q": inputs.q, "k": inputs.k, "v": inputs.v, "is_causal": causal}
    given |= {"softmax_scale": 1 / math.sqrt(inputs.q.shape[-1]), **more}
    arguments = positional_arguments(operator._schema, given)
    return lambda: operator(*arguments)[0]


# FlashAttention-4, in the CuTe DSL


def why_no_fa4(setting: Setting) -> str:
    if needs_gpu(setting):
        return needs_gpu(setting)
    try:
        importlib.import_module("flash_attn.cute")
    except Exception as error:  # a version that does not fit the others can raise anything
        return f"not installed (flash-attn-4): {error}"
    return ""


def fa4_version(setting: Setting) -> str:
    return f"flash-attn-4 {package_version('flash-attn-4')}"


def prepare_fa4(problem: Problem, inputs: Inputs, setting: Setting) -> Prepared:
    from flash_attn.cute import flash_attn_func

    q, k, v, causal = inputs.q, inputs.k, inputs.v, problem.causal

    def launch() -> Tensor:
        result = flash_attn_func(q, k, v, causal=causal)
        return result[0] if isinstance(result, tuple) else result

    return Prepared(launch)


# torch's scaled_dot_product_attention: cuDNN and FlashAttention-2


def prepare_sdpa(problem: Problem, inputs: Inputs, setting: Setting) -> Prepared:
    """SDPA takes (batch, heads, seqlen, head_dim): storage in that order is made here, no launch copies."""
    if problem.causal and problem.seqlen_q != problem.seqlen_k:
        raise NotImplementedError("SDPA's is_causal is aligned top-left; seqlen_q must equal seqlen_k")
    q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (inputs.q, inputs.k, inputs.v))
    causal, gqa = problem.causal, problem.heads != problem.heads_kv
    attention = functional.scaled_dot_product_attention
    return Prepared(lambda: attention(q, k, v, is_causal=causal, enable_gqa=gqa).transpose(1, 2))


def cudnn_version(setting: Setting) -> str:
    return f"cuDNN {torch.backends.cudnn.version()}, torch {torch.__version__}"


def torch_version(setting: Setting) -> str:
    return f"torch {torch.__version__}"


# torch's FlexAttention, compiled


def why_no_flex(setting: Setting) -> str:
    if needs_gpu(setting):
        return needs_gpu(setting)
    found = importlib.util.find_spec("torch.nn.attention.flex_attention")
    return "" if found else f"torch {torch.__version__} has no FlexAttention"


@lru_cache(maxsize=1)
def compile_flex(problem: Hashable) -> Callable[..., Tensor]:
    """FlexAttention compiled for one problem or workload.

    Dynamo keeps a few compiled versions of a function and then runs it uncompiled; so each problem starts anew, and
    ``fullgraph`` makes an error of what would not compile.
    """
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


@lru_cache(maxsize=1)
def flex_mask(problem: Problem, device: str) -> Any:
    """The causal block mask, aligned bottom-right; None without one. One object for all input sets of a problem: a new
    one would be compiled for again."""
    from torch.nn.attention.flex_attention import create_block_mask

    if not problem.causal:
        return None
    offset = problem.seqlen_k - problem.seqlen_q

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query + offset >= key

    return create_block_mask(sees, None, None, problem.seqlen_q, problem.seqlen_k, device=device)


def prepare_flex(problem: Problem, inputs: Inputs, setting: Setting) -> Prepared:
    """Storage is (batch, heads, seqlen, head_dim), as it asks for."""
    q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (inputs.q, inputs.k, inputs.v))
    attention, mask = compile_flex(problem), flex_mask(problem, setting.device)
    gqa = problem.heads != problem.heads_kv
    return Prepared(lambda: attention(q, k, v, block_mask=mask, enable_gqa=gqa).transpose(1, 2))


# the formula in plain PyTorch


def prepare_torch(problem: Problem, inputs: Inputs, setting: Setting) -> Prepared:
    """softmax(q k^T scale) v with the scores in memory, heads of q grouped over those of k and v."""
    p = problem
    group = p.heads // p.heads_kv
    q = inputs.q.transpose(1, 2).reshape(p.batch, p.heads_kv, group * p.seqlen_q, p.head_dim)
    k, v = inputs.k.transpose(1, 2).contiguous(), inputs.v.transpose(1, 2).contiguous()
    hidden = torch.ones(p.seqlen_q, p.seqlen_k, dtype=torch.bool, device=setting.device)
    hidden = hidden.triu(1 + p.seqlen_k - p.seqlen_q).repeat(group, 1)
    scale = 1 / math.sqrt(p.head_dim)

    def launch() -> Tensor:
        scores = q @ k.mT * scale
        if p.causal:
            scores.masked_fill_(hidden, -math.inf)
        probabilities = torch.softmax(scores, -1)
        if p.causal and p.seqlen_q > p.seqlen_k:
            probabilities.nan_to_num_()  # rows that see no key
        out = probabilities @ v
        return out.view(p.batch, p.heads, p.seqlen_q, p.head_dim_v).transpose(1, 2)

    return Prepared(launch)


# A matrix product

LEAST_SIDE = 4096
"""Rows and columns from which on a matrix product is at its best rate."""


def prepare_matmul(problem: Problem, inputs: Inputs, setting: Setting) -> Prepared:
    """One product with the rows of Q and of K as its sides, and so deep that it has as many operations as the problem.

    Raises:
        NotImplementedError: the sides are too short to keep the tensor cores busy.
    """
    rows, columns = problem.seqlen_q, problem.seqlen_k
    if min(rows, columns) < LEAST_SIDE:
        raise NotImplementedError(
            f"sides are {rows} and {columns}, allowed for a matrix product: {LEAST_SIDE} or more"
        )
    depth = round(problem.flops / 2 / rows / columns)
    left, right = (
        torch.randn(side, depth, dtype=getattr(torch, problem.dtype), device=setting.device)
        for side in (rows, columns)
    )
    return Prepared(lambda: left @ right.T)


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(OURS, "hopper-attention", always_available, our_version, prepare_ours),
        Peer("fa3", "FlashAttention-3 (CUDA C++)", why_no_fa3, fa3_version, prepare_fa3),
        Peer("fa4", "FlashAttention-4 (CuTe DSL)", why_no_fa4, fa4_version, prepare_fa4),
        Peer(
            "cudnn", "cuDNN (torch SDPA)", needs_gpu, cudnn_version, prepare_sdpa,
            lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
        ),
        Peer(
            "fa2", "FlashAttention-2 (torch SDPA)", needs_gpu, torch_version, prepare_sdpa,
            lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        ),
        Peer("flex", "FlexAttention (torch, compiled)", why_no_flex, torch_version, prepare_flex),
        Peer("torch", "plain PyTorch", always_available, torch_version, prepare_torch),
        Peer(
            AMPERE, "hopper-attention without WGMMA", needs_gpu, our_version,
            partial(prepare_ours, backend="ampere"),
        ),
        Peer(
            MATMUL, "torch.matmul of as many operations", always_available, torch_version, prepare_matmul,
            is_attention=False,
        ),
    )
}  # fmt: skip

DEFAULT_PEERS = (OURS, "fa3", "fa4", "cudnn", "fa2")


PeerT = TypeVar("PeerT", bound=ListedPeer)


def parse_peers(text: str, registry: Mapping[str, PeerT], usual: Sequence[str] = ()) -> tuple[PeerT, ...]:
    """Comma-separated names of rows, in their order; the ``usual`` ones if empty.

    Raises:
        ValueError: a name is not in the registry, or there is none.
    """
    names = [name.strip() for name in text.split(",") if name.strip()] or usual
    unknown = [name for name in names if name not in registry]
    if unknown or not names:
        raise ValueError(f"peers is {text!r}, allowed: comma-separated names out of {', '.join(registry)}")
    return tuple(registry[name] for name in dict.fromkeys(names))


def inspect_peers(peers: Sequence[ListedPeer], setting: Setting) -> dict[str, PeerInfo]:
    """Title, version and availability of each peer on this machine."""
    infos = {}
    for peer in peers:
        reason = peer.why_unavailable(setting)
        infos[peer.name] = PeerInfo(peer.title, "" if reason else peer.version(setting), reason)
    return infos
