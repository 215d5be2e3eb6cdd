"""jagged_sessionize: where the sessions of each sequence begin.

The case takes the rows for times, and multiplies each by the number of its session within its
sequence, modulo 128, as both levels of offsets give it. tests/test_sessions.py looks at these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_cuda.testing.case import ROW_PROFILES, Case, Tensors
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.ops.jagged_positions import times_positions
from jagged_cuda.testing.padding import pad, unpad
from jagged_cuda.testing.samples import Spec


def definition(time: Tensor, layout: Layout, gap: float) -> Tensor:
    """time `[T]` -> `[T]`, the number of each row's session in its sequence, from 1; 0 outside"""
    padded = pad(time, layout)
    rises = (padded[:, 1:] - padded[:, :-1] > gap).long()
    first = torch.ones_like(padded[:, :1], dtype=torch.int64)
    return unpad(torch.cat([first, rises], 1).cumsum(1), layout)


def numbers_of(offsets: Tensor, found: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    """`[T]`: the same, from the results."""
    session_offsets, first_session = found[0], found[1]
    rows = torch.arange(x.shape[0], device=x.device, dtype=offsets.dtype)
    seq = torch.searchsorted(offsets, rows, right=True) - 1
    session = torch.searchsorted(session_offsets, rows, right=True)
    is_inside = (rows >= offsets[0]) & (rows < offsets[-1])
    number = session - first_session[seq.clamp(min=0)]
    return torch.where(is_inside, number, 0)


def _function(ops: Any, spec: Spec, t: Tensors, offsets: Tensor, _: Tensor | None) -> Tensors:
    x = t["x"]
    found = ops.jagged_sessionize(x, offsets, spec.choices["gap"], sessions=x.shape[0])
    return {"out": times_positions(x, numbers_of(offsets, found, x))}


def _reference(spec: Spec, t: Tensors) -> Tensors:
    numbers = definition(t["x"].detach(), spec.layout, spec.choices["gap"])
    return {"out": times_positions(t["x"], numbers)}


CASE = Case(
    name="jagged_sessionize",
    choices={"gap": (0.25, 0.0, 1.5)},
    shapes=lambda spec: {"x": (spec.layout.total,)},
    rows={"x": "q", "out": "q"},
    function=_function,
    registered=lambda s: {
        "jagged_sessionize": (s.tensors["x"], s.offsets, s.spec.choices["gap"], s.spec.layout.total)
    },
    reference=_reference,
    profiles=ROW_PROFILES,
    autocast="unchanged",
    differentiable=False,
)
