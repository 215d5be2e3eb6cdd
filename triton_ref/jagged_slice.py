"""A range of the rows of each sequence."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from jagged_cuda.ops import _contract

from .common import launch
from .jagged_take import move

TILE_T = tl.constexpr(128)


@triton.jit(do_not_specialize=["total"])
def fill_index_kernel(
    p_begins,  # [ranges]: in the source
    p_ends,  # [ranges + 1]: in the result
    p_index,  # [total]
    total,
):
    i_range = tl.program_id(0)
    begin = tl.load(p_begins + i_range)
    first = tl.load(p_ends + i_range)
    end = tl.minimum(tl.load(p_ends + i_range + 1), total)
    for first_row in range(first, end, TILE_T):
        o_t = first_row + tl.arange(0, TILE_T)  # int64
        tl.store(p_index + o_t, begin + o_t - first, mask=o_t < end)


def move_ranges(xs, begins, lengths, offsets_dtype, total):
    """Rows begins[i] to begins[i] + lengths[i] of xs, for one i after another."""
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    capacity = int(ends[-1]) if total is None else total
    index = begins.new_full((capacity,), -1)
    launch(fill_index_kernel, (len(begins),), begins, ends, index, capacity)
    return move(xs, index, ends.clamp(max=capacity).to(offsets_dtype), total)


def rows_of(xs: torch.Tensor | Sequence[torch.Tensor]) -> int:
    return len(xs if isinstance(xs, torch.Tensor) else xs[0])


def slice_rows(xs, offsets, begin, length, total, from_end=False):
    """length rows from begin on, from_end: before begin rows at the end; cut to what is there."""
    rows = rows_of(xs)
    _contract.check("jagged_slice", offsets=offsets, rows=rows, total=total or 0)
    bounds = offsets.clamp(0, rows).long()
    lengths = bounds.diff().clamp(min=0)
    first = torch.minimum(lengths, torch.zeros_like(lengths) + begin)
    taken = lengths - first
    if length is not None:
        taken = torch.minimum(taken, torch.zeros_like(lengths) + length)
    first = lengths - first - taken if from_end else first
    return move_ranges(xs, bounds[:-1] + first, taken, offsets.dtype, total)


def jagged_slice(
    xs: torch.Tensor | Sequence[torch.Tensor],
    offsets: torch.Tensor,
    begin: int | torch.Tensor = 0,
    length: int | torch.Tensor | None = None,
    *,
    total: int | None = None,
):
    """z_b = x_b[begin : begin + length] for xs [T, ...], and the offsets; an int or [B] each."""
    return slice_rows(xs, offsets, begin, length, total)
