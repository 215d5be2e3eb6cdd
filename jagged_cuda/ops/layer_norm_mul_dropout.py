"""layer_norm_mul_dropout: a normed row times another one, with dropout, in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_cuda.ops._contract import fail_argument
from jagged_cuda.ops._dispatch import call, overridable, register


@overridable
def layer_norm_mul_dropout(
    x: Tensor,
    u: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float = 1e-6,
    p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """Norm each row, multiply it by the row of u, and drop elements, in one pass.

    For each row t: ``z[t] = keep[t] * u[t] * (xhat[t] * weight + bias)`` with
    ``xhat = (x - mean(x)) / sqrt(var(x) + eps)`` over the row's D features (var divides by D), and
    keep 0 with probability p, else ``1 / (1 - p)``. Rows are packed: no offsets are needed.

    Args:
        x: `[T, D]`; float32, float64, float16 or bfloat16.
        u: `[T, D]`, of x's dtype and device.
        weight, bias: `[D]`, of x's dtype or float32 (float64 for float64), in which the kernels
            take them: a float16 or bfloat16 one costs a copy.
        eps: added to the variance.
        p: probability of a 0, from 0 to 1.
        seed: `[1]` int64 on x's device, which says what is dropped; needed if p is not 0. It is
            read on the device, so that a CUDA graph replays with another seed.

    Returns:
        Like x. An element that is dropped is 0, whatever x and u hold there.

    Raises:
        RuntimeError: a shape, dtype or device does not fit, p is not from 0 to 1, or p is not 0 and
            seed is None; the message names the argument.
        torch.OutOfMemoryError: the GPU has no room for the result.

    Notes:
        What is dropped depends on the seed and on an element's row and column in x alone: random
        words are Philox 4x32-10 (Salmon et al., 2011) with the seed as key and row and column as
        counter, the same on the CPU, on CUDA and in Triton, in any dtype. p is rounded to a
        multiple of 2^-16, in what is dropped and in what the others are multiplied by. No mask is
        kept: the backward pass draws it again, and computes mean and variance again. Use another
        seed for each layer and step.

        No row is needed (T = 0), and nothing synchronises. Sums run in float32 (float64 for
        float64), and each result is rounded once. Gradients of x, u, weight and bias; those of
        weight and bias are summed in fixed order. Deterministic, forward and backward; no double
        backward. Under autocast x and u are cast to its dtype; weight and bias stay as they are.
        x and u are read in place if their last dimension is contiguous; any other layout costs one
        copy. Fastest where rows are multiples of 16 bytes.

    Sources: the output of an HSTU layer, "Actions Speak Louder than Words" (Zhai et al., 2024),
    equation 3; "Layer Normalization" (Ba, Kiros and Hinton, 2016).

    Example:
        >>> x, u = torch.tensor([[1.0, 3.0], [2.0, 6.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> layer_norm_mul_dropout(x, u, torch.ones(2), torch.ones(2), eps=0.0)
        tensor([[0., 4.],
                [0., 8.]])
    """
    op = "layer_norm_mul_dropout"
    if not 0 <= p <= 1:
        fail_argument(op, "p", "from 0 to 1", p)
    if p > 0 and seed is None:
        fail_argument(op, "seed", "a tensor of [1] int64, since p is not 0", "None")
    if x.dtype.itemsize == 2:
        weight, bias = (t.float() if t.dtype is x.dtype else t for t in (weight, bias))
    operator = torch.ops.jagged_cuda.layer_norm_mul_dropout.default
    return call(operator, x, u, weight, bias, seed, eps, p)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.eps, ctx.p = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    op = torch.ops.jagged_cuda.layer_norm_mul_dropout_backward.default
    gradients = call(op, grad_out, *ctx.saved_tensors, ctx.eps, ctx.p)
    return (*gradients, None, None, None)


register("layer_norm_mul_dropout_backward")
register(
    "layer_norm_mul_dropout",
    setup_context=_setup_context,
    backward=_backward,
    autocast="lower_precision",
)
