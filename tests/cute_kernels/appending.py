"""Tokens to append to a cache, for tests: the kernel run on NumPy, and what it should do, by plain loops in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from cute_kernels.append.config import (
    BY_PAGE,
    BY_SEQUENCE,
    BY_TOKEN,
    HALVES,
    INTERLEAVED,
    THREADS,
    VECTOR,
    AppendConfig,
)
from hopper_attention.reference.append import Rotation, rounded
from tests.hopper.on_numpy import Arguments, program_of
from tests.python.kvcache_cases import hadamard

POISON = 0xFF
"""Every byte of a cache before: NaN in all types."""

NO_WORDS = torch.empty(0, dtype=torch.int32)
NO_TABLE = torch.empty(0, 0, dtype=torch.int32)


@dataclass(frozen=True)
class Case:
    """Arguments of ``append_to_cache``, and queries. Lengths and tables are of int32, or None."""

    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    cu_seqlens_k_new: Tensor | None = None
    cache_batch_idx: Tensor | None = None
    page_table: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    rotation: Rotation | None = None
    q: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    per_query_position: bool = True
    hadamard: bool = False

    @property
    def scales(self) -> str:
        if self.k_descale is None or self.k_descale.dim() == 2:
            return BY_SEQUENCE
        return BY_TOKEN if self.k_descale.shape[1] == self.k_cache.shape[1] else BY_PAGE

    @property
    def batch(self) -> int:
        return len(self.cache_seqlens)

    @property
    def capacity(self) -> int:
        return self.k_cache.shape[1] * (1 if self.page_table is None else self.page_table.shape[1])

    def config(self, arch: str = "sm_90a") -> AppendConfig:
        dtype, cache = (str(x.dtype).removeprefix("torch.") for x in (self.k, self.k_cache))
        if self.rotation is None:
            return AppendConfig(arch, dtype, cache, scales=self.scales, hadamard=self.hadamard)
        kind = INTERLEAVED if self.rotation.is_interleaved else HALVES
        tables, q = (str(x.dtype).removeprefix("torch.") for x in (self.rotation.cos, self.q))
        return AppendConfig(arch, dtype, cache, kind, tables, q, self.scales, self.hadamard)

    def copied(self) -> Case:
        """With caches of its own, laid out alike, and scales if these are written."""
        own = replace(self, k_cache=cloned(self.k_cache), v_cache=cloned(self.v_cache))
        if self.scales == BY_TOKEN:
            own = replace(own, k_descale=cloned(self.k_descale), v_descale=cloned(self.v_descale))
        return own


def cloned(tensor: Tensor) -> Tensor:
    """A copy with the same strides, and the same in the gaps between its elements."""
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage().clone())
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def poisoned(*shape: int, dtype: torch.dtype, gap: int = 0) -> Tensor:
    """A cache of which nothing was written, with ``gap`` columns between the heads."""
    *lead, columns = shape
    size = math.prod(lead) * (columns + gap) * dtype.itemsize
    cache = torch.full((size,), POISON, dtype=torch.uint8).view(dtype)
    return cache.view(*lead, columns + gap)[..., :columns]


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def append_on_numpy(case: Case) -> tuple[Tensor, Tensor | None]:
    """(new lengths, rotated queries), poisoned before; the caches of ``case`` are written."""
    config, c = case.config(), case
    arguments, lengths = Arguments(), int32(*[-7] * case.batch)
    k, v = (batched(x, c.cu_seqlens_k_new) for x in (c.k, c.v))
    for x in (k, v, c.k_cache, c.v_cache):
        arguments.tensor(x, tuple(x.shape), x.stride()[:3])
    for x in (c.cache_seqlens, c.cu_seqlens_k_new, c.cache_batch_idx):
        add_words(arguments, x)
    table = NO_TABLE if c.page_table is None else c.page_table
    arguments.tensor(table, tuple(table.shape), table.stride()[:1])
    add_words(arguments, lengths)
    if config.is_scaled:
        for x in (c.k_descale, c.v_descale):
            x = x.expand(-1, c.k_cache.shape[1], -1) if c.scales == BY_PAGE else x
            arguments.tensor(x, tuple(x.shape), x.stride())
    parts = [parts_of(k, config.spreads_keys), parts_of(v, config.spreads_values), 0]
    rows, rotated = k.shape[0] * k.shape[1], None
    if config.rotates:
        for x in (c.rotation.cos, c.rotation.sin):
            arguments.tensor(x, tuple(x.shape), x.stride()[:1])
        add_words(arguments, c.rotation.first_positions)
        q = batched(c.q, c.cu_seqlens_q)
        rotated = poisoned(*q.shape, dtype=q.dtype)
        for x in (q, rotated):
            arguments.tensor(x, tuple(x.shape), x.stride()[:3])
        add_words(arguments, c.cu_seqlens_q)
        arguments.add(int(c.per_query_position))
        parts[2] = parts_of(q, c.hadamard)
        rows = max(rows, q.shape[0] * q.shape[1])
    arguments.add(*parts, rows)
    arguments.launch(program_of(config), (rows + -(-c.batch // THREADS), sum(parts), 1))
    return lengths, None if rotated is None else rotated.view(c.q.shape)


def batched(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return x if cu_seqlens is None else x.unsqueeze(0)


def add_words(arguments: Arguments, words: Tensor | None) -> None:
    words = NO_WORDS if words is None else words
    arguments.tensor(words, (len(words),), ())


def parts_of(x: Tensor, spreads: bool) -> int:
    chunks = x.shape[3] // VECTOR
    chunks = 1 << (chunks - 1).bit_length() if spreads else chunks
    return -(-x.shape[2] * chunks // THREADS)


@dataclass(frozen=True)
class Written:
    """What an append should do, in float64: new values of the caches by place, of those that it writes, new lengths,
    rotated queries by row, but for those of no sequence, which are zeros, and the scales of tokens by place."""

    k: dict[tuple[int, int], Tensor]
    v: dict[tuple[int, int], Tensor]
    lengths: list[int]
    q: dict[tuple[int, ...], Tensor]
    scales: tuple[dict[tuple[int, int], Tensor], dict[tuple[int, int], Tensor]] = ({}, {})


def expected(case: Case) -> Written:
    """By a loop over all tokens."""
    written = Written({}, {}, [], {}, ({}, {}))
    for b in range(case.batch):
        old = int(case.cache_seqlens[b])
        first = old
        if case.rotation is not None and case.rotation.first_positions is not None:
            first = int(case.rotation.first_positions[b])
        tokens = rows_of(case.k, case.cu_seqlens_k_new, b)
        for i, row in enumerate(tokens):
            place = place_of(case, b, old + i)
            if place is not None:
                k, v = (x[row].double() for x in (case.k, case.v))
                k = mixed(case, turned(case.rotation, k, first + i))
                for x, descale, values, scales in (
                    (k, case.k_descale, written.k, written.scales[0]),
                    (v, case.v_descale, written.v, written.scales[1]),
                ):
                    values[place] = x
                    if case.scales == BY_TOKEN:
                        scales[place] = x.abs().amax(-1) / 448.0
                        values[place] = x / scales[place][:, None].clamp(min=1e-30)
                    elif descale is not None:
                        of_row = descale[b] if case.scales == BY_SEQUENCE else descale[place[0], 0]
                        values[place] = x / of_row[:, None].double()
        written.lengths.append(min(max(old + len(tokens), 0), case.capacity))
        if case.rotation is not None:
            for i, row in enumerate(rows_of(case.q, case.cu_seqlens_q, b)):
                position = first + i * int(case.per_query_position)
                written.q[row] = mixed(case, turned(case.rotation, case.q[row].double(), position))
    return written


def rows_of(x: Tensor, cu_seqlens: Tensor | None, b: int) -> list[tuple[int, ...]]:
    """Indices of the rows of a sequence."""
    if cu_seqlens is None:
        return [(b, i) for i in range(x.shape[1])]
    return [(i,) for i in range(int(cu_seqlens[b]), int(cu_seqlens[b + 1]))]


def place_of(case: Case, b: int, position: int) -> tuple[int, int] | None:
    """(page, row) of a token, if the cache has one."""
    entry = b if case.cache_batch_idx is None else int(case.cache_batch_idx[b])
    pages, page_size = case.k_cache.shape[:2]
    entries = pages if case.page_table is None else len(case.page_table)
    if not (0 <= position < case.capacity and 0 <= entry < entries):
        return None
    page = entry
    if case.page_table is not None:
        page = int(case.page_table[entry, position // page_size])
    return (page, position % page_size) if 0 <= page < pages else None


def turned(rotation: Rotation | None, x: Tensor, position: int) -> Tensor:
    """(heads, columns) of float64, rotated pair by pair."""
    if rotation is None:
        return x
    half, result = rotation.cos.shape[1], x.clone()
    row = min(max(position, 0), len(rotation.cos) - 1)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if rotation.is_interleaved else (i, i + half)
        cos, sin = (float(table[row, i].float()) for table in (rotation.cos, rotation.sin))
        result[:, a] = x[:, a] * cos - x[:, b] * sin
        result[:, b] = x[:, a] * sin + x[:, b] * cos
    return result


def mixed(case: Case, x: Tensor) -> Tensor:
    return x @ hadamard(x.shape[-1]) if case.hadamard else x


STEPS = {
    torch.float16: (2.0**-11, 2.0**-25),
    torch.bfloat16: (2.0**-8, 0.0),
    torch.float8_e4m3fn: (2.0**-4, 2.0**-10),
}
"""Half a step between numbers of a type: of their size, and below the normal ones."""


def check_rounded(found: Tensor, exact: Tensor) -> None:
    """Raise AssertionError unless ``found`` is ``exact`` rounded once, but for what float32 loses on the way."""
    relative, smallest = STEPS[found.dtype]
    if found.dtype == torch.float8_e4m3fn:
        exact = exact.clamp(-448.0, 448.0)
    allowed = relative * exact.abs() + smallest + 1e-6 * exact.abs().max()
    wrong = ~((found.double() - exact).abs() <= allowed)
    assert not bool(wrong.any()), f"{found[wrong][:4]} in place of {exact[wrong][:4]}"


def check_cache(
    cache: Tensor, before: Tensor, written: dict[tuple[int, int], Tensor], is_copied: bool
) -> None:
    """Every byte that should not be written is as before; with ``is_copied`` the others are exact."""
    left = torch.ones(cache.shape[:2], dtype=torch.bool)
    for place, exact in written.items():
        left[place] = False
        if is_copied:
            assert torch.equal(bytes_of(cache[place]), bytes_of(rounded(exact.float(), cache.dtype)))
        else:
            check_rounded(cache[place], exact)
    assert torch.equal(bytes_of(cache)[left], bytes_of(before)[left])
    gaps, gaps_before = whole(cache), whole(before)
    kept = torch.ones(len(gaps), dtype=torch.bool)
    own = torch.arange(len(gaps)).as_strided(cache.shape, cache.stride(), cache.storage_offset())
    kept[own.flatten()] = False
    assert torch.equal(gaps[kept], gaps_before[kept])


def bytes_of(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def whole(x: Tensor) -> Tensor:
    """The memory of a tensor, element by element."""
    kind = {1: torch.uint8, 2: torch.int16}[x.element_size()]
    return torch.empty(0, dtype=kind, device=x.device).set_(x.untyped_storage())


def check(case: Case, before: Case, lengths: Tensor, rotated: Tensor | None) -> None:
    """Whether ``case`` is what an append to ``before`` should have left."""
    wanted = expected(before)
    assert lengths.tolist() == wanted.lengths and lengths.dtype == torch.int32
    is_scaled = case.k_descale is not None
    is_copied = case.rotation is None and not is_scaled and not case.hadamard
    check_cache(case.k_cache, before.k_cache, wanted.k, is_copied)
    check_cache(case.v_cache, before.v_cache, wanted.v, not is_scaled)
    if case.scales == BY_TOKEN:
        for found, old, scales in zip(
            (case.k_descale, case.v_descale),
            (before.k_descale, before.v_descale),
            wanted.scales,
            strict=True,
        ):
            exact = old.double()
            for place, scale in scales.items():
                exact[place] = scale
            torch.testing.assert_close(found.double(), exact, rtol=4e-6, atol=0.0, equal_nan=True)
    if rotated is not None:
        for row in product(*(range(size) for size in rotated.shape[:-2])):
            check_rounded(rotated[row], wanted.q.get(row, torch.zeros(rotated.shape[-2:]).double()))
