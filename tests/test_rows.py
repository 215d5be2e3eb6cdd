"""Plans and moves of rows: what the table of cases cannot say."""

from __future__ import annotations

import doctest
import importlib
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from on_cuda import memory_at_rest, requested_bytes
from plain import assert_same_bits, sentence
from strategies import LENGTHS
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import jagged_cuda
from jagged_cuda import (
    RowPlan,
    jagged_concat,
    jagged_first,
    jagged_index_select,
    jagged_last,
    jagged_select,
    jagged_slice,
    jagged_split,
    jagged_take,
)
from jagged_cuda.testing.lengths import Layout

LAYOUT = Layout((3, 0, 5, 1), base=2, tail=2)
ALL_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32),
    *(torch.int16, torch.int8, torch.uint8, torch.bool),
)


def parts_of(x: Tensor, offsets: Tensor) -> list[Tensor]:
    """The rows of each sequence."""
    return [x[begin:end] for begin, end in pairwise(offsets.tolist())]


def joined(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(parts) if parts else like[:0]


def values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 100, shape, generator=generator).to(device=device, dtype=dtype)


def mask(total: int, device: torch.device) -> Tensor:
    return torch.arange(total, device=device) % 3 != 1


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("trailing", "offsets_dtype"),
    [((), torch.int32), ((3,), torch.int64), ((2, 8), torch.int32)],
    ids=str,
)
def test_every_function_moves_every_dtype(
    trailing: tuple[int, ...],
    offsets_dtype: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """And rows of any width, several tensors at once, with both types of offsets."""
    offsets = LAYOUT.offsets(device, offsets_dtype)
    x = values((LAYOUT.total, *trailing), dtype, device)
    other = values((LAYOUT.total, 5), torch.int64, device)
    keep = mask(LAYOUT.total, device)
    n = torch.tensor([1, 2, 4, 0], device=device)
    picked = torch.tensor([2, 0, 2, 1], device=device)
    keep_of = parts_of(keep, offsets)
    for key, function, pick in (
        (
            "select",
            lambda *a, **k: jagged_select(*a, keep, **k),
            lambda part, b: part[keep_of[b]],
        ),
        (
            "slice",
            lambda *a, **k: jagged_slice(*a, 1, n, **k),
            lambda part, b: part[1:][: n[b]],
        ),
        ("first", lambda *a, **k: jagged_first(*a, n, **k), lambda part, b: part[: n[b]]),
        ("last", lambda *a, **k: jagged_last(*a, 2, **k), lambda part, _: part[-2:]),
    ):
        for total in (None, LAYOUT.total, 4):
            (y, z), planned = function([x, other], offsets, total=total)
            assert planned.dtype == offsets_dtype and y.dtype == dtype
            for found, source in ((y, x), (z, other)):
                parts = [pick(part, b) for b, part in enumerate(parts_of(source, offsets))]
                check_packed(found, planned, parts, total, key)
    parts = [parts_of(x, offsets)[b] for b in picked.tolist()]
    y, planned = jagged_index_select(x, offsets, picked)
    check_packed(y, planned, parts, None, "index_select")
    dense = values((4, 2, *trailing), dtype, device)
    y, planned = jagged_concat([dense, x, dense], [None, offsets, None])
    parts = [torch.cat([dense[b], part, dense[b]]) for b, part in enumerate(parts_of(x, offsets))]
    check_packed(y, planned, parts, None, "concat")
    for option in ({"n": n}, {"left_offsets": torch.nn.functional.pad(n.cumsum(0), (1, 0))}):
        option = {name: t.to(offsets_dtype) for name, t in option.items()}
        (left, left_offsets), (right, right_offsets) = jagged_split(x, offsets, **option)
        sides = parts_of(x, offsets)
        check_packed(left, left_offsets, [p[: n[b]] for b, p in enumerate(sides)], None, "left")
        check_packed(right, right_offsets, [p[n[b] :] for b, p in enumerate(sides)], None, "right")


def check_packed(
    found: Tensor, offsets: Tensor, parts: list[Tensor], total: int | None, label: str
) -> None:
    """These rows one after another, cut at total or filled up with zeros, and their offsets."""
    expected = joined(parts, found)
    capacity = len(expected) if total is None else total
    lengths = torch.tensor([0, *(len(part) for part in parts)])
    assert offsets.tolist() == lengths.cumsum(0).clamp(max=capacity).tolist(), label
    assert len(found) == capacity, label
    kept = min(capacity, len(expected))
    assert torch.equal(found[:kept], expected[:kept]), label
    assert not found[kept:].any(), label


# --- properties


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    lengths = tuple(draw(st.lists(LENGTHS, max_size=5)))
    return Layout(lengths, base=draw(st.integers(0, 4)), tail=draw(st.integers(0, 4)))


def inside_of(x: Tensor, layout: Layout) -> Tensor:
    return x[layout.base : layout.total - layout.tail]


@given(layout=layouts(), data=st.data())
def test_identities(device: torch.device, layout: Layout, data: st.DataObject) -> None:
    """Concatenation undoes a split, all rows selected are all, first and last make the whole."""
    offsets = layout.offsets(device, data.draw(st.sampled_from([torch.int32, torch.int64])))
    x = torch.randn(layout.total, 3, device=device)
    whole, moved = inside_of(x, layout), offsets - offsets[0]
    kept, planned = jagged_select(x, offsets, torch.ones(layout.total, dtype=torch.bool).to(device))
    assert torch.equal(kept, whole) and torch.equal(planned, moved)
    lengths = offsets.diff()
    n = (torch.rand(len(lengths), device=device) * (lengths + 1)).to(offsets.dtype)
    first, first_offsets = jagged_first(x, offsets, n)
    last, last_offsets = jagged_last(x, offsets, lengths - n)
    both, planned = jagged_concat([first, last], [first_offsets, last_offsets])
    assert torch.equal(both, whole) and torch.equal(planned, moved)
    (left, left_offsets), (right, _) = jagged_split(x, offsets, n=n)
    assert torch.equal(left, first) and torch.equal(right, last)
    again = jagged_split(both, planned, left_offsets=left_offsets)
    assert_same_bits({"left": again[0][0], "right": again[1][0]}, {"left": left, "right": right})


@given(layout=layouts())
def test_a_plan_replayed_is_the_plan_recomputed(device: torch.device, layout: Layout) -> None:
    offsets = layout.offsets(device)
    keep = mask(layout.total, device)
    picked = torch.arange(len(layout.lengths), device=device).flip(0)
    plans: tuple[tuple[Callable[..., Any], Any], ...] = (
        (jagged_select, keep),
        (jagged_slice, 2),
        (jagged_first, 3),
        (jagged_last, 3),
        (jagged_index_select, picked),
    )
    tensors = [
        torch.randn(layout.total, 4, device=device),
        torch.arange(layout.total, device=device, dtype=torch.int16),
        torch.randn(layout.total, 2, 3, device=device).half() > 0,
    ]
    for function, argument in plans:
        plan = function(tensors[0], offsets, argument, return_plan=True)
        assert isinstance(plan, RowPlan)
        at_once, planned = function(tensors, offsets, argument)
        assert torch.equal(planned, plan.offsets)
        for x, y in zip(tensors, at_once, strict=True):
            alone, _ = function(x, offsets, argument)
            assert torch.equal(plan.take(x), alone) and torch.equal(y, alone)


# --- gradients


def test_gradients_of_repeated_sequences(device: torch.device) -> None:
    """Each row's is the sum over its copies; not taken ones get none."""
    offsets = LAYOUT.offsets(device)
    x = torch.randn(LAYOUT.total, 3, device=device, dtype=torch.float64, requires_grad=True)
    picked = torch.tensor([2, 0, 2, 2], device=device)
    for total in (None, 13, 30):

        def function(x: Tensor, total: int | None = total) -> Tensor:
            return jagged_index_select(x, offsets, picked, total=total)[0]

        assert gradcheck(function, (x,)) and gradgradcheck(lambda x: function(x).square(), (x,))
    (grad,) = torch.autograd.grad(jagged_index_select(x, offsets, picked)[0].sum(), x)
    expected = torch.zeros_like(grad)
    expected[2:5], expected[5:10] = 1.0, 3.0
    assert torch.equal(grad, expected)


@pytest.mark.parametrize(
    ("num_seqs", "copies"), [(7, 5000), (5000, 9), (4095, 4096), (300, 900), (33, 1), (6, 0)]
)
@pytest.mark.parametrize("columns", [1, 8, 600])
def test_many_copies(device: torch.device, num_seqs: int, copies: int, columns: int) -> None:
    """Few are grouped by counting, many by a sort; a sequence may have more copies than lanes."""
    generator = torch.Generator().manual_seed(num_seqs)
    lengths = torch.randint(0, 40, (num_seqs,), generator=generator)
    offsets = jagged_cuda.offsets_from_lengths(lengths)
    index = (torch.rand(copies, generator=generator) ** 3 * num_seqs).long()
    rows = [torch.arange(offsets[b], offsets[b + 1]) for b in index.tolist()]
    taken = torch.cat([*rows, torch.zeros(0, dtype=torch.int64)])
    drawn = torch.randint(-9, 10, (int(offsets[-1]), columns), generator=generator).double()
    x = drawn.to(device).requires_grad_()
    for total in (len(taken), len(taken) + 70, len(taken) // 2):
        arguments = (x, offsets.to(device), index.to(device))
        out, planned = jagged_index_select(*arguments, total=total)
        found = torch.zeros(total, columns, dtype=torch.float64)
        kept = taken[:total]
        found[: len(kept)] = drawn[kept]
        assert torch.equal(out.detach().cpu(), found)
        plan = jagged_index_select(*arguments, total=total, return_plan=True)
        assert torch.equal(plan.offsets, planned) and torch.equal(plan.take(x), out)
        grad_out = torch.randint(-9, 10, out.shape, generator=generator).double()
        (grad,) = torch.autograd.grad(out, x, grad_out.to(device))
        expected = torch.zeros(x.shape, dtype=torch.float64)
        expected.index_add_(0, kept, grad_out[: len(kept)])
        assert torch.equal(grad.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("columns", [1, 8, 64, 300])
@pytest.mark.parametrize("longest", [40, 3000, 70000])
def test_gradient_of_copies_of_long_sequences(
    device: torch.device, longest: int, columns: int, dtype: torch.dtype
) -> None:
    """One sequence may have more tiles than all others, and rows may lie outside every sequence."""
    if longest * columns > 5_000_000:
        longest = 20000
    generator = torch.Generator().manual_seed(columns)
    lengths = torch.tensor([0, 3, longest, 0, 17, 1, 0, 64, 0, 2 * longest // 3, 5])
    offsets = 9 + jagged_cuda.offsets_from_lengths(lengths)
    index = torch.tensor([2, 9, 1, 1, 9, 2, 5, 2, 7, 1, 1, 1, 10, 3])
    total = int(offsets[-1]) + 21
    x = torch.zeros(total, columns, dtype=dtype, device=device, requires_grad=True)
    taken = torch.cat([torch.arange(offsets[b], offsets[b + 1]) for b in index.tolist()])
    out, _ = jagged_index_select(x, offsets.to(device), index.to(device), total=len(taken) + 7)
    grad_out = torch.randint(-9, 10, out.shape, generator=generator).double()
    expected = torch.zeros(x.shape, dtype=torch.float64)
    expected.index_add_(0, taken, grad_out[: len(taken)])
    for _ in range(2):
        (grad,) = torch.autograd.grad(out, x, grad_out.to(device, dtype), retain_graph=True)
        assert torch.equal(grad.cpu().double(), expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("columns", [1, 2, 8])
def test_numbers_are_joined(device: torch.device, dtype: torch.dtype, columns: int) -> None:
    """Rows of one unit have a way of their own; many sequences are empty, or short."""
    generator = torch.Generator().manual_seed(columns)
    lengths = [torch.randint(0, most, (3000,), generator=generator) for most in (2, 5, 90)]
    parts = [torch.randint(-99, 99, (int(n.sum()), columns), generator=generator) for n in lengths]
    parts.insert(1, torch.randint(-99, 99, (3000, 1, columns), generator=generator))
    seqs = [torch.arange(3000).repeat_interleave(n) for n in (*lengths[:1], 1, *lengths[1:])]
    order = torch.cat(seqs).argsort(stable=True)
    expected = torch.cat([part.reshape(-1, columns) for part in parts])[order].to(dtype)
    bounds = [jagged_cuda.offsets_from_lengths(n.to(device)) for n in lengths]
    bounds.insert(1, None)
    xs = [part.to(device, dtype).requires_grad_(dtype.is_floating_point) for part in parts]
    out, planned = jagged_concat(xs, bounds, total=len(order) + 3)
    assert torch.equal(out.cpu(), torch.nn.functional.pad(expected, (0, 0, 0, 3)))
    assert torch.equal(planned.diff().cpu(), sum(lengths) + 1)
    if dtype.is_floating_point:
        grad_out = torch.randint(-99, 99, out.shape, generator=generator).to(device, dtype)
        found = torch.autograd.grad(out, xs, grad_out)
        right = torch.empty_like(expected).index_copy(0, order, grad_out[:-3].cpu())
        assert torch.equal(torch.cat([g.reshape(-1, columns) for g in found]).cpu(), right)


def test_gradients_of_concatenated_tensors(device: torch.device) -> None:
    """More of them than one move takes, dense ones between, and some that need no gradient."""
    layouts = [LAYOUT, Layout((1, 2, 0, 1)), Layout((0, 0, 2, 1), base=1), Layout((2, 2, 2, 2))]
    jagged = [
        torch.randn(each.total, 2, device=device, dtype=torch.float64, requires_grad=i != 1)
        for i, each in enumerate(layouts)
    ]
    dense = torch.randn(4, 2, 2, device=device, dtype=torch.float64, requires_grad=True)
    bounds = [each.offsets(device) for each in layouts]
    leaves = [*(x for x in jagged if x.requires_grad), dense]

    def function(*_: Tensor) -> Tensor:
        return jagged_concat([*jagged, dense, dense], [*bounds, None, None], total=60)[0]

    assert gradcheck(function, leaves)
    assert gradgradcheck(lambda *_: function(*_).square(), leaves)
    assert jagged[1].grad is None


def test_rows_that_are_left_out_get_no_gradient(device: torch.device) -> None:
    """NaN in the gradient of the rows behind the last sequence must not reach any row."""
    offsets = LAYOUT.offsets(device)
    x = torch.randn(LAYOUT.total, 3, device=device, requires_grad=True)
    out, planned = jagged_last(x, offsets, 2, total=LAYOUT.total)
    grad_out = torch.ones_like(out)
    grad_out[int(planned[-1]) :] = math.nan
    (grad,) = torch.autograd.grad(out, x, grad_out)
    expected = torch.zeros_like(grad)
    for part in parts_of(expected, offsets):
        part[-2:] = 1.0
    assert torch.equal(grad, expected)


def test_a_promise_of_unique_rows_changes_no_gradient(device: torch.device) -> None:
    x = torch.randn(9, 4, device=device, requires_grad=True)
    index = torch.tensor([4, -1, 0, 8, 20, 1], device=device)
    for unique in (False, True):
        out = jagged_take(x, index, unique=unique)
        assert not out[1].any() and not out[4].any() and torch.equal(out[3], x[8])
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert grad[:, 0].tolist() == [1, 1, 0, 0, 1, 0, 0, 0, 1]


# --- capacities and errors


def overflowing(x: Tensor, offsets: Tensor) -> dict[str, Callable[[int], Any]]:
    """Calls by the name of the function that messages have: each needs 9 rows."""
    keep = torch.ones(len(x), dtype=torch.bool, device=x.device)
    picked = torch.arange(4, device=x.device)
    return {
        "jagged_select": lambda total: jagged_select(x, offsets, keep, total=total),
        "jagged_slice": lambda total: jagged_slice(x, offsets, total=total),
        "jagged_first": lambda total: jagged_first(x, offsets, 9, total=total),
        "jagged_last": lambda total: jagged_last(x, offsets, 9, total=total),
        "jagged_split": lambda total: jagged_split(x, offsets, n=9, totals=(total, 0)),
        "jagged_index_select": lambda total: jagged_index_select(x, offsets, picked, total=total),
        "jagged_concat": lambda total: jagged_concat([x], [offsets], total=total),
    }


def test_checks_name_what_does_not_fit(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, offsets = torch.ones(LAYOUT.total, 2, device=device), LAYOUT.offsets(device)
    for name, call in overflowing(x, offsets).items():
        monkeypatch.setenv("JAGGED_CUDA_CHECK", "0")
        call(7)
        monkeypatch.setenv("JAGGED_CUDA_CHECK", "1")
        call(9)
        message = "the result's offsets[3] must be <= the number of rows 7, got 8"
        assert sentence(call, 7) == f"{name}: {message}"


@pytest.mark.cuda
def test_async_checks_name_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAGGED_CUDA_CHECK", "0")
    jagged_cuda.set_checks("async")
    x, offsets = torch.ones(LAYOUT.total, 2, device="cuda"), LAYOUT.offsets("cuda")
    for name, call in overflowing(x, offsets).items():
        early = sentence(call, 7)  # where the function calls another operator
        torch.cuda.synchronize()
        message = "the result's offsets[3] must be <= the number of rows 7, got 8"
        text = early or sentence(jagged_cuda.check_errors)
        assert text.removesuffix(" (found on the GPU by an earlier call)") == f"{name}: {message}"
    picked = torch.tensor([0, 4], device="cuda")
    early = sentence(jagged_index_select, x, offsets, picked, total=9)
    torch.cuda.synchronize()
    message = "jagged_index_select: index[1] must be the number of one of 4 sequences, got 4"
    assert (early or sentence(jagged_cuda.check_errors)).startswith(message)


def test_numbers_out_of_range(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x, offsets = torch.ones(LAYOUT.total, 2, device=device), LAYOUT.offsets(device)
    picked = torch.tensor([2, -1, 4, 0], device=device)
    if device.type == "cuda":  # an empty sequence
        y, planned = jagged_index_select(x, offsets, picked, total=9)
        assert planned.tolist() == [0, 5, 5, 5, 8] and torch.equal(y[:8], x[:8])
    monkeypatch.setenv("JAGGED_CUDA_CHECK", "1")
    message = "index[1] must be the number of one of 4 sequences, got -1"
    text = sentence(jagged_index_select, x, offsets, picked, total=9)
    assert text == f"jagged_index_select: {message}"
    n = torch.tensor([1, 2, -3, 4], device=device)
    assert sentence(jagged_first, x, offsets, n) == "jagged_first: n[2] must be >= 0, got -3"


X, OFFSETS = torch.ones(6, 2), torch.tensor([0, 2, 6])
KEEP = torch.ones(6, dtype=torch.bool)
WRONG: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: jagged_select(X, OFFSETS, KEEP[1:]),
        "jagged_select: keep must be [6], got [5]",
    ),
    (
        lambda: jagged_select(X, OFFSETS, KEEP.int()),
        "jagged_select: keep must be bool, got int32",
    ),
    (
        lambda: jagged_select([X, X[1:]], OFFSETS, KEEP),
        "jagged_select: xs[1] must be [6, ...], got [5, 2]",
    ),
    (
        lambda: jagged_select([], OFFSETS, KEEP),
        "jagged_select: xs must be a tensor or a sequence of tensors, got no tensor",
    ),
    (
        lambda: jagged_select([X, 3], OFFSETS, KEEP),  # type: ignore[list-item]
        "jagged_select: xs must be a tensor or a sequence of tensors, got a list",
    ),
    (lambda: jagged_first(X, OFFSETS, -1), "jagged_first: n must be >= 0, got -1"),
    (
        lambda: jagged_last(X, OFFSETS, torch.ones(3, dtype=torch.int64)),
        "jagged_last: n must be [2], got [3]",
    ),
    (
        lambda: jagged_first(X, OFFSETS.flip(0), 1),
        "jagged_first: offsets[1] must be >= offsets[0] = 6, got 2",
    ),
    (
        lambda: jagged_first(X, OFFSETS, 1, total=-1),
        "jagged_first: total must be >= 0, got -1",
    ),
    (
        lambda: jagged_split(X, OFFSETS),
        "jagged_split: n must be given, or left_offsets in its place, got None",
    ),
    (
        lambda: jagged_concat([X, X], [OFFSETS]),
        "jagged_concat: offsets_list must be a sequence of 2 offsets, got 1",
    ),
    (
        lambda: jagged_concat([X, X.long()], [OFFSETS, OFFSETS]),
        "jagged_concat: xs[1] must be float32, got int64",
    ),
    (
        lambda: jagged_concat([X, X[:, None]], [OFFSETS, None]),
        "jagged_concat: xs[1] must be [2, M, 2], got [6, 1, 2]",
    ),
    (
        lambda: jagged_concat([X, X], [OFFSETS, OFFSETS[1:]]),
        "jagged_concat: offsets_list[1] must be [3], got [2]",
    ),
    (
        lambda: jagged_concat([X, X], [OFFSETS, OFFSETS.int()]),
        "jagged_concat: offsets_list[1] must be int64, got int32",
    ),
    (
        lambda: jagged_take(X, OFFSETS.int()),
        "jagged_take: index must be int64, got int32",
    ),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[text[:40] for _, text in WRONG])
def test_wrong_calls(call: Callable[[], Any], message: str) -> None:
    assert sentence(call) == message


# --- compilers, graphs, memory


def everything(x: Tensor, ids: Tensor, dense: Tensor, offsets: Tensor) -> list[Tensor]:
    """Each function once, the next one on the results of the one before; nothing is read."""
    rows = x.shape[0]
    (a, b), kept = jagged_select([x, ids], offsets, ids % 3 != 1, total=rows)
    a, first = jagged_first(a, kept, 6, total=rows)
    joined, both = jagged_concat([a, dense], [first, None], total=2 * rows)
    (left, left_offsets), (right, rest) = jagged_split(joined, both, n=2, totals=(rows, rows))
    plan = jagged_last(left, left_offsets, 1, total=rows, return_plan=True)
    picked = torch.arange(offsets.shape[0] - 1, device=x.device) // 2
    again, _ = jagged_index_select(right, rest, picked, total=rows)
    return [plan.take(left), b, again, plan.offsets]


def operands(layout: Layout, device: torch.device) -> tuple[Tensor, ...]:
    torch.manual_seed(layout.total)
    return (
        torch.randn(layout.total, 8, device=device, requires_grad=True),
        torch.arange(layout.total, device=device),
        torch.randn(len(layout.lengths), 2, 8, device=device, requires_grad=True),
        layout.offsets(device),
    )


def results_of(function: Callable[..., list[Tensor]], given: tuple[Tensor, ...]) -> list[Tensor]:
    found = function(*given)
    gradients = torch.autograd.grad(found[0].sum() + found[2].square().sum(), (given[0], given[2]))
    return [*(t.detach() for t in found), *gradients]


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compile(backend: str, device: torch.device) -> None:
    """No graph break, forward and backward, and no compilation again for another T and B."""
    torch._dynamo.reset()
    compiled = torch.compile(everything, fullgraph=True, dynamic=True, backend=backend)
    for index, layout in enumerate((LAYOUT, Layout((4, 21, 2, 0, 6, 1, 7), tail=3))):
        given = operands(layout, device)
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            found = results_of(compiled, given)
        for actual, expected in zip(found, results_of(everything, given), strict=True):
            assert torch.equal(actual, expected)


def test_export(device: torch.device) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, ids: Tensor, dense: Tensor, offsets: Tensor) -> list[Tensor]:
            return everything(x, ids, dense, offsets)

    rows, batch = torch.export.Dim("T", min=2), torch.export.Dim("B", min=2)
    shapes = ({0: rows}, {0: rows}, {0: batch}, {0: batch + 1})
    program = torch.export.export(Model(), operands(LAYOUT, device), dynamic_shapes=shapes)
    given = operands(Layout((4, 21, 2, 0, 6, 1, 7), tail=3), device)
    found = program.module()(*given)
    for actual, expected in zip(found, everything(*given), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.cuda
def test_graph_replays_with_other_lengths() -> None:
    """Forward and backward of all functions in one graph, captured without synchronisation."""
    given = operands(Layout((40, 0, 100, 7, 3), base=2, tail=8), torch.device("cuda"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results_of(everything, given)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            results_of(everything, given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results_of(everything, given)
    for layout in (Layout((0, 0, 0, 0, 160)), Layout((32,) * 5), Layout((0,) * 5, base=160)):
        given[3].copy_(layout.offsets())
        graph.replay()
        expected = results_of(everything, given)
        for actual, right in zip(found, expected, strict=True):
            assert torch.equal(actual, right)


@pytest.mark.cuda
def test_a_graph_needs_the_capacity() -> None:
    x, _, _, offsets = operands(LAYOUT, torch.device("cuda"))
    message = "jagged_first: total must be given while a CUDA graph is captured"
    with pytest.raises(RuntimeError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
        jagged_first(x, offsets, 2)


@pytest.mark.cuda
def test_long_scans() -> None:
    """More tiles of rows, and of sequences, than a CTA has threads."""
    generator = torch.Generator("cuda").manual_seed(1)
    lengths = torch.randint(0, 6, (700_000,), device="cuda", generator=generator)
    offsets = jagged_cuda.offsets_from_lengths(lengths) + 3
    total = int(offsets[-1]) + 2
    ids = torch.arange(total, device="cuda")
    keep = torch.rand(total, device="cuda", generator=generator) < 0.4
    found, planned = jagged_select(ids, offsets, keep)
    inside = keep & (ids >= 3) & (ids < total - 2)
    assert torch.equal(found, ids[inside])
    before = torch.nn.functional.pad(inside.cumsum(0), (1, 0))
    assert torch.equal(planned, before[offsets])
    found, planned = jagged_last(ids, offsets, 2)
    seq = torch.searchsorted(offsets, ids, right=True) - 1
    wanted = (seq >= 0) & (seq < len(lengths))
    wanted &= ids >= offsets[(seq + 1).clamp(max=len(lengths))] - 2
    assert torch.equal(found, ids[wanted])
    assert torch.equal(planned.diff(), lengths.clamp(max=2))
    order = torch.randperm(len(lengths), device="cuda", generator=generator)
    found, planned = jagged_index_select(ids, offsets, order)
    again, _ = jagged_index_select(found, planned, order.argsort())
    assert torch.equal(again, ids[3:-2])


@pytest.mark.cuda
def test_memory_is_that_of_results_and_plan() -> None:
    """A plan takes 8 bytes per row of the result, a concatenation none; nothing is padded."""
    x = torch.ones(2**18, 64, device="cuda")
    offsets = torch.tensor([0, 2**18 - 1000, 2**18], device="cuda")
    before = memory_at_rest()
    found = jagged_first(x, offsets, 2**17, total=2**18)
    peak = requested_bytes("peak") - before
    assert peak <= x.nbytes + 8 * 2**18 + 2**16
    del found
    before = memory_at_rest()
    joined, _ = jagged_concat([x, x], [offsets, offsets], total=2**19)
    assert requested_bytes("peak") - before <= joined.nbytes + 2**16


def test_docstrings() -> None:
    names = ("rows", "ops._plan", "ops.jagged_take", "ops.jagged_select", "ops.jagged_slice")
    for name in (*names, "ops.jagged_index_select", "ops.jagged_concat"):
        module = importlib.import_module(f"jagged_cuda.{name}")
        found = doctest.testmod(module, extraglobs={"torch": torch, **vars(jagged_cuda)})
        assert found.attempted > 0 and found.failed == 0, name
