"""jagged_attention, three operators in a row, as a case: attention with its scores in memory.

It is no operator of its own and not in the table of cases: its test and the benchmark use this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import jagged_cuda
from jagged_cuda.testing.case import Tensors
from jagged_cuda.testing.ops import (
    array_jagged_bmm_jagged_out,
    jagged2_softmax,
    jagged_jagged_bmm_jagged_out,
)
from jagged_cuda.testing.ops import jagged_flash_attention as flash
from jagged_cuda.testing.samples import Spec
from jagged_cuda.unfused import jagged_attention

# What jagged_flash_attention has and this form has not: heads, a mask and a hint.
FIXED: dict[str, Any] = {"heads": None, "causal": False, "window_size": (-1, -1), "max_len": False}


def _call(
    _: Any, spec: Spec, tensors: Tensors, offsets: Tensor, kv_offsets: Tensor | None
) -> Tensors:
    begins = None
    if spec.choices["matrix_offsets"]:
        begins = jagged_cuda.matrix_offsets(offsets, kv_offsets)
    out = jagged_attention(
        tensors["q"],
        tensors["k"],
        tensors["v"],
        offsets,
        kv_offsets=kv_offsets,
        matrix_offsets=begins,
        total_scores=None if spec.choices["capacity"] is None else spec.capacity,
        scale=None if spec.choices["scale"] is None else flash.attention_scale(spec),
    )
    return {"out": out}


class _Stored(torch.autograd.Function):
    """Rounds what is in memory between two operators, and its gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, storage: torch.dtype) -> Tensor:
        ctx.storage = storage
        return values.to(storage).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.storage).to(grad.dtype), None


def rounded(toward: int) -> Callable[[Spec, Tensors, torch.dtype], Tensors]:
    """Padded PyTorch as it would run product, softmax and product, which keep their scores."""
    softmax = jagged2_softmax.rounded(toward)

    def way(spec: Spec, tensors: Tensors, storage: torch.dtype) -> Tensors:
        q, k, v = (tensors[name] for name in "qkv")
        layouts = (spec.layout, spec.kv)
        elems = sum(x * y for x, y in zip(spec.layout.lengths, spec.kv.lengths, strict=True))
        scores = jagged_jagged_bmm_jagged_out.definition(q, k, *layouts, elems)
        options = dataclasses.replace(
            spec, choices={"dim": -1, "scale": flash.attention_scale(spec)}
        )
        weights = softmax(options, {"a": _Stored.apply(scores, storage)}, storage)["out"]
        weights = _Stored.apply(weights, storage)
        return {"out": array_jagged_bmm_jagged_out.definition(weights, v, *layouts)}

    return way


def terms(spec: Spec, tensors: Tensors, cotangents: Tensors | None) -> Tensors:
    if cotangents is not None:
        cotangents = cotangents | {"lse": tensors["q"].new_zeros(tensors["q"].shape[0])}
    found = flash.terms(spec, tensors, cotangents)
    return {name: t for name, t in found.items() if name != "lse"}


CASE = dataclasses.replace(
    flash.CASE,
    name="jagged_attention",
    choices={
        **flash.CASE.choices,
        **{name: (value,) for name, value in FIXED.items()},
        "capacity": (None, "exact", "spare"),
        "matrix_offsets": (False, True),
    },
    rows={name: rows for name, rows in flash.CASE.rows.items() if name != "lse"},
    function=_call,
    reference=lambda spec, t: {"out": flash.reference(spec, t)["out"]},
    rounded=(rounded(1), rounded(-1)),
    terms=terms,
)
