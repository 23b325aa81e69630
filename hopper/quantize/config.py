"""Configuration of the quantizer as data, and where each element lies: plain integer arithmetic, traced or not."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from cute_kernels.problem import DENSE, DTYPES, LAYOUTS, MAX_HEAD_DIM, SHORT_NAMES
from hopper.config import REGISTERS_PER_SM, SMEM_BYTES
from hopper.forward.fp8.config import FP8_DTYPE, FP8_KEYS_PER_STEP, WIDE_CODES_DTYPE
from hopper.forward.fp8.tilings import (
    FP8_HALF_SCORES_TILINGS,
    FP8_TILINGS,
    select_fp8_forward_config,
    with_runs,
)
from hopper.forward.tilings import ANY_LENGTH, NATIVE_HEAD_DIMS

WARP_THREADS = 32
CHUNK = 8
"""Elements of a row that a thread loads at once: 16 bytes."""

HEAD_DIM_STEP = 16
BLOCK_STEP = FP8_KEYS_PER_STEP
MAX_BLOCK = 256
"""Blocks are whole steps of the transposed V, and a CTA holds one in its registers."""

DEFAULT_BLOCK_Q = 1
ROWS_PER_ITEM = 128
"""Rows of Q that a CTA takes at once, or some times that, where each is a block."""

DEFAULT_SMOOTH_V = True
"""Whether the mean of V is subtracted unless told otherwise."""

BANK_LINE = 128
"""Bytes of shared memory that lie in different banks."""

CARRY_KEYS, FEEDBACK, MOST_SHIFT = BLOCK_STEP, 2.0**-5, 2.0**-5
"""Of so many keys of V errors are carried on: this share of each is added to all later values, but in all no more than
the second share of a value."""

PAYING_KEYS, PAID, PAID_WHERE_SAMPLED = 4, 2.0**-5, 1.5 * 2.0**-5
"""Where P V is added up in runs of many keys, one of so many keys of V pays for what the tensor cores will cut off of
all of them: the first share of the first value of the 32, or the second one where the means that V has lost are those
of a sample (``hopper_attention.quantization_rules.round_runs``)."""

FIT_SUMS, MOST_FIT = 4, 2.0**-4
"""The scale of a row of Q is fitted to its codes by sums of so many parts, and changes by no more than this share: more
than e4m3 may be off."""
MOST_OF_ELEMENT = 2.0**-5
"""An element of K changes by no more than this share of itself for the length of its row (``length_feedback``). It is
less than half the distance of the largest code from the next, so no code becomes larger than that."""
FEEDBACK_OF_LENGTH = 0.1
"""``length_feedback`` where the largest code is 1."""
RECIPROCAL = 0x7EF311C7
"""Bits of float32 less this are those of 1 / x, to an eighth. Of a share of half a percent no more is needed."""

RUNS_OF_PATCH, PATCH_COLUMNS = 4, 16
"""Of V, that a warp rounds at once: each thread two columns of a run."""

E4M3_MAX = 448.0
LARGEST_OF_ROW = 256.0
"""What the largest element of a row with a scale of its own becomes, but for ``SMALLER_CODES``. Both this and 448 are
without error; with this the elements down to 4 / 7 of it are rounded to 1 / 16 of it instead of 1 / 14, which leaves
3 % less squared error of 128 normal values (5 % of 64, 3 % of 256)."""
SMALLER_CODES = ((64, 16, 16), (128, 32, 16), (MAX_HEAD_DIM, 32, 32))
"""Rows of (head_dim at most, divisor of the largest code of Q, that of K), narrow heads first: so that scores fit
float16, in which the attention kernel may then have them. Divisors are powers of two, which cost no digits but those of
codes that become subnormal. Wider heads, which no kernel takes, keep theirs."""
MIN_SCALE = 2.0**-80
"""The scale of a block that is all zero. P / scale, which the attention kernel sums, stays within float32."""

VALUE_OCTAVES = 4
"""Scales of blocks of V are 2 to a multiple of this, powers of 16: the attention kernel multiplies O where two
neighbours differ."""

WARPS_AND_ELEMENTS = ((4, 64), (8, 64), (16, 64), (12, 112), (8, 192))
"""Warps of a CTA, and the elements that each thread may then hold: the first that fits serves."""

WORKING_REGISTERS = 56
"""Registers a thread needs beside its elements."""

MAILS = 2
"""Claimed items that may be waiting for the slowest warp of a CTA (``hopper.quantize.grid.Claims``)."""


def is_power_of_two(x: float) -> bool:
    return math.frexp(x)[0] == 0.5


def largest_codes(head_dim: int, scales_rows: bool) -> tuple[float, float]:
    """The largest magnitudes of codes of Q and of K, which the largest element of a block or row becomes.

    The product of any row of Q and any row of K, a sum of products of codes, fits float16 up to head_dim 256: its
    magnitude is at most 28 * 28 * 64, 14 * 28 * 128 or 14 * 14 * 256, 50176 of 65504. Columns of zeros that pad
    head_dim later change nothing of it. ``scales_rows``: each row of Q has a scale of its own.
    """
    divisors = (divisors for width, *divisors in SMALLER_CODES if head_dim <= width)
    divisor_q, divisor_k = next(divisors, (1, 1))
    largest_q = LARGEST_OF_ROW if scales_rows else E4M3_MAX
    return largest_q / divisor_q, E4M3_MAX / divisor_k


def keeps_lengths(head_dim: int) -> bool:
    """Whether rows of K are rounded such that they keep their length. Up to head_dim 64 errors on outliers gain nothing
    by it; beyond MAX_HEAD_DIM codes are too large for the sums."""
    return 64 < head_dim <= MAX_HEAD_DIM


def length_feedback(largest: float) -> float:
    """What x (x - code), summed over the elements x of a row in front, is multiplied with: the share of themselves
    that later elements are to change by.

    A power of two, which is exact. 1 over the sum of squares of the whole row would make up for all that the row is
    off, if all of it were still to come. The squares of normal numbers add up to about largest^2 head_dim / 17; so this
    is 0.7 times that at head_dim 128, and 1.4 times at 256. Twice as much at 128 has 1 % less error where a few keys
    have most of the weight, and 0.6 % more on outliers, whose rotated rows have elements that are rounded alike.
    """
    return float(2.0 ** round(math.log2(FEEDBACK_OF_LENGTH / largest**2)))


def hadamard_blocks(head_dim: int) -> list[int]:
    """The powers of two that head_dim is the sum of, largest first: 96 -> [64, 32]."""
    return [1 << bit for bit in reversed(range(head_dim.bit_length())) if head_dim >> bit & 1]


@dataclass(frozen=True)
class BlockTiling:
    """How the threads of a CTA hold an item: ``rows`` rows of ``head_dim`` elements, which are ``blocks`` blocks, or
    each row one (then ``blocks`` is not used).

    ``lanes`` neighbouring threads share a row: thread t of them holds the chunks t, t + lanes, ..., so that neighbours
    load neighbouring bytes. A warp takes ``rows_per_warp`` rows at once, the CTA ``rows_per_pass``.
    """

    head_dim: int
    rows: int
    lanes: int
    warps: int
    blocks: int = 1

    @property
    def rows_per_warp(self) -> int:
        return WARP_THREADS // self.lanes

    @property
    def rows_per_pass(self) -> int:
        return self.rows_per_warp * self.warps

    @property
    def passes(self) -> int:
        return -(-self.rows // self.rows_per_pass)

    @property
    def chunks(self) -> int:
        """Chunks of a row that a thread holds."""
        return self.head_dim // (CHUNK * self.lanes)

    @property
    def elements(self) -> int:
        """Elements that a thread holds."""
        return self.passes * self.chunks * CHUNK

    def first_row(self, index: int, warp: Any) -> Any:
        """First row of the item that ``warp`` holds in pass ``index``."""
        return (index * self.warps + warp) * self.rows_per_warp

    def block(self, index: int) -> int:
        """The block whose rows are held in pass ``index``."""
        return index * self.blocks // self.passes

    def is_full(self, index: int) -> bool:
        """Whether every warp holds rows in pass ``index``."""
        return (index + 1) * self.rows_per_pass <= self.rows

    def row(self, index: int, warp: Any, lane: Any) -> Any:
        return self.first_row(index, warp) + lane // self.lanes

    def column(self, chunk: int, lane: Any) -> Any:
        """First column of a thread's chunk."""
        return (chunk * self.lanes + lane % self.lanes) * CHUNK


