"""Runs one checked problem on its backend.

``find_launch`` turns sizes, strides, dtypes and devices into a launcher and remembers it, so that a
repeated call costs one dictionary look-up in place of the checks, the choice of backend and the choice of
config.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from cute_kernels.ampere.config import AmpereForwardConfig
from hopper.config import ForwardConfig
from hopper_attention import checks, compile_cache
from hopper_attention._kernels import Kernel
from hopper_attention.backends import choose_backend, target_of
from hopper_attention.checks import TensorSpec
from hopper_attention.dispatch import ReferenceConfig, select_config
from hopper_attention.layout import TMA_BYTES, Repair, contiguous_copy, repair_for
from hopper_attention.notices import warn_once
from hopper_attention.reference.tiled import tiled_forward

REMEMBERED_PROBLEMS = 4096
"""Launchers kept, least recently used first out. Decoding meets a new seqlen_k at every token."""

Launch = Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
"""(q, k, v, softmax_scale, wants_lse) -> (out, lse); an lse that is not wanted may come without its rows."""


@dataclass(frozen=True)
class ResultSpec:
    """What out (batch, seqlen_q, heads, head_dim_v) and lse (batch, heads, seqlen_q) will be.

    ``is_like_q`` says that out is laid out as q is, which makes it a microsecond cheaper to allocate.
    """

    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_like_q: bool = False

    def empty_out(self, q: Tensor) -> Tensor:
        if self.is_like_q:
            return torch.empty_like(q)
        return torch.empty(self.out_shape, dtype=self.dtype, device=self.device)

    def empty_lse(self) -> Tensor:
        return torch.empty(self.lse_shape, dtype=torch.float32, device=self.device)


@dataclass(frozen=True)
class NoKeysLaunch:
    """For problems without a score: seqlen_k is 0, or the output is empty. Nothing is launched."""

    result: ResultSpec

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, wants_lse: bool
    ) -> tuple[Tensor, Tensor]:
        return self.result.empty_out(q).zero_(), self.result.empty_lse().fill_(-math.inf)


@dataclass(frozen=True)
class ReferenceLaunch:
    """The tiled reference, on the device of the inputs."""

    config: ReferenceConfig
    causal: bool

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, wants_lse: bool
    ) -> tuple[Tensor, Tensor]:
        tiles = {"tile_m": self.config.tile_m, "tile_n": self.config.tile_n}
        return tiled_forward(q, k, v, causal=self.causal, softmax_scale=softmax_scale, **tiles)


@dataclass(frozen=True)
class KernelLaunch(ABC):
    """A compiled kernel on torch's current stream of ``device_index``.

    ``repairs`` is empty, or what q, k and v each need before a kernel can address them. ``no_lse`` (batch, heads, 0)
    tells the kernel to write no LSE.
    """

    kernel: Kernel
    result: ResultSpec
    device_index: int
    repairs: tuple[Repair, ...]
    no_lse: Tensor

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, wants_lse: bool
    ) -> tuple[Tensor, Tensor]:
        if self.device_index != torch.cuda.current_device():
            with torch.cuda.device(self.device_index):
                return self._launch(q, k, v, softmax_scale, wants_lse)
        return self._launch(q, k, v, softmax_scale, wants_lse)

    def _launch(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, wants_lse: bool
    ) -> tuple[Tensor, Tensor]:
        out = self.result.empty_out(q)
        lse = self.result.empty_lse() if wants_lse else self.no_lse
        if self.repairs:
            q, k, v = (repair.apply(x) for repair, x in zip(self.repairs, (q, k, v), strict=True))
        # An address is not part of what a launcher is remembered by. One test serves all three.
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % TMA_BYTES:
            q, k, v = (contiguous_copy(x) if x.data_ptr() % TMA_BYTES else x for x in (q, k, v))
        self._start(q, k, v, out, lse, softmax_scale)
        return out, lse

    @abstractmethod
    def _start(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, softmax_scale: float) -> None:
        """Queue the kernel."""


@dataclass(frozen=True)
class HopperLaunch(KernelLaunch):
    """The Hopper kernel, on a persistent grid of ``num_ctas``."""

    num_ctas: int

    def _start(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, softmax_scale: float) -> None:
        self.kernel(q, k, v, out, lse, tile_counter(self.device_index), softmax_scale, self.num_ctas)


@dataclass(frozen=True)
class AmpereLaunch(KernelLaunch):
    """The kernel without WGMMA, on a CTA for each tile."""

    def _start(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, softmax_scale: float) -> None:
        self.kernel(q, k, v, out, lse, softmax_scale)


def is_capturing(device: torch.device) -> bool:
    """Whether torch's current stream records a CUDA graph in place of running."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_tile_counters: dict[tuple[int, int], Tensor] = {}


