"""Calls that would not do what their caller means: each raises one sentence with the remedy.

What shapes, dtypes and devices must be is in tests/test_contract.py; wrong offsets are in
tests/test_errors.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain import sentence
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import jagged_cuda
from jagged_cuda import (
    jagged2_softmax,
    jagged_broadcast,
    jagged_dense_bmm,
    jagged_flash_attention,
    jagged_softmax,
    jagged_sum,
    jagged_target_attention,
    jagged_to_padded,
    padded_to_jagged,
)
from jagged_cuda.testing.cases import CASES


class Operands:
    """Right ones, of sequences of 2 and 4 rows."""

    def __init__(self, device: torch.device | str) -> None:
        self.offsets = torch.tensor([0, 2, 6], device=device)
        self.x = torch.ones(6, 4, device=device)
        self.q = torch.ones(6, 2, 8, device=device)
        self.target = torch.ones(2, 3, 2, 8, device=device)
        self.number = torch.ones((), device=device)
        self.learnt = torch.nn.Parameter(torch.ones((), device=device))


class Jagged:
    """Like TorchRec's JaggedTensor."""

    def __init__(self, values: torch.Tensor, offsets: torch.Tensor) -> None:
        self._values, self._offsets = values, offsets

    def values(self) -> torch.Tensor:
        return self._values

    def offsets(self) -> torch.Tensor:
        return self._offsets


def flash(o: Operands, **options: Any) -> Any:
    return jagged_flash_attention(o.q, o.q, o.q, o.offsets, **options)


SCALE = "got a tensor: no gradient would reach it; multiply the operand by it instead"
WAIT = "got a tensor: the host would wait for the tensor's device; pass int(...) of it"

# What is wrong: the call, and the error.
MISUSES: dict[str, tuple[Callable[[Operands], Any], str]] = {
    "a learnt scale of flash attention": (
        lambda o: flash(o, scale=o.learnt),
        f"jagged_flash_attention: scale must be a number or None, {SCALE}",
    ),
    "a learnt scale of target attention": (
        lambda o: jagged_target_attention(o.target, o.q, o.q, o.offsets, scale=o.learnt),
        f"jagged_target_attention: scale must be a number or None, {SCALE}",
    ),
    "a learnt scale of softmax": (
        lambda o: jagged_softmax(o.x, o.offsets, scale=o.learnt),
        f"jagged_softmax: scale must be a number, {SCALE}",
    ),
    "a learnt scale of softmax over matrices": (
        lambda o: jagged2_softmax(o.number.expand(20), o.offsets, scale=o.learnt),
        f"jagged2_softmax: scale must be a number, {SCALE}",
    ),
    "a vector as scale": (
        lambda o: flash(o, scale=o.q[0, 0]),
        f"jagged_flash_attention: scale must be a number or None, {SCALE}",
    ),
    "a tensor as fill": (
        lambda o: jagged_to_padded(o.x, o.offsets, 4, fill=o.number),
        f"jagged_to_padded: fill must be a number, {SCALE}",
    ),
    "a tensor as max_len": (
        lambda o: flash(o, max_len=o.offsets[1]),
        f"jagged_flash_attention: max_len must be an int or None, {WAIT}",
    ),
    "a tensor as padded length": (
        lambda o: jagged_to_padded(o.x, o.offsets, o.offsets[1]),
        f"jagged_to_padded: max_len must be an int, {WAIT}",
    ),
    "a tensor as total": (
        lambda o: jagged_broadcast(o.x[:2], o.offsets, total=o.offsets[2]),
        f"jagged_broadcast: total must be an int or None, {WAIT}",
    ),
    "a tensor as causal": (
        lambda o: flash(o, causal=o.number > 0),
        "jagged_flash_attention: causal must be True or False, got a tensor: the host would wait"
        " for the tensor's device; pass bool(...) of it",
    ),
    "max_len of 7.0": (
        lambda o: flash(o, max_len=7.0),
        "jagged_flash_attention: max_len must be an int or None, got 7.0",
    ),
    "a scale of text": (
        lambda o: jagged_softmax(o.x, o.offsets, scale="2"),
        "jagged_softmax: scale must be a number, got '2'",
    ),
    "causal and later keys": (
        lambda o: flash(o, causal=True, window_size=(-1, 2)),
        "jagged_flash_attention: window_size must be (left, 0) or (left, -1) with causal=True,"
        " got (-1, 2)",
    ),
    "a window of one number": (
        lambda o: flash(o, window_size=3),
        "jagged_flash_attention: window_size must be (left, right), two ints, got 3",
    ),
    "a window of three numbers": (
        lambda o: flash(o, window_size=(1, 2, 3)),
        "jagged_flash_attention: window_size must be (left, right), two ints, got (1, 2, 3)",
    ),
    "a window of fractions": (
        lambda o: flash(o, window_size=(1.5, 2)),
        "jagged_flash_attention: window_size must be (left, right), two ints, got (1.5, 2)",
    ),
    "no keys": (
        lambda o: jagged_flash_attention(o.q, None, o.q, o.offsets),
        "jagged_flash_attention: k must be a tensor, got None",
    ),
    "no offsets": (
        lambda o: jagged_flash_attention(o.q, o.q, o.q, None),
        "jagged_flash_attention: offsets must be a tensor, got None",
    ),
    "a list": (
        lambda o: jagged_sum(o.x, [0, 2, 6]),
        "jagged_sum: offsets must be a tensor, got a list: pass torch.tensor(...) of it",
    ),
    "a JaggedTensor": (
        lambda o: jagged_sum(Jagged(o.x, o.offsets), o.offsets),
        "jagged_sum: x must be a tensor, got a Jagged: pass its values() and offsets()",
    ),
    "a method": (
        lambda o: jagged_sum(o.x, Jagged(o.x, o.offsets).offsets),
        "jagged_sum: offsets must be a tensor, got a method: call it, offsets()",
    ),
    "a bias of text": (
        lambda o: jagged_dense_bmm(o.x, o.q, o.offsets, bias="x"),
        "jagged_dense_bmm: bias must be a tensor or None, got a str",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_gets_a_sentence(name: str, device: torch.device) -> None:
    call, message = MISUSES[name]
    assert sentence(call, Operands(device)) == message


@pytest.mark.parametrize("name", MISUSES)
def test_fake_tensors_get_the_same_sentence(name: str) -> None:
    call, message = MISUSES[name]
    with FakeTensorMode():
        assert sentence(call, Operands("cpu")) == message


def test_a_numpy_array_gets_a_sentence() -> None:
    numpy = pytest.importorskip("numpy")
    message = "x must be a tensor, got a numpy array: pass torch.from_numpy(...) of it"
    text = sentence(jagged_sum, numpy.ones((6, 4)), torch.tensor([0, 6]))
    assert text == f"jagged_sum: {message}"
    # Numbers from numpy are accepted.
    offsets = torch.tensor([0, 6])
    jagged_softmax(torch.ones(6), offsets, scale=numpy.float64(2.0))
    jagged_to_padded(torch.ones(6), offsets, numpy.int64(6))  # type: ignore[arg-type]


# --- nested tensors


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(4, 4)], layout=layout)


