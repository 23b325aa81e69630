"""Configurations of the backward kernel, as data. Nothing here imports the DSL or touches a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cute_kernels.backward.step import check_step_size
from cute_kernels.backward.word_order import COLUMNS_PER_GROUP, ROWS_PER_BAND, WORDS_PER_FRAGMENT, WordOrder
from cute_kernels.problem import (
    DENSE,
    SHORT_NAMES,
    check_block_lists,
    check_kind,
    feature_names,
)
from cute_kernels.user_functions import NO_FUNCTIONS, UserFunctions
from hopper.backward.used_columns import check_used_columns, leave_out_zeros
from hopper.config import (
    BARRIER_BYTES,
    REGISTERS_PER_SM,
    SMEM_BYTES,
    TWO_CONSUMERS,
    WARPGROUP_ROWS,
    WARPGROUP_THREADS,
    Registers,
)

NATIVE_HEAD_DIMS = (64, 96, 128, 192, 256)
MAX_HEAD_DIM = NATIVE_HEAD_DIMS[-1]
MAX_UNPAIRED_HEAD_DIM = 128

CLEARING_HEAD_DIM = 128
"""At which packed kernels clear the sums of dQ themselves."""

SPILLING_HEAD_DIM = 96
"""At which couriers of packed sequences would spill with the registers of others, and consumers have some to spare."""
TWO_CONSUMERS_OF_COURIERS = Registers(consumer=232, producer=40)

CLUSTER_CTAS = 2
"""CTAs of a ``PairedBackwardConfig`` that work on the same queries."""


@dataclass(frozen=True)
class BackwardConfig:
    """Everything that is fixed when a backward kernel is compiled.

    A CTA owns ``tile_n`` keys of one key/value head, 64 for each consumer warpgroup, and walks over the queries in
    tiles of ``tile_m``; Q, dO, dS and dQ each run through ``stages`` buffers. With ``ordered`` the parts of dQ are
    added in an order that does not depend on timing, so that dQ has the same bits in every run. ``window`` is a sliding
    window, whose sides the kernel is given when it runs; with ``causal`` the right one is 0. With ``chunk`` it is given
    the keys of a chunk too, outside of which a query sees none. ``layout`` is "dense", for sequences of one length, or
    "varlen", for packed ones. ``softcap`` caps scores by a tanh, ``alibi`` adds ALiBi's bias to
    them, ``dropout`` zeroes elements of P. ``functions`` are a user's. With ``block_lists`` a key tile visits the
    query tiles of a list alone, and the mask function is not asked in those that the list calls seen. With ``strips``
    a CTA has neighbouring key tiles one after another and writes dQ itself, in 16 bits, for windows that
    ``fit_strips`` and as many heads of K and V as of Q. With ``clears_ahead`` a warp of the kernel clears the
    sums of dQ, ahead of the key tiles that add to them; else they are zero before the launch. With
    ``few_keys`` it finds delta as the sum of P dP in float32, for those packed sequences that have no more than
    FEW_KEYS keys; others take that of ``prepare``. With ``one_tile`` there are no more keys than a tile has
    (``fit_one_tile``): the kernel finds delta and the base-2 LSE itself, and writes dQ in 16 bits, so that nothing is
    launched beside it. With ``stores_first`` the first key tile of a query tile stores its part of dQ, and what the
    sums held before does not matter: for ``ordered`` ones that a single launch makes. With ``divides_heads`` the query
    heads that share a head of K and V are divided among CTAs, as many as the launch says. Each leaves its dK and dV in
    float32, as its accumulators hold them (``dk_order``), and ``finish`` adds them up and rounds them. With
    ``walks_back`` key tiles walk from the last query tile back, over all query heads of each (``walk.py``). With
    ``divides_visits`` those key tiles that the launch says are shared by several CTAs (``pieces.py``). So many columns
    of Q and K as ``used_head_dim`` says, and of V as ``used_head_dim_v``, are multiplied where those behind them are
    zeros; 0 is all.
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    causal: bool
    tile_m: int
    tile_n: int
    stages: int
    registers: Registers = TWO_CONSUMERS
    ordered: bool = False
    window: bool = False
    chunk: bool = False
    layout: str = DENSE
    softcap: bool = False
    alibi: bool = False
    dropout: bool = False
    functions: UserFunctions = NO_FUNCTIONS
    block_lists: bool = False
    strips: bool = False
    clears_ahead: bool = False
    few_keys: bool = False
    one_tile: bool = False
    stores_first: bool = False
    divides_heads: bool = False
    walks_back: bool = False
    divides_visits: bool = False
    used_head_dim: int = 0
    used_head_dim_v: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether a kernel takes nothing but dense tensors and a scale: there is no mask but a causal one, and nothing
        is done to scores or P."""
        changes = self.softcap or self.alibi or self.dropout or self.functions
        return not (self.window or changes) and self.layout == DENSE

    @property
    def consumers(self) -> int:
        """Consumer warpgroups; each owns 64 keys of the tile."""
        return self.tile_n // WARPGROUP_ROWS

    @property
    def threads(self) -> int:
        return WARPGROUP_THREADS * (self.consumers + 1)

    @property
    def publishes_factors(self) -> bool:
        """Whether the warpgroup that makes P also has to hand on P times the factors of dS (the derivatives of a score
        function and of a softcap before it), since these do not follow from P."""
        return self.functions.has_score and (self.functions.bends or self.softcap)

    @property
    def rounds_probabilities(self) -> bool:
        """Whether dS is computed from the rounded P, because there are no registers to keep it in float32."""
        return self.tile_m > WARPGROUP_ROWS

    @property
    def splits_columns(self) -> bool:
        """Whether the warpgroups share out the columns of a dQ tile, because its rows are too few."""
        return self.tile_m < WARPGROUP_ROWS * self.consumers

    @property
    def k_columns(self) -> int:
        """Columns of K that are of the dQ of one warpgroup."""
        return self.head_dim // self.consumers if self.splits_columns else self.head_dim

    @property
    def dq_columns(self) -> int:
        """Columns of dQ that one warpgroup computes, of 64 of its rows: without zeros, where it has all columns. dV in
        16 bits has to fit where they are staged."""
        return self.k_columns if self.splits_columns else max(self.used_columns_k, self.head_dim // 2)

    @property
    def used_columns_k(self) -> int:
        """Columns that products of Q and K, and their gradients, have."""
        return self.used_head_dim or self.head_dim

    @property
    def used_columns_v(self) -> int:
        """The same of V and dO."""
        return self.used_head_dim_v or self.head_dim_v

    @property
    def is_persistent(self) -> bool:
        """Whether the grid has a CTA for each SM, and a counter from which they claim tiles."""
        return True

    @property
    def can_miss_queries(self) -> bool:
        """Whether there may be key tiles that no query sees."""
        return self.window or self.layout != DENSE or self.block_lists

    @property
    def key_parts(self) -> int:
        """Parts in which K and V of a tile come, each for itself: with ``strips`` one for each consumer warpgroup."""
        return self.consumers if self.strips else 1

    @property
    def hides_blocks(self) -> bool:
        """Whether products are left out where, by mask or window, the keys of a warpgroup see no query of a tile that
        others of the CTA see. With dropout or a user's functions there are no registers to tell."""
        is_walk = not (self.block_lists or self.chunk or self.dropout or self.functions)
        return is_walk and self.tile_m < self.tile_n and (self.causal or self.window)

    @property
    def shortens(self) -> bool:
        """Whether the walks of a head's key tiles get shorter towards its end, as the number of a tile alone says, and
        the order of tiles is free."""
        is_free = not (self.strips or self.one_tile or self.ordered or self.block_lists or self.chunk)
        return is_free and self.layout == DENSE and (self.causal or self.window)

    @property
    def most_without_tail(self) -> int:
        """Key tiles of a head at most, of which none wait for the end of a launch where its walks get shorter."""
        return 0

    @property
    def shortens_packed(self) -> bool:
        """The same of each of packed sequences, under a causal mask alone. In a window consumers, which find the place
        of a tile themselves, have no registers for it."""
        is_free = not (self.ordered or self.block_lists or self.chunk or self.window)
        return is_free and self.layout != DENSE and self.causal

    @property
    def has_sections(self) -> bool:
        """Whether the heads of a section have their first key tiles one behind the other, then their second ones, and
        so on, so that key tiles of a head, which take turns at its queries, do not begin together. Not tried in a
        window and by lists, and packed sequences have an order of their own."""
        return self.ordered and self.layout == DENSE and not (self.window or self.block_lists)

    @property
    def has_late_heads(self) -> bool:
        """Whether the last heads of those with sections come from their longest walks on, and add dQ in that order.
        Where the first key tile only adds, couriers of head_dim 96 have no register for it; there it was not timed."""
        is_turned = self.stores_first and self.has_sections and self.causal
        return is_turned and self.head_dim != SPILLING_HEAD_DIM

    @property
    def rows_apart(self) -> int:
        """With ``has_sections`` about how many rows of queries later a key tile begins than the one before it. More
        wait less for each other, and share less in L2."""
        return 2 * self.tile_m if self.causal else 256

    @property
    def fetches_sums(self) -> bool:
        """Whether the producer warp asks for the sums of dQ of a query tile in L2 when it loads the tile.

        Under a causal mask key tiles begin at different queries: of a short sequence most additions are the first to
        their sums, and would wait for memory. Without a mask key tiles begin alike; packed, there are no registers."""
        return self.is_plain and self.causal and not (self.ordered or self.one_tile)

    @property
    def writes_dq(self) -> bool:
        """Whether dQ leaves the kernel as it is to be, in 16 bits, and not as float32 sums."""
        return self.strips or self.one_tile

    @property
    def least_blocks(self) -> int:
        """Query tiles that a key tile visits at least, though none may see it. Couriers need one: they send dQ of a
        tile under the next one's first block, and would lag behind in the mailbox."""
        return 1 if self.can_miss_queries and self.ordered else 0

    @property
    def dq_parts(self) -> int:
        """Warpgroups that share out a dQ tile."""
        return self.consumers

    @property
    def counts_per_tile(self) -> int:
        """Counters of a query tile, of how many key tiles have added to it; one where a single warp adds."""
        return 1

    @property
    def dq_words(self) -> int:
        """float32 of a dQ tile that one warpgroup computes."""
        return WARPGROUP_ROWS * self.dq_columns

    @property
    def staged_words(self) -> int:
        """Words of 32 bits of shared memory in which that is staged."""
        return self.dq_words // 2 if self.one_tile else self.dq_words

    @property
    def dq_order(self) -> WordOrder:
        """Where the words of a dQ tile lie: four of a thread next to each other, and the threads in order."""
        bands = WARPGROUP_ROWS // ROWS_PER_BAND
        groups = self.dq_columns // COLUMNS_PER_GROUP
        return WordOrder(
            bands=bands,
            groups=groups,
            row_parts=1 if self.splits_columns else self.dq_parts,
            column_parts=self.dq_parts if self.splits_columns else 1,
            groups_in_turn=groups,
            band_stride=WORDS_PER_FRAGMENT,
            group_stride=bands * WORDS_PER_FRAGMENT,
            lane_stride=4,
            element_stride=1,
        )

    @property
    def dk_words(self) -> int:
        """float32 of a tile of dK or dV that one warpgroup computes."""
        return self.tile_n * self.head_dim // self.dq_parts

    @property
    def dk_order(self) -> WordOrder:
        """Where its words lie with ``divides_heads``: as those of dQ, for as many columns as a warpgroup has."""
        groups = self.tile_columns // COLUMNS_PER_GROUP
        return replace(
            self.dq_order,
            groups=groups,
            groups_in_turn=groups,
            row_parts=self.dq_parts * self.tile_columns // self.head_dim,
            column_parts=self.head_dim // self.tile_columns,
        )

    @property
    def tile_columns(self) -> int:
        """Columns of dK and dV that one warpgroup computes."""
        return self.head_dim

    def step_name(self, step: str) -> str:
        """Of "prepare" or "finish": the same for two configs only where their machine code is."""
        columns = self.head_dim_v if step == "prepare" else self.head_dim
        name = f"hopper_bwd_{step}_{SHORT_NAMES[self.dtype]}_d{columns}_m{self.tile_m}n{self.tile_n}"
        name = name if self.layout == DENSE else f"{name}_{self.layout}"
        if step != "prepare":
            name += f"_q{self.dq_columns}" * (self.dq_columns < self.k_columns)
            return name + "_divided" * self.divides_heads + "_pieces" * self.divides_visits
        return name + "_clears" * self.clears_ahead + "_few" * self.few_keys + "_stores" * self.stores_first

    @property
    def smem_bytes(self) -> int:
        rows = self.tile_n + self.stages * self.tile_m
        scores = self.stages * self.tile_m * self.tile_n
        vectors = 2 * self.stages * self.tile_m
        elements = rows * (self.head_dim + self.head_dim_v) + scores
        if self.one_tile:
            # O, and both vectors of each warpgroup beside the LSE that is given.
            elements += self.stages * self.tile_m * self.head_dim_v
            vectors = (self.stages + 2 * self.consumers) * self.tile_m
        return 2 * elements + 4 * (vectors + self.stages * self.consumers * self.staged_words) + BARRIER_BYTES

    @property
    def name(self) -> str:
        """Short unique name: kernel entry in profilers, file stem in the compile cache."""
        dims = (
            f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}v{self.head_dim_v}"
        )
        parts = ["hopper_bwd", SHORT_NAMES[self.dtype], dims, "causal" if self.causal else "full"]
        parts += [f"m{self.tile_m}n{self.tile_n}s{self.stages}"]
        parts += [f"r{self.registers.consumer}_{self.registers.producer}"]
        parts += ["ordered"] if self.ordered else []
        parts += feature_names(self)
        parts += ["strips"] if self.strips else []
        parts += ["clears"] if self.clears_ahead else []
        parts += ["few"] if self.few_keys else []
        parts += ["tile"] if self.one_tile else []
        parts += ["stores"] if self.stores_first else []
        parts += ["divided"] * self.divides_heads + ["back"] * self.walks_back
        parts += ["pieces"] * self.divides_visits
        parts += [f"used{self.used_head_dim}v{self.used_head_dim_v}"] if self.used_head_dim else []
        return "_".join(parts)


