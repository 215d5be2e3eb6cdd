"""z_b = x_b^T y_b: a dense matrix for each sequence, summed over its rows."""

import torch
import triton
import triton.language as tl

from . import jagged_dense_bmm as transposed
from .common import (
    accumulator,
    check,
    input_precision,
    load_rows,
)

TILE_M = 64
TILE_N = 64
TILE_K = 32


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
    stride_xk,
    stride_xm,
    stride_yk,
    stride_yn,
    ACCUMULATOR: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    i_seq = tl.program_id(0)
    begin, end = load_rows(p_offsets, i_seq, num_seqs, total)
    o_m = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
    o_n = tl.program_id(2) * TILE_N + tl.arange(0, TILE_N)
    m_m = o_m < M
    m_n = o_n < N

    b_z = tl.zeros([TILE_M, TILE_N], dtype=ACCUMULATOR)
    for first_row in range(begin, end, TILE_K):
        o_k = first_row + tl.arange(0, TILE_K)  # int64
        m_k = o_k < end
        # [TILE_M, TILE_K], the rows of the sequence as columns
        b_x = tl.load(
            p_x + o_m[:, None].to(tl.int64) * stride_xm + o_k[None, :] * stride_xk,
            mask=m_m[:, None] & m_k[None, :],
            other=0.0,
        )
        # [TILE_K, TILE_N]
        b_y = tl.load(
            p_y + o_k[:, None] * stride_yk + o_n[None, :].to(tl.int64) * stride_yn,
            mask=m_k[:, None] & m_n[None, :],
            other=0.0,
        )
        b_z += tl.dot(b_x, b_y, input_precision=INPUT_PRECISION)

    p_tile = p_z + (i_seq.to(tl.int64) * M + o_m[:, None]) * N + o_n[None, :]
    tl.store(p_tile, b_z.to(p_z.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


class JaggedJaggedBmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, offsets, precision):
        ctx.save_for_backward(x, y, offsets)
        ctx.precision = precision
        total, M = x.shape
        _, N = y.shape
        num_seqs = len(offsets) - 1
        z = x.new_empty(num_seqs, M, N)
        if z.numel() > 0:
            grid = (num_seqs, triton.cdiv(M, TILE_M), triton.cdiv(N, TILE_N))
            with torch.cuda.device_of(x):
                jagged_jagged_bmm_kernel[grid](
                    x,
                    y,
                    offsets,
                    z,
                    num_seqs,
                    total,
                    M,
                    N,
                    *x.stride(),
                    *y.stride(),
                    ACCUMULATOR=accumulator(x),
                    INPUT_PRECISION=precision,
                    TILE_M=TILE_M,
                    TILE_N=TILE_N,
                    TILE_K=TILE_K,
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
