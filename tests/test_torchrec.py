"""With TorchRec itself: examples/torchrec_model.py, also on two ranks; the adapters and modules."""

from __future__ import annotations

import re
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
from jagged_cuda.torchrec import features_to_jagged, from_jagged, to_jagged, with_values

pytestmark = pytest.mark.torchrec
ON_GPU = [pytest.mark.cuda, pytest.mark.fbgemm_cuda]
ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "torchrec.md"
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


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_GPU)])
def device(request: pytest.FixtureRequest) -> str:
    """Each device for which FBGEMM has kernels."""
    return request.param


def attend(module: Any, queries: Tensor, rows: Tensor, causal: bool = False) -> Tensor:
    """PyTorch's module with the parameters of one of ours."""
    plain = torch.nn.MultiheadAttention(module.embed_dim, module.num_heads)
    later = None
    if causal:
        later = torch.ones(len(queries), len(rows), dtype=torch.bool, device=rows.device).triu(1)
    parameters = dict(module.named_parameters())
    arguments = (queries, rows, rows)
    options = {"attn_mask": later, "need_weights": False}
    return torch.func.functional_call(plain, parameters, arguments, options)[0]


def one_by_one(model: Any, features: Any) -> Tensor:
    """The same with PyTorch's attention, one user at a time."""
    table = model.embeddings.embeddings["item_table"].weight
    parts = features.to_dict()
    logits = []
    for history, items in zip(
        parts["history"].to_dense(), parts["candidates"].to_dense(), strict=True
    ):
        x, items = table[history], table[items]
        interest = model.interest.out_proj.bias.expand_as(items)
        if len(x) > 0:
            x = x + attend(model.within, x, x, causal=True)
            interest = attend(model.interest, items, x)
        logits.append((items * interest).sum(1))
    return torch.stack(logits)


def test_agrees_with_a_user_at_a_time(model: Any, features: Any, device: str) -> None:
    model, features = model.to(device), features.to(device)
    parameters = list(model.parameters())
    found, expected = model(features), one_by_one(model, features)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(found)
    gradients = torch.autograd.grad((found * weight).sum(), parameters)
    expected_gradients = torch.autograd.grad((expected * weight).sum(), parameters)
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)


def test_its_tracer_takes_our_functions_as_nodes(model: Any, features: Any) -> None:
    """As a train pipeline traces, with the embeddings as a leaf."""
    from torchrec.fx import Tracer

    graph = Tracer(leaf_modules=["EmbeddingCollection"]).trace(model)
    names = {getattr(node.target, "__name__", "") for node in graph.nodes}
    assert {"jagged_flash_attention", "jagged_target_attention"} <= names
    traced = torch.fx.GraphModule(model, graph)
    assert torch.equal(traced(features), model(features))


def test_it_is_compiled_without_a_graph_break(example: Any, model: Any) -> None:
    """With other numbers of rows, which only the features' lengths say; forward and backward."""
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for seed in range(3):
        features = example.draw(NUM_USERS, NUM_ITEMS, CANDIDATES, seed)
        found, expected = compiled(features), model(features)
        torch.testing.assert_close(found, expected)
        weight = torch.randn_like(found)
        parameters = list(model.parameters())
        torch.testing.assert_close(
            torch.autograd.grad((found * weight).sum(), parameters),
            torch.autograd.grad((expected * weight).sum(), parameters),
        )


def test_it_is_exported_for_any_number_of_rows(example: Any, model: Any, features: Any) -> None:
    leaves, _ = torch.utils._pytree.tree_flatten(features)
    dims: list[Any] = [None] * len(leaves)
    dims[0] = {0: torch.export.Dim.DYNAMIC}  # rows of values
    exported = torch.export.export(model, (features,), dynamic_shapes=(dims,), strict=True)
    for seed in range(3):
        others = example.draw(NUM_USERS, NUM_ITEMS, CANDIDATES, seed)
        torch.testing.assert_close(exported.module()(others), model(others))


