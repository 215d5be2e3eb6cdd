"""The mean over the rows of each sequence."""

import torch

from .jagged_sum import sum_rows


def jagged_mean(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """z[b] = x_b.mean(0) for x [T, ...], accumulated in fp32; 0 without rows."""
    return sum_rows("jagged_mean", x, offsets, mean=True)
