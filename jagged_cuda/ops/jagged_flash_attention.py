"""jagged_flash_attention: tiled attention with online softmax, each sequence for itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_cuda.ops import _attention, _contract
from jagged_cuda.ops._memory import call
from jagged_cuda.ops._override import overridable
from jagged_cuda.ops._precision import allow_tf32
from jagged_cuda.ops._registration import register


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
) -> Tensor | tuple[Tensor, Tensor]:
    """Let each sequence's queries attend to its own keys, never storing the matrix of scores.

    For each sequence b and head: ``out_b = softmax(scale * q_b @ k_b.T + mask) @ v_b``. Row i
    sees key j iff ``i + Lk - Lq - left <= j <= i + Lk - Lq + right`` with
    ``(left, right) = window_size`` (bottom-right alignment).

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

    Returns:
        `[Tq, H, Dv]` of q's dtype (`[Tq, Dv]` for one head); with return_lse also lse `[Tq, H]`
        (`[Tq]`), natural logarithm, float32 (float64 for float64), differentiable. Rows that see
        no key, and rows outside every sequence, are 0 with lse = -inf.

    Raises:
        RuntimeError: a shape, dtype, device or option does not fit; the message names the argument.
        torch.OutOfMemoryError: the GPU has no room for the results.

    Notes:
        Empty sequences are allowed. Sums run in float32 (float64 for float64). float32 on CUDA
        multiplies in float32 whatever ``torch.backends.cuda.matmul.fp32_precision`` allows: no
        TF32 path exists yet. Nothing depends on the batch's longest sequence; a sequence's forward
        result does not depend on its neighbours, bit for bit.
        A NaN or inf in v reaches rows of its own sequence that do not see its key: their weight
        is 0, and 0 times NaN is NaN. It never reaches another sequence.
        Deterministic, forward and backward; no double backward. q, k and v are read in place if
        their last dimension is contiguous (slices of a fused projection included), fastest if
        rows are 16-byte aligned and D, Dv are multiples of 8; any other layout costs one copy of
        that operand.

    Source: "Enhancing Performance and Scalability of Large-Scale Recommendation Systems with
    Jagged Flash Attention", RecSys '24, section 3; "FlashAttention-2" (Dao, 2023) for the
    algorithm.

    Example:
        >>> q = k = v = torch.zeros(5, 2, 8)
        >>> out, lse = jagged_flash_attention(q, k, v, torch.tensor([0, 4, 5]), return_lse=True)
        >>> lse[:, 0].exp()
        tensor([4., 4., 4., 4., 1.])
    """
    window_left, window_right = window_size
    if causal:
        window_right = 0
    one_head = q.dim() == 2 and k.dim() == 2 and v.dim() == 2
    if one_head:
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
    if scale is None:
        scale = _attention.default_scale(q)
    out, lse = call(
        torch.ops.jagged_cuda.jagged_flash_attention.default,
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
    )
    if one_head:
        out, lse = out.squeeze(1), lse.squeeze(1)
    return (out, lse) if return_lse else out


def _check(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    kv_offsets: Tensor | None,
    window_left: int,
    window_right: int,
    max_len: int | None,
) -> None:
    """The checks of csrc/contract/jagged_flash_attention.h, in the same order."""
    fail, text = _contract.fail_argument, _contract.shape_text
    _contract.check_dim(op, "q", q, 3, "[Tq, H, D]")
    _contract.check_dim(op, "k", k, 3, "[Tk, G, D]")
    _contract.check_dim(op, "v", v, 3, "[Tk, G, Dv]")
    _contract.check_floating(op, "q", q)
    _contract.check_like(op, "k", k, q)
    _contract.check_like(op, "v", v, q)
    _contract.check_offsets(op, "offsets", offsets, q)
    total_q, heads, dim_qk = q.shape
    total_kv, kv_heads, _ = k.shape
    dim_v = v.shape[2]
    _contract.check_shape(op, "k", k, (total_kv, kv_heads, dim_qk))
    _contract.check_shape(op, "v", v, (total_kv, kv_heads, dim_v))
    if kv_offsets is not None:
        _contract.check_offsets(op, "kv_offsets", kv_offsets, q)
        _contract.check_dtype(op, "kv_offsets", kv_offsets, offsets.dtype)
        _contract.check_shape(op, "kv_offsets", kv_offsets, (offsets.shape[0],))
    elif total_kv != total_q:
        expected = text((total_q, kv_heads, dim_qk))
        fail(op, "k", f"{expected} (the rows of q, as kv_offsets is None)", text(k.shape))
    if dim_qk < 1 or dim_qk > 256:
        fail(op, "q", "[Tq, H, D] with D from 1 to 256", text(q.shape))
    if dim_v < 1 or dim_v > 256:
        fail(op, "v", "[Tk, G, Dv] with Dv from 1 to 256", text(v.shape))
    if heads > 0 if kv_heads < 1 else heads % kv_heads != 0:
        fail(op, "q", f"[Tq, H, D] with H a multiple of the {kv_heads} heads of k", text(q.shape))
    if window_left < -1:
        fail(op, "window_size[0]", ">= -1", str(window_left))
    if window_right < -1:
        fail(op, "window_size[1]", ">= -1", str(window_right))
    if max_len is not None and max_len < 0:
        fail(op, "max_len", ">= 0", str(max_len))


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    kv_offsets: Tensor | None,
    window_left: int,
    window_right: int,
    scale: float,
    max_len: int | None = None,
    allow_tf32: bool = False,
) -> tuple[Tensor, Tensor]:
    op = "jagged_flash_attention"
    _check(op, q, k, v, offsets, kv_offsets, window_left, window_right, max_len)
    return _attention.fake_results(q, v)


def _fake_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets: Tensor,
    kv_offsets: Tensor | None,
    window_left: int,
    window_right: int,
    scale: float,
    max_len: int | None = None,
    allow_tf32: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    op = "jagged_flash_attention_backward"
    _check(op, q, k, v, offsets, kv_offsets, window_left, window_right, max_len)
    _attention.check_results(op, q, v, out, lse, grad_out, grad_lse)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, offsets, kv_offsets, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, offsets, kv_offsets)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    op = torch.ops.jagged_cuda.jagged_flash_attention_backward.default
    return _attention.backward(op, ctx, grad_out, grad_lse)


register("jagged_flash_attention_backward", fake=_fake_backward)
register(
    "jagged_flash_attention",
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    autocast="lower_precision",
)
