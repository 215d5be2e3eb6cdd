"""jagged_dense_mul: each row multiplied by the padded row at the same place."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged_cuda.testing.case import ROW_PROFILES, Case
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.ops.jagged_dense_add import CHOICES, cut_or_fill, shapes
from jagged_cuda.testing.padding import pad, unpad


def definition(x: Tensor, y: Tensor, layout: Layout) -> Tensor:
    """x `[T, ...]`, y `[B, M, ...]` -> like x; zeros where y has no row, whatever x is there"""
    known = min(y.shape[1], layout.max_len)
    products = pad(x, layout)[:, :known] * y[:, :known]
    return unpad(cut_or_fill(products, layout.max_len), layout)


CASE = Case(
    name="jagged_dense_mul",
    choices=CHOICES,
    shapes=shapes,
    rows={"x": "q", "y": "seq", "out": "q"},
    function=lambda ops, _, t, offsets, __: {"out": ops.jagged_dense_mul(t["x"], t["y"], offsets)},
    registered=lambda s: {
        "jagged_dense_mul": (s.tensors["x"], s.tensors["y"], s.offsets),
        "jagged_dense_mul_backward": (
            torch.randn_like(s.tensors["x"]),
            s.tensors["x"],
            s.tensors["y"],
            s.offsets,
        ),
    },
    reference=lambda spec, t: {"out": definition(t["x"], t["y"], spec.layout)},
    profiles=ROW_PROFILES,
    autocast="unchanged",
    huge={"trailing": (512,), "padded_len": 128},
)
