"""Offsets from lengths and offsets: plain PyTorch on their own device, without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from jagged_cuda.ops import _contract
from jagged_cuda.ops._dispatch import overridable

__all__ = ["lengths_from_offsets", "offsets_from_lengths"]


@overridable
def offsets_from_lengths(lengths: Tensor) -> Tensor:
    """Say where each sequence begins, from the lengths of all.

    ``offsets[b] = sum(lengths[:b])``: sequence b is rows ``offsets[b]:offsets[b + 1]``.

    Args:
        lengths: `[B]` int32 or int64, on any device, contiguous or not.

    Returns:
        `[B + 1]` of lengths' dtype and device, beginning at 0; the last element is the number of
        all rows.

    Raises:
        RuntimeError: a shape or dtype does not fit; the message names the argument.

    Notes:
        Lengths may be 0. Negative ones are not checked here: operators check the offsets.
        The sum has lengths' dtype. More than 2^31 - 1 rows do not fit into int32: on the CPU that
        raises, on CUDA only under ``set_checks(True)``, since it needs a synchronisation; pass
        ``lengths.long()`` there. No gradient. Otherwise nothing synchronises.

    Example:
        >>> offsets_from_lengths(torch.tensor([2, 0, 3]))
        tensor([0, 2, 2, 5])
    """
    op = "offsets_from_lengths"
    _contract.check_lengths(op, lengths)
    sums = lengths.cumsum(0, dtype=torch.int64)
    if lengths.dtype is torch.int32 and lengths.numel() > 0 and _contract.may_read(lengths):
        rows = int(sums[-1])
        if rows > torch.iinfo(torch.int32).max:
            expected = "int64 for more than 2^31 - 1 rows"
            _contract.fail_argument(op, "lengths", expected, f"int32 for {rows}")
    return F.pad(sums.to(lengths.dtype), (1, 0))


@overridable
def lengths_from_offsets(offsets: Tensor) -> Tensor:
    """Say how many rows each sequence has.

    ``lengths[b] = offsets[b + 1] - offsets[b]``.

    Args:
        offsets: `[B + 1]` int32 or int64, on any device; they may begin anywhere.

    Returns:
        `[B]` of offsets' dtype and device.

    Raises:
        RuntimeError: a shape or dtype does not fit; the message names the argument.

    Notes:
        Decreasing offsets, which are wrong, give negative lengths. No gradient. Nothing
        synchronises.

    Example:
        >>> lengths_from_offsets(torch.tensor([4, 6, 6, 9]))
        tensor([2, 0, 3])
    """
    _contract.check_offsets("lengths_from_offsets", offsets)
    return torch.diff(offsets)
