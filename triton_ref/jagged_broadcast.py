"""Each row of a sequence gets the sequence's value."""

import torch

from . import jagged_sum as inverse
from .common import check
from .padded_to_jagged import take_rows


class JaggedBroadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, offsets, total):
        ctx.save_for_backward(offsets)
        # No sequence is longer than total, and the stride between a sequence's rows is 0.
        return take_rows(x.unsqueeze(1).expand(-1, total, -1), offsets, total)

    @staticmethod
    def backward(ctx, grad_z):
        (offsets,) = ctx.saved_tensors
        return inverse.JaggedSum.apply(grad_z, offsets, False), None, None


def jagged_broadcast(
    x: torch.Tensor, offsets: torch.Tensor, *, total: int | None = None
) -> torch.Tensor:
    """z_b[i] = x[b] for x [B, ...]: [total, ...], zeros outside the sequences.

    None reads total from the offsets.
    """
    check("jagged_broadcast", x=x, offsets=offsets, total=total)
    total = int(offsets[-1]) if total is None else total
    columns = x.reshape(len(x), x.shape[1:].numel())
    return JaggedBroadcast.apply(columns, offsets.contiguous(), total).reshape(total, *x.shape[1:])
