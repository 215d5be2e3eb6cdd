"""DINAttention: each target scores the rows of a history by a small network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jagged_cuda.nn._rows import Rows, check_targets, refuse_script, take_apart
from jagged_cuda.ops._contract import fail_argument
from jagged_cuda.ops.jagged_dense_bmm import jagged_dense_bmm
from jagged_cuda.ops.jagged_jagged_bmm import jagged_jagged_bmm
from jagged_cuda.ops.jagged_softmax import jagged_softmax

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}


class DINAttention(nn.Module):
    """Sum the rows of a history, weighted by what a network says of each pair of target and row.

    For each sequence b, target q and row k: ``score = scorer([q; k; q - k; q * k])``, a multilayer
    perceptron; the result is ``sum of score * k`` over the rows, or of ``softmax(score) * k``.

    The scorer's first layer is linear in k once q is known, so no row `[4 E]` is ever made: with
    its weight ``[Wq, Wk, Wd, Wp]`` it is ``k @ (Wk - Wd + Wp * q).T + (Wq + Wd) @ q + bias``, one
    product of the packed history with a matrix for each sequence.

    Args:
        embed_dim: E, features of targets and rows.
        hidden_dims: features of the scorer's hidden layers, at least one.
        activation: behind each hidden layer: "relu", "gelu", "sigmoid", "silu" or "tanh".
        softmax: whether scores are weights as they are (False, as in the paper), or after a softmax
            over the rows of each sequence.
        device, dtype: of the parameters.

    Raises:
        RuntimeError: an option does not fit; the message names it.

    Notes:
        ``scorer`` is a torch.nn.Sequential of Linear layers and activations, initialised as these
        are, which takes `[..., 4 E]` in the order q, k, q - k, q * k: the padded form is a call of
        it. With softmax the last has no bias. Hidden layers take `[T, N, hidden]` of memory.
        Rows outside every sequence (offsets of a slice) must be finite.

    Source: "Deep Interest Network for Click-Through Rate Prediction" (Zhou et al., KDD '18),
    section 4.3; sizes and activation as in its authors' code.

    Example:
        >>> import torch, jagged_cuda
        >>> attention = jagged_cuda.nn.DINAttention(16)
        >>> targets, history = torch.randn(2, 3, 16), torch.randn(5, 16)
        >>> attention(targets, history, torch.tensor([0, 2, 5])).shape
        torch.Size([2, 3, 16])
    """

    __prepare_scriptable__ = refuse_script

    def __init__(
        self,
        embed_dim: int,
        *,
        hidden_dims: Sequence[int] = (80, 40),
        activation: Literal["relu", "gelu", "sigmoid", "silu", "tanh"] = "sigmoid",
        softmax: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if len(hidden_dims) == 0 or min(hidden_dims) < 1:
            fail_argument(name, "hidden_dims", "one or more numbers above 0", tuple(hidden_dims))
        if activation not in _ACTIVATIONS:
            expected = "relu, gelu, sigmoid, silu or tanh"
            fail_argument(name, "activation", expected, repr(activation))
        self.embed_dim = embed_dim
        self.activation = activation
        self.softmax = softmax
        layers: list[nn.Module] = []
        width = 4 * embed_dim
        for hidden in hidden_dims:
            layers += [nn.Linear(width, hidden, device=device, dtype=dtype)]
            layers += [_ACTIVATIONS[activation]()]
            width = hidden
        # Softmax does not see a number that is added to all scores.
        layers += [nn.Linear(width, 1, bias=not softmax, device=device, dtype=dtype)]
        self.scorer = nn.Sequential(*layers)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, softmax={self.softmax}"

    def forward(self, targets: Tensor, history: Rows, offsets: Tensor | None = None) -> Tensor:
        """Score and sum.

        Args:
            targets: `[B, N, E]`.
            history: `[T, E]` with offsets, or a JaggedTensor, or a nested tensor `[B, j, E]`.
            offsets: `[B + 1]` int32 or int64, if history is a tensor.

        Returns:
            `[B, N, E]`; 0 for an empty history.

        Raises:
            RuntimeError: an argument does not fit; the message names it.
        """
        name = type(self).__name__
        targets = check_targets(name, targets, self.embed_dim)
        rows, offsets = take_apart(name, "history", history, offsets, self.embed_dim)
        scores = self._scores(targets, rows, offsets)
        if self.softmax:
            scores = jagged_softmax(scores, offsets)
        return jagged_jagged_bmm(scores, rows, offsets)

    def _scores(self, targets: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
        """`[T, N]`"""
        scorer: Any = self._modules["scorer"]  # without nn.Module's search for an attribute
        first, _, *layers = scorer._modules.values()
        of_target, of_row, of_difference, of_product = first.weight.chunk(4, dim=1)  # [h, E] each
        # One matrix per target, those of a sequence side by side.
        matrices = (of_row - of_difference) + of_product * targets.unsqueeze(2)  # [B, N, h, E]
        bias = F.linear(targets, of_target + of_difference, first.bias)  # [B, N, h]
        hidden = jagged_dense_bmm(
            rows,
            matrices.flatten(1, 2).transpose(1, 2),
            offsets,
            bias=bias.flatten(1),
            activation=self.activation,
        )
        x = hidden.view(hidden.size(0), targets.size(1), first.out_features)  # [T, N, h]
        for layer in layers:
            x = layer(x)
        return x.squeeze(2)
