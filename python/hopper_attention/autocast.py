"""torch.autocast: what it asks of the inputs of attention, and how the reference keeps its own dtypes under it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from hopper_attention.checks import FP8_DTYPE, HALF_DTYPES

Options = ParamSpec("Options")
Result = TypeVar("Result")

CASTABLE = (*HALF_DTYPES, torch.float32)


def find_autocast_dtype(*tensors: Tensor) -> torch.dtype | None:
    """The dtype that autocast gives q, k and v; None where it is off or leaves them as they are.

    As for torch's scaled_dot_product_attention, float32 inputs get the dtype of the autocast region, and so does
    whatever differs in dtype from the others. Tensors that all have one 16-bit dtype keep it, as in FlashAttention-3.
    """
    dtypes = {x.dtype for x in tensors}
    if dtypes <= {FP8_DTYPE} or not dtypes <= set(CASTABLE):
        return None
    if len(dtypes) == 1 and dtypes <= set(HALF_DTYPES):
        return None
    device = tensors[0].device.type
    # torch.compile does not know the first question in all versions; what it compiles is for a device of its own.
    is_available = device != "meta" and (
        torch.compiler.is_compiling() or torch.amp.is_autocast_available(device)
    )
    if not is_available or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def cast_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """q, k, v and what goes with them, as autocast wants them. Gradients come back in the dtypes that they had."""
    dtype = find_autocast_dtype(*tensors)
    return tensors if dtype is None else tuple(x.to(dtype) for x in tensors)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which products keep the dtype of their operands, whatever the caller's autocast says."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else nullcontext()


def ignores_autocast(
    compute: Callable[Concatenate[Tensor, Options], Result],
) -> Callable[Concatenate[Tensor, Options], Result]:
    """``compute``, on the device of its first argument, run ``without_autocast``."""

    @wraps(compute)
    def run(first: Tensor, *args: Options.args, **kwargs: Options.kwargs) -> Result:
        with without_autocast(first.device):
            return compute(first, *args, **kwargs)

    return run
