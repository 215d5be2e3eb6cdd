"""Lists of tensors, one for each sequence, as (values, offsets), and back.

Example:
    >>> import torch, jagged_cuda
    >>> values, offsets = jagged_cuda.lists.unpack([torch.ones(2), torch.ones(0), torch.ones(3)])
    >>> offsets
    tensor([0, 2, 2, 5])
    >>> jagged_cuda.lists.pack(values, offsets)
    [tensor([1., 1.]), tensor([]), tensor([1., 1., 1.])]
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from jagged_cuda.ops._contract import check_offsets, fail_argument

__all__ = ["pack", "unpack"]


def unpack(tensors: Sequence[Tensor], *, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """Put the rows of all tensors one after another.

    Args:
        tensors: at least one, `[L, ...]` each, of one dtype and device, alike but for L.
        dtype: of the offsets, int32 or int64.

    Returns:
        ``(values, offsets)``: values `[T, ...]`, offsets `[B + 1]` on the same device.

    Raises:
        RuntimeError: there is no tensor, or they differ in more than L.

    Notes:
        One copy of the rows, through which gradients reach each tensor. The lengths are known on
        the host, so nothing synchronises.
    """
    if len(tensors) == 0:
        fail_argument("lists.unpack", "tensors", "at least one tensor", "none")
    values = torch.cat([*tensors])
    ends = [*accumulate((len(tensor) for tensor in tensors), initial=0)]
    return values, torch.tensor(ends, dtype=dtype).to(values.device, non_blocking=True)


def pack(values: Tensor, offsets: Tensor | Sequence[int]) -> list[Tensor]:
    """Give each sequence a tensor of its own.

    Args:
        values: `[T, ...]`.
        offsets: `[B + 1]` int32 or int64; on a GPU they are read, which waits for it. Offsets that
            the host knows may be given as a sequence of ints, and nothing synchronises.

    Returns:
        B views of values, `[L, ...]` each.

    Raises:
        RuntimeError: a shape or dtype does not fit.
    """
    if isinstance(offsets, Tensor):
        check_offsets("lists.pack", offsets)
        offsets = offsets.tolist()
    return [values[begin:end] for begin, end in pairwise(offsets)]
