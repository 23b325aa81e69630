"""Custom operators that torch.func transforms: gradients, samples (vmap), and forward mode refused.

torch.func does not find the gradient that is registered with a custom operator, and forward mode passes over operators,
so that tangents would be lost without a word. Both know ``torch.autograd.Function``: a call that is transformed goes
through one with the same gradient. So does a call of plain tensors, without the operator: torch's dispatcher and what
stands around a gradient that is registered with it take several times as long as the rest of a short call. Every
other call, as of what is traced, goes to the operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef

from hopper_attention import compiled
from hopper_attention.autocast import without_autocast
from hopper_attention.plain_calls import are_plain_arguments, is_transformed, records_gradient

Results = tuple[Tensor, ...]

NO_FORWARD_MODE = (
    "forward-mode derivatives of attention (torch.func.jvp, jacfwd and hessian, dual tensors) are not implemented; use "
    "reverse mode, torch.func.grad, vjp and jacrev or Tensor.backward, or hopper_attention.reference.attention_naive, "
    "which torch differentiates in every mode"
)


def differentiable(
    operator: CustomOpDef,
    gradients: Callable[..., Any],
    save_for_backward: Callable[..., None] | None = None,
    mixes_samples: Callable[..., bool] = lambda *arguments: False,
    has_batch: bool = True,
) -> Callable[..., Any]:
    """Register the gradient of ``operator`` with torch, and return what calls it, plain, transformed or traced.

    All tensors that the operator takes and returns have the batch as their first dimension, or no elements. So the
    samples of vmap become more of the batch, unless ``mixes_samples`` says of the arguments that entries of a batch
    would then have to do with each other; then each sample is computed by itself. So is it always where the tensors
    have no such dimension.

    Args:
        operator: takes positional arguments, and returns a tuple of new tensors.
        gradients: (ctx, *gradients of the results) -> one gradient for each argument, None for all but tensors.
        save_for_backward: (ctx, inputs, output), as ``setup_context`` of an autograd.Function.
        mixes_samples: of the arguments of the operator.
        has_batch: whether the batch is the first dimension of all tensors.
    """
    operator.register_autograd(gradients, setup_context=save_for_backward)
    compute = operator._init_fn
    apply_plain = _without_dispatcher(operator, gradients, save_for_backward)

    class Transformed(torch.autograd.Function):
        @staticmethod
        def forward(*arguments: Any) -> Any:
            return operator(*arguments)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            if save_for_backward is not None:
                save_for_backward(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return gradients(ctx, *grads)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            raise NotImplementedError(NO_FORWARD_MODE)

        @staticmethod
        def vmap(
            info: Any, in_dims: tuple[int | None, ...], *arguments: Any
        ) -> tuple[Results, tuple[int, ...]]:
            samples = info.batch_size
            is_one_batch = has_batch and (samples < 2 or not mixes_samples(*arguments))
            compute = _as_one_batch if is_one_batch else _each_by_itself
            results = compute(in_graphs[0], samples, in_dims, arguments)
            return results, (0,) * len(results)

    # torch.compile cannot read such a Function, but can put a call of it into a graph.
    def transformed(*arguments: Any) -> Any:
        return Transformed.apply(*arguments)

    in_graphs = compiled.allow_in_graph(transformed)

    def call(*arguments: Any) -> Any:
        if are_plain_arguments(arguments):
            return apply_plain(*arguments) if records_gradient(arguments) else compute(*arguments)
        if not is_transformed():
            return operator(*arguments)
        if torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active():
            # A level of dual tensors is open, and what torch.compile traces has no tangents.
            raise NotImplementedError(NO_FORWARD_MODE)
        return in_graphs[0](*arguments)

    return call


def _without_dispatcher(
    operator: CustomOpDef, gradients: Callable[..., Any], save_for_backward: Callable[..., None] | None
) -> Callable[..., Any]:
    """What calls ``operator`` of plain tensors with its gradient, and nothing of torch in between but autograd."""
    compute = operator._init_fn

    def forward(ctx: Any, *arguments: Any) -> Any:
        results = compute(*arguments)
        if save_for_backward is not None:
            save_for_backward(ctx, arguments, results)
        return results

    def backward(ctx: Any, *grads: Any) -> Any:
        return gradients(ctx, *grads)

    return recorded(operator._qualname, forward, backward)


def recorded(operator: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """``apply`` of an autograd.Function for plain tensors (``plain_calls.are_plain_arguments``).

    Args:
        operator: its name, for the messages of autograd.
        forward: (ctx, *arguments). There is no setup_context, with which torch would look at the signature of
            ``forward`` in every call.
        backward: (ctx, *gradients of the results) -> one gradient for each argument.
    """
    steps = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(operator.replace("::", "_"), (torch.autograd.Function,), steps)
    # What the node of a call is asked for: that of its base asks first which functions the class has.
    function._backward_cls.apply = backward
    # Not function.apply, which first asks of every argument what is known of plain ones. That of its base, in C, is in
    # no stub of torch's.
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply
    return apply


def _as_one_batch(
    call: Callable[..., Results], samples: int, dims: tuple[int | None, ...], arguments: tuple[Any, ...]
) -> Results:
    """Results with the samples in front, from one call on a batch of all samples."""
    tensors = [
        _samples_first(x, dim, samples) if isinstance(x, Tensor) else x
        for x, dim in zip(arguments, dims, strict=True)
    ]
    entries = next(x.shape[1] for x in tensors if isinstance(x, Tensor))
    results = call(*(x.flatten(0, 1) if isinstance(x, Tensor) else x for x in tensors))
    # What has a single dimension has no elements.
    return tuple(x.unflatten(0, (samples, entries if x.dim() > 1 else 0)) for x in results)


def _each_by_itself(
    call: Callable[..., Results], samples: int, dims: tuple[int | None, ...], arguments: tuple[Any, ...]
) -> Results:
    """The same from a call for each sample.

    Raises:
        NotImplementedError: there is none.
    """
    if not samples:
        raise NotImplementedError(
            "vmap over 0 samples of sequences of different lengths is not implemented; use 1 or more"
        )
    tensors = [
        _samples_first(x, dim, samples) if isinstance(x, Tensor) else [x] * samples
        for x, dim in zip(arguments, dims, strict=True)
    ]
    results = [call(*sample) for sample in zip(*tensors, strict=True)]
    with without_autocast(results[0][0].device):
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True))


def _samples_first(x: Tensor, dim: int | None, samples: int) -> Tensor:
    return x.expand(samples, *x.shape) if dim is None else x.movedim(dim, 0)
