"""Tensors joined sequence by sequence."""

from collections.abc import Sequence

import torch

from .jagged_slice import move_ranges


def jagged_concat(
    xs: Sequence[torch.Tensor],
    offsets_list: Sequence[torch.Tensor | None],
    *,
    total: int | None = None,
):
    """z_b = [x0_b, x1_b, ...] for xs [T, ...], or dense [B, M, ...] where there are no offsets."""
    given = next((offsets for offsets in offsets_list if offsets is not None), None)
    rows, begins, lengths = [], [], []
    first = 0
    for x, offsets in zip(xs, offsets_list, strict=True):
        if offsets is None:
            offsets = torch.arange(len(x) + 1, device=x.device) * x.shape[1]
            x = x.flatten(0, 1)
        begins.append(first + offsets[:-1].long())
        lengths.append(offsets.diff().long())
        rows.append(x)
        first += len(x)
    dtype = torch.int64 if given is None else given.dtype
    ranges = (torch.stack(each, 1).flatten() for each in (begins, lengths))
    z, ends = move_ranges(torch.cat(rows), *ranges, dtype, total)
    return z, ends[:: len(xs)]
