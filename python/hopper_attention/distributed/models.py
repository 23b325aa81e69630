"""Context parallelism for models of Transformers, which take an attention function by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from hopper_attention.distributed.api import ContextOptions, context_parallel_attention
from hopper_attention.distributed.auto import AUTO
from hopper_attention.distributed.request import Mesh

AttentionFunction = Callable[..., tuple[Tensor, None]]


def attention_interface(
    mesh: Mesh = None, *, method: str = AUTO, **options: Unpack[ContextOptions]
) -> AttentionFunction:
    """A function for ``transformers.AttentionInterface.register``: attention of a model whose input is sharded.

    The model gets the rows of this rank, of tokens and of ``position_ids``, and every layer attends to the whole
    sequence. Mask, scale, softcap, sinks and sliding window come from the layer, the rest from ``options``.

    Args:
        mesh, method, options: as for :func:`context_parallel_attention`.

    The function that it returns raises:
        NotImplementedError: there is a mask beside the causal one (padding), or dropout.
    """

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """query, key and value are (batch, heads, rows, head_dim); the output (batch, rows, heads, head_dim)."""
        if attention_mask is not None:
            raise NotImplementedError(
                "attention_mask is given, which is not sharded with the sequence: register a mask function that gives "
                "None (docs/distributed.md), and pack sequences in place of padding them"
            )
        if dropout:
            raise NotImplementedError(f"dropout is {dropout}, allowed over several ranks: 0")
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        given: ContextOptions = {"causal": bool(causal), "softmax_scale": scaling, "softcap": softcap or 0.0}
        if sliding_window is not None:
            given["window_size"] = (sliding_window - 1, 0 if causal else sliding_window - 1)
        if s_aux is not None:
            given["sinks"] = s_aux
        given.update(options)
        given["return_lse"] = False
        out = context_parallel_attention(q, k, v, mesh, method=method, **given)
        assert isinstance(out, Tensor)
        return out, None

    return attend
