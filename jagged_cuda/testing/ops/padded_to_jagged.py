"""padded_to_jagged: the inverse of jagged_to_padded; rows that were cut are 0."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged_cuda.testing.case import ROW_PROFILES, TRAILING, Case
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.ops.jagged_to_padded import PADDED_LENS, padded_len
from jagged_cuda.testing.padding import unpad


def definition(x: Tensor, layout: Layout) -> Tensor:
    """x `[B, M, ...]` -> `[T, ...]`"""
    missing = max(0, layout.max_len - x.shape[1])
    beyond = x.new_zeros((x.shape[0], missing, *x.shape[2:]))
    return unpad(torch.cat([x, beyond], 1)[:, : layout.max_len], layout)


CASE = Case(
    name="padded_to_jagged",
    choices={"trailing": TRAILING, "padded_len": PADDED_LENS, "total": (None,)},
    shapes=lambda spec: {"x": (spec.layout.num_seqs, padded_len(spec), *spec.choices["trailing"])},
    rows={"x": "seq", "out": "total"},
    function=lambda ops, spec, t, offsets, _: {
        "out": ops.padded_to_jagged(t["x"], offsets, total=spec.rows_layout("total").total)
    },
    registered=lambda s: {
        "padded_to_jagged": (s.tensors["x"], s.offsets, s.spec.rows_layout("total").total)
    },
    reference=lambda spec, t: {"out": definition(t["x"], spec.rows_layout("total"))},
    profiles=ROW_PROFILES,
    autocast="unchanged",
    huge={"trailing": (512,), "padded_len": 128},
)
