"""jagged_positions: the integers, targets, and how many rows the result has."""

from __future__ import annotations

import pytest
import torch
from plain import sentence

from jagged_cuda import jagged_positions
from jagged_cuda.testing.lengths import Layout

# Up to a hundred empty sequences between two rows, and up to 32 sequences within 32 rows.
MANY = (*(0,) * 100, 1, *(0,) * 40, 2, 1, *(0,) * 31, 3, *(0,) * 33, 5, *(1, 0) * 50, 40)
LAYOUT = Layout((3, 0, 1000, 1, 257, *MANY), base=2, tail=3)
IDS = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])


@IDS
@pytest.mark.parametrize("from_end", [False, True])
@pytest.mark.parametrize("targets", [None, 0, 2, 300, (2, 5, 0, 1, 300, *(1,) * len(MANY))])
def test_positions(
    targets: int | tuple[int, ...] | None,
    from_end: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    expected = [0] * LAYOUT.base
    for seq, length in enumerate(LAYOUT.lengths):
        count = targets[seq] if isinstance(targets, tuple) else targets or 0
        history = length - min(count, length)
        positions = [min(i, history) for i in range(length)]
        expected += [history - i for i in positions] if from_end else positions
    given = torch.tensor(targets, device=device) if isinstance(targets, tuple) else targets
    offsets = LAYOUT.offsets(device, dtype)
    found = jagged_positions(offsets, total=LAYOUT.total, from_end=from_end, targets=given)
    assert found.dtype == torch.int32
    assert found.tolist() == [*expected, 0, 0, 0]
    # None reads the last offset.
    assert jagged_positions(offsets, from_end=from_end, targets=given).tolist() == expected


def test_a_total_that_cuts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = torch.tensor([1, 3, 6], device=device)
    assert jagged_positions(offsets, total=5).tolist() == [0, 0, 1, 0, 1]
    assert jagged_positions(offsets, total=5, from_end=True).tolist() == [0, 2, 1, 2, 1]
    monkeypatch.setenv("JAGGED_CUDA_CHECK", "1")
    message = "jagged_positions: offsets[2] must be <= the number of rows 5, got 6"
    assert sentence(jagged_positions, offsets, total=5) == message


def test_targets_are_checked(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    offsets, name = torch.tensor([1, 3, 6], device=device), "jagged_positions: targets"
    monkeypatch.setenv("JAGGED_CUDA_CHECK", "1")
    targets = torch.tensor([-2, 0], device=device)
    text = sentence(jagged_positions, offsets, total=6, targets=targets)
    assert text == f"{name}[0] must be >= 0, got -2"
    text = sentence(jagged_positions, offsets, total=6, targets=-3)
    assert text == f"{name} must be >= 0, got -3"
    text = sentence(jagged_positions, offsets, total=6, targets=1.5)
    assert text == f"{name} must be an int or a tensor or None, got a float"


@pytest.mark.cuda
def test_total_must_be_given_to_a_graph() -> None:
    offsets = torch.tensor([0, 2], device="cuda")
    message = "total must be given while a CUDA graph is captured"
    with pytest.raises(RuntimeError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
        jagged_positions(offsets)
