"""What the attention operators share: the default scale, masks, and the softmax's backward.

Their q is `[..., H, D]`, their v `[..., G, Dv]`; they return (out, lse) and save q, k, v, both
results, their offsets, and tensors that only the backward operator's last arguments are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jagged_cuda.ops._contract import fail_argument
from jagged_cuda.ops._dispatch import call


def default_scale(q: Tensor) -> float:
    """1 / sqrt(D), and 1 without features."""
    return q.shape[-1] ** -0.5 if q.dim() > 0 and q.shape[-1] > 0 else 1.0


def window(op: str, window_size: tuple[int, int], causal: bool) -> tuple[int, int]:
    """(left, right) with causal; what contradicts itself raises."""
    left, right = window_size
    if left < -1 or right < -1:
        fail_argument(op, "window_size", "(left, right), each -1 or more", window_size)
    if causal and right > 0:
        expected = "(left, 0) or (left, -1) with causal=True"
        fail_argument(op, "window_size", expected, window_size)
    return left, 0 if causal else right


def three_dims(key_ranges: Tensor | None) -> Tensor | None:
    """One range per row as `[Tq, 1, 2]`."""
    one = key_ranges is not None and key_ranges.dim() == 2
    return key_ranges.unsqueeze(1) if one and key_ranges is not None else key_ranges


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
