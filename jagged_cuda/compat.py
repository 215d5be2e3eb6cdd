"""Names and signatures of other libraries, so that a model changes by its imports alone.

``flash_attn_varlen_func`` is flash-attn's; the others are ``torch.ops.fbgemm.*``, for one jagged
dimension. FBGEMM's cut each sequence at max_L, which costs a pass over the rows, since the host
does not know the lengths; jagged_cuda's own functions need no max_L.

Source: Dao-AILab/flash-attention, flash_attn_interface.py; pytorch/FBGEMM, jagged_tensor_ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from jagged_cuda import offsets, ops
from jagged_cuda.ops._contract import dtype_name, fail_argument, shape_text
from jagged_cuda.ops._dispatch import overridable
from jagged_cuda.ops.jagged_flash_attention import attend

__all__ = [
    "asynchronous_complete_cumsum",
    "dense_to_jagged",
    "flash_attn_varlen_func",
    "jagged_dense_bmm",
    "jagged_dense_elementwise_add_jagged_output",
    "jagged_jagged_bmm",
    "jagged_softmax",
    "jagged_to_padded_dense",
]


# --- flash-attn


@overridable
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Attend as flash-attn's function of this name does, by jagged_flash_attention.

    For each sequence b and head: ``out_b = softmax(softmax_scale * q_b @ k_b.T + mask) @ v_b``.

    Args:
        q: `[Tq, H, D]` jagged; float32, float64, float16 or bfloat16; D from 1 to 256.
        k: `[Tk, G, D]`; H is a multiple of G.
        v: `[Tk, G, Dv]`.
        cu_seqlens_q: `[B + 1]` int32 or int64, the offsets of q.
        cu_seqlens_k: `[B + 1]` of the same dtype, the offsets of k and v.
        max_seqlen_q: at least the length of the longest sequence of q.
        max_seqlen_k: the same of k. Results of longer sequences are unspecified.
        dropout_p: must be 0.
        softmax_scale: of the scores; None means ``1 / sqrt(D)``.
        causal: no key after the query's own position, whatever window_size says of later ones.
        window_size: (left, right), in rows; -1 is unbounded.
        softcap: must be 0.
        alibi_slopes: must be None.
        deterministic: the same bits at every run in the backward too, as under
            torch.use_deterministic_algorithms(True).
        return_attn_probs: also return the logarithms of the sums, and None for the probabilities,
            which flash-attn has only with dropout.
        block_table: must be None.

    Returns:
        `[Tq, H, Dv]`; with return_attn_probs ``(out, softmax_lse, None)`` with softmax_lse
        `[H, Tq]`, -inf for a row that sees no key.

    Raises:
        RuntimeError: an argument does not fit, or is one that must have its default.

    Notes:
        Those of jagged_flash_attention.

    Example:
        >>> q = k = v = torch.zeros(5, 2, 8)
        >>> begins = torch.tensor([0, 4, 5])
        >>> flash_attn_varlen_func(q, k, v, begins, begins, 4, 4, causal=True).shape
        torch.Size([5, 2, 8])
    """
    op = "flash_attn_varlen_func"
    if dropout_p != 0:
        fail_argument(op, "dropout_p", "0: there is no dropout", dropout_p)
    if softcap != 0:
        fail_argument(op, "softcap", "0: scores are not capped", softcap)
    if alibi_slopes is not None:
        fail_argument(op, "alibi_slopes", "None: there is no ALiBi", "a tensor")
    if block_table is not None:
        fail_argument(op, "block_table", "None: keys are not paged", "a tensor")
    left, right = window_size
    out, lse = attend(
        q,
        k,
        v,
        cu_seqlens_q,
        None if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k,
        causal,
        (left, min(right, 0)) if causal else (left, right),
        softmax_scale,
        max(max_seqlen_q, max_seqlen_k),
        deterministic or torch.are_deterministic_algorithms_enabled(),
    )
    return (out, lse.t(), None) if return_attn_probs else out


# --- FBGEMM


