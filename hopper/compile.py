"""One way to compile the kernel of any config."""

from __future__ import annotations

from typing import Any

from hopper.backward.config import BackwardConfig, BackwardStep
from hopper.quantize.config import QuantizeConfig


def compile_kernel(config: Any, options: str = "") -> Any:
    """Compile the kernel of ``config`` for sm_90a: forward, FP8 forward, backward and its two steps, or quantizer.

    What comes back is described where it is made: ``compile_forward``, ``compile_forward_fp8``, ``compile_backward``,
    ``compile_step``, ``compile_quantize``. ``options`` go to ``cute.compile``.
    """
    if isinstance(config, BackwardConfig):
        from hopper.backward.compile import compile_backward

        return compile_backward(config, options)
    if isinstance(config, BackwardStep):
        from hopper.backward.compile import compile_step

        return compile_step(config, options)
    if isinstance(config, QuantizeConfig):
        from hopper.quantize.compile import compile_quantize

        return compile_quantize(config, options)
    from hopper.forward import compile_forward

    return compile_forward(config, options)
