"""Online softmax of rows over a latent, whose maximum may lag behind."""

from cutlass import Float32

from cute_kernels.lagging import Lagging
from hopper.decode.softmax import RowSoftmax


class LaggingSoftmax(Lagging, RowSoftmax):
    """``RowSoftmax`` with a maximum that may lag behind."""

    def sum_of_rounded(self, r: int, total: Float32) -> Float32:
        self.join_maxima(r)
        return self._sum_of_rounded(r, total)
