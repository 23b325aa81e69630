"""The forward kernel of GPUs without WGMMA, for 16-bit inputs."""

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.ampere.config import AmpereForwardConfig, validate_ampere_forward_config
from cute_kernels.ampere.forward.query_tile import QueryTile
from cute_kernels.ampere.options import KernelOptions, read_options
from cute_kernels.plan.packed import PackedSeqlens, PackedTileOrder
from cute_kernels.seqlen import DenseSeqlens
from cute_kernels.tile_scheduler import WORKERS, Sections, TileOrder, heads_of_last


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
        self.config = config

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        softmax_scale: Float32,
        *options_and_stream,
    ):
        """Launch. mQ, mK, mV, mO are (batch, seqlen, heads, head_dim), mLSE (batch, heads, seqlen_q or 0). Behind the
        scale come what ``read_options`` reads, and the stream."""
        *given, stream = options_and_stream
        c = self.config
        options, scale_log2 = read_options(c, tuple(given), softmax_scale)
        heads_per_kv_head = mQ.shape[2] // mK.shape[2]
        bytes_per_key = mK.element_type.width // 8 * (c.head_dim + c.head_dim_v)
        m_blocks, kv_heads = cute.ceil_div(mQ.shape[1], c.tile_m), mK.shape[0] * mK.shape[2]
        last = heads_of_last(m_blocks, kv_heads, heads_per_kv_head, WORKERS)
        sections = Sections.of_keys(bytes_per_key, mK.shape[1], kv_heads, heads_per_kv_head, last)
        order = TileOrder(m_blocks, mQ.shape[2], mQ.shape[0], sections, c.longest_first)
        self.kernel(
            mQ,
            mK,
            mV,
            mO,
            mLSE,
            scale_log2,
            heads_per_kv_head,
            order.sections,
            options,
        ).launch(**launch_options(c, order.num_tiles), stream=stream)

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
        sections: Sections,
        options: KernelOptions,
    ):
        c = self.config
        seqlen_q, seqlen_k = mQ.shape[1], mK.shape[1]
        order = TileOrder(
            cute.ceil_div(seqlen_q, c.tile_m),
            mQ.shape[2],
            mQ.shape[0],
            sections,
            longest_first=c.longest_first,
        )
        lengths, number = DenseSeqlens(seqlen_q, seqlen_k), cute.arch.block_idx()[0]
        tile = QueryTile(c, order, lengths, options, number, heads_per_kv_head)
        tile.attend((mQ, mK, mV), (mO, mLSE), scale_log2)


class PackedAmpereForwardKernel:
    """The same for packed sequences. The grid is for as many tiles as the plan may hold, and those that it does not
    hold end at once."""

    def __init__(self, config: AmpereForwardConfig):
        validate_ampere_forward_config(config)
        self.config = config

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        plan: cute.Tensor,
        sequences: Int32,
        softmax_scale: Float32,
        *options_and_stream,
    ):
        """Launch. mQ, mK, mV, mO are (total, heads, head_dim), mLSE (heads, total_q or 0); ``plan`` is of query
        tiles, for ``sequences`` - 1 sequences of the caller's. Behind the scale come what ``read_options`` reads, and
        the stream."""
        *given, stream = options_and_stream
        options, scale_log2 = read_options(self.config, tuple(given), softmax_scale)
        tiles = PackedTileOrder.most(plan, sequences, mQ.shape[1])
        self.kernel(mQ, mK, mV, mO, mLSE, plan, sequences, scale_log2, options).launch(
            **launch_options(self.config, tiles), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        plan: cute.Tensor,
        sequences: Int32,
        scale_log2: Float32,
        options: KernelOptions,
    ):
        c, heads = self.config, mQ.shape[1]
        num_tiles, number = PackedTileOrder.count(plan, heads), cute.arch.block_idx()[0]
        if number < num_tiles:
            heads_per_kv_head = heads // mK.shape[1]
            order = PackedTileOrder(
                plan,
                sequences,
                num_tiles,
                heads,
                heads_per_kv_head,
                c.tile_m,
                c.longest_first,
            )
            tile = QueryTile(c, order, PackedSeqlens(plan), options, number, heads_per_kv_head)
            tile.attend((mQ, mK, mV), (mO, mLSE), scale_log2)


def launch_options(config: AmpereForwardConfig, tiles: Int32) -> dict:
    """Of a grid with a CTA for each of ``tiles``."""
    return {
        "grid": (tiles, 1, 1),
        "block": (config.threads, 1, 1),
        "min_blocks_per_mp": config.ctas_per_sm,
        # Per cent. Left to itself the DSL asks the GPU of this machine, and there may be none.
        "preferred_smem_carveout": 100,
    }
