"""softmax(scale Q_b K_b^T + mask) V_b for each sequence, without the matrix in between.

With shift = Lk - Lq, row i of a sequence sees key j iff i + shift - left <= j <= i + shift + right.
The backward recomputes P = exp(scale Q K^T - LSE) and, with delta = rowsum(dO * O) - dLSE, follows

    dV = P^T dO,   dS = P * (dO V^T - delta),   dQ = scale dS K,   dK = scale dS^T Q.

Rows outside every sequence see nothing, like rows that the mask leaves nothing: output and gradient
0, LSE -inf. Logits stay in natural units, although exp2 with log2(e) in the scale would save a
product: so the largest logit minus the LSE is exact, where large logits lose digits otherwise.
"""

import math

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from .attention import add_keys, end_rows, load_block, plan, probs_and_grad_logits
from .common import (
    accumulator_type,
    check,
    find_tile,
    input_precision,
    load_rows,
    num_tiles,
)

RUN_TIME_SIZES = ["num_seqs", "total_q", "total_k", "group_size", "left", "right"]


@triton.jit
def sees(o_row, o_col, len_q, len_k, left, right):
    """Which of the rows [M] see which of the columns [N]: [M, N]."""
    distance = o_col[None, :] - (o_row[:, None] + len_k - len_q)
    inside = (o_row < len_q)[:, None] & (o_col < len_k)[None, :]
    return inside & (distance >= -left) & (distance <= right)


@triton.jit(do_not_specialize=RUN_TIME_SIZES)
def jagged_flash_attention_kernel(
    p_q,  # [Tq, H, D]
    p_k,  # [Tk, G, D]
    p_v,  # [Tk, G, Dv]
    p_offsets,  # [B + 1]
    p_kv_offsets,  # [B + 1]
    p_out,  # [Tq, H, Dv], contiguous
    p_lse,  # [Tq, H], contiguous
    num_seqs,
    total_q,
    total_k,
    group_size,
    left,
    right,
    scale,
    stride_qt,
    stride_qh,
    stride_qd,
    stride_kt,
    stride_kh,
    stride_kd,
    stride_vt,
    stride_vh,
    stride_vd,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    i_seq, first_row = find_tile(p_offsets, tl.program_id(0), num_seqs, total_q, TILE_M)
    i_head = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1)
    i_kv_head = i_head // group_size

    begin_q, end_q = load_rows(p_offsets, i_seq, num_seqs, total_q)
    begin_k, end_k = load_rows(p_kv_offsets, i_seq, num_seqs, total_k)
    in_sequence = (i_seq >= 0) & (i_seq < num_seqs)
    len_q = (end_q - begin_q).to(tl.int32)
    len_k = tl.where(in_sequence, end_k - begin_k, 0).to(tl.int32)
    first_row = (first_row - begin_q).to(tl.int32)  # within the sequence from here on

    o_m = first_row + tl.arange(0, TILE_M)
    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    m_m = o_m < len_q
    m_d = o_d < D
    m_dv = o_dv < DV
    # [TILE_M, BLOCK_D]
    b_q = load_block(p_q + i_head * stride_qh, begin_q + o_m, o_d, m_m, m_d, stride_qt, stride_qd)

    b_max = tl.full([TILE_M], float("-inf"), dtype=ACCUMULATOR)
    b_sum = tl.zeros([TILE_M], dtype=ACCUMULATOR)
    b_out = tl.zeros([TILE_M, BLOCK_DV], dtype=ACCUMULATOR)

    last_row = tl.minimum(first_row + TILE_M, len_q) - 1
    first_key = tl.maximum(first_row + len_k - len_q - left, 0)
    end_key = tl.minimum(last_row + len_k - len_q + right + 1, len_k)
    for start_n in range(first_key, end_key, TILE_N):
        o_n = start_n + tl.arange(0, TILE_N)
        m_n = o_n < len_k
        # [TILE_N, BLOCK_D]
        b_k = load_block(
            p_k + i_kv_head * stride_kh, begin_k + o_n, o_d, m_n, m_d, stride_kt, stride_kd
        )
        # [TILE_N, BLOCK_DV]
        b_v = load_block(
            p_v + i_kv_head * stride_vh, begin_k + o_n, o_dv, m_n, m_dv, stride_vt, stride_vd
        )
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=INPUT_PRECISION) * scale
        b_s = tl.where(sees(o_m, o_n, len_q, len_k, left, right), b_s, float("-inf"))
        b_max, b_sum, b_out = add_keys(b_s, b_v, b_max, b_sum, b_out, INPUT_PRECISION)

    b_out, b_lse = end_rows(b_max, b_sum, b_out)
    o_out = (begin_q + o_m) * num_heads + i_head
    tl.store(p_lse + o_out, b_lse, mask=m_m)
    p_tile = p_out + o_out[:, None] * DV + o_dv[None, :]
    tl.store(p_tile, b_out.to(p_out.dtype.element_ty), mask=m_m[:, None] & m_dv[None, :])


