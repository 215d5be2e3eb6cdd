"""Moving rows: truncation and splitting, made of the operators that plan and move.

``jagged_slice`` says which row goes where, ``jagged_take`` moves them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jagged_cuda.ops import _contract, _plan
from jagged_cuda.ops._dispatch import overridable
from jagged_cuda.ops._plan import RowPlan
from jagged_cuda.ops.jagged_slice import plan_slice

__all__ = ["RowPlan", "jagged_first", "jagged_last", "jagged_split"]


@overridable
def jagged_first(
    xs: Tensor | Sequence[Tensor],
    offsets: Tensor,
    n: int | Tensor,
    *,
    total: int | None = None,
    return_plan: bool = False,
) -> tuple[Tensor, Tensor] | tuple[list[Tensor], Tensor] | RowPlan:
    """Keep the first rows of each sequence: the oldest, where rows are in the order of time.

    For each sequence b: ``z_b = x_b[:n[b]]``.

    Args:
        xs: `[T, ...]` jagged, or a sequence of such tensors, which are all moved by one plan; any
            float or integer dtypes, or bool.
        offsets: `[B + 1]` int32 or int64, on the device of xs; sequence b is rows
            ``offsets[b]:offsets[b + 1]``.
        n: how many rows to keep of each sequence: an int, or `[B]` int32 or int64.
        total: rows of the result, a capacity: ``total=x.shape[0]`` always suffices. None reads how
            many rows the result has, which waits for the GPU.
        return_plan: return the plan of the move, whose ``take`` moves further tensors.

    Returns:
        ``(ys, offsets)``, or the plan, as jagged_select returns them.

    Raises:
        RuntimeError: a shape, dtype, device or option does not fit, the message names the
            argument; or total is None while a CUDA graph is captured.
        torch.OutOfMemoryError: the GPU has no room for the result.

    Notes:
        What jagged_slice's notes say holds here: capacity, gradient, determinism.

    Source: jagged_1d_to_truncated_values of FBGEMM, for rows of any shape.

    Example:
        >>> jagged_first(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 3, 4]), 2)
        (tensor([1., 2., 4.]), tensor([0, 2, 3]))
    """
    return _truncate("jagged_first", xs, offsets, n, total, return_plan)


@overridable
def jagged_last(
    xs: Tensor | Sequence[Tensor],
    offsets: Tensor,
    n: int | Tensor,
    *,
    total: int | None = None,
    return_plan: bool = False,
) -> tuple[Tensor, Tensor] | tuple[list[Tensor], Tensor] | RowPlan:
    """Keep the last rows of each sequence: the newest, where rows are in the order of time.

    For each sequence b of length L: ``z_b = x_b[L - min(n[b], L):]``.

    Args:
        xs: `[T, ...]` jagged, or a sequence of such tensors, which are all moved by one plan; any
            float or integer dtypes, or bool.
        offsets: `[B + 1]` int32 or int64, on the device of xs; sequence b is rows
            ``offsets[b]:offsets[b + 1]``.
        n: how many rows to keep of each sequence: an int, or `[B]` int32 or int64.
        total: rows of the result, a capacity: ``total=x.shape[0]`` always suffices. None reads how
            many rows the result has, which waits for the GPU.
        return_plan: return the plan of the move, whose ``take`` moves further tensors.

    Returns:
        ``(ys, offsets)``, or the plan, as jagged_select returns them.

    Raises:
        RuntimeError: a shape, dtype, device or option does not fit, the message names the
            argument; or total is None while a CUDA graph is captured.
        torch.OutOfMemoryError: the GPU has no room for the result.

    Notes:
        What jagged_slice's notes say holds here: capacity, gradient, determinism.

    Source: as jagged_first, from the other end.

    Example:
        >>> jagged_last(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 3, 4]), 2)
        (tensor([2., 3., 4.]), tensor([0, 2, 3]))
    """
    return _truncate("jagged_last", xs, offsets, n, total, return_plan)


def _truncate(
    op: str,
    xs: Tensor | Sequence[Tensor],
    offsets: Tensor,
    n: int | Tensor,
    total: int | None,
    return_plan: bool,
) -> tuple[Tensor, Tensor] | tuple[list[Tensor], Tensor] | RowPlan:
    rows = _plan.rows_of(op, xs)
    _plan.check_device(op, xs, offsets)
    capacity = rows if total is None else total
    from_end = op == "jagged_last"
    plan = plan_slice(op, offsets, rows, capacity, 0, n, from_end=from_end, name="n")
    if total is None:
        plan = _plan.cut_to_size(op, plan)
    return _plan.move(op, xs, plan, return_plan)


@overridable
def jagged_split(
    x: Tensor,
    offsets: Tensor,
    *,
    n: int | Tensor | None = None,
    left_offsets: Tensor | None = None,
    totals: tuple[int, int] | None = None,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Split each sequence in two: the inverse of jagged_concat of two tensors.

    For each sequence b: ``left_b = x_b[:n[b]]`` and ``right_b = x_b[n[b]:]``.

    Args:
        x: `[T, ...]` jagged; any float or integer dtype, or bool.
        offsets: `[B + 1]` int32 or int64, on x's device; sequence b is rows
            ``offsets[b]:offsets[b + 1]``.
        n: rows of the left part of each sequence, as far as it has them: an int, or `[B]` int32 or
            int64. Either n or left_offsets must be given.
        left_offsets: `[B + 1]` of offsets' dtype: the left part of sequence b has as many rows as
            their sequence b.
        totals: rows of the left and of the right result, which are capacities: T always suffices
            for both. None reads both, which waits for the GPU once.

    Returns:
        ``((left, left_offsets), (right, right_offsets))``, each as jagged_first returns them.

    Raises:
        RuntimeError: a shape, dtype, device or option does not fit, the message names the
            argument; or totals is None while a CUDA graph is captured.
        torch.OutOfMemoryError: the GPU has no room for the results.

    Notes:
        What jagged_slice's notes say holds for both results: capacity, gradient, determinism.

    Source: split_2D_jagged of generative-recommenders.

    Example:
        >>> x, offsets = torch.tensor([1.0, 2.0, 7.0, 3.0, 8.0]), torch.tensor([0, 3, 5])
        >>> (left, _), (right, _) = jagged_split(x, offsets, left_offsets=torch.tensor([0, 2, 3]))
        >>> left, right
        (tensor([1., 2., 3.]), tensor([7., 8.]))
    """
    op = "jagged_split"
    rows = _plan.rows_of(op, x)
    _plan.check_device(op, x, offsets)
    if (n is None) == (left_offsets is None):
        actual = "both" if n is not None else "None"
        _contract.fail_argument(op, "n", "given, or left_offsets in its place", actual)
    name = "n"
    if left_offsets is not None:
        name = "left_offsets"
        _contract.check_offsets(op, left_offsets)
        if left_offsets.shape != offsets.shape:
            expected, actual = map(_contract.shape_text, (offsets.shape, left_offsets.shape))
            _contract.fail_argument(op, name, expected, actual)
        n = left_offsets.diff()
    assert n is not None
    left_total, right_total = (rows, rows) if totals is None else totals
    left = plan_slice(op, offsets, rows, left_total, 0, n, name=name)
    right = plan_slice(op, offsets, rows, right_total, n, None, name=name)
    if totals is None:
        ends = torch.stack([left.offsets[-1], right.offsets[-1]])
        sizes = _plan.read_totals(op, ends)
        left, right = (
            plan._replace(index=plan.index[:size])
            for plan, size in zip((left, right), sizes, strict=True)
        )
    return (left.take(x), left.offsets), (right.take(x), right.offsets)
