"""A padded TorchRec model, which docs/torchrec.md makes jagged by three lines."""

import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor


class TargetRanker(nn.Module):
    """Scores N candidates of each of B users by attention to the users' histories.

    Args:
        num_items: rows of the embedding table that history and candidates share.
        max_len: histories are padded to this length.
        dim: columns of the table; a multiple of heads.
        heads: of the attention.
    """

    def __init__(self, num_items: int, max_len: int, dim: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.max_len = max_len
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
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """`[B, N]` logits of "candidates", N for each user, after "history", `[sum L]`."""
        embedded = self.embeddings(features)
        lengths = embedded["history"].lengths()
        items = embedded["candidates"].values().unflatten(0, (lengths.shape[0], -1))
        history = embedded["history"].to_padded_dense(self.max_len)
        absent = torch.arange(self.max_len, device=lengths.device) >= lengths[:, None]
        interest, _ = self.attention(items, history, history, key_padding_mask=absent)
        return (items * interest).sum(2)
