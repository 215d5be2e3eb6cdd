"""The rows of each sequence that a mask keeps."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from jagged_cuda.ops import _contract

from .common import launch
from .jagged_take import move

TILE_T = tl.constexpr(512)


@triton.jit(do_not_specialize=["num_rows"])
def count_kept_kernel(p_keep, p_counts, num_rows):
    o_t = tl.program_id(0).to(tl.int64) * TILE_T + tl.arange(0, TILE_T)
    # [TILE_T]
    b_keep = tl.load(p_keep + o_t, mask=o_t < num_rows, other=0).to(tl.int32)
    tl.store(p_counts + tl.program_id(0), tl.sum(b_keep))


@triton.jit(do_not_specialize=["num_rows", "total"])
def select_kernel(
    p_keep,  # [T]
    p_before,  # [tiles]: rows kept before each tile
    p_index,  # [total]
    p_places,  # [T + 1]: rows kept before each row
    num_rows,
    total,
):
    o_t = tl.program_id(0).to(tl.int64) * TILE_T + tl.arange(0, TILE_T)
    m_t = o_t < num_rows
    # [TILE_T]
    b_keep = tl.load(p_keep + o_t, mask=m_t, other=0).to(tl.int64)
    b_places = tl.load(p_before + tl.program_id(0)) + tl.cumsum(b_keep, 0) - b_keep
    tl.store(p_places + o_t, b_places, mask=o_t <= num_rows)
    tl.store(p_index + b_places, o_t, mask=m_t & (b_keep != 0) & (b_places < total))


def jagged_select(
    xs: torch.Tensor | Sequence[torch.Tensor],
    offsets: torch.Tensor,
    keep: torch.Tensor,
    *,
    total: int | None = None,
):
    """z_b = x_b[keep_b] for xs [T, ...], and the offsets: total rows, None: as many as are kept."""
    num_rows = len(keep)
    capacity = num_rows if total is None else total
    _contract.check("jagged_select", offsets=offsets, keep=keep, total=capacity)
    rows = torch.arange(num_rows, device=keep.device)
    kept = (keep & (rows >= offsets[0]) & (rows < offsets[-1])).to(torch.uint8)
    index = offsets.new_full((capacity,), -1, dtype=torch.int64)
    places = offsets.new_empty(num_rows + 1, dtype=torch.int64)
    tiles = num_rows // TILE_T.value + 1
    counts = offsets.new_empty(tiles, dtype=torch.int32)
    launch(count_kept_kernel, (tiles,), kept, counts, num_rows)
    before = counts.cumsum(0) - counts
    launch(select_kernel, (tiles,), kept, before, index, places, num_rows, capacity)
    planned = places[offsets.clamp(0, num_rows).long()].clamp(max=capacity).to(offsets.dtype)
    return move(xs, index, planned, total)
