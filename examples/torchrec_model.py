"""A TorchRec model whose histories stay jagged: from KeyedJaggedTensor to logits without padding.

Embeddings of a history attend to each other, then the candidates of each user attend to the
history; a candidate's logit compares the two. Needs TorchRec (docs/torchrec.md)::

    python examples/torchrec_model.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from jagged_cuda.nn import JaggedMultiheadAttention, TargetAttention


class HistoryRanker(nn.Module):
    """Scores N candidates of each of B users by the users' histories.

    Args:
        num_items: rows of the embedding table that history and candidates share.
        dim: columns of the table; a multiple of heads.
        heads: of both attentions.
    """

    def __init__(self, num_items: int, dim: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name="item_table",
                    embedding_dim=dim,
                    num_embeddings=num_items,
                    feature_names=["history", "candidates"],
                )
            ]
        )
        self.within = JaggedMultiheadAttention(dim, heads)
        self.interest = TargetAttention(dim, heads)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """`[B, N]` logits of "candidates", N for each user, after "history", `[sum L]`."""
        embedded = self.embeddings(features)
        history, candidates = embedded["history"], embedded["candidates"]
        x, offsets = history.values(), history.offsets()
        x = x + self.within(x, offsets, causal=True)
        items = candidates.values().unflatten(0, (history.lengths().shape[0], -1))
        return (items * self.interest(items, x, offsets)).sum(2)


def draw(num_users: int, num_items: int, candidates: int, seed: int) -> KeyedJaggedTensor:
    """Random histories of 0 to 40 items, and candidates."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 41, (num_users,), generator=generator)
    total = int(lengths.sum()) + num_users * candidates
    return KeyedJaggedTensor(
        keys=["history", "candidates"],
        values=torch.randint(num_items, (total,), generator=generator),
        lengths=torch.cat([lengths, torch.full((num_users,), candidates)]),
    )


def main() -> None:
    torch.manual_seed(0)
    num_users, num_items, candidates = 64, 1000, 4
    model = HistoryRanker(num_items)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    features = draw(num_users, num_items, candidates, seed=1)
    # The first candidate is the one that the user took.
    labels = torch.zeros(num_users, dtype=torch.long)
    for step in range(20):
        loss = nn.functional.cross_entropy(model(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 4:
            print(f"step {step + 1:3d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
