"""The rows of padded sequences one after another."""

import torch
import triton
import triton.language as tl

from . import jagged_to_padded as inverse
from .common import (
    check,
    find_tile,
    launch,
    load_block,
    load_rows,
    num_tiles,
    store_block,
    tile_of,
)


@triton.jit(do_not_specialize=["num_seqs", "total", "max_len"])
def padded_to_jagged_kernel(
    p_x,  # [B, M, C]
    p_offsets,  # [B + 1]
    p_z,  # [T, C], contiguous
    num_seqs,
    total,
    max_len,
    C,
    x_strides,
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
    m_x = m_t & (o_m < max_len) & in_sequence
    p_rows = p_x + i_seq.to(tl.int64) * x_strides[0]
    # [TILE_T, TILE_C]
    b_x = load_block(p_rows, (x_strides[1], x_strides[2]), o_m, o_c, m_x, m_c)
    store_block(p_z, b_x, o_t, o_c, m_t, m_c, C)


def take_rows(x: torch.Tensor, offsets: torch.Tensor, total: int) -> torch.Tensor:
    """[total, C] of x [B, M, C]"""
    z = x.new_empty(total, x.shape[2])
    tile_t, tile_c = tile_of(x.shape[2], widest=64)
    launch(
        padded_to_jagged_kernel,
        (num_tiles(total, len(x), tile_t), triton.cdiv(x.shape[2], tile_c)),
        x,
        offsets,
        z,
        len(x),
        total,
        *x.shape[1:],
        x.stride(),
        TILE_T=tile_t,
        TILE_C=tile_c,
    )
    return z


class PaddedToJagged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, offsets, total):
        ctx.save_for_backward(offsets)
        ctx.max_len = x.shape[1]
        return take_rows(x, offsets, total)

    @staticmethod
    def backward(ctx, grad_z):
        (offsets,) = ctx.saved_tensors
        return inverse.JaggedToPadded.apply(grad_z, offsets, ctx.max_len, 0.0), None, None


def padded_to_jagged(
    x: torch.Tensor, offsets: torch.Tensor, *, total: int | None = None
) -> torch.Tensor:
    """z_b[i] = x[b, i] for x [B, M, ...]: [total, ...], zeros outside the sequences and beyond M.

    None reads total from the offsets.
    """
    check("padded_to_jagged", x=x, offsets=offsets, total=total)
    total = int(offsets[-1]) if total is None else total
    columns = x.reshape(*x.shape[:2], x.shape[2:].numel())
    return PaddedToJagged.apply(columns, offsets.contiguous(), total).reshape(total, *x.shape[2:])
