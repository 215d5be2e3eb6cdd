"""jagged_attention, three operators in a row: judged by the definition of flash attention."""

from __future__ import annotations

import dataclasses
import doctest
from typing import Any

import pytest
import torch
from on_cuda import no_synchronisation
from plain import DTYPE, sentence
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.autograd import gradcheck

import jagged_cuda
from jagged_cuda import unfused
from jagged_cuda.testing.judge import check, judge
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.samples import Sample, Spec
from jagged_cuda.testing.unfused import CASE, FIXED
from jagged_cuda.unfused import jagged_attention

LAYOUT, KV_LAYOUT = Layout((3, 0, 20, 1, 9), base=2, tail=1), Layout((7, 4, 0, 1, 33), base=1)
SPEC = Spec(
    seed=1,
    layout=LAYOUT,
    choices=FIXED
    | {"dims": (8, 6), "scale": None, "cross": False, "capacity": "exact", "matrix_offsets": False},
)
CROSS = dataclasses.replace(SPEC, kv_layout=KV_LAYOUT)


def with_choices(spec: Spec, **choices: Any) -> Spec:
    return dataclasses.replace(spec, choices=dict(spec.choices) | choices)


def leaves_of(sample: Sample) -> list[Tensor]:
    return [sample.tensors[name].detach().requires_grad_() for name in "qkv"]


@DTYPE
@pytest.mark.parametrize("profile", ["small", "edge"])
def test_agrees_with_the_definition(dtype: torch.dtype, profile: str, device: torch.device) -> None:
    """Drawn as every operator's arguments are: outliers, rows outside, NaN in them, strides."""
    seeds = 12 if device.type == "cpu" else 40
    specs = [CASE.spec(profile, seed) for seed in range(seeds)]
    assert {spec.kv_layout is None for spec in specs} == {False, True}
    assert {spec.choices["capacity"] for spec in specs} == {None, "exact", "spare"}
    for spec in specs:
        judge(CASE, spec, dtype, device)


@pytest.mark.parametrize(
    "lengths", [(), (0,), (0, 0, 0)], ids=["no_sequence", "one_empty", "all_empty"]
)
@pytest.mark.parametrize("capacity", [None, "exact", "spare", 70_000])
def test_nothing_to_attend_to(
    lengths: tuple[int, ...], capacity: object, device: torch.device
) -> None:
    """The rows that there are lie outside: they are zeros, and so are their gradients."""
    spec = dataclasses.replace(SPEC, layout=Layout(lengths, base=2, tail=1))
    spec = with_choices(spec, capacity=capacity)
    judge(CASE, spec, torch.float32, device)


def test_features_are_not_needed(device: torch.device) -> None:
    """Without any, all scores are 0, and each row is the mean of its keys' values."""
    sample = CASE.sample(with_choices(SPEC, dims=(0, 6)), torch.float64, device)
    q, k, v = leaves_of(sample)
    mean = jagged_cuda.jagged_mean(v, sample.offsets)
    expected = jagged_cuda.jagged_broadcast(mean, sample.offsets, total=LAYOUT.total)
    torch.testing.assert_close(jagged_attention(q, k, v, sample.offsets), expected)


def test_gradients(device: torch.device) -> None:
    layout = Layout((3, 0, 1, 4), base=1, tail=1)
    spec = dataclasses.replace(SPEC, layout=layout, poisoned=False)
    sample = CASE.sample(spec, torch.float64, device)
    leaves = [t.clamp(-2, 2).requires_grad_() for t in sample.tensors.values()]
    assert gradcheck(lambda *qkv: jagged_attention(*qkv, sample.offsets), leaves)


def test_messages_name_the_operator_that_found_it(device: torch.device) -> None:
    x, offsets = torch.zeros(6, 4, device=device), torch.tensor([0, 2, 6], device=device)
    for qkv, message in (
        ((x[0, 0], x, x), "jagged_jagged_bmm_jagged_out: x must be [Tx, D], got []"),
        ((x[:, None], x, x), "jagged_jagged_bmm_jagged_out: x must be [Tx, D], got [6, 1, 4]"),
        ((x, x[:, :3], x), "jagged_jagged_bmm_jagged_out: y must be [6, 4], got [6, 3]"),
        ((x, x, x.double()), "array_jagged_bmm_jagged_out: y must be float32, got float64"),
    ):
        assert sentence(jagged_attention, *qkv, offsets) == message


def test_compile(device: torch.device) -> None:
    """With total_scores no graph break and, for another T and B, no compilation again."""
    torch._dynamo.reset()

    def attend(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, total_scores: int) -> Tensor:
        return jagged_attention(q, k, v, offsets, total_scores=total_scores)

    backend = "aot_eager" if device.type == "cpu" else "inductor"
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=backend)
    for index, lengths in enumerate(((5, 0, 9, 3), (4, 21, 2, 0, 6, 1, 7))):
        spec = dataclasses.replace(SPEC, layout=Layout(lengths, base=1, tail=2), poisoned=False)
        sample = CASE.sample(spec, torch.float32, device)
        leaves = leaves_of(sample)
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            out = compiled(*leaves, sample.offsets, spec.capacity)
            gradients = torch.autograd.grad(out, leaves, torch.ones_like(out))
        found = {"out": out.detach()}
        found |= {f"grad_{name}": g for name, g in zip("qkv", gradients, strict=True)}
        check(CASE, sample, found, {"out": torch.ones_like(out)})


def test_the_size_is_read_only_where_it_is_not_given() -> None:
    """Fake tensors have no numbers to read."""
    with FakeTensorMode():
        x, offsets = torch.zeros(6, 4), torch.tensor([0, 2, 6])
        assert jagged_attention(x, x, x, offsets, total_scores=20).shape == (6, 4)
        with pytest.raises(DataDependentOutputException):
            jagged_attention(x, x, x, offsets)


@pytest.mark.cuda
@DTYPE
@pytest.mark.parametrize("spec", [SPEC, CROSS], ids=["self", "cross"])
def test_waits_for_the_gpu_only_to_read_the_size(spec: Spec, dtype: torch.dtype) -> None:
    sample = CASE.sample(with_choices(spec, capacity="spare"), dtype, "cuda")
    leaves = leaves_of(sample)
    options: dict[str, Any] = {"kv_offsets": sample.kv_offsets}
    grad_out = torch.ones_like(jagged_attention(*leaves, sample.offsets, **options))
    with no_synchronisation():
        total_scores = sample.spec.capacity
        out = jagged_attention(*leaves, sample.offsets, total_scores=total_scores, **options)
        torch.autograd.grad(out, leaves, grad_out)
        with pytest.raises(RuntimeError, match="synchronizing"):
            jagged_attention(*leaves, sample.offsets, **options)


def test_the_example_in_its_docstring() -> None:
    found = doctest.testmod(unfused, extraglobs={"torch": torch})
    assert found.attempted == 2 and found.failed == 0
