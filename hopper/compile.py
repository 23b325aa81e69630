"""One way to compile the kernel of any config."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from cute_kernels.addition.config import AdditionConfig
from cute_kernels.ampere.backward.config import AmpereBackwardConfig
from cute_kernels.ampere.config import AmpereForwardConfig
from cute_kernels.append.config import AppendConfig
from cute_kernels.backward.step import BackwardStep
from cute_kernels.combine.config import CombineConfig
from cute_kernels.copies.config import CopiesConfig
from cute_kernels.dequantize.config import DequantizeConfig
from cute_kernels.launches.config import LaunchesConfig
from cute_kernels.merge.config import MergeConfig
from cute_kernels.plan.config import PlanConfig
from cute_kernels.rotation.config import RotationConfig
from hopper.backward.config import BackwardConfig
from hopper.config import ForwardConfig
from hopper.decode.config import DecodeConfig
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.mean.config import RunMeansConfig, ValueMeanConfig
from hopper.mla.config import MlaConfig
from hopper.quantize.config import QuantizeConfig
from hopper.transpose.config import TransposeConfig
from hopper.wide.config import WideForwardConfig
from hopper.widen.config import WidenConfig

HOPPER_ARCH = "sm_90a"

OF_ANY_ARCH = (
    AmpereForwardConfig,
    AmpereBackwardConfig,
    PlanConfig,
    AppendConfig,
    DequantizeConfig,
    CombineConfig,
    MergeConfig,
    AdditionConfig,
    CopiesConfig,
    LaunchesConfig,
    RotationConfig,
)
"""Configs that say what they are compiled for."""

COMPILERS: dict[type, tuple[str, str]] = {
    Fp8ForwardConfig: ("hopper.forward.compile", "compile_forward_fp8"),
    ForwardConfig: ("hopper.forward.compile", "compile_forward"),
    WideForwardConfig: ("hopper.wide.compile", "compile_wide"),
    DecodeConfig: ("hopper.decode.compile", "compile_decode"),
    MlaConfig: ("hopper.mla.compile", "compile_mla"),
    BackwardConfig: ("hopper.backward.compile", "compile_backward"),
    BackwardStep: ("cute_kernels.backward.compile", "compile_step"),
    PlanConfig: ("cute_kernels.plan.compile", "compile_plan"),
    AppendConfig: ("cute_kernels.append.compile", "compile_append"),
    DequantizeConfig: ("cute_kernels.dequantize.compile", "compile_dequantize"),
    CombineConfig: ("cute_kernels.combine.compile", "compile_combine"),
    MergeConfig: ("cute_kernels.merge.compile", "compile_merge"),
    AdditionConfig: ("cute_kernels.addition.compile", "compile_addition"),
    CopiesConfig: ("cute_kernels.copies.compile", "compile_copies"),
    LaunchesConfig: ("cute_kernels.launches.compile", "compile_launches"),
    RotationConfig: ("cute_kernels.rotation.compile", "compile_rotation"),
    QuantizeConfig: ("hopper.quantize.compile", "compile_quantize"),
    TransposeConfig: ("hopper.transpose.compile", "compile_transpose"),
    ValueMeanConfig: ("hopper.mean.compile", "compile_value_mean"),
    RunMeansConfig: ("hopper.mean.compile", "compile_run_means"),
    WidenConfig: ("hopper.widen.compile", "compile_widen"),
    AmpereForwardConfig: ("cute_kernels.ampere.forward.compile", "compile_ampere_forward"),
    AmpereBackwardConfig: ("cute_kernels.ampere.backward.compile", "compile_ampere_backward"),
}
"""By the type of a config, the first that it is an instance of: module and function that compile its kernel. Modules by
name, since they import the DSL."""


def arch_of(config: Any) -> str:
    """The architecture that the kernel of ``config`` is for; it never depends on the GPUs of this machine."""
    if isinstance(config, BackwardStep):
        return arch_of(config.config)
    return config.arch if isinstance(config, OF_ANY_ARCH) else HOPPER_ARCH


def module_of(config: Any) -> str:
    """The module that compiles the kernel of ``config``, and so reaches all that the kernel is made of."""
    return _compiler_of(config)[0]


def compile_kernel(config: Any, options: str = "") -> Any:
    """Compile the kernel of ``config``: of the forward, FP8 or not or for wide values, of the backward or one of its
    two steps, of the quantizer, of the mean of V or of what transposes V; for Hopper, or for GPUs without WGMMA.

    What comes back is described at the functions named in ``COMPILERS``. ``options`` go to ``cute.compile``.
    """
    module, function = _compiler_of(config)
    compiler = getattr(import_module(module), function)
    return compiler(config, f"--gpu-arch {arch_of(config)} {options}".strip())


def _compiler_of(config: Any) -> tuple[str, str]:
    return next(compiler for kind, compiler in COMPILERS.items() if isinstance(config, kind))