@triton.jit(do_not_specialize=RUN_TIME_SIZES)
def jagged_flash_attention_backward_dq_kernel(
    p_grad_out,  # [Tq, H, Dv]
    p_grad_lse,  # [Tq, H], contiguous, or None
    p_q,  # [Tq, H, D]
    p_k,  # [Tk, G, D]
    p_v,  # [Tk, G, Dv]
    p_out,  # [Tq, H, Dv], contiguous
    p_lse,  # [Tq, H], contiguous
    p_offsets,  # [B + 1]
    p_kv_offsets,  # [B + 1]
    p_grad_q,  # [Tq, H, D], contiguous
    p_delta,  # [Tq, H], contiguous, written for the other kernel
    num_seqs,
    total_q,
    total_k,
    group_size,
    left,
    right,
    scale,
    stride_gt,
    stride_gh,
    stride_gd,
    stride_qt,
    stride_qh,
    stride_qd,
    stride_kt,
    stride_kh,
    stride_kd,
    stride_vt,
    stride_vh,
    stride_vd,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    i_seq, first_row = find_tile(p_offsets, tl.program_id(0), num_seqs, total_q, TILE_M)
    i_head = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1)
    i_kv_head = i_head // group_size

    begin_q, end_q = load_rows(p_offsets, i_seq, num_seqs, total_q)
    begin_k, end_k = load_rows(p_kv_offsets, i_seq, num_seqs, total_k)
    in_sequence = (i_seq >= 0) & (i_seq < num_seqs)
    len_q = (end_q - begin_q).to(tl.int32)
    len_k = tl.where(in_sequence, end_k - begin_k, 0).to(tl.int32)
    first_row = (first_row - begin_q).to(tl.int32)

    o_m = first_row + tl.arange(0, TILE_M)
    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    m_m = o_m < len_q
    m_d = o_d < D
    m_dv = o_dv < DV
    o_out = (begin_q + o_m) * num_heads + i_head
    # [TILE_M, BLOCK_D]
    b_q = load_block(p_q + i_head * stride_qh, begin_q + o_m, o_d, m_m, m_d, stride_qt, stride_qd)
    # [TILE_M, BLOCK_DV]
    b_grad_out = load_block(
        p_grad_out + i_head * stride_gh, begin_q + o_m, o_dv, m_m, m_dv, stride_gt, stride_gd
    )
    # [TILE_M, BLOCK_DV]
    b_out = load_block(p_out, o_out, o_dv, m_m, m_dv, DV, 1)
    # [TILE_M]
    b_lse = tl.load(p_lse + o_out, mask=m_m, other=0.0)

    b_delta = tl.sum(b_out.to(ACCUMULATOR) * b_grad_out.to(ACCUMULATOR), 1)
    if p_grad_lse is not None:
        # [TILE_M]
        b_delta -= tl.load(p_grad_lse + o_out, mask=m_m, other=0.0)
    tl.store(p_delta + o_out, b_delta, mask=m_m)

    b_grad_q = tl.zeros([TILE_M, BLOCK_D], dtype=ACCUMULATOR)
    last_row = tl.minimum(first_row + TILE_M, len_q) - 1
    first_key = tl.maximum(first_row + len_k - len_q - left, 0)
    end_key = tl.minimum(last_row + len_k - len_q + right + 1, len_k)
    for start_n in range(first_key, end_key, TILE_N):
        o_n = start_n + tl.arange(0, TILE_N)
        m_n = o_n < len_k
        # [TILE_N, BLOCK_D]
        b_k = load_block(
            p_k + i_kv_head * stride_kh, begin_k + o_n, o_d, m_n, m_d, stride_kt, stride_kd
        )
        # [TILE_N, BLOCK_DV]
        b_v = load_block(
            p_v + i_kv_head * stride_vh, begin_k + o_n, o_dv, m_n, m_dv, stride_vt, stride_vd
        )
        m_s = sees(o_m, o_n, len_q, len_k, left, right)
        _, b_grad_s = probs_and_grad_logits(
            b_q, b_k, b_v, b_grad_out, b_lse, b_delta, m_s, scale, INPUT_PRECISION
        )
        b_grad_q += tl.dot(b_grad_s.to(b_k.dtype), b_k, input_precision=INPUT_PRECISION)

    p_tile = p_grad_q + o_out[:, None] * D + o_d[None, :]
    b_grad_q = (b_grad_q * scale).to(p_grad_q.dtype.element_ty)
    tl.store(p_tile, b_grad_q, mask=m_m[:, None] & m_d[None, :])


