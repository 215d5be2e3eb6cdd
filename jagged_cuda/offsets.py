"""Offsets from lengths and offsets: plain PyTorch on their own device, without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from jagged_cuda.ops import _contract, _matrices
from jagged_cuda.ops._dispatch import overridable

__all__ = ["lengths_from_offsets", "matrix_offsets", "offsets_from_lengths"]


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


@overridable
def matrix_offsets(offsets: Tensor, y_offsets: Tensor | None = None) -> Tensor:
    """Say where the matrix of each sequence begins in a vector of one matrix per sequence.

    Matrix b is `[Lx, Ly]`, stored row by row, one after another: the result is the running sum of
    ``Lx * Ly``, where Lx and Ly are the lengths of sequence b.

    Args:
        offsets: `[B + 1]` int32 or int64; sequence b of them has as many rows as matrix b.
        y_offsets: `[B + 1]` of offsets' dtype and device, for the columns; None means offsets.

    Returns:
        `[B + 1]` int64, beginning at 0; the last element is the number of all elements.

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.

    Notes:
        Empty sequences are allowed, and a negative length counts as 0. No gradient. Nothing
        synchronises. Computed once for a batch and given to each operator as ``matrix_offsets``,
        it spares each of them, and its backward, the scan. A slice ``[b : c + 1]`` of the result,
        with the same slice of the offsets, names sequences b to c - 1 of the same vector.

    Source: "Enhancing Performance and Scalability of Large-Scale Recommendation Systems with
    Jagged Flash Attention", RecSys '24, Table 1.

    Example:
        >>> import torch
        >>> matrix_offsets(torch.tensor([0, 2, 2, 5]))
        tensor([ 0,  4,  4, 13])
    """
    return _matrices.matrix_offsets("matrix_offsets", offsets, y_offsets)
