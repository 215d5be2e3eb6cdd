"""jagged_to_padded: jagged rows as a padded tensor."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from jagged_cuda.ops import _contract
from jagged_cuda.ops._dispatch import call, overridable, register


@overridable
def jagged_to_padded(x: Tensor, offsets: Tensor, max_len: int, *, fill: float = 0.0) -> Tensor:
    """Give each sequence a row of its own in a padded tensor.

    For each sequence b of length L: ``z[b, i] = x_b[i]`` for i < min(L, max_len), and ``fill``
    from there to max_len.

    Args:
        x: `[T, ...]` jagged; any float or integer dtype, or bool.
        offsets: `[B + 1]` int32 or int64, on x's device; sequence b is rows
            ``offsets[b]:offsets[b + 1]``.
        max_len: M, the padded length; rows of a sequence beyond it are cut.
        fill: the value where a sequence has no row; an integer for integer dtypes.

    Returns:
        `[B, max_len, ...]` of x's dtype, contiguous.

    Raises:
        RuntimeError: a shape, dtype, device or option does not fit; the message names the argument.
        torch.OutOfMemoryError: the GPU has no room for the result.

    Notes:
        Empty sequences are allowed. Values are copied, and nothing synchronises. The gradient is
        padded_to_jagged, so that derivatives of any order exist; rows that are cut, and rows
        outside every sequence, get zero gradient; integers have none. Autocast leaves the dtype
        alone. Deterministic. x is read in place if each of its rows is contiguous; any other
        layout costs one copy.

    Example:
        >>> x = torch.tensor([1, 2, 3, 4])
        >>> jagged_to_padded(x, torch.tensor([0, 1, 4]), 2, fill=-1)
        tensor([[ 1, -1],
                [ 2,  3]])
    """
    op = "jagged_to_padded"
    if not x.dtype.is_floating_point:
        low, high = (0, 1) if x.dtype is torch.bool else _integers(x.dtype)
        if not (low <= fill <= high and math.floor(fill) == fill):
            expected = f"an integer that fits into {_contract.dtype_name(x.dtype)}"
            _contract.fail_argument(op, "fill", expected, str(fill))
    return call(torch.ops.jagged_cuda.jagged_to_padded.default, x, offsets, max_len, fill)


def _integers(dtype: torch.dtype) -> tuple[int, int]:
    info = torch.iinfo(dtype)
    return info.min, info.max


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, offsets, _, _ = inputs
    ctx.total = x.shape[0]
    ctx.save_for_backward(offsets)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None, None, None]:
    (offsets,) = ctx.saved_tensors
    op = torch.ops.jagged_cuda.padded_to_jagged.default
    return call(op, grad_out, offsets, ctx.total), None, None, None


register(
    "jagged_to_padded",
    setup_context=_setup_context,
    backward=_backward,
    autocast="unchanged",
)
