"""jagged_softmax: softmax over the rows of each sequence; what other softmaxes share with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import jagged_cuda
from jagged_cuda.testing.case import ROW_PROFILES, TRAILING, Case, Kind, Tensors
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.padding import inside, pad, unpad
from jagged_cuda.testing.samples import Sample, Spec

# 6 times an outlier is a logit of some hundreds.
SCALES = (1.0, 1.0, 0.125, 6.0, -1.5, 0.0)


def masked_softmax(logits: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Softmax of the logits under the mask; zeros where the mask leaves nothing."""
    some = mask.any(dim=dim, keepdim=True)
    masked = logits.where(mask, -math.inf).where(some, 0.0)
    return masked.softmax(dim).where(mask, 0.0) if masked.numel() > 0 else masked


class RoundedSoftmax(torch.autograd.Function):
    """Masked softmax of padded values whose backward reads the rounded result, as torch's does.

    The order of sums moves the last bits of a float32 result, which decide between two 16-bit
    values where it lies halfway: `toward` 1 or -1 decides for the upper or the lower one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mask: Tensor,
        dim: int,
        scale: float,
        storage: torch.dtype,
        toward: int,
    ) -> Tensor:
        out = masked_softmax(scale * x, mask, dim)
        if storage.itemsize == 2:
            out = out * (1 + toward * 2.0**-20)
        out = out.to(storage).to(x.dtype)
        ctx.save_for_backward(out)
        ctx.dim, ctx.scale = dim, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        (out,) = ctx.saved_tensors
        delta = (out * grad_out).sum(ctx.dim, keepdim=True)
        return ctx.scale * out * (grad_out - delta), None, None, None, None, None


def softmax_terms(
    x: Tensor, out: Tensor, grad_out: Tensor | None, dim: int, scale: float
) -> list[Tensor]:
    """Terms of out and, given its gradient, of dx, padded. An error e of the logits makes an error
    of ``out * (e + sum(out * e))`` in out."""
    logits = (scale * x).abs()
    out_terms = out * (1 + logits + (out * logits).sum(dim, keepdim=True))
    if grad_out is None:
        return [out_terms]
    delta_terms = (out_terms * grad_out.abs()).sum(dim, keepdim=True)
    return [out_terms, abs(scale) * (out_terms * grad_out.abs() + out * delta_terms)]


def _mask(x: Tensor, layout: Layout) -> Tensor:
    is_row = inside(layout, x.device)
    return is_row.reshape(*is_row.shape, *(1,) * (x.dim() - 1))


def definition(x: Tensor, layout: Layout, scale: float) -> Tensor:
    """x `[T, ...]` -> like x"""
    return unpad(masked_softmax(scale * pad(x, layout), _mask(x, layout), dim=1), layout)


def rounded(toward: int) -> Callable[[Spec, Tensors, torch.dtype], Tensors]:
    def way(spec: Spec, tensors: Tensors, storage: torch.dtype) -> Tensors:
        x, layout = tensors["x"], spec.layout
        options = (1, spec.choices["scale"], storage, toward)
        return {
            "out": unpad(RoundedSoftmax.apply(pad(x, layout), _mask(x, layout), *options), layout)
        }

    return way


def terms(spec: Spec, tensors: Tensors, cotangents: Tensors | None) -> Tensors:
    x, layout, scale = tensors["x"], spec.layout, spec.choices["scale"]
    out = pad(definition(x, layout, scale), layout)
    grad_out = None if cotangents is None else pad(cotangents["out"], layout)
    found = softmax_terms(pad(x, layout), out, grad_out, 1, scale)
    return {n: unpad(t, layout) for n, t in zip(("out", "grad_x"), found, strict=False)}


def _registered(sample: Sample) -> dict[str, tuple[Any, ...]]:
    x, scale = sample.tensors["x"], sample.spec.choices["scale"]
    out = jagged_cuda.jagged_softmax(x.detach(), sample.offsets, scale=scale)
    return {
        "jagged_softmax": (x, sample.offsets, scale),
        "jagged_softmax_backward": (torch.randn_like(out), out, sample.offsets, scale),
    }


CASE = Case(
    name="jagged_softmax",
    choices={"trailing": TRAILING, "scale": SCALES},
    shapes=lambda spec: {"x": (spec.layout.total, *spec.choices["trailing"])},
    rows={"x": "q", "out": "q"},
    function=lambda ops, spec, t, offsets, _: {
        "out": ops.jagged_softmax(t["x"], offsets, scale=spec.choices["scale"])
    },
    registered=_registered,
    reference=lambda spec, t: {"out": definition(t["x"], spec.layout, spec.choices["scale"])},
    profiles=ROW_PROFILES,
    # Means and sequences so long that both passes go by a ring, and by vectors.
    kinds=(Kind((1, 6), (300, 2600), {"trailing": ((8,), (24,), (64,))}, ("nearly_full",)),),
    autocast="float32",
    rounded=(rounded(0), rounded(1), rounded(-1)),
    terms=terms,
    huge={"trailing": (512,)},
)
