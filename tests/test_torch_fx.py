"""Public functions are overridable like PyTorch's own: one node of a graph that torch.fx traces."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import jagged_cuda
from jagged_cuda.testing.cases import EVERY
from jagged_cuda.testing.judge import run
from jagged_cuda.testing.samples import Sample
from jagged_cuda.unfused import jagged_attention

OFFSETS = torch.tensor([0, 2, 5])


@pytest.mark.parametrize("name", EVERY)
def test_symbolic_trace(name: str, device: torch.device) -> None:
    """With every option; the traced model gives the same bits, forward and backward."""
    case = EVERY[name]
    for seed in range(4):
        spec = case.spec("small", seed)
        sample = case.sample(spec, torch.float32, device)

        class Model(torch.nn.Module):
            def forward(self, tensors: Any, offsets: Any, kv_offsets: Any) -> Any:
                given = None if spec.kv_layout is None else kv_offsets  # noqa: B023
                return case.function(jagged_cuda, spec, tensors, offsets, given)  # noqa: B023

        traced = torch.fx.symbolic_trace(Model())
        called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
        assert getattr(jagged_cuda, spec.choices.get("function", case.name)) in called

        def through_the_graph(given: Sample) -> Any:
            return traced(given.tensors, given.offsets, given.kv_offsets)  # noqa: B023

        def ones(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
            return {key: torch.ones_like(values) for key, values in outputs.items()}

        found = run(case, sample, through_the_graph, ones)
        expected = run(case, sample, lambda given: case.call(jagged_cuda, given), ones)
        for key, values in expected.items():
            assert torch.equal(found[key], values), key


class _Reader(torch.nn.Module):
    """Without annotations: torch.fx does not store those that are strings."""

    def forward(self, x, lengths):
        offsets = jagged_cuda.offsets_from_lengths(lengths)
        heads = x.unflatten(1, (2, 4))
        out, lse = jagged_cuda.jagged_flash_attention(
            heads, heads, heads, offsets, causal=True, return_lse=True
        )
        # How many scores there are is read when the graph runs.
        mixed = jagged_attention(x, x, out.flatten(1), offsets)
        return jagged_cuda.jagged_mean(mixed * lse.mean(1, keepdim=True), offsets)


def test_a_traced_model_can_be_stored() -> None:
    model = _Reader()
    traced = torch.fx.symbolic_trace(model)
    x, lengths = torch.randn(5, 8), torch.tensor([2, 3])
    expected = model(x, lengths)
    assert torch.equal(traced(x, lengths), expected)
    assert torch.equal(pickle.loads(pickle.dumps(traced))(x, lengths), expected)


class _Logged(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (jagged_cuda.jagged_softmax, jagged_cuda.jagged_dense_bmm):
            return func.__name__
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass_takes_the_call() -> None:
    x = torch.randn(5, 3)
    logged = x.as_subclass(_Logged)
    assert jagged_cuda.jagged_softmax(logged, OFFSETS) == "jagged_softmax"
    y, bias = torch.randn(2, 3, 4), torch.randn(2, 4).as_subclass(_Logged)
    assert jagged_cuda.jagged_dense_bmm(x, y, OFFSETS, bias=bias) == "jagged_dense_bmm"


class _Given(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return len(args), kwargs or {}


def test_a_subclass_gets_what_was_given() -> None:
    """No default, and a keyword's value by its name."""
    x = torch.randn(5, 1, 3).as_subclass(_Given)
    softmax, attention = jagged_cuda.jagged_softmax, jagged_cuda.jagged_flash_attention
    assert softmax(x, OFFSETS) == (2, {})
    assert softmax(offsets=OFFSETS, scale=2.0, x=x) == (2, {"scale": 2.0})
    count, kwargs = attention(x, x, x, OFFSETS, causal=True, window_size=(1, 0))
    assert (count, kwargs) == (4, {"causal": True, "window_size": (1, 0)})
    with pytest.raises(TypeError, match=r"^jagged_softmax\(\) missing 1 required"):
        softmax(x)


def test_nested_tensors_lend_their_parts() -> None:
    """As in docs/torchrec.md: nothing is copied, and gradients reach the nested tensor."""
    parts = [torch.randn(n, 8, requires_grad=True) for n in (2, 3)]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    x, offsets = nested.values(), nested.offsets()
    out = jagged_cuda.jagged_flash_attention(x, x, x, offsets)
    back = torch.nested.nested_tensor_from_jagged(out, offsets)
    assert back.shape == nested.shape
    (back + nested).values().sum().backward()
    assert all(part.grad is not None and part.grad.shape == part.shape for part in parts)
