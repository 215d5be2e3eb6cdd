"""jagged_slice: a range of the rows of each sequence; truncated, or split and joined again."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from jagged_cuda.testing.case import CAPACITIES, ROW_PROFILES, TRAILING, Case, Tensors
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.plans import packed, rows_of_sequences, taken
from jagged_cuda.testing.samples import Spec

FUNCTIONS = ("jagged_slice", "jagged_first", "jagged_last", "jagged_split")


def kept_rows(length: int, spec: Spec) -> range:
    """Of a sequence."""
    n = length - length // 3 if spec.choices["each"] else 5
    begin = n // 2
    return {
        "jagged_slice": range(length)[begin : begin + n],
        "jagged_first": range(length)[:n],
        "jagged_last": range(length)[max(0, length - n) :],
        "jagged_split": range(length),
    }[spec.choices["function"]]


def layout_of(spec: Spec) -> Layout:
    return packed(spec, (len(kept_rows(n, spec)) for n in spec.layout.lengths))


def function(ops: Any, spec: Spec, t: Tensors, offsets: Tensor, _: Tensor | None) -> Tensors:
    x, total = t["x"], layout_of(spec).total
    lengths = offsets.diff().clamp(min=0)
    n = lengths - lengths // 3 if spec.choices["each"] else 5
    name = spec.choices["function"]
    if name == "jagged_split":
        rows = x.shape[0]
        (left, left_offsets), (right, right_offsets) = ops.jagged_split(
            x, offsets, n=n, totals=(rows, rows)
        )
        parts = [left, right], [left_offsets, right_offsets]
        return {"out": ops.jagged_concat(*parts, total=total)[0]}
    numbers = (n // 2, n) if name == "jagged_slice" else (n,)
    return {"out": getattr(ops, name)(x, offsets, *numbers, total=total)[0]}


def reference(spec: Spec, t: Tensors) -> Tensors:
    rows = [rows[i] for rows in rows_of_sequences(spec.layout) for i in kept_rows(len(rows), spec)]
    return {"out": taken(t["x"], rows, layout_of(spec))}


CASE = Case(
    name="jagged_slice",
    choices={
        "trailing": TRAILING,
        "function": FUNCTIONS,
        "each": (False, True),
        "capacity": CAPACITIES,
    },
    shapes=lambda spec: {"x": (spec.layout.total, *spec.choices["trailing"])},
    rows={"x": "q", "out": layout_of},
    function=function,
    registered=lambda s: {
        "jagged_slice": (
            s.offsets,
            None,
            s.offsets.diff() // 2,
            s.spec.layout.total,
            layout_of(s.spec).total,
            2,
            3,
        )
    },
    reference=reference,
    profiles=ROW_PROFILES,
    autocast="unchanged",
    functions=FUNCTIONS,
    huge={"trailing": (512,)},
)
