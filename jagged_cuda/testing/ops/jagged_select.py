"""jagged_select: the rows of each sequence that a mask keeps, by their place in it."""

from __future__ import annotations

from torch import Tensor

from jagged_cuda.testing.case import CAPACITIES, ROW_PROFILES, TRAILING, Case, Tensors
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.plans import packed, positions, rows_of_sequences, taken
from jagged_cuda.testing.samples import Spec

KEPT = ("two_thirds", "all", "none")


def kept_rows(length: int, kept: str) -> list[int]:
    """Of a sequence: those of two_thirds depend on its length too."""
    if kept == "two_thirds":
        return [i for i in range(length) if (i + length) % 3]
    return list(range(length)) if kept == "all" else []


def mask(offsets: Tensor, total: int, kept: str) -> Tensor:
    """`[T]`; rows outside every sequence are True."""
    inside, i, length = positions(offsets, total)
    keep = (i + length) % 3 != 0 if kept == "two_thirds" else (i >= 0) == (kept == "all")
    return keep | ~inside


def layout_of(spec: Spec) -> Layout:
    kept = spec.choices["keep"]
    return packed(spec, (len(kept_rows(n, kept)) for n in spec.layout.lengths))


def function(ops: object, spec: Spec, t: Tensors, offsets: Tensor, _: Tensor | None) -> Tensors:
    keep = mask(offsets, t["x"].shape[0], spec.choices["keep"])
    total = layout_of(spec).total
    select = ops.jagged_select  # type: ignore[attr-defined]
    return {"out": select(t["x"], offsets, keep, total=total)[0]}


def reference(spec: Spec, t: Tensors) -> Tensors:
    kept = spec.choices["keep"]
    rows = [rows[i] for rows in rows_of_sequences(spec.layout) for i in kept_rows(len(rows), kept)]
    return {"out": taken(t["x"], rows, layout_of(spec))}


CASE = Case(
    name="jagged_select",
    choices={"trailing": TRAILING, "keep": KEPT, "capacity": CAPACITIES},
    shapes=lambda spec: {"x": (spec.layout.total, *spec.choices["trailing"])},
    rows={"x": "q", "out": layout_of},
    function=function,
    registered=lambda s: {
        "jagged_select": (
            s.offsets,
            mask(s.offsets, s.spec.layout.total, s.spec.choices["keep"]),
            layout_of(s.spec).total,
        )
    },
    reference=reference,
    profiles=ROW_PROFILES,
    autocast="unchanged",
    huge={"trailing": (512,)},
)