@overridable
def asynchronous_complete_cumsum(t_in: Tensor) -> Tensor:
    """Sum lengths, beginning with 0: ``torch.ops.fbgemm.asynchronous_complete_cumsum``.

    Args:
        t_in: `[B]` or `[N, B]` int32 or int64.

    Returns:
        `[B + 1]` or `[N, B + 1]` of t_in's dtype.

    Raises:
        RuntimeError: a shape or dtype does not fit.

    Example:
        >>> asynchronous_complete_cumsum(torch.tensor([2, 0, 3]))
        tensor([0, 2, 2, 5])
    """
    op = "asynchronous_complete_cumsum"
    if t_in.dtype not in (torch.int32, torch.int64):
        fail_argument(op, "t_in", "int32 or int64", dtype_name(t_in.dtype))
    if t_in.dim() not in (1, 2):
        fail_argument(op, "t_in", "[B] or [N, B]", shape_text(t_in.shape))
    if t_in.dim() == 1:
        return offsets.offsets_from_lengths(t_in)
    return F.pad(t_in.cumsum(1, dtype=t_in.dtype), (1, 0))


def jagged_to_padded_dense(
    values: Tensor,
    offsets: Sequence[Tensor],
    max_lengths: Sequence[int],
    padding_value: float = 0.0,
) -> Tensor:
    """Pad sequences, cut at max_lengths: ``torch.ops.fbgemm.jagged_to_padded_dense``.

    Args:
        values: `[T, ...]` jagged.
        offsets: a list of one tensor `[B + 1]`.
        max_lengths: a list of one length M; rows of a sequence beyond it are cut.
        padding_value: the value where a sequence has no row.

    Returns:
        `[B, M, ...]` of values' dtype.

    Raises:
        RuntimeError: an argument does not fit, or is a list of several.

    Example:
        >>> jagged_to_padded_dense(torch.ones(3), [torch.tensor([0, 1, 3])], [2])
        tensor([[1., 0.],
                [1., 1.]])
    """
    op = "jagged_to_padded_dense"
    length = _only(op, "max_lengths", "length", max_lengths)
    return ops.jagged_to_padded(
        values, _only(op, "offsets", "tensor", offsets), length, fill=padding_value
    )


