"""jagged_attention: attention as three operators, the paper's unfused form."""

from __future__ import annotations

from torch import Tensor

from jagged_cuda.ops import (
    array_jagged_bmm_jagged_out,
    jagged2_softmax,
    jagged_jagged_bmm_jagged_out,
)
from jagged_cuda.ops import matrix_offsets as running_sum
from jagged_cuda.ops._attention import default_scale
from jagged_cuda.ops._dispatch import overridable

__all__ = ["jagged_attention"]


@overridable
def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    kv_offsets: Tensor | None = None,
    matrix_offsets: Tensor | None = None,
    total_scores: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention within each sequence by product, softmax and product, with its scores in memory.

    For each sequence b: ``z_b = softmax(scale * q_b @ k_b.T) @ v_b``. The result is that of
    jagged_flash_attention, whose memory does not grow with the square of the lengths and which is
    faster; this form is for models that read or change the scores.

    Args:
        q: `[Tq, D]` jagged, one head; float32, float64, float16 or bfloat16.
        k: `[Tk, D]` jagged, of q's dtype and device.
        v: `[Tk, Dv]` jagged, of q's dtype and device.
        offsets: `[B + 1]` int32 or int64, on q's device; sequence b is rows
            ``offsets[b]:offsets[b + 1]`` of q.
        kv_offsets: `[B + 1]` of offsets' dtype for k and v; None means offsets.
        matrix_offsets: `[B + 1]` int64, where the scores of each sequence begin: the result of
            ``jagged_cuda.matrix_offsets(offsets, kv_offsets)``, computed here if None.
        total_scores: elements of all scores, at least the last of matrix_offsets. None reads that
            number, which waits for the GPU.
        scale: multiplies the scores; None means ``1 / sqrt(D)``.

    Returns:
        `[Tq, Dv]` of q's dtype. Rows outside every sequence, and rows that see no key, are 0.

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names the argument and
            the operator of the three that found it.
        torch.OutOfMemoryError: the GPU has no room for the scores.

    Source: "Enhancing Performance and Scalability of Large-Scale Recommendation Systems with
    Jagged Flash Attention", RecSys '24, section 2: jagged attention.

    Example:
        >>> x = torch.eye(3)
        >>> jagged_attention(x, x, x, torch.tensor([0, 1, 3]), scale=0.0)
        tensor([[1.0000, 0.0000, 0.0000],
                [0.0000, 0.5000, 0.5000],
                [0.0000, 0.5000, 0.5000]])
    """
    if scale is None:
        scale = default_scale(q)
    if matrix_offsets is None:
        matrix_offsets = running_sum(offsets, kv_offsets)
    scores = jagged_jagged_bmm_jagged_out(
        q,
        k,
        offsets,
        y_offsets=kv_offsets,
        matrix_offsets=matrix_offsets,
        total_out=total_scores,
    )
    weights = jagged2_softmax(
        scores, offsets, y_offsets=kv_offsets, matrix_offsets=matrix_offsets, scale=scale
    )
    return array_jagged_bmm_jagged_out(
        weights,
        v,
        offsets,
        y_offsets=kv_offsets,
        matrix_offsets=matrix_offsets,
        total=q.shape[0],
    )
