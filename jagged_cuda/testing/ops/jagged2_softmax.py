"""jagged2_softmax: softmax over the columns, or the rows, of each sequence's matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import jagged_cuda
from jagged_cuda.testing.case import CAPACITIES, Case, Kind, Profile, Tensors
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.ops.jagged_softmax import (
    SCALES,
    RoundedSoftmax,
    masked_softmax,
    softmax_terms,
)
from jagged_cuda.testing.padding import matrix_elements, pad_matrices, unpad_matrices
from jagged_cuda.testing.samples import Sample, Spec


def definition(a: Tensor, layout: Layout, kv_layout: Layout, dim: int, scale: float) -> Tensor:
    """a `[sum L*Lk]` -> like a"""
    _, there = matrix_elements(layout, kv_layout, a.shape[0], a.device)
    out = masked_softmax(scale * pad_matrices(a, layout, kv_layout), there, dim)
    return unpad_matrices(out, layout, kv_layout, a.shape[0])


def rounded(toward: int) -> Callable[[Spec, Tensors, torch.dtype], Tensors]:
    def way(spec: Spec, tensors: Tensors, storage: torch.dtype) -> Tensors:
        a, layouts = tensors["a"], (spec.layout, spec.kv)
        _, there = matrix_elements(*layouts, a.shape[0], a.device)
        options = (spec.choices["dim"], spec.choices["scale"], storage, toward)
        out = RoundedSoftmax.apply(pad_matrices(a, *layouts), there, *options)
        return {"out": unpad_matrices(out, *layouts, a.shape[0])}

    return way


def terms(spec: Spec, tensors: Tensors, cotangents: Tensors | None) -> Tensors:
    a, layouts = tensors["a"], (spec.layout, spec.kv)
    options = (spec.choices["dim"], spec.choices["scale"])
    out = pad_matrices(definition(a, *layouts, *options), *layouts)
    grad_out = None if cotangents is None else pad_matrices(cotangents["out"], *layouts)
    found = softmax_terms(pad_matrices(a, *layouts), out, grad_out, *options)
    names = ("out", "grad_a")
    return {n: unpad_matrices(t, *layouts, a.shape[0]) for n, t in zip(names, found, strict=False)}


def _registered(sample: Sample) -> dict[str, tuple[Any, ...]]:
    a, choices = sample.tensors["a"], sample.spec.choices
    begins = jagged_cuda.matrix_offsets(sample.offsets, sample.kv_offsets)
    options = (sample.offsets, sample.kv_offsets, begins, choices["dim"], choices["scale"])
    out = torch.ops.jagged_cuda.jagged2_softmax(a.detach(), *options)
    return {
        "jagged2_softmax": (a, *options),
        "jagged2_softmax_backward": (torch.randn_like(out), out, *options),
    }


CASE = Case(
    name="jagged2_softmax",
    choices={
        "dim": (-1, -2),
        "scale": SCALES,
        "cross": (False, True),
        "capacity": CAPACITIES,
    },
    shapes=lambda spec: {"a": (spec.capacity,)},
    rows={"a": "matrix", "out": "matrix"},
    function=lambda ops, spec, t, offsets, kv_offsets: {
        "out": ops.jagged2_softmax(
            t["a"],
            offsets,
            y_offsets=kv_offsets,
            dim=spec.choices["dim"],
            scale=spec.choices["scale"],
        )
    },
    registered=_registered,
    reference=lambda spec, t: {
        "out": definition(t["a"], spec.layout, spec.kv, spec.choices["dim"], spec.choices["scale"])
    },
    profiles={
        "small": Profile((1, 2, 4), (1, 9, 24)),
        "edge": Profile((1, 3, 6), (33, 65, 300)),
        "large": Profile((16, 100), (200, 700)),
    },
    autocast="float32",
    # By the mean size of a matrix: for a cluster, large, for strips, and of some windows.
    kinds=(
        Kind((4, 20), (116, 124), {"dim": (-2,)}, ("nearly_full",)),
        Kind((80, 90), (122, 132), {"dim": (-2,)}, ("nearly_full",), ("bfloat16", "float16")),
        Kind((8, 10), (500, 530), {"dim": (-2,)}, ("nearly_full",)),
        Kind((4, 8), (38, 46), {"dim": (-1,)}, ("nearly_full",), ("bfloat16", "float16")),
    ),
    rounded=(rounded(0), rounded(1), rounded(-1)),
    terms=terms,
)