def dense_to_jagged(
    dense: Tensor, x_offsets: Sequence[Tensor], total_L: int | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Take the rows of padded sequences: ``torch.ops.fbgemm.dense_to_jagged``.

    Args:
        dense: `[B, M, ...]` padded.
        x_offsets: a list of one tensor `[B + 1]`.
        total_L: T, at least the last of the offsets. None reads that number, which waits for the
            GPU.

    Returns:
        `[T, ...]` of dense's dtype, where rows of a sequence beyond M, which are cut, are 0; and
        x_offsets.

    Raises:
        RuntimeError: an argument does not fit, or is a list of several.

    Example:
        >>> dense_to_jagged(torch.ones(2, 2), [torch.tensor([0, 1, 3])])
        (tensor([1., 1., 1.]), [tensor([0, 1, 3])])
    """
    begins = _only("dense_to_jagged", "x_offsets", "tensor", x_offsets)
    return ops.padded_to_jagged(dense, begins, total=total_L), [begins]


def jagged_dense_elementwise_add_jagged_output(
    x_values: Tensor, x_offsets: Sequence[Tensor], y: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Add a padded tensor: ``torch.ops.fbgemm.jagged_dense_elementwise_add_jagged_output``.

    Args:
        x_values: `[T, D]` jagged.
        x_offsets: a list of one tensor `[B + 1]`.
        y: `[B, max_L, D]`; nothing is added to rows of a sequence beyond max_L.

    Returns:
        `[T, D]` of x_values' dtype, or of the one that y's promotes it to; and x_offsets.

    Raises:
        RuntimeError: an argument does not fit, or is a list of several.

    Example:
        >>> x, y = torch.ones(3, 1), torch.ones(2, 1, 1)
        >>> jagged_dense_elementwise_add_jagged_output(x, [torch.tensor([0, 1, 3])], y)[0].T
        tensor([[2., 2., 1.]])
    """
    op = "jagged_dense_elementwise_add_jagged_output"
    begins = _only(op, "x_offsets", "tensor", x_offsets)
    dtype = torch.promote_types(x_values.dtype, y.dtype)
    return ops.jagged_dense_add(x_values.to(dtype), y.to(dtype), begins), [begins]


@overridable
def jagged_dense_bmm(
    x_values: Tensor, x_offsets: Tensor, y: Tensor, max_L: int
) -> tuple[Tensor, Tensor]:
    """Multiply each sequence by its own matrix: ``torch.ops.fbgemm.jagged_dense_bmm``.

    For each sequence b: ``z_b = x_b[:max_L] @ y_b``.

    Args:
        x_values: `[T, D]` jagged.
        x_offsets: `[B + 1]`.
        y: `[B, D, N]`.
        max_L: rows of a sequence beyond it are cut: their results are 0.

    Returns:
        `[T, N]` of x_values' dtype, and x_offsets.

    Raises:
        RuntimeError: an argument does not fit.

    Example:
        >>> x, y = torch.ones(3, 2), torch.ones(2, 2, 1)
        >>> jagged_dense_bmm(x, torch.tensor([0, 1, 3]), y, 1)[0].T
        tensor([[2., 2., 0.]])
    """
    _check_max_length("jagged_dense_bmm", max_L)
    product = ops.jagged_dense_bmm(x_values, y, x_offsets)
    return _cut(product, x_offsets, max_L), x_offsets


@overridable
def jagged_jagged_bmm(x_values: Tensor, y_values: Tensor, x_offsets: Tensor, max_L: int) -> Tensor:
    """Multiply two jagged tensors, over their rows: ``torch.ops.fbgemm.jagged_jagged_bmm``.

    For each sequence b: ``z_b = x_b[:max_L].T @ y_b[:max_L]``.

    Args:
        x_values: `[T, D]` jagged.
        y_values: `[T, N]` jagged.
        x_offsets: `[B + 1]`.
        max_L: rows of a sequence beyond it are cut.

    Returns:
        `[B, D, N]` of x_values' dtype.

    Raises:
        RuntimeError: an argument does not fit.

    Example:
        >>> x = torch.ones(3, 1)
        >>> jagged_jagged_bmm(x, x, torch.tensor([0, 1, 3]), 1).flatten()
        tensor([1., 1.])
    """
    _check_max_length("jagged_jagged_bmm", max_L)
    return ops.jagged_jagged_bmm(x_values, y_values, _in_two(x_offsets, max_L))[::2]


@overridable
def jagged_softmax(values: Tensor, x_offsets: Tensor, max_L: int) -> tuple[Tensor, Tensor]:
    """Take the softmax over the rows of each sequence: ``torch.ops.fbgemm.jagged_softmax``.

    For each sequence b: ``z_b = softmax(x_b[:max_L], dim=0)``.

    Args:
        values: `[T, D]` jagged.
        x_offsets: `[B + 1]`.
        max_L: rows of a sequence beyond it are cut: their results are 0 (FBGEMM's are what was in
            memory).

    Returns:
        `[T, D]` of values' dtype, and x_offsets.

    Raises:
        RuntimeError: an argument does not fit.

    Example:
        >>> jagged_softmax(torch.zeros(3, 1), torch.tensor([0, 1, 3]), 1)[0].T
        tensor([[1., 1., 0.]])
    """
    _check_max_length("jagged_softmax", max_L)
    weights = ops.jagged_softmax(values, _in_two(x_offsets, max_L))
    return _cut(weights, x_offsets, max_L), x_offsets


def _only(op: str, argument: str, what: str, listed: Sequence[Any]) -> Any:
    """The one element of a list: there is one jagged dimension."""
    if not isinstance(listed, (list, tuple)):
        fail_argument(op, argument, f"a list of one {what}", f"a {type(listed).__name__}")
    if len(listed) != 1:
        expected = f"a list of one {what}: there is one jagged dimension"
        fail_argument(op, argument, expected, f"{len(listed)}")
    return listed[0]


def _check_max_length(op: str, max_L: int) -> None:
    if max_L < 0:
        fail_argument(op, "max_L", "0 or more", max_L)


def _in_two(x_offsets: Tensor, max_L: int) -> Tensor:
    """`[2 * B + 1]`: the first max_L rows of each sequence, and its other rows, as sequences."""
    begins = x_offsets[:-1]
    pairs = torch.stack((begins, begins + x_offsets.diff().clamp(max=max_L)), 1)
    return torch.cat((pairs.flatten(), x_offsets[-1:]))


def _cut(x: Tensor, x_offsets: Tensor, max_L: int) -> Tensor:
    """x `[T, D]`, with 0 in the rows of each sequence beyond its first max_L."""
    kept = x_offsets.new_ones((), dtype=torch.bool).expand(x_offsets.shape[0] - 1, max_L)
    return x.where(ops.padded_to_jagged(kept, x_offsets, total=x.shape[0])[:, None], 0)
