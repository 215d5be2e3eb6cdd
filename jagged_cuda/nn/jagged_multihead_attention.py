"""JaggedMultiheadAttention: torch.nn.MultiheadAttention on packed rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from jagged_cuda.nn._projections import AttentionProjections
from jagged_cuda.nn._rows import Rows, given, put_together, take_apart
from jagged_cuda.ops._bias import PositionBias, TimeBias
from jagged_cuda.ops._contract import fail_argument
from jagged_cuda.ops.jagged_flash_attention import jagged_flash_attention


class JaggedMultiheadAttention(AttentionProjections):
    """Let the rows of each sequence attend to those of the same, or of another, sequence.

    For each sequence b and head: ``softmax(q_b @ k_b.T / sqrt(D) + bias + mask) @ v_b``, where q, k
    and v are linear in the rows; a linear layer follows. All layers run on packed rows.

    Args:
        embed_dim: E, features of the rows of queries and of the result.
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
        dropout, which have none. float32, float64, float16 and bfloat16, and autocast.
        Rows outside every sequence (offsets of a slice) get the output layer's bias and zero
        gradient, but must be finite: linear layers read them.

    Sources: "Attention Is All You Need" (Vaswani et al., 2017); "GQA: Training Generalized
    Multi-Query Transformer Models from Multi-Head Checkpoints" (Ainslie et al., 2023); jagged
    flash attention: see jagged_cuda.jagged_flash_attention.

    Example:
        >>> import torch, jagged_cuda
        >>> attention = jagged_cuda.nn.JaggedMultiheadAttention(16, num_heads=2)
        >>> x, offsets = torch.randn(5, 16), torch.tensor([0, 2, 5])
        >>> attention(x, offsets, causal=True).shape
        torch.Size([5, 16])
    """

    def forward(
        self,
        x: Rows,
        offsets: Tensor | None = None,
        *,
        kv: Rows | tuple[Tensor, Tensor] | None = None,
        kv_offsets: Tensor | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        key_ranges: Tensor | None = None,
        kv_lengths: Tensor | None = None,
        kv_bias: Tensor | None = None,
        time_bias: TimeBias | None = None,
        position_bias: PositionBias | None = None,
        max_len: int | None = None,
    ) -> Rows:
        """Attend.

        Args:
            x: `[Tq, E]` with offsets, or a JaggedTensor, or a nested tensor `[B, j, E]`.
            offsets: `[B + 1]` int32 or int64, if x is a tensor.
            kv: what keys and values are made of, x itself if None: `[Tk, kdim]`, or a JaggedTensor
                or a nested tensor, or a pair of tensors `[Tk, kdim]` and `[Tk, vdim]`.
            kv_offsets: `[B + 1]` of offsets' dtype, if kv is a tensor or a pair. None means
                offsets.
            causal, window_size, key_ranges, kv_lengths: which keys a row sees: see
                jagged_cuda.jagged_flash_attention.
            kv_bias, time_bias, position_bias: added to scores: see
                jagged_cuda.jagged_flash_attention. Their tables are parameters of your own, which
                layers may share.
            max_len: a hint, the length of the longest sequence.

        Returns:
            `[Tq, E]`, of x's kind. Rows that see no key are the output layer's bias.

        Raises:
            RuntimeError: an argument does not fit; the message names it.
        """
        name = type(self).__name__
        rows, row_offsets = take_apart(name, "x", x, offsets, self.embed_dim)
        key_offsets = None
        if kv is not None:
            keys, values, key_offsets = self.take_keys("kv", kv, kv_offsets, row_offsets)
            q, k, v = self.project_apart(rows, keys, values)
        else:
            if kv_offsets is not None:
                fail_argument(name, "kv_offsets", "None without kv", "a tensor")
            if not self.embed_dim == self.kdim == self.vdim:
                expected = f"given, since kdim is {self.kdim} and vdim {self.vdim}"
                fail_argument(name, "kv", expected, "None")
            q, k, v = self.project(rows)
        options = given(
            {"causal": causal},
            ("kv_offsets", key_offsets),
            ("window_size", None if window_size == (-1, -1) else window_size),
            ("max_len", max_len),
            ("key_ranges", key_ranges),
            ("kv_lengths", kv_lengths),
            ("kv_bias", kv_bias),
            ("time_bias", time_bias),
            ("position_bias", position_bias),
        )
        out: Any = jagged_flash_attention(q, k, v, row_offsets, **options)
        return put_together(x, self.merge(out))
