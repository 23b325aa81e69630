"""Configurations of the FP8 forward kernels, as data. Nothing here imports the DSL or touches a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cute_kernels.problem import DENSE, MAX_HEAD_DIM, SCORE_FEATURES, VARLEN
from hopper.config import TWO_CONSUMERS, WARPGROUP_ROWS, ForwardConfig
from hopper.ragged import shares_plain_tiles

FP8_DTYPE = "float8_e4m3fn"
WIDE_CODES_DTYPE = "float16"
"""Has every number of e4m3, and is multiplied without a loss."""

FP8_KEYS_PER_STEP = 32
FP8_KEY_ORDER = tuple(
    16 * (slot // 16) + 8 * (slot % 4 // 2) + 2 * (slot % 16 // 4) + slot % 2
    for slot in range(FP8_KEYS_PER_STEP)
)
"""Slot of the k of an FP8 WGMMA -> key of 32: how V's keys must lie for ``store_row_as_operand_a_e4m3``, which leaves
P in the order of the accumulator."""

V_ROW_COLUMNS = 64
"""Of V in rows, that the four warps which transpose it take at once."""

USED_COLUMNS = 32
"""Columns of Q and K in a step of their product. Of V whole vectors of ``PartialSumsOutput``, and pairs of units that
are transposed."""

V_ROW_STAGES = 2
"""Blocks of FP8 V in rows that wait in shared memory for their transposition."""

REGISTERS_OF_FOUR_UNITS = 40
"""Of a producer that has four units of V on their way from shared memory."""

OPERAND_ALIGNMENT = 1024
"""Bytes, in shared memory."""

RUN_FLOATS = 96
"""Of each consumer beside its mean of V, with ``run_blocks``: 96 bytes of each warp (``Staging``)."""

NOTE_FLOATS = 2 * WARPGROUP_ROWS
"""In global memory, that a consumer notes where it leaves a run of keys with a mean of its own."""

MAX_PV_COLUMNS, PV_PART_COLUMNS = 128, 64
"""Columns of O up to which a second accumulator of its size finds registers, and how many there are in a part of P V
where it does not."""


class Softmax(Enum):
    """How a kernel takes the maximum of a row, and in which precision it has the scores.

    - ``EXACT``: the maximum of every block, of float32 scores (``softmax/exact.py``).
    - ``EAGER``: the same with fewer steps that depend on each other, for two warpgroups (``softmax/eager.py``).
    - ``LAGGING``: a maximum of earlier blocks while that will do (``softmax/lagging.py``).
    - ``HALF_SCORES``: as ``LAGGING``, of scores in float16: no product of a row of Q and one of K, as e4m3, may exceed
      65504 (``softmax/half.py``), unless ``lowers_queries`` says that the kernel is to see to it.
    """

    EXACT = "exact"
    EAGER = "eager"
    LAGGING = "lagging"
    HALF_SCORES = "half"


FP8_SCORE_FEATURES = ("softcap", "sinks")
"""Of ``SCORE_FEATURES``, what FP8 kernels do."""

STALE_MAXIMUM = (Softmax.LAGGING, Softmax.HALF_SCORES)
"""Softmaxes that go on with a maximum of earlier blocks."""


@dataclass(frozen=True)
class Fp8ForwardConfig(ForwardConfig):
    """A forward kernel on e4m3 inputs with block scales.

    ``output`` is the dtype of O. Of each 8 pairs of columns of P, ``polynomial_pairs`` get their exponentials from the
    FMA pipe instead of MUFU (``hopper.forward.fp8.exp2``).
    With ``v_rows`` V arrives as (keys, head_dim_v) and the producer warpgroup transposes it, else as (head_dim_v,
    keys). With ``two_level`` the P V of a key block has an accumulator of its own and is added to O in float32, of
    whose bits FP8 WGMMA keeps only a part in its sums. With ``wide_codes`` Q and K come as 16 bits, which have every
    number of e4m3, so that Q K^T is added up in float32 as well. With ``lowers_queries`` rows of Q are multiplied by
    powers of two first, so that scores in float16 serve any codes (``hopper.forward.fp8.lowered_queries``). With
    ``lone_scales`` all rows of a head share a scale in Q, in K and in V: a consumer reads them once a tile, in place of
    once a block from shared memory. With ``run_blocks`` O goes to a sum in shared memory behind so many blocks, 0 for
    never (``hopper.forward.fp8.partial_sums``), and each ``mean_blocks`` of V, which divide these, may have lost a mean
    of their own.
    """

    output: str = "bfloat16"
    polynomial_pairs: int = 0
    softmax: Softmax = Softmax.EXACT
    v_rows: bool = False
    two_level: bool = False
    wide_codes: bool = False
    lowers_queries: bool = False
    lone_scales: bool = False
    run_blocks: int = 0
    mean_blocks: int = 0

    used_steps = USED_COLUMNS, USED_COLUMNS

    @property
    def awaits_v_early(self) -> bool:
        """Whether V of a block is awaited under Q K^T, in place of behind its exponentials. Without that wait between
        them ptxas moves the one for P V in front of them; with three warpgroups others' products run meanwhile. Where
        it gained: at head_dim 128 without a mask, and in runs under a causal mask."""
        is_half = self.softmax is Softmax.HALF_SCORES and self.is_plain
        finds_scales = self.lowers_queries and not self.lone_scales
        if not is_half or self.v_rows or finds_scales or self.consumers < 3:
            return False
        return self.run_blocks > 0 if self.causal else self.head_dim == 128

    @property
    def awaits_v_late(self) -> bool:
        """At head_dim 256 with V in rows. A block of V is there only once it has been transposed, into the stage that
        the slower warpgroup has left last: to await it where P is made is to wait. Calls take 0.5 to 4 % less. With
        three stages, at head_dim 128, they take up to 3.5 % more, and with scores in float16 once 9
        (`fp8_transposers.json`). The eager softmax gained 0.2 to 0.6 % by a form of it and by early reads, and kernels
        with turns have not been timed."""
        is_known = self.pipelined and not self.ping_pong and self.softmax is not Softmax.EAGER
        return self.v_rows and self.head_dim == MAX_HEAD_DIM and is_known

    @property
    def two_walk_apart(self) -> bool:
        """At head_dim 256: where lengths are no whole tiles calls take 0.4 to 7 % less, else as long. Packed kernels
        spill then (`fp8_wide_loads.json`, as below)."""
        is_plain = self.layout == DENSE and not self.v_rows and not self.two_level
        is_known = self.softmax in (Softmax.HALF_SCORES, Softmax.EAGER) and self.head_dim == MAX_HEAD_DIM
        return is_plain and is_known

    @property
    def has_registers_for_parts(self) -> bool:
        return self.score_dtype == "float16" or (self.softmax is Softmax.EAGER and self.consumers == 2)

    @property
    def loads_k_ahead(self) -> bool:
        """Where there are two stages, which is at head_dim 256. A consumer gives K of a block back while the product of
        V before it runs. In the other order the load of K would wait behind that of V: up to 3.0 % of the time. With
        three stages or four calls take 0 to 4 % longer by it (`fp8_wide_loads.json`). ``LAGGING`` gives K back when a
        block is over, so that V would be late."""
        gives_back_early = self.softmax in (Softmax.HALF_SCORES, Softmax.EAGER)
        return self.stages == 2 and gives_back_early and self.pipelined and not self.v_rows

    @property
    def finds_ends_early(self) -> bool:
        """Whether the walk knows from the first product of a tile on where its first sum may end, and not only where it
        begins. The one loop around blocks is compiled otherwise for it: at head_dim 128 under a causal mask calls take
        0.3 to 1.7 % less, at 64 0.7 to 1.7 more, with or without changes (`fp8_run_walk.json`), and at 128 without a
        mask now up to 0.5 more (`fp8_paid_sums.json`)."""
        return self.head_dim > 128 or (self.head_dim == 128 and self.causal)

    @property
    def reads_notes_at_once(self) -> bool:
        """Whether the notes of all steps at hand are read together at a tile's end, or each under the product before:
        at head_dim 128 calls whose means change take up to 1.7 % less, at 64 causal ones 0.7 to 1.5 more
        (`fp8_shorter_means.json`)."""
        return self.head_dim >= 128

    @property
    def note_floats(self) -> int:
        """That a CTA notes for each mean of a head (``MeansOfRuns``), 0 without ``run_blocks``."""
        return self.consumers * NOTE_FLOATS if self.run_blocks else 0

    @property
    def pv_columns(self) -> int:
        """Columns of O whose P V is in one accumulator: all, unless registers for that are too few beside O."""
        is_too_wide = self.two_level and self.head_dim_v > MAX_PV_COLUMNS
        return PV_PART_COLUMNS if is_too_wide else self.head_dim_v

    @property
    def blocks_a_wary_block(self) -> int:
        """That of ``HalfScoresSoftmax`` with ``lone_scales``. At head_dim 256 products and shared memory take most of a
        block's time, so that to be wary costs little: with 768 keys 3 % of N(0, 1), where peaky inputs gain 5 to 8
        (`fp8_wary_beginnings.json`). Dense e4m3 tensors without a mask have another softmax up to 1024 keys since."""
        return 5 if self.head_dim > 128 else 8

    @property
    def takes_used_columns(self) -> bool:
        """Whether there are kernels with ``used_head_dim``."""
        return not (self.two_level or self.wide_codes)

    @property
    def input_dtypes(self) -> tuple[str, ...]:
        return (FP8_DTYPE,)

    @property
    def out_dtype(self) -> str:
        return self.output

    @property
    def score_dtype(self) -> str:
        return "float16" if self.softmax is Softmax.HALF_SCORES else "float32"

    @property
    def element_bytes(self) -> int:
        return 1

    @property
    def qk_dtype(self) -> str:
        return WIDE_CODES_DTYPE if self.wide_codes else self.dtype

    @property
    def qk_bytes(self) -> int:
        return 2 if self.wide_codes else self.element_bytes

    @property
    def name(self) -> str:
        parts = [] if self.softmax is Softmax.EXACT else [self.softmax.value]
        parts += [f"poly{self.polynomial_pairs}"] if self.polynomial_pairs else []
        parts += ["vrows"] if self.v_rows else []
        parts += ["twolevel"] if self.two_level else []
        parts += ["wide"] if self.wide_codes else []
        parts += ["lowers"] if self.lowers_queries else []
        parts += ["lone"] if self.lone_scales else []
        parts += [f"runs{self.run_blocks}of{self.mean_blocks}"] if self.run_blocks else []
        return "_".join([super().name, *parts])

    @property
    def other_bytes(self) -> int:
        rows = V_ROW_STAGES * self.tile_n * self.head_dim_v if self.v_rows else 0
        means = -(-self.mean_bytes // OPERAND_ALIGNMENT) * OPERAND_ALIGNMENT
        return super().other_bytes + means + rows

    @property
    def units_under_way(self) -> int:
        """Of V, from shared memory to a warp that transposes (``VTransposer``): as many as it has registers for. With
        several heads or sinks there are fewer, as ptxas shares them out. Two take -0.3 to 2.4 % longer where each
        maximum is taken, -1.2 to 0.9 with scores in float16 (`fp8_transposers.json`)."""
        if self.registers.producer >= REGISTERS_OF_FOUR_UNITS:
            return 4
        is_short_of_them = self.registers == TWO_CONSUMERS and (self.group > 1 or self.sinks)
        return 2 if is_short_of_them else 3

    @property
    def o_shares_rows(self) -> bool:
        """A tile's rows of V have all been read when its O is written, and none of the next is loaded until that has
        been stored."""
        holds_o = V_ROW_STAGES * self.tile_n >= 2 * self.tile_m
        # It is given back before Q of the next tile is awaited, and nobody may wait for that tile's V by then.
        is_returned = self.pipelined and not self.walks_apart
        return self.v_rows and self._o_needs_place and holds_o and is_returned and not self.o_from_registers

    @property
    def o_from_registers(self) -> bool:
        """Where it could only share memory. V's columns are transposed into an order in which a thread has four
        neighbours of O. The fence of lowered queries would wait until all of the O before has been stored."""
        is_awaited = self.lowers_queries or self.layout != DENSE
        return (self.v_rows and self._o_needs_place and self.pipelined and not is_awaited) or self.split

    @property
    def _has_short_ends(self) -> bool:
        """Whether what stands between two tiles of a warpgroup is kept short: V comes in rows, and O has no place of
        its own."""
        return self.o_shares_rows or self.o_from_registers

    @property
    def has_short_beginnings(self) -> bool:
        """Whether a tile's first block of K is loaded before its Q, and the block of Q's scale found without a
        division: it gains where tiles are short, which causal ones are."""
        is_bare = not self.split and self.group == 1 and not self.page_box
        return self.o_from_registers and self.causal and is_bare

    @property
    def has_block_divisor(self) -> bool:
        """Whether the block of Q's scale is found without a division."""
        return self.has_short_beginnings or self._gains_in_runs

    @property
    def _gains_in_runs(self) -> bool:
        """Whether a kernel with runs gains by what is short between two tiles of it. At head_dim 64 tiles are shortest,
        and causal ones most of all. Others take as long either way, or up to 0.7 % longer, as ptxas then orders their
        inner loop (`fp8_paid_sums.json`)."""
        return self.run_blocks > 0 and self.causal and self.head_dim == 64

    @property
    def _is_for_few_keys(self) -> bool:
        """Whether this is ``FEW_KEYS`` of ``tilings.py`` up to head_dim 128, whose tiles are short, and whose threads
        have registers left for what makes their ends shorter (`fp8_short_peaky.json`)."""
        return self.softmax is Softmax.EAGER and not self.two_level and self.head_dim <= 128

    @property
    def _gains_by_second_q(self) -> bool:
        """At head_dim 128 where keys are few, and tiles short for what stands between two of them. Others, as ptxas
        then orders their inner loop, take up to 2 % longer with scores in float16, 4 at head_dim 64 with peaky ones, 6
        where sequences are packed (`second_q.json`)."""
        return self._is_for_few_keys and self.head_dim == 128 and self.is_plain and not self.v_rows

    @property
    def shares_first_block(self) -> bool:
        """Also where the producer transposes V and beginnings are short, and where keys are few: with the softmax that
        these had before N(0, 1) took 4 to 7 % less by it at head_dim 64, up to 3 at 128. Lowered queries leave no
        registers for it."""
        has_few = self._is_for_few_keys and self.causal and self.is_plain and self.group == 1
        return self.has_short_beginnings or has_few

    @property
    def first_widths(self) -> tuple[int, ...]:
        """Also where two warpgroups visit the same blocks: of a diagonal one the first sees half."""
        if self.shares_first_block and self.tile_n == 2 * WARPGROUP_ROWS:
            return (WARPGROUP_ROWS,)
        return self._ending_widths if self._cuts_ends else super().first_widths

    @property
    def lets_blocks_pass(self) -> bool:
        """Also under a causal mask where keys are few, and of packed sequences at head_dim 256."""
        is_wide = self.layout == VARLEN and self.head_dim == MAX_HEAD_DIM
        gains = not self.causal or self._is_for_few_keys or is_wide
        return gains and not (self.ping_pong or self._loses_by_branches) and shares_plain_tiles(self)

    @property
    def _loses_by_branches(self) -> bool:
        """Whether whole lengths take 1 to 6 % longer by them: with lowered queries at head_dim 64; on e4m3 tensors of
        one length that take each maximum, without a mask, at 128 and 256; where O goes from registers. Where lowered
        queries have scales to find, or there are runs, threads spill at 256; runs are of many keys, beside which an
        end is nothing."""
        is_short_of_registers = self.lowers_queries and (self.head_dim == 64 or not self.lone_scales)
        takes_each = self.softmax is Softmax.EAGER and self.lone_scales and not self.causal
        is_slower = takes_each and self.layout == DENSE and self.head_dim in (128, MAX_HEAD_DIM)
        return is_short_of_registers or is_slower or self.o_from_registers or self.run_blocks > 0

    @property
    def _cuts_ends(self) -> bool:
        """Whether the scores of the block with the last keys are cut: without a mask, and of packed sequences with few
        keys at head_dim 128. Not with lowered queries there where V was transposed before: peaky ones of whole lengths
        take 1 to 2.5 % longer by it, and just to let blocks pass costs nothing."""
        is_dense = self.layout == DENSE
        gains = not self.causal or (self._is_for_few_keys and not is_dense and self.head_dim == 128)
        loses = is_dense and self.head_dim == 128 and self.lowers_queries and not self.v_rows
        is_known = self.softmax is not Softmax.EXACT and not self.two_level
        has_width = self.tile_n == 2 * WARPGROUP_ROWS
        return self.lets_blocks_pass and is_known and has_width and gains and not loses

    @property
    def _ending_widths(self) -> tuple[int, ...]:
        """Of ``_cuts_ends``: steps of P V at head_dim 64, where scores are most of the work. Elsewhere, and where parts
        take each maximum, more widths than one take longer."""
        is_fast = self.softmax is Softmax.HALF_SCORES or (self.softmax is Softmax.EAGER and self.lone_scales)
        step = FP8_KEYS_PER_STEP if self.head_dim == 64 and is_fast else WARPGROUP_ROWS
        return tuple(range(step, self.tile_n, step))

    @property
    def has_divisors(self) -> bool:
        """Whether there are registers for them: kernels that take each maximum, under a causal mask, and stage O have
        none left at head_dim 256. Where keys are few they are worth 4 to 7 % of a causal call."""
        is_short_of_them = self.causal and self.softmax is Softmax.EAGER and not self._is_for_few_keys
        return self._has_short_ends or not is_short_of_them

    @property
    def finalizes_early(self) -> bool:
        """At head_dim 128 where keys are few too: 1 to 3 % of a causal call, 0 to 3 of others."""
        few_keys = self._is_for_few_keys and self.head_dim == 128
        return self._has_short_ends or self._gains_in_runs or few_keys

    @property
    def starts_early(self) -> bool:
        """Where it gained: behind the kernel that transposes V, where O goes from registers, and where keys are few:
        0.8 to 1.3 % of calls back to back (`early` in `fp8_short_peaky.json`)."""
        few = self._is_for_few_keys and (not self.v_rows or self.lone_scales)
        return self.lowers_queries or self.o_from_registers or few

    @property
    def asks_early(self) -> bool:
        """Where V comes in rows and what stands between two tiles is short: there it was timed, and gained."""
        return self._has_short_ends and self.is_plain and self.group == 1

    @property
    def takes_groups(self) -> bool:
        """Where each block takes its maximum, and P V is one sum; of packed sequences if a head has one scale."""
        return self.takes_maxima and (self.layout == DENSE or self.lone_scales)

    @property
    def takes_maxima(self) -> bool:
        """Whether each block takes its maximum, and P V is one sum: then scores may be changed."""
        takes_each = self.softmax in (Softmax.EXACT, Softmax.EAGER)
        return takes_each and not (self.two_level or self.wide_codes)

    @property
    def takes_lone_scales(self) -> bool:
        """Whether there is such a kernel: for codes of which nothing is promised, with one sum of P V."""
        is_of_any = self.softmax is not Softmax.HALF_SCORES or self.lowers_queries
        return is_of_any and not (self.two_level or self.wide_codes)

    @property
    def mean_bytes(self) -> int:
        """A mean of V in float32 for each consumer. What ``Staging`` keeps is little and lies beside barriers."""
        return 4 * self.consumers * self.head_dim_v

    def validate_precision(self) -> None:
        for name in SCORE_FEATURES:
            if getattr(self, name) and name not in FP8_SCORE_FEATURES:
                raise ValueError(f"{name} is True, allowed for {FP8_DTYPE}: False")
        if self.softcap and not self.takes_maxima:
            raise ValueError(
                f"softcap is True, allowed for {FP8_DTYPE} where a block does not take its maximum, or P V is no "
                "single sum: False"
            )
        if self.sinks and (self.two_level or self.wide_codes):
            raise ValueError("sinks is True, allowed with two_level and wide_codes: False")
        if self.functions:
            raise ValueError(f"functions is {self.functions.name!r}, allowed for {FP8_DTYPE}: none")
        if self.tile_n % FP8_KEYS_PER_STEP:
            raise ValueError(
                f"tile_n is {self.tile_n}, allowed for {FP8_DTYPE}: multiples of {FP8_KEYS_PER_STEP}"
            )
        if self.v_rows and self.head_dim_v % V_ROW_COLUMNS:
            raise ValueError(
                f"head_dim_v is {self.head_dim_v}, allowed with v_rows: multiples of {V_ROW_COLUMNS}"
            )
        if not 0 <= self.polynomial_pairs <= 8:
            raise ValueError(f"polynomial_pairs is {self.polynomial_pairs}, allowed: 0 to 8")
        if self.used_head_dim and not self.takes_used_columns:
            raise ValueError(
                f"used_head_dim is {self.used_head_dim}, allowed with two_level and wide_codes: 0"
            )
        if self.two_level:
            _validate_two_level(self)
        if self.wide_codes:
            _validate_wide_codes(self)
        if self.softmax in STALE_MAXIMUM:
            _validate_stale_maximum(self)
        if self.lowers_queries and self.softmax is not Softmax.HALF_SCORES:
            raise ValueError(f"lowers_queries is True, allowed with softmax {self.softmax.value!r}: False")
        if self.lone_scales and not self.takes_lone_scales:
            raise ValueError(
                "lone_scales is True, allowed for two_level, wide_codes, and scores in float16 without "
                "lowers_queries: False"
            )
        if self.run_blocks or self.mean_blocks:
            _validate_runs(self)
        if self.page_box and not (self.v_rows and self.lone_scales):
            raise ValueError(f"page_box is {self.page_box}, allowed without v_rows and lone_scales: 0")