RANKS = {
    "two on the CPU": pytest.param(2, "cpu"),
    "one GPU": pytest.param(1, "cuda", marks=ON_GPU),
    "two GPUs": pytest.param(2, "cuda", marks=[*ON_GPU, pytest.mark.multi_gpu]),
}


@pytest.mark.parametrize(("ranks", "device_type"), RANKS.values(), ids=RANKS)
def test_ranks_train_as_one(tmp_path: Path, ranks: int, device_type: str) -> None:
    """With each sharding of the table, and with TorchRec's pipeline."""
    import torchrec_ranks

    alone = torchrec_ranks.train_alone(ranks, device_type)
    assert alone[-1] < alone[0] - 0.05  # what is compared changes
    found = torchrec_ranks.train(tmp_path, ranks, device_type)
    assert len(found) == 2 * len(torchrec_ranks.SHARDINGS)
    for name, losses in found.items():
        assert losses == pytest.approx(alone, rel=0, abs=1e-6), name


def patched(text: str, diff: str) -> str:
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def test_the_documented_diff_makes_a_padded_model_jagged() -> None:
    """Its checkpoint loads; logits and gradients are the same."""
    diff = re.search(r"^```diff\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    assert diff and diff[1].count("\n+") == 3
    text = (ROOT / "examples/torchrec_padded_model.py").read_text()
    padded, jagged = {}, {}
    exec(text, padded)
    exec(patched(text, diff[1]), jagged)
    torch.manual_seed(0)
    before, after = (names["TargetRanker"](NUM_ITEMS, 40, dim=16) for names in (padded, jagged))
    after.load_state_dict(before.state_dict())

    lengths = torch.randint(1, 41, (NUM_USERS,))
    features = padded["KeyedJaggedTensor"](
        keys=["history", "candidates"],
        values=torch.randint(NUM_ITEMS, (int(lengths.sum()) + NUM_USERS * CANDIDATES,)),
        lengths=torch.cat([lengths, torch.full((NUM_USERS,), CANDIDATES)]),
    )
    expected, found = before(features), after(features)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(found)
    (expected * weight).sum().backward()
    (found * weight).sum().backward()
    expected_of = dict(before.named_parameters())
    for name, parameter in after.named_parameters():
        wanted = expected_of[name].grad
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-5)


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
    """Features of 2 sequences each, or of 1, 3 and 2."""
    from torchrec import KeyedJaggedTensor

    return KeyedJaggedTensor(
        keys=["a", "b", "c"],
        values=values,
        lengths=torch.tensor([1, 2, 3, 0, 3, 1]),
        stride_per_key_per_rank=[[1], [3], [2]] if variable else None,
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("offsets", [False, True], ids=["lengths", "offsets"])
def test_jagged_tensors_lend_what_they_hold(offsets: bool, dtype: torch.dtype) -> None:
    jt = jagged_tensor(offsets=offsets, dtype=dtype)
    values, found = to_jagged(jt)
    assert values is jt.values() and found is jt.offsets() and found.dtype == dtype
    out = torch.randn(7, 3)
    back = with_values(jt, out)
    assert type(back) is type(jt)
    assert back.values() is out and back.offsets() is found
    assert back.lengths_or_none() is jt.lengths_or_none()
    assert back.weights_or_none() is jt.weights_or_none()


def test_jagged_tensors_of_parts() -> None:
    weights = torch.rand(7)
    jt = from_jagged(X, OFFSETS, weights=weights)
    assert jt.values() is X and jt.offsets() is OFFSETS and jt.weights() is weights
    assert jt.lengths().tolist() == [2, 0, 5]
    assert [len(part) for part in jt.to_dense()] == [2, 0, 5]


@pytest.mark.parametrize("variable", [False, True], ids=["stride", "stride of each key"])
def test_features_are_slices_of_all_offsets(variable: bool) -> None:
    values = torch.randn(10, 4)
    kjt = keyed(values, variable=variable)
    found = features_to_jagged(kjt)
    assert list(found) == ["a", "b", "c"] and list(features_to_jagged(kjt, ["c"])) == ["c"]
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
    assert torch.equal(back["c"].values(), out[features_to_jagged(kjt)["c"][1][0] :])


def test_nothing_is_read() -> None:
    """Fake tensors have no values to wait for; to take one feature TorchRec reads them."""
    with FakeTensorMode():
        kjt = keyed(torch.randn(10, 4))
        found = features_to_jagged(kjt)
        assert [offsets.shape[0] for _, offsets in found.values()] == [3, 3, 3]
        with_values(kjt, torch.randn(10, 2))
        jt = from_jagged(*found["b"])
        assert with_values(jt, to_jagged(jt)[0]).values().shape == (10, 4)
        with pytest.raises(RuntimeError):
            keyed(torch.randn(10, 4))["b"]


@pytest.mark.cuda
@pytest.mark.fbgemm_cuda
def test_nothing_waits_for_the_gpu() -> None:
    kjt = keyed(torch.randn(10, 4)).to("cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        parts = features_to_jagged(kjt)
        sums = {key: jagged_cuda.jagged_sum(*part) for key, part in parts.items()}
        jt = with_values(from_jagged(*parts["b"]), parts["b"][0] * 2)
        twice = jagged_cuda.jagged_sum(*to_jagged(jt))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(twice, 2 * sums["b"])
    for key, found in sums.items():
        expected = torch.stack([part.sum(0) for part in kjt[key].to_dense()])
        torch.testing.assert_close(found, expected)


def test_wrong_calls() -> None:
    kjt = keyed(torch.randn(10, 16))
    feature = "got a KeyedJaggedTensor: take one feature of it, with features_to_jagged(...)[key]"
    assert sentence(to_jagged, kjt) == f"torchrec.to_jagged: jt must be a JaggedTensor, {feature}"
    assert sentence(JaggedMultiheadAttention(16, 2), kjt) == (
        "JaggedMultiheadAttention: x must be a tensor, a JaggedTensor or a nested tensor,"
        f" {feature}"
    )
    assert sentence(features_to_jagged, X) == (
        "torchrec.features_to_jagged: kjt must be a KeyedJaggedTensor, got a tensor"
    )
    assert sentence(features_to_jagged, kjt, ["d"]) == (
        "torchrec.features_to_jagged: keys must be among ['a', 'b', 'c'], got 'd'"
    )
    assert sentence(with_values, X, X) == (
        "torchrec.with_values: jt must be a JaggedTensor or a KeyedJaggedTensor, got a tensor"
    )
    assert sentence(with_values, jagged_tensor(), [1.0]) == (
        "torchrec.with_values: values must be a tensor, got a list"
    )
    assert sentence(with_values, jagged_tensor(), X[1:]) == (
        "torchrec.with_values: values must be [7, ...], got [6, 16]"
    )


# --- jagged_cuda.nn on TorchRec's tensors


@pytest.mark.parametrize("offsets", [False, True], ids=["lengths", "offsets"])
def test_modules_take_and_give_jagged_tensors(offsets: bool, device: str) -> None:
    torch.manual_seed(0)
    with torch.device(device):
        layer, cross = JaggedTransformerLayer(16, 2), JaggedMultiheadAttention(16, 2)
        readers = TargetAttention(16, 2), DINAttention(16), JaggedFeatureInteraction(16)
        targets = torch.randn(3, 4, 16)
    jt, x, begins = jagged_tensor(offsets=offsets).to(device), X.to(device), OFFSETS.to(device)
    out = layer(jt, causal=True)
    assert type(out) is type(jt) and torch.equal(out.offsets(), begins)
    assert torch.equal(out.values(), layer(x, begins, causal=True))
    read = cross(out, kv=jt)
    assert torch.equal(read.values(), cross(out.values(), begins, kv=x))
    for reader in readers:
        assert torch.equal(reader(targets, jt), reader(targets, x, begins))


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
