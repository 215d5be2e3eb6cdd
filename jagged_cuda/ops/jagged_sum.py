"""jagged_sum: the sum over the rows of each sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_cuda.ops._dispatch import call, overridable, register


@overridable
def jagged_sum(x: Tensor, offsets: Tensor) -> Tensor:
    """Sum the rows of each sequence.

    For each sequence b: ``z[b] = x_b.sum(0)``.

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
        (float64 for float64), those of long sequences in parts that are added in order. The
        gradient is jagged_broadcast, so that derivatives of any order exist. Autocast leaves the
        dtype alone. Deterministic, and a sequence's result does not depend on its neighbours. x is
        read in place if each of its rows is contiguous; any other layout costs one copy.

    Example:
        >>> jagged_sum(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 2, 2, 3]))
        tensor([3., 0., 3.])
    """
    return call(torch.ops.jagged_cuda.jagged_sum.default, x, offsets)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, offsets = inputs
    ctx.total = x.shape[0]
    ctx.save_for_backward(offsets)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None]:
    (offsets,) = ctx.saved_tensors
    op = torch.ops.jagged_cuda.jagged_broadcast.default
    return call(op, grad_out, offsets, ctx.total), None


register(
    "jagged_sum",
    setup_context=setup_context,
    backward=_backward,
    autocast="unchanged",
)
