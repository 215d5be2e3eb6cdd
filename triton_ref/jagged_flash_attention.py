"""softmax(scale Q_b K_b^T + mask) V_b for each sequence, without the matrix in between.

With shift = Lk - Lq, row i of a sequence sees key j iff i + shift - left <= j <= i + shift + right.
The backward recomputes P = exp(scale Q K^T - LSE) and, with delta = rowsum(dO * O) - dLSE, follows

    dV = P^T dO,   dS = P * (dO V^T - delta),   dQ = scale dS K,   dK = scale dS^T Q.

jagged_hstu_attention has weight silu(scale Q K^T) in the place of P, and in that of dS weight
silu'(scale Q K^T) * dO V^T.

Rows outside every sequence see nothing, like rows that the mask leaves nothing: output and gradient
0, LSE -inf. Logits stay in natural units, although exp2 with log2(e) in the scale would save a
product: so the largest logit minus the LSE is exact, where large logits lose digits otherwise.
"""

import math

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from .attention import (
    add_keys,
    bias_of,
    end_rows,
    find_rows,
    load_head,
    plan,
    position_buckets,
    probs_and_grad_logits,
    store_head,
    time_buckets,
    used_keys,
    visible_range,
)
from .common import accumulator_type, check, input_precision, launch, num_tiles

RUN_TIME_SIZES = ["num_seqs", "total_q", "total_k", "group_size", "left", "right", "num_ranges"]


@triton.jit
def sees(o_row, o_col, len_q, len_k, left, right, p_ranges, num_ranges):
    """Which of the rows [M] see which of the columns [N]: [M, N].

    p_ranges points to the ranges of the sequence's first row, [Lq, num_ranges, 2], or is None.
    """
    distance = o_col[None, :] - (o_row[:, None] + len_k - len_q)
    inside = (o_row < len_q)[:, None] & (o_col < len_k)[None, :]
    inside = inside & (distance >= -left) & (distance <= right)
    if p_ranges is not None:
        p_range = p_ranges + o_row.to(tl.int64) * num_ranges * 2
        m_row = o_row < len_q
        in_some = inside & (o_col < 0)[None, :]
        for _ in range(num_ranges):
            # [M], both
            b_begin = tl.load(p_range, mask=m_row, other=0)
            b_end = tl.load(p_range + 1, mask=m_row, other=0)
            in_one = (o_col[None, :] >= b_begin[:, None]) & (o_col[None, :] < b_end[:, None])
            in_some = in_some | in_one
            p_range += 2
        inside = inside & in_some
    return inside


@triton.jit
def finite(b_lse, BIASED: tl.constexpr):
    """Of rows all of whose keys a bias hides: their P is 0 then.

    Likewise with a bias where an LSE in float32 is below -2^24, from where on its neighbours are 2
    apart: P would be up to 1 for each key.
    """
    least = -16777216.0 if BIASED and b_lse.dtype != tl.float64 else -3e38
    return tl.where(b_lse < least, 0.0, b_lse)


@triton.jit
def add_to_buckets(p_sums, buckets, b_bucket, b_grad_s, i_head, num_heads):
    """Add dS [M, N] to this program's sums of each bucket."""
    p_row = p_sums + (tl.program_id(0).to(tl.int64) * num_heads + i_head) * buckets
    for i in range(buckets):
        added = tl.sum(tl.sum(tl.where(b_bucket == i, b_grad_s, 0.0), 1), 0)
        tl.store(p_row + i, tl.load(p_row + i) + added)


@triton.jit
def row_weights(p_row_scale, o_row, m_row, divisor, len_k, b_zeros):
    """What the sums of silu(scores) v of rows [M] are multiplied by; divisor 0 is len_k: [M]."""
    b_divisor = b_zeros + tl.where(divisor == 0.0, tl.maximum(len_k, 1).to(b_zeros.dtype), divisor)
    if p_row_scale is None:
        b_factor = b_zeros + 1.0
    else:
        b_factor = tl.load(p_row_scale + o_row, mask=m_row, other=0.0)
    return b_factor / b_divisor


