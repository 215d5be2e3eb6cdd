"""jagged_hstu_attention: SiLU in place of softmax, with the masks of jagged_flash_attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import jagged_cuda
from jagged_cuda.testing.case import Tensors
from jagged_cuda.testing.ops import jagged_flash_attention as flash
from jagged_cuda.testing.padding import pad, unpad
from jagged_cuda.testing.samples import Sample, Spec


def _row_scale(spec: Spec, q: Tensor, offsets: Tensor, kv_offsets: Tensor | None) -> Tensor | None:
    """`[Tq]`: by a row's place in its sequence, of either sign; or None."""
    if not spec.choices["row_scale"]:
        return None
    ranges = jagged_cuda.hstu_key_ranges(offsets, kv_offsets=kv_offsets, total=q.shape[0])
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    return (ranges[:, 0, 1] % 5 - 1).to(dtype) / 4


def _options(spec: Spec, q: Tensor, offsets: Tensor, kv_offsets: Tensor | None) -> dict[str, Any]:
    kind = spec.choices["ranges"]
    ranges = None if kind is None else flash.key_ranges(kind, q, offsets, kv_offsets)
    return {"row_scale": _row_scale(spec, q, offsets, kv_offsets), "key_ranges": ranges}


def _factors(spec: Spec, q: Tensor) -> tuple[Tensor, Tensor]:
    """`[B, 1, M, 1]` and `[B, 1, 1, 1]`: what the sum of a row is multiplied and divided by."""
    kv = None if spec.kv_layout is None else spec.kv_layout.offsets(q.device)
    given = _row_scale(spec, q, spec.layout.offsets(q.device), kv)
    rows = q.new_ones(q.shape[0]) if given is None else given.to(q.dtype)
    divisor = spec.choices["divisor"]
    lengths = torch.tensor(flash.used_lengths(spec), dtype=q.dtype, device=q.device)
    by = lengths.clamp(min=1) if divisor == "length" else torch.full_like(lengths, divisor)
    return pad(rows, spec.layout)[:, None, :, None], by[:, None, None, None]


def _weight(spec: Spec, q: Tensor) -> Tensor:
    """`[B, 1, M, 1]`: what the sum of a row is multiplied by."""
    scale, divisor = _factors(spec, q)
    return scale / divisor


def _padded(spec: Spec, tensors: Tensors) -> tuple[Tensor, ...]:
    q, k, v = (flash.with_heads(spec, tensors)[name] for name in "qkv")
    return flash.pad_heads(q, k, v, spec.layout, spec.kv)


def _unpadded(spec: Spec, out: Tensor) -> Tensors:
    return flash.without_heads(spec, {"out": unpad(out.transpose(1, 2), spec.layout)})


def reference(spec: Spec, tensors: Tensors) -> Tensors:
    q, k, v = _padded(spec, tensors)
    scores = flash.attention_scale(spec) * (q @ k.transpose(2, 3))
    bias = flash.padded_bias(spec, tensors)
    scores = scores if bias is None else scores + bias
    weights = F.silu(scores).where(flash.visible_keys(spec, tensors), 0.0)
    return _unpadded(spec, _weight(spec, tensors["q"]) * (weights @ v))


