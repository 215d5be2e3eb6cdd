"""jagged_select: the rows of each sequence that a mask keeps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jagged_cuda.ops import _contract, _plan
from jagged_cuda.ops._dispatch import call, overridable, register
from jagged_cuda.ops._plan import RowPlan


@overridable
def jagged_select(
    xs: Tensor | Sequence[Tensor],
    offsets: Tensor,
    keep: Tensor,
    *,
    total: int | None = None,
    return_plan: bool = False,
) -> tuple[Tensor, Tensor] | tuple[list[Tensor], Tensor] | RowPlan:
    """Keep some rows of each sequence, in their order.

    For each sequence b: ``z_b = x_b[keep_b]``.

    Args:
        xs: `[T, ...]` jagged, or a sequence of such tensors, which are all moved by one plan; any
            float or integer dtypes, or bool.
        offsets: `[B + 1]` int32 or int64, on the device of xs; sequence b is rows
            ``offsets[b]:offsets[b + 1]``.
        keep: `[T]` bool: the rows to keep. Rows outside every sequence never are.
        total: rows of the result, a capacity: ``total=x.shape[0]`` always suffices. None reads how
            many rows are kept, which waits for the GPU.
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
        Values are copied, and so are gradients: rows that are not kept get 0. Derivatives of any
        order exist; the mask has none. Autocast leaves the dtype alone. Deterministic. Each x is
        read in place if each of its rows is contiguous; any other layout costs one copy of it.

    Source: masked_select_jagged_1d of FBGEMM, for rows of any shape.

    Example:
        >>> x, offsets = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 3, 4])
        >>> jagged_select(x, offsets, x != 2.0)
        (tensor([1., 3., 4.]), tensor([0, 2, 3]))
    """
    op = "jagged_select"
    rows = _plan.rows_of(op, xs)
    _plan.check_device(op, xs, offsets)
    if keep.shape != (rows,):
        _contract.fail_argument(op, "keep", f"[{rows}]", _contract.shape_text(keep.shape))
    planner = torch.ops.jagged_cuda.jagged_select.default
    index, planned = call(planner, offsets, keep, rows if total is None else total)
    plan = RowPlan(index, planned, True)
    if total is None:
        plan = _plan.cut_to_size(op, plan)
    return _plan.move(op, xs, plan, return_plan)


# No gradient: the mask and the offsets have none; that of the rows is jagged_take's.
register(
    "jagged_select",
    autocast="unchanged",
)