@triton.jit(do_not_specialize=RUN_TIME_SIZES)
def jagged_flash_attention_kernel(
    p_q,  # [Tq, H, D]
    p_k,  # [Tk, G, D]
    p_v,  # [Tk, G, Dv]
    p_offsets,  # [B + 1]
    p_kv_offsets,  # [B + 1]
    p_ranges,  # [Tq, num_ranges, 2], contiguous, or None
    p_row_scale,  # [Tq], contiguous, or None
    p_kv_lengths,  # [B], or None
    key,  # kv_bias [Tk, Hb] and Hb, or None
    time,  # table [Ht, R], Ht, R, q_time [Tq], kv_time [Tk], boundaries [R - 1], symmetric; or None
    position,  # table [Hp, R], Hp, R, first; or None
    p_out,  # [Tq, H, Dv], contiguous
    p_lse,  # [Tq, H], contiguous; None with SILU
    num_seqs,
    total_q,
    total_k,
    group_size,
    left,
    right,
    num_ranges,
    scale,
    divisor,
    q_strides,
    k_strides,
    v_strides,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SILU: tl.constexpr,
    TILE: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    first_row, begin_q, len_q, begin_k, len_k, i_seq = find_rows(
        p_offsets, p_kv_offsets, num_seqs, total_q, total_k, TILE
    )
    len_k = used_keys(p_kv_lengths, i_seq, len_k)
    if p_ranges is not None:
        p_ranges += begin_q * num_ranges * 2
    i_head = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1)
    i_kv_head = i_head // group_size

    o_m = first_row + tl.arange(0, TILE)
    m_m = o_m < len_q
    # [TILE, BLOCK_D]
    b_q = load_head(p_q, q_strides, i_head, begin_q + o_m, m_m, D, BLOCK_D)

    b_max = tl.full([TILE], float("-inf"), dtype=ACCUMULATOR)
    b_sum = tl.zeros([TILE], dtype=ACCUMULATOR)
    b_out = tl.zeros([TILE, BLOCK_DV], dtype=ACCUMULATOR)

    first_key, end_key = visible_range(first_row, len_q, len_k, left, right, TILE)
    for start_n in range(first_key, end_key, TILE):
        o_n = start_n + tl.arange(0, TILE)
        m_n = o_n < len_k
        # [TILE, BLOCK_D]
        b_k = load_head(p_k, k_strides, i_kv_head, begin_k + o_n, m_n, D, BLOCK_D)
        # [TILE, BLOCK_DV]
        b_v = load_head(p_v, v_strides, i_kv_head, begin_k + o_n, m_n, DV, BLOCK_DV)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=INPUT_PRECISION) * scale
        b_s = bias_of(
            *(key, time, position, i_head, num_heads, begin_q + o_m, begin_k + o_n, m_m, m_n),
            *(o_m[:, None] + (len_k - len_q) - o_n[None, :], b_s),
        )
        m_s = sees(o_m, o_n, len_q, len_k, left, right, p_ranges, num_ranges)
        if SILU:
            b_w = tl.where(m_s, b_s * tl.sigmoid(b_s), 0.0)
            b_out += tl.dot(b_w.to(b_v.dtype), b_v, input_precision=INPUT_PRECISION)
        else:
            b_s = tl.where(m_s, b_s, float("-inf"))
            b_max, b_sum, b_out = add_keys(b_s, b_v, b_max, b_sum, b_out, INPUT_PRECISION)

    o_out = (begin_q + o_m) * num_heads + i_head
    if SILU:
        b_weight = row_weights(p_row_scale, begin_q + o_m, m_m, divisor, len_k, b_sum * 0.0)
        b_out *= b_weight[:, None]
    else:
        b_out, b_lse = end_rows(b_max, b_sum, b_out)
        tl.store(p_lse + o_out, b_lse, mask=m_m)
    store_head(p_out, b_out, o_out, m_m, DV, BLOCK_DV)


