"""One way to compile the kernel of any config."""

from __future__ import annotations

from typing import Any

from cute_kernels.ampere.backward.config import AmpereBackwardConfig
from cute_kernels.ampere.config import AmpereForwardConfig
from cute_kernels.backward.step import BackwardStep
from hopper.backward.config import BackwardConfig
from hopper.quantize.config import QuantizeConfig

HOPPER_ARCH = "sm_90a"


def arch_of(config: Any) -> str:
    """The architecture that the kernel of ``config`` is for; it never depends on the GPUs of this machine."""
    if isinstance(config, BackwardStep):
        return arch_of(config.config)
    return config.arch if isinstance(config, AmpereForwardConfig | AmpereBackwardConfig) else HOPPER_ARCH


def compile_kernel(config: Any, options: str = "") -> Any:
    """Compile the kernel of ``config``: forward, FP8 forward, backward, quantizer, the forward or the backward of
    GPUs without WGMMA, or one of the two steps of a backward.

    What comes back is described where it is made: ``compile_forward``, ``compile_forward_fp8``, ``compile_backward``,
    ``compile_quantize``, ``compile_ampere_forward``, ``compile_ampere_backward``, ``compile_step``. ``options`` go to
    ``cute.compile``.
    """
    options = f"--gpu-arch {arch_of(config)} {options}".strip()
    if isinstance(config, AmpereForwardConfig):
        from cute_kernels.ampere.forward import compile_ampere_forward

        return compile_ampere_forward(config, options)
    if isinstance(config, AmpereBackwardConfig):
        from cute_kernels.ampere.backward.compile import compile_ampere_backward

        return compile_ampere_backward(config, options)
    if isinstance(config, BackwardConfig):
        from hopper.backward.compile import compile_backward

        return compile_backward(config, options)
    if isinstance(config, BackwardStep):
        from cute_kernels.backward.compile import compile_step

        return compile_step(config, options)
    if isinstance(config, QuantizeConfig):
        from hopper.quantize.compile import compile_quantize

        return compile_quantize(config, options)
    from hopper.forward import compile_forward

    return compile_forward(config, options)
