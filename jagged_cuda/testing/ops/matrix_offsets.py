"""matrix_offsets: where the matrix of each sequence begins.

The case multiplies a value of each sequence by how many elements its matrix has, so that what knows
only floating results, and batches that are cut, judges it: modulo 120, which every dtype holds.
tests/test_offsets.py looks at the integers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from jagged_cuda.testing.case import ROW_PROFILES, Case, Tensors
from jagged_cuda.testing.samples import Sample, Spec


def times_sizes(x: Tensor, sizes: Tensor) -> Tensor:
    """x `[B]`, sizes `[B]`; 0 for an empty matrix, so that nothing leaks from outside."""
    factor = (sizes % 120 + 1).to(x.device, x.dtype)
    return torch.where(sizes.to(x.device) > 0, x * factor, 0.0)


def _function(ops: Any, spec: Spec, t: Tensors, offsets: Tensor, kv_offsets: Tensor | None) -> Any:
    begins = ops.matrix_offsets(offsets, kv_offsets)
    return {"out": times_sizes(t["x"], begins.diff() + begins[0])}


def _reference(spec: Spec, t: Tensors) -> Tensors:
    lengths = (torch.tensor(n.lengths, dtype=torch.int64) for n in (spec.layout, spec.kv))
    return {"out": times_sizes(t["x"], math.prod(lengths, start=torch.ones(()).long()))}


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