def tile_counter(device_index: int) -> Tensor:
    """Two int32 zeros with which the CTAs of one launch share out the tiles; the kernel leaves them zero.

    Launches on one stream run one after the other and so can share a counter: it is kept, which saves a
    memset a call. Two streams may run at the same time, so each has its own. A captured graph may be replayed
    on any stream, alongside anything, so a launch in it gets a counter of its own, zeroed by the graph.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=f"cuda:{device_index}")
    # torch.cuda.current_stream() builds an object around this number, which takes ten times as long.
    key = device_index, torch._C._cuda_getCurrentRawStream(device_index)
    counter = _tile_counters.get(key)
    if counter is None:
        with torch.inference_mode(False):
            counter = torch.zeros(2, dtype=torch.int32, device=f"cuda:{device_index}")
        _tile_counters[key] = counter
    return counter


@lru_cache(maxsize=REMEMBERED_PROBLEMS)
def find_launch(
    q_shape: tuple[int, ...],
    q_strides: tuple[int, ...],
    q_dtype: torch.dtype,
    q_device: torch.device,
    k_shape: tuple[int, ...],
    k_strides: tuple[int, ...],
    k_dtype: torch.dtype,
    k_device: torch.device,
    v_shape: tuple[int, ...],
    v_strides: tuple[int, ...],
    v_dtype: torch.dtype,
    v_device: torch.device,
    causal: bool,
    backend: str | None,
    sm_margin: int,
) -> Launch:
    """The launcher of a 16-bit problem; checks it, and compiles or loads its kernel, the first time.

    The arguments are flat because they are looked up at every call: a record for each tensor would cost more to
    make than the look-up itself.

    Raises:
        ValueError, TypeError: the arguments do not make a problem, or ``backend`` cannot run it.
        NotImplementedError: ``backend`` does not do it yet.
    """
    q = TensorSpec(q_shape, q_strides, q_dtype, q_device)
    k = TensorSpec(k_shape, k_strides, k_dtype, k_device)
    v = TensorSpec(v_shape, v_strides, v_dtype, v_device)
    checks.check_qkv(q, k, v)
    checks.check_backend(backend)
    checks.check_sm_margin(sm_margin)
    target = target_of(q.device)
    choice = choose_backend(target, q.dtype, backend)
    if choice.advice:
        warn_once(f"attention on the tiled reference, which is slow: {choice.reason}; {choice.advice}")
    batch, seqlen_q, heads, _ = q.shape
    out_shape = (batch, seqlen_q, heads, v.shape[3])
    packed = (seqlen_q * heads * q.shape[3], heads * q.shape[3], q.shape[3], 1)
    is_like_q = out_shape == tuple(q.shape) and packed == tuple(q.strides)
    result = ResultSpec(out_shape, (batch, heads, seqlen_q), q.dtype, q.device, is_like_q)
    if 0 in (batch, seqlen_q, heads, k.shape[1]):
        return NoKeysLaunch(result)
    config = select_config(choice.backend, target.capability, q, k, v, causal)
    if isinstance(config, ReferenceConfig):
        return ReferenceLaunch(config, causal)
    return _kernel_launch(config, result, (q, k, v), sm_margin)


def _kernel_launch(
    config: ForwardConfig | AmpereForwardConfig,
    result: ResultSpec,
    specs: tuple[TensorSpec, ...],
    sm_margin: int,
) -> KernelLaunch:
    index = torch.cuda.current_device() if result.device.index is None else result.device.index
    multiprocessors = torch.cuda.get_device_properties(index).multi_processor_count
    if sm_margin >= multiprocessors:
        raise ValueError(f"sm_margin is {sm_margin}, allowed on this GPU: 0 to {multiprocessors - 1}")
    repairs = tuple(repair_for(spec) for spec in specs)
    repairs = repairs if any(repair.is_needed for repair in repairs) else ()
    no_lse = torch.empty((*result.lse_shape[:2], 0), dtype=torch.float32, device=result.device)
    kernel = compile_cache.get_forward(config)
    if isinstance(config, AmpereForwardConfig):
        return AmpereLaunch(kernel, result, index, repairs, no_lse)
    return HopperLaunch(kernel, result, index, repairs, no_lse, multiprocessors - sm_margin)


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    backend: str | None,
    sm_margin: int,
    wants_lse: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attention of 16-bit tensors without autograd: out and lse, in new contiguous tensors.

    Without ``wants_lse`` the lse that comes back may lack its rows.
    """
    launch = find_launch(
        q.shape,
        q.stride(),
        q.dtype,
        q.device,
        k.shape,
        k.stride(),
        k.dtype,
        k.device,
        v.shape,
        v.stride(),
        v.dtype,
        v.device,
        causal,
        backend,
        sm_margin,
    )
    scale = q.shape[3] ** -0.5 if softmax_scale is None else checks.check_scale(softmax_scale)
    return launch(q, k, v, scale, wants_lse)
