"""jagged_target_attention: dense queries of each sequence against its jagged history."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_cuda.ops import _attention, _bias
from jagged_cuda.ops._contract import (
    check_numbers,
    dtype_name,
    fail_argument,
    operators,
    shape_text,
)
from jagged_cuda.ops._dispatch import (
    allow_tf32,
    call,
    lower_precision,
    overridable,
    refuse_transforms,
    register,
)

# torch.compile traces its check, and could not load it.
_CONTRACT = operators()["jagged_target_attention"][1]


@overridable
def jagged_target_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    scale: float | None = None,
    max_len: int | None = None,
    return_lse: bool = False,
    kv_lengths: Tensor | None = None,
    kv_bias: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Let N dense queries of each sequence attend to all of its keys: items against a history.

    For each sequence b and head: ``out_b = softmax(scale * q_b @ k_b.T + kv_bias_b) @ v_b``.

    Args:
        q: `[B, N, H, D]` dense, or `[B, N, D]` for one head; float32, float64, float16 or
            bfloat16; D from 1 to 256.
        k: `[T, G, D]` jagged (`[T, D]`), of q's dtype and device; H is a multiple of G
            (grouped-query attention).
        v: `[T, G, Dv]` (`[T, Dv]`), Dv from 1 to 256.
        offsets: `[B + 1]` int32 or int64; sequence b is rows ``offsets[b]:offsets[b + 1]`` of k
            and v.
        scale: of the scores; None means ``1 / sqrt(D)``.
        max_len: a hint, the length of the longest sequence. Results of longer sequences are then
            unspecified.
        return_lse: also return the logarithm of each query's sum of exponentials.
        kv_lengths: `[B]` of offsets' dtype, the used part of each sequence, from its beginning; a
            number beyond its rows counts as all of them. None uses all.
        kv_bias: `[T]`, or `[T, H]`, float32 (float64 for float64): added to every score of its key
            after scale; -inf hides the key. (A row whose scores are all below -2.3e38, or that
            times a smaller scale, may count as one that sees nothing. Sums in float32 leave a row
            no gradient whose lse is below -2^24; in 16 bits on CUDA also above 2^24.)

    Returns:
        `[B, N, H, Dv]` of q's dtype (`[B, N, Dv]` for one head); with return_lse also lse
        `[B, N, H]` (`[B, N]`), natural logarithm, float32 (float64 for float64), differentiable.
        Queries of an empty sequence get 0 with lse = -inf.

    Raises:
        RuntimeError: a shape, dtype, device or option does not fit; the message names the argument.
        torch.OutOfMemoryError: the GPU has no room for the results.

    Notes:
        Empty sequences are allowed. Sums run in float32 (float64 for float64). float32 on CUDA
        multiplies as in jagged_flash_attention, whose kernels it takes. In 16 bits long sequences
        are cut into parts of a fixed length, which are merged in order by their LSE; nothing
        depends on the batch's longest sequence, and a sequence's forward result does not depend on
        its neighbours, bit for bit.
        Calls with kv_lengths or kv_bias take the kernels of jagged_flash_attention, q as a jagged
        tensor of sequences of N rows: nothing is cut into parts there.
        Deterministic, forward and backward; no double backward. Rows of k and v outside every
        sequence have zero gradient. Operands are read in place if their last dimension is
        contiguous (slices of a fused projection included), fastest if rows are 16-byte aligned and
        D, Dv are multiples of 8; any other layout costs one copy of that operand, as do, on the
        CPU and in the float32 and float64 kernels on CUDA, queries whose rows are not at one
        constant distance.

    Source: "Enhancing Performance and Scalability of Large-Scale Recommendation Systems with
    Jagged Flash Attention", RecSys '24, section 3; "Deep Interest Network for Click-Through Rate
    Prediction" (Zhou et al., KDD '18) for attention of targets to a history.

    Example:
        >>> q, k = torch.zeros(2, 3, 8), torch.zeros(5, 8)  # one head, 3 items per user
        >>> v = torch.arange(5.0)[:, None]
        >>> jagged_target_attention(q, k, v, torch.tensor([0, 4, 5])).squeeze(2)
        tensor([[1.5000, 1.5000, 1.5000],
                [4.0000, 4.0000, 4.0000]])
    """
    one_head = q.dim() == 3 and k.dim() == 2 and v.dim() == 2
    if one_head:
        q, k, v = q.unsqueeze(2), k.unsqueeze(1), v.unsqueeze(1)
    if scale is None:
        scale = _attention.default_scale(q)
    if kv_lengths is None and kv_bias is None:
        out, lse = call(
            torch.ops.jagged_cuda.jagged_target_attention.default,
            q,
            k,
            v,
            offsets,
            scale,
            max_len,
            allow_tf32(q.dtype),
        )
    else:
        out, lse = _as_jagged(q, k, v, offsets, scale, max_len, kv_lengths, kv_bias)
    if one_head:
        out, lse = out.squeeze(2), lse.squeeze(2)
    return (out, lse) if return_lse else out


