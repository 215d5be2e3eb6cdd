"""Jagged rows as a padded tensor."""

import torch
import triton
import triton.language as tl

from . import padded_to_jagged as inverse
from .common import check, launch, load_rows, tile_of


@triton.jit(do_not_specialize=["num_seqs", "total", "max_len"])
def jagged_to_padded_kernel(
    p_x,  # [T, C]
    p_offsets,  # [B + 1]
    p_z,  # [B, M, C], contiguous
    num_seqs,
    total,
    max_len,
    C,
    x_strides,
    fill,
    TILE_M: tl.constexpr,
    TILE_C: tl.constexpr,
):
    i_seq = tl.program_id(0)
    begin, end = load_rows(p_offsets, i_seq, num_seqs, total)
    o_m = tl.program_id(1).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    o_c = tl.program_id(2) * TILE_C + tl.arange(0, TILE_C)
    m_z = (o_m < max_len)[:, None] & (o_c < C)[None, :]
    m_x = m_z & (o_m < end - begin)[:, None]
    # [TILE_M, TILE_C]
    p_tile = p_x + (begin + o_m)[:, None] * x_strides[0] + o_c[None, :] * x_strides[1]
    b_x = tl.load(p_tile, mask=m_x, other=0.0)
    b_z = tl.where(m_x, b_x, fill).to(p_z.dtype.element_ty)
    o_z = (i_seq.to(tl.int64) * max_len + o_m)[:, None] * C + o_c[None, :]
    tl.store(p_z + o_z, b_z, mask=m_z)


class JaggedToPadded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, offsets, max_len, fill):
        ctx.save_for_backward(offsets)
        ctx.total = len(x)
        num_seqs = len(offsets) - 1
        z = x.new_empty(num_seqs, max_len, x.shape[1])
        tile_m, tile_c = tile_of(x.shape[1], widest=64)
        launch(
            jagged_to_padded_kernel,
            (num_seqs, triton.cdiv(max_len, tile_m), triton.cdiv(x.shape[1], tile_c)),
            x,
            offsets,
            z,
            num_seqs,
            len(x),
            max_len,
            x.shape[1],
            x.stride(),
            fill,
            TILE_M=tile_m,
            TILE_C=tile_c,
        )
        return z

    @staticmethod
    def backward(ctx, grad_z):
        (offsets,) = ctx.saved_tensors
        return inverse.PaddedToJagged.apply(grad_z, offsets, ctx.total), None, None, None


def jagged_to_padded(
    x: torch.Tensor, offsets: torch.Tensor, max_len: int, *, fill: float = 0.0
) -> torch.Tensor:
    """z[b, i] = x_b[i] for x [T, ...]: [B, max_len, ...], with `fill` where b has no row i."""
    check("jagged_to_padded", x=x, offsets=offsets, max_len=max_len)
    columns = x.reshape(len(x), x.shape[1:].numel())
    z = JaggedToPadded.apply(columns, offsets.contiguous(), max_len, float(fill))
    return z.reshape(len(offsets) - 1, max_len, *x.shape[1:])
