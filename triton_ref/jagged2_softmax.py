"""Softmax of each sequence's own matrix, over its columns or its rows."""

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from .common import (
    EXACT_PRODUCTS,
    accumulator,
    check,
    load_matrix,
    load_rows,
    make_matrices,
)

TILE_I = 32  # elements that a softmax runs over, at a time
TILE_J = 32  # of softmaxes beside each other

# No tensor says how many rows and columns the matrices have: offsets are not bounded above.
UNBOUNDED = tl.constexpr(1 << 62)


@triton.jit
def load_lines(p_offsets, p_y_offsets, p_matrix_offsets, i_seq, num_seqs, capacity, DIM):
    """Where a matrix begins; the length, number and two strides of its lines, along and across."""
    begin_x, end_x = load_rows(p_offsets, i_seq, num_seqs, UNBOUNDED)
    begin_y, end_y = load_rows(p_y_offsets, i_seq, num_seqs, UNBOUNDED)
    rows, columns = end_x - begin_x, end_y - begin_y
    begin, fits = load_matrix(p_matrix_offsets, i_seq, num_seqs, rows * columns, capacity)
    if DIM == -1:
        length, lines = columns, rows
        stride, line_stride = 1, columns
    else:
        length, lines = rows, columns
        stride, line_stride = columns, 1
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
        m_j = o_j < lines
        b_max = tl.full([TILE_J], float("-inf"), dtype=ACCUMULATOR)
        b_sum = tl.zeros([TILE_J], dtype=ACCUMULATOR)
        for first in range(0, length, TILE_I):
            o_i = first + tl.arange(0, TILE_I).to(tl.int64)
            m_a = (o_i < length)[:, None] & m_j[None, :]
            # [TILE_I, TILE_J]
            b_a = tl.load(p_a + o_i[:, None] * stride + o_line[None, :], mask=m_a, other=0.0)
            b_a = tl.where(m_a, b_a.to(ACCUMULATOR) * scale, float("-inf"))
            b_max_new = tl.maximum(b_max, tl.max(b_a, 0))
            # While a line has seen only -inf, -inf - -inf would be NaN.
            b_shift = tl.where(b_max_new == float("-inf"), 0.0, b_max_new)
            b_sum = b_sum * tl.exp(b_max - b_shift) + tl.sum(tl.exp(b_a - b_shift[None, :]), 0)
            b_max = b_max_new
        b_shift = tl.where(b_max == float("-inf"), 0.0, b_max)
        b_sum = tl.where(m_j, b_sum, 1.0)
        for first in range(0, length, TILE_I):
            o_i = first + tl.arange(0, TILE_I).to(tl.int64)
            m_a = (o_i < length)[:, None] & m_j[None, :]
            o_a = o_i[:, None] * stride + o_line[None, :]
            # [TILE_I, TILE_J]
            b_a = tl.load(p_a + o_a, mask=m_a, other=0.0).to(ACCUMULATOR)
            b_z = tl.exp(b_a * scale - b_shift[None, :]) / b_sum[None, :]
            tl.store(p_z + o_a, b_z.to(p_z.dtype.element_ty), mask=m_a)


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
        m_j = o_j < lines
        b_sum = tl.zeros([TILE_J], dtype=ACCUMULATOR)  # of z * grad_z
        for first in range(0, length, TILE_I):
            o_i = first + tl.arange(0, TILE_I).to(tl.int64)
            m_z = (o_i < length)[:, None] & m_j[None, :]
            o_z = o_i[:, None] * stride + o_line[None, :]
            # [TILE_I, TILE_J] both
            b_z = tl.load(p_z + o_z, mask=m_z, other=0.0).to(ACCUMULATOR)
            b_grad_z = tl.load(p_grad_z + o_z, mask=m_z, other=0.0).to(ACCUMULATOR)
            b_sum += tl.sum(b_z * b_grad_z, 0)
        for first in range(0, length, TILE_I):
            o_i = first + tl.arange(0, TILE_I).to(tl.int64)
            m_z = (o_i < length)[:, None] & m_j[None, :]
            o_z = o_i[:, None] * stride + o_line[None, :]
            # [TILE_I, TILE_J] both
            b_z = tl.load(p_z + o_z, mask=m_z, other=0.0).to(ACCUMULATOR)
            b_grad_z = tl.load(p_grad_z + o_z, mask=m_z, other=0.0).to(ACCUMULATOR)
            b_grad_a = b_z * (b_grad_z - b_sum[None, :]) * scale
            tl.store(p_grad_a + o_z, b_grad_a.to(p_grad_a.dtype.element_ty), mask=m_z)


class Jagged2Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, offsets, y_offsets, matrix_offsets, dim, scale):
        z = torch.zeros_like(a)
        ctx.save_for_backward(z, offsets, y_offsets, matrix_offsets)
        ctx.dim, ctx.scale = dim, scale
        if z.numel() > 0 and len(offsets) > 1:
            with torch.cuda.device_of(a):
                jagged2_softmax_kernel[grid_of(a, offsets)](
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
                    TILE_I=TILE_I,
                    TILE_J=TILE_J,
                    **EXACT_PRODUCTS,
                )
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_z):
        z, offsets, y_offsets, matrix_offsets = ctx.saved_tensors
        grad_a = torch.zeros_like(z)
        if z.numel() > 0 and len(offsets) > 1:
            with torch.cuda.device_of(z):
                jagged2_softmax_backward_kernel[grid_of(z, offsets)](
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
                    TILE_I=TILE_I,
                    TILE_J=TILE_J,
                )
        return grad_a, None, None, None, None, None


def grid_of(a: torch.Tensor, offsets: torch.Tensor) -> tuple[int, int]:
    """Some programs share each matrix: more where there are few matrices."""
    num_seqs = len(offsets) - 1
    return num_seqs, triton.cdiv(min(1024, triton.cdiv(len(a), TILE_I * TILE_J)), num_seqs)


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
