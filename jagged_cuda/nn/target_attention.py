"""TargetAttention: the items to be ranked attend to a user's history."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from jagged_cuda.nn._projections import AttentionProjections
from jagged_cuda.nn._rows import Rows, check_targets, given
from jagged_cuda.ops.jagged_target_attention import jagged_target_attention


class TargetAttention(AttentionProjections):
    """Let N targets of each sequence attend to all of its rows: items against a history.

    For each sequence b and head: ``softmax(q_b @ k_b.T / sqrt(D) + kv_bias_b) @ v_b``, where q is
    linear in the targets, k and v in the history; a linear layer follows. Histories stay packed.

    Args:
        embed_dim: E, features of the targets and of the result.
        num_heads: H, heads of queries, of D = E / H features.
        num_kv_heads: G, heads of keys and values, which H is a multiple of (grouped-query
            attention). None means H.
        kdim, vdim: features of the rows that keys, and values, are made of. None means E.
        bias: whether the linear layers have one.
        device, dtype: of the parameters.

    Raises:
        RuntimeError: an option does not fit; the message names it.

    Notes:
        Parameters have the names, shapes and initial values of torch.nn.MultiheadAttention's: a
        state_dict of one loads into the other if num_kv_heads is None. The meaning is the same if
        that one has neither add_bias_kv, whose parameters do not load, nor add_zero_attn nor
        dropout, which have none.
        Where each sequence has another number of targets, use JaggedMultiheadAttention, with the
        targets as x and the history as kv.
        Rows outside every sequence (offsets of a slice) are not read by attention, but must be
        finite: linear layers read them.

    Sources: "Deep Interest Network for Click-Through Rate Prediction" (Zhou et al., KDD '18) for
    attention of targets to a history; "Attention Is All You Need" (Vaswani et al., 2017) for its
    form here; DINAttention is that of the first paper.

    Example:
        >>> import torch, jagged_cuda
        >>> attention = jagged_cuda.nn.TargetAttention(16, num_heads=2)
        >>> targets, history = torch.randn(2, 3, 16), torch.randn(5, 16)
        >>> attention(targets, history, torch.tensor([0, 2, 5])).shape
        torch.Size([2, 3, 16])
    """

    def forward(
        self,
        targets: Tensor,
        history: Rows | tuple[Tensor, Tensor],
        offsets: Tensor | None = None,
        *,
        kv_lengths: Tensor | None = None,
        kv_bias: Tensor | None = None,
        max_len: int | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            targets: `[B, N, E]`.
            history: what keys and values are made of: `[T, kdim]` with offsets, or a JaggedTensor
                or a nested tensor, or a pair of tensors `[T, kdim]` and `[T, vdim]`.
            offsets: `[B + 1]` int32 or int64, if history is a tensor or a pair.
            kv_lengths, kv_bias: see jagged_cuda.jagged_target_attention.
            max_len: a hint, the length of the longest sequence.

        Returns:
            `[B, N, E]`; for an empty history the output layer's bias.

        Raises:
            RuntimeError: an argument does not fit; the message names it.
        """
        targets = check_targets(type(self).__name__, targets, self.embed_dim)
        keys, values, offsets = self.take_keys("history", history, offsets)
        q, k, v = self.project_apart(targets, keys, values)
        options = given({}, ("max_len", max_len), ("kv_lengths", kv_lengths), ("kv_bias", kv_bias))
        out: Any = jagged_target_attention(q, k, v, offsets, **options)
        return self.merge(out)
