"""Where the matrix of each sequence begins."""

import torch
import triton
import triton.language as tl

from .common import check_place, launch

TILE_B = 1024


@triton.jit
def load_lengths(p_offsets, o_b, m_b):
    # [TILE_B]
    b_begin = tl.load(p_offsets + o_b, mask=m_b, other=0).to(tl.int64)
    b_end = tl.load(p_offsets + o_b + 1, mask=m_b, other=0).to(tl.int64)
    return tl.maximum(b_end - b_begin, 0)


@triton.jit(do_not_specialize=["num_seqs"])
def matrix_offsets_kernel(
    p_offsets,  # [B + 1]
    p_y_offsets,  # [B + 1]
    p_z,  # [B + 1]
    num_seqs,
    TILE_B: tl.constexpr,
):
    before = tl.zeros((), dtype=tl.int64)
    tl.store(p_z, before)
    for i_b in range(0, num_seqs, TILE_B):
        o_b = i_b + tl.arange(0, TILE_B)
        m_b = o_b < num_seqs
        b_size = load_lengths(p_offsets, o_b, m_b) * load_lengths(p_y_offsets, o_b, m_b)
        tl.store(p_z + o_b + 1, before + tl.cumsum(b_size, 0), mask=m_b)
        before += tl.sum(b_size, 0)


def matrix_offsets(offsets: torch.Tensor, y_offsets: torch.Tensor | None = None) -> torch.Tensor:
    """The running sum of Lx * Ly: [B + 1] int64."""
    check_place("matrix_offsets", offsets=offsets, y_offsets=y_offsets)
    offsets = offsets.contiguous()
    y_offsets = offsets if y_offsets is None else y_offsets.contiguous()
    z = offsets.new_empty(len(offsets), dtype=torch.int64)
    launch(matrix_offsets_kernel, (1,), offsets, y_offsets, z, len(offsets) - 1, TILE_B=TILE_B)
    return z
