"""array_jagged_bmm_jagged_out: each sequence's matrix times its rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import jagged_cuda
from jagged_cuda.testing.case import (
    CAPACITIES,
    FEATURES,
    MATRIX_PROFILES,
    Case,
    Tensors,
    matrix_kinds,
)
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.padding import pad, pad_matrices, unpad
from jagged_cuda.testing.samples import Sample, Spec


def definition(
    a: Tensor, y: Tensor, layout: Layout, kv_layout: Layout, transpose: bool = False
) -> Tensor:
    """a `[sum L*Lk]`, y `[Ty, N]` -> `[Tx, N]`; with transpose the matrices are `[Lk, L]`"""
    if transpose:
        weights = pad_matrices(a, kv_layout, layout).transpose(1, 2)
    else:
        weights = pad_matrices(a, layout, kv_layout)
    return unpad(weights @ pad(y, kv_layout), layout)


def _offsets(
    spec: Spec, offsets: Tensor, kv_offsets: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The result has the rows of q: with transpose these are the matrices' columns."""
    if spec.choices["transpose"] and kv_offsets is not None:
        return kv_offsets, offsets
    return offsets, kv_offsets


def _call(
    ops: Any, spec: Spec, tensors: Tensors, offsets: Tensor, kv_offsets: Tensor | None
) -> Tensors:
    rows, columns = _offsets(spec, offsets, kv_offsets)
    out = ops.array_jagged_bmm_jagged_out(
        tensors["a"],
        tensors["y"],
        rows,
        y_offsets=columns,
        transpose=spec.choices["transpose"],
        total=None if kv_offsets is None else spec.layout.total,
    )
    return {"out": out}


def _registered(sample: Sample) -> dict[str, tuple[Any, ...]]:
    spec = sample.spec
    offsets = _offsets(spec, sample.offsets, sample.kv_offsets)
    begins = jagged_cuda.matrix_offsets(sample.offsets, sample.kv_offsets)
    options = (spec.layout.total, spec.choices["transpose"])
    operands = (sample.tensors["a"], sample.tensors["y"])
    a, y = (operand.detach() for operand in operands)  # the operator has no derivative
    grad_out = y.new_ones(spec.layout.total, y.shape[1])
    return {
        "array_jagged_bmm_jagged_out": (*operands, *offsets, begins, *options),
        "array_jagged_bmm_jagged_out_backward": (
            *(grad_out, a, y, *offsets, begins),
            spec.choices["transpose"],
        ),
    }


CASE = Case(
    name="array_jagged_bmm_jagged_out",
    choices={
        "N": FEATURES,
        "cross": (False, True),
        "capacity": CAPACITIES,
        "transpose": (False, True),
    },
    shapes=lambda spec: {"a": (spec.capacity,), "y": (spec.kv.total, spec.choices["N"])},
    rows={"a": "matrix", "y": "kv", "out": "q"},
    function=_call,
    registered=_registered,
    reference=lambda spec, t: {
        "out": definition(t["a"], t["y"], spec.layout, spec.kv, spec.choices["transpose"])
    },
    profiles=MATRIX_PROFILES,
    kinds=matrix_kinds("N"),
    autocast="lower_precision",
    product=True,
    huge={"N": 512},
)
