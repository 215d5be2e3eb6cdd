"""examples/torchrec_model.py with TorchRec itself: right, differentiable, traceable."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import jagged_cuda

pytestmark = pytest.mark.torchrec
ROOT = Path(__file__).resolve().parent.parent
NUM_USERS, NUM_ITEMS, CANDIDATES = 9, 50, 3


@pytest.fixture(scope="module")
def example() -> Any:
    sys.path.insert(0, str(ROOT / "examples"))
    import torchrec_model

    return torchrec_model


@pytest.fixture
def model(example: Any) -> Any:
    torch.manual_seed(0)
    return example.HistoryRanker(NUM_ITEMS, dim=16)


@pytest.fixture
def features(example: Any) -> Any:
    return example.draw(NUM_USERS, NUM_ITEMS, CANDIDATES, seed=2)


def one_by_one(model: Any, features: Any) -> Tensor:
    """The same with PyTorch's attention, one user at a time."""
    table = model.embeddings.embeddings["item_table"].weight
    parts = features.to_dict()
    histories = parts["history"].to_dense()
    candidates = parts["candidates"].to_dense()
    logits = []
    for history, items in zip(histories, candidates, strict=True):
        x, items = table[history], table[items]
        q, k, v = model.qkv(x).unflatten(1, (3, model.heads, -1)).permute(1, 2, 0, 3)
        attend = torch.nn.functional.scaled_dot_product_attention
        read = attend(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
        x = x + model.out(read)
        interest = attend(items[None], x[None], x[None])[0] if len(x) else torch.zeros_like(items)
        logits.append((items * interest).sum(1))
    return torch.stack(logits)


def test_agrees_with_a_user_at_a_time(model: Any, features: Any) -> None:
    parameters = list(model.parameters())
    found, expected = model(features), one_by_one(model, features)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(found)
    gradients = torch.autograd.grad((found * weight).sum(), parameters)
    expected_gradients = torch.autograd.grad((expected * weight).sum(), parameters)
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_its_tracer_takes_our_functions_as_nodes(model: Any, features: Any) -> None:
    """As a train pipeline traces, with the embeddings as a leaf; and as its inference compiles."""
    from torchrec.fx import Tracer

    graph = Tracer(leaf_modules=["EmbeddingCollection"]).trace(model)
    names = {getattr(node.target, "__name__", "") for node in graph.nodes}
    assert {"jagged_flash_attention", "jagged_target_attention"} <= names
    traced = torch.fx.GraphModule(model, graph)
    expected = model(features)
    assert torch.equal(traced(features), expected)
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(traced), file)
    file.seek(0)
    assert torch.equal(torch.jit.load(file)(features), expected)


def test_a_feature_by_its_part_of_all_offsets(features: Any) -> None:
    """As docs/torchrec.md says: offsets that do not begin at 0, within the rows of all features."""
    values, keys = features.values().float()[:, None], features.keys()
    for i, key in enumerate(keys):
        offsets = features.offsets()[i * NUM_USERS : (i + 1) * NUM_USERS + 1]
        found = jagged_cuda.jagged_sum(values, offsets)
        feature = features[key]
        expected = jagged_cuda.jagged_sum(feature.values().float()[:, None], feature.offsets())
        assert torch.equal(found, expected)


def test_training_lowers_the_loss(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    example.main()
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 4 and losses[-1] < losses[0]
