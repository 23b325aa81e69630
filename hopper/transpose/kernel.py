"""Transposes V of e4m3 for the FP8 forward kernel."""

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Int32, Int64

from cute_kernels.integers import ceil_div, divide
from hopper.forward.fp8.config import FP8_KEY_ORDER
from hopper.quantize.config import BLOCK_STEP, CHUNK, KEYS_PER_STORE
from hopper.quantize.words import transpose_bytes, words_at
from hopper.transpose.config import (
    CTAS_PER_SM,
    KEYS,
    THREADS,
    TransposeConfig,
    validate_transpose_config,
)

VECTOR = 16
"""Bytes that a thread loads at once."""


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
        columns = self.config.columns
        cute.arch.griddepcontrol_wait()
        # The kernel that attends to V makes ready meanwhile.
        cute.arch.griddepcontrol_launch_dependents()
        words = cute.make_layout(self.config.tiling.size // 4)
        buffer = cutlass.memory.SmemAllocator().allocate_tensor(Int32, words, 128)
        thread, _, _ = cute.arch.thread_idx()
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
        self._load(source, Int64(mV.stride[1]), keys, buffer, thread)
        cute.arch.sync_threads()
        target = mVt.iterator.toint() + Int64(batch) * mVt.stride[0] + Int64(head) * mVt.stride[1]
        target = target + Int64(part * columns) * mVt.stride[2] + block * KEYS
        self._store(target, Int64(mVt.stride[2]), keys, buffer, thread)

    @cute.jit
    def _load(self, source: Int64, stride: Int64, keys: Int32, buffer: cute.Tensor, thread: Int32):
        """Put the rows from address ``source`` on into the buffer, zeros from row ``keys`` on."""
        columns = self.config.columns
        vectors = columns // VECTOR
        count = KEYS * vectors // THREADS
        loaded = cute.make_rmem_tensor((VECTOR // 4, count), Int32)
        loaded.fill(0)
        for i in cutlass.range_constexpr(count):
            index = thread + i * THREADS
            key, vector = index // vectors, index % vectors
            if key < keys:
                address = source + Int64(key) * stride + vector * VECTOR
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
