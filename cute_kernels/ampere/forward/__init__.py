"""The forward kernel of the GPUs without WGMMA."""

from cute_kernels.ampere.forward.compile import compile_ampere_forward

__all__ = ["compile_ampere_forward"]
