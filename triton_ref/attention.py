"""Shared by the attention kernels: the online softmax, P and dS recomputed, and tiles."""

import torch
import triton
import triton.language as tl

from .common import (
    EXACT_PRODUCTS,
    accumulator,
    find_tile,
    load_block,
    load_rows,
    store_block,
)


@triton.jit
def find_rows(p_offsets, p_other_offsets, num_seqs, total, other_total, TILE):
    """The first row of this program's tile within its sequence, and where the sequence begins.

    With its length, and begin and length of the same sequence's rows in the other tensor: length 0
    for rows outside every sequence. Then its number, -1 for those.
    """
    i_seq, first = find_tile(p_offsets, tl.program_id(0), num_seqs, total, TILE)
    begin, end = load_rows(p_offsets, i_seq, num_seqs, total)
    other_begin, other_end = load_rows(p_other_offsets, i_seq, num_seqs, other_total)
    in_sequence = (i_seq >= 0) & (i_seq < num_seqs)
    other_len = tl.where(in_sequence, other_end - other_begin, 0).to(tl.int32)
    length = (end - begin).to(tl.int32)
    i_inside = tl.where(in_sequence, i_seq, -1)
    return (first - begin).to(tl.int32), begin, length, other_begin, other_len, i_inside


@triton.jit
def used_keys(p_kv_lengths, i_seq, len_k):
    """The used part of a sequence's keys, out of len_k."""
    if p_kv_lengths is not None:
        used = tl.load(p_kv_lengths + i_seq, mask=i_seq >= 0, other=0)
        len_k = tl.minimum(tl.maximum(used, 0), len_k).to(tl.int32)
    return len_k


@triton.jit
def time_buckets(time, o_q, o_k, m_q, m_k):
    """How many boundaries are at most the distance in time of rows [M] and keys [N]: [M, N]."""
    _, _, buckets, p_q_time, p_kv_time, p_boundaries, symmetric = time
    # [M]
    b_q = tl.load(p_q_time + o_q, mask=m_q, other=0)
    # [N]
    b_k = tl.load(p_kv_time + o_k, mask=m_k, other=0)
    b_away = b_q[:, None] - b_k[None, :]
    b_away = tl.where(symmetric != 0, tl.abs(b_away), tl.maximum(b_away, 0))
    b_bucket = (b_away * 0).to(tl.int32)
    for i in range(buckets - 1):
        b_bucket += (tl.load(p_boundaries + i) <= b_away).to(tl.int32)
    return b_bucket


@triton.jit
def position_buckets(position, b_distance):
    """Of the distance in rows: [M, N]."""
    _, _, buckets, first = position
    return tl.minimum(tl.maximum(b_distance.to(tl.int64) - first, 0), buckets - 1).to(tl.int32)


