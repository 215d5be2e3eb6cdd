"""jagged_take: rows by their numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_cuda.ops._dispatch import call, overridable, register


@overridable
def jagged_take(x: Tensor, index: Tensor, *, unique: bool = False) -> Tensor:
    """Take rows by their numbers; the number -1 gives a row of zeros.

    For each row i of the result: ``z[i] = x[index[i]]``, and 0 where ``index[i]`` is -1.

    Args:
        x: `[T, ...]`; any float or integer dtype, or bool.
        index: `[N]` int64, on x's device: numbers of rows of x, or -1.
        unique: promises that no row is taken twice. The gradient is then one copy of the rows;
            without the promise it takes a sort of the index too. If the promise is wrong, a row
            gets the gradient of one of its copies, whichever.

    Returns:
        `[N, ...]` of x's dtype.

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.
        torch.OutOfMemoryError: the GPU has no room for the result.

    Notes:
        Any other number that is not one of a row gives zeros too, and reads nothing. Values are
        copied. Nothing synchronises. The gradient of a row is the sum over the rows of the result
        that took it, in an order that depends on index alone, so it is deterministic; sums run in
        float32 (float64 for float64). Rows that nobody takes get zeros. Derivatives of any order
        exist; integers have none. Autocast leaves the dtype alone. x is read in place if each of
        its rows is contiguous; any other layout costs one copy.

    Example:
        >>> jagged_take(torch.tensor([5.0, 6.0, 7.0]), torch.tensor([2, -1, 0, 2]))
        tensor([7., 0., 5., 7.])
    """
    return call(torch.ops.jagged_cuda.jagged_take.default, x, index, unique)


def take_of_several(xs: list[Tensor], index: Tensor, unique: bool) -> Tensor:
    """Rows of up to four tensors, numbered one tensor after another."""
    return call(torch.ops.jagged_cuda.jagged_take.default, xs[0], index, unique, *xs[1:])


def take_sequences(
    x: Tensor, index: Tensor, chosen: Tensor, source: Tensor, taken: Tensor
) -> Tensor:
    """Rows of whole sequences `chosen` of offsets `source`, which are those of offsets `taken`."""
    op = torch.ops.jagged_cuda.jagged_take.default
    return call(op, x, index, False, None, None, None, chosen, source, taken)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, index, ctx.unique, y, z, w, *sequences = inputs
    ctx.rows = [None if part is None else part.shape[0] for part in (x, y, z, w)]
    ctx.save_for_backward(index, *sequences)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    index, chosen, source, taken = ctx.saved_tensors
    if chosen is not None:
        # The copies of each sequence, one after another, in their own order. As int32, which takes
        # half the passes: a number that does not fit is none of a sequence, and its copy is empty.
        numbers, order = chosen.to(torch.int32).sort(stable=True)
        seqs = torch.arange(source.shape[0], device=source.device, dtype=torch.int32)
        groups = torch.searchsorted(numbers, seqs)
        op = torch.ops.jagged_cuda.jagged_index_select_backward.default
        arguments = (grad_out, index, source, taken, order, groups, ctx.rows[0])
        return call(op, *arguments), *(None,) * 8
    total = sum(rows for rows in ctx.rows if rows is not None)
    if ctx.unique:
        op = torch.ops.jagged_cuda.jagged_take_backward.default
        source, bounds = call(op, index, total), None
    else:
        # The rows of the result that took each row, one after another, in their own order.
        taken, source = index.sort(stable=True)
        numbers = torch.arange(total + 1, device=index.device)
        bounds = torch.searchsorted(taken, numbers)
    gradients: list[Tensor | None] = []
    begin = 0
    # Arguments that were left out have no place in needs_input_grad.
    for place, rows in zip((0, 3, 4, 5), ctx.rows, strict=True):
        gradient = None
        if rows is not None and ctx.needs_input_grad[place]:
            if bounds is None:
                gradient = _take(grad_out, source[begin : begin + rows])
            else:
                of_rows = bounds[begin : begin + rows + 1]
                sums = torch.ops.jagged_cuda.jagged_sum.default
                gradient = call(sums, _take(grad_out, source), of_rows)
        gradients.append(gradient)
        begin += rows or 0
    return gradients[0], None, None, *gradients[1:], None, None, None


def _take(x: Tensor, index: Tensor) -> Tensor:
    return call(torch.ops.jagged_cuda.jagged_take.default, x, index, True)


register(
    "jagged_take",
    setup_context=_setup_context,
    backward=_backward,
    autocast="unchanged",
)
register("jagged_take_backward")
