"""The workloads of the serving benchmark, as data. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hopper_attention.experiments.bench.spec import LONG_DTYPES
from hopper_attention.experiments.features.spec import skewed_lengths
from hopper_attention.experiments.reports import short_length
from hopper_attention.experiments.workloads.spec import H200, bytes_of, limit_us_of

MOST_DECODE_QUERIES = 16
"""Of a sequence. A workload with more is a prefill: its rate is counted in TFLOP/s, not in bytes of the cache."""

RAGGED_TOKENS, RAGGED_SEQUENCES, LONGEST_RAGGED = 524_288, 85, 47_823


def ragged_lengths(
    tokens: int = RAGGED_TOKENS, sequences: int = RAGGED_SEQUENCES, longest: int = LONGEST_RAGGED
) -> tuple[int, ...]:
    """Lengths with this sum: the longest in the middle of others that are exponentially distributed."""
    others = skewed_lengths(tokens - longest, sequences - 1)
    if max(others) > longest:
        raise ValueError(f"longest is {longest}, allowed with these sizes: {max(others)} or more")
    middle = len(others) // 2
    return *others[:middle], longest, *others[middle:]


@dataclass(frozen=True, kw_only=True)
class ServingWorkload:
    """A call on a key/value cache.

    Attributes:
        lengths: keys of each sequence, new ones included.
        queries: of each sequence, under a causal mask aligned at the last key.
        page_size: rows of a page, whose order in memory is random; 0: the cache is (batch, longest, ...).
        appends: the keys of the queries are new: the call rotates them and the queries and writes them into the cache.
        is_fp8: the cache is e4m3 with a descale for each sequence and key/value head.
        dtype: of queries, and of a cache that is not e4m3.
        latent: columns of V, which are more columns of the keys: a second query multiplies them. A row of the cache has
            these, and behind them the head_dim of K. 0: V has head_dim columns.
    """

    lengths: tuple[int, ...]
    heads: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    queries: int = 1
    page_size: int = 0
    appends: bool = False
    is_fp8: bool = False
    dtype: str = "bfloat16"
    latent: int = 0

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < self.queries:
            raise ValueError(
                f"lengths is {self.lengths}, allowed: one or more of queries, {self.queries}, or more"
            )
        if self.heads_kv < 1 or self.heads % self.heads_kv:
            raise ValueError(f"heads_kv is {self.heads_kv}, allowed: divisors of heads, {self.heads}")
        if self.is_fp8 and (self.page_size or self.appends):
            raise ValueError("is_fp8 is True, allowed: without pages and without new keys")
        if self.latent and (self.is_fp8 or self.appends):
            raise ValueError(f"latent is {self.latent}, allowed: 0 with a cache in e4m3 and with new keys")

    @property
    def key_columns(self) -> int:
        """That a query multiplies."""
        return self.head_dim + self.latent

    @property
    def value_columns(self) -> int:
        return self.latent or self.head_dim

    @property
    def softmax_scale(self) -> float:
        return self.key_columns**-0.5

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def is_ragged(self) -> bool:
        return min(self.lengths) < self.longest

    @property
    def is_prefill(self) -> bool:
        return self.queries > MOST_DECODE_QUERIES

    @property
    def is_causal(self) -> bool:
        """One query sees all keys with the mask or without it."""
        return self.queries > 1

    @property
    def is_plain(self) -> bool:
        """Whether it has neither pages nor new keys."""
        return not (self.page_size or self.appends)

    @property
    def plain(self) -> ServingWorkload:
        """The same without new keys, else without pages."""
        return replace(self, appends=False) if self.appends else replace(self, page_size=0)

    @property
    def visible(self) -> int:
        """Pairs of a query and a key that it sees, in all sequences."""
        hidden = self.queries * (self.queries - 1) // 2
        return sum(self.queries * length - hidden for length in self.lengths)

    @property
    def flops(self) -> float:
        """Useful operations: those of visible pairs alone."""
        return 2.0 * self.heads * (self.key_columns + self.value_columns) * self.visible

    @property
    def kv_bytes(self) -> int:
        """Of the keys and values that a call reads."""
        size = 1 if self.is_fp8 else bytes_of(self.dtype)
        columns = self.head_dim + self.value_columns
        return sum(self.lengths) * self.heads_kv * columns * size

    @property
    def input_bytes(self) -> int:
        return self.kv_bytes + self._rows_of_queries * self.key_columns * bytes_of(self.dtype)

    @property
    def moved_bytes(self) -> int:
        """Bytes that a call reads and writes at least: K, V, q and out, whose dtype is that of q."""
        return self.input_bytes + self._rows_of_queries * self.value_columns * bytes_of(self.dtype)

    @property
    def _rows_of_queries(self) -> int:
        return self.batch * self.queries * self.heads

    def limit_us(self, gpu: str = H200) -> float:
        """Below which a GPU cannot go."""
        return limit_us_of(self.flops, self.moved_bytes, self.is_fp8, gpu)

    @property
    def kind(self) -> str:
        return "prefill" if self.is_prefill else "decode"

    @property
    def batch_name(self) -> str:
        """Sequences and their keys, such as 64 x 8k, or 85 to 47823."""
        return f"{self.batch} {'to' if self.is_ragged else 'x'} {short_length(self.longest)}"

    @property
    def heads_name(self) -> str:
        return f"{self.heads}/{self.heads_kv}"

    @property
    def cache_name(self) -> str:
        """What is particular of the cache; empty if nothing is."""
        parts = ["e4m3"] if self.is_fp8 else []
        parts += [f"latent of {self.latent}"] if self.latent else []
        parts += [f"pages of {self.page_size}"] if self.page_size else []
        return ", ".join([*parts, *(["append"] if self.appends else [])])

    @property
    def name(self) -> str:
        """Such as ``bf16-decode-64x8k-q1-h32-hk8-d128-page64-append``."""
        parts = [LONG_DTYPES[self.dtype], self.kind, self.batch_name.replace(" ", ""), f"q{self.queries}"]
        parts += [f"h{self.heads}", f"hk{self.heads_kv}", f"d{self.head_dim}"]
        parts += [f"v{self.latent}"] if self.latent else []
        parts += [f"page{self.page_size}"] if self.page_size else []
        parts += [*(["append"] if self.appends else []), *(["e4m3"] if self.is_fp8 else [])]
        return "-".join(parts)


def equal(batch: int, length: int, heads_kv: int = 8) -> ServingWorkload:
    """One query for each of ``batch`` sequences with ``length`` thousand keys."""
    return ServingWorkload(lengths=(length * 1024,) * batch, heads_kv=heads_kv)


def in_pages(*workloads: ServingWorkload) -> tuple[ServingWorkload, ...]:
    return tuple(replace(workload, page_size=size) for workload in workloads for size in PAGE_SIZES)


PAGE_SIZES = (16, 64, 256)
SHORT = equal(1, 1)
"""Host time is measured on it."""

GROUPED = (
    *(equal(1, length) for length in (1, 8, 64, 128)),
    *(equal(8, length) for length in (1, 8, 64)),
    *(equal(batch, length) for batch in (64, 256) for length in (1, 8)),
)
OTHER_HEADS = (equal(1, 64, 1), equal(8, 8, 1), equal(1, 8, 32))
FOUR_QUERIES = tuple(replace(equal(batch, 8), queries=4) for batch in (1, 8))
PAGED = in_pages(equal(1, 128), equal(8, 8), equal(64, 8))
RAGGED = ServingWorkload(lengths=ragged_lengths())
PREFILL = tuple(replace(equal(4, length), queries=512) for length in (8, 32))
APPENDED = tuple(replace(equal(64, 8), appends=True, page_size=size) for size in (0, 64))
LATENT = tuple(
    ServingWorkload(
        lengths=(length * 1024,) * batch,
        heads=heads,
        heads_kv=1,
        head_dim=64,
        queries=queries,
        page_size=64,
        latent=512,
    )
    for batch, length, heads, queries in (
        (128, 8, 16, 1),
        (128, 8, 128, 1),
        (128, 8, 128, 2),
        (16, 32, 16, 1),
        (1, 64, 128, 1),
    )
)
"""Decoding over a latent (MLA), of one rank of eight and of one."""
FP8 = tuple(replace(equal(*sizes), is_fp8=True) for sizes in ((1, 64), (8, 8), (64, 8), (256, 8)))
KNOWN = equal(8, 1), equal(8, 8), FP8[1]
"""Measured also with lengths that the host knows."""

FP8_OTHERS = (
    replace(equal(1, 8), is_fp8=True),
    replace(equal(8, 8), is_fp8=True, queries=4),
    replace(equal(8, 8, 1), is_fp8=True),
)

WORKLOADS = (
    *GROUPED,
    *OTHER_HEADS,
    *FOUR_QUERIES,
    *PAGED,
    RAGGED,
    replace(RAGGED, page_size=64),
    *PREFILL,
    *in_pages(*PREFILL),
    *APPENDED,
    *LATENT,
)
"""What is measured, in this order. A new row is one more workload here."""

ALL_WORKLOADS = (*WORKLOADS, *FP8, *FP8_OTHERS)
"""With those that are measured only if they are asked for."""

TOPICS: dict[str, Callable[[ServingWorkload], bool]] = {
    "Decode": lambda w: w.is_plain and not (w.is_fp8 or w.is_prefill or w.is_ragged or w.latent),
    "Pages": lambda w: bool(w.page_size) and not (w.appends or w.is_prefill or w.is_ragged or w.latent),
    "Ragged sequences": lambda w: w.is_ragged and not (w.appends or w.is_prefill or w.latent),
    "Chunked prefill": lambda w: w.is_prefill and not (w.appends or w.latent),
    "New keys": lambda w: w.appends,
    "A latent": lambda w: w.latent > 0,
    "FP8 cache": lambda w: w.is_fp8 and not (w.is_prefill or w.is_ragged),
}
"""Parts of a report, by title: which workloads each has."""
