"""What the softmax kernels share: softmax over lines of a matrix, beside each other, and back.

Element i of line j is at i * strides[0] + j * strides[1]. Where `keeps` is false, results are 0.
"""

import triton
import triton.language as tl

from .common import load_block


@triton.jit
def store_elements(p_z, strides, b_z, o_i, o_j, m_i, m_j, keeps):
    b_z = tl.where(keeps, b_z, 0.0).to(p_z.dtype.element_ty)
    o_z = o_i[:, None] * strides[0] + o_j[None, :] * strides[1]
    tl.store(p_z + o_z, b_z, mask=m_i[:, None] & m_j[None, :])


@triton.jit
def softmax_lines(
    p_x, x_strides, p_z, z_strides, length, o_j, m_j, keeps, scale, ACCUMULATOR, TILE_I, TILE_J
):
    """z = softmax(scale * x) along i, in two passes."""
    b_max = tl.full([TILE_J], float("-inf"), dtype=ACCUMULATOR)
    b_sum = tl.zeros([TILE_J], dtype=ACCUMULATOR)
    for first in range(0, length, TILE_I):
        o_i = first + tl.arange(0, TILE_I).to(tl.int64)
        m_x = (o_i < length)[:, None] & m_j[None, :]
        # [TILE_I, TILE_J]
        b_x = load_block(p_x, x_strides, o_i, o_j, o_i < length, m_j)
        b_x = tl.where(m_x, b_x.to(ACCUMULATOR) * scale, float("-inf"))
        b_max_new = tl.maximum(b_max, tl.max(b_x, 0))
        # While a line has seen only -inf, -inf - -inf would be NaN.
        b_shift = tl.where(b_max_new == float("-inf"), 0.0, b_max_new)
        b_sum = b_sum * tl.exp(b_max - b_shift) + tl.sum(tl.exp(b_x - b_shift[None, :]), 0)
        b_max = b_max_new
    b_shift = tl.where(b_max == float("-inf"), 0.0, b_max)
    b_sum = tl.where(m_j, b_sum, 1.0)
    for first in range(0, length, TILE_I):
        o_i = first + tl.arange(0, TILE_I).to(tl.int64)
        # [TILE_I, TILE_J]
        b_x = load_block(p_x, x_strides, o_i, o_j, o_i < length, m_j).to(ACCUMULATOR)
        b_z = tl.exp(b_x * scale - b_shift[None, :]) / b_sum[None, :]
        store_elements(p_z, z_strides, b_z, o_i, o_j, o_i < length, m_j, keeps)


@triton.jit
def softmax_lines_backward(
    p_grad_z,
    grad_strides,
    p_z,  # its strides are those of grad_x too
    z_strides,
    p_grad_x,
    length,
    o_j,
    m_j,
    keeps,
    scale,
    ACCUMULATOR,
    TILE_I,
    TILE_J,
):
    """grad_x = scale z (grad_z - sum z grad_z) along i."""
    b_sum = tl.zeros([TILE_J], dtype=ACCUMULATOR)  # of z * grad_z
    for first in range(0, length, TILE_I):
        o_i = first + tl.arange(0, TILE_I).to(tl.int64)
        # [TILE_I, TILE_J] both
        b_z = load_block(p_z, z_strides, o_i, o_j, o_i < length, m_j).to(ACCUMULATOR)
        b_grad_z = load_block(p_grad_z, grad_strides, o_i, o_j, o_i < length, m_j)
        b_sum += tl.sum(b_z * b_grad_z.to(ACCUMULATOR), 0)
    for first in range(0, length, TILE_I):
        o_i = first + tl.arange(0, TILE_I).to(tl.int64)
        # [TILE_I, TILE_J] both
        b_z = load_block(p_z, z_strides, o_i, o_j, o_i < length, m_j).to(ACCUMULATOR)
        b_grad_z = load_block(p_grad_z, grad_strides, o_i, o_j, o_i < length, m_j)
        b_grad_x = b_z * (b_grad_z.to(ACCUMULATOR) - b_sum[None, :]) * scale
        store_elements(p_grad_x, z_strides, b_grad_x, o_i, o_j, o_i < length, m_j, keeps)