def _validate_stale_maximum(config: Fp8ForwardConfig) -> None:
    """P V of a block is awaited in that block, as the softmax may multiply O; what it does not, is done under the next
    Q K^T."""
    softmax = f"softmax {config.softmax.value!r}"
    required = {"pipelined": True, "warp_specialized": True, "late_rescale": True, "two_level": False}
    for name, value in required.items():
        if getattr(config, name) is not value:
            raise ValueError(f"{name} is {not value}, allowed with {softmax}: {value}")
    if config.polynomial_pairs == 8:
        # Only MUFU's exponentials tell what float16, which the others are, does not hold: a P, or the scale.
        raise ValueError(f"polynomial_pairs is 8, allowed with {softmax}: 0 to 7")


def _validate_runs(config: Fp8ForwardConfig) -> None:
    """Of dense problems without a window alone, whose O has shared memory of its own."""
    is_half = config.softmax is Softmax.HALF_SCORES
    runs, means = config.run_blocks, config.mean_blocks
    fits = runs != 0 and runs % means == 0 if means > 0 else runs == means == 0
    if not fits:
        allowed = "what divides them" if runs else 0
        raise ValueError(f"mean_blocks is {means}, allowed with run_blocks {runs}: {allowed}")
    if runs < 0 or not (is_half and config.is_plain) or config.v_rows or config.lowers_queries:
        raise ValueError(
            f"run_blocks is {runs}, allowed: 0, or more with softmax 'half', V transposed and nothing else"
        )
    if config.o_shares_q or config.o_from_registers:
        raise ValueError(f"run_blocks is {runs}, allowed where O has no shared memory of its own for sums: 0")


def _validate_wide_codes(config: Fp8ForwardConfig) -> None:
    """What scores gain, polynomials would lose. A stale maximum goes with codes of e4m3, from which scores that were
    lost are made again."""
    if config.softmax in STALE_MAXIMUM:
        raise ValueError(f"wide_codes is True, allowed with softmax {config.softmax.value!r}: False")
    if config.polynomial_pairs:
        raise ValueError(f"polynomial_pairs is {config.polynomial_pairs}, allowed with wide_codes: 0")


def _validate_two_level(config: Fp8ForwardConfig) -> None:
    if config.late_rescale:
        raise ValueError(
            "late_rescale is True, allowed with two_level: False, as O is rescaled where P V is added to it"
        )
    if config.head_dim_v % config.pv_columns:
        raise ValueError(
            f"head_dim_v is {config.head_dim_v}, allowed with two_level: multiples of {PV_PART_COLUMNS} "
            f"above {MAX_PV_COLUMNS}"
        )
    if config.pipelined and config.pv_columns < config.head_dim_v:
        raise ValueError(
            f"pipelined is True, allowed with two_level at head_dim_v {config.head_dim_v}: False, "
            "as P V comes in parts"
        )