@dataclass(frozen=True)
class PairedBackwardConfig(BackwardConfig):
    """A backward kernel for wide heads, of which a CTA cannot hold dK and dV of 128 keys in registers.

    A cluster of two CTAs owns ``tile_n`` keys, half of them each, and the two consumer warpgroups of a CTA share out
    the columns of dK and dV. Q and dS run through ``stages`` buffers, dO through one.
    """

    @property
    def consumers(self) -> int:
        return 2

    @property
    def is_persistent(self) -> bool:
        return False

    @property
    def fetches_sums(self) -> bool:
        """Not tried."""
        return False

    @property
    def has_sections(self) -> bool:
        """As above, but with plain scores alone: where they are changed there are no registers for it."""
        return super().has_sections and self.is_plain

    @property
    def has_late_heads(self) -> bool:
        """Not tried."""
        return False

    @property
    def most_without_tail(self) -> int:
        """With 3 tiles a head 66 pairs took 10 % longer, with 8 as long as without (`backward_tails.json`)."""
        return 8

    @property
    def shortens(self) -> bool:
        """As above, but under a causal mask alone: in a window it was not tried."""
        return super().shortens and self.causal and not self.window

    @property
    def rows_apart(self) -> int:
        return 128

    @property
    def keys(self) -> int:
        """Of a CTA."""
        return self.tile_n // CLUSTER_CTAS

    def stages_of(self, pipe: str) -> int:
        """Buffers of "q", "do" or "p"."""
        return {"q": self.stages, "do": 1, "p": 1}[pipe]

    @property
    def buffers_of_p(self) -> int:
        """Buffers of P in shared memory: one more with dropout, since dV needs P after it and dS P before it, and where
        the config ``publishes_factors``."""
        return self.stages_of("p") + (self.dropout or self.publishes_factors)

    @property
    def least_blocks(self) -> int:
        """One, since the first block stands by itself."""
        return 1 if self.can_miss_queries else 0

    @property
    def splits_columns(self) -> bool:
        return True

    @property
    def dq_parts(self) -> int:
        return CLUSTER_CTAS * self.consumers

    @property
    def counts_per_tile(self) -> int:
        return self.dq_parts

    @property
    def k_columns(self) -> int:
        return self.head_dim // self.dq_parts

    @property
    def tile_columns(self) -> int:
        return self.head_dim // self.consumers

    @property
    def smem_bytes(self) -> int:
        keys = self.keys * (self.head_dim + self.head_dim_v + self.head_dim // CLUSTER_CTAS)
        queries = self.tile_m * (self.stages * self.head_dim + self.head_dim_v)
        scores = self.tile_m * self.keys * (self.buffers_of_p + CLUSTER_CTAS * self.stages)
        vectors = self.tile_m * (self.stages + 1)
        return 2 * (keys + queries + scores) + 4 * vectors + BARRIER_BYTES

    @property
    def name(self) -> str:
        return f"{super().name}_pair"


def validate_backward_config(config: BackwardConfig) -> None:
    """Raise ValueError naming the first field that no backward kernel can be built from."""
    c = config
    if c.head_dim not in NATIVE_HEAD_DIMS or c.head_dim_v != c.head_dim:
        raise ValueError(
            f"head_dim is {c.head_dim} and head_dim_v {c.head_dim_v}, allowed: the same, one of {NATIVE_HEAD_DIMS}"
        )
    if c.tile_n != 2 * WARPGROUP_ROWS:
        raise ValueError(f"tile_n is {c.tile_n}, allowed: {2 * WARPGROUP_ROWS} (two consumer warpgroups)")
    is_paired = isinstance(c, PairedBackwardConfig)
    if is_paired != (c.head_dim > MAX_UNPAIRED_HEAD_DIM):
        raise ValueError(
            f"head_dim is {c.head_dim}, allowed: above {MAX_UNPAIRED_HEAD_DIM} in pairs of CTAs, and only there"
        )
    tiles_m = (64,) if is_paired else (64, 128)
    if c.tile_m not in tiles_m:
        raise ValueError(f"tile_m is {c.tile_m}, allowed: {' or '.join(map(str, tiles_m))}")
    if c.dropout and c.tile_m != WARPGROUP_ROWS:
        raise ValueError(f"tile_m is {c.tile_m}, allowed with dropout: {WARPGROUP_ROWS}")
    if c.functions and c.rounds_probabilities:
        raise ValueError(f"tile_m is {c.tile_m}, allowed with a user's functions: {WARPGROUP_ROWS}")
    if c.stages < 2 or ((is_paired or c.ordered) and c.stages > 2):
        raise ValueError(f"stages is {c.stages}, allowed: {'2' if is_paired or c.ordered else '2 or more'}")
    check_kind(c)
    check_block_lists(c)
    if c.strips and (c.chunk or c.ordered or not c.window or c.layout != DENSE or is_paired):
        raise ValueError(
            f"strips is True with window={c.window}, chunk={c.chunk}, ordered={c.ordered}, layout {c.layout!r} and "
            f"head_dim {c.head_dim}, allowed: True, False, False, 'dense' and at most {MAX_UNPAIRED_HEAD_DIM}"
        )
    if c.clears_ahead and (
        c.causal or c.window or c.ordered or c.block_lists or c.layout == DENSE or is_paired
    ):
        raise ValueError(
            f"clears_ahead is True with causal={c.causal}, window={c.window}, ordered={c.ordered}, "
            f"block_lists={c.block_lists}, layout {c.layout!r} and head_dim {c.head_dim}, allowed: False four times, "
            f"'varlen' and at most {MAX_UNPAIRED_HEAD_DIM}"
        )
    if c.stores_first and not gains_by_storing(c):
        raise ValueError(
            f"stores_first is True in {c.name}, allowed: with ordered, plain scores and no mask but a causal one"
        )
    if c.divides_heads and c.writes_dq:
        raise ValueError(f"divides_heads is True in {c.name}, allowed: without strips and one_tile")
    if c.walks_back and not can_walk_back(c):
        allowed = f"causal, plain, in any order, to head_dim {MAX_UNPAIRED_HEAD_DIM}"
        raise ValueError(f"walks_back is True in {c.name}, allowed: {allowed}")
    if c.divides_visits and not can_divide_visits(c):
        allowed = f"plain, in any order, to head_dim {MAX_UNPAIRED_HEAD_DIM}"
        others = "without one_tile, divides_heads and walks_back"
        raise ValueError(f"divides_visits is True in {c.name}, allowed: {allowed}, {others}")
    check_used_columns(c)
    if c.few_keys and c.layout == DENSE:
        raise ValueError(f"few_keys is True with layout {c.layout!r}, allowed: 'varlen'")
    if c.one_tile and (not c.is_plain or c.ordered or is_paired):
        raise ValueError(
            f"one_tile is True with is_plain={c.is_plain}, ordered={c.ordered} and head_dim {c.head_dim}, allowed: "
            f"True, False and at most {MAX_UNPAIRED_HEAD_DIM}"
        )
    if c.strips and (c.tile_m, c.stages) != (WARPGROUP_ROWS, 2):
        raise ValueError(
            f"tile_m is {c.tile_m} and stages {c.stages}, allowed with strips: {WARPGROUP_ROWS} and 2"
        )
    total = WARPGROUP_THREADS * (c.registers.consumer * c.consumers + c.registers.producer)
    # What the launch gives; a warpgroup that asks for more than is left of it waits forever.
    available = REGISTERS_PER_SM // c.threads // 8 * 8 * c.threads
    if total > available:
        raise ValueError(f"registers {c.registers} need {total}, allowed: {available} in all")
    if c.smem_bytes > SMEM_BYTES:
        raise ValueError(f"the tiles need {c.smem_bytes} bytes of shared memory, allowed: {SMEM_BYTES}")


def select_backward_config(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    causal: bool,
    ordered: bool = False,
    window: bool = False,
    layout: str = DENSE,
    softcap: bool = False,
    alibi: bool = False,
    dropout: bool = False,
    functions: UserFunctions = NO_FUNCTIONS,
    block_lists: bool = False,
) -> BackwardConfig:
    """The config that serves a problem. Windows and packed sequences have the tiles of dense problems, and so have
    scores and P that are changed, but at head_dim 64, where the widest tile leaves no registers for it.

    Raises:
        ValueError: a head dimension is larger than the kernel takes.
    """
    size = max(head_dim, head_dim_v)
    fits = [native for native in NATIVE_HEAD_DIMS if native >= size]
    if not fits:
        raise ValueError(
            f"head_dim {head_dim} and head_dim_v {head_dim_v}: both may be at most {MAX_HEAD_DIM} in the Hopper "
            "backward kernel"
        )
    kind = PairedBackwardConfig if fits[0] > MAX_UNPAIRED_HEAD_DIM else BackwardConfig
    packed_in_order = ordered and layout != DENSE and fits[0] == SPILLING_HEAD_DIM
    tile_m = 128 if fits[0] == 64 and not (softcap or alibi or dropout or functions) else 64
    config = kind(
        dtype,
        fits[0],
        fits[0],
        causal,
        tile_m,
        tile_n=128,
        stages=2,
        registers=TWO_CONSUMERS_OF_COURIERS if packed_in_order else TWO_CONSUMERS,
        ordered=ordered,
        window=window,
        layout=layout,
        softcap=softcap,
        alibi=alibi,
        dropout=dropout,
        functions=functions,
        block_lists=block_lists,
    )
    config = replace(
        config, clears_ahead=gains_by_clearing_ahead(config), stores_first=gains_by_storing(config)
    )
    used, used_v = leave_out_zeros(config, head_dim, head_dim_v)
    config = replace(config, used_head_dim=used, used_head_dim_v=used_v)
    validate_backward_config(config)
    return config


def gains_by_clearing_ahead(config: BackwardConfig) -> bool:
    """Whether ``clears_ahead`` serves a config and makes it faster: with packed sequences at head_dim 128, no mask and
    plain scores. Under a causal mask it has lost, and at head_dim 64 and 96 it wins nothing."""
    c = config
    is_masked = c.causal or c.window or c.block_lists
    is_changed = c.softcap or c.alibi or c.dropout or c.functions
    return (
        c.layout != DENSE and c.head_dim == CLEARING_HEAD_DIM and not (is_masked or is_changed or c.ordered)
    )


def gains_by_storing(config: BackwardConfig) -> bool:
    """Whether ``stores_first`` serves a config. In a window and by lists there may be query tiles that no key tile
    visits; of packed sequences those without keys have such tiles, whose sums ``prepare`` clears."""
    c = config
    is_changed = c.softcap or c.alibi or c.dropout or c.functions
    return c.ordered and not (is_changed or c.window or c.block_lists)


def can_walk_back(config: BackwardConfig) -> bool:
    """Whether ``walks_back`` serves a config; it was not tried in pairs."""
    c = config
    return c.is_plain and c.causal and c.shortens and c.head_dim <= MAX_UNPAIRED_HEAD_DIM


def can_divide_visits(config: BackwardConfig) -> bool:
    """Whether ``divides_visits`` serves a config; it was not tried in pairs."""
    c = config
    is_other = c.one_tile or c.ordered or c.divides_heads or c.walks_back
    return c.is_plain and not is_other and c.head_dim <= MAX_UNPAIRED_HEAD_DIM


def check_backward_size(batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> None:
    """Raise NotImplementedError for sizes that the grids of the backward kernels cannot count."""
    check_step_size("Hopper backward kernel", (batch, heads), (seqlen_q, seqlen_k))
