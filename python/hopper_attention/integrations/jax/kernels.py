"""What serves a call in JAX: kernels on the GPUs that have some, through XLA's FFI, and the formula on other devices.

The rules and the compiled kernels are those of PyTorch's side. A trace asks for them once for each shape; what runs
afterwards is XLA's alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax import Array

from cute_kernels.ampere.config import AmpereForwardConfig
from cute_kernels.backward.step import BackwardStep
from hopper.config import ForwardConfig
from hopper_attention import backward_rules, compile_cache, forward_rules
from hopper_attention.backends import KERNELS, Choice, Target, choose_backend
from hopper_attention.checks import TensorSpec
from hopper_attention.integrations.jax import ffi, formula
from hopper_attention.integrations.jax.call import Call, Gradients, Result
from hopper_attention.integrations.jax.ffi import Launch, Written
from hopper_attention.integrations.jax.script import COUNTER, Counter
from hopper_attention.launch.base import NO_PAGES, NO_PLAN, NO_SIDES
from hopper_attention.launch.gradient_launchers import kernel_options
from hopper_attention.launch.gradient_memory import FEWEST_WORDS, dq_shape, lse_shape
from hopper_attention.masks import kernel_sides, present
from hopper_attention.notices import warn_once
from hopper_attention.scores import NO_SCORES, Scores

TORCH_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
"""By JAX's names."""


class Gpu(NamedTuple):
    """What the rules need of the GPUs of a process, which are taken to be alike."""

    target: Target
    multiprocessors: int


@lru_cache(maxsize=1)
def find_gpu() -> Gpu | None:
    """Those that JAX sees; None if there is none of NVIDIA."""
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError:
        return None
    major, minor = device.compute_capability.split(".")
    return Gpu(Target(device.device_kind, (int(major), int(minor))), device.core_count)


def attend(call: Call, q: Array, k: Array, v: Array) -> Result:
    """out and lse. No size may be 0.

    Raises:
        ValueError: ``call.backend`` cannot run here.
        NotImplementedError: the sizes are larger than the kernel can count.
    """
    gpu = find_gpu()
    by_formula = partial(formula.attend, call)
    if gpu is None:
        _check_requested(call.backend)
        return by_formula(q, k, v)
    choice = _choose(gpu.target, TORCH_DTYPES[q.dtype.name], call.backend)
    if _is_formula(choice):
        return by_formula(q, k, v)
    of_q, of_k, of_v = (_spec_of(x) for x in (q, k, v))
    options = call.mask.causal, call.mask.sides, _scores_of(call).kind
    config = forward_rules.select_config(choice.backend, gpu.target.capability, of_q, of_k, of_v, *options)
    assert isinstance(config, (ForwardConfig, AmpereForwardConfig))
    return _on_gpus(call, partial(launch_forward, config, call, gpu.multiprocessors), by_formula)(q, k, v)


def differentiate(
    call: Call, q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array, dlse: Array | None = None
) -> Gradients:
    """dq, dk and dv, likewise."""
    saved = (q, k, v, out, lse, dout) if dlse is None else (q, k, v, out, lse, dout, dlse)
    gpu = find_gpu()
    by_formula = partial(formula.differentiate, call)
    # To a single key the formula is exact, and the kernel only up to rounding.
    if gpu is None or k.shape[1] == 1:
        return by_formula(*saved)
    problem = backward_rules.BackwardProblem(
        q.shape,
        k.shape,
        v.shape,
        TORCH_DTYPES[q.dtype.name],
        call.mask.causal,
        call.deterministic,
        call.mask.has_window,
        _scores_of(call).kind,
        call.mask.attention_chunk > 0,
    )
    choice = backward_rules.choose_backward(problem, gpu.target, call.backend)
    if _is_formula(choice):
        return by_formula(*saved)
    config = backward_rules.select_config(problem, choice.backend, gpu.target.capability)
    return _on_gpus(call, partial(launch_backward, config, call, gpu.multiprocessors), by_formula)(*saved)


def _check_requested(backend: str | None) -> None:
    """Raise ValueError for a kernel where there is no GPU."""
    if backend is not None:
        _choose(Target(jax.default_backend()), torch.float16, backend)


def _choose(target: Target, dtype: torch.dtype, backend: str | None) -> Choice:
    """``choose_backend`` for JAX, where nobody may ask for "torch"."""
    return choose_backend(target, dtype, backend, "JAX is not PyTorch" if backend else "")


def _is_formula(choice: Choice) -> bool:
    """Whether the formula serves, with one warning if a kernel could."""
    if choice.backend not in KERNELS:
        if choice.advice:
            warn_once(f"attention for JAX by its formula, which is slow: {choice.reason}; {choice.advice}")
        return True
    if ffi.is_missing():
        warn_once(
            "attention for JAX by its formula, which is slow: the kernels need jax-tvm-ffi, not installed here; "
            "install it with: pip install 'hopper-attention[jax]'"
        )
        return True
    return False


