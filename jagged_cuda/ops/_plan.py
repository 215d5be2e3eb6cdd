"""Plans of moves: which row each row of a result takes, made once and replayed on any tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from jagged_cuda.ops import _contract, _matrices
from jagged_cuda.ops._dispatch import refuse_transforms
from jagged_cuda.ops.jagged_take import jagged_take, take_sequences


class RowPlan(NamedTuple):
    """Which row each row of a result takes: one plan serves any number of parallel tensors.

    Args:
        index: `[total]` int64, the row that each row of the result takes; -1 for none, a row of
            zeros.
        offsets: `[B + 1]` int32 or int64: sequence b is rows ``offsets[b]:offsets[b + 1]`` of the
            result.
        unique: no row is taken twice. The gradient is then a copy; otherwise rows that are taken
            several times sum theirs, after a sort of the index.
        chosen, source: if whole sequences are taken, their numbers `[B]` among those of the offsets
            `source`; then these numbers are sorted in place of the index.

    Example:
        >>> ids, times = torch.tensor([7, 8, 9]), torch.tensor([[0.1], [0.2], [0.3]])
        >>> keep = torch.tensor([True, False, True])
        >>> plan = jagged_select(ids, torch.tensor([0, 2, 3]), keep, return_plan=True)
        >>> plan.take(ids), plan.take(times).flatten(), plan.offsets
        (tensor([7, 9]), tensor([0.1000, 0.3000]), tensor([0, 1, 2]))
    """

    index: Tensor  # type: ignore[assignment]  # instead of tuple's method
    offsets: Tensor
    unique: bool = False
    chosen: Tensor | None = None
    source: Tensor | None = None

    def take(self, x: Tensor) -> Tensor:
        """``z[i] = x[index[i]]``: jagged_take of x `[T, ...]`, with as many rows as planned for."""
        if self.chosen is None or self.source is None:
            return jagged_take(x, self.index, unique=self.unique)
        return take_sequences(x, self.index, self.chosen, self.source, self.offsets)


def rows_of(op: str, xs: Tensor | Sequence[Tensor]) -> int:
    """T, the rows that all of xs have."""
    tensors = [xs] if isinstance(xs, Tensor) else xs
    refuse_transforms(op, tensors)
    if not tensors:
        _contract.fail_argument(op, "xs", "a tensor or a sequence of tensors", "no tensor")
    for position, x in enumerate(tensors):
        name = "xs" if isinstance(xs, Tensor) else f"xs[{position}]"
        if x.dim() == 0:
            _contract.fail_argument(op, name, "[T, ...]", "[]")
        if x.shape[0] != tensors[0].shape[0]:
            expected = f"[{tensors[0].shape[0]}, ...]"
            _contract.fail_argument(op, name, expected, _contract.shape_text(x.shape))
    return tensors[0].shape[0]


def check_device(op: str, xs: Tensor | Sequence[Tensor], offsets: Tensor) -> None:
    """Offsets must be where the tensors are; messages name the function that was called."""
    x = xs if isinstance(xs, Tensor) else xs[0]
    _contract.check_offsets(op, offsets)
    if offsets.device != x.device:
        _contract.fail_argument(op, "offsets", f"on {x.device}", f"on {offsets.device}")


def read_total(op: str, sizes: Tensor) -> int:
    """The last of sizes, the rows of a result whose `total` is not given: waits for the GPU."""
    return _matrices.read_size(op, "total", sizes)


def read_totals(op: str, sizes: Tensor) -> list[int]:
    """Several sizes `[2]` that are not given: waits for the GPU once."""
    if torch.compiler.is_compiling():
        return [_matrices.read_size(op, "totals", sizes[i : i + 1]) for i in range(2)]
    _matrices.check_not_capturing(op, "totals", sizes)
    return cast(list[int], sizes.tolist())


def cut_to_size(op: str, plan: RowPlan) -> RowPlan:
    """The plan without rows at its end that take none: reads its size, which waits for the GPU."""
    return plan._replace(index=plan.index[: read_total(op, plan.offsets)])


def move(
    op: str, xs: Tensor | Sequence[Tensor], plan: RowPlan, return_plan: bool
) -> tuple[Tensor, Tensor] | tuple[list[Tensor], Tensor] | RowPlan:
    """The results of a plan and their offsets, or the plan."""
    if return_plan:
        return plan
    if isinstance(xs, Tensor):
        return plan.take(xs), plan.offsets
    return [plan.take(x) for x in xs], plan.offsets
