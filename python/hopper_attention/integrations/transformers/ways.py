"""The ways to compute a layer: in 16 bits, in FP8, and in float32 by torch's products or the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hopper_attention.api import flash_attn_func
from hopper_attention.dropout import draw_philox
from hopper_attention.fp8 import flash_attn_fp8_func
from hopper_attention.functions import MaskMod, ScoreMod
from hopper_attention.lengths import Lengths, read_sequences
from hopper_attention.masks import MaskSpec
from hopper_attention.notices import warn_once
from hopper_attention.reference import attention_tiled
from hopper_attention.sdpa import exact
from hopper_attention.varlen import flash_attn_varlen_func


@dataclass(frozen=True)
class Terms:
    """What is done to scores and to P, and which keys a query sees by its position.

    Attributes:
        scale: factor of the scores; None for head_dim**-0.5.
        is_causal: a query sees no later key.
        window: keys to the left that a query sees, itself among them; in both directions where nothing is causal. 0 is
            no window.
        softcap, sinks, dropout_p, deterministic: as of ``flash_attn_func``.
        table: a user's mask, which takes the place of causal and window; boolean, or to be added to scores.
    """

    scale: float | None
    is_causal: bool
    window: int
    softcap: float
    sinks: Tensor | None
    dropout_p: float
    deterministic: bool
    table: Tensor | None = None

    def as_seen(self, window: int, is_causal: bool) -> Terms:
        """The same, with what a mask says, which knows it better than a layer does; 0 leaves the layer's window."""
        if is_causal == self.is_causal and window in (0, self.window):
            return self
        return replace(self, window=window or self.window, is_causal=is_causal)

    def of_table(self, table: Tensor) -> Terms:
        """The same, seeing what a table says.

        Raises:
            NotImplementedError: it is no table that is supported.
        """
        if not isinstance(table, Tensor) or table.dim() != 4:
            shape = f" of shape {tuple(table.shape)}" if isinstance(table, Tensor) else ""
            raise NotImplementedError(
                f"attention_mask is a {type(table).__name__}{shape}, allowed: a padding mask of (batch, tokens), or a "
                "table of (batch, heads, queries, keys), boolean or floating; use attn_implementation='flex_attention' "
                "for its BlockMask"
            )
        if table.dtype != torch.bool and not table.dtype.is_floating_point:
            raise NotImplementedError(
                f"attention_mask has dtype {table.dtype}, allowed: torch.bool, where True is seen, or floating "
                "numbers, which are added to scores"
            )
        return replace(self, is_causal=False, window=0, table=table)

    @property
    def sides(self) -> tuple[int, int]:
        """``window_size`` of the package."""
        return (self.window - 1, self.window - 1) if self.window else (-1, -1)

    def of_kernel(self) -> dict[str, Any]:
        """As arguments of ``flash_attn_func`` and ``flash_attn_varlen_func``."""
        options = self.of_cache() | {"dropout_p": self.dropout_p, "deterministic": self.deterministic}
        return options | self.functions()

    def of_cache(self) -> dict[str, Any]:
        """As arguments of ``flash_attn_with_kvcache``."""
        return {
            "softmax_scale": self.scale,
            "causal": self.is_causal,
            "window_size": self.sides,
            "softcap": self.softcap,
            "sinks": None if self.sinks is None else self.sinks.float(),
        }

    def functions(self) -> dict[str, MaskMod | ScoreMod]:
        """The table as functions that read it."""
        if self.table is None:
            return {}
        table = self.table
        batches, heads = table.shape[0] > 1, table.shape[1] > 1
        if table.dtype == torch.bool:
            return {"mask_mod": lambda b, h, i, j: table[b if batches else 0, h if heads else 0, i, j]}
        return {"score_mod": lambda s, b, h, i, j: s + table[b if batches else 0, h if heads else 0, i, j]}


Dense = Callable[[Tensor, Tensor, Tensor, Terms], Tensor]
Packed = Callable[[Tensor, Tensor, Tensor, Lengths, Terms], Tensor]


class Way(NamedTuple):
    """How to attend to (batch, seqlen, heads, head_dim), and to packed (total, heads, head_dim)."""

    dense: Dense
    packed: Packed


def _half(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Tensor:
    return flash_attn_func(q, k, v, **terms.of_kernel())


def _half_packed(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, terms: Terms) -> Tensor:
    return flash_attn_varlen_func(q, k, v, **lengths._asdict(), **terms.of_kernel())


def _fp8(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Tensor:
    return flash_attn_fp8_func(q, k, v, **_fp8_options(terms))


def _fp8_packed(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, terms: Terms) -> Tensor:
    return flash_attn_fp8_func(q, k, v, **lengths._asdict(), **_fp8_options(terms))


def _fp8_options(terms: Terms) -> dict[str, Any]:
    wanted = {
        "softcap": terms.softcap != 0.0,
        "sinks (s_aux)": terms.sinks is not None,
        "dropout": terms.dropout_p != 0.0,
        "a mask of queries and keys": terms.table is not None,
    }
    refused = [name for name, is_wanted in wanted.items() if is_wanted]
    if refused:
        raise NotImplementedError(
            f"hopper_attention_fp8 does not support {', '.join(refused)}; use attn_implementation='hopper_attention'"
        )
    return {"softmax_scale": terms.scale, "causal": terms.is_causal, "window_size": terms.sides}


def _exact(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Tensor:
    """By torch's products on a CPU, where they can do it, else by the reference."""
    if q.device.type == "cpu" and not terms.dropout_p and terms.table is None:
        mask = MaskSpec.canonical(terms.is_causal, *terms.sides, q.shape[1], k.shape[1])
        scale = q.shape[3] ** -0.5 if terms.scale is None else terms.scale
        own = exact.Terms(mask.causal, scale, mask.sides, terms.softcap, sinks=terms.sinks)
        return exact.attend_exactly(q, k, v, own)
    if q.is_cuda:
        warn_once(
            "hopper_attention runs a float32 model on its reference, which is slow: no kernel takes float32. Load the "
            "model with dtype=torch.bfloat16, or use torch.autocast"
        )
    left, right = terms.sides
    philox = draw_philox(q.device) if terms.dropout_p else None
    out, _ = attention_tiled(
        q,
        k,
        v,
        causal=terms.is_causal,
        softmax_scale=terms.scale,
        window_left=left,
        window_right=right,
        softcap=terms.softcap,
        sinks=terms.sinks,
        dropout_p=terms.dropout_p,
        philox=philox,
        **terms.functions(),  # type: ignore[arg-type]  # one type for all its values
    )
    return out


def _exact_packed(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, terms: Terms) -> Tensor:
    """Sequence by sequence, and zeros where there is none."""
    sequences = read_sequences(lengths, q.shape[0], k.shape[0])
    parts = [
        _exact(q[None, rows.slice], k[None, keys.slice], v[None, keys.slice], terms)
        for rows, keys in sequences
    ]
    ends = [0, *(rows.stop for rows, _ in sequences), q.shape[0]]
    begins = [*(rows.start for rows, _ in sequences), q.shape[0]]
    gaps = [
        q.new_zeros(begin - end, q.shape[1], v.shape[2]) for end, begin in zip(ends, begins, strict=False)
    ]
    joined = [x for gap, part in zip(gaps, parts, strict=False) for x in (gap, part[0])]
    return torch.cat([*joined, gaps[-1]])


HALF = Way(_half, _half_packed)
FP8 = Way(_fp8, _fp8_packed)
EXACT = Way(_exact, _exact_packed)
