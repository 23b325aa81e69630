"""Inputs of the accuracy experiment: what is drawn, in which shape, and the same on every device."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

OUTLIER_STD = 10.0
"""Standard deviation of the paper's outliers: its N(0, 100) gives the variance."""

OUTLIER_RATE = 0.001
"""Probability that an element (or, in "token-outliers", a whole token) is an outlier."""

CHANNELS_PER_OUTLIER = 64
"""In "channel-outliers", one channel of so many is an outlier, the same one for every token of a head."""

DISTRIBUTIONS = ("outliers", "token-outliers", "channel-outliers", "heavy-tails", "offset", "normal")
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

MOST_DRAWERS = 8
DRAWN_NUMBERS = 1 << 28
"""Numbers of the problems that are drawn at a time, at most: with what they are made of, 16 bytes each."""

MAX_SIGMAS = 6.5
"""No draw of this size is expected to hold a normal number so many standard deviations out."""


MOST_ELEMENTS = 2**40
"""Of an input: more than any machine holds, and few enough for torch to count their bytes."""


@dataclass(frozen=True)
class RmseExperiment:
    """What to measure. Validated when made; the same spec gives the same inputs on every device.

    ``seqlen`` counts keys, and queries too unless ``queries`` (0: as many as keys) says fewer, which are
    then the last ones of a causal sequence. ``outlier_std`` is the standard deviation of the outliers.
    """

    batch: int = 1
    seqlen: int = 8448
    heads: int = 1
    head_dim: int = 128
    seeds: int = 3
    causal: bool = False
    dtype: str = "float16"
    device: str = "cpu"
    distribution: str = "outliers"
    outlier_std: float = OUTLIER_STD
    queries: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "seqlen", "heads", "seeds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed: 1 or more")
        if self.head_dim % 8 or not 8 <= self.head_dim <= 256:
            raise ValueError(f"head_dim is {self.head_dim}, allowed: multiples of 8 from 8 to 256")
        shape = self.batch, self.seqlen, self.heads, self.head_dim
        if math.prod(shape) > MOST_ELEMENTS:
            raise ValueError(f"shape of the inputs is {shape}, allowed: up to 2**40 elements")
        if not 0 <= self.queries <= self.seqlen:
            raise ValueError(f"queries is {self.queries}, allowed: 0 (all) to seqlen, {self.seqlen}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, allowed: {', '.join(DTYPES)}")
        if self.distribution not in DISTRIBUTIONS:
            raise ValueError(f"distribution is {self.distribution!r}, allowed: {', '.join(DISTRIBUTIONS)}")
        largest = torch.finfo(DTYPES[self.dtype]).max / MAX_SIGMAS
        if not 0 <= self.outlier_std <= largest:
            raise ValueError(
                f"outlier_std is {self.outlier_std:g}, allowed with {self.dtype}: 0 to {largest:.2g}"
            )
        try:
            torch.device(self.device)
        except RuntimeError:
            raise ValueError(f"device is {self.device!r}, allowed: a torch device, cpu or cuda:0") from None

    @property
    def seqlen_q(self) -> int:
        return self.queries or self.seqlen

    @property
    def is_papers(self) -> bool:
        """Whether the paper's figures may stand beside ours: its inputs, and the shape we take it to mean."""
        shape = (self.seqlen_q, self.seqlen, self.head_dim, self.dtype, self.causal)
        inputs = (self.distribution, self.outlier_std)
        return shape == (8448, 8448, 128, "float16", False) and inputs == ("outliers", OUTLIER_STD)


def describe(experiment: RmseExperiment) -> str:
    """The inputs and the shape in one line."""
    e = experiment
    lengths = f"seqlen {e.seqlen}" if e.seqlen_q == e.seqlen else f"{e.seqlen_q} queries, {e.seqlen} keys"
    seeds = f" · {e.seeds} seeds" if e.seeds > 1 else ""
    return f"{describe_inputs(e)} · {lengths} · {describe_heads(e)}{seeds}"


def describe_heads(experiment: RmseExperiment) -> str:
    e = experiment
    heads = "1 head" if e.heads == 1 else f"{e.heads} heads"
    return f"batch {e.batch} · {heads} · head_dim {e.head_dim} · {'causal' if e.causal else 'not causal'}"


def describe_inputs(experiment: RmseExperiment) -> str:
    e = experiment
    if e.distribution == "normal":
        return f"{e.dtype} N(0,1) inputs"
    std = (
        f" of std {e.outlier_std:g}" if has_outliers(e.distribution) and e.outlier_std != OUTLIER_STD else ""
    )
    return f"{e.dtype} inputs with {e.distribution}{std}"


def has_outliers(distribution: str) -> bool:
    """Whether ``outlier_std`` says anything about this distribution."""
    return distribution.endswith("outliers")


