"""Attention for JAX: :func:`flash_attention`, under jit, grad, vmap and shard_map.

On an NVIDIA GPU XLA calls the compiled kernels through its FFI (``kernels``), elsewhere it compiles the formula
(``formula``).
"""

from hopper_attention.integrations.needs import need

# What is missing or too old must be said before names are imported from it.
need("jax")

from hopper_attention.integrations.jax.attention import flash_attention

__all__ = ["flash_attention"]
