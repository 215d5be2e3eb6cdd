"""padded_to_jagged: the rows of padded sequences one after another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_cuda.ops import _contract, _matrices
from jagged_cuda.ops._dispatch import call, overridable, register


@overridable
def padded_to_jagged(x: Tensor, offsets: Tensor, *, total: int | None = None) -> Tensor:
    """Take the rows that each sequence has from a padded tensor.

    For each sequence b of length L: ``z_b[i] = x[b, i]`` for i < min(L, M), and 0 from there to L.

    Args:
        x: `[B, M, ...]` padded; any float or integer dtype, or bool.
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
        Empty sequences are allowed, and rows of x beyond a sequence's length are not read.
        Values are copied. With total nothing synchronises; torch.compile without graph breaks
        needs it too. The gradient is jagged_to_padded, so that derivatives of any order exist;
        integers have none. Autocast leaves the dtype alone. Deterministic. x is read in place if
        each ``x[b, i]`` is contiguous; any other layout costs one copy.

    Example:
        >>> padded_to_jagged(torch.tensor([[1, 0], [2, 3]]), torch.tensor([0, 1, 3]))
        tensor([1, 2, 3])
    """
    op = "padded_to_jagged"
    if total is None:
        _contract.check_offsets(op, offsets)
        total = _matrices.read_size(op, "total", offsets)
    return call(torch.ops.jagged_cuda.padded_to_jagged.default, x, offsets, total)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, offsets, _ = inputs
    ctx.max_len = x.shape[1]
    ctx.save_for_backward(offsets)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None, None]:
    (offsets,) = ctx.saved_tensors
    op = torch.ops.jagged_cuda.jagged_to_padded.default
    return call(op, grad_out, offsets, ctx.max_len), None, None


register(
    "padded_to_jagged",
    setup_context=_setup_context,
    backward=_backward,
    autocast="unchanged",
)
