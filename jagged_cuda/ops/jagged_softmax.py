"""jagged_softmax: softmax over the rows of each sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_cuda.ops._dispatch import call, overridable, register

_OP = torch.ops.jagged_cuda.jagged_softmax.default
_BACKWARD = torch.ops.jagged_cuda.jagged_softmax_backward.default


@overridable
def jagged_softmax(x: Tensor, offsets: Tensor, *, scale: float = 1.0) -> Tensor:
    """Take the softmax over the rows of each sequence, at each of the other positions.

    For each sequence b: ``z_b = softmax(scale * x_b, dim=0)``.

    Args:
        x: `[T, ...]` jagged; float32, float64, float16 or bfloat16.
        offsets: `[B + 1]` int32 or int64, on x's device; sequence b is rows
            ``offsets[b]:offsets[b + 1]``.
        scale: multiplies x before the softmax.

    Returns:
        Like x; rows outside every sequence are 0.

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.
        torch.OutOfMemoryError: the GPU has no room for the result.

    Notes:
        Empty sequences are allowed. Sums run in float32 (float64 for float64); under autocast the
        operator runs in float32. Deterministic, forward and backward, and a sequence's result
        does not depend on its neighbours. No double backward. x is read in place if it is
        contiguous, or `[T, D]` with a contiguous last dimension; any other layout costs one copy.

    Source: "Enhancing Performance and Scalability of Large-Scale Recommendation Systems with
    Jagged Flash Attention", RecSys '24, Table 1.

    Example:
        >>> jagged_softmax(torch.zeros(5), torch.tensor([0, 4, 5]))
        tensor([0.2500, 0.2500, 0.2500, 0.2500, 1.0000])
    """
    return call(_OP, x, offsets, scale)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, offsets, ctx.scale = inputs
    ctx.save_for_backward(output, offsets)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None, None]:
    out, offsets = ctx.saved_tensors
    return call(_BACKWARD, grad_out, out, offsets, ctx.scale), None, None


register("jagged_softmax_backward")
register(
    "jagged_softmax",
    setup_context=_setup_context,
    backward=_backward,
    autocast="float32",
)
