"""Rows of jagged and of padded sequences multiplied element by element."""

import torch

from .common import check
from .jagged_dense_add import combine
from .jagged_to_padded import JaggedToPadded


class JaggedDenseMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, offsets):
        ctx.save_for_backward(x, y, offsets)
        return combine(x, y, offsets, multiply=True)

    @staticmethod
    def backward(ctx, grad_z):
        x, y, offsets = ctx.saved_tensors
        grad_x = JaggedDenseMul.apply(grad_z, y, offsets)
        return grad_x, JaggedToPadded.apply(grad_z * x, offsets, y.shape[1], 0.0), None


def jagged_dense_mul(x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """z_b[i] = x_b[i] y[b, i] for x [T, ...] and y [B, M, ...], 0 from M on."""
    check("jagged_dense_mul", x=x, y=y, offsets=offsets)
    columns = x.shape[1:].numel()
    flat = x.reshape(len(x), columns), y.reshape(*y.shape[:2], columns)
    return JaggedDenseMul.apply(*flat, offsets.contiguous()).reshape(x.shape)
