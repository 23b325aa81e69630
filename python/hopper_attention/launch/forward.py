"""Runs one checked 16-bit problem on its backend.

What serves a call is found in two steps. ``find_launch`` remembers it by sizes and strides, so that a repeated call
costs one look-up. Sizes that are new, as every token of a decode has them, are checked; what is costly, the choice of
backend and config and the kernel itself, is remembered without them, by ``find``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cute_kernels.ampere.config import AmpereForwardConfig
from hopper.config import ForwardConfig
from hopper.wide.config import WideForwardConfig
from hopper_attention import checks, compile_cache, device_memory, few_queries
from hopper_attention._kernels import Kernel, kept_argument
from hopper_attention.backends import target_of
from hopper_attention.checks import TensorSpec
from hopper_attention.device_memory import Facts, Piece
from hopper_attention.forward_rules import (
    Config,
    ReferenceConfig,
    check_size,
    choose_for,
    grouped_problem,
    problem_of,
    select_for,
    takes_wide_values,
)
from hopper_attention.launch.base import (
    NO_PAGES,
    NO_PLAN,
    NO_SIDES,
    REMEMBERED_CALLS,
    REMEMBERED_LAUNCHERS,
    Launcher,
    ResultSpec,
    count_ctas,
    current_device,
    index_of,
    no_vectors,
)
from hopper_attention.launch.few_queries import FewQueriesLaunch
from hopper_attention.launch.sdpa import TorchLaunch
from hopper_attention.launch.split_forward import find_split
from hopper_attention.launch.wide import WithoutQv, make_wide_launcher
from hopper_attention.layout import TMA_BYTES, Repair, contiguous_copy, repairs_for
from hopper_attention.masks import FULL_SIDES, MaskSpec, Sides, kernel_sides, present
from hopper_attention.problem import AttentionProblem
from hopper_attention.reference.tiled import tiled_forward
from hopper_attention.scores import NO_SCORES, PLAIN, ScoreKind, Scores, check_scores
from hopper_attention.tile_turns import in_fewer_turns
from hopper_attention.torch_rules import TorchConfig
from hopper_attention.value_parts import attend_in_parts, needs_parts, part_widths

Launch = Callable[..., tuple[Tensor, Tensor]]
"""(q, k, v, softmax_scale, wants_lse, *window, scores=NO_SCORES) -> (out, lse); an lse that is not wanted may come
without its rows. No scale is head_dim**-0.5. ``window`` is (window_left, window_right, attention_chunk) for problems
that have one, else nothing. ``scores`` is given for problems whose kind is not plain."""


@dataclass(frozen=True)
class NoKeysLaunch:
    """For problems without a score: seqlen_k is 0, or the output is empty. Nothing is launched."""

    result: ResultSpec

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None,
        wants_lse: bool,
        *window: int,
        scores: Scores = NO_SCORES,
    ) -> tuple[Tensor, Tensor]:
        lse = self.result.empty_lse(q).fill_(-math.inf)
        if scores.sinks is not None:
            lse.copy_(scores.sinks[:, None])
        return self.result.empty_out(q).zero_(), lse


@dataclass(frozen=True)
class ReferenceLaunch:
    """The tiled reference, on the device of the inputs."""

    config: ReferenceConfig
    causal: bool
    default_scale: float

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None,
        wants_lse: bool,
        *window: int,
        scores: Scores = NO_SCORES,
    ) -> tuple[Tensor, Tensor]:
        tiles = {"tile_m": self.config.tile_m, "tile_n": self.config.tile_n}
        scale = self.default_scale if softmax_scale is None else softmax_scale
        sides = dict(zip(("window_left", "window_right", "attention_chunk"), window, strict=False))
        options = tiles | sides | scores.options
        return tiled_forward(q, k, v, causal=self.causal, softmax_scale=scale, **options)


@dataclass(frozen=True)
class PartsLaunch:
    """A launcher for each part of the columns of a V that is wider than a kernel's, by their number."""

    launches: dict[int, Launch]

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *options: Any, **scores: Scores
    ) -> tuple[Tensor, Tensor]:
        return attend_in_parts(v, lambda part: self.launches[part.shape[3]](q, k, part, *options, **scores))


