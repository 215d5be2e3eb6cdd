"""Functions that move and combine rows: wide moves, gradients beside padded rows."""

from __future__ import annotations

import pytest
import torch
from on_cuda import CUDA
from plain import spec_of

import jagged_cuda
from jagged_cuda.testing import last_kernel
from jagged_cuda.testing.cases import CASES
from jagged_cuda.testing.judge import judge
from jagged_cuda.testing.lengths import Layout

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("columns", [8, 40, 64, 72, 520])
@pytest.mark.parametrize("name", ["jagged_dense_add", "jagged_dense_mul"])
def test_gradients_beside_padded_rows_of_any_width(name: str, columns: int) -> None:
    """A warp takes 32, 16 or 8 rows, of several sequences, and as many padded ones."""
    layout = Layout((40, 0, 3, 1, 70, 9, 33), base=5, tail=9)
    for padded_len in (33, 100):
        spec = spec_of(layout, trailing=(columns,), padded_len=padded_len)
        judge(CASES[name], spec, torch.float32, CUDA)
        assert last_kernel("cuda") == f"cuda.{name}_backward"


@pytest.mark.parametrize("left_out", [0, 700, -70], ids=["exact", "short", "long"])
@pytest.mark.parametrize("columns", [16, 24, 64, 200, 2048])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_path_of_wide_moves(dtype: torch.dtype, columns: int, left_out: int) -> None:
    """The bits of the CPU's, wherever a warp's rows begin, and however wide they are."""
    columns //= dtype.itemsize // 2
    generator = torch.Generator().manual_seed(columns)
    lengths = (torch.rand(40, generator=generator) ** 2 * 400).long() * (torch.arange(40) % 7 > 0)
    layout = Layout(tuple(lengths.tolist()), base=5, tail=9)
    picked = (torch.rand(30, generator=generator) ** 2 * 40).long()
    x = torch.randn(layout.total, columns + 8, generator=generator).to(dtype)
    dense = torch.randn(40, 3, columns, generator=generator).to(dtype)

    def moved(device: str) -> list[torch.Tensor]:
        offsets = layout.offsets(device)
        # Rows that are further apart than they are long.
        rows = x.to(device)[:, :columns].requires_grad_()
        leaves = (rows, dense.to(device).requires_grad_())
        total = 2 * int(lengths.sum()) + 3 * 40 - left_out
        joined, planned = jagged_cuda.jagged_concat(
            [rows, leaves[1], rows], [offsets, None, offsets], total=total
        )
        paths = [last_kernel("cuda")]
        found = [joined, planned, *torch.autograd.grad(joined, leaves, joined.detach() * 2)]
        paths.append(last_kernel("cuda"))
        taken, _ = jagged_cuda.jagged_index_select(
            rows, offsets, picked.to(device), total=max(0, 3500 - left_out)
        )
        found += [taken, *torch.autograd.grad(taken, rows, taken.detach() + 1)]
        paths.append(last_kernel("cuda"))
        if device == CUDA:
            names = ("jagged_concat", "jagged_concat_backward", "jagged_index_select_backward")
            assert paths == [f"cuda.{name}" for name in names]
        return found

    for found, expected in zip(moved(CUDA), moved("cpu"), strict=True):
        assert torch.equal(found.cpu(), expected)
