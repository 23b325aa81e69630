"""Problems of the benchmarks: sizes, names, the shapes of the paper, and random ones. Nothing here needs torch."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass, replace

SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
LONG_DTYPES = {long: short for short, long in SHORT_DTYPES.items()}

PAPER_TOKENS = 16_384
PAPER_WIDTH = 2_048
PAPER_SEQLENS = (512, 1024, 2048, 4096, 8192, 16_384)
PAPER_HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True)
class Problem:
    """One forward problem: q (batch, seqlen_q, heads, head_dim), k and v with ``heads_kv`` heads."""

    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool

    @property
    def shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """Of q, k and v."""
        return (
            (self.batch, self.seqlen_q, self.heads, self.head_dim),
            (self.batch, self.seqlen_k, self.heads_kv, self.head_dim),
            (self.batch, self.seqlen_k, self.heads_kv, self.head_dim_v),
        )

    @property
    def flops(self) -> float:
        """Operations as the paper counts them (section 4.1): both matrix products, halved if causal."""
        scores = self.batch * self.heads * self.seqlen_q * self.seqlen_k
        products = 2.0 * scores * (self.head_dim + self.head_dim_v)
        return products / 2 if self.causal else products

    @property
    def input_bytes(self) -> int:
        """Bytes of q, k and v together."""
        size = 4 if self.dtype == "float32" else 2
        queries = self.seqlen_q * self.heads * self.head_dim
        keys = self.seqlen_k * self.heads_kv * (self.head_dim + self.head_dim_v)
        return self.batch * (queries + keys) * size

    @property
    def name(self) -> str:
        """Short name, which :func:`parse_problem` reads back, such as ``bf16-b4-s4096-h16-d128-causal``."""
        parts = [LONG_DTYPES[self.dtype], f"b{self.batch}", f"s{self.seqlen_q}"]
        parts += [f"sk{self.seqlen_k}"] if self.seqlen_k != self.seqlen_q else []
        parts += [f"h{self.heads}"]
        parts += [f"hk{self.heads_kv}"] if self.heads_kv != self.heads else []
        parts += [f"d{self.head_dim}"]
        parts += [f"dv{self.head_dim_v}"] if self.head_dim_v != self.head_dim else []
        return "-".join([*parts, "causal" if self.causal else "full"])


ABLATION = Problem("float16", 4, 8448, 8448, 16, 16, 128, 128, causal=False)
"""The shape of the paper's ablation (section 4.2)."""


