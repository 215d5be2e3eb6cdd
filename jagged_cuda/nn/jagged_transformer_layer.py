"""JaggedTransformerLayer: torch.nn.TransformerEncoderLayer(norm_first=True) on packed rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jagged_cuda.nn._rows import Rows, put_together, refuse_script, take_apart
from jagged_cuda.nn.jagged_multihead_attention import JaggedMultiheadAttention
from jagged_cuda.ops._bias import PositionBias, TimeBias
from jagged_cuda.ops._contract import fail_argument

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
}


class JaggedTransformerLayer(nn.Module):
    """Self-attention and a feed-forward network on the rows of each sequence, normalised before.

    For each sequence b: ``y_b = x_b + attention(norm1(x_b))``, then
    ``z_b = y_b + linear2(activation(linear1(norm2(y_b))))``.

    Args:
        embed_dim: E, features of the rows.
        num_heads, num_kv_heads: of attention: see JaggedMultiheadAttention.
        dim_feedforward: features between linear1 and linear2. None means 4 * E.
        dropout: probability in training of a 0 in attention's result, behind the activation, and
            in the result of linear2. Attention's weights have none.
        activation: "relu", "gelu" or "silu", or a function of a tensor.
        layer_norm_eps: eps of both norms.
        bias: whether linear layers and norms have one.
        device, dtype: of the parameters.

    Raises:
        RuntimeError: an option does not fit; the message names it.

    Notes:
        Parameters have the names, shapes and initial values of
        torch.nn.TransformerEncoderLayer(norm_first=True): a state_dict of one loads into the other
        if num_kv_heads is None. Activation and eps are no part of a state_dict: pass the same.
        Dropout in training is the same but for attention's weights.
        Rows outside every sequence (offsets of a slice) are treated as rows that see no key; they
        must be finite.

    Sources: "Attention Is All You Need" (Vaswani et al., 2017); "On Layer Normalization in the
    Transformer Architecture" (Xiong et al., 2020) for norms before.

    Example:
        >>> import torch, jagged_cuda
        >>> layer = jagged_cuda.nn.JaggedTransformerLayer(16, num_heads=2)
        >>> x, offsets = torch.randn(5, 16), torch.tensor([0, 2, 5])
        >>> layer(x, offsets, causal=True).shape
        torch.Size([5, 16])
    """

    __prepare_scriptable__ = refuse_script

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        dim_feedforward: int | None = None,
        dropout: float = 0.0,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        layer_norm_eps: float = 1e-5,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if isinstance(activation, str) and activation not in _ACTIVATIONS:
            expected = "relu, gelu, silu or a function"
            fail_argument(name, "activation", expected, repr(activation))
        if not 0 <= dropout <= 1:
            fail_argument(name, "dropout", "from 0 to 1", dropout)
        self.embed_dim = embed_dim
        self.activation = _ACTIVATIONS[activation] if isinstance(activation, str) else activation
        hidden = 4 * embed_dim if dim_feedforward is None else dim_feedforward
        # In the order of torch.nn.TransformerEncoderLayer, so that one seed gives both the same.
        self.self_attn = JaggedMultiheadAttention(
            embed_dim,
            num_heads,
            num_kv_heads=num_kv_heads,
            bias=bias,
            device=device,
            dtype=dtype,
        )
        self.linear1 = nn.Linear(embed_dim, hidden, bias=bias, device=device, dtype=dtype)
        self.linear2 = nn.Linear(hidden, embed_dim, bias=bias, device=device, dtype=dtype)
        self.norm1, self.norm2 = (
            nn.LayerNorm(embed_dim, layer_norm_eps, bias=bias, device=device, dtype=dtype)
            for _ in range(2)
        )
        self.dropout, self.dropout1, self.dropout2 = (nn.Dropout(dropout) for _ in range(3))

    def forward(
        self,
        x: Rows,
        offsets: Tensor | None = None,
        *,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        key_ranges: Tensor | None = None,
        kv_bias: Tensor | None = None,
        time_bias: TimeBias | None = None,
        position_bias: PositionBias | None = None,
        max_len: int | None = None,
    ) -> Rows:
        """Transform the rows.

        Args:
            x: `[T, E]` with offsets, or a JaggedTensor, or a nested tensor `[B, j, E]`.
            offsets: `[B + 1]` int32 or int64, if x is a tensor.
            causal, window_size, key_ranges: which keys a row sees: see
                jagged_cuda.jagged_flash_attention.
            kv_bias, time_bias, position_bias: added to scores, as in JaggedMultiheadAttention.
            max_len: a hint, the length of the longest sequence.

        Returns:
            `[T, E]`, of x's kind.

        Raises:
            RuntimeError: an argument does not fit; the message names it.
        """
        rows, offsets = take_apart(type(self).__name__, "x", x, offsets, self.embed_dim)
        part: Any = self._modules  # the attributes, without nn.Module's search for them
        read = part["self_attn"](
            part["norm1"](rows),
            offsets,
            causal=causal,
            window_size=window_size,
            key_ranges=key_ranges,
            kv_bias=kv_bias,
            time_bias=time_bias,
            position_bias=position_bias,
            max_len=max_len,
        )
        rows = rows + _drop(part["dropout1"], read)
        hidden = self.activation(part["linear1"](part["norm2"](rows)))
        hidden = part["linear2"](_drop(part["dropout"], hidden))
        return put_together(x, rows + _drop(part["dropout2"], hidden))


def _drop(dropout: nn.Dropout, x: Tensor) -> Tensor:
    """dropout(x), which with p = 0 would return x and take the host 3 us."""
    return x if dropout.p == 0 else dropout(x)
