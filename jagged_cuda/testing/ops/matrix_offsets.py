"""matrix_offsets: where the matrix of each sequence begins.

The case multiplies a value of each sequence by where its matrix begins and by how many elements it
has, so that what knows only floating results judges it: modulo 128, which every dtype holds.
tests/test_offsets.py looks at the integers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_cuda.testing.case import ROW_PROFILES, Case, Tensors
from jagged_cuda.testing.samples import Sample, Spec


def times_begins(x: Tensor, begins: Tensor) -> Tensor:
    """x `[B]`, begins `[B + 1]`; each factor is at least 1."""
    factors = (begins[:-1] % 97 + 1, begins[1:] % 113 + 1)
    return x * factors[0].to(x.device, x.dtype) * factors[1].to(x.device, x.dtype)


def _function(ops: Any, spec: Spec, t: Tensors, offsets: Tensor, kv_offsets: Tensor | None) -> Any:
    return {"out": times_begins(t["x"], ops.matrix_offsets(offsets, kv_offsets))}


def _reference(spec: Spec, t: Tensors) -> Tensors:
    sizes = [
        rows * columns for rows, columns in zip(spec.layout.lengths, spec.kv.lengths, strict=True)
    ]
    begins = [sum(sizes[:seq]) for seq in range(len(sizes) + 1)]
    return {"out": times_begins(t["x"], torch.tensor(begins, dtype=torch.int64))}


def _registered(sample: Sample) -> dict[str, tuple[Any, ...]]:
    return {"matrix_offsets": (sample.offsets, sample.kv_offsets)}


CASE = Case(
    name="matrix_offsets",
    choices={"cross": (False, True)},
    shapes=lambda spec: {"x": (spec.layout.num_seqs,)},
    rows={"x": "seq", "out": "seq"},
    function=_function,
    registered=_registered,
    reference=_reference,
    profiles=ROW_PROFILES,
    autocast="unchanged",
    differentiable=False,
)
