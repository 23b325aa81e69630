"""The attention functions: what a layer of a model hands over becomes one call of the package."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hopper_attention.integrations.transformers import visible
from hopper_attention.integrations.transformers.packing import find_offsets
from hopper_attention.integrations.transformers.ways import EXACT, FP8, HALF, Terms, Way
from hopper_attention.kvcache import flash_attn_with_kvcache
from hopper_attention.lengths import Lengths

REFUSED = {
    "position_bias": "attention with a learned position bias; use attn_implementation='eager' or 'sdpa'",
    "head_mask": "a head_mask; use attn_implementation='eager'",
    "output_attentions": "output_attentions=True, as no kernel has the probabilities; use attn_implementation='eager'",
    "cache": "continuous batching under this name; call prepare_batches(model) of "
    "hopper_attention.integrations.transformers first",
}
"""Arguments of a layer that are not supported, and what to use instead."""

KEYS_A_QUERY = 4
"""With more keys than this for each query, quantizing them is not worth while."""


class Heads(NamedTuple):
    """Q, K and V as the package has them, (batch, seqlen, heads, head_dim)."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def flat(self) -> tuple[Tensor, Tensor, Tensor]:
        """(batch * seqlen, heads, head_dim) each."""
        q, k, v = (x.flatten(0, 1) for x in self)
        return q, k, v

    @property
    def exact_way(self) -> Way:
        """What computes in the dtype that they have."""
        return EXACT if self.q.dtype == torch.float32 else HALF


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as ``AttentionInterface`` asks for it.

    16-bit tensors go to the kernels. float32 ones, which no kernel takes, are for tests: on a CPU torch's products
    serve them, elsewhere the tiled reference, which is slow. Where the layer's weights have 16 bits, or under autocast,
    they are cast first.

    Args:
        module: the layer. Its ``is_causal`` says whether queries see later keys, where ``is_causal`` does not.
        query: (batch, heads, seqlen_q, head_dim).
        key: (batch, kv_heads, seqlen_k, head_dim), the whole of a cache if there is one.
        value: (batch, kv_heads, seqlen_k, head_dim_v).
        attention_mask: what :func:`make_mask` made; or of a user, (batch, heads, seqlen_q, seqlen_k) where sizes may be
            1 instead, boolean or to be added to the scores. A user's is all there is: causal and windows are in it.
        dropout: how much of P is dropped.
        scaling: factor of the scores; head_dim**-0.5 by default.
        is_causal: overrides that of the layer.
        options: ``sliding_window``, ``softcap``, ``s_aux`` (sinks), ``deterministic``, ``position_ids``,
            ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k``. Others are of no matter here.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v), and None in place of the probabilities.

    Raises:
        NotImplementedError: something is asked for that is not supported; the message says what to use instead.
        ValueError, TypeError: of the package, for tensors that it does not take.
    """
    heads = _heads_of(module, query, key, value)
    terms = _terms_of(module, scaling, is_causal, dropout, options)
    options["layer"] = getattr(module, "layer_idx", None)
    return _attend(heads.exact_way, heads, attention_mask, terms, options), None


def attend_fp8(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """:func:`attend` with Q, K and V quantized to e4m3 where there is a query for ``KEYS_A_QUERY`` keys or fewer;
    gradients as of :func:`hopper_attention.flash_attn_fp8_func`.

    Other calls, so all steps on a cache, run as those of :func:`attend`: quantizing the cache anew would cost more than
    FP8 gains.

    Raises:
        NotImplementedError: as there; and for softcap, sinks, dropout and masks of users.
    """
    heads = _heads_of(module, query, key, value)
    terms = _terms_of(module, scaling, is_causal, dropout, options)
    options["layer"] = getattr(module, "layer_idx", None)
    seqlen_q, seqlen_k = heads.q.shape[1], heads.k.shape[1]
    way = FP8 if seqlen_q > 1 and seqlen_k <= KEYS_A_QUERY * seqlen_q else heads.exact_way
    return _attend(way, heads, attention_mask, terms, options), None


def attend_packed_rows(
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    scaling: float | None,
    is_causal: bool | None,
    dropout: float,
    options: dict[str, Any],
) -> Tensor:
    """:func:`attend` of one row of sequences whose offsets are in ``options``, for queries and keys each.

    Args:
        tensors: query (1, heads, total_q, head_dim), key and value (1, kv_heads, total_k, ...).
        module, scaling, is_causal, dropout, options: as there.

    Returns:
        out (1, total_q, heads, head_dim_v). Rows of no sequence are 0.
    """
    heads = _heads_of(module, *tensors)
    terms = _terms_of(module, scaling, is_causal, dropout, options)
    starts = options["cu_seq_lens_q"], options["cu_seq_lens_k"]
    lengths = Lengths(*starts, None, None, int(options["max_length_q"]), int(options["max_length_k"]))
    return _attend_packed(heads.exact_way, heads, lengths, terms)


# What a layer says


def _heads_of(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Heads:
    heads = Heads(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    dtype = _dtype_of(module, query, value)
    if query.dtype == key.dtype == value.dtype == dtype:
        return heads
    return Heads(*(x.to(dtype) for x in heads))


def _dtype_of(module: nn.Module, q: Tensor, v: Tensor) -> torch.dtype:
    """What to compute in. Norms and rotary embeddings of 16-bit models may have made q and k float32."""
    device = q.device.type
    if q.dtype != torch.float32 and q.dtype == v.dtype:
        return q.dtype
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    if v.dtype != torch.float32:
        return v.dtype
    weights = (layer.weight.dtype for layer in module.modules() if isinstance(layer, nn.Linear))
    dtype = next(weights, torch.float32)
    return dtype if dtype in (torch.float16, torch.bfloat16) else torch.float32


def _terms_of(
    module: nn.Module, scaling: float | None, is_causal: bool | None, dropout: float, options: dict[str, Any]
) -> Terms:
    for name in REFUSED.keys() & options.keys():
        if options[name] is not None and options[name] is not False:
            raise NotImplementedError(f"hopper_attention in Transformers does not support {REFUSED[name]}")
    if is_causal is None:
        # A decoder whose config says so attends in both directions, though its layers do not know.
        config = getattr(module, "config", None)
        is_causal = getattr(module, "is_causal", True) and getattr(config, "is_causal", True) is not False
    return Terms(
        scale=scaling,
        is_causal=bool(is_causal),
        window=options.get("sliding_window") or 0,
        softcap=options.get("softcap") or 0.0,
        sinks=options.get("s_aux"),
        dropout_p=dropout,
        deterministic=bool(options.get("deterministic")),
    )


# From a mask to a call


def _attend(way: Way, heads: Heads, mask: Tensor | None, terms: Terms, options: dict[str, Any]) -> Tensor:
    if mask is None:
        return _attend_to_all(way, heads, terms, options)
    if not visible.is_encoded(mask):
        return way.dense(*heads, terms.of_table(mask))
    seen = visible.decode(mask)
    terms = terms.as_seen(seen.window, seen.kind != visible.BOTH_WAYS)
    if seen.kind == visible.PACKED:
        starts_q, starts_k = seen.values.contiguous()
        lengths = Lengths(starts_q, starts_k, None, None, heads.q.shape[1], heads.k.shape[1])
        return _attend_packed(way, heads, lengths, terms)
    if seen.fields == visible.WINDOW_ONLY:
        return _attend_to_all(way, heads, terms, options)
    if seen.fields in (visible.ENDS, visible.KEYS):
        return _attend_to_keys(way, heads, seen, terms)
    return _attend_to_rows(way, heads, seen.values, terms)


def _attend_to_all(way: Way, heads: Heads, terms: Terms, options: dict[str, Any]) -> Tensor:
    """All keys, the last query at the last key; of each sequence, where a row holds several."""
    offsets = find_offsets(heads.q.shape[:2], heads.k.shape[1], options)
    if offsets is not None:
        return _attend_packed(way, heads, offsets, terms)
    if heads.q.shape[1] == 1 and _suits_cache(way, heads, terms):
        return flash_attn_with_kvcache(*heads, **terms.of_cache())
    return way.dense(*heads, terms)


def _attend_to_keys(way: Way, heads: Heads, seen: visible.Visible, terms: Terms) -> Tensor:
    """The keys up to end of each sequence, (batch, 1), or from begin on, (batch, 2); the last query at end - 1."""
    if way is not FP8 and _suits_cache(way, heads, terms):
        *begin, end = seen.columns
        left = begin[0] if begin else None
        return flash_attn_with_kvcache(*heads, cache_seqlens=end, cache_leftpad=left, **terms.of_cache())
    return _attend_to_rows(way, heads, visible.rows_of_keys(seen.values, heads.q.shape[1]), terms)


def _suits_cache(way: Way, heads: Heads, terms: Terms) -> bool:
    """Whether the function for caches can do it, which reads keys where they lie, and has no gradient."""
    tensors = heads if terms.sinks is None else (*heads, terms.sinks)
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return way is not EXACT and not needs_gradient and not terms.dropout_p


def _attend_to_rows(way: Way, heads: Heads, rows: Tensor, terms: Terms) -> Tensor:
    lengths = visible.lengths_of_rows(rows, heads.q.shape[1], heads.k.shape[1])
    return _attend_packed(way, heads, lengths, terms)


def _attend_packed(way: Way, heads: Heads, lengths: Lengths, terms: Terms) -> Tensor:
    out = way.packed(*heads.flat, lengths, terms)
    return out.unflatten(0, heads.q.shape[:2])
