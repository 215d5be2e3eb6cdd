"""The operators with one matrix per sequence: sizes that are read, parts of a batch, transposes."""

from __future__ import annotations

import pytest
import torch
from plain import sentence
from torch import Tensor

import jagged_cuda

SCORES, WEIGHTED = jagged_cuda.jagged_jagged_bmm_jagged_out, jagged_cuda.array_jagged_bmm_jagged_out


def operands(device: torch.device, **options: torch.dtype) -> tuple[Tensor, ...]:
    """x of 3, 0, 4 and 2 rows between two others, y of 5, 1, 0 and 3, and both offsets."""
    torch.manual_seed(0)
    x, y = torch.randn(11, 6, device=device), torch.randn(9, 6, device=device)
    offsets = torch.tensor([1, 4, 4, 8, 10], device=device, **options)
    return x, y, offsets, torch.tensor([0, 5, 6, 6, 9], device=device, **options)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_sizes_are_read_where_they_are_not_given(dtype: torch.dtype, device: torch.device) -> None:
    x, y, offsets, y_offsets = operands(device, dtype=dtype)
    scores = SCORES(x, y, offsets, y_offsets=y_offsets)
    assert scores.shape == (3 * 5 + 2 * 3,)
    torch.testing.assert_close(scores[:15].view(3, 5), x[1:4] @ y[:5].T)
    torch.testing.assert_close(scores[15:].view(2, 3), x[8:10] @ y[6:].T)
    found = WEIGHTED(scores, y, offsets, y_offsets=y_offsets)
    assert found.shape == (10, 6)  # offsets end at 10
    torch.testing.assert_close(found[8:], scores[15:].view(2, 3) @ y[6:])
    assert not found[0].any() and not found[4:8].any()
    found = WEIGHTED(scores, x, offsets, y_offsets=y_offsets, transpose=True)
    assert found.shape == (9, 6)
    torch.testing.assert_close(found[:5], scores[:15].view(3, 5).T @ x[1:4])
    assert WEIGHTED(SCORES(x, x, offsets), x, offsets).shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [0, 2])
def test_room_without_matrices_is_zero(
    batch: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Tensors without rows, on one side or on both, and more room than their matrices need."""
    none, some = (torch.zeros(rows, 3, dtype=dtype, device=device) for rows in (0, 4))
    empty = torch.zeros(batch + 1, dtype=torch.int64, device=device)
    full = torch.arange(batch + 1, device=device)
    for x, y, offsets, y_offsets in (
        (none, none, empty, None),
        (none, some, empty, full),
        (some, none, full, empty),
    ):
        found = SCORES(x, y, offsets, y_offsets=y_offsets, total_out=70_000)
        assert torch.equal(found, torch.zeros(70_000, dtype=dtype, device=device))
        found = WEIGHTED(found[:0], y, offsets, y_offsets=y_offsets, total=5)
        assert torch.equal(found, torch.zeros(5, 3, dtype=dtype, device=device))
        found = WEIGHTED(found.view(-1), x, offsets, y_offsets=y_offsets, transpose=True, total=2)
        assert torch.equal(found, torch.zeros(2, 3, dtype=dtype, device=device))


def test_a_slice_of_the_offsets_names_the_same_matrices(device: torch.device) -> None:
    x, y, offsets, y_offsets = operands(device)
    begins = jagged_cuda.matrix_offsets(offsets, y_offsets)
    scores = SCORES(x, y, offsets, y_offsets=y_offsets)
    last = {"y_offsets": y_offsets[2:], "matrix_offsets": begins[2:]}
    part = SCORES(x, y, offsets[2:], total_out=25, **last)
    assert torch.equal(part[15:21], scores[15:])
    assert not part[:15].any() and not part[21:].any()
    whole = WEIGHTED(scores, y, offsets, y_offsets=y_offsets, total=11)
    part = WEIGHTED(scores, y, offsets[2:], total=11, **last)
    assert torch.equal(part[8:], whole[8:]) and not part[:8].any()


def test_gradients_of_a_slice_stay_within_it(device: torch.device) -> None:
    _, y, offsets, y_offsets = operands(device)
    begins = jagged_cuda.matrix_offsets(offsets, y_offsets)
    a = torch.randn(21, device=device, requires_grad=True)
    y.requires_grad_()
    found = WEIGHTED(
        a, y, offsets[:2], y_offsets=y_offsets[:2], matrix_offsets=begins[:2], total=11
    )
    found.sum().backward()
    assert a.grad is not None and y.grad is not None
    torch.testing.assert_close(a.grad[:15].view(3, 5), y[:5].sum(1).expand(3, 5))
    assert not a.grad[15:].any() and not y.grad[5:].any()


def test_export_reads_the_sizes(device: torch.device) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor, offsets: Tensor, y_offsets: Tensor) -> Tensor:
            return SCORES(x, y, offsets, y_offsets=y_offsets)

    arguments = operands(device)
    program = torch.export.export(Module(), arguments)
    x, y, _, y_offsets = arguments
    offsets = torch.tensor([0, 4, 5, 9, 9], device=device)
    found = program.module()(x, y, offsets, y_offsets)
    torch.testing.assert_close(found, SCORES(x, y, offsets, y_offsets=y_offsets))


@pytest.mark.cuda
def test_sizes_must_be_given_while_a_graph_is_captured() -> None:
    """It raises before anything waits, so that the capture goes on."""
    x, y, offsets, y_offsets = operands(torch.device("cuda"))
    scores = SCORES(x, y, offsets, y_offsets=y_offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        expected = "total_out must be given while a CUDA graph is captured, got None"
        text = sentence(SCORES, x, y, offsets, y_offsets=y_offsets)
        assert text == f"jagged_jagged_bmm_jagged_out: {expected}"
        expected = "total must be given while a CUDA graph is captured, got None"
        text = sentence(WEIGHTED, scores, y, offsets, y_offsets=y_offsets)
        assert text == f"array_jagged_bmm_jagged_out: {expected}"
        found = SCORES(x, y, offsets, y_offsets=y_offsets, total_out=21)
    graph.replay()
    assert torch.equal(found, scores)
