"""jagged_positions: where in its sequence each row is.

The case multiplies rows by their positions, so that what knows only floating results judges it:
modulo 128, which every dtype holds. tests/test_positions.py looks at the integers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_cuda.ops._counts import tensor_and_int
from jagged_cuda.testing.case import ROW_PROFILES, Case, Tensors
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.padding import unpad
from jagged_cuda.testing.samples import Sample, Spec


def count_of(chosen: int | str | None, offsets: Tensor) -> Any:
    """An int or None, or for "each" `[B]`: from 0 to 4, by the length of each sequence."""
    return offsets.diff() % 5 if chosen == "each" else chosen


def definition(layout: Layout, targets: int | Tensor | None, from_end: bool) -> Tensor:
    """`[T]`"""
    lengths = torch.tensor(layout.lengths, dtype=torch.int64)
    given = torch.as_tensor(0 if targets is None else targets).cpu()
    history = (lengths - given.expand(lengths.shape)).clamp(min=0)[:, None]
    positions = torch.minimum(torch.arange(layout.max_len)[None], history)
    return unpad(history - positions if from_end else positions, layout)


def times_positions(x: Tensor, positions: Tensor) -> Tensor:
    """x `[T]`, positions `[T]`; 0 where a position is, so that nothing leaks from outside."""
    factor = (positions % 128).to(x.device, x.dtype)
    return torch.where(factor > 0, x * factor, 0.0)


def _function(ops: Any, spec: Spec, t: Tensors, offsets: Tensor, _: Tensor | None) -> Tensors:
    x, from_end = t["x"], spec.choices["from_end"]
    targets = count_of(spec.choices["targets"], offsets)
    positions = ops.jagged_positions(offsets, total=x.shape[0], from_end=from_end, targets=targets)
    return {"out": times_positions(x, positions)}


def _reference(spec: Spec, t: Tensors) -> Tensors:
    targets = count_of(spec.choices["targets"], spec.layout.offsets())
    positions = definition(spec.layout, targets, spec.choices["from_end"])
    return {"out": times_positions(t["x"], positions)}


def _registered(sample: Sample) -> dict[str, tuple[Any, ...]]:
    targets = count_of(sample.spec.choices["targets"], sample.offsets)
    each, same = tensor_and_int("jagged_positions", "targets", targets)
    total, from_end = sample.tensors["x"].shape[0], sample.spec.choices["from_end"]
    return {"jagged_positions": (sample.offsets, each, total, from_end, same)}


CASE = Case(
    name="jagged_positions",
    choices={"from_end": (False, True), "targets": (None, 1, 3, "each")},
    shapes=lambda spec: {"x": (spec.layout.total,)},
    rows={"x": "q", "out": "q"},
    function=_function,
    registered=_registered,
    reference=_reference,
    profiles=ROW_PROFILES,
    autocast="unchanged",
    differentiable=False,
)
