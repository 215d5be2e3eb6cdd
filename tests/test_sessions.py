"""jagged_sessionize: the two levels of offsets, dtypes of time, and capacities."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from plain import sentence

from jagged_cuda import jagged_positions, jagged_sessionize, jagged_sum
from jagged_cuda.testing.lengths import Layout

DTYPES = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def expected(time: list[float], offsets: list[int], gap: float) -> tuple[list[int], list[int]]:
    starts, first = [], [0]
    for begin, end in pairwise(offsets):
        starts += [t for t in range(begin, end) if t == begin or time[t] - time[t - 1] > gap]
        first.append(len(starts))
    return [*starts, offsets[-1]], first


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "layout",
    [
        Layout((3, 0, 40, 1, 0, 0), base=2, tail=3),
        Layout((5000, 0, 1, 1024, 3000, 7), base=31),
        Layout((0, 2, 0) * 700, base=1, tail=40),
        Layout((0, 0), base=3, tail=1),
        Layout((), base=4, tail=2),
        Layout(()),
    ],
    ids=["few", "long", "many", "empty", "none", "nothing"],
)
def test_sessions(dtype: torch.dtype, layout: Layout, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(layout.total)
    time = torch.randint(0, 100, (layout.total,), generator=generator).to(dtype)
    for index, gap in enumerate((0, 30.5, 1000)):
        offsets = layout.offsets(device, (torch.int32, torch.int64)[index % 2])
        starts, first = expected(time.tolist(), offsets.tolist(), gap)
        spare = [offsets.tolist()[-1]] * (layout.total - first[-1])
        found = jagged_sessionize(time.to(device), offsets, gap, sessions=layout.total)
        assert [t.dtype for t in found] == [offsets.dtype] * 2
        assert [t.tolist() for t in found] == [starts + spare, first]
        found = jagged_sessionize(time.to(device), offsets, gap)
        assert [t.tolist() for t in found] == [starts, first]


def test_differences_are_exact(device: torch.device) -> None:
    """Of integers, even where they overflow; float32 loses what float64 keeps."""
    largest = torch.iinfo(torch.int64)
    time = torch.tensor([largest.min, largest.max, 0, 2**53, 2**53 + 1], device=device)
    offsets = torch.tensor([0, 5], device=device)
    assert jagged_sessionize(time, offsets, 2.0**63)[0].tolist() == [0, 1, 5]
    assert jagged_sessionize(time, offsets, 2.0**70)[0].tolist() == [0, 5]
    assert jagged_sessionize(time, offsets, 0)[0].tolist() == [0, 1, 3, 4, 5]
    assert jagged_sessionize(time, offsets, 0.5)[0].tolist() == [0, 1, 3, 4, 5]
    assert jagged_sessionize(time, offsets, math.inf)[0].tolist() == [0, 5]
    numbers = torch.tensor([-1.0, 2.0**24, math.nan, math.inf, math.inf], device=device)
    assert jagged_sessionize(numbers, offsets, 2.0**24)[0].tolist() == [0, 1, 5]
    assert jagged_sessionize(numbers[::2].contiguous(), offsets[:1], 1)[0].tolist() == [0]


def test_too_few_sessions(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones are whole, and what follows is outside."""
    time = torch.tensor([0, 9, 0, 9, 10, 30], device=device)
    offsets = torch.tensor([0, 2, 2, 6], device=device)
    found = [t.tolist() for t in jagged_sessionize(time, offsets, 5, sessions=3)]
    assert found == [[0, 1, 2, 3], [0, 2, 2, 3]]
    found = [t.tolist() for t in jagged_sessionize(time, offsets, 5, sessions=0)]
    assert found == [[0], [0, 0, 0, 0]]
    monkeypatch.setenv("JAGGED_CUDA_CHECK", "1")
    jagged_sessionize(time, offsets, 5, sessions=5)
    message = "jagged_sessionize: sessions must be at least 5, got 4"
    assert sentence(jagged_sessionize, time, offsets, 5, sessions=4) == message


@pytest.mark.cuda
def test_async_checks_name_too_few_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    import jagged_cuda

    time, offsets = torch.arange(6, device="cuda"), torch.tensor([0, 6], device="cuda")
    monkeypatch.setenv("JAGGED_CUDA_CHECK", "async")
    jagged_sessionize(time, offsets, 0, sessions=2)
    torch.cuda.synchronize()
    message = "jagged_sessionize: sessions must be at least 6, got 2"
    assert message in sentence(jagged_cuda.check_errors)


def test_a_gap_that_is_none(device: torch.device) -> None:
    time, offsets = torch.arange(6, device=device), torch.tensor([0, 6], device=device)
    name = "jagged_sessionize: gap must be"
    assert sentence(jagged_sessionize, time, offsets, -1) == f"{name} >= 0, got -1"
    assert sentence(jagged_sessionize, time, offsets, math.nan) == f"{name} >= 0, got nan"
    text = f"{name} a number that float64 holds, got {2**53 + 1}"
    assert sentence(jagged_sessionize, time, offsets, 2**53 + 1) == text


def test_operators_work_per_session(device: torch.device) -> None:
    """Two levels: sums of sessions, and of a sequence's sessions; positions within a session."""
    time = torch.tensor([1, 2, 50, 51, 52, 7], device=device)
    offsets = torch.tensor([0, 5, 5, 6], device=device)
    sessions, first = jagged_sessionize(time, offsets, 10, sessions=6)
    sums = jagged_sum(torch.ones(6, device=device), sessions)
    assert sums.tolist() == [2.0, 3.0, 1.0, 0.0, 0.0, 0.0]
    assert jagged_sum(sums.square(), first).tolist() == [13.0, 0.0, 1.0]
    assert jagged_positions(sessions, total=6).tolist() == [0, 1, 0, 1, 2, 0]
