"""matrix_offsets: where the matrix of each sequence begins."""

from __future__ import annotations

import torch  # noqa: F401  (of the example)
from torch import Tensor

from jagged_cuda.ops import _matrices
from jagged_cuda.ops._dispatch import overridable, register


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
        >>> matrix_offsets(torch.tensor([0, 2, 2, 5]))
        tensor([ 0,  4,  4, 13])
    """
    return _matrices.matrix_offsets("matrix_offsets", offsets, y_offsets)


register(
    "matrix_offsets",
    autocast="unchanged",
)
