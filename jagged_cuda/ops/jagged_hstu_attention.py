"""jagged_hstu_attention: HSTU's attention, with SiLU in place of softmax."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from jagged_cuda.ops import _attention, _bias
from jagged_cuda.ops._bias import PositionBias, TimeBias
from jagged_cuda.ops._contract import fail_argument
from jagged_cuda.ops._dispatch import allow_tf32, call, overridable, register


@overridable
def jagged_hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    divisor: float | Literal["length"],
    kv_offsets: Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    key_ranges: Tensor | None = None,
    row_scale: Tensor | None = None,
    scale: float | None = None,
    max_len: int | None = None,
    kv_lengths: Tensor | None = None,
    kv_bias: Tensor | None = None,
    time_bias: TimeBias | None = None,
    position_bias: PositionBias | None = None,
) -> Tensor:
    """Let each sequence's queries sum its values, weighted by the SiLU of their scores.

    For each sequence b and head, over the keys j that row i sees:
    ``out_b[i] = row_scale[i] / divisor * sum_j silu(scale * q_b[i] @ k_b[j] + bias) * v_b[j]`` with
    ``silu(z) = z / (1 + exp(-z))``. What a row sees is as in jagged_flash_attention.

    Args:
        q: `[Tq, H, D]` jagged, or `[Tq, D]` for one head; float32, float64, float16 or bfloat16;
            D from 1 to 256.
        k: `[Tk, G, D]`, of q's dtype and device; H is a multiple of G.
        v: `[Tk, G, Dv]`, Dv from 1 to 256.
        offsets: `[B + 1]` int32 or int64; sequence b is rows ``offsets[b]:offsets[b + 1]`` of q.
        divisor: a finite number other than 0, or "length", each sequence's own number of keys. It
            never depends on the batch.
        kv_offsets: `[B + 1]` of offsets' dtype for k and v, such as new rows against a long
            history; None means offsets (then Tk = Tq).
        causal: no key after the query's own position; the same as ``window_size=(left, 0)``.
        window_size: (left, right), in rows; -1 is unbounded.
        key_ranges: `[Tq, 2]` or `[Tq, 2, 2]` int32, ranges (begin, end) of keys per row, such as
            hstu_key_ranges makes.
        row_scale: `[Tq]` float32 (float64 for float64), a factor for each row of the result; it
            takes no gradient.
        scale: of the scores; None means ``1 / sqrt(D)``.
        max_len: a hint, the length of the longest sequence. Results of longer sequences are then
            unspecified.
        kv_lengths: `[B]` of offsets' dtype, the used part of each key sequence, from its
            beginning: Lk, everywhere. A number beyond its rows counts as all of them. dk and dv of
            the rows behind the used ones are 0. None uses all.
        kv_bias: `[Tk]`, or `[Tk, H]`, float32 (float64 for float64): added to every score of its
            key after scale; finite.
        time_bias: a TimeBias, added likewise: by the time between query and key.
        position_bias: a PositionBias, added likewise: by the rows between query and key.

    Returns:
        `[Tq, H, Dv]` of q's dtype (`[Tq, Dv]` for one head). Rows that see no key, and rows outside
        every sequence, are 0.

    Raises:
        RuntimeError: a shape, dtype, device or option does not fit, or row_scale requires a
            gradient; the message names the argument.
        torch.OutOfMemoryError: the GPU has no room for the results.

    Notes:
        Empty sequences are allowed. Sums run in float32 (float64 for float64); float32 multiplies
        in float32, without TF32. A sequence's result does not depend on its neighbours, bit for
        bit. Tiles of keys that no row of a tile of queries sees cost nothing. A NaN or inf in v
        reaches rows of its own sequence that do not see its key, and never another sequence.
        Deterministic, forward and backward; no double backward. q, k and v are read in place if
        their last dimension is contiguous; any other layout costs one copy of that operand, as do,
        in 16 bits on Hopper, rows that are not 16-byte aligned or whole multiples of 16 bytes.

    Source: "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for
    Generative Recommendations" (Zhai et al., 2024), section 3.

    Example:
        >>> q = k = v = torch.ones(3, 1, 4)
        >>> offsets = torch.tensor([0, 2, 3])
        >>> jagged_hstu_attention(q, k, v, offsets, divisor="length", scale=0.25)[:, 0, 0]
        tensor([0.7311, 0.7311, 0.7311])
    """
    op = "jagged_hstu_attention"
    window_left, window_right = _attention.window(op, window_size, causal)
    check_divisor(op, divisor)
    if row_scale is not None and row_scale.requires_grad:
        expected = "without requires_grad (it takes no gradient: multiply the result by it instead)"
        fail_argument(op, "row_scale", expected, "one that requires it")
    one_head = q.dim() == 2 and k.dim() == 2 and v.dim() == 2
    if one_head:
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
    out = call(
        torch.ops.jagged_cuda.jagged_hstu_attention.default,
        q,
        k,
        v,
        offsets,
        kv_offsets,
        window_left,
        window_right,
        _attention.default_scale(q) if scale is None else scale,
        0.0 if divisor == "length" else divisor,
        row_scale,
        _attention.three_dims(key_ranges),
        max_len,
        allow_tf32(q.dtype),
        *_bias.flatten(op, q, kv_lengths, kv_bias, time_bias, position_bias),
    )
    return out.squeeze(1) if one_head else out


def check_divisor(op: str, divisor: float | Literal["length"]) -> None:
    if divisor != "length" and (isinstance(divisor, str) or not 0 < abs(divisor) < math.inf):
        fail_argument(op, "divisor", 'a finite number other than 0, or "length"', repr(divisor))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.options = inputs[5:9], inputs[11:13]
    ctx.biases = _attention.save(ctx, (*inputs[:5], *inputs[9:11]), inputs[13:])


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    (*operands, row_scale, key_ranges), biases = _attention.saved(ctx)
    before, after = ctx.options
    op = torch.ops.jagged_cuda.jagged_hstu_attention_backward.default
    wanted = _attention.wanted(ctx, 13)
    *gradients, kv_bias, time_table, position_table = call(
        *(op, grad_out, *operands, *before, row_scale, key_ranges, *after, *biases, *wanted)
    )
    added = _attention.bias_gradients(wanted, biases, kv_bias, time_table, position_table)
    return (*gradients, *(None,) * 10, *added)


register("jagged_hstu_attention_backward")
register(
    "jagged_hstu_attention",
    setup_context=_setup_context,
    backward=_backward,
    autocast="lower_precision",
)
