"""What serves the backward pass of a problem, and why: one rule, without touching a tensor."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from cute_kernels.ampere.backward.config import (
    AmpereBackwardConfig,
    check_ampere_backward_size,
    select_ampere_backward_config,
)
from cute_kernels.ampere.config import ARCH_OF_CAPABILITY
from cute_kernels.backward.step import FEW_KEYS
from cute_kernels.problem import DENSE, MAX_SEQLEN, VARLEN
from hopper.backward.config import (
    MAX_UNPAIRED_HEAD_DIM,
    BackwardConfig,
    can_walk_back,
    check_backward_size,
    select_backward_config,
)
from hopper.backward.written_configs import (
    fit_one_tile,
    fit_strips,
    select_one_tile_config,
    select_strip_config,
)
from hopper_attention.backends import (
    HOPPER_CAPABILITY,
    KERNELS,
    Choice,
    Target,
    asked_for_torch,
    how_to_go_faster,
    why_not_ampere,
    why_not_hopper,
    without_kernel,
)
from hopper_attention.checks import DTYPE_NAMES
from hopper_attention.forward_rules import lists_of
from hopper_attention.masks import Sides
from hopper_attention.problem import GradientProblem, PackedKeys
from hopper_attention.scores import PLAIN, ScoreKind
from hopper_attention.torch_rules import why_not_torch_gradient

MANY_KEYS = 1024
"""Keys of the longest of packed sequences from which on sums of dQ are cleared ahead. Of equal lengths 1024 gained 2 %
by it, 744 lost 1 % and 512 and 128 lost 3 % (``backward_cleared_by_length.json``)."""

SDPA_HAS_ONE = "torch's scaled_dot_product_attention has a fast one"
KernelConfig = BackwardConfig | AmpereBackwardConfig

LONGEST_WALKS = (64, MAX_SEQLEN), (16, 8), (0, 4)
"""Query tiles that a CTA may visit with ``one_tile``, behind the key/value heads that there are at least."""

FASTER_IN_ORDER = {64: 768, 128: 1024, 256: 512}
"""By the head_dim of a kernel, keys up to which sums of dQ in a fixed order are faster under a causal mask: the first
key tile stores its part where any order adds to zeros (`backward_orders.json`; packed, `packed_stores_first.json`)."""

FASTER_BACK_HEAD_DIM, FASTER_BACK_HEADS, FASTER_BACK_KEYS = 64, 8, 512
"""At this head_dim sums in any order are faster even so, where key tiles walk back over so many query heads and have so
many keys: three sizes of 512 to 768 keys, with 8 to 71 heads over one, take 6 to 17 % less time. At 128 it is one or
the other (`backward_any_parts.json`)."""

MANY_ELEMENTS = 30_000_000
"""Of Q, from which on that was found. With few tiles a CTA its turns are waited for: 2 to 17 % slower with a quarter or
less."""


HEADS_TO_WALK_BACK = 4
"""Query heads that share a head of K and V in a CTA, from which on key tiles walk back under a causal mask. With one
they took 2.5 to 4.5 % longer so, as all add to the same dQ at a time, a single shape with two 1 %, and with 4 to 12 by
the mean 3 % less (`backward_shared_tails.json`)."""


class Division(NamedTuple):
    """``tiles`` key tiles from number ``first`` on, of the order in which CTAs claim them. What each visits is divided
    into ``each`` pieces."""

    first: int
    tiles: int
    each: int


class BackwardProblem(NamedTuple):
    """Sizes and options of a 16-bit problem whose gradients are wanted.

    ``q_shape`` (batch, seqlen_q, heads, head_dim), ``k_shape`` and ``v_shape`` (batch, seqlen_k, kv_heads, ...).
    ``deterministic`` asks for gradients of the same bits in every run. ``has_window``, ``has_chunk`` and ``scores`` as
    in ``AttentionProblem``, ``in_strips`` and ``one_tile`` as in ``GradientProblem``. ``head_parts`` and ``division``
    say what CTAs share of a key tile (``visit_pieces.with_shares``).
    """

    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    dtype: torch.dtype
    causal: bool
    deterministic: bool = False
    has_window: bool = False
    scores: ScoreKind = PLAIN
    has_chunk: bool = False
    in_strips: bool = False
    one_tile: bool = False
    head_parts: int = 1
    division: Division | None = None

    @property
    def kind(self) -> GradientProblem:
        """What of it decides on the kernel."""
        head_dim, head_dim_v = self.q_shape[3], self.v_shape[3]
        return GradientProblem(
            self.dtype,
            self.dtype,
            head_dim,
            head_dim_v,
            self.causal,
            has_window=self.has_window,
            has_chunk=self.has_chunk,
            scores=self.scores,
            deterministic=self.deterministic,
            in_strips=self.in_strips,
            one_tile=self.one_tile,
            divides_heads=self.head_parts > 1,
            walks_back=self.division is None and walk_back(self),
            divides_visits=self.division is not None,
        )


def choose_backward(problem: BackwardProblem, target: Target, requested: str | None) -> Choice:
    """``choose_for`` a problem with sizes, which may be too large for a kernel."""
    choice = choose_for(problem.kind, target, requested)
    if choice.backend not in KERNELS:
        return choice
    return unless_too_large(choice, problem, select_for(problem.kind, choice.backend, target.capability))


def choose_for(problem: GradientProblem, target: Target, requested: str | None) -> Choice:
    """The kernel that the forward's rule gives, where it can do the problem, else the tiled reference.

    ``requested`` is the backend that the forward was asked for. It is no promise of a backward kernel: not every
    problem of the forward has one.
    """
    if requested == "reference":
        return Choice("reference", "asked for with backend='reference'")
    unserved = why_not_torch_gradient(problem, target)
    if requested == "torch" and unserved:
        return Choice("reference", unserved, SDPA_HAS_ONE if target.is_gpu else "")
    if requested == "torch":
        return asked_for_torch(target, unserved)
    blocked = {"hopper": why_not_hopper(target), "ampere": why_not_ampere(target)}
    backend = requested or next((name for name, reason in blocked.items() if not reason), "ampere")
    if blocked[backend] and not requested:
        return without_kernel(target, blocked[backend], unserved)
    if blocked[backend]:
        is_installable = backend == "ampere" or target.capability == HOPPER_CAPABILITY
        faster = how_to_go_faster(target) if is_installable else SDPA_HAS_ONE
        return Choice("reference", blocked[backend], faster if target.is_gpu else "")
    reason = why_not_kernel(problem, backend, target.capability)
    if reason:
        return Choice("reference", reason, SDPA_HAS_ONE)
    major, minor = target.capability
    reason = f"{target.name} has compute capability {major}.{minor} and the kernel takes these sizes"
    return Choice(backend, f"asked for with backend='ampere'; {reason}" if requested == "ampere" else reason)


def why_not_kernel(problem: GradientProblem, backend: str, capability: tuple[int, ...]) -> str:
    """What about head dimensions and dtype keeps a backend's kernel from doing a problem; empty if nothing does."""
    if problem.dtype not in DTYPE_NAMES:
        return f"the backward kernels take float16 and bfloat16, not {problem.dtype}"
    try:
        select_for(problem, backend, capability)
    except ValueError as error:
        return str(error)
    return ""


