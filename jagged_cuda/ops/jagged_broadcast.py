"""jagged_broadcast: each row of a sequence gets the sequence's value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_cuda.ops import _contract, _matrices
from jagged_cuda.ops._dispatch import call, overridable, register


@overridable
def jagged_broadcast(x: Tensor, offsets: Tensor, *, total: int | None = None) -> Tensor:
    """Give each row of a sequence the sequence's value.

    For each sequence b: ``z_b[i] = x[b]`` for each of its rows i.

    Args:
        x: `[B, ...]`, one value per sequence; any float or integer dtype, or bool.
        offsets: `[B + 1]` int32 or int64, on x's device; sequence b is rows
            ``offsets[b]:offsets[b + 1]`` of the result.
        total: T, rows of the result: at least the last of offsets. None reads that number, which
            waits for the GPU.

    Returns:
        `[T, ...]` of x's dtype; rows outside every sequence are 0.

    Raises:
        RuntimeError: a shape, dtype, device or option does not fit, the message names the
            argument; or total is None while a CUDA graph is captured.
        torch.OutOfMemoryError: the GPU has no room for the result.

    Notes:
        Empty sequences are allowed; their values are not read. Values are copied. With total
        nothing synchronises; torch.compile without graph breaks needs it too. The gradient is
        jagged_sum, so that derivatives of any order exist; integers have none. Autocast leaves
        the dtype alone. Deterministic. x is read in place if each of its rows is contiguous; any
        other layout costs one copy.

    Example:
        >>> jagged_broadcast(torch.tensor([5.0, 6.0, 7.0]), torch.tensor([0, 2, 2, 3]))
        tensor([5., 5., 7.])
    """
    op = "jagged_broadcast"
    if total is None:
        _contract.check_offsets(op, offsets)
        total = _matrices.read_size(op, "total", offsets)
    return call(torch.ops.jagged_cuda.jagged_broadcast.default, x, offsets, total)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None, None]:
    (offsets,) = ctx.saved_tensors
    return call(torch.ops.jagged_cuda.jagged_sum.default, grad_out, offsets), None, None


register(
    "jagged_broadcast",
    setup_context=_setup_context,
    backward=_backward,
    autocast="unchanged",
)