def with_holes() -> torch.Tensor:
    offsets, lengths = torch.tensor([0, 2, 6]), torch.tensor([1, 4])
    return torch.nested.nested_tensor_from_jagged(torch.ones(6, 4), offsets, lengths)


NESTED = {
    "jagged": (
        lambda: nested(torch.jagged),
        "a nested tensor: pass its x.values() and x.offsets()",
    ),
    "strided": (
        lambda: nested(torch.strided),
        "a strided nested tensor: make it with layout=torch.jagged",
    ),
    "with holes": (
        with_holes,
        "a nested tensor, which has holes: take its contiguous() and pass its x.values() and"
        " x.offsets()",
    ),
}


@pytest.mark.parametrize("kind", NESTED)
def test_nested_tensors_get_a_sentence(kind: str) -> None:
    make, description = NESTED[kind]
    text = sentence(jagged_sum, make(), torch.tensor([0, 2, 6]))
    assert text == f"jagged_sum: x must be a tensor, got {description}"


@pytest.mark.parametrize("kind", ["jagged", "with holes"])
def test_nested_tensors_get_a_sentence_under_compile(kind: str) -> None:
    make, description = NESTED[kind]
    offsets = torch.tensor([0, 2, 6])
    compiled = torch.compile(lambda x: jagged_sum(x, offsets), fullgraph=True, backend="eager")
    with pytest.raises(
        Exception, match=re.escape(f"jagged_sum: x must be a tensor, got {description}")
    ):
        compiled(make())


# --- compilers


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:ast")
@pytest.mark.parametrize("traced", [False, True], ids=["function", "after fx"])
def test_torch_jit_script_gets_a_sentence(traced: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, x, offsets):  # torch.jit.script reads no annotations that are text
            return jagged_sum(x, offsets)

    refused = torch.fx.symbolic_trace(Model()) if traced else jagged_sum
    text = sentence(torch.jit.script, refused)
    assert text == (
        "jagged_sum: torch.jit.script is not supported; use torch.export or torch.compile"
    )


