"""What the operators that take a number of rows share: an int, or one for each sequence."""

from __future__ import annotations

from torch import Tensor

from jagged_cuda.ops._contract import fail_argument


def tensor_and_int(op: str, argument: str, count: int | Tensor | None) -> tuple[Tensor | None, int]:
    """`count` as operators take it: `[B]` or None, and what then holds for every sequence."""
    if isinstance(count, Tensor):
        return count, 0
    if count is None:
        return None, 0
    if count < 0:
        fail_argument(op, argument, ">= 0", count)
    return None, count
