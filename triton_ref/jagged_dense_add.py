"""Rows of jagged and of padded sequences added; the kernel that multiplies them, too."""

import torch
import triton
import triton.language as tl

from . import jagged_to_padded as padded
from .common import (
    accumulator,
    check,
    check_place,
    find_tile,
    launch,
    load_block,
    load_rows,
    num_tiles,
    store_block,
    tile_of,
)


@triton.jit(do_not_specialize=["num_seqs", "total", "max_len"])
def combine_kernel(
    p_x,  # [T, C]
    p_y,  # [B, M, C]
    p_offsets,  # [B + 1]
    p_z,  # [T, C], contiguous
    num_seqs,
    total,
    max_len,
    C,
    x_strides,
    y_strides,
    MULTIPLY: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_C: tl.constexpr,
):
    i_seq, first_row = find_tile(p_offsets, tl.program_id(0), num_seqs, total, TILE_T)
    in_sequence = (i_seq >= 0) & (i_seq < num_seqs)
    begin, end = load_rows(p_offsets, i_seq, num_seqs, total)
    o_t = first_row + tl.arange(0, TILE_T)  # int64
    o_c = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    o_m = o_t - begin
    m_t = o_t < end
    m_c = o_c < C
    m_y = m_t & (o_m < max_len) & in_sequence
    # [TILE_T, TILE_C]
    b_x = load_block(p_x, x_strides, o_t, o_c, m_t & in_sequence, m_c)
    p_rows = p_y + i_seq.to(tl.int64) * y_strides[0]
    # [TILE_T, TILE_C]
    b_y = load_block(p_rows, (y_strides[1], y_strides[2]), o_m, o_c, m_y, m_c)
    b_wide_x, b_wide_y = b_x.to(ACCUMULATOR), b_y.to(ACCUMULATOR)
    if MULTIPLY:
        # Not a product with 0: x may be infinite there.
        b_z = tl.where(m_y[:, None], b_wide_x * b_wide_y, 0.0)
    else:
        b_z = tl.where(m_y[:, None], b_wide_x + b_wide_y, b_wide_x)
    store_block(p_z, b_z, o_t, o_c, m_t, m_c, C)


def combine(
    x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor, multiply: bool
) -> torch.Tensor:
    """x [T, C] with y [B, M, C]; sums of integers wrap around"""
    z = x.new_empty(x.shape)
    tile_t, tile_c = tile_of(x.shape[1], widest=64)
    launch(
        combine_kernel,
        (num_tiles(len(x), len(y), tile_t), triton.cdiv(x.shape[1], tile_c)),
        x,
        y,
        offsets,
        z,
        len(y),
        len(x),
        y.shape[1],
        x.shape[1],
        x.stride(),
        y.stride(),
        MULTIPLY=multiply,
        ACCUMULATOR=accumulator(x) if x.is_floating_point() else tl.int64,
        TILE_T=tile_t,
        TILE_C=tile_c,
    )
    return z


class JaggedDenseAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, offsets):
        ctx.save_for_backward(offsets)
        ctx.max_len = y.shape[1]
        return combine(x, y, offsets, multiply=False)

    @staticmethod
    def backward(ctx, grad_z):
        (offsets,) = ctx.saved_tensors
        # With no padded rows, only what is outside the sequences changes.
        nothing = grad_z.new_empty(len(offsets) - 1, 0, grad_z.shape[1])
        grad_x = JaggedDenseAdd.apply(grad_z, nothing, offsets)
        grad_y = padded.JaggedToPadded.apply(grad_z, offsets, ctx.max_len, 0.0)
        return grad_x, grad_y, None


def jagged_dense_add(x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """z_b[i] = x_b[i] + y[b, i] for x [T, ...] and y [B, M, ...], x_b[i] alone from M on."""
    (check if x.is_floating_point() else check_place)("jagged_dense_add", x=x, y=y, offsets=offsets)
    if x.dtype is torch.bool:  # one of the two is enough
        return jagged_dense_add(x.view(torch.uint8), y.view(torch.uint8), offsets).bool()
    columns = x.shape[1:].numel()
    flat = x.reshape(len(x), columns), y.reshape(*y.shape[:2], columns)
    return JaggedDenseAdd.apply(*flat, offsets.contiguous()).reshape(x.shape)
