"""jagged_index_select: whole sequences by their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jagged_cuda.ops import _contract, _plan
from jagged_cuda.ops._dispatch import call, overridable, register
from jagged_cuda.ops._plan import RowPlan
from jagged_cuda.ops.jagged_take import sum_copies


@overridable
def jagged_index_select(
    xs: Tensor | Sequence[Tensor],
    offsets: Tensor,
    index: Tensor,
    *,
    total: int | None = None,
    return_plan: bool = False,
) -> tuple[Tensor, Tensor] | tuple[list[Tensor], Tensor] | RowPlan:
    """Take whole sequences by their numbers, in any order, some repeatedly.

    For each k: ``z_k = x_b`` with ``b = index[k]``.

    Args:
        xs: `[T, ...]` jagged, or a sequence of such tensors, which are all moved by one plan; any
            float or integer dtypes, or bool.
        offsets: `[B + 1]` int32 or int64, on the device of xs; sequence b is rows
            ``offsets[b]:offsets[b + 1]``.
        index: `[K]` int64: the number of the sequence that each one of the result is.
        total: rows of the result, a capacity. None reads how many rows the result has, which waits
            for the GPU.
        return_plan: return the plan of the move, whose ``take`` moves further tensors.

    Returns:
        ``(ys, offsets)``: ys `[total, ...]` of the dtype of xs, or a list of such tensors; rows
        after the last sequence are 0. offsets `[K + 1]` of the dtype of the others begin at 0. With
        return_plan the RowPlan alone.

    Raises:
        RuntimeError: a shape, dtype, device or option does not fit, the message names the
            argument; a number in index is not one of a sequence, on the CPU, and on CUDA under
            ``JAGGED_CUDA_CHECK``; or total is None while a CUDA graph is captured.
        torch.OutOfMemoryError: the GPU has no room for the result.

    Notes:
        A number that is not one of a sequence is an empty one, where it does not raise. Rows
        beyond total are left out, and the offsets end there, so that they are always right for ys;
        ``JAGGED_CUDA_CHECK`` names the first sequence that does not fit. With total nothing
        synchronises; torch.compile without graph breaks needs it too. Values are copied. The
        gradient of a row sums those of its copies in a fixed order, in float32 (float64 for
        float64), so it is deterministic; rows that are not taken get 0. Derivatives of any order
        exist. Autocast leaves the dtype alone. Each x is read in place if each of its rows is
        contiguous; any other layout costs one copy of it.

    Source: jagged_index_select of FBGEMM.

    Example:
        >>> x, offsets = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 2, 3])
        >>> jagged_index_select(x, offsets, torch.tensor([1, 0, 1]))
        (tensor([3., 1., 2., 3.]), tensor([0, 1, 3, 4]))
    """
    op = "jagged_index_select"
    rows = _plan.rows_of(op, xs)
    _plan.check_device(op, xs, offsets)
    if total is None:
        total = _size(op, offsets, index)
    elif total < 0:
        _contract.fail_argument(op, "total", ">= 0", total)
    if isinstance(xs, Tensor) and not return_plan:
        y, planned = call(
            torch.ops.jagged_cuda.jagged_index_select.default, xs, offsets, index, total
        )
        return y, planned
    planner = torch.ops.jagged_cuda.jagged_index_select_plan.default
    taken, planned = call(planner, offsets, index, rows, total)
    return _plan.move(op, xs, RowPlan(taken, planned, False, index, offsets), return_plan)


def _size(op: str, offsets: Tensor, index: Tensor) -> int:
    """How many rows the sequences of index have: waits for the GPU."""
    lengths = offsets.diff().clamp(min=0).to(torch.int64)
    num_seqs = lengths.shape[0]
    if num_seqs == 0:
        return 0
    right = (index >= 0) & (index < num_seqs)
    taken = lengths.index_select(0, index.where(right, 0).flatten())
    sums = taken.where(right.flatten(), 0).sum(0, keepdim=True)
    return _plan.read_total(op, sums)


# No gradient: numbers of sequences have none; that of the rows is jagged_take's.
register(
    "jagged_index_select_plan",
    autocast="unchanged",
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, offsets, index, _ = inputs
    ctx.total = x.shape[0]
    ctx.save_for_backward(offsets, index, output[1])


def _backward(ctx: Any, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    offsets, index, taken = ctx.saved_tensors
    return sum_copies(grad_out, offsets, taken, index, ctx.total), None, None, None


register(
    "jagged_index_select",
    setup_context=_setup_context,
    backward=_backward,
    autocast="unchanged",
)


def _setup_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad_out, offsets, _, chosen = inputs[:4]
    ctx.total = grad_out.shape[0]
    ctx.save_for_backward(offsets, chosen)


def _differentiate_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    offsets, chosen = ctx.saved_tensors
    op = torch.ops.jagged_cuda.jagged_index_select.default
    taken, _ = call(op, grad, offsets, chosen, ctx.total)
    return taken, *(None,) * 6


register(
    "jagged_index_select_backward",
    setup_context=_setup_gradient,
    backward=_differentiate_gradient,
)
