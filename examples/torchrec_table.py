"""The items' embeddings in TorchRec, one table whose rows are spread over all processes.

Needs TorchRec (docs/torchrec.md). The table has an optimizer of its own, which works within
backward: Adagrad with one number per row, as is usual for large tables.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

FEATURE = "items"


class ItemTable(nn.Module):
    """nn.Embedding's call, on an EmbeddingCollection."""

    def __init__(self, num_items: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        config = EmbeddingConfig(
            name="item_table",
            num_embeddings=num_items + 1,
            embedding_dim=dim,
            feature_names=[FEATURE],
            init_fn=lambda weight: nn.init.normal_(weight, std=0.02),
        )
        self.collection = EmbeddingCollection(tables=[config])

    def forward(self, items: Tensor) -> Tensor:
        """`[...]` numbers of items -> `[..., dim]`."""
        lengths = torch.full((1,), items.numel(), dtype=items.dtype, device=items.device)
        features = KeyedJaggedTensor([FEATURE], items.flatten(), lengths=lengths)
        return self.collection(features)[FEATURE].values().view(*items.shape, self.dim)


def spread(
    module: nn.Module, table: ItemTable, device: torch.device, learning_rate: float
) -> DistributedModelParallel:
    """The module with the table's rows spread over all processes, and all else copied to each."""
    count = torch.distributed.get_world_size()
    apply_optimizer_in_backward(RowWiseAdagrad, table.parameters(), {"lr": learning_rate})
    sharder = EmbeddingCollectionSharder()
    plan = construct_module_sharding_plan(
        table.collection,
        {"item_table": row_wise()},
        sharder=sharder,
        local_size=count,
        world_size=count,
        device_type=device.type,
    )
    (path,) = (name for name, child in module.named_modules() if child is table.collection)
    return DistributedModelParallel(
        module, device=device, plan=ShardingPlan({path: plan}), sharders=[sharder]
    )


def own_rows(model: DistributedModelParallel) -> list[Tensor]:
    """This process's rows of the table, and of its optimizer's state, to be saved or written."""
    states = [model.state_dict(), model.fused_optimizer.state_dict()["state"]]
    return [shard.tensor for tensor in _sharded(states) for shard in tensor.local_shards()]


def _sharded(state: object) -> Iterator[ShardedTensor]:
    if isinstance(state, ShardedTensor):
        yield state
    elif isinstance(state, dict):
        for key in sorted(state):
            yield from _sharded(state[key])
    elif isinstance(state, list):
        for each in state:
            yield from _sharded(each)