class _Rounded(torch.autograd.Function):
    """On padded tensors; rounds what it stores between two products: with a row's weight, and what
    is left of that behind them."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        visible: Tensor,
        weight: Tensor,
        divisor: Tensor | float,
        scale: float,
        storage: torch.dtype,
    ) -> Tensor:
        scores = scale * (q @ k.transpose(2, 3))
        scores = scores if bias is None else scores + bias
        ctx.save_for_backward(q, k, v, scores, visible, weight)
        ctx.divisor, ctx.scale, ctx.storage = divisor, scale, storage
        stored = F.silu(scores).where(visible, 0.0).to(storage).to(q.dtype)
        return weight / divisor * (stored @ v)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, scores, visible, weight = ctx.saved_tensors
        gate = scores.sigmoid()
        slope = gate * (1 + scores * (1 - gate))
        grad_scores = (weight * slope * (grad_out @ v.transpose(2, 3))).where(visible, 0.0)
        grad_bias = grad_scores / ctx.divisor if ctx.needs_input_grad[3] else None
        grad_scores = grad_scores.to(ctx.storage).to(q.dtype)
        weights = (weight * F.silu(scores)).where(visible, 0.0).to(ctx.storage).to(q.dtype)
        scale = ctx.scale / ctx.divisor
        return (
            scale * (grad_scores @ k),
            scale * (grad_scores.transpose(2, 3) @ q),
            weights.transpose(2, 3) @ grad_out / ctx.divisor,
            grad_bias,
            *(None,) * 5,
        )


def rounded(divide_last: bool) -> Callable[[Spec, Tensors, torch.dtype], Tensors]:
    """The definition; it divides what is stored, or sums of that. Where heads have one column, few
    numbers are compared: either way is at times three times as far off as the other."""

    def way(spec: Spec, tensors: Tensors, storage: torch.dtype) -> Tensors:
        q = tensors["q"]
        row_scale, divisor = _factors(spec, q)
        factors = (row_scale, divisor) if divide_last else (_weight(spec, q), 1.0)
        visible, bias = flash.visible_keys(spec, tensors), flash.padded_bias(spec, tensors)
        options = (visible, *factors, flash.attention_scale(spec), storage)
        out = _Rounded.apply(*_padded(spec, tensors), bias, *options)
        return _unpadded(spec, out)

    return way


def terms(spec: Spec, tensors: Tensors, cotangents: Tensors | None) -> Tensors:
    """A score sums terms of size ``scale * sum(|q| * |k|)``; the slope of silu is at most 1.1,
    and that of its slope 0.5."""
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    padded, bias = _padded(spec, leaves), flash.padded_bias(spec, leaves)
    q, k, v = (t.detach() for t in padded)
    scale, visible = flash.attention_scale(spec), flash.visible_keys(spec, tensors)
    weight = _weight(spec, tensors["q"]).abs()
    scores = scale * (q @ k.transpose(2, 3))
    score_terms = abs(scale) * (q.abs() @ k.abs().transpose(2, 3))
    if bias is not None:
        padded = (*padded, bias)
        scores, score_terms = scores + bias.detach(), score_terms + bias.detach().abs()
    silu_terms = (F.silu(scores).abs() + 1.1 * score_terms).where(visible, 0.0)
    found = _unpadded(spec, weight * (silu_terms @ v.abs()))
    if cotangents is None:
        return found
    given = flash.with_heads(spec, cotangents)["out"]
    grad_out = pad(given, spec.layout).transpose(1, 2)
    gate = scores.sigmoid()
    slope = (gate * (1 + scores * (1 - gate))).abs()
    grad_weights = (grad_out @ v.transpose(2, 3)).abs()
    grad_terms = weight * (
        (slope + 0.5 * score_terms) * grad_weights + 1.1 * grad_out.abs() @ v.abs().transpose(2, 3)
    ).where(visible, 0.0)
    by_padded = (
        abs(scale) * (grad_terms @ k.abs()),
        abs(scale) * (grad_terms.transpose(2, 3) @ q.abs()),
        (weight * silu_terms).transpose(2, 3) @ grad_out.abs(),
        *(() if bias is None else (grad_terms,)),
    )
    gradients = torch.autograd.grad(
        padded, list(leaves.values()), by_padded, materialize_grads=True
    )
    return found | {f"grad_{n}": g for n, g in zip(leaves, gradients, strict=True)}


def _call(
    ops: Any, spec: Spec, tensors: Tensors, offsets: Tensor, kv_offsets: Tensor | None
) -> Tensors:
    q, k, v = (tensors[name] for name in "qkv")
    out = ops.jagged_hstu_attention(
        *(q, k, v, offsets),
        divisor=spec.choices["divisor"],
        kv_offsets=kv_offsets,
        **flash.call_options(spec),
        **flash.bias_options(spec, tensors, offsets, kv_offsets),
        **_options(spec, q, offsets, kv_offsets),
    )
    return {"out": out}


def _registered(sample: Sample) -> dict[str, tuple[Any, ...]]:
    spec = sample.spec
    q, k, v = (flash.with_heads(spec, sample.tensors)[name] for name in "qkv")
    more = _options(spec, q, sample.offsets, sample.kv_offsets)
    ranges = None if more["key_ranges"] is None else flash.three_dims(more["key_ranges"])
    divisor = spec.choices["divisor"]
    options = (
        *(sample.offsets, sample.kv_offsets, *flash.window(spec), flash.attention_scale(spec)),
        *(0.0 if divisor == "length" else divisor, more["row_scale"], ranges, None, False),
        *flash.flat_biases(sample),
    )
    detached = tuple(t.detach() for t in (q, k, v))
    out = torch.ops.jagged_cuda.jagged_hstu_attention(*detached, *options)
    wanted = (True, True) if "kv_bias" in sample.tensors else ()
    return {
        "jagged_hstu_attention": (q, k, v, *options),
        "jagged_hstu_attention_backward": (
            *(torch.randn_like(out), *detached, *flash.detach(options), *wanted),
        ),
    }


CASE = dataclasses.replace(
    flash.WITH_RANGES,
    name="jagged_hstu_attention",
    choices={
        **flash.WITH_RANGES.choices,
        "ranges": (None, *flash.RANGES),
        "divisor": ("length", 11.5, "length", -0.25),
        "row_scale": (False, True),
    },
    rows={name: rows for name, rows in flash.CASE.rows.items() if name != "lse"},
    function=_call,
    registered=_registered,
    reference=reference,
    rounded=(rounded(divide_last=False), rounded(divide_last=True)),
    terms=terms,
)

BIASED = dataclasses.replace(
    CASE,
    choices={**CASE.choices, **flash.BIAS_CHOICES, "hidden": (False,)},
    kinds=flash.BIASED_KINDS,
    shapes=flash.BIASED.shapes,
    rows={name: rows for name, rows in flash.BIASED.rows.items() if name != "lse"},
)

VARIANTS = {"jagged_hstu_attention_biased": BIASED}
