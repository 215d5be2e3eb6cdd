"""z_b = x_b y_b^T: one matrix per sequence, row by row in one vector."""

import torch
import triton
import triton.language as tl

from . import array_jagged_bmm_jagged_out as weighted
from .common import (
    TILE_M,
    TILE_N,
    accumulator,
    check,
    find_tile,
    input_precision,
    launch,
    load_matrix,
    load_rows,
    make_matrices,
    multiply,
    num_tiles,
    store_block,
)


@triton.jit(do_not_specialize=["num_seqs", "total_x", "total_y", "capacity"])
def jagged_jagged_bmm_jagged_out_kernel(
    p_x,  # [Tx, K]
    p_y,  # [Ty, K]
    p_offsets,  # [B + 1]
    p_y_offsets,  # [B + 1]
    p_matrix_offsets,  # [B + 1]
    p_z,  # [capacity], zeros
    num_seqs,
    total_x,
    total_y,
    capacity,
    K,
    x_strides,
    y_strides,
    ACCUMULATOR: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    i_seq, first_row = find_tile(p_offsets, tl.program_id(0), num_seqs, total_x, TILE_M)
    begin_x, end_x = load_rows(p_offsets, i_seq, num_seqs, total_x)
    begin_y, end_y = load_rows(p_y_offsets, i_seq, num_seqs, total_y)
    N = end_y - begin_y
    begin, fits = load_matrix(p_matrix_offsets, i_seq, num_seqs, (end_x - begin_x) * N, capacity)

    o_m = first_row + tl.arange(0, TILE_M)  # int64
    m_m = (o_m < end_x) & fits
    for first_n in range(0, N, TILE_N):
        o_n = first_n + tl.arange(0, TILE_N)
        m_n = o_n < N
        p_m = p_x + o_m * x_strides[0]
        p_n = p_y + (begin_y + o_n) * y_strides[0]
        b_z = multiply(
            p_m, m_m, x_strides[1], p_n, m_n, y_strides[1], 0, K, ACCUMULATOR, INPUT_PRECISION
        )
        store_block(p_z + begin, b_z, o_m - begin_x, o_n, m_m, m_n, N)


class JaggedJaggedBmmJaggedOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, offsets, y_offsets, matrix_offsets, total_out, precision):
        ctx.save_for_backward(x, y, offsets, y_offsets, matrix_offsets)
        ctx.precision = precision
        total, K = x.shape
        num_seqs = len(offsets) - 1
        z = x.new_zeros(total_out)
        launch(
            jagged_jagged_bmm_jagged_out_kernel,
            (num_tiles(total, num_seqs, TILE_M.value),),
            x,
            y,
            offsets,
            y_offsets,
            matrix_offsets,
            z,
            num_seqs,
            total,
            len(y),
            total_out,
            K,
            x.stride(),
            y.stride(),
            ACCUMULATOR=accumulator(x),
            INPUT_PRECISION=precision,
        )
        return z

    @staticmethod
    def backward(ctx, grad_z):
        x, y, *offsets = ctx.saved_tensors
        need_x, need_y = ctx.needs_input_grad[:2]
        function = weighted.ArrayJaggedBmmJaggedOut.apply
        grad_x = grad_y = None
        if need_x:
            grad_x = function(grad_z, y, *offsets, len(x), False, ctx.precision)
        if need_y:
            grad_y = function(grad_z, x, *offsets, len(y), True, ctx.precision)
        return grad_x, grad_y, None, None, None, None, None


def jagged_jagged_bmm_jagged_out(
    x: torch.Tensor,
    y: torch.Tensor,
    offsets: torch.Tensor,
    *,
    y_offsets: torch.Tensor | None = None,
    matrix_offsets: torch.Tensor | None = None,
    total_out: int | None = None,
) -> torch.Tensor:
    """z_b = x_b y_b^T for x [Tx, D] and y [Ty, D]: [total_out], matrix b from matrix_offsets[b] on.

    Elements of no matrix are zero, and so is a matrix that does not fit into total_out, which is
    read from matrix_offsets if it is None. Any strides are read as they are. The gradients are
    array_jagged_bmm_jagged_out, so it can be differentiated any number of times.
    """
    op = "jagged_jagged_bmm_jagged_out"
    matrices = make_matrices(op, offsets, y_offsets, matrix_offsets)
    total_out = int(matrices[2][-1]) if total_out is None else total_out
    bounds = {"offsets": offsets, "y_offsets": y_offsets, "matrix_offsets": matrices[2]}
    check(op, x=x, y=y, **bounds, total_out=total_out)
    return JaggedJaggedBmmJaggedOut.apply(x, y, *matrices, total_out, input_precision())
