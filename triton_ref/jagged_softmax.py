"""Softmax over the rows of each sequence, at each of the other positions."""

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from .common import EXACT_PRODUCTS, accumulator, check, launch, load_rows, tile_of
from .softmax import softmax_lines, softmax_lines_backward


@triton.jit(do_not_specialize=["num_seqs", "total"])
def jagged_softmax_kernel(
    p_x,  # [T, C]
    p_offsets,  # [B + 1]
    p_y,  # [T, C], contiguous
    num_seqs,
    total,
    C,
    x_strides,
    scale,
    ACCUMULATOR: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_C: tl.constexpr,
):
    i_seq = tl.program_id(0) - 1
    in_sequence = (i_seq >= 0) & (i_seq < num_seqs)
    begin, end = load_rows(p_offsets, i_seq, num_seqs, total)
    o_c = (tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)).to(tl.int64)
    length, m_c = end - begin, o_c < C
    p_first = p_x + begin * x_strides[0] + o_c * x_strides[1]
    p_z = p_y + begin * C + o_c
    softmax_lines(
        p_first, x_strides[0], p_z, C, length, m_c, in_sequence, scale, ACCUMULATOR, TILE_T
    )


@triton.jit(do_not_specialize=["num_seqs", "total"])
def jagged_softmax_backward_kernel(
    p_grad_y,  # [T, C]
    p_y,  # [T, C], contiguous
    p_offsets,  # [B + 1]
    p_grad_x,  # [T, C], contiguous
    num_seqs,
    total,
    C,
    grad_strides,
    scale,
    ACCUMULATOR: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_C: tl.constexpr,
):
    i_seq = tl.program_id(0) - 1
    in_sequence = (i_seq >= 0) & (i_seq < num_seqs)
    begin, end = load_rows(p_offsets, i_seq, num_seqs, total)
    o_c = (tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)).to(tl.int64)
    p_g = p_grad_y + begin * grad_strides[0] + o_c * grad_strides[1]
    p_z, p_grad_z = p_y + begin * C + o_c, p_grad_x + begin * C + o_c
    softmax_lines_backward(
        p_g,
        grad_strides[0],
        p_z,
        p_grad_z,
        C,
        end - begin,
        o_c < C,
        in_sequence,
        scale,
        ACCUMULATOR,
        TILE_T,
    )


class JaggedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, offsets, scale):
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        ctx.save_for_backward(y, offsets)
        ctx.scale = scale
        grid, tiles = plan(x, offsets)
        launch(
            jagged_softmax_kernel,
            grid,
            x,
            offsets,
            y,
            len(offsets) - 1,
            *x.shape,
            x.stride(),
            scale,
            ACCUMULATOR=accumulator(x),
            **tiles,
            **EXACT_PRODUCTS,
        )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):
        y, offsets = ctx.saved_tensors
        grad_x = torch.empty_like(y)
        grid, tiles = plan(y, offsets)
        launch(
            jagged_softmax_backward_kernel,
            grid,
            grad_y,
            y,
            offsets,
            grad_x,
            len(offsets) - 1,
            *y.shape,
            grad_y.stride(),
            ctx.scale,
            ACCUMULATOR=accumulator(y),
            **tiles,
        )
        return grad_x, None, None


def plan(x: torch.Tensor, offsets: torch.Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """One program for each sequence and some columns; two more for the rows outside all of them."""
    tile_t, tile_c = tile_of(x.shape[1])
    grid = (len(offsets) + 1, triton.cdiv(x.shape[1], tile_c))
    return grid, {"TILE_T": tile_t, "TILE_C": tile_c}


def jagged_softmax(x: torch.Tensor, offsets: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    """softmax(scale * x_b) over the rows of each sequence for x [T, ...], zeros outside them.

    Two passes over the rows, accumulated in fp32.
    """
    check("jagged_softmax", x=x, offsets=offsets)
    columns = x.reshape(len(x), x.shape[1:].numel())
    return JaggedSoftmax.apply(columns, offsets.contiguous(), float(scale)).reshape(x.shape)
