"""What the attention operators share: the default scale, masks, and the softmax's backward.

Their q is `[..., H, D]`, their v `[..., G, Dv]`.
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
    shape = q.shape
    features = shape[-1] if shape else 0
    return features**-0.5 if features > 0 else 1.0


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
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k and v by the backward operator, and None for all other arguments."""
    q, k, v, out, lse, *rest = ctx.saved_tensors
    no_gradient = (None,) * (len(rest) + len(ctx.options))
    if grad_out is None and grad_lse is None:
        return (None, None, None, *no_gradient)
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    gradients = call(op, grad_out, grad_lse, q, k, v, out, lse, *rest, *ctx.options)
    return (*gradients, *no_gradient)


_SAVED = "saved"  # in the place of a tensor
NO_BIASES = (None, None, None, None, None, None, True, None, 0)


def save(ctx: Any, tensors: tuple[Tensor | None, ...], biases: tuple[Any, ...]) -> tuple[Any, ...]:
    """Save tensors, and those among biases (_bias.flatten); the result stands for the latter.

    It is NO_BIASES itself where there are none.
    """
    biases = (*biases, *NO_BIASES[len(biases) :])
    ctx.num_tensors = len(tensors)
    if biases[0] is biases[1] is biases[2] is biases[7] is None:
        ctx.save_for_backward(*tensors)
        return NO_BIASES
    added = [t for t in biases if isinstance(t, Tensor)]
    ctx.save_for_backward(*tensors, *added)
    return tuple(_SAVED if isinstance(t, Tensor) else t for t in biases)


def saved(ctx: Any) -> tuple[tuple[Tensor | None, ...], tuple[Any, ...]]:
    """What save() was given."""
    tensors = ctx.saved_tensors  # once: under checkpointing a second look is an error
    if ctx.biases is NO_BIASES:
        return tensors, NO_BIASES
    added = iter(tensors[ctx.num_tensors :])
    return tensors[: ctx.num_tensors], tuple(
        next(added) if each is _SAVED else each for each in ctx.biases
    )


def wanted(ctx: Any, first: int) -> tuple[bool, bool]:
    """Whether the gradient of kv_bias is asked for, and that of a table; `first` is kv_lengths."""
    asked = (*ctx.needs_input_grad[first:], *(False,) * 9)
    return asked[1], asked[2] or asked[7]


def bias_gradients(
    wanted: tuple[bool, bool],
    biases: tuple[Any, ...],
    kv_bias: Tensor,
    time_table: Tensor,
    position_table: Tensor,
) -> tuple[Tensor | None, ...]:
    """Gradients for what _bias.flatten makes: None for what does not ask."""
    has_time, has_position = biases[2] is not None, biases[7] is not None
    return (
        None,
        kv_bias if wanted[0] else None,
        time_table if wanted[1] and has_time else None,
        *(None,) * 4,
        position_table if wanted[1] and has_position else None,
        None,
    )
