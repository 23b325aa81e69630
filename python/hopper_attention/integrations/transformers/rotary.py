"""Rotary embedding of a model's layers in one launch, in place of ten of torch's operators and twenty for gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hopper_attention.checks import HALF_DTYPES
from hopper_attention.launch.rotation import Angles, find
from hopper_attention.plain_calls import is_plain_call
from hopper_attention.rotary import rotate_by

FUNCTION = "apply_rotary_pos_emb"
"""What layers of Transformers rotate by, a function of the Python module that they are written in."""

ROTARY_STEP = 16
"""What head_dim is a multiple of for the kernel."""

Rotated = tuple[Tensor, Tensor]
Rotate = Callable[..., Rotated]
Pair = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From a table (batch, seqlen, columns) to those of the two columns of each pair."""


def _doubled(table: Tensor) -> tuple[Tensor, Tensor]:
    low, high = table.chunk(2, -1)
    return low, high


def _single(table: Tensor) -> tuple[Tensor, Tensor]:
    return table, table


def fuse_rotary(model: PreTrainedModel) -> PreTrainedModel:
    """Have the layers of ``model`` rotate queries and keys by one kernel, with any attention implementation.

    Transformers' layers call a function of their Python module, which is replaced: for all models of that kind in this
    process, until :func:`unfuse_rotary`. It is asked before, on a small example, whether it computes what the kernel
    does: column i and column i + head_dim / 2 turn together. 16-bit tensors on a GPU with kernels then take one launch,
    which computes in float32 and rounds once, where the function rounds three times; all else, and what torch.compile
    traces, is left to the function, which torch.compile fuses by itself.

    Returns:
        ``model`` itself.

    Raises:
        NotImplementedError: no layer of the model rotates by such a function.
    """
    found = list(_modules_of(model))
    if not found:
        raise NotImplementedError(
            f"{type(model).__name__} has no layer that calls {FUNCTION}, allowed: a model whose layers rotate queries "
            "and keys by it"
        )
    pairs = [_pair_of(module) for module in found]
    for module, pair in zip(found, pairs, strict=True):
        original = getattr(module, FUNCTION)
        if not hasattr(original, "by_torch"):
            setattr(module, FUNCTION, _fused(original, pair))
    return model


def unfuse_rotary(model: PreTrainedModel) -> PreTrainedModel:
    """Undo :func:`fuse_rotary`, for all models of that kind. Returns ``model`` itself."""
    for module in _modules_of(model):
        replaced = getattr(module, FUNCTION)
        setattr(module, FUNCTION, getattr(replaced, "by_torch", replaced))
    return model


def _modules_of(model: nn.Module) -> Iterator[ModuleType]:
    """Python modules that classes of the model's layers are written in and that have the function, each once."""
    names = {type(layer).__module__: None for layer in model.modules()}
    return (sys.modules[name] for name in names if hasattr(sys.modules.get(name), FUNCTION))


def _pair_of(module: ModuleType) -> Pair:
    """How the tables are laid out that the function of a module takes.

    Raises:
        NotImplementedError: it computes something else.
    """
    function = getattr(module, FUNCTION)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    # The heads are no more than the positions, so that one cannot pass for the other.
    q, k = draw(1, 2, 3, 32), draw(1, 1, 3, 32)
    for pair, columns in ((_doubled, 32), (_single, 16)):
        tables = draw(1, 3, columns), draw(1, 3, columns)
        try:
            found = getattr(function, "by_torch", function)(q, k, *tables)
            both = zip(found, _rotate(q, k, tables, pair), strict=True)
            if all(torch.allclose(x, y, rtol=1e-9, atol=1e-9) for x, y in both):
                return pair
        except (RuntimeError, TypeError, ValueError, IndexError):
            # It takes other tables, or gives something else.
            continue
    raise NotImplementedError(
        f"{module.__name__}.{FUNCTION} does not turn columns i and i + head_dim / 2 together, and there is no kernel "
        "for what it does; leave it as it is"
    )


def _rotate(q: Tensor, k: Tensor, tables: tuple[Tensor, Tensor], pair: Pair) -> Rotated:
    """Of (batch, heads, seqlen, head_dim), with views of that shape."""
    (low_cos, high_cos), (low_sin, high_sin) = (pair(table) for table in tables)
    angles = Angles(low_cos, low_sin, high_cos, high_sin)
    new_q, new_k = rotate_by(q.transpose(1, 2), k.transpose(1, 2), angles)
    return new_q.transpose(1, 2), new_k.transpose(1, 2)


def _fused(original: Rotate, pair: Pair) -> Rotate:
    """``original``, with the kernel for what that serves."""

    @wraps(original)
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **options: Any) -> Rotated:
        if torch.compiler.is_compiling() or others or options or not _suits(q, k, cos, sin, pair):
            return original(q, k, cos, sin, *others, **options)
        return _rotate(q, k, (cos, sin), pair)

    rotate.by_torch = original  # type: ignore[attr-defined]  # found again by unfuse_rotary
    return rotate


def _suits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, pair: Pair) -> bool:
    """Whether these are plain tensors that the kernel rotates, and come out in the dtype that the function gives.

    By float32 tables that gives float32, which autocast would round to the 16 bits of Q before it is multiplied.
    """
    if not is_plain_call(q, k, cos) or type(sin) is not Tensor:
        return False
    if cos.dtype != q.dtype and not torch.is_autocast_enabled(q.device.type):
        return False
    if not q.is_cuda or q.dtype not in HALF_DTYPES or k.dtype != q.dtype:
        return False
    if q.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape or cos.dtype != sin.dtype:
        return False
    # Of k the heads alone may be others; what broadcasts, or lies on another GPU, is for the function to judge.
    if k.dim() != 4 or (k.shape[0], *k.shape[2:]) != (q.shape[0], *q.shape[2:]):
        return False
    if {x.device for x in (k, cos, sin)} != {q.device}:
        return False
    if cos.requires_grad or sin.requires_grad or cos.shape[0] not in (1, q.shape[0]):
        return False
    columns = q.shape[3] if pair is _doubled else q.shape[3] // 2
    if cos.shape[1:] != (q.shape[2], columns) or q.shape[3] % ROTARY_STEP:
        return False
    return find(q.dtype, cos.dtype, q.device) is not None