@dataclass(frozen=True)
class ForwardLauncher(Launcher):
    """A forward kernel of 16 bits.

    ``repairs`` is empty, or what q, k and v each need before a kernel can address them. ``num_ctas`` are those of a
    persistent grid, whose CTAs share out the tiles; 0 for a kernel that has a CTA for each tile. A kernel with a window
    takes its sides after the scale, and then its chunk, if it has one, and then one of a kind of scores that is not
    plain takes ``Scores.for_kernel``; that of Hopper takes all of these where it takes one
    (``hopper.forward.kernel.GeneralForwardKernel``). ``listed`` is empty, or the tile of a kernel that goes by lists of
    blocks.
    """

    kernel: Kernel
    result: ResultSpec
    repairs: tuple[Repair, ...]
    default_scale: float
    num_ctas: int
    listed: tuple[int, ...] = ()

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None,
        wants_lse: bool,
        *window: int,
        scores: Scores = NO_SCORES,
    ) -> tuple[Tensor, Tensor]:
        if self.device_index != torch.cuda.current_device():
            return self.call_there(q, k, v, softmax_scale, wants_lse, *window, scores=scores)
        out = self.result.empty_out(q)
        batch, _, heads, _ = q.shape
        lse = self.result.empty_lse(q) if wants_lse else no_vectors(batch, heads, q.device)
        if self.repairs:
            q, k, v = (repair.apply(x) for repair, x in zip(self.repairs, (q, k, v), strict=True))
        # An address is not part of what is remembered. One test serves all three.
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % TMA_BYTES:
            q, k, v = (contiguous_copy(x) if x.data_ptr() % TMA_BYTES else x for x in (q, k, v))
        scale = self.default_scale if softmax_scale is None else softmax_scale
        sizes = batch, heads, q.shape[1], k.shape[1]
        self.start(q, k, v, out, lse, scale, self.options(sizes, window, scores))
        return out, lse

    def start(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Any, scale: float, options: tuple[Any, ...]
    ) -> None:
        """Queue the kernel on tensors that it can address, on the current GPU, which is that of this launcher."""
        if self.num_ctas:
            counter = device_memory.tile_counter(self.device_index)
            self.kernel(q, k, v, out, lse, counter, scale, *options, self.num_ctas)
        else:
            self.kernel(q, k, v, out, lse, scale, *options)

    def options(
        self, sizes: tuple[int, int, int, int], window: tuple[int, ...], scores: Scores
    ) -> tuple[int | float | Tensor | None, ...]:
        """What a kernel takes behind the scale, nothing if it is plain; ``sizes`` are batch, heads, seqlen_q,
        seqlen_k."""
        if not window and scores is NO_SCORES:
            return ()
        (batch, heads, *_), sides = sizes, kernel_sides(*window)
        if self.listed:
            tile_m, tile_n = self.listed
            before = (*NO_SIDES, *NO_PLAN, *NO_PAGES) if self.num_ctas else ()
            return *before, *scores.for_listed_kernel((tile_m, tile_n), sizes)
        if self.num_ctas:
            return *(sides or NO_SIDES), *NO_PLAN, *NO_PAGES, *scores.for_kernel(batch, heads)
        return *present(sides), *(() if scores is NO_SCORES else scores.for_kernel(batch, heads))


