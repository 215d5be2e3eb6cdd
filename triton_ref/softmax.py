"""What the softmax kernels share: softmax along lines of a matrix, beside each other, and back.

p_x points to the first element of each line, [J], and stride_x to the next ones; so do the others.
Lines outside the mask m_j are left alone; those of no sequence get 0, and so does their gradient.
"""

import triton
import triton.language as tl


@triton.jit
def load_tile(p_x, stride, o_i, m_tile, ACCUMULATOR):
    """[I, J]"""
    return tl.load(p_x[None, :] + o_i[:, None] * stride, mask=m_tile, other=0.0).to(ACCUMULATOR)


@triton.jit
def store_tile(p_z, stride, o_i, m_tile, b_z):
    tl.store(p_z[None, :] + o_i[:, None] * stride, b_z.to(p_z.dtype.element_ty), mask=m_tile)


@triton.jit
def softmax_lines(
    p_x, stride_x, p_z, stride_z, length, m_j, in_sequence, scale, ACCUMULATOR, TILE_I
):
    """z = softmax(scale * x), in two passes."""
    b_max = tl.full(m_j.shape, float("-inf"), dtype=ACCUMULATOR)
    b_sum = tl.zeros(m_j.shape, dtype=ACCUMULATOR)
    for first in range(0, length, TILE_I):
        o_i = first + tl.arange(0, TILE_I).to(tl.int64)
        m_x = (o_i < length)[:, None] & m_j[None, :]
        b_x = load_tile(p_x, stride_x, o_i, m_x, ACCUMULATOR) * scale
        b_x = tl.where(m_x, b_x, float("-inf"))
        b_max_new = tl.maximum(b_max, tl.max(b_x, 0))
        # While a line has seen only -inf, -inf - -inf would be NaN.
        b_shift = tl.where(b_max_new == float("-inf"), 0.0, b_max_new)
        b_sum = b_sum * tl.exp(b_max - b_shift) + tl.sum(tl.exp(b_x - b_shift[None, :]), 0)
        b_max = b_max_new
    b_shift = tl.where(b_max == float("-inf"), 0.0, b_max)
    b_sum = tl.where(m_j, b_sum, 1.0)
    for first in range(0, length, TILE_I):
        o_i = first + tl.arange(0, TILE_I).to(tl.int64)
        m_x = (o_i < length)[:, None] & m_j[None, :]
        b_x = load_tile(p_x, stride_x, o_i, m_x, ACCUMULATOR) * scale
        b_z = tl.exp(b_x - b_shift[None, :]) / b_sum[None, :]
        store_tile(p_z, stride_z, o_i, m_x, tl.where(in_sequence, b_z, 0.0))


@triton.jit
def softmax_lines_backward(
    p_grad_z,
    stride_g,
    p_z,
    p_grad_x,
    stride_z,
    length,
    m_j,
    in_sequence,
    scale,
    ACCUMULATOR,
    TILE_I,
):
    """grad_x = scale z (grad_z - sum z grad_z); z and grad_x share a stride."""
    b_sum = tl.zeros(m_j.shape, dtype=ACCUMULATOR)  # of z * grad_z
    for first in range(0, length, TILE_I):
        o_i = first + tl.arange(0, TILE_I).to(tl.int64)
        m_z = (o_i < length)[:, None] & m_j[None, :]
        b_z = load_tile(p_z, stride_z, o_i, m_z, ACCUMULATOR)
        b_sum += tl.sum(b_z * load_tile(p_grad_z, stride_g, o_i, m_z, ACCUMULATOR), 0)
    for first in range(0, length, TILE_I):
        o_i = first + tl.arange(0, TILE_I).to(tl.int64)
        m_z = (o_i < length)[:, None] & m_j[None, :]
        b_z = load_tile(p_z, stride_z, o_i, m_z, ACCUMULATOR)
        b_grad_z = load_tile(p_grad_z, stride_g, o_i, m_z, ACCUMULATOR)
        b_grad_x = b_z * (b_grad_z - b_sum[None, :]) * scale
        store_tile(p_grad_x, stride_z, o_i, m_z, tl.where(in_sequence, b_grad_x, 0.0))
