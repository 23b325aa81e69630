"""After a backward kernel that divides heads: dQ as ever, and dK and dV of the parts that its CTAs have left."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.backward.finish import FinishKernel
from cute_kernels.backward.grid import from_the_last
from cute_kernels.backward.packed import OFFSET_K, rows_as_batch, sequence_of
from cute_kernels.backward.step import DividedConfig
from cute_kernels.integers import maximum
from cute_kernels.plan.packed import PackedSeqlens


class DividedKeys(FinishKernel):
    """dK or dV = the sum of its parts, which are float32 tiles of keys in the order of ``config.dk_order``.

    Parts are added in the order of the heads, so that the bits are the same in every run.
    """

    def __init__(self, config: DividedConfig):
        super().__init__(config)
        self.order, self.rows = config.dk_order, config.tile_n
        # A chunk's parts are read one behind the other; of two there would be spills.
        self.chunks_at_once = 1

    def _words_of(self, sums: cute.Tensor, part: Int32) -> cute.Tensor:
        """Of (parts of a tile, words, parts of heads): (words, parts of heads)."""
        return sums[part, None, None]

    @cute.jit
    def _read(self, words: cute.Tensor, band: Int32, group: Int32, row: Int32) -> cute.Tensor:
        """The sum over (words, parts of heads) of what ``FinishKernel`` reads of one."""
        total = FinishKernel._read(self, words[None, 0], band, group, row)
        for part in cutlass.range(1, words.shape[1], unroll=1):
            more = FinishKernel._read(self, words[None, part], band, group, row)
            total.store(total.load() + more.load())
        return total

    @cute.jit
    def add_up(self, words: cute.Tensor, gradient: cute.Tensor, place: tuple):
        """The key tile at ``place``, its number, head and batch, of ``parts_of_tile``."""
        self._finish(self._read_round(words, 0), words, gradient, place, Float32(1.0))


class DividedFinishKernel(FinishKernel):
    """``FinishKernel``, whose grid has the key tiles behind the query tiles: those of dK, and those of dV."""

    def __init__(self, config: DividedConfig):
        super().__init__(config)
        self.keys = DividedKeys(config)

    @cute.jit
    def __call__(
        self,
        mSums: cute.Tensor,
        mdQ: cute.Tensor,
        mKeySums: cute.Tensor,
        mValueSums: cute.Tensor,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        softmax_scale: Float32,
        stream,
    ):
        """Launch. mSums and mdQ as of ``FinishKernel``; mKeySums and mValueSums (batch, kv_heads times parts, key
        tiles, parts of a tile, words); mdK and mdV (batch, seqlen_k, kv_heads, head_dim)."""
        self.divided(mSums, mdQ, (mKeySums, mValueSums), (mdK, mdV), softmax_scale).launch(
            grid=(
                maximum(mSums.shape[2], mKeySums.shape[2]),
                mSums.shape[1] + 2 * mdK.shape[2],
                mSums.shape[0],
            ),
            block=(self.threads_per_part * self.config.dq_parts, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def divided(
        self, mSums: cute.Tensor, mdQ: cute.Tensor, left: tuple, gradients: tuple, softmax_scale: Float32
    ):
        heads, kv_heads = mSums.shape[1], gradients[0].shape[2]
        tiles = maximum(mSums.shape[2], left[0].shape[2])
        tile, head, batch = from_the_last(tiles, heads + 2 * kv_heads, mSums.shape[0])
        if head < heads:
            if tile < mSums.shape[2]:
                sums = mSums[batch, head, tile, None, None]
                self._finish(self._read_round(sums, 0), sums, mdQ, (tile, head, batch), softmax_scale)
        elif tile < left[0].shape[2]:
            for i in cutlass.range_constexpr(2):
                head_kv = head - heads - i * kv_heads
                if head_kv >= 0 and head_kv < kv_heads:
                    words = parts_of_tile(left[i][batch, None, tile, None, None], head_kv, kv_heads)
                    self.keys.add_up(words, gradients[i], (tile, head_kv, batch))


class PackedDividedFinishKernel(DividedFinishKernel):
    """The same for packed sequences, whose sums of dQ, and parts of dK and dV, lie in whole tiles (``packed.py``)."""

    @cute.jit
    def __call__(
        self,
        mSums: cute.Tensor,
        mdQ: cute.Tensor,
        mKeySums: cute.Tensor,
        mValueSums: cute.Tensor,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        mPlan: cute.Tensor,
        sequences: Int32,
        softmax_scale: Float32,
        stream,
    ):
        """Launch. mSums and mdQ as of ``PackedFinishKernel``; mKeySums and mValueSums (kv_heads times parts, key tiles,
        parts of a tile, words); mdK and mdV (total_k, kv_heads, head_dim)."""
        plan = mPlan, sequences
        self.packed(mSums, mdQ, (mKeySums, mValueSums), (mdK, mdV), plan, softmax_scale).launch(
            grid=(maximum(mSums.shape[1], mKeySums.shape[1]), mSums.shape[0] + 2 * mdK.shape[1], 1),
            block=(self.threads_per_part * self.config.dq_parts, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def packed(
        self,
        mSums: cute.Tensor,
        mdQ: cute.Tensor,
        left: tuple,
        gradients: tuple,
        plan: tuple,
        softmax_scale: Float32,
    ):
        heads, kv_heads = mSums.shape[0], gradients[0].shape[1]
        tiles = maximum(mSums.shape[1], left[0].shape[1])
        tile, head, _ = from_the_last(tiles, heads + 2 * kv_heads, Int32(1))
        if head < heads:
            if tile < mSums.shape[1]:
                self._finish_packed(mSums, mdQ, plan, (tile, head), softmax_scale)
        elif tile < left[0].shape[1]:
            tile_n = self.config.tile_n
            seqlens = PackedSeqlens(plan[0]).of(sequence_of(*plan, tile, tile_n, OFFSET_K))
            # Below 0 of rows in front of the first sequence.
            n_block = tile - seqlens.first_key_block(tile_n)
            for i in cutlass.range_constexpr(2):
                head_kv = head - heads - i * kv_heads
                if n_block >= 0 and head_kv >= 0 and head_kv < kv_heads:
                    words = parts_of_tile(left[i][None, tile, None, None], head_kv, kv_heads)
                    rows = rows_as_batch(gradients[i], seqlens.offset_k, seqlens.seqlen_k)
                    self.keys.add_up(words, rows, (n_block, head_kv, 0))


def parts_of_tile(sums: cute.Tensor, head_kv: Int32, kv_heads: Int32) -> cute.Tensor:
    """Of (kv_heads times parts, parts of a tile, words) those of a head: (parts of a tile, words, parts)."""
    parts = sums.shape[0] // kv_heads
    first = cute.domain_offset((head_kv * parts, 0, 0), sums)
    layout = cute.make_layout((*sums.shape[1:], parts), stride=(*sums.stride[1:], sums.stride[0]))
    return cute.make_tensor(first.iterator, layout)
