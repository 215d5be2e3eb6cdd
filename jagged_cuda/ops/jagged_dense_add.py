"""jagged_dense_add: rows of jagged and of padded sequences added."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_cuda.ops._dispatch import call, overridable, register


@overridable
def jagged_dense_add(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """Add to each row the padded row at the same place, without a padded copy of x.

    For each sequence b: ``z_b[i] = x_b[i] + y[b, i]`` for i < M, and ``x_b[i]`` from there on.

    Args:
        x: `[T, ...]` jagged; any float or integer dtype, or bool.
        y: `[B, M, ...]` padded, of x's dtype, with x's dimensions after the first; an expanded
            ``table[None].expand(B, M, D)``, as of positions, is read in place.
        offsets: `[B + 1]` int32 or int64, on x's device; sequence b is rows
            ``offsets[b]:offsets[b + 1]``.

    Returns:
        Like x; rows outside every sequence are 0.

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.
        torch.OutOfMemoryError: the GPU has no room for the result.

    Notes:
        Empty sequences are allowed, rows of y beyond a sequence's length are not read, and nothing
        synchronises. Each sum is rounded once, from float32 (float64 for float64); integers wrap
        around, and of two bools one that is True is enough. Gradients: x's is the incoming one,
        with zeros outside the sequences; y's is jagged_to_padded of it: nothing is summed, since
        a row of y belongs to one row of x. So they are deterministic, and there are derivatives of
        any order; integers have none. Autocast leaves the dtype alone. x and y are read in place if
        each of their rows is contiguous; any other layout costs one copy.

    Source: jagged_dense_elementwise_add of FBGEMM, for one jagged dimension.

    Example:
        >>> x = torch.tensor([1.0, 2.0, 3.0])
        >>> jagged_dense_add(x, torch.tensor([[10.0], [20.0]]), torch.tensor([0, 1, 3]))
        tensor([11., 22.,  3.])
    """
    return call(torch.ops.jagged_cuda.jagged_dense_add.default, x, y, offsets)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, y, offsets = inputs
    ctx.max_len = y.shape[1]
    ctx.save_for_backward(offsets)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    (offsets,) = ctx.saved_tensors
    wants_x, wants_y = ctx.needs_input_grad[:2]
    grad_x = grad_y = None
    if wants_x and wants_y:
        op = torch.ops.jagged_cuda.jagged_dense_add_backward.default
        grad_x, grad_y = call(op, grad_out, offsets, ctx.max_len)
    elif wants_x:
        # Without padded rows it only leaves out what is outside the sequences.
        nothing = grad_out.new_empty((offsets.shape[0] - 1, 0, *grad_out.shape[1:]))
        op = torch.ops.jagged_cuda.jagged_dense_add.default
        grad_x = call(op, grad_out, nothing, offsets)
    elif wants_y:
        op = torch.ops.jagged_cuda.jagged_to_padded.default
        grad_y = call(op, grad_out, offsets, ctx.max_len)
    return grad_x, grad_y, None


def _setup_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[1])


def _backward_of_gradients(
    ctx: Any, grad_x: Tensor, grad_y: Tensor
) -> tuple[Tensor | None, None, None]:
    """The gradients are linear in the incoming one, and the operator is what turns them around."""
    op = torch.ops.jagged_cuda.jagged_dense_add.default
    return call(op, grad_x, grad_y, *ctx.saved_tensors), None, None


register(
    "jagged_dense_add",
    setup_context=_setup_context,
    backward=_backward,
    autocast="unchanged",
)
register(
    "jagged_dense_add_backward",
    setup_context=_setup_gradients,
    backward=_backward_of_gradients,
    autocast="unchanged",
)