@dataclass(frozen=True)
class RunTiling:
    """A block of float16 (rows, head_dim) in shared memory, written by rows, read by runs of CARRY_KEYS keys.

    A row begins at a line of 128 bytes. The chunks of 8 columns of each line are permuted by an XOR, so that those
    which a warp writes or reads at once lie in different banks: neighbouring rows when it writes, a key of each of four
    runs when it reads.
    """

    head_dim: int
    rows: int

    @property
    def pitch(self) -> int:
        """Bytes between two rows."""
        return -(-2 * self.head_dim // BANK_LINE) * BANK_LINE

    @property
    def size(self) -> int:
        return self.rows * self.pitch

    @property
    def runs(self) -> int:
        return self.rows // CARRY_KEYS

    @property
    def patches(self) -> int:
        """Patches of four runs by 16 columns, one for the 32 threads of a warp; the last runs may not be there."""
        return self._fours * (self.head_dim // PATCH_COLUMNS)

    def chain(self, patch: Any, lane: Any) -> tuple[Any, Any]:
        """(run, first column) of the two columns that a lane takes of a patch."""
        run = patch % self._fours * RUNS_OF_PATCH + lane % RUNS_OF_PATCH
        return run, patch // self._fours * PATCH_COLUMNS + lane // RUNS_OF_PATCH * 2

    def offset(self, run: Any, key: Any, column: Any) -> Any:
        """Byte at which ``column``, an even one, of key ``key`` of a run lies."""
        permuted = column // CHUNK ^ run % RUNS_OF_PATCH * 2 ^ key % 2 * 4 ^ key & 2
        return (run * CARRY_KEYS + key) * self.pitch + permuted * 2 * CHUNK + column % CHUNK * 2

    @property
    def _fours(self) -> int:
        return -(-self.runs // RUNS_OF_PATCH)


@dataclass(frozen=True)
class QuantizeConfig:
    """Everything that is fixed when a quantizer is compiled.

    ``dtype`` is that of the inputs. ``block_q`` rows of Q and ``block_k`` rows of K and of V share a scale.
    ``rotate`` and ``rotate_v`` multiply Q and K, and V, by a random-sign Hadamard matrix; ``smooth_k`` and
    ``smooth_v`` subtract a vector from each row of K, and of V, before. ``layout`` is "dense" or "varlen", as that of
    ``ForwardConfig``. With ``wide_codes`` Q and K are rounded to e4m3 and stored in 16 bits, as a kernel of an exact
    LSE takes them. With ``mean_blocks`` runs of so many blocks of V, counted from the last one back, have a mean each.
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    block_q: int
    block_k: int
    rotate: bool = True
    rotate_v: bool = False
    smooth_k: bool = False
    smooth_v: bool = False
    layout: str = DENSE
    wide_codes: bool = False
    mean_blocks: int = 0

    @property
    def scales_rows(self) -> bool:
        """Whether each row of Q has a scale of its own."""
        return self.block_q == 1

    @property
    def largest_codes(self) -> tuple[float, float]:
        """Those of Q and of K, by the function of this name."""
        return largest_codes(self.head_dim, self.scales_rows)

    @property
    def lanes(self) -> int:
        """Threads that share a row. Each holds whole chunks of every Hadamard block, the smallest of which decides."""
        return 2 if self.head_dim % 32 or self.head_dim_v % 32 else 4

    @cached_property
    def warps(self) -> int:
        """Warps of a CTA.

        Raises:
            ValueError: the registers of a CTA do not hold the blocks.
        """
        for warps, elements in WARPS_AND_ELEMENTS:
            if max(tiling.elements for tiling in self._tilings(warps)) <= elements:
                return warps
        raise ValueError(
            f"blocks of {self._rows_q} x {self.head_dim} and {self.block_k} x {self.head_dim_v} are more than the "
            "registers of a CTA hold"
        )

    @property
    def threads(self) -> int:
        return WARP_THREADS * self.warps

    @cached_property
    def elements(self) -> int:
        """Elements that a thread holds of the largest block."""
        return max(tiling.elements for tiling in self._tilings(self.warps))

    @property
    def q(self) -> BlockTiling:
        """That of Q. An item has as many blocks, or ROWS_PER_ITEM rows, as give a thread no more to do than one of K:
        they share what is done once an item."""
        one = self._tilings(self.warps)[0]
        count = self.elements // one.elements if one.is_full(one.passes - 1) else 1
        return replace(one, rows=count * one.rows, blocks=1 if self.scales_rows else count)

    @property
    def k(self) -> BlockTiling:
        return self._tilings(self.warps)[1]

    @property
    def v(self) -> BlockTiling:
        return self._tilings(self.warps)[2]

    @property
    def vt(self) -> RunTiling:
        """V between the passes by rows and by columns."""
        return RunTiling(self.head_dim_v, self.block_k)

    @property
    def staging_bytes(self) -> int:
        """Shared memory into which the next block is loaded: 2 bytes an element."""
        return 2 * self.threads * self.elements

    @property
    def smem_bytes(self) -> int:
        signs = 2 * (self.head_dim + self.head_dim_v)
        return self.staging_bytes + self.vt.size + signs + 4 * self.mean_floats + 1024

    @property
    def mean_floats(self) -> int:
        """Of the means of two items."""
        return 2 * max(self.head_dim, self.head_dim_v) if self.smooth_k or self.smooth_v else 0

    @cached_property
    def ctas_per_sm(self) -> int:
        by_registers = REGISTERS_PER_SM // (self.threads * (self.elements + WORKING_REGISTERS))
        return max(1, min(by_registers, SMEM_BYTES // self.smem_bytes))

    @property
    def claims_items(self) -> bool:
        """Whether CTAs claim the last of their items, as some begin late, behind two kernels that find means. One that
        is alone on its SM gains nothing, as nobody works while it asks."""
        return self.mean_blocks > 0 and self.ctas_per_sm > 1

    @property
    def mails(self) -> int:
        """Places for claimed items."""
        return MAILS if self.claims_items else 0

    @cached_property
    def name(self) -> str:
        """Short unique name: kernel entry in profilers, file stem in the compile cache."""
        dims = (
            f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}v{self.head_dim_v}"
        )
        parts = ["hopper_quantize", SHORT_NAMES[self.dtype], dims, f"q{self.block_q}k{self.block_k}"]
        parts += [flag for flag in ("rotate", "rotate_v", "smooth_k", "smooth_v") if getattr(self, flag)]
        parts += [] if self.layout == DENSE else [self.layout]
        parts += ["wide"] if self.wide_codes else []
        parts += [f"runs{self.mean_blocks}"] if self.mean_blocks else []
        return "_".join(parts)

    @property
    def code_dtype(self) -> str:
        """What Q and K are stored as."""
        return WIDE_CODES_DTYPE if self.wide_codes else FP8_DTYPE

    @property
    def _rows_q(self) -> int:
        """Rows of the smallest item of Q."""
        return ROWS_PER_ITEM if self.scales_rows else self.block_q

    def _tilings(self, warps: int) -> tuple[BlockTiling, BlockTiling, BlockTiling]:
        """Those of Q, K and V."""
        return (
            BlockTiling(self.head_dim, self._rows_q, self.lanes, warps),
            BlockTiling(self.head_dim, self.block_k, self.lanes, warps),
            BlockTiling(self.head_dim_v, self.block_k, self.lanes, warps),
        )


def validate_quantize_config(config: QuantizeConfig) -> None:
    """Raise ValueError naming the first field that no quantizer can be built from."""
    if config.dtype not in DTYPES:
        raise ValueError(f"dtype is {config.dtype!r}, allowed: {', '.join(DTYPES)}")
    for name, step, largest, other in (
        ("head_dim", HEAD_DIM_STEP, MAX_HEAD_DIM, ()),
        ("head_dim_v", HEAD_DIM_STEP, MAX_HEAD_DIM, ()),
        ("block_q", BLOCK_STEP, MAX_BLOCK, (1,)),
        ("block_k", BLOCK_STEP, MAX_BLOCK, ()),
    ):
        value = getattr(config, name)
        if value not in other and (value % step or not step <= value <= largest):
            allowed = "".join(f"{x} or " for x in other) + f"multiples of {step} from {step} to {largest}"
            raise ValueError(f"{name} is {value}, allowed: {allowed}")
    if config.layout not in LAYOUTS:
        raise ValueError(f"layout is {config.layout!r}, allowed: {', '.join(LAYOUTS)}")
    if config.layout != DENSE and config.wide_codes:
        raise ValueError("wide_codes is True, allowed for packed sequences: False")
    if config.layout != DENSE and config.smooth_k:
        raise ValueError("smooth_k is True, allowed for packed sequences: False")
    if config.mean_blocks < 0 or (config.mean_blocks and (config.layout != DENSE or not config.smooth_v)):
        raise ValueError(
            f"mean_blocks is {config.mean_blocks}, allowed: 0, or more with smooth_v, not packed"
        )
    if config.smem_bytes > SMEM_BYTES:  # asks for the number of warps, which refuses what is too large
        raise ValueError(f"the blocks need {config.smem_bytes} bytes of shared memory, allowed: {SMEM_BYTES}")


def shipped_quantize_configs() -> tuple[QuantizeConfig, ...]:
    """The configs of the default options at the native head_dims, each once, with wide codes too."""
    options: dict[str, Any] = {"block_q": DEFAULT_BLOCK_Q, "smooth_v": DEFAULT_SMOOTH_V}
    return tuple(
        QuantizeConfig(dtype, head_dim, head_dim_v, block_k=block_k, wide_codes=wide_codes, **options)
        for wide_codes in (False, True)
        for dtype in DTYPES
        for head_dim, head_dim_v in NATIVE_HEAD_DIMS
        for block_k in default_block_sizes(head_dim, head_dim_v)
    )


def shipped_long_quantize_configs() -> tuple[QuantizeConfig, ...]:
    """Those for attention kernels that add up keys in runs, whose V may lose a mean for each part of one."""
    narrow = [config for config in shipped_quantize_configs() if not config.wide_codes]
    long = [replace(config, mean_blocks=_blocks_of_a_mean(config)) for config in narrow]
    return tuple(config for config in long if config.mean_blocks)


def _blocks_of_a_mean(config: QuantizeConfig) -> int:
    """Of V, that may lose a mean of their own where attention to what ``config`` makes adds up in runs; 0 where it does
    not. A causal mask changes nothing of that."""
    dims, block_k = (config.head_dim, config.head_dim_v), config.block_k
    attention = select_fp8_forward_config(*dims, False, config.dtype, ANY_LENGTH, block_k, half_scores=True)
    return with_runs(attention, ANY_LENGTH).mean_blocks if attention.tile_n == block_k else 0


def default_block_sizes(head_dim: int, head_dim_v: int) -> list[int]:
    """Rows that K and V have in a block unless told otherwise: the key tiles of the attention kernel."""
    tables = *FP8_TILINGS.values(), *FP8_HALF_SCORES_TILINGS.values()
    lengths = {tiling.max_seqlen_k for tilings in tables for tiling in tilings}
    dims = head_dim, head_dim_v
    masks = False, True
    return sorted(
        {
            select_fp8_forward_config(*dims, causal, DTYPES[0], n, half_scores=True).tile_n
            for n in lengths
            for causal in masks
        }
    )
