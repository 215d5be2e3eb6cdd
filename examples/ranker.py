"""The demo's model: self-attention over a history, then candidates attend to it and are ranked.

Every layer but attention treats rows alone, so the same code takes rows [T] (jagged) and [B, M]
(padded). Attention comes in two forms that compute the same.

Sources: Kang and McAuley, "Self-Attentive Sequential Recommendation", 2018 (the blocks, with
sampled candidates); Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", 2018
(attention of candidates to a history).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from histories import IGNORED_LABEL, PADDING_ITEM, Batch
from torch import Tensor, nn

from jagged_cuda import jagged_flash_attention, jagged_target_attention

AttentionFunction = Callable[[Tensor, Tensor, Tensor, Batch], Tensor]


class Attention(NamedTuple):
    """The model's two attentions in one form, padded or jagged.

    Args:
        causal: (q, k, v, batch) -> out, each of the rows' shape with [H, D] behind.
        target: (q, k, v, batch) -> out, q and out [B, N, H, D].
    """

    causal: AttentionFunction
    target: AttentionFunction

    def make_block(self, dim: int, num_heads: int) -> nn.Module:
        return Block(dim, num_heads, self.causal)

    def make_target(self, dim: int, num_heads: int) -> nn.Module:
        return TargetAttention(dim, num_heads, self.target)


class Layers(NamedTuple):
    """Other layers in the place of those around the two attentions.

    Args:
        make_block: (dim, num_heads) -> a module that is called as Block is.
        make_target: (dim, num_heads) -> a module that is called as TargetAttention is.
    """

    make_block: Callable[[int, int], nn.Module]
    make_target: Callable[[int, int], nn.Module]


def causal_on_padded(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    """Causal attention on [B, M, H, D], padded behind each history.

    No row sees the padding, which comes after it: PyTorch needs no mask beside the causal one, and
    takes its fastest kernel.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def target_on_padded(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    """Attention of q [B, N, H, D] to k and v [B, M, H, D] under a mask of the padding."""
    is_event = (batch.labels != IGNORED_LABEL)[:, None, None, :]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=is_event).transpose(1, 2)


def causal_on_jagged(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    """Causal attention on [T, H, D]."""
    assert batch.offsets is not None, "the batch is padded"
    return jagged_flash_attention(q, k, v, batch.offsets, causal=True)


def target_on_jagged(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    """Attention of q [B, N, H, D] to k and v [T, H, D]."""
    assert batch.offsets is not None, "the batch is padded"
    return jagged_target_attention(q, k, v, batch.offsets)


padded_attention = Attention(causal_on_padded, target_on_padded)
jagged_attention = Attention(causal_on_jagged, target_on_jagged)


def of_last_events(rows: Tensor, batch: Batch) -> Tensor:
    """The rows of each history's last event: [B, ...] of [T, ...] or [B, M, ...]."""
    if batch.offsets is not None:
        return rows[batch.offsets[1:] - 1]
    last = (batch.labels != IGNORED_LABEL).sum(1) - 1
    return rows[torch.arange(len(rows), device=rows.device), last]


class Block(nn.Module):
    """Self-attention, then a feed-forward layer, each normalised before and added to its input."""

    def __init__(self, dim: int, num_heads: int, attention: AttentionFunction) -> None:
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


class TargetAttention(nn.Module):
    """What each candidate finds in a history: its query against the history's states."""

    def __init__(self, dim: int, num_heads: int, attention: AttentionFunction) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention = attention
        self.query = nn.Linear(dim, dim, bias=False)
        self.key_value = nn.Linear(dim, 2 * dim, bias=False)
        self.projection = nn.Linear(dim, dim)

    def forward(self, candidates: Tensor, states: Tensor, batch: Batch) -> Tensor:
        """Candidates [B, N, dim] and the states of all events -> [B, N, dim]."""
        q = self.query(candidates).unflatten(-1, (self.num_heads, -1))
        k, v = self.key_value(states).unflatten(-1, (2, self.num_heads, -1)).unbind(-3)
        return self.projection(self.attention(q, k, v, batch).flatten(-2))


class Ranker(nn.Module):
    """Rank the next item of each event, and the next item of each history, among candidates."""

    def __init__(
        self,
        *,
        num_items: int,
        max_positions: int,
        dim: int,
        num_heads: int,
        num_blocks: int,
        attention: Attention | Layers,
    ) -> None:
        super().__init__()
        self.item_embedding = nn.Embedding(num_items + 1, dim, padding_idx=PADDING_ITEM)
        self.position_embedding = nn.Embedding(max_positions, dim)
        self.blocks = nn.ModuleList(attention.make_block(dim, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)
        self.target_attention = attention.make_target(dim, num_heads)
        for embedding in (self.item_embedding, self.position_embedding):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Score the target (column 0) and the negatives.

        Returns:
            Of each event, by its state: [..., 1 + N]. Of each history, by its last state and by
            what each candidate finds in all of its states: [B, 1 + N].
        """
        states = self.encode(batch)
        negatives = self.item_embedding(batch.negatives)  # [N, dim]
        target = (states * self.item_embedding(batch.targets)).sum(-1, keepdim=True)
        by_event = torch.cat([target, states @ negatives.T], dim=-1)
        return (
            _without_targets(by_event, batch.targets, batch),
            self.score_histories(states, negatives, batch),
        )

    def encode(self, batch: Batch) -> Tensor:
        """The state of each event: [..., dim]."""
        x = self.item_embedding(batch.items) + self.position_embedding(batch.positions)
        for block in self.blocks:
            x = block(x, batch)
        return self.norm(x)

    def score_histories(self, states: Tensor, negatives: Tensor, batch: Batch) -> Tensor:
        """Scores of what follows each history, and of the negatives [N, dim]: [B, 1 + N]."""
        targets = of_last_events(batch.targets, batch)  # [B]
        candidates = torch.cat(
            [
                self.item_embedding(targets).unsqueeze(1),
                negatives.expand(len(targets), *negatives.shape),
            ],
            dim=1,
        )
        last_state = of_last_events(states, batch).unsqueeze(1)
        found = last_state + self.target_attention(candidates, states, batch)
        return _without_targets((candidates * found).sum(-1), targets, batch)

    def loss(self, batch: Batch, reduction: str = "mean") -> Tensor:
        """Mean of -log softmax(scores)[target] over all events and histories together, or the sum.

        There are few histories and many events: in a mean of their own their noise would dominate.
        """
        by_event, by_history = self(batch)
        scores = torch.cat([by_event.flatten(0, -2), by_history])
        labels = torch.cat([batch.labels.flatten(), batch.labels.new_zeros(len(by_history))])
        return F.cross_entropy(scores, labels, ignore_index=IGNORED_LABEL, reduction=reduction)


def _without_targets(scores: Tensor, targets: Tensor, batch: Batch) -> Tensor:
    """A negative that happens to be the target is no candidate."""
    is_target = targets.unsqueeze(-1) == batch.negatives
    return scores.masked_fill(F.pad(is_target, (1, 0)), -torch.inf)
