"""The workloads of the features' benchmark, as data. Nothing here needs torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from hopper_attention.experiments.bench.spec import LONG_DTYPES
from hopper_attention.experiments.reports import short_length
from hopper_attention.experiments.workloads.spec import H200, bytes_of, limit_us_of

Direction = Literal["forward", "backward"]
PASSES: tuple[Direction, ...] = ("forward", "backward")
UNLIMITED = -1
FULL_WINDOW = (UNLIMITED, UNLIMITED)

BIAS, DOCUMENTS = "bias", "documents"
FUNCTIONS = ("", BIAS, DOCUMENTS)
"""What is given to attention as functions: nothing; a bias by distance as a score function; that sequences do not see
each other, and the causal mask, as a mask function, of packed sequences that are one sequence otherwise."""

BACKWARD_WORK = 2.5
"""Operations of a backward pass over those of the forward: five matrix products for two."""

TOKENS = 32_768
SEQUENCES = 32
SEED = 5
"""Of the skewed lengths. Their mean square is near that of an exponential distribution, twice the mean's square."""


def skewed_lengths(tokens: int = TOKENS, sequences: int = SEQUENCES, seed: int = SEED) -> tuple[int, ...]:
    """Lengths of 1 or more with this sum, exponentially distributed: a few long sequences among many short ones."""
    generator = random.Random(seed)
    weights = [generator.expovariate(1.0) for _ in range(sequences)]
    lengths = [max(1, round(weight / sum(weights) * tokens)) for weight in weights]
    lengths[lengths.index(max(lengths))] += tokens - sum(lengths)
    return tuple(lengths)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Self-attention of a batch of sequences, forward or backward.

    Attributes:
        lengths: of the sequences. Unless they are packed, all are equal.
        is_packed: the sequences lie one after another in one tensor, as ``flash_attn_varlen_func`` has them.
        window: (left, right) as ``flash_attn_func`` takes it; with ``causal`` the right side is 0 whatever it says.
        direction: which pass is timed.
        is_fp8: q, k and v are drawn in ``dtype`` and made e4m3, unless a peer says so outside of the timing.
        softcap: c of c tanh(score / c); 0 is none.
        alibi, sinks: whether there are slopes and sinks, whose values ``score_terms`` has.
        dropout: how much of P is dropped; not of packed sequences.
        latent: columns of a latent, which are further columns of the keys, and the values as well (MLA); ``head_dim``
            are then those of the rotary part. 0: there is none, and values have head_dim columns.
        functions: one of ``FUNCTIONS``.
    """

    lengths: tuple[int, ...]
    heads: int
    heads_kv: int
    head_dim: int
    causal: bool = True
    window: tuple[int, int] = FULL_WINDOW
    is_packed: bool = False
    direction: Direction = "forward"
    dtype: str = "bfloat16"
    is_fp8: bool = False
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    dropout: float = 0.0
    latent: int = 0
    functions: str = ""

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1 or not (self.is_packed or self.has_equal_lengths):
            raise ValueError(f"lengths is {self.lengths}, allowed: 1 or more, all equal unless packed")
        if self.dropout and self.is_packed:
            raise ValueError(f"dropout is {self.dropout}, allowed of packed sequences: 0")
        if self.direction not in PASSES:
            raise ValueError(f"direction is {self.direction!r}, allowed: {', '.join(PASSES)}")
        if self.functions not in FUNCTIONS or (self.functions == DOCUMENTS and not self.is_packed):
            raise ValueError(f"functions is {self.functions!r}, allowed: {FUNCTIONS}, documents if packed")
        if self.is_fp8 and self.is_backward:
            raise ValueError(
                "direction is 'backward', allowed in FP8: 'forward', as gradients are those of 16 bits"
            )

    @property
    def score_dim(self) -> int:
        """Columns of a query that make a score."""
        return self.head_dim + self.latent

    @property
    def value_dim(self) -> int:
        return self.latent or self.head_dim

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def has_equal_lengths(self) -> bool:
        return min(self.lengths) == self.longest

    @property
    def is_backward(self) -> bool:
        return self.direction == "backward"

    @property
    def has_window(self) -> bool:
        """Whether a side is limited beyond what ``causal`` says."""
        return self.window[0] != UNLIMITED or (self.window[1] != UNLIMITED and not self.causal)

    def key_range(self, length: int, first: int, stop: int) -> tuple[int, int]:
        """Keys of a sequence of this length, from and to, that some query from ``first`` to before ``stop`` sees."""
        left, right = self.sides(length)
        return max(0, first - left), min(length, stop + right)

    def sides(self, length: int) -> tuple[int, int]:
        """Keys before and after its own that a query of a sequence of this length sees at most."""
        left, right = self.window
        right = 0 if self.causal else right
        return (length if left == UNLIMITED else left), (length if right == UNLIMITED else right)

    @property
    def visible(self) -> int:
        """Pairs of a query and a key that it sees, in all sequences."""
        return sum(visible_pairs(length, *self.sides(length)) for length in self.lengths)

    @property
    def flops(self) -> float:
        """Useful operations: those of visible pairs alone."""
        forward = 2.0 * self.heads * (self.score_dim + self.value_dim) * self.visible
        return BACKWARD_WORK * forward if self.is_backward else forward

    @property
    def input_bytes(self) -> int:
        """Bytes of q, k and v together."""
        size = 1 if self.is_fp8 else bytes_of(self.dtype)
        return self.tokens * (self.heads * self.score_dim + self.heads_kv * self.key_columns) * size

    @property
    def key_columns(self) -> int:
        """Of K and V together; a latent counts once."""
        return self.score_dim if self.latent else 2 * self.head_dim

    @property
    def moved_bytes(self) -> int:
        """Bytes that a pass reads and writes at least: q, k, v and out; backward also the gradients of all four."""
        forward = self.input_bytes + self.tokens * self.heads * self.value_dim * bytes_of(self.dtype)
        return 2 * forward if self.is_backward else forward

    def limit_us(self, gpu: str = H200) -> float:
        """Below which a GPU cannot go."""
        return limit_us_of(self.flops, self.moved_bytes, self.is_fp8, gpu)

    @property
    def batch_name(self) -> str:
        """Tokens and sequences, such as 32k in 32 skewed, or 4 x 8k."""
        if self.is_packed:
            kind = "equal" if self.has_equal_lengths else "skewed"
            return f"{short_length(self.tokens)} in {len(self.lengths)} {kind}"
        return f"{len(self.lengths)} x {short_length(self.longest)}"

    @property
    def mask_name(self) -> str:
        """Causal, full, or the window: under a causal mask by the keys that a query sees, else by its two sides. With
        the functions that there are."""
        return " ".join([self._sides_name, *([self.functions] if self.functions else [])])

    @property
    def _sides_name(self) -> str:
        if not self.has_window:
            return "causal" if self.causal else "full"
        if self.causal:
            return f"window {self.window[0] + 1}"
        left, right = ("all" if side == UNLIMITED else str(side) for side in self.window)
        return f"window {left}, {right}"

    @property
    def changes_scores(self) -> bool:
        return bool(self.softcap) or self.alibi or self.sinks or bool(self.dropout)

    @property
    def scores_name(self) -> str:
        """What is done to scores and P, such as softcap 30; empty if nothing is."""
        names = {
            f"softcap {self.softcap:g}": self.softcap,
            "ALiBi": self.alibi,
            "sinks": self.sinks,
            f"dropout {self.dropout:g}": self.dropout,
        }
        return ", ".join(name for name, is_there in names.items() if is_there)

    @property
    def heads_name(self) -> str:
        return f"{self.heads}" if self.heads == self.heads_kv else f"{self.heads}/{self.heads_kv}"

    @property
    def columns_name(self) -> str:
        """Such as d128, or d64 latent 512."""
        return f"d{self.head_dim}" + (f" latent {self.latent}" if self.latent else "")

    @property
    def name(self) -> str:
        """Such as ``bf16-packed-32k-in-32-skewed-h16-d128-causal-forward``."""
        parts = ["fp8" if self.is_fp8 else LONG_DTYPES[self.dtype], *(["packed"] if self.is_packed else [])]
        parts += [self.batch_name.replace(" x ", "x"), f"h{self.heads_name.replace('/', '-hk')}"]
        scores = [self.scores_name.lower()] if self.changes_scores else []
        parts += [
            self.columns_name.replace(" ", "-"),
            *(x.replace(", ", "-") for x in (self.mask_name, *scores)),
            self.direction,
        ]
        return "-".join(parts).replace(" ", "-")


def visible_pairs(length: int, left: int, right: int) -> int:
    """Pairs of a query and a key of one sequence that are at most ``left`` and ``right`` apart."""
    left, right = min(left, length - 1), min(right, length - 1)
    before, after = length - 1 - left, length - 1 - right
    return length * length - before * (before + 1) // 2 - after * (after + 1) // 2


@dataclass(frozen=True)
class Family:
    """How inputs are drawn: N(0, 1), queries times ``query_factor``."""

    words: str
    query_factor: float


FAMILIES = {
    "normal": Family("N(0, 1)", 1.0),
    "peaky": Family("N(0, 1), queries times 4: most of a row's weight on a few keys", 4.0),
}

SKEWED = Workload(lengths=skewed_lengths(), heads=16, heads_kv=16, head_dim=128, is_packed=True)
EQUAL = replace(SKEWED, lengths=(TOKENS // SEQUENCES,) * SEQUENCES)
GROUPED = replace(SKEWED, heads=32, heads_kv=8)
PACKED = (
    SKEWED,
    replace(SKEWED, causal=False),
    GROUPED,
    replace(SKEWED, heads=32, heads_kv=32, head_dim=64),
    replace(SKEWED, heads=8, heads_kv=8, head_dim=256),
    EQUAL,
    replace(EQUAL, causal=False),
)
WINDOWED = tuple(
    Workload(lengths=(length,), heads=heads, heads_kv=heads, head_dim=head_dim, window=(keys - 1, 0))
    for keys in (4096, 128)
    for length in (16_384, 65_536)
    for heads, head_dim in ((16, 128), (32, 64))
)

CAPPED = Workload(lengths=(8192,), heads=16, heads_kv=8, head_dim=256, softcap=30.0)
BIASED = Workload(lengths=(4096,) * 2, heads=32, heads_kv=32, head_dim=128, alibi=True)
SUNK = Workload(lengths=(8192,), heads=64, heads_kv=8, head_dim=64, sinks=True)
CHANGED = (CAPPED, replace(CAPPED, window=(4095, 0)), BIASED, SUNK, replace(SUNK, window=(127, 0)))
DROPPED = Workload(lengths=(16_384,), heads=16, heads_kv=16, head_dim=128, causal=False, dropout=0.1)
LATENT = Workload(lengths=(16_384,), heads=16, heads_kv=1, head_dim=64, latent=512)
LATENTS = (replace(LATENT, lengths=(4096,)), LATENT)


def backward_of(*workloads: Workload) -> tuple[Workload, ...]:
    return tuple(replace(workload, direction="backward") for workload in workloads)


def of_16k_d128(workload: Workload) -> bool:
    return workload.lengths == (16_384,) and workload.head_dim == 128


LONG_SKEWED = replace(SKEWED, lengths=skewed_lengths(2 * TOKENS, 8))
FP8 = tuple(
    replace(workload, is_fp8=True)
    for workload in (
        LONG_SKEWED,
        replace(LONG_SKEWED, causal=False),
        replace(LONG_SKEWED, heads=32, heads_kv=32, head_dim=64),
        replace(LONG_SKEWED, heads=8, heads_kv=8, head_dim=256),
        replace(SKEWED, lengths=(8192,) * 4),
        replace(SKEWED, lengths=(8192,) * 4, causal=False),
        *(w for w in WINDOWED if w.window[0] == 4095),
    )
)
WITH_FUNCTIONS = (
    Workload(lengths=(8192,), heads=16, heads_kv=16, head_dim=128, functions=BIAS),
    replace(SKEWED, functions=DOCUMENTS),
)

WORKLOADS = (
    *PACKED,
    *backward_of(*PACKED),
    *WINDOWED,
    *backward_of(*filter(of_16k_d128, WINDOWED)),
    *CHANGED,
    DROPPED,
    *backward_of(DROPPED),
    *FP8,
    *LATENTS,
    *WITH_FUNCTIONS,
    *backward_of(*WITH_FUNCTIONS),
)
"""What is measured, in this order. A new row is one more workload here."""

TOPICS: dict[str, Callable[[Workload], bool]] = {
    "Packed sequences": lambda workload: workload.is_packed and not (workload.is_fp8 or workload.functions),
    "Windows": lambda workload: (
        workload.has_window and not (workload.is_packed or workload.changes_scores or workload.is_fp8)
    ),
    "A latent": lambda workload: bool(workload.latent),
    "Scores": lambda workload: workload.changes_scores and not workload.is_packed,
    "FP8": lambda workload: workload.is_fp8,
    "Functions of scores": lambda workload: bool(workload.functions),
}
"""Parts of a report, by title: which workloads each has."""
