"""What the attention kernels share: the online softmax, P and dS again, and tiles."""

import torch
import triton
import triton.language as tl

from .common import EXACT_PRODUCTS, accumulator


@triton.jit
def load_block(p_first, o_row, o_dim, m_row, m_dim, stride_row, stride_dim):
    """Rows of one head, zeros where masked: [rows, dims]."""
    p_block = p_first + o_row[:, None] * stride_row + o_dim[None, :].to(tl.int64) * stride_dim
    return tl.load(p_block, mask=m_row[:, None] & m_dim[None, :], other=0.0)


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
    b_q, b_k, b_v, b_grad_out, b_lse, b_delta, m_s, scale, INPUT_PRECISION: tl.constexpr
):
    """P and dS, zeros where masked: [M, N] both."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=INPUT_PRECISION) * scale
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
        "TILE_M": tile,
        "TILE_N": tile,
        "ACCUMULATOR": accumulator(q),
        "INPUT_PRECISION": precision,
        "num_stages": 2,
        **EXACT_PRODUCTS,
    }
