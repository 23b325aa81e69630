"""Scales of a cache of e4m3: by sequence, by page or by token, which the shape of the descales says."""

from __future__ import annotations

from typing import Protocol

import torch

from cute_kernels.append.config import BY_PAGE, BY_SEQUENCE, BY_TOKEN
from hopper_attention.checks import FP8_DTYPE, TensorSpec


class ScaledCache(Protocol):
    """What of a ``CacheShape`` decides on the shapes of descales."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def cache_dtype(self) -> torch.dtype: ...
    @property
    def new_dtype(self) -> torch.dtype | None: ...
    @property
    def caches(self) -> tuple[TensorSpec, TensorSpec]: ...
    @property
    def pages(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...


def check_descales(shape: ScaledCache, named: dict[str, TensorSpec]) -> str:
    """What shares a scale, of ``BY_SEQUENCE``, ``BY_PAGE`` and ``BY_TOKEN``; ``named`` are all tensors of a call.

    Raises:
        ValueError, TypeError: a descale has no place in the call, or the two of the cache are of different kinds.
    """
    kinds = {}
    for name, of, dtype in (
        ("q_descale", "q", shape.dtype),
        ("k_descale", "k_cache", shape.cache_dtype),
        ("v_descale", "v_cache", shape.cache_dtype),
    ):
        if name not in named:
            continue
        spec = named[name]
        if dtype != FP8_DTYPE:
            raise ValueError(
                f"{name} is given but {of} has dtype {dtype}, allowed: descales with {FP8_DTYPE} only"
            )
        if spec.dtype != torch.float32:
            raise TypeError(f"{name} has dtype {spec.dtype}, allowed: torch.float32")
        kinds[name] = _kind_of(name, spec, shape)
    kinds.pop("q_descale", None)
    scales = next((kind for kind in kinds.values() if kind != BY_SEQUENCE), BY_SEQUENCE)
    if scales != BY_SEQUENCE:
        _check_both(scales, kinds, shape, named)
    return scales


def _kind_of(name: str, spec: TensorSpec, shape: ScaledCache) -> str:
    given = tuple(spec.shape)
    if given == (shape.batch, shape.kv_heads):
        return BY_SEQUENCE
    allowed = f"(batch, kv_heads), {(shape.batch, shape.kv_heads)}"
    if name != "q_descale":
        # A page of one row is a token.
        for kind in (BY_TOKEN, BY_PAGE):
            if given == shape_of_scales(kind, shape):
                return kind
            allowed += f", or by {kind} {shape_of_scales(kind, shape)}"
    raise ValueError(f"{name} has shape {given}, allowed: {allowed}")


def shape_of_scales(kind: str, shape: ScaledCache) -> tuple[int, int, int]:
    """That of a descale by page or by token."""
    rows = shape.caches[0].shape[1] if kind == BY_TOKEN else 1
    return shape.pages, rows, shape.kv_heads


def _check_both(scales: str, kinds: dict[str, str], shape: ScaledCache, named: dict[str, TensorSpec]) -> None:
    """Raise unless both descales of the cache are ``scales``, and there is room for those of new tokens."""
    wanted = shape_of_scales(scales, shape)
    for name in ("k_descale", "v_descale"):
        other = "v_descale" if name == "k_descale" else "k_descale"
        if kinds.get(name) != scales:
            was = f"has shape {tuple(named[name].shape)}" if name in named else "is None"
            raise ValueError(
                f"{name} {was}, allowed with {other} of shape {tuple(named[other].shape)}: the same kind, {wanted}"
            )
        shares = any(n > 1 and stride == 0 for n, stride in zip(wanted, named[name].strides, strict=True))
        # Tokens of e4m3 are in the scale that their rows have already.
        if scales == BY_TOKEN and shape.new_dtype not in (None, FP8_DTYPE) and shares:
            raise ValueError(
                f"{name} has strides {tuple(named[name].strides)}, allowed with new tokens: none that is 0, as their "
                "scales are written"
            )
