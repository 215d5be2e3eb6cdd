"""jagged_concat: rows of each sequence, dense ones before them, between or after."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_cuda.testing.case import CAPACITIES, ROW_PROFILES, TRAILING, Case, Tensors
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.ops.jagged_dense_add import shapes
from jagged_cuda.testing.ops.jagged_to_padded import PADDED_LENS, padded_len
from jagged_cuda.testing.plans import packed, rows_of_sequences, taken
from jagged_cuda.testing.samples import Sample, Spec

# Which tensors are joined; more than four take a second move.
PARTS = ("yx", "xx", "xyx", "yxxyx")


def layout_of(spec: Spec) -> Layout:
    each, parts = padded_len(spec), spec.choices["parts"]
    lengths = (parts.count("x") * n + parts.count("y") * each for n in spec.layout.lengths)
    return packed(spec, lengths)


def function(ops: Any, spec: Spec, t: Tensors, offsets: Tensor, _: Tensor | None) -> Tensors:
    parts = spec.choices["parts"]
    bounds = [offsets if name == "x" else None for name in parts]
    xs = [t[name] for name in parts]
    return {"out": ops.jagged_concat(xs, bounds, total=layout_of(spec).total)[0]}


def registered(sample: Sample) -> dict[str, tuple[Any, ...]]:
    x, y = sample.tensors["x"], sample.tensors["y"].flatten(0, 1)
    total = layout_of(sample.spec).total
    joined = torch.ones((total, *x.shape[1:]), dtype=x.dtype, device=x.device)
    rows = (len(x), sample.offsets, len(y), None, len(x), sample.offsets, 0, None)
    return {
        "jagged_concat": (x, sample.offsets, sample.offsets, total, y, None, x, sample.offsets),
        "jagged_concat_backward": (joined.requires_grad_(), sample.offsets, *rows),
    }


def reference(spec: Spec, t: Tensors) -> Tensors:
    each, first = padded_len(spec), t["x"].shape[0]
    rows: list[int] = []
    for seq, own in enumerate(rows_of_sequences(spec.layout)):
        dense = range(first + seq * each, first + (seq + 1) * each)
        for name in spec.choices["parts"]:
            rows += own if name == "x" else dense
    return {"out": taken(torch.cat([t["x"], t["y"].flatten(0, 1)]), rows, layout_of(spec))}


CASE = Case(
    name="jagged_concat",
    choices={
        "trailing": TRAILING,
        "padded_len": PADDED_LENS,
        "parts": PARTS,
        "capacity": CAPACITIES,
    },
    shapes=shapes,
    rows={"x": "q", "y": "seq", "out": layout_of},
    function=function,
    registered=registered,
    reference=reference,
    profiles=ROW_PROFILES,
    autocast="unchanged",
    huge={"trailing": (512,), "padded_len": 1, "parts": "yx"},
)
