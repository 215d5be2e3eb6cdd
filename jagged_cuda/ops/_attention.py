"""What the attention operators share: the default scale, and their backward.

Their q is `[..., H, D]`, their v `[..., G, Dv]`; they return (out, lse) and save q, k, v, both
results, their offsets, and tensors that only the backward operator's last arguments are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jagged_cuda.ops._dispatch import call


def default_scale(q: Tensor) -> float:
    """1 / sqrt(D), and 1 without features."""
    return q.shape[-1] ** -0.5 if q.dim() > 0 and q.shape[-1] > 0 else 1.0


def backward(
    op: Callable[..., Any],
    ctx: Any,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    offsets: int = 1,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k and v by the backward operator, and None for all other arguments.

    `offsets` are how many of the saved tensors come before the options.
    """
    q, k, v, out, lse, *rest = ctx.saved_tensors
    no_gradient = (None,) * (len(rest) + len(ctx.options))
    if grad_out is None and grad_lse is None:
        return (None, None, None, *no_gradient)
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    arguments = (*rest[:offsets], *ctx.options, *rest[offsets:])
    gradients = call(op, grad_out, grad_lse, q, k, v, out, lse, *arguments)
    return (*gradients, *no_gradient)
