"""After a backward kernel that divides the visits of some key tiles: dQ as ever, and dK and dV of the divided tiles."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cute_kernels.backward.finish import FinishKernel
from cute_kernels.backward.finish_divided import DividedKeys
from cute_kernels.backward.grid import from_the_last
from cute_kernels.backward.step import NUMBERS_OF_A_PLACE, DividedConfig


class PieceFinishKernel(FinishKernel):
    """``FinishKernel``, whose grid has further rows behind those of the heads, for dK and dV of each divided tile."""

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
        mPlaces: cute.Tensor,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        softmax_scale: Float32,
        stream,
    ):
        """Launch. mSums and mdQ as of ``FinishKernel``; mKeySums and mValueSums float32 (divided tiles, pieces, parts
        of a tile, words), mPlaces int32, three for each of these tiles; mdK and mdV (batch, seqlen_k, kv_heads,
        head_dim), of which these tiles are written."""
        batches, heads, tiles = mSums.shape[:3]
        rows = cute.ceil_div(2 * mKeySums.shape[0], tiles * batches)
        self.divided(mSums, mdQ, (mKeySums, mValueSums), mPlaces, (mdK, mdV), softmax_scale).launch(
            grid=(tiles, heads + rows, batches),
            block=(self.threads_per_part * self.config.dq_parts, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def divided(
        self,
        mSums: cute.Tensor,
        mdQ: cute.Tensor,
        left: tuple,
        mPlaces: cute.Tensor,
        gradients: tuple,
        softmax_scale: Float32,
    ):
        batches, heads, tiles = mSums.shape[:3]
        tile, head, batch = from_the_last(tiles, cute.arch.grid_dim()[1], batches)
        if head < heads:
            sums = mSums[batch, head, tile, None, None]
            self._finish(self._read_round(sums, 0), sums, mdQ, (tile, head, batch), softmax_scale)
        else:
            number = ((head - heads) * batches + batch) * tiles + tile
            inside = number // 2
            for i in cutlass.range_constexpr(2):
                if number % 2 == i and inside < left[i].shape[0]:
                    words = left[i][inside, None, None, None]
                    words = cute.make_tensor(words.iterator, cute.select(words.layout, mode=[1, 2, 0]))
                    first = inside * NUMBERS_OF_A_PLACE
                    place = tuple(mPlaces[first + j] for j in range(NUMBERS_OF_A_PLACE))
                    self.keys.add_up(words, gradients[i], place)
