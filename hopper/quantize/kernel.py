"""The quantizer's launch and its persistent loop over the blocks of Q, K and V."""

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Int32, const_expr

from cute_kernels.integers import ceil_div, maximum
from cute_kernels.plan.config import plan_entries
from cute_kernels.problem import VARLEN
from hopper.quantize.config import CHUNK, E4M3_MAX, QuantizeConfig, keeps_lengths, validate_quantize_config
from hopper.quantize.grid import Claims, Grid, PackedGrid, PackedSide, Shares
from hopper.quantize.operand import (
    CHUNK_WORDS,
    Cta,
    DenseItems,
    LengthKeepingOperand,
    Operand,
    PackedItems,
    RowScaledOperand,
)
from hopper.quantize.values import TransposedOperand


class QuantizeKernel:
    """Q, K and V of 16 bits -> e4m3 with block scales, on sm_90a; ``hopper_attention.quantization`` has the rules.

    The grid is persistent, and a CTA takes whole blocks. Each thread copies its part of the next item to where in
    shared memory only it reads (``Cta.slots``), while it works on the current one in registers: no barrier and no
    register waits for memory. One barrier an item joins the maxima, a second one precedes the transpose of V. Rows of Q
    with a scale each need no barrier (``RowScaledOperand``). ``hopper.quantize.grid`` says which item comes next.

    A row lies across a few lanes (``BlockTiling``), so most butterflies of a rotation stay within a thread.

    Where V loses its mean, the kernel in front finds that, and lets the CTAs of this one start before it has ended
    (programmatic dependent launch). Only what reads the mean waits for it: that kernel started when all before it had
    ended, so Q, K and V are there, and nobody reads any more what is written over.
    """

    def __init__(self, config: QuantizeConfig):
        validate_quantize_config(config)
        self.config = config

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mQ8: cute.Tensor,
        mK8: cute.Tensor,
        mVt8: cute.Tensor,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
        v_scale: cute.Tensor,
        signs: cute.Tensor,
        signs_v: cute.Tensor,
        mean_k: cute.Tensor,
        mean_v: cute.Tensor,
        num_ctas: Int32,
        stream,
    ):
        """Launch; ``compile_quantize`` says what the arguments are."""
        tensors = (
            (mQ, mK, mV),
            (mQ8, mK8, mVt8),
            (q_scale, k_scale, v_scale),
            (signs, signs_v),
            (mean_k, mean_v),
        )
        self._launch_dense(tensors, (), num_ctas, stream)

    @cute.jit
    def _launch_dense(self, tensors: tuple, counters: tuple, num_ctas: Int32, stream):
        """``_launch`` for sequences of one length."""
        (mQ, mK, _), c = tensors[0], self.config
        batch, heads, kv_heads = mQ.shape[0], mQ.shape[2], mK.shape[2]
        of_q, of_kv = ceil_div(mQ.shape[1], c.q.rows), ceil_div(mK.shape[1], c.k.rows)
        items = batch * heads * of_q, batch * kv_heads * of_kv
        self._launch(tensors, items, (heads, of_q, kv_heads, of_kv), (), counters, num_ctas, stream)

    @cute.jit
    def _launch(
        self,
        tensors: tuple,
        items: tuple,
        divisors: tuple,
        lengths: tuple,
        counters: tuple,
        num_ctas: Int32,
        stream,
    ):
        """``items`` are those of Q, and of K; ``divisors`` those of ``Grid``; ``lengths`` of packed sequences;
        ``counters`` what items are claimed by, if they are."""
        c, (of_q, of_k) = self.config, items
        end = of_q + 2 * of_k
        ctas = cutlass.min(num_ctas, end)
        self.kernel(
            *tensors,
            (of_q, of_q + of_k, end),
            tuple(cute.FastDivmodDivisorV2(x) for x in divisors),
            lengths,
            self._claimed_by(counters, end, ctas),
        ).launch(
            grid=(ctas, 1, 1),
            block=(c.threads, 1, 1),
            stream=stream,
            use_pdl=c.smooth_v,
            min_blocks_per_mp=c.ctas_per_sm,
            # Unless told, the DSL asks the GPU for its shared memory, and there may be none when compiling.
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        sources: tuple,
        data: tuple,
        scales: tuple,
        signs: tuple,
        means: tuple,
        bounds: tuple,
        divisors: tuple,
        lengths: tuple,
        claimed_by: tuple,
    ):
        c = self.config
        storage = cutlass.memory.SmemAllocator().allocate(self._shared_storage())
        thread, _, _ = cute.arch.thread_idx()
        cta = Cta(
            c.warps,
            thread,
            cute.arch.make_warp_uniform(cute.arch.warp_idx()),
            cute.arch.lane_idx(),
            storage.slots.get_tensor(cute.make_layout((CHUNK_WORDS, c.threads, c.elements // CHUNK))),
            storage.amax.get_tensor(cute.make_layout((c.warps, 2, c.q.blocks))),
        )
        shared_signs = self._share_signs(cta, signs, (storage.signs, storage.signs_v))
        buffer = storage.buffer.get_tensor(cute.make_layout(c.vt.size // 4))
        (signs_qk, signs_v), (mean_k, mean_v) = shared_signs, means
        means = mean_v
        if const_expr(c.mean_floats > 0):
            means = storage.means.get_tensor(cute.make_layout((c.mean_floats // 2, 2)))
        operand_q = RowScaledOperand if c.scales_rows else Operand
        operand_k = LengthKeepingOperand if keeps_lengths(c.head_dim) else Operand
        of_q, of_k, of_v = zip(sources, data, scales, strict=True)
        largest_q, largest_k = c.largest_codes
        items = PackedItems() if const_expr(c.layout == VARLEN) else DenseItems()
        options_v = c.rotate_v, c.smooth_v, E4M3_MAX, items
        q, k, v = (
            operand_q(c.q, *of_q, signs_qk, mean_k, means, c.rotate, False, largest_q, items),
            operand_k(c.k, *of_k, signs_qk, mean_k, means, c.rotate, c.smooth_k, largest_k, items),
            TransposedOperand(c.v, *of_v, signs_v, mean_v, means, *options_v, buffer, c.vt, c.mean_blocks),
        )
        first_of_k, first_of_v, end = bounds
        half = len(divisors) // 2
        shared_out = first_of_k, first_of_v, end, divisors[:half], divisors[half:], c.smooth_v
        grid = self._grid(shared_out, sources, lengths)
        number, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        order = Shares(grid, number, ctas)
        if const_expr(c.claims_items):
            mailbox = storage.mailbox.get_tensor(cute.make_layout(c.mails))
            barriers = storage.full.data_ptr(), storage.empty.data_ptr()
            order = Claims(grid, number, ctas, *claimed_by, c.warps, thread, mailbox, *barriers)
            order.prepare()
            cute.arch.sync_threads()

        turn = Int32(0)
        item, count = order.begin()
        place = grid.place(item)
        if item < first_of_k:
            q.start_loads(cta, place, count & 1)
        elif item < first_of_v:
            k.start_loads(cta, place, count & 1)
        else:
            v.start_loads(cta, place, count & 1)
        cute.arch.cp_async_commit_group()
        while order.is_open(item, count):
            claimed = order.claim(count)
            words = cta.take_slots(c.elements // CHUNK)
            following = order.following(item, count)
            next_place = grid.place(following)
            if order.has(following, count):
                if following < first_of_k:
                    q.start_loads(cta, next_place, count & 1 ^ 1)
                elif following < first_of_v:
                    k.start_loads(cta, next_place, count & 1 ^ 1)
                else:
                    v.start_loads(cta, next_place, count & 1 ^ 1)
            cute.arch.cp_async_commit_group()
            order.pass_on(claimed, count)
            if item < first_of_k:
                turn = q.quantize(cta, words, place, turn, count & 1)
            elif item < first_of_v:
                turn = k.quantize(cta, words, place, turn, count & 1)
            else:
                turn = v.quantize(cta, words, place, turn, count & 1)
            item, place, count = following, next_place, order.advance(count)
        order.finish()

    def _claimed_by(self, counters: tuple, end: Int32, ctas: Int32) -> tuple:
        """The counter, how many items of a share are known, and a divisor by the CTAs; nothing if none is claimed."""
        known = [maximum(2 * (end // ctas) // 3, 2) for _ in counters]
        return *counters, *known, *(cute.FastDivmodDivisorV2(ctas) for _ in counters)

    def _grid(self, shared_out: tuple, sources: tuple, lengths: tuple) -> Grid:
        """``lengths`` are cu_seqlens and seqused of Q and of K, if sequences are packed."""
        if not lengths:
            return Grid(*shared_out)
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = lengths
        (mQ, mK, _), c = sources, self.config
        sides = (
            PackedSide(cu_seqlens_q, seqused_q, mQ.shape[1], c.q.rows),
            PackedSide(cu_seqlens_k, seqused_k, mK.shape[1], c.k.rows),
        )
        return PackedGrid(*shared_out, *sides)

    @cute.jit
    def _share_signs(self, cta: Cta, signs: tuple, memory: tuple) -> tuple:
        """Copy the signs that are used to shared memory; returns where they are."""
        c = self.config
        shared = tuple(
            place.get_tensor(cute.make_layout(d // 2))
            for place, d in zip(memory, (c.head_dim, c.head_dim_v), strict=True)
        )
        for i in cutlass.range_constexpr(2):
            if const_expr((c.rotate, c.rotate_v)[i]):
                if cta.thread < cute.size(shared[i]):
                    shared[i][cta.thread] = signs[i][cta.thread]
        cute.arch.sync_threads()
        return shared

    def _shared_storage(self) -> type:
        c = self.config

        @cute.struct
        class SharedStorage:
            amax: cute.struct.MemRange[Int32, 2 * c.warps * c.q.blocks]
            signs: cute.struct.Align[cute.struct.MemRange[Int32, c.head_dim // 2], 16]
            signs_v: cute.struct.Align[cute.struct.MemRange[Int32, c.head_dim_v // 2], 16]
            means: cute.struct.Align[cute.struct.MemRange[cutlass.Float32, c.mean_floats], 16]
            full: cute.struct.MemRange[cutlass.Int64, c.mails]
            empty: cute.struct.MemRange[cutlass.Int64, c.mails]
            mailbox: cute.struct.MemRange[Int32, c.mails]
            slots: cute.struct.Align[cute.struct.MemRange[Int32, c.staging_bytes // 4], 128]
            buffer: cute.struct.Align[cute.struct.MemRange[Int32, c.vt.size // 4], 128]

        return SharedStorage


class ClaimingQuantizeKernel(QuantizeKernel):
    """``QuantizeKernel`` whose CTAs claim their last items (``Claims``)."""

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mQ8: cute.Tensor,
        mK8: cute.Tensor,
        mVt8: cute.Tensor,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
        v_scale: cute.Tensor,
        signs: cute.Tensor,
        signs_v: cute.Tensor,
        mean_k: cute.Tensor,
        mean_v: cute.Tensor,
        counter: cute.Tensor,
        num_ctas: Int32,
        stream,
    ):
        """Launch; ``compile_quantize`` says what the arguments are."""
        tensors = (
            (mQ, mK, mV),
            (mQ8, mK8, mVt8),
            (q_scale, k_scale, v_scale),
            (signs, signs_v),
            (mean_k, mean_v),
        )
        self._launch_dense(tensors, (counter,), num_ctas, stream)


class PackedQuantizeKernel(QuantizeKernel):
    """``QuantizeKernel`` for packed sequences, whose tensors have a batch of 1."""

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mQ8: cute.Tensor,
        mK8: cute.Tensor,
        mVt8: cute.Tensor,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
        v_scale: cute.Tensor,
        signs: cute.Tensor,
        signs_v: cute.Tensor,
        mean_k: cute.Tensor,
        mean_v: cute.Tensor,
        cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor,
        seqused_q: cute.Tensor,
        seqused_k: cute.Tensor,
        num_ctas: Int32,
        stream,
    ):
        """Launch; ``compile_quantize`` says what the arguments are."""
        c = self.config
        heads, kv_heads, batch = mQ.shape[2], mK.shape[2], cu_seqlens_q.shape[0] - 1
        items = (
            heads * plan_entries(mQ.shape[1], batch, c.q.rows),
            kv_heads * plan_entries(mK.shape[1], batch, c.k.rows),
        )
        tensors = (
            (mQ, mK, mV),
            (mQ8, mK8, mVt8),
            (q_scale, k_scale, v_scale),
            (signs, signs_v),
            (mean_k, mean_v),
        )
        lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
        self._launch(tensors, items, (heads, kv_heads), lengths, (), num_ctas, stream)
