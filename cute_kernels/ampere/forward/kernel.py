"""The forward kernel of GPUs without WGMMA, for 16-bit inputs."""

import math

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32

from cute_kernels.ampere.config import MMA_ROWS, AmpereForwardConfig, validate_ampere_forward_config
from cute_kernels.ampere.forward.epilogue import Epilogue
from cute_kernels.ampere.forward.mainloop import Mainloop, WarpBlocks
from cute_kernels.ampere.forward.ring import KeyValueRing
from cute_kernels.ampere.forward.warp_tiles import WarpTiles
from cute_kernels.ampere.shared_tile import ALIGNMENT, SharedTile
from cute_kernels.ampere.tile_loader import TileLoader
from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.fragments import first_column_of_thread, first_row_of_thread
from cute_kernels.key_blocks import BlockRange
from cute_kernels.mask import TileMask
from cute_kernels.score_tile import ScoreTile
from cute_kernels.seqlen import DenseSeqlens
from cute_kernels.tile_scheduler import TileOrder, heads_in_l2
from cute_kernels.window import window_of


class AmpereForwardKernel:
    """softmax(softmax_scale Q K^T) V and its log-sum-exp, without an instruction newer than sm_80.

    Names in backticks are fields of ``AmpereForwardConfig``; a test holds what they say to the kernel.

    | role | warps | does |
    |---|---|---|
    | all | `warps` | cp.async of every tile; both GEMMs, softmax and epilogue of `rows_per_warp` rows each |

    | shared memory | bytes | holds |
    |---|---|---|
    | sQ | `q_bytes` | Q of the tile; at its end O, each warp's rows in its own |
    | sKV | `stages * stage_bytes` | a ring: K of a block, V of it, K of the next, ... |

    | registers of a thread | number | holds |
    |---|---|---|
    | acc_O | `bands * head_dim_v // 2` | O, float32, not yet normalised |
    | acc_S | `bands * tile_n // 2` | scores of a block, then its probabilities |
    | Q | `q_in_registers * bands * head_dim // 4` | Q as the A operand, where it is kept |

    One block in time; at each | the CTA's threads meet, when the item that is needed next has arrived, and the stage
    of the one before is filled with what comes `stages - 1` items later::

        | S = Q K^T, maxima | P of 16 keys, O += P V, P of the next 16, ... | S = ...

    The grid has a CTA for each tile in the order of ``TileOrder``; `ctas_per_sm` share an SM, so that one's softmax
    runs under another's GEMMs.
    """

    def __init__(self, config: AmpereForwardConfig):
        validate_ampere_forward_config(config)
        self.config, self.dtype = config, DSL_DTYPES[config.dtype]

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        softmax_scale: Float32,
        stream,
    ):
        """Launch. mQ, mK, mV, mO are (batch, seqlen, heads, head_dim), mLSE (batch, heads, seqlen_q or 0)."""
        c = self.config
        heads_per_kv_head = mQ.shape[2] // mK.shape[2]
        bytes_per_key = mK.element_type.width // 8 * (c.head_dim + c.head_dim_v)
        order = TileOrder(
            cute.ceil_div(mQ.shape[1], c.tile_m),
            mQ.shape[2],
            mQ.shape[0],
            heads_in_l2(bytes_per_key, mK.shape[1], mK.shape[0] * mK.shape[2]) * heads_per_kv_head,
            longest_first=c.causal,
        )
        self.kernel(
            mQ,
            mK,
            mV,
            mO,
            mLSE,
            softmax_scale * Float32(math.log2(math.e)),
            heads_per_kv_head,
            order.heads_per_section,
        ).launch(
            grid=(order.num_tiles, 1, 1),
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
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        scale_log2: Float32,
        heads_per_kv_head: Int32,
        heads_per_section: Int32,
    ):
        c = self.config
        seqlen_q, seqlen_k = mQ.shape[1], mK.shape[1]
        order = TileOrder(
            cute.ceil_div(seqlen_q, c.tile_m),
            mQ.shape[2],
            mQ.shape[0],
            heads_per_section,
            longest_first=c.causal,
        )
        m_block, head, batch = order.coordinates(cute.arch.block_idx()[0])
        head_kv = head // heads_per_kv_head
        seqlens = DenseSeqlens(seqlen_q, seqlen_k).of(batch)
        window = window_of(c.causal)
        blocks = BlockRange(c.tile_m, c.tile_n, window).of(m_block, seqlens)

        sQ, sKV = self._allocate()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        q_tile, v_tile = SharedTile(c.head_dim), SharedTile(c.head_dim_v)
        q_loader = TileLoader(q_tile, c.tile_m, c.threads, sQ, mQ[batch, None, head, None], thread)
        ring = KeyValueRing(
            c,
            TileLoader(q_tile, c.tile_n, c.threads, sKV, mK[batch, None, head_kv, None], thread),
            TileLoader(v_tile, c.tile_n, c.threads, sKV, mV[batch, None, head_kv, None], thread),
            blocks.begin,
        )
        q_loader.load(m_block * c.tile_m, Int32(0), True)
        ring.fill(blocks.last)

        first_row = m_block * c.tile_m + warp * c.rows_per_warp
        row, column = first_row + first_row_of_thread(0, lane), first_column_of_thread(lane)
        scores = [
            ScoreTile(TileMask(window, c.tile_n, seqlens, row + band * MMA_ROWS, column))
            for band in range(c.bands)
        ]
        mainloop = Mainloop(c, self.dtype, ring, WarpTiles(c, sQ, sKV, warp, lane), scale_log2)
        of_warp, of_band = (BlockRange(rows, c.tile_n, window) for rows in (c.rows_per_warp, MMA_ROWS))
        number = m_block * c.warps + warp
        bands = tuple(of_band.of(c.bands * number + i, seqlens) for i in range(c.bands))
        mainloop.attend(scores, WarpBlocks.of(blocks, of_warp.of(number, seqlens), bands))
        epilogue = Epilogue(c, sQ, warp, lane)
        epilogue.store(
            mainloop, mO[batch, None, head, None], mLSE[batch, head, None], first_row, (head_kv, batch)
        )

    def _allocate(self) -> tuple[Int32, Int32]:
        """Where Q, and the ring of K and V, begin in shared memory."""
        c = self.config

        @cute.struct
        class SharedStorage:
            sQ: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, c.q_bytes], ALIGNMENT]
            sKV: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, c.stages * c.stage_bytes], ALIGNMENT]

        storage = cutlass.memory.SmemAllocator().allocate(SharedStorage)
        return Int32(storage.sQ.data_ptr().toint()), Int32(storage.sKV.data_ptr().toint())
