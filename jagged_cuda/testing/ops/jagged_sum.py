"""jagged_sum: the sum of each sequence's rows."""

from __future__ import annotations

from torch import Tensor

from jagged_cuda.testing.case import ROW_PROFILES, TRAILING, Case
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.padding import pad


def definition(x: Tensor, layout: Layout) -> Tensor:
    """x `[T, ...]` -> `[B, ...]`"""
    return pad(x, layout).sum(1)


CASE = Case(
    name="jagged_sum",
    choices={"trailing": TRAILING},
    shapes=lambda spec: {"x": (spec.layout.total, *spec.choices["trailing"])},
    rows={"x": "q", "out": "seq"},
    function=lambda ops, _, t, offsets, __: {"out": ops.jagged_sum(t["x"], offsets)},
    registered=lambda s: {"jagged_sum": (s.tensors["x"], s.offsets)},
    reference=lambda spec, t: {"out": definition(t["x"], spec.layout)},
    profiles=ROW_PROFILES,
    autocast="unchanged",
    huge={"trailing": (512,)},
    huge_dense={"trailing": (65_600,)},
)
