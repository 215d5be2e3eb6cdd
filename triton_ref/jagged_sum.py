"""The sum over the rows of each sequence, or their mean."""

import torch
import triton
import triton.language as tl

from . import jagged_broadcast as inverse
from .common import (
    accumulator,
    accumulator_type,
    check,
    launch,
    load_block,
    load_rows,
    tile_of,
)


@triton.jit(do_not_specialize=["num_seqs", "total"])
def jagged_sum_kernel(
    p_x,  # [T, C]
    p_offsets,  # [B + 1]
    p_z,  # [B, C], contiguous
    num_seqs,
    total,
    C,
    x_strides,
    MEAN: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_C: tl.constexpr,
):
    i_seq = tl.program_id(0)
    begin, end = load_rows(p_offsets, i_seq, num_seqs, total)
    o_c = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    m_c = o_c < C
    b_sum = tl.zeros([TILE_C], dtype=ACCUMULATOR)
    for first_row in range(begin, end, TILE_T):
        o_t = first_row + tl.arange(0, TILE_T)  # int64
        # [TILE_T, TILE_C]
        b_x = load_block(p_x, x_strides, o_t, o_c, o_t < end, m_c)
        b_sum += tl.sum(b_x.to(ACCUMULATOR), 0)
    if MEAN:
        b_sum = b_sum / tl.maximum(end - begin, 1).to(ACCUMULATOR)
    p_row = p_z + i_seq.to(tl.int64) * C
    tl.store(p_row + o_c, b_sum.to(p_z.dtype.element_ty), mask=m_c)


class JaggedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, offsets, mean):
        ctx.save_for_backward(offsets)
        ctx.total, ctx.mean = len(x), mean
        num_seqs = len(offsets) - 1
        z = x.new_empty(num_seqs, x.shape[1])
        tile_t, tile_c = tile_of(x.shape[1])
        launch(
            jagged_sum_kernel,
            (num_seqs, triton.cdiv(x.shape[1], tile_c)),
            x,
            offsets,
            z,
            num_seqs,
            *x.shape,
            x.stride(),
            MEAN=mean,
            ACCUMULATOR=accumulator(x),
            TILE_T=tile_t,
            TILE_C=tile_c,
        )
        return z

    @staticmethod
    def backward(ctx, grad_z):
        (offsets,) = ctx.saved_tensors
        if ctx.mean:
            lengths = offsets.diff().clamp(min=1)[:, None].to(accumulator_type(grad_z))
            grad_z = (grad_z.to(lengths.dtype) / lengths).to(grad_z.dtype)
        return inverse.JaggedBroadcast.apply(grad_z, offsets, ctx.total), None, None


def sum_rows(op: str, x: torch.Tensor, offsets: torch.Tensor, mean: bool) -> torch.Tensor:
    check(op, x=x, offsets=offsets)
    columns = x.reshape(len(x), x.shape[1:].numel())
    z = JaggedSum.apply(columns, offsets.contiguous(), mean)
    return z.reshape(len(offsets) - 1, *x.shape[1:])


def jagged_sum(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """z[b] = x_b.sum(0) for x [T, ...], accumulated in fp32."""
    return sum_rows("jagged_sum", x, offsets, mean=False)
