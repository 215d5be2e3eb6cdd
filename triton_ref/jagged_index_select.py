"""Whole sequences by their numbers."""

from collections.abc import Sequence

import torch

from jagged_cuda.ops import _contract

from .jagged_slice import move_ranges, rows_of


def jagged_index_select(
    xs: torch.Tensor | Sequence[torch.Tensor],
    offsets: torch.Tensor,
    index: torch.Tensor,
    *,
    total: int | None = None,
):
    """z_k = x_b with b = index[k] for xs [T, ...], and the offsets."""
    rows = rows_of(xs)
    x = xs if isinstance(xs, torch.Tensor) else xs[0]
    _contract.check("jagged_index_select", x=x, offsets=offsets, index=index, total=total or 0)
    bounds = offsets.clamp(0, rows).long()
    begins, lengths = bounds[:-1][index], bounds.diff().clamp(min=0)[index]
    return move_ranges(xs, begins, lengths, offsets.dtype, total)
