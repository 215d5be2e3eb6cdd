"""HSTU's masks as two ranges of keys per row."""

import torch
import triton
import triton.language as tl

from .common import check_place, find_tile, launch, load_rows, num_tiles

TILE_T = 64


@triton.jit
def step_of(o_key, len_shared, last_step):
    """The step that a key counts as: contextual ones 0, targets the last."""
    return tl.minimum(tl.maximum(o_key - len_shared, 0), last_step)


@triton.jit
def first_key_of(step, len_shared):
    return tl.where(step > 0, step + len_shared, 0)


@triton.jit(do_not_specialize=["num_seqs", "total", "max_attn_len", "min_full_attn_len"])
def hstu_key_ranges_kernel(
    p_offsets,  # [B + 1]
    p_kv_offsets,  # [B + 1]
    p_targets,  # [B], or None
    p_contextual,  # [B], or None: contextual_len
    p_ranges,  # [T, 2, 2], contiguous
    num_seqs,
    total,
    contextual_len,
    max_attn_len,
    min_full_attn_len,
    target_group,
    CAUSAL: tl.constexpr,
    TILE: tl.constexpr,
):
    i_seq, first_row = find_tile(p_offsets, tl.program_id(0), num_seqs, total, TILE)
    begin, end = load_rows(p_offsets, i_seq, num_seqs, total)
    m_seq = (i_seq >= 0) & (i_seq < num_seqs)
    begin_k = tl.load(p_kv_offsets + i_seq, mask=m_seq, other=0).to(tl.int64)
    len_k = tl.load(p_kv_offsets + i_seq + 1, mask=m_seq, other=0).to(tl.int64) - begin_k
    targets = contextual_len * 0
    if p_targets is not None:
        targets = tl.load(p_targets + i_seq, mask=m_seq, other=0).to(tl.int64)
    context = contextual_len
    if p_contextual is not None:
        context = tl.load(p_contextual + i_seq, mask=m_seq, other=0).to(tl.int64)

    history = len_k - tl.minimum(tl.maximum(targets, 0), len_k)
    shared = tl.maximum(context - 1, 0)
    last_step = tl.maximum(history - shared, 0)

    o_t = first_row + tl.arange(0, TILE)
    # [TILE], of each row: its place among the keys, and its step
    o_p = o_t - begin + len_k - (end - begin)
    b_step = step_of(o_p, shared, last_step)
    m_target = o_p >= history
    m_all = (max_attn_len == 0) | (
        (min_full_attn_len > 0) & (b_step >= last_step - min_full_attn_len)
    )
    # The steps that it sees: [b_low, b_high).
    b_low = tl.where(m_all, 0, tl.maximum(b_step - max_attn_len, 0))
    b_high = b_step
    if not CAUSAL:
        b_high = tl.where(m_all, last_step + 1, tl.minimum(b_step + max_attn_len, last_step) + 1)
        b_high = tl.where(m_target, last_step, b_high)
    # As keys; the step of the targets ends with the sequence.
    b_begin = first_key_of(b_low, shared)
    b_end = tl.where(b_high > last_step, len_k, tl.minimum(first_key_of(b_high, shared), history))
    m_context = (context > 0) & (b_step == 0)
    b_end = tl.where(m_context, tl.maximum(b_end, history), b_end)
    if last_step == 0:
        b_begin = tl.where(m_target, 0, o_p)
        b_end = b_begin
    # Itself; as a target its group, in the second range.
    b_end = tl.where(m_target, b_end, tl.maximum(b_end, o_p + 1))
    b_own = o_p - (o_p - history) % target_group
    m_first = m_seq & (o_p >= 0)
    m_own = m_first & m_target

    p_row = p_ranges + o_t * 4
    m_t = o_t < end
    tl.store(p_row, tl.where(m_first, b_begin, 0).to(tl.int32), mask=m_t)
    tl.store(p_row + 1, tl.where(m_first, b_end, 0).to(tl.int32), mask=m_t)
    tl.store(p_row + 2, tl.where(m_own, b_own, 0).to(tl.int32), mask=m_t)
    tl.store(p_row + 3, tl.where(m_own, o_p + 1, 0).to(tl.int32), mask=m_t)


def hstu_key_ranges(
    offsets: torch.Tensor,
    *,
    kv_offsets: torch.Tensor | None = None,
    num_targets: torch.Tensor | None = None,
    contextual_len: int | torch.Tensor = 0,
    max_attn_len: int = 0,
    min_full_attn_len: int = 0,
    target_group: int = 1,
    causal: bool = True,
    total: int | None = None,
) -> torch.Tensor:
    """What each row sees under HSTU's masks: [total, 2, 2], two ranges (begin, end) of keys.

    None reads total from the offsets.
    """
    total = int(offsets[-1]) if total is None else total
    contextual = contextual_len if isinstance(contextual_len, torch.Tensor) else None
    contextual_len = 0 if contextual is not None else contextual_len
    limits = {
        "contextual_len": contextual_len,
        "max_attn_len": max_attn_len,
        "min_full_attn_len": min_full_attn_len,
        "target_group": target_group,
        "total": total,
    }
    check_place(
        "hstu_key_ranges",
        offsets=offsets,
        kv_offsets=kv_offsets,
        num_targets=num_targets,
        contextual_lens=contextual,
        **limits,
    )
    ranges = torch.empty(total, 2, 2, dtype=torch.int32, device=offsets.device)
    num_seqs = len(offsets) - 1
    launch(
        hstu_key_ranges_kernel,
        (num_tiles(total, num_seqs, TILE_T) if total else 0,),
        offsets.contiguous(),
        (offsets if kv_offsets is None else kv_offsets).contiguous(),
        None if num_targets is None else num_targets.contiguous(),
        None if contextual is None else contextual.contiguous(),
        ranges,
        *(num_seqs, total, contextual_len, max_attn_len, min_full_attn_len, target_group),
        CAUSAL=causal,
        TILE=TILE_T,
    )
    return ranges
