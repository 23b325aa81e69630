"""Kernel configurations as data: what a kernel is built from, how one is chosen, and what makes one valid.

Nothing here imports the DSL or touches a GPU. A config is a frozen dataclass; variants are made with
``dataclasses.replace``; an explicit config is validated and never silently changed.
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels import problem
from cute_kernels.problem import (
    DENSE,
    DTYPES,
    MAX_HEAD_DIM,
    SHORT_NAMES,
    VARLEN,
    check_block_lists,
    check_layout,
    feature_names,
)
from cute_kernels.user_functions import NO_FUNCTIONS, UserFunctions
from hopper import ragged
from hopper.field_checks import check_group, check_used_columns

SMEM_BYTES = 232_448
"""Shared memory a CTA may use on sm_90 (227 KiB)."""

SMEM_RESERVED = 1_024
"""Shared memory of a CTA that the driver keeps for itself; SMEM_BYTES and this are all that an SM has."""

REGISTERS_PER_SM = 65_536
WARPGROUP_THREADS = 128
WARPGROUP_ROWS = 64
"""Rows of the output tile that one consumer warpgroup owns: the M of one WGMMA."""

BARRIER_BYTES = 1_024
"""Shared memory set aside for mbarriers, the scheduler's mailbox and alignment."""

COLUMNS_PER_STEP, COLUMNS_PER_ATOM = 16, 8
"""Of 16-bit elements: the K of a WGMMA, and what its N is a multiple of."""

WIDE_HEAD_DIM = 160
"""From here on a Q that is awaited costs more than warpgroups that wait for each other once a tile."""

ASKING_TILES = {
    *((head_dim, 64, causal) for head_dim in (64, 256) for causal in (False, True)),
    *((128, tile_n, False) for tile_n in (96, 128, 176)),
    (128, 128, True),
}
"""Of 16 bits, by head_dim, keys of a block and causal: those for which ``asks_early`` was timed, and is faster."""

WAITING_TILES = {("bfloat16", 128, 128, False)}
"""Of these, those for which ``waits_to_load`` was timed, and is faster; by dtype too."""

MIN_REGISTERS, MAX_REGISTERS = 24, 256
"""What setmaxnreg can set."""


@dataclass(frozen=True)
class Registers:
    """Registers a thread holds after ``setmaxnreg``, by role."""

    consumer: int
    producer: int


