"""A normed row times another one, with dropout; one program for each row."""

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from .common import accumulator, accumulator_type, check, launch

TILE_T = 64  # rows whose sums for the gradients of weight and bias one program adds


@triton.jit
def draw_keep(p_seed, i_row, o_d, dropped, HAS_SEED: tl.constexpr, ACCUMULATOR: tl.constexpr):
    """0 for elements that are dropped, else the factor of the others: [TILE_D]."""
    b_keep = tl.full(o_d.shape, 1.0, ACCUMULATOR)
    if HAS_SEED:
        seed = tl.load(p_seed)
        o_block = (o_d // 8).to(tl.uint32)
        o_row = (o_d * 0).to(tl.int64) + i_row
        c1, c2 = (o_row & 0xFFFFFFFF).to(tl.uint32), (o_row >> 32).to(tl.uint32)
        w0, w1, w2, w3 = tl.philox(seed, o_block, c1, c2, o_block * 0)
        o_word = o_d % 8 // 2
        words = tl.where(o_word < 2, tl.where(o_word == 0, w0, w1), tl.where(o_word == 2, w2, w3))
        halves = tl.where(o_d % 2 == 0, words & 0xFFFF, words >> 16)
        scale = 65536 / ((o_d * 0 + 65536) - dropped).to(ACCUMULATOR)
        b_keep = tl.where(halves.to(tl.int32) < dropped, 0.0, scale).to(ACCUMULATOR)
    return b_keep


@triton.jit
def load_row(p_x, strides, i_row, o_d, m_d, ACCUMULATOR: tl.constexpr):
    """[TILE_D]"""
    o_x = i_row * strides[0] + o_d.to(tl.int64) * strides[1]
    return tl.load(p_x + o_x, mask=m_d, other=0.0).to(ACCUMULATOR)


@triton.jit
def normalise(b_x, m_d, D, eps):
    """xhat, zeros past the row, and 1 / standard deviation."""
    mean = tl.sum(b_x) / D
    b_x = tl.where(m_d, b_x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(b_x * b_x) / D + eps)
    return b_x * rstd, rstd


@triton.jit(do_not_specialize=["dropped"])
def layer_norm_mul_dropout_kernel(
    p_x,  # [T, D]
    p_u,  # [T, D]
    p_weight,  # [D]
    p_bias,  # [D]
    p_seed,  # [1] or None
    p_y,  # [T, D], contiguous
    D,
    x_strides,
    u_strides,
    dropped,  # of 2^16
    EPS: tl.constexpr,  # in full: a number would be of 32 bits
    HAS_SEED: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    TILE_D: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, TILE_D)
    m_d = o_d < D
    b_x = load_row(p_x, x_strides, i_row, o_d, m_d, ACCUMULATOR)
    b_u = load_row(p_u, u_strides, i_row, o_d, m_d, ACCUMULATOR)
    b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0)
    b_bias = tl.load(p_bias + o_d, mask=m_d, other=0.0)
    b_xhat, _ = normalise(b_x, m_d, D, EPS)
    b_keep = draw_keep(p_seed, i_row, o_d, dropped, HAS_SEED, ACCUMULATOR)
    b_y = tl.where(b_keep == 0.0, 0.0, b_u * (b_xhat * b_weight + b_bias) * b_keep)
    tl.store(p_y + i_row * D + o_d, b_y.to(p_y.dtype.element_ty), mask=m_d)


