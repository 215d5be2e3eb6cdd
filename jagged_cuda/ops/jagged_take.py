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


def take_sequences(
    x: Tensor, index: Tensor, chosen: Tensor, source: Tensor, taken: Tensor
) -> Tensor:
    """Rows of whole sequences `chosen` of offsets `source`, which are those of offsets `taken`."""
    op = torch.ops.jagged_cuda.jagged_take.default
    return call(op, x, index, False, chosen, source, taken)


# Of so many sequences at most, and so many copies, the gradient groups the copies itself, in
# quadratic time: a sort takes ten launches.
_MOST_COUNTED = 4096


def sum_copies(
    grad_out: Tensor, source: Tensor, taken: Tensor, chosen: Tensor, total: int
) -> Tensor:
    """The gradient of `total` rows, of which whole sequences `chosen` of `source` were taken."""
    order = groups = None
    if max(chosen.shape[0], source.shape[0]) > _MOST_COUNTED:
        # The copies of each sequence, one after another, in their own order. As int32, which
        # takes half the passes: a number that does not fit is none of a sequence, and its copy
        # is empty.
        numbers, order = chosen.to(torch.int32).sort(stable=True)
        seqs = torch.arange(source.shape[0], device=source.device, dtype=torch.int32)
        groups = torch.searchsorted(numbers, seqs)
    op = torch.ops.jagged_cuda.jagged_index_select_backward.default
    return call(op, grad_out, source, taken, chosen, order, groups, total)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, index, ctx.unique, *sequences = inputs
    ctx.total = x.shape[0]
    ctx.save_for_backward(index, *sequences)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    index, chosen, source, taken = ctx.saved_tensors
    if chosen is not None:
        gradient = sum_copies(grad_out, source, taken, chosen, ctx.total)
    elif ctx.unique:
        op = torch.ops.jagged_cuda.jagged_take_backward.default
        gradient = _take(grad_out, call(op, index, ctx.total))
    else:
        # The rows of the result that took each row, one after another, in their own order.
        numbers, order = index.sort(stable=True)
        bounds = torch.searchsorted(numbers, torch.arange(ctx.total + 1, device=index.device))
        sums = torch.ops.jagged_cuda.jagged_sum.default
        gradient = call(sums, _take(grad_out, order), bounds)
    return gradient, *(None,) * 5


def _take(x: Tensor, index: Tensor) -> Tensor:
    return call(torch.ops.jagged_cuda.jagged_take.default, x, index, True)


register(
    "jagged_take",
    setup_context=_setup_context,
    backward=_backward,
    autocast="unchanged",
)
register("jagged_take_backward")
