"""jagged_concat: rows of each sequence, dense ones before them, between or after."""

from __future__ import annotations

from collections.abc import Callable
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
PARTS = ("yx", "xxy", "xyx", "yxxyx")


def layout_of(spec: Spec) -> Layout:
    each, parts = padded_len(spec), spec.choices["parts"]
    lengths = (parts.count("x") * n + parts.count("y") * each for n in spec.layout.lengths)
    return packed(spec, lengths)


def dense_rows(y: Tensor, spec: Spec, lengths: Tensor) -> Tensor:
    """y with zeros for empty sequences: samples have NaN there, as rows that are not to be read."""
    return y.where((lengths > 0).view(-1, 1, *(1 for _ in spec.choices["trailing"])), 0.0)


def function(ops: Any, spec: Spec, t: Tensors, offsets: Tensor, _: Tensor | None) -> Tensors:
    parts = spec.choices["parts"]
    bounds = [offsets if name == "x" else None for name in parts]
    given = {"x": t["x"], "y": dense_rows(t["y"], spec, offsets.diff())}
    xs = [given[name] for name in parts]
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


def joined(spec: Spec, t: Tensors, other: Tensors, from_other: tuple[int, ...]) -> Tensors:
    """The rows of x and y; those of some parts, by their number, from others of the same values."""
    each, height = padded_len(spec), t["x"].shape[0]
    seqs = len(spec.layout.lengths)
    rows: list[int] = []
    for seq, own in enumerate(rows_of_sequences(spec.layout)):
        for number, name in enumerate(spec.choices["parts"]):
            before = height + seqs * each if number in from_other else 0
            dense = range(height + seq * each, height + (seq + 1) * each)
            rows += [before + row for row in (own if name == "x" else dense)]
    lengths = torch.tensor(spec.layout.lengths, device=t["y"].device)
    both = [
        (given["x"], dense_rows(given["y"], spec, lengths).flatten(0, 1)) for given in (t, other)
    ]
    return {
        "out": taken(torch.cat([part for given in both for part in given]), rows, layout_of(spec))
    }


def reference(spec: Spec, t: Tensors) -> Tensors:
    return joined(spec, t, t, ())


def added_first(numbers: tuple[int, ...]) -> Callable[[Spec, Tensors, torch.dtype], Tensors]:
    """The gradients of these parts are added first, and stored before others are added to them, as
    autograd does it with a tensor that is given more than once."""

    def way(spec: Spec, t: Tensors, storage: torch.dtype) -> Tensors:
        stored = {name: x.to(storage).to(x.dtype) for name, x in t.items()}
        return joined(spec, t, stored, numbers)

    return way


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
    rounded=tuple(map(added_first, ((), (1, 2), (1, 4), (2, 4)))),
    profiles=ROW_PROFILES,
    autocast="unchanged",
    huge={"trailing": (512,), "padded_len": 1, "parts": "yx"},
)
