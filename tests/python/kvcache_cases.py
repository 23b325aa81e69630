"""Calls on a key/value cache full of NaN but for its keys, and what comes of them, by plain indexing in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache as kept
from typing import Any

import torch
from torch import Tensor

from cute_kernels.append.config import has_minus
from tests.python.varlen_cases import offsets

FP8 = torch.float8_e4m3fn
GARBAGE = (-1, 1 << 30, -(1 << 31))
"""Page numbers behind the length of a sequence."""


def int32(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def bits(x: Tensor) -> Tensor:
    """What tells NaN from NaN."""
    return x.view(torch.uint8 if x.dtype == FP8 else torch.int16)


def turn(x: Tensor, cos: Tensor, sin: Tensor, position: int, interleaved: bool) -> Tensor:
    """Rotary embedding of (heads, columns), pair by pair, in float64."""
    x, half = x.double().clone(), cos.shape[1]
    for i in range(half):
        at, other = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = cos[position, i].double(), sin[position, i].double()
        first, second = x[:, at].clone(), x[:, other].clone()
        x[:, at], x[:, other] = first * c - second * s, first * s + second * c
    return x


@kept
def hadamard(size: int) -> Tensor:
    """Signs times Hadamard matrices of the powers of two in ``size``, the largest first, element by element."""
    matrix, start = torch.zeros(size, size).double(), 0
    for bit in reversed(range(size.bit_length())):
        n = size & 1 << bit
        for i in range(n):
            sign = -1.0 if has_minus(start + i) else 1.0
            for j in range(n):
                matrix[start + i, start + j] = sign * (-1.0) ** (i & j).bit_count() * n**-0.5
        start += n
    return matrix


@dataclass(frozen=True)
class CacheCase:
    """A call: sequences with so many keys in the cache, new tokens and queries.

    Attributes:
        lengths, new, queries: of each sequence; no new tokens is an empty tuple.
        page_size: 0 for a cache without pages.
        packed_q, packed_new: whether q, and the new tokens, are packed; else they are as long as the longest.
        leftpad, batch_idx: of each sequence, or empty.
        rotary_dim: 0 for none.
        rotary_seqlens: of each sequence, or empty.
        options: further arguments of the call.
    """

    lengths: tuple[int, ...] = (9, 0, 21)
    new: tuple[int, ...] = ()
    queries: tuple[int, ...] = (3, 3, 3)
    capacity: int = 24
    page_size: int = 0
    heads: tuple[int, int] = (4, 2)
    head_dims: tuple[int, int] = (32, 24)
    packed_q: bool = False
    packed_new: bool = False
    leftpad: tuple[int, ...] = ()
    batch_idx: tuple[int, ...] = ()
    rotary_dim: int = 0
    interleaved: bool = True
    rotary_seqlens: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def sequences(self) -> int:
        """In the cache."""
        return self.batch + 2 if self.batch_idx else self.batch

    def entry(self, b: int) -> int:
        return self.batch_idx[b] if self.batch_idx else b

    def pad(self, b: int) -> int:
        return self.leftpad[b] if self.leftpad else 0

    def count(self, b: int) -> int:
        return self.new[b] if self.new else 0

    def build(
        self, dtype: torch.dtype, cache_dtype: torch.dtype | None = None, seed: int = 0, **given: Any
    ) -> dict[str, Any]:
        """The arguments of the call."""
        torch.manual_seed(seed)
        cache_dtype = cache_dtype or dtype
        (heads, kv_heads), (head_dim, head_dim_v) = self.heads, self.head_dims
        rows = self.page_size or self.capacity
        a_sequence = -(-self.capacity // rows) if rows else 1
        pages = self.sequences * a_sequence + (3 if self.page_size else 0)
        caches = [
            torch.full((pages, rows, kv_heads, d), math.nan).to(cache_dtype) for d in (head_dim, head_dim_v)
        ]
        table = torch.randperm(pages)[: self.sequences * a_sequence].view(self.sequences, a_sequence).int()
        if not self.page_size:
            table = torch.arange(self.sequences)[:, None].int()
        for b, length in enumerate(self.lengths):
            for row in range(self.pad(b), length):
                for cache in caches:
                    token = torch.randn(kv_heads, cache.shape[3]).to(cache_dtype)
                    cache[table[self.entry(b), row // rows], row % rows] = token
            first_unused = -(-(length + self.count(b)) // max(rows, 1))
            for page in range(first_unused, a_sequence if self.page_size else 0):
                table[self.entry(b), page] = GARBAGE[page % 3]
        call: dict[str, Any] = {
            "k_cache": caches[0],
            "v_cache": caches[1],
            "cache_seqlens": int32(self.lengths),
        }
        call["q"] = self.tokens(self.queries, self.packed_q, (heads, head_dim)).to(dtype)
        if self.packed_q:
            call |= {"cu_seqlens_q": offsets(self.queries), "max_seqlen_q": max(self.queries)}
        if self.new:
            for name, columns in (("k", head_dim), ("v", head_dim_v)):
                call[name] = self.tokens(self.new, self.packed_new, (kv_heads, columns)).to(dtype)
        if self.packed_new:
            call["cu_seqlens_k_new"] = offsets(self.new)
        if self.page_size:
            call["page_table"] = table
        if self.batch_idx:
            call["cache_batch_idx"] = int32(self.batch_idx)
        if self.leftpad:
            call["cache_leftpad"] = int32(self.leftpad)
        if self.rotary_dim:
            angles = torch.rand(self.capacity + 8, self.rotary_dim // 2) * 2 * math.pi
            call |= {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype)}
            call["rotary_interleaved"] = self.interleaved
        if self.rotary_seqlens:
            call["rotary_seqlens"] = int32(self.rotary_seqlens)
        return call | self.options | given

    def tokens(self, counts: tuple[int, ...], packed: bool, sizes: tuple[int, int]) -> Tensor:
        if packed:
            return torch.randn(sum(counts), *sizes)
        return torch.randn(self.batch, max(counts), *sizes)

    def place(self, call: dict[str, Any], b: int, row: int) -> tuple[int, int]:
        """Page and row in it."""
        if not self.page_size:
            return self.entry(b), row
        return int(call["page_table"][self.entry(b), row // self.page_size]), row % self.page_size

    def token(self, call: dict[str, Any], name: str, b: int, i: int) -> Tensor:
        """New token, or query, i of a sequence."""
        packed, counts = (self.packed_q, self.queries) if name in ("q", "qv") else (self.packed_new, self.new)
        x: Tensor = call[name]
        return x[sum(counts[:b]) + i] if packed else x[b, i]

    def position(self, b: int) -> int:
        return self.rotary_seqlens[b] if self.rotary_seqlens else self.lengths[b]

    def turned(self, call: dict[str, Any], x: Tensor, position: int) -> Tensor:
        """A token or query as it is used, in float64."""
        if not self.rotary_dim:
            return x.double()
        return turn(x, call["rotary_cos"], call["rotary_sin"], position, self.interleaved)

    def caches_after(self, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The caches that a call should leave, new tokens rounded once from float64."""
        after = call["k_cache"].clone(), call["v_cache"].clone()
        for b in range(self.batch):
            for i in range(self.count(b)):
                at = self.place(call, b, self.lengths[b] + i)
                k = self.new_key(call, b, i)
                v = self.token(call, "v", b, i).double()
                for cache, token, name in zip(after, (k, v), ("k_descale", "v_descale"), strict=True):
                    if name in call and call["k"].dtype != FP8:
                        token = token / call[name][b].double()[:, None]
                    cache[at] = token.to(cache.dtype)
        return after

    def new_key(self, call: dict[str, Any], b: int, i: int) -> Tensor:
        """New token i of a sequence as it goes into the cache, in float64."""
        k = self.turned(call, self.token(call, "k", b, i), self.position(b) + i)
        return k @ hadamard(k.shape[1]) if call.get("hadamard") else k

    def keys(self, call: dict[str, Any], b: int) -> tuple[Tensor, Tensor]:
        """Those of a sequence in the caches of a call after it, (keys, kv_heads, columns) in float64."""
        both = []
        for name, descale in (("k_cache", "k_descale"), ("v_cache", "v_descale")):
            rows = range(self.pad(b), self.lengths[b] + self.count(b))
            x = torch.stack([call[name][self.place(call, b, row)].double() for row in rows]) if rows else None
            x = torch.zeros(0, *call[name].shape[2:]).double() if x is None else x
            both.append(x * self.scales(call, descale, b) if descale in call else x)
        return both[0], both[1]

    def scales(self, call: dict[str, Any], name: str, b: int) -> Tensor:
        """Of the keys of a sequence, (keys or 1, kv_heads, 1)."""
        descale = call[name].double()
        if descale.dim() == 2:
            return descale[b][None, :, None]
        places = [self.place(call, b, row) for row in range(self.pad(b), self.lengths[b] + self.count(b))]
        found = [descale[page, row % descale.shape[1]] for page, row in places]
        return torch.stack(found)[..., None] if found else descale[0, :0, :, None]

    def expected(self, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """out and lse of a call after it, in float64, in its layout."""
        (heads, _), dv = self.heads, self.head_dims[1]
        q = call["q"]
        out = torch.zeros(*q.shape[:-1], dv).double()
        lse = torch.full((*q.shape[:-3], heads, q.shape[-3]), -math.inf).double()
        for b in range(self.batch):
            queries = self.queries[b] if self.packed_q else max(self.queries)
            for i in range(queries):
                row, lse_row = self.attend(call, b, i, queries)
                at = (sum(self.queries[:b]) + i,) if self.packed_q else (b, i)
                out[at] = row
                lse[(*at[:-1], slice(None), at[-1])] = lse_row
        return out, lse

    def attend(self, call: dict[str, Any], b: int, i: int, queries: int) -> tuple[Tensor, Tensor]:
        """out (heads, head_dim_v) and lse (heads,) of one query."""
        left, right = call.get("window_size", (-1, -1))
        chunk, causal = call.get("attention_chunk", 0), call.get("causal", False)
        own = causal or (left, right) != (-1, -1) or chunk > 0
        q = self.token(call, "q", b, i)
        dtype, q = q.dtype, self.turned(call, q, self.position(b) + (i if own else 0))
        q = (q @ hadamard(q.shape[1]) if call.get("hadamard") else q).to(dtype).double()
        k, v = self.keys(call, b)
        group = self.heads[0] // self.heads[1]
        if "q_descale" in call:
            q = q * call["q_descale"][b].double().repeat_interleave(group)[:, None]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("hd,khd->hk", q.to(torch.float64), k)
        scale = q.shape[1] ** -0.5
        if "qv" in call:
            scores = scores + torch.einsum("hd,khd->hk", self.token(call, "qv", b, i).double(), v)
            scale = (q.shape[1] + v.shape[2]) ** -0.5
        scores = scores * call.get("softmax_scale", scale)
        if call.get("softcap"):
            scores = call["softcap"] * torch.tanh(scores / call["softcap"])
        own_key, keys = i + k.shape[0] - queries, torch.arange(k.shape[0])
        if "alibi_slopes" in call:
            slopes = call["alibi_slopes"].double().expand(self.batch, self.heads[0])[b]
            scores = scores - slopes[:, None] * (own_key - keys).abs()
        seen = torch.ones(k.shape[0], dtype=torch.bool)
        seen &= (keys <= own_key) if causal else seen
        seen &= (keys >= own_key - left) if left >= 0 else seen
        seen &= (keys <= own_key + right) if right >= 0 else seen
        if chunk:
            seen &= keys // chunk == own_key // chunk
        scores = scores.masked_fill(~seen, -math.inf)
        with_sinks = scores
        if "sinks" in call:
            with_sinks = torch.cat((scores, call["sinks"].double()[:, None]), 1)
        lse = (
            with_sinks.logsumexp(1)
            if with_sinks.shape[1]
            else torch.full((self.heads[0],), -math.inf).double()
        )
        weights = torch.exp(scores - lse[:, None].nan_to_num(neginf=0.0))
        return torch.einsum("hk,khd->hd", weights, v), lse
