"""row_scale / divisor * silu(scale Q_b K_b^T) V_b for each sequence, where the mask allows it.

The kernels are those of jagged_flash_attention, with another score function.
"""

from typing import Literal

import torch

from .jagged_flash_attention import attention_of


def jagged_hstu_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor,
    *,
    divisor: float | Literal["length"],
    kv_offsets: torch.Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    key_ranges: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
    scale: float | None = None,
    max_len: int | None = None,
    kv_lengths: torch.Tensor | None = None,
    kv_bias: torch.Tensor | None = None,
    time_bias: tuple | None = None,
    position_bias: tuple | None = None,
) -> torch.Tensor:
    """row_scale / divisor * silu(scale Q_b K_b^T) V_b for each sequence b.

    Shapes, masks and biases are those of jagged_flash_attention; row_scale is [Tq]. "length"
    divides by the sequence's number of keys.
    """
    out, _ = attention_of(
        *("jagged_hstu_attention", q, k, v, offsets),
        kv_offsets=kv_offsets,
        causal=causal,
        window_size=window_size,
        scale=scale,
        key_ranges=key_ranges,
        kv_lengths=kv_lengths,
        kv_bias=kv_bias,
        time_bias=time_bias,
        position_bias=position_bias,
        row_scale=row_scale,
        divisor=0.0 if divisor == "length" else float(divisor),
    )
    return out
