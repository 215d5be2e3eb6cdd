"""Conversions and reductions: what the table of cases cannot say."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from plain import TWO_DTYPES, spec_of

import jagged_cuda
from jagged_cuda.testing.cases import CASES
from jagged_cuda.testing.judge import check
from jagged_cuda.testing.lengths import Layout

LAYOUT = Layout((3, 0, 5, 1), base=2, tail=2)
IDS = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])


@IDS
def test_ids(dtype: torch.dtype, device: torch.device) -> None:
    """Integers are copied as they are, large ones too."""
    offsets = LAYOUT.offsets(device)
    ids = torch.iinfo(dtype).max - torch.arange(LAYOUT.total, dtype=dtype, device=device)
    padded = jagged_cuda.jagged_to_padded(ids, offsets, 4, fill=-1)
    assert padded.dtype == dtype and padded.shape == (4, 4)
    for seq, (begin, end) in enumerate(pairwise(offsets)):
        kept = min(4, int(end - begin))
        assert torch.equal(padded[seq, :kept], ids[begin : begin + kept])
        assert (padded[seq, kept:] == -1).all()
    back = jagged_cuda.padded_to_jagged(padded, offsets, total=LAYOUT.total)
    assert back.tolist() == [0, 0, *ids[2:5], *ids[5:9], 0, ids[10], 0, 0]
    spread = jagged_cuda.jagged_broadcast(padded, offsets, total=LAYOUT.total)
    assert torch.equal(spread[2:5], padded[:1].expand(3, 4)) and not spread[:2].any()


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str
)
@pytest.mark.parametrize("columns", [3, 16])
def test_integers_are_added(dtype: torch.dtype, columns: int, device: torch.device) -> None:
    """As torch adds them: they wrap around, and of bools one is enough."""
    offsets = LAYOUT.offsets(device)
    highest = 1 if dtype is torch.bool else torch.iinfo(dtype).max
    generator = torch.Generator().manual_seed(columns)
    x, y = (
        (highest - torch.randint(0, 2, shape, generator=generator)).to(device, dtype)
        for shape in ((LAYOUT.total, columns), (4, 4, columns))
    )
    found = jagged_cuda.jagged_dense_add(x, y, offsets)
    added = jagged_cuda.padded_to_jagged(y, offsets, total=LAYOUT.total)
    expected = (x + added) * (LAYOUT.seq_of_row(device) < LAYOUT.num_seqs)[:, None]
    assert found.dtype == dtype and torch.equal(found, expected.to(dtype))


def test_an_expanded_table_is_added(device: torch.device) -> None:
    """One table for every sequence, read in place; its gradient is the sum over sequences."""
    offsets = LAYOUT.offsets(device)
    x = torch.randn(LAYOUT.total, 8, device=device)
    table = torch.randn(6, 8, device=device, requires_grad=True)
    found = jagged_cuda.jagged_dense_add(x, table.expand(4, 6, 8), offsets)
    position = jagged_cuda.jagged_positions(offsets, total=LAYOUT.total).long()
    inside = (LAYOUT.seq_of_row(device) < LAYOUT.num_seqs)[:, None]
    expected = torch.where(inside, x + table[position], 0.0)
    assert torch.equal(found, expected)
    gradients = [torch.autograd.grad(out.square().sum(), table)[0] for out in (found, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", ["jagged_dense_add", "jagged_dense_mul"])
@pytest.mark.parametrize("padded_len", [0, 4, 70])
def test_each_gradient_alone(name: str, padded_len: int, device: torch.device) -> None:
    """Both come from one kernel; one alone from another, with the same bits."""
    layout = Layout((33, 0, 5, 68, 1, 64), base=2, tail=35)
    operator, offsets = getattr(jagged_cuda, name), layout.offsets(device)
    generator = torch.Generator().manual_seed(padded_len)
    x, y, grad_out = (
        torch.randn(shape, generator=generator).to(device, torch.bfloat16)
        for shape in ((layout.total, 24), (6, padded_len, 24), (layout.total, 24))
    )
    x, y = x.requires_grad_(), y.requires_grad_()
    both = torch.autograd.grad(operator(x, y, offsets), (x, y), grad_out)
    of_x = torch.autograd.grad(operator(x, y.detach(), offsets), x, grad_out)
    of_y = torch.autograd.grad(operator(x.detach(), y, offsets), y, grad_out)
    for found, expected in zip(both, (*of_x, *of_y), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("trailing", [(), (5,), (16,), (3, 8)])
def test_round_trip_is_exact(
    trailing: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    offsets = LAYOUT.offsets(device)
    x = torch.randn(LAYOUT.total, *trailing, device=device).to(dtype)
    inside = LAYOUT.seq_of_row(device) < LAYOUT.num_seqs
    x[~inside] = math.nan
    padded = jagged_cuda.jagged_to_padded(x, offsets, 6, fill=math.nan)
    back = jagged_cuda.padded_to_jagged(padded, offsets, total=LAYOUT.total)
    assert torch.equal(back[inside], x[inside]) and not back[~inside].any()


@pytest.mark.parametrize("fill", [math.nan, -math.inf, 1e-3])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
)
def test_fill(fill: float, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.ones(3, 3, dtype=dtype, device=device)
    padded = jagged_cuda.jagged_to_padded(x, torch.tensor([0, 2], device=device), 4, fill=fill)
    assert torch.equal(padded[0, :2], x[:2])
    expected = torch.full((2, 3), fill, dtype=dtype, device=device)
    torch.testing.assert_close(padded[0, 2:], expected, rtol=0, atol=0, equal_nan=True)


def test_padding_is_not_read(device: torch.device) -> None:
    """NaN beyond a sequence's length, in padded values and in padded gradients."""
    offsets = LAYOUT.offsets(device)
    padded = torch.full((4, 6, 3), math.nan, device=device)
    for seq, length in enumerate(LAYOUT.lengths):
        padded[seq, :length] = 1.0
    values = padded.clone().requires_grad_()
    out = jagged_cuda.padded_to_jagged(values, offsets, total=LAYOUT.total)
    assert out.sum() == 3 * sum(LAYOUT.lengths)
    (grad,) = torch.autograd.grad(out.sum(), values)
    torch.testing.assert_close(grad, padded.nan_to_num(0.0))
    x = torch.zeros(LAYOUT.total, 3, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(jagged_cuda.jagged_to_padded(x, offsets, 6), x, padded)
    assert grad.sum() == 3 * sum(LAYOUT.lengths)


@pytest.mark.parametrize("name", ["padded_to_jagged", "jagged_broadcast"])
def test_total(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is read from the offsets; a larger one leaves rows of zeros, a smaller one cuts."""
    offsets = torch.tensor([1, 3, 6], device=device)
    x = torch.arange(1.0, 7.0, device=device).reshape(2, 3)
    function = getattr(jagged_cuda, name)
    whole = function(x, offsets)
    assert whole.shape[0] == 6
    assert torch.equal(function(x, offsets, total=8)[:6], whole)
    assert not function(x, offsets, total=8)[6:].any()
    assert torch.equal(function(x, offsets, total=4), whole[:4])
    with pytest.raises(RuntimeError, match=rf"^{name}: offsets must be \[B \+ 1\], got \[\]"):
        function(x, offsets[0])
    monkeypatch.setenv("JAGGED_CUDA_CHECK", "1")
    message = rf"^{name}: offsets\[2\] must be <= the number of rows 4, got 6"
    with pytest.raises(RuntimeError, match=message):
        function(x, offsets, total=4)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["padded_to_jagged", "jagged_broadcast"])
def test_total_must_be_given_to_a_graph(name: str) -> None:
    offsets = torch.tensor([0, 2], device="cuda")
    x = torch.ones(1, 2, device="cuda")
    message = "total must be given while a CUDA graph is captured"
    with pytest.raises(RuntimeError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
        getattr(jagged_cuda, name)(x, offsets)


@pytest.mark.parametrize("name", ["jagged_sum", "jagged_mean"])
@pytest.mark.parametrize("trailing", [(), (1,), (4,), (24,), (257,)])
@TWO_DTYPES
def test_a_long_sequence_among_short_ones(
    name: str, trailing: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """It is summed in parts: the same bits alone as among others, and right."""
    case = CASES[name]
    spec = spec_of(Layout((2, 30_011, 0, 129, 1), base=3, tail=1), trailing=trailing)
    sample = case.sample(spec, dtype, device)
    found = case.call(jagged_cuda, sample)
    check(case, sample, found, None)
    x, offsets = sample.tensors["x"], sample.offsets
    for seq, (begin, end) in enumerate(pairwise(offsets)):
        rows = x[begin:end]
        alone = getattr(jagged_cuda, name)(rows, torch.tensor([0, len(rows)], device=device))
        assert torch.equal(alone[0], found["out"][seq])


def test_mean_of_more_rows_than_float16_counts(device: torch.device) -> None:
    x = torch.ones(70_000, 2, dtype=torch.float16, device=device, requires_grad=True)
    offsets = torch.tensor([0, 70_000], device=device)
    out = jagged_cuda.jagged_mean(x, offsets)
    assert torch.equal(out, torch.ones_like(out))
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert (grad == torch.tensor(1 / 70_000, dtype=torch.float16)).all()