def unless_too_large(choice: Choice, problem: BackwardProblem, config: KernelConfig) -> Choice:
    """``choice``, or the reference for sizes that the kernel of ``config`` cannot count."""
    try:
        check_size(problem, config)
    except NotImplementedError as error:
        return Choice("reference", str(error), SDPA_HAS_ONE)
    return choice


def check_size(problem: BackwardProblem, config: KernelConfig) -> None:
    """Raise NotImplementedError for more batches, heads or rows than the kernel of ``config`` can count."""
    (batch, seqlen_q, heads, _), (_, seqlen_k, kv_heads, _) = problem.q_shape, problem.k_shape
    if isinstance(config, AmpereBackwardConfig):
        check_ampere_backward_size(config, batch, (heads, kv_heads), (seqlen_q, seqlen_k))
    else:
        check_backward_size(batch, heads, seqlen_q, seqlen_k)


def select_config(problem: BackwardProblem, backend: str, capability: tuple[int, ...]) -> KernelConfig:
    """The config with which "hopper" or "ampere" serves a problem of 16 bits on a GPU of this compute capability.

    Raises:
        ValueError: a head dimension is larger than the kernel takes, or there is no kernel for such a GPU.
        NotImplementedError: the problem has more batches, heads or rows than the kernel can count.
    """
    config = select_for(problem.kind, backend, capability)
    check_size(problem, config)
    return config


