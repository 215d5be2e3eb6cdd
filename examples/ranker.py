"""The demo's model: causal self-attention over a history ranks the next item among candidates.

Every layer but attention treats rows alone, so the same code takes rows [T] (jagged) and [B, M]
(padded). Attention comes in two forms that compute the same.

Source: Kang and McAuley, "Self-Attentive Sequential Recommendation", 2018 (the model, with sampled
candidates).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from histories import IGNORED_LABEL, PADDING_ITEM, Batch
from torch import Tensor, nn

from jagged_cuda import jagged_flash_attention

# (q, k, v, batch) -> out, each of the rows' shape with [H, D] behind
Attention = Callable[[Tensor, Tensor, Tensor, Batch], Tensor]


def padded_attention(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    """Causal attention on [B, M, H, D], padded behind each history.

    No row sees the padding, which comes after it: PyTorch needs no mask beside the causal one, and
    takes its fastest kernel.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def jagged_attention(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    """Causal attention on [T, H, D]."""
    assert batch.offsets is not None, "the batch is padded"
    return jagged_flash_attention(q, k, v, batch.offsets, causal=True)


class Block(nn.Module):
    """Self-attention, then a feed-forward layer, each normalised before and added to its input."""

    def __init__(self, dim: int, num_heads: int, attention: Attention) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention = attention
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.projection = nn.Linear(dim, dim)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.unbind(-3)  # slices of one product, which both attentions read in place
        x = x + self.projection(self.attention(q, k, v, batch).flatten(-2))
        return x + self.feed_forward(x)


class Ranker(nn.Module):
    """Rank the next item of each row of a history among candidates."""

    def __init__(
        self,
        *,
        num_items: int,
        max_positions: int,
        dim: int,
        num_heads: int,
        num_blocks: int,
        attention: Attention,
    ) -> None:
        super().__init__()
        self.item_embedding = nn.Embedding(num_items + 1, dim, padding_idx=PADDING_ITEM)
        self.position_embedding = nn.Embedding(max_positions, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads, attention) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)
        for embedding in (self.item_embedding, self.position_embedding):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, batch: Batch) -> Tensor:
        """Score the target (column 0) and the negatives for each row: [..., 1 + N]."""
        x = self.item_embedding(batch.items) + self.position_embedding(batch.positions)
        for block in self.blocks:
            x = block(x, batch)
        state = self.norm(x)
        target = (state * self.item_embedding(batch.targets)).sum(-1, keepdim=True)
        negatives = state @ self.item_embedding(batch.negatives).T
        # A negative that happens to be the target is no candidate.
        is_target = batch.targets.unsqueeze(-1) == batch.negatives
        return torch.cat([target, negatives.masked_fill(is_target, -torch.inf)], dim=-1)

    def loss(self, batch: Batch) -> Tensor:
        """Mean over the real rows of -log softmax(scores)[target]."""
        scores = self(batch).flatten(0, -2)
        return F.cross_entropy(scores, batch.labels.flatten(), ignore_index=IGNORED_LABEL)