@triton.jit(do_not_specialize=RUN_TIME_SIZES)
def jagged_flash_attention_backward_dq_kernel(
    p_grad_out,  # [Tq, H, Dv]
    p_grad_lse,  # [Tq, H], contiguous, or None
    p_q,  # [Tq, H, D]
    p_k,  # [Tk, G, D]
    p_v,  # [Tk, G, Dv]
    p_out,  # [Tq, H, Dv], contiguous; None with SILU
    p_lse,  # [Tq, H], contiguous; None with SILU
    p_offsets,  # [B + 1]
    p_kv_offsets,  # [B + 1]
    p_ranges,  # [Tq, num_ranges, 2], contiguous, or None
    p_row_scale,  # [Tq], contiguous, or None
    p_kv_lengths,  # [B], or None
    key,  # kv_bias [Tk, Hb] and Hb, or None
    time,  # table [Ht, R], Ht, R, q_time [Tq], kv_time [Tk], boundaries [R - 1], symmetric; or None
    position,  # table [Hp, R], Hp, R, first; or None
    p_grad_q,  # [Tq, H, D], contiguous
    p_delta,  # [Tq, H], contiguous, written for the other kernel; None with SILU
    p_time_sums,  # with TABLES [tiles, H, R], zeros, which get sums of dS by bucket; or None
    p_position_sums,  # likewise
    num_seqs,
    total_q,
    total_k,
    group_size,
    left,
    right,
    num_ranges,
    scale,
    divisor,
    grad_strides,
    q_strides,
    k_strides,
    v_strides,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SILU: tl.constexpr,
    TABLES: tl.constexpr,
    TILE: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    first_row, begin_q, len_q, begin_k, len_k, i_seq = find_rows(
        p_offsets, p_kv_offsets, num_seqs, total_q, total_k, TILE
    )
    len_k = used_keys(p_kv_lengths, i_seq, len_k)
    if p_ranges is not None:
        p_ranges += begin_q * num_ranges * 2
    i_head = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1)
    i_kv_head = i_head // group_size

    o_m = first_row + tl.arange(0, TILE)
    m_m = o_m < len_q
    o_out = (begin_q + o_m) * num_heads + i_head
    # [TILE, BLOCK_D]
    b_q = load_head(p_q, q_strides, i_head, begin_q + o_m, m_m, D, BLOCK_D)
    # [TILE, BLOCK_DV]
    b_grad_out = load_head(p_grad_out, grad_strides, i_head, begin_q + o_m, m_m, DV, BLOCK_DV)
    if SILU:
        b_zeros = tl.zeros([TILE], dtype=ACCUMULATOR)
        b_delta = row_weights(p_row_scale, begin_q + o_m, m_m, divisor, len_k, b_zeros)
        b_lse = b_zeros
    else:
        # [TILE, BLOCK_DV]
        b_out = load_head(p_out, (DV, 0, 1), 0, o_out, m_m, DV, BLOCK_DV)
        # [TILE]
        BIASED: tl.constexpr = key is not None or time is not None or position is not None
        b_lse = finite(tl.load(p_lse + o_out, mask=m_m, other=0.0), BIASED)
        b_delta = tl.sum(b_out.to(ACCUMULATOR) * b_grad_out.to(ACCUMULATOR), 1)
        if p_grad_lse is not None:
            # [TILE]
            b_delta -= tl.load(p_grad_lse + o_out, mask=m_m, other=0.0)
        tl.store(p_delta + o_out, b_delta, mask=m_m)

    b_grad_q = tl.zeros([TILE, BLOCK_D], dtype=ACCUMULATOR)
    first_key, end_key = visible_range(first_row, len_q, len_k, left, right, TILE)
    for start_n in range(first_key, end_key, TILE):
        o_n = start_n + tl.arange(0, TILE)
        m_n = o_n < len_k
        # [TILE, BLOCK_D]
        b_k = load_head(p_k, k_strides, i_kv_head, begin_k + o_n, m_n, D, BLOCK_D)
        # [TILE, BLOCK_DV]
        b_v = load_head(p_v, v_strides, i_kv_head, begin_k + o_n, m_n, DV, BLOCK_DV)
        m_s = sees(o_m, o_n, len_q, len_k, left, right, p_ranges, num_ranges)
        b_distance = o_m[:, None] + (len_k - len_q) - o_n[None, :]
        b_bias = bias_of(
            *(key, time, position, i_head, num_heads, begin_q + o_m, begin_k + o_n, m_m, m_n),
            *(b_distance, tl.zeros([TILE, TILE], dtype=ACCUMULATOR)),
        )
        _, b_grad_s = probs_and_grad_logits(
            b_q, b_k, b_v, b_grad_out, b_lse, b_delta, m_s, b_bias, scale, SILU, INPUT_PRECISION
        )
        if TABLES:
            if time is not None:
                b_bucket = time_buckets(time, begin_q + o_m, begin_k + o_n, m_m, m_n)
                add_to_buckets(p_time_sums, time[2], b_bucket, b_grad_s, i_head, num_heads)
            if position is not None:
                b_bucket = position_buckets(position, b_distance)
                add_to_buckets(p_position_sums, position[2], b_bucket, b_grad_s, i_head, num_heads)
        b_grad_q += tl.dot(b_grad_s.to(b_k.dtype), b_k, input_precision=INPUT_PRECISION)

    store_head(p_grad_q, b_grad_q * scale, o_out, m_m, D, BLOCK_D)


