"""jagged_broadcast: each row gets its sequence's value."""

from __future__ import annotations

from torch import Tensor

from jagged_cuda.testing.case import ROW_PROFILES, TRAILING, Case
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.padding import unpad


def definition(x: Tensor, layout: Layout) -> Tensor:
    """x `[B, ...]` -> `[T, ...]`"""
    return unpad(x[:, None].expand(-1, layout.max_len, *x.shape[1:]), layout)


CASE = Case(
    name="jagged_broadcast",
    choices={"trailing": TRAILING, "total": (None,)},
    shapes=lambda spec: {"x": (spec.layout.num_seqs, *spec.choices["trailing"])},
    rows={"x": "seq", "out": "total"},
    function=lambda ops, spec, t, offsets, _: {
        "out": ops.jagged_broadcast(t["x"], offsets, total=spec.rows_layout("total").total)
    },
    registered=lambda s: {
        "jagged_broadcast": (s.tensors["x"], s.offsets, s.spec.rows_layout("total").total)
    },
    reference=lambda spec, t: {"out": definition(t["x"], spec.rows_layout("total"))},
    profiles=ROW_PROFILES,
    autocast="unchanged",
    huge={"trailing": (512,)},
    huge_dense={"trailing": (65_600,)},
)
