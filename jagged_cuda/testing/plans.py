"""What the rooms of the operators that plan and move rows share."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.samples import Spec


def packed(spec: Spec, lengths: Iterable[int]) -> Layout:
    """A result of these lengths, by the choice "capacity": what is beyond it is cut."""
    wanted = list(lengths)
    rows = sum(wanted)
    capacity = spec.choices["capacity"]
    if not isinstance(capacity, int):
        capacity = {"exact": rows, "spare": rows + 37, "short": rows * 2 // 3}[capacity]
    left, kept = capacity, []
    for length in wanted:
        kept.append(min(length, left))
        left -= kept[-1]
    return Layout(tuple(kept), tail=left)


def taken(x: Tensor, rows: list[int], layout: Layout) -> Tensor:
    """These rows of x, as far as they fit into the layout; zeros after them."""
    index = torch.tensor(rows[: sum(layout.lengths)], dtype=torch.int64, device=x.device)
    kept = x.index_select(0, index)
    return F.pad(kept, (*(0,) * (2 * (x.dim() - 1)), 0, layout.tail))


def rows_of_sequences(layout: Layout) -> list[range]:
    """The numbers of each sequence's rows."""
    begin, rows = layout.base, []
    for length in layout.lengths:
        rows.append(range(begin, begin + length))
        begin += length
    return rows


def positions(offsets: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """`[T]`: whether each row is in a sequence, its number there, and the sequence's length."""
    rows = torch.arange(total, device=offsets.device)
    bounds = offsets.to(torch.int64)
    last = bounds.shape[0] - 1
    seq = torch.searchsorted(bounds, rows, right=True) - 1
    begin = bounds[seq.clamp(0, last)]
    length = bounds[(seq + 1).clamp(0, last)] - begin
    return (seq >= 0) & (seq < last), rows - begin, length
