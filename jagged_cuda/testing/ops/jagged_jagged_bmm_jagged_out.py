"""jagged_jagged_bmm_jagged_out: for each sequence the matrix of its rows' products."""

from __future__ import annotations

from torch import Tensor

import jagged_cuda
from jagged_cuda.testing.case import CAPACITIES, FEATURES, MATRIX_PROFILES, Case, matrix_kinds
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.padding import pad, unpad_matrices


def definition(x: Tensor, y: Tensor, layout: Layout, kv_layout: Layout, capacity: int) -> Tensor:
    """x `[Tx, D]`, y `[Ty, D]` -> `[capacity]`, a matrix `[L, Lk]` per sequence"""
    scores = pad(x, layout) @ pad(y, kv_layout).transpose(1, 2)
    return unpad_matrices(scores, layout, kv_layout, capacity)


CASE = Case(
    name="jagged_jagged_bmm_jagged_out",
    choices={"D": FEATURES, "cross": (False, True), "capacity": CAPACITIES},
    shapes=lambda spec: {
        "x": (spec.layout.total, spec.choices["D"]),
        "y": (spec.kv.total, spec.choices["D"]),
    },
    rows={"x": "q", "y": "kv", "out": "matrix"},
    function=lambda ops, spec, t, offsets, kv_offsets: {
        "out": ops.jagged_jagged_bmm_jagged_out(
            t["x"], t["y"], offsets, y_offsets=kv_offsets, total_out=spec.capacity
        )
    },
    registered=lambda s: {
        "jagged_jagged_bmm_jagged_out": (
            *(s.tensors["x"], s.tensors["y"], s.offsets, s.kv_offsets),
            *(jagged_cuda.matrix_offsets(s.offsets, s.kv_offsets), s.spec.capacity),
        ),
        "jagged_jagged_bmm_jagged_out_backward": (
            s.tensors["x"].new_ones(s.spec.capacity),
            s.tensors["x"].detach(),  # the operator has no derivative
            s.tensors["y"].detach(),
            *(s.offsets, s.kv_offsets),
            jagged_cuda.matrix_offsets(s.offsets, s.kv_offsets),
        ),
    },
    reference=lambda spec, t: {
        "out": definition(t["x"], t["y"], spec.layout, spec.kv, spec.capacity)
    },
    profiles=MATRIX_PROFILES,
    kinds=matrix_kinds("D"),
    autocast="lower_precision",
    product=True,
    huge={"D": 512},
)
