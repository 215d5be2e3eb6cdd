"""softmax(scale Q_b K_b^T) V_b for N dense queries of each sequence, without the matrix in between.

The backward recomputes P = exp(scale Q K^T - LSE) and, with delta = rowsum(dO * O) - dLSE, follows

    dV = P^T dO,   dS = P * (dO V^T - delta),   dQ = scale dS K,   dK = scale dS^T Q.

Queries of an empty sequence give 0 with LSE -inf and have no gradient; neither have rows of k and v
outside every sequence. Logits stay in natural units, as in jagged_flash_attention.
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

RUN_TIME_SIZES = ["num_seqs", "total", "num_queries", "group_size"]


@triton.jit(do_not_specialize=RUN_TIME_SIZES)
def jagged_target_attention_kernel(
    p_q,  # [B, N, H, D]
    p_k,  # [T, G, D]
    p_v,  # [T, G, Dv]
    p_offsets,  # [B + 1]
    p_out,  # [B, N, H, Dv], contiguous
    p_lse,  # [B, N, H], contiguous
    num_seqs,
    total,
    num_queries,
    group_size,
    scale,
    stride_qb,
    stride_qn,
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
    """One sequence, one head, TILE_M of its queries."""
    i_seq = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1)
    i_kv_head = i_head // group_size
    begin, end = load_rows(p_offsets, i_seq, num_seqs, total)

    o_m = tl.program_id(2) * TILE_M + tl.arange(0, TILE_M)
    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    m_m = o_m < num_queries
    m_d = o_d < D
    m_dv = o_dv < DV
    # [TILE_M, BLOCK_D]
    b_q = load_block(
        p_q + i_seq * stride_qb + i_head * stride_qh, o_m, o_d, m_m, m_d, stride_qn, stride_qd
    )

    b_max = tl.full([TILE_M], float("-inf"), dtype=ACCUMULATOR)
    b_sum = tl.zeros([TILE_M], dtype=ACCUMULATOR)
    b_out = tl.zeros([TILE_M, BLOCK_DV], dtype=ACCUMULATOR)
    for first_key in range(begin, end, TILE_N):
        o_n = first_key + tl.arange(0, TILE_N)
        m_n = o_n < end
        # [TILE_N, BLOCK_D]
        b_k = load_block(p_k + i_kv_head * stride_kh, o_n, o_d, m_n, m_d, stride_kt, stride_kd)
        # [TILE_N, BLOCK_DV]
        b_v = load_block(p_v + i_kv_head * stride_vh, o_n, o_dv, m_n, m_dv, stride_vt, stride_vd)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=INPUT_PRECISION) * scale
        b_s = tl.where(m_n[None, :], b_s, float("-inf"))
        b_max, b_sum, b_out = add_keys(b_s, b_v, b_max, b_sum, b_out, INPUT_PRECISION)

    b_out, b_lse = end_rows(b_max, b_sum, b_out)
    o_out = (i_seq * num_queries + o_m) * num_heads + i_head
    tl.store(p_lse + o_out, b_lse, mask=m_m)
    p_tile = p_out + o_out[:, None] * DV + o_dv[None, :]
    tl.store(p_tile, b_out.to(p_out.dtype.element_ty), mask=m_m[:, None] & m_dv[None, :])


@triton.jit(do_not_specialize=RUN_TIME_SIZES)
def jagged_target_attention_backward_dq_kernel(
    p_grad_out,  # [B, N, H, Dv], contiguous
    p_grad_lse,  # [B, N, H], contiguous, or None
    p_q,  # [B, N, H, D]
    p_k,  # [T, G, D]
    p_v,  # [T, G, Dv]
    p_out,  # [B, N, H, Dv], contiguous
    p_lse,  # [B, N, H], contiguous
    p_offsets,  # [B + 1]
    p_grad_q,  # [B, N, H, D], contiguous
    p_delta,  # [B, N, H], contiguous, written for the other kernel
    num_seqs,
    total,
    num_queries,
    group_size,
    scale,
    stride_qb,
    stride_qn,
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
    """One sequence, one head, TILE_M of its queries."""
    i_seq = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1)
    i_kv_head = i_head // group_size
    begin, end = load_rows(p_offsets, i_seq, num_seqs, total)

    o_m = tl.program_id(2) * TILE_M + tl.arange(0, TILE_M)
    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    m_m = o_m < num_queries
    m_d = o_d < D
    m_dv = o_dv < DV
    o_out = (i_seq * num_queries + o_m) * num_heads + i_head
    # [TILE_M, BLOCK_D]
    b_q = load_block(
        p_q + i_seq * stride_qb + i_head * stride_qh, o_m, o_d, m_m, m_d, stride_qn, stride_qd
    )
    # [TILE_M, BLOCK_DV]
    b_grad_out = load_block(p_grad_out, o_out, o_dv, m_m, m_dv, DV, 1)
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
    for first_key in range(begin, end, TILE_N):
        o_n = first_key + tl.arange(0, TILE_N)
        m_n = o_n < end
        # [TILE_N, BLOCK_D]
        b_k = load_block(p_k + i_kv_head * stride_kh, o_n, o_d, m_n, m_d, stride_kt, stride_kd)
        # [TILE_N, BLOCK_DV]
        b_v = load_block(p_v + i_kv_head * stride_vh, o_n, o_dv, m_n, m_dv, stride_vt, stride_vd)
        _, b_grad_s = probs_and_grad_logits(
            b_q, b_k, b_v, b_grad_out, b_lse, b_delta, m_n[None, :], scale, INPUT_PRECISION
        )
        b_grad_q += tl.dot(b_grad_s.to(b_k.dtype), b_k, input_precision=INPUT_PRECISION)

    p_tile = p_grad_q + o_out[:, None] * D + o_d[None, :]
    b_grad_q = (b_grad_q * scale).to(p_grad_q.dtype.element_ty)
    tl.store(p_tile, b_grad_q, mask=m_m[:, None] & m_d[None, :])


@triton.jit(do_not_specialize=RUN_TIME_SIZES)
def jagged_target_attention_backward_dkdv_kernel(
    p_grad_out,  # [B, N, H, Dv], contiguous
    p_q,  # [B, N, H, D]
    p_k,  # [T, G, D]
    p_v,  # [T, G, Dv]
    p_lse,  # [B, N, H], contiguous
    p_delta,  # [B, N, H], contiguous
    p_offsets,  # [B + 1]
    p_grad_k,  # [T, G, D], contiguous
    p_grad_v,  # [T, G, Dv], contiguous
    num_seqs,
    total,
    num_queries,
    group_size,
    scale,
    stride_qb,
    stride_qn,
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
    """TILE_N keys of one sequence, or of the rows outside all, and one key/value head."""
    i_seq, first_key = find_tile(p_offsets, tl.program_id(0), num_seqs, total, TILE_N)
    i_kv_head = tl.program_id(1).to(tl.int64)
    num_kv_heads = tl.num_programs(1)
    _, end = load_rows(p_offsets, i_seq, num_seqs, total)
    in_sequence = (i_seq >= 0) & (i_seq < num_seqs)
    end_query = tl.where(in_sequence, num_queries, 0)

    o_n = first_key + tl.arange(0, TILE_N)
    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    m_n = o_n < end
    m_d = o_d < D
    m_dv = o_dv < DV
    # [TILE_N, BLOCK_D]
    b_k = load_block(p_k + i_kv_head * stride_kh, o_n, o_d, m_n, m_d, stride_kt, stride_kd)
    # [TILE_N, BLOCK_DV]
    b_v = load_block(p_v + i_kv_head * stride_vh, o_n, o_dv, m_n, m_dv, stride_vt, stride_vd)

    b_grad_k = tl.zeros([TILE_N, BLOCK_D], dtype=ACCUMULATOR)
    b_grad_v = tl.zeros([TILE_N, BLOCK_DV], dtype=ACCUMULATOR)
    for i_head_of_group in range(0, group_size):
        i_head = i_kv_head * group_size + i_head_of_group
        p_head = p_q + i_seq.to(tl.int64) * stride_qb + i_head * stride_qh
        for start_m in range(0, end_query, TILE_M):
            o_m = start_m + tl.arange(0, TILE_M)
            m_m = o_m < end_query
            o_out = (i_seq.to(tl.int64) * num_queries + o_m) * (num_kv_heads * group_size) + i_head
            # [TILE_M, BLOCK_D]
            b_q = load_block(p_head, o_m, o_d, m_m, m_d, stride_qn, stride_qd)
            # [TILE_M, BLOCK_DV]
            b_grad_out = load_block(p_grad_out, o_out, o_dv, m_m, m_dv, DV, 1)
            # [TILE_M]
            b_lse = tl.load(p_lse + o_out, mask=m_m, other=0.0)
            # [TILE_M]
            b_delta = tl.load(p_delta + o_out, mask=m_m, other=0.0)

            m_s = m_m[:, None] & m_n[None, :]
            b_p, b_grad_s = probs_and_grad_logits(
                b_q, b_k, b_v, b_grad_out, b_lse, b_delta, m_s, scale, INPUT_PRECISION
            )
            b_grad_v += tl.dot(
                tl.trans(b_p.to(b_grad_out.dtype)), b_grad_out, input_precision=INPUT_PRECISION
            )
            b_grad_k += tl.dot(
                tl.trans(b_grad_s.to(b_q.dtype)), b_q, input_precision=INPUT_PRECISION
            )

    o_key = o_n * num_kv_heads + i_kv_head
    p_tile = p_grad_k + o_key[:, None] * D + o_d[None, :]
    b_grad_k = (b_grad_k * scale).to(p_grad_k.dtype.element_ty)
    tl.store(p_tile, b_grad_k, mask=m_n[:, None] & m_d[None, :])
    p_tile = p_grad_v + o_key[:, None] * DV + o_dv[None, :]
    tl.store(p_tile, b_grad_v.to(p_grad_v.dtype.element_ty), mask=m_n[:, None] & m_dv[None, :])


class JaggedTargetAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, offsets, scale, precision):
        num_seqs, num_queries, num_heads, _ = q.shape
        out = q.new_empty(*q.shape[:3], v.shape[2])
        lse = q.new_empty(q.shape[:3], dtype=accumulator_type(q))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, offsets)
        ctx.options = scale, precision
        if lse.numel() > 0:
            config = plan_queries(q, v, precision)
            with torch.cuda.device_of(q):
                grid = (num_seqs, num_heads, triton.cdiv(num_queries, config["TILE_M"]))
                jagged_target_attention_kernel[grid](
                    q,
                    k,
                    v,
                    offsets,
                    out,
                    lse,
                    num_seqs,
                    len(k),
                    num_queries,
                    num_heads // k.shape[1],
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
        q, k, v, out, lse, offsets = ctx.saved_tensors
        scale, precision = ctx.options
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out.contiguous()
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        grad_q, grad_k, grad_v = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)
        )
        delta = torch.empty_like(lse)
        config = plan_queries(q, v, precision)
        num_seqs, num_queries, num_heads, _ = q.shape
        sizes = (num_seqs, len(k), num_queries, num_heads // max(k.shape[1], 1))
        strides = (*q.stride(), *k.stride(), *v.stride())
        with torch.cuda.device_of(q):
            if lse.numel() > 0:
                grid = (num_seqs, num_heads, triton.cdiv(num_queries, config["TILE_M"]))
                jagged_target_attention_backward_dq_kernel[grid](
                    grad_out,
                    grad_lse,
                    q,
                    k,
                    v,
                    out,
                    lse,
                    offsets,
                    grad_q,
                    delta,
                    *sizes,
                    scale,
                    *strides,
                    **config,
                )
            if k.numel() > 0:
                grid = (num_tiles(len(k), num_seqs, config["TILE_N"]), k.shape[1])
                jagged_target_attention_backward_dkdv_kernel[grid](
                    grad_out,
                    q,
                    k,
                    v,
                    lse,
                    delta,
                    offsets,
                    grad_k,
                    grad_v,
                    *sizes,
                    scale,
                    *strides,
                    **config,
                )
        return grad_q, grad_k, grad_v, None, None, None


def plan_queries(q: torch.Tensor, v: torch.Tensor, precision: str) -> dict[str, object]:
    """The plan of attention, with tiles no larger than the queries of a sequence need."""
    config = plan(q, v, precision)
    needed = max(16, triton.next_power_of_2(q.shape[1]))
    return config | {"TILE_M": min(config["TILE_M"], needed)}


def jagged_target_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor,
    *,
    scale: float | None = None,
    max_len: int | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale Q_b K_b^T) V_b for N dense queries of each sequence b.

    q [B, N, H, D], k [T, G, D] and v [T, G, Dv] give out [B, N, H, Dv]; query head h reads key head
    h // (H / G); [B, N, D] and [T, D] mean one head. The default scale is 1 / sqrt(D). return_lse
    adds the natural log of each query's sum of exponentials, [B, N, H], differentiable too. max_len
    is a hint that is not needed here.
    """
    one_head = q.dim() == 3 and k.dim() == 2 and v.dim() == 2
    if one_head:
        q, k, v = q.unsqueeze(2), k.unsqueeze(1), v.unsqueeze(1)
    check("jagged_target_attention", q=q, k=k, v=v, offsets=offsets)

    out, lse = JaggedTargetAttention.apply(
        q,
        k,
        v,
        offsets.contiguous(),
        1.0 / math.sqrt(q.shape[3]) if scale is None else float(scale),
        input_precision(),
    )
    if one_head:
        out, lse = out.squeeze(2), lse.squeeze(2)
    return (out, lse) if return_lse else out
