"""Each row of a sequence gets what the sequence has."""

import torch
import triton
import triton.language as tl

from . import jagged_sum as inverse
from .common import check, check_offsets, check_values, find_tile, load_rows, num_tiles

BLOCK_ELEMS = 1024


@triton.jit(do_not_specialize=["num_seqs", "total"])
def jagged_broadcast_kernel(
    p_x,  # [B, C]
    p_offsets,  # [B + 1]
    p_z,  # [T, C], contiguous
    num_seqs,
    total,
    C,
    stride_xb,
    stride_xc,
    TILE_T: tl.constexpr,
    TILE_C: tl.constexpr,
):
    i_seq, first_row = find_tile(p_offsets, tl.program_id(0), num_seqs, total, TILE_T)
    in_sequence = (i_seq >= 0) & (i_seq < num_seqs)
    _, end = load_rows(p_offsets, i_seq, num_seqs, total)
    o_t = first_row + tl.arange(0, TILE_T)  # int64
    o_c = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    m_c = o_c < C
    # [TILE_C]
    p_row = p_x + i_seq.to(tl.int64) * stride_xb
    b_x = tl.load(p_row + o_c * stride_xc, mask=m_c & in_sequence, other=0.0)
    b_z = tl.broadcast_to(b_x[None, :], (TILE_T, TILE_C))
    tl.store(p_z + o_t[:, None] * C + o_c[None, :], b_z, mask=(o_t < end)[:, None] & m_c[None, :])


class JaggedBroadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, offsets, total):
        ctx.save_for_backward(offsets)
        z = x.new_empty(total, x.shape[1])
        if z.numel() > 0:
            tile_c = min(64, triton.next_power_of_2(x.shape[1]))
            tile_t = BLOCK_ELEMS // tile_c
            grid = (num_tiles(total, len(x), tile_t), triton.cdiv(x.shape[1], tile_c))
            with torch.cuda.device_of(x):
                jagged_broadcast_kernel[grid](
                    x,
                    offsets,
                    z,
                    len(x),
                    total,
                    x.shape[1],
                    *x.stride(),
                    TILE_T=tile_t,
                    TILE_C=tile_c,
                )
        return z

    @staticmethod
    def backward(ctx, grad_z):
        (offsets,) = ctx.saved_tensors
        return inverse.JaggedSum.apply(grad_z, offsets, False), None, None


def jagged_broadcast(
    x: torch.Tensor, offsets: torch.Tensor, *, total: int | None = None
) -> torch.Tensor:
    """z_b[i] = x[b] for x [B, ...]: [total, ...], zeros outside the sequences.

    None reads total from the offsets.
    """
    op = "jagged_broadcast"
    check_values(op, x=x)
    check_offsets(op, offsets, x)
    fits = x.dim() >= 1 and len(x) == len(offsets) - 1
    check(op, fits, "x", f"[{len(offsets) - 1}, ...]", list(x.shape))
    total = int(offsets[-1]) if total is None else total
    columns = x.reshape(len(x), x.shape[1:].numel())
    return JaggedBroadcast.apply(columns, offsets.contiguous(), total).reshape(total, *x.shape[1:])