def draw(
    shape: Sequence[int], distribution: str, generator: torch.Generator, outlier_std: float = OUTLIER_STD
) -> Tensor:
    """Float32 inputs of ``shape`` (batch, seqlen, heads, head_dim), made on the CPU.

    - "outliers": every element alone is an outlier with probability 0.001 (the paper's inputs);
    - "token-outliers": a token is, with all its channels, so that few blocks have any;
    - "channel-outliers": one channel in 64 is, for all tokens, as in the keys of language models;
    - "heavy-tails": Student's t with 3 degrees of freedom, scaled to a variance of 1;
    - "offset": N(1, 1), so that most terms of P V have one sign, and their sum grows with the keys;
    - "normal": N(0, 1).

    An outlier is N(0, 1) + N(0, outlier_std^2). Under one scale, e4m3 holds values at full precision down to
    1/28672 of the largest, and with the smaller codes of Q and K down to 1/512 or less, so
    the paper's outliers, of standard deviation 10, cost the others next to nothing, and block scales change
    little. They pay where the tokens of other blocks are thousands of times larger: then those of a quiet block
    keep their precision. The rotation helps where outliers are single elements. Without
    it so does a scale for each row of Q: the largest element of a row, most often an outlier, is then exact.
    """
    batch, seqlen, heads, head_dim = shape
    base = torch.randn(batch, seqlen, heads, head_dim, generator=generator)
    if distribution == "normal":
        return base
    if distribution == "offset":
        return base + 1.0
    if distribution == "heavy-tails":
        # t = z / sqrt(chi2 / 3) has a variance of 3, and chi2 is the sum of three squares of N(0, 1).
        chi2 = sum(torch.randn(base.shape, generator=generator).square_() for _ in range(3))
        return base / torch.as_tensor(chi2).sqrt()
    if distribution == "channel-outliers":
        order = torch.rand(batch, 1, heads, head_dim, generator=generator).argsort(-1)
        outlier = order < math.ceil(head_dim / CHANNELS_PER_OUTLIER)
    else:
        per_token = distribution == "token-outliers"
        where = (batch, seqlen, heads, 1 if per_token else head_dim)
        outlier = torch.rand(where, generator=generator) < OUTLIER_RATE
    return base + outlier_std * torch.randn(base.shape, generator=generator) * outlier


@dataclass(frozen=True)
class Problem:
    """One draw: q (batch, seqlen_q, heads, head_dim), k and v (batch, seqlen, heads, head_dim), 16 bit."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool


def draw_problem(experiment: RmseExperiment, seed: int) -> Problem:
    """The inputs of one seed, drawn on the CPU and moved to the experiment's device.

    Raises:
        ValueError: this machine does not have the device.
    """
    check_device(experiment)
    return moved(draw_on_cpu(experiment, seed), experiment.device)


def draw_problems(experiment: RmseExperiment) -> Iterator[Problem]:
    """What :func:`draw_problem` gives for each seed, in order. Threads draw the next ones while one is in use.

    Raises:
        ValueError: this machine does not have the device.
    """
    check_device(experiment)
    ahead = drawers(experiment)
    with ThreadPoolExecutor(ahead) as pool:
        coming = deque(pool.submit(draw_on_cpu, experiment, seed) for seed in range(ahead))
        for seed in range(ahead, experiment.seeds + ahead):
            drawn = coming.popleft().result()
            if seed < experiment.seeds:
                coming.append(pool.submit(draw_on_cpu, experiment, seed))
            yield moved(drawn, experiment.device)


def drawers(experiment: RmseExperiment) -> int:
    """Seeds that are drawn at a time: as many as there are cores, but of no more than ``DRAWN_NUMBERS``."""
    e = experiment
    numbers = e.batch * e.heads * e.head_dim * (e.seqlen_q + 2 * e.seqlen)
    return max(1, min(e.seeds, MOST_DRAWERS, os.cpu_count() or 1, DRAWN_NUMBERS // numbers))


def check_device(experiment: RmseExperiment) -> None:
    """Raise ValueError where the experiment's device is a GPU and there is none."""
    device = experiment.device
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but torch finds no CUDA GPU here; allowed: cpu")


def draw_on_cpu(experiment: RmseExperiment, seed: int) -> Problem:
    """The inputs of one seed, on the CPU."""
    e = experiment
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        draw((e.batch, seqlen, e.heads, e.head_dim), e.distribution, generator, e.outlier_std).to(
            DTYPES[e.dtype]
        )
        for seqlen in (e.seqlen_q, e.seqlen, e.seqlen)
    )
    return Problem(q, k, v, e.causal)


def moved(problem: Problem, device: str) -> Problem:
    q, k, v = (x.to(device) for x in (problem.q, problem.k, problem.v))
    return Problem(q, k, v, problem.causal)
