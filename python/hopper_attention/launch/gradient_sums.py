"""Gradients of rows of Q against keys that come part by part: one float32 sum of dQ, to which the kernel adds all."""

from __future__ import annotations

import torch
from torch import Tensor

from hopper.backward.config import BackwardConfig, PairedBackwardConfig
from hopper_attention.launch.gradient_launchers import BackwardLauncher, FinishedLauncher
from hopper_attention.launch.gradient_memory import subtract_lse_gradient, work_pieces
from hopper_attention.layout import make_addressable
from hopper_attention.masks import MaskSpec


class GradientSums:
    """dQ of some rows, to be added to by one launch for each part of the keys, and rounded once.

    What a backward pass needs of each row is computed once, and the sums are not rounded between parts. Launches on one
    stream come one after another, so that ordered ones give the same bits in every run.
    """

    def __init__(
        self,
        launcher: BackwardLauncher,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
    ) -> None:
        """Of q (batch, rows, heads, head_dim), out and dout (batch, rows, heads, head_dim_v), lse and dlse float32
        (batch, heads, rows), as for ``run_backward``. ``launcher`` is that of any part: all share ``dq_tile``."""
        launcher = launcher.adding
        self.q, self.dout, out = map(make_addressable, (q, dout, out))
        self.finish_with = launcher
        # Of this pass alone: memory that launches share is filled anew by each.
        pieces = work_pieces(launcher.dq_tile, q.shape)
        self.lse_log2, self.delta, self.sums = (piece.empty(q.device) for piece in pieces)
        with torch.cuda.device(launcher.device_index):
            launcher.prepare(out, self.dout, lse.contiguous(), self.lse_log2, self.delta, self.sums)
        if dlse is not None:
            subtract_lse_gradient(self.delta, lse, dlse)

    def add(
        self,
        launcher: BackwardLauncher,
        part: tuple[slice, slice],
        tensors: tuple[Tensor, Tensor, Tensor, Tensor],
        softmax_scale: float,
        mask: MaskSpec,
    ) -> None:
        """Add dQ from some keys, and write dK and dV of these.

        Args:
            launcher: of the mask.
            part: entries of the batch and heads of Q that take part: all heads of some entries, or some heads where
                there is one entry. Kernels count query tiles over heads and entries alike.
            tensors: k, v, dk and dv of these entries and of the heads that belong to those of Q. dk and dv may be k
                and v themselves where ``may_replace_keys`` says so.
            mask: between the rows and these keys.
        """
        batch, heads = part
        k, v, dk, dv = tensors
        rows = (x[batch, :, heads] for x in (self.q, self.dout))
        q, dout = map(make_addressable, rows)
        work = tuple(x[batch, heads] for x in (self.lse_log2, self.delta, self.sums))
        assert work[2].is_contiguous(), "kernels take sums of heads that lie one behind the other"
        window = mask.sides if mask.has_window else ()
        inputs = q, make_addressable(k), make_addressable(v), dout
        with torch.cuda.device(launcher.device_index):
            launcher.adding.start(inputs, (*work, dk, dv), softmax_scale, window)

    def take(self, other: GradientSums, part: tuple[slice, slice], first_row: int) -> bool:
        """Add the sums of some entries of the batch and heads, of rows that begin at ``first_row`` of these, if they
        have whole tiles of these; whether it was done."""
        first_tile, rest = divmod(first_row, self.finish_with.config.tile_m)
        if rest:
            return False
        self.sums[part][:, :, first_tile : first_tile + other.sums.shape[2]].add_(other.sums)
        return True

    def finish(self, dq: Tensor, softmax_scale: float) -> None:
        """Round the sums into dq, of the shape and dtype of q and contiguous."""
        with torch.cuda.device(self.finish_with.device_index):
            self.finish_with.finish(self.sums, dq, softmax_scale)


def may_replace_keys(launcher: FinishedLauncher) -> bool:
    """Whether dK and dV may be written over K and V: where a tile of keys is read by one CTA alone, which writes their
    gradients when it has done all queries, or else ``finish`` writes them, behind the kernel."""
    config = launcher.config
    return isinstance(config, BackwardConfig) and not isinstance(config, PairedBackwardConfig)


def share_sums(launchers: list[BackwardLauncher]) -> bool:
    """Whether their kernels add dQ in the same order of words, and take the same work memory."""
    first = launchers[0]
    return all(
        each.dq_tile == first.dq_tile and each.config.dq_order == first.config.dq_order for each in launchers
    )
