"""Eager calls skip PyTorch's Python kernel for autograd, and nothing else changes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from plain import run_python
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import jagged_cuda
from jagged_cuda.ops import _dispatch
from jagged_cuda.testing.cases import EVERY
from jagged_cuda.testing.judge import run
from jagged_cuda.testing.samples import draw_cotangents

OFFSETS = torch.tensor([0, 2, 5])


def softmax_of(x: Tensor) -> Tensor:
    return jagged_cuda.jagged_softmax(x, OFFSETS)


@pytest.mark.parametrize("name", EVERY)
def test_both_ways_give_the_same_bits(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = EVERY[name]
    for seed in range(4):
        spec = case.spec("small", seed)
        sample = case.sample(spec, torch.float32, device)

        cotangents = functools.partial(draw_cotangents, spec=spec, rows=case.rows)
        ways = []
        for has_private in (True, False):
            monkeypatch.setattr(_dispatch, "_HAS_PRIVATE", has_private)
            ways.append(run(case, sample, lambda s: case.call(jagged_cuda, s), cotangents))
        for key, values in ways[0].items():
            assert torch.equal(values, ways[1][key]), key


def test_the_way_shows_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, 3, requires_grad=True)
    assert type(softmax_of(x).grad_fn).__name__ == "jagged_softmaxBackward"
    monkeypatch.setattr(_dispatch, "_HAS_PRIVATE", False)
    assert "GeneratedBackwardFor" in type(softmax_of(x).grad_fn).__name__


def test_no_graph_without_need_of_one() -> None:
    x = torch.randn(5, 3, requires_grad=True)
    assert softmax_of(x.detach()).grad_fn is None
    with torch.no_grad():
        assert not softmax_of(x).requires_grad
    with torch.inference_mode():
        assert softmax_of(x).is_inference()
    parameter = torch.nn.Parameter(x.detach())
    softmax_of(parameter).square().sum().backward()
    assert parameter.grad is not None


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class _Subclass(Tensor):
    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


def _watched_by_a_mode(x: Tensor) -> tuple[Tensor, list[str]]:
    with _Calls() as calls:
        return softmax_of(x), calls.names


def _watched_by_a_subclass(x: Tensor) -> tuple[Tensor, list[str]]:
    _Subclass.seen.clear()
    return softmax_of(x.as_subclass(_Subclass)), _Subclass.seen


@pytest.mark.parametrize("watch", [_watched_by_a_mode, _watched_by_a_subclass])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_who_watches_sees_the_operator(
    watch: Callable[[Tensor], tuple[Tensor, list[str]]], requires_grad: bool
) -> None:
    x = torch.randn(5, 3, requires_grad=requires_grad)
    out, names = watch(x)
    assert any("jagged_softmax" in name for name in names)
    assert out.requires_grad == requires_grad
    assert torch.equal(out.detach().as_subclass(Tensor), softmax_of(x.detach()))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_a_trace_has_the_operator() -> None:
    traced = torch.jit.trace(softmax_of, torch.randn(5, 3), check_trace=False)
    assert "jagged_cuda::jagged_softmax" in str(traced.graph)


@pytest.mark.parametrize("transpose", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize(
    "name",
    [
        "jagged_dense_bmm",
        "jagged_jagged_bmm",
        "jagged_jagged_bmm_jagged_out",
        "array_jagged_bmm_jagged_out",
    ],
)
def test_one_operator_gives_the_bits_of_two(
    name: str, transpose: bool, device: torch.device
) -> None:
    """Both gradients of a product at once, each alone, and those with derivatives of their own;
    operands as they are and transposed, or matrices that are."""
    offsets = torch.tensor([1, 3, 3, 6], device=device)
    shapes = {
        "jagged_dense_bmm": ((7, 4), (3, 4, 5)),
        "jagged_jagged_bmm": ((7, 4), (7, 5)),
        "jagged_jagged_bmm_jagged_out": ((7, 4), (9, 4)),
        "array_jagged_bmm_jagged_out": ((4 + 0 + 12,), (7, 5) if transpose else (9, 5)),
    }[name]
    options: dict[str, Any] = {}
    if name.endswith("jagged_out"):
        options["y_offsets"] = torch.tensor([0, 2, 5, 9], device=device)
    if name.startswith("array"):
        options |= {"transpose": transpose, "total": 9 if transpose else 7}
    x, y = (torch.randn(shape, device=device) for shape in shapes)
    if transpose and x.dim() == 2:
        x, y = (operand.mT.contiguous().mT for operand in (x, y))
    x, y = (operand.requires_grad_() for operand in (x, y))
    out = getattr(jagged_cuda, name)(x, y, offsets, **options)
    grad_out = torch.randn_like(out)

    def gradients(*inputs: Tensor, create_graph: bool = False) -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            out, inputs, grad_out, retain_graph=True, create_graph=create_graph
        )

    with _Calls() as calls:
        both = gradients(x, y)
    assert [each for each in calls.names if "jagged_cuda" in each] == [
        f"jagged_cuda.{name}_backward.default"
    ]
    for ways in ((*gradients(x), *gradients(y)), gradients(x, y, create_graph=True)):
        assert all(torch.equal(a, b) for a, b in zip(both, ways, strict=True))


def test_without_pytorchs_private_functions_all_works() -> None:
    code = """
        import torch; del torch._C._is_any_autocast_enabled
        import jagged_cuda
        x = torch.ones(5, requires_grad=True)
        out = jagged_cuda.jagged_softmax(x, torch.tensor([0, 2, 5]))
        out[0].backward(); print(x.grad.tolist()[:2])
    """
    assert run_python("-c", code).stdout == "[0.25, -0.25]\n"