@triton.jit(do_not_specialize=RUN_TIME_SIZES)
def jagged_flash_attention_backward_dkdv_kernel(
    p_grad_out,  # [Tq, H, Dv]
    p_q,  # [Tq, H, D]
    p_k,  # [Tk, G, D]
    p_v,  # [Tk, G, Dv]
    p_lse,  # [Tq, H], contiguous; None with SILU
    p_delta,  # [Tq, H], contiguous; None with SILU
    p_offsets,  # [B + 1]
    p_kv_offsets,  # [B + 1]
    p_ranges,  # [Tq, num_ranges, 2], contiguous, or None
    p_row_scale,  # [Tq], contiguous, or None
    p_kv_lengths,  # [B], or None
    key,  # kv_bias [Tk, Hb] and Hb, or None
    time,  # table [Ht, R], Ht, R, q_time [Tq], kv_time [Tk], boundaries [R - 1], symmetric; or None
    position,  # table [Hp, R], Hp, R, first; or None
    p_grad_k,  # [Tk, G, D], contiguous
    p_grad_v,  # [Tk, G, Dv], contiguous
    p_key_sums,  # [Tk, H], contiguous, the sums of dS over queries; or None
    num_seqs,
    total_q,
    total_k,
    group_size,
    left,
    right,
    num_ranges,
    scale,
    divisor,
    grad_strides,
    q_strides,
    k_strides,
    v_strides,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SILU: tl.constexpr,
    TILE: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    first_key, begin_k, num_rows, begin_q, len_q, i_seq = find_rows(
        p_kv_offsets, p_offsets, num_seqs, total_k, total_q, TILE
    )
    len_k = used_keys(p_kv_lengths, i_seq, num_rows)
    if p_ranges is not None:
        p_ranges += begin_q * num_ranges * 2
    i_kv_head = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1) * group_size

    o_n = first_key + tl.arange(0, TILE)
    m_row = o_n < num_rows
    m_n = o_n < len_k
    # [TILE, BLOCK_D]
    b_k = load_head(p_k, k_strides, i_kv_head, begin_k + o_n, m_n, D, BLOCK_D)
    # [TILE, BLOCK_DV]
    b_v = load_head(p_v, v_strides, i_kv_head, begin_k + o_n, m_n, DV, BLOCK_DV)

    b_grad_k = tl.zeros([TILE, BLOCK_D], dtype=ACCUMULATOR)
    b_grad_v = tl.zeros([TILE, BLOCK_DV], dtype=ACCUMULATOR)
    first_row, end_row = visible_range(first_key, len_k, len_q, right, left, TILE)
    for i_head_of_group in range(0, group_size):
        i_head = i_kv_head * group_size + i_head_of_group
        b_key_sums = tl.zeros([TILE], dtype=ACCUMULATOR)
        for start_m in range(first_row, end_row, TILE):
            o_m = start_m + tl.arange(0, TILE)
            m_m = o_m < len_q
            o_out = (begin_q + o_m) * num_heads + i_head
            # [TILE, BLOCK_D]
            b_q = load_head(p_q, q_strides, i_head, begin_q + o_m, m_m, D, BLOCK_D)
            # [TILE, BLOCK_DV]
            b_grad_out = load_head(
                p_grad_out, grad_strides, i_head, begin_q + o_m, m_m, DV, BLOCK_DV
            )
            if SILU:
                b_zeros = tl.zeros([TILE], dtype=ACCUMULATOR)
                b_delta = row_weights(p_row_scale, begin_q + o_m, m_m, divisor, len_k, b_zeros)
                b_lse = b_zeros
            else:
                # [TILE]
                BIASED: tl.constexpr = key is not None or time is not None or position is not None
                b_lse = finite(tl.load(p_lse + o_out, mask=m_m, other=0.0), BIASED)
                # [TILE]
                b_delta = tl.load(p_delta + o_out, mask=m_m, other=0.0)

            m_s = sees(o_m, o_n, len_q, len_k, left, right, p_ranges, num_ranges)
            b_bias = bias_of(
                *(key, time, position, i_head, num_heads, begin_q + o_m, begin_k + o_n, m_m, m_n),
                o_m[:, None] + (len_k - len_q) - o_n[None, :],
                tl.zeros([TILE, TILE], dtype=ACCUMULATOR),
            )
            b_p, b_grad_s = probs_and_grad_logits(
                b_q, b_k, b_v, b_grad_out, b_lse, b_delta, m_s, b_bias, scale, SILU, INPUT_PRECISION
            )
            b_key_sums += tl.sum(b_grad_s, 0)
            b_grad_v += tl.dot(
                tl.trans(b_p.to(b_grad_out.dtype)), b_grad_out, input_precision=INPUT_PRECISION
            )
            b_grad_k += tl.dot(
                tl.trans(b_grad_s.to(b_q.dtype)), b_q, input_precision=INPUT_PRECISION
            )
        if p_key_sums is not None:
            tl.store(p_key_sums + (begin_k + o_n) * num_heads + i_head, b_key_sums, mask=m_row)

    o_key = (begin_k + o_n) * tl.num_programs(1) + i_kv_head
    store_head(p_grad_k, b_grad_k * scale, o_key, m_row, D, BLOCK_D)
    store_head(p_grad_v, b_grad_v, o_key, m_row, DV, BLOCK_DV)


