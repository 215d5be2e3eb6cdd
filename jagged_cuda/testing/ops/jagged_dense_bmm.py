"""jagged_dense_bmm: each sequence's rows times its own matrix; a bias and an activation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from jagged_cuda.testing.case import FEATURES, PRODUCT_KINDS, PRODUCT_PROFILES, Case, Tensors
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.padding import pad, unpad
from jagged_cuda.testing.samples import Sample, Spec


def definition(x: Tensor, y: Tensor, layout: Layout) -> Tensor:
    """x `[T, D]`, y `[B, D, N]` -> `[T, N]`"""
    return unpad(pad(x, layout) @ y, layout)


CASE = Case(
    name="jagged_dense_bmm",
    choices={"D": FEATURES, "N": FEATURES},
    shapes=lambda spec: {
        "x": (spec.layout.total, spec.choices["D"]),
        "y": (spec.layout.num_seqs, spec.choices["D"], spec.choices["N"]),
    },
    rows={"x": "q", "y": "seq", "out": "q"},
    function=lambda ops, _, t, offsets, __: {"out": ops.jagged_dense_bmm(t["x"], t["y"], offsets)},
    registered=lambda s: {
        "jagged_dense_bmm": (s.tensors["x"], s.tensors["y"], s.offsets),
        "jagged_dense_bmm_backward": (
            s.tensors["x"].new_ones(s.tensors["x"].shape[0], s.tensors["y"].shape[2]),
            s.tensors["x"].detach(),  # the operator has no derivative
            s.tensors["y"].detach(),
            s.offsets,
        ),
    },
    reference=lambda spec, t: {"out": definition(t["x"], t["y"], spec.layout)},
    profiles=PRODUCT_PROFILES,
    kinds=PRODUCT_KINDS,
    autocast="lower_precision",
    product=True,
    huge={"D": 512, "N": 8},
    huge_dense={"D": 256, "N": 257},
)

# --- with a bias and an activation

# In the order of csrc/contract/activation.h.
ACTIVATIONS = (None, "relu", "gelu", "silu", "sigmoid", "tanh")


def activate(z: Tensor, activation: str | None) -> Tensor:
    return z if activation is None else getattr(F, activation)(z)


def _biased(spec: Spec, tensors: Tensors) -> Tensor:
    """`[T, N]`: what goes into the activation."""
    z = pad(tensors["x"], spec.layout) @ tensors["y"] + tensors["bias"][:, None]
    return unpad(z, spec.layout)


def _inside(spec: Spec, out: Tensor) -> Tensors:
    """Rows outside every sequence are 0, though sigmoid(0) is not."""
    inside = spec.layout.seq_of_row(out.device) < spec.layout.num_seqs
    return {"out": out.where(inside[:, None], 0.0)}


def _biased_reference(spec: Spec, tensors: Tensors) -> Tensors:
    return _inside(spec, activate(_biased(spec, tensors), spec.choices["activation"]))


def _biased_rounded(spec: Spec, tensors: Tensors, storage: torch.dtype) -> Tensors:
    """As in PyTorch, where the activation reads, writes and saves stored values."""
    z = _biased(spec, tensors)
    out = activate(z.to(storage), spec.choices["activation"])
    return _inside(spec, out.to(z.dtype))


class _RoundedOnce(torch.autograd.Function):
    """sigmoid or tanh of sums that are not rounded before; the gradient reads what is stored."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, activation: str, storage: torch.dtype) -> Tensor:
        out = activate(z, activation).to(storage)
        ctx.activation = activation
        ctx.save_for_backward(out)
        return out.to(z.dtype)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None, None]:
        (out,) = ctx.saved_tensors
        backward = getattr(torch.ops.aten, f"{ctx.activation}_backward")
        return backward(grad_out.to(out.dtype), out).to(grad_out.dtype), None, None


