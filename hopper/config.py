"""Kernel configurations as data: what a kernel is built from, how one is chosen, and what makes one valid.

Nothing here imports the DSL or touches a GPU. A config is a frozen dataclass; variants are made with
``dataclasses.replace``; an explicit config is validated and never silently changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from cute_kernels import problem
from cute_kernels.problem import DTYPES, MAX_HEAD_DIM, SHORT_NAMES

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

FP8_DTYPE = "float8_e4m3fn"
FP8_KEYS_PER_STEP = 32
FP8_KEY_ORDER = tuple(
    16 * (slot // 16) + 8 * (slot % 4 // 2) + 2 * (slot % 16 // 4) + slot % 2
    for slot in range(FP8_KEYS_PER_STEP)
)
"""Slot of the k of an FP8 WGMMA -> key of 32: how V's keys must lie for ``store_row_as_operand_a_e4m3``, which leaves
P in the order of the accumulator."""

V_ROW_STAGES = 2
"""Blocks of FP8 V in rows that wait in shared memory for their transposition."""

MAX_PV_COLUMNS, PV_PART_COLUMNS = 128, 64
"""Columns of O up to which a second accumulator of its size finds registers, and how many there are in a part of P V
where it does not."""

NATIVE_HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
"""(head_dim, head_dim_v) pairs that have a kernel of their own; any other pair runs on the cheapest
one that covers it, the tail of a row being zero-filled by TMA on load and clipped on store."""

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

    ``pipelined`` issues S = Q K_{j+1}^T before O += P_j V_j, so that a warpgroup's softmax runs under its
    own second GEMM (FlashAttention-3, section 3.2). ``ping_pong`` orders the warpgroups with named barriers,
    so that one's softmax runs under another's GEMMs (section 3.1). ``late_rescale`` shrinks O for
    a new maximum not with the softmax that found it but under the next Q K^T, and not at all if a warp found none.
    Without ``warp_specialized`` there is no producer warp: the first consumer warp loads between its own steps, and
    all threads keep the registers of the launch. ``ctas_per_sm`` CTAs share an SM, and its registers and shared memory.
    Such kernels are for comparison, as in the paper's ablation.
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
    warp_specialized: bool = True
    ctas_per_sm: int = 1

    @property
    def consumers(self) -> int:
        """Consumer warpgroups; each owns 64 rows of the tile."""
        return self.tile_m // WARPGROUP_ROWS

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
    def out_dtype(self) -> str:
        return self.dtype

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of Q, K and V."""
        return 1 if self.dtype == FP8_DTYPE else 2

    @property
    def q_bytes(self) -> int:
        return self.tile_m * self.head_dim * self.element_bytes

    @property
    def o_bytes(self) -> int:
        return self.tile_m * self.head_dim_v * 2

    @property
    def kv_bytes(self) -> int:
        return self.stages * self.tile_n * (self.head_dim + self.head_dim_v) * self.element_bytes

    @property
    def o_shares_q(self) -> bool:
        """Whether O is staged in Q's shared memory, because a buffer of its own would not fit."""
        return self.q_bytes + self.kv_bytes + self.o_bytes + BARRIER_BYTES > self.smem_limit

    @property
    def smem_bytes(self) -> int:
        staging = self.q_bytes if self.o_shares_q else self.q_bytes + self.o_bytes
        return staging + self.kv_bytes + BARRIER_BYTES

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
        parts += [] if self.warp_specialized else ["nows"]
        parts += [] if self.ctas_per_sm == 1 else [f"x{self.ctas_per_sm}"]
        return "_".join(parts)