class JaggedFlashAttention(torch.autograd.Function):
    """With a divisor silu in place of softmax; then there is no lse."""

    @staticmethod
    def forward(
        ctx,
        q,
        k,
        v,
        offsets,
        kv_offsets,
        ranges,
        row_scale,
        kv_lengths,
        kv_bias,
        time_table,
        q_time,
        kv_time,
        boundaries,
        position_table,
        symmetric,
        position_first,
        left,
        right,
        scale,
        divisor,
        precision,
    ):
        silu = divisor is not None
        out = q.new_empty(*q.shape[:2], v.shape[2])
        lse = None if silu else q.new_empty(q.shape[:2], dtype=accumulator_type(q))
        ctx.set_materialize_grads(False)
        saved = (None, None) if silu else (out, lse)
        biases = (kv_bias, time_table, q_time, kv_time, boundaries, position_table)
        ctx.save_for_backward(
            *(q, k, v, *saved, offsets, kv_offsets, ranges, row_scale, kv_lengths, *biases)
        )
        ctx.options = left, right, scale, divisor, precision, symmetric, position_first
        config = plan(q, v, precision)
        num_seqs = len(offsets) - 1
        launch(
            jagged_flash_attention_kernel,
            (num_tiles(len(q), num_seqs, config["TILE"]), q.shape[1]),
            q,
            k,
            v,
            offsets,
            kv_offsets,
            ranges,
            row_scale,
            kv_lengths,
            *packed(*biases, symmetric, position_first),
            out,
            lse,
            *(num_seqs, len(q), len(k), q.shape[1] // max(1, k.shape[1]), left, right),
            1 if ranges is None else ranges.shape[1],
            scale,
            divisor if silu else 0.0,
            q.stride(),
            k.stride(),
            v.stride(),
            SILU=silu,
            **config,
        )
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, grad_lse):
        q, k, v, out, lse, offsets, kv_offsets, ranges, row_scale, *more = ctx.saved_tensors
        kv_lengths, *biases = more
        kv_bias, time_table, position_table = biases[0], biases[1], biases[5]
        left, right, scale, divisor, precision, symmetric, position_first = ctx.options
        silu = divisor is not None
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        grad_q, grad_k, grad_v = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)
        )
        delta = None if silu else torch.empty_like(lse)
        config = plan(q, v, precision)
        num_seqs, heads = len(offsets) - 1, q.shape[1]
        sizes = (num_seqs, len(q), len(k), heads // max(1, k.shape[1]), left, right)
        numbers = (1 if ranges is None else ranges.shape[1], scale, divisor if silu else 0.0)
        strides = [x.stride() for x in (grad_out, q, k, v)]
        tiles = num_tiles(len(q), num_seqs, config["TILE"])
        sums = q.new_zeros
        dtype = accumulator_type(q)
        key_sums = None if kv_bias is None else sums(len(k), heads, dtype=dtype)
        time_sums, position_sums = (
            None if table is None else sums(tiles, heads, table.shape[1], dtype=dtype)
            for table in (time_table, position_table)
        )
        added = packed(*biases, symmetric, position_first)
        launch(
            jagged_flash_attention_backward_dq_kernel,
            (tiles, heads),
            grad_out,
            grad_lse,
            q,
            k,
            v,
            out,
            lse,
            offsets,
            kv_offsets,
            ranges,
            row_scale,
            kv_lengths,
            *added,
            grad_q,
            delta,
            time_sums,
            position_sums,
            *sizes,
            *numbers,
            *strides,
            SILU=silu,
            TABLES=time_table is not None or position_table is not None,
            **config,
        )
        launch(
            jagged_flash_attention_backward_dkdv_kernel,
            (num_tiles(len(k), num_seqs, config["TILE"]), k.shape[1]),
            grad_out,
            q,
            k,
            v,
            lse,
            delta,
            offsets,
            kv_offsets,
            ranges,
            row_scale,
            kv_lengths,
            *added,
            grad_k,
            grad_v,
            key_sums,
            *sizes,
            *numbers,
            *strides,
            SILU=silu,
            **config,
        )
        grad_kv_bias = None
        if kv_bias is not None:
            grad_kv_bias = key_sums.unflatten(1, (kv_bias.shape[1], -1)).sum(2)
        grad_time, grad_position = (
            None if part is None else part.sum(0).unflatten(0, (table.shape[0], -1)).sum(1)
            for part, table in ((time_sums, time_table), (position_sums, position_table))
        )
        no_gradient = (None,) * 5
        return (
            *(grad_q, grad_k, grad_v, *no_gradient),
            *(grad_kv_bias, grad_time, None, None, None, grad_position, None, *no_gradient, None),
        )


# Beyond any distance in rows, from which it can be subtracted.
FAR = 2**62


def packed(
    kv_bias, time_table, q_time, kv_time, boundaries, position_table, symmetric, position_first
):
    """The arguments key, time and position of the kernels."""
    key = None if kv_bias is None else (kv_bias, kv_bias.shape[1])
    time = position = None
    if time_table is not None:
        time = (time_table, *time_table.shape, q_time, kv_time, boundaries, int(symmetric))
    if position_table is not None:
        first = min(max(position_first, -FAR), FAR)
        position = (position_table, *position_table.shape, first)
    return key, time, position


def attention_of(
    op,
    q,
    k,
    v,
    offsets,
    *,
    kv_offsets,
    causal,
    window_size,
    scale,
    key_ranges,
    kv_lengths,
    kv_bias,
    time_bias,
    position_bias,
    **silu,
):
    """Out and lse of an operator; `silu` has row_scale and divisor, or nothing."""
    one_head = q.dim() == 2 and k.dim() == 2 and v.dim() == 2
    if one_head:
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
    left, right = window_size
    if key_ranges is not None and key_ranges.dim() == 2:
        key_ranges = key_ranges.unsqueeze(1)
    if kv_bias is not None and kv_bias.dim() == 1:
        kv_bias = kv_bias.unsqueeze(1)
    time_table, q_time, kv_time, boundaries, symmetric = time_bias or (None,) * 4 + (True,)
    position_table, position_first = position_bias or (None, 0)
    time_table, position_table = (
        t.unsqueeze(0) if t is not None and t.dim() == 1 else t
        for t in (time_table, position_table)
    )
    tensors = {"kv_lengths": kv_lengths, "kv_bias": kv_bias, "time_table": time_table}
    tensors |= {"q_time": q_time, "kv_time": kv_time, "boundaries": boundaries}
    tensors |= {"position_table": position_table}
    mask = {"window_left": left, "window_right": right, "key_ranges": key_ranges}
    check(op, q=q, k=k, v=v, offsets=offsets, kv_offsets=kv_offsets, **mask, **tensors, **silu)
    kv_offsets = offsets if kv_offsets is None else kv_offsets
    if causal:
        right = 0
    # No row is further from a key than this, so that the kernels need no case for unbounded.
    reach = min(max(len(q), len(k)), 2**29)
    left, right = (reach if w < 0 else min(w, reach) for w in (left, right))
    row_scale = silu.get("row_scale")
    out, lse = JaggedFlashAttention.apply(
        q,
        k,
        v,
        offsets.contiguous(),
        kv_offsets.contiguous(),
        None if key_ranges is None else key_ranges.contiguous(),
        None if row_scale is None else row_scale.contiguous(),
        *(None if t is None else t.contiguous() for t in tensors.values()),
        symmetric,
        position_first,
        left,
        right,
        1.0 / math.sqrt(q.shape[2]) if scale is None else float(scale),
        silu.get("divisor"),
        input_precision(),
    )
    if one_head:
        out, lse = out.squeeze(1), lse if lse is None else lse.squeeze(1)
    return out, lse


def jagged_flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor,
    *,
    kv_offsets: torch.Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    max_len: int | None = None,
    return_lse: bool = False,
    key_ranges: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    kv_bias: torch.Tensor | None = None,
    time_bias: tuple | None = None,
    position_bias: tuple | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale Q_b K_b^T + mask) V_b for each sequence b.

    q [Tq, H, D], k [Tk, G, D] and v [Tk, G, Dv] give out [Tq, H, Dv]; query head h reads key head
    h // (H / G); [T, D] means one head. kv_offsets is offsets where it is not given, the default
    scale 1 / sqrt(D). Row i sees key j iff
    i + Lk - Lq - left <= j <= i + Lk - Lq + right; -1 is unbounded, causal is right = 0. With
    key_ranges [Tq, 2] or [Tq, 2, 2], int32, j is also in one of the row's ranges (begin, end).
    return_lse adds the natural log of each row's sum of exponentials, [Tq, H], differentiable too.
    kv_lengths [B] is the used part of each key sequence. kv_bias [Tk] or [Tk, H] is added to the
    scores of its keys; a table of time_bias (table, q_time, kv_time, boundaries, symmetric) by how
    many boundaries the distance in time has reached; one of position_bias (table, first) by the
    distance in rows, less first. max_len is a hint that is not needed here. Any strides are read as
    they are; accumulation, LSE and its gradient are fp32.
    """
    out, lse = attention_of(
        *("jagged_flash_attention", q, k, v, offsets),
        kv_offsets=kv_offsets,
        causal=causal,
        window_size=window_size,
        scale=scale,
        key_ranges=key_ranges,
        kv_lengths=kv_lengths,
        kv_bias=kv_bias,
        time_bias=time_bias,
        position_bias=position_bias,
    )
    return (out, lse) if return_lse else out