@dataclass(frozen=True, slots=True)
class ReadyLaunch:
    """A ``Launch`` of tensors of the same sizes and strides in every call, which the kernel can address wherever they
    are aligned: it looks at addresses before it launches anything, and raises ValueError. ``options`` are what the
    kernel takes behind the scale in every call, as its window is the same and nothing changes its scores; ``ctas`` are
    as ``num_ctas`` of ``ForwardLauncher``."""

    launcher: ForwardLauncher
    kernel: Kernel
    device_index: int
    ctas: int
    options: tuple[Any, ...]
    out: Facts
    lse: Facts
    no_lse: Any
    default_scale: float

    @classmethod
    def of(cls, launcher: ForwardLauncher, q: Tensor, k: Tensor, window: tuple[int, ...]) -> ReadyLaunch:
        """That of calls with tensors like these; ``launcher`` repairs none of them."""
        batch, seqlen_q, heads, _ = q.shape
        options = launcher.options((batch, heads, seqlen_q, k.shape[1]), window, NO_SCORES)
        result = launcher.result
        out = Piece((batch, seqlen_q, heads, result.head_dim_v), result.dtype)
        results = out.facts, Piece((batch, heads, seqlen_q)).facts
        no_lse = kept_argument(no_vectors(batch, heads, q.device))
        where = launcher.kernel, launcher.device_index, launcher.num_ctas
        return cls(launcher, *where, options, *results, no_lse, launcher.default_scale)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, wants_lse: bool, *window: int
    ) -> tuple[Tensor, Tensor]:
        index, make = self.device_index, device_memory.empty_on_gpu
        if current_device() != index:
            return self.launcher(q, k, v, softmax_scale, wants_lse, *window)
        out, lse = make(*self.out), make(*self.lse) if wants_lse else self.no_lse
        scale = self.default_scale if softmax_scale is None else softmax_scale
        try:
            if not self.ctas:
                self.kernel(q, k, v, out, lse, scale, *self.options)
            elif self.options:
                counter = device_memory.tile_counter(index)
                self.kernel(q, k, v, out, lse, counter, scale, *self.options, self.ctas)
            else:
                # Most calls, for which Python is to unpack nothing.
                self.kernel(q, k, v, out, lse, device_memory.tile_counter(index), scale, self.ctas)
            return out, lse
        except ValueError:
            # Copies are to take the place of these, and errors of theirs are not to speak of addresses.
            del out, lse
        return self.launcher(q, k, v, softmax_scale, wants_lse, *window)

    def fill(
        self, q: Tensor, k: Tensor, v: Tensor, results: tuple[Tensor, Tensor], softmax_scale: float
    ) -> bool:
        """Write out and lse. out may lie where Q does, with its strides, as each tile of both is of one CTA. False, and
        nothing is done, if TMA cannot address the tensors, or another GPU is current."""
        index, (out, lse) = self.device_index, results
        addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()
        if addresses % TMA_BYTES or current_device() != index:
            return False
        if self.ctas:
            counter = device_memory.tile_counter(index)
            self.kernel(q, k, v, out, lse, counter, softmax_scale, *self.options, self.ctas)
        else:
            self.kernel(q, k, v, out, lse, softmax_scale, *self.options)
        return True


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find_config(problem: AttentionProblem, device: torch.device, backend: str | None) -> Config:
    """What serves problems of a kind.

    Raises:
        ValueError: ``backend`` cannot run there.
    """
    target = target_of(device)
    choice = choose_for(problem, target, backend)
    choice.advise("attention")
    return select_for(problem, choice.backend, target.capability)


def takes_wide(problem: AttentionProblem, device: torch.device, backend: str | None) -> bool:
    """``takes_wide_values`` on a device."""
    return takes_wide_values(problem, target_of(device), backend)


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find(
    problem: AttentionProblem,
    device: torch.device,
    backend: str | None,
    sm_margin: int,
    is_like_q: bool,
    repairs: tuple[Repair, ...],
) -> Launch:
    """What runs problems of a kind that have keys; compiles or loads its kernel the first time.

    ``is_like_q`` and ``repairs`` are those of ``ResultSpec`` and ``ForwardLauncher``.

    Raises:
        ValueError: ``sm_margin`` leaves no multiprocessor.
    """
    config = find_config(problem, device, backend)
    scale = problem.head_dim**-0.5
    if isinstance(config, ReferenceConfig):
        return ReferenceLaunch(config, problem.causal, scale)
    if isinstance(config, TorchConfig):
        return TorchLaunch(problem.causal, scale)
    if isinstance(config, WideForwardConfig):
        return WithoutQv(make_wide_launcher(config, device, problem.head_dim_v, sm_margin), scale)
    index = index_of(device)
    num_ctas = count_ctas(index, sm_margin) * config.ctas_per_sm
    result = ResultSpec(problem.out_dtype, problem.head_dim_v, is_like_q)
    kernel = compile_cache.get_forward(config)
    if isinstance(config, AmpereForwardConfig):
        num_ctas = 0
    listed = (config.tile_m, config.tile_n) if config.block_lists else ()
    return ForwardLauncher(index, kernel, result, repairs, scale, num_ctas, listed)