@dataclass(frozen=True)
class Fp8ForwardConfig(ForwardConfig):
    """A forward kernel on e4m3 inputs with block scales.

    ``output`` is the dtype of O. Of each 8 pairs of columns of P, ``polynomial_pairs`` get their exponentials from the
    FMA pipe instead of MUFU (``cute_kernels.exp2_pairs``). ``eager`` is for few warps: the softmax is ``EagerSoftmax``.
    With ``lagging`` it is ``LaggingSoftmax``, which takes few maxima, and with ``half_scores`` ``HalfScoresSoftmax``,
    which does so on scores in float16: no product of a row of Q and one of K, as e4m3, may exceed 65504.
    With ``v_rows`` V arrives as (keys, head_dim_v) and the producer warpgroup transposes it, else as (head_dim_v,
    keys). With ``two_level`` the P V of a key block has an accumulator of its own and is added to O in float32, of
    whose bits FP8 WGMMA keeps only a part in its sums.
    """

    output: str = "bfloat16"
    polynomial_pairs: int = 0
    eager: bool = False
    lagging: bool = False
    half_scores: bool = False
    v_rows: bool = False
    two_level: bool = False

    @property
    def pv_columns(self) -> int:
        """Columns of O whose P V is in one accumulator: all, unless registers for that are too few beside O."""
        is_too_wide = self.two_level and self.head_dim_v > MAX_PV_COLUMNS
        return PV_PART_COLUMNS if is_too_wide else self.head_dim_v

    @property
    def out_dtype(self) -> str:
        return self.output

    @property
    def name(self) -> str:
        parts = ["eager"] if self.eager else []
        parts += ["lagging"] if self.lagging else []
        parts += ["half"] if self.half_scores else []
        parts += [f"poly{self.polynomial_pairs}"] if self.polynomial_pairs else []
        parts += ["vrows"] if self.v_rows else []
        parts += ["twolevel"] if self.two_level else []
        return "_".join([super().name, *parts])

    @property
    def smem_bytes(self) -> int:
        rows = V_ROW_STAGES * self.tile_n * self.head_dim_v if self.v_rows else 0
        return super().smem_bytes + rows


def validate_forward_config(config: ForwardConfig) -> None:
    """Raise ValueError naming the first field that no Hopper kernel can be built from."""
    c = config
    allowed = (FP8_DTYPE,) if isinstance(c, Fp8ForwardConfig) else DTYPES
    if c.dtype not in allowed:
        raise ValueError(f"dtype is {c.dtype!r}, allowed: {', '.join(allowed)}")
    if c.out_dtype not in DTYPES:
        raise ValueError(f"output is {c.out_dtype!r}, allowed: {', '.join(DTYPES)}")
    if isinstance(c, Fp8ForwardConfig):
        _validate_fp8(c)
    for name in ("head_dim", "head_dim_v"):
        value = getattr(c, name)
        if value % 32 or not 32 <= value <= MAX_HEAD_DIM:
            raise ValueError(f"{name} is {value}, allowed: multiples of 32 from 32 to {MAX_HEAD_DIM}")
    if c.tile_m not in (64, 128, 192):
        raise ValueError(f"tile_m is {c.tile_m}, allowed: 64, 128 or 192 (one to three consumer warpgroups)")
    if c.ping_pong and c.consumers < 2:
        raise ValueError(
            f"ping_pong is True, allowed with tile_m {c.tile_m}: False, as there is one warpgroup"
        )
    if c.tile_n % 16 or not 16 <= c.tile_n <= 256:
        raise ValueError(f"tile_n is {c.tile_n}, allowed: multiples of 16 from 16 to 256")
    if c.stages < 2:
        raise ValueError(f"stages is {c.stages}, allowed: 2 or more")
    if c.ctas_per_sm < 1:
        raise ValueError(f"ctas_per_sm is {c.ctas_per_sm}, allowed: 1 or more")
    _validate_registers(c)
    if c.o_shares_q and c.o_bytes > c.q_bytes:
        raise ValueError(
            f"O is staged in Q's memory and needs {c.o_bytes} bytes, allowed: {c.q_bytes}; stages is {c.stages} and "
            f"tile_n {c.tile_n}, of which fewer leave O memory of its own"
        )
    if c.smem_bytes > c.smem_limit:
        raise ValueError(f"the tiles need {c.smem_bytes} bytes of shared memory, allowed: {c.smem_limit}")


def _validate_fp8(config: Fp8ForwardConfig) -> None:
    if config.tile_n % FP8_KEYS_PER_STEP:
        raise ValueError(
            f"tile_n is {config.tile_n}, allowed for {FP8_DTYPE}: multiples of {FP8_KEYS_PER_STEP}"
        )
    if not 0 <= config.polynomial_pairs <= 8:
        raise ValueError(f"polynomial_pairs is {config.polynomial_pairs}, allowed: 0 to 8")
    if config.two_level:
        _validate_two_level(config)
    if config.lagging:
        _validate_lagging(config, "lagging")
        if config.polynomial_pairs == 8:
            # Only exponentials in float32 can tell what float16 does not hold from what float32 does not.
            raise ValueError("polynomial_pairs is 8, allowed with lagging: 0 to 7")
    if config.half_scores:
        _validate_lagging(config, "half_scores")
        if config.polynomial_pairs == 8:
            # Only MUFU's exponentials can tell that float16 does not hold the scale.
            raise ValueError("polynomial_pairs is 8, allowed with half_scores: 0 to 7")
        for name in ("lagging", "v_rows"):
            if getattr(config, name):
                raise ValueError(f"{name} is True, allowed with half_scores: False")


