"""The backward kernel of GPUs without WGMMA, for 16-bit inputs."""

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.ampere.backward.batch import DenseBatch, PackedBatch
from cute_kernels.ampere.backward.config import AmpereBackwardConfig, validate_ampere_backward_config
from cute_kernels.ampere.backward.key_gradients import KeyGradients, Tensors
from cute_kernels.ampere.options import KernelOptions, read_options
from cute_kernels.plan.packed import PackedTileOrder
from cute_kernels.window import Window, window_of


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
        self.config = config

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
        *options_and_stream,
    ):
        """Launch. mQ, mK, mV, mdO, mdK, mdV are (batch, seqlen, heads, head_dim), mLSE and mDelta (batch, heads,
        seqlen_q in whole query tiles), mdQ (batch, heads, query tiles, parts, words). Behind
        the scale come what ``read_options`` reads, and the stream."""
        *given, stream = options_and_stream
        c = self.config
        options, scale_log2 = read_options(c, tuple(given), softmax_scale)
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
            scale_log2,
            mQ.shape[2] // mK.shape[2],
            options,
        ).launch(
            **launch_options(c, cute.ceil_div(mK.shape[1], c.tile_n) * mK.shape[2] * mK.shape[0]),
            stream=stream,
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
        options: KernelOptions,
    ):
        c, window = self.config, window_of(self.config.causal, options.sides)
        tensors = Tensors(mQ, mK, mV, mdO, mLSE, mDelta, mdQ, mdK, mdV, mCounter)
        gradients = KeyGradients.of(c, tensors, window, options.lists)
        seqlen_q, seqlen_k, n_blocks = mQ.shape[1], mK.shape[1], cute.ceil_div(mK.shape[1], c.tile_n)
        batch = DenseBatch(c, seqlen_q, seqlen_k, n_blocks, mK.shape[2], takes_last_first(c, window))
        rules = options.key_rules(scale_log2, mQ.element_type, c.functions)
        gradients.compute(batch, gradients.claim(), heads_per_kv_head, softmax_scale, rules)


class PackedAmpereBackwardKernel:
    """The same for packed sequences. The grid is for as many key tiles as the plan may hold, and CTAs for those that it
    does not hold end at once."""

    def __init__(self, config: AmpereBackwardConfig):
        validate_ampere_backward_config(config)
        self.config = config

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
        plan: cute.Tensor,
        sequences: Int32,
        softmax_scale: Float32,
        *options_and_stream,
    ):
        """Launch. mQ, mK, mV, mdO, mdK, mdV are (total, heads, head_dim), mLSE and mDelta (heads, rows of all query
        tiles), mdQ (heads, query tiles, parts, words). Behind the scale come what ``read_options`` reads, and the
        stream."""
        *given, stream = options_and_stream
        options, scale_log2 = read_options(self.config, tuple(given), softmax_scale)
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
            plan,
            sequences,
            softmax_scale,
            scale_log2,
            options,
        ).launch(
            **launch_options(self.config, PackedTileOrder.most(plan, sequences, mK.shape[1])), stream=stream
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
        plan: cute.Tensor,
        sequences: Int32,
        softmax_scale: Float32,
        scale_log2: Float32,
        options: KernelOptions,
    ):
        c, window = self.config, window_of(self.config.causal, options.sides)
        tensors = Tensors(mQ, mK, mV, mdO, mLSE, mDelta, mdQ, mdK, mdV, mCounter)
        gradients = KeyGradients.of(c, tensors, window)
        kv_heads = mK.shape[1]
        num_tiles, tile = PackedTileOrder.count(plan, kv_heads), gradients.claim()
        if tile < num_tiles:
            order = PackedTileOrder(
                plan,
                sequences,
                num_tiles,
                kv_heads,
                Int32(1),
                c.tile_n,
                longest_first=False,
                of_keys=True,
            )
            batch = PackedBatch(c, plan, order, takes_last_first(c, window))
            rules = options.key_rules(scale_log2, mQ.element_type, c.functions)
            gradients.compute(batch, tile, mQ.shape[1] // kv_heads, softmax_scale, rules)


def takes_last_first(config: AmpereBackwardConfig, window: Window) -> bool:
    """Whether the key tiles of a sequence come from the last one on, since they take turns in that order
    (``QueryRange.turn``)."""
    return config.ordered and window.has_right


def launch_options(config: AmpereBackwardConfig, tiles: Int32) -> dict:
    """Of a grid with a CTA for each of ``tiles``."""
    return {
        "grid": (tiles, 1, 1),
        "block": (config.threads, 1, 1),
        "min_blocks_per_mp": config.ctas_per_sm,
        # Per cent. Left to itself the DSL asks the GPU of this machine, and there may be none.
        "preferred_smem_carveout": 100,
    }
