"""z_b = x_b^T y_b: a dense matrix for each sequence, summed over its rows."""

import torch
import triton
import triton.language as tl

from . import jagged_dense_bmm as transposed
from .common import (
    TILE_M,
    TILE_N,
    accumulator,
    check,
    input_precision,
    launch,
    load_rows,
    multiply,
    store_block,
)


@triton.jit(do_not_specialize=["num_seqs", "total"])
def jagged_jagged_bmm_kernel(
    p_x,  # [T, M]
    p_y,  # [T, N]
    p_offsets,  # [B + 1]
    p_z,  # [B, M, N], contiguous
    num_seqs,
    total,
    M,
    N,
    x_strides,
    y_strides,
    ACCUMULATOR: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    i_seq = tl.program_id(0)
    begin, end = load_rows(p_offsets, i_seq, num_seqs, total)
    o_m = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
    o_n = tl.program_id(2) * TILE_N + tl.arange(0, TILE_N)
    m_m = o_m < M
    m_n = o_n < N
    p_m = p_x + o_m.to(tl.int64) * x_strides[1]
    p_n = p_y + o_n.to(tl.int64) * y_strides[1]
    b_z = multiply(
        p_m, m_m, x_strides[0], p_n, m_n, y_strides[0], begin, end, ACCUMULATOR, INPUT_PRECISION
    )
    store_block(p_z + i_seq.to(tl.int64) * M * N, b_z, o_m, o_n, m_m, m_n, N)


class JaggedJaggedBmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, offsets, precision):
        ctx.save_for_backward(x, y, offsets)
        ctx.precision = precision
        total, M = x.shape
        _, N = y.shape
        num_seqs = len(offsets) - 1
        z = x.new_empty(num_seqs, M, N)
        launch(
            jagged_jagged_bmm_kernel,
            (num_seqs, triton.cdiv(M, TILE_M.value), triton.cdiv(N, TILE_N.value)),
            x,
            y,
            offsets,
            z,
            num_seqs,
            total,
            M,
            N,
            x.stride(),
            y.stride(),
            ACCUMULATOR=accumulator(x),
            INPUT_PRECISION=precision,
        )
        return z

    @staticmethod
    def backward(ctx, grad_z):
        x, y, offsets = ctx.saved_tensors
        need_x, need_y = ctx.needs_input_grad[:2]
        grad_x = grad_y = None
        if need_x:
            grad_x = transposed.JaggedDenseBmm.apply(
                y, grad_z.transpose(1, 2), offsets, ctx.precision, None, None
            )
        if need_y:
            grad_y = transposed.JaggedDenseBmm.apply(x, grad_z, offsets, ctx.precision, None, None)
        return grad_x, grad_y, None, None


def jagged_jagged_bmm(x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """z_b = x_b^T y_b for x [T, D] and y [T, N]: [B, D, N], zeros for an empty sequence.

    Any strides are read as they are. The gradients are this family's own operators, so it can be
    differentiated any number of times.
    """
    check("jagged_jagged_bmm", x=x, y=y, offsets=offsets)
    return JaggedJaggedBmm.apply(x, y, offsets.contiguous(), input_precision())