@triton.jit(do_not_specialize=RUN_TIME_SIZES)
def jagged_flash_attention_backward_dkdv_kernel(
    p_grad_out,  # [Tq, H, Dv]
    p_q,  # [Tq, H, D]
    p_k,  # [Tk, G, D]
    p_v,  # [Tk, G, Dv]
    p_lse,  # [Tq, H], contiguous
    p_delta,  # [Tq, H], contiguous
    p_offsets,  # [B + 1]
    p_kv_offsets,  # [B + 1]
    p_grad_k,  # [Tk, G, D], contiguous
    p_grad_v,  # [Tk, G, Dv], contiguous
    num_seqs,
    total_q,
    total_k,
    group_size,
    left,
    right,
    scale,
    stride_gt,
    stride_gh,
    stride_gd,
    stride_qt,
    stride_qh,
    stride_qd,
    stride_kt,
    stride_kh,
    stride_kd,
    stride_vt,
    stride_vh,
    stride_vd,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    i_seq, first_key = find_tile(p_kv_offsets, tl.program_id(0), num_seqs, total_k, TILE_N)
    i_kv_head = tl.program_id(1).to(tl.int64)
    num_kv_heads = tl.num_programs(1)

    begin_q, end_q = load_rows(p_offsets, i_seq, num_seqs, total_q)
    begin_k, end_k = load_rows(p_kv_offsets, i_seq, num_seqs, total_k)
    in_sequence = (i_seq >= 0) & (i_seq < num_seqs)
    len_q = tl.where(in_sequence, end_q - begin_q, 0).to(tl.int32)
    len_k = (end_k - begin_k).to(tl.int32)
    first_key = (first_key - begin_k).to(tl.int32)

    o_n = first_key + tl.arange(0, TILE_N)
    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    m_n = o_n < len_k
    m_d = o_d < D
    m_dv = o_dv < DV
    # [TILE_N, BLOCK_D]
    b_k = load_block(
        p_k + i_kv_head * stride_kh, begin_k + o_n, o_d, m_n, m_d, stride_kt, stride_kd
    )
    # [TILE_N, BLOCK_DV]
    b_v = load_block(
        p_v + i_kv_head * stride_vh, begin_k + o_n, o_dv, m_n, m_dv, stride_vt, stride_vd
    )

    b_grad_k = tl.zeros([TILE_N, BLOCK_D], dtype=ACCUMULATOR)
    b_grad_v = tl.zeros([TILE_N, BLOCK_DV], dtype=ACCUMULATOR)
    last_key = tl.minimum(first_key + TILE_N, len_k) - 1
    first_row = tl.maximum(first_key - (len_k - len_q) - right, 0)
    end_row = tl.minimum(last_key - (len_k - len_q) + left + 1, len_q)
    for i_head_of_group in range(0, group_size):
        i_head = i_kv_head * group_size + i_head_of_group
        for start_m in range(first_row, end_row, TILE_M):
            o_m = start_m + tl.arange(0, TILE_M)
            m_m = o_m < len_q
            o_out = (begin_q + o_m) * (num_kv_heads * group_size) + i_head
            # [TILE_M, BLOCK_D]
            b_q = load_block(
                p_q + i_head * stride_qh, begin_q + o_m, o_d, m_m, m_d, stride_qt, stride_qd
            )
            # [TILE_M, BLOCK_DV]
            b_grad_out = load_block(
                p_grad_out + i_head * stride_gh,
                begin_q + o_m,
                o_dv,
                m_m,
                m_dv,
                stride_gt,
                stride_gd,
            )
            # [TILE_M]
            b_lse = tl.load(p_lse + o_out, mask=m_m, other=0.0)
            # [TILE_M]
            b_delta = tl.load(p_delta + o_out, mask=m_m, other=0.0)

            m_s = sees(o_m, o_n, len_q, len_k, left, right)
            b_p, b_grad_s = probs_and_grad_logits(
                b_q, b_k, b_v, b_grad_out, b_lse, b_delta, m_s, scale, INPUT_PRECISION
            )
            b_grad_v += tl.dot(
                tl.trans(b_p.to(b_grad_out.dtype)), b_grad_out, input_precision=INPUT_PRECISION
            )
            b_grad_k += tl.dot(
                tl.trans(b_grad_s.to(b_q.dtype)), b_q, input_precision=INPUT_PRECISION
            )

    o_key = (begin_k + o_n) * num_kv_heads + i_kv_head
    p_tile = p_grad_k + o_key[:, None] * D + o_d[None, :]
    b_grad_k = (b_grad_k * scale).to(p_grad_k.dtype.element_ty)
    tl.store(p_tile, b_grad_k, mask=m_n[:, None] & m_d[None, :])
    p_tile = p_grad_v + o_key[:, None] * DV + o_dv[None, :]
    tl.store(p_tile, b_grad_v.to(p_grad_v.dtype.element_ty), mask=m_n[:, None] & m_dv[None, :])


class JaggedFlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, offsets, kv_offsets, left, right, scale, precision):
        out = q.new_empty(*q.shape[:2], v.shape[2])
        lse = q.new_empty(q.shape[:2], dtype=accumulator_type(q))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, offsets, kv_offsets)
        ctx.options = left, right, scale, precision
        if lse.numel() > 0:
            config = plan(q, v, precision)
            num_seqs = len(offsets) - 1
            with torch.cuda.device_of(q):
                grid = (num_tiles(len(q), num_seqs, config["TILE_M"]), q.shape[1])
                jagged_flash_attention_kernel[grid](
                    q,
                    k,
                    v,
                    offsets,
                    kv_offsets,
                    out,
                    lse,
                    num_seqs,
                    len(q),
                    len(k),
                    q.shape[1] // k.shape[1],
                    left,
                    right,
                    scale,
                    *q.stride(),
                    *k.stride(),
                    *v.stride(),
                    **config,
                )
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, grad_lse):
        q, k, v, out, lse, offsets, kv_offsets = ctx.saved_tensors
        left, right, scale, precision = ctx.options
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        grad_q, grad_k, grad_v = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)
        )
        delta = torch.empty_like(lse)
        config = plan(q, v, precision)
        num_seqs = len(offsets) - 1
        sizes = (num_seqs, len(q), len(k), q.shape[1] // k.shape[1], left, right)
        strides = (*grad_out.stride(), *q.stride(), *k.stride(), *v.stride())
        with torch.cuda.device_of(q):
            if lse.numel() > 0:
                grid = (num_tiles(len(q), num_seqs, config["TILE_M"]), q.shape[1])
                jagged_flash_attention_backward_dq_kernel[grid](
                    grad_out,
                    grad_lse,
                    q,
                    k,
                    v,
                    out,
                    lse,
                    offsets,
                    kv_offsets,
                    grad_q,
                    delta,
                    *sizes,
                    scale,
                    *strides,
                    **config,
                )
            if k.numel() > 0:
                grid = (num_tiles(len(k), num_seqs, config["TILE_N"]), k.shape[1])
                jagged_flash_attention_backward_dkdv_kernel[grid](
                    grad_out,
                    q,
                    k,
                    v,
                    lse,
                    delta,
                    offsets,
                    kv_offsets,
                    grad_k,
                    grad_v,
                    *sizes,
                    scale,
                    *strides,
                    **config,
                )
        return grad_q, grad_k, grad_v, None, None, None, None, None, None


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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale Q_b K_b^T + mask) V_b for each sequence b.

    q [Tq, H, D], k [Tk, G, D] and v [Tk, G, Dv] give out [Tq, H, Dv]; query head h reads key head
    h // (H / G); [T, D] means one head. kv_offsets is offsets where it is not given, the default
    scale 1 / sqrt(D). Row i sees key j iff
    i + Lk - Lq - left <= j <= i + Lk - Lq + right; -1 is unbounded, causal is right = 0.
    return_lse adds the natural log of each row's sum of exponentials, [Tq, H], differentiable too.
    max_len is a hint that is not needed here. Any strides are read as they are; accumulation, LSE
    and its gradient are fp32.
    """
    one_head = q.dim() == 2 and k.dim() == 2 and v.dim() == 2
    if one_head:
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
    left, right = window_size
    op = "jagged_flash_attention"
    check(
        op,
        q=q,
        k=k,
        v=v,
        offsets=offsets,
        kv_offsets=kv_offsets,
        window_left=left,
        window_right=right,
    )
    kv_offsets = offsets if kv_offsets is None else kv_offsets
    if causal:
        right = 0
    # No row is further from a key than this, so that the kernels need no case for unbounded.
    reach = min(max(len(q), len(k)), 2**29)
    left, right = (reach if w < 0 else min(w, reach) for w in (left, right))

    out, lse = JaggedFlashAttention.apply(
        q,
        k,
        v,
        offsets.contiguous(),
        kv_offsets.contiguous(),
        left,
        right,
        1.0 / math.sqrt(q.shape[2]) if scale is None else float(scale),
        input_precision(),
    )
    if one_head:
        out, lse = out.squeeze(1), lse.squeeze(1)
    return (out, lse) if return_lse else out
