"""HSTULayer: the layer of generative recommenders, on packed rows."""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from jagged_cuda.nn._rows import Rows, given, put_together, refuse_script, take_apart
from jagged_cuda.ops._bias import PositionBias, TimeBias
from jagged_cuda.ops._contract import fail_argument
from jagged_cuda.ops.jagged_hstu_attention import check_divisor, jagged_hstu_attention
from jagged_cuda.ops.layer_norm_mul_dropout import layer_norm_mul_dropout


class HSTULayer(nn.Module):
    """Project the rows, let each attend to its sequence by SiLU, gate, project back and add.

    For each sequence b, with `*` element by element::

        u_b, v_b, q_b, k_b = split(silu(uvqk_proj(input_norm(x_b))))
        a_b = silu(q_b @ k_b.T / sqrt(qk_dim) + bias) @ v_b / divisor  # each head, visible keys
        y_b = x_b + out_proj(dropout(u_b * output_norm(a_b)))

    Args:
        embed_dim: E, features of the rows.
        num_heads: H.
        qk_dim, v_dim: features of a head's queries and keys, and of its values (and of u), from 1
            to 256. None means E / H.
        divisor: a number, or "length", each sequence's own number of rows.
        dropout: probability in training of a 0 in what out_proj takes.
        eps: of both norms.
        bias: whether the linear layers have one. Norms always have.
        recompute: keep only the rows and attention's result for the backward pass, which computes
            norm, projection and SiLU again: 4 H (qk_dim + v_dim) + E elements less per row.
        device, dtype: of the parameters.

    Raises:
        RuntimeError: an option does not fit; the message names it.

    Notes:
        Rows of uvqk_proj are those of u, v, q and k, in this order, each head by head; output_norm
        norms all heads of a row together. Norm, gate and dropout behind attention are one pass over
        the rows (jagged_cuda.layer_norm_mul_dropout). float32, float64, float16 and bfloat16, and
        autocast. Dropout draws its seed on the rows' device, from PyTorch's generator, so that a
        CUDA graph replays with others.
        Rows outside every sequence (offsets of a slice) are treated as rows that see no key; they
        must be finite.

    Source: "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for
    Generative Recommendations" (Zhai et al., 2024), section 3.

    Example:
        >>> import torch, jagged_cuda
        >>> layer = jagged_cuda.nn.HSTULayer(16, num_heads=2)
        >>> x, offsets = torch.randn(5, 16), torch.tensor([0, 2, 5])
        >>> layer(x, offsets).shape
        torch.Size([5, 16])
    """

    __prepare_scriptable__ = refuse_script

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        qk_dim: int | None = None,
        v_dim: int | None = None,
        divisor: float | Literal["length"] = "length",
        dropout: float = 0.0,
        eps: float = 1e-6,
        bias: bool = True,
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if num_heads < 1:
            fail_argument(name, "num_heads", "1 or more", num_heads)
        if embed_dim < 1 or ((qk_dim is None or v_dim is None) and embed_dim % num_heads != 0):
            fail_argument(name, "embed_dim", f"a multiple of num_heads {num_heads}", embed_dim)
        if not 0 <= dropout <= 1:
            fail_argument(name, "dropout", "from 0 to 1", dropout)
        check_divisor(name, divisor)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.qk_dim = embed_dim // num_heads if qk_dim is None else qk_dim
        self.v_dim = embed_dim // num_heads if v_dim is None else v_dim
        for argument, dim in (("qk_dim", self.qk_dim), ("v_dim", self.v_dim)):
            if not 1 <= dim <= 256:
                fail_argument(name, argument, "from 1 to 256", dim)
        self.divisor = divisor
        self.dropout = dropout
        self.recompute = recompute
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        self._sizes = [num_heads * dim for dim in (self.v_dim,) * 2 + (self.qk_dim,) * 2]
        self.input_norm = nn.LayerNorm(embed_dim, eps, **kind)
        self.uvqk_proj = nn.Linear(embed_dim, sum(self._sizes), bias=bias, **kind)
        self.output_norm = nn.LayerNorm(num_heads * self.v_dim, eps, **kind)
        self.out_proj = nn.Linear(num_heads * self.v_dim, embed_dim, bias=bias, **kind)

    def reset_parameters(self) -> None:
        """Draw weights as torch.nn.Linear and torch.nn.LayerNorm do."""
        for layer in (self.input_norm, self.uvqk_proj, self.output_norm, self.out_proj):
            layer.reset_parameters()

    def extra_repr(self) -> str:
        return (
            f"{self.embed_dim}, num_heads={self.num_heads}, qk_dim={self.qk_dim},"
            f" v_dim={self.v_dim}, divisor={self.divisor!r}, dropout={self.dropout},"
            f" recompute={self.recompute}"
        )

    def forward(
        self,
        x: Rows,
        offsets: Tensor | None = None,
        *,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
        key_ranges: Tensor | None = None,
        row_scale: Tensor | None = None,
        kv_bias: Tensor | None = None,
        time_bias: TimeBias | None = None,
        position_bias: PositionBias | None = None,
        max_len: int | None = None,
        seed: Tensor | None = None,
    ) -> Rows:
        """Transform the rows.

        Args:
            x: `[T, E]` with offsets, or a JaggedTensor, or a nested tensor `[B, j, E]`.
            offsets: `[B + 1]` int32 or int64, if x is a tensor.
            causal, window_size, key_ranges: which keys a row sees: see
                jagged_cuda.jagged_hstu_attention. With ranges of hstu_key_ranges pass
                ``causal=False``.
            row_scale: `[T]`, a factor for attention's result.
            kv_bias, time_bias, position_bias: added to scores: see
                jagged_cuda.jagged_hstu_attention. Their tables are parameters of your own, which
                layers may share.
            max_len: a hint, the length of the longest sequence.
            seed: `[1]` int64 on x's device, what dropout draws from in training. None draws one.

        Returns:
            `[T, E]`, of x's kind.

        Raises:
            RuntimeError: an argument does not fit; the message names it.
        """
        rows, offsets = take_apart(type(self).__name__, "x", x, offsets, self.embed_dim)
        part: Any = self._modules  # the attributes, without nn.Module's search for them
        p = self.dropout if self.training else 0.0
        if p > 0 and seed is None:
            seed = torch.randint(2**62, (1,), device=rows.device)
        options = given(
            {"causal": causal},
            ("window_size", None if window_size == (-1, -1) else window_size),
            ("key_ranges", key_ranges),
            ("row_scale", row_scale),
            ("kv_bias", kv_bias),
            ("time_bias", time_bias),
            ("position_bias", position_bias),
            ("max_len", max_len),
        )
        if self.recompute and torch.is_grad_enabled() and not torch.compiler.is_exporting():
            gated = checkpoint(
                self._gate,
                rows,
                offsets,
                options,
                p,
                seed,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=_keep_attention,
            )
        else:
            gated = self._gate(rows, offsets, options, p, seed)
        return put_together(x, rows + part["out_proj"](gated))

    def _gate(
        self, rows: Tensor, offsets: Tensor, options: dict[str, Any], p: float, seed: Tensor | None
    ) -> Tensor:
        """`[T, E]` -> what out_proj takes, `[T, H * v_dim]`."""
        part: Any = self._modules
        projected = F.silu(part["uvqk_proj"](part["input_norm"](rows)))
        # Functions of C++; split() and unflatten() are of Python, and cost the host more.
        u, v, q, k = projected.split_with_sizes(self._sizes, -1)
        num_rows, num_heads = rows.size(0), self.num_heads
        read = jagged_hstu_attention(
            q.view(num_rows, num_heads, self.qk_dim),
            k.view(num_rows, num_heads, self.qk_dim),
            v.view(num_rows, num_heads, self.v_dim),
            offsets,
            divisor=self.divisor,
            **options,
        )
        norm = part["output_norm"]
        dropout: dict[str, Any] = {} if p == 0 else {"p": p, "seed": seed}
        gated: Tensor = layer_norm_mul_dropout(
            read.flatten(1), u, norm.weight, norm.bias, eps=norm.eps, **dropout
        )
        return gated


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Attention is not computed twice."""
    if op is torch.ops.jagged_cuda.jagged_hstu_attention.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


_keep_attention = functools.partial(create_selective_checkpoint_contexts, _policy)
