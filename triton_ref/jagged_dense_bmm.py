"""z_b = x_b y_b: the rows of each sequence times the sequence's own dense matrix."""

import torch
import triton
import triton.language as tl

from . import jagged_jagged_bmm as transposed
from .common import (
    accumulator,
    check,
    check_offsets,
    check_values,
    find_tile,
    input_precision,
    load_rows,
    num_tiles,
)

TILE_M = 64
TILE_N = 64
TILE_K = 32


@triton.jit(do_not_specialize=["num_seqs", "total"])
def jagged_dense_bmm_kernel(
    p_x,  # [T, K]
    p_y,  # [B, K, N]
    p_offsets,  # [B + 1]
    p_z,  # [T, N], contiguous
    num_seqs,
    total,
    K,
    N,
    stride_xm,
    stride_xk,
    stride_yb,
    stride_yk,
    stride_yn,
    ACCUMULATOR: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    i_seq, first_row = find_tile(p_offsets, tl.program_id(0), num_seqs, total, TILE_M)
    _, end = load_rows(p_offsets, i_seq, num_seqs, total)
    # Rows outside every sequence sum over nothing, which makes them zeros.
    num_terms = tl.where((i_seq >= 0) & (i_seq < num_seqs), K, 0)

    o_m = first_row + tl.arange(0, TILE_M)  # int64
    o_n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    m_m = o_m < end
    m_n = o_n < N
    p_y += i_seq.to(tl.int64) * stride_yb

    b_z = tl.zeros([TILE_M, TILE_N], dtype=ACCUMULATOR)
    for first_k in range(0, num_terms, TILE_K):
        o_k = first_k + tl.arange(0, TILE_K)
        m_k = o_k < K
        # [TILE_M, TILE_K]
        b_x = tl.load(
            p_x + o_m[:, None] * stride_xm + o_k[None, :] * stride_xk,
            mask=m_m[:, None] & m_k[None, :],
            other=0.0,
        )
        # [TILE_K, TILE_N]
        b_y = tl.load(
            p_y + o_k[:, None].to(tl.int64) * stride_yk + o_n[None, :] * stride_yn,
            mask=m_k[:, None] & m_n[None, :],
            other=0.0,
        )
        b_z += tl.dot(b_x, b_y, input_precision=INPUT_PRECISION)

    p_tile = p_z + o_m[:, None] * N + o_n[None, :]
    tl.store(p_tile, b_z.to(p_z.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


class JaggedDenseBmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, offsets, precision):
        ctx.save_for_backward(x, y, offsets)
        ctx.precision = precision
        total, K = x.shape
        num_seqs, _, N = y.shape
        z = x.new_empty(total, N)
        if z.numel() > 0:
            grid = (num_tiles(total, num_seqs, TILE_M), triton.cdiv(N, TILE_N))
            with torch.cuda.device_of(x):
                jagged_dense_bmm_kernel[grid](
                    x,
                    y,
                    offsets,
                    z,
                    num_seqs,
                    total,
                    K,
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
            grad_x = JaggedDenseBmm.apply(grad_z, y.transpose(1, 2), offsets, ctx.precision)
        if need_y:
            grad_y = transposed.JaggedJaggedBmm.apply(x, grad_z, offsets, ctx.precision)
        return grad_x, grad_y, None, None


def jagged_dense_bmm(x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """z_b = x_b y_b for x [T, D] and y [B, D, N]: [T, N], zeros outside every sequence.

    Any strides are read as they are. The gradients are this family's own operators, so it can be
    differentiated any number of times.
    """
    op = "jagged_dense_bmm"
    check_values(op, x=x, y=y)
    check_offsets(op, offsets, x)
    check(op, x.dim() == 2, "x", "[T, D]", list(x.shape))
    expected = f"[{len(offsets) - 1}, {x.shape[1]}, N]"
    fits = y.dim() == 3 and y.shape[:2] == (len(offsets) - 1, x.shape[1])
    check(op, fits, "y", expected, list(y.shape))
    return JaggedDenseBmm.apply(x, y, offsets.contiguous(), input_precision())
