"""Lists of tensors, one for each sequence, as (values, offsets), and back.

Example:
    >>> import torch, jagged_cuda
    >>> values, offsets = jagged_cuda.lists.to_jagged([torch.ones(2), torch.ones(0), torch.ones(3)])
    >>> offsets
    tensor([0, 2, 2, 5])
    >>> jagged_cuda.lists.from_jagged(values, offsets)
    [tensor([1., 1.]), tensor([]), tensor([1., 1., 1.])]
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from jagged_cuda.ops._contract import check_offsets, dtype_name, fail_argument, shape_text

__all__ = ["from_jagged", "to_jagged"]


def to_jagged(
    tensors: Sequence[Tensor], *, dtype: torch.dtype = torch.int64
) -> tuple[Tensor, Tensor]:
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
        fail_argument("lists.to_jagged", "tensors", "at least one tensor", "none")
    if dtype not in (torch.int32, torch.int64):
        fail_argument("lists.to_jagged", "dtype", "int32 or int64", dtype_name(dtype))
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor) or tensor.is_nested or tensor.dim() == 0:
            kind = f"a {type(tensor).__name__}"
            actual = shape_text(tensor.shape) if kind == "a Tensor" else kind
            fail_argument("lists.to_jagged", f"tensors[{i}]", "a tensor [L, ...]", actual)
        if _kind_of(tensor) != _kind_of(tensors[0]):
            expected = f"{_kind_of(tensors[0])}, as tensors[0]"
            fail_argument("lists.to_jagged", f"tensors[{i}]", expected, _kind_of(tensor))
    values = torch.cat([*tensors])
    ends = [*accumulate((len(tensor) for tensor in tensors), initial=0)]
    return values, torch.tensor(ends, dtype=dtype).to(values.device, non_blocking=True)


def from_jagged(values: Tensor, offsets: Tensor | Sequence[int]) -> list[Tensor]:
    """Give each sequence a tensor of its own.

    Args:
        values: `[T, ...]`.
        offsets: `[B + 1]` int32 or int64; on a GPU they are read, which waits for it. Offsets that
            the host knows may be given as a sequence of ints, and nothing synchronises.

    Returns:
        B views of values, `[L, ...]` each.

    Raises:
        RuntimeError: a shape or dtype does not fit; offsets decrease, or end behind the rows.
    """
    if isinstance(offsets, Tensor):
        check_offsets("lists.from_jagged", offsets)
        offsets = offsets.tolist()
    for i, (begin, end) in enumerate(pairwise(offsets)):
        if not 0 <= begin <= end:
            expected = f">= offsets[{i}] = {begin}" if begin >= 0 else ">= 0"
            which, actual = (i + 1, end) if begin >= 0 else (i, begin)
            fail_argument("lists.from_jagged", f"offsets[{which}]", expected, actual)
        if end > len(values):
            expected = f"<= the number of rows {len(values)}"
            fail_argument("lists.from_jagged", f"offsets[{i + 1}]", expected, end)
    return [values[begin:end] for begin, end in pairwise(offsets)]


def _kind_of(tensor: Tensor) -> str:
    """What all tensors have in common, but for the number of their rows."""
    shape = shape_text(["L", *tensor.shape[1:]])
    return f"{shape} {dtype_name(tensor.dtype)} on {tensor.device}"
