"""jagged_target_attention: N dense queries of each sequence, softmax(scale Q_b K_b^T) V_b.

N dense queries of each of B sequences are a jagged tensor of B sequences of N rows each, and their
keys have offsets of their own: this is jagged_flash_attention's case of cross attention.
"""

import math

import torch

from .common import check
from .jagged_flash_attention import jagged_flash_attention


def jagged_target_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor,
    *,
    scale: float | None = None,
    max_len: int | None = None,
    return_lse: bool = False,
    kv_lengths: torch.Tensor | None = None,
    kv_bias: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale Q_b K_b^T) V_b for N dense queries of each sequence b.

    q [B, N, H, D], k [T, G, D] and v [T, G, Dv] give out [B, N, H, Dv]; query head h reads key head
    h // (H / G); [B, N, D] and [T, D] mean one head. The default scale is 1 / sqrt(D). return_lse
    adds the natural log of each query's sum of exponentials, [B, N, H], differentiable too. max_len
    is a hint that is not needed here. kv_lengths [B] is the used part of each history, kv_bias [T]
    or [T, H] is added to the scores of its keys.
    """
    one_head = q.dim() == 3 and k.dim() == 2 and v.dim() == 2
    if one_head:
        q, k, v = q.unsqueeze(2), k.unsqueeze(1), v.unsqueeze(1)
    check("jagged_target_attention", q=q, k=k, v=v, offsets=offsets)
    seqs, queries = q.shape[:2]
    begins = torch.arange(seqs + 1, dtype=offsets.dtype, device=offsets.device) * queries
    out, lse = jagged_flash_attention(
        q.flatten(0, 1),
        k,
        v,
        begins,
        kv_offsets=offsets,
        scale=1.0 / math.sqrt(q.shape[3]) if scale is None else scale,
        return_lse=True,
        kv_lengths=kv_lengths,
        kv_bias=kv_bias,
    )
    out, lse = (rows.unflatten(0, (seqs, queries)) for rows in (out, lse))
    if one_head:
        out, lse = out.squeeze(2), lse.squeeze(2)
    return (out, lse) if return_lse else out
