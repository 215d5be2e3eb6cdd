"""jagged_mean: the mean of each sequence's rows, 0 without any."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.ops import jagged_sum


def definition(x: Tensor, layout: Layout) -> Tensor:
    """x `[T, ...]` -> `[B, ...]`"""
    lengths = torch.tensor(layout.lengths, dtype=x.dtype, device=x.device).clamp(min=1)
    return jagged_sum.definition(x, layout) / lengths.reshape(-1, *(1,) * (x.dim() - 1))


CASE = dataclasses.replace(
    jagged_sum.CASE,
    name="jagged_mean",
    function=lambda ops, _, t, offsets, __: {"out": ops.jagged_mean(t["x"], offsets)},
    registered=lambda s: {"jagged_mean": (s.tensors["x"], s.offsets)},
    reference=lambda spec, t: {"out": definition(t["x"], spec.layout)},
)
