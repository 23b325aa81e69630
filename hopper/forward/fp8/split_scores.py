"""Scores of e4m3 that are as exact as their sum in float32."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineState

from hopper.forward.consumer import Consumer
from hopper.wgmma import issue_step

PRODUCTS_AT_ONCE = 2
"""Where none is awaited under P V."""


class SplitScoresConsumer(Consumer):
    """``Consumer`` that adds S up in float32, from a product for each 32 columns of Q and K.

    FP8 WGMMA cuts each term of a sum off below 2^-13 of the largest, of which the accumulator is one. So the larger a
    score has grown, the more it loses, and with it the LSE of a row in which it counts. Without an accumulator only
    products below 2^-7 of the largest of 32 lose anything, since one of two e4m3 has 8 bits, and the sum of 32, which
    WGMMA cuts off below 2^-13 of itself.

    It costs an addition a score for each product but the first, and their registers: of all of them, or of two where
    nothing overlaps.
    """

    def _start_scores(self, acc_S: cute.Tensor, kv_state: PipelineState) -> tuple:
        steps = cute.size(self.tSrQ.shape[2])
        at_once = steps if self.config.pipelined else min(steps, PRODUCTS_AT_ONCE)
        products = tuple(self._make_acc_S() for _ in range(1, at_once))
        for k, product in enumerate((acc_S, *products)):
            self._issue(product, kv_state, k)
        return products

    @cute.jit
    def _finish_scores(self, acc_S: cute.Tensor, products: cutlass.Constexpr[tuple], kv_state: PipelineState):
        for product in products:
            acc_S.store(acc_S.load() + product.load())
        for k in cutlass.range_constexpr(1 + len(products), cute.size(self.tSrQ.shape[2])):
            product = products[-1]
            self._issue(product, kv_state, k)
            warpgroup.wait_group(0)
            acc_S.store(acc_S.load() + product.load())

    def _issue(self, product: cute.Tensor, kv_state: PipelineState, k: int):
        issue_step(self.mmas.qk, product, self.tSrQ, self.tSrK[None, None, None, kv_state.index], k)
