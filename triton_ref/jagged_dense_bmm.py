"""z_b = activation(x_b y_b + bias_b): rows of a sequence times the sequence's own dense matrix."""

import torch
import triton
import triton.language as tl

from jagged_cuda.ops._contract import fail_argument

from . import jagged_jagged_bmm as transposed
from . import jagged_sum as reduction
from .common import (
    TILE_M,
    TILE_N,
    accumulator,
    check,
    find_tile,
    input_precision,
    launch,
    load_rows,
    multiply,
    num_tiles,
    store_block,
)

ACTIVATIONS = (None, "relu", "gelu", "silu", "sigmoid", "tanh")


@triton.jit
def activate(b_z, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        b_z = tl.where(b_z < 0, 0.0, b_z)
    elif ACTIVATION == "gelu":
        b_z = b_z * 0.5 * (1.0 + tl.math.erf(b_z * 0.7071067811865476))
    elif ACTIVATION == "silu":
        b_z = b_z / (1.0 + tl.exp(-b_z))
    elif ACTIVATION == "sigmoid":
        b_z = 1.0 / (1.0 + tl.exp(-b_z))
    elif ACTIVATION == "tanh":
        b_z = 2.0 / (1.0 + tl.exp(-2.0 * b_z)) - 1.0
    return b_z


@triton.jit(do_not_specialize=["num_seqs", "total"])
def jagged_dense_bmm_kernel(
    p_x,  # [T, K]
    p_y,  # [B, K, N]
    p_bias,  # [B, N], or None
    p_offsets,  # [B + 1]
    p_z,  # [T, N], contiguous
    num_seqs,
    total,
    K,
    N,
    x_strides,
    y_strides,
    bias_strides,
    ACTIVATION: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    i_seq, first_row = find_tile(p_offsets, tl.program_id(0), num_seqs, total, TILE_M)
    _, end = load_rows(p_offsets, i_seq, num_seqs, total)
    in_sequence = (i_seq >= 0) & (i_seq < num_seqs)
    # Rows outside every sequence sum over nothing, which makes them zeros.
    num_terms = tl.where(in_sequence, K, 0)

    o_m = first_row + tl.arange(0, TILE_M)  # int64
    o_n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    m_m = o_m < end
    m_n = o_n < N
    p_m = p_x + o_m * x_strides[0]
    p_n = p_y + i_seq.to(tl.int64) * y_strides[0] + o_n * y_strides[2]
    b_z = multiply(
        p_m, m_m, x_strides[1], p_n, m_n, y_strides[1], 0, num_terms, ACCUMULATOR, INPUT_PRECISION
    )
    if p_bias is not None:
        # [TILE_N]
        p_row = p_bias + i_seq.to(tl.int64) * bias_strides[0]
        b_bias = tl.load(p_row + o_n * bias_strides[1], mask=m_n & in_sequence, other=0.0)
        b_z += b_bias[None, :].to(ACCUMULATOR)
    b_z = tl.where(in_sequence, activate(b_z, ACTIVATION), 0.0)
    store_block(p_z, b_z, o_m, o_n, m_m, m_n, N)


class JaggedDenseBmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, offsets, precision, bias, activation):
        ctx.save_for_backward(x, y, offsets, bias)
        ctx.precision, ctx.activation = precision, activation
        total, K = x.shape
        num_seqs, _, N = y.shape
        z = x.new_empty(total, N)
        launch(
            jagged_dense_bmm_kernel,
            (num_tiles(total, num_seqs, TILE_M.value), triton.cdiv(N, TILE_N.value)),
            x,
            y,
            bias,
            offsets,
            z,
            num_seqs,
            total,
            K,
            N,
            x.stride(),
            y.stride(),
            (0, 0) if bias is None else bias.stride(),
            ACTIVATION=activation,
            ACCUMULATOR=accumulator(x),
            INPUT_PRECISION=precision,
        )
        return z

    @staticmethod
    def backward(ctx, grad_z):
        x, y, offsets, bias = ctx.saved_tensors
        need_x, need_y, _, _, need_bias, _ = ctx.needs_input_grad
        grad_x = grad_y = grad_bias = None
        if ctx.activation is not None:
            product = JaggedDenseBmm.apply(x, y, offsets, ctx.precision, bias, None)
            with torch.enable_grad():
                leaf = product.detach().requires_grad_()
                function = getattr(torch.nn.functional, ctx.activation)
                (grad_z,) = torch.autograd.grad(function(leaf), leaf, grad_z)
        if need_x:
            grad_x = JaggedDenseBmm.apply(
                grad_z, y.transpose(1, 2), offsets, ctx.precision, None, None
            )
        if need_y:
            grad_y = transposed.JaggedJaggedBmm.apply(x, grad_z, offsets, ctx.precision)
        if need_bias:
            grad_bias = reduction.JaggedSum.apply(grad_z, offsets, False)
        return grad_x, grad_y, None, None, grad_bias, None


def jagged_dense_bmm(
    x: torch.Tensor,
    y: torch.Tensor,
    offsets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """z_b = activation(x_b y_b + bias_b) for x [T, D], y [B, D, N] and bias [B, N]: [T, N].

    Zeros outside every sequence. Any strides are read as they are. The gradients are this family's
    own operators, so without activation it can be differentiated any number of times.
    """
    check("jagged_dense_bmm", x=x, y=y, offsets=offsets, bias=bias)
    if activation not in ACTIVATIONS:
        expected = "None, relu, gelu, silu, sigmoid or tanh"
        fail_argument("jagged_dense_bmm", "activation", expected, activation)
    precision = input_precision()
    return JaggedDenseBmm.apply(x, y, offsets.contiguous(), precision, bias, activation)
