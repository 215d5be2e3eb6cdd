"""Rows by their numbers, zeros for -1."""

import torch
import triton
import triton.language as tl

from .common import accumulator_type, check_place, launch, load_block, store_block, tile_of

# Rows are moved as bits, whatever they mean: by the size of an element.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit(do_not_specialize=["num_rows", "total"])
def jagged_take_kernel(
    p_x,  # [T, C]
    p_index,  # [N]
    p_z,  # [N, C], contiguous
    num_rows,
    total,
    C,
    x_strides,
    TILE_T: tl.constexpr,
    TILE_C: tl.constexpr,
):
    o_t = tl.program_id(0).to(tl.int64) * TILE_T + tl.arange(0, TILE_T)
    o_c = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    m_t = o_t < num_rows
    m_c = o_c < C
    # [TILE_T]
    b_index = tl.load(p_index + o_t, mask=m_t, other=-1)
    m_x = (b_index >= 0) & (b_index < total)
    # [TILE_T, TILE_C]
    b_x = load_block(p_x, x_strides, b_index, o_c, m_x, m_c)
    store_block(p_z, b_x, o_t, o_c, m_t, m_c, C)


class JaggedTake(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        ctx.total = len(x)
        z = x.new_empty(len(index), x.shape[1])
        tile_t, tile_c = tile_of(x.shape[1], widest=64)
        launch(
            jagged_take_kernel,
            (triton.cdiv(len(index), tile_t), triton.cdiv(x.shape[1], tile_c)),
            x.view(BITS[x.element_size()]),
            index,
            z.view(BITS[x.element_size()]),
            len(index),
            len(x),
            x.shape[1],
            x.stride(),
            TILE_T=tile_t,
            TILE_C=tile_c,
        )
        return z

    @staticmethod
    def backward(ctx, grad_z):
        (index,) = ctx.saved_tensors
        # What took no row is added to one row too many.
        places = index.where((index >= 0) & (index < ctx.total), ctx.total)
        sums = grad_z.new_zeros(ctx.total + 1, grad_z.shape[1], dtype=accumulator_type(grad_z))
        return sums.index_add(0, places, grad_z.to(sums.dtype))[:-1].to(grad_z.dtype), None


def jagged_take(x: torch.Tensor, index: torch.Tensor, *, unique: bool = False) -> torch.Tensor:
    """z[i] = x[index[i]] for x [T, ...] of any dtype, zeros where index is -1.

    Gradients are summed whatever unique promises.
    """
    check_place("jagged_take", x=x, index=index)
    columns = x.reshape(len(x), x.shape[1:].numel())
    z = JaggedTake.apply(columns, index.contiguous())
    return z.reshape(len(index), *x.shape[1:])


def move(xs, index, offsets, total):
    """The rows of a plan, of one tensor or of each, and the offsets; total None: as it needs."""
    index = index[: int(offsets[-1])] if total is None else index
    ys = (
        jagged_take(xs, index)
        if isinstance(xs, torch.Tensor)
        else [jagged_take(x, index) for x in xs]
    )
    return ys, offsets
