"""The linear layers around attention, with the parameters of torch.nn.MultiheadAttention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jagged_cuda.nn._rows import Rows, check_pair, refuse_script, take_apart
from jagged_cuda.ops._contract import fail_argument


class AttentionProjections(nn.Module):
    """Queries, keys and values from rows, and the layer behind the heads.

    Parameters have the names, shapes and initial values of torch.nn.MultiheadAttention's, so that a
    state_dict of one loads into the other; keys and values may have fewer heads than queries.
    """

    in_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None

    __prepare_scriptable__ = refuse_script

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        name = type(self).__name__
        if num_heads < 1:
            fail_argument(name, "num_heads", "1 or more", num_heads)
        if embed_dim < 1 or embed_dim % num_heads != 0:
            fail_argument(name, "embed_dim", f"a multiple of num_heads {num_heads}", embed_dim)
        if self.num_kv_heads < 1 or num_heads % self.num_kv_heads != 0:
            expected = f"a divisor of num_heads {num_heads}"
            fail_argument(name, "num_kv_heads", expected, self.num_kv_heads)
        self.head_dim = embed_dim // num_heads
        self._kv_features = self.num_kv_heads * self.head_dim

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        rows = embed_dim + 2 * self._kv_features
        if self.kdim == embed_dim and self.vdim == embed_dim:
            self.in_proj_weight = empty(rows, embed_dim)
            for each in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
                self.register_parameter(each, None)
        else:
            self.register_parameter("in_proj_weight", None)
            self.q_proj_weight = empty(embed_dim, embed_dim)
            self.k_proj_weight = empty(self._kv_features, self.kdim)
            self.v_proj_weight = empty(self._kv_features, self.vdim)
        if bias:
            self.in_proj_bias = empty(rows)
        else:
            self.register_parameter("in_proj_bias", None)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self._reset_input()

    def reset_parameters(self) -> None:
        """Draw weights as torch.nn.MultiheadAttention does; biases are 0."""
        self.out_proj.reset_parameters()
        self._reset_input()

    def _reset_input(self) -> None:
        if self.in_proj_weight is not None:
            nn.init.xavier_uniform_(self.in_proj_weight)
        else:
            for weight in (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
                nn.init.xavier_uniform_(weight)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"

    def take_keys(
        self,
        name: str,
        kv: Rows | tuple[Tensor, Tensor],
        offsets: Tensor | None,
        default: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows for keys, for values, the same tensor if one is both, and their offsets."""
        module = type(self).__name__
        keys, values = check_pair(module, name, kv) if isinstance(kv, tuple) else (kv, None)
        keys, key_offsets = take_apart(module, name, keys, offsets, self.kdim, default)
        if values is not None:
            values, _ = take_apart(module, name, values, key_offsets, self.vdim)
        elif self.kdim == self.vdim:
            values = keys
        else:
            expected = f"a pair, since kdim is {self.kdim} and vdim {self.vdim}"
            fail_argument(module, name, expected, "one")
        return keys, values, key_offsets

    def project(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[T, E]` -> q `[T, H, D]`, k and v `[T, G, D]`: slices of one product."""
        weight = self.in_proj_weight
        assert weight is not None
        product = self._heads(F.linear(rows, weight, self.in_proj_bias))
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = product.split_with_sizes(heads, -2)  # of C++, where split() is of Python
        return q, k, v

    def project_apart(
        self, queries: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`[..., E]`, `[T, kdim]`, `[T, vdim]` -> q `[..., H, D]`, k and v `[T, G, D]`."""
        sizes, bias = [self.embed_dim, self._kv_features, self._kv_features], self.in_proj_bias
        weight = self.in_proj_weight
        # Each of these takes its parts by number: torch.fx cannot count them.
        if weight is not None and keys is values:
            sizes = [self.embed_dim, 2 * self._kv_features]
            q_weight, kv_weight = weight.split_with_sizes(sizes)
            q_bias, kv_bias = (None, None) if bias is None else bias.split_with_sizes(sizes)
            q = F.linear(queries, q_weight, q_bias)
            k, v = self._heads(F.linear(keys, kv_weight, kv_bias)).chunk(2, dim=-2)
            return self._heads(q), k, v
        q_bias, k_bias, v_bias = (
            (None, None, None) if bias is None else bias.split_with_sizes(sizes)
        )
        if weight is not None:
            q_weight, k_weight, v_weight = weight.split_with_sizes(sizes)
        else:
            q_weight, k_weight, v_weight = (
                self.q_proj_weight,
                self.k_proj_weight,
                self.v_proj_weight,
            )
        q = F.linear(queries, q_weight, q_bias)
        k = F.linear(keys, k_weight, k_bias)
        v = F.linear(values, v_weight, v_bias)
        return self._heads(q), self._heads(k), self._heads(v)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def merge(self, heads: Tensor) -> Tensor:
        """`[..., H, D]` -> `[..., E]`, through the output layer."""
        out_proj: Any = self._modules["out_proj"]  # without nn.Module's search for an attribute
        return out_proj(heads.flatten(-2))