def select_for(problem: GradientProblem, backend: str, capability: tuple[int, ...]) -> KernelConfig:
    """``select_config`` of all problems of a kind, whatever their sizes.

    Raises:
        ValueError: a head dimension is larger than the kernel takes, or there is no kernel for such a GPU.
    """
    p = problem
    options = DTYPE_NAMES[p.dtype], p.head_dim, p.head_dim_v, p.causal
    features = p.deterministic, p.has_window, VARLEN if p.is_packed else DENSE
    # A sink is in the LSE, which is all that a backward kernel sees of it.
    changes = p.scores.has_softcap, p.scores.has_alibi, p.scores.has_dropout, p.scores.functions
    if backend == "hopper" and p.in_strips:
        return select_strip_config(*options)
    if backend == "hopper" and p.one_tile:
        return select_one_tile_config(*options)
    if backend == "hopper":
        hopper = replace(select_backward_config(*options, *features, *changes), chunk=p.has_chunk)
        walks_back = p.walks_back and can_walk_back(hopper)
        hopper = replace(hopper, divides_heads=p.divides_heads, divides_visits=p.divides_visits)
        hopper = replace(hopper, walks_back=walks_back)
        if p.keys != "many":
            hopper = replace(hopper, few_keys=p.keys == "few", clears_ahead=False)
        if p.keys == "few":
            hopper = replace(hopper, stores_first=False)
        return replace(hopper, **lists_of(p, (hopper.tile_m, hopper.tile_n)))
    if backend != "ampere":
        raise ValueError(f"backend is {backend!r}, allowed for a backward kernel: 'hopper' or 'ampere'")
    if capability not in ARCH_OF_CAPABILITY:
        known = ", ".join(f"{major}.{minor}" for major, minor in ARCH_OF_CAPABILITY)
        given = ".".join(map(str, capability)) or "none"
        raise ValueError(f"compute capability is {given}, allowed for the kernel without WGMMA: {known}")
    arch = ARCH_OF_CAPABILITY[capability[0], capability[1]]
    config = select_ampere_backward_config(*options, arch, *features)
    fields = dict(zip(("softcap", "alibi", "dropout", "functions"), changes, strict=True))
    lists = lists_of(p, (config.tile_m, config.tile_n))
    return replace(config, **fields | lists, chunk=p.has_chunk)


def keys_within(max_seqlen_k: int, has_sinks: bool) -> PackedKeys:
    """What a bound of the lengths of packed sequences says of the kernel of their gradients.

    With "few", where none has more than FEW_KEYS keys, delta is found from P and dP in float32 rather than from O in 16
    bits. The sum of P has to be 1 then, so not with sinks, which also stand for keys that the LSE has beside those of a
    call. With "many", from MANY_KEYS on, sums of dQ are cleared ahead of their use (``gains_by_clearing_ahead``): in
    short sequences they would be waited for.
    """
    if max_seqlen_k <= FEW_KEYS and not has_sinks:
        return "few"
    return "many" if max_seqlen_k >= MANY_KEYS else "usual"


def in_strips(problem: BackwardProblem, sides: Sides) -> BackwardProblem:
    """A problem whose window has these sides, served by a kernel with strips where the Hopper kernels have one for it:
    where scores are plain, each head of K and V has one of Q, and the window is narrow (``fit_strips``)."""
    p, (left, right, chunk) = problem, sides
    (_, seqlen_q, heads, head_dim), (_, seqlen_k, kv_heads, _) = p.q_shape, p.k_shape
    head_dim = max(head_dim, p.v_shape[3])
    if chunk or left < 0 or heads != kv_heads or p.scores != PLAIN:
        return p
    if p.dtype not in DTYPE_NAMES or head_dim > MAX_UNPAIRED_HEAD_DIM:
        return p
    config = select_strip_config(DTYPE_NAMES[p.dtype], head_dim, head_dim, p.causal)
    fits = fit_strips(config, (left, 0 if p.causal else right), (seqlen_q, seqlen_k))
    return p._replace(in_strips=fits)


