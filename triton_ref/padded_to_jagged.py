"""The rows of padded sequences one after another."""

import torch
import triton
import triton.language as tl

from . import jagged_to_padded as inverse
from .common import check, find_tile, load_rows, num_tiles

BLOCK_ELEMS = 1024


@triton.jit(do_not_specialize=["num_seqs", "total", "max_len"])
def padded_to_jagged_kernel(
    p_x,  # [B, M, C]
    p_offsets,  # [B + 1]
    p_z,  # [T, C], contiguous
    num_seqs,
    total,
    max_len,
    C,
    stride_xb,
    stride_xm,
    stride_xc,
    TILE_T: tl.constexpr,
    TILE_C: tl.constexpr,
):
    i_seq, first_row = find_tile(p_offsets, tl.program_id(0), num_seqs, total, TILE_T)
    in_sequence = (i_seq >= 0) & (i_seq < num_seqs)
    begin, end = load_rows(p_offsets, i_seq, num_seqs, total)
    o_t = first_row + tl.arange(0, TILE_T)  # int64
    o_c = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    m_z = (o_t < end)[:, None] & (o_c < C)[None, :]
    o_m = o_t - begin
    m_x = m_z & ((o_m < max_len) & in_sequence)[:, None]
    # [TILE_T, TILE_C]
    p_tile = p_x + i_seq.to(tl.int64) * stride_xb
    b_x = tl.load(p_tile + o_m[:, None] * stride_xm + o_c[None, :] * stride_xc, mask=m_x, other=0.0)
    tl.store(p_z + o_t[:, None] * C + o_c[None, :], b_x, mask=m_z)


def take_rows(x: torch.Tensor, offsets: torch.Tensor, total: int) -> torch.Tensor:
    """[total, C] of x [B, M, C]"""
    z = x.new_empty(total, x.shape[2])
    if z.numel() > 0:
        tile_c = min(64, triton.next_power_of_2(x.shape[2]))
        tile_t = BLOCK_ELEMS // tile_c
        grid = (num_tiles(total, len(x), tile_t), triton.cdiv(x.shape[2], tile_c))
        with torch.cuda.device_of(x):
            padded_to_jagged_kernel[grid](
                x,
                offsets,
                z,
                len(x),
                total,
                x.shape[1],
                x.shape[2],
                *x.stride(),
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
