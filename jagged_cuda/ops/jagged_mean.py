"""jagged_mean: the mean over the rows of each sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_cuda.ops._dispatch import call, overridable, register
from jagged_cuda.ops.jagged_sum import setup_context


@overridable
def jagged_mean(x: Tensor, offsets: Tensor) -> Tensor:
    """Average the rows of each sequence.

    For each sequence b: ``z[b] = x_b.mean(0)``, and 0 without rows, where torch.mean is nan.

    Args:
        x: `[T, ...]` jagged; float32, float64, float16 or bfloat16.
        offsets: `[B + 1]` int32 or int64, on x's device; sequence b is rows
            ``offsets[b]:offsets[b + 1]``.

    Returns:
        `[B, ...]` of x's dtype; 0 for an empty sequence.

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.
        torch.OutOfMemoryError: the GPU has no room for the result.

    Notes:
        Rows outside every sequence are not read and get zero gradient. Sums run in float32
        (float64 for float64), those of long sequences in parts that are added in order, and are
        divided before they are rounded to x's dtype. The gradient is jagged_broadcast of the
        result's over L, so that derivatives of any order exist. Autocast leaves the dtype alone.
        Deterministic, and a sequence's result does not depend on its neighbours. x is read in
        place if each of its rows is contiguous; any other layout costs one copy.

    Example:
        >>> jagged_mean(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 2, 2, 3]))
        tensor([1.5000, 0.0000, 3.0000])
    """
    return call(torch.ops.jagged_cuda.jagged_mean.default, x, offsets)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None]:
    (offsets,) = ctx.saved_tensors
    # In the dtype of sums: float16 has no number for 70,000 rows.
    sums = torch.float64 if grad_out.dtype is torch.float64 else torch.float32
    lengths = offsets.diff().clamp(min=1).to(sums)
    share = grad_out.to(sums) / lengths.reshape(-1, *(1,) * (grad_out.dim() - 1))
    op = torch.ops.jagged_cuda.jagged_broadcast.default
    return call(op, share.to(grad_out.dtype), offsets, ctx.total), None


register(
    "jagged_mean",
    setup_context=setup_context,
    backward=_backward,
    autocast="unchanged",
)
