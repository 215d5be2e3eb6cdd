"""Where the sessions of each sequence begin."""

import torch
import triton
import triton.language as tl

from .common import check, check_place, find_tile, launch, load_rows, num_tiles

TILE_T = 256
MOST = tl.constexpr(2**63 - 1)


@triton.jit(do_not_specialize=["num_seqs", "total"])
def mark_starts_kernel(
    p_time,  # [T]
    p_offsets,  # [B + 1]
    p_start,  # [T]
    p_gap,  # [1]
    num_seqs,
    total,
    HUGE_GAP: tl.constexpr,
    TILE_T: tl.constexpr,
):
    i_seq, first_row = find_tile(p_offsets, tl.program_id(0), num_seqs, total, TILE_T)
    in_sequence = (i_seq >= 0) & (i_seq < num_seqs)
    begin, end = load_rows(p_offsets, i_seq, num_seqs, total)
    o_t = first_row + tl.arange(0, TILE_T)  # int64
    m_t = o_t < end
    # [TILE_T]
    b_time = tl.load(p_time + o_t, mask=m_t, other=0.0)
    # [TILE_T]
    b_before = tl.load(p_time + o_t - 1, mask=m_t & (o_t > begin), other=0.0)
    gap = tl.load(p_gap)
    if p_time.dtype.element_ty.is_int():
        # Where time rises, a difference below 0 has wrapped around: it is 2^63 and its other bits.
        b_rise = b_time - b_before
        if HUGE_GAP:
            b_rises = (b_rise < 0) & ((b_rise & MOST) > gap)
        else:
            b_rises = (b_rise < 0) | (b_rise > gap)
        b_rises = b_rises & (b_time > b_before)
    else:
        b_rises = b_time.to(tl.float64) - b_before.to(tl.float64) > gap
    b_start = ((o_t == begin) | b_rises) & in_sequence
    tl.store(p_start + o_t, b_start.to(tl.int64), mask=m_t)


@triton.jit(do_not_specialize=["total", "sessions"])
def write_starts_kernel(
    p_start,  # [T]
    p_number,  # [T], inclusive sums of them
    p_session_offsets,  # [sessions + 1]
    total,
    sessions,
    TILE_T: tl.constexpr,
):
    o_t = tl.program_id(0).to(tl.int64) * TILE_T + tl.arange(0, TILE_T)
    m_t = o_t < total
    b_start = tl.load(p_start + o_t, mask=m_t, other=0)
    b_session = tl.load(p_number + o_t, mask=m_t, other=1) - 1
    b_row = o_t.to(p_session_offsets.dtype.element_ty)
    tl.store(p_session_offsets + b_session, b_row, mask=(b_start > 0) & (b_session <= sessions))


def jagged_sessionize(
    time: torch.Tensor, offsets: torch.Tensor, gap: float, *, sessions: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets of sessions [sessions + 1], and the first session of each sequence [B + 1].

    None reads how many sessions there are.
    """
    capacity = len(time) if sessions is None else sessions
    is_number = time.is_floating_point()
    (check if is_number else check_place)(
        "jagged_sessionize", time=time, offsets=offsets, sessions=capacity
    )
    time, offsets = time.detach().contiguous(), offsets.contiguous()
    num_seqs, total = len(offsets) - 1, len(time)
    start = offsets.new_empty(total, dtype=torch.int64)
    tiles = num_tiles(total, num_seqs, TILE_T)
    # A tensor: a number would be passed in fp32. Differences of integers are compared as integers.
    is_huge = not is_number and gap > MOST.value
    if is_number:
        limit = torch.full((1,), gap, dtype=torch.float64, device=time.device)
    else:
        time, whole = time.long(), int(min(gap, 2.0**64)) - (2**63 if is_huge else 0)
        limit = torch.full((1,), min(whole, MOST.value), device=time.device)
    launch(
        mark_starts_kernel,
        (tiles,),
        time,
        offsets,
        start,
        limit,
        num_seqs,
        total,
        HUGE_GAP=is_huge,
        TILE_T=TILE_T,
    )
    number = start.cumsum(0)
    ends = offsets[-1:].clamp(0, total)
    session_offsets = ends.repeat(capacity + 1)
    grid = (triton.cdiv(total, TILE_T),)
    launch(
        write_starts_kernel, grid, start, number, session_offsets, total, capacity, TILE_T=TILE_T
    )
    before = torch.cat([number.new_zeros(1), number])[offsets.clamp(0, total).long()]
    first_session = before.clamp(max=capacity).to(offsets.dtype)
    if sessions is None:
        session_offsets = session_offsets[: int(first_session[-1]) + 1]
    return session_offsets, first_session
