"""Softmax of each sequence's own matrix, over its columns or its rows."""

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from .common import (
    EXACT_PRODUCTS,
    accumulator,
    check,
    launch,
    load_matrix,
    load_rows,
    make_matrices,
)
from .softmax import softmax_lines, softmax_lines_backward

TILE = {"TILE_I": 32, "TILE_J": 32}  # elements of a softmax, and softmaxes, at a time

# No tensor says how many rows and columns the matrices have: offsets are not bounded above.
UNBOUNDED = tl.constexpr(1 << 62)


@triton.jit
def load_lines(p_offsets, p_y_offsets, p_matrix_offsets, i_seq, num_seqs, capacity, DIM):
    """Where a matrix begins; length, number and two strides of its lines, along and across."""
    begin_x, end_x = load_rows(p_offsets, i_seq, num_seqs, UNBOUNDED)
    begin_y, end_y = load_rows(p_y_offsets, i_seq, num_seqs, UNBOUNDED)
    rows, columns = end_x - begin_x, end_y - begin_y
    begin, fits = load_matrix(p_matrix_offsets, i_seq, num_seqs, rows * columns, capacity)
    if DIM == -1:
        length, lines, stride, line_stride = columns, rows, 1, columns
    else:
        length, lines, stride, line_stride = rows, columns, columns, 1
    return begin, tl.where(fits, length, 0), lines, stride, line_stride


@triton.jit(do_not_specialize=["num_seqs", "capacity"])
def jagged2_softmax_kernel(
    p_a,  # [capacity], contiguous
    p_offsets,  # [B + 1]
    p_y_offsets,  # [B + 1]
    p_matrix_offsets,  # [B + 1]
    p_z,  # [capacity], zeros
    num_seqs,
    capacity,
    scale,
    DIM: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    TILE_I: tl.constexpr,
    TILE_J: tl.constexpr,
):
    i_seq = tl.program_id(0)
    begin, length, lines, stride, line_stride = load_lines(
        p_offsets, p_y_offsets, p_matrix_offsets, i_seq, num_seqs, capacity, DIM
    )
    for first_line in range(tl.program_id(1) * TILE_J, lines, tl.num_programs(1) * TILE_J):
        o_j = first_line + tl.arange(0, TILE_J).to(tl.int64)
        o_line = begin + o_j * line_stride
        p_x, p_y = p_a + o_line, p_z + o_line
        softmax_lines(
            p_x, stride, p_y, stride, length, o_j < lines, True, scale, ACCUMULATOR, TILE_I
        )


@triton.jit(do_not_specialize=["num_seqs", "capacity"])
def jagged2_softmax_backward_kernel(
    p_grad_z,  # [capacity], contiguous
    p_z,  # [capacity]
    p_offsets,  # [B + 1]
    p_y_offsets,  # [B + 1]
    p_matrix_offsets,  # [B + 1]
    p_grad_a,  # [capacity], zeros
    num_seqs,
    capacity,
    scale,
    DIM: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    TILE_I: tl.constexpr,
    TILE_J: tl.constexpr,
):
    i_seq = tl.program_id(0)
    begin, length, lines, stride, line_stride = load_lines(
        p_offsets, p_y_offsets, p_matrix_offsets, i_seq, num_seqs, capacity, DIM
    )
    for first_line in range(tl.program_id(1) * TILE_J, lines, tl.num_programs(1) * TILE_J):
        o_j = first_line + tl.arange(0, TILE_J).to(tl.int64)
        o_line = begin + o_j * line_stride
        p_y, p_grad_y, p_grad_x = p_z + o_line, p_grad_z + o_line, p_grad_a + o_line
        m_j = o_j < lines
        softmax_lines_backward(
            p_grad_y, stride, p_y, p_grad_x, stride, length, m_j, True, scale, ACCUMULATOR, TILE_I
        )


class Jagged2Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, offsets, y_offsets, matrix_offsets, dim, scale):
        z = torch.zeros_like(a)
        ctx.save_for_backward(z, offsets, y_offsets, matrix_offsets)
        ctx.dim, ctx.scale = dim, scale
        launch(
            jagged2_softmax_kernel,
            grid_of(a, offsets),
            a,
            offsets,
            y_offsets,
            matrix_offsets,
            z,
            len(offsets) - 1,
            len(a),
            scale,
            DIM=dim,
            ACCUMULATOR=accumulator(a),
            **TILE,
            **EXACT_PRODUCTS,
        )
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_z):
        z, offsets, y_offsets, matrix_offsets = ctx.saved_tensors
        grad_a = torch.zeros_like(z)
        launch(
            jagged2_softmax_backward_kernel,
            grid_of(z, offsets),
            grad_z.contiguous(),
            z,
            offsets,
            y_offsets,
            matrix_offsets,
            grad_a,
            len(offsets) - 1,
            len(z),
            ctx.scale,
            DIM=ctx.dim,
            ACCUMULATOR=accumulator(z),
            **TILE,
        )
        return grad_a, None, None, None, None, None


def grid_of(a: torch.Tensor, offsets: torch.Tensor) -> tuple[int, int]:
    """Some programs share each matrix: more where there are few matrices."""
    num_seqs = len(offsets) - 1
    return num_seqs, triton.cdiv(min(1024, triton.cdiv(len(a), 32 * 32)), max(1, num_seqs))


def jagged2_softmax(
    a: torch.Tensor,
    offsets: torch.Tensor,
    *,
    y_offsets: torch.Tensor | None = None,
    matrix_offsets: torch.Tensor | None = None,
    dim: int = -1,
    scale: float = 1.0,
) -> torch.Tensor:
    """softmax(scale * A_b, dim) for the matrices [Lx, Ly] in a [sum Lx*Ly], zeros outside them.

    Two passes over each line, accumulated in fp32.
    """
    op = "jagged2_softmax"
    all_offsets = make_matrices(op, offsets, y_offsets, matrix_offsets)
    names = ("offsets", "y_offsets", "matrix_offsets")
    check(op, a=a, **dict(zip(names, all_offsets, strict=True)), dim=dim)
    return Jagged2Softmax.apply(a.contiguous(), *all_offsets, dim, float(scale))