@triton.jit
def bias_of(key, time, position, i_head, num_heads, o_q, o_k, m_q, m_k, b_distance, b_zeros):
    """What is added to the logits of rows [M] and keys [N] of the tensors: [M, N]."""
    b_bias = b_zeros
    if key is not None:
        p_bias, heads = key
        # [N]
        b_key = tl.load(p_bias + o_k * heads + i_head // (num_heads // heads), mask=m_k, other=0.0)
        b_bias += b_key[None, :]
    if time is not None:
        p_table, heads, buckets = time[0], time[1], time[2]
        p_row = p_table + i_head // (num_heads // heads) * buckets
        # [M, N]
        b_bias += tl.load(p_row + time_buckets(time, o_q, o_k, m_q, m_k))
    if position is not None:
        p_table, heads, buckets = position[0], position[1], position[2]
        p_row = p_table + i_head // (num_heads // heads) * buckets
        # [M, N]
        b_bias += tl.load(p_row + position_buckets(position, b_distance))
    return b_bias


@triton.jit
def visible_range(first, len_rows, len_others, before, after, TILE):
    """First and end of the rows of the other tensor that see, or are seen by, those of the tile."""
    shift = len_others - len_rows
    last = tl.minimum(first + TILE, len_rows) - 1
    return tl.maximum(first + shift - before, 0), tl.minimum(last + shift + after + 1, len_others)


@triton.jit
def load_head(p_x, strides, i_head, o_row, m_row, D, BLOCK_D: tl.constexpr):
    """Rows of one head of x [T, H, D], zeros where masked: [rows, BLOCK_D]."""
    o_d = tl.arange(0, BLOCK_D)
    strides_of_head = (strides[0], strides[2])
    return load_block(p_x + i_head * strides[1], strides_of_head, o_row, o_d, m_row, o_d < D)


@triton.jit
def store_head(p_z, b_z, o_row, m_row, D, BLOCK_D: tl.constexpr):
    """Rows of z [T * H, D], contiguous."""
    o_d = tl.arange(0, BLOCK_D)
    store_block(p_z, b_z, o_row, o_d, m_row, o_d < D, D)


@triton.jit
def add_keys(b_s, b_v, b_max, b_sum, b_out, INPUT_PRECISION: tl.constexpr):
    """The online softmax's state [M], [M], [M, Dv] after keys of logits [M, N], -inf if masked."""
    b_max_new = tl.maximum(b_max, tl.max(b_s, 1))
    # While a row has seen nothing, -inf - -inf would be NaN.
    b_shift = tl.where(b_max_new == float("-inf"), 0.0, b_max_new)
    b_p = tl.exp(b_s - b_shift[:, None])
    b_rescale = tl.exp(b_max - b_shift)
    b_sum = b_sum * b_rescale + tl.sum(b_p, 1)
    b_pv = tl.dot(b_p.to(b_v.dtype), b_v, input_precision=INPUT_PRECISION)
    b_out = b_out * b_rescale[:, None] + b_pv
    return b_max_new, b_sum, b_out


@triton.jit
def end_rows(b_max, b_sum, b_out):
    """Result [M, Dv] and LSE [M] of the state; 0 and -inf for a row that has seen nothing."""
    m_sees = b_max > float("-inf")
    b_sum = tl.where(m_sees, b_sum, 1.0)
    return b_out / b_sum[:, None], tl.where(m_sees, b_max + tl.log(b_sum), float("-inf"))


@triton.jit
def probs_and_grad_logits(
    b_q,
    b_k,
    b_v,
    b_grad_out,
    b_lse,
    b_delta,
    m_s,
    b_bias,
    scale,
    SILU: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """P and dS, zeros where masked: [M, N] both. With SILU b_delta is the rows' weight."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=INPUT_PRECISION) * scale + b_bias
    b_grad_p = tl.dot(b_grad_out, tl.trans(b_v), input_precision=INPUT_PRECISION)
    if SILU:
        b_gate = tl.sigmoid(b_s)
        b_slope = b_gate * (1.0 + b_s * (1.0 - b_gate))
        b_p = tl.where(m_s, b_delta[:, None] * (b_s * b_gate), 0.0)
        b_grad_s = tl.where(m_s, b_delta[:, None] * b_slope * b_grad_p, 0.0)
    else:
        # Where masked, p may be inf (no LSE to hold it down) and delta may be NaN.
        b_p = tl.where(m_s, tl.exp(b_s - b_lse[:, None]), 0.0)
        b_grad_s = tl.where(m_s, b_p * (b_grad_p - b_delta[:, None]), 0.0)
    return b_p, b_grad_s


def plan(q: torch.Tensor, v: torch.Tensor, precision: str) -> dict[str, object]:
    """The sizes that are compiled into the kernels: head dims, tiles, types."""
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    widest = max(head_dim, value_dim)
    # A tile of 64 rows of 128 values of 16 bits is 16 KiB; the backward keeps six or so at once.
    # tl.dot takes 16 rows and more.
    tile = max(16, (128 if widest <= 128 else 64) // q.element_size())
    return {
        "D": head_dim,
        "DV": value_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_DV": max(16, triton.next_power_of_2(value_dim)),
        "TILE": tile,
        "ACCUMULATOR": accumulator(q),
        "INPUT_PRECISION": precision,
        "num_stages": 2,
        **EXACT_PRODUCTS,
    }
