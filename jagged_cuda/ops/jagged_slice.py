"""jagged_slice: a range of the rows of each sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jagged_cuda.ops import _contract, _plan
from jagged_cuda.ops._dispatch import call, overridable, register
from jagged_cuda.ops._plan import RowPlan

# csrc/contract/plan.h has them in this order.
_FUNCTIONS = ("jagged_slice", "jagged_first", "jagged_last", "jagged_split")


@overridable
def jagged_slice(
    xs: Tensor | Sequence[Tensor],
    offsets: Tensor,
    begin: int | Tensor = 0,
    length: int | Tensor | None = None,
    *,
    total: int | None = None,
    return_plan: bool = False,
) -> tuple[Tensor, Tensor] | tuple[list[Tensor], Tensor] | RowPlan:
    """Take a range of the rows of each sequence.

    For each sequence b: ``z_b = x_b[begin[b] : begin[b] + length[b]]``, as far as x_b has them.

    Args:
        xs: `[T, ...]` jagged, or a sequence of such tensors, which are all moved by one plan; any
            float or integer dtypes, or bool.
        offsets: `[B + 1]` int32 or int64, on the device of xs; sequence b is rows
            ``offsets[b]:offsets[b + 1]``.
        begin: the first row of a sequence to take: an int, or `[B]` int32 or int64.
        length: how many to take, likewise; None takes all from begin on.
        total: rows of the result, a capacity: ``total=x.shape[0]`` always suffices. None reads how
            many rows the result has, which waits for the GPU.
        return_plan: return the plan of the move, whose ``take`` moves further tensors.

    Returns:
        ``(ys, offsets)``: ys `[total, ...]` of the dtype of xs, or a list of such tensors; rows
        after the last sequence are 0. offsets `[B + 1]` of their own dtype begin at 0. With
        return_plan the RowPlan alone.

    Raises:
        RuntimeError: a shape, dtype, device or option does not fit, the message names the
            argument; or total is None while a CUDA graph is captured.
        torch.OutOfMemoryError: the GPU has no room for the result.

    Notes:
        Empty sequences are allowed. Rows beyond total are left out, and the offsets end there, so
        that they are always right for ys; ``JAGGED_CUDA_CHECK`` names the first sequence that does
        not fit. With total nothing synchronises; torch.compile without graph breaks needs it too.
        Values are copied, and so are gradients: rows that are left out get 0. Derivatives of any
        order exist. Autocast leaves the dtype alone. Deterministic. Each x is read in place if each
        of its rows is contiguous; any other layout costs one copy of it.

    Source: jagged_slice of FBGEMM, for rows of any shape.

    Example:
        >>> x, offsets = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 3, 4])
        >>> jagged_slice(x, offsets, 1, 1)
        (tensor([2.]), tensor([0, 1, 1]))
    """
    op = "jagged_slice"
    rows = _plan.rows_of(op, xs)
    _plan.check_device(op, xs, offsets)
    plan = plan_slice(op, offsets, rows, rows if total is None else total, begin, length)
    if total is None:
        plan = _plan.cut_to_size(op, plan)
    return _plan.move(op, xs, plan, return_plan)


def plan_slice(
    op: str,
    offsets: Tensor,
    rows: int,
    total: int,
    begin: int | Tensor = 0,
    length: int | Tensor | None = None,
    *,
    from_end: bool = False,
    name: str = "length",
) -> RowPlan:
    """The plan of ranges, for the function `op`; `name` is that of length there.

    from_end: begin counts from the sequence's end, backwards.
    """
    if total < 0:
        _contract.fail_argument(op, "total", ">= 0", total)
    begins, skip = _numbers(op, "begin", begin, offsets)
    lengths, most = (None, None) if length is None else _numbers(op, name, length, offsets)
    planner = torch.ops.jagged_cuda.jagged_slice.default
    function = _FUNCTIONS.index(op)
    index, planned = call(
        planner, offsets, begins, lengths, rows, total, skip or 0, most, from_end, function
    )
    return RowPlan(index, planned, True)


def _numbers(
    op: str, name: str, given: int | Tensor, offsets: Tensor
) -> tuple[Tensor | None, int | None]:
    """Numbers of rows, none negative: `[B]` in the dtype of offsets, or one for all."""
    if not isinstance(given, Tensor):
        if given < 0:
            _contract.fail_argument(op, name, ">= 0", given)
        return None, given
    _contract.check_numbers(op, name, offsets, given)
    if _contract.may_read(given) and bool((given < 0).any()):
        position = int((given < 0).nonzero()[0])
        _contract.fail_argument(op, f"{name}[{position}]", ">= 0", int(given[position]))
    return given.to(offsets.dtype), None


# No gradient: numbers of rows have none; that of the rows is jagged_take's.
register(
    "jagged_slice",
    autocast="unchanged",
)
