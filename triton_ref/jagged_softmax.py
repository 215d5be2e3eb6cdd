"""Softmax over the rows of each sequence, every other position alone."""

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from .common import EXACT_PRODUCTS, accumulator, check, load_rows

BLOCK_ELEMS = 1024  # elements of a block: few columns make it tall


@triton.jit(do_not_specialize=["num_seqs", "total"])
def jagged_softmax_kernel(
    p_x,  # [T, C]
    p_offsets,  # [B + 1]
    p_y,  # [T, C], contiguous
    num_seqs,
    total,
    C,
    stride_xt,
    stride_xc,
    scale,
    ACCUMULATOR: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_C: tl.constexpr,
):
    i_seq = tl.program_id(0) - 1
    in_sequence = (i_seq >= 0) & (i_seq < num_seqs)
    begin, end = load_rows(p_offsets, i_seq, num_seqs, total)
    o_c = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    m_c = o_c < C

    b_max = tl.full([TILE_C], float("-inf"), dtype=ACCUMULATOR)
    b_sum = tl.zeros([TILE_C], dtype=ACCUMULATOR)
    for first_row in range(begin, end, TILE_T):
        o_t = first_row + tl.arange(0, TILE_T)  # int64
        m_x = (o_t < end)[:, None] & m_c[None, :]
        # [TILE_T, TILE_C]
        b_x = tl.load(
            p_x + o_t[:, None] * stride_xt + o_c[None, :] * stride_xc, mask=m_x, other=0.0
        )
        b_x = tl.where(m_x, b_x.to(ACCUMULATOR) * scale, float("-inf"))
        b_max_new = tl.maximum(b_max, tl.max(b_x, 0))
        # While a column has seen only -inf, -inf - -inf would be NaN.
        b_shift = tl.where(b_max_new == float("-inf"), 0.0, b_max_new)
        b_sum = b_sum * tl.exp(b_max - b_shift) + tl.sum(tl.exp(b_x - b_shift[None, :]), 0)
        b_max = b_max_new

    b_shift = tl.where(b_max == float("-inf"), 0.0, b_max)
    b_sum = tl.where(m_c, b_sum, 1.0)
    for first_row in range(begin, end, TILE_T):
        o_t = first_row + tl.arange(0, TILE_T)
        m_x = (o_t < end)[:, None] & m_c[None, :]
        # [TILE_T, TILE_C]
        b_x = tl.load(
            p_x + o_t[:, None] * stride_xt + o_c[None, :] * stride_xc, mask=m_x, other=0.0
        )
        b_y = tl.exp(b_x.to(ACCUMULATOR) * scale - b_shift[None, :]) / b_sum[None, :]
        b_y = tl.where(in_sequence, b_y, 0.0)
        tl.store(p_y + o_t[:, None] * C + o_c[None, :], b_y.to(p_y.dtype.element_ty), mask=m_x)


@triton.jit(do_not_specialize=["num_seqs", "total"])
def jagged_softmax_backward_kernel(
    p_grad_y,  # [T, C]
    p_y,  # [T, C], contiguous
    p_offsets,  # [B + 1]
    p_grad_x,  # [T, C], contiguous
    num_seqs,
    total,
    C,
    stride_gt,
    stride_gc,
    scale,
    ACCUMULATOR: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_C: tl.constexpr,
):
    i_seq = tl.program_id(0) - 1
    in_sequence = (i_seq >= 0) & (i_seq < num_seqs)
    begin, end = load_rows(p_offsets, i_seq, num_seqs, total)
    o_c = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    m_c = o_c < C

    b_sum = tl.zeros([TILE_C], dtype=ACCUMULATOR)  # of y * grad_y over the rows
    for first_row in range(begin, end, TILE_T):
        o_t = first_row + tl.arange(0, TILE_T)  # int64
        m_y = (o_t < end)[:, None] & m_c[None, :]
        # [TILE_T, TILE_C]
        b_y = tl.load(p_y + o_t[:, None] * C + o_c[None, :], mask=m_y, other=0.0).to(ACCUMULATOR)
        # [TILE_T, TILE_C]
        b_grad_y = tl.load(
            p_grad_y + o_t[:, None] * stride_gt + o_c[None, :] * stride_gc, mask=m_y, other=0.0
        ).to(ACCUMULATOR)
        b_sum += tl.sum(b_y * b_grad_y, 0)

    for first_row in range(begin, end, TILE_T):
        o_t = first_row + tl.arange(0, TILE_T)
        m_y = (o_t < end)[:, None] & m_c[None, :]
        # [TILE_T, TILE_C]
        b_y = tl.load(p_y + o_t[:, None] * C + o_c[None, :], mask=m_y, other=0.0).to(ACCUMULATOR)
        # [TILE_T, TILE_C]
        b_grad_y = tl.load(
            p_grad_y + o_t[:, None] * stride_gt + o_c[None, :] * stride_gc, mask=m_y, other=0.0
        ).to(ACCUMULATOR)
        b_grad_x = b_y * (b_grad_y - b_sum[None, :]) * scale
        b_grad_x = tl.where(in_sequence, b_grad_x, 0.0)
        p_tile = p_grad_x + o_t[:, None] * C + o_c[None, :]
        tl.store(p_tile, b_grad_x.to(p_grad_x.dtype.element_ty), mask=m_y)


class JaggedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, offsets, scale):
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        ctx.save_for_backward(y, offsets)
        ctx.scale = scale
        if y.numel() > 0:
            grid, tiles = plan(x, offsets)
            with torch.cuda.device_of(x):
                jagged_softmax_kernel[grid](
                    x,
                    offsets,
                    y,
                    len(offsets) - 1,
                    *x.shape,
                    *x.stride(),
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
        if y.numel() > 0:
            grid, tiles = plan(y, offsets)
            with torch.cuda.device_of(y):
                jagged_softmax_backward_kernel[grid](
                    grad_y,
                    y,
                    offsets,
                    grad_x,
                    len(offsets) - 1,
                    *y.shape,
                    *grad_y.stride(),
                    ctx.scale,
                    ACCUMULATOR=accumulator(y),
                    **tiles,
                )
        return grad_x, None, None


def plan(x: torch.Tensor, offsets: torch.Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """One program for each sequence and some columns; two more for the rows outside all of them."""
    tile_c = min(32, triton.next_power_of_2(x.shape[1]))
    grid = (len(offsets) + 1, triton.cdiv(x.shape[1], tile_c))
    return grid, {"TILE_T": BLOCK_ELEMS // tile_c, "TILE_C": tile_c}


def jagged_softmax(x: torch.Tensor, offsets: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    """softmax(scale * x_b) over the rows of each sequence for x [T, ...], zeros outside them.

    Two passes over the rows, accumulated in fp32.
    """
    check("jagged_softmax", x=x, offsets=offsets)
    columns = x.reshape(len(x), x.shape[1:].numel())
    return JaggedSoftmax.apply(columns, offsets.contiguous(), float(scale)).reshape(x.shape)
