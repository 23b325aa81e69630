"""Transposes V of e4m3 for the FP8 forward kernel."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Int32, Int64

from cute_kernels.integers import ceil_div, divide
from cute_kernels.invariant import LoopInvariant
from hopper.forward.fp8.config import FP8_KEY_ORDER
from hopper.quantize.config import BLOCK_STEP, CHUNK
from hopper.quantize.grid import PackedSide
from hopper.quantize.words import transpose_bytes, words_at
from hopper.transpose.config import (
    CTAS_PER_SM,
    KEYS,
    KEYS_PER_STORE,
    THREADS,
    TransposeConfig,
    validate_transpose_config,
)

VECTOR = 16
"""Bytes that a thread loads at once."""


STEPS = KEYS // BLOCK_STEP
"""Of a tile. Those of packed sequences may be of as many sequences."""


@dataclass(frozen=True)
class TileKeys(LoopInvariant):
    """The rows of a tile: ``keys`` from the first on, ``stride`` bytes apart."""

    keys: Int32
    stride: Int64

    def find(self, key: Int32) -> tuple[Boolean, Int64]:
        """Whether there is a row for a key of the tile, and how many bytes it lies behind the first."""
        return key < self.keys, Int64(key) * self.stride


@dataclass(frozen=True)
class PackedTileKeys(LoopInvariant):
    """The same of packed sequences, from row 0 on: lane n knows the first row of step n % STEPS of the tile, and how
    many rows from there on are of its sequence. All keys of a warp are of one step."""

    first: Int32
    left: Int32
    stride: Int64

    def find(self, key: Int32) -> tuple[Boolean, Int64]:
        """As ``TileKeys.find``."""
        step, row = key // BLOCK_STEP, key % BLOCK_STEP
        first, left = (cute.arch.shuffle_sync(x, offset=step) for x in (self.first, self.left))
        return row < left, Int64(first + row) * self.stride


class TransposeKernel:
    """V (batch, keys, heads, columns) in e4m3 -> (batch, heads, columns, keys), each 32 keys in the order
    FP8_KEY_ORDER.

    A CTA takes a tile. Its threads load rows, all of their loads under way at once, put them into shared memory and
    take them out by columns, 16 keys of four columns at a time (``TransposeTiling`` keeps that free of bank conflicts).
    Rows behind the last key become zeros up to a multiple of 32 keys; nothing further is written.
    """

    def __init__(self, config: TransposeConfig):
        validate_transpose_config(config)
        self.config = config

    @cute.jit
    def __call__(self, mV: cute.Tensor, mVt: cute.Tensor, stream):
        """Launch; ``compile_transpose`` says what the arguments are."""
        tiles = ceil_div(mV.shape[1], KEYS) * (mV.shape[3] // self.config.columns)
        self.kernel(mV, mVt).launch(
            grid=(tiles * mV.shape[2] * mV.shape[0], 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=CTAS_PER_SM,
            # Unless told, the DSL asks the GPU for its shared memory, and there may be none when compiling.
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, mV: cute.Tensor, mVt: cute.Tensor):
        buffer, thread = self._begin()
        columns = self.config.columns
        parts, blocks = mV.shape[3] // columns, ceil_div(mV.shape[1], KEYS)
        # Neighbouring CTAs read neighbouring bytes: parts of a row, then heads, then blocks of keys.
        tile = cute.arch.block_idx()[0]
        row = divide(tile, parts)
        part = tile - row * parts
        block = divide(row, mV.shape[2])
        head = row - block * mV.shape[2]
        batch = divide(block, blocks)
        block = block - batch * blocks
        keys = cutlass.min(mV.shape[1] - block * KEYS, KEYS)
        source = mV.iterator.toint() + Int64(batch) * mV.stride[0] + Int64(head) * mV.stride[2]
        source = source + Int64(block * KEYS) * mV.stride[1] + part * columns
        self._load(source, TileKeys(keys, Int64(mV.stride[1])), buffer, thread)
        cute.arch.sync_threads()
        target = mVt.iterator.toint() + Int64(batch) * mVt.stride[0] + Int64(head) * mVt.stride[1]
        target = target + Int64(part * columns) * mVt.stride[2] + block * KEYS
        self._store(target, Int64(mVt.stride[2]), keys, buffer, thread)

    @cute.jit
    def _begin(self) -> tuple[cute.Tensor, Int32]:
        """Wait for the kernel before this one. The buffer in shared memory, and the thread."""
        cute.arch.griddepcontrol_wait()
        # The kernel that attends to V makes ready meanwhile.
        cute.arch.griddepcontrol_launch_dependents()
        words = cute.make_layout(self.config.tiling.size // 4)
        buffer = cutlass.memory.SmemAllocator().allocate_tensor(Int32, words, 128)
        thread, _, _ = cute.arch.thread_idx()
        return buffer, thread

    @cute.jit
    def _load(self, source: Int64, keys: TileKeys | PackedTileKeys, buffer: cute.Tensor, thread: Int32):
        """Put the rows that there are into the buffer, zeros for others; the first lies at ``source``."""
        columns = self.config.columns
        vectors = columns // VECTOR
        count = KEYS * vectors // THREADS
        loaded = cute.make_rmem_tensor((VECTOR // 4, count), Int32)
        loaded.fill(0)
        for i in cutlass.range_constexpr(count):
            index = thread + i * THREADS
            key, vector = index // vectors, index % vectors
            is_there, offset = keys.find(key)
            if is_there:
                address = source + offset + vector * VECTOR
                cute.autovec_copy(words_at(address, VECTOR // 4), loaded[None, i])
        for i in cutlass.range_constexpr(count):
            index = thread + i * THREADS
            key, vector = index // vectors, index % vectors
            for c in cutlass.range_constexpr(VECTOR // CHUNK):
                chunk = cute.make_tensor(
                    loaded[None, i].iterator + c * (CHUNK // 4), cute.make_layout(CHUNK // 4)
                )
                run = key // KEYS_PER_STORE, key % KEYS_PER_STORE
                place = self._buffered(buffer, *run, vector * VECTOR + c * CHUNK, CHUNK // 4)
                cute.autovec_copy(chunk, place)

    @cute.jit
    def _store(self, target: Int64, stride: Int64, keys: Int32, buffer: cute.Tensor, thread: Int32):
        """Store the buffer by columns, whose first is at address ``target``."""
        tiling = self.config.tiling
        keys_stored = ceil_div(keys, BLOCK_STEP) * BLOCK_STEP
        for i in cutlass.range_constexpr(ceil_div(tiling.stores, THREADS)):
            index = thread + i * THREADS
            run, column = tiling.store(index)
            if index < tiling.stores and run * KEYS_PER_STORE < keys_stored:
                stored = [cute.make_rmem_tensor(KEYS_PER_STORE // 4, Int32) for _ in range(4)]
                for quad in cutlass.range_constexpr(KEYS_PER_STORE // 4):
                    order = FP8_KEY_ORDER[4 * quad : 4 * quad + 4]
                    rows = [self._buffered(buffer, run, key, column, 1)[0] for key in order]
                    for c, word in enumerate(transpose_bytes(rows)):
                        stored[c][quad] = word
                for c in cutlass.range_constexpr(4):
                    address = target + Int64(column + c) * stride + run * KEYS_PER_STORE
                    cute.autovec_copy(stored[c], words_at(address, KEYS_PER_STORE // 4))

    def _buffered(
        self, buffer: cute.Tensor, run: Int32, key: Int32, column: Int32, words: int
    ) -> cute.Tensor:
        """Words of the buffer from ``column`` of row 16 ``run`` + ``key`` on."""
        offset = self.config.tiling.offset(run, key, column)
        return cute.local_tile(buffer, (words,), (offset // (4 * words),))


class PackedTransposeKernel(TransposeKernel):
    """The same of packed sequences: V (1, total, heads, columns) -> (1, heads, columns, keys), in which each sequence
    has whole steps of 32 keys to itself (``PackedSide``). Keys of no sequence become zeros."""

    @cute.jit
    def __call__(
        self, mV: cute.Tensor, mVt: cute.Tensor, cu_seqlens: cute.Tensor, seqused: cute.Tensor, stream
    ):
        """Launch; ``compile_transpose`` says what the arguments are."""
        tiles = ceil_div(mVt.shape[3], KEYS) * (mV.shape[3] // self.config.columns)
        self.packed_kernel(mV, mVt, cu_seqlens, seqused).launch(
            grid=(tiles * mV.shape[2], 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=CTAS_PER_SM,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def packed_kernel(self, mV: cute.Tensor, mVt: cute.Tensor, cu_seqlens: cute.Tensor, seqused: cute.Tensor):
        buffer, thread = self._begin()
        columns = self.config.columns
        parts = mV.shape[3] // columns
        tile = cute.arch.block_idx()[0]
        row = divide(tile, parts)
        column = (tile - row * parts) * columns
        block = divide(row, mV.shape[2])
        head = row - block * mV.shape[2]
        side = PackedSide(cu_seqlens, seqused, mV.shape[1], BLOCK_STEP)
        number, sequence, offset, length = side.find(block * STEPS + cute.arch.lane_idx() % STEPS)
        left = length - number * BLOCK_STEP
        if sequence == cu_seqlens.shape[0] - 1:
            left = Int32(0)
        keys = PackedTileKeys(offset + number * BLOCK_STEP, left, Int64(mV.stride[1]))
        source = mV.iterator.toint() + Int64(head) * mV.stride[2] + column
        self._load(source, keys, buffer, thread)
        cute.arch.sync_threads()
        target = mVt.iterator.toint() + Int64(head) * mVt.stride[1]
        target = target + Int64(column) * mVt.stride[2] + block * KEYS
        stored = cutlass.min(mVt.shape[3] - block * KEYS, KEYS)
        self._store(target, Int64(mVt.stride[2]), stored, buffer, thread)
