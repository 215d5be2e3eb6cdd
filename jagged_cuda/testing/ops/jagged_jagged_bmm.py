"""jagged_jagged_bmm: x_b^T y_b for each sequence of two jagged tensors."""

from __future__ import annotations

from torch import Tensor

from jagged_cuda.testing.case import FEATURES, PRODUCT_KINDS, PRODUCT_PROFILES, Case
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.padding import pad


def definition(x: Tensor, y: Tensor, layout: Layout) -> Tensor:
    """x `[T, D]`, y `[T, N]` -> `[B, D, N]`"""
    return pad(x, layout).transpose(1, 2) @ pad(y, layout)


CASE = Case(
    name="jagged_jagged_bmm",
    choices={"D": FEATURES, "N": FEATURES},
    shapes=lambda spec: {
        "x": (spec.layout.total, spec.choices["D"]),
        "y": (spec.layout.total, spec.choices["N"]),
    },
    rows={"x": "q", "y": "q", "out": "seq"},
    function=lambda ops, _, t, offsets, __: {"out": ops.jagged_jagged_bmm(t["x"], t["y"], offsets)},
    registered=lambda s: {
        "jagged_jagged_bmm": (s.tensors["x"], s.tensors["y"], s.offsets),
        "jagged_jagged_bmm_backward": (
            s.tensors["x"].new_ones(
                s.offsets.numel() - 1, s.tensors["x"].shape[1], s.tensors["y"].shape[1]
            ),
            s.tensors["x"].detach(),  # the operator has no derivative
            s.tensors["y"].detach(),
            s.offsets,
        ),
    },
    reference=lambda spec, t: {"out": definition(t["x"], t["y"], spec.layout)},
    profiles=PRODUCT_PROFILES,
    kinds=PRODUCT_KINDS,
    autocast="lower_precision",
    product=True,
    huge={"D": 512, "N": 8},
    huge_dense={"D": 256, "N": 257},
)