def _biased_rounded_once(spec: Spec, tensors: Tensors, storage: torch.dtype) -> Tensors:
    """As a compiler of PyTorch fuses it: the activation takes the sums before they are stored."""
    activation = spec.choices["activation"]
    if activation not in ("sigmoid", "tanh"):
        return _biased_rounded(spec, tensors, storage)
    return _inside(spec, _RoundedOnce.apply(_biased(spec, tensors), activation, storage))


def _through(spec: Spec, tensors: Tensors, weights: Callable[[Tensor], Tensor]) -> Tensors:
    """Gradients of the sums' terms, given what flows into each sum."""
    leaves = {name: t.abs().requires_grad_() for name, t in tensors.items()}
    z = _biased(spec, leaves)
    gradients = torch.autograd.grad(z, list(leaves.values()), weights(z.detach()))
    return {f"grad_{name}": g for name, g in zip(leaves, gradients, strict=True)}


def _biased_terms(spec: Spec, tensors: Tensors, cotangents: Tensors | None) -> Tensors:
    """Terms on absolute values. No activation has a slope above 1.2 nor, except at a kink, a second
    derivative above 1."""
    found = {"out": 1.2 * _biased(spec, {name: t.abs() for name, t in tensors.items()}) + 1}
    if cotangents is not None:
        flow = cotangents["out"].abs()
        found |= _through(spec, tensors, lambda terms: flow * (1.2 + terms))
    return found


def _slope(z: Tensor, activation: str, storage: torch.dtype) -> Tensor:
    """The activation's slope, as a gradient computes it from stored values: the result, or sums."""
    if activation in ("gelu", "silu"):
        stored = z.to(storage).double().requires_grad_()
        return torch.autograd.grad(activate(stored, activation).sum(), stored)[0]
    out = activate(z, activation).to(storage).double()
    return {"relu": (out > 0).double(), "sigmoid": out * (1 - out), "tanh": 1 - out * out}[
        activation
    ]


def _biased_jumps(
    spec: Spec, tensors: Tensors, cotangents: Tensors, storage: torch.dtype, accuracy: float
) -> Tensors:
    """Jumps of the slope if sums are a little off: at relu's kink, and near the middle between two
    16-bit values, where the other one may be stored."""
    activation = spec.choices["activation"]
    if activation is None or (activation != "relu" and storage.itemsize > 2):
        return {}
    z, flow = _biased(spec, tensors), cotangents["out"].abs()

    def weights(terms: Tensor) -> Tensor:
        below, above = (
            _slope(z + sign * accuracy * terms, activation, storage) for sign in (-1, 1)
        )
        return flow * (above - below).abs()

    return _through(spec, tensors, weights)


def _call_biased(
    ops: Any, spec: Spec, tensors: Tensors, offsets: Tensor, _: Tensor | None
) -> Tensors:
    options = {"bias": tensors["bias"], "activation": spec.choices["activation"]}
    return {"out": ops.jagged_dense_bmm(tensors["x"], tensors["y"], offsets, **options)}


def _registered_biased(sample: Sample) -> dict[str, tuple[Any, ...]]:
    x, y, bias = (sample.tensors[name] for name in ("x", "y", "bias"))
    activation = ACTIVATIONS.index(sample.spec.choices["activation"])
    return {"jagged_dense_bmm": (x, y, sample.offsets, False, bias, activation)}


BIASED = dataclasses.replace(
    CASE,
    choices={
        **CASE.choices,
        # First the one whose gradient multiplies x and y once more.
        "activation": ("gelu", *(name for name in ACTIVATIONS if name != "gelu")),
    },
    kinds=(),
    shapes=lambda spec: {
        **CASE.shapes(spec),
        "bias": (spec.layout.num_seqs, spec.choices["N"]),
    },
    rows={"x": "q", "y": "seq", "bias": "seq", "out": "q"},
    function=_call_biased,
    registered=_registered_biased,
    reference=_biased_reference,
    rounded=(_biased_rounded, _biased_rounded_once),
    terms=_biased_terms,
    jumps=_biased_jumps,
)

# Judged and fuzzed like operators of their own, in Triton too.
VARIANTS = {"jagged_dense_bmm_biased": BIASED}
