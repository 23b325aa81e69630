"""Families of inputs that FP8 attention meets, as draws of q, k and v."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hopper_attention.experiments.bench.peers import Inputs
from hopper_attention.experiments.bench.spec import Problem

OUTLIER_STD, OUTLIER_SHARE = 10.0, 0.001
"""The paper's inputs, section 4.3: N(0, 1) + N(0, 100) * Bernoulli(0.001)."""

LARGE_CHANNELS, LARGE_MEAN = 16, 4.0
"""One channel of so many has a mean of this times a normal number; others have a normal one as it is."""

ROPE_BASE = 10_000.0
SINK = 8.0
"""A query along the mean of all queries, and as long as they are, has this times sqrt(head_dim) as its score with the
first key."""

SINK_SHARE, SINK_MEAN = 0.01, 0.3
"""The values of a sink are so much of the others', which have this mean."""

LARGE_TOKENS, LARGE_FACTOR = 128, 20.0
"""One key of so many is this many times as large, in k and in v."""


@dataclass(frozen=True)
class Family:
    """A kind of inputs: its name, what it is in a line, and how it is drawn with a generator on its device."""

    name: str
    what: str
    draw: Callable[[Problem, torch.Generator], Inputs]


def normal(problem: Problem, generator: torch.Generator) -> Inputs:
    """N(0, 1) in float32: q (batch, seqlen_q, heads, head_dim), k and v (batch, seqlen_k, heads_kv, ...)."""
    return Inputs(
        *(torch.randn(shape, generator=generator, device=generator.device) for shape in problem.shapes)
    )


def outliers(problem: Problem, generator: torch.Generator) -> Inputs:
    plain, large = normal(problem, generator), normal(problem, generator)

    def add(x: Tensor, more: Tensor) -> Tensor:
        chosen = torch.rand(x.shape, generator=generator, device=x.device) < OUTLIER_SHARE
        return x + OUTLIER_STD * more * chosen

    return Inputs(add(plain.q, large.q), add(plain.k, large.k), add(plain.v, large.v))


def scaled(factor: float) -> Callable[[Problem, torch.Generator], Inputs]:
    """Queries so many times as large, which makes scores peaky."""

    def draw(problem: Problem, generator: torch.Generator) -> Inputs:
        inputs = normal(problem, generator)
        return Inputs(factor * inputs.q, inputs.k, inputs.v)

    return draw


def like_a_model(problem: Problem, generator: torch.Generator) -> Inputs:
    """Channels of q and k with means, some large; rotary embedding; a first key that every query attends to."""
    inputs = normal(problem, generator)
    channels = problem.head_dim
    means = torch.randn(2, channels, generator=generator, device=generator.device)
    means[:, ::LARGE_CHANNELS] *= LARGE_MEAN
    q, k = rotate(inputs.q + means[0]), rotate(inputs.k + means[1])
    direction = torch.nn.functional.normalize(q.mean((0, 1)), dim=-1)
    group = problem.heads // problem.heads_kv
    k[:, 0] = SINK * channels**0.5 / q.norm(dim=-1).mean() * direction[::group] * channels**0.5
    return Inputs(q, k, inputs.v)


def with_sink(problem: Problem, generator: torch.Generator) -> Inputs:
    """``like_a_model``, whose first key has a value of nearly nothing beside the others', N(SINK_MEAN, 1)."""
    inputs = like_a_model(problem, generator)
    v = inputs.v + SINK_MEAN
    v[:, 0] = SINK_SHARE * inputs.v[:, 0]
    return Inputs(inputs.q, inputs.k, v)


def large_tokens(problem: Problem, generator: torch.Generator) -> Inputs:
    inputs = normal(problem, generator)
    shape = problem.batch, problem.seqlen_k, 1, 1
    chosen = torch.rand(shape, generator=generator, device=generator.device) < 1 / LARGE_TOKENS
    factor = 1.0 + (LARGE_FACTOR - 1.0) * chosen
    return Inputs(inputs.q, inputs.k * factor, inputs.v * factor)


def rotate(x: Tensor) -> Tensor:
    """Rotary embedding of (batch, seqlen, heads, head_dim) by position, halves of a row paired."""
    half = x.shape[3] // 2
    rates = ROPE_BASE ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[1], device=x.device)[:, None, None] * rates
    cos, sin = angles.cos(), angles.sin()
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)


FAMILIES = (
    Family("normal", "N(0, 1)", normal),
    Family("outliers", "the paper's: N(0, 1) + N(0, 100) · Bernoulli(0.001)", outliers),
    Family("q4", "N(0, 1), queries times 4", scaled(4.0)),
    Family("q8", "N(0, 1), queries times 8", scaled(8.0)),
    Family(
        "model",
        f"channel means of q and k, one of {LARGE_CHANNELS} channels {LARGE_MEAN:g} times as large, rotary embedding, "
        "and a first key that every query attends to",
        like_a_model,
    ),
    Family(
        "sink",
        f"the same, values N({SINK_MEAN:g}, 1), but that of the first key {SINK_SHARE:g} N(0, 1)",
        with_sink,
    ),
    Family(
        "tokens", f"N(0, 1), one key of {LARGE_TOKENS} {LARGE_FACTOR:g} times as large, k and v", large_tokens
    ),
)


def draw_family(family: Family, problem: Problem, seed: int, device: str) -> Inputs:
    """Inputs of a family in the dtype of the problem."""
    inputs = family.draw(problem, torch.Generator(device).manual_seed(seed))
    dtype = getattr(torch, problem.dtype)
    return Inputs(*(x.to(dtype) for x in (inputs.q, inputs.k, inputs.v)))
