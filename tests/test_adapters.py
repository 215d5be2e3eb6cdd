"""Nested tensors and lists as (values, offsets), and back. TorchRec's are in test_torchrec.py."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain import sentence
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from jagged_cuda import jagged_flash_attention, lists, nested

OFFSETS = torch.tensor([0, 2, 2, 5])


def heads_first(x: Tensor, offsets: Tensor) -> Any:
    """`[B, H, j, D]` of `[T, H, D]`."""
    return nested.from_jagged(x, offsets).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("make", [nested.from_jagged, heads_first])
def test_nested_tensors_lend_what_they_hold(
    make: Callable[..., Any], dtype: torch.dtype, device: torch.device
) -> None:
    x, offsets = torch.randn(5, 2, 8, device=device), OFFSETS.to(device, dtype)
    nt = make(x, offsets)
    values, found = nested.to_jagged(nt)
    assert found is offsets and values.data_ptr() == x.data_ptr()
    assert values.shape == x.shape and values.stride() == x.stride()
    out = jagged_flash_attention(values, values, values, found)
    back = nested.with_values(nt, out)
    assert back.shape == nt.shape and back.offsets() is offsets
    assert nested.to_jagged(back)[0].data_ptr() == out.data_ptr()
    for part, (begin, end) in zip((back + nt).unbind(), ((0, 2), (2, 2), (2, 5)), strict=True):
        part = part if make is nested.from_jagged else part.transpose(0, 1)
        torch.testing.assert_close(part, (out + x)[begin:end])


@pytest.mark.parametrize("make", [nested.from_jagged, heads_first])
def test_gradients_pass_through_nested_tensors(make: Callable[..., Any]) -> None:
    """In one compiled graph, too."""

    def attend(nt: Any) -> Any:
        values, offsets = nested.to_jagged(nt)
        return nested.with_values(nt, jagged_flash_attention(values, values, values, offsets))

    for function in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        x = torch.randn(5, 2, 8, requires_grad=True)
        nt = make(x, OFFSETS)
        out = function(nt)
        assert out.shape == nt.shape
        (gradient,) = torch.autograd.grad(nested.to_jagged(out)[0].sum(), x)
        expected = jagged_flash_attention(x, x, x, OFFSETS)
        torch.testing.assert_close(gradient, *torch.autograd.grad(expected.sum(), x))


def test_known_lengths_stay_known() -> None:
    nt = nested.from_jagged(torch.randn(5, 4), OFFSETS, min_len=0, max_len=3)
    out = nested.with_values(nt, torch.randn(5, 6))
    assert (out._maybe_min_seqlen, out._maybe_max_seqlen) == (0, 3)
    unknown = nested.with_values(nested.from_jagged(torch.randn(5, 4), OFFSETS), torch.randn(5, 6))
    assert (unknown._maybe_min_seqlen, unknown._maybe_max_seqlen) == (None, None)


def with_holes() -> Any:
    return torch.nested.nested_tensor_from_jagged(
        torch.arange(12.0).view(6, 2), torch.tensor([0, 3, 6]), lengths=torch.tensor([2, 1])
    )


def test_holes_are_compacted_if_asked_for() -> None:
    values, offsets = nested.to_jagged(with_holes(), compact=True)
    assert offsets.tolist() == [0, 2, 3]
    assert values.tolist() == [[0, 1], [2, 3], [6, 7]]


NESTED = nested.from_jagged(torch.ones(5, 4), OFFSETS)
STRIDED = torch.nested.nested_tensor([torch.ones(2, 3)])
LAYOUT = "must be a nested tensor with layout=torch.jagged, got a strided one"
WRONG = {
    "holes": (
        lambda: nested.to_jagged(with_holes()),
        "nested.to_jagged: nt must be without holes, got one made with lengths: pass compact=True,"
        " or its contiguous()",
    ),
    "holes in results": (
        lambda: nested.with_values(with_holes(), torch.ones(6, 2)),
        "nested.with_values: nt must be without holes, got one made with lengths",
    ),
    "strided": (lambda: nested.to_jagged(STRIDED), f"nested.to_jagged: nt {LAYOUT}"),
    "strided results": (
        lambda: nested.with_values(STRIDED, torch.ones(2, 3)),
        f"nested.with_values: nt {LAYOUT}",
    ),
    "not nested": (
        lambda: nested.to_jagged(OFFSETS),
        "nested.to_jagged: nt must be a nested tensor, got a Tensor",
    ),
    "other rows": (
        lambda: nested.with_values(NESTED, torch.ones(4, 2)),
        "nested.with_values: values must be [5, ...], got [4, 2]",
    ),
    "no tensors": (
        lambda: lists.to_jagged([]),
        "lists.to_jagged: tensors must be at least one tensor, got none",
    ),
    "offsets of floats": (
        lambda: lists.from_jagged(torch.ones(3), torch.ones(2)),
        "lists.from_jagged: offsets must be int32 or int64, got float32",
    ),
    "offsets made as floats": (
        lambda: lists.to_jagged([torch.ones(3)], dtype=torch.float32),
        "lists.to_jagged: dtype must be int32 or int64, got float32",
    ),
    "offsets past the rows": (
        lambda: lists.from_jagged(torch.ones(5), OFFSETS + 1),
        "lists.from_jagged: offsets[3] must be <= the number of rows 5, got 6",
    ),
    "decreasing offsets": (
        lambda: lists.from_jagged(torch.ones(5), [0, 3, 2]),
        "lists.from_jagged: offsets[2] must be >= offsets[1] = 3, got 2",
    ),
    "negative offsets": (
        lambda: lists.from_jagged(torch.ones(5), [-1, 3]),
        "lists.from_jagged: offsets[0] must be >= 0, got -1",
    ),
    "other features": (
        lambda: lists.to_jagged([torch.ones(2, 3), torch.ones(2, 4)]),
        "lists.to_jagged: tensors[1] must be [L, 3] float32 on cpu, as tensors[0], got [L, 4]"
        " float32 on cpu",
    ),
    "other dtypes": (
        lambda: lists.to_jagged([torch.ones(2), torch.ones(2).double()]),
        "lists.to_jagged: tensors[1] must be [L] float32 on cpu, as tensors[0], got [L] float64 on"
        " cpu",
    ),
    "a list of lists": (
        lambda: lists.to_jagged([[1, 2]]),
        "lists.to_jagged: tensors[0] must be a tensor [L, ...], got a list",
    ),
    "a list of numbers": (
        lambda: lists.to_jagged([torch.tensor(1.0)]),
        "lists.to_jagged: tensors[0] must be a tensor [L, ...], got []",
    ),
    "a list as rows": (
        lambda: nested.with_values(NESTED, [1.0]),
        "nested.with_values: values must be a tensor, got a list",
    ),
    "a list as offsets": (
        lambda: nested.from_jagged(torch.ones(5, 4), [0, 2, 5]),
        "nested.from_jagged: offsets must be a tensor, got a list",
    ),
}


@pytest.mark.parametrize(("call", "expected"), WRONG.values(), ids=WRONG)
def test_wrong_calls(call: Callable[[], Any], expected: str) -> None:
    assert sentence(call) == expected


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_lists(dtype: torch.dtype, device: torch.device) -> None:
    parts = [torch.randn(n, 3, device=device, requires_grad=True) for n in (2, 0, 3)]
    values, offsets = lists.to_jagged(parts, dtype=dtype)
    assert offsets.dtype == dtype and offsets.device == values.device
    assert offsets.tolist() == [0, 2, 2, 5]
    for given in (offsets, [0, 2, 2, 5]):
        back = lists.from_jagged(values, given)
        assert all(map(torch.equal, back, parts))
        assert back[2].data_ptr() == values[2:].data_ptr()
    values.sum().backward()
    assert all(torch.equal(part.grad, torch.ones_like(part)) for part in parts)


def test_nothing_is_read() -> None:
    """Fake tensors have no values to wait for."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        x, offsets = torch.randn(5, 2, 8), torch.zeros(4, dtype=torch.int64)
        nt = heads_first(x, offsets)
        assert nested.to_jagged(nt)[0].shape == x.shape
        assert nested.with_values(nt, x).shape == nt.shape
        assert lists.to_jagged([x, x])[1].shape == (3,)
        assert len(lists.from_jagged(x, [0, 5])) == 1


@pytest.mark.cuda
def test_nothing_waits_for_the_gpu() -> None:
    x, offsets = torch.randn(5, 2, 8, device="cuda"), OFFSETS.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        nt = heads_first(x, offsets)
        nested.with_values(nt, nested.to_jagged(nt)[0])
        lists.from_jagged(lists.to_jagged([x, x])[0], [0, 5, 10])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("module", [nested, lists])
def test_examples_in_docstrings(module: Any) -> None:
    assert doctest.testmod(module).failed == 0