def _validate_lagging(config: Fp8ForwardConfig, option: str) -> None:
    """P V of a block is awaited in that block, as the softmax may multiply O."""
    required = {
        "pipelined": True,
        "warp_specialized": True,
        "late_rescale": False,
        "eager": False,
        "two_level": False,
    }
    for name, value in required.items():
        if getattr(config, name) is not value:
            raise ValueError(f"{name} is {not value}, allowed with {option}: {value}")


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
TWO_CONSUMERS_TRANSPOSING = Registers(consumer=224, producer=56)
THREE_CONSUMERS_TRANSPOSING = Registers(consumer=152, producer=56)
"""A producer warpgroup that transposes V needs more than one that only issues loads."""


ANY_LENGTH = 2**62


@dataclass(frozen=True)
class Tiling:
    """The tuned part of a config, for keys up to ``max_seqlen_k``."""

    tile_m: int
    tile_n: int
    stages: int
    ping_pong: bool = True
    late_rescale: bool = False
    max_seqlen_k: int = ANY_LENGTH


TILINGS: dict[tuple[int, int, bool], tuple[Tiling, ...]] = {
    (64, 64, False): (Tiling(192, 128, 3),),
    (64, 64, True): (Tiling(128, 128, 4, max_seqlen_k=1536), Tiling(192, 128, 3)),
    (96, 96, False): (Tiling(128, 192, 2),),
    (96, 96, True): (Tiling(128, 128, 2),),
    (128, 128, False): (Tiling(128, 128, 2, max_seqlen_k=1280), Tiling(128, 176, 2)),
    (128, 128, True): (Tiling(128, 128, 2, max_seqlen_k=6144), Tiling(128, 176, 2)),
    (192, 128, False): (Tiling(128, 128, 2),),
    (192, 128, True): (Tiling(128, 128, 2),),
    (192, 192, False): (Tiling(128, 112, 2, late_rescale=True),),
    (192, 192, True): (Tiling(128, 112, 2, late_rescale=True),),
    (256, 256, False): (Tiling(128, 80, 2, ping_pong=False, late_rescale=True),),
    (256, 256, True): (
        Tiling(128, 64, 2, ping_pong=False, late_rescale=True, max_seqlen_k=1536),
        Tiling(128, 80, 2, ping_pong=False, late_rescale=True),
    ),
}
"""By (head_dim, head_dim_v, causal): the first tiling whose ``max_seqlen_k`` is not exceeded serves. Short
sequences want small tiles (fewer masked or padded scores), and at head_dim 64 a deep pipeline (the next tile's loads
run ahead); long ones want the widest tile that fits, which reads shared memory least. Late rescaling pays
where O has so many columns that rescaling them does not fit under the exponentials."""


def cover_head_dims(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The native (head_dim, head_dim_v) pair of least work that is not smaller in either."""
    return problem.cover_head_dims(NATIVE_HEAD_DIMS, head_dim, head_dim_v)


@lru_cache(maxsize=4096)
def select_forward_config(
    dtype: str, head_dim: int, head_dim_v: int, causal: bool, seqlen_k: int
) -> ForwardConfig:
    """The config that serves a problem. Reads sizes only, never a tensor; cached."""
    d, dv = cover_head_dims(head_dim, head_dim_v)
    tiling = next(tiling for tiling in TILINGS[d, dv, causal] if seqlen_k <= tiling.max_seqlen_k)
    return _make_config(dtype, (d, dv, causal), tiling)


def _make_config(dtype: str, key: tuple[int, int, bool], tiling: Tiling) -> ForwardConfig:
    head_dim, head_dim_v, causal = key
    config = ForwardConfig(
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        causal=causal,
        tile_m=tiling.tile_m,
        tile_n=tiling.tile_n,
        stages=tiling.stages,
        registers=TWO_CONSUMERS if tiling.tile_m == 2 * WARPGROUP_ROWS else THREE_CONSUMERS,
        ping_pong=tiling.ping_pong,
        late_rescale=tiling.late_rescale,
    )
    validate_forward_config(config)
    return config


def shipped_forward_configs() -> tuple[ForwardConfig, ...]:
    """Every config that ``select_forward_config`` can return, each once."""
    return tuple(
        _make_config(dtype, key, tiling)
        for dtype in DTYPES
        for key, tilings in TILINGS.items()
        for tiling in tilings
    )
