"""jagged2_softmax: softmax of each sequence's matrix, over its columns or its rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_cuda.ops import _matrices
from jagged_cuda.ops._dispatch import call, overridable, register


@overridable
def jagged2_softmax(
    a: Tensor,
    offsets: Tensor,
    *,
    y_offsets: Tensor | None = None,
    matrix_offsets: Tensor | None = None,
    dim: int = -1,
    scale: float = 1.0,
) -> Tensor:
    """Take the softmax of each sequence's own matrix.

    For each sequence b, with A_b the matrix `[Lx, Ly]` that `a` holds row by row:
    ``z_b = softmax(scale * A_b, dim)``. With dim=-1 these are attention's weights from its scores.

    Args:
        a: `[sum Lx*Ly]`, one matrix per sequence; float32, float64, float16 or bfloat16.
        offsets: `[B + 1]` int32 or int64, on a's device; sequence b of them has as many rows (Lx)
            as A_b.
        y_offsets: `[B + 1]` of offsets' dtype; sequence b of them has as many rows (Ly) as A_b
            has columns. None means offsets.
        matrix_offsets: `[B + 1]` int64, where each matrix begins: the result of
            ``jagged_cuda.matrix_offsets(offsets, y_offsets)``, computed here if None.
        dim: -1, over the columns of each row, or -2, over the rows of each column.
        scale: multiplies a before the softmax.

    Returns:
        Like a. Elements that belong to no matrix are 0, and so are those of a matrix that does
        not fit into a.

    Raises:
        RuntimeError: a shape, dtype, device or option does not fit; the message names the argument.
        torch.OutOfMemoryError: the GPU has no room for the result.

    Notes:
        Empty sequences are allowed; where Lx or Ly is 0 there is nothing. Under
        ``JAGGED_CUDA_CHECK`` a matrix that does not fit raises. A row (or column) that is all
        -inf is nan, as in torch. Sums run in float32 (float64 for float64); under autocast the
        operator runs in float32. Nothing synchronises. Deterministic, forward and backward, and a
        sequence's result does not depend on its neighbours; its gradient may in the last bits, as
        the kernel is chosen by the matrices' mean size. No double backward. a is read in place if
        it is contiguous, else copied once.

    Source: "Enhancing Performance and Scalability of Large-Scale Recommendation Systems with
    Jagged Flash Attention", RecSys '24, Table 1.

    Example:
        >>> jagged2_softmax(torch.zeros(5), torch.tensor([0, 2, 3]))
        tensor([0.5000, 0.5000, 0.5000, 0.5000, 1.0000])
    """
    if matrix_offsets is None:
        matrix_offsets = _matrices.matrix_offsets("jagged2_softmax", offsets, y_offsets)
    op = torch.ops.jagged_cuda.jagged2_softmax.default
    return call(op, a, offsets, y_offsets, matrix_offsets, dim, scale)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, offsets, y_offsets, matrix_offsets, *ctx.options = inputs
    ctx.save_for_backward(output, offsets, y_offsets, matrix_offsets)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    op = torch.ops.jagged_cuda.jagged2_softmax_backward.default
    return call(op, grad_out, *ctx.saved_tensors, *ctx.options), None, None, None, None, None


register("jagged2_softmax_backward")
register(
    "jagged2_softmax",
    setup_context=_setup_context,
    backward=_backward,
    autocast="float32",
)
