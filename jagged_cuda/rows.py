"""Moving rows: truncation, concatenation and splitting, made of the operators that plan and move.

``jagged_slice`` and ``jagged_index_select`` say which row goes where, ``jagged_take`` moves them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jagged_cuda.ops import _contract, _plan
from jagged_cuda.ops._dispatch import overridable, refuse_transforms
from jagged_cuda.ops._plan import RowPlan
from jagged_cuda.ops.jagged_index_select import plan_index_select
from jagged_cuda.ops.jagged_slice import plan_slice
from jagged_cuda.ops.jagged_take import take_of_several

__all__ = ["RowPlan", "jagged_concat", "jagged_first", "jagged_last", "jagged_split"]


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
def jagged_concat(
    xs: Sequence[Tensor],
    offsets_list: Sequence[Tensor | None],
    *,
    total: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Join tensors sequence by sequence: a prefix, a history and targets, say.

    For each sequence b: ``z_b = [x0_b, x1_b, ...]``, the rows of b in each tensor, one tensor after
    the other.

    Args:
        xs: tensors of one dtype and device, and of rows of one shape: `[T, ...]` jagged, or
            `[B, M, ...]` dense with M rows for each sequence; any float or integer dtype, or bool.
        offsets_list: for each of them its offsets `[B + 1]`, all int32 or all int64, or None, which
            marks a dense one.
        total: rows of the result, a capacity: the sum of all rows always suffices. None reads how
            many rows the result has, which waits for the GPU, unless all are dense.

    Returns:
        ``(y, offsets)``: y `[total, ...]`; rows after the last sequence are 0. offsets `[B + 1]`
        of the dtype of the others, int64 without any, begin at 0.

    Raises:
        RuntimeError: a shape, dtype, device or option does not fit, the message names the
            argument; or total is None while a CUDA graph is captured.
        torch.OutOfMemoryError: the GPU has no room for the result.

    Notes:
        Empty sequences are allowed. Rows beyond total are left out, and the offsets end there, so
        that they are always right for y; ``JAGGED_CUDA_CHECK`` names the first part that does not
        fit. With total nothing synchronises; torch.compile without graph breaks needs it too.
        Values are copied, once for up to four tensors, and so are gradients. Derivatives of any
        order exist. Autocast leaves the dtype alone. Deterministic. jagged_split undoes it. A
        tensor is read in place if each of its rows is contiguous (a dense one, if it is contiguous
        as a whole); any other layout costs one copy of it.

    Example:
        >>> history, targets = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([[7.0], [8.0]])
        >>> jagged_concat([history, targets], [torch.tensor([0, 2, 3]), None])
        (tensor([1., 2., 7., 3., 8.]), tensor([0, 3, 5]))
    """
    op = "jagged_concat"
    refuse_transforms(op, xs)
    flat, bounds = _as_parts(op, xs, offsets_list)
    while True:
        group, rest = flat[:_MOST_PARTS], flat[_MOST_PARTS:]
        group_bounds = bounds[:_MOST_PARTS]
        capacity = sum(x.shape[0] for x in group) if total is None or rest else total
        joined, plan = _join(op, group, group_bounds, capacity)
        if not rest:
            break
        # More parts than one move takes: those joined so far are the first of the next move.
        flat, bounds = [joined, *rest], [plan.offsets, *bounds[_MOST_PARTS:]]
    if total is None and any(offsets is not None for offsets in offsets_list):
        joined = joined[: _plan.read_total(op, plan.offsets)]
    return joined, plan.offsets


# Sources of one move.
_MOST_PARTS = 4


def _as_parts(
    op: str, xs: Sequence[Tensor], offsets_list: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor]]:
    """All of them jagged, with offsets of one dtype."""
    if len(xs) == 0 or len(xs) != len(offsets_list):
        expected = f"a sequence of {len(xs) or 'one or more'} offsets"
        _contract.fail_argument(op, "offsets_list", expected, f"{len(offsets_list)}")
    given = [offsets for offsets in offsets_list if offsets is not None]
    dtype = given[0].dtype if given else torch.int64
    num_seqs = given[0].shape[0] - 1 if given and given[0].dim() == 1 else xs[0].shape[0]
    flat, bounds = [], []
    for position, (x, offsets) in enumerate(zip(xs, offsets_list, strict=True)):
        name = f"xs[{position}]"
        if x.dtype != xs[0].dtype:
            expected, actual = map(_contract.dtype_name, (xs[0].dtype, x.dtype))
            _contract.fail_argument(op, name, expected, actual)
        if x.device != xs[0].device:
            _contract.fail_argument(op, name, f"on {xs[0].device}", f"on {x.device}")
        leading = 1 if offsets is not None else 2
        first_leading = 1 if offsets_list[0] is not None else 2
        trailing = list(xs[0].shape[first_leading:])
        if x.dim() < leading or list(x.shape[leading:]) != trailing:
            expected = _contract.shape_text([*("BM" if leading == 2 else "T"), *trailing])
            _contract.fail_argument(op, name, expected, _contract.shape_text(x.shape))
        if offsets is None:
            if x.shape[0] != num_seqs:
                expected = _contract.shape_text([num_seqs, "M", *trailing])
                _contract.fail_argument(op, name, expected, _contract.shape_text(x.shape))
            bounds.append(_dense_offsets(x, dtype))
            flat.append(x.reshape(x.shape[0] * x.shape[1], *trailing))
            continue
        label = f"offsets_list[{position}]"
        if offsets.dtype not in (torch.int32, torch.int64) or offsets.dtype != dtype:
            expected = "int32 or int64" if offsets is given[0] else _contract.dtype_name(dtype)
            _contract.fail_argument(op, label, expected, _contract.dtype_name(offsets.dtype))
        if offsets.device != x.device:
            _contract.fail_argument(op, label, f"on {x.device}", f"on {offsets.device}")
        if offsets.shape != (num_seqs + 1,):
            expected = _contract.shape_text([num_seqs + 1 if offsets is not given[0] else "B + 1"])
            _contract.fail_argument(op, label, expected, _contract.shape_text(offsets.shape))
        flat.append(x)
        bounds.append(offsets)
    return flat, bounds


def _dense_offsets(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`[B + 1]`: where the rows of each sequence begin in x `[B, M, ...]`."""
    return torch.arange(x.shape[0] + 1, device=x.device, dtype=dtype) * x.shape[1]


def _join(op: str, xs: list[Tensor], bounds: list[Tensor], total: int) -> tuple[Tensor, RowPlan]:
    """A few jagged tensors joined: sequence b of tensor p is one of `[P (B + 1)]` sequences.

    Their offsets lie one after another, so that sequence p (B + 1) + B is what lies between two
    tensors, which nobody takes.
    """
    num_seqs, num_parts = bounds[0].shape[0] - 1, len(xs)
    shifted, first = [bounds[0]], xs[0].shape[0]
    for x, offsets in zip(xs[1:], bounds[1:], strict=True):
        shifted.append(offsets + first)
        first = first + x.shape[0]
    numbers = torch.arange(num_parts * (num_seqs + 1), device=bounds[0].device)
    chosen = numbers.view(num_parts, num_seqs + 1)[:, :num_seqs].t().reshape(-1)
    plan = plan_index_select(op, torch.cat(shifted), chosen, first, total, unique=True)
    joined = take_of_several(xs, plan.index, True)
    return joined, plan._replace(offsets=plan.offsets[::num_parts].contiguous())


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
