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
    for rows outside every sequence.
    """
    i_seq, first = find_tile(p_offsets, tl.program_id(0), num_seqs, total, TILE)
    begin, end = load_rows(p_offsets, i_seq, num_seqs, total)
    other_begin, other_end = load_rows(p_other_offsets, i_seq, num_seqs, other_total)
    in_sequence = (i_seq >= 0) & (i_seq < num_seqs)
    other_len = tl.where(in_sequence, other_end - other_begin, 0).to(tl.int32)
    return (first - begin).to(tl.int32), begin, (end - begin).to(tl.int32), other_begin, other_len


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
    scale,
    SILU: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """P and dS, zeros where masked: [M, N] both. With SILU b_delta is the rows' weight."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=INPUT_PRECISION) * scale
    if SILU:
        b_gate = tl.sigmoid(b_s)
        b_grad_w = tl.dot(b_grad_out, tl.trans(b_v), input_precision=INPUT_PRECISION)
        b_slope = b_gate * (1.0 + b_s * (1.0 - b_gate))
        b_w = tl.where(m_s, b_delta[:, None] * (b_s * b_gate), 0.0)
        return b_w, tl.where(m_s, b_delta[:, None] * b_slope * b_grad_w, 0.0)
    # Where masked, p may be inf (no LSE to hold it down) and delta may be NaN.
    b_p = tl.where(m_s, tl.exp(b_s - b_lse[:, None]), 0.0)
    b_grad_p = tl.dot(b_grad_out, tl.trans(b_v), input_precision=INPUT_PRECISION)
    return b_p, tl.where(m_s, b_p * (b_grad_p - b_delta[:, None]), 0.0)


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