@lru_cache(maxsize=REMEMBERED_CALLS)
def find_launch(
    q_shape: tuple[int, ...],
    q_strides: tuple[int, ...],
    q_dtype: torch.dtype,
    q_device: torch.device,
    k_shape: tuple[int, ...],
    k_strides: tuple[int, ...],
    k_dtype: torch.dtype,
    k_device: torch.device,
    v_shape: tuple[int, ...],
    v_strides: tuple[int, ...],
    v_dtype: torch.dtype,
    v_device: torch.device,
    causal: bool,
    backend: str | None,
    sm_margin: int,
    window: Sides = FULL_SIDES,
    scores: ScoreKind = PLAIN,
) -> Launch:
    """What serves a call with these tensors, checked.

    The arguments are flat because they are looked up at every call: a record for each tensor would cost more to
    make than the look-up itself.

    Raises:
        ValueError, TypeError: the arguments do not make a problem, or ``backend`` cannot run it.
        NotImplementedError: the sizes are larger than the kernel can count.
    """
    q = TensorSpec(q_shape, q_strides, q_dtype, q_device)
    k = TensorSpec(k_shape, k_strides, k_dtype, k_device)
    v = TensorSpec(v_shape, v_strides, v_dtype, v_device)
    checks.check_qkv(q, k, v)
    checks.check_backend(backend)
    checks.check_sm_margin(sm_margin)
    problem = problem_of(q, k, v, causal, window, scores)
    if needs_parts(v_shape[3]) and not takes_wide(problem, q_device, backend):
        shapes = {width: (*v_shape[:3], width) for width in part_widths(v_shape[3])}
        options = causal, backend, sm_margin, window, scores
        return PartsLaunch(
            {width: find_launch(*q, *k, shape, *v[1:], *options) for width, shape in shapes.items()}
        )
    config = find_config(problem, q_device, backend)
    if problem.is_empty:
        return NoKeysLaunch(ResultSpec(q_dtype, problem.head_dim_v))
    check_size(config, q_shape, k_shape)
    if isinstance(config, ForwardConfig):
        few = few_queries.find_few(q, k, v, MaskSpec(causal, *window), scores, sm_margin)
        if few.call is not None:
            return FewQueriesLaunch(few.call)
        problem = grouped_problem(problem, q, k, few.group, few.split_rows)
        if few.splits > 1:
            config = find_config(problem, q_device, backend)
            assert isinstance(config, ForwardConfig)
            return find_split(config, q_device, (q_shape[3], v_shape[3]), few.splits, sm_margin)
        problem = in_fewer_turns(problem, q, k, sm_margin)
    return find(problem, q_device, backend, sm_margin, *layout_of(q, k, v))


def layout_of(q: TensorSpec, k: TensorSpec, v: TensorSpec) -> tuple[bool, tuple[Repair, ...]]:
    """Whether out is laid out as q is, and what q, k and v need before a kernel can address them."""
    _, seqlen_q, heads, head_dim = q.shape
    packed = seqlen_q * heads * head_dim, heads * head_dim, head_dim, 1
    return head_dim == v.shape[3] and packed == q.strides, repairs_for(q, k, v)


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    backend: str | None,
    sm_margin: int,
    wants_lse: bool = True,
    window: Sides = FULL_SIDES,
    scores: Scores = NO_SCORES,
) -> tuple[Tensor, Tensor]:
    """Attention of 16-bit tensors without autograd: out and lse, in new contiguous tensors.

    Without ``wants_lse`` the lse that comes back may lack its rows. ``causal`` and ``window`` are those of a
    ``MaskSpec``, the latter its sides.
    """
    if scores is not NO_SCORES:
        options = causal, backend, sm_margin, window
        return _run_with_scores(q, k, v, softmax_scale, wants_lse, scores, options)
    launch = find_launch(
        q.shape,
        q.stride(),
        q.dtype,
        q.device,
        k.shape,
        k.stride(),
        k.dtype,
        k.device,
        v.shape,
        v.stride(),
        v.dtype,
        v.device,
        causal,
        backend,
        sm_margin,
        window,
    )
    if softmax_scale is not None:
        softmax_scale = checks.check_scale(softmax_scale)
    if window != FULL_SIDES:
        return launch(q, k, v, softmax_scale, wants_lse, *window)
    return launch(q, k, v, softmax_scale, wants_lse)


def _run_with_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    wants_lse: bool,
    scores: Scores,
    options: tuple[bool, str | None, int, Sides],
) -> tuple[Tensor, Tensor]:
    """``run_forward`` with scores that are not plain; ``options`` are causal, backend, sm_margin and window."""
    specs = (*TensorSpec.of(q), *TensorSpec.of(k), *TensorSpec.of(v))
    launch = find_launch(*specs, *options, scores.kind)
    check_scores(scores, q.shape[0], q.shape[2], q.dtype, q.device)
    scale = None if softmax_scale is None else checks.check_scale(softmax_scale)
    window = options[3]
    sides = window if window != FULL_SIDES else ()
    return launch(q, k, v, scale, wants_lse, *sides, scores=scores)