def _on_gpus(call: Call, launch: Callable[..., Any], by_formula: Callable[..., Any]) -> Callable[..., Any]:
    """``launch`` where XLA compiles for GPUs, ``by_formula`` elsewhere; always ``launch`` if a kernel was asked for."""
    if call.backend is not None:
        return launch
    return partial(jax.lax.platform_dependent, default=by_formula, cuda=launch)


def _spec_of(x: Array) -> TensorSpec:
    return TensorSpec(x.shape, (), TORCH_DTYPES[x.dtype.name], torch.device("meta"))


def _scores_of(call: Call) -> Scores:
    return Scores.of(call.softcap, None, None)


def launch_forward(
    config: ForwardConfig | AmpereForwardConfig,
    call: Call,
    multiprocessors: int,
    q: Array,
    k: Array,
    v: Array,
) -> Result:
    """As ``hopper_attention.launch.forward.ForwardLauncher``."""
    batch, seqlen_q, heads, _ = q.shape
    scores = _scores_of(call)
    sides = kernel_sides(*call.mask.sides) if call.mask.has_window else ()
    changes = scores.for_kernel(batch, heads)
    results = Written((batch, seqlen_q, heads, v.shape[3]), q.dtype), Written((batch, heads, seqlen_q))
    arguments: tuple[Any, ...] = q, k, v, *results
    if isinstance(config, AmpereForwardConfig):
        options = *present(sides), *(() if scores is NO_SCORES else changes)
        arguments += call.softmax_scale, *options
    else:
        options = () if config.is_plain else (*(sides or NO_SIDES), *NO_PLAN, *NO_PAGES, *changes)
        ctas = multiprocessors * config.ctas_per_sm
        arguments += COUNTER, call.softmax_scale, *options, ctas
    out, lse = ffi.call((Launch(config, compile_cache.get_forward, arguments),), *results)
    return out, lse


def launch_backward(
    config: backward_rules.KernelConfig,
    call: Call,
    multiprocessors: int,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array | None = None,
) -> Gradients:
    """As ``hopper_attention.launch.gradient_launchers.BackwardLauncher``."""
    rows = lse_shape(config, q.shape)
    lse_log2: Any = Written(rows)
    delta: Any = Written(rows)
    sums = Written(dq_shape(config, q.shape))
    before: tuple[Launch, ...] = (_step("prepare", config, (out, dout, lse, lse_log2, delta, sums)),)
    if dlse is not None:
        # A call of XLA fills what is new, so that the sums are not those of the next one.
        unused = Written((*rows[:2], rows[2] // config.tile_m, 1, FEWEST_WORDS))
        prepare = _step("prepare", config, (out, dout, lse, lse_log2, delta, unused))
        lse_log2, delta = ffi.call((prepare,), lse_log2, delta)
        before, sums = (), Written.zeros(dq_shape(config, q.shape), jnp.float32)
        # A row without keys keeps its delta of 0.
        seen = jnp.where(lse == -math.inf, 0.0, dlse)
        delta = delta - jnp.pad(seen, ((0, 0), (0, 0), (0, rows[2] - seen.shape[2])))
    dq, dk, dv = (Written(x.shape, x.dtype) for x in (q, k, v))
    like_q: Any = q
    sides = kernel_sides(*call.mask.sides) if call.mask.has_window else ()
    arguments = (
        *(q, k, v, dout, lse_log2, delta, sums, dk, dv),
        _counter(config, rows),
        call.softmax_scale,
        *kernel_options(config, sides, NO_PLAN, _scores_of(call), like_q),
        *((multiprocessors,) if config.is_persistent else ()),
    )
    kernel = Launch(config, compile_cache.get_backward, arguments)
    finish = _step("finish", config, (sums, dq, call.softmax_scale))
    of_q, of_k, of_v = ffi.call((*before, kernel, finish), dq, dk, dv)
    return of_q, of_k, of_v


def _step(name: str, config: backward_rules.KernelConfig, arguments: tuple[Any, ...]) -> Launch:
    """What comes before or after the kernel of ``config``."""
    return Launch(BackwardStep(name, config), compile_cache.get_backward, arguments)


def _counter(config: backward_rules.KernelConfig, rows: tuple[int, ...]) -> Written | Counter:
    """As ``hopper_attention.launch.gradient_memory.backward_counter``."""
    if not config.ordered:
        return COUNTER
    counts = math.prod(rows[:2]) * (rows[2] // config.tile_m) * config.counts_per_tile
    return Written.zeros((2 + counts,), jnp.int32)
