"""Offsets from lengths and from offsets, and back."""

from __future__ import annotations

import pytest
import torch
from plain import sentence
from torch._subclasses.fake_tensor import FakeTensorMode

import jagged_cuda
from jagged_cuda.testing.lengths import Layout, matrices


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("lengths", [(), (0,), (3, 0, 1, 70_000)])
def test_matrix_offsets(lengths: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Beyond 2^31 elements too, with any base, and the lengths of two jagged tensors."""
    offsets = Layout(lengths, base=5).offsets(device, dtype)
    found = jagged_cuda.matrix_offsets(offsets)
    assert found.tolist() == Layout(tuple(n * n for n in lengths)).offsets().tolist()
    assert found.dtype == torch.int64
    assert found.device == device
    other = Layout(tuple(n // 2 + 1 for n in lengths), base=1)
    found = jagged_cuda.matrix_offsets(offsets, other.offsets(device, dtype))
    sizes = tuple(n * (n // 2 + 1) for n in lengths)
    assert found.tolist() == Layout(sizes).offsets().tolist()


@pytest.mark.parametrize("num_seqs", [8191, 8192, 8193, 16_384, 30_000])
def test_matrix_offsets_of_many(num_seqs: int, device: torch.device) -> None:
    """Up to one tile of the CUDA kernel, and several."""
    lengths = torch.randint(0, 2000, (2, num_seqs), generator=torch.Generator().manual_seed(0))
    offsets, y_offsets = (jagged_cuda.offsets_from_lengths(n).to(device) for n in lengths)
    found = jagged_cuda.matrix_offsets(offsets, y_offsets)
    assert torch.equal(found.cpu()[1:], (lengths[0] * lengths[1]).cumsum(0))
    assert found[0] == 0
    strided = offsets.repeat_interleave(2)[::2]
    assert torch.equal(jagged_cuda.matrix_offsets(strided, y_offsets), found)


def test_matrix_offsets_of_wrong_offsets(device: torch.device) -> None:
    """A negative length counts as 0."""
    assert jagged_cuda.matrix_offsets(torch.tensor([4, 2, 5], device=device)).tolist() == [0, 0, 9]


def test_matrix_offsets_compiles(device: torch.device) -> None:
    compiled = torch.compile(
        jagged_cuda.matrix_offsets, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for lengths in ((3, 0, 2, 5), (1, 7)):
        offsets = Layout(lengths).offsets(device)
        assert torch.equal(compiled(offsets), jagged_cuda.matrix_offsets(offsets))


@pytest.mark.cuda
def test_matrix_offsets_never_synchronises() -> None:
    offsets = torch.arange(200_001, device="cuda", dtype=torch.int32)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = jagged_cuda.matrix_offsets(offsets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, offsets.long())


def test_invalid_matrix_offsets() -> None:
    offsets = torch.tensor([0, 2, 6])
    for arguments, message in (
        ((offsets[None],), "offsets must be [B + 1], got [1, 3]"),
        ((offsets.float(),), "offsets must be int32 or int64, got float32"),
        ((offsets, offsets[:2]), "y_offsets must be [3], got [2]"),
        ((offsets, offsets.int()), "y_offsets must be int64, got int32"),
    ):
        assert sentence(jagged_cuda.matrix_offsets, *arguments) == f"matrix_offsets: {message}"


def test_matrix_offsets_of_two_devices() -> None:
    with FakeTensorMode():
        here, there = torch.zeros(3, dtype=torch.int64, device="cuda:0"), torch.zeros(3).long()
        text = sentence(jagged_cuda.matrix_offsets, here, there)
        assert text == "matrix_offsets: y_offsets must be on cuda:0, got on cpu"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("lengths", [(), (0,), (3, 0, 1, 70_000)])
def test_offsets_and_lengths(
    lengths: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    expected = Layout(lengths).offsets(device, dtype)
    given = torch.tensor(lengths, dtype=dtype, device=device)
    found = jagged_cuda.offsets_from_lengths(given)
    assert found.dtype == dtype and found.device == device
    assert torch.equal(found, expected)
    assert torch.equal(jagged_cuda.lengths_from_offsets(expected + 7), given)
    strided = given.repeat_interleave(2)[::2]
    assert torch.equal(jagged_cuda.offsets_from_lengths(strided), expected)


@pytest.mark.parametrize("name", ["offsets_from_lengths", "lengths_from_offsets"])
def test_offsets_and_lengths_compile(name: str, device: torch.device) -> None:
    function = getattr(jagged_cuda, name)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (3, 6):
        given = torch.arange(count, device=device, dtype=torch.int32)
        assert torch.equal(compiled(given), function(given))


@pytest.mark.cuda
def test_offsets_and_lengths_never_synchronise() -> None:
    lengths = torch.ones(200_000, device="cuda", dtype=torch.int32)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = jagged_cuda.lengths_from_offsets(jagged_cuda.offsets_from_lengths(lengths))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, lengths)


def test_invalid_lengths_and_offsets() -> None:
    lengths = torch.tensor([2, 4])
    for name, argument, message in (
        ("offsets_from_lengths", lengths[None], "lengths must be [B], got [1, 2]"),
        ("offsets_from_lengths", lengths.float(), "lengths must be int32 or int64, got float32"),
        ("lengths_from_offsets", lengths[:0], "offsets must be [B + 1], got [0]"),
        ("lengths_from_offsets", lengths.bool(), "offsets must be int32 or int64, got bool"),
    ):
        assert sentence(getattr(jagged_cuda, name), argument) == f"{name}: {message}"


def test_layout_of_matrices() -> None:
    """Those that do not fit count as outside."""
    rows, columns = Layout((2, 0, 3, 1)), Layout((3, 5, 2, 1))
    assert matrices(rows, columns, 13) == Layout((6, 0, 6, 1))
    assert matrices(rows, columns, 12) == Layout((6, 0, 6, 0))
    assert matrices(rows, columns, 11) == Layout((6, 0, 0, 0), tail=5)
