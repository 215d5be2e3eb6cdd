"""jagged_jagged_bmm_jagged_out: the rows of one jagged tensor times the rows of another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_cuda.ops import _matrices
from jagged_cuda.ops._dispatch import allow_tf32, call, overridable, register

_BACKWARD = torch.ops.jagged_cuda.jagged_jagged_bmm_jagged_out_backward.default


@overridable
def jagged_jagged_bmm_jagged_out(
    x: Tensor,
    y: Tensor,
    offsets: Tensor,
    *,
    y_offsets: Tensor | None = None,
    matrix_offsets: Tensor | None = None,
    total_out: int | None = None,
) -> Tensor:
    """Multiply each sequence's rows of x with its rows of y, which gives one matrix per sequence.

    For each sequence b: ``z_b = x_b @ y_b.T``, a matrix `[Lx, Ly]`, stored row by row in one
    vector. These are the scores of attention.

    Args:
        x: `[Tx, D]` jagged; float32, float64, float16 or bfloat16.
        y: `[Ty, D]` jagged, of x's dtype and device.
        offsets: `[B + 1]` int32 or int64, on x's device; sequence b is rows
            ``offsets[b]:offsets[b + 1]`` of x.
        y_offsets: `[B + 1]` of offsets' dtype for y; None means offsets (then Ty = Tx).
        matrix_offsets: `[B + 1]` int64, where each matrix begins: the result of
            ``jagged_cuda.matrix_offsets(offsets, y_offsets)``, computed here if None.
        total_out: elements of the result, at least the last of matrix_offsets. None reads that
            number, which waits for the GPU.

    Returns:
        `[total_out]` of x's dtype: ``z_b.flatten()`` from ``matrix_offsets[b]`` on. Elements that
        belong to no matrix are 0, and so are those of a matrix that does not fit into total_out.

    Raises:
        RuntimeError: a shape, dtype or device does not fit, the message names the argument; or
            total_out is None while a CUDA graph is captured.
        torch.OutOfMemoryError: the GPU has no room for the result.

    Notes:
        Empty sequences are allowed. With total_out nothing synchronises; torch.compile without
        graph breaks needs it too. Under ``JAGGED_CUDA_CHECK`` a matrix that does not fit raises.
        Sums run in float32 (float64 for float64). float32 on CUDA obeys
        ``torch.backends.cuda.matmul.fp32_precision``: products are as accurate as float32 unless
        it allows TF32. The gradients are array_jagged_bmm_jagged_out, plain and transposed, so
        that derivatives of any order exist; elements that belong to no matrix pass none on.
        Deterministic, and a sequence's result does not depend on its neighbours. x and y are read
        in place if their last dimension is contiguous; any other layout costs one copy of that
        operand.

    Source: "Enhancing Performance and Scalability of Large-Scale Recommendation Systems with
    Jagged Flash Attention", RecSys '24, Table 1.

    Example:
        >>> x, y = torch.ones(3, 2), torch.ones(5, 2)
        >>> offsets, y_offsets = torch.tensor([0, 2, 3]), torch.tensor([0, 2, 5])
        >>> jagged_jagged_bmm_jagged_out(x, y, offsets, y_offsets=y_offsets)
        tensor([2., 2., 2., 2., 2., 2., 2.])
    """
    op = "jagged_jagged_bmm_jagged_out"
    if matrix_offsets is None:
        matrix_offsets = _matrices.matrix_offsets(op, offsets, y_offsets)
    if total_out is None:
        total_out = _matrices.read_size(op, "total_out", matrix_offsets)
    return call(
        torch.ops.jagged_cuda.jagged_jagged_bmm_jagged_out.default,
        x,
        y,
        offsets,
        y_offsets,
        matrix_offsets,
        total_out,
        allow_tf32(x.dtype),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, y, offsets, y_offsets, matrix_offsets, _, ctx.allow_tf32 = inputs
    ctx.save_for_backward(x, y, offsets, y_offsets, matrix_offsets)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    x, y, *offsets = ctx.saved_tensors
    op = torch.ops.jagged_cuda.array_jagged_bmm_jagged_out.default
    wants_x, wants_y, *_ = ctx.needs_input_grad
    grad_x = grad_y = None
    if wants_x and wants_y and not torch.is_grad_enabled():  # one operator, without derivatives
        grad_x, grad_y = call(_BACKWARD, grad_out, x, y, *offsets, ctx.allow_tf32)
        wants_x = wants_y = False
    if wants_x:
        grad_x = call(op, grad_out, y, *offsets, x.shape[0], False, ctx.allow_tf32)
    if wants_y:
        grad_y = call(op, grad_out, x, *offsets, y.shape[0], True, ctx.allow_tf32)
    return grad_x, grad_y, None, None, None, None, None


register("jagged_jagged_bmm_jagged_out_backward")
register(
    "jagged_jagged_bmm_jagged_out",
    setup_context=_setup_context,
    backward=_backward,
    autocast="lower_precision",
)
