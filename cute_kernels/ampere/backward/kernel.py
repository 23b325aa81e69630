"""The backward kernel of GPUs without WGMMA, for 16-bit inputs."""

import math

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, const_expr

from cute_kernels.ampere.backward.config import AmpereBackwardConfig, validate_ampere_backward_config
from cute_kernels.ampere.backward.dq import GradientOfQ
from cute_kernels.ampere.backward.epilogue import Epilogue
from cute_kernels.ampere.backward.key_tile import KeyTile
from cute_kernels.ampere.backward.loader import QueryLoader, load_keys
from cute_kernels.ampere.backward.mainloop import Mainloop
from cute_kernels.ampere.backward.operands import SharedMemory, WarpShare
from cute_kernels.ampere.backward.walk import Walk
from cute_kernels.ampere.shared_tile import ALIGNMENT
from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.fast_math import pin
from cute_kernels.fragments import first_column_of_thread, first_row_of_thread
from cute_kernels.key_mask import KeyMask
from cute_kernels.seqlen import DenseSeqlens
from cute_kernels.window import window_of

COUNTS_BEFORE_TURNS = 2
"""Words of the counter before those that say whose turn it is; the first one hands out key tiles."""


class AmpereBackwardKernel:
    """Gradients of attention, without an instruction newer than sm_80. dQ is left as float32 sums (``dq.py``).

    Names in backticks are fields of ``AmpereBackwardConfig``; a test holds what they say to the kernel.

    | role | warps | does |
    |---|---|---|
    | all | `warps` | cp.async of every tile; a part of each of the five products, and what lies between them |

    | shared memory | bytes | holds |
    |---|---|---|
    | sK, sV | `kv_bytes` | K and V of the tile; at its end dK and dV |
    | sQ, sdO | `2 * stages * stage_bytes` | Q and dO of a query tile |
    | sP | `ds_offset` | P^T of a block, if not kept in registers |
    | sdS | `score_bytes` | dS^T of a block |
    | sLSE, sDelta | `2 * stages * vector_bytes` | a number for each query |

    | registers of a thread | number | holds |
    |---|---|---|
    | acc_dK, acc_dV | `2 * gradient_bands * head_dim // (2 * gradient_splits)` | gradients of a warp's keys |
    | acc_S, acc_dP | `2 * score_bands * score_queries // 2` | scores of a block, their gradients |
    | acc_dQ | `dq_words // 32` | dQ of a block, when the scores are gone |

    One block in time; at each | the CTA's threads meet. Behind the first the next query tile is on its way; with one
    stage they meet once more at the end, and it is sent for then::

        | S^T = K Q^T, P^T, dP^T = V dO^T, dS^T | dV += P^T dO, dK += dS^T Q, dQ = dS K, additions | S^T ...

    A warp that keeps P^T and dS^T in registers (`keeps_probabilities`) adds to dV and dK before the second.

    The grid has a CTA for each key tile of each key/value head; `ctas_per_sm` share an SM.
    """

    def __init__(self, config: AmpereBackwardConfig):
        validate_ampere_backward_config(config)
        self.config, self.dtype = config, DSL_DTYPES[config.dtype]

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mDelta: cute.Tensor,
        mdQ: cute.Tensor,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        mCounter: cute.Tensor,
        softmax_scale: Float32,
        stream,
    ):
        """Launch. mQ, mK, mV, mdO, mdK, mdV are (batch, seqlen, heads, head_dim), mLSE and mDelta (batch, heads,
        seqlen_q in whole query tiles), mdQ (batch, heads, query tiles, parts, words)."""
        c = self.config
        self.kernel(
            mQ,
            mK,
            mV,
            mdO,
            mLSE,
            mDelta,
            mdQ,
            mdK,
            mdV,
            mCounter,
            softmax_scale,
            softmax_scale * Float32(math.log2(math.e)),
            mQ.shape[2] // mK.shape[2],
        ).launch(
            grid=(cute.ceil_div(mK.shape[1], c.tile_n) * mK.shape[2] * mK.shape[0], 1, 1),
            block=(c.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=c.ctas_per_sm,
            # Per cent. Left to itself the DSL asks the GPU of this machine, and there may be none.
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mDelta: cute.Tensor,
        mdQ: cute.Tensor,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        mCounter: cute.Tensor,
        softmax_scale: Float32,
        scale_log2: Float32,
        heads_per_kv_head: Int32,
    ):
        c = self.config
        seqlen_q, seqlen_k = mQ.shape[1], mK.shape[1]
        smem, claimed = self._allocate()
        n_blocks = cute.ceil_div(seqlen_k, c.tile_n)
        n_block, head_kv, batch = self._coordinates(self._claim(mCounter, claimed), n_blocks, mK.shape[2])
        seqlens = DenseSeqlens(seqlen_q, seqlen_k).of(batch)
        load_keys(c, smem, mK[batch, None, head_kv, None], mV[batch, None, head_kv, None], n_block)

        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        share = WarpShare(c, warp)
        key = n_block * c.tile_n + share.score_row + first_row_of_thread(0, lane)
        column = share.score_query + first_column_of_thread(lane)
        mask = KeyMask(window_of(c.causal), c.tile_m, seqlens, key, column)
        turns = cute.make_tensor(
            mCounter.iterator + COUNTS_BEFORE_TURNS,
            cute.make_ordered_layout((*mdQ.shape[:3], c.warps), order=(3, 2, 1, 0)),
        )
        key_tile = KeyTile(c, n_block, n_blocks, seqlens)
        dq = GradientOfQ(c, mdQ, turns, key_tile, (warp, lane))
        mainloop = Mainloop(c, self.dtype, smem, share, mask, dq, scale_log2)
        mainloop.clear()
        rows = mQ[batch, None, None, None], mdO[batch, None, None, None]
        loader = QueryLoader(c, smem, rows, (mLSE[batch, None, None], mDelta[batch, None, None]))
        walk = Walk(c, loader, mainloop, key_tile)
        for i in cutlass.range(heads_per_kv_head, unroll=1):
            walk.head(batch, head_kv * heads_per_kv_head + i)
        # All anew and pinned, since from before the loops it would take registers throughout.
        thread = pin(cute.arch.thread_idx()[0], Int32)
        tile = claimed[0] if const_expr(c.ordered) else pin(cute.arch.block_idx()[0], Int32)
        n_blocks = cute.ceil_div(pin(seqlen_k, Int32), c.tile_n)
        n_block, head_kv, batch = self._coordinates(tile, n_blocks, mK.shape[2])
        targets = mdK[batch, None, head_kv, None], mdV[batch, None, head_kv, None]
        Epilogue(c, smem, thread).store(mainloop, targets, n_block, softmax_scale)

    def _coordinates(self, tile: Int32, n_blocks: Int32, kv_heads: Int32) -> tuple[Int32, Int32, Int32]:
        """(n_block, head_kv, batch) of a tile number."""
        n_block, head_batch = tile % n_blocks, tile // n_blocks
        if self.config.ordered and self.config.causal:
            n_block = n_blocks - 1 - n_block
        return n_block, head_batch % kv_heads, head_batch // kv_heads

    @cute.jit
    def _claim(self, mCounter: cute.Tensor, claimed: cute.Tensor) -> Int32:
        """The number of this CTA's key tile.

        Where key tiles wait for those before them, each CTA claims one when it runs, so that none waits for a CTA that
        has found no SM.
        """
        tile = cute.arch.block_idx()[0]
        if const_expr(self.config.ordered):
            if cute.arch.thread_idx()[0] == 0:
                claimed[0] = cute.arch.atomic_add(mCounter.iterator, Int32(1), sem="relaxed", scope="gpu")
            cute.arch.sync_threads()
            tile = cute.arch.make_warp_uniform(claimed[0])
        return tile

    def _allocate(self) -> tuple[SharedMemory, cute.Tensor]:
        """Where everything lies in shared memory, and a word for the number of a tile."""
        c = self.config

        def of(count: int, dtype: type[cutlass.Numeric] = cutlass.Uint8):
            return cute.struct.Align[cute.struct.MemRange[dtype, count], ALIGNMENT]

        @cute.struct
        class SharedStorage:
            sKV: of(c.kv_bytes)
            sQdO: of(2 * c.stages * c.stage_bytes)
            scores: of(c.ds_offset + c.score_bytes)
            sLSE: of(c.stages * c.tile_m, Float32)
            sDelta: of(c.stages * c.tile_m, Float32)
            claimed: cute.struct.MemRange[Int32, 4]

        storage = cutlass.memory.SmemAllocator().allocate(SharedStorage)
        tiles = (storage.sKV, storage.sQdO, storage.scores)
        addresses = (Int32(tile.data_ptr().toint()) for tile in tiles)
        claimed = storage.claimed.get_tensor(cute.make_layout(1))
        return SharedMemory(*addresses, storage.sLSE.data_ptr(), storage.sDelta.data_ptr()), claimed
