"""jagged_jagged_bmm: x_b^T y_b for each sequence of two jagged tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_cuda.ops._dispatch import allow_tf32, call, overridable, register

_OP = torch.ops.jagged_cuda.jagged_jagged_bmm.default
_BACKWARD = torch.ops.jagged_cuda.jagged_jagged_bmm_backward.default
_DENSE = torch.ops.jagged_cuda.jagged_dense_bmm.default


@overridable
def jagged_jagged_bmm(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """Multiply two jagged tensors sequence by sequence, summing over the rows of each sequence.

    For each sequence b: ``z_b = x_b.T @ y_b``.

    Args:
        x: `[T, D]` jagged; float32, float64, float16 or bfloat16.
        y: `[T, N]` jagged with the same offsets, of x's dtype and device.
        offsets: `[B + 1]` int32 or int64, on x's device; sequence b is rows
            ``offsets[b]:offsets[b + 1]``.

    Returns:
        `[B, D, N]` of x's dtype; zeros for an empty sequence.

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.
        torch.OutOfMemoryError: the GPU has no room for the result.

    Notes:
        Rows outside every sequence are not read and get zero gradient. Sums run in float32
        (float64 for float64). float32 on CUDA obeys
        ``torch.backends.cuda.matmul.fp32_precision``: products are as accurate as float32 unless
        it allows TF32. The gradients are jagged_dense_bmm twice, so that derivatives of any order
        exist. Deterministic, and a sequence's result does not depend on its neighbours. x and y
        are read in place if their last dimension is contiguous; any other layout costs one copy
        of that operand.

    Source: "Enhancing Performance and Scalability of Large-Scale Recommendation Systems with
    Jagged Flash Attention", RecSys '24, Table 1.

    Example:
        >>> x, y = torch.ones(5, 2), torch.ones(5, 3)
        >>> jagged_jagged_bmm(x, y, torch.tensor([0, 4, 5]))[:, 0, 0]
        tensor([4., 1.])
    """
    return call(_OP, x, y, offsets, allow_tf32(x.dtype))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, y, offsets, ctx.allow_tf32 = inputs
    ctx.save_for_backward(x, y, offsets)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x, y, offsets = ctx.saved_tensors
    wants_x, wants_y, *_ = ctx.needs_input_grad
    grad_x = grad_y = None
    if wants_x and wants_y and not torch.is_grad_enabled():  # one operator, without derivatives
        grad_x, grad_y = call(_BACKWARD, grad_out, x, y, offsets, ctx.allow_tf32)
        return grad_x, grad_y, None, None
    if wants_x:
        grad_x = call(_DENSE, y, grad_out.transpose(1, 2), offsets, ctx.allow_tf32)
    if wants_y:
        grad_y = call(_DENSE, x, grad_out, offsets, ctx.allow_tf32)
    return grad_x, grad_y, None, None


register("jagged_jagged_bmm_backward")
register(
    "jagged_jagged_bmm",
    setup_context=_setup_context,
    backward=_backward,
    autocast="lower_precision",
)
