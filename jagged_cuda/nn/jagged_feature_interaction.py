"""JaggedFeatureInteraction: targets meet a history, and become the features of a ranking model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from jagged_cuda.nn._rows import Rows, check_targets, given, refuse_script, take_apart
from jagged_cuda.ops._contract import fail_argument
from jagged_cuda.ops.jagged_mean import jagged_mean
from jagged_cuda.ops.jagged_target_attention import jagged_target_attention


class JaggedFeatureInteraction(nn.Module):
    """Let dense targets interact with the values of a jagged history, which stays jagged.

    For each sequence b with history x_b and targets t_b, per head:
    ``found_b = softmax(query(t_b) @ x_b.T / sqrt(D)) @ x_b``, one fused operator in place of the
    paper's ``jagged_dense_bmm``, ``jagged_softmax`` and ``jagged_jagged_bmm``. The result is what a
    ranking network reads of each target: itself, what it found and the mean of the history.

    Args:
        embed_dim: E, features of targets and history.
        num_heads: H; each head meets E / H features of the history's own.
        bias: whether the linear layer of queries has one.
        device, dtype: of the parameters.

    Raises:
        RuntimeError: an option does not fit; the message names it.

    Notes:
        The history's values are keys and values as they are; TargetAttention projects them first.
        ``query`` is a torch.nn.Linear, initialised as that is. Rows outside every sequence (offsets
        of a slice) are not read.

    Source: "Enhancing Performance and Scalability of Large-Scale Recommendation Systems with
    Jagged Flash Attention" (Xu et al., RecSys '24), section 2, Figure 1.

    Example:
        >>> import torch, jagged_cuda
        >>> interaction = jagged_cuda.nn.JaggedFeatureInteraction(16)
        >>> targets, history = torch.randn(2, 3, 16), torch.randn(5, 16)
        >>> interaction(targets, history, torch.tensor([0, 2, 5])).shape
        torch.Size([2, 3, 48])
    """

    __prepare_scriptable__ = refuse_script

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 1,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if num_heads < 1:
            fail_argument(name, "num_heads", "1 or more", num_heads)
        if embed_dim < 1 or embed_dim % num_heads != 0:
            fail_argument(name, "embed_dim", f"a multiple of num_heads {num_heads}", embed_dim)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.query = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}"

    def forward(
        self,
        targets: Tensor,
        history: Rows,
        offsets: Tensor | None = None,
        *,
        max_len: int | None = None,
    ) -> Tensor:
        """Interact.

        Args:
            targets: `[B, N, E]`.
            history: `[T, E]` with offsets, or a JaggedTensor, or a nested tensor `[B, j, E]`.
            offsets: `[B + 1]` int32 or int64, if history is a tensor.
            max_len: a hint, the length of the longest sequence.

        Returns:
            `[B, N, 3 * E]`: the target, what it found, and the mean of the history; the last two
            are 0 for an empty history.

        Raises:
            RuntimeError: an argument does not fit; the message names it.
        """
        name = type(self).__name__
        targets = check_targets(name, targets, self.embed_dim)
        rows, offsets = take_apart(name, "history", history, offsets, self.embed_dim)
        query: Any = self._modules["query"]  # without nn.Module's search for an attribute
        q, values, num_heads = query(targets), rows, self.num_heads
        if num_heads > 1:
            q, values = q.unflatten(-1, (num_heads, -1)), rows.unflatten(-1, (num_heads, -1))
        options = given({}, ("max_len", max_len))
        found: Any = jagged_target_attention(q, values, values, offsets, **options)
        mean = jagged_mean(rows, offsets).unsqueeze(1).expand_as(targets)
        found = found.flatten(-2) if num_heads > 1 else found
        return torch.cat([targets, found, mean], dim=-1)
