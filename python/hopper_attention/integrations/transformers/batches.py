"""Continuous batching of Transformers, ``generate_batch``, on the kernels of packed sequences.

Transformers keeps keys in pages of its own. It hands a layer the new tokens of all requests in one row, with offsets,
and the cache to put them in, which gives back all keys of all requests in another row.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation import continuous_batching

from hopper_attention.integrations.transformers.attention import attend_packed_rows

BATCHES_NAME = "hopper_flash_attention"
"""Transformers batches continuously under names of its own, and under those with "flash" in them."""

PLACES_READ = "read_index"
"""What only ``generate_batch`` tells a layer: where in the cache its keys are."""

UPDATE = ["key_states", "value_states", "layer_idx", "kwargs"]
"""Parameters of ``PagedCache.update``."""


class PagedCache(Protocol):
    """What is used of Transformers' own."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]: ...


def prepare_batches(model: PreTrainedModel) -> PreTrainedModel:
    """Have ``model.generate_batch`` run on these kernels. Its other calls then raise an error.

    ``model.set_attn_implementation("hopper_attention")`` undoes it. The name is written into the config as it is:
    ``set_attn_implementation`` takes one with "flash" in it for a package of kernels to load.

    Returns:
        ``model`` itself.

    Raises:
        NotImplementedError: the model has attention that does not go by name, or this version of Transformers has
            another interface of its cache.
    """
    if not model._can_set_attn_implementation():
        raise NotImplementedError(
            f"{type(model).__name__} has attention that does not go by name; use a model that makes use of "
            "AttentionInterface"
        )
    if not can_prepare_batches():
        raise NotImplementedError(
            "this version of Transformers updates its paged cache in another way; use a newer one, or "
            "attn_implementation='sdpa'"
        )
    model.config._attn_implementation = BATCHES_NAME
    return model


def can_prepare_batches() -> bool:
    """Whether this version of Transformers updates its paged cache in the way that is known here."""
    cache = getattr(continuous_batching, "PagedAttentionCache", None)
    return cache is not None and list(inspect.signature(cache.update).parameters)[1:] == UPDATE


def attend_batches(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    cache: PagedCache | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer in ``generate_batch``, as ``AttentionInterface`` asks for it.

    Args:
        module, scaling, is_causal: as in :func:`~hopper_attention.integrations.transformers.attend`.
        query: (1, heads, total_q, head_dim), the new tokens of all requests.
        key, value: (1, kv_heads, total_q, ...), theirs.
        attention_mask: None, as offsets say all of it.
        cache: takes key and value, and gives those of all tokens of the requests. From Transformers 5.24 on the layer
            has done that before, and there is none.
        options: as there, and the offsets, lengths and places in the cache that ``cache`` reads.

    Returns:
        out (1, total_q, heads, head_dim_v), and None in place of the probabilities.

    Raises:
        NotImplementedError: called by anything but ``generate_batch``.
    """
    if cache is None and PLACES_READ not in options:
        raise NotImplementedError(
            f"attn_implementation {BATCHES_NAME!r} serves generate_batch alone; use "
            "model.set_attn_implementation('hopper_attention') for other calls"
        )
    if cache is not None:
        layer: Any = module.layer_idx
        key, value = cache.update(key, value, layer, options)
    return attend_packed_rows(module, (query, key, value), scaling, is_causal, dropout, options), None


def no_mask(*sizes: Any, **options: Any) -> None:
    """The mask function under this name: there is none."""