def _as_jagged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    scale: float,
    max_len: int | None,
    kv_lengths: Tensor | None,
    kv_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The same by jagged_flash_attention, with q as sequences of N rows."""
    op = "jagged_target_attention"
    refuse_transforms(op, (q, k, v, kv_bias))
    q, k, v = lower_precision(q), lower_precision(k), lower_precision(v)
    _CONTRACT.check(op, {"q": q, "k": k, "v": v, "offsets": offsets, "max_len": max_len})
    if kv_lengths is not None:
        check_numbers(op, "kv_lengths", offsets, kv_lengths)
        if kv_lengths.dtype != offsets.dtype:
            fail_argument(op, "kv_lengths", dtype_name(offsets.dtype), dtype_name(kv_lengths.dtype))
    if kv_bias is not None:
        heads = kv_bias.shape[1] if kv_bias.dim() == 2 else 1
        fits = kv_bias.dim() in (1, 2) and kv_bias.shape[0] == k.shape[0]
        if not fits or heads < 1 or q.shape[2] % heads != 0:
            expected = f"[{k.shape[0]}] or [{k.shape[0]}, {q.shape[2]}]"
            fail_argument(op, "kv_bias", expected, shape_text(kv_bias.shape))
        sums = torch.float64 if q.dtype is torch.float64 else torch.float32
        if kv_bias.dtype != sums:
            fail_argument(op, "kv_bias", dtype_name(sums), dtype_name(kv_bias.dtype))
    num_seqs, queries = q.shape[:2]
    q = q.flatten(0, 1)
    rows = torch.arange(num_seqs + 1, dtype=offsets.dtype, device=offsets.device) * queries
    if max_len is not None:  # of queries and keys; a compiler would take N for a constant
        max_len = None if torch.compiler.is_compiling() else max(max_len, queries)
    out, lse = _call_flash_attention(
        *(q, k, v, rows, offsets, -1, -1, scale, max_len, allow_tf32(q.dtype)),
        *(torch.are_deterministic_algorithms_enabled(), None),
        *_bias.flatten(op, q, kv_lengths, kv_bias, None, None),
    )
    return out.unflatten(0, (num_seqs, queries)), lse.unflatten(0, (num_seqs, queries))


def _call_flash_attention(*args: Any) -> tuple[Tensor, Tensor]:
    """Its sentences about values, such as offsets that fall, name the function that was called."""
    flash = torch.ops.jagged_cuda.jagged_flash_attention.default
    if torch.compiler.is_compiling():
        result: tuple[Tensor, Tensor] = call(flash, *args)
        return result
    try:
        result = call(flash, *args)
    except RuntimeError as error:
        op, _, text = str(error).partition(": ")
        # Out of memory has a type of its own; what an earlier call has left keeps its name.
        if op != "jagged_flash_attention" or text.endswith("by an earlier call)"):
            raise
        text = text.replace("kv_offsets", "offsets")
        raise RuntimeError(f"jagged_target_attention: {text}") from None
    return result


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, offsets, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, offsets)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    op = torch.ops.jagged_cuda.jagged_target_attention_backward.default
    return _attention.backward(op, ctx, grad_out, grad_lse)


register("jagged_target_attention_backward")
register(
    "jagged_target_attention",
    setup_context=_setup_context,
    backward=_backward,
    autocast="lower_precision",
)
