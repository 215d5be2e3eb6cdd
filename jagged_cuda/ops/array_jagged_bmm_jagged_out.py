"""array_jagged_bmm_jagged_out: each sequence's matrix times its rows of a jagged tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_cuda.ops import _matrices
from jagged_cuda.ops._dispatch import allow_tf32, call, overridable, register

_BACKWARD = torch.ops.jagged_cuda.array_jagged_bmm_jagged_out_backward.default


@overridable
def array_jagged_bmm_jagged_out(
    a: Tensor,
    y: Tensor,
    offsets: Tensor,
    *,
    y_offsets: Tensor | None = None,
    matrix_offsets: Tensor | None = None,
    transpose: bool = False,
    total: int | None = None,
) -> Tensor:
    """Multiply each sequence's own matrix with its rows of y.

    For each sequence b, with A_b the matrix `[Lx, Ly]` that `a` holds row by row:
    ``z_b = A_b @ y_b``, or ``z_b = A_b.T @ y_b`` with ``transpose``. This is the weighted sum of
    attention, and the gradients of its scores.

    Args:
        a: `[sum Lx*Ly]`, one matrix per sequence; float32, float64, float16 or bfloat16.
        y: `[Ty, N]` jagged, of a's dtype and device; with transpose `[Tx, N]`.
        offsets: `[B + 1]` int32 or int64, on a's device. offsets and y_offsets say the shape of
            the matrices, transposed or not: sequence b of offsets has as many rows (Lx) as A_b.
            These are the rows of the result, and with transpose those of y.
        y_offsets: `[B + 1]` of offsets' dtype; sequence b of them has as many rows (Ly) as A_b
            has columns. These are the rows of y, and with transpose those of the result. None
            means offsets.
        matrix_offsets: `[B + 1]` int64, where each matrix begins: the result of
            ``jagged_cuda.matrix_offsets(offsets, y_offsets)``, computed here if None.
        transpose: multiply with the transposed matrices.
        total: rows of the result, at least the last of offsets (of y_offsets with transpose).
            None means the rows of y if y_offsets is None; else it reads that last offset, which
            waits for the GPU.

    Returns:
        `[total, N]` of a's dtype. Rows outside every sequence are 0, and so are those of a
        sequence whose matrix does not fit into a.

    Raises:
        RuntimeError: a shape, dtype or device does not fit, the message names the argument; or
            total must be read while a CUDA graph is captured.
        torch.OutOfMemoryError: the GPU has no room for the result.

    Notes:
        Empty sequences are allowed; where Ly is 0 the result is 0. Under ``JAGGED_CUDA_CHECK`` a
        matrix that does not fit raises. Sums run in float32 (float64 for float64). float32 on
        CUDA obeys ``torch.backends.cuda.matmul.fp32_precision``: products are as accurate as
        float32 unless it allows TF32. The gradient of a is jagged_jagged_bmm_jagged_out, that of
        y this operator with the other value of transpose, so that derivatives of any order exist;
        elements of a that belong to no matrix are not read and get zero gradient. Deterministic,
        and a sequence's result does not depend on its neighbours. a is read in place if it is
        contiguous, y if its last dimension is; any other layout costs one copy of that operand.

    Source: "Enhancing Performance and Scalability of Large-Scale Recommendation Systems with
    Jagged Flash Attention", RecSys '24, Table 1.

    Example:
        >>> a, y = torch.ones(7), torch.ones(5, 2)
        >>> offsets, y_offsets = torch.tensor([0, 2, 3]), torch.tensor([0, 2, 5])
        >>> array_jagged_bmm_jagged_out(a, y, offsets, y_offsets=y_offsets)[:, 0]
        tensor([2., 2., 3.])
    """
    op = "array_jagged_bmm_jagged_out"
    if matrix_offsets is None:
        matrix_offsets = _matrices.matrix_offsets(op, offsets, y_offsets)
    if total is None and y_offsets is None and y.dim() > 0:
        total = y.shape[0]
    elif total is None:
        known = offsets if y_offsets is None or not transpose else y_offsets
        total = _matrices.read_size(op, "total", known)
    return call(
        torch.ops.jagged_cuda.array_jagged_bmm_jagged_out.default,
        a,
        y,
        offsets,
        y_offsets,
        matrix_offsets,
        total,
        transpose,
        allow_tf32(a.dtype),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, y, offsets, y_offsets, matrix_offsets, _, ctx.transpose, ctx.allow_tf32 = inputs
    ctx.save_for_backward(a, y, offsets, y_offsets, matrix_offsets)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    a, y, *offsets = ctx.saved_tensors
    ops = torch.ops.jagged_cuda
    wants_a, wants_y, *_ = ctx.needs_input_grad
    grad_a = grad_y = None
    if wants_a and wants_y and not torch.is_grad_enabled():  # one operator, without derivatives
        grad_a, grad_y = call(_BACKWARD, grad_out, a, y, *offsets, ctx.transpose, ctx.allow_tf32)
        wants_a = wants_y = False
    if wants_a:
        factors = (y, grad_out) if ctx.transpose else (grad_out, y)
        op = ops.jagged_jagged_bmm_jagged_out.default
        grad_a = call(op, *factors, *offsets, a.shape[0], ctx.allow_tf32)
    if wants_y:
        op = ops.array_jagged_bmm_jagged_out.default
        options = (y.shape[0], not ctx.transpose, ctx.allow_tf32)
        grad_y = call(op, a, grad_out, *offsets, *options)
    return grad_a, grad_y, None, None, None, None, None, None


register("array_jagged_bmm_jagged_out_backward")
register(
    "array_jagged_bmm_jagged_out",
    setup_context=_setup_context,
    backward=_backward,
    autocast="lower_precision",
)
