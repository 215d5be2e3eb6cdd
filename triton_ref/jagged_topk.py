"""Which rows of each sequence are its best."""

import torch
import triton
import triton.language as tl

from .common import check, check_place, counts_of, launch, load_rows

TILE_T = 256


@triton.jit
def load_keys(p_score, o_t, m_t, BITS: tl.constexpr, KEY: tl.constexpr):
    """Scores as integers of the same order, NaN the least: [TILE_T]."""
    # [TILE_T]
    b_score = tl.load(p_score + o_t, mask=m_t, other=0.0)
    if p_score.dtype.element_ty.is_int():
        return b_score
    if BITS == 32:
        b_score = b_score.to(tl.float32)
    b_bits = b_score.to(KEY, bitcast=True)
    lowest = -(2 ** (BITS - 1))
    # A negative number grows as its size falls; -0 is 0.
    b_key = tl.where(b_bits < 0, b_bits ^ (2 ** (BITS - 1) - 1), b_bits)
    b_key = tl.where(b_score == 0, 0, b_key)
    return tl.where(b_score != b_score, lowest, b_key).to(tl.int64)


@triton.jit(do_not_specialize=["num_seqs", "total"])
def jagged_topk_kernel(
    p_score,  # [T]
    p_offsets,  # [B + 1]
    p_k,  # [B]
    p_keep,  # [T]
    num_seqs,
    total,
    BITS: tl.constexpr,
    KEY: tl.constexpr,
    TILE_T: tl.constexpr,
):
    i_seq = tl.program_id(0) - 1
    in_sequence = (i_seq >= 0) & (i_seq < num_seqs)
    begin, end = load_rows(p_offsets, i_seq, num_seqs, total)
    k = tl.load(p_k + i_seq, mask=in_sequence, other=0).to(tl.int64)
    k = tl.minimum(tl.maximum(k, 0), end - begin)
    # The k-th largest key: the largest number that k keys reach, found bit by bit.
    threshold = tl.full([], -(2 ** (BITS - 1)), tl.int64)
    for i_bit in range(BITS):
        # The highest bit is the sign's.
        step = tl.full([], 1, tl.int64) << (BITS - 1 - i_bit)
        tried = threshold + step
        reached = tl.full([], 0, tl.int64)
        for first_row in range(begin, end, TILE_T):
            o_t = first_row + tl.arange(0, TILE_T)  # int64
            b_key = load_keys(p_score, o_t, o_t < end, BITS, KEY)
            reached += tl.sum(((b_key >= tried) & (o_t < end)).to(tl.int64))
        threshold = tl.where(reached >= k, tried, threshold)
    above = tl.full([], 0, tl.int64)
    for first_row in range(begin, end, TILE_T):
        o_t = first_row + tl.arange(0, TILE_T)
        b_key = load_keys(p_score, o_t, o_t < end, BITS, KEY)
        above += tl.sum(((b_key > threshold) & (o_t < end)).to(tl.int64))
    # Of the rows that equal it the last ones, counted from the end.
    later = tl.full([], 0, tl.int64)
    for i_tile in range(0, tl.cdiv(end - begin, TILE_T)):
        o_t = end - 1 - i_tile * TILE_T - tl.arange(0, TILE_T)
        m_t = o_t >= begin
        b_key = load_keys(p_score, o_t, m_t, BITS, KEY)
        b_equal = ((b_key == threshold) & m_t).to(tl.int64)
        b_rank = later + tl.cumsum(b_equal)
        b_keep = (b_key > threshold) | ((b_equal > 0) & (b_rank <= k - above))
        b_keep = b_keep & (k > 0) & in_sequence
        tl.store(p_keep + o_t, b_keep.to(tl.int8), mask=m_t)
        later += tl.sum(b_equal)


def jagged_topk(score: torch.Tensor, offsets: torch.Tensor, k: int | torch.Tensor) -> torch.Tensor:
    """Whether each row of score [T] is among the k best of its sequence: [T] bool."""
    each, same = counts_of(k)
    is_number = score.is_floating_point()
    (check if is_number else check_place)(
        "jagged_topk", score=score, offsets=offsets, k=each, same_k=same
    )
    score = score if is_number else score.long()
    num_seqs, wide = len(offsets) - 1, score.element_size() == 8
    keep = score.new_empty(len(score), dtype=torch.int8)
    launch(
        jagged_topk_kernel,
        (num_seqs + 2,),
        score.detach().contiguous(),
        offsets.contiguous(),
        offsets.new_full((num_seqs,), same) if each is None else each.contiguous(),
        keep,
        num_seqs,
        len(score),
        BITS=64 if wide else 32,
        KEY=tl.int64 if wide else tl.int32,
        TILE_T=TILE_T,
    )
    return keep.bool()
