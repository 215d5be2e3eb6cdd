"""jagged_to_padded: each sequence's rows, filled up or cut to max_len."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged_cuda.testing.case import ROW_PROFILES, TRAILING, Case
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.samples import Spec

PADDED_LENS = ("longest", "spare", "short", 0)


def padded_len(spec: Spec) -> int:
    """By the choice "padded_len": a number, or what the longest sequence needs, more or less."""
    chosen = spec.choices["padded_len"]
    if isinstance(chosen, int):
        return chosen
    longest = spec.layout.max_len
    return {"longest": longest, "spare": longest + 3, "short": longest * 2 // 3}[chosen]


def definition(x: Tensor, layout: Layout, max_len: int, fill: float) -> Tensor:
    """x `[T, ...]` -> `[B, max_len, ...]`"""
    lengths = torch.tensor(layout.lengths, dtype=torch.int64, device=x.device)
    i = torch.arange(max_len, device=x.device)
    row = layout.offsets(x.device)[:-1, None] + i
    filled = torch.cat([x, x.new_full((1, *x.shape[1:]), fill)])
    return filled[row.where(i < lengths[:, None], layout.total)]


CASE = Case(
    name="jagged_to_padded",
    choices={"trailing": TRAILING, "padded_len": PADDED_LENS, "fill": (0.0, -1.5, 3.0)},
    shapes=lambda spec: {"x": (spec.layout.total, *spec.choices["trailing"])},
    rows={"x": "q", "out": "seq"},
    function=lambda ops, spec, t, offsets, _: {
        "out": ops.jagged_to_padded(t["x"], offsets, padded_len(spec), fill=spec.choices["fill"])
    },
    registered=lambda s: {
        "jagged_to_padded": (s.tensors["x"], s.offsets, padded_len(s.spec), s.spec.choices["fill"])
    },
    reference=lambda spec, t: {
        "out": definition(t["x"], spec.layout, padded_len(spec), spec.choices["fill"])
    },
    profiles=ROW_PROFILES,
    autocast="unchanged",
    huge={"trailing": (512,), "padded_len": 128},
)
