"""torch.jit.script after torch.fx.symbolic_trace: how TorchRec's inference compiles models."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from plain import sentence
from torch import Tensor

import jagged_cuda
from jagged_cuda.ops._dispatch import overridable
from jagged_cuda.testing.cases import EVERY
from jagged_cuda.testing.judge import run
from jagged_cuda.testing.samples import Sample

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

# Cases of functions, and of options, that came later may be unknown to it.
KNOWN = {
    "array_jagged_bmm_jagged_out",
    "jagged2_softmax",
    "jagged_broadcast",
    "jagged_dense_bmm",
    "jagged_dense_bmm_biased",
    "jagged_flash_attention",
    "jagged_jagged_bmm",
    "jagged_jagged_bmm_jagged_out",
    "jagged_mean",
    "jagged_softmax",
    "jagged_sum",
    "jagged_target_attention",
    "jagged_to_padded",
    "padded_to_jagged",
}


def stored(model: torch.nn.Module) -> Any:
    """Traced, compiled, saved and loaded."""
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.fx.symbolic_trace(model)), file)
    file.seek(0)
    return torch.jit.load(file)


@pytest.mark.parametrize("name", EVERY)
def test_every_function_is_compiled(name: str, device: torch.device) -> None:
    """With every option; what is loaded gives the same bits, forward and backward."""
    case = EVERY[name]
    for seed in range(4):
        spec = case.spec("small", seed)
        sample = case.sample(spec, torch.float32, device)

        class Model(torch.nn.Module):
            # Annotations that torch.fx stores must not be text.
            def forward(self, tensors, offsets, kv_offsets):
                given = None if spec.kv_layout is None else kv_offsets  # noqa: B023
                return case.function(jagged_cuda, spec, tensors, offsets, given)  # noqa: B023

        Model.forward.__annotations__ = {
            "tensors": dict[str, Tensor],
            "offsets": Tensor,
            "kv_offsets": Tensor,
        }
        try:
            loaded = stored(Model())
        except RuntimeError as error:
            assert name not in KNOWN
            assert f"{case.name}: torch.jit.script is not supported" in str(error) or (
                "Unknown keyword argument" in str(error)
            )
            return

        def through_script(given: Sample) -> Any:
            kv_offsets = given.offsets if given.kv_offsets is None else given.kv_offsets
            return loaded(given.tensors, given.offsets, kv_offsets)  # noqa: B023

        def ones(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
            return {key: torch.ones_like(values) for key, values in outputs.items()}

        found = run(case, sample, through_script, ones)
        expected = run(case, sample, lambda given: case.call(jagged_cuda, given), ones)
        for key, values in expected.items():
            assert torch.equal(found[key], values), key


class _Reader(torch.nn.Module):
    def forward(self, x, lengths):
        offsets = jagged_cuda.offsets_from_lengths(lengths)
        total = jagged_cuda.matrix_offsets(offsets).sum()
        out = jagged_cuda.jagged_flash_attention(x, x, x, offsets, causal=True, scale=1)
        interest = jagged_cuda.jagged_target_attention(
            jagged_cuda.jagged_to_padded(out, offsets, 2, fill=False), x, x, offsets
        )
        means = jagged_cuda.padded_to_jagged(interest[:, :1], offsets)
        share = jagged_cuda.jagged_broadcast(jagged_cuda.lengths_from_offsets(offsets), offsets)
        return out + means + total + share[:, None]


def test_sizes_are_read_when_the_model_runs() -> None:
    model = _Reader()
    loaded = stored(model)
    for lengths in (torch.tensor([2, 3]), torch.tensor([0, 4, 2], dtype=torch.int32)):
        x = torch.randn(int(lengths.sum()), 8)
        assert torch.equal(loaded(x, lengths), model(x, lengths))


def test_a_function_alone_is_compiled() -> None:
    x, offsets = torch.randn(5, 3), torch.tensor([0, 2, 5])
    scripted = torch.jit.script(jagged_cuda.jagged_softmax)
    assert torch.equal(
        scripted(x, offsets, scale=2), jagged_cuda.jagged_softmax(x, offsets, scale=2)
    )


def test_what_is_not_known_gets_a_sentence() -> None:
    @overridable
    def jagged_novelty(x: Tensor, offsets: Tensor) -> Tensor:
        return x

    class Model(torch.nn.Module):
        def forward(self, x, offsets):
            return jagged_novelty(x, offsets)

    for given in (torch.fx.symbolic_trace(Model()), jagged_novelty):
        assert sentence(torch.jit.script, given) == (
            "jagged_novelty: torch.jit.script is not supported; use torch.export or torch.compile"
        )


def test_a_contradiction_raises_when_the_model_runs() -> None:
    class Model(torch.nn.Module):
        def forward(self, x, offsets):
            return jagged_cuda.jagged_flash_attention(
                x, x, x, offsets, causal=True, window_size=(-1, 2)
            )

    with pytest.raises(torch.jit.Error, match=r"window_size must be \(left, 0\)"):
        stored(Model())(torch.ones(2, 8), torch.tensor([0, 2]))


class _Modules(torch.nn.Module):
    """With rows as tensors."""

    def __init__(self):
        super().__init__()
        nn = jagged_cuda.nn
        self.within = nn.JaggedMultiheadAttention(8, 2)
        self.layer = nn.JaggedTransformerLayer(8, 2)
        self.target = nn.TargetAttention(8, 2, num_kv_heads=1)
        self.scorer = nn.DINAttention(8)
        self.interaction = nn.JaggedFeatureInteraction(8, 2)

    def forward(self, x, offsets, targets):
        x = self.layer(self.within(x, offsets, causal=True), offsets)
        targets = self.target(targets, x, offsets) + self.scorer(targets, x, offsets)
        return self.interaction(targets, x, offsets)


def test_modules_are_compiled() -> None:
    model = _Modules()
    inputs = (torch.randn(5, 8), torch.tensor([0, 2, 5]), torch.randn(2, 3, 8))
    assert torch.equal(stored(model)(*inputs), model(*inputs))
