"""jagged_take: the rows of each sequence backwards, or each of the first half of them twice."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged_cuda.testing.case import ROW_PROFILES, TRAILING, Case, Tensors
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.padding import pad, unpad
from jagged_cuda.testing.plans import positions
from jagged_cuda.testing.samples import Spec


def definition(x: Tensor, layout: Layout, repeated: bool) -> Tensor:
    """x `[T, ...]` -> like x"""
    lengths = torch.tensor(layout.lengths, dtype=torch.int64, device=x.device)[:, None]
    i = torch.arange(layout.max_len, device=x.device)
    row = (i // 2).expand(layout.num_seqs, -1) if repeated else (lengths - 1 - i).clamp(min=0)
    padded = pad(x, layout)
    seq = torch.arange(layout.num_seqs, device=x.device)[:, None]
    return unpad(padded[seq, row], layout)


def index_of(offsets: Tensor, total: int, repeated: bool) -> Tensor:
    inside, i, length = positions(offsets, total)
    rows = torch.arange(total, device=offsets.device) - i
    return (rows + (i // 2 if repeated else length - 1 - i)).where(inside, -1)


def function(ops: object, spec: Spec, t: Tensors, offsets: Tensor, _: Tensor | None) -> Tensors:
    repeated = spec.choices["repeated"]
    index = index_of(offsets, t["x"].shape[0], repeated)
    return {"out": ops.jagged_take(t["x"], index, unique=not repeated)}  # type: ignore[attr-defined]


CASE = Case(
    name="jagged_take",
    choices={"trailing": TRAILING, "repeated": (False, True)},
    shapes=lambda spec: {"x": (spec.layout.total, *spec.choices["trailing"])},
    rows={"x": "q", "out": "q"},
    function=function,
    registered=lambda s: {
        "jagged_take": (
            s.tensors["x"],
            index_of(s.offsets, s.spec.layout.total, False),
            True,
        ),
        "jagged_take_backward": (index_of(s.offsets, s.spec.layout.total, False), 5),
    },
    reference=lambda spec, t: {"out": definition(t["x"], spec.layout, spec.choices["repeated"])},
    profiles=ROW_PROFILES,
    autocast="unchanged",
    huge={"trailing": (512,)},
)
