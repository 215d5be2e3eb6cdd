"""Ranks that train examples/torchrec_model.py, for tests/test_torchrec.py.

They are processes of gloo on the CPU, or of nccl with a GPU each. `train` runs them and returns
their losses, by name: each sharding of the table, without and with TorchRec's pipeline.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.streamable import Pipelineable

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from torchrec_model import HistoryRanker, draw

# Of the table, among this many ranks.
SHARDINGS: dict[str, Callable[[int], Any]] = {
    "row_wise": lambda ranks: row_wise(),
    "table_wise": lambda ranks: table_wise(rank=ranks - 1),
    "column_wise": lambda ranks: column_wise(ranks=list(range(ranks))),
}
STEPS, NUM_USERS, NUM_ITEMS, CANDIDATES, LEARNING_RATE = 6, 5, 40, 3, 2.0


@dataclass
class Batch(Pipelineable):
    features: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(
            self.features.to(device, non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        self.features.record_stream(stream)


class Task(nn.Module):
    """The loss, as a pipeline wants it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ranker = HistoryRanker(NUM_ITEMS, dim=16)

    def forward(self, batch):
        logits = self.ranker(batch.features)
        return nn.functional.cross_entropy(logits, batch.labels), logits


def batches(rank: int, ranks: int) -> Iterator[Batch]:
    for step in range(STEPS):
        features = draw(NUM_USERS, NUM_ITEMS, CANDIDATES, seed=ranks * (step % 2) + rank)
        yield Batch(features, torch.zeros(NUM_USERS, dtype=torch.long))


def train_alone(ranks: int = 2, device_type: str = "cpu") -> list[float]:
    """The same steps in one process, without sharding, on the batches of all ranks."""
    device = torch.device(device_type)
    task = Task().to(device)
    optimizer = torch.optim.SGD(task.parameters(), LEARNING_RATE)
    losses = []
    for step in zip(*(batches(rank, ranks) for rank in range(ranks)), strict=True):
        loss = torch.stack([task(batch.to(device))[0] for batch in step]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _shard(
    task: Task, sharding: Callable[[int], Any], device: torch.device
) -> DistributedModelParallel:
    embeddings = task.ranker.embeddings
    apply_optimizer_in_backward(torch.optim.SGD, embeddings.parameters(), {"lr": LEARNING_RATE})
    sharder = EmbeddingCollectionSharder()
    ranks = distributed.get_world_size()
    plan = construct_module_sharding_plan(
        embeddings,
        {"item_table": sharding(ranks)},
        sharder=sharder,
        local_size=ranks,
        world_size=ranks,
        device_type=device.type,
    )
    return DistributedModelParallel(
        task.to(device),
        device=device,
        plan=ShardingPlan({"ranker.embeddings": plan}),
        sharders=[sharder],
    )


def _steps(
    device: torch.device, sharding: Callable[[int], Any], pipelined: bool
) -> Iterator[Tensor]:
    """The loss of each step on this rank."""
    model = _shard(Task(), sharding, device)
    # Those of the table have their own, in the backward.
    dense = [each for name, each in model.named_parameters() if "embeddings" not in name]
    optimizer = torch.optim.SGD(dense, LEARNING_RATE)
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    if not pipelined:
        for batch in batches(rank, ranks):
            loss, _ = model(batch.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.detach()
        return

    logits_of: list[Tensor] = []
    pipeline = TrainPipelineSparseDist(model, optimizer, device, execute_all_batches=True)
    given = batches(rank, ranks)
    for batch in batches(rank, ranks):
        logits_of.append(pipeline.progress(given))
        yield nn.functional.cross_entropy(logits_of[-1].detach(), batch.labels.to(device))
    # It runs ahead only for embeddings that it has found.
    names = [type(module).__name__ for module in pipeline._pipelined_modules]
    assert names == ["ShardedEmbeddingCollection"], names


def _run(rank: int, folder: str, ranks: int, device_type: str) -> None:
    torch.set_num_threads(1)
    on_gpu = device_type == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=ranks,
    )
    found = {}
    for name, sharding in SHARDINGS.items():
        for pipelined in (False, True):
            losses = torch.stack(list(_steps(device, sharding, pipelined)))
            distributed.all_reduce(losses)
            found[f"{name}{', pipelined' if pipelined else ''}"] = (losses / ranks).tolist()
    if rank == 0:
        (Path(folder) / "losses.json").write_text(json.dumps(found))
    distributed.destroy_process_group()
    # Threads of gloo's that are still ending when Python does would abort the process.
    os._exit(0)


def train(folder: Path, ranks: int = 2, device_type: str = "cpu") -> dict[str, list[float]]:
    """On some ranks, which meet in a folder."""
    torch.multiprocessing.spawn(_run, args=(str(folder), ranks, device_type), nprocs=ranks)
    return json.loads((folder / "losses.json").read_text())


if __name__ == "__main__":
    import tempfile

    print(train_alone())
    print(train(Path(tempfile.mkdtemp())))