@dataclass(frozen=True)
class ForwardConfig:
    """Everything that is fixed when a forward kernel is compiled.

    ``pipelined`` issues S = Q K_{j+1}^T before O += P_j V_j, so that a warpgroup's softmax runs under its own second
    GEMM (FlashAttention-3, section 3.2). ``ping_pong`` orders the warpgroups with named barriers, so that one's softmax
    runs under another's GEMMs (section 3.1). ``late_rescale`` shrinks O for a new maximum not with the softmax that
    found it but under the next Q K^T, and not at all if a warp found none. ``few_keys`` behind the block visited first,
    or fewer, have shared memory of their own beside Q; 0 is none. Then tiles are counted from the end where no more are
    left of keys in parts of a warpgroup's rows. Without ``warp_specialized`` there is no
    producer warp: the first consumer warp loads between its own steps, and all threads keep the registers of the
    launch. ``ctas_per_sm`` CTAs share an SM, and its registers and shared memory. Such kernels are for comparison, as
    in the paper's ablation. ``window`` is a sliding window, whose sides the kernel is given when it runs; with
    ``causal`` the right one is 0. With ``chunk`` it is given the keys of a chunk too, outside of which a query sees
    none. ``layout`` is "dense", for sequences of one length, or "varlen", for packed ones. ``softcap`` caps scores by a
    tanh, ``alibi`` adds ALiBi's bias to them, ``sinks`` a logit without a value to each row; ``dropout`` zeroes
    elements of P. ``functions`` are a user's ``score_mod`` and ``mask_mod``. With ``block_lists`` the kernel visits the
    key blocks of a list alone, and asks the mask function only in those that the list calls seen in part. With
    ``page_box`` K and V lie in the pages of a cache, in each so many rows together, or a multiple; 0 is no cache.
    ``used_head_dim`` of the columns of Q and K, and ``used_head_dim_v`` of V's, are multiplied where those behind them
    are known to be zeros; 0 is all. ``group`` query heads of a K/V head stand in the rows of a tile, those of one query
    after another (``grouped``). With ``split`` several CTAs visit parts of a tile's keys, and leave partial results.
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    causal: bool
    tile_m: int
    tile_n: int
    stages: int
    registers: Registers
    pipelined: bool = True
    ping_pong: bool = True
    late_rescale: bool = False
    few_keys: int = 0
    warp_specialized: bool = True
    ctas_per_sm: int = 1
    window: bool = False
    chunk: bool = False
    layout: str = DENSE
    softcap: bool = False
    alibi: bool = False
    sinks: bool = False
    dropout: bool = False
    functions: UserFunctions = NO_FUNCTIONS
    block_lists: bool = False
    page_box: int = 0
    used_head_dim: int = 0
    used_head_dim_v: int = 0
    group: int = 1
    split: bool = False

    used_steps = COLUMNS_PER_STEP, COLUMNS_PER_ATOM
    """What ``used_head_dim`` and ``used_head_dim_v`` are multiples of."""
    awaits_v_late = False
    """Whether V of a block is awaited where its product is started, in place of where P of it is made."""

    @property
    def is_plain(self) -> bool:
        """Whether a kernel takes nothing but dense tensors and a scale: there is no mask but a causal one, and nothing
        is done to scores or P."""
        return not (self.window or self.split or self.changes_scores) and self.layout == DENSE

    @property
    def changes_scores(self) -> bool:
        return self.softcap or self.alibi or self.sinks or self.dropout or bool(self.functions)

    @property
    def compares_bits(self) -> bool:
        """Whether maxima are found by comparing the bits of scores. Beyond head_dim 128 products take so long that
        maxima do not matter; what else is in the softmax's way takes the registers of a second way to a maximum."""
        is_narrow = self.head_dim <= 128 and self.element_bytes == 2
        return is_narrow and not (self.softcap or self.dropout or self.functions)

    @property
    def finds_second_maximum_late(self) -> bool:
        """Whether the maximum of a thread's second row is found under the exponentials of its first one. At head_dim
        64, with three warpgroups on an SM, others fill that time; at 96 the gain is less than one per cent."""
        return self.compares_bits and self.head_dim > 96

    @property
    def shrinks_in_branch(self) -> bool:
        """Whether the second half of a block's softmax is there twice, and shrinks O only for warps with a new maximum.
        In narrow blocks there is too little under which the branch is decided."""
        return self.finds_second_maximum_late and self.tile_n > 128 and not self.late_rescale

    @property
    def asks_ahead(self) -> bool:
        """Whether a consumer asks for the next block's K under the exponentials of the block at hand, so that no wait
        stands in front of the next product. At head_dim 64 blocks are short; with turns, and from head_dim 128 on,
        what is asked comes into the way of others."""
        is_short = self.head_dim <= 64 and self.element_bytes == 2
        return is_short and self.pipelined and self.warp_specialized and not self.ping_pong

    @property
    def begins_in_turn(self) -> bool:
        """Whether the first Q K^T of a tile is queued in turns too, so that the first warpgroup has its scores while
        the second one's product runs."""
        is_known = self.head_dim == self.head_dim_v == 128 and self.element_bytes == 2 and not self.causal
        is_whole = self.is_plain and not self.used_head_dim
        return is_known and is_whole and self.ping_pong and self.pipelined and self.warp_specialized

    @property
    def has_whole_beginnings(self) -> bool:
        """Whether the block visited first is there twice, with the mask of an end and without: of few blocks the mask
        of one that is whole counts. With blocks of 96 keys it costs more than it saves."""
        return self.begins_in_turn and self.tile_n == 128

    @property
    def walks_apart(self) -> bool:
        """Whether a consumer warpgroup visits the key blocks that its own rows see, and leaves out the others of its
        tile. Where they take no turns, none waits for one that has left. Without a mask only warpgroups without a query
        leave blocks out: at head_dim 128, with blocks of 176 keys. At 256 nothing is gained.
        """
        is_masked = self.causal or self.window
        has_parts = self.consumers > 2 or (self.consumers == 2 and self.two_walk_apart)
        is_known = is_masked or (self.cuts_first_product and self.head_dim == 128)
        is_whole = self.warp_specialized and not self.split
        return is_known and has_parts and is_whole and not self.ping_pong

    @property
    def two_walk_apart(self) -> bool:
        """Whether two warpgroups do what three always do (``walks_apart``)."""
        return True

    @property
    def lets_blocks_pass(self) -> bool:
        """Whether a warpgroup without a query leaves out all of its tile, where others that share its blocks do not."""
        return self.element_bytes == 2 and ragged.lets_blocks_pass(self)

    @property
    def shares_first_block(self) -> bool:
        """Whether warpgroups that visit the same blocks work each on the keys of the first one that its rows see."""
        return self.has_short_beginnings

    @property
    def first_widths(self) -> tuple[int, ...]:
        """Keys, in ascending order, of the block that a warpgroup visits first, of which only so many are worked on
        where its rows see no more. Of many warpgroups under a causal mask, as a block is twice as wide as a warpgroup
        is high or more: as many as it has rows, or a multiple, where these divide a block; else half of the block. What
        else is in the softmax's way takes the registers. Each width of the tiles that ship has whole steps of P V."""
        if self.cuts_first_product:
            return ragged.PRODUCT_WIDTHS[self._tiles]
        if self.lets_blocks_pass and self.element_bytes == 2:
            return ragged.score_widths(self)
        is_wide = self.tile_n >= 2 * WARPGROUP_ROWS and self.tile_n % 32 == 0
        if not (self.walks_apart and is_wide and self.has_registers_for_parts):
            return ()
        if self.tile_n % WARPGROUP_ROWS:
            return (self.tile_n // 2,)
        return tuple(range(WARPGROUP_ROWS, self.tile_n, WARPGROUP_ROWS))

    @property
    def has_registers_for_parts(self) -> bool:
        """Whether scores of a part of a block, beside those of whole ones, leave no thread short of registers."""
        return self.compares_bits

    @property
    def cuts_first_product(self) -> bool:
        """Whether P V too leaves out what is behind the first keys of the block visited first. The block behind it,
        under whose Q K^T that product is made, is there once more for each width."""
        is_whole = self.head_dim == self.head_dim_v and not self.used_head_dim
        has_widths = self.element_bytes == 2 and self._tiles in ragged.PRODUCT_WIDTHS
        return has_widths and is_whole and self.is_plain and self.pipelined and self.warp_specialized

    @property
    def _tiles(self) -> tuple[int, int, bool]:
        return self.head_dim, self.tile_n, self.causal

    @property
    def loads_k_ahead(self) -> bool:
        """Whether K of a block is loaded before V of the one in front of it, in the order in which consumers ask for
        them. Where O has no place in shared memory, V of a tile awaits nothing but the V before it. At head_dim 128 it
        does not pay."""
        return self.o_from_registers and self.element_bytes == 2 and self.head_dim == MAX_HEAD_DIM

    @property
    def keeps_q(self) -> bool:
        """Whether a consumer has Q of a tile in registers, so that Q K^T reads K alone from shared memory: on pages at
        head_dim 128 without turns, where blocks of 128 keys leave 32 registers a thread for it. With turns, and in
        dense kernels, nothing is gained (`chunk_variants.json`)."""
        is_bare = not (self.window or self.changes_scores) and self.element_bytes == 2
        is_narrow = self.head_dim == self.head_dim_v == 128 and self.tile_n <= 128
        return bool(self.page_box) and is_narrow and is_bare and self.walks_apart

    @property
    def adds_row_bias_late(self) -> bool:
        """Whether a score gets only what its column adds of ALiBi. What is left, one number for a row of a block, is
        added to the row's maximum and subtracted from its exponents."""
        return self.alibi and self.causal and self.element_bytes == 2 and not (self.functions or self.softcap)

    @property
    def steps_qk(self) -> int:
        """Steps of Q K^T where not all columns are multiplied; 0 is all."""
        return self.used_head_dim // self.used_steps[0]

    @property
    def columns_pv(self) -> int:
        """Columns of P V."""
        return self.used_head_dim_v or self.head_dim_v

    @property
    def consumers(self) -> int:
        """Consumer warpgroups; each owns 64 rows of the tile."""
        return self.tile_m // WARPGROUP_ROWS

    @property
    def tile_queries(self) -> int:
        return self.consumers * (WARPGROUP_ROWS // self.group)

    @property
    def threads(self) -> int:
        return WARPGROUP_THREADS * (self.consumers + self.warp_specialized)

    @property
    def launched_registers(self) -> int:
        """Registers a thread has before ``setmaxnreg``."""
        return min(REGISTERS_PER_SM // (self.ctas_per_sm * self.threads) // 8 * 8, MAX_REGISTERS)

    @property
    def smem_limit(self) -> int:
        """Shared memory that each CTA may use."""
        return (SMEM_BYTES + SMEM_RESERVED) // self.ctas_per_sm - SMEM_RESERVED

    @property
    def input_dtypes(self) -> tuple[str, ...]:
        """Those that a kernel of this class takes."""
        return DTYPES

    @property
    def out_dtype(self) -> str:
        return self.dtype

    @property
    def score_dtype(self) -> str:
        """What Q K^T is accumulated in."""
        return "float32"

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of Q, K and V."""
        return 2

    @property
    def qk_dtype(self) -> str:
        """Of Q and K in memory."""
        return self.dtype

    @property
    def qk_bytes(self) -> int:
        """Bytes of an element of Q and K."""
        return self.element_bytes

    def validate_precision(self) -> None:
        """Raise ValueError naming the first field that does not go with what a subclass adds."""

    @property
    def q_stages(self) -> int:
        """Tiles whose Q has shared memory at once. With two, Q of a tile is loaded while the one before is at work."""
        with_two = 2 * self.q_tile_bytes + self.kv_bytes + self.o_bytes + self.other_bytes
        return 2 if self._gains_by_second_q and with_two <= self.smem_limit else 1

    @property
    def _gains_by_second_q(self) -> bool:
        """Where tiles are short for what stands between two of them: up to head_dim 96, and of packed sequences. Others
        lose as much as they gain, as blocks of 192 keys do under a window (`second_q.json`)."""
        is_bare = not (self.changes_scores or self.page_box or self.few_keys) and self.warp_specialized
        is_short = self.head_dim < 128 or (self.layout == VARLEN and not self.window)
        has_wide_blocks = self.window and self.tile_n > 128
        return is_bare and is_short and not has_wide_blocks and self.element_bytes == 2

    @property
    def q_tile_bytes(self) -> int:
        """Of Q, for one tile."""
        return self.tile_m * self.head_dim * self.qk_bytes

    @property
    def q_bytes(self) -> int:
        return self.q_stages * self.q_tile_bytes

    @property
    def o_bytes(self) -> int:
        return self.tile_m * self.head_dim_v * 2

    @property
    def kv_bytes(self) -> int:
        of_key = self.head_dim * self.qk_bytes + self.head_dim_v * self.element_bytes
        return self.stages * self.tile_n * of_key

    @property
    def other_bytes(self) -> int:
        """Shared memory that holds no whole operand of a product, nor O."""
        return BARRIER_BYTES + self.consumers * self.few_bytes

    @property
    def few_bytes(self) -> int:
        """Of ``few_keys`` of K and V, for one warpgroup."""
        return self.few_keys * (self.head_dim + self.head_dim_v) * self.element_bytes

    @property
    def o_shares_q(self) -> bool:
        """Whether O is staged in Q's shared memory, because a buffer of its own would not fit, nor could V's serve.

        O has one of five ways out: by a buffer of its own, by that of Q, of V (``o_shares_v``) or of V in rows
        (``o_shares_rows``), or straight from registers (``o_from_registers``)."""
        has_place = self.o_shares_v or self.o_shares_rows or self.o_from_registers
        return self._o_needs_place and not has_place

    @property
    def o_shares_v(self) -> bool:
        """Whether O is staged in V's shared memory, because a buffer of its own would not fit, so that the next Q and K
        are loaded meanwhile. Not where rows are so short that it costs more that warpgroups wait for each other."""
        holds_o = self.stages * self.tile_n >= self.tile_m and self.element_bytes == 2
        pays = self.head_dim >= WIDE_HEAD_DIM and self.warp_specialized and not self.page_box
        return self._o_needs_place and holds_o and pays and not self.o_from_registers

    @property
    def o_shares_rows(self) -> bool:
        """Whether O is staged where rows of V wait for their transposition."""
        return False

    @property
    def o_from_registers(self) -> bool:
        """Whether O goes from registers straight to global memory, so that nothing is awaited for its sake: in 16 bits
        at head_dim 128 and 256, where it has no place of its own. Where it has one that is faster."""
        is_known = self.head_dim == self.head_dim_v and self.head_dim in (128, MAX_HEAD_DIM)
        is_bare = self.is_plain and self.element_bytes == 2 and not self.used_head_dim and self.group == 1
        is_plain = is_known and is_bare and self._o_needs_place and self.pipelined and self.warp_specialized
        return is_plain or self.split

    @property
    def has_short_beginnings(self) -> bool:
        """Whether a tile's first block of K is loaded before its Q, and each warpgroup works on the keys of it that its
        own rows see."""
        return False

    @property
    def has_divisors(self) -> bool:
        """Whether tile numbers are divided by factors that the host makes."""
        return self.element_bytes == 2

    @property
    def ends_with_short_tiles(self) -> bool:
        """Whether the short tiles of all heads come last, behind all sections of a causal grid. At head_dim 256 blocks
        of few keys serve short sequences, where nothing is gained."""
        is_long = self.head_dim == MAX_HEAD_DIM and self.tile_n > WARPGROUP_ROWS
        is_narrow = self.head_dim == self.head_dim_v == 128 and self.walks_apart and not self.used_head_dim
        is_plain = self.is_plain and self.group == 1
        return self.causal and is_plain and self.element_bytes == 2 and (is_long or is_narrow)

    @property
    def least_m_blocks(self) -> int:
        """Query tiles from which on a head has such: at head_dim 128 lengths of 8 to 24 tiles lose 0.2 to 3 %."""
        return 32 if self.head_dim == 128 else 1

    @property
    def counts_from_end(self) -> bool:
        """Whether query tiles are counted from the end of the sequence, so that of a length that has no whole tiles the
        first tile is the short one, which sees few keys, and not the last, which sees all."""
        tiles = self.dtype, self.head_dim, self.tile_n
        is_known = (self.few_keys or tiles in ragged.COUNTING_TILES) and self.ends_with_short_tiles
        return bool(is_known) and self.pipelined and self.walks_apart and not self.used_head_dim

    @property
    def stores_first_apart(self) -> bool:
        """Whether O of the first of these tiles leaves by a TMA map of its own, which ends where the tile does. TMA
        stores nothing that begins in front of a tensor."""
        return self.counts_from_end and not self.o_from_registers

    @property
    def finalizes_early(self) -> bool:
        """Whether the factors of a tile's O are found under its last P V."""
        return False

    @property
    def starts_early(self) -> bool:
        """Whether CTAs may start before the kernel in front of this one has ended (programmatic dependent launch). They
        read and write no global memory until then."""
        return self.element_bytes == 2

    @property
    def takes_groups(self) -> bool:
        """Whether a tile may have rows of several heads, or its keys be in parts."""
        return self.element_bytes == 2

    @property
    def asks_early(self) -> bool:
        """Whether a CTA that has started early asks for its first tile: for inputs that are in memory, and not in L2,
        the trip there is made while the kernel in front ends."""
        is_known = self._tiles in ASKING_TILES and self.element_bytes == 2
        is_whole = self.is_plain and not self.used_head_dim and self.head_dim == self.head_dim_v
        return is_known and is_whole and self.group == 1 and self.starts_early and self.warp_specialized

    @property
    def waits_to_load(self) -> bool:
        """Whether the warp that loads waits for the kernel in front, and nobody else: what consumers store comes behind
        what it has loaded. The warps beside it ask meanwhile, and the next kernel is let in once a tile's loads are
        issued."""
        return self.asks_early and (self.dtype, *self._tiles) in WAITING_TILES

    @property
    def ends_in_halves(self) -> bool:
        """Whether the last P V of a tile is made in two halves of O's columns, which leave one after the other, the
        first while the second is made. A half is a box of TMA, and O has a place of its own. In float16 ptxas finds too
        few registers, and makes one product wait for the other throughout."""
        return self.waits_to_load and self.begins_in_turn and not self.o_from_registers

    @property
    def _o_needs_place(self) -> bool:
        return self.q_tile_bytes + self.kv_bytes + self.o_bytes + self.other_bytes > self.smem_limit

    @property
    def smem_bytes(self) -> int:
        staging = self.q_bytes if self._o_needs_place else self.q_bytes + self.o_bytes
        return staging + self.kv_bytes + self.other_bytes

    @property
    def name(self) -> str:
        """Short unique name: kernel entry in profilers, file stem in the compile cache."""
        short = SHORT_NAMES[self.dtype] + (
            "" if self.out_dtype == self.dtype else "_" + SHORT_NAMES[self.out_dtype]
        )
        dims = (
            f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}v{self.head_dim_v}"
        )
        parts = ["hopper_fwd", short, dims, "causal" if self.causal else "full"]
        parts += [f"m{self.tile_m}n{self.tile_n}s{self.stages}"]
        parts += [f"r{self.registers.consumer}_{self.registers.producer}"]
        parts += [] if self.pipelined else ["nopipe"]
        parts += [] if self.ping_pong else ["nopingpong"]
        parts += ["late"] if self.late_rescale else []
        parts += [f"few{self.few_keys}"] if self.few_keys else []
        parts += [] if self.warp_specialized else ["nows"]
        parts += [] if self.ctas_per_sm == 1 else [f"x{self.ctas_per_sm}"]
        parts += feature_names(self)
        parts += [f"pages{self.page_box}"] if self.page_box else []
        parts += [f"used{self.used_head_dim}v{self.used_head_dim_v}"] if self.used_head_dim else []
        parts += ([f"g{self.group}"] if self.group > 1 else []) + (["split"] if self.split else [])
        return "_".join(parts)


def validate_forward_config(config: ForwardConfig) -> None:
    """Raise ValueError naming the first field that no Hopper kernel can be built from."""
    c = config
    if c.dtype not in c.input_dtypes:
        raise ValueError(f"dtype is {c.dtype!r}, allowed: {', '.join(c.input_dtypes)}")
    if c.out_dtype not in DTYPES:
        raise ValueError(f"output is {c.out_dtype!r}, allowed: {', '.join(DTYPES)}")
    c.validate_precision()
    for name in ("head_dim", "head_dim_v"):
        value = getattr(c, name)
        if value % 16 or not 32 <= value <= MAX_HEAD_DIM:
            raise ValueError(f"{name} is {value}, allowed: multiples of 16 from 32 to {MAX_HEAD_DIM}")
    if c.tile_m not in (64, 128, 192):
        raise ValueError(f"tile_m is {c.tile_m}, allowed: 64, 128 or 192 (one to three consumer warpgroups)")
    if c.ping_pong and c.consumers < 2:
        raise ValueError(
            f"ping_pong is True, allowed with tile_m {c.tile_m}: False, as there is one warpgroup"
        )
    if c.tile_n % 16 or not 16 <= c.tile_n <= 256:
        raise ValueError(f"tile_n is {c.tile_n}, allowed: multiples of 16 from 16 to 256")
    if c.few_keys and not c.counts_from_end:
        raise ValueError(
            f"few_keys is {c.few_keys}, allowed where query tiles can be counted from the end, else 0"
        )
    if c.stages < 2:
        raise ValueError(f"stages is {c.stages}, allowed: 2 or more")
    if c.ctas_per_sm < 1:
        raise ValueError(f"ctas_per_sm is {c.ctas_per_sm}, allowed: 1 or more")
    check_layout(c)
    if not c.is_plain and not c.warp_specialized:
        raise ValueError(
            f"warp_specialized is {c.warp_specialized}, allowed with a window, with packed sequences and where scores "
            "are changed: True"
        )
    if c.dropout and c.tile_n % 32:
        raise ValueError(f"tile_n is {c.tile_n}, allowed with dropout: multiples of 32")
    if c.page_box and (c.layout != VARLEN or c.page_box % 8 or c.tile_n % c.page_box):
        raise ValueError(
            f"page_box is {c.page_box} with layout {c.layout!r}, allowed: 0, or with 'varlen' multiples of 8 that "
            f"divide tile_n, {c.tile_n}"
        )
    check_block_lists(c)
    check_used_columns(c)
    check_group(c)
    _validate_registers(c)
    if c.o_shares_q and c.o_bytes > c.q_bytes:
        raise ValueError(
            f"O is staged in Q's memory and needs {c.o_bytes} bytes, allowed: {c.q_bytes}; stages is {c.stages} and "
            f"tile_n {c.tile_n}, of which fewer leave O memory of its own"
        )
    if c.smem_bytes > c.smem_limit:
        raise ValueError(f"the tiles need {c.smem_bytes} bytes of shared memory, allowed: {c.smem_limit}")


def _validate_registers(config: ForwardConfig) -> None:
    """setmaxnreg can only lower the producer's share of what the launch gives, and raise the consumers'."""
    launched, r = config.launched_registers, config.registers
    if not config.warp_specialized:
        if r != Registers(launched, 0):
            raise ValueError(f"registers are {r}, allowed without a producer: {Registers(launched, 0)}")
        return
    total = WARPGROUP_THREADS * (r.consumer * config.consumers + r.producer)
    # A warpgroup that asks for more than is left of what the CTA was launched with waits forever.
    available = launched * config.threads
    in_order = MIN_REGISTERS <= r.producer <= launched <= r.consumer <= MAX_REGISTERS
    if r.consumer % 8 or r.producer % 8 or not in_order or total > available:
        raise ValueError(
            f"registers {r} need {total}, allowed: multiples of 8, producer {MIN_REGISTERS} to {launched}, "
            f"consumer {launched} to {MAX_REGISTERS}, {available} in all"
        )


def check_problem_size(config: ForwardConfig, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> None:
    """Raise NotImplementedError for sizes that the kernel's 32-bit tile and key numbers cannot count."""
    problem.check_problem_size("Hopper kernel", config.tile_m, (batch, heads), (seqlen_q, seqlen_k))


TWO_CONSUMERS = Registers(consumer=240, producer=24)
THREE_CONSUMERS = Registers(consumer=160, producer=32)
TWO_CONSUMERS_OF_PAGES = Registers(consumer=232, producer=40)
"""Where a box of a page is more than two copies."""
ONE_CONSUMER_OF_THREE_CTAS = Registers(consumer=136, producer=24)
TWO_CONSUMERS_TRANSPOSING = Registers(consumer=224, producer=56)
TWO_CONSUMERS_OF_WIDE_ROWS = Registers(consumer=232, producer=40)
THREE_CONSUMERS_TRANSPOSING = Registers(consumer=152, producer=56)
"""A producer warpgroup that transposes V needs more than one that only issues loads."""