def in_faster_order(problem: BackwardProblem, may_walk_back: bool = True) -> BackwardProblem:
    """A problem whose sums of dQ are made in a fixed order where that is faster than any: many sequences that are
    short, with a causal mask alone and as many queries as keys. For the Hopper kernels, of which those of packed
    sequences cannot walk back."""
    p, (_, seqlen_q, _, head_dim), (_, seqlen_k, _, _) = problem, problem.q_shape, problem.k_shape
    if not p.causal or p.has_window or p.has_chunk or p.scores != PLAIN or seqlen_q != seqlen_k:
        return p
    if p.dtype not in DTYPE_NAMES or head_dim != p.v_shape[3] or math.prod(p.q_shape) < MANY_ELEMENTS:
        return p
    if may_walk_back and _is_faster_back(p):
        return p
    return p._replace(deterministic=p.deterministic or are_short((seqlen_q, seqlen_k), head_dim))


def _is_faster_back(problem: BackwardProblem) -> bool:
    """Whether sums in any order are faster since key tiles walk back, of a causal problem with plain scores."""
    (_, seqlen, heads, head_dim), kv_heads = problem.q_shape, problem.k_shape[2]
    is_long = head_dim == FASTER_BACK_HEAD_DIM and seqlen >= FASTER_BACK_KEYS
    return is_long and heads >= FASTER_BACK_HEADS * kv_heads


def packed_in_faster_order(
    problem: GradientProblem, elements: int, bounds: tuple[int, int]
) -> GradientProblem:
    """The same of packed sequences, but for those with few keys: Q has ``elements`` in all, ``bounds`` are
    max_seqlen_q and max_seqlen_k."""
    p = problem
    if not p.causal or p.has_window or p.has_chunk or p.scores != PLAIN or p.keys == "few":
        return p
    if p.dtype not in DTYPE_NAMES or p.head_dim != p.head_dim_v or elements < MANY_ELEMENTS:
        return p
    return replace(p, deterministic=True) if are_short(bounds, p.head_dim) else p


def are_short(seqlens: tuple[int, int], head_dim: int) -> bool:
    """Whether sequences of these lengths of Q and K, or packed ones with these bounds, are as short as those whose sums
    are made faster in a fixed order."""
    return seqlens[0] == seqlens[1] <= FASTER_IN_ORDER.get(head_dim, 0)


def walk_back(problem: BackwardProblem) -> bool:
    """Whether so many query heads share a head of K and V in a CTA, with plain scores, that key tiles are to walk from
    the last query tile back, over all of these heads, where a kernel can (``can_walk_back``)."""
    p, heads, kv_heads = problem, problem.q_shape[2], problem.k_shape[2]
    return p.scores == PLAIN and heads >= HEADS_TO_WALK_BACK * kv_heads * p.head_parts


def in_one_tile(problem: BackwardProblem) -> BackwardProblem:
    """A problem that a kernel serves without others beside it, where the Hopper kernels have one for it: all keys are
    one tile, nothing changes the scores and no mask but a causal one hides keys (``fit_one_tile``,
    ``gains_by_one_tile``). The LSE has to be without a gradient."""
    p, (batch, seqlen_q, heads, _), (_, seqlen_k, kv_heads, _) = problem, problem.q_shape, problem.k_shape
    head_dim = max(p.q_shape[3], p.v_shape[3])
    if p.has_window or p.has_chunk or p.scores != PLAIN:
        return p
    if p.dtype not in DTYPE_NAMES or head_dim > MAX_UNPAIRED_HEAD_DIM:
        return p
    config = select_one_tile_config(DTYPE_NAMES[p.dtype], head_dim, head_dim, p.causal)
    fits = fit_one_tile(config, (seqlen_q, seqlen_k))
    return p._replace(
        one_tile=fits and gains_by_one_tile(config, (batch * heads, batch * kv_heads), seqlen_q)
    )


def gains_by_one_tile(config: BackwardConfig, heads: tuple[int, int], seqlen_q: int) -> bool:
    """Whether one launch is faster than three, for ``heads`` of Q and of K in all batches. A CTA has the time that
    ``prepare`` saves in each of its query tiles: where heads are fewer than SMs and walks are long that counts."""
    heads_q, heads_kv = heads
    query_tiles = heads_q * -(-seqlen_q // config.tile_m)
    longest = next(tiles for heads, tiles in LONGEST_WALKS if heads_kv >= heads)
    return query_tiles <= longest * heads_kv