@triton.jit(do_not_specialize=["total", "dropped"])
def layer_norm_mul_dropout_backward_kernel(
    p_grad_y,  # [T, D]
    p_x,  # [T, D]
    p_u,  # [T, D]
    p_weight,  # [D]
    p_bias,  # [D]
    p_seed,  # [1] or None
    p_grad_x,  # [T, D], contiguous
    p_grad_u,  # [T, D], contiguous
    p_sums,  # [programs, 2, D]
    total,
    D,
    grad_strides,
    x_strides,
    u_strides,
    dropped,  # of 2^16
    EPS: tl.constexpr,  # in full: a number would be of 32 bits
    HAS_SEED: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_D: tl.constexpr,
):
    i_first = tl.program_id(0).to(tl.int64) * TILE_T
    o_d = tl.arange(0, TILE_D)
    m_d = o_d < D
    b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0)
    b_bias = tl.load(p_bias + o_d, mask=m_d, other=0.0)
    b_grad_weight = tl.zeros([TILE_D], ACCUMULATOR)
    b_grad_bias = tl.zeros([TILE_D], ACCUMULATOR)
    for i_row in range(i_first, tl.minimum(i_first + TILE_T, total)):
        b_x = load_row(p_x, x_strides, i_row, o_d, m_d, ACCUMULATOR)
        b_u = load_row(p_u, u_strides, i_row, o_d, m_d, ACCUMULATOR)
        b_g = load_row(p_grad_y, grad_strides, i_row, o_d, m_d, ACCUMULATOR)
        b_xhat, rstd = normalise(b_x, m_d, D, EPS)
        b_keep = draw_keep(p_seed, i_row, o_d, dropped, HAS_SEED, ACCUMULATOR)
        b_g = tl.where(b_keep == 0.0, 0.0, b_g * b_keep)
        b_grad_u = b_g * (b_xhat * b_weight + b_bias)
        b_grad_weight += b_g * b_u * b_xhat
        b_grad_bias += b_g * b_u
        b_h = b_g * b_u * b_weight
        mean_h, mean_hx = tl.sum(b_h) / D, tl.sum(b_h * b_xhat) / D
        b_grad_x = rstd * (b_h - mean_h - b_xhat * mean_hx)
        o_row = i_row * D + o_d
        tl.store(p_grad_x + o_row, b_grad_x.to(p_grad_x.dtype.element_ty), mask=m_d)
        tl.store(p_grad_u + o_row, b_grad_u.to(p_grad_u.dtype.element_ty), mask=m_d)
    o_sums = tl.program_id(0).to(tl.int64) * 2 * D + o_d
    tl.store(p_sums + o_sums, b_grad_weight, mask=m_d)
    tl.store(p_sums + o_sums + D, b_grad_bias, mask=m_d)


class LayerNormMulDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, u, weight, bias, seed, eps, p):
        ctx.save_for_backward(x, u, weight, bias, seed)
        ctx.options = eps, p
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows = len(x) if x.shape[1] > 0 else 0
        launch(
            layer_norm_mul_dropout_kernel,
            (rows,),
            x,
            u,
            weight,
            bias,
            seed,
            y,
            x.shape[1],
            x.stride(),
            u.stride(),
            EPS=eps,
            **options_of(x, seed, p),
        )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):
        x, u, weight, bias, seed = ctx.saved_tensors
        eps, p = ctx.options
        grad_x, grad_u = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2)
        )
        programs = triton.cdiv(len(x), TILE_T) if x.shape[1] > 0 else 0
        sums = x.new_empty((programs, 2, x.shape[1]), dtype=accumulator_type(x))
        launch(
            layer_norm_mul_dropout_backward_kernel,
            (programs,),
            grad_y,
            x,
            u,
            weight,
            bias,
            seed,
            grad_x,
            grad_u,
            sums,
            *x.shape,
            grad_y.stride(),
            x.stride(),
            u.stride(),
            EPS=eps,
            TILE_T=TILE_T,
            **options_of(x, seed, p),
        )
        grad_weight, grad_bias = sums.sum(0)
        return grad_x, grad_u, grad_weight, grad_bias, None, None, None


def options_of(x: torch.Tensor, seed: torch.Tensor | None, p: float) -> dict[str, object]:
    dropped = int(p * 2**16 + 0.5)
    return {
        "dropped": dropped,
        "HAS_SEED": seed is not None and dropped > 0,
        "ACCUMULATOR": accumulator(x),
        "TILE_D": triton.next_power_of_2(max(1, x.shape[1])),
    }


def layer_norm_mul_dropout(
    x: torch.Tensor,
    u: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    eps: float = 1e-6,
    p: float = 0.0,
    seed: torch.Tensor | None = None,
) -> torch.Tensor:
    """dropout(u * layer_norm(x)) for x, u [T, D]: the elements that jagged_cuda drops too."""
    weight, bias = (t.to(accumulator_type(x)).contiguous() for t in (weight, bias))
    check("layer_norm_mul_dropout", x=x, u=u, weight=weight, bias=bias, seed=seed)
    return LayerNormMulDropout.apply(x, u, weight, bias, seed, eps, p)
