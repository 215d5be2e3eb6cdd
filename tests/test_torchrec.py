"""With TorchRec itself: examples/torchrec_model.py, jagged_cuda.torchrec, jagged_cuda.nn."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import sentence
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import jagged_cuda
from jagged_cuda.nn import (
    DINAttention,
    JaggedFeatureInteraction,
    JaggedMultiheadAttention,
    JaggedTransformerLayer,
    TargetAttention,
)
from jagged_cuda.torchrec import pack, unpack, unpack_features, with_values

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


def test_its_tracer_takes_our_functions_as_nodes(model: Any, features: Any) -> None:
    """As a train pipeline traces: the embeddings are a leaf."""
    from torchrec.fx import Tracer

    graph = Tracer(leaf_modules=["EmbeddingCollection"]).trace(model)
    names = {getattr(node.target, "__name__", "") for node in graph.nodes}
    assert {"jagged_flash_attention", "jagged_target_attention"} <= names
    traced = torch.fx.GraphModule(model, graph)
    assert torch.equal(traced(features), model(features))


def test_a_feature_by_its_part_of_all_offsets(features: Any) -> None:
    """As docs/torchrec.md says: offsets that do not begin at 0, within the rows of all features."""
    values, keys = features.values().float()[:, None], features.keys()
    for i, key in enumerate(keys):
        offsets = features.offsets()[i * NUM_USERS : (i + 1) * NUM_USERS + 1]
        found = jagged_cuda.jagged_sum(values, offsets)
        feature = features[key]
        expected = jagged_cuda.jagged_sum(feature.values().float()[:, None], feature.offsets())
        assert torch.equal(found, expected)


# --- jagged_cuda.torchrec

X, OFFSETS = torch.randn(7, 16), torch.tensor([0, 2, 2, 7])


def jagged_tensor(*, offsets: bool = True, dtype: torch.dtype = torch.int64) -> Any:
    from torchrec import JaggedTensor

    if offsets:
        return JaggedTensor(X, offsets=OFFSETS.to(dtype), weights=torch.rand(7))
    return JaggedTensor(X, lengths=OFFSETS.diff().to(dtype))


def keyed(values: Tensor, *, variable: bool = False) -> Any:
    """Features of 3 and 3 sequences, or of 1 and 5."""
    from torchrec import KeyedJaggedTensor

    return KeyedJaggedTensor(
        keys=["a", "b"],
        values=values,
        lengths=torch.tensor([1, 2, 3, 0, 3, 1]),
        stride_per_key_per_rank=[[1], [5]] if variable else None,
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("offsets", [False, True], ids=["lengths", "offsets"])
def test_jagged_tensors_lend_what_they_hold(offsets: bool, dtype: torch.dtype) -> None:
    jt = jagged_tensor(offsets=offsets, dtype=dtype)
    values, found = unpack(jt)
    assert values is jt.values() and found is jt.offsets() and found.dtype == dtype
    out = torch.randn(7, 3)
    back = with_values(jt, out)
    assert type(back) is type(jt)
    assert back.values() is out and back.offsets() is found
    assert back.lengths_or_none() is jt.lengths_or_none()
    assert back.weights_or_none() is jt.weights_or_none()


def test_jagged_tensors_of_parts() -> None:
    weights = torch.rand(7)
    jt = pack(X, OFFSETS, weights=weights)
    assert jt.values() is X and jt.offsets() is OFFSETS and jt.weights() is weights
    assert jt.lengths().tolist() == [2, 0, 5]
    assert [len(part) for part in jt.to_dense()] == [2, 0, 5]


@pytest.mark.parametrize("variable", [False, True], ids=["stride", "stride of each key"])
def test_features_are_slices_of_all_offsets(variable: bool) -> None:
    values = torch.randn(10, 4)
    kjt = keyed(values, variable=variable)
    found = unpack_features(kjt)
    assert list(found) == ["a", "b"] and list(unpack_features(kjt, ["b"])) == ["b"]
    for key, (rows, offsets) in found.items():
        assert rows is values
        assert offsets.untyped_storage().data_ptr() == kjt.offsets().untyped_storage().data_ptr()
        sums = jagged_cuda.jagged_sum(rows, offsets)
        jt = kjt[key]
        torch.testing.assert_close(sums, jagged_cuda.jagged_sum(jt.values(), jt.offsets()))
    out = torch.randn(10, 3)
    back = with_values(kjt, out)
    assert type(back) is type(kjt) and back.keys() == kjt.keys()
    assert back.values() is out and back.lengths() is kjt.lengths()
    assert back.stride_per_key() == kjt.stride_per_key()
    assert torch.equal(back["b"].values(), out[unpack_features(kjt)["b"][1][0] :])


def test_nothing_is_read() -> None:
    """Fake tensors have no values to wait for; to take one feature TorchRec reads them."""
    with FakeTensorMode():
        kjt = keyed(torch.randn(10, 4))
        found = unpack_features(kjt)
        assert [offsets.shape[0] for _, offsets in found.values()] == [4, 4]
        with_values(kjt, torch.randn(10, 2))
        jt = pack(*found["b"])
        assert with_values(jt, unpack(jt)[0]).values().shape == (10, 4)
        with pytest.raises(RuntimeError):
            keyed(torch.randn(10, 4))["b"]


def test_wrong_calls() -> None:
    kjt = keyed(torch.randn(10, 16))
    feature = "got a KeyedJaggedTensor: take one feature of it, with unpack_features(...)[key]"
    assert sentence(unpack, kjt) == f"torchrec.unpack: jt must be a JaggedTensor, {feature}"
    assert sentence(JaggedMultiheadAttention(16, 2), kjt) == (
        "JaggedMultiheadAttention: x must be a tensor, a JaggedTensor or a nested tensor,"
        f" {feature}"
    )
    assert sentence(unpack_features, X) == (
        "torchrec.unpack_features: kjt must be a KeyedJaggedTensor, got a tensor"
    )
    assert sentence(unpack_features, kjt, ["c"]) == (
        "torchrec.unpack_features: keys must be among ['a', 'b'], got 'c'"
    )
    assert sentence(with_values, X, X) == (
        "torchrec.with_values: jt must be a JaggedTensor or a KeyedJaggedTensor, got a tensor"
    )
    assert sentence(with_values, jagged_tensor(), X[1:]) == (
        "torchrec.with_values: values must be [7, ...], got [6, 16]"
    )


# --- jagged_cuda.nn on TorchRec's tensors


@pytest.mark.parametrize("offsets", [False, True], ids=["lengths", "offsets"])
def test_modules_take_and_give_jagged_tensors(offsets: bool) -> None:
    torch.manual_seed(0)
    layer, cross = JaggedTransformerLayer(16, 2), JaggedMultiheadAttention(16, 2)
    jt, targets = jagged_tensor(offsets=offsets), torch.randn(3, 4, 16)
    out = layer(jt, causal=True)
    assert type(out) is type(jt) and torch.equal(out.offsets(), OFFSETS)
    assert torch.equal(out.values(), layer(X, OFFSETS, causal=True))
    read = cross(out, kv=jt)
    assert torch.equal(read.values(), cross(out.values(), OFFSETS, kv=X))
    for reader in (TargetAttention(16, 2), DINAttention(16), JaggedFeatureInteraction(16)):
        assert torch.equal(reader(targets, jt), reader(targets, X, OFFSETS))


def test_modules_compile_for_jagged_tensors() -> None:
    torch._dynamo.reset()
    attention = JaggedMultiheadAttention(16, 2)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    jt = jagged_tensor()
    out = compiled(jt, causal=True)
    assert type(out) is type(jt)
    torch.testing.assert_close(out.values(), attention(X, OFFSETS, causal=True))


class Ranker(torch.nn.Module):
    """Without annotations: torch.fx does not store those that are strings."""

    def __init__(self):
        from torchrec import EmbeddingCollection, EmbeddingConfig

        super().__init__()
        table = EmbeddingConfig(
            name="item_table",
            num_embeddings=50,
            embedding_dim=16,
            feature_names=["history", "candidates"],
        )
        self.embeddings = EmbeddingCollection([table])
        self.layer = JaggedTransformerLayer(16, 2)
        self.cross = JaggedMultiheadAttention(16, 2)
        self.rank = torch.nn.Linear(16, 1)

    def forward(self, features):
        embedded = self.embeddings(features)
        history = self.layer(embedded["history"], causal=True)
        found = self.cross(embedded["candidates"], kv=history)
        return self.rank(found.values())


def test_its_tracer_takes_modules(features: Any) -> None:
    """The tensors that embeddings return go from module to module."""
    from torchrec.fx import Tracer

    model = Ranker()
    graph = Tracer(leaf_modules=["EmbeddingCollection"]).trace(model)
    traced = torch.fx.GraphModule(model, graph)
    assert torch.equal(traced(features), model(features))


def test_training_lowers_the_loss(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    example.main()
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 4 and losses[-1] < losses[0]