# --- transforms


def pushed_forward(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(x, x))


FORWARD_MODE = (
    "forward-mode differentiation (torch.func.jvp, jacfwd, dual tensors) is not supported; use"
    " torch.autograd.grad"
)
REVERSE_MODE = (
    "torch.func.grad, vjp and jacrev are not supported; use torch.autograd.grad or"
    " torch.autograd.functional"
)
TRANSFORMS: dict[str, tuple[Callable[..., Any], str]] = {
    "dual": (pushed_forward, FORWARD_MODE),
    "jvp": (lambda f, x: torch.func.jvp(f, (x,), (x,)), FORWARD_MODE),
    "jacfwd": (lambda f, x: torch.func.jacfwd(f)(x), FORWARD_MODE),
    "grad": (lambda f, x: torch.func.grad(lambda y: f(y).sum())(x), REVERSE_MODE),
    "vjp": (lambda f, x: torch.func.vjp(f, x), REVERSE_MODE),
    "jacrev": (lambda f, x: torch.func.jacrev(f)(x), REVERSE_MODE),
    "vmap of grad": (
        lambda f, x: torch.vmap(torch.func.grad(lambda y: f(y).sum()))(x[None]),
        REVERSE_MODE,
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_get_a_sentence(name: str, transform: str, device: torch.device) -> None:
    case = CASES[name]
    if transform == "dual" and not case.differentiable:
        pytest.skip("without a derivative, a tangent changes nothing")
    sample = case.sample(case.spec("small", 0), torch.float32, device)
    apply, message = TRANSFORMS[transform]
    operand = next(iter(sample.tensors))

    def function(x: torch.Tensor) -> torch.Tensor:
        changed = type(sample)(
            sample.spec, {**sample.tensors, operand: x}, sample.offsets, sample.kv_offsets
        )
        return next(iter(case.call(jagged_cuda, changed).values()))

    text = sentence(apply, function, sample.tensors[operand].detach().clone())
    called = sample.spec.choices.get("function", name)
    # Integers alone have no derivative to lose.
    of_integers = name in ("jagged_positions", "matrix_offsets")
    assert text == ("" if of_integers else f"{called}: {message}")


def test_vmap_works(device: torch.device) -> None:
    o = Operands(device)
    x = torch.randn(3, 6, 4, device=device)
    expected = torch.stack([jagged_sum(part, o.offsets) for part in x])
    torch.testing.assert_close(torch.vmap(lambda part: jagged_sum(part, o.offsets))(x), expected)


# --- what is allowed


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str
)
@pytest.mark.parametrize("columns", [(), (3,), (16,)], ids=["rows", "odd", "wide"])
def test_masks_and_counts_are_converted(
    dtype: torch.dtype, columns: tuple[int, ...], device: torch.device
) -> None:
    x = torch.randint(0, 2, (7, *columns)).to(device=device, dtype=dtype)
    offsets = torch.tensor([0, 2, 2, 6], device=device)
    padded = jagged_to_padded(x, offsets, 4, fill=1)
    expected = torch.ones(3, 4, *columns, device=device, dtype=dtype)
    expected[0, :2], expected[2] = x[:2], x[2:6]
    assert torch.equal(padded, expected)
    assert torch.equal(padded_to_jagged(padded, offsets, total=6), x[:6])
    each = jagged_broadcast(padded[:, 0], offsets, total=6)
    assert torch.equal(each, padded[:, 0].repeat_interleave(offsets.diff(), 0))


@pytest.mark.cuda
def test_a_graph_of_int32_lengths_is_captured_under_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAGGED_CUDA_CHECK", "1")
    lengths = torch.tensor([2, 0, 4], dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        offsets = jagged_cuda.offsets_from_lengths(lengths)
    graph.replay()
    assert offsets.tolist() == [0, 2, 2, 6]


def test_more_rows_than_int32_holds(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAGGED_CUDA_CHECK", "1")  # else nothing waits for a GPU
    lengths = torch.tensor([2**30, 2**30, 5], dtype=torch.int32, device=device)
    message = "lengths must be int64 for more than 2^31 - 1 rows, got int32 for 2147483653"
    assert sentence(jagged_cuda.offsets_from_lengths, lengths) == f"offsets_from_lengths: {message}"
    assert jagged_cuda.offsets_from_lengths(lengths.long())[-1] == 2**31 + 5
