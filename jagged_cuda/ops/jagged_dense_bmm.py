"""jagged_dense_bmm: each sequence times a dense matrix of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_cuda.ops import _contract
from jagged_cuda.ops._memory import call
from jagged_cuda.ops._precision import allow_tf32
from jagged_cuda.ops._registration import register


def jagged_dense_bmm(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """Multiply the rows of each sequence by the sequence's own dense matrix.

    For each sequence b: ``z_b = x_b @ y_b``.

    Args:
        x: `[T, D]` jagged; float32, float64, float16 or bfloat16.
        y: `[B, D, N]` dense, of x's dtype and device.
        offsets: `[B + 1]` int32 or int64, on x's device; sequence b is rows
            ``offsets[b]:offsets[b + 1]``.

    Returns:
        `[T, N]` of x's dtype; rows outside every sequence are 0.

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.
        torch.OutOfMemoryError: the GPU has no room for the result.

    Notes:
        Empty sequences are allowed. Sums run in float32 (float64 for float64). float32 on CUDA
        obeys ``torch.backends.cuda.matmul.fp32_precision``: products are as accurate as float32
        unless it allows TF32. The gradient of x is this operator with y transposed, that of y is
        jagged_jagged_bmm, so that derivatives of any order exist. Deterministic, and a sequence's
        result does not depend on its neighbours. x is read in place if its last dimension is
        contiguous, y if one of its last two is; any other layout costs one copy of that operand.

    Source: "Enhancing Performance and Scalability of Large-Scale Recommendation Systems with
    Jagged Flash Attention", RecSys '24, Table 1.

    Example:
        >>> x, y = torch.ones(5, 2), torch.ones(2, 2, 3)
        >>> jagged_dense_bmm(x, y, torch.tensor([0, 4, 5])).shape
        torch.Size([5, 3])
    """
    return call(torch.ops.jagged_cuda.jagged_dense_bmm.default, x, y, offsets, allow_tf32())


def _fake(x: Tensor, y: Tensor, offsets: Tensor, allow_tf32: bool = False) -> Tensor:
    op = "jagged_dense_bmm"
    _contract.check_dim(op, "x", x, 2, "[T, D]")
    _contract.check_dim(op, "y", y, 3, "[B, D, N]")
    _contract.check_floating(op, "x", x)
    _contract.check_like(op, "y", y, x)
    _contract.check_offsets(op, "offsets", offsets, x)
    _contract.check_shape(op, "y", y, (offsets.shape[0] - 1, x.shape[1], y.shape[2]))
    return x.new_empty((x.shape[0], y.shape[2]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, y, offsets, ctx.allow_tf32 = inputs
    ctx.save_for_backward(x, y, offsets)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x, y, offsets = ctx.saved_tensors
    ops = torch.ops.jagged_cuda
    grad_x = grad_y = None
    if ctx.needs_input_grad[0]:
        y_transposed = y.transpose(1, 2)
        grad_x = call(ops.jagged_dense_bmm.default, grad_out, y_transposed, offsets, ctx.allow_tf32)
    if ctx.needs_input_grad[1]:
        grad_y = call(ops.jagged_jagged_bmm.default, x, grad_out, offsets, ctx.allow_tf32)
    return grad_x, grad_y, None, None


register(
    "jagged_dense_bmm",
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    autocast="lower_precision",
)
