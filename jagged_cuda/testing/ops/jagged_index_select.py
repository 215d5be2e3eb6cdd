"""jagged_index_select: each sequence twice, by its number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_cuda.testing.case import CAPACITIES, ROW_PROFILES, TRAILING, Case, Kind, Tensors
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.plans import packed, rows_of_sequences, taken
from jagged_cuda.testing.samples import Sample, Spec


def layout_of(spec: Spec) -> Layout:
    """Both copies of a sequence are one."""
    return packed(spec, (2 * n for n in spec.layout.lengths))


def index_of(offsets: Tensor) -> Tensor:
    return torch.arange(2 * (offsets.shape[0] - 1), device=offsets.device) // 2


def function(ops: Any, spec: Spec, t: Tensors, offsets: Tensor, _: Tensor | None) -> Tensors:
    # A list is moved by a plan, one tensor without.
    xs = [t["x"]] if spec.choices["is_list"] else t["x"]
    total = layout_of(spec).total
    out, _ = ops.jagged_index_select(xs, offsets, index_of(offsets), total=total)
    return {"out": out[0] if spec.choices["is_list"] else out}


def registered(sample: Sample) -> dict[str, tuple[Any, ...]]:
    index, total = index_of(sample.offsets), layout_of(sample.spec).total
    planning = (sample.offsets, index, sample.spec.layout.total, total)
    _, taken = torch.ops.jagged_cuda.jagged_index_select_plan(*planning)
    x = sample.tensors["x"]
    copies = torch.ones((total, *x.shape[1:]), dtype=x.dtype, device=x.device)
    return {
        "jagged_index_select": (x, sample.offsets, index, total),
        "jagged_index_select_plan": planning,
        "jagged_index_select_backward": (
            copies.requires_grad_(),
            *(sample.offsets, taken, index, None, None),
            sample.spec.layout.total,
        ),
    }


def reference(spec: Spec, t: Tensors) -> Tensors:
    rows = [row for rows in rows_of_sequences(spec.layout) for row in (*rows, *rows)]
    return {"out": taken(t["x"], rows, layout_of(spec))}


CASE = Case(
    name="jagged_index_select",
    choices={"trailing": TRAILING, "capacity": CAPACITIES, "is_list": (False, True)},
    shapes=lambda spec: {"x": (spec.layout.total, *spec.choices["trailing"])},
    rows={"x": "q", "out": layout_of},
    function=function,
    registered=registered,
    reference=reference,
    profiles=ROW_PROFILES,
    autocast="unchanged",
    # So many copies that they are sorted.
    kinds=(Kind((2050, 2500), (1, 4), {"trailing": TRAILING[:5]}),),
    huge={"trailing": (512,)},
)
