"""z_b = A_b y_b, or A_b^T y_b: each sequence's own matrix times its rows of y."""

import torch
import triton
import triton.language as tl

from . import jagged_jagged_bmm_jagged_out as scores
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


@triton.jit(do_not_specialize=["num_seqs", "total_z", "total_y", "capacity"])
def array_jagged_bmm_jagged_out_kernel(
    p_a,  # [capacity]
    p_y,  # [total_y, N]
    p_z_offsets,  # [B + 1], of the rows of z
    p_y_offsets,  # [B + 1], of the rows of y
    p_matrix_offsets,  # [B + 1]
    p_z,  # [total_z, N], contiguous
    num_seqs,
    total_z,
    total_y,
    capacity,
    N,
    stride_a,
    y_strides,
    TRANSPOSE: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    i_seq, first_row = find_tile(p_z_offsets, tl.program_id(0), num_seqs, total_z, TILE_M)
    begin_z, end_z = load_rows(p_z_offsets, i_seq, num_seqs, total_z)
    begin_y, end_y = load_rows(p_y_offsets, i_seq, num_seqs, total_y)
    M = end_z - begin_z
    K = end_y - begin_y
    begin, fits = load_matrix(p_matrix_offsets, i_seq, num_seqs, M * K, capacity)
    stride_am = stride_a if TRANSPOSE else K * stride_a
    stride_ak = M * stride_a if TRANSPOSE else stride_a
    # Rows outside every sequence sum over nothing, and so do those of a matrix that does not fit.
    num_terms = tl.where(fits, K, 0)

    o_m = first_row + tl.arange(0, TILE_M)  # int64
    o_n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    m_m = o_m < end_z
    m_n = o_n < N
    p_m = p_a + begin * stride_a + (o_m - begin_z) * stride_am
    p_n = p_y + begin_y * y_strides[0] + o_n * y_strides[1]
    b_z = multiply(
        p_m, m_m, stride_ak, p_n, m_n, y_strides[0], 0, num_terms, ACCUMULATOR, INPUT_PRECISION
    )
    store_block(p_z, b_z, o_m, o_n, m_m, m_n, N)


class ArrayJaggedBmmJaggedOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, y, offsets, y_offsets, matrix_offsets, total, transpose, precision):
        ctx.save_for_backward(a, y, offsets, y_offsets, matrix_offsets)
        ctx.transpose, ctx.precision = transpose, precision
        total_y, N = y.shape
        num_seqs = len(offsets) - 1
        z = y.new_empty(total, N)
        launch(
            array_jagged_bmm_jagged_out_kernel,
            (num_tiles(total, num_seqs, TILE_M.value), triton.cdiv(N, TILE_N.value)),
            a,
            y,
            y_offsets if transpose else offsets,
            offsets if transpose else y_offsets,
            matrix_offsets,
            z,
            num_seqs,
            total,
            total_y,
            len(a),
            N,
            a.stride(0),
            y.stride(),
            TRANSPOSE=transpose,
            ACCUMULATOR=accumulator(a),
            INPUT_PRECISION=precision,
        )
        return z

    @staticmethod
    def backward(ctx, grad_z):
        a, y, *offsets = ctx.saved_tensors
        need_a, need_y = ctx.needs_input_grad[:2]
        grad_a = grad_y = None
        if need_a:
            factors = (y, grad_z) if ctx.transpose else (grad_z, y)
            function = scores.JaggedJaggedBmmJaggedOut.apply
            grad_a = function(*factors, *offsets, len(a), ctx.precision)
        if need_y:
            function = ArrayJaggedBmmJaggedOut.apply
            grad_y = function(a, grad_z, *offsets, len(y), not ctx.transpose, ctx.precision)
        return grad_a, grad_y, None, None, None, None, None, None


def array_jagged_bmm_jagged_out(
    a: torch.Tensor,
    y: torch.Tensor,
    offsets: torch.Tensor,
    *,
    y_offsets: torch.Tensor | None = None,
    matrix_offsets: torch.Tensor | None = None,
    transpose: bool = False,
    total: int | None = None,
) -> torch.Tensor:
    """z_b = A_b y_b for a [sum Lx*Ly] and y [Ty, N]: [total, N], zeros outside every sequence.

    With transpose z_b = A_b^T y_b for y [Tx, N]. A sequence whose matrix does not fit into a gets
    zeros. total is read from the offsets if it is None. Any strides are read as they are. The
    gradients are this family's own operators, so it can be differentiated any number of times.
    """
    op = "array_jagged_bmm_jagged_out"
    matrices = make_matrices(op, offsets, y_offsets, matrix_offsets)
    if total is None:
        total = len(y) if y_offsets is None else int(matrices[1 if transpose else 0][-1])
    names = ("offsets", "y_offsets", "matrix_offsets")
    check(op, a=a, y=y, **dict(zip(names, matrices, strict=True)), total=total)
    return ArrayJaggedBmmJaggedOut.apply(a, y, *matrices, total, transpose, input_precision())
