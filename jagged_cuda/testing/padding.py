"""Padding, its inverse, and masks of padded positions, for the definitions.

`[T, ...]` -> `[B, M, ...]` and back; for one matrix per sequence `[sum L*Lk]` -> `[B, M, N]`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from jagged_cuda.testing.lengths import Layout, matrices


@functools.lru_cache(maxsize=16)
def inside(layout: Layout, device: torch.device) -> Tensor:
    """`[B, M]`: True where a padded position holds a row of the sequence."""
    lengths = torch.tensor(layout.lengths, dtype=torch.int64, device=device)
    return torch.arange(layout.max_len, device=device) < lengths[:, None]


@functools.lru_cache(maxsize=16)
def _rows(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each of `[sum L]` rows: its padded position in `[B * M]`, and its place in `[T]`."""
    is_row = inside(layout, device)
    row = layout.offsets(device)[:-1, None] + torch.arange(layout.max_len, device=device)
    return is_row.flatten().nonzero().squeeze(1), row[is_row]


def pad(values: Tensor, layout: Layout) -> Tensor:
    """`[T, ...]` -> `[B, M, ...]`, zeros beyond each sequence."""
    position, row = _rows(layout, values.device)
    padded = values.new_zeros((layout.num_seqs * layout.max_len, *values.shape[1:]))
    # Not a gather from a row of zeros: its gradient would add up all padding in that one row.
    padded = padded.index_copy(0, position, values.index_select(0, row))
    return padded.unflatten(0, (layout.num_seqs, layout.max_len))


def unpad(padded: Tensor, layout: Layout, outside: float = 0.0) -> Tensor:
    """`[B, M, ...]` -> `[T, ...]`; rows outside every sequence are ``outside``."""
    position, row = _rows(layout, padded.device)
    values = padded.new_full((layout.total, *padded.shape[2:]), outside)
    return values.index_copy(0, row, padded.flatten(0, 1).index_select(0, position))


def matrix_elements(
    layout: Layout, kv_layout: Layout, capacity: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """`[B, M, N]`: where each element of a matrix `[L, Lk]` is, and whether it exists."""
    begin = matrices(layout, kv_layout, capacity).offsets(device)[:-1]
    fits = matrices(layout, kv_layout, capacity).offsets(device).diff() > 0
    len_k = torch.tensor(kv_layout.lengths, dtype=torch.int64, device=device)
    i = torch.arange(layout.max_len, device=device)[None, :, None]
    j = torch.arange(kv_layout.max_len, device=device)[None, None, :]
    there = inside(layout, device)[:, :, None] & inside(kv_layout, device)[:, None, :]
    return begin[:, None, None] + i * len_k[:, None, None] + j, there & fits[:, None, None]


def pad_matrices(values: Tensor, layout: Layout, kv_layout: Layout) -> Tensor:
    """`[sum L*Lk]` -> `[B, M, N]`, zeros beyond each matrix, and for one that does not fit."""
    element, there = matrix_elements(layout, kv_layout, values.shape[0], values.device)
    padded = values.new_zeros(there.numel())
    position = there.flatten().nonzero().squeeze(1)
    padded = padded.index_copy(0, position, values.index_select(0, element[there]))
    return padded.view(there.shape)


def unpad_matrices(padded: Tensor, layout: Layout, kv_layout: Layout, capacity: int) -> Tensor:
    """`[B, M, N]` -> `[sum L*Lk]` in `capacity` elements; those outside every matrix are 0."""
    element, there = matrix_elements(layout, kv_layout, capacity, padded.device)
    return padded.new_zeros(capacity).index_copy(0, element[there], padded[there])
