"""jagged_dense_bmm: each sequence times a dense matrix of its own."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from jagged_cuda.ops import _contract
from jagged_cuda.ops._dispatch import allow_tf32, call, overridable, register

# In the order of csrc/contract/activation.h.
_ACTIVATIONS = (None, "relu", "gelu", "silu", "sigmoid", "tanh")


_OP = torch.ops.jagged_cuda.jagged_dense_bmm.default
_BACKWARD = torch.ops.jagged_cuda.jagged_dense_bmm_backward.default


@overridable
def jagged_dense_bmm(
    x: Tensor,
    y: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    activation: Literal["relu", "gelu", "silu", "sigmoid", "tanh"] | None = None,
) -> Tensor:
    """Multiply the rows of each sequence by the sequence's own dense matrix.

    For each sequence b: ``z_b = activation(x_b @ y_b + bias[b])``.

    Args:
        x: `[T, D]` jagged; float32, float64, float16 or bfloat16.
        y: `[B, D, N]` dense, of x's dtype and device.
        offsets: `[B + 1]` int32 or int64, on x's device; sequence b is rows
            ``offsets[b]:offsets[b + 1]``.
        bias: `[B, N]`, of x's dtype and device; added to each row of its sequence.
        activation: applied last; "gelu" uses the error function.

    Returns:
        `[T, N]` of x's dtype; rows outside every sequence are 0, whatever the activation.

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.
        torch.OutOfMemoryError: the GPU has no room for the result.

    Notes:
        Empty sequences are allowed. Sums run in float32 (float64 for float64). float32 on CUDA
        obeys ``torch.backends.cuda.matmul.fp32_precision``: products are as accurate as float32
        unless it allows TF32. Bias and activation are applied to the sums, before they are rounded
        to x's dtype. The gradient of x is this operator with y transposed, that of y is
        jagged_jagged_bmm, that of bias jagged_sum, so that derivatives of any order exist. With
        relu, sigmoid and tanh the gradient reads the result that was saved; with gelu and silu it
        multiplies x and y once more, since the result does not determine its input.
        Deterministic, and a sequence's result does not depend on its neighbours. x and bias are
        read in place if their last dimension is contiguous, y if one of its last two is; any other
        layout costs one copy of that operand.

    Source: "Enhancing Performance and Scalability of Large-Scale Recommendation Systems with
    Jagged Flash Attention", RecSys '24, Table 1.

    Example:
        >>> x, y = torch.ones(5, 2), torch.ones(2, 2, 3)
        >>> jagged_dense_bmm(x, y, torch.tensor([0, 4, 5])).shape
        torch.Size([5, 3])
    """
    if activation not in _ACTIVATIONS:
        expected = "None, relu, gelu, silu, sigmoid or tanh"
        _contract.fail_argument("jagged_dense_bmm", "activation", expected, str(activation))
    if bias is None and activation is None:
        return call(_OP, x, y, offsets, allow_tf32(x.dtype))
    return call(_OP, x, y, offsets, allow_tf32(x.dtype), bias, _ACTIVATIONS.index(activation))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, y, offsets, ctx.allow_tf32, bias, activation = inputs
    ctx.activation = _ACTIVATIONS[activation]
    known = output if ctx.activation in ("relu", "sigmoid", "tanh") else None
    ctx.save_for_backward(x, y, offsets, bias, known)


def _grad_of_activation(
    ctx: Any,
    grad_out: Tensor,
    x: Tensor,
    y: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """The gradient of x_b @ y_b + bias. Rows outside every sequence are unspecified."""
    aten = torch.ops.aten
    if ctx.activation is None:
        return grad_out
    if ctx.activation == "relu":
        return aten.threshold_backward(grad_out, out, 0)
    if ctx.activation == "sigmoid":
        return aten.sigmoid_backward(grad_out, out)
    if ctx.activation == "tanh":
        return aten.tanh_backward(grad_out, out)
    product = call(_OP, x, y, offsets, ctx.allow_tf32, bias)
    if ctx.activation == "gelu":
        return aten.gelu_backward(grad_out, product)
    if torch.is_grad_enabled():  # aten.silu_backward has no derivative
        share = product.sigmoid()
        return grad_out * share * (1 + product * (1 - share))
    return aten.silu_backward(grad_out, product)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    # Once: activation checkpointing refuses to give them again.
    x, y, offsets, bias, out = ctx.saved_tensors
    ops = torch.ops.jagged_cuda
    wants_x, wants_y, *_ = wanted = ctx.needs_input_grad
    grad_out = _grad_of_activation(ctx, grad_out, x, y, offsets, bias, out)
    grad_x = grad_y = grad_bias = None
    if wants_x and wants_y and not torch.is_grad_enabled():  # one operator, without derivatives
        grad_x, grad_y = call(_BACKWARD, grad_out, x, y, offsets, ctx.allow_tf32)
        wants_x = wants_y = False
    if wants_x:
        y_transposed = y.transpose(1, 2)
        grad_x = call(_OP, grad_out, y_transposed, offsets, ctx.allow_tf32)
    if wants_y:
        grad_y = call(ops.jagged_jagged_bmm.default, x, grad_out, offsets, ctx.allow_tf32)
    if bias is not None and wanted[4]:
        grad_bias = call(ops.jagged_sum.default, grad_out, offsets)
    return grad_x, grad_y, None, None, grad_bias, None


register("jagged_dense_bmm_backward")
register(
    "jagged_dense_bmm",
    setup_context=_setup_context,
    backward=_backward,
    autocast="lower_precision",
)
