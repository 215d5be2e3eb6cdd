"""Where in its sequence each row is."""

import torch
import triton
import triton.language as tl

from .common import check_place, counts_of, find_tile, launch, load_rows, num_tiles

TILE_T = 256


@triton.jit(do_not_specialize=["num_seqs", "total"])
def jagged_positions_kernel(
    p_offsets,  # [B + 1]
    p_targets,  # [B]
    p_z,  # [T]
    num_seqs,
    total,
    FROM_END: tl.constexpr,
    TILE_T: tl.constexpr,
):
    i_seq, first_row = find_tile(p_offsets, tl.program_id(0), num_seqs, total, TILE_T)
    in_sequence = (i_seq >= 0) & (i_seq < num_seqs)
    begin, end = load_rows(p_offsets, i_seq, num_seqs, total)
    targets = tl.load(p_targets + i_seq, mask=in_sequence, other=0).to(tl.int64)
    o_t = first_row + tl.arange(0, TILE_T)  # int64
    history = tl.maximum(end - begin - tl.maximum(targets, 0), 0)
    b_z = tl.minimum(o_t - begin, history)
    if FROM_END:
        b_z = history - b_z
    b_z = tl.where(in_sequence, b_z, 0)
    tl.store(p_z + o_t, b_z.to(tl.int32), mask=o_t < end)


def jagged_positions(
    offsets: torch.Tensor,
    *,
    total: int | None = None,
    from_end: bool = False,
    targets: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """z_b[i] = min(i, L - targets), or L - targets - min(i, L - targets): [total] int32.

    None reads total from the offsets.
    """
    op = "jagged_positions"
    total = int(offsets[-1]) if total is None else total
    each, same = counts_of(targets)
    check_place(op, offsets=offsets, targets=each, total=total, same_targets=same)
    num_seqs = len(offsets) - 1
    z = offsets.new_empty(total, dtype=torch.int32)
    launch(
        jagged_positions_kernel,
        (num_tiles(total, num_seqs, TILE_T),),
        offsets.contiguous(),
        offsets.new_full((num_seqs,), same) if each is None else each.contiguous(),
        z,
        num_seqs,
        total,
        FROM_END=from_end,
        TILE_T=TILE_T,
    )
    return z