def paper_grid(dtype: str = "bfloat16") -> tuple[Problem, ...]:
    """The paper's 36 forward cells (section 4.1): 16384 tokens, heads x head_dim = 2048."""
    return tuple(
        Problem(dtype, PAPER_TOKENS // s, s, s, PAPER_WIDTH // d, PAPER_WIDTH // d, d, d, causal)
        for d in PAPER_HEAD_DIMS
        for causal in (False, True)
        for s in PAPER_SEQLENS
    )


def parse_problem(text: str) -> Problem:
    """Read a name such as ``bf16-b4-s8192-h16-hk4-d128-causal``; sk, hk and dv default to s, h and d.

    Raises:
        ValueError: a part is missing or is not one of those, or a size is 0.
    """
    sizes: dict[str, int] = {}
    words: list[str] = []
    for part in text.strip().split("-"):
        match = re.fullmatch(r"(b|sk|s|hk|h|dv|d)(\d+)", part)
        if match:
            sizes[match[1]] = int(match[2])
        else:
            words.append(part)
    dtypes = [SHORT_DTYPES[word] for word in words if word in SHORT_DTYPES]
    masks = [word for word in words if word in ("causal", "full")]
    missing = [key for key in ("b", "s", "h", "d") if key not in sizes]
    if missing or len(dtypes) != 1 or len(masks) > 1 or len(dtypes) + len(masks) != len(words):
        raise ValueError(
            f"shape is {text!r}, allowed: names such as bf16-b4-s8192-h16-d128-causal (sk, hk, dv optional), "
            f"a dtype of {', '.join(SHORT_DTYPES)}, and causal or full"
        )
    if 0 in sizes.values():
        raise ValueError(f"shape is {text!r}, allowed: sizes above 0, since nothing takes no time")
    return Problem(
        dtype=dtypes[0],
        batch=sizes["b"],
        seqlen_q=sizes["s"],
        seqlen_k=sizes.get("sk", sizes["s"]),
        heads=sizes["h"],
        heads_kv=sizes.get("hk", sizes["h"]),
        head_dim=sizes["d"],
        head_dim_v=sizes.get("dv", sizes["d"]),
        causal=masks == ["causal"],
    )


EVEN = parse_problem("bf16-b1-s4096-h32-d128-causal")
RAGGED = replace(EVEN, seqlen_q=4099, seqlen_k=4099)
"""Three queries and keys more than a round number, which are a tile and a key block more."""

BETWEEN_TILES = tuple(
    parse_problem(f"bf16-b4-s4096-h16-d{head_dim}-{mask}")
    for head_dim in (72, 80, 104)
    for mask in ("full", "causal")
)
IMAGES = parse_problem("bf16-b64-s197-h12-d64-full")
"""The tokens of an image in a vision transformer."""

SHORT = tuple(parse_problem(f"bf16-b1-s{seqlen}-h32-d128-full") for seqlen in (512, 128))

LONGEST = {
    d: tuple(parse_problem(f"bf16-b1-s16384-h{PAPER_WIDTH // d}-d{d}-{mask}") for mask in ("full", "causal"))
    for d in PAPER_HEAD_DIMS
}
"""Without a mask, and causal, by head_dim."""

ODD_SHAPES: tuple[Problem, ...] = (
    EVEN,
    RAGGED,
    *BETWEEN_TILES,
    IMAGES,
    *SHORT,
    *(problem for pair in LONGEST.values() for problem in pair),
)
"""Beside the paper's grid: short ones, odd sizes, and its longest ones, which stand beside a matrix product."""


RANDOM_HEAD_DIMS = (64, 64, 128, 128, 128, 256, 96, 192)
"""As often as models have them, about."""

RANDOM_HEADS = (
    *((8, 8), (16, 16), (12, 12), (32, 32), (20, 20), (5, 5)),
    *((32, 8), (16, 2), (24, 8), (40, 8), (64, 8), (28, 4), (16, 1), (3, 1)),
)
"""Of queries and of keys."""

MOST_BATCH, LEAST_SEQLEN, MOST_SEQLEN = 40, 257, 16_384
MOST_PAIRS = 4e9
"""Pairs of a query and a key in all heads, of 128 columns: some milliseconds of an H200."""

MOST_ELEMENTS = 2**28
"""Of q, and of k and v."""

WHOLE, OTHER_KEYS = 0.4, 0.25
"""How often lengths are whole tiles, and how often keys are not as many as queries."""

RANDOM = re.compile(r"random:(?P<count>[1-9]\d*)(?::(?P<seed>\d+))?")


def random_problems(count: int, seed: int, dtype: str = "bfloat16") -> tuple[Problem, ...]:
    """So many that differ. The first of them are the same for a seed, however many are asked for."""
    found: dict[Problem, None] = {}
    number = 0
    while len(found) < count:
        found[_draw(random.Random(f"{seed} {number}"), dtype)] = None
        number += 1
    return tuple(found)


def _draw(chance: random.Random, dtype: str) -> Problem:
    head_dim, (heads, heads_kv) = chance.choice(RANDOM_HEAD_DIMS), chance.choice(RANDOM_HEADS)
    batch = _between(chance, 1, MOST_BATCH)
    seqlen_q = _between(chance, LEAST_SEQLEN, MOST_SEQLEN)
    if chance.random() < WHOLE:
        seqlen_q = max(seqlen_q // 128 * 128, 384)
    ratio = chance.uniform(0.2, 3) if chance.random() < OTHER_KEYS else 1.0
    while _is_large(batch, seqlen_q, ratio, heads * head_dim):
        batch, seqlen_q = (batch // 2, seqlen_q) if batch > 1 else (batch, seqlen_q // 2)
    seqlen_k = max(int(seqlen_q * ratio), 1)
    sizes = batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, head_dim
    return Problem(dtype, *sizes, causal=chance.random() < 0.5)


def _between(chance: random.Random, least: int, most: int) -> int:
    """As likely to be in one octave as in another."""
    return int(math.exp(chance.uniform(math.log(least), math.log(most + 1))))


def _is_large(batch: int, seqlen: int, ratio: float, width: int) -> bool:
    pairs = batch * seqlen * seqlen * ratio * width / 128
    return pairs > MOST_PAIRS or batch * seqlen * max(ratio, 1.0) * width > MOST_ELEMENTS


def parse_shapes(text: str) -> tuple[Problem, ...]:
    """Comma-separated problems; ``paper`` stands for the 36 cells, ``ablation`` for the ablation's shape, ``odd`` for
    ODD_SHAPES, ``random:COUNT`` or ``random:COUNT:SEED`` for so many ``random_problems``."""
    groups = {"paper": paper_grid(), "ablation": (ABLATION,), "odd": ODD_SHAPES}
    problems: list[Problem] = []
    for part in map(str.strip, text.split(",")):
        drawn = RANDOM.fullmatch(part)
        if drawn:
            problems += random_problems(int(drawn["count"]), int(drawn["seed"] or 0))
        else:
            problems += groups[part] if part in groups else [parse_problem(part)]
    return tuple(dict.fromkeys(problems))
