"""The forward pass: kernel and its compilation."""

from hopper.forward.compile import compile_forward

__all__ = ["compile_forward"]
