"""jagged_flash_attention: tiled attention with online softmax, each sequence for itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_cuda.ops import _attention, _bias
from jagged_cuda.ops._bias import PositionBias, TimeBias
from jagged_cuda.ops._dispatch import allow_tf32, call, overridable, register

_OP = torch.ops.jagged_cuda.jagged_flash_attention.default
_BACKWARD = torch.ops.jagged_cuda.jagged_flash_attention_backward.default


@overridable
def jagged_flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    kv_offsets: Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    max_len: int | None = None,
    return_lse: bool = False,
    key_ranges: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    kv_bias: Tensor | None = None,
    time_bias: TimeBias | None = None,
    position_bias: PositionBias | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Let each sequence's queries attend to its own keys, never storing the matrix of scores.

    For each sequence b and head: ``out_b = softmax(scale * q_b @ k_b.T + bias + mask) @ v_b``. Row
    i sees key j iff ``i + Lk - Lq - left <= j <= i + Lk - Lq + right`` with
    ``(left, right) = window_size`` (bottom-right alignment), and, with key_ranges, j is in one of
    the row's ranges.

    Args:
        q: `[Tq, H, D]` jagged, or `[Tq, D]` for one head; float32, float64, float16 or bfloat16;
            D from 1 to 256.
        k: `[Tk, G, D]`, of q's dtype and device; H is a multiple of G (grouped-query attention).
        v: `[Tk, G, Dv]`, Dv from 1 to 256.
        offsets: `[B + 1]` int32 or int64; sequence b is rows ``offsets[b]:offsets[b + 1]`` of q.
        kv_offsets: `[B + 1]` of offsets' dtype for k and v; None means offsets (then Tk = Tq).
        causal: no key after the query's own position; the same as ``window_size=(left, 0)``.
        window_size: (left, right), in rows; -1 is unbounded.
        scale: of the scores; None means ``1 / sqrt(D)``.
        max_len: a hint, the length of the longest sequence. Results of longer sequences are then
            unspecified.
        return_lse: also return the logarithm of each row's sum of exponentials.
        key_ranges: `[Tq, 2]` or `[Tq, 2, 2]` int32, one or two ranges (begin, end) of keys per row:
            ``begin <= j < end``, counted from the first key of the sequence; empty if
            ``end <= begin``. hstu_key_ranges makes those of HSTU.
        kv_lengths: `[B]` of offsets' dtype, the used part of each key sequence, from its
            beginning: Lk, everywhere. A number beyond its rows counts as all of them. dk and dv of
            the rows behind the used ones are 0. None uses all.
        kv_bias: `[Tk]`, or `[Tk, H]`, float32 (float64 for float64): added to every score of its
            key after scale; -inf hides the key. (A row whose scores are all below -2.3e38, or
            that times a smaller scale, may count as one that sees nothing. Sums in float32 leave a
            row no gradient whose lse is below -2^24, which has lost what probabilities are made
            of; in 16 bits on CUDA also above 2^24.)
        time_bias: a TimeBias, added likewise: by the time between query and key.
        position_bias: a PositionBias, added likewise: by the rows between query and key.

    Returns:
        `[Tq, H, Dv]` of q's dtype (`[Tq, Dv]` for one head); with return_lse also lse `[Tq, H]`
        (`[Tq]`), natural logarithm, float32 (float64 for float64), differentiable. Rows that see
        no key, and rows outside every sequence, are 0 with lse = -inf.

    Raises:
        RuntimeError: a shape, dtype, device or option does not fit; the message names the argument.
        torch.OutOfMemoryError: the GPU has no room for the results.

    Notes:
        Empty sequences are allowed. Sums run in float32 (float64 for float64). Nothing depends on
        the batch's longest sequence; a sequence's forward result does not depend on its neighbours,
        bit for bit.
        float32 on CUDA multiplies on tensor cores: in TF32 where
        ``torch.backends.cuda.matmul.fp32_precision`` allows it in the forward call, which the
        backward pass follows; else each number as a part in TF32 and a rest in bfloat16, so that a
        term of a sum is exact to 2^-17 at least, mostly to 2^-20, and sums are as exact as the
        tests ask of float32 (docs/testing.md). With key_ranges, kv_lengths or a bias it multiplies
        in float32, which takes longer.
        Tiles of keys that no row of a tile of queries has in its ranges cost nothing, forward and
        backward. No matrix of biases is stored. The gradients of kv_bias and of the tables are sums
        in a fixed order. On Hopper, in 16 bits, such calls run on wgmma where D and Dv are at most
        128, but for the forward pass of up to 64 queries, of D and Dv up to 32, or with a time_bias
        beside another bias or of more than 256 buckets.
        A NaN or inf in v reaches rows of its own sequence that do not see its key: their weight
        is 0, and 0 times NaN is NaN. It never reaches another sequence.
        Deterministic, but for the gradient of q in 16 bits on Hopper (compute capability 9.0):
        without key_ranges, kv_lengths and biases, where max(D, Dv) is 33 to 128, sequences of 1,024
        queries and more (512 without a mask) may add to it in no fixed order, in float32. Under
        ``torch.use_deterministic_algorithms(True)`` they add in order, which costs some time. No
        double backward. q, k and v are read in place if their last dimension is contiguous (slices
        of a fused projection included), fastest if rows are 16-byte aligned and D, Dv are multiples
        of 8; any other layout costs one copy of that operand. In 16 bits on Hopper so do rows that
        are not aligned: operands and results are copied, with D and Dv rounded up to 8.

    Source: "Enhancing Performance and Scalability of Large-Scale Recommendation Systems with
    Jagged Flash Attention", RecSys '24, section 3; "FlashAttention-2" (Dao, 2023) for the
    algorithm.

    Example:
        >>> q = k = v = torch.zeros(5, 2, 8)
        >>> out, lse = jagged_flash_attention(q, k, v, torch.tensor([0, 4, 5]), return_lse=True)
        >>> lse[:, 0].exp()
        tensor([4., 4., 4., 4., 1.])
    """
    out, lse = attend(
        q,
        k,
        v,
        offsets,
        kv_offsets,
        causal,
        window_size,
        scale,
        max_len,
        torch.are_deterministic_algorithms_enabled(),
        key_ranges,
        _bias.flatten("jagged_flash_attention", q, kv_lengths, kv_bias, time_bias, position_bias),
    )
    return (out, lse) if return_lse else out


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    kv_offsets: Tensor | None,
    causal: bool,
    window_size: tuple[int, int],
    scale: float | None,
    max_len: int | None,
    deterministic: bool,
    key_ranges: Tensor | None = None,
    biases: tuple[Any, ...] = (),
) -> tuple[Tensor, Tensor]:
    """What jagged_flash_attention computes: the result and the LSE."""
    window_left, window_right = _attention.window("jagged_flash_attention", window_size, causal)
    one_head = q.dim() == 2 and k.dim() == 2 and v.dim() == 2
    if one_head:
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
    if scale is None:
        scale = _attention.default_scale(q)
    out, lse = call(
        _OP,
        q,
        k,
        v,
        offsets,
        kv_offsets,
        window_left,
        window_right,
        scale,
        max_len,
        allow_tf32(q.dtype),
        deterministic,
        _attention.three_dims(key_ranges),
        *biases,
    )
    if one_head:
        out, lse = out.squeeze(1), lse.squeeze(1)
    return out, lse


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.options = inputs[5:11]
    ctx.biases = _attention.save(ctx, (*inputs[:3], *output, *inputs[3:5], inputs[11]), inputs[12:])
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    if grad_out is None and grad_lse is None:
        return (None,) * 21
    (q, k, v, out, lse, offsets, kv_offsets, key_ranges), biases = _attention.saved(ctx)
    if grad_out is None and out is not None:
        grad_out = torch.zeros_like(out)
    if biases is _attention.NO_BIASES:
        grad_q, grad_k, grad_v, *_ = call(
            *(_BACKWARD, grad_out, grad_lse, q, k, v, out, lse, offsets, kv_offsets),
            *(*ctx.options, key_ranges),
        )
        return (grad_q, grad_k, grad_v, *(None,) * 18)
    wanted = _attention.wanted(ctx, 12)
    *gradients, kv_bias, time_table, position_table = call(
        *(_BACKWARD, grad_out, grad_lse, q, k, v, out, lse, offsets, kv_offsets),
        *(*ctx.options, key_ranges, *biases, *wanted),
    )
    added = _attention.bias_gradients(wanted, biases, kv_bias, time_table, position_table)
    return (*gradients, *(None,) * 9, *added)


register("jagged_flash_attention_backward")
register(
    "jagged_flash_attention",
    setup_context=_setup_context,
    backward=_backward,
    autocast="lower_precision",
)
