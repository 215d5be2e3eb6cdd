"""Attention's operands, drawn from a seed, and the bytes and operations that they need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import shapes
from jagged_cuda.testing.lengths import Layout


@dataclass(frozen=True)
class Operands:
    """Operands of self-attention, or of target attention: N dense queries per sequence.

    Args:
        q, grad_out: `[T, H, D]`; of target attention `[B, N, H, D]`.
        k, v: `[T, H, D]`.
        offsets: `[B + 1]` int64.
    """

    layout: Layout
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    offsets: Tensor
    scale: float
    causal: bool = False

    @classmethod
    def draw(
        cls,
        layout: Layout,
        heads: int,
        dim: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        causal: bool = False,
        queries: int | None = None,
    ) -> Operands:
        """queries: N of target attention; None is self-attention."""
        torch.manual_seed(shapes.SEED)
        jagged = (layout.total, heads, dim)
        of_q = jagged if queries is None else (layout.num_seqs, queries, heads, dim)
        q, k, v, grad_out = (
            torch.randn(size, device=device).to(dtype) for size in (of_q, jagged, jagged, of_q)
        )
        return cls(layout, q, k, v, grad_out, layout.offsets(device), dim**-0.5, causal)

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def queries(self) -> int | None:
        """N of target attention."""
        return self.q.shape[1] if self.q.dim() == 4 else None

    @property
    def max_queries(self) -> int:
        return self.queries or self.layout.max_len

    @property
    def query_offsets(self) -> Tensor:
        """`[B + 1]`: where each sequence begins among the rows of q."""
        if self.queries is None:
            return self.offsets
        return self.queries * torch.arange(self.layout.num_seqs + 1, device=self.q.device)

    def parts(self, seq: int) -> Iterator[tuple[str, Any, Any]]:
        """Name, index into q and index into k of some heads of a sequence."""
        begins = self.layout.offsets()
        rows = slice(int(begins[seq]), int(begins[seq + 1]))
        name = f"sequence {seq} ({self.layout.lengths[seq]} rows)"
        if self.queries is not None:
            yield name, (slice(seq, seq + 1), slice(None), 0), (rows, 0)
            return
        for head in sorted({0, self.k.shape[1] - 1}):
            yield f"{name}, head {head}", (rows, head), (rows, head)

    # --- what is counted

    @property
    def lse_bytes(self) -> int:
        return 4 * self.q.numel() // self.q.shape[-1]

    @property
    def forward_bytes(self) -> int:
        """q, k, v, out, LSE."""
        elems = 2 * self.q.numel() + 2 * self.k.numel()
        return elems * self.q.element_size() + self.lse_bytes

    @property
    def backward_bytes(self) -> int:
        """q, k, v, out, LSE, grad_out; dq, dk, dv."""
        elems = 4 * self.q.numel() + 4 * self.k.numel()
        return elems * self.q.element_size() + self.lse_bytes

    @property
    def flops(self) -> float:
        """Useful operations: forward 4 sum(Lq Lk) H D, half if causal; backward 2.5 times that."""
        _, heads, dim = self.k.shape
        full = 4.0 * sum((self.queries or n) * n for n in self.layout.lengths) * heads * dim
        return full / 2 if self.causal else full

    def counts(self, pass_name: str) -> tuple[tuple[int, ...], float]:
        """Bytes of each kernel that a pass must launch, and its useful operations."""
        if pass_name == "forward":
            return (self.forward_bytes,), self.flops
        if pass_name == "backward":
            return (self.backward_bytes,), 2.5 * self.flops
        return (self.forward_bytes, self.backward_bytes), 3.5 * self.flops

    def shape(self) -> dict[str, int | bool]:
        found: dict[str, int | bool] = {
            "B": self.layout.num_seqs,
            "T": self.layout.total,
            "max_len": self.layout.max_len,
            "H": self.k.shape[1],
            "D": self.k.shape[2],
            "causal": self.causal,
        }
        return found if self.queries is None else found | {"N": self.queries}
