"""Attention with a user's functions under autograd.

Operators of torch take no functions, so this is an autograd.Function of its own. torch.compile leaves it, and what
traces the functions, out of its graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hopper_attention import compiled
from hopper_attention.launch.forward import run_forward
from hopper_attention.launch.gradients import differentiate
from hopper_attention.launch.varlen import run_varlen, run_varlen_backward
from hopper_attention.lengths import Lengths
from hopper_attention.masks import MaskSpec
from hopper_attention.plain_calls import are_fake
from hopper_attention.scores import FunctionScores, Scores, sinks_gradient
from hopper_attention.value_parts import Gradients, differentiate_in_parts, needs_parts


@dataclass(frozen=True, eq=False)
class DenseCall:
    """Everything of a call but q, k, v and sinks, which are differentiated."""

    softmax_scale: float
    mask: MaskSpec
    scores: Scores
    backend: str | None
    sm_margin: int
    deterministic: bool

    @property
    def constants(self) -> tuple[Tensor | None, ...]:
        """The call's tensors without a gradient, which autograd saves too; None for slopes that are not there."""
        return self.scores.alibi_slopes, *self.scores.captured.saved

    def with_saved(self, sinks: Tensor | None, constants: Sequence[Tensor | None]) -> DenseCall:
        """The same call with the tensors that autograd saved, and of which it says if they were changed in place."""
        return replace(self, scores=self._scores_with(sinks, constants))

    def _scores_with(self, sinks: Tensor | None, constants: Sequence[Tensor | None]) -> Scores:
        slopes, *captured = constants
        tensors = tuple(x for x in captured if x is not None)
        functions = self.scores.captured.with_saved(tensors)
        return FunctionScores(self.scores.softcap, slopes, sinks, functions=functions)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        options = self.softmax_scale, self.mask.causal, self.backend, self.sm_margin
        return run_forward(q, k, v, *options, window=self.mask.sides, scores=self.scores)

    def differentiate(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> Gradients:
        options = self.softmax_scale, self.mask, self.scores, self.backend, self.deterministic
        return differentiate(dout, dlse, q, k, v, out, lse, *options)


@dataclass(frozen=True, eq=False)
class VarlenCall(DenseCall):
    """The same of sequences of different lengths."""

    lengths: Lengths

    @property
    def constants(self) -> tuple[Tensor | None, ...]:
        return *self.lengths[:4], *super().constants

    def with_saved(self, sinks: Tensor | None, constants: Sequence[Tensor | None]) -> VarlenCall:
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = constants[:4]
        assert cu_seqlens_q is not None and cu_seqlens_k is not None
        lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, *self.lengths[4:])
        return replace(self, scores=self._scores_with(sinks, constants[4:]), lengths=lengths)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        options = self.softmax_scale, self.mask.causal, self.backend, self.sm_margin
        return run_varlen(q, k, v, self.lengths, *options, window=self.mask.sides, scores=self.scores)

    def differentiate(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> Gradients:
        in_order = self.deterministic or torch.are_deterministic_algorithms_enabled()
        options = self.softmax_scale, self.mask.causal, self.backend, in_order, self.mask.sides, self.scores

        def of_part(dout: Tensor, dlse: Tensor | None, v: Tensor, out: Tensor) -> Gradients:
            return run_varlen_backward(dout, dlse, q, k, v, out, lse, self.lengths, *options)

        if needs_parts(v.shape[2]):
            return differentiate_in_parts(dout, dlse, v, out, of_part)
        return of_part(dout, dlse, v, out)


class AttentionWithFunctions(torch.autograd.Function):
    """out and lse; differentiable by q, k, v and sinks, once."""

    @staticmethod
    def forward(
        ctx: Any,
        call: DenseCall,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        *constants: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = call.attend(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse, sinks, *constants)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, sinks, *constants = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        call = ctx.call.with_saved(sinks, constants)
        gradients = GradientWithFunctions.apply(call, dout, dlse, q, k, v, out, lse)
        dsinks = None if sinks is None else sinks_gradient(dout, dlse, out, lse, sinks)
        return None, *gradients, dsinks, *[None] * len(constants)


class GradientWithFunctions(torch.autograd.Function):
    """The gradients as a step of their own, so that differentiating them raises instead of giving zero."""

    @staticmethod
    def forward(ctx: Any, call: DenseCall, *tensors: Tensor) -> Gradients:
        return call.differentiate(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError(
            "the gradient of attention with score_mod or mask_mod was differentiated again (double backward), which no "
            "backend does; use hopper_attention.reference.attention_naive, which torch differentiates any number of "
            "times"
        )


@compiled.disable
def attend_with_functions(call: DenseCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse of a checked call.

    Raises:
        NotImplementedError: tensors of a GPU are fake. No operator stands for the call: a kernel would be launched.
    """
    if q.device.type == "cuda" and call.backend != "reference" and are_fake(q, k, v):
        raise NotImplementedError(
            "score_mod, mask_mod and block_mask on fake tensors of a GPU (torch.export, FakeTensorMode) are not "
            "implemented; torch.compile takes such a call, as a break in its graph, and backend='reference' is traced"
        )
    out, lse = AttentionWithFunctions.apply(call, q, k, v, call.scores.sinks, *call.constants)
    return out, lse
