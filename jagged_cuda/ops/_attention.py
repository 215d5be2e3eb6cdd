"""What the attention operators share: the default scale, and what surrounds their gradient.

Their q is `[..., H, D]`, their v `[..., G, Dv]`; they return (out, lse) and save q, k, v, both
results, and their offsets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jagged_cuda.ops import _contract
from jagged_cuda.ops._memory import call


def default_scale(q: Tensor) -> float:
    """1 / sqrt(D), and 1 without features."""
    return q.shape[-1] ** -0.5 if q.dim() > 0 and q.shape[-1] > 0 else 1.0


def fake_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out `[..., H, Dv]` and lse `[..., H]`, without values."""
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(q.shape[:-1], dtype=_lse_dtype(q.dtype))


def check_results(
    op: str,
    q: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
) -> None:
    """Check what a backward operator gets beside the operands."""
    for name, tensor in (("out", out), ("grad_out", grad_out)):
        _contract.check_shape(op, name, tensor, (*q.shape[:-1], v.shape[-1]))
        _contract.check_like(op, name, tensor, q)
    for name, rows in (("lse", lse), ("grad_lse", grad_lse)):
        if rows is not None:
            _contract.check_shape(op, name, rows, q.shape[:-1])
            _contract.check_dtype(op, name, rows, _lse_dtype(q.dtype))
            _contract.check_device(op, name, rows, q)


def _lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def backward(
    op: Callable[..., Any], ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k and v by the backward operator, and None for all other arguments."""
    q, k, v, out, lse, *offsets = ctx.saved_tensors
    no_gradient = (None,) * (len(offsets) + len(ctx.options))
    if grad_out is None and grad_lse is None:
        return (None, None, None, *no_gradient)
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    gradients = call(op, grad_out, grad_lse, q, k, v, out, lse, *offsets, *ctx.options)
    return (*gradients, *no_gradient)
