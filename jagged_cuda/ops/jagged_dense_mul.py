"""jagged_dense_mul: rows of jagged and of padded sequences multiplied element by element."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_cuda.ops._dispatch import call, overridable, register


@overridable
def jagged_dense_mul(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """Multiply each row by the padded row at the same place, without a padded copy of x.

    For each sequence b: ``z_b[i] = x_b[i] * y[b, i]`` for i < M, and 0 from there on, since y
    counts as 0 where it has no row.

    Args:
        x: `[T, ...]` jagged; float32, float64, float16 or bfloat16.
        y: `[B, M, ...]` padded, of x's dtype, with x's dimensions after the first.
        offsets: `[B + 1]` int32 or int64, on x's device; sequence b is rows
            ``offsets[b]:offsets[b + 1]``.

    Returns:
        Like x; rows outside every sequence are 0.

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.
        torch.OutOfMemoryError: the GPU has no room for the result.

    Notes:
        Empty sequences are allowed, rows of y beyond a sequence's length and rows of x at M and
        beyond are not read, and nothing synchronises. Each product is rounded once, from float32
        (float64 for float64). Gradients: x's is the operator itself on the incoming one; y's holds
        the products ``dz_b[i] * x_b[i]``, zeros beyond a sequence's length: nothing is summed,
        since a row of y belongs to one row of x. So they are deterministic, and there are
        derivatives of any order. Autocast leaves the dtype alone. x and y are read in place if each
        of their rows is contiguous; any other layout costs one copy.

    Source: jagged_dense_elementwise_mul of FBGEMM, for one jagged dimension.

    Example:
        >>> x = torch.tensor([1.0, 2.0, 3.0])
        >>> jagged_dense_mul(x, torch.tensor([[10.0], [20.0]]), torch.tensor([0, 1, 3]))
        tensor([10., 40.,  0.])
    """
    return call(torch.ops.jagged_cuda.jagged_dense_mul.default, x, y, offsets)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, y, offsets = inputs
    ctx.max_len = y.shape[1]
    # What no gradient needs is not kept.
    wants_x, wants_y = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if wants_y else None, y if wants_x else None, offsets)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, y, offsets = ctx.saved_tensors
    wants_x, wants_y = ctx.needs_input_grad[:2]
    grad_x = grad_y = None
    if wants_x and wants_y:
        op = torch.ops.jagged_cuda.jagged_dense_mul_backward.default
        grad_x, grad_y = call(op, grad_out, x, y, offsets)
    elif wants_x:
        grad_x = call(torch.ops.jagged_cuda.jagged_dense_mul.default, grad_out, y, offsets)
    elif wants_y:
        grad_y = _padded_product(grad_out, x, offsets, ctx.max_len)
    return grad_x, grad_y, None


def _padded_product(x: Tensor, y: Tensor, offsets: Tensor, max_len: int) -> Tensor:
    """``x_b[i] * y_b[i]`` of two jagged tensors, padded; rows outside sequences are left out."""
    product: Tensor = call(torch.ops.jagged_cuda.jagged_to_padded.default, x * y, offsets, max_len)
    return product


def _setup_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _backward_of_gradients(ctx: Any, grad_x: Tensor, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    """Of ``dz_b[i] * y[b, i]`` and ``dz_b[i] * x_b[i]``: products again, in other places."""
    grad_out, x, y, offsets = ctx.saved_tensors
    wants_grad_out, wants_x, wants_y = ctx.needs_input_grad[:3]
    product = torch.ops.jagged_cuda.jagged_dense_mul.default
    of_grad_out = of_x = of_y = None
    if wants_grad_out:
        of_grad_out = call(product, grad_x, y, offsets) + call(product, x, grad_y, offsets)
    if wants_x:
        of_x = call(product, grad_out, grad_y, offsets)
    if wants_y:
        of_y = _padded_product(grad_out, grad_x, offsets, y.shape[1])
    return of_grad_out, of_x, of_y, None


register(
    "jagged_dense_mul",
    setup_context=_setup_context,
    backward=_backward,
    autocast="unchanged",
)
register(
    "jagged_dense_mul_backward",
    setup_context=_setup_gradients,
    backward=_backward_of_gradients,
    autocast="unchanged",
)
